//! The result of a measurement of a disk.

use std::fmt;
use std::time::Duration;

use base::process::Usage;
use node::failure::Result;
use node::units::ByteSize;
use serde::Serialize;

use super::{DiskBenchArgs, DiskLayout, DiskWorkload, failed};
use crate::commands::bench::load::LoadResult;
use crate::commands::bench::record::OpRecord;
use crate::commands::bench::report::Latency;

/// What a round measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Blocks of the disk.
    Disk,
    /// Blocks within objects of the size of a chunk.
    Ranges,
    /// Whole objects of the size of a block.
    Whole,
}

impl Subject {
    /// All subjects, in the order of the report.
    pub const ALL: [Subject; 3] = [Subject::Disk, Subject::Ranges, Subject::Whole];

    /// Returns the name of the subject.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Disk => "disk",
            Subject::Ranges => "ranges",
            Subject::Whole => "whole",
        }
    }
}

/// The sum of the rounds of a subject.
#[derive(Debug, Default)]
pub struct SubjectSum {
    record: Option<OpRecord>,
    errors: u64,
    iops_by_round: Vec<f64>,
    cpu_ns: u64,
}

impl SubjectSum {
    /// Adds a round of `seconds` seconds.
    ///
    /// # Errors
    /// As for [`OpRecord::merge`].
    pub fn add(&mut self, result: LoadResult, seconds: f64, cpu: Usage) -> Result<()> {
        let mut round = result.reads;
        round.merge(&result.writes)?;
        self.iops_by_round.push(round.ops() as f64 / seconds);
        self.errors += result.errors;
        self.cpu_ns += cpu.cpu_ns;
        match &mut self.record {
            Some(record) => record.merge(&round)?,
            None => self.record = Some(round),
        }
        Ok(())
    }
}

/// What the snapshots during a measurement have cost.
#[derive(Debug, Default)]
pub struct SnapshotSum {
    /// Times of the snapshots, in milliseconds.
    took: Vec<f64>,
    /// The longest requests in the windows with and without a snapshot, in milliseconds.
    with: Vec<f64>,
    without: Vec<f64>,
}

impl SnapshotSum {
    /// Adds the longest requests of the windows of a round, and the windows with a snapshot and its time.
    pub fn add(&mut self, longest: &[Duration], taken: Vec<(usize, Duration)>) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        // The first window has first writes, and the last one may be short.
        for (window, longest) in longest.iter().enumerate().skip(1) {
            match taken.iter().any(|(at, _)| *at == window) {
                true => self.with.push(ms(*longest)),
                false => self.without.push(ms(*longest)),
            }
        }
        self.took.extend(taken.into_iter().map(|(_, took)| ms(took)));
    }
}

/// The medians of a [`SnapshotSum`].
#[derive(Debug, Serialize)]
struct SnapshotReport {
    count: usize,
    took_ms: f64,
    longest_with_ms: f64,
    longest_without_ms: f64,
}

/// The results of a measurement of a disk. The JSON form is stable: fields are never removed, but new
/// fields may be added.
#[derive(Debug, Serialize)]
pub struct DiskBenchReport {
    disk: String,
    workload: DiskWorkload,
    block_size: u64,
    depth: u32,
    /// Used part of the disk, in bytes.
    span: u64,
    chunk: u64,
    rounds: u32,
    /// Duration of each measurement.
    seconds: u32,
    subjects: SubjectReports,
    ratios: SubjectRatios,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshots: Option<SnapshotReport>,
}

/// The results of the subjects.
#[derive(Debug, Serialize)]
struct SubjectReports {
    disk: SubjectReport,
    ranges: SubjectReport,
    whole: SubjectReport,
}

/// The figures of the disk, divided by those of the objects.
#[derive(Debug, Serialize)]
struct SubjectRatios {
    ranges: Ratios,
    whole: Ratios,
}

/// The result of one subject.
#[derive(Debug, Serialize)]
struct SubjectReport {
    ops: u64,
    errors: u64,
    /// Median of the rounds.
    iops: f64,
    iops_by_round: Vec<f64>,
    /// Throughput in 10^6 bytes per second, from the median of the rounds.
    mb_per_s: f64,
    /// Latency of all rounds together.
    latency_us: Latency,
    /// CPU time of this process.
    client_cpu_us_per_op: f64,
}

/// The figures of a disk, divided by those of a subject; `None` for a division by zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Ratios {
    iops: Option<f64>,
    p50: Option<f64>,
    p99: Option<f64>,
    client_cpu: Option<f64>,
}

impl DiskBenchReport {
    /// Computes the results.
    ///
    /// # Errors
    /// If a subject has no operation that succeeded.
    pub fn new(
        args: &DiskBenchArgs,
        layout: DiskLayout,
        sums: [SubjectSum; 3],
        snapshots: &SnapshotSum,
    ) -> Result<DiskBenchReport> {
        let report = |sum, subject: Subject| {
            SubjectReport::new(sum, layout.block).ok_or_else(|| {
                let why =
                    "no operation succeeded, or the measurement was too short; messages above state errors";
                failed(args, format!("{}: {why}", subject.name()))
            })
        };
        let [disk, ranges, whole] = sums;
        let subjects = SubjectReports {
            disk: report(disk, Subject::Disk)?,
            ranges: report(ranges, Subject::Ranges)?,
            whole: report(whole, Subject::Whole)?,
        };
        let ratios = SubjectRatios {
            ranges: Ratios::new(&subjects.disk, &subjects.ranges),
            whole: Ratios::new(&subjects.disk, &subjects.whole),
        };
        Ok(DiskBenchReport {
            disk: args.disk.to_string(),
            workload: args.workload,
            block_size: layout.block,
            depth: args.depth,
            span: layout.span,
            chunk: layout.chunk,
            rounds: args.rounds,
            seconds: args.seconds,
            subjects,
            ratios,
            snapshots: (!snapshots.took.is_empty()).then(|| SnapshotReport {
                count: snapshots.took.len(),
                took_ms: median(&snapshots.took),
                longest_with_ms: median(&snapshots.with),
                longest_without_ms: median(&snapshots.without),
            }),
        })
    }
}

impl SubjectReport {
    fn new(sum: SubjectSum, block: u64) -> Option<SubjectReport> {
        let record = sum.record.filter(|record| record.ops() > 0)?;
        let iops = median(&sum.iops_by_round);
        Some(SubjectReport {
            ops: record.ops(),
            errors: sum.errors,
            iops,
            iops_by_round: sum.iops_by_round,
            mb_per_s: iops * block as f64 / 1e6,
            latency_us: Latency::of(record.latency()),
            client_cpu_us_per_op: sum.cpu_ns as f64 / 1e3 / record.ops() as f64,
        })
    }
}

impl Ratios {
    fn new(disk: &SubjectReport, other: &SubjectReport) -> Ratios {
        let ratio = |of: fn(&SubjectReport) -> f64| {
            let ratio = of(disk) / of(other);
            ratio.is_finite().then_some(ratio)
        };
        Ratios {
            iops: ratio(|report| report.iops),
            p50: ratio(|report| report.latency_us.p50),
            p99: ratio(|report| report.latency_us.p99),
            client_cpu: ratio(|report| report.client_cpu_us_per_op),
        }
    }
}

/// Returns the median; of an even number of values, the mean of the two in the middle. 0 without values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

impl fmt::Display for DiskBenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (block, chunk) = (ByteSize(self.block_size), ByteSize(self.chunk));
        writeln!(
            f,
            "{:?} of {block} on disk {}, {} in flight, {} of the disk in chunks of {chunk}, {} rounds of {} s",
            self.workload,
            self.disk,
            self.depth,
            ByteSize(self.span),
            self.rounds,
            self.seconds
        )?;
        let names =
            ["disk".to_owned(), format!("ranges of {chunk} objects"), format!("whole {block} objects")];
        let SubjectReports { disk, ranges, whole } = &self.subjects;
        let width = names.iter().map(String::len).max().unwrap_or(0);
        let heads = ["op/s", "MB/s", "p50 µs", "p99 µs", "max µs", "CPU µs/op", "errors"];
        write!(f, "  {:width$}", "")?;
        heads.iter().try_for_each(|head| write!(f, " {head:>10}"))?;
        writeln!(f)?;
        for (name, report) in names.iter().zip([disk, ranges, whole]) {
            let latency = &report.latency_us;
            writeln!(
                f,
                "  {name:width$} {:>10.0} {:>10.1} {:>10.0} {:>10.0} {:>10.0} {:>10.1} {:>10}",
                report.iops,
                report.mb_per_s,
                latency.p50,
                latency.p99,
                latency.max,
                report.client_cpu_us_per_op,
                report.errors
            )?;
        }
        for (name, ratios) in names[1..].iter().zip([self.ratios.ranges, self.ratios.whole]) {
            let Ratios { iops, p50, p99, client_cpu } = ratios;
            let known =
                |ratio: Option<f64>| ratio.map_or("unknown".to_owned(), |ratio| format!("{ratio:.2}"));
            let [iops, p50, p99, cpu] = [iops, p50, p99, client_cpu].map(known);
            writeln!(f, "  disk / {name}: op/s {iops}   p50 {p50}   p99 {p99}   CPU {cpu}")?;
        }
        if let Some(snapshots) = &self.snapshots {
            let SnapshotReport { count, took_ms, longest_with_ms, longest_without_ms } = snapshots;
            writeln!(
                f,
                "  {count} snapshots of {took_ms:.1} ms; longest request of half a second with one {longest_with_ms:.1} \
                 ms, without {longest_without_ms:.1} ms (medians)"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn sum(rounds: &[(u64, Duration)]) -> SubjectSum {
        let mut sum = SubjectSum::default();
        for (ops, latency) in rounds {
            let mut result = LoadResult::new().unwrap();
            (0..*ops).for_each(|_| result.writes.complete(MS, *latency));
            sum.add(result, 1.0, Usage { cpu_ns: 1000 * ops, ..Usage::default() }).unwrap();
        }
        sum
    }

    #[test]
    fn ratios_divide_the_medians_of_the_disk_by_those_of_the_objects() {
        let disk = SubjectReport::new(sum(&[(10, 4 * MS), (30, 4 * MS), (20, 4 * MS)]), 4096).unwrap();
        let other = SubjectReport::new(sum(&[(40, 2 * MS), (40, 2 * MS)]), 4096).unwrap();
        assert_eq!((disk.iops, disk.ops, disk.client_cpu_us_per_op), (20.0, 60, 1.0));
        assert_eq!(disk.iops_by_round, [10.0, 30.0, 20.0]);
        let ratios = Ratios::new(&disk, &other);
        assert_eq!((ratios.iops, ratios.client_cpu), (Some(0.5), Some(1.0)));
        assert!((ratios.p50.unwrap() - 2.0).abs() < 0.01, "{ratios:?}");
        assert_eq!(median(&[1.0, 2.0]), 1.5);
    }

    #[test]
    fn a_subject_without_operations_has_no_result() {
        assert!(SubjectReport::new(SubjectSum::default(), 512).is_none());
        assert!(SubjectReport::new(sum(&[(0, MS)]), 512).is_none());
    }
}
