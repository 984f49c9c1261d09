//! The `outboard` program. It runs the roles of a node, and offers commands to users.
//!
//! The module `commands` contains one file per command. The crate `node` runs a node: its
//! directory, configuration, supervision and roles.

#![forbid(unsafe_code)]

mod args;
mod cli;
mod commands;
mod output;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// Replaces the C library's allocator. Buffers are pooled, but each request also allocates small
/// values on one thread and frees them on another. The C library's allocator is slow in this case.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // This call must come before the process starts another thread.
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
