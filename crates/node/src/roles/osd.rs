//! The role that handles requests: `osd` with the store in another process, or `node` with the
//! targets in its own process.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use base::BoxFuture;
use base::thread::ThreadClass;
use base::watch;
use control::{ControlListener, ControlServer, GatewayRegistry};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use identity::Trust;
use osd::{AuditSink, Directory, OsdAdministrator};
use store::{BlockStore, MountOptions, RemountedStore};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::task::LocalSet;
use uuid::Uuid;
use wire::Placement;

use crate::announce::Ready;
use crate::audit_file::{AUDIT_LOG, AuditFile};
use crate::coding;
use crate::config::Config;
use crate::control_port::{self, LAST_PORT};
use crate::cpus::{ChannelSide, Cpus, ThreadCount};
use crate::debug::Controls;
use crate::failure::{Doing, Failure, Result};
use crate::metrics;
use crate::node_keys::NodeKeys;
use crate::port;
use crate::remount;
use crate::request_side::{self, ShardCommon, Stores};
use crate::role::{self, RoleArgs, RoleProcess, StopSignals};
use crate::roster::ExpectedNode;
use crate::state::Role;
use crate::store_address::StoreAddress;
use crate::targets::{self, Mounted, TargetPaths};
use crate::watchdog::{Checkpoints, Heartbeat};

/// Returns the name of the thread of a shard.
fn event_loop(shard: u16) -> String {
    format!("osd-{shard}")
}

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
    let faults = process.faults.clone();
    let config = process.config.clone();
    let placement = match &stores {
        StoresAt::Here(_) => Placement::Host,
        StoresAt::Behind(_) => Placement::Dpu,
    };
    let mut mounted = Vec::new();
    let mut offered: Vec<(Uuid, Arc<RemountedStore>)> = Vec::new();
    let cpus = match &stores {
        StoresAt::Behind(address) => address.cpus(config.osd.cpus),
        StoresAt::Here(_) => config.osd.cpus,
    };
    if config.osd.accept_altered_map {
        tracing::warn!(
            "osd.accept_altered_map is set: this osd, and each osd that the supervisor starts after it, \
             accepts what other keys than the DPU's have sealed; check `outboard user ls`, and start the \
             node again without it"
        );
    }
    // The role runs in the node's directory.
    let keys = NodeKeys::settle(Path::new("")).doing("reading the node's keys")?;
    let listen = listen.unwrap_or_else(|| config.listen.clone());
    let control = match config.control.address() {
        Some(address) => ControlListener::bind(address),
        None => control_port::bind(&listen, Path::new(LAST_PORT)),
    };
    let control = control.map_err(|e| {
        let at = config.control.address().unwrap_or("a free port");
        let why = format!("{e}; choose another address with control.listen");
        Failure::new(format!("serving the control plane at {at}"), why)
    })?;
    let shards = shard_count(&config, cpus, &listen)?;
    // The claim keeps nodes that start at the same time from choosing the same ports.
    let (listen, _claim) = port::settle(&listen, shards);
    let stores = match stores {
        StoresAt::Behind(address) => {
            cpus.apply(ChannelSide::Dpu).doing("restricting the process to the CPUs of osd.cpus")?;
            let trust = match &address {
                StoreAddress::Tcp(_) => keys.channel_trust(Path::new("")).doing("reading the store's key")?,
                StoreAddress::Unix(_) => Trust::default(),
            };
            Stores::Behind(address.endpoint(), trust)
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
    let checkpoints = targets::checkpoints(&mounted);
    let users = Directory::default();
    let audit = AuditFile::start(Path::new(AUDIT_LOG), process.config.log.audit_size.0);
    let audit: Arc<dyn AuditSink> = Arc::new(audit.doing("opening the audit log")?);
    let common = ShardCommon {
        stores,
        config: Arc::new(process.config),
        controls: Controls::new(placement, faults.clone()),
        expected,
        run: base::entropy::uuid().as_u128(),
        shards,
        trust: keys.trust(users.clone(), Arc::clone(&audit)),
        users,
        audit,
        dpu_key: keys.dpu_key().clone(),
        admin_revision: keys.admin_revision(),
        control: control.address(),
        gateways: GatewayRegistry::default(),
    };
    let heartbeats = process.heartbeat.map(|heartbeat| (heartbeat, checkpoints.clone()));
    let mut shards = ShardThreads::start(&common, &listen, heartbeats.as_ref())?;
    let administrator = shards.administrator.clone();
    let administer =
        move |caller, request, is_repeated| administrator.administer(caller, request, is_repeated);
    let gateways = common.gateways.clone();
    let control = ControlServer::start(control, common.trust.clone(), Arc::new(administer), gateways);
    let control = control.doing("starting the control plane")?;
    let ready = loop {
        tokio::select! {
            biased;
            // If a shard has failed, its error says more than that of the first shard, which only
            // knows that the other has ended.
            Some(ended) = shards.ended.recv() => {
                if let Err(failure) = ended {
                    break Err(failure);
                }
            }
            ready = &mut shards.ready => break ready.unwrap_or_else(|_| Err(ended())),
            () = signals.next() => return Ok(()),
        }
    }?;
    role::ready(Ready {
        metrics: Some(process.metrics),
        targets: targets::announced(&mounted),
        loops: (0..common.shards).map(event_loop).collect(),
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
        ended = shards.ended.recv() => {
            return ended.unwrap_or_else(|| Err(ended_unasked())).and(Err(ended_unasked()));
        }
        () = signals.next() => {}
        never = remount::keep_mounted(&mut mounted, mount, replace) => match never {},
    }
    role::stopping();
    drop(control);
    shards.stop();
    targets::unmount(mounted).await.doing("unmounting targets")
}

/// Returns the number of shards of an osd that listens at `listen`. If the configuration leaves the
/// number open, the osd has no more shards than there are free ports in a row. It has one shard if
/// the configuration names the port of a path, because further shards need the ports that follow.
fn shard_count(config: &Config, cpus: Cpus, listen: &str) -> Result<u16> {
    let wanted = config.osd.shards.shards(cpus).doing("counting the CPUs of osd.cpus")?;
    if config.osd.shards != ThreadCount::Auto {
        return Ok(wanted);
    }
    if wanted > 1 && config.network.stacks.has_fixed_port() {
        tracing::info!(
            "the osd has 1 of {wanted} shards, because network.stacks names a port; set osd.shards if the \
             ports that follow it are free, or name no port"
        );
        return Ok(1);
    }
    let shards = port::free_for_shards(listen, wanted);
    if shards < wanted {
        tracing::warn!(
            "the osd has {shards} of {wanted} shards, because the next port after those of its shards is in \
             use; listen at an address that is followed by more free ports"
        );
    }
    Ok(shards)
}

fn ended() -> Failure {
    Failure::new("starting the osd", "the osd's thread ended before it was ready; see the log")
}

fn ended_unasked() -> Failure {
    Failure::new("serving clients", "the osd's thread ended unexpectedly; see the log")
}

/// The threads of the shards, and the channels between them and the role's main thread.
struct ShardThreads {
    /// Receives the announcement when the osd can serve clients, or the reason why it cannot.
    ready: oneshot::Receiver<Result<Ready>>,
    /// Receives the result of each thread that stops serving clients.
    ended: mpsc::UnboundedReceiver<Result<()>>,
    stop: watch::Sender<bool>,
    threads: Vec<JoinHandle<()>>,
    administrator: OsdAdministrator,
}

impl ShardThreads {
    fn start(
        common: &ShardCommon,
        listen: &str,
        heartbeats: Option<&(Heartbeat, Checkpoints)>,
    ) -> Result<ShardThreads> {
        let (started, ready) = oneshot::channel();
        let (tell, ended) = mpsc::unbounded_channel();
        let stop = watch::Sender::new(false);
        let (first, further) = osd::shards(common.shards);
        let administrator = first.administrator();
        let mut threads = Vec::new();
        let mut start = |number: u16, serve: ServeShard| {
            let mut stopped = stop.subscribe();
            let until_stopped = async move { drop(stopped.wait_for(|stop| *stop).await) };
            let beat = heartbeats.cloned().map(|(heartbeat, checkpoints)| async move {
                heartbeat.beat(&event_loop(number), checkpoints.of_loop(number.into())).await;
            });
            let tell = tell.clone();
            let body = move |runtime: Runtime| {
                let local = LocalSet::new();
                if let Some(beat) = beat {
                    local.spawn_local(beat);
                }
                // If the role's main thread no longer waits for the result, the result is dropped.
                let _ = tell.send(local.block_on(&runtime, serve(Box::pin(until_stopped))));
            };
            threads.push(spawn_with_runtime(number, body).doing("starting the osd")?);
            Ok(())
        };
        let (of_first, listen) = (common.clone(), listen.to_owned());
        let serve =
            |stop: StopShard| request_side::serve(first, of_first, listen, started, stop).boxed_local();
        start(0, Box::new(serve))?;
        for (number, shard) in (1..).zip(further) {
            let common = common.clone();
            let serve =
                move |stop: StopShard| request_side::serve_further(number, shard, common, stop).boxed_local();
            start(number, Box::new(serve))?;
        }
        Ok(ShardThreads { ready, ended, stop, threads, administrator })
    }

    fn stop(self) {
        self.stop.send_replace(true);
        for thread in self.threads {
            // An error would mean that the thread has panicked, but a panic ends the process.
            let _ = thread.join();
        }
    }
}

/// Resolves when a shard must stop.
type StopShard = BoxFuture<'static, ()>;
/// Serves clients on one shard, on the thread that calls the function.
type ServeShard = Box<dyn FnOnce(StopShard) -> LocalBoxFuture<'static, Result<()>> + Send>;

/// Starts the thread of a shard with a runtime.
fn spawn_with_runtime(
    number: u16,
    body: impl FnOnce(Runtime) + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let runtime = base::task::runtime()?;
    base::thread::spawn(ThreadClass::Osd, &number.to_string(), move || {
        metrics::label_thread(number);
        body(runtime);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file;

    #[test]
    fn a_path_with_a_fixed_port_leaves_auto_with_one_shard() {
        let count = |stacks: &str, shards: &str| {
            let env = [("OUTBOARD_NETWORK_STACKS", stacks), ("OUTBOARD_OSD_SHARDS", shards)];
            let find =
                |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            let config = config_file::load(None, find).unwrap();
            shard_count(&config, Cpus::try_from("0-2".to_owned()).unwrap(), "127.0.0.1:0").unwrap()
        };
        assert_eq!(count("ofi:tcp", "auto"), 3);
        assert_eq!(count("ofi:tcp@127.0.0.1:7701", "auto"), 1);
        assert_eq!(count("ofi:tcp@127.0.0.1:7701", "2"), 2);
    }
}
