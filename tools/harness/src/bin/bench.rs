//! `make bench`: compares a node with the ceilings of its drive, network and memory, in one run.
//! `OUTBOARD_BENCH_ROUNDS` (5) and `OUTBOARD_BENCH_SECONDS` (4) set the duration. The program
//! prints medians and their spread.
//!
//! `make bench COMPARE=OLD`: compares an old binary with the new one, in interleaved rounds
//! (`compare`). The exit status is 1 if a result of the new binary is worse, and 2 if the
//! comparison failed.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use outboard_harness::ceiling::{self, FioFile};
use outboard_harness::node::{BenchSpec, Node, NodePlacement};
use outboard_harness::report::{Table, median, say};
use outboard_harness::{Result, compare};

fn main() -> ExitCode {
    let outcome = match compare::CompareSettings::from_args(std::env::args().skip(1)) {
        Ok(Some(settings)) => compare(&settings),
        Ok(None) => against_the_machine().map(|()| ExitCode::SUCCESS),
        Err(why) => Err(why),
    };
    outcome.unwrap_or_else(|why| {
        complain(&format!("outboard-bench: {why}"));
        ExitCode::from(2)
    })
}

/// Prints a line to standard error. Ignores errors, such as a closed pipe.
fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn compare(settings: &compare::CompareSettings) -> Result<ExitCode> {
    let failed = compare::run(settings, &complain)?.print(settings.json)?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn against_the_machine() -> Result<()> {
    let rounds = setting("OUTBOARD_BENCH_ROUNDS", 5);
    let seconds = setting("OUTBOARD_BENCH_SECONDS", 4);
    let parent = std::env::var_os("OUTBOARD_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = parent.join(format!("outboard-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let outcome = measure(&dir, rounds, seconds);
    std::fs::remove_dir_all(&dir)?;
    outcome
}

fn setting(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// The values of one figure, one per round.
#[derive(Default)]
struct RoundValues(Vec<f64>);

impl RoundValues {
    fn median(&self) -> f64 {
        median(self.0.clone())
    }

    fn spread(&self) -> String {
        let (low, high) = self.0.iter().fold((f64::MAX, 0.0_f64), |(l, h), v| (l.min(*v), h.max(*v)));
        format!("{low:.0}..{high:.0}")
    }
}

fn measure(dir: &std::path::Path, rounds: u32, seconds: u32) -> Result<()> {
    say(format!(
        "running {rounds} rounds of all measurements, {seconds} s per measurement, in {}",
        dir.display()
    ));
    let fio = FioFile::create(dir, 2048)?;
    let node = Node::new(&dir.join("node"))?;
    node.up(NodePlacement::Dpu, 1, "8GiB")?;
    node.run(&["pool", "create", "bench"])?;
    let idle = idle_cpu_percent(&node)?;

    let names = [
        "fio 4 MiB write, depth 1, MB/s",
        "fio 4 MiB write, depth 16, MB/s",
        "fio 4 KiB write + fdatasync, depth 1, op/s",
        "bare TCP over loopback, MB/s",
        "memory copy, MB/s",
        "dpu 4 MiB write, 16 in flight, MB/s",
        "dpu 4 KiB durable write, 16 in flight, op/s",
        "host 4 MiB write, 16 in flight, MB/s",
        "host 4 KiB durable write, 16 in flight, op/s",
    ];
    let mut series: Vec<RoundValues> = names.iter().map(|_| RoundValues::default()).collect();
    let large = BenchSpec { mode: "write", object_size: "4MiB", in_flight: 16, seconds };
    let small = BenchSpec { object_size: "4KiB", ..large };
    for round in 1..=rounds {
        say(format!("round {round} of {rounds}"));
        let mut values = vec![
            fio.write_mb_per_s("4m", 1, seconds)?,
            fio.write_mb_per_s("4m", 16, seconds)?,
            fio.sync_write_iops(seconds)?,
            ceiling::loopback(seconds.min(2))?.mb_per_s,
            ceiling::memcpy_mb_per_s(),
        ];
        for placement in [NodePlacement::Dpu, NodePlacement::Host] {
            node.down()?;
            node.up(placement, 1, "8GiB")?;
            values.push(node.bench("bench", large)?.mb_per_s);
            values.push(node.bench("bench", small)?.iops);
        }
        series.iter_mut().zip(values).for_each(|(s, v)| s.0.push(v));
    }

    let mut table = Table::new(&["figure", "median", "spread"]);
    for (name, s) in names.iter().zip(&series) {
        table.row(&[(*name).to_owned(), format!("{:.0}", s.median()), s.spread()]);
    }
    table.print();

    let m: Vec<f64> = series.iter().map(RoundValues::median).collect();
    let (drive, network) = (m[0].max(m[1]), m[3]);
    say("");
    let mut ratios = Table::new(&["ratio", "value", "threshold"]);
    let mut ratio = |name: &str, value: f64, bar: &str| {
        ratios.row(&[name.to_owned(), format!("{value:.2}"), bar.to_owned()])
    };
    ratio("dpu 4 MiB write / fio, better of depth 1 and 16", m[5] / drive, ">= 0.60");
    ratio("dpu 4 MiB write / bare loopback TCP", m[5] / network, "");
    ratio("host 4 MiB write / fio", m[7] / drive, "");
    ratio("dpu 4 KiB durable write / fio 4 KiB write+fdatasync", m[6] / m[2], ">= 2");
    ratio("host 4 KiB durable write / fio 4 KiB write+fdatasync", m[8] / m[2], "");
    ratio("idle node, % of one core", idle, "< 1");
    ratios.print();
    peak_memory(&node)
}

/// Measures the CPU time of all processes of a node over ten idle seconds, as a percentage of one
/// core.
fn idle_cpu_percent(node: &Node) -> Result<f64> {
    std::thread::sleep(Duration::from_secs(2));
    let pids: Vec<u32> = node.status()?.processes.iter().filter_map(|p| p.pid).collect();
    let used = || pids.iter().map(|pid| cpu_seconds(*pid)).sum::<f64>();
    let before = used();
    std::thread::sleep(Duration::from_secs(10));
    Ok((used() - before) / 10.0 * 100.0)
}

/// Returns the run time of all threads of a process in seconds, from the scheduler's nanosecond
/// clock.
fn cpu_seconds(pid: u32) -> f64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0.0 };
    let on_cpu = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_ascii_whitespace().next()?.parse::<f64>().ok()
    };
    tasks.flatten().filter_map(on_cpu).sum::<f64>() / 1e9
}

/// Prints the peak resident memory of each process after a load with 64 writes of 16 MiB in flight.
fn peak_memory(node: &Node) -> Result<()> {
    node.down()?;
    node.up(NodePlacement::Dpu, 1, "8GiB")?;
    node.bench("bench", BenchSpec { mode: "write", object_size: "16MiB", in_flight: 64, seconds: 5 })?;
    say("\n  peak resident memory with 64 x 16 MiB writes in flight (limit for store and osd: 512 MiB each)");
    for process in node.status()?.processes {
        let Some(pid) = process.pid else { continue };
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("unknown").trim();
        say(format!("    {:<12} {peak}", process.role));
    }
    Ok(())
}
