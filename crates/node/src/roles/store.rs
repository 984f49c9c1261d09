//! The role `store`, which owns the targets and serves them to an osd.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use channel::ofi::OfiHostOptions;
use channel::{MemoryLayout, MemoryOptions};
use identity::Trust;
use proxy::{Server, ServerOptions};
use store::BlockStore;

use crate::announce::Ready;
use crate::coding;
use crate::config::EngineKind;
use crate::cpus::ChannelSide;
use crate::debug_socket;
use crate::failure::{Doing, Failure, Result};
use crate::node_keys;
use crate::remount;
use crate::request_side;
use crate::role::{self, RoleArgs, RoleProcess, StopSignals};
use crate::state::Role;
use crate::store_address::StoreAddress;
use crate::targets::{self, Mounted, TargetPaths};

/// Returns the name of the thread of an event loop, which serves the osd and runs targets.
fn event_loop(number: usize) -> String {
    format!("chan-{number}")
}

/// Runs the role until a signal stops it. The role waits for the osd at `socket`, and serves the debug
/// socket at `debug_socket`, if there is one.
///
/// # Errors
/// If the role cannot be set up, or the targets cannot be mounted, served or unmounted.
pub fn run(
    args: &RoleArgs,
    targets: TargetPaths,
    socket: StoreAddress,
    debug_socket: Option<&Path>,
) -> Result<()> {
    role::run(Role::Store, args, |process| serve(process, targets, socket, debug_socket))
}

async fn serve(
    process: RoleProcess,
    paths: TargetPaths,
    socket: StoreAddress,
    debug_socket: Option<&Path>,
) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let faults = &process.faults;
    if let Some(path) = debug_socket {
        debug_socket::serve(path, faults.clone()).map_err(|e| {
            let why = format!("{e}; choose another path with --debug-socket, or none");
            Failure::new(format!("serving the debug socket {}", path.display()), why)
        })?;
    }
    let accelerator = coding::accelerator(&process.config, socket.cpus(process.config.osd.cpus), faults)
        .doing("starting the emulated accelerator")?;
    let cpus = socket.cpus(process.config.store.cpus);
    let loops = process.config.store.loops.loops(cpus, paths.paths.len());
    let loops = usize::from(loops.doing("counting the CPUs of store.cpus")?);
    cpus.apply(ChannelSide::Host).doing("restricting the process to the CPUs of store.cpus")?;
    let engines =
        coding::engines(&process.config, accelerator, faults).doing("starting the coding engines")?;
    let progress = process.report_progress();
    let (mut mounted, drivers) =
        targets::mount_driven(&paths, &process.config, faults).doing("mounting targets")?;
    drop(progress);
    let listener = socket.listen().map_err(|e| {
        let why = format!("{e}; choose another address with --socket");
        Failure::new(format!("waiting for the osd at {}", socket), why)
    })?;
    let offered =
        mounted.iter().map(|m| proxy::ServedTarget { uuid: m.uuid, store: m.object_store() }).collect();
    let channel = &process.config.channel;
    let ofi = match &channel.engine {
        EngineKind::Shm => None,
        EngineKind::Ofi(provider) => Some(OfiHostOptions::new(provider, channel.ofi_listen)),
    };
    let trust = match &socket {
        // The role runs in the node's directory.
        StoreAddress::Tcp(_) => node_keys::store_trust(Path::new("")).doing("reading the store's key")?,
        StoreAddress::Unix(_) => Trust::default(),
    };
    let defaults = ServerOptions::default();
    let layout = MemoryLayout { data_len: channel.window.0, ..MemoryOptions::default().layout };
    let (max_memory, max_outstanding) = request_side::store_limits(layout, channel.requests);
    let options = ServerOptions {
        max_memory: defaults.max_memory.max(max_memory),
        max_outstanding: defaults.max_outstanding.max(max_outstanding),
        ofi,
        trust,
        faults: faults.clone(),
        engines: Some(engines),
        poll: Duration::from_micros(channel.host_poll_us),
        loops,
    };
    let checkpoints = targets::checkpoints(&mounted);
    let (heartbeat, watched) = (process.heartbeat, checkpoints.clone());
    let beside = move |number| {
        let watched = watched.clone().of_loop(number);
        async move {
            if let Some(heartbeat) = heartbeat {
                heartbeat.beat(&event_loop(number), watched).await;
            }
        }
    };
    let server = Server::serve_and_drive(listener, offered, drivers, options, beside)
        .doing("starting to serve targets")?;
    role::ready(Ready {
        metrics: Some(process.metrics),
        targets: targets::announced(&mounted),
        loops: (0..loops).map(event_loop).collect(),
        ..Ready::default()
    });
    let mount = remount::mount_on_thread(&mounted, &process.config, faults, BlockStore::mount_driven);
    let replace = |target: &Mounted, store: &Arc<BlockStore>, driver| {
        checkpoints.add(target.path.clone(), store.checkpoint_watch());
        server.replace(target.uuid, Arc::clone(store) as _, Some(driver));
    };
    tokio::select! {
        () = signals.next() => {}
        never = remount::keep_mounted(&mut mounted, mount, replace) => match never {},
    }
    role::stopping();
    server.stop();
    targets::unmount(mounted).await.doing("unmounting targets")
}
