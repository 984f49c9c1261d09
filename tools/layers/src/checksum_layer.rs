//! `outboard-layers checksums`: measures what the verification of data costs, beside the CRC-32C
//! alone.

use std::fmt::Write as _;
use std::time::Instant;

use base::block::{BLOCK_SIZE, Payload, crc32c, piece_checksums};
use bytes::Bytes;
use clap::Args;
use ec::{CheckedUnit, Code, EcError, Geometry, KernelChoice, Recovery};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use serde::Serialize;

use crate::output;
use node::failure::{Doing, Result};

/// Bytes of data of one operation.
const DATA: usize = 4 << 20;
/// Number of different operations that exceed every cache together.
const COLD: usize = 48;
/// Bytes of a stripe unit.
const UNIT: usize = 64 << 10;

/// Measure the verification of checksums on one core of this machine
///
/// Each figure is the time for 4 MiB of data in microseconds: the median over rounds. "hot" repeats
/// an operation on the same data, and "cold" uses data that is in no cache. The rows:
///
/// "crc" computes the CRC-32C of each block of 4 KiB and does nothing else. "verify" compares a
/// payload with its checksums, as the host does with payload that arrived by DMA. "parity" computes
/// the parity and its checksums, without and with the verification of the data in the same pass.
/// "apart" verifies the data in a pass of its own before. "recover" reconstructs one data fragment
/// and computes its checksums, without and with the verification of the K other fragments. "adds"
/// is the median, over rounds, of the time with verification minus the time without it in the same
/// round, and "of crc" is this difference divided by the time of "crc" in the same round.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard-layers checksums\n  \
    outboard-layers checksums --k 8 --m 3 --rounds 101 --json")]
pub struct ChecksumArgs {
    /// Number of data fragments
    #[arg(long, default_value_t = 4)]
    k: usize,
    /// Number of parity fragments
    #[arg(long, default_value_t = 2)]
    m: usize,
    /// Number of rounds
    #[arg(long, default_value_t = 51, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The results. The JSON form is stable: fields are never removed, but new fields may be added.
#[derive(Debug, Serialize)]
struct ChecksumReport {
    geometry: String,
    kernel: &'static str,
    rounds: u32,
    data_bytes: usize,
    hot: Costs,
    cold: Costs,
}

/// Times for the data of one operation in µs, without and with verification.
#[derive(Debug, Serialize)]
struct Costs {
    crc_us: f64,
    verify_us: f64,
    parity_us: f64,
    parity_checked_us: f64,
    parity_apart_us: f64,
    parity_adds_us: f64,
    parity_adds_of_crc: f64,
    recover_us: f64,
    recover_checked_us: f64,
    recover_adds_us: f64,
    recover_adds_of_crc: f64,
}

/// Runs the command.
pub fn run(args: &ChecksumArgs) -> Result<()> {
    let doing = "measuring checksums";
    let kernel = KernelChoice::Auto.load().doing(doing)?;
    let geometry = Geometry::new(args.k, args.m).doing(doing)?;
    let code = Code::new(geometry, kernel);
    // Whole stripes.
    let stripe = UNIT * geometry.k();
    let len = (DATA / stripe).max(1) * stripe;
    let data: Vec<Payload> = (0..COLD).map(|number| Payload::compute(0, noise(number as u64, len))).collect();
    let mut trial = Trial::new(&code, len).doing(doing)?;
    let hot = trial.measure(&data[..1], args.rounds).doing(doing)?;
    let cold = trial.measure(&data, args.rounds).doing(doing)?;
    let report = ChecksumReport {
        geometry: geometry.to_string(),
        kernel: kernel.name(),
        rounds: args.rounds,
        data_bytes: len,
        hot,
        cold,
    };
    if args.json {
        output::json(&report);
    } else {
        output::raw(table(&report));
    }
    Ok(())
}

/// Times of one round in µs.
#[derive(Debug, Default)]
struct Round {
    crc: f64,
    verify: f64,
    parity: f64,
    parity_checked: f64,
    parity_apart: f64,
    recover: f64,
    recover_checked: f64,
}

/// Buffers for the results of the operations.
struct Trial<'a> {
    code: &'a Code,
    recovery: Recovery,
    parity: Vec<Vec<u8>>,
    checksums: Vec<Vec<u32>>,
    /// The fragment that is reconstructed.
    lost: Vec<u8>,
    /// Number of the next operation.
    next: usize,
}

impl Trial<'_> {
    fn new(code: &Code, len: usize) -> Result<Trial<'_>, EcError> {
        let (k, m) = (code.geometry().k(), code.geometry().m());
        let present: Vec<usize> = (1..=k).collect();
        Ok(Trial {
            code,
            recovery: code.recovery(&present, &[0])?,
            parity: vec![vec![1; len / k]; m],
            checksums: vec![Vec::with_capacity(len / k / BLOCK_SIZE); m],
            lost: vec![1; len / k],
            next: 0,
        })
    }

    /// Measures all operations in turns. Each operation uses the next entry of `data`.
    fn measure(&mut self, data: &[Payload], rounds: u32) -> Result<Costs, EcError> {
        let mut all = Vec::new();
        for _ in 0..=rounds {
            all.push(self.round(data)?);
        }
        // The first round warms up caches and tables.
        all.remove(0);
        let of = |figure: &dyn Fn(&Round) -> f64| median(all.iter().map(figure).collect());
        Ok(Costs {
            crc_us: of(&|r| r.crc),
            verify_us: of(&|r| r.verify),
            parity_us: of(&|r| r.parity),
            parity_checked_us: of(&|r| r.parity_checked),
            parity_apart_us: of(&|r| r.parity_apart),
            parity_adds_us: of(&|r| r.parity_checked - r.parity),
            parity_adds_of_crc: of(&|r| (r.parity_checked - r.parity) / r.crc),
            recover_us: of(&|r| r.recover),
            recover_checked_us: of(&|r| r.recover_checked),
            recover_adds_us: of(&|r| r.recover_checked - r.recover),
            recover_adds_of_crc: of(&|r| (r.recover_checked - r.recover) / r.crc),
        })
    }

    fn round(&mut self, data: &[Payload]) -> Result<Round, EcError> {
        let mut next = || {
            self.next += 1;
            &data[self.next % data.len()]
        };
        let payloads: [&Payload; 7] = std::array::from_fn(|_| next());
        let mut round = Round::default();
        let mut sum = 0;
        round.crc = micros(|| {
            payloads[0].data().chunks_exact(BLOCK_SIZE).for_each(|block| sum ^= crc32c(block));
            Ok(())
        })?;
        std::hint::black_box(sum);
        round.verify = micros(|| {
            assert!(payloads[1].verify().is_ok(), "the data is intact");
            Ok(())
        })?;
        round.parity = micros(|| self.encode(payloads[2], false))?;
        round.parity_checked = micros(|| self.encode(payloads[3], true))?;
        round.parity_apart = micros(|| {
            assert!(payloads[4].verify().is_ok(), "the data is intact");
            self.encode(payloads[4], false)
        })?;
        // The sources are the units as they are, so the result is not the first fragment. That makes
        // no difference to the time.
        round.recover = micros(|| {
            let units: Vec<&[u8]> = fragments(payloads[5].data(), self.recovery.sources().len());
            self.recovery.run(&units, &mut [&mut self.lost])?;
            std::hint::black_box(piece_checksums(0, &self.lost));
            Ok(())
        })?;
        round.recover_checked = micros(|| {
            let k = self.recovery.sources().len();
            let sums = payloads[6].checksums();
            let units = fragments(payloads[6].data(), k).into_iter().zip(sums.chunks_exact(sums.len() / k));
            let units: Vec<CheckedUnit<'_>> =
                units.map(|(bytes, checksums)| CheckedUnit { bytes, checksums }).collect();
            let mut sums = vec![Vec::with_capacity(self.lost.len() / BLOCK_SIZE)];
            self.recovery.run_checked(&units, &mut [&mut self.lost], &mut sums)?;
            std::hint::black_box(sums);
            Ok(())
        })?;
        Ok(round)
    }

    fn encode(&mut self, data: &Payload, verify: bool) -> Result<(), EcError> {
        self.checksums.iter_mut().for_each(Vec::clear);
        let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
        if !verify {
            return self.code.encode_stripes(UNIT, data.data(), &mut parity, &mut self.checksums);
        }
        let sums = data.checksums().chunks_exact(UNIT / BLOCK_SIZE);
        let unit = |(bytes, checksums)| CheckedUnit { bytes, checksums };
        let units: Vec<CheckedUnit<'_>> = data.data().chunks_exact(UNIT).zip(sums).map(unit).collect();
        self.code.encode_checked(&units, &mut parity, &mut self.checksums)
    }
}

/// Divides the data into `k` contiguous parts of equal length.
fn fragments(data: &[u8], k: usize) -> Vec<&[u8]> {
    data.chunks_exact(data.len() / k).collect()
}

/// Returns the time of an operation in µs.
fn micros(operation: impl FnOnce() -> Result<(), EcError>) -> Result<f64, EcError> {
    let start = Instant::now();
    operation()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn noise(seed: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes.into()
}

/// Formats the results as a table.
fn table(report: &ChecksumReport) -> String {
    let ChecksumReport { geometry, kernel, rounds, data_bytes, hot, cold } = report;
    let mut text = format!(
        "µs for {data_bytes} bytes of data, code {geometry}, kernel {kernel}; medians of {rounds} rounds\n\n{:<30} {:>8} {:>8}\n",
        "", "hot", "cold"
    );
    type Row = (&'static str, fn(&Costs) -> f64);
    let rows: [Row; 11] = [
        ("crc alone", |c| c.crc_us),
        ("verify a payload", |c| c.verify_us),
        ("parity", |c| c.parity_us),
        ("parity, data verified", |c| c.parity_checked_us),
        ("parity, data verified apart", |c| c.parity_apart_us),
        ("  verification adds", |c| c.parity_adds_us),
        ("  of crc", |c| c.parity_adds_of_crc),
        ("recover", |c| c.recover_us),
        ("recover, sources verified", |c| c.recover_checked_us),
        ("  verification adds", |c| c.recover_adds_us),
        ("  of crc", |c| c.recover_adds_of_crc),
    ];
    for (name, figure) in rows {
        let digits = if name == "  of crc" { 2 } else { 0 };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<30} {:>8.digits$} {:>8.digits$}", figure(hot), figure(cold));
    }
    text
}
