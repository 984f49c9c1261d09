//! The commands, one file per command. This module runs the command that the user has chosen.

pub mod bench;
pub mod cp;
pub mod debug;
pub mod doctor;
pub mod down;
pub mod ec;
pub mod fsck;
pub mod get;
mod locate;
pub mod ls;
pub mod osd;
pub mod pool;
pub mod put;
pub mod rm;
pub mod scrub;
mod session;
pub mod stat;
pub mod status;
pub mod store;
pub mod target;
pub mod up;

use crate::cli::{Cli, Command};
use node::failure::Result;

/// Runs the command that the command line selects.
pub fn run(cli: Cli) -> Result<()> {
    let node = &cli.node;
    match cli.command {
        Command::Up(args) => up::run(args, node),
        Command::Down(args) => down::run(args, node),
        Command::Status(args) => status::run(args, node),
        Command::Pool(command) => pool::run(command, node),
        Command::Target(command) => target::run(command, node),
        Command::Scrub(args) => scrub::run(args, node),
        Command::Put(args) => put::run(args, node),
        Command::Get(args) => get::run(args, node),
        Command::Ls(args) => ls::run(args, node),
        Command::Stat(args) => stat::run(args, node),
        Command::Rm(args) => rm::run(args, node),
        Command::Cp(args) => cp::run(args, node),
        Command::Bench(args) => bench::run(args, node),
        Command::Debug(command) => debug::run(command, node),
        Command::Ec(command) => ec::run(command, node),
        Command::Store(args) => store::run(args, node),
        Command::Osd(args) => osd::run(args, node),
        Command::Fsck(args) => fsck::run(args, node),
        Command::Doctor(args) => doctor::run(args, node),
    }
}

/// Returns the client options that all commands use. With the default timeouts, a command continues
/// across the restart of any role of the node.
fn options() -> client::Options {
    client::Options { name: "outboard".to_owned(), ..client::Options::default() }
}
