//! The command line. Scripts depend on it: names and meanings stay.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use wire::Placement;

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

/// Where the node is.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// The node's directory: targets, configuration, logs [default: ./outboard-node]
    #[arg(long, global = true, env = "OUTBOARD_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address of a node to talk to; goes before --dir
    #[arg(long, global = true, env = "OUTBOARD_ENDPOINT", value_name = "HOST:PORT")]
    pub endpoint: Option<String>,
    /// How to talk to a node: auto (RDMA where both sides have it), tcp, or ofi:PROVIDER, e.g. ofi:verbs
    #[arg(long, global = true, env = "OUTBOARD_NETWORK", value_name = "STACK", default_value = "auto")]
    pub network: messenger::StackChoice,
    /// Address of this machine to connect from, where it has several [default: the system's choice]
    #[arg(long, global = true, env = "OUTBOARD_BIND", value_name = "ADDR")]
    pub bind: Option<std::net::IpAddr>,
}

/// Everything that `outboard` does.
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
    #[command(subcommand, about = "Make things go wrong on purpose, to see what happens")]
    Debug(commands::debug::DebugCommand),
    #[command(
        subcommand,
        about = "Cut files into shards with parity, put them together again; say where a node computes parity"
    )]
    Ec(commands::ec::EcCommand),
    Store(commands::store::StoreArgs),
    Osd(commands::osd::OsdArgs),
    Fsck(commands::fsck::FsckArgs),
    Doctor(commands::doctor::DoctorArgs),
}

/// Parses a placement; the help describes each.
pub fn placement() -> impl clap::builder::TypedValueParser<Value = Placement> {
    let value = |placement: Placement| {
        PossibleValue::new(placement.as_str()).help(match placement {
            Placement::Dpu => "The OSD and the store are two processes joined by the host–DPU channel",
            Placement::Host => "One process, the store called directly: the baseline",
        })
    };
    PossibleValuesParser::new(Placement::ALL.map(value)).try_map(|name| {
        Placement::ALL.into_iter().find(|p| p.as_str() == name).ok_or("there is no such placement")
    })
}
