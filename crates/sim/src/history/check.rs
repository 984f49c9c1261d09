//! The check of a history: divides it into objects, and applies the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use base::collections::HashSet;
use bytes::Bytes;
use client::engine::model::{self, BulkRule};
use wire::{Condition, Data, Mutate, Mutation, ObjectName, ObjectRequest, OpBytes, RequestHead};

use super::search::{DeadEnd, Found, Maybe, PreparedChange, Search, Step, Sure};
use super::{
    CallId, ChangeCall, DataOrigin, Fill, History, ListCall, Moment, Outcome, PoolRules, RecordedCall,
    RefusalKind, Request, Rule, Violation,
};

/// Payloads of more than this size, in bytes, may reach the store before their transaction.
const BULK_MIN: u64 = 2 << 20;
/// Payloads of more than this size, in bytes, always reach the store before their transaction.
const BULK_MAX: u64 = 4 << 20;
/// Reads of more than this size, in bytes, may fail because the object changes.
const ATOMIC_READ_MAX: u64 = 2 << 20;
/// Zeros that stand for the data of an op in checks of sizes.
static ZEROS: [u8; wire::limits::MAX_HEADER + 1] = [0; wire::limits::MAX_HEADER + 1];
/// Number of earlier changes that a report shows.
const SHOWN_CHANGES: usize = 6;
/// Maximum number of bytes that a change adds to the index besides its keys and values.
const INDEX_PER_CHANGE: u64 = 512;
/// Minimum number of bytes of no fill that count as data that was not written. Shorter runs are the
/// ends of fills.
const RAW_MIN: u64 = 64;
/// Number of events before the contradiction that a report shows.
const SHOWN_NOTES: usize = 6;

/// Parameters of a check.
#[derive(Debug, Clone)]
pub struct CheckOptions {
    /// Maximum number of search steps per object.
    pub steps_max: usize,
    /// Time for which the node may still execute a change of unknown outcome. It begins at the
    /// later of two times: the deadline of the change, and the healing of all faults. `None` for no
    /// limit.
    pub late_effect: Option<Duration>,
    /// Time after the healing from which on each call must be answered.
    pub recovery: Duration,
    /// Time by which a call may exceed its deadline.
    pub slack: Duration,
    /// Space of a target; `None` if no target can become full.
    pub space: Option<TargetSpace>,
}

/// Space of a target, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetSpace {
    /// Size of the data area.
    pub data: u64,
    /// Size of the index.
    pub index: u64,
}

/// Maximum number of bytes that the changes up to an event may store on one target.
#[derive(Debug, Clone, Copy, Default)]
struct StoredBytes {
    /// Order of the event.
    order: u64,
    data: u64,
    index: u64,
}

impl StoredBytes {
    /// Returns the sum of `self` and the bytes of a change that starts at event `order`.
    fn and(self, order: u64, change: &ChangeCall) -> StoredBytes {
        let ops = change.ops_with(|_| Bytes::new());
        // An op changes at most one partial block at each of its ends.
        let data = |fill: &Option<Fill>| fill.map_or(0, |fill| fill.len.next_multiple_of(4096)) + 2 * 4096;
        let data = change.pieces().iter().map(data).sum::<u64>();
        let conditions = Vec::new();
        let mutate = Mutate { name: change.object.to_wire(), part: None, conditions, ops, data: Data::None };
        let index = bytes_in(&mutate) as u64 + INDEX_PER_CHANGE;
        StoredBytes { order, data: self.data + data, index: self.index + index }
    }

    /// Whether the bytes may fill a target. The node needs more space than the sum: for replaced
    /// data that it has not freed yet, for changes that it may undo, and for pages of the index that
    /// are partly full.
    fn may_fill(self, space: TargetSpace) -> bool {
        self.data > space.data / 2 || self.index > space.index / 4
    }
}

impl Default for CheckOptions {
    fn default() -> CheckOptions {
        CheckOptions {
            steps_max: 200_000,
            late_effect: Some(Duration::from_secs(60)),
            recovery: Duration::from_secs(30),
            slack: Duration::from_secs(3),
            space: None,
        }
    }
}

/// The rules for bulk data that the node may follow for a change.
pub(super) fn bulk_rules(change: &ChangeCall, is_redundant: bool) -> &'static [BulkRule] {
    let payload = change.payload().and_then(|index| change.pieces()[index]).map_or(0, |fill| fill.len);
    match (payload, is_redundant) {
        (..=BULK_MIN, _) => &[BulkRule::Nothing],
        (..=BULK_MAX, false) => &[BulkRule::Nothing, BulkRule::Parts],
        (_, false) => &[BulkRule::Parts],
        // Data before the first stripe boundary does not count as bulk data.
        (_, true) if payload > BULK_MAX && !change.writes_payload_at_offset() => {
            &[BulkRule::Parts, BulkRule::Blocks]
        }
        (_, true) => &[BulkRule::Nothing, BulkRule::Parts, BulkRule::Blocks],
    }
}

/// Returns the error with which the node refuses a change in any state of the object.
pub(super) fn static_error(change: &ChangeCall) -> Option<RefusalKind> {
    let placeholder = |len: u64| Bytes::from_static(&ZEROS[..ZEROS.len().min(len as usize)]);
    let ops = change.ops_with(|fill| placeholder(fill.len));
    let is_payload = |op: &Mutation| matches!(op.source(), Some(OpBytes::Payload));
    let payload = change.payload().and_then(|index| change.pieces()[index]).map_or(0, |fill| fill.len);
    let data = if ops.iter().any(is_payload) { Data::Inline } else { Data::None };
    let conditions = change.conditions.clone();
    let mutate = Mutate { name: change.object.to_wire(), part: None, conditions, ops, data };
    if let Err(e) = mutate.check() {
        return Some(RefusalKind::of(&e.into()));
    }
    let too_large = mutate.ops.iter().find_map(|op| model::check_payload(op, payload).err());
    if bytes_in(&mutate) > wire::limits::MAX_HEADER / 2 {
        let head = RequestHead { strand: 0, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
        let encoded = wire::encode_request(&head, &ObjectRequest::Mutate(mutate).into());
        if encoded.len() > wire::limits::MAX_HEADER {
            return Some(RefusalKind::Limit);
        }
    }
    too_large.map(|e| RefusalKind::of(&e))
}

/// Returns the number of bytes in the conditions and ops of a change, which is nearly its encoded
/// size.
fn bytes_in(mutate: &Mutate) -> usize {
    let pairs = |pairs: &[(Bytes, Bytes)]| pairs.iter().map(|(key, value)| key.len() + value.len()).sum();
    let of_op = |op: &Mutation| match op {
        Mutation::SetXattr(name, value) => name.len() + value.len(),
        Mutation::OmapSet(entries) => pairs(entries),
        Mutation::OmapRemove(keys) => keys.iter().map(Bytes::len).sum(),
        op => match op.source() {
            Some(OpBytes::Embedded(bytes)) => bytes.len(),
            _ => 0,
        },
    };
    let of_condition = |condition: &Condition| match condition {
        Condition::Xattr(name, value) | Condition::Omap(name, value) => {
            name.len() + value.as_ref().map_or(0, Bytes::len)
        }
        Condition::Bytes(_, bytes) => bytes.len(),
        _ => 0,
    };
    mutate.ops.iter().map(of_op).sum::<usize>() + mutate.conditions.iter().map(of_condition).sum::<usize>()
}

/// The calls that concern one object.
#[derive(Default)]
struct ObjectCalls<'a> {
    calls: Vec<(CallId, &'a RecordedCall)>,
}

/// Place of a call in a sequence.
enum Place<'a> {
    Sure(Sure<'a>),
    Maybe(Maybe<'a>),
}

/// A listing, with the names that it contains.
struct CheckedListing<'a> {
    id: CallId,
    call: &'a RecordedCall,
    list: &'a ListCall,
    names: HashSet<(&'a str, &'a str)>,
}

/// A check in progress.
struct HistoryCheck<'a> {
    history: &'a History,
    options: &'a CheckOptions,
    /// All moments of the history, in order.
    moments: Vec<Moment>,
    /// Sums of the bytes of all changes so far, one per change.
    stored: Vec<StoredBytes>,
    default_pool: PoolRules,
    violations: Vec<Violation>,
}

/// Checks the calls on one pool, or all calls.
pub(super) fn check(history: &History, options: &CheckOptions, only: Option<&str>) -> Vec<Violation> {
    let of_call = |call: &RecordedCall| {
        [Some(call.start), call.end.as_ref().map(|(moment, _)| *moment), call.killed].into_iter().flatten()
    };
    let mut moments: Vec<Moment> = history.calls.iter().flat_map(of_call).collect();
    moments.sort_unstable();
    let default_pool = PoolRules::default();
    let mut sum = StoredBytes::default();
    let changes = history.calls.iter().filter_map(|call| match &call.request {
        Request::Change(change) => Some((call.start.order, change)),
        _ => None,
    });
    let stored = changes.map(|(order, change)| {
        sum = sum.and(order, change);
        sum
    });
    let stored = stored.collect();
    let mut check = HistoryCheck { history, options, moments, stored, default_pool, violations: Vec::new() };
    let mut objects: BTreeMap<&ObjectName, ObjectCalls<'_>> = BTreeMap::new();
    let mut listings = Vec::new();
    let is_checked = |call: &RecordedCall| only.is_none() || call.request.pool() == only;
    for (id, call) in (0..).map(CallId).zip(&history.calls).filter(|(_, call)| is_checked(call)) {
        check.check_liveness(id, call);
        match &call.request {
            Request::List(list) => {
                let names = match &call.end {
                    Some((_, Outcome::Listed(names))) => {
                        names.iter().map(|(namespace, name)| (&namespace[..], &name[..])).collect()
                    }
                    _ => HashSet::default(),
                };
                listings.push(CheckedListing { id, call, list, names });
            }
            request => {
                if let Some(object) = request.object() {
                    objects.entry(object).or_default().calls.push((id, call));
                }
            }
        }
    }
    for CheckedListing { id, call, list, .. } in &listings {
        check.check_names(*id, call, list, &objects);
    }
    for (object, calls) in &objects {
        match check.pool(object.pool()).may_lose_changes {
            Some(_) => check.check_origin(object, calls),
            None => check.check_object(object, calls, &listings),
        }
    }
    check.violations
}

impl<'a> HistoryCheck<'a> {
    fn pool(&self, name: &str) -> &PoolRules {
        self.history.pools.get(name).unwrap_or(&self.default_pool)
    }

    fn report(&mut self, rule: Rule, object: Option<&ObjectName>, calls: Vec<CallId>, text: String) {
        self.violations.push(Violation { rule, object: object.cloned(), calls, text });
    }

    /// Reports a call that breaks a rule by itself.
    fn report_call(&mut self, rule: Rule, id: CallId, text: &str) {
        let object = self.history.calls[id.0 as usize].request.object();
        let mut shown = format!("{text}\n");
        self.show_call(&mut shown, id);
        self.show_notes(&mut shown, self.history.calls[id.0 as usize].start.order);
        self.report(rule, object, vec![id], shown);
    }

    fn show_call(&self, out: &mut String, id: CallId) {
        let call = &self.history.calls[id.0 as usize];
        let end = match (&call.end, call.killed) {
            (Some((end, outcome)), _) => format!("{:?}: {outcome:?}", end.time),
            (None, Some(killed)) => format!("client killed at {:?}", killed.time),
            (None, None) => "never ended".into(),
        };
        let (client, start, request) = (call.client.0, call.start.time, &call.request);
        let _ = writeln!(out, "  #{} client {client}: {request}\n      {start:?} … {end}", id.0);
    }

    fn show_notes(&self, out: &mut String, until: u64) {
        let before = self.history.notes.iter().rev().filter(|(moment, _)| moment.order < until);
        let mut shown: Vec<_> = before.take(SHOWN_NOTES).collect();
        shown.reverse();
        for (moment, text) in shown {
            let _ = writeln!(out, "  event at {:?}: {text}", moment.time);
        }
    }

    /// Returns whether too many faults were active at some time of a call.
    fn is_beyond_tolerance(&self, call: &RecordedCall) -> bool {
        let end = call.end.as_ref().map_or(Duration::MAX, |(end, _)| end.time);
        let intervals =
            call.request.pool().map(|pool| &self.pool(pool).beyond_tolerance[..]).unwrap_or_default();
        intervals.iter().any(|(from, to)| *from <= end && to.is_none_or(|to| to >= call.start.time))
    }

    fn was_beyond_tolerance(&self, call: &RecordedCall) -> bool {
        let end = call.end.as_ref().map_or(Duration::MAX, |(end, _)| end.time);
        let intervals =
            call.request.pool().map(|pool| &self.pool(pool).beyond_tolerance[..]).unwrap_or_default();
        intervals.iter().any(|(from, _)| *from <= end)
    }

    /// Returns whether objects may have been unreadable for a while during a call.
    fn was_maybe_unreadable(&self, call: &RecordedCall) -> bool {
        let end = call.end.as_ref().map_or(Duration::MAX, |(end, _)| end.time);
        let intervals = call.request.pool().map(|pool| &self.pool(pool).maybe_unreadable[..]);
        let mut intervals = intervals.unwrap_or_default().iter();
        intervals.any(|(from, to)| *from <= end && to.is_none_or(|to| call.start.time <= to))
    }

    /// Returns whether the pool of a call was removed before the call ended.
    fn is_on_removed_pool(&self, call: &RecordedCall) -> bool {
        let removed = call.request.pool().and_then(|pool| self.pool(pool).removed);
        removed.is_some_and(|removed| call.end.as_ref().is_none_or(|(end, _)| *end >= removed))
    }

    fn check_liveness(&mut self, id: CallId, call: &RecordedCall) {
        let slack = self.options.slack;
        match (&call.end, call.killed) {
            (None, None) => self.report_call(Rule::Ends, id, "the call never ended"),
            (Some((end, _)), _) if call.deadline.is_some_and(|deadline| end.time > deadline + slack) => {
                let text =
                    format!("the call ended after its deadline {:?}", call.deadline.unwrap_or_default());
                self.report_call(Rule::Ends, id, &text);
            }
            _ => {}
        }
        let Some(healed) = self.history.healed else { return };
        let served = healed + self.options.recovery;
        let is_before = call.end.as_ref().is_some_and(|(end, _)| end.time < served + slack);
        if (call.start.time < served && is_before) || self.is_beyond_tolerance(call) {
            return;
        }
        let is_answered = match &call.end {
            Some((_, Outcome::Unknown(_))) => false,
            Some((_, Outcome::Refused(refusal))) => refusal.kind != RefusalKind::Failed,
            _ => true,
        };
        if !is_answered && !self.is_on_removed_pool(call) {
            let text = format!("the call has no answer, although all faults were healed at {healed:?}");
            self.report_call(Rule::Answered, id, &text);
        }
    }

    /// Checks the names of a listing that do not need the sequence of changes.
    fn check_names(
        &mut self,
        id: CallId,
        call: &RecordedCall,
        list: &ListCall,
        objects: &BTreeMap<&'a ObjectName, ObjectCalls<'a>>,
    ) {
        let names = match &call.end {
            Some((_, Outcome::Listed(names))) => names,
            Some((_, Outcome::Refused(refusal))) => {
                if self.pool(&list.pool).may_lose_changes.is_some() {
                    return;
                }
                if refusal.kind == RefusalKind::Damaged && self.was_beyond_tolerance(call) {
                    return;
                }
                if !matches!(refusal.kind, RefusalKind::Failed | RefusalKind::NoSuchPool) {
                    self.report_call(Rule::ExpectedError, id, "a listing cannot fail with this error");
                } else if refusal.kind == RefusalKind::NoSuchPool
                    && self.history.pools.contains_key(&list.pool)
                    && !self.is_on_removed_pool(call)
                {
                    self.report_call(Rule::ExpectedError, id, "the pool exists");
                }
                return;
            }
            Some((_, Outcome::Unknown(_))) | None => return,
            Some(_) => return self.report_call(Rule::ExpectedAnswer, id, "the answer is not a listing"),
        };
        if self.is_on_removed_pool(call) {
            return;
        }
        if list.is_ordered && !names.is_sorted_by(|a, b| a < b) {
            return self.report_call(Rule::Listing, id, "the names are not in order");
        }
        let mut seen = BTreeSet::new();
        for (namespace, object) in names {
            let pool = list.pool.parse().ok();
            let name = pool.and_then(|pool| ObjectName::new(pool, namespace, object).ok());
            let Some(name) = name.filter(|name| list.covers(name)) else {
                let text = format!("the listing must not contain {namespace:?}/{object:?}");
                return self.report_call(Rule::Listing, id, &text);
            };
            let Some(calls) = objects.get(&name) else {
                let text = format!("the listing contains {name}, which no call has created");
                return self.report_call(Rule::Listing, id, &text);
            };
            let is_checked = self.pool(&list.pool).may_lose_changes.is_none();
            if !seen.insert(name.clone()) && is_checked && !self.may_be_removed_during(call, calls) {
                let text =
                    format!("the listing contains {name} twice, although no call removed it meanwhile");
                return self.report_call(Rule::Listing, id, &text);
            }
        }
    }

    /// Returns whether a target may be full at some time of a call.
    fn may_be_full(&self, call: &RecordedCall) -> bool {
        let Some(space) = self.options.space else { return false };
        let end = call.end.as_ref().map(|(end, _)| *end);
        let is_recovered = |healed| call.start.time >= healed + self.options.recovery;
        let is_filled = self.history.filled.is_some_and(|from| end.is_none_or(|end| end.time >= from))
            && !self.history.healed.is_some_and(is_recovered);
        let end = end.map_or(u64::MAX, |end| end.order);
        let begun = self.stored.partition_point(|stored| stored.order < end);
        is_filled || self.stored[..begun].last().is_some_and(|stored| stored.may_fill(space))
    }

    /// Returns whether a removal of an object may take effect during a call.
    fn may_be_removed_during(&self, during: &RecordedCall, calls: &ObjectCalls<'_>) -> bool {
        calls.calls.iter().any(|(_, call)| {
            matches!(&call.request, Request::Change(change) if change.has_removal())
                && may_take_effect(call)
                && self.overlaps(call, during)
        })
    }

    /// Returns whether a change may take effect during another call.
    fn overlaps(&self, change: &RecordedCall, during: &RecordedCall) -> bool {
        let end = during.end.as_ref().map_or(u64::MAX, |(end, _)| end.order);
        let is_answered = matches!(&change.end, Some((_, Outcome::Changed(_))));
        let until = match &change.end {
            Some((end, _)) if is_answered => end.order,
            _ => self.latest_effect(change),
        };
        change.start.order < end && until > during.start.order
    }

    /// Returns the number of the first event at which a change of unknown outcome can no longer
    /// take effect.
    fn latest_effect(&self, call: &RecordedCall) -> u64 {
        let bound = self.options.late_effect.zip(self.history.healed).zip(call.deadline);
        bound.map_or(u64::MAX, |((late, healed), deadline)| {
            let time = deadline.max(healed) + late;
            let after = self.moments.partition_point(|moment| moment.time <= time);
            self.moments.get(after).map_or(u64::MAX, |moment| moment.order)
        })
    }

    /// Checks that all data of an object that clients have read was written to the object.
    fn check_origin(&mut self, object: &ObjectName, calls: &ObjectCalls<'a>) {
        let mut written = BTreeSet::new();
        for (_, call) in &calls.calls {
            if let Request::Change(change) = &call.request {
                written.extend(change.fills().map(|fill| fill.id));
            }
        }
        for (id, call) in &calls.calls {
            let Some((_, Outcome::Read(answer))) = &call.end else { continue };
            let wrong = answer.data.runs().iter().find(|(len, origin)| match origin {
                DataOrigin::Zeros => false,
                // Other bytes may look like a fill with a very high number.
                DataOrigin::Fill { id, .. } if *id <= self.history.fills => !written.contains(id),
                DataOrigin::Fill { .. } | DataOrigin::Raw(_) => *len >= RAW_MIN,
            });
            if let Some((len, origin)) = wrong {
                let text = format!("no call wrote these {len} bytes to {object}: {origin:?}");
                return self.report_call(Rule::DataOrigin, *id, &text);
            }
        }
    }

    fn check_object(
        &mut self,
        object: &ObjectName,
        calls: &ObjectCalls<'a>,
        listings: &[CheckedListing<'a>],
    ) {
        for (id, call) in &calls.calls {
            if let Err((rule, text)) = self.place(*id, call, calls, u64::MAX) {
                self.report_call(rule, *id, &text);
            }
        }
        let places = |check: &HistoryCheck<'a>, cut| check.places(object, calls, listings, cut);
        let (sure, maybe) = places(self, u64::MAX);
        let mut ends: Vec<u64> = sure.iter().map(|call| call.end).collect();
        match Search::new(sure, maybe).run(self.options.steps_max) {
            Found::Sequence => {}
            Found::GaveUp(dead_end) => {
                let (sure, maybe) = places(self, u64::MAX);
                self.report_dead_end(Rule::SearchEnds, object, &Search::plain(sure, maybe), &dead_end);
            }
            Found::Nothing(dead_end) => {
                // Show the shortest part of the history that has no sequence.
                ends.sort_unstable();
                let has_sequence = |end: &u64| {
                    let (sure, maybe) = places(self, *end);
                    matches!(Search::new(sure, maybe).run(self.options.steps_max), Found::Sequence)
                };
                let cut = ends.get(ends.partition_point(has_sequence)).copied().unwrap_or(u64::MAX);
                let (sure, maybe) = places(self, cut);
                let mut search = Search::plain(sure, maybe);
                let dead_end = match search.run(self.options.steps_max / 10) {
                    Found::Sequence => dead_end,
                    Found::Nothing(dead_end) | Found::GaveUp(dead_end) => dead_end,
                };
                self.report_dead_end(Rule::Linearizable, object, &search, &dead_end);
            }
        }
    }

    /// Returns the calls on an object that a sequence must contain, and those that it may contain.
    /// Events after event `cut` do not count.
    fn places(
        &self,
        object: &ObjectName,
        calls: &ObjectCalls<'a>,
        listings: &[CheckedListing<'a>],
        cut: u64,
    ) -> (Vec<Sure<'a>>, Vec<Maybe<'a>>) {
        let (mut sure, mut maybe) = (Vec::new(), Vec::new());
        for (id, call) in &calls.calls {
            match self.place(*id, call, calls, cut) {
                Ok(Some(Place::Sure(call))) => sure.push(call),
                Ok(Some(Place::Maybe(call))) => maybe.push(call),
                // A call that breaks a rule by itself is already reported.
                Ok(None) | Err(_) => {}
            }
        }
        for CheckedListing { id, call, names, .. } in
            listings.iter().filter(|listing| listing.list.covers(object))
        {
            if let Some((end, Outcome::Listed(_))) = &call.end
                && end.order <= cut
                && !self.is_on_removed_pool(call)
            {
                let step = Step::Listed(names.contains(&(object.namespace(), object.object())));
                sure.push(Sure { call: *id, start: call.start.order, end: end.order, step });
            }
        }
        (sure, maybe)
    }

    fn report_dead_end(&mut self, rule: Rule, object: &ObjectName, search: &Search<'_>, dead_end: &DeadEnd) {
        let path: Vec<CallId> = dead_end.path.iter().map(|choice| search.call_of(*choice)).collect();
        let before = &path[path.len().saturating_sub(SHOWN_CHANGES)..];
        let mut text = match rule {
            Rule::Linearizable => "no sequence of the calls explains all answers\n".to_owned(),
            _ => format!("the search ended after {} steps\n", self.options.steps_max),
        };
        let _ = writeln!(text, "the longest sequence has {} changes; the last of them:", path.len());
        before.iter().for_each(|id| self.show_call(&mut text, *id));
        let _ = writeln!(text, "the object then: {}", dead_end.object);
        let _ = writeln!(text, "none of these calls can follow:");
        for (id, reason) in &dead_end.stuck {
            self.show_call(&mut text, *id);
            let _ = writeln!(text, "      {reason}");
        }
        let stuck = dead_end.stuck.iter().map(|(id, _)| *id);
        let last = stuck.clone().map(|id| self.history.calls[id.0 as usize].start.order).max();
        let mut fills: BTreeMap<u32, CallId> = BTreeMap::new();
        for (id, call) in (0..).map(CallId).zip(&self.history.calls) {
            if let Request::Change(change) = &call.request {
                fills.extend(change.fills().map(|fill| (fill.id, id)));
            }
        }
        let shown = stuck.clone().filter_map(|id| match &self.history.calls[id.0 as usize].end {
            Some((_, Outcome::Read(answer))) => Some(answer.data.fills()),
            _ => None,
        });
        let shown: BTreeSet<u32> = shown.flatten().collect();
        for id in shown {
            let Some(call) = fills.get(&id) else {
                let _ = writeln!(text, "no call wrote fill {id}");
                continue;
            };
            let place = match path.iter().position(|placed| placed == call) {
                Some(place) => format!("change {} of the sequence", place + 1),
                None => "not in the sequence".into(),
            };
            let _ = writeln!(text, "fill {id} is the data of call #{} ({place})", call.0);
            if !before.contains(call) {
                self.show_call(&mut text, *call);
            }
        }
        self.show_notes(&mut text, last.unwrap_or(u64::MAX));
        let calls = before.iter().copied().chain(stuck).collect();
        self.report(rule, Some(object), calls, text);
    }

    /// Returns the place of a call in a sequence, as far as events up to event `cut` show it.
    ///
    /// # Errors
    /// If the call breaks a rule by itself.
    fn place(
        &self,
        id: CallId,
        call: &'a RecordedCall,
        others: &ObjectCalls<'_>,
        cut: u64,
    ) -> Result<Option<Place<'a>>, (Rule, String)> {
        let start = call.start.order;
        let is_redundant = call.request.pool().is_some_and(|pool| self.pool(pool).redundant);
        let is_on_removed_pool = self.is_on_removed_pool(call);
        let prepared = |change| PreparedChange::new(change, bulk_rules(change, is_redundant));
        let end = call.end.as_ref().filter(|(end, _)| end.order <= cut);
        if start > cut {
            return Ok(None);
        }
        if let Request::Change(change) = &call.request
            && (is_on_removed_pool || matches!(end, None | Some((_, Outcome::Unknown(_)))))
        {
            if static_error(change).is_some() || !may_take_effect(call) {
                return Ok(None);
            }
            let until = self.latest_effect(call);
            return Ok(Some(Place::Maybe(Maybe { call: id, start, until, change: prepared(change) })));
        }
        let Some((end, outcome)) = end.filter(|_| !is_on_removed_pool) else { return Ok(None) };
        let must_fail =
            |kind: RefusalKind| Err((Rule::ExpectedError, format!("the call must fail with {kind:?}")));
        let step = match (&call.request, outcome) {
            (request, Outcome::Refused(refusal)) => {
                let kind = refusal.kind;
                if let Request::Change(change) = request
                    && let Some(expected) = static_error(change)
                {
                    let is_wrong = kind != expected && is_about_request(kind);
                    return if is_wrong { must_fail(expected) } else { Ok(None) };
                }
                if let Some(problem) = self.problem(call, kind, others) {
                    return Err((Rule::ExpectedError, problem.to_owned()));
                }
                if !depends_on_object(kind, request) {
                    return Ok(None);
                }
                match request {
                    Request::Change(change) => Step::Refused(prepared(change), kind),
                    Request::Read(read) => Step::ReadRefused(read, kind),
                    Request::Query(query) => Step::QueryRefused(query, kind),
                    Request::List(_) | Request::Admin(_) => return Ok(None),
                }
            }
            (Request::Change(change), Outcome::Changed(mutated)) => match static_error(change) {
                Some(expected) => return must_fail(expected),
                None => Step::Changed(prepared(change), *mutated),
            },
            (Request::Read(read), Outcome::Read(answer)) => Step::Read(read, answer),
            (Request::Query(query), Outcome::Queried(answers)) => Step::Queried(query, answers),
            (_, Outcome::Unknown(_)) => return Ok(None),
            _ => return Err((Rule::ExpectedAnswer, "the answer is of the wrong kind".into())),
        };
        Ok(Some(Place::Sure(Sure { call: id, start, end: end.order, step })))
    }

    /// Returns the reason why a call cannot fail with an error, if the reason does not depend on
    /// the object's state.
    fn problem(
        &self,
        call: &RecordedCall,
        kind: RefusalKind,
        others: &ObjectCalls<'_>,
    ) -> Option<&'static str> {
        let is_change = matches!(call.request, Request::Change(_));
        match kind {
            RefusalKind::Damaged if !self.was_beyond_tolerance(call) && !self.was_maybe_unreadable(call) => {
                Some("no more faults are active than the pool tolerates, so no data may be lost")
            }
            RefusalKind::NoSpace if !is_change => Some("the call needs no space"),
            RefusalKind::NoSpace if matches!(&call.request, Request::Change(c) if c.only_removes()) => {
                Some("a removal works on a full target")
            }
            RefusalKind::NoSpace if !self.may_be_full(call) => Some("no target can be full"),
            RefusalKind::NoSuchPool
                if call.request.pool().is_some_and(|pool| self.history.pools.contains_key(pool)) =>
            {
                Some("the pool exists")
            }
            RefusalKind::Limit if is_change => None,
            RefusalKind::Limit | RefusalKind::BadRequest if !is_change => Some("the request is valid"),
            RefusalKind::Striped => Some("no call made the object striped"),
            RefusalKind::Changed { .. } => match &call.request {
                Request::Read(read) if read.if_version.is_some() => None,
                Request::Read(read) if read.len > ATOMIC_READ_MAX => {
                    let changes = others.calls.iter().any(|(_, other)| {
                        matches!(other.request, Request::Change(_))
                            && may_take_effect(other)
                            && self.overlaps(other, call)
                    });
                    if changes { None } else { Some("no change took effect during the read") }
                }
                _ => Some("only a long read, or a read of a certain version, can fail with this error"),
            },
            _ => None,
        }
    }
}

/// Returns whether a call may have an effect.
fn may_take_effect(call: &RecordedCall) -> bool {
    !matches!(&call.end, Some((_, Outcome::Refused(_))))
}

/// Returns whether an error states that the request is wrong, in any state of the object or in its
/// present state.
fn is_about_request(kind: RefusalKind) -> bool {
    !matches!(
        kind,
        RefusalKind::Failed | RefusalKind::NoSpace | RefusalKind::Damaged | RefusalKind::NoSuchPool
    )
}

/// Returns whether an error depends on the object's state.
fn depends_on_object(kind: RefusalKind, request: &Request) -> bool {
    match kind {
        RefusalKind::Changed { .. } => {
            matches!(request, Request::Read(read) if read.if_version.is_some())
        }
        kind => is_about_request(kind),
    }
}
