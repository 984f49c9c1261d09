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
    /// Number of targets of a node; by default as many as the pool needs, and at least one more
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

fn main() -> ExitCode {
    match run(&ThrashArgs::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(violated) => {
            say(&format!("outboard-thrash: {violated} rounds with violations"));
            ExitCode::FAILURE
        }
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

/// Runs rounds until the time is over. Returns the number of rounds with violations.
fn run(args: &ThrashArgs) -> Result<usize, String> {
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
    let mut violated = 0;
    let mut number = 0;
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
            number += 1;
            let config = RoundConfig {
                seed,
                redundancy,
                placement,
                targets: args.targets.unwrap_or_else(|| RoundConfig::targets_for(redundancy)),
                target_size: args.target_size.clone(),
                kinds: kinds.clone(),
                fault_seconds,
                writers: args.writers,
            };
            violated += usize::from(run_round(args, &program, &root, number, &config, &stop)?);
            let is_over = args.one_round || Instant::now() >= end || stop.load(Ordering::Relaxed);
            if is_over || (violated > 0 && !args.keep_going) {
                break 'run;
            }
        }
    }
    if violated == 0 {
        let _ = if args.dir.is_none() { std::fs::remove_dir_all(&root) } else { Ok(()) };
        say(&format!("outboard-thrash: {number} rounds, no violation, seed {seed}"));
    }
    Ok(violated)
}

/// Runs a round, and prints its result. Returns whether a promise was broken.
fn run_round(
    args: &ThrashArgs,
    program: &std::path::Path,
    root: &std::path::Path,
    number: usize,
    config: &RoundConfig,
    stop: &AtomicBool,
) -> Result<bool, String> {
    let dir = root.join(format!("round-{number}"));
    std::fs::create_dir(&dir).map_err(|e| format!("cannot create {}: {e}", dir.display()))?;
    say(&format!("round {number}: {config}"));
    let summary = round::run(program, &dir, config, args.verbose, stop)
        .map_err(|why| format!("round {number} ({config}) in {}: {why}", dir.display()))?;
    say(&summary.text());
    if !summary.record.is_violated() {
        std::fs::remove_dir_all(&dir).map_err(|e| format!("cannot remove {}: {e}", dir.display()))?;
        return Ok(false);
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
    Ok(true)
}
