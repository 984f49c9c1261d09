//! `outboard gateway` and `outboard holder`: the roles that serve front ends on virtual disks.

use std::path::PathBuf;

use clap::Args;

use crate::args::NodeArgs;
use node::failure::{Failure, Result};
use node::role::RoleArgs;
use node::roles::gateway::{self, GatewayOptions};
use node::roles::holder;

/// Run the gateway role: serve virtual disks to virtual machines (vhost-user) and to NBD clients
///
/// `outboard up` runs and supervises this role if `gateway.enabled` is set in the configuration. Run it
/// directly on the DPU of a compute node. vhost-user devices need a holder, which keeps their connections
/// while the gateway restarts. The role prints one line of JSON when it is ready, and stops on SIGTERM or
/// SIGINT.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard holder --socket /run/outboard/holder.sock\n  \
    outboard gateway --endpoint 10.0.0.7:7400 --credentials gateway.toml --name rack1-host7 --holder /run/outboard/holder.sock --attachments /var/lib/outboard/attachments.json")]
pub struct GatewayArgs {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Name of the gateway, which must stay the same when it starts again
    #[arg(long, value_name = "NAME", default_value = "gateway")]
    pub name: String,
    /// Control socket of the holder [default: no vhost-user devices]
    #[arg(long, value_name = "PATH")]
    pub holder: Option<PathBuf>,
    /// File with the list of attached disks, which the gateway attaches again when it starts
    #[arg(long, value_name = "FILE", default_value = "attachments.json")]
    pub attachments: PathBuf,
}

/// Run the holder role: keep the connections of vhost-user front ends while the gateway restarts
///
/// `outboard up` runs and supervises this role together with the gateway.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  outboard holder --socket /run/outboard/holder.sock")]
pub struct HolderArgs {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Path of the UNIX socket at which the gateway connects
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
}

/// Runs the gateway.
pub fn run(args: GatewayArgs, node: &NodeArgs) -> Result<()> {
    let missing =
        |what: &str, flag: &str| Failure::new("starting the gateway", format!("{what}; set {flag}"));
    let endpoint =
        node.endpoint.clone().ok_or_else(|| missing("it has no address of a node", "--endpoint"))?;
    let credentials =
        node.credentials.clone().ok_or_else(|| missing("it has no credentials", "--credentials"))?;
    let GatewayArgs { role, name, holder, attachments } = args;
    gateway::run(&role, GatewayOptions { endpoint, credentials, name, holder, attachments })
}

/// Runs the holder.
pub fn run_holder(args: HolderArgs, _node: &NodeArgs) -> Result<()> {
    holder::run(&args.role, &args.socket)
}
