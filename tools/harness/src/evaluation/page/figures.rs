//! The page's section with figures 5 to 10 and tables 2 and 3 of the DoCeph paper, next to the
//! results that were measured on this machine.

use super::svg::{self, Grouped, Series, Share, Stack, Stacked};
use super::text::{cell, number, table};
use crate::evaluation::paper;
use crate::evaluation::plan::LINKED;
use crate::evaluation::sample::{CeilingKind, Measurements, PartUse, Sample, Subsystem};
use crate::evaluation::stats::{Estimate, estimate, ratio};
use crate::evaluation::workload::{
    AccessMode, Case, EmulatedLink, MIB, PAPER_SIZES, TestedSystem, size_label,
};
use crate::node::BenchBreakdown;

/// The tested systems, with their classes in the style sheet.
pub const SYSTEMS: [(TestedSystem, &str); 6] = [
    (TestedSystem::Ceph, "ceph"),
    (TestedSystem::Host, "host"),
    (TestedSystem::DpuMemcpy, "memcpy"),
    (TestedSystem::DpuBf3, "bf3"),
    (TestedSystem::DpuBf3Serial, "bf3s"),
    (TestedSystem::DpuOfi, "ofi"),
];

/// Returns a table's head that begins with `first` and continues with the systems.
pub fn head_of_systems(first: &[&'static str]) -> Vec<&'static str> {
    first.iter().copied().chain(SYSTEMS.map(|(config, _)| config.label())).collect()
}

/// A figure of the DoCeph paper that shows a value by object size: the paper's values, and the
/// function that returns the same value of a run on this machine.
struct BySize<'a> {
    title: &'a str,
    axis: &'a str,
    baseline: [Option<f64>; 4],
    doceph: [f64; 4],
    here: &'a dyn Fn(&Sample) -> f64,
}

/// Formats the section with all figures.
pub fn section(m: &Measurements) -> String {
    let mut html = String::from("<section><h2>The figures of the DoCeph paper</h2>");
    html.push_str(&figure_5(m));
    html.push_str(&figure_6(m));
    html.push_str(&figure_7(m));
    html.push_str(&figure_8(m));
    html.push_str(&figure_9(m));
    html.push_str(&figure_10(m));
    html.push_str("</section>");
    html
}

fn writes(config: TestedSystem, size: u64) -> Case {
    Case::new(config, AccessMode::Write, size)
}

fn of(m: &Measurements, case: &Case, figure: &dyn Fn(&Sample) -> f64) -> Option<Estimate> {
    estimate(m.rounds(case, figure).into_values())
}

/// Class of a part in the style sheet.
fn part_class(part: Subsystem) -> &'static str {
    match part {
        Subsystem::Messenger => "p1",
        Subsystem::ObjectStore => "p2",
        Subsystem::Osd => "p3",
        Subsystem::OsdAndMessenger => "p4",
        Subsystem::Channel => "p5",
        Subsystem::Fabric => "p11",
        Subsystem::FabricHost => "p12",
        Subsystem::Dma => "p7",
        Subsystem::Coding => "p9",
        Subsystem::CodingDevice => "p10",
        Subsystem::Rocksdb => "p8",
        Subsystem::Other => "p6",
    }
}

fn figure_5(m: &Measurements) -> String {
    let mut published = Vec::new();
    for (network, messenger, cpu) in paper::FIG5 {
        let parts = vec![
            Share {
                name: Subsystem::Messenger.label(),
                class: part_class(Subsystem::Messenger),
                amount: messenger,
            },
            Share { name: "ObjectStore and osd together", class: "paper-a", amount: 100.0 - messenger },
        ];
        published.push(Stack { label: [network.to_owned(), percent_of_core(cpu)], parts });
    }
    let mut here = Vec::new();
    for (config, _) in SYSTEMS {
        let case = writes(config, 4 * MIB);
        let Some(cpu) = of(m, &case, &|s| (s.node_cpu_us_per_op - s.client_cpu_us_per_op) * s.iops / 1e4)
        else {
            continue;
        };
        let share = |part: Subsystem| of(m, &case, &|s| s.parts.get(&part).map_or(0.0, |u| u.cpu_us));
        let parts = parts_of(m, &case).into_iter().filter_map(|part| {
            Some(Share { name: part.label(), class: part_class(part), amount: share(part)?.median })
        });
        let label = [config.label().to_owned(), percent_of_core(cpu.median)];
        here.push(Stack { label, parts: parts.collect() });
    }
    let charts = [
        Stacked { title: "Paper, Ceph, 4 MB writes".to_owned(), bars: published },
        Stacked { title: "Here, 4 MiB writes, without the client".to_owned(), bars: here },
    ];
    format!(
        "<h3>Figure 5. CPU time of the storage system by part</h3>{}<p class=\"soft\">The CPU time is divided by thread class. A node's osd thread also runs the messenger. The CPU time of this thread is \
         divided between osd and messenger by the time of their tasks, if the node reports this time. The emulated DMA engine is a thread, but a real DMA engine is hardware. The paper shows separate values for \
         ObjectStore and osd only in its drawing, so this page shows their sum.</p>{}",
        svg::stacked(&charts),
        table_2(m)
    )
}

fn percent_of_core(percent: f64) -> String {
    format!("{} % core", number(percent))
}

/// Returns the subsystems that the samples of a case contain, in the order of [`Subsystem`].
fn parts_of(m: &Measurements, case: &Case) -> Vec<Subsystem> {
    let mut parts: Vec<Subsystem> =
        m.samples.iter().filter(|s| s.case == *case).flat_map(|s| s.parts.keys().copied()).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}

fn table_2(m: &Measurements) -> String {
    let (messenger, store) = paper::TABLE2;
    let mut rows = vec![vec![
        "paper, Ceph (per run)".to_owned(),
        number(messenger),
        number(store),
        number(messenger / store),
    ]];
    rows[0].extend(["–"; 7].map(str::to_owned));
    for (config, _) in SYSTEMS.into_iter().filter(|(c, _)| m.has(*c)) {
        let case = writes(config, 4 * MIB);
        let of_part =
            |part: Subsystem| m.rounds_if(&case, |s| Some(s.parts.get(&part)?.switches).filter(|n| *n > 0.0));
        let (messenger, store) = (of_part(Subsystem::Messenger), of_part(Subsystem::ObjectStore));
        let all = of(m, &case, &|s| s.parts.values().map(|u| u.switches).sum());
        let counted = |count: fn(&PartUse) -> f64| {
            let of_part =
                |part: Subsystem| m.rounds_if(&case, |s| s.parts.get(&part).map(count).filter(|n| *n > 0.0));
            let (messenger, store) = (of_part(Subsystem::Messenger), of_part(Subsystem::ObjectStore));
            [
                cell(estimate(messenger.values().copied())),
                cell(estimate(store.values().copied())),
                cell(estimate(ratio(&messenger, &store).into_values())),
            ]
        };
        let switches = [
            cell(estimate(messenger.values().copied())),
            cell(estimate(store.values().copied())),
            cell(estimate(ratio(&messenger, &store).into_values())),
        ];
        let mut row = vec![format!("{} (per write)", config.label())];
        row.extend(switches.into_iter().chain(counted(|u| u.wake_ups)).chain(counted(|u| u.polls)));
        row.push(cell(all));
        rows.push(row);
    }
    let head = [
        "4 MiB writes",
        "switches: messenger",
        "ObjectStore",
        "ratio",
        "wake-ups: messenger",
        "ObjectStore",
        "ratio",
        "polls: messenger",
        "ObjectStore",
        "ratio",
        "switches: all threads",
    ];
    format!(
        "<h3>Table 2. Context switches</h3>{}<p class=\"soft\">A node's messenger has no threads of its own, so the kernel does not count its context switches: they are only in the last \
         column. The node counts two other figures for the tasks of its threads: the wake-ups, in which a task of the messenger or of the store was the first to run after its thread had waited, and all \
         polls of the tasks. Each wake-up costs a context switch, unless the awaited event has already happened.</p>",
        table(&head, &rows)
    )
}

fn figure_6(m: &Measurements) -> String {
    let paper_mb_per_s = paper::FIG10_BASELINE[1] * 4.0;
    let mut rows = vec![vec![
        "paper, Ceph over 100 Gbit/s (computed from the 119 writes/s of figure 10)".to_owned(),
        number(paper_mb_per_s),
    ]];
    for (config, _) in SYSTEMS.into_iter().filter(|(c, _)| m.has(*c)) {
        let rate = of(m, &writes(config, 4 * MIB), &|s| s.mb_per_s);
        rows.push(vec![format!("{}, loopback", config.label()), cell(rate)]);
    }
    let [network, messenger_share, cpu] = ["network", "messenger, % of the CPU time", "CPU, % of a core"];
    let mut by_link: Vec<Vec<String>> = Vec::new();
    for (network, messenger, cpu) in paper::FIG5 {
        by_link.push(vec![format!("paper, Ceph, {network}"), "–".to_owned(), number(messenger), number(cpu)]);
    }
    for config in LINKED {
        for link in EmulatedLink::ALL {
            let case = Case::across(config, link);
            let Some(rate) = of(m, &case, &|s| s.mb_per_s) else { continue };
            rows.push(vec![format!("{}, {}", config.label(), link.label()), cell(Some(rate))]);
            let server_us = |s: &Sample| s.node_cpu_us_per_op - s.client_cpu_us_per_op;
            let messenger = |s: &Sample| s.parts.get(&Subsystem::Messenger).map_or(0.0, |u| u.cpu_us);
            by_link.push(vec![
                format!("{}, {}", config.label(), link.label()),
                cell(Some(rate)),
                cell(of(m, &case, &|s| 100.0 * messenger(s) / server_us(s))),
                cell(of(m, &case, &|s| server_us(s) * s.iops / 1e4)),
            ]);
        }
    }
    format!(
        "<h3>Figure 6. Throughput by network</h3>{}{}<p class=\"soft\">The paper's figures 5 and 6 compare 1 and 100 Gbit/s. The text states the values of figure 5 only. Here, node and client run in \
         two network namespaces on one machine, and a pair of virtual Ethernet devices joins them. For 1 Gbit/s, a token bucket <b>shapes</b> the link in both directions; “unlimited” is as fast as the kernel moves packets \
         between the namespaces. The congestion control is Reno, as over loopback. A table below contains the ceiling of loopback TCP.</p>",
        table(&["4 MiB writes, 16 in flight", "MB/s"], &rows),
        table(&[network, "MB/s", messenger_share, cpu], &by_link)
    )
}

fn figure_7(m: &Measurements) -> String {
    let figure = BySize {
        title: "host CPU",
        axis: "host CPU, % of a core",
        baseline: paper::FIG7_BASELINE.map(Some),
        doceph: paper::FIG7_DOCEPH,
        here: &Sample::host_cpu_percent,
    };
    let mut rows = Vec::new();
    for size in PAPER_SIZES {
        let mut row = vec![size_label(size)];
        row.extend(SYSTEMS.map(|(config, _)| {
            cell(of(m, &writes(config, size), &|s| s.host_cpu_us_per_op * MIB as f64 / s.case.size as f64))
        }));
        rows.push(row);
    }
    format!(
        "<h3>Figure 7. Host CPU under writes</h3>{}<p class=\"soft\">Each percentage applies to the throughput that the system reached, so a faster system writes more data with \
         the same percentage. The following table is independent of the throughput. Host CPU per MiB written, in µs:</p>{}",
        figure.draw(m),
        table(&head_of_systems(&[""]), &rows)
    ) + &host_share(m)
}

/// Formats the host's CPU time per write by part, with the emulated engine and with the engine `ofi`.
fn host_share(m: &Measurements) -> String {
    let mut rows = Vec::new();
    for size in PAPER_SIZES {
        for config in [TestedSystem::DpuMemcpy, TestedSystem::DpuOfi].into_iter().filter(|c| m.has(*c)) {
            let case = writes(config, size);
            let fabric = |s: &Sample| s.parts.get(&Subsystem::FabricHost).map_or(0.0, |u| u.cpu_us);
            rows.push(vec![
                format!("{}, {}", size_label(size), config.label()),
                cell(of(m, &case, &|s| s.host_cpu_us_per_op)),
                cell(of(m, &case, &fabric)),
                cell(of(m, &case, &|s| s.host_cpu_us_per_op - fabric(s))),
                if config == TestedSystem::DpuOfi {
                    cell(estimate(plain_receiver(m, size)))
                } else {
                    String::new()
                },
            ]);
        }
    }
    let head =
        ["host CPU, µs per write", "all", "libfabric", "without libfabric", "ceiling: plain TCP receiver"];
    format!(
        "<h3>The host's share of the engine</h3>{}<p class=\"soft\">The CPU time of the emulated engine (shm) counts for the DPU, because a DMA engine is hardware of the DPU. With \
         ofi:tcp, a thread of libfabric on the host receives the one-sided writes from a socket and copies them. An RDMA NIC writes into the memory of the host without its CPU, and the thread \
         only waits for doorbells. So the column without libfabric is what remains on the host with RDMA hardware, apart from the doorbells. The ceiling is the CPU time in which a plain receiver takes as \
         many bytes from a TCP connection over loopback.</p>",
        table(&head, &rows)
    )
}

/// CPU time of a plain receiver for this number of bytes over loopback TCP, in µs, in each round.
fn plain_receiver(m: &Measurements, bytes: u64) -> impl Iterator<Item = f64> {
    m.ceiling(CeilingKind::LoopbackReceiver, 0).into_values().map(move |rate| bytes as f64 / rate)
}

fn figure_8(m: &Measurements) -> String {
    let figure = BySize {
        title: "mean latency of writes",
        axis: "latency, ms",
        baseline: paper::FIG8_BASELINE.map(|s| s.map(|s| s * 1e3)),
        doceph: paper::FIG8_DOCEPH.map(|s| s * 1e3),
        here: &|s| s.latency_us_mean / 1e3,
    };
    let alone = |config: TestedSystem| of(m, &writes(config, MIB).one_at_a_time(), &|s| s.latency_us_mean);
    let (host, dpu) = (alone(TestedSystem::Host), alone(TestedSystem::DpuMemcpy));
    let note = match (host, dpu) {
        (None, None) => String::new(),
        _ => format!(
            "<p>One 1 MiB write at a time: host {} µs, dpu (memcpy) {} µs.</p>",
            cell(host),
            cell(dpu)
        ),
    };
    format!(
        "<h3>Figure 8. Latency of writes</h3>{}{note}<p class=\"soft\">With 16 writes in flight, the mean latency in seconds is 16 divided by the number of writes per second. The paper states its baseline only for 1 and 16 MB.</p>",
        figure.draw(m)
    )
}

fn figure_10(m: &Measurements) -> String {
    let mb_per_s = |iops: [f64; 4]| std::array::from_fn(|i| iops[i] * PAPER_SIZES[i] as f64 / MIB as f64);
    let figure = BySize {
        title: "throughput of writes",
        axis: "MB/s",
        baseline: mb_per_s(paper::FIG10_BASELINE).map(Some),
        doceph: mb_per_s(paper::FIG10_DOCEPH),
        here: &|s| s.mb_per_s,
    };
    let mut rows = Vec::new();
    for (i, size) in PAPER_SIZES.into_iter().enumerate() {
        let rate = |config| m.rounds(&writes(config, size), |s| s.iops);
        let mut row =
            vec![size_label(size), number(paper::FIG10_BASELINE[i]), number(paper::FIG10_DOCEPH[i])];
        row.push(number(paper::FIG10_DOCEPH[i] / paper::FIG10_BASELINE[i]));
        row.extend(SYSTEMS.map(|(config, _)| cell(estimate(rate(config).into_values()))));
        row.push(cell(estimate(
            ratio(&rate(TestedSystem::DpuMemcpy), &rate(TestedSystem::Host)).into_values(),
        )));
        row.push(cell(estimate(
            ratio(&rate(TestedSystem::DpuMemcpy), &rate(TestedSystem::Ceph)).into_values(),
        )));
        rows.push(row);
    }
    let mut head = head_of_systems(&["writes/s", "paper, baseline", "paper, DoCeph", "ratio"]);
    head.extend(["dpu / host", "dpu / Ceph"]);
    format!(
        "<h3>Figure 10. Throughput of writes</h3>{}<p class=\"soft\">The chart shows MB/s with 16 writes in flight. The paper's chart shows writes per second, which are in the table.</p>{}",
        figure.draw(m),
        table(&head, &rows)
    )
}

impl BySize<'_> {
    /// Draws the values of the DoCeph paper on the left, and the values that were measured on this
    /// machine on the right.
    fn draw(&self, m: &Measurements) -> String {
        let exact = |values: [Option<f64>; 4]| values.map(|v| v.map(Estimate::exact)).to_vec();
        let published = Grouped {
            title: format!("Paper: {}", self.title),
            axis: self.axis.to_owned(),
            groups: ["1 MB", "4 MB", "8 MB", "16 MB"].map(str::to_owned).to_vec(),
            series: vec![
                Series { name: "paper, baseline".to_owned(), class: "paper-a", values: exact(self.baseline) },
                Series {
                    name: "paper, DoCeph".to_owned(),
                    class: "paper-b",
                    values: exact(self.doceph.map(Some)),
                },
            ],
        };
        let measured: Vec<u64> =
            PAPER_SIZES.into_iter().filter(|size| m.samples.iter().any(|s| s.case.size == *size)).collect();
        let here = Grouped {
            title: format!("Here: {}", self.title),
            axis: self.axis.to_owned(),
            groups: measured.iter().map(|s| size_label(*s)).collect(),
            series: systems(m, &measured, AccessMode::Write, self.here),
        };
        if measured.is_empty() { svg::grouped(&[published]) } else { svg::grouped(&[published, here]) }
    }
}

/// Returns one series per measured system, with one value per size.
pub fn systems(
    m: &Measurements,
    sizes: &[u64],
    mode: AccessMode,
    figure: &dyn Fn(&Sample) -> f64,
) -> Vec<Series> {
    let series = |(config, class): (TestedSystem, &'static str)| Series {
        name: config.label().to_owned(),
        class,
        values: sizes.iter().map(|size| of(m, &Case::new(config, mode, *size), figure)).collect(),
    };
    SYSTEMS.into_iter().filter(|(config, _)| m.has(*config)).map(series).collect()
}

/// Returns the parts of a breakdown, in the order of table 3 of the DoCeph paper.
fn breakdown_parts(b: &BenchBreakdown) -> [Share; 4] {
    [
        Share { name: "Host write", class: "p2", amount: b.host_write },
        Share { name: "DMA", class: "p1", amount: b.dma },
        Share { name: "DMA wait", class: "p4", amount: b.dma_wait },
        Share { name: "Others", class: "p6", amount: b.others },
    ]
}

/// Returns the median of each part of the breakdown over all rounds.
fn breakdown(m: &Measurements, config: TestedSystem, size: u64) -> Option<BenchBreakdown> {
    let part = |figure: fn(&BenchBreakdown) -> f64| {
        let rounds = m.rounds_if(&writes(config, size), |s| s.breakdown_us.as_ref().map(figure));
        Some(estimate(rounds.into_values())?.median)
    };
    Some(BenchBreakdown {
        total: part(|b| b.total)?,
        host_write: part(|b| b.host_write)?,
        dma: part(|b| b.dma)?,
        dma_wait: part(|b| b.dma_wait)?,
        others: part(|b| b.others)?,
    })
}

fn figure_9(m: &Measurements) -> String {
    let mut published = Vec::new();
    let mut rows = Vec::new();
    let mut row = |who: &str, size: u64, b: &BenchBreakdown| {
        let mut cells = vec![format!("{who}, {}", size_label(size))];
        cells.extend(breakdown_parts(b).map(|part| number(part.amount / 1e3)));
        cells.extend([number(b.total / 1e3), format!("{} %", number(100.0 * b.dma_wait / b.total))]);
        rows.push(cells);
    };
    let bar = |size: u64, b: &BenchBreakdown| {
        let label = [size_label(size), format!("{} ms", number(b.total / 1e3))];
        Stack { label, parts: breakdown_parts(b).into() }
    };
    for (column, size) in paper::TABLE3.iter().zip(PAPER_SIZES) {
        let us = |s: f64| s * 1e6;
        let b = BenchBreakdown {
            total: us(column.total()),
            host_write: us(column.host_write),
            dma: us(column.dma),
            dma_wait: us(column.dma_wait),
            others: us(column.others),
        };
        published.push(bar(size, &b));
        row("paper, DoCeph", size, &b);
    }
    let mut charts = vec![Stacked { title: "Paper, DoCeph".to_owned(), bars: published }];
    let systems =
        [TestedSystem::DpuMemcpy, TestedSystem::DpuBf3, TestedSystem::DpuBf3Serial, TestedSystem::DpuOfi];
    for config in systems.into_iter().filter(|c| m.has(*c)) {
        let sizes = [4096, 64 << 10].into_iter().chain(PAPER_SIZES);
        let known: Vec<(u64, BenchBreakdown)> =
            sizes.filter_map(|size| Some((size, breakdown(m, config, size)?))).collect();
        known.iter().for_each(|(size, b)| row(config.label(), *size, b));
        let bars = known
            .iter()
            .filter(|(size, _)| PAPER_SIZES.contains(size))
            .map(|(size, b)| bar(*size, b))
            .collect();
        charts.push(Stacked { title: format!("Here, {}", config.label()), bars });
    }
    let note = if charts.iter().skip(1).all(|c| c.bars.is_empty()) {
        "<p>This build does not report the phases of a write's time.</p>"
    } else {
        ""
    };
    format!(
        "<h3>Figure 9 and table 3. Phases of a write's time</h3>{}{note}{}<p class=\"soft\">With 16 writes in flight. The phases are means per write, and their sum is the latency. In phase DMA, the \
         engine transfers data of the write. In phase Host write, the store works on the write and the engine does not. In phase DMA wait, the write only waits for the engine. Others is the \
         remaining time, including network and client. Writes of 4 and 64 KiB travel together with their request, and this transfer counts as DMA too. The profiles bf3-paper and bf3-serial treat each chain of more than 64 KiB as \
         payload, so they slow down writes of 64 KiB, and not those of 4 KiB; the paper has no value below 1 MB. With ofi:tcp, the engine does not know when a transfer without a completion has arrived, so only the fetches of \
         replies count at these sizes.</p>",
        svg::stacked(&charts),
        table(&["ms", "host write", "DMA", "DMA wait", "others", "total", "DMA wait's share"], &rows)
    )
}
