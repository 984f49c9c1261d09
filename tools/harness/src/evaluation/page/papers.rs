//! The page's overview of the papers: for each figure and table, the published result, the result
//! here, and why the two differ.

use super::text::{escape, number, table};
use crate::evaluation::paper;
use crate::evaluation::sample::{Measurements, Sample, Subsystem};
use crate::evaluation::stats::{Rounds, estimate, ratio};
use crate::evaluation::workload::{
    AccessMode, Case, EmulatedLink, IN_FLIGHT_SWEEP, MIB, Network, PAPER_SIZES, TestedSystem,
};

/// A figure or table of a paper.
struct PaperFigure {
    what: &'static str,
    published: String,
    here: String,
    /// What is emulated or shaped here, or how the result is obtained.
    setting: &'static str,
    why: &'static str,
}

/// Formats the section.
pub fn section(m: &Measurements) -> String {
    let row = |f: PaperFigure| {
        vec![f.what.to_owned(), escape(&f.published), escape(&f.here), escape(f.setting), escape(f.why)]
    };
    let figures = doceph(m).into_iter().chain(coding()).chain(rdma(m));
    format!(
        "<section><h2>The papers' results, the results here, and why they differ</h2>{}\
         <p class=\"soft\">A dash means that this run has not measured the value. Values for several sizes or numbers of requests are in this order.</p></section>",
        table(
            &["figure", "the paper", "here", "emulated or shaped here", "why it differs"],
            &figures.map(row).collect::<Vec<_>>()
        )
    )
}

fn writes(config: TestedSystem, size: u64) -> Case {
    Case::new(config, AccessMode::Write, size)
}

/// The median with a unit, or a dash.
fn median(rounds: Rounds, unit: &str) -> String {
    estimate(rounds.into_values()).map_or_else(|| "–".to_owned(), |e| number(e.median) + unit)
}

/// The medians for the sizes of the DoCeph paper.
fn by_size(unit: &str, rounds: impl Fn(u64) -> Rounds) -> String {
    PAPER_SIZES.map(|size| median(rounds(size), unit)).join(", ")
}

fn published<const N: usize>(values: [f64; N], unit: &str) -> String {
    values.map(|value| number(value) + unit).join(", ")
}

fn server_us(s: &Sample) -> f64 {
    s.node_cpu_us_per_op - s.client_cpu_us_per_op
}

/// The messenger's share of the CPU time of the storage system, in %. Unknown if the time of the
/// osd's thread is not divided.
fn messenger_share(m: &Measurements, case: &Case) -> String {
    let share = |s: &Sample| Some(100.0 * s.parts.get(&Subsystem::Messenger)?.cpu_us / server_us(s));
    median(m.rounds_if(case, share), " %")
}

fn doceph(m: &Measurements) -> Vec<PaperFigure> {
    let (ceph, host, dpu) = (TestedSystem::Ceph, TestedSystem::Host, TestedSystem::DpuMemcpy);
    let serial = TestedSystem::DpuBf3Serial;
    let across = |link| Case::across(host, link);
    let rate = |config, size| m.rounds(&writes(config, size), |s| s.iops);
    let rate_across = |link| median(m.rounds(&across(link), |s| s.mb_per_s), " MB/s");
    let latency = |config, size| m.rounds(&writes(config, size), |s| s.latency_us_mean);
    let wait = |config| {
        by_size(" %", |size| {
            m.rounds_if(&writes(config, size), |s| {
                s.breakdown_us.as_ref().map(|b| 100.0 * b.dma_wait / b.total)
            })
        })
    };
    let switches = |part: Subsystem| {
        m.rounds_if(&writes(ceph, 4 * MIB), |s| Some(s.parts.get(&part)?.switches).filter(|n| *n > 0.0))
    };
    let wake_ups = |part: Subsystem| {
        m.rounds_if(&writes(dpu, 4 * MIB), |s| Some(s.parts.get(&part)?.wake_ups).filter(|n| *n > 0.0))
    };
    let compared = |of: &dyn Fn(Subsystem) -> Rounds| {
        median(ratio(&of(Subsystem::Messenger), &of(Subsystem::ObjectStore)), "")
    };
    let saved = by_size(" %", |size| {
        let cpu = |config| m.rounds(&writes(config, size), |s| s.host_cpu_us_per_op);
        ratio(&cpu(dpu), &cpu(ceph)).into_iter().map(|(round, r)| (round, 100.0 * (1.0 - r))).collect()
    });
    let doceph_latency: [f64; 2] =
        [0, 3].map(|i| paper::FIG8_DOCEPH[i] / paper::FIG8_BASELINE[i].unwrap_or(f64::NAN));
    let doceph_rate: [f64; 4] = std::array::from_fn(|i| paper::FIG10_DOCEPH[i] / paper::FIG10_BASELINE[i]);
    vec![
        PaperFigure {
            what: "DoCeph, figure 5: the messenger's share of Ceph's CPU time, 4 MB writes",
            published: format!(
                "{} (1 Gbit/s), {} (100 Gbit/s)",
                number(paper::FIG5[0].1) + " %",
                number(paper::FIG5[1].1) + " %"
            ),
            here: format!(
                "Ceph {} (loopback); host {} (1 Gbit/s), {} (unlimited)",
                messenger_share(m, &writes(ceph, 4 * MIB)),
                messenger_share(m, &across(EmulatedLink::ALL[0])),
                messenger_share(m, &across(EmulatedLink::ALL[1]))
            ),
            setting: "the link is a shaped pair of virtual devices; Ceph is real",
            why: "The paper's Ceph also sends each write to a second node, over a real network with its driver. Nothing is replicated here, and a node's messenger, osd and store are other code than Ceph's.",
        },
        PaperFigure {
            what: "DoCeph, table 2: context switches of the messenger / those of ObjectStore",
            published: number(paper::TABLE2.0 / paper::TABLE2.1),
            here: format!("Ceph {}; dpu {} (wake-ups)", compared(&switches), compared(&wake_ups)),
            setting: "Ceph is real",
            why: "The paper names neither the network nor the length of the run. Here, there is one loopback connection, over which Ceph's messenger switches only a few times per write. Outboard has no threads for the messenger, so its wake-ups are counted.",
        },
        PaperFigure {
            what: "DoCeph, figure 6: throughput at 1 and 100 Gbit/s, 4 MB writes",
            published: format!(
                "the drawing only; {} MB/s at 100 Gbit/s by figure 10",
                number(paper::FIG10_BASELINE[1] * 4.0)
            ),
            here: format!(
                "host {} (1 Gbit/s), {} (unlimited)",
                rate_across(EmulatedLink::ALL[0]),
                rate_across(EmulatedLink::ALL[1])
            ),
            setting: "1 Gbit/s is shaped by a token bucket; “unlimited” is the speed of the kernel",
            why: "At 1 Gbit/s the link limits both. The paper's throughput at 100 Gbit/s is close to the speed of its SATA drives; here the two cores limit.",
        },
        PaperFigure {
            what: "DoCeph, figure 7: host CPU time saved, writes of 1, 4, 8 and 16 MB",
            published: published(paper::SAVED, " %"),
            here: format!("against Ceph {saved}"),
            setting: "the DPU and its DMA engine are emulated; their CPU time is not the host's",
            why: "The paper compares the percentages of a core at different throughputs; here it is the CPU time per write. Ceph without replication does less work per write than the paper's, and Outboard's store verifies the checksums of all data (channel.verify_every).",
        },
        PaperFigure {
            what: "DoCeph, figure 8: latency with DPU / without, writes of 1 and 16 MB",
            published: published(doceph_latency, ""),
            here: [MIB, 16 * MIB]
                .map(|size| median(ratio(&latency(dpu, size), &latency(host, size)), ""))
                .join(", "),
            setting: "the engine copies memory on a core of this machine",
            why: "The paper's osd runs on slower Arm cores, and its writes wait for a serial engine. Here the emulated engine takes time of the two cores that all parts share.",
        },
        PaperFigure {
            what: "DoCeph, table 3 and figure 9: share of the time waiting for DMA, writes of 1, 4, 8 and 16 MB",
            published: published(paper::TABLE3.map(|t| 100.0 * t.dma_wait / t.total()), " %"),
            here: format!("memcpy {}; bf3-serial {}", wait(dpu), wait(serial)),
            setting: "bf3-serial emulates the paper's engine: 2.4 ms plus 0.38 ms per MB for each write, one write at a time",
            why: "With a fast engine there is little to wait for. With bf3-serial, the rest of a write takes less time than in the paper (no second node, fast drive), so the engine is the bottleneck and the other 15 writes wait for it.",
        },
        PaperFigure {
            what: "DoCeph, figure 10: throughput with DPU / without, writes of 1, 4, 8 and 16 MB",
            published: published(doceph_rate, ""),
            here: by_size("", |size| ratio(&rate(dpu, size), &rate(host, size))),
            setting: "as in figure 8",
            why: "In the paper, large writes are close to the speed of the SATA drives, so that the DPU hardly matters. Here, both placements use all of the two cores, and the emulated engine needs CPU time too.",
        },
    ]
}

fn coding() -> Vec<PaperFigure> {
    vec![
        PaperFigure {
            what: "Ryu et al., figure 2: time of the accelerator / time of the CPU, 128+32",
            published: "13.3 (8 MB), 10.5 (128 MB)".to_owned(),
            here: "printed by outboard-layers ec; drawn in “Figure 2 of Ryu et al. inside a node” (make bench-redundancy PARTS=coding:wide)".to_owned(),
            setting: "the accelerator is emulated: it computes real parity, and then waits as long as the paper's linear fit requires",
            why: "The emulation is calibrated with one speed of the host, and the host's speed depends on the file size. Inside a node, a write also contains the network and the transactions of 160 targets, which makes the ratio smaller.",
        },
        PaperFigure {
            what: "Ryu et al., algorithm 1: busy, latency-sensitive, async and hybrid",
            published: "pseudo-code without results".to_owned(),
            here: "drawn in “The scheduler at work” and “Fixed ratios and hybrid:auto” (PARTS=coding)".to_owned(),
            setting: "host and DPU have a CPU of this machine each",
            why: "α and β are measured here. The paper leaves the hybrid of the DPU's cores and its accelerator as future work: coding.offload = “both”.",
        },
    ]
}

fn rdma(m: &Measurements) -> Vec<PaperFigure> {
    let over = |figure: fn(&Sample) -> f64, in_flight: u32| {
        let [tcp, ofi] = Network::ALL.map(|network| m.rounds(&Case::over(network, in_flight), figure));
        median(ratio(&ofi, &tcp), "")
    };
    let all = |figure: fn(&Sample) -> f64| IN_FLIGHT_SWEEP.map(|n| over(figure, n)).join(", ");
    let randread = |config| messenger_share(m, &Case::new(config, AccessMode::Randread, 4096));
    let setting = "no RDMA hardware: ofi:tcp is the RDMA code over libfabric's provider for TCP; bench/rdma/compare measures soft-RoCE and soft-iWARP in an emulated machine";
    vec![
        PaperFigure {
            what: "Ceph over RDMA, figure 2: share of the CPU time for networking, 4 KiB random reads",
            published: "22–24 %".to_owned(),
            here: format!("Ceph {}; host {}", randread(TestedSystem::Ceph), randread(TestedSystem::Host)),
            setting: "Ceph is real; loopback TCP",
            why: "The article profiles the whole osd under many clients with NVMe drives and RBD. Here one client reads whole objects that Ceph has in its cache.",
        },
        PaperFigure {
            what: "Ceph over RDMA, figure 6 (a): operations over RDMA / over TCP, 1 to 32 in flight",
            published: "1.17 at 2 in flight; the rest only in the drawing".to_owned(),
            here: all(|s| s.iops),
            setting,
            why: "The gain comes from a NIC that moves messages without the kernel. Here software does this work in addition.",
        },
        PaperFigure {
            what: "Ceph over RDMA, figure 6 (b): CPU time per operation of the node over RDMA / over TCP",
            published: "less per operation, without a number".to_owned(),
            here: all(server_us),
            setting,
            why: "As for figure 6 (a).",
        },
        PaperFigure {
            what: "Ceph over RDMA, figure 7: user time and system time over RDMA / over TCP",
            published: "more user time, less system time, without numbers".to_owned(),
            here: format!("user {}; system {}", all(|s| s.user_us_per_op), all(|s| s.system_us_per_op)),
            setting,
            why: "The provider for TCP calls the kernel as TCP does, so no system time is saved. The emulated machine shows the saving for large transfers.",
        },
        PaperFigure {
            what: "Ceph over RDMA, figures 8 and 9: 48.7 % more operations with a third node",
            published: "+48.7 % (RDMA), +50 % (TCP)".to_owned(),
            here: "not measured".to_owned(),
            setting: "–",
            why: "Outboard is one node so far.",
        },
        PaperFigure {
            what: "Ceph over RDMA, figures 10 and 11: two events and one more copy per message",
            published: "two polling threads".to_owned(),
            here: format!("wake-ups per operation over ofi:tcp / over tcp {}", all(|s| s.wake_ups_per_op)),
            setting,
            why: "One loop serves sockets and completion queues, so a message needs one event. outboard-layers rpc prints the copies per byte.",
        },
    ]
}
