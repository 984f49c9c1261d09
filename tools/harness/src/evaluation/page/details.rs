//! The page's section with results that the DoCeph paper lacks: reads, small objects, ceilings,
//! ablations and the machine.

use super::PageContent;
use super::figures::{SYSTEMS, head_of_systems, systems};
use super::svg::{self, Grouped};
use super::text::{cell, escape, table};
use crate::evaluation::sample::{CeilingKind, Measurements, Sample};
use crate::evaluation::stats::{estimate, ratio};
use crate::evaluation::workload::{AccessMode, Case, size_label};

/// Formats the section.
pub fn section(content: &PageContent<'_>) -> String {
    let m = content.found;
    [
        "<section><h2>Results that the DoCeph paper lacks</h2>".to_owned(),
        reads(m),
        small(m),
        every_workload(m),
        large_set(m),
        ceilings(m),
        ablations(m),
        environment(content),
        "</section>".to_owned(),
    ]
    .concat()
}

fn sizes_of(m: &Measurements, which: impl Fn(u64) -> bool) -> Vec<u64> {
    let mut sizes: Vec<u64> = m.samples.iter().map(|s| s.case.size).filter(|s| which(*s)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn chart(
    m: &Measurements,
    title: &str,
    axis: &str,
    sizes: &[u64],
    mode: AccessMode,
    figure: &dyn Fn(&Sample) -> f64,
) -> Grouped {
    Grouped {
        title: title.to_owned(),
        axis: axis.to_owned(),
        groups: sizes.iter().map(|s| size_label(*s)).collect(),
        series: systems(m, sizes, mode, figure),
    }
}

fn reads(m: &Measurements) -> String {
    let sizes = sizes_of(m, |s| s >= 1 << 20);
    if sizes.is_empty() {
        return String::new();
    }
    let charts =
        [chart(m, "Sequential reads of whole objects", "MB/s", &sizes, AccessMode::Read, &|s| s.mb_per_s)];
    format!("<h3>Throughput of reads</h3>{}", svg::grouped(&charts))
}

fn small(m: &Measurements) -> String {
    let sizes = sizes_of(m, |s| s < 1 << 20);
    if sizes.is_empty() {
        return String::new();
    }
    let thousands = |s: &Sample| s.iops / 1e3;
    let charts = [
        chart(m, "Durable writes", "thousand per second", &sizes, AccessMode::Write, &thousands),
        chart(m, "Random reads", "thousand per second", &sizes, AccessMode::Randread, &thousands),
    ];
    format!("<h3>Small objects</h3>{}", svg::grouped(&charts))
}

fn every_workload(m: &Measurements) -> String {
    let mut rows = Vec::new();
    for mode in AccessMode::ALL {
        for size in sizes_of(m, |_| true) {
            for (config, _) in SYSTEMS {
                let case = Case::new(config, mode, size);
                rows.extend(row(
                    m,
                    &case,
                    &format!("{} {}, {}", size_label(size), mode.name(), config.label()),
                ));
            }
        }
    }
    format!("<h3>Every workload, 16 requests in flight</h3>{}", table(&HEAD, &rows))
}

const HEAD: [&str; 7] =
    ["", "MB/s", "op/s", "mean latency, µs", "p99, µs", "host CPU, µs/op", "all CPU, µs/op"];

/// Returns the table row of a case, or `None` if the case was not measured.
fn row(m: &Measurements, case: &Case, label: &str) -> Option<Vec<String>> {
    let of = |figure: &dyn Fn(&Sample) -> f64| estimate(m.rounds(case, figure).into_values());
    of(&|s| s.iops)?;
    let p99 = estimate(m.rounds_if(case, |s| s.latency_us_p99).into_values());
    Some(vec![
        escape(label),
        cell(of(&|s| s.mb_per_s)),
        cell(of(&|s| s.iops)),
        cell(of(&|s| s.latency_us_mean)),
        cell(p99),
        cell(of(&|s| s.host_cpu_us_per_op)),
        cell(of(&|s| s.node_cpu_us_per_op)),
    ])
}

fn large_set(m: &Measurements) -> String {
    let case = |config| Case::large_set(config);
    let rows: Vec<Vec<String>> =
        SYSTEMS.into_iter().filter_map(|(config, _)| row(m, &case(config), config.label())).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!("<h3>4 KiB random reads of the large set</h3>{}", table(&HEAD, &rows))
}

fn ceilings(m: &Measurements) -> String {
    let mut rows = Vec::new();
    let drive = [
        ("write", CeilingKind::DriveWrite, AccessMode::Write),
        ("read", CeilingKind::DriveRead, AccessMode::Read),
    ];
    for (name, kind, mode) in drive {
        for size in sizes_of(m, |_| true) {
            let ceiling = m.ceiling(kind, size);
            rows.push(ceiling_row(
                m,
                format!("drive, {name} of {}", size_label(size)),
                &ceiling,
                Some((mode, size)),
            ));
        }
    }
    let random = m.ceiling(CeilingKind::DriveRandread, 4096);
    rows.push(ceiling_row(
        m,
        "drive, random read of 4 KiB".to_owned(),
        &random,
        Some((AccessMode::Randread, 4096)),
    ));
    for (name, kind) in
        [("one TCP connection, loopback", CeilingKind::Loopback), ("copying memory", CeilingKind::Memcpy)]
    {
        rows.push(ceiling_row(m, name.to_owned(), &m.ceiling(kind, 0), None));
    }
    let head = head_of_systems(&["ceiling", "MB/s"]);
    format!(
        "<h3>Ceilings, and the systems' use of them</h3>{}<p class=\"soft\">The drive is measured by fio with O_DIRECT on a completely written file, with the better of \
         depth 1 and 16 (random reads: depth 16). The writes of fio include no flush, but durable writes of the systems do. The systems' columns show throughput / ceiling.</p>",
        table(&head, &rows)
    )
}

fn ceiling_row(
    m: &Measurements,
    name: String,
    ceiling: &crate::evaluation::stats::Rounds,
    workload: Option<(AccessMode, u64)>,
) -> Vec<String> {
    let mut row = vec![name, cell(estimate(ceiling.values().copied()))];
    row.extend(SYSTEMS.map(|(config, _)| {
        let used = workload.and_then(|(mode, size)| {
            let rate = m.rounds(&Case::new(config, mode, size), |s| s.mb_per_s);
            estimate(ratio(&rate, ceiling).into_values())
        });
        cell(used)
    }));
    row
}

fn ablations(m: &Measurements) -> String {
    let cases: Vec<&Case> = m.cases().into_iter().filter(|c| c.ablation.is_some()).collect();
    if cases.is_empty() {
        return String::new();
    }
    let mut rows = Vec::new();
    for case in cases {
        let whole = case.control();
        let against = |figure: fn(&Sample) -> f64| {
            cell(estimate(ratio(&m.rounds(case, figure), &m.rounds(&whole, figure)).into_values()))
        };
        rows.push(vec![
            format!(
                "{}, {}, {}",
                escape(case.ablation.as_deref().unwrap_or("")),
                size_label(case.size),
                case.config.label()
            ),
            against(|s| s.iops),
            against(|s| s.latency_us_mean),
            against(|s| s.host_cpu_us_per_op),
            against(|s| s.node_cpu_us_per_op),
        ]);
    }
    let head = ["writes with …", "throughput", "latency", "host CPU per write", "all CPU per write"];
    format!(
        "<h3>Ablations</h3><p class=\"soft\">An ablation is the whole design with one part switched off, at an object size at which this part matters. Each value is the ratio of a run with the ablation to a run of the whole design. The two runs follow each other directly, in alternating order.</p>{}",
        table(&head, &rows)
    )
}

fn environment(content: &PageContent<'_>) -> String {
    let e = content.environment;
    let facts = [
        ("date", &e.date),
        ("CPU", &e.cpu),
        ("CPUs", &e.cpus.to_string()),
        ("memory", &e.memory),
        ("kernel", &e.kernel),
        ("TCP congestion control", &e.tcp_congestion_control),
        ("system", &e.system),
        ("drive of the targets", &e.drive),
        ("commit", &e.commit),
        ("outboard", &e.outboard),
        ("fio", &e.fio),
        ("Ceph", &e.ceph),
        ("rustc", &e.rustc),
    ];
    let rows: Vec<Vec<String>> = facts.iter().map(|(k, v)| vec![(*k).to_owned(), escape(v)]).collect();
    format!(
        "<h3>The machine</h3>{}<p class=\"soft\">The file report.json beside this page contains the results of every run in every round.</p>",
        table(&["", ""], &rows)
    )
}
