//! The simulated node: its drives, and the bodies of its roles.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use array::{CodingConfig, StripesAt};
use base::clock::{Instant, WallClock};
use base::mem::Arena;
use base::pool::BufferPool;
use base::thread::ThreadClass;
use messenger::NetworkStack;
use node::remount;
use node::targets::Mounted;
use osd::{OsdConfig, OsdServer};
use store::sim::{DriveTimes, SimDrive};
use store::stripes::{EngineOptions, Engines};
use store::{AbsentStore, BlockStore, Driver, MkfsOptions, MountOptions, ObjectStore, RemountedStore};
use uuid::Uuid;
use wire::Placement;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::plan::{NodeRole, Plan, Stream, rng};
use crate::role::Role;
use crate::trace::Trace;

/// Address at which the osd serves clients.
pub const ENDPOINT: &str = "node:7400";
/// Size of the osd's staging memory, in bytes.
const STAGING: usize = 32 << 20;
/// Largest staging buffer, in bytes: two segments of 2 MiB.
const LARGEST_BUFFER: usize = 4 << 20;
/// Time after which a role that has ended by itself is started again.
const RESTART: Duration = Duration::from_secs(1);
/// Time of day at the start of a simulation, since 1970.
const TIME_OF_DAY: Duration = Duration::from_secs(1_800_000_000);

/// The simulated node.
pub struct Node {
    plan: Plan,
    trace: Trace,
    began: Instant,
    network: Arc<dyn NetworkStack>,
    drives: Vec<(Uuid, Arc<SimDrive>)>,
    /// Whether the drive of each target is lost for ever.
    lost: RefCell<Vec<bool>>,
    osd: RoleSlot,
    store: RoleSlot,
}

/// A role of the node, which the simulator starts again when it has ended.
#[derive(Default)]
struct RoleSlot {
    role: RefCell<Option<Role>>,
    /// Number of faults that keep the role down.
    held: std::cell::Cell<u32>,
    /// Signals that `held` has changed.
    changed: tokio::sync::Notify,
    /// Difference of the role's time of day from the simulated time, in seconds.
    clock: Arc<AtomicI64>,
}

impl Node {
    /// Creates a node with new drives. No role runs yet.
    #[must_use]
    pub fn new(plan: &Plan, trace: &Trace, network: Arc<dyn NetworkStack>) -> Rc<Node> {
        let drives = (0..plan.targets).map(|number| drive(plan, number)).collect();
        Rc::new(Node {
            plan: plan.clone(),
            trace: trace.clone(),
            began: Instant::now(),
            network,
            drives,
            lost: RefCell::new(vec![false; plan.targets]),
            osd: RoleSlot::default(),
            store: RoleSlot::default(),
        })
    }

    /// Starts the node's roles, and starts them again whenever they end.
    pub fn run(self: &Rc<Node>) {
        for role in self.roles() {
            let node = Rc::clone(self);
            base::task::spawn_local(ThreadClass::Admin, async move { node.supervise(role).await });
        }
    }

    /// The roles of the node.
    pub fn roles(&self) -> impl Iterator<Item = NodeRole> + use<> {
        let is_dpu = self.plan.placement == Placement::Dpu && false;
        is_dpu.then_some(NodeRole::Store).into_iter().chain([NodeRole::Osd])
    }

    fn slot(&self, role: NodeRole) -> &RoleSlot {
        match role {
            NodeRole::Osd => &self.osd,
            NodeRole::Store => &self.store,
        }
    }

    async fn supervise(self: Rc<Node>, kind: NodeRole) {
        let slot = self.slot(kind);
        loop {
            while slot.held.get() > 0 {
                slot.changed.notified().await;
            }
            self.trace.event(format_args!("start {kind}"));
            let role = match kind {
                NodeRole::Osd => Role::start(Rc::clone(&self).osd_body()),
                NodeRole::Store => Role::start(std::future::pending()),
            };
            *slot.role.borrow_mut() = Some(role.clone());
            role.ended().await;
            if slot.held.get() == 0 {
                self.trace.event(format_args!("{kind} has ended by itself"));
                tokio::time::sleep(RESTART).await;
            }
        }
    }

    /// Kills a role. The role starts again after [`release`](Self::release).
    pub fn kill(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() + 1);
        if let Some(role) = slot.role.borrow_mut().take() {
            if self.owner() == kind {
                self.drives.iter().for_each(|(_, drive)| drive.sever());
            }
            role.kill();
        }
    }

    /// Kills all roles, and makes the drives lose unflushed writes.
    pub fn cut_power(&self) {
        for (number, (_, drive)) in self.drives.iter().enumerate() {
            let survivors = drive.power_failure();
            self.trace.event(format_args!("drive {number} loses power: {survivors:?} may survive"));
        }
        self.roles().for_each(|role| self.kill(role));
    }

    /// The drive of the target with this number.
    #[must_use]
    pub fn drive(&self, target: usize) -> &Arc<SimDrive> {
        &self.drives[target].1
    }

    /// Records that the drive of a target never returns.
    pub fn lose(&self, target: usize) {
        self.lost.borrow_mut()[target] = true;
    }

    /// Whether the drive of a target never returns.
    #[must_use]
    pub fn is_lost(&self, target: usize) -> bool {
        self.lost.borrow()[target]
    }

    /// Ends all faults of drives, except for lost drives.
    pub fn heal(&self) {
        for (target, (_, drive)) in self.drives.iter().enumerate() {
            drive.clear_faults();
            if !self.is_lost(target) {
                drive.reinsert();
            }
        }
    }

    /// Changes the time of day of a role.
    pub fn step_clock(&self, role: NodeRole, seconds: i64) {
        self.slot(role).clock.fetch_add(seconds, Ordering::Relaxed);
    }

    /// A hash of all events of the drives.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.drives.iter().fold(0, |hash, (_, drive)| xxh3_64_with_seed(&drive.trace().to_le_bytes(), hash))
    }

    fn wall_clock(&self, role: NodeRole) -> WallClock {
        let (began, offset) = (self.began, Arc::clone(&self.slot(role).clock));
        WallClock::new(move || {
            let seconds = offset.load(Ordering::Relaxed);
            let now = UNIX_EPOCH + TIME_OF_DAY + began.elapsed();
            match seconds < 0 {
                true => now - Duration::from_secs(seconds.unsigned_abs()),
                false => now + Duration::from_secs(seconds.unsigned_abs()),
            }
        })
    }

    /// The role that owns the targets.
    fn owner(&self) -> NodeRole {
        if self.roles().any(|role| role == NodeRole::Store) { NodeRole::Store } else { NodeRole::Osd }
    }

    /// Ends one [`kill`](Self::kill).
    pub fn release(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() - 1);
        slot.changed.notify_one();
    }

    /// The role that runs now, if it runs.
    pub fn role(&self, kind: NodeRole) -> Option<Role> {
        self.slot(kind).role.borrow().clone()
    }

    /// Mounts the target with this number.
    async fn mount(&self, target: usize, stages_after: u64) -> Result<(Arc<BlockStore>, Driver), String> {
        let (uuid, drive) = &self.drives[target];
        let options = MountOptions {
            expected_uuid: Some(*uuid),
            index: target,
            index_cache_bytes: 1 << 20,
            metadata_cache_bytes: 1 << 20,
            buffer_bytes: 2 << 20,
            stages_after,
            ..MountOptions::default()
        };
        BlockStore::mount_simulated(drive, &options).await.map_err(|e| e.to_string())
    }

    /// Mounts all targets and runs their drivers.
    async fn mount_all(&self) -> Vec<Mounted> {
        let mut mounted = Vec::new();
        for (index, (uuid, _)) in self.drives.iter().enumerate() {
            let store = match self.mount(index, 0).await {
                Ok((store, driver)) => {
                    base::task::spawn_local(ThreadClass::Store, driver.run());
                    Ok(store)
                }
                Err(why) => {
                    self.trace.event(format_args!("target {index} cannot be mounted: {why}"));
                    Err(AbsentStore::new(why))
                }
            };
            mounted.push(Mounted { path: format!("target {index}").into(), uuid: *uuid, store });
        }
        mounted
    }

    async fn osd_body(self: Rc<Node>) {
        let engines = Engines::start(EngineOptions { threads: 0, ..EngineOptions::default() }, None);
        let engines = Arc::new(engines.expect("engines without threads always start"));
        let config = OsdConfig {
            placement: Placement::Host,
            clock: self.wall_clock(NodeRole::Osd),
            coding: CodingConfig {
                threads: 0,
                stripes: StripesAt::Here(Some(engines)),
                ..CodingConfig::default()
            },
            ..OsdConfig::default()
        };
        let mut mounted = self.mount_all().await;
        let offered: Vec<_> =
            mounted.iter().map(|m| (m.uuid, Arc::new(RemountedStore::new(m.object_store())))).collect();
        let targets: Vec<(Uuid, Arc<dyn ObjectStore>)> =
            offered.iter().map(|(uuid, store)| (*uuid, Arc::clone(store) as _)).collect();
        let node = Rc::clone(&self);
        base::task::spawn_local(ThreadClass::Admin, async move {
            let mount = async |index, stages_after| node.mount(index, stages_after).await;
            let replace = |target: &Mounted, store: &Arc<BlockStore>, driver: Driver| {
                base::task::spawn_local(ThreadClass::Store, driver.run());
                let (_, offered) =
                    offered.iter().find(|(uuid, _)| *uuid == target.uuid).expect("the target is offered");
                offered.replace(Arc::clone(store) as _);
                node.trace.event(format_args!("{} was remounted", target.path.display()));
            };
            match remount::keep_mounted(&mut mounted, mount, replace).await {}
        });
        let arena = Arena::anonymous(STAGING).expect("the machine has memory for a simulation");
        let staging = BufferPool::new(arena, 0, LARGEST_BUFFER);
        let ready = |started: Result<String, osd::StartError>| match started {
            Ok(endpoint) => self.trace.event(format_args!("the osd serves {endpoint}")),
            Err(e) => self.trace.event(format_args!("the osd cannot start: {e}")),
        };
        let network = Arc::clone(&self.network);
        OsdServer::serve(config, targets, staging, network, ENDPOINT, ready, std::future::pending()).await;
    }
}

/// Creates a drive with a new target.
fn drive(plan: &Plan, number: usize) -> (Uuid, Arc<SimDrive>) {
    let drive = SimDrive::new(plan.drive_size, rng(plan.seed, Stream::Drive(number)), DriveTimes::default());
    let sizes = MkfsOptions {
        log_bytes: Some(plan.drive_size / 16),
        index_bytes: Some(plan.drive_size / 8),
        ..MkfsOptions::default()
    };
    let uuid = drive.mkfs(&sizes).expect("the drive is large enough");
    (uuid, drive)
}
