//! Execution of a change of an object, from the request to its durable result.

use std::rc::Rc;
use std::time::Duration;

use base::block::BLOCK;
use store::{ObjectId, StoreError, Transaction};
use tokio::time::Instant;
use wire::{Condition, Error, Mutated, Mutation};

use crate::chain::ModifiedRange;
use crate::conditions;
use crate::draft::{self, Draft, Drafted};
use crate::fail::{Fail, StepResult, unavailable};
use crate::gather::Gathered;
use crate::object::{ObjectInfo, ObjectState};
use crate::pg::Origin;
use crate::pool::ObjectLocation;
use crate::sessions::ENDED;
use crate::shard::Shard;
use crate::turnstile::{PendingChange, Ticket, Turn};

/// First pause before another attempt after the store became unreachable. The pause doubles up to
/// [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Number of attempts that may fail because other changes have failed, before an attempt waits.
const WITHDRAWALS: u32 = 10;

/// Maximum time that a change waits for other changes and trims to free space.
const SPACE_PATIENCE: Duration = Duration::from_secs(5);

/// A change of one object.
pub(crate) struct Change<'a> {
    pub(crate) shard: &'a Rc<Shard>,
    pub(crate) place: &'a ObjectLocation,
    pub(crate) name: &'a str,
    pub(crate) conditions: &'a [Condition],
    pub(crate) ops: &'a [Mutation],
    /// The objects of which the first that exists is copied, if the object does not exist.
    pub(crate) sources: &'a [ObjectId],
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
    /// Whether the next attempt makes no assumption about the object that only the store checks.
    careful: bool,
    data: Option<Gathered>,
    ticket: Option<Ticket<'a>>,
}

/// Object state from which a change's transaction is computed.
#[derive(Clone, Copy)]
enum Basis {
    /// The latest state of the object; `None` if it does not exist.
    Known(Option<ObjectInfo>),
    /// A new object. The transaction fails if the object exists.
    New,
    /// Any object state, because the change replaces all of the object's data.
    Unknown,
}

impl Basis {
    fn info(self) -> Option<ObjectInfo> {
        match self {
            Basis::Known(info) => info,
            Basis::New | Basis::Unknown => None,
        }
    }
}

/// A change whose transaction was computed.
struct EvaluatedChange {
    basis: Basis,
    /// Whether the store checks some of the conditions.
    has_guarded_conditions: bool,
    drafted: Drafted,
    /// Version of the object that this one begins as a copy of; 0 if there is none.
    oldest: u64,
}

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
        let mut running = self.shard.space.enter();
        let object = self.place.pg.object(&self.place.oid);
        let mut progress =
            ChangeProgress { object: &object, unsure, careful: false, data: None, ticket: None };
        let began = Instant::now();
        let until = began + self.patience;
        let mut pause = PAUSE;
        let mut withdrawals = 0;
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
                    let (trim, until) = (self.shard.trim_all(), until.min(began + SPACE_PATIENCE));
                    let may_come = self.shard.space.may_come(seen, until, trim).await;
                    if !may_come && (Instant::now() >= until || !self.shard.others_may_free().await) {
                        return Err(e);
                    }
                    running = self.shard.space.enter();
                }
                Err(Fail::Refused(e)) => return Err(e),
                Err(Fail::Withdrawn) => {
                    metrics::counter!("outboard_osd_changes_withdrawn_total").increment(1);
                    withdrawals += 1;
                    if withdrawals > WITHDRAWALS {
                        // Perhaps a target has lost an object that the change depends on.
                        if Instant::now() >= until {
                            let why = "its targets do not agree about the object; scrub the pool";
                            return Err(unavailable(why.into()));
                        }
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                }
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
                    pause = (pause * 2).min(PAUSE_MAX);
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
        if let Some(mutated) = self.earlier_result(progress).await? {
            return Ok(ChangeEffect { mutated, dropped: None });
        }
        let data = match progress.data.take() {
            Some(data) => data,
            None => gather().await?,
        };
        let data = &*progress.data.insert(data);
        let ticket = &*progress.ticket.get_or_insert_with(|| progress.object.turnstile.ticket());
        let (turn, incarnation) = pg.enter(ticket, async || pg.load().await).await?;
        let epoch = turn.epoch();
        let evaluated = self.evaluate(&turn, progress.object, data, progress.careful, incarnation).await;
        if turn.epoch() != epoch {
            // A pending change has failed that the evaluation may have seen.
            ticket.keep_place();
            return Err(Fail::Withdrawn);
        }
        match evaluated {
            Ok(evaluated) => self.commit(evaluated, turn, progress, incarnation).await,
            Err(Fail::Refused(e)) => {
                let seen = turn.observe();
                drop(turn);
                progress.ticket = None;
                if !base::mutant!(AnswerBeforeDurable) {
                    seen.durable().await?;
                }
                Err(Fail::Refused(e))
            }
            Err(fail) => Err(fail),
        }
    }

    /// Returns the recorded result of an earlier attempt, if one may have taken effect and has.
    async fn earlier_result(&self, progress: &mut ChangeProgress<'_>) -> StepResult<Option<Mutated>> {
        let pg = &self.place.pg;
        let incarnation = pg.load().await?;
        let (true, Some(origin)) = (progress.unsure, &self.origin) else { return Ok(None) };
        let earlier = pg.result(origin).await?;
        pg.backing.still(incarnation)?;
        if earlier.is_some() {
            metrics::counter!("outboard_osd_duplicates_total").increment(1);
        }
        progress.unsure = false;
        Ok(earlier)
    }

    /// Computes the change's transaction from the object's latest state. First makes assumptions
    /// that save lookups and that the store checks: the object is new, or the conditions hold. If
    /// an op or a condition fails under these assumptions, computes the transaction again without
    /// them.
    async fn evaluate(
        &self,
        turn: &Turn<'_>,
        object: &ObjectState,
        data: &Gathered,
        careful: bool,
        incarnation: u64,
    ) -> StepResult<EvaluatedChange> {
        let unseen = turn.latest(incarnation).is_none();
        let guards_conditions = !careful && self.has_guards() && object.expects_success.guess();
        let basis = if unseen && self.replaces_object() {
            Basis::Unknown
        } else if unseen && !careful && self.makes_object() && self.place.pg.expects_new.guess() {
            Basis::New
        } else {
            Basis::Known(self.look(turn, incarnation).await?)
        };
        if guards_conditions || matches!(basis, Basis::New) {
            match self.draft(turn, basis, guards_conditions, data, incarnation).await {
                Err(Fail::Refused(_)) => {}
                drafted => return drafted,
            }
        }
        let basis = match basis {
            Basis::New => Basis::Known(self.look(turn, incarnation).await?),
            basis => basis,
        };
        let drafted = self.draft(turn, basis, false, data, incarnation).await;
        if self.has_guards() {
            let is_violation = matches!(drafted, Err(Fail::Refused(Error::ConditionFailed { .. })));
            object.expects_success.learn(!is_violation);
        }
        drafted
    }

    /// Queues the change and ends its turn, so that other changes can run while this change becomes
    /// durable. Waits for the outcome.
    async fn commit<'a>(
        &self,
        evaluated: EvaluatedChange,
        turn: Turn<'a>,
        progress: &mut ChangeProgress<'a>,
        incarnation: u64,
    ) -> StepResult<ChangeEffect> {
        let (pg, oid) = (&self.place.pg, &self.place.oid);
        let session = self.origin.as_ref().map(|origin| origin.session);
        // Nothing may wait between this check and the queueing of the transaction: a fence waits only
        // for queued transactions.
        if let Some(session) = session.filter(|id| self.shard.has_ended(*id)) {
            progress.ticket = None;
            return Err(Error::SessionRefused { session, why: ENDED.to_owned() }.into());
        }
        let EvaluatedChange { basis, has_guarded_conditions, drafted, oldest } = evaluated;
        let before = basis.info();
        let version = pg.next_version(before.map_or(oldest, |i| i.version));
        let new = drafted.object.map(|(size, manifest)| ObjectInfo {
            version,
            size,
            modified_ms: pg.clock.now_ms(),
            manifest,
        });
        let mut ops = drafted.ops;
        let modified = ModifiedRange::of(oid, &ops, before.as_ref(), new.as_ref());
        ops.extend(new.as_ref().map(|info| draft::set_info(oid, info)));
        let size = new.map_or(0, |i| i.user_size());
        let mutated = Mutated { version, size, appended_at: drafted.appended_at };
        let note = pg.record(&mut ops, self.origin.as_ref(), &mutated);
        let uses_reserve = self.gives_back(before.as_ref());
        let kept = new.and_then(|i| i.manifest).map(|m| m.upload);
        let dropped = drafted.dropped.filter(|m| Some(m.upload) != kept);
        let queued = pg.backing.queue(Transaction { collection: pg.cid.clone(), ops, uses_reserve });
        let (committing, pending) = (pg.committing(session), turn.pend(incarnation, modified, new));
        let outcome = queued.await;
        committing.ended(outcome.as_ref().is_err_and(is_unsure).then_some(incarnation));
        let Err(error) = outcome else {
            pending.committed();
            pg.recorded(note);
            if matches!(basis, Basis::New) {
                pg.expects_new.learn(true);
            }
            if has_guarded_conditions {
                progress.object.expects_success.learn(true);
            }
            return Ok(ChangeEffect { mutated, dropped });
        };
        pg.not_recorded(note);
        let is_wrong_guess = matches!((basis, &error), (Basis::New, StoreError::Exists(_)));
        if is_wrong_guess {
            pg.expects_new.learn(false);
        }
        let fail = if is_wrong_guess { Fail::Withdrawn } else { Fail::from(error) };
        progress.careful |= is_wrong_guess || (has_guarded_conditions && matches!(fail, Fail::Withdrawn));
        self.conclude_failure(fail, pending, progress, incarnation).await
    }

    /// Handles the failure of a queued change. Prepares another attempt, unless the store has
    /// refused the change.
    async fn conclude_failure<'a>(
        &self,
        fail: Fail,
        pending: PendingChange<'a>,
        progress: &mut ChangeProgress<'a>,
        incarnation: u64,
    ) -> StepResult<ChangeEffect> {
        match &fail {
            // The store need not check the guard first, so the refusal may rest on a change that
            // failed.
            Fail::Refused(_) if pending.has_failed_base() => {
                pending.back_in_line();
                return Err(Fail::Withdrawn);
            }
            Fail::Refused(_) => {
                let seen = pending.failed();
                progress.ticket = None;
                // The refusal may rest on earlier changes, for example on the size of the xattrs.
                seen.durable().await?;
            }
            Fail::Withdrawn => pending.back_in_line(),
            Fail::Lost(_) => {
                self.place.pg.backing.lost(incarnation);
                progress.unsure = true;
                if matches!(progress.data, Some(Gathered::Staged(_))) {
                    // The staged data was lost with the store. The ticket is dropped, because a
                    // slow client must not block the object while it sends the data again.
                    drop(pending);
                    (progress.data, progress.ticket) = (None, None);
                } else {
                    pending.back_in_line();
                }
            }
        }
        Err(fail)
    }

    /// Returns the object that the change copies, with its latest record.
    async fn copied(&self, incarnation: u64) -> StepResult<Option<(&ObjectId, ObjectInfo)>> {
        let found = self.place.pg.first_of(self.sources, incarnation).await?;
        Ok(found.map(|(index, info)| (&self.sources[index], info)))
    }

    /// Returns the latest record of the object. If the object was uncached, also records whether it
    /// was new.
    async fn look(&self, turn: &Turn<'_>, incarnation: u64) -> StepResult<Option<ObjectInfo>> {
        let pg = &self.place.pg;
        let unseen = turn.latest(incarnation).is_none();
        let info = pg.info(&self.place.oid, turn, incarnation).await?;
        if unseen && self.makes_object() {
            pg.expects_new.learn(info.is_none());
        }
        Ok(info)
    }

    /// Whether a guard can check some of the conditions.
    fn has_guards(&self) -> bool {
        self.conditions.iter().any(conditions::has_guard)
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
            matches!(
                op,
                Mutation::Create | Mutation::WriteFull(_) | Mutation::SetManifest(_) | Mutation::Inherit(_)
            )
        };
        self.ops.first().is_some_and(whole) && self.conditions.iter().all(|c| matches!(c, Condition::Absent))
    }

    /// Computes the transaction for the given basis. With `guards_conditions`, the transaction
    /// checks the conditions that need a lookup.
    async fn draft(
        &self,
        turn: &Turn<'_>,
        basis: Basis,
        guards_conditions: bool,
        data: &Gathered,
        incarnation: u64,
    ) -> StepResult<EvaluatedChange> {
        let (pg, oid, info) = (&self.place.pg, &self.place.oid, basis.info());
        let mut guards = Vec::new();
        if turn.has_pending() && !base::mutant!(CommitDependentChange) {
            // The pending changes may still fail. The store then refuses this change, too.
            guards.push(draft::guard_info(oid, info.as_ref()));
        }
        let checked = if guards_conditions {
            conditions::guard_conditions(self.place, self.name, self.conditions, info.as_ref()).await
        } else {
            let (place, name) = (self.place, self.name);
            conditions::check_conditions(place, name, self.conditions, info.as_ref())
                .await
                .map(|()| Vec::new())
        };
        pg.backing.still(incarnation)?;
        guards.extend(checked?);
        let copied = match info {
            None => self.copied(incarnation).await,
            Some(_) => Ok(None),
        };
        pg.backing.still(incarnation)?;
        let copied = copied?;
        let draft = match &copied {
            Some((source, info)) => {
                // Another request may change the source, or move it to another object of the list.
                guards.push(draft::guard_info(source, Some(info)));
                Draft::of_copy(pg, oid, self.name, (source, info))?
            }
            None => Draft::new(pg, oid, self.name, info.as_ref()),
        };
        let drafted = draft.apply(self.ops, data).await;
        // What the draft has read is valid only in the same incarnation. This includes its errors.
        pg.backing.still(incarnation)?;
        let mut drafted = drafted?;
        match basis {
            Basis::Known(_) => {}
            // Without an object in the end, nothing would check the guess.
            Basis::New if drafted.object.is_none() => {
                return Err(Error::NoSuchObject(self.name.into()).into());
            }
            Basis::New => drafted.make_exclusive(oid),
            Basis::Unknown => drafted.make_replacing(oid),
        }
        drafted.ops.splice(0..0, guards);
        let oldest = copied.map_or(0, |(_, info)| info.version);
        Ok(EvaluatedChange { basis, has_guarded_conditions: guards_conditions, drafted, oldest })
    }
}

/// Returns whether a transaction that failed with this error may still take effect.
fn is_unsure(e: &StoreError) -> bool {
    matches!(e, StoreError::Disconnected(_) | StoreError::Poisoned(_))
}
