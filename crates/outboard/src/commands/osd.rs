//! `outboard osd`: the role that handles requests.

use std::path::PathBuf;

use clap::Args;

use crate::args::NodeArgs;
use node::failure::Result;
use node::role::RoleArgs;
use node::roles::osd::{self, StoresAt};
use node::roster::{ExpectedNode, KnownTarget};
use node::store_address::StoreAddress;
use node::targets::TargetPaths;
use uuid::Uuid;

/// Run the osd role: serve clients, with the store in another process or in the same process
///
/// With --store-socket, as on a DPU, the store is a separate process. With --target, this process
/// mounts the targets itself (placement host). `outboard up` runs and supervises this role; run it
/// directly only for a node with a custom setup. The role prints one line of JSON when it is ready,
/// and stops on SIGTERM or SIGINT.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard osd --store-socket /run/outboard/store.sock --listen 0.0.0.0:7400\n  \
    outboard osd --store-socket tcp:10.0.0.7:7401 --listen 0.0.0.0:7400\n  \
    outboard osd --target /srv/t0.img --listen 127.0.0.1:7400")]
pub struct OsdArgs {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Address at which the role serves clients [default: the key listen of the configuration]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Address of the store: the path of a UNIX socket, or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", required_unless_present = "targets", conflicts_with = "targets")]
    pub store_socket: Option<StoreAddress>,
    /// Target to mount in this process: a file or a raw block device; the flag may be repeated
    #[arg(long = "target", value_name = "PATH")]
    pub targets: Vec<PathBuf>,
    /// UUID of the target at PATH. If this target cannot be mounted, or PATH contains another
    /// target, the role serves the other targets instead of failing
    #[arg(long = "known-target", value_name = "PATH=UUID", hide = true)]
    pub known_targets: Vec<KnownTarget>,
    /// UUID of a target of which the operator has accepted the loss (`outboard target forget`)
    #[arg(long = "forgotten-target", value_name = "UUID", hide = true)]
    pub forgotten_targets: Vec<Uuid>,
    /// UUID of the node. If no target belongs to this node, the role fails instead of creating a node
    #[arg(long, value_name = "UUID", hide = true)]
    pub expected_node: Option<Uuid>,
}

/// Runs the role.
pub fn run(args: OsdArgs, _node: &NodeArgs) -> Result<()> {
    let stores = match args.store_socket {
        Some(address) => StoresAt::Behind(address),
        None => StoresAt::Here(TargetPaths { paths: args.targets, known: args.known_targets }),
    };
    let expected = ExpectedNode { node: args.expected_node, forgotten: args.forgotten_targets };
    osd::run(&args.role, stores, args.listen, expected)
}
