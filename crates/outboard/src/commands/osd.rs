//! `outboard osd`: the role that handles requests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use base::thread::ThreadClass;
use clap::Args;
use store::{BlockStore, MountOptions, RemountedStore};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use uuid::Uuid;

use crate::args::NodeArgs;
use node::announce::Ready;
use node::coding;
use node::config::Config;
use node::cpus::{ChannelSide, Cpus};
use node::debug::Controls;
use node::failure::{Doing, Failure, Result};
use node::remount;
use node::request_side::{self, Stores};
use node::role::{self, RoleArgs, RoleProcess, StopSignals};
use node::state::Role;
use node::store_address::StoreAddress;
use node::targets::{self, KnownTarget};

/// Name of the thread that handles requests.
const EVENT_LOOP: &str = "osd-0";

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
    /// UUID of the target at PATH. If this target cannot be mounted, the role serves the other
    /// targets instead of failing
    #[arg(long = "known-target", value_name = "PATH=UUID", hide = true)]
    pub known_targets: Vec<KnownTarget>,
}

/// Runs the role.
pub fn run(args: OsdArgs, _node: &NodeArgs) -> Result<()> {
    let role = if args.store_socket.is_some() { Role::Osd } else { Role::Node };
    role::run(role, &args.role, async |process| serve(process, &args).await)
}

async fn serve(process: RoleProcess, args: &OsdArgs) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let faults = process.controls.faults().clone();
    let config = process.config.clone();
    let progress = process.report_progress();
    let mut mounted =
        targets::mount(&args.targets, &args.known_targets, &config, &faults).doing("mounting targets")?;
    drop(progress);
    let offered: Vec<(Uuid, Arc<RemountedStore>)> =
        mounted.iter().map(|m| (m.uuid, Arc::new(RemountedStore::new(m.object_store())))).collect();
    let stores = match &args.store_socket {
        Some(address) => {
            address
                .cpus(process.config.osd.cpus)
                .apply(ChannelSide::Dpu)
                .doing("restricting the process to the CPUs of osd.cpus")?;
            Stores::Behind(address.endpoint())
        }
        None => {
            let faults = process.controls.faults();
            let accelerator = coding::accelerator(&process.config, Cpus::Any, faults)
                .doing("starting the emulated accelerator")?;
            let engines =
                coding::engines(&process.config, accelerator, faults).doing("starting the coding engines")?;
            let targets = offered.iter().map(|(uuid, store)| (*uuid, Arc::clone(store) as _)).collect();
            Stores::Here(targets, engines)
        }
    };
    let listen = args.listen.clone().unwrap_or_else(|| process.config.listen.clone());
    let checkpoints = targets::checkpoints(&mounted);
    let heartbeat = process.heartbeat.map(|heartbeat| heartbeat.beat(EVENT_LOOP, checkpoints.clone()));
    let mut shard = Shard::start(stores, process.config, listen, process.controls, heartbeat)?;
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
    let replace = |uuid, store: Arc<BlockStore>, ()| {
        let target = offered.iter().find(|(offered, _)| *offered == uuid);
        if let Some((_, target)) = target {
            target.replace(store);
        }
    };
    tokio::select! {
        ended = &mut shard.ended => {
            return ended.unwrap_or_else(|_| Err(ended_unasked())).and(Err(ended_unasked()));
        }
        () = signals.next() => {}
        never = remount::keep_mounted(&mut mounted, &config, &checkpoints, &faults, mount, replace) => match never {},
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
        heartbeat: Option<impl Future<Output = ()> + Send + 'static>,
    ) -> Result<Shard> {
        let (started, ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().doing("starting the osd")?;
        let stopped = async move { drop(stopped.await) };
        let body = move || {
            let serving = request_side::serve(stores, Arc::new(config), listen, controls, started, stopped);
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
