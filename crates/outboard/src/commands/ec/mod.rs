//! `outboard ec`: encodes files into fragments with parity and decodes them, without a node. It
//! also controls where a node computes parity.

mod decode;
mod encode;
mod files;
mod mode;

use clap::Subcommand;

use crate::args::NodeArgs;
use node::failure::Result;

/// The subcommands of `outboard ec`.
#[derive(Debug, Subcommand)]
pub enum EcCommand {
    Encode(encode::EncodeArgs),
    Decode(decode::DecodeArgs),
    Mode(mode::ModeArgs),
}

/// Runs the command.
pub fn run(command: EcCommand, node: &NodeArgs) -> Result<()> {
    match command {
        EcCommand::Encode(args) => encode::run(args),
        EcCommand::Decode(args) => decode::run(args),
        EcCommand::Mode(args) => mode::run(args, node),
    }
}
