//! Execution of a change of an object, from the request to its durable result.

use std::time::Duration;

use base::block::BLOCK;
use store::{StoreCalls, StoreError, Transaction};
use tokio::time::Instant;
use wire::{Condition, Error, Mutated, Mutation};

use crate::draft::{self, Draft};
use crate::fail::{Fail, StepResult, unavailable};
use crate::gather::Gathered;
use crate::object::{ObjectInfo, ObjectState, user_xattr};
use crate::osd::Osd;
use crate::pg::{MetaNote, Origin};
use crate::pool::ObjectLocation;
use crate::turnstile::{PendingTransaction, Ticket, Turn};

/// First pause before another attempt after the store became unreachable. The pause doubles up to
/// half a second.
const PAUSE: Duration = Duration::from_millis(5);

/// Maximum time that a change waits for other changes and trims to free space.
const SPACE_PATIENCE: Duration = Duration::from_secs(5);

/// A change of one object.
pub(crate) struct Change<'a> {
    pub(crate) osd: &'a Osd,
    pub(crate) place: &'a ObjectLocation,
    pub(crate) name: &'a str,
    pub(crate) conditions: &'a [Condition],
    pub(crate) ops: &'a [Mutation],
    /// The request of the change; `None` for the osd's own changes.
    pub(crate) origin: Option<Origin>,
    /// Maximum time to wait for the store.
    pub(crate) patience: Duration,
}

/// Progress of a change over several attempts.
struct ChangeProgress<'a> {
    object: &'a ObjectState,
    /// Whether an earlier attempt, in this or an earlier run of the osd, may have taken effect.
    unsure: bool,
    data: Option<Gathered>,
    ticket: Option<Ticket<'a>>,
}

/// Object state from which a change's transaction is computed.
#[derive(Clone, Copy)]
enum Basis {
    /// The current state of the object; `None` if it does not exist.
    Known(Option<ObjectInfo>),
    /// A new object. The transaction fails if the object exists.
    New,
    /// Any object state, because the change replaces all of the object's data.
    Unknown,
}

/// A change whose transaction was queued.
struct QueuedChange {
    note: MetaNote,
    /// The object after the change; `None` if the change removes it.
    new: Option<ObjectInfo>,
    mutated: Mutated,
    dropped: Option<wire::Manifest>,
}

/// A change whose transaction is durable or has failed.
type Concluded<'a> = (QueuedChange, PendingTransaction<'a>, store::Result<()>);

/// Effect of a change.
pub(crate) struct ChangeEffect {
    pub(crate) mutated: Mutated,
    /// Manifest that the change has dropped: no head object refers to its parts any more.
    pub(crate) dropped: Option<wire::Manifest>,
}

impl Change<'_> {
    /// Executes the change exactly once, even if the store becomes unreachable in between. `unsure`
    /// says whether an earlier attempt may have taken effect. `gather` fetches the data, and is
    /// called again if the store has lost the data.
    pub(crate) async fn run(
        &self,
        unsure: bool,
        gather: impl AsyncFn() -> StepResult<Gathered>,
    ) -> wire::Result<ChangeEffect> {
        let mut running = self.osd.space.enter();
        let object = self.place.pg.object(&self.place.oid);
        let mut progress = ChangeProgress { object: &object, unsure, data: None, ticket: None };
        let began = Instant::now();
        let until = began + self.patience;
        let mut pause = PAUSE;
        loop {
            let incarnation = self.place.pg.backing.incarnation();
            match self.attempt(&mut progress, &gather).await {
                Ok(done) => return Ok(done),
                // An earlier attempt may have taken effect. Only its recorded result shows whether
                // it did.
                Err(Fail::Refused(e)) if progress.unsure && e != Error::RequestExpired => {
                    return Err(Error::OutcomeUnknown(e.to_string()));
                }
                // The store's error contains the id in the store; return the object's name instead.
                Err(Fail::Refused(Error::NoSuchObject(_))) => {
                    return Err(Error::NoSuchObject(self.name.into()));
                }
                Err(Fail::Refused(e @ Error::NoSpace { .. })) => {
                    // A change that waits for space must hold no space and block no other change.
                    progress.ticket = None;
                    if matches!(progress.data, Some(Gathered::Staged(_))) {
                        progress.data = None;
                    }
                    let seen = running.found_no_space();
                    let groups = || self.osd.open_groups().into_iter().map(|(_, group)| group).collect();
                    if !self.osd.space.may_come(seen, until.min(began + SPACE_PATIENCE), groups).await {
                        return Err(e);
                    }
                    running = self.osd.space.enter();
                }
                Err(Fail::Refused(e)) => return Err(e),
                Err(Fail::Lost(why)) if Instant::now() >= until => return Err(unavailable(why)),
                Err(Fail::Lost(why)) if self.place.pg.has_lost_target() => {
                    return Err(if progress.unsure {
                        Error::OutcomeUnknown(why)
                    } else {
                        Error::TargetFailed(why)
                    });
                }
                Err(Fail::Lost(why)) => {
                    tracing::debug!(name = self.name, why, "the store is unreachable; repeating the change");
                    progress.ticket.iter().for_each(Ticket::keep_place);
                    self.place.pg.backing.lost(incarnation);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
            }
        }
    }

    async fn attempt<'a>(
        &self,
        progress: &mut ChangeProgress<'a>,
        gather: &impl AsyncFn() -> StepResult<Gathered>,
    ) -> StepResult<ChangeEffect> {
        let pg = &self.place.pg;
        let incarnation = pg.load().await?;
        if let (true, Some(origin)) = (progress.unsure, &self.origin) {
            let earlier = pg.result(origin).await?;
            pg.backing.still(incarnation)?;
            if let Some(mutated) = earlier {
                metrics::counter!("outboard_osd_duplicates_total").increment(1);
                return Ok(ChangeEffect { mutated, dropped: None });
            }
            progress.unsure = false;
        }
        let data = match progress.data.take() {
            Some(data) => data,
            None => gather().await?,
        };
        let data = &*progress.data.insert(data);
        let ticket = &*progress.ticket.get_or_insert_with(|| progress.object.turnstile.ticket());
        let mut turn = ticket.enter(|| pg.backing.incarnation()).await;
        let incarnation = pg.load().await?;
        let unseen = progress.object.known(incarnation).is_none();
        if unseen && self.replaces_object() {
            turn.settled().await;
            pg.backing.still(incarnation)?;
            return self.queue_and_leave(Basis::Unknown, false, turn, progress, incarnation).await;
        }
        if unseen && self.makes_object() && pg.expects_new.guess() {
            match self.make_unseen(turn, progress.object, data, incarnation).await? {
                Ok(concluded) => return self.conclude(concluded, progress, incarnation),
                Err(back) => turn = back,
            }
        }
        // The cached state assumes that all pending transactions succeed. If all of them are blind,
        // this state is right even if some of them fail.
        let certain = turn.follows_blind_ones();
        let mut info = self.look(progress.object, incarnation).await?;
        let blind = certain
            && self.conditions.is_empty()
            && info.is_some_and(|i| draft::is_blind(self.ops, data, &i));
        if !blind {
            turn.settled().await;
            pg.backing.still(incarnation)?;
            info = pg.info(&self.place.oid, progress.object, incarnation).await?;
        }
        self.queue_and_leave(Basis::Known(info), blind, turn, progress, incarnation).await
    }

    /// Queues the change and ends its turn, so that other changes can run while this change becomes
    /// durable.
    async fn queue_and_leave<'a>(
        &self,
        basis: Basis,
        blind: bool,
        turn: Turn<'a>,
        progress: &mut ChangeProgress<'a>,
        incarnation: u64,
    ) -> StepResult<ChangeEffect> {
        let data = progress.data.as_ref().unwrap_or(&Gathered::None);
        let (queued, committed) = self.queue(basis, data, incarnation).await?;
        progress.object.learn(incarnation, queued.new);
        let pending = turn.pend(incarnation, blind);
        let outcome = committed.await;
        self.conclude((queued, pending, outcome), progress, incarnation)
    }

    /// Returns the record of the object. If the object was uncached, also records whether it was
    /// new.
    async fn look(&self, object: &ObjectState, incarnation: u64) -> StepResult<Option<ObjectInfo>> {
        let pg = &self.place.pg;
        let unseen = object.known(incarnation).is_none();
        let info = pg.info(&self.place.oid, object, incarnation).await?;
        if unseen && self.makes_object() {
            pg.expects_new.learn(info.is_none());
        }
        Ok(info)
    }

    /// Returns whether the change replaces the whole content of the object in every state of it.
    /// If the object was striped, the collector removes its old parts.
    fn replaces_object(&self) -> bool {
        matches!(self.ops.first(), Some(Mutation::WriteFull(_))) && self.conditions.is_empty()
    }

    /// Returns whether the change only frees space. On a full target, the change may then use the
    /// reserve.
    fn gives_back(&self, info: Option<&ObjectInfo>) -> bool {
        let Some(info) = info else { return false };
        self.ops.iter().all(|op| match op {
            Mutation::Truncate(size) => *size <= info.size,
            // Zeroing part of a block needs a new block if the block was a hole.
            Mutation::Zero { offset, len } => offset.checked_add(*len).is_some_and(|end| {
                let is_whole =
                    offset.is_multiple_of(BLOCK) && (end.is_multiple_of(BLOCK) || end == info.size);
                is_whole && end <= info.size
            }),
            Mutation::Remove
            | Mutation::RemoveXattr(_)
            | Mutation::OmapRemove(_)
            | Mutation::OmapRemoveRange(..)
            | Mutation::OmapClear => true,
            _ => false,
        })
    }

    /// Returns whether changes of this kind often create objects.
    fn makes_object(&self) -> bool {
        let whole = |op: &Mutation| {
            matches!(op, Mutation::Create | Mutation::WriteFull(_) | Mutation::SetManifest(_))
        };
        self.ops.first().is_some_and(whole) && self.conditions.iter().all(|c| matches!(c, Condition::Absent))
    }

    /// Executes the change of an uncached object as if the object were new, which saves a lookup.
    /// The transaction fails if the object exists. The turn lasts until the outcome of the
    /// transaction is known. Returns the turn if the object must be read after all: the object
    /// exists, or an op is invalid for a new object.
    async fn make_unseen<'a>(
        &self,
        turn: Turn<'a>,
        object: &ObjectState,
        data: &Gathered,
        incarnation: u64,
    ) -> StepResult<Result<Concluded<'a>, Turn<'a>>> {
        let pg = &self.place.pg;
        turn.settled().await;
        pg.backing.still(incarnation)?;
        // An op that is invalid for a new object may be valid for an existing object.
        let Ok((queued, committed)) = self.queue(Basis::New, data, incarnation).await else {
            return Ok(Err(turn));
        };
        let outcome = committed.await;
        if let Err(StoreError::Exists(_)) = outcome {
            pg.expects_new.learn(false);
            pg.not_recorded(queued.note);
            return Ok(Err(turn));
        }
        if outcome.is_ok() {
            pg.expects_new.learn(true);
            object.learn(incarnation, queued.new);
        }
        Ok(Ok((queued, turn.pend(incarnation, false), outcome)))
    }

    /// Computes the transaction for the given basis and queues it.
    async fn queue(
        &self,
        basis: Basis,
        data: &Gathered,
        incarnation: u64,
    ) -> StepResult<(QueuedChange, impl Future<Output = store::Result<()>>)> {
        let pg = &self.place.pg;
        let info = match basis {
            Basis::Known(info) => info,
            Basis::New | Basis::Unknown => None,
        };
        let checked = self.check_conditions(info.as_ref()).await;
        pg.backing.still(incarnation)?;
        checked?;
        let draft = Draft::new(pg, &self.place.oid, self.name, info.as_ref());
        let drafted = draft.apply(self.ops, data).await;
        // What the draft has read is valid only in the same incarnation. This includes its errors.
        pg.backing.still(incarnation)?;
        let mut drafted = drafted?;
        match basis {
            Basis::Known(_) => {}
            Basis::New => drafted.make_exclusive(&self.place.oid),
            Basis::Unknown => drafted.make_replacing(&self.place.oid),
        }

        let version = pg.next_version(info.map_or(0, |i| i.version));
        let new = drafted.object.map(|(size, manifest)| ObjectInfo {
            version,
            size,
            modified_ms: pg.clock.now_ms(),
            manifest,
        });
        drafted.ops.extend(new.as_ref().map(|info| draft::set_info(&self.place.oid, info)));
        let size = new.map_or(0, |i| i.user_size());
        let mutated = Mutated { version, size, appended_at: drafted.appended_at };
        let note = pg.record(&mut drafted.ops, self.origin.as_ref(), &mutated);
        let uses_reserve = self.gives_back(info.as_ref());
        let transaction = Transaction { collection: pg.cid.clone(), ops: drafted.ops, uses_reserve };
        let queued = pg.backing.queue(transaction);
        let committing = pg.committing();
        let committed = async move {
            let outcome = queued.await;
            drop(committing);
            outcome
        };
        Ok((QueuedChange { note, new, mutated, dropped: drafted.dropped }, committed))
    }

    /// Handles the outcome of a change's transaction. If the store was lost, prepares another
    /// attempt.
    fn conclude<'a>(
        &self,
        (queued, pending, outcome): Concluded<'a>,
        progress: &mut ChangeProgress<'a>,
        incarnation: u64,
    ) -> StepResult<ChangeEffect> {
        let pg = &self.place.pg;
        let Err(error) = outcome else {
            pg.recorded(queued.note);
            let kept = queued.new.and_then(|i| i.manifest).map(|m| m.upload);
            let dropped = queued.dropped.filter(|m| Some(m.upload) != kept);
            return Ok(ChangeEffect { mutated: queued.mutated, dropped });
        };
        let fail = Fail::from(error);
        if !(base::mutant!(KeepCacheAtFailover) && matches!(fail, Fail::Lost(_))) {
            progress.object.forget();
        }
        pg.not_recorded(queued.note);
        if matches!(fail, Fail::Lost(_)) {
            pg.backing.lost(incarnation);
            progress.unsure = true;
            if matches!(progress.data, Some(Gathered::Staged(_))) {
                // The staged data was lost with the store. The ticket is dropped, because a slow
                // client must not block the object while it sends the data again.
                (progress.data, progress.ticket) = (None, None);
            } else {
                pending.back_in_line();
            }
        }
        Err(fail)
    }

    async fn check_conditions(&self, info: Option<&ObjectInfo>) -> StepResult<()> {
        check_conditions(self.place, self.name, self.conditions, info).await
    }
}

/// Checks conditions on an object. The caller must hold the object's turn, and no transaction on
/// the object may be pending.
pub(crate) async fn check_conditions(
    place: &ObjectLocation,
    name: &str,
    conditions: &[Condition],
    info: Option<&ObjectInfo>,
) -> StepResult<()> {
    for (index, condition) in conditions.iter().enumerate() {
        if let Some(detail) = violation(place, name, condition, info).await? {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            return Err(Error::ConditionFailed { index, detail }.into());
        }
    }
    Ok(())
}

/// Returns why a condition does not hold; `None` if it holds.
async fn violation(
    place: &ObjectLocation,
    name: &str,
    condition: &Condition,
    info: Option<&ObjectInfo>,
) -> StepResult<Option<String>> {
    let (pg, oid) = (&place.pg, &place.oid);
    let store = &pg.backing;
    Ok(match condition {
        Condition::Exists => info.is_none().then(|| "the object does not exist".into()),
        Condition::Absent => info.map(|i| format!("the object exists with version {}", i.version)),
        Condition::Version(wanted) => match info {
            Some(i) if i.version == *wanted => None,
            Some(i) => Some(format!("the object has version {} instead of {wanted}", i.version)),
            None => Some("the object does not exist".into()),
        },
        Condition::Xattr(xattr, wanted) => {
            let found = match store.get_xattr(&pg.cid, oid, user_xattr(xattr)).await {
                Ok(value) => Some(value),
                Err(StoreError::NoSuchXattr(_) | StoreError::NoSuchObject(_)) => None,
                Err(e) => return Err(e.into()),
            };
            (found != *wanted)
                .then(|| format!("xattr \"{}\" does not have the expected value", xattr.escape_ascii()))
        }
        Condition::Omap(key, wanted) => {
            let found = match store.omap_get(&pg.cid, oid, vec![key.clone()]).await {
                Ok(mut found) => found.pop().map(|(_, value)| value),
                Err(StoreError::NoSuchObject(_)) => None,
                Err(e) => return Err(e.into()),
            };
            (found != *wanted)
                .then(|| format!("omap entry \"{}\" does not have the expected value", key.escape_ascii()))
        }
        Condition::Bytes(offset, wanted) => {
            let Some(info) = info else { return Ok(Some("the object does not exist".into())) };
            if info.manifest.is_some() {
                let what = "comparing bytes".into();
                return Err(Error::Striped { name: name.into(), what }.into());
            }
            let len = wanted.len() as u64;
            let read = store.read(&pg.cid, oid, *offset, len, None).await?;
            read.verify().map_err(|e| Error::Corrupt(format!("{name} ({e})")))?;
            (read.slice(*offset, len) != *wanted)
                .then(|| format!("the bytes at offset {offset} differ from the expected bytes"))
        }
        other => return Err(Error::BadRequest(format!("{other:?} is not supported")).into()),
    })
}
