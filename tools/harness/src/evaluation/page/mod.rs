//! Formats the report's page, which is one HTML file without external resources.

pub mod coding;
mod details;
mod figures;
mod networks;
mod papers;
pub mod svg;
pub mod text;
mod verdict;

use text::{escape, number};

use super::bars::Bar;
use super::environment::Environment;
use super::paper;
use super::sample::Measurements;
use super::settings::EvaluationSettings;

/// The content of the page.
pub struct PageContent<'a> {
    /// The settings of the run.
    pub settings: &'a EvaluationSettings,
    /// The machine and the software.
    pub environment: &'a Environment,
    /// The measured values.
    pub found: &'a Measurements,
    /// The claims of the report, with their thresholds and verdicts.
    pub bars: &'a [Bar],
    /// Number of completed rounds.
    pub rounds: u32,
    /// The drawings of the section about erasure coding.
    pub coding: &'a [coding::Drawing],
}

const STYLE: &str = include_str!("style.css");

/// Formats the whole page. It is also well-formed XML.
#[must_use]
pub fn html(content: &PageContent<'_>) -> String {
    let sections = [
        verdict::section(content),
        papers::section(content.found),
        setting(content),
        figures::section(content.found),
        networks::section(content.found),
        coding::section(content.coding),
        details::section(content),
    ];
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\
         <title>Outboard: the evaluation</title><style>{STYLE}</style></head>\n<body><main>{}</main></body></html>\n",
        sections.join("\n")
    )
}

/// Describes the systems, and the limits of their comparison.
fn setting(content: &PageContent<'_>) -> String {
    let (s, e) = (content.settings, content.environment);
    let large = s.large_set().map_or(String::new(), |objects| {
        format!(
            " <b>The large set</b> consists of {objects} objects of 4 KiB ({} MiB). A node's caches hold 128 MiB in total. Ceph's caches are reduced to the same size while Ceph \
             reads the set (osd_memory_target 896 MiB). RocksDB can also use the kernel's page cache.",
            (objects * 4096) >> 20
        )
    });
    let start = content.found.rados_start_cpu_seconds.map_or(String::new(), |seconds| {
        format!(
            "<li>“All CPU” does not contain the CPU time of starting a client. outboard bench counts CPU time only from its first request on. From the CPU time of each run of rados bench, {} ms \
             are subtracted, which is the CPU time of a rados bench with a single object.</li>",
            number(seconds * 1e3)
        )
    });
    format!(
        "<section><h2>What is compared</h2>\
         <dl><dt><i class=\"host\"></i>host</dt><dd>Outboard with osd and store in one process. It corresponds to the paper's baseline.</dd>\
         <dt><i class=\"memcpy\"></i>dpu, memcpy</dt><dd>Outboard with its osd on an <b>emulated</b> DPU, which is a separate process, with a separate CPU if the machine has \
         several. The DMA engine is a thread that copies memory as fast as possible.</dd>\
         <dt><i class=\"bf3\"></i>dpu, bf3-paper</dt><dd>Like “dpu, memcpy”, but the emulated engine is serial, and each transfer takes the time that the paper measured on a \
         BlueField-3.</dd>\
         <dt><i class=\"bf3s\"></i>dpu, bf3-serial</dt><dd>Like “dpu, bf3-paper”, but each write has the fixed time of a transfer (2.4 ms) once. With bf3-paper, all writes \
         that one chain transfers share it.</dd>\
         <dt><i class=\"ofi\"></i>dpu, ofi:tcp</dt><dd>Like “dpu, memcpy”, but the engine ofi moves payload by one-sided transfers of libfabric over TCP, in software. On the host, a \
         thread of libfabric does the work that an RDMA NIC would do.</dd>\
         <dt><i class=\"ceph\"></i>Ceph</dt><dd>A real Ceph ({}) with one OSD, one copy of the data, BlueStore on a completely written file, no authentication, and \
         2 GiB of memory. rados bench drives it.</dd>\
         <dt><i class=\"paper-a\"></i>paper</dt><dd><cite>{}</cite> (SC Workshops '25, \
         <a href=\"https://doi.org/{doi}\">doi:{doi}</a>), section 5: two storage nodes and a client, AMD EPYC 9474F, BlueField-3, 100 Gbit/s, SATA SSD. \
         <b>Its absolute values come from other hardware. Compare only ratios and the shapes of curves.</b></dd></dl>\
         <p>All systems run at the same time on the same drive, and are idle while another system is measured. The run has {} round{} of {} s per run ({} s if no threshold depends on the run), with 16 requests in flight unless stated otherwise. In \
         each round, all systems run at each size, except for the nodes with other engines (bf3-paper, bf3-serial, ofi:tcp), which run in every other round. Over all rounds, each system directly follows each other system about equally often. A value is the median of the rounds, and a ratio is the median of the ratios of the rounds. \
         Small print shows the interval that contains the true median with a probability of 95 % (order statistics). With fewer than six rounds, the interval is the range of the values and proves little.{large}</p>\
         <h3>Limits of the comparison</h3><ul>\
         <li>Client, osd, store, emulated DMA and the kernel's loopback share this machine's {} CPUs. On real hardware, the osd and the DMA engine have their own processors, and \
         the client runs on another machine. Here each copy by the emulated engine uses CPU time, which counts as “all CPU” but not as “host CPU”.</li>\
         <li>Host CPU is the CPU time of the store's process (dpu), of the node's one process (host), or of the ceph-osd (Ceph). Ceph's mon and mgr count only in the results for \
         idle systems.</li>{start}\
         <li>rados bench writes each object once, and its removal afterwards is not measured. outboard bench repeatedly overwrites a set of half a GiB, so its results also include \
         the cost of freeing the old data. Reads of all sets except the large set may come from BlueStore's cache (up to 2 GiB), whereas Outboard caches no data.</li>\
         <li>The paper replicates data to a second node. The systems here do not replicate data.</li>\
         <li>The drive of this machine may be a virtual disk with its own cache. The ceilings were measured in the same rounds.</li></ul></section>",
        escape(&e.ceph),
        paper::TITLE,
        content.rounds,
        if content.rounds == 1 { "" } else { "s" },
        s.seconds,
        s.secondary_seconds(),
        e.cpus,
        doi = paper::DOI,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::bars;
    use crate::evaluation::sample::{Ceiling, CeilingKind, PartUse, Sample, Subsystem};
    use crate::evaluation::workload::{
        AccessMode, Case, IN_FLIGHT_SWEEP, MIB, Network, PAPER_SIZES, TestedSystem,
    };
    use crate::node::BenchBreakdown;

    fn sample(round: u32, case: Case, value: f64) -> Sample {
        Sample {
            round,
            case,
            ops: 100,
            mb_per_s: value,
            iops: value,
            latency_us_mean: value,
            latency_us_p99: None,
            host_cpu_us_per_op: value,
            node_cpu_us_per_op: value,
            client_cpu_us_per_op: value,
            user_us_per_op: value,
            system_us_per_op: value,
            wake_ups_per_op: value,
            parts: [(
                Subsystem::Messenger,
                PartUse { cpu_us: 1.0, switches: 2.0, polls: 3.0, wake_ups: 4.0 },
            )]
            .into(),
            breakdown_us: Some(BenchBreakdown {
                total: 10.0,
                host_write: 2.0,
                dma: 3.0,
                dma_wait: 4.0,
                others: 1.0,
            }),
        }
    }

    fn some_measurements() -> Measurements {
        let mut found = Measurements {
            problems: vec!["a < b & c".to_owned()],
            rados_start_cpu_seconds: Some(0.0625),
            ..Measurements::default()
        };
        for round in 1..=7 {
            for (config, _) in figures::SYSTEMS {
                let value = f64::from(round) + config as u32 as f64 * 10.0;
                found.samples.extend(
                    PAPER_SIZES.map(|size| sample(round, Case::new(config, AccessMode::Write, size), value)),
                );
            }
            for in_flight in IN_FLIGHT_SWEEP {
                let value = |network| f64::from(round) * if network == Network::Tcp { 1.0 } else { 2.0 };
                let over = |network| sample(round, Case::over(network, in_flight), value(network));
                found.samples.extend(Network::ALL.map(over));
            }
            found.ceilings.push(Ceiling { round, kind: CeilingKind::DriveWrite, size: MIB, mb_per_s: 1.0 });
        }
        found
    }

    fn page_of(found: &Measurements) -> String {
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        let environment = Environment::here(std::path::Path::new("."));
        let bars = bars::all(found);
        let drawn = || svg::file(9.0, 9.0, "<g>a &amp; b</g>", &[("host", "host")]);
        let coding = &coding::drawings(|_| Some(drawn()));
        html(&PageContent {
            settings: &settings,
            environment: &environment,
            found,
            bars: &bars,
            rounds: 7,
            coding,
        })
    }

    /// Panics if the page closes a tag that is not open, or leaves a tag open.
    fn check_tags(html: &str) {
        let mut open: Vec<&str> = Vec::new();
        let body = html.split_once("<html").unwrap().1;
        for piece in format!("<html{body}").split('<').skip(1) {
            let (tag, _) = piece.split_once('>').expect("a tag ends");
            let name = tag.split([' ', '/']).find(|s| !s.is_empty()).unwrap().to_owned();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name.as_str()), "before {piece}");
            } else if !tag.ends_with('/') {
                let name: &'static str = name.leak();
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn the_page_is_well_formed_with_and_without_measurements() {
        check_tags(&page_of(&some_measurements()));
        check_tags(&page_of(&Measurements::default()));
    }

    #[test]
    fn network_stacks_are_compared_by_the_ratios_of_rounds_at_every_queue_depth() {
        let mut found = some_measurements();
        let section = networks::section(&found);
        assert!(page_of(&found).contains(&section));
        // Ratios of operations, of all CPU, of the client's CPU, of user and system time, and of wake-ups.
        let ratios = section.matches("<td>2 <small>2–2</small></td>").count();
        assert_eq!(ratios, 6 * IN_FLIGHT_SWEEP.len());
        for in_flight in IN_FLIGHT_SWEEP {
            assert_eq!(section.matches(&format!("<th>{in_flight}</th>")).count(), 3);
        }
        found.samples.retain(|s| s.case.network.is_none());
        check_tags(&page_of(&found));
        assert_eq!(networks::section(&found), "");
    }

    #[test]
    fn the_overview_of_the_papers_shows_medians_of_ratios_or_dashes() {
        let section = papers::section(&some_measurements());
        assert!(page_of(&some_measurements()).contains(&section));
        let row = |section: &str, name: &str| {
            let (_, row) = section.split_once(&format!("<th>{name}")).expect("the row exists");
            row.split_once("</tr>").expect("the row ends").0.to_owned()
        };
        let operations = row(&section, "Ceph over RDMA, figure 6 (a)");
        assert!(operations.contains("<td>2, 2, 2, 2, 2, 2</td>"), "{operations}");
        // In round 4, the systems have the values 4 + 10 times their number.
        let of = |config: TestedSystem| 4.0 + config as u32 as f64 * 10.0;
        let dpu = text::number(of(TestedSystem::DpuMemcpy) / of(TestedSystem::Host));
        let throughput = row(&section, "DoCeph, figure 10");
        assert!(throughput.contains(&format!("<td>{0}, {0}, {0}, {0}</td>", dpu)), "{throughput}");
        let none = papers::section(&Measurements::default());
        assert!(row(&none, "DoCeph, figure 10").contains("<td>–, –, –, –</td>"), "{none}");
    }

    #[test]
    fn the_page_states_the_cpu_time_subtracted_from_rados() {
        assert!(page_of(&some_measurements()).contains("62.5 ms"));
        assert!(!page_of(&Measurements::default()).contains("starting a client"));
    }

    #[test]
    fn the_page_uses_no_external_resources() {
        let page = page_of(&some_measurements());
        for what in ["src=", "@import", "url(", "<script", "<link"] {
            assert!(!page.contains(what), "{what}");
        }
    }
}
