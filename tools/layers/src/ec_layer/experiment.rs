//! The experiment of figure 2 of the paper by Ryu et al.: time and CPU time for encoding a file in
//! each place.

use std::fmt;

use base::block::BLOCK_SIZE;
use base::process::{ProcessUsage, Usage};
use base::thread::ThreadClass;
use bytes::Bytes;
use ec::Code;
use serde::Serialize;

use super::places::{Encoder, Files, HostEncoder, Offloaded};
use super::{median, noise};
use node::failure::Result;
use node::progress::ProgressMeter;

/// The ratios of an accelerator's time to the host's time in the paper by Ryu et al., by file size
/// in MB.
const PAPER: [(u64, f64); 2] = [(8, 13.3), (128, 10.5)];
/// Number of files submitted together.
const TOGETHER: usize = 16;
/// Minimum amount of data from which files are taken, in bytes. It exceeds every cache.
const IN_MEMORY: usize = 128 << 20;
/// Maximum size of a file for the measurement of the host's rate, in bytes.
const RATE_BYTES: u64 = 32 << 20;

/// The results of the experiment of Ryu et al. on this machine.
#[derive(Debug, Serialize)]
pub struct PaperExperiment {
    pub geometry: String,
    /// Rate of a core that the emulated accelerator assumes, in bytes of data per second.
    pub host_rate: f64,
    pub rows: Vec<ExperimentRow>,
    pub batching: Batching,
    /// Number of batches whose computation took longer than the time that the accelerator is meant
    /// to take. For these batches the machine is too slow to emulate the accelerator.
    pub overruns: u64,
}

/// The result for one file size in one place.
#[derive(Debug, Serialize)]
pub struct ExperimentRow {
    pub place: &'static str,
    /// Whether the place is a part of the DPU that threads of this machine emulate.
    pub emulated: bool,
    /// Requested file size in bytes.
    pub file_bytes: u64,
    /// File size in bytes, including the zeros that fill the last block of each fragment.
    pub encoded_bytes: usize,
    /// Median time until the parity is complete, in seconds.
    pub seconds: f64,
    /// Ratio of this time to the host's time.
    pub ratio_to_host: f64,
    /// The ratio in the paper by Ryu et al.; `None` if the paper has no value for this size.
    pub paper_ratio_to_host: Option<f64>,
    /// CPU time per file.
    #[serde(flatten)]
    pub cpu: Cpu,
}

/// CPU time in seconds, divided into the host's time and the time of threads that emulate the DPU.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Cpu {
    /// CPU time of this process, without the threads that emulate the DPU.
    pub host_cpu_seconds: f64,
    /// CPU time of the threads that emulate the DPU's cores.
    pub dpu_cpu_seconds: f64,
    /// CPU time of the thread that emulates the accelerator. A real accelerator uses no CPU time.
    pub emulated_device_cpu_seconds: f64,
}

/// The benefit of submitting several files together.
#[derive(Debug, Serialize)]
pub struct Batching {
    pub place: &'static str,
    pub emulated: bool,
    pub file_bytes: u64,
    /// Number of files submitted together.
    pub files: usize,
    /// Number of batches that the device formed.
    pub batches: u64,
    /// Median time per file, if each file completes before the next is submitted.
    pub seconds_one_by_one: f64,
    /// Median time per file, if all files are submitted before the first completes.
    pub seconds_together: f64,
    /// Ratio of `seconds_together` to the host's time for one file.
    pub ratio_to_host_together: f64,
}

/// Returns the length of a file of `bytes` bytes, including the zeros that fill the last block of
/// each fragment.
fn encoded(code: &Code, bytes: u64) -> usize {
    let k = code.geometry().k();
    (bytes as usize).div_ceil(k).next_multiple_of(BLOCK_SIZE) * k
}

/// Encodes files of the given sizes in each place.
pub fn measure(code: &Code, sizes: &[u64], rounds: u32, progress: &ProgressMeter) -> Result<PaperExperiment> {
    let largest = sizes.iter().copied().max().unwrap_or(RATE_BYTES);
    let data = Bytes::from(noise(encoded(code, largest).max(IN_MEMORY)));
    let files = |bytes: u64| Files::new(code, &data, encoded(code, bytes));
    let host_rate = HostEncoder::rate(code, &mut files(largest.min(RATE_BYTES)))?;
    let (mut cores, mut accelerator) = (Offloaded::cores()?, Offloaded::accelerator(host_rate)?);
    let mut rows: Vec<ExperimentRow> = vec![];
    for &size in sizes {
        let mut files = files(size);
        let places: [(&mut dyn Encoder, bool, _); 3] = [
            (&mut HostEncoder, false, None),
            (&mut cores, true, None),
            (&mut accelerator, true, paper(size)),
        ];
        let host_row = rows.len();
        for (place, emulated, paper_ratio_to_host) in places {
            progress.message(format!("encoding {size} bytes with {} on: {}", code.geometry(), place.name()));
            let (seconds, cpu) = encode(place, code, &mut files, rounds, progress)?;
            rows.push(ExperimentRow {
                place: place.name(),
                emulated,
                file_bytes: size,
                encoded_bytes: files.len(),
                seconds,
                ratio_to_host: seconds / rows.get(host_row).map_or(seconds, |host| host.seconds),
                paper_ratio_to_host,
                cpu,
            });
        }
    }
    let smallest = sizes.iter().copied().min().unwrap_or(RATE_BYTES);
    let batching = batching(&mut accelerator, code, &mut files(smallest), &rows, (rounds, progress))?;
    let (geometry, overruns) = (code.geometry().to_string(), accelerator.stats().overruns);
    Ok(PaperExperiment { geometry, host_rate, rows, batching, overruns })
}

/// Encodes a file several times. Returns the median time in seconds and the CPU time per file.
fn encode(
    place: &mut dyn Encoder,
    code: &Code,
    files: &mut Files,
    rounds: u32,
    progress: &ProgressMeter,
) -> Result<(f64, Cpu)> {
    // Encode once without measuring, because a thread may be slow directly after its start.
    place.encode(code, files, 1)?;
    let before = Cpu::so_far();
    let mut seconds = vec![];
    for _ in 0..rounds {
        seconds.push(place.encode(code, files, 1)?);
        progress.add(files.len() as u64);
    }
    Ok((median(seconds), Cpu::so_far().per_file_since(before, rounds)))
}

/// Measures the accelerator with several files of the smallest size that are submitted together.
/// `rows` contains the times for files that are submitted one by one.
fn batching(
    accelerator: &mut Offloaded,
    code: &Code,
    files: &mut Files,
    rows: &[ExperimentRow],
    (rounds, progress): (u32, &ProgressMeter),
) -> Result<Batching> {
    let size = rows.iter().map(|row| row.file_bytes).min().unwrap_or(0);
    let of = |place: &str| rows.iter().find(|row| row.file_bytes == size && row.place == place);
    let seconds_of = |place| of(place).map_or(f64::NAN, |row| row.seconds);
    let (one_by_one, host) = (seconds_of(accelerator.name()), seconds_of("host"));
    progress.message(format!("{}, {TOGETHER} files at a time at {}", code.geometry(), accelerator.name()));
    accelerator.encode(code, files, TOGETHER)?;
    let before = accelerator.stats().batches;
    let mut seconds = vec![];
    for _ in 0..rounds {
        seconds.push(accelerator.encode(code, files, TOGETHER)? / TOGETHER as f64);
        progress.add((files.len() * TOGETHER) as u64);
    }
    let together = median(seconds);
    Ok(Batching {
        place: accelerator.name(),
        emulated: true,
        file_bytes: size,
        files: TOGETHER,
        batches: (accelerator.stats().batches - before).div_ceil(u64::from(rounds)),
        seconds_one_by_one: one_by_one,
        seconds_together: together,
        ratio_to_host_together: together / host,
    })
}

/// Returns the ratio in the paper by Ryu et al. for a file size, where MB may mean 10^6 or 2^20
/// bytes. Returns `None` if the paper has no ratio for this size.
fn paper(size: u64) -> Option<f64> {
    let is_it = |mb: u64| [mb * 1_000_000, mb << 20].contains(&size);
    PAPER.into_iter().find(|(mb, _)| is_it(*mb)).map(|(_, ratio)| ratio)
}

impl Cpu {
    /// Returns the CPU time of this process so far. The host's time is NaN if the system does not
    /// report CPU times.
    fn so_far() -> Cpu {
        let classes = ProcessUsage::read(std::process::id()).map(|usage| usage.by_class).unwrap_or_default();
        let of = |class: ThreadClass| classes.get(class.prefix()).map_or(0.0, |usage| usage.cpu_seconds());
        let (dpu, device) = (of(ThreadClass::Coding), of(ThreadClass::CodingDevice));
        // The classes do not contain threads that have ended. No computing thread ends during a
        // measurement.
        let all: f64 = classes.values().map(|usage: &Usage| usage.cpu_seconds()).sum();
        let host = if classes.is_empty() { f64::NAN } else { all - dpu - device };
        Cpu { host_cpu_seconds: host, dpu_cpu_seconds: dpu, emulated_device_cpu_seconds: device }
    }

    fn per_file_since(self, before: Cpu, files: u32) -> Cpu {
        let per_file = |now: f64, before: f64| (now - before).max(0.0) / f64::from(files);
        Cpu {
            host_cpu_seconds: per_file(self.host_cpu_seconds, before.host_cpu_seconds),
            dpu_cpu_seconds: per_file(self.dpu_cpu_seconds, before.dpu_cpu_seconds),
            emulated_device_cpu_seconds: per_file(
                self.emulated_device_cpu_seconds,
                before.emulated_device_cpu_seconds,
            ),
        }
    }
}

impl fmt::Display for PaperExperiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = self.host_rate / 1e9;
        writeln!(
            f,
            "{}, whole files that are in no cache, one at a time; ratios are relative to the host's time",
            self.geometry
        )?;
        writeln!(
            f,
            "dpu: a thread with the speed of a host core; accelerator: as slow as the paper's accelerator, relative"
        )?;
        writeln!(
            f,
            "to a host core that encodes {gb:.2} GB/s; dev CPU: CPU time of the thread that emulates the accelerator"
        )?;
        writeln!(
            f,
            "{:<22} {:>12} {:>9} {:>7} {:>6} {:>6} {:>12} {:>11} {:>11}",
            "place", "file bytes", "ms", "GB/s", "ratio", "paper", "host CPU ms", "dpu CPU ms", "dev CPU ms"
        )?;
        for row in &self.rows {
            let (place, bytes, ms, ratio) = (row.place, row.file_bytes, row.seconds * 1e3, row.ratio_to_host);
            let rate = row.encoded_bytes as f64 / row.seconds / 1e9;
            let paper = row.paper_ratio_to_host.map_or("-".to_owned(), |ratio| format!("{ratio:.1}"));
            let Cpu { host_cpu_seconds: host, dpu_cpu_seconds: dpu, emulated_device_cpu_seconds: device } =
                row.cpu;
            let [host, dpu, device] = [host, dpu, device].map(|seconds| seconds * 1e3);
            write!(f, "{place:<22} {bytes:>12} {ms:>9.2} {rate:>7.2} {ratio:>6.1} {paper:>6}")?;
            writeln!(f, " {host:>12.2} {dpu:>11.2} {device:>11.2}")?;
        }
        self.batching.fmt(f)?;
        if self.overruns > 0 {
            writeln!(
                f,
                "{} batches took longer than on the accelerator: this machine is too slow to emulate it",
                self.overruns
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Batching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Batching { place, file_bytes, files, batches, .. } = self;
        let [one, together] = [self.seconds_one_by_one, self.seconds_together].map(|seconds| seconds * 1e3);
        writeln!(
            f,
            "\n{place}, {files} files of {file_bytes} bytes submitted together: {together:.2} ms per file \
             ({:.1} times the host's time) in {batches} batches; submitted one by one: {one:.2} ms",
            self.ratio_to_host_together
        )
    }
}
