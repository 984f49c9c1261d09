//! The osd: its targets, pools and sessions, and the state that all requests share.

use std::cell::{Cell, LazyCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use array::{Array, CodingDispatcher, Group, GroupOptions, Member, Pace, StripesAt};
use base::pool::BufferPool;
use messenger::{Admissions, Connection};
use store::stripes::{EngineOptions, Engines, LocalStoreSet, StoreSet};
use store::{AbsentStore, ObjectStore};
use tokio::sync::Mutex;
use uuid::Uuid;
use wire::{Error, ObjectName, PartId, PathStatus, Redundancy, SessionId, placement};

use crate::age::Age;
use crate::backing::Backing;
use crate::config::{OsdConfig, TargetRetry};
use crate::ids;
use crate::inflight::InFlight;
use crate::map::{MISSING_STEP, NodeMap, PoolRecord, TargetRecord};
use crate::object::INFO_XATTR;
use crate::pg::Pg;
use crate::pool::{ActivePool, ObjectLocation};
use crate::rebuilds::Rebuilds;
use crate::scrubs::Scrubs;
use crate::sessions::{ConnectionId, Sessions};
use crate::sole_target::SoleTarget;
use crate::space::SpaceReclaim;
use crate::start_error::StartError;
use crate::target::Target;
use crate::timed::Timed;
use crate::times::Times;
use crate::witness::NodeWitness;

/// Time after the osd's start during which a closed session keeps its results if it was created
/// before the start. Other sessions from before the start may still reconnect and send retries. The
/// time equals the default time limit of a client's requests.
const SETTLING: Duration = Duration::from_secs(60);

/// An object storage daemon. One thread owns it.
pub(crate) struct Osd {
    pub(crate) config: OsdConfig,
    pub(crate) staging: BufferPool,
    pub(crate) targets: Rc<Vec<Rc<Target>>>,
    /// The targets as [`Member`]s, for the array groups of pools with redundancy.
    members: Rc<Vec<Rc<dyn Member>>>,
    pub(crate) map: Rc<RefCell<NodeMap>>,
    /// Lock that is held during a change of the map.
    pub(crate) changing_map: Mutex<()>,
    /// Additional increase of the map epoch at the next change of the map.
    pub(crate) epoch_step: Cell<u64>,
    /// Whether the last change of the map failed, so that perhaps only some targets have stored the
    /// changed map.
    pub(crate) map_is_uncertain: Cell<bool>,
    pub(crate) pools: RefCell<BTreeMap<String, Rc<ActivePool>>>,
    pub(crate) sessions: RefCell<Sessions>,
    /// Open connections, by number.
    pub(crate) connections: RefCell<BTreeMap<ConnectionId, Weak<dyn Connection>>>,
    /// Port at which the osd accepts connections.
    pub(crate) port: Cell<u16>,
    /// Transports other than TCP that clients can use: kind and address of each.
    pub(crate) paths: RefCell<Vec<PathStatus>>,
    /// Counters of connections that the listener refused, and of slots that it reclaimed from
    /// connections.
    pub(crate) admissions: RefCell<Option<Arc<Admissions>>>,
    pub(crate) in_flight: InFlight,
    pub(crate) requests: Cell<u32>,
    pub(crate) space: SpaceReclaim,
    pub(crate) times: Times,
    /// Rate limit of rebuilds and scrubs.
    pub(crate) pace: Pace,
    pub(crate) rebuilds: Rebuilds,
    pub(crate) scrubs: Scrubs,
    /// Pools that were removed while a target was missing. Their objects still have to be removed.
    pub(crate) removed_pools: RefCell<Vec<Rc<ActivePool>>>,
    pub(crate) coding: Rc<CodingDispatcher>,
    pub(crate) age: Rc<Age>,
    pub(crate) witness: Rc<NodeWitness>,
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

impl Osd {
    /// Returns the number of connections that use one-sided transfers for bulk data now.
    pub(crate) fn one_sided_connections(&self) -> u32 {
        let connections = self.connections.borrow();
        connections.values().filter_map(Weak::upgrade).filter(|c| c.limits().one_sided).count() as u32
    }

    /// Opens the node on these targets. Creates a new node if all targets are new.
    pub(crate) async fn open(
        config: OsdConfig,
        targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
        staging: BufferPool,
    ) -> Result<Rc<Osd>, StartError> {
        let target = |(uuid, store): (Uuid, Arc<dyn ObjectStore>)| {
            let store = if config.store_is_here() { Arc::new(Timed(store)) } else { store };
            Rc::new(Target::new(uuid, store, config.target_retry))
        };
        let mut targets: Vec<Rc<Target>> = targets.into_iter().map(target).collect();
        for target in &targets {
            target.store.register_memory(staging.arena());
        }
        let witness = NodeWitness::load(config.witness.clone())?;
        let map = NodeMap::open(&targets, &config, &witness).await?;
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
        let age = Age::begin(&targets, &witness, config.target_timeout).await?;
        let is_missing = |target: &Rc<Target>| target.failure().is_some();
        let epoch_step = if targets.iter().any(is_missing) { MISSING_STEP } else { 0 };
        let coding = CodingDispatcher::start(&config.coding, store_set(&config, &targets)?, config.emulated)?;
        let osd = Osd {
            coding,
            staging,
            members: Rc::new(targets.iter().map(|t| Rc::clone(t) as Rc<dyn Member>).collect()),
            targets: Rc::new(targets),
            map: Rc::new(RefCell::new(map.clone())),
            changing_map: Mutex::default(),
            epoch_step: Cell::new(epoch_step),
            map_is_uncertain: Cell::new(false),
            pools: RefCell::default(),
            sessions: RefCell::new(Sessions::new(config.sessions, age.generation())),
            connections: RefCell::default(),
            port: Cell::new(0),
            paths: RefCell::default(),
            admissions: RefCell::default(),
            in_flight: InFlight::default(),
            requests: Cell::new(0),
            space: SpaceReclaim::default(),
            times: Times::new(),
            pace: Pace::new(config.rebuild_rate, config.rebuild_share),
            rebuilds: Rebuilds::default(),
            scrubs: Scrubs::default(),
            removed_pools: RefCell::default(),
            age: Rc::new(age),
            witness: Rc::new(witness),
            config,
        };
        for record in map.pools.iter().filter(|record| !record.removing) {
            osd.add_pool(osd.make_pool(record));
        }
        Ok(Rc::new(osd))
    }

    /// Makes a pool available to requests.
    pub(crate) fn add_pool(&self, pool: Rc<ActivePool>) {
        self.pools.borrow_mut().insert(pool.record.name.clone(), pool);
    }

    /// Creates the in-memory state of a pool from the map's record.
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
            let times = (Rc::clone(&self.age), self.config.clock.clone());
            Rc::new(Pg::new(backing, sole, (record.id, pg), self.config.cached_objects_per_pg, times))
        };
        let pgs = (0..record.pg_count).map(&mut pg).collect();
        Rc::new(ActivePool { pgs, groups, sole_targets, closed: Cell::new(false), record: record.clone() })
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
            witness: Rc::clone(&self.witness) as _,
            is_forgotten: self.target_test(|record| record.is_some_and(|record| record.forgotten)),
            has_left: self.target_test(|record| record.is_none()),
        }
    }

    /// Returns the pool with this name, if it accepts requests.
    pub(crate) fn open_pool(&self, name: &str) -> wire::Result<Rc<ActivePool>> {
        let pools = self.pools.borrow();
        let open = pools.get(name).filter(|pool| !pool.closed.get());
        open.cloned().ok_or_else(|| Error::NoSuchPool(name.to_owned()))
    }

    /// Returns the groups of all open pools, each with its pool's name.
    pub(crate) fn open_groups(&self) -> Vec<(String, Rc<Group>)> {
        let pools = self.pools.borrow();
        let open = pools.values().filter(|pool| !pool.closed.get());
        open.flat_map(|pool| pool.groups.iter().map(|g| (pool.record.name.clone(), Rc::clone(g)))).collect()
    }

    /// Returns whether all targets of the node are present and usable.
    pub(crate) fn has_all_targets(&self) -> bool {
        let is_there = |uuid| self.targets.iter().any(|t| t.uuid == uuid && t.is_usable());
        self.map.borrow().targets.iter().all(|record| is_there(record.uuid))
    }

    /// Returns the location of an object or of one part of it.
    pub(crate) fn place(&self, name: &ObjectName, part: Option<&PartId>) -> wire::Result<ObjectLocation> {
        Ok(self.open_pool(name.pool())?.place(name.namespace(), name.object(), part))
    }

    /// Ends a session that its client has closed. No request of the session may be in progress, and
    /// the client must send no more retries.
    pub(crate) fn close_session(&self, session: SessionId) {
        self.sessions.borrow_mut().close(session);
        // Shortly after a start, the osd does not know which sessions from before the start will
        // reconnect. If the osd forgot this session now, it would also mark all sessions with lower
        // numbers as forgotten, including the sessions that reconnect later. This session therefore
        // expires later instead.
        if session.generation() < self.age.generation() && self.age.ran() < SETTLING {
            return;
        }
        let living = LazyCell::new(|| self.sessions.borrow().living(self.config.session_expiry));
        let pools = self.pools.borrow();
        for pg in pools.values().flat_map(|pool| &pool.pgs).filter(|pg| pg.knows(session)) {
            pg.close_session(session, &living);
        }
    }
}
