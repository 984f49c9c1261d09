//! The role that handles requests: `osd` with the store in another process, or `node` with the
//! targets in its own process.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use base::thread::ThreadClass;
use store::{BlockStore, MountOptions, RemountedStore};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use uuid::Uuid;

use crate::announce::Ready;
use crate::coding;
use crate::config::Config;
use crate::cpus::{ChannelSide, Cpus};
use crate::debug::Controls;
use crate::failure::{Doing, Failure, Result};
use crate::identity::ExpectedNode;
use crate::remount;
use crate::request_side::{self, Stores};
use crate::role::{self, RoleArgs, RoleProcess, StopSignals};
use crate::state::Role;
use crate::store_address::StoreAddress;
use crate::targets::{self, Mounted, TargetPaths};

/// Name of the thread that handles requests.
const EVENT_LOOP: &str = "osd-0";

/// Location of the stores that the role uses.
#[derive(Debug, Clone)]
pub enum StoresAt {
    /// In this process, which mounts the targets.
    Here(TargetPaths),
    /// In the process of the role `store`, which listens at this address.
    Behind(StoreAddress),
}

/// Runs the role until a signal stops it. The role serves clients at `listen`, or at the address in
/// the configuration if `listen` is `None`.
///
/// # Errors
/// If the role cannot be set up, if it stops serving clients without a signal, or if the targets
/// cannot be mounted or unmounted.
pub fn run(args: &RoleArgs, stores: StoresAt, listen: Option<String>, expected: ExpectedNode) -> Result<()> {
    let role = match &stores {
        StoresAt::Here(_) => Role::Node,
        StoresAt::Behind(_) => Role::Osd,
    };
    role::run(role, args, |process| serve(process, stores, listen, expected))
}

async fn serve(
    process: RoleProcess,
    stores: StoresAt,
    listen: Option<String>,
    expected: ExpectedNode,
) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let faults = process.controls.faults().clone();
    let config = process.config.clone();
    let mut mounted = Vec::new();
    let mut offered: Vec<(Uuid, Arc<RemountedStore>)> = Vec::new();
    let stores = match stores {
        StoresAt::Behind(address) => {
            address
                .cpus(config.osd.cpus)
                .apply(ChannelSide::Dpu)
                .doing("restricting the process to the CPUs of osd.cpus")?;
            Stores::Behind(address.endpoint())
        }
        StoresAt::Here(paths) => {
            let progress = process.report_progress();
            mounted = targets::mount(&paths, &config, &faults).doing("mounting targets")?;
            drop(progress);
            offered.extend(mounted.iter().map(|m| (m.uuid, Arc::new(RemountedStore::new(m.object_store())))));
            let accelerator = coding::accelerator(&config, Cpus::Any, &faults)
                .doing("starting the emulated accelerator")?;
            let engines =
                coding::engines(&config, accelerator, &faults).doing("starting the coding engines")?;
            let targets = offered.iter().map(|(uuid, store)| (*uuid, Arc::clone(store) as _)).collect();
            Stores::Here(targets, engines)
        }
    };
    let listen = listen.unwrap_or_else(|| config.listen.clone());
    let checkpoints = targets::checkpoints(&mounted);
    let heartbeat = process.heartbeat.map(|heartbeat| heartbeat.beat(EVENT_LOOP, checkpoints.clone()));
    let mut shard = Shard::start(stores, process.config, listen, process.controls, expected, heartbeat)?;
    let ready = tokio::select! {
        ready = &mut shard.ready => ready.unwrap_or_else(|_| Err(ended())),
        () = signals.next() => return Ok(()),
    }?;
    role::ready(Ready {
        metrics: Some(process.metrics),
        targets: targets::announced(&mounted),
        loops: vec![EVENT_LOOP.to_owned()],
        ..ready
    });
    let mount = |path: &Path, options: &MountOptions| Ok((BlockStore::mount(path, options)?, ()));
    let mount = remount::mount_on_thread(&mounted, &config, &faults, mount);
    let replace = |target: &Mounted, store: &Arc<BlockStore>, ()| {
        checkpoints.add(target.path.clone(), store.checkpoint_watch());
        if let Some((_, offered)) = offered.iter().find(|(uuid, _)| *uuid == target.uuid) {
            offered.replace(Arc::clone(store) as _);
        }
    };
    tokio::select! {
        ended = &mut shard.ended => {
            return ended.unwrap_or_else(|_| Err(ended_unasked())).and(Err(ended_unasked()));
        }
        () = signals.next() => {}
        never = remount::keep_mounted(&mut mounted, mount, replace) => match never {},
    }
    role::stopping();
    shard.stop();
    targets::unmount(mounted).await.doing("unmounting targets")
}

fn ended() -> Failure {
    Failure::new("starting the osd", "the osd's thread ended before it was ready; see the log")
}

fn ended_unasked() -> Failure {
    Failure::new("serving clients", "the osd's thread ended unexpectedly; see the log")
}

/// The thread that handles requests, and the channels between it and the role's main thread.
struct Shard {
    /// Receives the announcement when the thread can serve clients, or the reason why it cannot.
    ready: oneshot::Receiver<Result<Ready>>,
    /// Receives the thread's result when the thread stops serving clients.
    ended: oneshot::Receiver<Result<()>>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Shard {
    fn start(
        stores: Stores,
        config: Config,
        listen: String,
        controls: Controls,
        expected: ExpectedNode,
        heartbeat: Option<impl Future<Output = ()> + Send + 'static>,
    ) -> Result<Shard> {
        let (started, ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().doing("starting the osd")?;
        let stopped = async move { drop(stopped.await) };
        let body = move || {
            let serving =
                request_side::serve(stores, Arc::new(config), listen, controls, expected, started, stopped);
            let local = LocalSet::new();
            if let Some(heartbeat) = heartbeat {
                local.spawn_local(heartbeat);
            }
            // If the role's main thread no longer waits for the result, the result is dropped.
            let _ = tell.send(local.block_on(&runtime, serving));
        };
        let thread = base::thread::spawn(ThreadClass::Osd, "0", body).doing("starting the osd")?;
        Ok(Shard { ready, ended, stop, thread })
    }

    fn stop(self) {
        // Ignore both errors. The first error means that the thread has ended already. The second
        // error would mean that the thread has panicked, but a panic ends the process.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}
