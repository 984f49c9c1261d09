//! One file per command; this one calls them.

use crate::cli::Cli;
use crate::failure::Result;

/// Runs the command that was asked for.
pub fn run(cli: Cli) -> Result<()> {
    match cli.command {}
}
