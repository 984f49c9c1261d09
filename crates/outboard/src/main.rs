//! The `outboard` program: every role of a node and every command of its users.
//!
//! `commands` has one file per command. The crate `node` runs a node: its directory, configuration, supervision and roles.

#![forbid(unsafe_code)]

mod args;
mod cli;
mod commands;
mod output;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// Buffers are pooled, but every request makes some small things on one thread that another drops, and there the C
/// library's allocator is slow.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Before there is any other thread.
    channel::ofi::prepare_process();
    let cli = cli::Cli::parse();
    match commands::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure),
    }
}

/// Prints a failure to standard error, and returns the exit status that fits it.
fn report(failure: &node::failure::Failure) -> ExitCode {
    // Nothing can be done if standard error itself is gone.
    let _ = writeln!(std::io::stderr(), "outboard: {}", output::shown_as_error(&failure.to_string()));
    ExitCode::from(if failure.is_usage() { 2 } else { 1 })
}
