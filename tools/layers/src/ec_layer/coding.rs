//! Compares the write path (encoding with checksums) with ISA-L's `ec_encode_data`, which computes
//! only parity. Also measures decoding, and updates of parity.

use std::fmt::Write as _;
use std::time::Instant;

use ec::{Code, EcError, Geometry, Kernel, KernelChoice, Matrix, Transform};
use serde::Serialize;

use super::{median, noise};
use node::progress::ProgressMeter;

/// Bytes of data that fit into the second-level cache together with their parity.
const IN_CACHE: usize = 512 << 10;
/// Bytes of data that exceed every cache.
const IN_MEMORY: usize = 96 << 20;
/// Minimum amount of data that is coded per measurement, in bytes. Smaller data is coded
/// repeatedly.
const AT_LEAST: usize = 32 << 20;

/// The result for one code and one amount of data. Rates are in GB/s (10^9 bytes per second). For
/// every operation, they count only the data, without the parity.
#[derive(Debug, Serialize)]
pub struct CodingRates {
    pub geometry: String,
    /// Location of the data: `cache` or `memory`.
    pub data_in: &'static str,
    pub data_bytes: usize,
    pub unit: usize,
    /// Rate of `ec_encode_data` alone; missing without ISA-L.
    pub ec_encode_data_gb_per_s: Option<f64>,
    /// Results of the write path with each kernel; the requested kernel is first.
    pub write_path: Vec<WritePath>,
    /// Rate of reconstructing M lost data fragments (at most K).
    pub decode_gb_per_s: f64,
    /// Rate of updating the parity after a change of one data fragment.
    pub update_gb_per_s: f64,
}

/// The result of the write path (encoding with checksums) with one kernel.
#[derive(Debug, Serialize)]
pub struct WritePath {
    pub kernel: &'static str,
    pub gb_per_s: f64,
    /// Median over rounds of the ratio to `ec_encode_data` in the same round.
    pub ratio: Option<f64>,
}

/// Measures all codes.
pub fn measure(
    geometries: &[Geometry],
    kernel: &'static dyn Kernel,
    unit: usize,
    rounds: u32,
    progress: &ProgressMeter,
) -> Result<Vec<CodingRates>, EcError> {
    let data = noise(IN_MEMORY);
    let mut kernels = vec![kernel];
    for choice in [KernelChoice::Gfni, KernelChoice::Isal, KernelChoice::Portable] {
        kernels.extend(choice.load().ok().filter(|other| kernels.iter().all(|k| k.name() != other.name())));
    }
    let mut all = vec![];
    for &geometry in geometries {
        let least = base::block::BLOCK_SIZE;
        let cached = (IN_CACHE / geometry.k() / least * least).clamp(least, unit);
        for (data_in, unit, most) in [("cache", cached, IN_CACHE), ("memory", unit, IN_MEMORY)] {
            progress.message(format!("{geometry}, data in {data_in}"));
            let stripe = unit * geometry.k();
            let Some(data) = data.get(..(most / stripe).max(1) * stripe) else { continue };
            let work = CodeTrial::new(geometry, unit, data);
            all.push(work.measure(data_in, &kernels, rounds, progress)?);
        }
    }
    Ok(all)
}

/// Data to code, and buffers for the results.
struct CodeTrial<'a> {
    geometry: Geometry,
    unit: usize,
    data: &'a [u8],
    parity: Vec<Vec<u8>>,
    checksums: Vec<Vec<u32>>,
    times: usize,
}

impl CodeTrial<'_> {
    fn new(geometry: Geometry, unit: usize, data: &[u8]) -> CodeTrial<'_> {
        let fragment = data.len() / geometry.k();
        CodeTrial {
            geometry,
            unit,
            data,
            parity: vec![vec![1; fragment]; geometry.m()],
            checksums: vec![Vec::with_capacity(fragment / base::block::BLOCK_SIZE); geometry.m()],
            times: AT_LEAST.div_ceil(data.len()),
        }
    }

    fn measure(
        mut self,
        data_in: &'static str,
        kernels: &[&'static dyn Kernel],
        rounds: u32,
        progress: &ProgressMeter,
    ) -> Result<CodingRates, EcError> {
        let codes: Vec<Code> = kernels.iter().map(|kernel| Code::new(self.geometry, *kernel)).collect();
        let matrix = Matrix::parity(self.geometry);
        let bare = KernelChoice::Isal.load().ok().map(|isal| isal.prepare(&matrix));
        let (k, m) = (self.geometry.k(), self.geometry.m());
        let lost: Vec<usize> = (0..m.min(k)).collect();
        let present: Vec<usize> = (lost.len()..k + m).collect();
        let recovery = codes[0].recovery(&present, &lost)?;
        let (mut reference, mut decode, mut update) = (vec![], vec![], vec![]);
        let mut paths = vec![vec![]; codes.len()];
        for _ in 0..rounds {
            reference.extend(bare.as_ref().map(|bare| self.bare(&**bare)));
            for (code, seconds) in codes.iter().zip(&mut paths) {
                seconds.push(self.write_path(code)?);
            }
            decode.push(self.decode(&recovery)?);
            update.push(self.update(&codes[0])?);
            progress.add((self.data.len() * self.times * (codes.len() + 3)) as u64);
        }
        let gb = (self.data.len() * self.times) as f64 / 1e9;
        let path = |(code, seconds): (&Code, Vec<f64>)| {
            let ratios: Vec<f64> = reference.iter().zip(&seconds).map(|(bare, path)| bare / path).collect();
            let ratio = (!ratios.is_empty()).then(|| median(ratios));
            WritePath { kernel: code.kernel().name(), gb_per_s: gb / median(seconds), ratio }
        };
        Ok(CodingRates {
            geometry: self.geometry.to_string(),
            data_in,
            data_bytes: self.data.len(),
            unit: self.unit,
            write_path: codes.iter().zip(paths).map(path).collect(),
            ec_encode_data_gb_per_s: (!reference.is_empty()).then(|| gb / median(reference)),
            decode_gb_per_s: gb / median(decode),
            update_gb_per_s: gb / k as f64 / median(update),
        })
    }

    /// Returns the seconds that `ec_encode_data` takes, called once per stripe.
    fn bare(&mut self, isal: &dyn Transform) -> f64 {
        let start = Instant::now();
        for _ in 0..self.times {
            for (index, stripe) in self.data.chunks_exact(self.unit * self.geometry.k()).enumerate() {
                let sources: Vec<&[u8]> = stripe.chunks_exact(self.unit).collect();
                isal.apply(&sources, &mut units(&mut self.parity, index, self.unit));
            }
        }
        start.elapsed().as_secs_f64()
    }

    fn write_path(&mut self, code: &Code) -> Result<f64, EcError> {
        let start = Instant::now();
        for _ in 0..self.times {
            self.checksums.iter_mut().for_each(Vec::clear);
            let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
            code.encode_stripes(self.unit, self.data, &mut parity, &mut self.checksums)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the seconds for reconstructing the first data fragments from the remaining data
    /// fragments and the parity. The results are written to a separate buffer.
    fn decode(&mut self, recovery: &ec::Recovery) -> Result<f64, EcError> {
        let (k, lost) = (self.geometry.k(), self.geometry.m().min(self.geometry.k()));
        let mut out = vec![vec![1; self.unit]; lost];
        let start = Instant::now();
        for _ in 0..self.times {
            for (index, stripe) in self.data.chunks_exact(self.unit * k).enumerate() {
                let data = stripe.chunks_exact(self.unit).skip(lost);
                let parity = self.parity.iter().map(|p| &p[index * self.unit..][..self.unit]);
                let sources: Vec<&[u8]> = data.chain(parity).take(k).collect();
                recovery.run(&sources, &mut units(&mut out, 0, self.unit))?;
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the seconds for updating the parity after a change of the first data fragment. This
    /// changes the parity, which the next round computes again.
    fn update(&mut self, code: &Code) -> Result<f64, EcError> {
        let start = Instant::now();
        for _ in 0..self.times {
            for (index, stripe) in self.data.chunks_exact(self.unit * self.geometry.k()).enumerate() {
                let parity = units(&mut self.parity, index, self.unit);
                let mut rows: Vec<(usize, &mut [u8])> = parity.into_iter().enumerate().collect();
                code.update(0, &stripe[..self.unit], &mut rows)?;
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Returns the unit of stripe `index` in each fragment.
fn units(fragments: &mut [Vec<u8>], index: usize, unit: usize) -> Vec<&mut [u8]> {
    fragments.iter_mut().map(|fragment| &mut fragment[index * unit..][..unit]).collect()
}

/// Formats the results as a table.
pub fn table(all: &[CodingRates]) -> String {
    let mut text = format!(
        "{:<8} {:<7} {:>8}  {:>14}  {:<34} {:>7} {:>7}\n",
        "code", "data in", "unit", "ec_encode_data", "write path (ratio)", "decode", "update"
    );
    for one in all {
        let bare = one.ec_encode_data_gb_per_s.map_or("-".to_owned(), |rate| format!("{rate:.2}"));
        let path = |path: &WritePath| {
            let ratio = path.ratio.map_or(String::new(), |ratio| format!(" ({ratio:.2})"));
            format!("{} {:.2}{ratio}", path.kernel, path.gb_per_s)
        };
        let paths: Vec<String> = one.write_path.iter().map(path).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<8} {:<7} {:>8}  {bare:>14}  {:<34} {:>7.2} {:>7.2}",
            one.geometry,
            one.data_in,
            one.unit,
            paths.join("  "),
            one.decode_gb_per_s,
            one.update_gb_per_s
        );
    }
    text
}
