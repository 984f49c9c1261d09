//! The history of all calls of a simulation, and the check that it keeps the promises of
//! `docs/semantics.md`.
//!
//! Clients record each call when they start it and when it ends. At the end of the simulation,
//! [`History::check`] looks for a sequence of the calls on each object that explains all answers.
//! The module has no I/O and no clock.
//!
//! ```
//! use std::time::Duration;
//! use sim::history::{CheckOptions, ClientId, History, Outcome, ReadAnswer, Request};
//! use sim::history::{ChangeCall, Fill, RangeRead, Seen};
//!
//! let mut history = History::new();
//! history.add_pool("photos", true);
//! let at = Duration::from_millis;
//! let name: wire::ObjectName = "photos/beach".parse()?;
//! let fill = history.new_fill(5000);
//! let put = ChangeCall::new(name.clone()).write_full(fill);
//! let call = history.start(ClientId(0), at(1), None, put);
//! let mutated = wire::Mutated { version: 1, size: 5000, appended_at: 0 };
//! history.end(call, at(2), Outcome::Changed(mutated));
//! let call = history.start(ClientId(1), at(3), None, RangeRead::whole(name));
//! let answer = ReadAnswer { version: Some(1), object_size: None, data: Seen::recognise(&fill.bytes()) };
//! history.end(call, at(4), Outcome::Read(answer));
//! assert!(history.check(&CheckOptions::default()).is_empty());
//! # Ok::<(), wire::NameError>(())
//! ```

mod calls;
mod check;
mod fill;
mod object;
mod outcome;
mod search;
mod violation;

#[cfg(test)]
mod engine_test;
#[cfg(test)]
mod generated_test;
#[cfg(test)]
mod rules_test;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::coverage::Coverage;

pub use calls::{ChangeCall, ListCall, QueryCall, RangeRead, Request};
pub use check::{CheckOptions, TargetSpace};
pub use fill::{DataOrigin, Fill, Seen};
pub use outcome::{Outcome, ReadAnswer, RefusalKind, RefusedCall};
pub use violation::{Rule, Violation};

/// A client of the simulation. A client that was killed does not come back; its successor has
/// another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u32);

/// Number of a call in its history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u32);

/// A point in the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment {
    /// Number of the event in the history. Events at the same simulated time have an order, too.
    pub(crate) order: u64,
    /// Time since the start of the simulation.
    pub(crate) time: Duration,
}

/// One call of a client.
#[derive(Debug, Clone)]
pub(crate) struct RecordedCall {
    pub(crate) client: ClientId,
    pub(crate) request: Request,
    pub(crate) start: Moment,
    /// Time at which the client stops waiting; `None` if it waits for ever.
    pub(crate) deadline: Option<Duration>,
    /// `None` if the call never ended.
    pub(crate) end: Option<(Moment, Outcome)>,
    /// Time at which the client was killed during the call.
    pub(crate) killed: Option<Moment>,
}

/// What the check must know about a pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct PoolRules {
    /// Whether the pool's redundancy scheme stores data on several targets.
    pub(crate) redundant: bool,
    /// Intervals in which more faults are active than the pool tolerates.
    pub(crate) beyond_tolerance: Vec<(Duration, Option<Duration>)>,
    /// Intervals in which objects may be unreadable for a while, because groups of the pool may lack
    /// members that were slow.
    pub(crate) maybe_unreadable: Vec<(Duration, Option<Duration>)>,
    /// Moment from which on drives may have lost acknowledged changes of the pool.
    pub(crate) may_lose_changes: Option<Moment>,
    /// Moment from which on the pool's calls are not checked, because the pool was removed.
    pub(crate) removed: Option<Moment>,
}

/// All calls of a simulation, and the events that the check must know.
#[derive(Debug, Clone, Default)]
pub struct History {
    calls: Vec<RecordedCall>,
    events: u64,
    fills: u32,
    pools: BTreeMap<String, PoolRules>,
    notes: Vec<(Moment, String)>,
    healed: Option<Duration>,
    /// Time of the first attempt to fill the targets.
    filled: Option<Duration>,
}

impl History {
    /// Creates an empty history.
    #[must_use]
    pub fn new() -> History {
        History::default()
    }

    fn moment(&mut self, time: Duration) -> Moment {
        self.events += 1;
        Moment { order: self.events, time }
    }

    /// Declares a pool. Objects of the pool did not exist before the first call.
    pub fn add_pool(&mut self, name: &str, redundant: bool) {
        self.pools.insert(name.to_owned(), PoolRules { redundant, ..PoolRules::default() });
    }

    /// Declares that a pool is about to be removed. Calls on the pool that have not ended are no
    /// longer checked.
    ///
    /// # Panics
    /// If the pool was not declared.
    pub fn remove_pool(&mut self, name: &str, now: Duration) {
        let moment = self.moment(now);
        self.pools.get_mut(name).expect("the pool was declared").removed = Some(moment);
    }

    /// Declares that more faults are active from `from` to `to` than the pool tolerates; without
    /// `to`, until the end. Calls on the pool may then fail, also later with `Corrupt`.
    ///
    /// # Panics
    /// If the pool was not declared.
    pub fn beyond_tolerance(&mut self, pool: &str, from: Duration, to: Option<Duration>) {
        self.pools.get_mut(pool).expect("the pool was declared").beyond_tolerance.push((from, to));
    }

    /// Declares that calls on a pool may fail with `Corrupt` from now on, until
    /// [`readable`](Self::readable).
    ///
    /// # Panics
    /// If the pool was not declared.
    pub fn maybe_unreadable(&mut self, pool: &str, now: Duration) {
        self.pools.get_mut(pool).expect("the pool was declared").maybe_unreadable.push((now, None));
    }

    /// Declares that all members of the groups of all pools are in sync.
    pub fn readable(&mut self, now: Duration) {
        for (_, end) in self.pools.values_mut().flat_map(|pool| &mut pool.maybe_unreadable) {
            end.get_or_insert(now);
        }
    }

    /// Declares that no more faults are active than a pool tolerates from now on.
    ///
    /// # Panics
    /// If the pool was not declared.
    pub fn within_tolerance(&mut self, pool: &str, now: Duration) {
        let intervals = &mut self.pools.get_mut(pool).expect("the pool was declared").beyond_tolerance;
        for (_, end) in intervals {
            end.get_or_insert(now);
        }
    }

    /// Declares that drives may lose acknowledged changes of a pool from now on. Of the pool's calls that
    /// end later, the check only demands that they end, and that reads return data that was written to the
    /// object.
    ///
    /// # Panics
    /// If the pool was not declared.
    pub fn may_lose_changes(&mut self, pool: &str, now: Duration) {
        let moment = self.moment(now);
        let pool = self.pools.get_mut(pool).expect("the pool was declared");
        pool.may_lose_changes.get_or_insert(moment);
    }

    /// Returns the history of a pool until drives may have lost its changes: calls that end later have not
    /// ended yet. `None` if drives never may.
    fn before_losses(&self, pool: &str) -> Option<History> {
        let moment = self.pools.get(pool)?.may_lose_changes?;
        let mut before = self.clone();
        before.pools.get_mut(pool)?.may_lose_changes = None;
        before.calls.truncate(self.calls.partition_point(|call| call.start < moment));
        for call in &mut before.calls {
            if call.end.as_ref().is_some_and(|(end, _)| *end > moment) {
                call.end = None;
            }
            if call.end.is_none() {
                call.killed = Some(call.killed.map_or(moment, |killed| killed.min(moment)));
            }
        }
        before.notes.retain(|(at, _)| *at < moment);
        before.healed = self.healed.filter(|healed| *healed < moment.time);
        Some(before)
    }

    /// Declares that requests that the history does not contain fill the targets from now on. Calls
    /// may fail with `NoSpace` until the node has recovered from all faults.
    pub fn fill_targets(&mut self, now: Duration) {
        self.filled.get_or_insert(now);
    }

    /// Returns data that no other call writes.
    pub fn new_fill(&mut self, len: u64) -> Fill {
        self.fills += 1;
        Fill { id: self.fills, len }
    }

    /// Records the start of a call. The client stops waiting at `deadline`, in simulated time.
    pub fn start(
        &mut self,
        client: ClientId,
        now: Duration,
        deadline: Option<Duration>,
        request: impl Into<Request>,
    ) -> CallId {
        let start = self.moment(now);
        let id = CallId(self.calls.len() as u32);
        self.calls.push(RecordedCall {
            client,
            request: request.into(),
            start,
            deadline,
            end: None,
            killed: None,
        });
        id
    }

    /// Records the end of a call.
    ///
    /// # Panics
    /// If the call has already ended, or if its client was killed.
    pub fn end(&mut self, call: CallId, now: Duration, outcome: Outcome) {
        let moment = self.moment(now);
        let call = &mut self.calls[call.0 as usize];
        assert!(call.end.is_none() && call.killed.is_none(), "the call has already ended");
        call.end = Some((moment, outcome));
    }

    /// Records that a client was killed. Its calls in progress have an unknown outcome.
    pub fn kill(&mut self, client: ClientId, now: Duration) {
        let moment = self.moment(now);
        self.note_at(moment, format!("client {} is killed", client.0));
        for call in self.calls.iter_mut().filter(|call| call.client == client && call.end.is_none()) {
            call.killed = Some(moment);
        }
    }

    /// Records that all clients and operators were killed.
    pub fn kill_all(&mut self, now: Duration) {
        let moment = self.moment(now);
        for call in self.calls.iter_mut().filter(|call| call.end.is_none() && call.killed.is_none()) {
            call.killed = Some(moment);
        }
    }

    /// Records that a client continues after a pause. A client that is stopped cannot keep the
    /// deadlines of its calls.
    pub fn resume(&mut self, client: ClientId, now: Duration) {
        self.note(now, format!("client {} continues", client.0));
        let is_open =
            |call: &&mut RecordedCall| call.client == client && call.end.is_none() && call.killed.is_none();
        for call in self.calls.iter_mut().filter(is_open) {
            call.deadline = call.deadline.map(|deadline| deadline.max(now));
        }
    }

    /// Adds the number of calls with each kind of outcome to `coverage`.
    pub fn count_outcomes(&self, coverage: &mut Coverage) {
        for (_, outcome) in self.calls.iter().filter_map(|call| call.end.as_ref()) {
            coverage.add(outcome.kind(), 1);
        }
    }

    /// Records an event, such as a fault, for the report of a violation.
    pub fn note(&mut self, now: Duration, text: impl Into<String>) {
        let moment = self.moment(now);
        self.note_at(moment, text.into());
    }

    fn note_at(&mut self, moment: Moment, text: String) {
        self.notes.push((moment, text));
    }

    /// Records that no fault is active any more, and that no further fault follows.
    pub fn healed(&mut self, now: Duration) {
        self.note(now, "all faults are healed");
        self.healed = Some(now);
    }

    /// Returns the calls of a client that have ended, with their outcomes.
    pub fn ended_calls(&self, client: ClientId) -> impl Iterator<Item = (&Request, &Outcome)> {
        let calls = self.calls.iter().filter(move |call| call.client == client);
        calls.filter_map(|call| Some((&call.request, &call.end.as_ref()?.1)))
    }

    /// Returns the number of calls.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Returns whether there are no calls.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Returns the names of all objects that a call tried to change, in order. A simulation reads
    /// these objects at its end.
    #[must_use]
    pub fn objects(&self) -> Vec<wire::ObjectName> {
        let changed = self.calls.iter().filter_map(|call| match &call.request {
            Request::Change(change) => Some(change.object().clone()),
            _ => None,
        });
        changed.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }

    /// Checks that the history keeps the promises of `docs/semantics.md`. Returns all violations,
    /// at most one per object and rule.
    #[must_use]
    pub fn check(&self, options: &CheckOptions) -> Vec<Violation> {
        let mut violations = check::check(self, options, None);
        for pool in self.pools.keys() {
            let before = self.before_losses(pool);
            violations.extend(before.iter().flat_map(|before| check::check(before, options, Some(pool))));
        }
        violations
    }
}
