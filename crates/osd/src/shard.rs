//! A shard of the osd: its placement groups, and the state that their requests share.

use std::cell::{Cell, LazyCell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use array::{Array, CodingDispatcher, Group, GroupOptions, Member, Pace, StripesAt};
use base::block::Payload;
use base::pool::BufferPool;
use capability::{CapabilityError, CapabilityKey};
use futures::stream::{FuturesUnordered, StreamExt};
use messenger::{Admissions, Message};
use store::stripes::{EngineOptions, Engines, LocalStoreSet, StoreSet};
use store::{AbsentStore, ObjectStore};
use uuid::Uuid;
use wire::{PathStatus, Redundancy, Reply, SessionId, placement};

use crate::age::Age;
use crate::backing::Backing;
use crate::clients::Clients;
use crate::config::{OsdConfig, TargetRetry};
use crate::ids;
use crate::inflight::InFlight;
use crate::mailbox::{Addresses, Peers, ShardGone};
use crate::map::{NodeMap, PoolRecord, TargetRecord};
use crate::object::INFO_XATTR;
use crate::osd::Osd;
use crate::pg::Pg;
use crate::pool::ActivePool;
use crate::pool_table::PoolTable;
use crate::presence::SessionPresence;
use crate::pull_choice::PullChoices;
use crate::rebuilds::Rebuilds;
use crate::request_count::RequestCount;
use crate::scrubs::Scrubs;
use crate::sessions::BindingNumber;
use crate::share::GroupShare;
use crate::sole_target::SoleTarget;
use crate::space::SpaceReclaim;
use crate::start_error::StartError;
use crate::target::{FailureAtStart, Target};
use crate::task::spawn;
use crate::timed::Timed;
use crate::times::Times;
use crate::witness::{NodeWitness, SharedWitness};

/// Time that a change without space waits for changes on other shards before it tries again.
const SPACE_PAUSE: Duration = Duration::from_millis(20);

/// Number of the first shard, which has the state of the whole osd.
pub(crate) const FIRST: u16 = 0;

/// Time after the osd's start during which a closed session keeps its results if it was created
/// before the start. Other sessions from before the start may still reconnect and send retries. The
/// time equals the default time limit of a client's requests.
const SETTLING: Duration = Duration::from_secs(60);

/// A shard of the osd: a thread with its share of the placement groups, and the state that the
/// requests on these groups use. One thread owns it.
pub(crate) struct Shard {
    pub(crate) config: OsdConfig,
    pub(crate) share: GroupShare,
    pub(crate) peers: Peers,
    /// The state of the whole osd; only the first shard has it.
    osd: OnceCell<Weak<Osd>>,
    pub(crate) staging: BufferPool,
    pub(crate) targets: Rc<Vec<Rc<Target>>>,
    /// The targets as [`Member`]s, for the array groups of pools with redundancy.
    members: Rc<Vec<Rc<dyn Member>>>,
    /// The shard's copy of the node's map. The first shard changes all copies.
    pub(crate) map: Rc<RefCell<NodeMap>>,
    /// Number of changes of `map` since the start.
    pub(crate) map_changes: Cell<u64>,
    pub(crate) pools: PoolTable,
    /// Pools that are being created. The map does not contain them yet.
    pub(crate) prepared: PoolTable,
    /// Pools that are being removed, by their numbers.
    pub(crate) removing: RefCell<BTreeMap<u32, Rc<ActivePool>>>,
    /// Recognises the capabilities that the control plane has issued.
    pub(crate) capability_key: CapabilityKey,
    pub(crate) clients: Clients,
    pub(crate) presence: SessionPresence,
    endpoint: OnceCell<ShardEndpoint>,
    pub(crate) in_flight: InFlight,
    pub(crate) requests: RequestCount,
    pub(crate) space: SpaceReclaim,
    pub(crate) times: Times,
    pub(crate) pulls: PullChoices,
    /// Rate limit of rebuilds and scrubs of the shard.
    pub(crate) pace: Pace,
    pub(crate) rebuilds: Rebuilds,
    pub(crate) scrubs: Scrubs,
    pub(crate) coding: Rc<CodingDispatcher>,
    pub(crate) age: Arc<Age>,
    pub(crate) witness: Arc<NodeWitness>,
}

/// Fails to compile if one of the types can be sent to another thread.
macro_rules! owned_by_one_thread {
    ($($owned:ty),+) => {$(
        const _: fn() = || {
            /// Has two implementations for a type that is `Send`, so that the call below is ambiguous.
            trait AmbiguousIfSend<Which> {
                fn check() {}
            }
            impl<T: ?Sized> AmbiguousIfSend<()> for T {}
            impl<T: ?Sized + Send> AmbiguousIfSend<u8> for T {}
            <$owned as AmbiguousIfSend<_>>::check();
        };
    )+};
}

owned_by_one_thread!(Shard, Osd, ActivePool, Pg, Target, Group, CodingDispatcher);

/// Where clients reach the shards.
pub(crate) struct ShardEndpoint {
    /// Address that this shard listens to.
    pub(crate) address: String,
    /// Ports of all shards, by their numbers.
    pub(crate) ports: Vec<u16>,
    /// Transports other than TCP that clients can use: kind and address of each.
    pub(crate) paths: Vec<PathStatus>,
    /// Counters of connections that the listener refused, and of slots that it reclaimed from
    /// connections.
    pub(crate) admissions: Arc<Admissions>,
}

/// What all shards have in common when they start.
#[derive(Clone)]
pub(crate) struct NodeBasis {
    pub(crate) map: NodeMap,
    pub(crate) age: Arc<Age>,
    pub(crate) witness: Arc<NodeWitness>,
    pub(crate) pace: Pace,
    /// Targets that failed while the first shard opened the node.
    pub(crate) failed: Vec<(Uuid, FailureAtStart)>,
}

/// Returns the stores of these targets, for calls that concern several of them.
fn store_set(config: &OsdConfig, targets: &[Rc<Target>]) -> Result<Arc<dyn StoreSet>, StartError> {
    let engines = match &config.coding.stripes {
        StripesAt::There(stores) => return Ok(Arc::clone(stores)),
        StripesAt::Here(Some(engines)) => Arc::clone(engines),
        StripesAt::Here(None) => Arc::new(Engines::start(EngineOptions::default(), None)?),
    };
    let stores = targets.iter().map(|target| (target.uuid, Arc::clone(&target.store)));
    Ok(Arc::new(LocalStoreSet::new(stores.collect(), engines)))
}

/// Returns a target that belongs to the node, but that the osd has no store for.
fn absent_target(uuid: Uuid, retry: TargetRetry) -> Rc<Target> {
    let why =
        "the target was not present at the start of the node, and is used once the node is restarted with it";
    let target = Target::new(uuid, Arc::new(AbsentStore::new(why)), retry);
    target.lose(why.to_owned());
    Rc::new(target)
}

impl Shard {
    /// Maximum length of a segment of a write, in bytes.
    pub(crate) fn segment(&self) -> usize {
        self.config.segment.min(self.staging.largest())
    }

    /// Creates a shard of a node that the first shard has opened. `targets` are the shard's own
    /// stores of the node's targets.
    pub(crate) fn new(
        config: OsdConfig,
        share: GroupShare,
        addresses: Addresses,
        staging: BufferPool,
        mut targets: Vec<Rc<Target>>,
        basis: NodeBasis,
    ) -> Result<Rc<Shard>, StartError> {
        let NodeBasis { map, age, witness, pace, failed } = basis;
        targets.retain(|target| {
            let is_listed = map.has(target);
            if !is_listed {
                tracing::warn!(target_uuid = %target.uuid, "the target was replaced and is not used; restart the node with the new target");
            }
            is_listed
        });
        let given: Vec<Uuid> = targets.iter().map(|target| target.uuid).collect();
        let absent = map.targets.iter().map(|record| record.uuid).filter(|uuid| !given.contains(uuid));
        targets.extend(absent.map(|uuid| absent_target(uuid, config.target_retry)));
        for (uuid, failure) in failed {
            let target = targets.iter().find(|target| target.uuid == uuid && target.failure().is_none());
            target.into_iter().for_each(|target| target.take_over(&failure));
        }
        map.tell(&targets);
        let coding = CodingDispatcher::start(&config.coding, store_set(&config, &targets)?, config.emulated)?;
        let shard = Shard {
            coding,
            share,
            peers: Peers::new(share.shard(), addresses),
            osd: OnceCell::new(),
            staging,
            members: Rc::new(targets.iter().map(|t| Rc::clone(t) as Rc<dyn Member>).collect()),
            targets: Rc::new(targets),
            map: Rc::new(RefCell::new(map.clone())),
            pools: PoolTable::default(),
            map_changes: Cell::new(0),
            prepared: PoolTable::default(),
            capability_key: CapabilityKey::derive(&config.dpu_key),
            removing: RefCell::default(),
            clients: Clients::default(),
            presence: SessionPresence::new(age.generation()),
            endpoint: OnceCell::new(),
            in_flight: InFlight::default(),
            requests: RequestCount::default(),
            space: SpaceReclaim::default(),
            times: Times::new(share.shard()),
            pulls: PullChoices::new(share.shard()),
            pace,
            rebuilds: Rebuilds::default(),
            scrubs: Scrubs::default(),
            age,
            witness,
            config,
        };
        for record in map.pools.iter().filter(|record| !record.removing) {
            shard.pools.add(shard.make_pool(record));
        }
        Ok(Rc::new(shard))
    }

    /// Returns the state of the whole osd, if this is the first shard and the osd is running.
    pub(crate) fn osd(&self) -> Option<Rc<Osd>> {
        self.osd.get().and_then(Weak::upgrade)
    }

    /// Makes this shard the first shard.
    pub(crate) fn set_osd(&self, osd: &Rc<Osd>) {
        assert_eq!(self.share.shard(), FIRST, "only the first shard has the state of the osd");
        assert!(self.osd.set(Rc::downgrade(osd)).is_ok(), "an osd has one first shard");
    }

    /// Runs a task with the state of the whole osd, on the first shard.
    ///
    /// # Errors
    /// If the osd is stopping.
    pub(crate) async fn on_first<T: Send + 'static, F: Future<Output = T> + 'static>(
        self: &Rc<Self>,
        task: impl FnOnce(Rc<Osd>) -> F + Send + 'static,
    ) -> Result<T, ShardGone> {
        let task = async move |shard: Rc<Shard>| match shard.osd() {
            Some(osd) => Ok(task(osd).await),
            None => Err(ShardGone),
        };
        self.on(FIRST, task).await?
    }

    /// Runs `errand` with the state of the whole osd, on the first shard, without waiting for it.
    pub(crate) fn tell_first(self: &Rc<Self>, errand: impl FnOnce(&Rc<Osd>) + Send + 'static) {
        self.tell(FIRST, move |shard| {
            if let Some(osd) = shard.osd() {
                errand(&osd)
            }
        });
    }

    /// Records where clients reach the shards.
    pub(crate) fn listens(&self, endpoint: ShardEndpoint) {
        assert_eq!(endpoint.ports.len(), usize::from(self.share.shards()), "each shard has a port");
        assert!(self.endpoint.set(endpoint).is_ok(), "a shard listens to one address");
    }

    /// Returns where clients reach the shards; `None` until the osd has started.
    pub(crate) fn endpoint(&self) -> Option<&ShardEndpoint> {
        self.endpoint.get()
    }

    /// Creates the in-memory state of the shard's share of a pool, from the map's record.
    pub(crate) fn make_pool(&self, record: &PoolRecord) -> Rc<ActivePool> {
        let slots: Vec<Uuid> = self.map.borrow().targets.iter().map(|record| record.slot).collect();
        let (mut groups, mut sole_targets) = (Vec::new(), Vec::new());
        let mut backings: BTreeMap<Uuid, Rc<Backing>> = BTreeMap::new();
        let mut pg = |pg| {
            let mut sole = None;
            let backing = if record.redundancy == Redundancy::Single {
                let target = self.sole_target(record.id, pg, &slots);
                sole_targets.push(Rc::clone(&target));
                sole = Some(SoleTarget::new(&target, &self.witness, self.config.target_timeout));
                Rc::clone(backings.entry(target.uuid).or_insert_with(|| Rc::new(Backing::sole(&target))))
            } else {
                let made = Group::new(self.group_options(record, pg));
                let group = Rc::new(made.expect("the pool was created with a valid scheme"));
                groups.push(Rc::clone(&group));
                Rc::new(Backing::array(Array::new(group), format!("{}:{pg}", record.name)))
            };
            let times = (Arc::clone(&self.age), self.config.clock.clone());
            Rc::new(Pg::new(backing, sole, (record.id, pg), self.config.cached_objects_per_pg, times))
        };
        let pgs = self.share.groups(record.pg_count).map(&mut pg).collect();
        let label = self.map.borrow().label(record);
        let (share, closed, record) = (self.share, Cell::new(false), record.clone());
        Rc::new(ActivePool { share, pgs, groups, sole_targets, closed, record, label })
    }

    /// Returns the target of a group of a pool without redundancy. `slots` are the slots of all targets
    /// in the map.
    fn sole_target(&self, pool: u32, pg: u32, slots: &[Uuid]) -> Rc<Target> {
        let index = placement::target(pool, pg, slots).expect("a node has at least one target");
        let uuid = self.map.borrow().targets[index].uuid;
        let target = self.targets.iter().find(|target| target.uuid == uuid).cloned();
        // The target has been replaced. The node uses the new target from its next start.
        target.unwrap_or_else(|| absent_target(uuid, self.config.target_retry))
    }

    /// Returns a function that looks up a target in the map, and applies `test` to its record.
    fn target_test(&self, test: fn(Option<&TargetRecord>) -> bool) -> Rc<dyn Fn(&Uuid) -> bool> {
        let map = Rc::clone(&self.map);
        Rc::new(move |uuid| test(map.borrow().record(uuid)))
    }

    fn group_options(&self, record: &PoolRecord, number: u32) -> GroupOptions {
        GroupOptions {
            cid: ids::collection(record.id, number),
            place: (record.id, number),
            meta: ids::meta_object(),
            is_internal: |oid| ids::parse(oid).is_none(),
            state_xattr: INFO_XATTR,
            redundancy: record.redundancy,
            targets: Rc::clone(&self.members),
            staging: self.staging.clone(),
            member_timeout: self.config.target_timeout,
            patience: self.config.store_patience.max(2 * self.config.target_timeout),
            dirty_max: self.config.missed_objects_per_pg,
            coding: Rc::clone(&self.coding),
            clock: self.config.clock.clone(),
            witness: Rc::new(SharedWitness(Arc::clone(&self.witness))),
            is_forgotten: self.target_test(|record| record.is_some_and(|record| record.forgotten)),
            has_left: self.target_test(|record| record.is_none()),
        }
    }

    /// Returns the refusal of a capability for this reason.
    pub(crate) fn refusal_of(&self, why: CapabilityError) -> wire::Error {
        wire::Error::CapabilityRefused { why: why.to_string(), control: self.config.control.clone() }
    }

    /// Returns the pool with this number, if it accepts requests.
    pub(crate) fn open_pool(&self, id: u32) -> wire::Result<Rc<ActivePool>> {
        self.pools.open(id)
    }

    /// Returns the shard's groups of all open pools, each with its pool's label.
    pub(crate) fn open_groups(&self) -> Vec<(String, Rc<Group>)> {
        let group = |pool: &Rc<ActivePool>, group: &Rc<Group>| (pool.label.clone(), Rc::clone(group));
        let open = self.pools.all_open();
        open.iter().flat_map(|pool| pool.groups.iter().map(|g| group(pool, g))).collect()
    }

    /// Makes the groups of all shards trim overwritten data. Returns whether any group freed data.
    pub(crate) async fn trim_all(self: &Rc<Self>) -> bool {
        let trim = async |shard: Rc<Shard>| {
            let groups = || shard.open_groups().into_iter().map(|(_, group)| group).collect();
            shard.space.trim(groups).await
        };
        let trims = (0..self.share.shards()).map(|shard| self.on(shard, trim));
        let mut trims: FuturesUnordered<_> = trims.collect();
        while let Some(freed) = trims.next().await {
            if freed == Ok(true) {
                return true;
            }
        }
        false
    }

    /// Waits a moment if changes are running on other shards, which may free space. Returns whether
    /// any were running.
    pub(crate) async fn others_may_free(self: &Rc<Self>) -> bool {
        if self.share.shards() == 1 {
            return false;
        }
        let own = self.share.shard();
        let running = async move |shard: Rc<Shard>| shard.share.shard() != own && shard.space.is_active();
        let may_free = self.each(running).await.is_ok_and(|running| running.contains(&true));
        if may_free {
            tokio::time::sleep(SPACE_PAUSE).await;
        }
        may_free
    }

    /// Ends a session that its client has closed, in the placement groups of this shard. Ends the
    /// session's binding at once, unless it is newer than `newest`. The future waits until the
    /// session's requests in progress have finished. The client must send no more retries.
    pub(crate) fn end_session(
        self: Rc<Self>,
        session: SessionId,
        newest: BindingNumber,
    ) -> impl Future<Output = ()> + 'static {
        let ended = self.clients.end_session(session, newest);
        async move {
            if let Some(binding) = ended {
                let all = u32::try_from(self.config.requests_per_connection).unwrap_or(u32::MAX);
                // Acquiring fails only if the semaphore was closed, and nothing closes it.
                let _ = binding.room.acquire_many(all).await;
            }
            // Changes may be in progress on connections that have ended.
            self.in_flight.until_idle(session).await;
            self.forget_results(session);
        }
    }

    /// Returns whether the session may not change anything any more.
    pub(crate) fn has_ended(&self, session: SessionId) -> bool {
        self.map.borrow().ended.has(session) && !base::mutant!(IgnoreFence)
    }

    /// Waits until no transaction of an ended session is in flight any more. The shard queues no further
    /// one, because [`has_ended`](Self::has_ended) is true for the session.
    pub(crate) async fn drain(self: Rc<Shard>, session: SessionId) {
        let removing: Vec<Rc<ActivePool>> = self.removing.borrow().values().cloned().collect();
        for pool in self.pools.all().into_iter().chain(removing) {
            for pg in &pool.pgs {
                pg.drained(session).await;
            }
        }
    }

    /// Makes the placement groups of this shard forget the results of a closed session.
    fn forget_results(&self, session: SessionId) {
        // Shortly after a start, the osd does not know which sessions from before the start will
        // reconnect. If the osd forgot this session now, it would also mark all sessions with lower
        // numbers as forgotten, including the sessions that reconnect later. This session therefore
        // expires later instead.
        if session.generation() < self.age.generation() && self.age.ran() < SETTLING {
            return;
        }
        let living = LazyCell::new(|| self.presence.living(self.config.session_expiry));
        for pool in self.pools.all() {
            for pg in pool.pgs.iter().filter(|pg| pg.knows(session)) {
                pg.close_session(session, &living);
            }
        }
    }

    /// Returns whether all targets of the node are present and usable.
    pub(crate) fn has_all_targets(&self) -> bool {
        let is_there = |uuid| self.targets.iter().any(|t| t.uuid == uuid && t.is_usable());
        self.map.borrow().targets.iter().all(|record| is_there(record.uuid))
    }

    /// Detaches a session that has lost its slot. Closes its connection, unless other sessions use it:
    /// then tells the client on the strand of the session.
    pub(crate) fn evict(&self, session: SessionId) {
        let Some(binding) = self.clients.end_session(session, BindingNumber::MAX) else { return };
        metrics::counter!("outboard_osd_sessions_reclaimed_total").increment(1);
        let Some((connection, is_shared)) = self.clients.connection(binding.connection) else { return };
        spawn(async move {
            if !is_shared {
                return connection.close().await;
            }
            let result =
                Err(wire::Error::NoSession("it has lost its slot, or an operator has ended it".into()));
            let header = wire::encode_reply(&Reply { strand: binding.strand, seq: 0, result });
            // If the connection is lost, the client resumes the session, and gets the refusal then.
            drop(connection.send(Message { header, payload: Payload::default() }).await);
        });
    }
}

/// Prepares the targets of a shard.
pub(crate) fn make_targets(
    config: &OsdConfig,
    targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
    staging: &BufferPool,
) -> Vec<Rc<Target>> {
    let target = |(uuid, store): (Uuid, Arc<dyn ObjectStore>)| {
        let store = if config.store_is_here() { Arc::new(Timed(store)) } else { store };
        store.register_memory(staging.arena());
        Rc::new(Target::new(uuid, store, config.target_retry))
    };
    targets.into_iter().map(target).collect()
}
