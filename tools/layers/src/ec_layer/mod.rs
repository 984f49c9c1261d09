//! `outboard-layers ec`: measures the speed of erasure coding on this machine.

mod coding;
mod experiment;
mod handover;
mod places;
mod write;

use clap::Args;
use ec::{Code, Geometry, KernelChoice};
use serde::Serialize;

use coding::CodingRates;
use experiment::PaperExperiment;
use handover::Handover;
use write::Write;

use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;
use node::units::ByteSize;

/// Measure coding on one core of this machine
///
/// The first part measures encoding for storage (the "write path"): whole stripes in one buffer,
/// parity in other buffers, and a CRC-32C of every 4 KiB of parity. For comparison, ISA-L's
/// ec_encode_data encodes fragments of the same size without checksums. The two run in alternation.
/// "ratio" is the median over rounds of the write path's rate divided by the rate of ec_encode_data
/// in the same round. In one series the data fits into the second-level cache, and in the other
/// series the data exceeds every cache. "decode" reconstructs M lost data fragments. "update"
/// changes the parity after a change of one data fragment.
///
/// The second part measures how fast a node processes the data of a write. The node's own function
/// cuts new objects of 2 and 4 MiB into the operations for their fragments, with parity and
/// checksums, using the kernel that "auto" selects. The result is compared with ec_encode_data on
/// the same fragments.
///
/// The third part compares two ways of reconstructing a fragment, and of changing parity after a
/// change of one data fragment: "in place" on the osd's thread, or "handed over" to a coding thread.
///
/// The fourth part is the experiment of "Evaluation of Erasure Coding and Opportunistic Offloading
/// Algorithms using DPU in Distributed Storage Systems" (figure 2). It encodes files of some sizes
/// into 128 data and 32 parity fragments in three places: on this host; on a thread that emulates a
/// core of a DPU; and on the emulated accelerator. The accelerator computes real parity, and its
/// time is this host's time multiplied by the paper's ratio (13.3 for 8 MB, 10.5 for 128 MB).
/// Finally, 16 files are submitted to the accelerator together. CPU time of the threads that
/// emulate the DPU does not count as CPU time of the host.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard-layers ec\n  \
    outboard-layers ec --k 4 --m 2 --rounds 21 --json")]
pub struct EcArgs {
    /// Number of data fragments; with --m, measures this code only [default: 4+2, 8+3, 10+4 and
    /// 128+32]
    #[arg(long, requires = "m")]
    k: Option<usize>,
    /// Number of parity fragments
    #[arg(long, requires = "k")]
    m: Option<usize>,
    /// Stripe unit, a multiple of 4KiB; smaller in the series whose data fits into the cache
    #[arg(long, default_value = "64KiB", value_name = "S")]
    unit: ByteSize,
    /// File sizes of the experiment
    #[arg(long, value_delimiter = ',', default_value = "8MiB,16MiB,32MiB,64MiB,128MiB", value_name = "S,…")]
    sizes: Vec<ByteSize>,
    /// Number of rounds; the output shows medians
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Kernel of the write path: auto, gfni, isal or portable
    #[arg(long, default_value_t)]
    kernel: KernelChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The results. The JSON form is stable: fields are never removed, but new fields may be added.
#[derive(Serialize)]
struct EcReport {
    /// Kernel of the write path.
    kernel: &'static str,
    rounds: u32,
    /// Whether ISA-L is available for comparison.
    isal: bool,
    coding: Vec<CodingRates>,
    /// Results of cutting new objects into fragments as a node does.
    write: Vec<Write>,
    /// Tasks in place and on a coding thread.
    handover: Vec<Handover>,
    experiment: PaperExperiment,
}

/// Runs the command.
pub fn run(args: EcArgs) -> Result<()> {
    let doing = "measuring erasure coding";
    let kernel = args.kernel.load().doing(doing)?;
    let geometries = match (args.k, args.m) {
        (Some(k), Some(m)) => vec![Geometry::new(k, m)],
        _ => [(4, 2), (8, 3), (10, 4), (128, 32)].map(|(k, m)| Geometry::new(k, m)).to_vec(),
    };
    let geometries = geometries.into_iter().collect::<Result<Vec<_>, _>>();
    let geometries = geometries.map_err(|e| Failure::usage(doing, e))?;
    let unit = usize::try_from(args.unit.0).unwrap_or(usize::MAX);
    let possible =
        unit > 0 && unit <= ec::fragments::UNIT_MAX && unit.is_multiple_of(base::block::BLOCK_SIZE);
    if !possible || args.sizes.iter().any(|size| !(1..=1 << 30).contains(&size.0)) {
        let why = "--unit must be a multiple of 4KiB up to 4MiB, and each of --sizes from 1 byte to 1GiB";
        return Err(Failure::usage(doing, why));
    }
    if let Err(e) = KernelChoice::Isal.load() {
        output::note(format!("the comparison with ISA-L's ec_encode_data is omitted: {e}"));
    }
    let progress = ProgressMeter::stream(doing);
    let coding = coding::measure(&geometries, kernel, unit, args.rounds, &progress).doing(doing)?;
    let write = write::measure(&geometries, unit, args.rounds, &progress)?;
    let handover = handover::measure(args.rounds, &progress)?;
    let code = Code::new(Geometry::new(128, 32).doing(doing)?, kernel);
    let sizes: Vec<u64> = args.sizes.iter().map(|size| size.0).collect();
    let experiment = experiment::measure(&code, &sizes, args.rounds, &progress)?;
    drop(progress);
    let isal = KernelChoice::Isal.load().is_ok();
    let report =
        EcReport { kernel: kernel.name(), rounds: args.rounds, isal, coding, write, handover, experiment };
    if args.json {
        output::json(&report);
    } else {
        output::line(format!("GB/s of data on one core; medians of {} rounds\n", args.rounds));
        output::raw(coding::table(&report.coding));
        output::line("\nwrites of new objects, cut into fragments as a node does\n");
        output::raw(write::table(&report.write));
        output::line("\nreconstructions and changes, 4+2: in place or on a coding thread\n");
        output::raw(handover::table(&report.handover));
        output::line("");
        output::raw(&report.experiment);
    }
    Ok(())
}

/// Returns the median.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns pseudo-random bytes.
fn noise(len: usize) -> Vec<u8> {
    use rand::{RngCore, SeedableRng, rngs::SmallRng};
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(1).fill_bytes(&mut bytes);
    bytes
}
