//! The command line of Outboard. It runs the roles of a node, and offers commands to users.
//!
//! The module `commands` contains one file per command. The crate `node` runs a node: its
//! directory, configuration, supervision and roles. The program `outboard` only calls [`main`]. This
//! crate is separate from the program because cargo compiles a library while the libraries that it
//! uses are still being compiled, but starts to compile a program only after that.

#![forbid(unsafe_code)]

mod args;
mod cli;
mod commands;
mod output;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// Executes the command that the arguments of this process name, and returns its exit status. Must be
/// called before the process starts another thread.
pub fn main() -> ExitCode {
    node::role::prepare_process();
    let cli = cli::Cli::parse();
    match cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure),
    }
}

/// Prints a failure to standard error and returns its exit status.
fn report(failure: &node::failure::Failure) -> ExitCode {
    // If standard error is closed, the message is lost.
    let _ = writeln!(std::io::stderr(), "outboard: {}", output::shown_as_error(&failure.to_string()));
    ExitCode::from(match (failure.is_usage(), failure.is_refusal()) {
        (true, _) => 2,
        (_, true) => 3,
        _ => 1,
    })
}
