//! Measures the ceilings of this machine, for comparison with a node's results.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;

use crate::Result;

/// A completely written file on which fio runs. Dropping this value removes the file.
#[derive(Debug)]
pub struct FioFile {
    path: PathBuf,
    size: String,
}

#[derive(Deserialize)]
struct FioOutput {
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    read: FioSide,
    write: FioSide,
    #[serde(default)]
    sync: FioSync,
}

#[derive(Deserialize)]
struct FioSide {
    bw_bytes: f64,
    iops: f64,
    #[serde(default)]
    lat_ns: FioLatency,
}

#[derive(Default, Deserialize)]
struct FioLatency {
    #[serde(default)]
    max: f64,
}

#[derive(Default, Deserialize)]
struct FioSync {
    #[serde(default)]
    lat_ns: FioLatency,
}

/// Durable writes of fio over time.
#[derive(Debug)]
pub struct DurableWrites {
    /// Writes per second.
    pub iops: f64,
    /// The longest write or fdatasync, in ms.
    pub longest_ms: f64,
    /// Number of writes in each second.
    pub per_second: Vec<f64>,
}

impl FioFile {
    /// Writes a file of `mib` MiB in `dir`.
    ///
    /// # Errors
    /// If fio is missing or fails.
    pub fn create(dir: &Path, mib: u32) -> Result<FioFile> {
        let file = FioFile { path: dir.join("fio.img"), size: format!("{mib}m") };
        file.fio(&["--rw=write", "--bs=4m", "--iodepth=4"])?;
        Ok(file)
    }

    /// Measures the throughput of O_DIRECT writes of size `bs` at a queue depth, in 10^6 bytes per
    /// second.
    ///
    /// # Errors
    /// If fio fails.
    pub fn write_mb_per_s(&self, bs: &str, depth: u32, seconds: u32) -> Result<f64> {
        let job = self.timed("write", bs, depth, seconds, &[])?;
        Ok(job.write.bw_bytes / 1e6)
    }

    /// Measures the throughput of O_DIRECT reads of size `bs` at a queue depth, in 10^6 bytes per
    /// second.
    ///
    /// # Errors
    /// If fio fails.
    pub fn read_mb_per_s(&self, bs: &str, depth: u32, seconds: u32) -> Result<f64> {
        let job = self.timed("read", bs, depth, seconds, &[])?;
        Ok(job.read.bw_bytes / 1e6)
    }

    /// Measures the total throughput of mixed random O_DIRECT reads and writes of size `bs` at a
    /// queue depth, in 10^6 bytes per second.
    ///
    /// # Errors
    /// If fio fails.
    pub fn mixed_mb_per_s(&self, bs: &str, depth: u32, read_percent: u32, seconds: u32) -> Result<f64> {
        let mix = format!("--rwmixread={read_percent}");
        let job = self.timed("randrw", bs, depth, seconds, &[&mix])?;
        Ok((job.read.bw_bytes + job.write.bw_bytes) / 1e6)
    }

    /// Measures the rate of random 4 KiB O_DIRECT writes per second, one at a time, each followed
    /// by fdatasync.
    ///
    /// # Errors
    /// If fio fails.
    pub fn sync_write_iops(&self, seconds: u32) -> Result<f64> {
        let job = self.timed("randwrite", "4k", 1, seconds, &["--fdatasync=1"])?;
        Ok(job.write.iops)
    }

    /// Measures the rate of random 4 KiB O_DIRECT reads per second at a queue depth.
    ///
    /// # Errors
    /// If fio fails.
    pub fn randread_iops(&self, depth: u32, seconds: u32) -> Result<f64> {
        Ok(self.timed("randread", "4k", depth, seconds, &[])?.read.iops)
    }

    /// Measures random 4 KiB O_DIRECT writes of `jobs` threads, each write followed by fdatasync.
    ///
    /// # Errors
    /// If fio fails.
    pub fn durable_writes(&self, jobs: u32, seconds: u32) -> Result<DurableWrites> {
        let log = self.path.with_extension("log");
        let (jobs, log_arg) = (format!("--numjobs={jobs}"), format!("--write_iops_log={}", log.display()));
        let logged = [log_arg.as_str(), "--log_avg_msec=1000", "--per_job_logs=0"];
        let together = [jobs.as_str(), "--group_reporting", "--fdatasync=1"];
        // The last engine in the arguments counts: a thread waits for each of its writes.
        let job = self.timed(
            "randwrite",
            "4k",
            1,
            seconds,
            &[&together[..], &logged, &["--ioengine=psync"]].concat(),
        )?;
        let path = log.with_extension("log_iops.log");
        let text = std::fs::read_to_string(&path)?;
        std::fs::remove_file(&path)?;
        let longest_ms = job.write.lat_ns.max.max(job.sync.lat_ns.max) / 1e6;
        Ok(DurableWrites { iops: job.write.iops, longest_ms, per_second: writes_per_second(&text, seconds) })
    }

    fn timed(&self, rw: &str, bs: &str, depth: u32, seconds: u32, more: &[&str]) -> Result<FioJob> {
        let (rw, bs, depth) = (format!("--rw={rw}"), format!("--bs={bs}"), format!("--iodepth={depth}"));
        let runtime = format!("--runtime={seconds}");
        self.fio(&[&[rw.as_str(), &bs, &depth, &runtime, "--time_based"], more].concat())
    }

    fn fio(&self, args: &[&str]) -> Result<FioJob> {
        let output = Command::new("fio")
            .args(["--name=ceiling", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
            .arg(format!("--filename={}", self.path.display()))
            .arg(format!("--size={}", self.size))
            .args(args)
            .output()
            .map_err(|e| format!("cannot run fio ({e}); install it with: apt-get install fio"))?;
        if !output.status.success() {
            return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let parsed: FioOutput = serde_json::from_slice(&output.stdout)?;
        parsed.jobs.into_iter().next().ok_or_else(|| "fio reported no job".into())
    }
}

/// Adds up the writes of all threads in each second. Each line of the log has the end of the second in
/// ms, the number of operations per second, and their direction, which is 1 for writes.
fn writes_per_second(log: &str, seconds: u32) -> Vec<f64> {
    let mut sums = vec![0.0; seconds as usize];
    for line in log.lines() {
        let fields: Vec<f64> = line.split(',').map_while(|field| field.trim().parse().ok()).collect();
        if let [ms, operations, direction, ..] = fields[..]
            && direction == 1.0
            && let Some(sum) = sums.get_mut(((ms - 1.0) / 1000.0) as usize)
        {
            *sum += operations;
        }
    }
    sums
}

impl Drop for FioFile {
    fn drop(&mut self) {
        // Ignore an error: at worst, the file is left behind.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The speed of one plain TCP connection over loopback.
#[derive(Debug, Clone, Copy)]
pub struct LoopbackSpeed {
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// 10^6 bytes that the receiver gets per second of its CPU time.
    pub mb_per_cpu_s: f64,
}

/// Measures one plain TCP connection over loopback. One thread sends, and this thread receives.
///
/// # Errors
/// If the loopback interface does not work.
pub fn loopback(seconds: u32) -> Result<LoopbackSpeed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let mut socket = TcpStream::connect(address)?;
        // Outboard's connections within a machine also use this algorithm. If the system refuses
        // it, the connection uses the system's default.
        let _ = socket2::SockRef::from(&socket).set_tcp_congestion(b"reno");
        let data = vec![0x5a; 256 << 10];
        let end = Instant::now() + Duration::from_secs(u64::from(seconds));
        while Instant::now() < end {
            socket.write_all(&data)?;
        }
        Ok(())
    });
    let (mut socket, _) = listener.accept()?;
    let mut buffer = vec![0; 256 << 10];
    let (started, cpu, mut bytes) = (Instant::now(), cpu_time(), 0u64);
    loop {
        match socket.read(&mut buffer)? {
            0 => break,
            n => bytes += n as u64,
        }
    }
    let mb = bytes as f64 / 1e6;
    let mb_per_s = mb / started.elapsed().as_secs_f64();
    let mb_per_cpu_s = mb / (cpu_time() - cpu).as_secs_f64();
    sender.join().map_err(|_| "the sending thread panicked")??;
    Ok(LoopbackSpeed { mb_per_s, mb_per_cpu_s })
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Measures the throughput of copying 4 MiB between two buffers, in 10^6 bytes per second.
#[must_use]
pub fn memcpy_mb_per_s() -> f64 {
    let (from, mut to) = (vec![0x5a_u8; 4 << 20], vec![0_u8; 4 << 20]);
    let (started, mut copies) = (Instant::now(), 0u32);
    while started.elapsed() < Duration::from_millis(300) {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        copies += 1;
    }
    f64::from(copies) * f64::from(4 << 20) / started.elapsed().as_secs_f64() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_writes_of_all_threads_are_added_up_by_second() {
        let log = "1000, 40, 1, 4096, 0\n1001, 7, 0, 4096, 0\n1000, 2, 1, 4096, 0\n1999, 5, 1, 4096, 0\n3000, 9, 1, 4096, 0\n";
        assert_eq!(writes_per_second(log, 2), [42.0, 5.0]);
    }
}
