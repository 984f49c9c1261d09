//! `outboard bench`: runs a closed loop or a fixed rate of operations on one pool, and reports their
//! throughput over time, latency, and CPU time by process and thread class. `outboard bench disk` compares
//! a virtual disk with objects.

mod accounting;
mod breakdown;
mod clients;
mod disk;
mod entries;
mod load;
mod record;
mod report;
mod schedule;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Failure, Result};
use node::units::ByteSize;
use wire::limits::MAX_OMAP_VALUE;

/// Exit status after Ctrl-C during the measurement. A shell reports the same status for a command that
/// SIGINT has ended.
const EXIT_INTERRUPTED: i32 = 130;

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Write whole objects sequentially, again and again
    Write,
    /// Read whole objects sequentially
    Read,
    /// Read whole objects in random order
    Randread,
    /// Write whole objects in random order
    Randwrite,
    /// Read and write whole objects in random order
    Randrw,
    /// Change entries of the objects' omaps, each on condition of its old value
    Omap,
}

// What `outboard bench` measures: objects, or a virtual disk. A doc comment would replace the help text of
// `BenchArgs`.
#[derive(Debug, Args)]
#[command(subcommand_negates_reqs = true)]
pub struct BenchCommand {
    #[command(subcommand)]
    subject: Option<BenchSubject>,
    #[command(flatten)]
    objects: Option<BenchArgs>,
}

/// What `outboard bench` measures instead of objects.
#[derive(Debug, Subcommand)]
enum BenchSubject {
    Disk(disk::DiskBenchArgs),
}

/// Measure throughput, latency and CPU per operation
///
/// Keeps a fixed number of operations in flight for the given time. The objects are called
/// bench-SIZE-N. All workloads except write first write the objects that are missing.
///
/// With --block-size, each operation reads or writes one block of this size inside an object,
/// instead of a whole object. With --objects 1, all operations meet on one object.
///
/// The workload omap changes entries of the objects bench-omap-N. Each operation has the condition
/// that the entry still has the value of the last operation on it, and --object-size is the size of
/// a value. At the end, this program checks that the entries have their last values, so that each
/// change has taken effect exactly once.
///
/// With --rate, operations are due at equal intervals. The latency of an operation counts from the
/// moment at which it is due, also if too many earlier operations are in flight. The latency thus
/// includes stalls of the node, and of this program, that a closed loop hides. It excludes the first
/// 2 ms of delay of the timer that wakes this program for an operation. Operations that were due and
/// could not be started before the end are reported; their latency counts up to the end. The latency
/// of a failed operation counts up to the failure; without --rate, failed operations have no latency.
///
/// "in the worst second" is the smallest number of operations that completed in one of the seconds
/// of the measurement. "longest pause" is the longest time without a completed operation, rounded
/// down to 10 ms. A pause at the end of the measurement counts up to the next completion.
///
/// Ctrl-C ends the measurement: this program waits for the operations in flight, and prints what it
/// has measured. The exit status is then 130. A second Ctrl-C ends this program at once.
///
/// Latency is measured in this program. Below the latency, the output divides the osd's part of it
/// into phases: in "host write" the store worked (wrote or read); in "dma" a transfer was in
/// progress; in "dma wait" a transfer was queued; "others" is the rest. Each moment counts for one
/// phase only, in this order of precedence: dma, host write, dma wait. So the phases add up to the
/// total. Requests of other clients in the same period count too.
///
/// Host CPU is the CPU time of the store process (dpu placement) or of the node's only process
/// (host placement). Node CPU is the sum over all processes, including this process and emulated
/// hardware. The node reports the use of its processes, which may run on other machines. If a
/// process does not report it, the figure is unknown (null with --json). The supervisor counts only
/// if it runs on this machine and --endpoint is not given.
///
/// CPU and context switches are shown by process and thread class. Connections (msgr) and, on a
/// DPU, the channel's software (chan) share the osd's thread. On the host, the channel's software
/// and the store share a thread. The CPU time of a shared thread is divided among its classes in
/// proportion to the time in their tasks; this is an estimate and is marked as one. The context
/// switches of a shared thread cannot be divided: all of them count for osd, or for chan on the
/// host. "polls" counts how often tasks of a class ran, and "wake-ups" how often a task of the class
/// was the first to run after its thread had waited. For a process, "wake-ups" counts how often one
/// of its threads slept.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard bench write --pool p --object-size 4MiB --in-flight 16 --seconds 10\n  \
    outboard bench randread --pool p --object-size 4KiB --in-flight 16 --seconds 10 --json\n  \
    outboard bench randwrite --pool p --block-size 4KiB --objects 1\n  \
    outboard bench omap --pool p --object-size 100B --objects 1\n  \
    outboard bench randrw --reads 70 --pool p --object-size 4KiB --objects 1000000 --rate 5000\n  \
    outboard bench disk vms/test --workload randwrite")]
pub struct BenchArgs {
    /// Operation to measure
    #[arg(value_enum)]
    workload: Workload,
    /// Pool: POOL[:NAMESPACE]
    #[arg(long, value_name = "P")]
    pool: String,
    /// Size of each object
    #[arg(long, default_value = "4MiB", value_name = "S")]
    pub object_size: ByteSize,
    /// Size of the block that an operation reads or writes [default: the whole object]
    #[arg(long, value_name = "S")]
    pub block_size: Option<ByteSize>,
    /// Number of operations in flight, over all clients
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub in_flight: u32,
    /// Duration of the measurement in seconds
    #[arg(long, default_value_t = 10, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Number of objects [default: enough for 1 GiB, between 64 and 16384]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub objects: Option<u64>,
    /// Number of clients, each with its own connection and thread
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub clients: u32,
    /// Start this many operations per second, instead of one whenever another has completed
    #[arg(long, value_name = "OPS", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub rate: Option<u32>,
    /// Percentage of reads in the workload randrw
    #[arg(long, default_value_t = 50, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub reads: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print a line on standard error when the objects are prepared and the measurement starts
    #[arg(long)]
    pub announce: bool,
}

impl BenchArgs {
    fn object_count(&self) -> u64 {
        self.objects.unwrap_or_else(|| ((1 << 30) / self.object_size.0.max(1)).clamp(64, 16_384))
    }

    /// Number of bytes that one operation reads or writes.
    fn block_bytes(&self) -> u64 {
        self.block_size.unwrap_or(self.object_size).0
    }

    fn duration(&self) -> Duration {
        Duration::from_secs(u64::from(self.seconds))
    }

    /// Number of operations that the client with number `number` keeps in flight.
    fn in_flight_of(&self, number: u32) -> u32 {
        self.in_flight / self.clients + u32::from(number < self.in_flight % self.clients)
    }

    fn check(&self) -> Result<()> {
        if self.object_size.0 > 128 << 20 {
            return Err(Failure::usage(
                "measuring",
                "objects above 128 MiB are striped; choose a smaller --object-size",
            ));
        }
        let block = self.block_bytes();
        if block == 0 || !self.object_size.0.is_multiple_of(block) {
            return Err(Failure::usage(
                "measuring",
                format!(
                    "objects of {} bytes do not consist of blocks of {block} bytes; choose another --block-size",
                    self.object_size.0
                ),
            ));
        }
        if self.workload == Workload::Omap && (self.block_size.is_some() || block > MAX_OMAP_VALUE as u64) {
            return Err(Failure::usage(
                "measuring",
                format!(
                    "values of an omap have at most {MAX_OMAP_VALUE} bytes; choose a smaller --object-size, without --block-size"
                ),
            ));
        }
        if self.clients > self.in_flight {
            return Err(Failure::usage(
                "measuring",
                format!(
                    "{} clients need more than {} operations in flight; raise --in-flight, or lower --clients",
                    self.clients, self.in_flight
                ),
            ));
        }
        Ok(())
    }
}

/// Runs the command.
pub fn run(command: BenchCommand, node: &NodeArgs) -> Result<()> {
    match command {
        BenchCommand { subject: None, objects: Some(args) } => measure_objects(args, node),
        BenchCommand { subject: Some(BenchSubject::Disk(args)), objects: None } => disk::run(args, node),
        _ => {
            let why = "name either a workload on objects, or `disk`; flags of a measurement follow its name";
            Err(Failure::usage("measuring", why))
        }
    }
}

fn measure_objects(args: BenchArgs, node: &NodeArgs) -> Result<()> {
    args.check()?;
    let supervisor = accounting::LocalSupervisor::of(node);
    let requests_in_flight = load::PREPARED_IN_FLIGHT.max(args.in_flight as usize);
    let options = client::Options { requests_in_flight, ..super::options() };
    let shared = Arc::new(load::SharedLoad::new(&args)?);
    let (others, threads) = clients::FurtherClients::start(&args, node, &options, &shared)?;
    let json = args.json;
    let report = session::run(node, options, async move |client| {
        clients::measure(&client, &args, supervisor, &shared, others).await
    });
    for thread in threads {
        thread.join().map_err(|_| Failure::new("measuring", "a client panicked; this is a bug"))?;
    }
    let report = report?;
    if json {
        output::json(&report);
    } else {
        output::raw(&report);
    }
    if report.interrupted {
        std::process::exit(EXIT_INTERRUPTED);
    }
    Ok(())
}

#[cfg(test)]
impl BenchArgs {
    /// Arguments of a test: 10 objects of 4 KiB in the pool `p`, and one operation in flight for a second.
    fn of(workload: Workload) -> BenchArgs {
        BenchArgs {
            workload,
            pool: "p".to_owned(),
            object_size: ByteSize(4096),
            block_size: None,
            in_flight: 1,
            seconds: 1,
            objects: Some(10),
            clients: 1,
            rate: None,
            reads: 50,
            json: false,
            announce: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parsed(line: &str) -> Result<BenchCommand, clap::Error> {
        match Cli::try_parse_from(line.split(' '))?.command {
            Command::Bench(command) => Ok(command),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn bench_measures_objects_or_a_disk() {
        let objects = parsed("outboard bench write --pool p --in-flight 3").unwrap();
        assert!(objects.subject.is_none() && objects.objects.is_some_and(|args| args.in_flight == 3));
        for line in
            ["outboard bench disk p/vm", "outboard --dir d bench disk p/vm --workload hot-chunk --block 8KiB"]
        {
            let disk = parsed(line).unwrap();
            assert!(disk.subject.is_some() && disk.objects.is_none(), "{line}: {disk:?}");
        }
        for line in [
            "outboard bench",
            "outboard bench write",
            "outboard bench --pool p",
            "outboard bench disk",
            "outboard bench disk p/vm@s",
            "outboard bench disk p/vm --workload backwards",
        ] {
            assert_eq!(parsed(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
