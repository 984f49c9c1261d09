//! The *bars*: the claims of the report, each with a threshold, the measured value and the result
//! of the DoCeph paper.

use serde::Serialize;

use super::paper;
use super::sample::{CeilingKind, Measurements, Sample};
use super::stats::{Estimate, Rounds, estimate, paired, ratio};
use super::workload::{AccessMode, Case, MIB, PAPER_SIZES, TestedSystem, size_label};
use crate::node::BenchBreakdown;

/// A claim and its check, case by case.
#[derive(Debug, Clone, Serialize)]
pub struct Bar {
    /// Number of the claim in this report.
    pub number: &'static str,
    /// The claim.
    pub title: &'static str,
    /// How the value is computed.
    pub definition: &'static str,
    /// One row per case.
    pub rows: Vec<BarRow>,
}

/// One case of a claim.
#[derive(Debug, Clone, Serialize)]
pub struct BarRow {
    /// Name of the case.
    pub case: String,
    /// Median over rounds of the ratio of paired runs; `None` if it was not measured.
    pub value: Option<Estimate>,
    /// Format of the value.
    pub unit: FigureFormat,
    /// The threshold; `None` if the value is for comparison only.
    pub bound: Option<Bound>,
    /// Whether the median meets the threshold.
    pub verdict: BarVerdict,
    /// The DoCeph paper's value for this case.
    pub paper: Option<String>,
}

/// Format of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FigureFormat {
    /// A percentage.
    Percent,
    /// A ratio, as a decimal number.
    Ratio,
}

/// A threshold.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The smallest value that passes.
    AtLeast(f64),
    /// The largest value that passes.
    AtMost(f64),
}

/// The result of a comparison with a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BarVerdict {
    /// The median meets the threshold.
    Pass,
    /// The median does not meet the threshold.
    Fail,
    /// The run did not measure the value.
    NotMeasured,
    /// The value has no threshold and is for information only.
    Information,
}

impl BarRow {
    fn new(case: impl Into<String>, rounds: Rounds, unit: FigureFormat, bound: Option<Bound>) -> BarRow {
        let value = estimate(rounds.into_values());
        let verdict = match (value, bound) {
            (None, _) => BarVerdict::NotMeasured,
            (_, None) => BarVerdict::Information,
            (Some(v), Some(Bound::AtLeast(least))) if v.median >= least => BarVerdict::Pass,
            (Some(v), Some(Bound::AtMost(most))) if v.median <= most => BarVerdict::Pass,
            _ => BarVerdict::Fail,
        };
        BarRow { case: case.into(), value, unit, bound, verdict, paper: None }
    }

    fn beside(self, paper: impl Into<String>) -> BarRow {
        BarRow { paper: Some(paper.into()), ..self }
    }
}

/// Computes all bars, in the order of the report.
#[must_use]
pub fn all(m: &Measurements) -> Vec<Bar> {
    vec![
        host_cpu_against_ceph(m),
        host_cpu_against_host(m),
        node_cpu_against_ceph(m),
        write_throughput(m),
        latency_alone(m),
        dma_wait(m),
        serial_engine(m),
        read_throughput(m),
        against_ceph(m),
        against_drive(m),
        idle(m),
    ]
}

fn writes(config: TestedSystem, size: u64) -> Case {
    Case::new(config, AccessMode::Write, size)
}

/// Returns one row per object size of the DoCeph paper.
fn by_size(
    rounds: impl Fn(u64) -> Rounds,
    unit: FigureFormat,
    bounds: [Bound; 4],
    paper: Option<[String; 4]>,
) -> Vec<BarRow> {
    let row = |i: usize| {
        let row = BarRow::new(size_label(PAPER_SIZES[i]), rounds(PAPER_SIZES[i]), unit, Some(bounds[i]));
        match &paper {
            Some(figures) => row.beside(figures[i].clone()),
            None => row,
        }
    };
    (0..PAPER_SIZES.len()).map(row).collect()
}

fn saved_percent(m: &Measurements, of: TestedSystem, against: TestedSystem, size: u64) -> Rounds {
    let cpu = |config| m.rounds(&writes(config, size), |s| s.host_cpu_us_per_op);
    ratio(&cpu(of), &cpu(against)).into_iter().map(|(round, r)| (round, 100.0 * (1.0 - r))).collect()
}

fn host_cpu_against_ceph(m: &Measurements) -> Bar {
    let rounds = |size| saved_percent(m, TestedSystem::DpuMemcpy, TestedSystem::Ceph, size);
    let paper = paper::SAVED.map(|saved| format!("{saved} %"));
    Bar {
        number: "1",
        title: "Host CPU saved against Ceph, writes",
        definition: "1 − CPU time per write of the store's process (dpu) / CPU time per write of the ceph-osd. Ceph's mon and mgr are not counted.",
        rows: by_size(rounds, FigureFormat::Percent, [Bound::AtLeast(95.0); 4], Some(paper)),
    }
}

fn host_cpu_against_host(m: &Measurements) -> Bar {
    let rounds = |size| saved_percent(m, TestedSystem::DpuMemcpy, TestedSystem::Host, size);
    Bar {
        number: "2",
        title: "Host CPU saved against the same code on the host, writes",
        definition: "1 − CPU time per write of the store's process (dpu) / CPU time per write of the node's one process (host).",
        rows: by_size(rounds, FigureFormat::Percent, [Bound::AtLeast(60.0); 4], None),
    }
}

fn node_cpu_against_ceph(m: &Measurements) -> Bar {
    let cpu = |config, size| m.rounds(&writes(config, size), |s| s.node_cpu_us_per_op);
    let rounds = |size| ratio(&cpu(TestedSystem::DpuMemcpy, size), &cpu(TestedSystem::Ceph, size));
    Bar {
        number: "3",
        title: "All CPU against Ceph's, writes",
        definition: "CPU time per write of the node's processes and its client, including emulated DMA / CPU time per write of the ceph-osd and its client. The CPU time of starting the clients is not counted.",
        rows: by_size(rounds, FigureFormat::Ratio, [Bound::AtMost(1.0); 4], None),
    }
}

fn write_throughput(m: &Measurements) -> Bar {
    let rate = |config, size| m.rounds(&writes(config, size), |s| s.iops);
    let rounds = |size| ratio(&rate(TestedSystem::DpuMemcpy, size), &rate(TestedSystem::Host, size));
    let paper = std::array::from_fn(|i| format!("{:.2}", paper::FIG10_DOCEPH[i] / paper::FIG10_BASELINE[i]));
    let bounds = [0.85, 0.92, 0.95, 0.95].map(Bound::AtLeast);
    Bar {
        number: "4",
        title: "Write throughput, dpu / host",
        definition: "Writes per second, 16 in flight.",
        rows: by_size(rounds, FigureFormat::Ratio, bounds, Some(paper)),
    }
}

fn latency_alone(m: &Measurements) -> Bar {
    let latency = |config| m.rounds(&writes(config, MIB).one_at_a_time(), |s| s.latency_us_mean);
    let more =
        paired(&latency(TestedSystem::DpuMemcpy), &latency(TestedSystem::Host), |d, h| 100.0 * (d / h - 1.0));
    let row =
        BarRow::new("1 MiB, one write at a time", more, FigureFormat::Percent, Some(Bound::AtMost(25.0)));
    Bar {
        number: "5",
        title: "Latency added by the DPU",
        definition: "Mean latency of writes, dpu / host − 1. The paper measured its value with 16 writes in flight.",
        rows: vec![row.beside("67 %")],
    }
}

fn dma_wait(m: &Measurements) -> Bar {
    let share = |s: &Sample| s.breakdown_us.map(|b| 100.0 * b.dma_wait / b.total);
    let row = |size: u64, bound| {
        let rounds = m.rounds_if(&writes(TestedSystem::DpuMemcpy, size), share);
        let column = paper::TABLE3[PAPER_SIZES.iter().position(|s| *s == size).unwrap_or(0)];
        let paper = format!("{:.1} %", 100.0 * column.dma_wait / column.total());
        BarRow::new(size_label(size), rounds, FigureFormat::Percent, bound).beside(paper)
    };
    let rows = PAPER_SIZES.map(|size| row(size, (size == MIB).then_some(Bound::AtMost(10.0))));
    Bar {
        number: "6a",
        title: "Share of DMA wait in the latency of writes, profile memcpy",
        definition: "Mean time that a write waits for the DMA engine / mean latency, 16 in flight.",
        rows: rows.to_vec(),
    }
}

fn serial_engine(m: &Measurements) -> Bar {
    let excess = |s: &Sample| {
        let b = s.breakdown_us?;
        let service_us = paper::dma_service_us(s.case.size);
        Some((b.dma + b.dma_wait) / serial_engine_bound_us(&b, service_us, s.case.in_flight))
    };
    let rounds = |config, size| m.rounds_if(&writes(config, size), excess);
    let serial = |size| rounds(TestedSystem::DpuBf3Serial, size);
    let mut rows = by_size(serial, FigureFormat::Ratio, [Bound::AtMost(1.15); 4], None);
    rows.extend(PAPER_SIZES.map(|size| {
        let name = format!("{}, bf3-paper", size_label(size));
        BarRow::new(name, rounds(TestedSystem::DpuBf3, size), FigureFormat::Ratio, None)
    }));
    Bar {
        number: "6b",
        title: "DMA and DMA wait compared with the lower bound of a serial engine, profiles bf3-serial and bf3-paper",
        definition: "(DMA + DMA wait) / max(S, N·S − Z). S is the engine's time for one write: 2.4 ms plus 0.38 ms per MB, a linear fit of table 3 of the DoCeph paper. \
                     N is the number of writes in flight, 16. Z is the time of a write outside the engine: mean latency − DMA − DMA wait. A serial engine completes at most one write per S. \
                     By Little's law, each of N writes in flight therefore takes at least N·S. A write spends the part of this time that is not Z at the engine, even with a perfect \
                     pipeline. The value 1 means that the engine is never idle while a write waits for it. A larger value means that the pipeline has gaps. With the profile bf3-paper, \
                     several writes share the fixed time of a chain, so the value can be smaller than 1. With the profile bf3-serial, each write has its own fixed time.",
        rows,
    }
}

/// Returns the smallest possible mean time, in µs, that a request spends at a serial engine and in
/// the engine's queue. If the engine limits the throughput of a closed loop of `in_flight`
/// requests, this time is `in_flight` times the service time of one request, minus the time that
/// the request spends elsewhere. Otherwise it is the service time.
#[must_use]
pub fn serial_engine_bound_us(b: &BenchBreakdown, service_us: f64, in_flight: u32) -> f64 {
    let elsewhere = b.total - b.dma - b.dma_wait;
    (f64::from(in_flight) * service_us - elsewhere).max(service_us)
}

fn read_throughput(m: &Measurements) -> Bar {
    let rate = |config, size| m.rounds(&Case::new(config, AccessMode::Read, size), |s| s.iops);
    let rounds = |size| ratio(&rate(TestedSystem::DpuMemcpy, size), &rate(TestedSystem::Host, size));
    Bar {
        number: "7",
        title: "Read throughput, dpu / host",
        definition: "Reads per second, 16 in flight. The paper has no results for reads, because it implements only writes.",
        rows: by_size(rounds, FigureFormat::Ratio, [Bound::AtLeast(0.90); 4], None),
    }
}

fn against_ceph(m: &Measurements) -> Bar {
    let row = |mode: AccessMode, size: u64, least: Option<f64>| {
        let rate = |config| m.rounds(&Case::new(config, mode, size), |s| s.iops);
        let rounds = ratio(&rate(TestedSystem::DpuMemcpy), &rate(TestedSystem::Ceph));
        BarRow::new(
            format!("{} {}", size_label(size), mode.name()),
            rounds,
            FigureFormat::Ratio,
            least.map(Bound::AtLeast),
        )
    };
    let large = |config| m.rounds(&Case::large_set(config), |s| s.iops);
    let of_large_set = ratio(&large(TestedSystem::DpuMemcpy), &large(TestedSystem::Ceph));
    Bar {
        number: "8",
        title: "Throughput against Ceph",
        definition: "Operations per second, dpu / Ceph, 16 in flight.",
        rows: vec![
            row(AccessMode::Write, 4096, Some(5.0)),
            row(AccessMode::Randread, 4096, Some(2.5)),
            row(AccessMode::Write, MIB, Some(2.0)),
            row(AccessMode::Write, 4 * MIB, Some(2.0)),
            row(AccessMode::Randread, 4 * MIB, None),
            BarRow::new("4 KiB randread, large set", of_large_set, FigureFormat::Ratio, None),
        ],
    }
}

fn against_drive(m: &Measurements) -> Bar {
    let drive = m.ceiling(CeilingKind::DriveWrite, 4 * MIB);
    let row = |config: TestedSystem, bound| {
        let rounds = ratio(&m.rounds(&writes(config, 4 * MIB), |s| s.mb_per_s), &drive);
        BarRow::new(format!("4 MiB, {}", config.label()), rounds, FigureFormat::Ratio, bound)
    };
    let bound = Some(Bound::AtLeast(0.80));
    Bar {
        number: "9",
        title: "Write throughput against the drive",
        definition: "Bytes per second / bytes per second of fio with O_DIRECT on the same drive, the better of depth 1 and 16.",
        rows: vec![
            row(TestedSystem::DpuMemcpy, bound),
            row(TestedSystem::Host, None),
            row(TestedSystem::Ceph, None),
        ],
    }
}

fn idle(m: &Measurements) -> Bar {
    let on_host = |process: &str| ["store", "node", "supervisor"].contains(&process);
    let row = |case: &str, rounds, bound| BarRow::new(case, rounds, FigureFormat::Percent, bound);
    Bar {
        number: "10",
        title: "Host CPU of an idle node",
        definition: "CPU in % of one core over 10 s without requests. The store (or the node's one process) and the supervisor run on the host.",
        rows: vec![
            row(
                "dpu: store and supervisor",
                m.idle(TestedSystem::DpuMemcpy, on_host),
                Some(Bound::AtMost(0.3)),
            ),
            row("dpu: osd, on the emulated DPU", m.idle(TestedSystem::DpuMemcpy, |p| p == "osd"), None),
            row("host: node and supervisor", m.idle(TestedSystem::Host, on_host), None),
            row("Ceph: OSD", m.idle(TestedSystem::Ceph, |p| p == "ceph-osd"), None),
            row("Ceph: mon and mgr", m.idle(TestedSystem::Ceph, |p| p != "ceph-osd"), None),
        ],
    }
}

/// Counts the rows that passed, failed and were not measured. Rows without a threshold do not
/// count.
#[must_use]
pub fn score(bars: &[Bar]) -> (usize, usize, usize) {
    let rows = || bars.iter().flat_map(|b| &b.rows).filter(|r| r.bound.is_some());
    let count = |verdict| rows().filter(|r| r.verdict == verdict).count();
    (count(BarVerdict::Pass), count(BarVerdict::Fail), count(BarVerdict::NotMeasured))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::plan::{self, PlanStep, Subjects};
    use crate::evaluation::sample::Ceiling;
    use crate::evaluation::settings::EvaluationSettings;

    fn breakdown(dma: f64, dma_wait: f64, elsewhere: f64) -> BenchBreakdown {
        BenchBreakdown {
            total: dma + dma_wait + elsewhere,
            host_write: elsewhere,
            dma,
            dma_wait,
            others: 0.0,
        }
    }

    #[test]
    fn the_time_at_a_saturated_engine_without_pauses_equals_the_lower_bound() {
        // 16 requests with a service time of 100 µs, which spend 400 µs elsewhere, take 1600 µs
        // each. They spend 1200 µs of this time at the engine.
        let b = breakdown(100.0, 1100.0, 400.0);
        assert_eq!(serial_engine_bound_us(&b, 100.0, 16), 1200.0);
    }

    #[test]
    fn the_time_at_an_engine_with_pauses_exceeds_the_lower_bound() {
        // The engine completes one write per 110 µs, although a write needs 100 µs. So 16 writes in
        // flight take 1760 µs each, of which 1360 µs pass at the engine.
        let b = breakdown(100.0, 1260.0, 400.0);
        assert!((b.dma + b.dma_wait) / serial_engine_bound_us(&b, 100.0, 16) > 1.1);
    }

    #[test]
    fn the_lower_bound_of_an_engine_that_is_no_bottleneck_is_its_service_time() {
        let b = breakdown(100.0, 5.0, 4000.0);
        assert_eq!(serial_engine_bound_us(&b, 100.0, 16), 100.0);
    }

    #[test]
    fn a_value_that_was_not_measured_neither_passes_nor_fails() {
        let bars = all(&Measurements::default());
        let (passed, failed, absent) = score(&bars);
        assert_eq!((passed, failed), (0, 0));
        assert!(absent > 20, "{absent}");
    }

    #[test]
    fn no_claim_of_the_report_depends_on_a_secondary_run() {
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        let cases: Vec<Case> = plan::round(&settings, &Subjects::all(), 1)
            .into_iter()
            .flat_map(|step| match step {
                PlanStep::Modes { config, size } => {
                    AccessMode::ALL.map(|mode| Case::new(config, mode, size)).into()
                }
                PlanStep::Run(case) => vec![case],
                PlanStep::CephLargeSet => vec![Case::large_set(TestedSystem::Ceph)],
                PlanStep::Drive { .. } | PlanStep::Machine | PlanStep::Idle => Vec::new(),
            })
            .collect();
        let of = |cases: &[&Case]| {
            let samples = cases.iter().map(|case| Sample {
                round: 1,
                case: (*case).clone(),
                ops: 1,
                mb_per_s: 1.0,
                iops: 1.0,
                latency_us_mean: 1.0,
                latency_us_p99: None,
                host_cpu_us_per_op: 1.0,
                node_cpu_us_per_op: 1.0,
                client_cpu_us_per_op: 1.0,
                user_us_per_op: 1.0,
                system_us_per_op: 1.0,
                wake_ups_per_op: 1.0,
                parts: std::collections::BTreeMap::new(),
                breakdown_us: Some(breakdown(1.0, 1.0, 1.0)),
            });
            let ceiling = Ceiling { round: 1, kind: CeilingKind::DriveWrite, size: 4 * MIB, mb_per_s: 1.0 };
            let found = Measurements {
                samples: samples.collect(),
                ceilings: vec![ceiling],
                ..Measurements::default()
            };
            let rows = all(&found).into_iter().flat_map(|bar| bar.rows);
            rows.filter(|row| row.verdict != BarVerdict::NotMeasured).count()
        };
        let main: Vec<&Case> = cases.iter().filter(|c| !c.is_secondary()).collect();
        assert!(main.len() < cases.len());
        assert_eq!(of(&main), of(&cases.iter().collect::<Vec<_>>()));
    }

    #[test]
    fn a_verdict_compares_the_median_of_the_rounds_with_the_threshold() {
        let row = |values: [f64; 3], bound| {
            BarRow::new("", (1..).zip(values).collect(), FigureFormat::Ratio, Some(bound)).verdict
        };
        assert_eq!(row([0.1, 0.9, 0.95], Bound::AtLeast(0.9)), BarVerdict::Pass);
        assert_eq!(row([0.1, 0.89, 0.95], Bound::AtLeast(0.9)), BarVerdict::Fail);
        assert_eq!(row([0.1, 1.0, 9.0], Bound::AtMost(1.0)), BarVerdict::Pass);
    }
}
