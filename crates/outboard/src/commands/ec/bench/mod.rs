//! `outboard ec bench`: how fast this machine codes.

mod coding;
mod experiment;
mod places;
mod write;

use clap::Args;
use ec::{Code, Geometry, KernelChoice};
use serde::Serialize;

use coding::CodingRates;
use experiment::PaperExperiment;
use write::Write;

use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;
use node::units::ByteSize;

/// Measure coding on one core of this machine
///
/// First encoding for storage: whole stripes in one buffer, parity into others, a CRC-32C of every 4 KiB of parity. Beside it,
/// in the same run and in turns, the bare ec_encode_data of ISA-L on fragments of the same size; "ratio" is the median of what the
/// write path reaches of that in the same round. Once on data that fits the second cache and once on data that fits none. "decode" makes
/// M lost data fragments anew; "update" changes the parity after a change of one data fragment.
///
/// Then what a node does to the data of a write: new objects of 2 and 4 MiB are cut into the ops of their fragments, parity and
/// checksums included, by the function that the node calls, with the kernel that "auto" stands for. Again beside ec_encode_data on
/// the same fragments.
///
/// Then the experiment of "Evaluation of Erasure Coding and Opportunistic Offloading Algorithms using DPU in Distributed
/// Storage Systems" (figure 2): files of some sizes in 128 data and 32 parity fragments, and what that takes in each place: on this
/// host; by a thread that stands for a core of a DPU; by the emulated accelerator, which computes for real, and takes as many
/// times as long as this host as that of the paper (13.3 times for 8 MB, 10.5 for 128 MB). At last what the accelerator makes of
/// 16 files that are handed over together. CPU of the threads that stand for the DPU is not counted as the host's.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard ec bench\n  \
    outboard ec bench --k 4 --m 2 --rounds 21 --json")]
pub struct EcBenchArgs {
    /// Data fragments; with --m, measures this code only [default: 4+2, 8+3, 10+4 and 128+32]
    #[arg(long, requires = "m")]
    k: Option<usize>,
    /// Parity fragments
    #[arg(long, requires = "k")]
    m: Option<usize>,
    /// Stripe unit, a multiple of 4KiB; less where stripes are to fit the cache
    #[arg(long, default_value = "64KiB", value_name = "S")]
    unit: ByteSize,
    /// File sizes of the experiment
    #[arg(long, value_delimiter = ',', default_value = "8MiB,16MiB,32MiB,64MiB,128MiB", value_name = "S,…")]
    sizes: Vec<ByteSize>,
    /// How often everything is measured; medians are shown
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// What computes in the write path: auto, gfni, isal or portable
    #[arg(long, default_value_t)]
    kernel: KernelChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The figures. The JSON form is a contract: fields stay, new ones may come.
#[derive(Serialize)]
struct EcBenchReport {
    /// What computes in the write path.
    kernel: &'static str,
    rounds: u32,
    /// Whether there is ISA-L to compare with.
    isal: bool,
    coding: Vec<CodingRates>,
    /// Cutting new objects into fragments, as a node does.
    write: Vec<Write>,
    experiment: PaperExperiment,
}

/// Runs the command.
pub fn run(args: EcBenchArgs) -> Result<()> {
    let doing = "measuring";
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
        let why = "--unit must be a multiple of 4KiB up to 4MiB, and --sizes between 1 byte and 1GiB";
        return Err(Failure::usage(doing, why));
    }
    if let Err(e) = KernelChoice::Isal.load() {
        output::note(format!("there is nothing to compare with: {e}"));
    }
    let progress = ProgressMeter::stream(doing);
    let coding = coding::measure(&geometries, kernel, unit, args.rounds, &progress).doing(doing)?;
    let write = write::measure(&geometries, unit, args.rounds, &progress)?;
    let code = Code::new(Geometry::new(128, 32).doing(doing)?, kernel);
    let sizes: Vec<u64> = args.sizes.iter().map(|size| size.0).collect();
    let experiment = experiment::measure(&code, &sizes, args.rounds, &progress)?;
    drop(progress);
    let isal = KernelChoice::Isal.load().is_ok();
    let report =
        EcBenchReport { kernel: kernel.name(), rounds: args.rounds, isal, coding, write, experiment };
    if args.json {
        output::json(&report);
    } else {
        output::line(format!("GB/s of data on one core; medians of {} rounds\n", args.rounds));
        output::raw(coding::table(&report.coding));
        output::line("\nwrites of new objects, cut into fragments as a node does\n");
        output::raw(write::table(&report.write));
        output::line("");
        output::raw(&report.experiment);
    }
    Ok(())
}

/// The one in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Bytes that look random.
fn noise(len: usize) -> Vec<u8> {
    use rand::{RngCore, SeedableRng, rngs::SmallRng};
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(1).fill_bytes(&mut bytes);
    bytes
}
