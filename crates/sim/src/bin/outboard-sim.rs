//! `outboard-sim`: runs simulations of a node from seeds.

#![expect(clippy::print_stderr, reason = "this is a program for the command line")]
#![expect(
    clippy::disallowed_methods,
    reason = "the program measures real time and runs simulations in threads"
)]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::mutant::Mutant;
use clap::Parser;
use sim::coverage::Coverage;
use sim::output::line;
use sim::plan::{FaultKind, PlanOptions, SimulationPlan};
use sim::simulation::{Report, run};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The commit that the program was built from, or `unknown`.
const COMMIT: &str = env!("OUTBOARD_COMMIT");
/// Real time after which a simulation counts as stuck.
const STUCK: Duration = Duration::from_secs(120);
/// Number of the last events that a report of a failure shows.
const SHOWN_EVENTS: usize = 40;
/// Number of violations that a report of a failure shows.
const SHOWN_VIOLATIONS: usize = 5;

/// Simulate a whole node in one process, from one seed.
///
/// Each seed determines a node, the requests of its clients, the faults and their times. A simulation
/// with the same seed and the same options repeats exactly. At its end, the program checks that the
/// node has kept the promises of docs/semantics.md.
///
/// Examples:
///   outboard-sim --seed 7 --trace          print everything that happens in one simulation
///   outboard-sim --seed 7 --minimize       find the faults that a failure needs
///   outboard-sim --count 1000 --jobs 2     run many simulations
///   outboard-sim --minutes 4               run as many simulations as fit, from a new seed
#[derive(Parser, Clone)]
#[command(version, verbatim_doc_comment)]
struct Arguments {
    /// The first seed. By default, 0, or a new seed with --minutes.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of simulations, with consecutive seeds.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Run simulations for this time instead of a fixed number.
    #[arg(long, conflicts_with = "count", value_parser = positive_minutes)]
    minutes: Option<f64>,
    /// Number of simulations that run at a time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Kinds of faults that do not occur, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "KIND")]
    off: Vec<FaultKind>,
    /// Make the calls of all clients meet on few objects, in all simulations instead of a quarter
    /// of them.
    #[arg(long)]
    hot: bool,
    /// Inject only the faults with these numbers, as --minimize prints them. Without a number, inject
    /// no fault.
    #[arg(long, value_delimiter = ',', value_name = "NUMBER", num_args = 0.., conflicts_with_all = ["count", "minutes"])]
    only: Option<Vec<usize>>,
    /// Run no further simulation after the first failure.
    #[arg(long)]
    until_failure: bool,
    /// Remove the faults that are not needed for the failure.
    #[arg(long, requires = "seed", conflicts_with_all = ["count", "minutes"])]
    minimize: bool,
    /// Print each event.
    #[arg(long)]
    trace: bool,
    /// Print one line per simulation.
    #[arg(long, short)]
    verbose: bool,
    /// Print how often each effect of faults occurred, and which effects never occurred.
    #[arg(long)]
    coverage: bool,
    /// Plant a bug in the code under test. Needs a build with `--cfg mutants`.
    #[arg(long)]
    mutant: Option<Mutant>,
    /// Plant each bug in turn, and check that a simulation among --count finds it.
    #[arg(long, conflicts_with_all = ["mutant", "minutes", "minimize"])]
    mutants: bool,
    /// Print the log of the code under test, for example `debug` or `osd=trace,array=debug`.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Whether the batch looks for a failure that the planted bug causes.
    #[arg(skip)]
    is_hunt: bool,
}

impl Arguments {
    fn plan_options(&self) -> PlanOptions {
        PlanOptions { off: self.off.clone(), hot: self.hot }
    }
}

/// Parses a duration in minutes.
fn positive_minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if minutes > 0.0 => Ok(minutes),
        _ => Err("the number of minutes must be positive".to_owned()),
    }
}

/// Prints the simulated time in front of each line of the log.
struct SimulatedTime;

impl tracing_subscriber::fmt::time::FormatTime for SimulatedTime {
    fn format_time(&self, out: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        match sim::trace::now() {
            Some(at) => write!(out, "{:>10.6}", at.as_secs_f64()),
            None => write!(out, "         -"),
        }
    }
}

/// The simulations of one run of the program.
struct SeedBatch {
    arguments: Arguments,
    first: u64,
    began: Instant,
    /// Number of simulations that were begun.
    begun: AtomicU64,
    done: AtomicU64,
    /// Calls of clients, summed over all simulations.
    calls: AtomicU64,
    simulated_ms: AtomicU64,
    coverage: Mutex<Coverage>,
    failures: Mutex<Vec<u64>>,
    is_over: AtomicBool,
    /// Seed and start of the simulation that each job runs.
    running: Vec<Mutex<Option<(u64, Instant)>>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(filter) = &arguments.log {
        let filter: Targets = match filter.parse() {
            Ok(filter) => filter,
            Err(e) => return refuse(&format!("--log {filter:?} is not a filter of the log: {e}")),
        };
        let log = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE);
        log.with_timer(SimulatedTime).with_ansi(false).finish().with(filter).init();
    }
    if (arguments.mutant.is_some() || arguments.mutants) && !cfg!(mutants) {
        return refuse("this build contains no planted bugs; build with RUSTFLAGS=\"--cfg mutants\"");
    }
    if arguments.mutants {
        return hunt_mutants(&arguments);
    }
    let is_minimizing = arguments.minimize;
    let batch = SeedBatch::new(arguments);
    if let Some(only) = &batch.arguments.only {
        let count = SimulationPlan::new(batch.first, &batch.arguments.plan_options()).faults.len();
        if let Some(number) = only.iter().find(|number| **number >= count) {
            return refuse(&format!(
                "the plan of seed {} has no fault {number}: it has {count} faults, counted from 0 without the kinds in --off",
                batch.first
            ));
        }
    }
    if is_minimizing {
        return minimize(&batch);
    }
    batch.run();
    batch.summarise()
}

/// Reports wrong arguments.
fn refuse(why: &str) -> ExitCode {
    eprintln!("outboard-sim: {why}");
    ExitCode::from(2)
}

/// Plants each bug, and runs simulations until one of them fails because of the bug. Prints how many
/// were needed.
fn hunt_mutants(arguments: &Arguments) -> ExitCode {
    let mut missed = 0;
    for mutant in Mutant::ALL {
        let batch = SeedBatch::new(Arguments {
            mutant: Some(mutant),
            until_failure: true,
            is_hunt: true,
            ..arguments.clone()
        });
        batch.run();
        let failure = batch.failures.lock().expect("no job panics").iter().min().copied();
        let (done, wall) = (batch.done.load(Ordering::Relaxed), batch.began.elapsed().as_secs_f64());
        match failure {
            Some(seed) => line(format_args!(
                "{:<28} found by seed {seed}, {done} simulations, {wall:.1} s",
                mutant.name()
            )),
            None => {
                missed += 1;
                line(format_args!("{:<28} NOT FOUND by {done} simulations, {wall:.1} s", mutant.name()));
            }
        }
    }
    if missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

impl SeedBatch {
    fn new(arguments: Arguments) -> SeedBatch {
        let first = arguments.seed.unwrap_or_else(|| match arguments.minutes {
            Some(_) => base::entropy::random::<u32>().into(),
            None => 0,
        });
        SeedBatch {
            first,
            began: Instant::now(),
            begun: AtomicU64::new(0),
            done: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            simulated_ms: AtomicU64::new(0),
            coverage: Mutex::default(),
            failures: Mutex::default(),
            is_over: AtomicBool::new(false),
            running: (0..arguments.jobs.max(1)).map(|_| Mutex::default()).collect(),
            arguments,
        }
    }

    /// Runs all simulations of the batch.
    fn run(&self) {
        std::thread::scope(|scope| {
            for job in 0..self.running.len() {
                scope.spawn(move || self.work(job));
            }
            self.watch();
        });
    }

    fn plan(&self, seed: u64) -> SimulationPlan {
        let plan = SimulationPlan::new(seed, &self.arguments.plan_options());
        match &self.arguments.only {
            Some(only) => plan.only(only),
            None => plan,
        }
    }

    /// Returns the next seed, or `None` if the batch is complete.
    fn next(&self) -> Option<u64> {
        let is_over = match self.arguments.minutes {
            Some(minutes) => self.began.elapsed().as_secs_f64() >= minutes * 60.0,
            None => self.begun.load(Ordering::Relaxed) >= self.arguments.count,
        };
        let has_failed = || !self.failures.lock().expect("no job panics").is_empty();
        if is_over || (self.arguments.until_failure && has_failed()) {
            return None;
        }
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let is_beyond = self.arguments.minutes.is_none() && number >= self.arguments.count;
        (!is_beyond).then(|| self.first.wrapping_add(number))
    }

    fn work(&self, job: usize) {
        base::mutant::plant(self.arguments.mutant);
        while let Some(seed) = self.next() {
            let began = Instant::now();
            *self.running[job].lock().expect("no job panics") = Some((seed, began));
            let plan = self.plan(seed);
            if self.arguments.trace {
                line(&plan);
            }
            let report = run(&plan, self.arguments.trace);
            let is_expected = self.arguments.is_hunt && report.has_failed() && {
                *self.running[job].lock().expect("no job panics") = Some((seed, Instant::now()));
                self.fails_anyway(&plan)
            };
            *self.running[job].lock().expect("no job panics") = None;
            self.done.fetch_add(1, Ordering::Relaxed);
            self.calls.fetch_add(report.calls as u64, Ordering::Relaxed);
            self.simulated_ms.fetch_add(report.simulated.as_millis() as u64, Ordering::Relaxed);
            self.coverage.lock().expect("no job panics").merge(&report.coverage);
            if self.arguments.verbose || self.arguments.trace {
                line(format_args!(
                    "seed {seed}: trace {:016x}, {} events, {} calls, {:.0} simulated s in {:.3} s",
                    report.hash,
                    report.events,
                    report.calls,
                    report.simulated.as_secs_f64(),
                    began.elapsed().as_secs_f64()
                ));
            }
            if !report.has_failed() {
                continue;
            }
            if is_expected {
                line(format_args!("seed {seed} fails also without a planted bug, so it does not count"));
                continue;
            }
            let mut failures = self.failures.lock().expect("no job panics");
            failures.push(seed);
            if !self.arguments.is_hunt {
                tell(&plan, &report);
            }
        }
        if self.running.iter().all(|running| running.lock().expect("no job panics").is_none()) {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a simulation fails also without the planted bug.
    fn fails_anyway(&self, plan: &SimulationPlan) -> bool {
        base::mutant::plant(None);
        let report = run(plan, false);
        base::mutant::plant(self.arguments.mutant);
        report.has_failed()
    }

    /// Ends the process if a simulation makes no progress.
    fn watch(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
            for running in &self.running {
                let running = *running.lock().expect("no job panics");
                if let Some((seed, began)) = running
                    && began.elapsed() > STUCK
                {
                    line(format_args!(
                        "seed {seed}: FAILED, the simulation has not ended after {} s; commit {}",
                        STUCK.as_secs(),
                        COMMIT
                    ));
                    std::process::exit(1);
                }
            }
        }
    }

    fn summarise(&self) -> ExitCode {
        let (done, wall) = (self.done.load(Ordering::Relaxed), self.began.elapsed());
        let mut failures = self.failures.lock().expect("no job panics").clone();
        failures.sort_unstable();
        let per_seed = wall.as_secs_f64() * self.running.len() as f64 / done.max(1) as f64;
        line(format_args!(
            "{done} simulations from seed {}, commit {}: {} calls, {:.1} simulated hours, {:.1} s with {} jobs, {per_seed:.3} s per simulation and job",
            self.first,
            COMMIT,
            self.calls.load(Ordering::Relaxed),
            self.simulated_ms.load(Ordering::Relaxed) as f64 / 3.6e6,
            wall.as_secs_f64(),
            self.running.len()
        ));
        if self.arguments.coverage {
            let coverage = self.coverage.lock().expect("no job panics");
            let missing = coverage.missing(&self.arguments.off);
            line(format_args!("{coverage}{} effects never occurred: {}", missing.len(), missing.join(", ")));
        }
        if failures.is_empty() {
            line("the node has kept its promises in all simulations");
            return ExitCode::SUCCESS;
        }
        let seeds: Vec<String> = failures.iter().map(ToString::to_string).collect();
        line(format_args!(
            "the node has broken a promise in {} simulations; seeds: {}",
            failures.len(),
            seeds.join(" ")
        ));
        ExitCode::FAILURE
    }
}

/// Prints a failure: how to repeat it, the faults, the broken promises and the last events.
fn tell(plan: &SimulationPlan, report: &Report) {
    line(format_args!("seed {}: FAILED, commit {}, trace {:016x}", plan.seed, COMMIT, report.hash));
    line(plan);
    for event in report.recent.iter().rev().take(SHOWN_EVENTS).rev() {
        line(format_args!("  {event}"));
    }
    for panic in &report.panics {
        line(format_args!("seed {}: the code under test has panicked: {panic}", plan.seed));
    }
    for violation in report.violations.iter().take(SHOWN_VIOLATIONS) {
        line(format_args!("seed {}: {violation}", plan.seed));
    }
    let more = report.violations.len().saturating_sub(SHOWN_VIOLATIONS);
    if more > 0 {
        line(format_args!("seed {}: {more} more violations", plan.seed));
    }
}

/// Removes faults as long as the failure stays.
fn minimize(batch: &SeedBatch) -> ExitCode {
    base::mutant::plant(batch.arguments.mutant);
    let seed = batch.first;
    let whole = SimulationPlan::new(seed, &batch.arguments.plan_options());
    let first = run(&batch.plan(seed), false);
    let Some(kind) = first.failure_kind() else {
        line(format_args!("seed {seed}: the node has kept its promises, so there is nothing to minimize"));
        return ExitCode::SUCCESS;
    };
    let all: Vec<usize> = (0..whole.faults.len()).collect();
    let mut kept = batch.arguments.only.clone().unwrap_or(all);
    let fails = |kept: &[usize]| run(&whole.only(kept), false).failure_kind().as_ref() == Some(&kind);
    let mut size = kept.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        while at < kept.len() {
            let mut fewer = kept.clone();
            fewer.drain(at..(at + size).min(kept.len()));
            if fails(&fewer) {
                kept = fewer;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    let plan = whole.only(&kept);
    tell(&plan, &run(&plan, false));
    line(format_args!(
        "{} of {} faults are needed; repeat with: {}",
        kept.len(),
        whole.faults.len(),
        repetition(&batch.arguments, seed, &kept)
    ));
    ExitCode::FAILURE
}

/// The arguments that repeat a simulation with only these faults. The numbers of the faults depend
/// on the kinds that are switched off.
fn repetition(arguments: &Arguments, seed: u64, kept: &[usize]) -> String {
    let mut parts = vec!["--seed".to_owned(), seed.to_string()];
    if !arguments.off.is_empty() {
        let off: Vec<&str> = arguments.off.iter().map(|kind| kind.name()).collect();
        parts.extend(["--off".to_owned(), off.join(",")]);
    }
    if let Some(mutant) = arguments.mutant {
        parts.extend(["--mutant".to_owned(), mutant.name().to_owned()]);
    }
    parts.push("--only".to_owned());
    if !kept.is_empty() {
        let numbers: Vec<String> = kept.iter().map(ToString::to_string).collect();
        parts.push(numbers.join(","));
    }
    parts.join(" ")
}
