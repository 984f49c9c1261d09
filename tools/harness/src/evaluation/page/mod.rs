//! The page: one HTML file without external resources.

pub mod coding;
mod details;
mod figures;
mod networks;
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
    /// How much was measured.
    pub settings: &'a EvaluationSettings,
    /// The machine and the software.
    pub environment: &'a Environment,
    /// The measured values.
    pub found: &'a Measurements,
    /// The comparison with the thresholds.
    pub bars: &'a [Bar],
    /// Number of completed rounds.
    pub rounds: u32,
    /// The drawings of where parity is computed.
    pub coding: &'a [coding::Drawing],
}

const STYLE: &str = include_str!("style.css");

/// Formats the whole page. It is also well-formed XML.
#[must_use]
pub fn html(content: &PageContent<'_>) -> String {
    let sections = [
        verdict::section(content),
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
            " <b>The large set</b> is {objects} objects of 4 KiB ({} MiB); a node's caches hold 128 MiB in all, and Ceph's are cut down to as \
             much while it reads it (osd_memory_target 896 MiB; RocksDB also has the kernel's page cache).",
            (objects * 4096) >> 20
        )
    });
    let start = content.found.rados_start_cpu_seconds.map_or(String::new(), |seconds| {
        format!(
            "<li>What a client costs that is only started is left out of “all CPU”: outboard bench counts from its first request on, and {} ms, the CPU of a rados bench \
             of a single object in this run, are taken off each run of rados bench.</li>",
            number(seconds * 1e3)
        )
    });
    format!(
        "<section><h2>What is compared</h2>\
         <dl><dt><i class=\"host\"></i>host</dt><dd>Outboard with everything in one process: the baseline in the paper's sense.</dd>\
         <dt><i class=\"memcpy\"></i>dpu, memcpy</dt><dd>Outboard with its OSD on an <b>emulated</b> DPU: a process of its own, with a CPU of its own where there \
         are several. The DMA engine is a thread that copies memory, as fast as it can.</dd>\
         <dt><i class=\"bf3\"></i>dpu, bf3-paper</dt><dd>The same, but the emulated engine is serial and takes the time per transfer that the paper measured on a \
         BlueField-3.</dd>\
         <dt><i class=\"ceph\"></i>Ceph</dt><dd>A real one ({}): one OSD, one copy, BlueStore on a file that was written in full beforehand, no authentication, \
         2 GiB of memory; driven by rados bench.</dd>\
         <dt><i class=\"paper-a\"></i>paper</dt><dd><cite>{}</cite> (SC Workshops '25, \
         <a href=\"https://doi.org/{doi}\">doi:{doi}</a>), section 5: two storage nodes and a client, AMD EPYC 9474F, BlueField-3, 100 Gbit/s, SATA SSD. \
         <b>Its absolute figures are of other hardware; compare ratios and shapes.</b></dd></dl>\
         <p>All systems are up at the same time, on the same drive, and idle while another is measured. {} round{} of {} s per run ({} s where no threshold hangs on it), 16 requests in flight unless stated; in \
         each round the systems take turns at each size, in an order in which over the rounds each follows each other about equally often. A figure is the median of the rounds; a ratio is the median of the rounds' ratios. \
         Small print gives the interval that holds the true median with 95 % (order statistics; with fewer than six rounds it is the range and proves little).{large}</p>\
         <h3>To bear in mind</h3><ul>\
         <li>Client, OSD, store, emulated DMA and the kernel's loopback share this machine's {} CPUs. On real hardware the OSD and the DMA engine have their own, and \
         the client is elsewhere. Here every copy that the emulated engine makes costs CPU, booked under “all CPU” but not under “host CPU”.</li>\
         <li>Host CPU is that of the store's process (dpu), of the node's one process (host), of the ceph-osd (Ceph). Ceph's mon and mgr are counted nowhere but under \
         idle CPU.</li>{start}\
         <li>rados bench writes each object once and removes them afterwards, unmeasured. outboard bench goes round a set of half a GiB and overwrites, so it also pays \
         for freeing what was there. Reads of the usual sets may come from BlueStore's cache (up to 2 GiB); Outboard caches no data.</li>\
         <li>The paper replicates to a second node; nothing here does.</li>\
         <li>The drive is what this machine has, often a virtual disk with a cache of its own. The ceilings were measured in the same rounds.</li></ul></section>",
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
            parts: [(Subsystem::Messenger, PartUse { cpu_us: 1.0, switches: 2.0 })].into(),
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
            for config in
                [TestedSystem::Host, TestedSystem::DpuMemcpy, TestedSystem::DpuBf3, TestedSystem::Ceph]
            {
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

    /// Fails where a tag is closed that is not open, or left open.
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
    fn the_page_is_well_formed_whatever_was_measured() {
        check_tags(&page_of(&some_measurements()));
        check_tags(&page_of(&Measurements::default()));
    }

    #[test]
    fn network_stacks_are_compared_by_the_ratios_of_rounds_at_every_depth() {
        let mut found = some_measurements();
        let section = networks::section(&found);
        assert!(page_of(&found).contains(&section));
        // Of operations, of all CPU and of the client's.
        let ratios = section.matches("<td>2 <small>2–2</small></td>").count();
        assert_eq!(ratios, 3 * IN_FLIGHT_SWEEP.len());
        for in_flight in IN_FLIGHT_SWEEP {
            assert_eq!(section.matches(&format!("<th>{in_flight}</th>")).count(), 2);
        }
        found.samples.retain(|s| s.case.network.is_none());
        check_tags(&page_of(&found));
        assert_eq!(networks::section(&found), "");
    }

    #[test]
    fn the_page_says_what_is_taken_off_the_cpu_of_rados() {
        assert!(page_of(&some_measurements()).contains("62.5 ms"));
        assert!(!page_of(&Measurements::default()).contains("only started"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = page_of(&some_measurements());
        for what in ["src=", "@import", "url(", "<script", "<link"] {
            assert!(!page.contains(what), "{what}");
        }
    }
}
