//! `outboard store`: the role that owns the targets.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use channel::ofi::OfiHostOptions;
use channel::{MemoryLayout, MemoryOptions};
use clap::Args;
use proxy::{Server, ServerOptions};
use store::BlockStore;
use uuid::Uuid;

use crate::args::NodeArgs;
use node::announce::Ready;
use node::coding;
use node::config::EngineKind;
use node::cpus::ChannelSide;
use node::failure::{Doing, Failure, Result};
use node::remount;
use node::role::{self, RoleArgs, RoleProcess, StopSignals};
use node::state::Role;
use node::store_address::StoreAddress;
use node::targets::{self, KnownTarget};

/// Name of the thread that serves the osd and runs the targets.
const EVENT_LOOP: &str = "chan-0";

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
    /// UUID of the target at PATH. If this target cannot be mounted, the role serves the other
    /// targets instead of failing
    #[arg(long = "known-target", value_name = "PATH=UUID", hide = true)]
    pub known_targets: Vec<KnownTarget>,
    /// Address at which to wait for the osd: the path of a UNIX socket, or tcp:HOST:PORT. TCP has
    /// no authentication, and allows DMA only with the engine ofi
    #[arg(long, value_name = "ADDRESS")]
    pub socket: StoreAddress,
}

/// Runs the role.
pub fn run(args: StoreArgs, _node: &NodeArgs) -> Result<()> {
    role::run(Role::Store, &args.role, async |process| serve(process, &args).await)
}

async fn serve(process: RoleProcess, args: &StoreArgs) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let faults = process.controls.faults();
    let accelerator = coding::accelerator(&process.config, args.socket.cpus(process.config.osd.cpus), faults)
        .doing("starting the emulated accelerator")?;
    args.socket
        .cpus(process.config.store.cpus)
        .apply(ChannelSide::Host)
        .doing("restricting the process to the CPUs of store.cpus")?;
    let engines =
        coding::engines(&process.config, accelerator, faults).doing("starting the coding engines")?;
    let progress = process.report_progress();
    let (mut mounted, drivers) =
        targets::mount_driven(&args.targets, &args.known_targets, &process.config, faults)
            .doing("mounting targets")?;
    drop(progress);
    let listener = args.socket.listen().map_err(|e| {
        let why = format!("{e}; choose another address with --socket");
        Failure::new(format!("waiting for the osd at {}", args.socket), why)
    })?;
    let offered =
        mounted.iter().map(|m| proxy::ServedTarget { uuid: m.uuid, store: m.object_store() }).collect();
    let channel = &process.config.channel;
    let ofi = match &channel.engine {
        EngineKind::Shm => None,
        EngineKind::Ofi(provider) => Some(OfiHostOptions::new(provider, channel.ofi_listen)),
    };
    let defaults = ServerOptions::default();
    let layout = MemoryLayout { data_len: channel.window.0, ..MemoryOptions::default().layout };
    let options = ServerOptions {
        max_memory: defaults.max_memory.max(layout.len()),
        ofi,
        faults: faults.clone(),
        engines: Some(engines),
        poll: Duration::from_micros(channel.host_poll_us),
        ..defaults
    };
    let checkpoints = targets::checkpoints(&mounted);
    let (heartbeat, watched) = (process.heartbeat, checkpoints.clone());
    let beside = move || async move {
        if let Some(heartbeat) = heartbeat {
            heartbeat.beat(EVENT_LOOP, watched).await;
        }
    };
    let server = Server::serve_and_drive(listener, offered, drivers, options, beside)
        .doing("starting to serve targets")?;
    role::ready(Ready {
        metrics: Some(process.metrics),
        targets: targets::announced(&mounted),
        loops: vec![EVENT_LOOP.to_owned()],
        ..Ready::default()
    });
    let replace = |uuid: Uuid, store: Arc<BlockStore>, driver| {
        server.replace(uuid, store, Some(driver));
    };
    let mount = BlockStore::mount_driven;
    let config = &process.config;
    tokio::select! {
        () = signals.next() => {}
        never = remount::keep_mounted(&mut mounted, config, &checkpoints, faults, mount, replace) => match never {},
    }
    role::stopping();
    server.stop();
    targets::unmount(mounted).await.doing("unmounting targets")
}
