//! `outboard store`: the role that owns the targets.

use std::path::PathBuf;

use clap::Args;

use crate::args::NodeArgs;
use node::failure::Result;
use node::role::RoleArgs;
use node::roles::store;
use node::roster::KnownTarget;
use node::store_address::StoreAddress;
use node::targets::TargetPaths;

/// Run the store role: mount targets and serve them to an osd
///
/// `outboard up` runs and supervises this role; run it directly only for a node with a custom
/// setup. The role prints one line of JSON when it is ready. On SIGTERM or SIGINT it unmounts its
/// targets and stops.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard store --target /srv/t0.img --target /dev/nvme1n1 --socket /run/outboard/store.sock\n  \
    outboard store --config /etc/outboard.toml --target t0.img --socket tcp:10.0.0.7:7401")]
pub struct StoreArgs {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Target to mount: a file or a raw block device; the flag may be repeated
    #[arg(long = "target", value_name = "PATH", required = true)]
    pub targets: Vec<PathBuf>,
    /// UUID of the target at PATH. If this target cannot be mounted, or PATH contains another
    /// target, the role serves the other targets instead of failing
    #[arg(long = "known-target", value_name = "PATH=UUID", hide = true)]
    pub known_targets: Vec<KnownTarget>,
    /// Address at which to wait for the osd: the path of a UNIX socket, or tcp:HOST:PORT. TCP has
    /// no authentication, and allows DMA only with the engine ofi
    #[arg(long, value_name = "ADDRESS")]
    pub socket: StoreAddress,
    /// Path of a UNIX socket for arming faults while the role runs [default: no socket]
    #[arg(long, value_name = "PATH")]
    pub debug_socket: Option<PathBuf>,
}

/// Runs the role.
pub fn run(args: StoreArgs, _node: &NodeArgs) -> Result<()> {
    let targets = TargetPaths { paths: args.targets, known: args.known_targets };
    store::run(&args.role, targets, args.socket, args.debug_socket.as_deref())
}
