//! `outboard bench disk`: measures a virtual disk beside objects of equal size.

mod load;
mod measure;
mod report;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{BenchArgs, Workload, load::PREPARED_IN_FLIGHT};
use crate::args::NodeArgs;
use crate::commands::disk::names::DiskPath;
use crate::commands::{options, session};
use crate::output;
use node::failure::{Failure, Result};
use node::units::ByteSize;

/// Default of the part of the disk that is used, in bytes.
const SPAN_DEFAULT: u64 = 1 << 30;
/// Maximum number of whole objects of the size of a block.
const OBJECTS_MAX: u64 = 16_384;

/// The measured requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskWorkload {
    /// Write blocks one after the other
    Seqwrite,
    /// Write blocks in random order
    Randwrite,
    /// Read blocks in random order
    Randread,
    /// Read and write blocks in random order, half of each
    Mix,
    /// Write blocks in random order within one chunk; the objects beside it are those of one chunk
    HotChunk,
    /// Write one block to each chunk of a new clone, which makes the clone's copy of the chunk
    CloneFirstWrite,
    /// Write blocks in random order while a snapshot is taken every second
    Snapshots,
}

/// Measure a virtual disk beside objects of equal size
///
/// This process attaches the disk, and executes the requests without a guest or a network front end. The
/// measurement OVERWRITES the disk: use a disk without data of value. Before it starts, it writes the used part
/// of the disk (--span), so that writes overwrite.
///
/// Each round measures three subjects, one after the other, with the same block size and number of requests in
/// flight: "disk" is blocks of the disk; "ranges" is blocks within objects of the size of a chunk, and "whole" is
/// whole objects of the size of a block, both over the object API.
///
/// Rounds begin with different subjects, so that a drift of the machine affects all of them. The objects are
/// called bench-SIZE-N, as those of the other benchmarks, and remain in the pool. In the workload
/// clone-first-write, each round makes a clone of a snapshot of the disk, and a subject "disk" ends when each of
/// its chunks has been written; the objects are overwritten at random. In the workload snapshots, the longest
/// request of each half second with a snapshot is compared with those of the others; the snapshots are removed
/// after each round.
///
/// "op/s" is the median of the rounds. Latencies are those of all rounds together, measured in this program.
/// "CPU" is the CPU time of this process per operation. The ratios divide the figures of the disk by those of
/// the objects.
///
/// Ctrl-C ends the measurement without a result, and detaches the disk.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard bench disk vms/test --workload randwrite --block 4KiB --depth 16 --seconds 10\n  \
    outboard bench disk vms/test --workload clone-first-write --json\n\n\
    With --json, prints \"disk\", \"workload\", \"block_size\", \"depth\", \"span\", \"chunk\", \"rounds\", \
    \"seconds\" of a measurement; \"subjects\" with \"disk\", \"ranges\" and \"whole\", each with \"ops\", \
    \"errors\", \"iops\", \"iops_by_round\", \"mb_per_s\", \"latency_us\" (\"mean\", \"p50\", \"p99\", \"p999\", \
    \"max\") and \"client_cpu_us_per_op\"; and \"ratios\" of the disk to \"ranges\" and \"whole\", each with \
    \"iops\", \"p50\", \"p99\" and \"client_cpu\". A ratio to zero is null. The workload snapshots adds \
    \"snapshots\" with \"count\", and the medians \"took_ms\" of the snapshots, \"longest_with_ms\" and \
    \"longest_without_ms\" of the longest requests.")]
pub struct DiskBenchArgs {
    /// Disk to overwrite, written POOL/DISK
    pub disk: DiskPath,
    /// Requests to measure
    #[arg(long, value_enum, default_value_t = DiskWorkload::Randwrite)]
    pub workload: DiskWorkload,
    /// Number of bytes that a request reads or writes: a multiple of 512 bytes that divides a chunk
    #[arg(long, default_value = "4KiB", value_name = "SIZE")]
    pub block: ByteSize,
    /// Number of requests in flight
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub depth: u32,
    /// Duration of each measurement in seconds; each round has three
    #[arg(long, default_value_t = 10, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Number of rounds
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Part of the disk that is used, from its start [default: the disk, at most 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub span: Option<ByteSize>,
    /// Take the disk over if it is attached elsewhere; requests there fail from then on
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Sizes of a measurement, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DiskLayout {
    block: u64,
    chunk: u64,
    /// Used part of the disk: a multiple of `chunk`.
    span: u64,
}

impl DiskLayout {
    /// Returns the sizes of a measurement of a disk of `size` bytes.
    ///
    /// # Errors
    /// If blocks do not divide chunks, or if the disk has not a whole chunk.
    fn new(args: &DiskBenchArgs, size: u64, chunk: u64) -> Result<DiskLayout, String> {
        let block = args.block.0;
        if block == 0 || !block.is_multiple_of(disk::BLOCK) || !chunk.is_multiple_of(block) {
            return Err(format!(
                "chunks of {} do not consist of blocks of {}; choose another --block",
                ByteSize(chunk),
                args.block
            ));
        }
        let span = args.span.map_or(size.min(SPAN_DEFAULT), |span| span.0) / chunk * chunk;
        if span == 0 || span > size {
            return Err(format!(
                "the disk has {}, and the measurement needs whole chunks of {} within it; choose another --span or disk",
                ByteSize(size),
                ByteSize(chunk)
            ));
        }
        Ok(DiskLayout { block, chunk, span })
    }
}

impl DiskBenchArgs {
    /// Returns the equal load on objects: on blocks of objects of the size of a chunk, or on whole objects of
    /// the size of a block.
    fn on_objects(&self, layout: DiskLayout, are_whole: bool) -> BenchArgs {
        let DiskLayout { block, chunk, span } = layout;
        let span = if self.workload == DiskWorkload::HotChunk { chunk } else { span };
        BenchArgs {
            workload: match self.workload {
                DiskWorkload::Seqwrite => Workload::Write,
                DiskWorkload::Randwrite
                | DiskWorkload::HotChunk
                | DiskWorkload::CloneFirstWrite
                | DiskWorkload::Snapshots => Workload::Randwrite,
                DiskWorkload::Randread => Workload::Randread,
                DiskWorkload::Mix => Workload::Randrw,
            },
            pool: self.disk.pool.clone(),
            object_size: ByteSize(if are_whole { block } else { chunk }),
            block_size: (!are_whole).then_some(ByteSize(block)),
            in_flight: self.depth,
            seconds: self.seconds,
            objects: Some(if are_whole { (span / block).min(OBJECTS_MAX) } else { span / chunk }),
            clients: 1,
            rate: None,
            reads: 50,
            json: false,
            announce: false,
        }
    }
}

/// Runs the command.
pub fn run(args: DiskBenchArgs, node: &NodeArgs) -> Result<()> {
    let requests_in_flight = PREPARED_IN_FLIGHT.max(args.depth as usize);
    let options = client::Options { requests_in_flight, ..options() };
    let json = args.json;
    let report = session::run_as_owner(node, options, async move |client, sessions| {
        measure::measure(&client, sessions, args).await
    });
    let report = report?.or_exit();
    if json {
        output::json(&report);
    } else {
        output::raw(&report);
    }
    Ok(())
}

/// The failure of a measurement.
fn failed(args: &DiskBenchArgs, why: impl std::fmt::Display) -> Failure {
    Failure::new(format!("measuring disk {}", args.disk), why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn args(workload: DiskWorkload) -> DiskBenchArgs {
        DiskBenchArgs {
            disk: "p/vm".parse().unwrap(),
            workload,
            block: ByteSize(4096),
            depth: 2,
            seconds: 1,
            rounds: 1,
            span: None,
            force: false,
            json: false,
        }
    }

    #[test]
    fn the_objects_have_the_size_of_the_used_part_of_the_disk() {
        let layout = DiskLayout::new(&args(DiskWorkload::Mix), 9 * MIB + 512, 4 * MIB).unwrap();
        assert_eq!(layout, DiskLayout { block: 4096, chunk: 4 * MIB, span: 8 * MIB });
        let objects = |workload, are_whole| {
            let on_objects = args(workload).on_objects(layout, are_whole);
            (on_objects.workload, on_objects.object_size.0, on_objects.block_bytes(), on_objects.objects)
        };
        assert_eq!(objects(DiskWorkload::Mix, false), (Workload::Randrw, 4 * MIB, 4096, Some(2)));
        assert_eq!(objects(DiskWorkload::Mix, true), (Workload::Randrw, 4096, 4096, Some(2048)));
        assert_eq!(objects(DiskWorkload::HotChunk, false), (Workload::Randwrite, 4 * MIB, 4096, Some(1)));
        assert_eq!(objects(DiskWorkload::HotChunk, true), (Workload::Randwrite, 4096, 4096, Some(1024)));
        assert_eq!(objects(DiskWorkload::Seqwrite, true).0, Workload::Write);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (block, span, size) in [
            (0, None, MIB),
            (1000, None, MIB),
            (3 * 512, None, MIB),
            (2 * MIB, None, MIB),
            (4096, None, 512),
            (4096, Some(2 * MIB), MIB),
        ] {
            let args = DiskBenchArgs {
                block: ByteSize(block),
                span: span.map(ByteSize),
                ..args(DiskWorkload::Randwrite)
            };
            assert!(DiskLayout::new(&args, size, MIB).is_err(), "{block} {span:?} {size}");
        }
    }
}
