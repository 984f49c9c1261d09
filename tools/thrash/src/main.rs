//! `outboard-thrash`: injects faults into real nodes while clients make calls, and checks that the
//! node keeps the promises of `docs/semantics.md`. See `docs/thrash.md`.
//!
//! A run consists of rounds. Each round has a new node with one pool. The check of the answers is in
//! `ledger`; the faults are in `injector` and `outside`.

#![forbid(unsafe_code)]

mod calls;
mod content;
mod expected;
mod filler;
mod hot;
mod image;
mod injector;
mod ledger;
mod outside;
mod plan;
mod record;
mod relay;
mod round;
mod thrashed_node;
mod writer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use client::{Placement, Redundancy};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::plan::{RoundConfig, ThrashFault};
use crate::record::RoundRecord;

/// Inject faults into real nodes, and check that no acknowledged change is lost
///
/// Runs rounds until the time is over. Each round starts a node with one pool, lets many clients
/// change objects, injects faults that the pool tolerates, and then checks that no acknowledged
/// change is lost, no content is mixed, no change was made twice, and that calls succeed 30 s after
/// the last fault.
#[derive(Debug, Parser)]
#[command(version, after_help = ThrashFault::help())]
struct ThrashArgs {
    /// Duration of the run, in minutes; the last round ends later
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Seed of the run; a random seed by default
    #[arg(long, env = "OUTBOARD_SEED")]
    seed: Option<u64>,
    /// Redundancy schemes of the pools
    #[arg(long, value_delimiter = ',', default_value = "single,mirror:2,mirror:3,ec:2+1,ec:4+2")]
    pools: Vec<Redundancy>,
    /// Placements of the osd: dpu, host, or both
    #[arg(long, value_delimiter = ',', default_value = "dpu,host", value_parser = parse_placement)]
    placement: Vec<Placement>,
    /// Kinds of faults to inject; all by default
    #[arg(long, value_delimiter = ',', value_name = "KIND")]
    faults: Vec<ThrashFault>,
    /// Kinds of faults not to inject
    #[arg(long, value_delimiter = ',', value_name = "KIND")]
    without: Vec<ThrashFault>,
    /// How long faults are injected in a round, in seconds; by default a tenth of the run, from 20 to
    /// 150 s
    #[arg(long, value_name = "SECONDS")]
    fault_seconds: Option<u64>,
    /// Number of targets of a node; by default as many as the pool needs, or one more, at random,
    /// but at least two
    #[arg(long)]
    targets: Option<usize>,
    /// Size of a target
    #[arg(long, default_value = "128MiB")]
    target_size: String,
    /// Number of writers
    #[arg(long, default_value_t = 9)]
    writers: usize,
    /// Directory for the nodes; a temporary directory by default
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The outboard program; by default in the directory of this program
    #[arg(long)]
    program: Option<PathBuf>,
    /// Run exactly one round, with the first pool, the first placement and the seed as given
    #[arg(long)]
    one_round: bool,
    /// Continue with the next round after a violation
    #[arg(long)]
    keep_going: bool,
    /// Print each event
    #[arg(long, short)]
    verbose: bool,
}

fn parse_placement(name: &str) -> Result<Placement, String> {
    let found = Placement::ALL.into_iter().find(|placement| placement.as_str() == name);
    found.ok_or_else(|| "use dpu or host".to_owned())
}

/// Prints a line.
#[expect(clippy::print_stdout, reason = "a program prints its results")]
fn say(text: &str) {
    println!("{text}");
}

/// The result of a run.
#[derive(Debug, Clone, Copy, Default)]
struct RunResult {
    /// Number of rounds.
    rounds: usize,
    /// Number of rounds in which a promise was broken.
    violated: usize,
    /// Number of faults that had an effect.
    fired: u64,
}

impl RunResult {
    /// Returns the result in one line, without the name of the program.
    fn text(&self) -> String {
        let RunResult { rounds, violated, fired } = self;
        match (violated, fired) {
            (0, 0) => format!("{rounds} rounds, but no fault had an effect, so the run shows nothing"),
            (0, _) => format!("{rounds} rounds, {fired} faults, no violation"),
            _ => format!("{violated} rounds with violations"),
        }
    }

    /// Returns whether no promise was broken although there were faults.
    fn is_success(&self) -> bool {
        self.violated == 0 && self.fired > 0
    }
}

fn main() -> ExitCode {
    match run(&ThrashArgs::parse()) {
        Ok(result) if result.is_success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(why) => {
            say(&format!("outboard-thrash: {why}"));
            ExitCode::from(2)
        }
    }
}

/// Sets `stop` when the user interrupts the program. A second signal ends the program at once.
fn watch_signals(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
            let Ok(mut terminated) = terminated else { return };
            loop {
                tokio::select! {
                    _ = tokio::signal::ctrl_c() => {}
                    _ = terminated.recv() => {}
                }
                if stop.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
            }
        });
    });
}

/// Runs rounds until the time is over, and prints the result.
fn run(args: &ThrashArgs) -> Result<RunResult, String> {
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|e| e.to_string())?.with_file_name("outboard"),
    };
    if !program.exists() {
        return Err(format!("{} does not exist; build it, or name it with --program", program.display()));
    }
    if args.pools.is_empty() || args.placement.is_empty() || args.writers == 0 {
        return Err("at least one pool, one placement and one writer are needed".to_owned());
    }
    let kinds = if args.faults.is_empty() { ThrashFault::all() } else { args.faults.clone() };
    let kinds: Vec<ThrashFault> = kinds.into_iter().filter(|kind| !args.without.contains(kind)).collect();
    if kinds.is_empty() {
        return Err("no kind of fault is left; change --faults or --without".to_owned());
    }
    let seed = args.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000_000));
    let fault_seconds = args.fault_seconds.unwrap_or(((args.minutes * 6.0) as u64).clamp(20, 150));
    let root = match &args.dir {
        Some(dir) => std::fs::create_dir_all(dir).map(|()| dir.clone()),
        None => tempfile::Builder::new().prefix("outboard-thrash-").tempdir().map(tempfile::TempDir::keep),
    };
    let root =
        root.and_then(|root| root.canonicalize()).map_err(|e| format!("cannot create a directory: {e}"))?;
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    say(&format!("outboard-thrash: seed {seed}, directory {}, faults {}", root.display(), names.join(",")));

    let stop = Arc::new(AtomicBool::new(false));
    watch_signals(Arc::clone(&stop));
    let end = Instant::now() + Duration::from_secs_f64(args.minutes * 60.0);
    let mut random = SmallRng::seed_from_u64(seed);
    let mut result = RunResult::default();
    'run: loop {
        let mut cases: Vec<(Redundancy, Placement)> = args
            .pools
            .iter()
            .flat_map(|pool| args.placement.iter().map(move |placement| (*pool, *placement)))
            .collect();
        cases.shuffle(&mut random);
        for (redundancy, placement) in cases {
            let (redundancy, placement, seed) = match args.one_round {
                true => (args.pools[0], args.placement[0], seed),
                false => (redundancy, placement, random.random_range(0..1_000_000_000)),
            };
            result.rounds += 1;
            let config = RoundConfig {
                seed,
                redundancy,
                placement,
                targets: args.targets.unwrap_or_else(|| RoundConfig::targets_for(redundancy, seed)),
                target_size: args.target_size.clone(),
                kinds: kinds.clone(),
                fault_seconds,
                writers: args.writers,
            };
            let record = run_round(args, &program, &root, result.rounds, &config, &stop)?;
            result.violated += usize::from(record.is_violated());
            result.fired += record.faults().values().sum::<u64>();
            let is_over = args.one_round || Instant::now() >= end || stop.load(Ordering::Relaxed);
            if is_over || (result.violated > 0 && !args.keep_going) {
                break 'run;
            }
        }
    }
    if result.violated == 0 {
        let _ = if args.dir.is_none() { std::fs::remove_dir_all(&root) } else { Ok(()) };
    }
    say(&format!("outboard-thrash: {}, seed {seed}", result.text()));
    Ok(result)
}

/// Runs a round, and prints its result. Returns its record.
fn run_round(
    args: &ThrashArgs,
    program: &std::path::Path,
    root: &std::path::Path,
    number: usize,
    config: &RoundConfig,
    stop: &AtomicBool,
) -> Result<Arc<RoundRecord>, String> {
    let dir = root.join(format!("round-{number}"));
    std::fs::create_dir(&dir).map_err(|e| format!("cannot create {}: {e}", dir.display()))?;
    say(&format!("round {number}: {config}"));
    let summary = round::run(program, &dir, config, args.verbose, stop)
        .map_err(|why| format!("round {number} ({config}) in {}: {why}", dir.display()))?;
    say(&summary.text());
    if !summary.record.is_violated() {
        std::fs::remove_dir_all(&dir).map_err(|e| format!("cannot remove {}: {e}", dir.display()))?;
        return Ok(summary.record);
    }
    say(&summary.violations());
    let faults: Vec<&str> = config.kinds.iter().map(|kind| kind.name()).collect();
    say(&format!("the node's logs: {}", dir.join("node/log").display()));
    say(&format!("all calls: {}", dir.join("history.txt").display()));
    say(&format!(
        "repeat with: outboard-thrash --one-round --seed {} --pools {} --placement {} --targets {} --target-size {} \
         --writers {} --fault-seconds {} --faults {}",
        config.seed,
        config.redundancy,
        config.placement,
        config.targets,
        config.target_size,
        config.writers,
        config.fault_seconds,
        faults.join(","),
    ));
    Ok(summary.record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_faults_fails() {
        let result = RunResult { rounds: 3, violated: 0, fired: 0 };
        assert!(!result.is_success());
        assert!(result.text().contains("no fault had an effect"), "{}", result.text());
        assert!(RunResult { fired: 1, ..result }.is_success());
        assert!(!RunResult { fired: 1, violated: 1, ..result }.is_success());
    }
}
