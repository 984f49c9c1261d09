//! The definition of the command line, and the dispatch to the commands. Scripts depend on the
//! command line, so the names and meanings of commands and flags must not change.

use clap::{Parser, Subcommand};

use node::failure::Result;

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
    #[command(
        subcommand,
        about = "List targets, take targets out of use and into use again, and replace lost targets"
    )]
    Target(commands::target::TargetCommand),
    #[command(subcommand, about = "Create, list and remove tenants")]
    Tenant(commands::tenant::TenantCommand),
    #[command(subcommand, about = "Create, list and remove users")]
    User(commands::user::UserCommand),
    Grant(commands::user::GrantArgs),
    Revoke(commands::user::RevokeArgs),
    #[command(subcommand, about = "Issue and show capabilities with fewer rights")]
    Token(commands::token::TokenCommand),
    #[command(subcommand, about = "List and end sessions")]
    Session(commands::sessions::SessionCommand),
    Audit(commands::sessions::AuditArgs),
    #[command(name = "whoami")]
    WhoAmI(commands::user::WhoAmIArgs),
    Scrub(commands::scrub::ScrubArgs),
    #[command(
        subcommand,
        about = "Create, attach, snapshot and clone virtual disks, and copy them from and to files"
    )]
    Disk(commands::disk::DisksCommand),
    Put(commands::put::PutArgs),
    Get(commands::get::GetArgs),
    Ls(commands::ls::LsArgs),
    Stat(commands::stat::StatArgs),
    Rm(commands::rm::RmArgs),
    Cp(commands::cp::CpArgs),
    Bench(commands::bench::BenchCommand),
    #[command(subcommand, about = "Inject faults into a running node, and tune its channel")]
    Debug(commands::debug::DebugCommand),
    #[command(
        subcommand,
        about = "Encode files into fragments with parity, and decode them; choose where a node computes parity"
    )]
    Ec(commands::ec::EcCommand),
    Store(commands::store::StoreArgs),
    Osd(commands::osd::OsdArgs),
    Gateway(commands::gateway::GatewayArgs),
    Holder(commands::gateway::HolderArgs),
    Fsck(commands::fsck::FsckArgs),
    Doctor(commands::doctor::DoctorArgs),
}

/// Runs the selected command.
pub fn run(cli: Cli) -> Result<()> {
    let node = &cli.node;
    match cli.command {
        Command::Up(args) => commands::up::run(args, node),
        Command::Down(args) => commands::down::run(args, node),
        Command::Status(args) => commands::status::run(args, node),
        Command::Pool(command) => commands::pool::run(command, node),
        Command::Target(command) => commands::target::run(command, node),
        Command::Tenant(command) => commands::tenant::run(command, node),
        Command::User(command) => commands::user::run(command, node),
        Command::Grant(args) => commands::user::grant(args, node),
        Command::Revoke(args) => commands::user::revoke(args, node),
        Command::Token(command) => commands::token::run(command, node),
        Command::Session(command) => commands::sessions::run(command, node),
        Command::Audit(args) => commands::sessions::audit(args, node),
        Command::WhoAmI(args) => commands::user::who_am_i(args, node),
        Command::Scrub(args) => commands::scrub::run(args, node),
        Command::Disk(command) => commands::disk::run(command, node),
        Command::Put(args) => commands::put::run(args, node),
        Command::Get(args) => commands::get::run(args, node),
        Command::Ls(args) => commands::ls::run(args, node),
        Command::Stat(args) => commands::stat::run(args, node),
        Command::Rm(args) => commands::rm::run(args, node),
        Command::Cp(args) => commands::cp::run(args, node),
        Command::Bench(args) => commands::bench::run(args, node),
        Command::Debug(command) => commands::debug::run(command, node),
        Command::Ec(command) => commands::ec::run(command, node),
        Command::Store(args) => commands::store::run(args, node),
        Command::Osd(args) => commands::osd::run(args, node),
        Command::Gateway(args) => commands::gateway::run(args, node),
        Command::Holder(args) => commands::gateway::run_holder(args, node),
        Command::Fsck(args) => commands::fsck::run(args, node),
        Command::Doctor(args) => commands::doctor::run(args, node),
    }
}
