//! What encoding a file takes in each place where it can be done.

use std::fmt;
use std::time::Instant;

use base::block::BLOCK_SIZE;
use base::process::ProcessUsage;
use ec::{Code, EcError};
use serde::Serialize;

use super::{median, noise};
use crate::progress::Progress;

/// Where data can be encoded.
pub trait Place {
    /// What it is called in the table.
    fn name(&self) -> &'static str;

    /// Encodes data, one stripe of whole blocks for each shard; the seconds from when the data is there until the parity is.
    fn encode(&mut self, code: &Code, data: &[u8]) -> Result<f64, EcError>;
}

/// The places of this machine.
pub fn all() -> Vec<Box<dyn Place>> {
    vec![Box::new(Host::default())]
}

/// This processor, on the caller's thread, as the write path does it.
#[derive(Default)]
struct Host {
    parity: Vec<Vec<u8>>,
    checksums: Vec<Vec<u32>>,
}

impl Place for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn encode(&mut self, code: &Code, data: &[u8]) -> Result<f64, EcError> {
        let unit = data.len() / code.geometry().k();
        self.parity.resize(code.geometry().m(), vec![]);
        self.parity.iter_mut().for_each(|parity| parity.resize(unit, 1));
        self.checksums = vec![vec![]; code.geometry().m()];
        let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
        let start = Instant::now();
        code.encode_stripes(unit, data, &mut parity, &mut self.checksums)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// The paper's experiment.
#[derive(Debug, Serialize)]
pub struct Experiment {
    pub geometry: String,
    pub rows: Vec<Row>,
}

/// A file in a place.
#[derive(Debug, Serialize)]
pub struct Row {
    pub place: &'static str,
    /// What was asked for.
    pub file_bytes: u64,
    /// With the zeros that fill the last block of each shard.
    pub encoded_bytes: usize,
    /// Median of the time until the parity is there.
    pub seconds: f64,
    /// CPU time of this process per file.
    pub host_cpu_seconds: f64,
}

/// Encodes files of these sizes in each place.
pub fn measure(
    places: &mut [Box<dyn Place>],
    code: &Code,
    sizes: &[u64],
    rounds: u32,
    progress: &Progress,
) -> Result<Experiment, EcError> {
    let k = code.geometry().k();
    let mut rows = vec![];
    for &file_bytes in sizes {
        let unit = (file_bytes as usize).div_ceil(k).next_multiple_of(BLOCK_SIZE);
        let data = noise(unit * k);
        for place in &mut *places {
            progress.message(format!("{}, {file_bytes} bytes at {}", code.geometry(), place.name()));
            // The first time memory is touched that the others find in place.
            place.encode(code, &data)?;
            let before = cpu_seconds();
            let mut seconds = vec![];
            for _ in 0..rounds {
                seconds.push(place.encode(code, &data)?);
                progress.add(file_bytes);
            }
            rows.push(Row {
                place: place.name(),
                file_bytes,
                encoded_bytes: data.len(),
                seconds: median(seconds),
                host_cpu_seconds: (cpu_seconds() - before) / f64::from(rounds),
            });
        }
    }
    Ok(Experiment { geometry: code.geometry().to_string(), rows })
}

/// Of this process so far; not a number if the system does not say.
fn cpu_seconds() -> f64 {
    ProcessUsage::read(std::process::id()).map_or(f64::NAN, |usage| usage.total.cpu_seconds)
}

impl fmt::Display for Experiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, whole files; host CPU is this process's", self.geometry)?;
        writeln!(f, "{:<12} {:>12} {:>10} {:>12} {:>8}", "place", "file bytes", "ms", "host CPU ms", "GB/s")?;
        for row in &self.rows {
            let (ms, cpu, rate) =
                (row.seconds * 1e3, row.host_cpu_seconds * 1e3, row.encoded_bytes as f64 / row.seconds / 1e9);
            let (place, bytes) = (row.place, row.file_bytes);
            writeln!(f, "{place:<12} {bytes:>12} {ms:>10.2} {cpu:>12.2} {rate:>8.2}")?;
        }
        Ok(())
    }
}
