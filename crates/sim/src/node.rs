//! The simulated node: its drives, and the bodies of its roles.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use array::{CodingConfig, StripesAt};
use base::BoxFuture;
use base::clock::{Instant, WallClock};
use base::fault::Faults;
use base::mem::Arena;
use base::pool::BufferPool;
use base::task::spawn_local;
use base::thread::ThreadClass;
use channel::sim::{ControlWire, EngineFaults, SimEngine, SimEngineOptions, WireOptions};
use channel::{SeatClaim, TargetInfo};
use client::ControlWay;
use client::engine::InProcess;
use identity::Trust;
use messenger::transport::sim::SimNetwork;
use messenger::{ConnectionConfig, SimStack};
use node::remount;
use node::targets::Mounted;
use osd::{OsdAdministrator, OsdConfig, OsdServer, ShardResources, WitnessAt};
use proxy::{
    Attachment, AttachmentOptions, LocalServer, ServedTarget, ServerOptions, StoreEndpoint, StoreListener,
};
use rand::Rng;
use store::sim::{DriveTimes, SimDrive};
use store::stripes::Engines;
use store::{AbsentStore, BlockStore, Driver, MkfsOptions, MountOptions, ObjectStore, RemountedStore};
use tokio::sync::Notify;
use tokio::time::sleep;
use uuid::Uuid;
use wire::{AdminReply, CodingMode, CodingOffload, Placement};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::coverage::{Coverage, SHARDED_STARTS};
use crate::identities::{SimIdentities, SimUser};
use crate::memory::{DamagedMemorySet, DamagedMemoryStore, MemoryFlips};
use crate::plan::{NodeRole, RandomStream, SimulationPlan, rng};
use crate::role::SimRole;
use crate::trace::EventTrace;
use crate::witness::SimWitness;

/// Address at which the osd serves clients.
pub const ENDPOINT: &str = "node:7400";
/// Name of the node's host.
pub const HOST: &str = "node";
/// Size of the osd's staging memory, in bytes.
const STAGING: usize = 32 << 20;
/// Largest staging buffer, in bytes: two segments of 2 MiB.
const LARGEST_BUFFER: usize = 4 << 20;
/// Size of the data region of host memory, in bytes.
const WINDOW: u64 = 16 << 20;
/// Time for which a failed path for packets is not used.
const PATH_COOL_DOWN: Duration = Duration::from_secs(10);
/// Time after which a role that has ended by itself is started again.
const RESTART: Duration = Duration::from_secs(1);
/// Time of day at the start of a simulation, since 1970.
const TIME_OF_DAY: Duration = Duration::from_secs(1_800_000_000);

/// The simulated node.
pub struct SimNode {
    plan: SimulationPlan,
    trace: EventTrace,
    began: Instant,
    network: SimNetwork,
    /// The control connection between osd and store.
    wire: ControlWire,
    /// The DMA engines of the osd that was started last, one for each shard.
    engines: RefCell<Vec<Arc<SimEngine>>>,
    engines_started: Cell<u64>,
    /// Random faults of each DMA engine.
    dma: Cell<EngineFaults>,
    /// Hash of the operations of earlier DMA engines.
    engine_trace: Cell<u64>,
    /// Effects of the faults of earlier DMA engines.
    engine_coverage: RefCell<Coverage>,
    /// Faults of the engines that compute parity.
    coding_faults: Faults,
    witness: Arc<SimWitness>,
    /// Bits that flip in the osd's memory.
    memory_flips: MemoryFlips,
    osds_started: Cell<u64>,
    /// Number of starts of an osd with several shards.
    sharded_osds_started: Cell<u64>,
    drives_made: Cell<usize>,
    /// The present drive of each target.
    drives: RefCell<Vec<(Uuid, Arc<SimDrive>)>>,
    /// Drives that were replaced.
    retired: RefCell<Vec<Arc<SimDrive>>>,
    /// Whether the drive of each target is lost for ever.
    lost: RefCell<Vec<bool>>,
    /// Whether the osd did not start, so that the operator accepts the loss of the lost drives for its next
    /// start.
    is_refused: Cell<bool>,
    /// Number of starts at which the operator has accepted the loss of targets.
    lossy_starts: Cell<u32>,
    /// The administrator of the osd that was started last.
    administrator: Arc<Mutex<Option<OsdAdministrator>>>,
    identities: SimIdentities,
    osd: RoleSlot,
    store: RoleSlot,
}

/// A role of the node, which the simulator starts again when it has ended.
#[derive(Default)]
struct RoleSlot {
    role: RefCell<Option<SimRole>>,
    /// Number of faults that keep the role down.
    held: Cell<u32>,
    /// Signals that `held` has changed.
    changed: Notify,
    /// Difference of the role's time of day from the simulated time, in seconds.
    clock: Arc<AtomicI64>,
}

/// What a shard of the osd uses for its requests.
struct ShardParts {
    targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
    staging: BufferPool,
    stripes: StripesAt,
    attachment: Option<Attachment>,
}

impl SimNode {
    /// Creates a node with new drives. No role runs yet.
    #[must_use]
    pub fn new(plan: &SimulationPlan, trace: &EventTrace, network: SimNetwork) -> Rc<SimNode> {
        let drives = (0..plan.targets).map(|number| drive(plan, number)).collect();
        let wire = ControlWire::new(WireOptions {
            seed: rng(plan.seed, RandomStream::Control).random(),
            ..WireOptions::default()
        });
        Rc::new(SimNode {
            plan: plan.clone(),
            trace: trace.clone(),
            began: Instant::now(),
            network,
            wire,
            engines: RefCell::default(),
            engines_started: Cell::new(0),
            dma: Cell::new(plan.dma),
            engine_trace: Cell::new(0),
            engine_coverage: RefCell::default(),
            coding_faults: Faults::default(),
            witness: Arc::default(),
            memory_flips: MemoryFlips::new(rng(plan.seed, RandomStream::MemoryFlips)),
            osds_started: Cell::new(0),
            sharded_osds_started: Cell::new(0),
            drives_made: Cell::new(plan.targets),
            drives: RefCell::new(drives),
            retired: RefCell::default(),
            lost: RefCell::new(vec![false; plan.targets]),
            is_refused: Cell::new(false),
            lossy_starts: Cell::new(0),
            administrator: Arc::default(),
            identities: SimIdentities::default(),
            osd: RoleSlot::default(),
            store: RoleSlot::default(),
        })
    }

    /// Starts the node's roles, and starts them again whenever they end.
    pub fn run(self: &Rc<SimNode>) {
        for role in self.roles() {
            let node = Rc::clone(self);
            spawn_local(ThreadClass::Admin, async move { node.supervise(role).await });
        }
    }

    /// The roles of the node.
    pub fn roles(&self) -> impl Iterator<Item = NodeRole> + use<> {
        let store = (self.plan.placement == Placement::Dpu).then_some(NodeRole::Store);
        store.into_iter().chain([NodeRole::Osd])
    }

    fn slot(&self, role: NodeRole) -> &RoleSlot {
        match role {
            NodeRole::Osd => &self.osd,
            NodeRole::Store => &self.store,
        }
    }

    async fn supervise(self: Rc<SimNode>, kind: NodeRole) {
        let slot = self.slot(kind);
        loop {
            while slot.held.get() > 0 {
                slot.changed.notified().await;
            }
            self.trace.event(format_args!("start {kind}"));
            let node = Rc::clone(&self);
            let role = match (kind, self.plan.placement) {
                (NodeRole::Store, _) => SimRole::start(node.store_body()),
                (NodeRole::Osd, Placement::Host) => SimRole::start(node.node_body(self.begin_osd())),
                (NodeRole::Osd, Placement::Dpu) => {
                    let shards = self.begin_osd();
                    self.start_engines(shards);
                    SimRole::start(node.osd_body(shards))
                }
            };
            *slot.role.borrow_mut() = Some(role.clone());
            role.ended().await;
            if slot.held.get() == 0 {
                self.trace.event(format_args!("{kind} has ended by itself"));
                self.sever(kind);
                slot.role.borrow_mut().take();
                sleep(RESTART).await;
            }
        }
    }

    /// Counts a start of an osd. Returns its number of shards.
    fn begin_osd(&self) -> u16 {
        let earlier = self.osds_started.get();
        self.osds_started.set(earlier + 1);
        let shards = self.plan.shards(earlier);
        if shards > 1 {
            self.sharded_osds_started.set(self.sharded_osds_started.get() + 1);
            self.trace.event(format_args!("the osd has {shards} shards"));
        }
        shards
    }

    /// Starts a DMA engine for each shard. Their devices are not part of a role.
    fn start_engines(&self, shards: u16) {
        let start = |_| {
            self.engines_started.set(self.engines_started.get() + 1);
            let seed = rng(self.plan.seed, RandomStream::Dma(self.engines_started.get())).random();
            let options = SimEngineOptions { seed, faults: self.dma.get(), ..SimEngineOptions::default() };
            let (engine, device) = SimEngine::new(options);
            spawn_local(ThreadClass::Dma, device);
            engine
        };
        for before in self.engines.replace((0..shards).map(start).collect()) {
            let hash = xxh3_64_with_seed(&before.stats().trace.to_le_bytes(), self.engine_trace.get());
            self.engine_trace.set(hash);
            add_engine(&mut self.engine_coverage.borrow_mut(), &before);
        }
    }

    /// Cuts a role off from drives, network and the other role, so that its destructors have no
    /// effect on them.
    fn sever(&self, kind: NodeRole) {
        if self.owner() == kind {
            self.drives.borrow().iter().for_each(|(_, drive)| drive.sever());
        }
        match kind {
            NodeRole::Osd => {
                self.network.sever(HOST);
                self.wire.sever_osd();
                self.engines.borrow().iter().for_each(|engine| engine.sever());
            }
            NodeRole::Store => self.wire.sever_store(),
        }
    }

    /// Kills a role. The role starts again after [`release`](Self::release).
    pub fn kill(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() + 1);
        if let Some(role) = slot.role.borrow_mut().take() {
            self.sever(kind);
            role.kill();
        }
    }

    /// Kills all roles, and makes the drives lose unflushed writes.
    pub fn cut_power(&self) {
        for (number, (_, drive)) in self.drives.borrow().iter().enumerate() {
            let survivors = drive.power_failure();
            self.trace.event(format_args!("drive {number} loses power: {survivors:?} may survive"));
        }
        self.roles().for_each(|role| self.kill(role));
    }

    /// Ends one [`kill`](Self::kill).
    pub fn release(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() - 1);
        slot.changed.notify_one();
    }

    /// The role that runs now, if it runs.
    pub fn role(&self, kind: NodeRole) -> Option<SimRole> {
        self.slot(kind).role.borrow().clone()
    }

    /// The drive of the target with this number.
    #[must_use]
    pub fn drive(&self, target: usize) -> Arc<SimDrive> {
        Arc::clone(&self.drives.borrow()[target].1)
    }

    /// Creates a drive with a new target, which [`replace`](Self::replace) can install.
    pub fn new_drive(&self) -> (Uuid, Arc<SimDrive>) {
        self.drives_made.set(self.drives_made.get() + 1);
        drive(&self.plan, self.drives_made.get() - 1)
    }

    /// Gives a target's place to a new target. No role may run.
    pub fn replace(&self, target: usize, new: (Uuid, Arc<SimDrive>)) {
        let (_, old) = std::mem::replace(&mut self.drives.borrow_mut()[target], new);
        self.retired.borrow_mut().push(old);
        self.lost.borrow_mut()[target] = false;
    }

    /// The UUID of the target with this number.
    #[must_use]
    pub fn uuid(&self, target: usize) -> Uuid {
        self.drives.borrow()[target].0
    }

    /// The DMA engines of the running osd; none if the node has none.
    #[must_use]
    pub fn engines(&self) -> Vec<Arc<SimEngine>> {
        self.engines.borrow().clone()
    }

    /// Random faults of the DMA engines while no other fault changes them.
    #[must_use]
    pub fn dma(&self) -> EngineFaults {
        self.dma.get()
    }

    /// The control connection between osd and store.
    #[must_use]
    pub fn wire(&self) -> &ControlWire {
        &self.wire
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

    /// Ends all faults of drives, memory, DMA and control connection, except for lost drives.
    pub fn heal(&self) {
        for (target, (_, drive)) in self.drives.borrow().iter().enumerate() {
            drive.clear_faults();
            if !self.is_lost(target) {
                drive.reinsert();
            }
        }
        self.memory_flips.set(0.0);
        self.witness.trouble(None);
        self.dma.set(EngineFaults::default());
        self.engines.borrow().iter().for_each(|engine| engine.set_faults(EngineFaults::default()));
        self.wire.refuse(false);
        self.wire.hold(false);
        self.network.links_down(false);
    }

    /// Changes the time of day of a role.
    pub fn step_clock(&self, role: NodeRole, seconds: i64) {
        self.slot(role).clock.fetch_add(seconds, Ordering::Relaxed);
    }

    /// A hash of all operations of drives and DMA engines.
    #[must_use]
    pub fn trace(&self) -> u64 {
        let drives: Vec<u64> = self.all_drives().iter().map(|drive| drive.trace()).collect();
        let engines: Vec<u64> = self.engines.borrow().iter().map(|engine| engine.stats().trace).collect();
        let hashes = drives.into_iter().chain([self.engine_trace.get()]).chain(engines);
        hashes.fold(0, |hash, next| xxh3_64_with_seed(&next.to_le_bytes(), hash))
    }

    /// All drives that the node has had.
    fn all_drives(&self) -> Vec<Arc<SimDrive>> {
        let drives = self.drives.borrow();
        self.retired.borrow().iter().chain(drives.iter().map(|(_, drive)| drive)).map(Arc::clone).collect()
    }

    /// Adds the effects of faults of drives, DMA engines and control connection to `coverage`. The
    /// caller calls this once, at the end of a simulation.
    pub fn count_effects(&self, coverage: &mut Coverage) {
        for drive in self.all_drives() {
            let counts = drive.counts();
            for (name, count) in [
                ("read errors", counts.read_errors),
                ("write errors", counts.write_errors),
                ("flush errors", counts.flush_errors),
                ("lying flushes", counts.lying_flushes),
                ("stalls", counts.stalls),
                ("bits flipped in reads", counts.flips_in_reads),
                ("bits flipped in writes", counts.flips_in_writes),
                ("bits flipped at rest", counts.flips_at_rest),
                ("absent errors", counts.absent_errors),
                ("power failures", counts.power_failures),
                ("lost sectors", counts.lost_sectors),
            ] {
                coverage.add(format!("drive: {name}"), count);
            }
        }
        let wire = self.wire.stats();
        for (name, count) in [
            ("connections cut", wire.cut),
            ("connections held", wire.held),
            ("connections refused", wire.refused),
            ("late doorbells", wire.late_doorbells),
        ] {
            coverage.add(format!("channel: {name}"), count);
        }
        self.engines
            .borrow()
            .iter()
            .for_each(|engine| add_engine(&mut self.engine_coverage.borrow_mut(), engine));
        coverage.merge(&self.engine_coverage.take());
        let flips = self.memory_flips.counts();
        coverage.add("memory: bits flipped in writes", flips.in_writes);
        coverage.add("memory: bits flipped in reads", flips.in_reads);
        let witness = self.witness.counts();
        coverage.add("witness: failed writes", witness.failed_writes);
        coverage.add("witness: late writes", witness.late_writes);
        coverage.add("witness: losses", witness.losses);
        coverage.add("witness: older copies", witness.older_copies);
        coverage.add("node: starts of an osd", self.osds_started.get());
        coverage.add(SHARDED_STARTS, self.sharded_osds_started.get());
    }

    /// Faults of the engines that compute parity.
    pub fn coding_faults(&self) -> &Faults {
        &self.coding_faults
    }

    /// Bits that flip in the osd's memory.
    pub fn memory_flips(&self) -> &MemoryFlips {
        &self.memory_flips
    }

    /// The storage of the osd's witness.
    pub fn witness(&self) -> &SimWitness {
        &self.witness
    }

    /// Returns the clock of a client, which shows the simulated time.
    #[must_use]
    pub fn client_clock(&self) -> WallClock {
        let began = self.began;
        WallClock::new(move || UNIX_EPOCH + TIME_OF_DAY + began.elapsed())
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
    pub(crate) fn owner(&self) -> NodeRole {
        match self.plan.placement {
            Placement::Host => NodeRole::Osd,
            Placement::Dpu => NodeRole::Store,
        }
    }

    /// Creates coding engines that compute on the calling thread.
    fn coding_engines(&self) -> Arc<Engines> {
        let has_accelerator = self.plan.offload.is_some_and(CodingOffload::has_accelerator);
        Arc::new(Engines::inline(self.coding_faults.clone(), has_accelerator))
    }

    /// Mounts the target with this number.
    async fn mount(&self, target: usize, stages_after: u64) -> Result<(Arc<BlockStore>, Driver), String> {
        let (uuid, drive) = self.drives.borrow()[target].clone();
        let options = MountOptions {
            expected_uuid: Some(uuid),
            index: target,
            cache_bytes: 2 << 20,
            buffer_bytes: 2 << 20,
            stages_after,
            ..MountOptions::default()
        };
        BlockStore::mount_simulated(&drive, &options).await.map_err(|e| e.to_string())
    }

    /// Mounts all targets and runs their drivers.
    async fn mount_all(&self) -> Vec<Mounted> {
        let mut mounted = Vec::new();
        for index in 0..self.plan.targets {
            let uuid = self.uuid(index);
            let store = match self.mount(index, 0).await {
                Ok((store, driver)) => {
                    spawn_local(ThreadClass::Store, driver.run());
                    Ok(store)
                }
                Err(why) => {
                    self.trace.event(format_args!("target {index} cannot be mounted: {why}"));
                    Err(AbsentStore::new(why))
                }
            };
            mounted.push(Mounted { path: format!("target {index}").into(), uuid, store });
        }
        mounted
    }

    /// Remounts targets that fail, and passes each new store to `replace`.
    async fn keep_mounted(&self, mut mounted: Vec<Mounted>, replace: impl Fn(Uuid, Arc<BlockStore>)) {
        let mount = async |index, stages_after| self.mount(index, stages_after).await;
        let replace = |target: &Mounted, store: &Arc<BlockStore>, driver: Driver| {
            spawn_local(ThreadClass::Store, driver.run());
            replace(target.uuid, Arc::clone(store));
            self.trace.event(format_args!("{} was remounted", target.path.display()));
        };
        match remount::keep_mounted(&mut mounted, mount, replace).await {}
    }

    /// The body of the osd's role with the placement `host`.
    async fn node_body(self: Rc<SimNode>, shards: u16) {
        let mounted = self.mount_all().await;
        let offered: Vec<_> =
            mounted.iter().map(|m| (m.uuid, Arc::new(RemountedStore::new(m.object_store())))).collect();
        let targets: Vec<(Uuid, Arc<dyn ObjectStore>)> =
            offered.iter().map(|(uuid, store)| (*uuid, Arc::clone(store) as _)).collect();
        let node = Rc::clone(&self);
        spawn_local(ThreadClass::Admin, async move {
            let replace = |uuid, store: Arc<BlockStore>| {
                let (_, offered) =
                    offered.iter().find(|(offered, _)| *offered == uuid).expect("the target is offered");
                offered.replace(store as _);
            };
            node.keep_mounted(mounted, replace).await;
        });
        let engines = self.coding_engines();
        let part = |_| {
            let arena = Arena::anonymous(STAGING / usize::from(shards));
            let arena = arena.expect("the machine has memory for a simulation");
            ShardParts {
                targets: targets.clone(),
                staging: BufferPool::new(arena, 0, LARGEST_BUFFER),
                stripes: StripesAt::Here(Some(Arc::clone(&engines))),
                attachment: None,
            }
        };
        self.serve((0..shards).map(part).collect()).await;
    }

    /// The body of the store's role.
    async fn store_body(self: Rc<SimNode>) {
        let mounted = self.mount_all().await;
        let served = mounted.iter().map(|m| ServedTarget { uuid: m.uuid, store: m.object_store() }).collect();
        let listener = StoreListener::Sim(self.wire.listen());
        let options = ServerOptions { engines: Some(self.coding_engines()), ..ServerOptions::default() };
        let (server, serving) =
            LocalServer::new(listener, served, options).expect("a simulated listener can be polled");
        spawn_local(ThreadClass::Channel, serving);
        let replace = |uuid, store: Arc<BlockStore>| server.replace(uuid, &(store as _));
        self.keep_mounted(mounted, replace).await;
    }

    /// The body of the osd's role with the placement `dpu`.
    async fn osd_body(self: Rc<SimNode>, shards: u16) {
        let mut parts = Vec::new();
        let run = base::entropy::uuid().as_u128();
        for (seat, engine) in (0..shards).zip(self.engines()) {
            let seat = SeatClaim { osd: run, seat, seats: shards };
            match self.attach(seat, engine).await {
                Ok(part) => parts.push(part),
                Err(e) => return self.trace.event(format_args!("the osd cannot attach to the store: {e}")),
            }
        }
        self.serve(parts).await;
    }

    /// Attaches a shard to the store.
    async fn attach(&self, seat: SeatClaim, engine: Arc<SimEngine>) -> channel::Result<ShardParts> {
        let mut options = AttachmentOptions { engine: Some(engine), seat, ..AttachmentOptions::default() };
        let shards = usize::from(seat.seats);
        options.verify_every = self.plan.verify_every();
        options.memory.layout.data_len = WINDOW / u64::from(seat.seats) / 4096 * 4096;
        options.memory.pool_len = STAGING / shards / LARGEST_BUFFER * LARGEST_BUFFER;
        options.memory.largest_buffer = LARGEST_BUFFER;
        let attachment = Attachment::connect(StoreEndpoint::Sim(self.wire.clone()), options).await?;
        let store = |(index, info): (usize, &TargetInfo)| {
            let store = DamagedMemoryStore::new(attachment.store(index), self.memory_flips.clone());
            (info.uuid, Arc::new(store) as _)
        };
        let stripes = DamagedMemorySet::new(attachment.store_set(), self.memory_flips.clone());
        Ok(ShardParts {
            targets: attachment.targets().iter().enumerate().map(store).collect(),
            staging: attachment.pool().clone(),
            stripes: StripesAt::There(Arc::new(stripes)),
            attachment: Some(attachment),
        })
    }

    /// Returns the configuration of a shard of the osd that was started last. Each start has its own,
    /// as if the operator had edited the configuration.
    fn config(&self, stripes: StripesAt) -> OsdConfig {
        let number = self.osds_started.get() - 1;
        let mut rng = rng(self.plan.seed, RandomStream::Config(number));
        let modes = [CodingMode::LatencySensitive, CodingMode::Async, CodingMode::Auto];
        let mode = if number == 0 { self.plan.coding } else { modes[rng.random_range(0..modes.len())] };
        let coding = CodingConfig {
            threads: 0,
            stripes,
            offload: self.plan.offload,
            mode,
            faults: self.coding_faults.clone(),
            ..CodingConfig::default()
        };
        let config = OsdConfig {
            placement: self.plan.placement,
            clock: self.wall_clock(NodeRole::Osd),
            pid: 1,
            coding,
            witness: Some(WitnessAt(Arc::clone(&self.witness) as _)),
            forgotten: self.accepted_losses(),
            users: self.identities.users(),
            ..OsdConfig::default()
        };
        let seconds = |seconds| Duration::from_secs(seconds);
        let is_usual = rng.random_bool(0.5);
        if is_usual {
            return config;
        }
        let mut pick = |choices: [u64; 3]| choices[rng.random_range(0..3)];
        OsdConfig {
            store_patience: seconds(pick([30, 10, 4])),
            target_timeout: seconds(pick([10, 5, 2])),
            rebuild_share: pick([25, 5, 100]) as u32,
            missed_objects_per_pg: pick([65_536, 8, 1]) as usize,
            session_expiry: seconds(pick([24 * 3600, 20, 4])),
            orphan_grace: seconds(pick([3600, 60, 20])),
            collect_interval: seconds(pick([600, 10, 2])),
            requests_per_connection: pick([256, 8, 1]) as usize,
            // With a session for each of their calls at a time, the clients need more than 16.
            sessions: pick([4096, 64, if self.plan.shares_connections { 64 } else { 16 }]) as usize,
            cached_objects_per_pg: pick([4096, 8, 1]) as usize,
            segments_in_flight: Arc::new(AtomicUsize::new(pick([3, 2, 1]) as usize)),
            ..config
        }
    }

    /// The targets whose loss an operator has accepted while the osd did not start, because more drives are
    /// lost than the pools tolerate.
    fn accepted_losses(&self) -> Vec<Uuid> {
        if !(self.is_refused.get() && self.plan.loses_too_many()) {
            return Vec::new();
        }
        self.lossy_starts.set(self.lossy_starts.get() + 1);
        (0..self.plan.targets)
            .filter(|&target| self.is_lost(target))
            .map(|target| self.uuid(target))
            .collect()
    }

    /// Returns the number of starts at which the operator has accepted the loss of targets. The
    /// node then may have an older map, with older rights.
    #[must_use]
    pub fn lossy_starts(&self) -> u32 {
        self.lossy_starts.get()
    }

    /// The identities of the node and its users.
    #[must_use]
    pub fn identities(&self) -> &SimIdentities {
        &self.identities
    }

    /// The way of a user to the control plane of the osd that runs at the time of a call.
    #[must_use]
    pub fn control(&self, user: SimUser) -> ControlWay {
        let (current, identities) = (Arc::clone(&self.administrator), self.identities.clone());
        let administer = move |request, is_repeated| -> BoxFuture<'static, wire::Result<AdminReply>> {
            let running = current.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match running.zip(identities.caller(user)) {
                Some((administrator, caller)) => administrator.administer(caller, request, is_repeated),
                None => Box::pin(std::future::ready(Err(wire::Error::Unavailable("no osd runs".into())))),
            }
        };
        ControlWay(Arc::new(InProcess(administer)))
    }

    async fn serve(&self, parts: Vec<ShardParts>) {
        let ready = |started: Result<osd::OsdStarted, osd::StartError>| {
            self.is_refused.set(started.is_err());
            match started {
                Ok(started) => {
                    self.trace.event(format_args!("the osd serves {}", started.endpoint));
                    let mut current = self.administrator.lock().unwrap_or_else(PoisonError::into_inner);
                    *current = Some(started.administrator);
                }
                Err(e) => self.trace.event(format_args!("the osd cannot start: {e}")),
            }
        };
        let stack = Arc::new(stack(&self.plan, &self.network, HOST, self.identities.of_osd()));
        let attachments: Vec<_> = parts.iter().filter_map(|part| part.attachment.clone()).collect();
        let superseded = async {
            match attachments.is_empty() {
                true => std::future::pending().await,
                false => {
                    let any = attachments.iter().map(|attachment| Box::pin(attachment.superseded()));
                    drop(futures::future::select_all(any).await);
                }
            }
        };
        let resources = parts.into_iter().map(|part| ShardResources {
            config: self.config(part.stripes),
            targets: part.targets,
            staging: part.staging,
        });
        OsdServer::serve_on_one_thread(resources.collect(), stack, ENDPOINT, ready, superseded).await;
    }
}

fn add_engine(coverage: &mut Coverage, engine: &SimEngine) {
    let stats = engine.stats();
    for (name, count) in [
        ("failed transfers", stats.failed),
        ("stalled transfers", stats.stalled),
        ("transfers moved late", stats.moved_late),
        ("corrupted transfers", stats.corrupted),
        ("dropped doorbells", stats.dropped_doorbells),
        ("device failures", stats.device_failures),
        ("device hangs", stats.device_hangs),
        ("resets", stats.resets),
    ] {
        coverage.add(format!("engine: {name}"), count);
    }
}

/// Creates the network stack of a process on a host.
#[must_use]
pub fn stack(plan: &SimulationPlan, network: &SimNetwork, host: &str, trust: Trust) -> SimStack {
    let (host, config) = (network.host(host), ConnectionConfig { trust, ..ConnectionConfig::default() });
    if plan.packets { host.stack_with_packets(config, PATH_COOL_DOWN, false) } else { host.stack(config) }
}

/// Creates a drive with a new target.
fn drive(plan: &SimulationPlan, number: usize) -> (Uuid, Arc<SimDrive>) {
    let drive =
        SimDrive::new(plan.drive_size, rng(plan.seed, RandomStream::Drive(number)), DriveTimes::default());
    let sizes = MkfsOptions {
        log_bytes: Some(plan.log_size()),
        index_bytes: Some(plan.index_size()),
        ..MkfsOptions::default()
    };
    let uuid = drive.mkfs(&sizes).expect("the drive is large enough");
    (uuid, drive)
}
