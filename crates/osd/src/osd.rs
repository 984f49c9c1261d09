//! [`Osd`]: the state of the whole osd, which the first shard owns.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use array::Pace;
use base::budget::PeerAddress;
use tokio::sync::Semaphore;
use wire::{Error, SessionId, SessionInfo};

use crate::age::Age;
use crate::audit_log::{AuditEvent, AuditKind};
use crate::change_map::MapKeeper;
use crate::clients::{ConnectionId, SessionBinding};
use crate::config::OsdConfig;
use crate::ended::OpenSessions;
use crate::mailbox::ShardGone;
use crate::map::{MISSING_STEP, MapStore, PoolRecord, TargetMapStore};
use crate::seal::Seal;
use crate::sessions::{AboutSession, BindingNumber, OpenedSession, SessionOwner, SessionSlots, Shortages};
use crate::shard::{NodeBasis, Shard};
use crate::start_error::StartError;
use crate::target::Target;
use crate::witness::NodeWitness;

/// An object storage daemon, as far as its state does not belong to single placement groups.
pub(crate) struct Osd {
    /// The first shard.
    pub(crate) shard: Rc<Shard>,
    pub(crate) map_keeper: MapKeeper,
    slots: RefCell<SessionSlots>,
    /// Sessions that the next save of the map ends.
    ending: RefCell<BTreeSet<SessionId>>,
    /// Pools that were removed while a target was missing. Their objects still have to be removed.
    pub(crate) removed_pools: RefCell<Vec<PoolRecord>>,
    /// Held while a scrub is being started, so that only one request at a time starts one.
    pub(crate) scrub_start: tokio::sync::Mutex<()>,
}

/// A connection on which a client opens a session.
pub(crate) struct OpeningConnection {
    pub(crate) shard: u16,
    pub(crate) id: ConnectionId,
    /// Number of the session on the connection.
    pub(crate) strand: u32,
    pub(crate) peer: PeerAddress,
    pub(crate) owner: SessionOwner,
    pub(crate) about: AboutSession,
    pub(crate) room: Arc<Semaphore>,
}

/// Opens the node on these targets. Creates a new node if all targets are new.
pub(crate) async fn open_node(config: &OsdConfig, targets: &[Rc<Target>]) -> Result<NodeBasis, StartError> {
    let seal = Seal::new(config.dpu_key.clone(), config.accepts_altered_map);
    let witness = Arc::new(NodeWitness::load(config.witness.clone(), seal)?);
    let mut map = TargetMapStore::new(targets, Arc::clone(&witness), config).load().await?;
    let listed: Vec<Rc<Target>> = targets.iter().filter(|target| map.has(target)).cloned().collect();
    let age = Age::begin(&listed, &witness, config.target_timeout).await?;
    let failed = listed.iter().filter_map(|target| target.failure_at_start().map(|e| (target.uuid, e)));
    let failed = failed.collect();
    map.ended.begin(age.generation());
    let pace = Pace::new(config.rebuild_rate, config.rebuild_share);
    Ok(NodeBasis { map, age: Arc::new(age), witness, pace, failed })
}

impl Osd {
    /// Creates the state of the osd, on its first shard.
    pub(crate) fn new(shard: Rc<Shard>) -> Rc<Osd> {
        let is_missing = |target: &Rc<Target>| target.failure().is_some();
        let epoch_step = if shard.targets.iter().any(is_missing) { MISSING_STEP } else { 0 };
        shard.config.users.publish(&shard.map.borrow().accounts);
        let slots =
            SessionSlots::new(shard.config.sessions, shard.age.generation(), shard.config.dpu_key.clone());
        // Unlike the store that the map was loaded from, this one knows the targets that are missing.
        let store = Rc::new(TargetMapStore::new(&shard.targets, Arc::clone(&shard.witness), &shard.config));
        let epoch = shard.map.borrow().epoch;
        let osd = Rc::new(Osd {
            map_keeper: MapKeeper::new(store, epoch, epoch_step),
            slots: RefCell::new(slots),
            ending: RefCell::default(),
            removed_pools: RefCell::default(),
            scrub_start: tokio::sync::Mutex::default(),
            shard: Rc::clone(&shard),
        });
        shard.set_osd(&osd);
        osd
    }

    /// Opens a session on a connection of any shard. When this function returns, all shards know the
    /// session. Returns its id, and the number of its binding to the connection.
    pub(crate) async fn open_session(
        &self,
        presented: Option<SessionId>,
        connection: OpeningConnection,
    ) -> wire::Result<(SessionId, BindingNumber)> {
        let OpeningConnection { shard: on, id: connection, strand, peer, owner, about, room } = connection;
        let client = ((about.tenant, peer), &owner);
        let OpenedSession { id, binding: number, evicted } = {
            let map = self.shard.map.borrow();
            self.slots.borrow_mut().open(presented, on, client, &map.ended)?
        };
        if presented.is_none() {
            self.shard.config.audit.record(|| AuditEvent {
                at_ms: about.opened_ms,
                event: AuditKind::SessionOpened,
                user: Some(about.user.clone()),
                key: owner.key,
                peer: Some(about.peer.clone()),
                what: id.to_string(),
                why: None,
            });
        }
        self.slots.borrow_mut().describe(id, about);
        // Each shard receives these errands in the order in which the slots have changed.
        let known = self.shard.tell_each(move |shard| {
            if let Some(evicted) = evicted {
                shard.presence.forget(evicted);
                shard.evict(evicted);
            }
            shard.presence.opened(id);
            if shard.share.shard() == on {
                let room = Arc::clone(&room);
                shard.clients.bind(id, SessionBinding { number, connection, strand, room });
            }
        });
        known.await?;
        Ok((id, number))
    }

    /// Returns the sessions of a tenant; with `None`, of all tenants.
    pub(crate) fn list_sessions(&self, tenant: Option<u32>) -> Vec<SessionInfo> {
        let slots = self.slots.borrow();
        let listed =
            slots.list().into_iter().filter(|(_, about, _)| tenant.is_none_or(|id| about.tenant == id));
        let info = |(id, about, connections): (SessionId, &AboutSession, usize)| SessionInfo {
            id,
            user: about.user.clone(),
            peer: about.peer.clone(),
            opened_ms: about.opened_ms,
            connections: u32::try_from(connections).unwrap_or(u32::MAX),
        };
        listed.map(info).collect()
    }

    /// Ends a session for good, as [`fence`](Self::fence) does, by order of an operator.
    ///
    /// # Errors
    /// [`Error::CommandRefused`] if no such session of this tenant has a slot. With `None`, if the session
    /// has ended, or the node cannot have created it; it need not have a slot. Otherwise those of
    /// [`fence`](Self::fence).
    pub(crate) async fn kill_session(
        self: &Rc<Self>,
        id: SessionId,
        tenant: Option<u32>,
    ) -> wire::Result<()> {
        let generations = SessionId::FIRST_GENERATION..=self.shard.age.generation();
        let is_possible = generations.contains(&id.generation()) && id.number() > 0;
        let is_listed = self.list_sessions(tenant).iter().any(|session| session.id == id);
        let has_ended = self.shard.map.borrow().ended.has(id);
        if !is_listed && (tenant.is_some() || !is_possible || has_ended) {
            let why = format!("there is no session {id}; see `outboard session ls`");
            return Err(Error::CommandRefused(why));
        }
        self.fence(id).await
    }

    /// Ends a session of the client `owner` for good, on behalf of another session of this client.
    ///
    /// # Errors
    /// [`Error::SessionRefused`] if the node did not create the session for this client, unless the session
    /// has ended. Otherwise those of [`fence`](Self::fence).
    pub(crate) async fn fence_for(
        self: &Rc<Self>,
        session: SessionId,
        owner: &SessionOwner,
    ) -> wire::Result<()> {
        // A session that an operator has ended may have been another client's.
        let has_ended = self.shard.map.borrow().ended.has(session);
        if !has_ended && !self.slots.borrow().belongs_to(session, owner) {
            let why = "this node did not create it for this client. If it is an earlier owner's of a disk, \
                       end it with `outboard session kill ID` as administrator of the node";
            let why = why.to_owned();
            return Err(Error::SessionRefused { session, why });
        }
        self.fence(session).await
    }

    /// Ends a session for good. When this returns, no request of the session takes effect any more, on any
    /// shard, now or after a restart. The node's map stores this before any shard ends the session, so a
    /// restart cannot undo it. Fencing the session again has no effect.
    ///
    /// # Errors
    /// If the map cannot be saved. The session may continue then.
    async fn fence(self: &Rc<Self>, session: SessionId) -> wire::Result<()> {
        self.end_durably(session).await?;
        self.slots.borrow_mut().remove(session);
        let told = self.shard.tell_each(move |shard| {
            shard.presence.forget(session);
            shard.evict(session);
        });
        told.await?;
        self.shard.each(move |shard| async move { shard.drain(session).await }).await?;
        Ok(())
    }

    /// Records in the node's map that a session has ended. When this returns, all shards refuse its
    /// changes. Sessions that end while the map is being saved share the next save.
    async fn end_durably(self: &Rc<Self>, session: SessionId) -> wire::Result<()> {
        self.ending.borrow_mut().insert(session);
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        let mut all = std::mem::take(&mut *self.ending.borrow_mut());
        // Another caller may have taken this session along, and have failed to save it.
        all.insert(session);
        let mut map = self.shard.map.borrow().clone();
        let slots = self.slots.borrow().open_sessions();
        let open = OpenSessions { slots, may_return: self.shard.presence.may_return() };
        for id in &all {
            if !map.ended.has(*id) {
                map.ended.add(*id, &open);
            }
        }
        if map.ended == self.shard.map.borrow().ended {
            return Ok(());
        }
        self.save_map(map).await
    }

    /// Ends what a removed user has: the sessions of the user, the sessions that the user has opened for
    /// others, and the connections.
    pub(crate) async fn end_user(&self, user: u32) -> wire::Result<()> {
        let of_user = |about: &AboutSession| about.user_id == user || about.presenter == user;
        let ended: Vec<SessionId> = {
            let mut slots = self.slots.borrow_mut();
            let listed = slots.list().into_iter().filter(|(_, about, _)| of_user(about));
            let mut ended: Vec<SessionId> = listed.map(|(id, ..)| id).collect();
            ended.retain(|id| slots.remove(*id));
            ended
        };
        let told = self.shard.tell_each(move |shard| {
            for session in &ended {
                shard.presence.forget(*session);
                shard.evict(*session);
            }
            shard.clients.close_of(user);
        });
        Ok(told.await?)
    }

    /// Records that a binding of a session has ended.
    pub(crate) fn session_left(&self, session: SessionId, shard: u16, binding: BindingNumber) {
        if self.slots.borrow_mut().left(session, shard, binding) {
            drop(self.shard.tell_each(move |shard| shard.presence.left(session)));
        }
    }

    /// Records that a session is active.
    pub(crate) fn session_heard(&self, session: SessionId) {
        self.slots.borrow_mut().heard(session);
    }

    /// Ends a session that its client has closed, on all shards. The session stays known until its
    /// requests in progress have finished: until then, the collector keeps the parts of its uploads.
    pub(crate) async fn close_session(&self, session: SessionId) -> Result<(), ShardGone> {
        let newest = self.slots.borrow().newest_binding();
        self.shard.each(move |shard| shard.end_session(session, newest)).await?;
        if self.slots.borrow_mut().close(session, newest) {
            self.shard.tell_each(move |shard| shard.presence.forget(session)).await?;
        }
        Ok(())
    }

    /// Returns the counts of sessions that lost their slot or got no slot.
    pub(crate) fn shortages(&self) -> Shortages {
        self.slots.borrow().shortages()
    }
}
