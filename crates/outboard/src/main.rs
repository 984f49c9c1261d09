//! The `outboard` program: every role of a node and every command of its users.
//!
//! `commands` has one file per command; `node` is what runs a node: its directory, configuration, supervision and
//! roles.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod failure;
mod node;
mod output;
mod progress;

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
        Err(failure) => failure.report(),
    }
}
