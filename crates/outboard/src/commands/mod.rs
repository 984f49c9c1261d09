//! One file per command; this one calls them.

pub mod doctor;
pub mod down;

use crate::cli::{Cli, Command};
use crate::failure::Result;

/// Runs the command that was asked for.
pub fn run(cli: Cli) -> Result<()> {
    let node = &cli.node;
    match cli.command {
        Command::Down(args) => down::run(args, node),
        Command::Doctor(args) => doctor::run(args, node),
    }
}
