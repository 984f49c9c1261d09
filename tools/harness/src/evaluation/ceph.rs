//! A real Ceph for comparison: one OSD with BlueStore on a file beside the nodes' targets, without
//! replication. `bench/ceph` starts and stops it, and `rados bench` drives it. This module accounts
//! for the OSD's CPU time, thread by thread (bench/ceph/README.md).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::processes::{Threads, children_cpu_seconds, written_bytes};
use super::sample::{Sample, Subsystem, sum_parts};
use super::workload::{Case, Set};
use crate::Result;

/// The OSD's default memory limit in bytes, as `bench/ceph/up` sets it.
const MEMORY_TARGET: u64 = 2 << 30;

/// The osd's smallest memory limit in bytes. It leaves caches of 128 MiB (`osd_memory_cache_min`).
const MEMORY_TARGET_LEAST: u64 = 896 << 20;

/// Limits below which the osd counts as quiet: CPU use as a fraction of one core, and bytes written
/// per second. An idle osd uses 0.3 % of a core.
const QUIET: (f64, f64) = (0.02, 1e6);

/// Number of client starts for measuring the cost of a start. One start is too short to measure,
/// because the kernel counts a client's CPU time in steps of 10 ms.
const CLIENT_STARTS: u32 = 3;

/// Duration of one observation of the osd's activity.
const QUIET_WATCH: Duration = Duration::from_millis(500);
/// Maximum time to wait until the osd is quiet.
const QUIET_WAIT: Duration = Duration::from_secs(5);

/// A Ceph cluster in its own directory. The owner of this directory stops the cluster.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    /// A circumstance that makes the comparison unfairly bad for Ceph, if there is one.
    pub handicap: Option<String>,
    /// CPU time, in s, of a `rados bench` that does almost no work: the cost of a client's start
    /// and end.
    pub client_start_cpu_seconds: f64,
}

/// The summary at the end of the output of `rados bench --format json`.
#[derive(Debug, Deserialize)]
struct RadosBench {
    total_time_run: String,
    total_writes_made: Option<String>,
    total_reads_made: Option<String>,
    average_latency: String,
}

/// Returns the directory with the scripts `up` and `down`.
#[must_use]
pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/ceph")
}

impl Cluster {
    /// Starts a cluster whose osd has a file of `gib` GiB.
    ///
    /// # Errors
    /// If Ceph is not installed or does not start. The message states the reason.
    pub fn up(dir: &Path, gib: u64) -> Result<Cluster> {
        let mut command = Command::new("timeout");
        command.arg("300").arg(scripts().join("up")).arg(dir).arg(format!("{gib}G"));
        let output = command.stdin(Stdio::null()).output()?;
        if output.status.success() {
            let said = String::from_utf8_lossy(&output.stdout);
            let handicap = said.lines().find_map(|l| l.strip_prefix("handicap: ")).map(str::to_owned);
            let mut cluster = Cluster { dir: dir.to_owned(), handicap, client_start_cpu_seconds: 0.0 };
            cluster.client_start_cpu_seconds = cluster.measure_client_start()?;
            return Ok(cluster);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let why = said.lines().last().unwrap_or("it did not start within 300 s");
        Err(why.trim_start_matches("ceph: ").into())
    }

    /// Measures the CPU time of a client's start. The very first client does not count, because the
    /// page cache does not contain its program.
    fn measure_client_start(&self) -> Result<f64> {
        let one = ["bench", "1", "write", "-b", "4096", "-t", "1", "--max-objects", "1", "--no-cleanup"];
        self.rados("bench", 60, &one)?;
        let before = children_cpu_seconds();
        for _ in 0..CLIENT_STARTS {
            self.rados("bench", 60, &one)?;
        }
        let used = children_cpu_seconds() - before;
        self.clean()?;
        Ok(used / f64::from(CLIENT_STARTS))
    }

    /// Returns the names and pids of the cluster's daemons.
    #[must_use]
    pub fn daemons(&self) -> Vec<(&'static str, u32)> {
        let pid = |name: &str| {
            let text = std::fs::read_to_string(self.dir.join(format!("pid/{name}.pid"))).ok()?;
            text.trim().parse().ok()
        };
        let names = [("ceph-osd", "osd.0"), ("ceph-mon", "mon.a"), ("ceph-mgr", "mgr.x")];
        names.into_iter().filter_map(|(program, name)| Some((program, pid(name)?))).collect()
    }

    /// Fills the pool of the large set with objects of 4 KiB, and waits until the osd is quiet.
    ///
    /// # Errors
    /// If the operation fails or takes longer than ten minutes.
    pub fn fill_large_set(&self, objects: u64) -> Result<()> {
        let objects = objects.to_string();
        let more = ["-b", "4096", "-t", "64", "--max-objects", &objects, "--no-cleanup"];
        self.rados("cold", 600, &[&["bench", "600", "write"][..], &more].concat())?;
        self.settle()
    }

    /// Sets the osd's memory limit to the smallest value if `least` is true, otherwise to the
    /// default. The osd adjusts its caches within some seconds.
    ///
    /// # Errors
    /// If the osd refuses the setting.
    pub fn limit_memory(&self, least: bool) -> Result<()> {
        let target = if least { MEMORY_TARGET_LEAST } else { MEMORY_TARGET }.to_string();
        let mut command = Command::new("timeout");
        command.args(["30", "ceph", "-c"]).arg(self.dir.join("ceph.conf"));
        command.args(["tell", "osd.0", "config", "set", "osd_memory_target", &target]);
        let output = command.output()?;
        if output.status.success() {
            Ok(())
        } else {
            Err("cannot set the memory target of Ceph's OSD".into())
        }
    }

    /// Runs `rados bench` and accounts for the CPU time of the osd and the client. The cost of a
    /// client's start is subtracted, because `outboard bench` does not count its own start. Objects
    /// remain until `clean`.
    ///
    /// # Errors
    /// If `rados` fails.
    pub fn bench(&self, round: u32, case: &Case, seconds: u32) -> Result<Sample> {
        let pool = if case.set == Set::Large { "cold" } else { "bench" };
        let osd = self.osd()?;
        let (size, in_flight, seconds_text) =
            (case.size.to_string(), case.in_flight.to_string(), seconds.to_string());
        let mut args = vec!["bench", &seconds_text, case.mode.rados_name(), "-t", &in_flight];
        if case.mode == super::workload::AccessMode::Write {
            args.extend(["-b", &size, "--no-cleanup"]);
        }
        let (threads, client) = (Threads::of(osd), children_cpu_seconds());
        let output = self.rados(pool, seconds + 60, &args)?;
        let (client, now) = (children_cpu_seconds() - client, Threads::of(osd));
        let client = (client - self.client_start_cpu_seconds).max(0.0);
        let found = RadosBench::parse(&output)?;
        let ops = found.ops()?;
        let per_op = |seconds: f64| seconds * 1e6 / ops.max(1) as f64;
        let osd = now.cpu_seconds_since(&threads);
        let iops = ops as f64 / found.total_time_run.parse::<f64>()?;
        Ok(Sample {
            round,
            case: case.clone(),
            ops,
            // The unit MB/s of `rados bench` is 2^20 bytes per second, but this field counts 10^6
            // bytes per second.
            mb_per_s: iops * case.size as f64 / 1e6,
            iops,
            latency_us_mean: found.average_latency.parse::<f64>()? * 1e6,
            latency_us_p99: None,
            host_cpu_us_per_op: per_op(osd),
            node_cpu_us_per_op: per_op(osd + client),
            client_cpu_us_per_op: per_op(client),
            user_us_per_op: 0.0,
            system_us_per_op: 0.0,
            wake_ups_per_op: 0.0,
            parts: sum_parts(
                now.since(&threads).map(|(name, used)| (Subsystem::of_ceph_thread(name), used)),
                ops,
            ),
            breakdown_us: None,
        })
    }

    /// Removes all objects except the large set, so that the osd's file does not fill up, and waits
    /// until the osd is quiet.
    ///
    /// # Errors
    /// If `rados` fails or no osd is running.
    pub fn clean(&self) -> Result<()> {
        self.rados("bench", 120, &["cleanup"])?;
        self.settle()
    }

    /// Waits until the osd is quiet, at most 5 s. The osd frees space and compacts in the
    /// background after it has answered requests, and this work would slow down the next
    /// measurement.
    ///
    /// # Errors
    /// If no osd is running.
    pub fn settle(&self) -> Result<()> {
        let osd = self.osd()?;
        let started = Instant::now();
        while started.elapsed() < QUIET_WAIT {
            let (threads, written, at) = (Threads::of(osd), written_bytes(osd), Instant::now());
            std::thread::sleep(QUIET_WATCH);
            let per_second = |amount: f64| amount / at.elapsed().as_secs_f64();
            let cpu = per_second(Threads::of(osd).cpu_seconds_since(&threads));
            let writes = per_second(written_bytes(osd).saturating_sub(written) as f64);
            if cpu < QUIET.0 && writes < QUIET.1 {
                break;
            }
        }
        Ok(())
    }

    fn osd(&self) -> Result<u32> {
        let osd = self.daemons().into_iter().find(|(name, _)| *name == "ceph-osd");
        Ok(osd.ok_or("no ceph-osd is running")?.1)
    }

    /// Runs `rados` on a pool with a deadline. Without an osd, `rados` would wait forever.
    fn rados(&self, pool: &str, seconds: u32, args: &[&str]) -> Result<String> {
        let mut command = Command::new("timeout");
        command.args([
            "--foreground",
            "-k",
            "5",
            &seconds.to_string(),
            "rados",
            "-p",
            pool,
            "--format",
            "json",
            "-c",
        ]);
        command.arg(self.dir.join("ceph.conf")).args(args);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        // If this process is killed, bench/ceph/down uses this file to stop `rados`.
        let mark = self.dir.join("pid/client.pid");
        std::fs::write(&mark, child.id().to_string())?;
        let output = child.wait_with_output()?;
        std::fs::remove_file(&mark)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let why = said.lines().last().unwrap_or("no message");
        Err(format!("rados {} failed ({}): {why}", args.join(" "), output.status).into())
    }
}

impl RadosBench {
    /// Finds the JSON object in the output.
    fn parse(output: &str) -> Result<RadosBench> {
        let start = output.find('{').ok_or("rados bench printed no JSON")?;
        Ok(serde_json::from_str(&output[start..])?)
    }

    fn ops(&self) -> Result<u64> {
        let made = self.total_writes_made.as_ref().or(self.total_reads_made.as_ref());
        Ok(made.ok_or("rados bench printed no number of operations")?.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_rados_bench_is_parsed() {
        let printed = concat!(
            "hints = 1\n",
            r#"{"datas":[{"sec":"0","avg_lat":"0"}],"total_time_run":"2.5","total_reads_made":"395","#,
            r#""read_size":"4194304","bandwidth":"759.7","average_iops":"189","average_latency":"0.082665"}"#
        );
        let found = RadosBench::parse(printed).unwrap();
        assert_eq!((found.ops().unwrap(), found.average_latency.as_str()), (395, "0.082665"));
        assert!(RadosBench::parse("error").is_err());
    }
}
