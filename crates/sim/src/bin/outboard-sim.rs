//! `outboard-sim`: runs simulations of a node from seeds.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is a program for the command line")]

use std::process::ExitCode;

use clap::Parser;
use sim::plan::{FaultKind, Plan};

/// Simulate a whole node in one process, from one seed.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// The seed of the first simulation.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of simulations, with consecutive seeds.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Kinds of faults that do not occur.
    #[arg(long, value_delimiter = ',')]
    off: Vec<FaultKind>,
    /// Print each event.
    #[arg(long)]
    trace: bool,
    /// Print the log of the code under test, for example `debug` or `osd=trace,array=debug`.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
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

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut failed = 0;
    if let Some(filter) = &arguments.log {
        tracing_subscriber::fmt().with_env_filter(filter).with_timer(SimulatedTime).with_ansi(false).init();
    }
    let began = std::time::Instant::now();
    for seed in arguments.seed..arguments.seed + arguments.count {
        let plan = Plan::new(seed, &arguments.off);
        if arguments.trace {
            eprintln!("{plan:#?}");
        }
        let one = std::time::Instant::now();
        let report = sim::simulation::run(&plan, arguments.trace);
        println!(
            "seed {seed}: trace {:016x}, {} events, {} calls, {:.0} simulated s in {:.3} s",
            report.hash,
            report.events,
            report.calls,
            report.simulated.as_secs_f64(),
            one.elapsed().as_secs_f64()
        );
        failed += u64::from(!report.violations.is_empty());
        for violation in &report.violations {
            println!("seed {seed}: {violation}");
        }
    }
    println!(
        "{failed} broke a promise; {} simulations in {:.1} s",
        arguments.count,
        began.elapsed().as_secs_f64()
    );
    if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
