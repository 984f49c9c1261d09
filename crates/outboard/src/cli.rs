//! The definition of the command line. Scripts depend on it, so the names and meanings of commands
//! and flags must not change.

use clap::{Parser, Subcommand};

use crate::args::NodeArgs;
use crate::commands;

/// Object storage whose stack runs on a DPU instead of the host.
#[derive(Debug, Parser)]
#[command(name = "outboard", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub node: NodeArgs,
}

/// The commands of `outboard`.
#[derive(Debug, Subcommand)]
pub enum Command {
    Up(commands::up::UpArgs),
    Down(commands::down::DownArgs),
    Status(commands::status::StatusArgs),
    #[command(subcommand, about = "Create, list and remove pools")]
    Pool(commands::pool::PoolCommand),
    #[command(subcommand, about = "List targets, take them out and in, replace them")]
    Target(commands::target::TargetCommand),
    Scrub(commands::scrub::ScrubArgs),
    Put(commands::put::PutArgs),
    Get(commands::get::GetArgs),
    Ls(commands::ls::LsArgs),
    Stat(commands::stat::StatArgs),
    Rm(commands::rm::RmArgs),
    Cp(commands::cp::CpArgs),
    Bench(commands::bench::BenchCommand),
    #[command(subcommand, about = "Inject faults into a running node, and show or clear them")]
    Debug(commands::debug::DebugCommand),
    #[command(
        subcommand,
        about = "Encode files into fragments with parity, and decode them; choose where a node computes parity"
    )]
    Ec(commands::ec::EcCommand),
    Store(commands::store::StoreArgs),
    Osd(commands::osd::OsdArgs),
    Fsck(commands::fsck::FsckArgs),
    Doctor(commands::doctor::DoctorArgs),
}
