//! `outboard ec`: files cut into shards with parity, and put together again; no node is needed.

mod bench;
mod decode;
mod encode;
mod files;

use clap::Subcommand;

use crate::failure::Result;

/// What to do with shards.
#[derive(Debug, Subcommand)]
pub enum EcCommand {
    Encode(encode::EncodeArgs),
    Decode(decode::DecodeArgs),
    Bench(bench::BenchArgs),
}

/// Runs the command.
pub fn run(command: EcCommand) -> Result<()> {
    match command {
        EcCommand::Encode(args) => encode::run(args),
        EcCommand::Decode(args) => decode::run(args),
        EcCommand::Bench(args) => bench::run(args),
    }
}
