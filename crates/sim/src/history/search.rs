//! Searches for a sequence of the calls on one object that explains all answers.
//!
//! The search is the algorithm of Wing and Gong with the memory of failed configurations that Lowe
//! added ("Testing for linearizability", 2016). Three facts keep it nearly linear:
//!
//! - Answered changes follow one another in the order of their versions.
//! - A call that changes nothing can take its place as soon as its answer fits.
//! - An answer that contains a version, or data of a change with unknown outcome, bounds the places
//!   of these changes.
//!
//! Changes of unknown outcome that left no trace in any answer have a penalty. The search prefers the
//! configuration that explains the most calls with the least penalties.

use std::collections::{BTreeMap, BinaryHeap};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::rc::Rc;

use base::collections::HashSet;
use bytes::Bytes;
use client::engine::model::{self, BulkRule, Effect, ModelledObject};
use wire::{Condition, Mutated, Mutation, QueryAnswer, QueryOp};

use super::object::hash_object;
use super::{CallId, ChangeCall, DataOrigin, Fill, QueryCall, RangeRead, ReadAnswer, RefusalKind, Seen};

/// Version of a state whose version no call mentions.
const HIDDEN: u64 = u64::MAX;

/// Number of calls that a change without evidence must explain, so that the search prefers it to
/// other choices.
const PENALTY: i64 = 8;

/// State of an object; `None` if it does not exist.
type State = Option<ModelledObject<Seen>>;

/// A change, prepared for repeated execution.
#[derive(Debug)]
pub(super) struct PreparedChange<'a> {
    change: &'a ChangeCall,
    ops: Vec<Mutation>,
    /// Rules for bulk data that the node may follow.
    rules: &'static [BulkRule],
}

impl<'a> PreparedChange<'a> {
    pub(super) fn new(change: &'a ChangeCall, rules: &'static [BulkRule]) -> PreparedChange<'a> {
        PreparedChange { change, ops: change.ops_with(|_| Bytes::new()), rules }
    }

    pub(super) fn apply_under(&self, rule: BulkRule, state: &State) -> Result<Effect<Seen>, RefusalKind> {
        let change = model::ObjectChange {
            name: &self.change.object,
            conditions: &self.change.conditions,
            ops: &self.ops,
            pieces: self.change.pieces(),
            bulk_rule: rule,
            inherited: None,
        };
        change.apply(state.as_ref()).map_err(|e| RefusalKind::of(&e))
    }

    /// Returns the effect of the change, or the first error.
    fn apply(&self, state: &State) -> Result<Effect<Seen>, RefusalKind> {
        let mut outcomes = self.rules.iter().map(|rule| self.apply_under(*rule, state));
        let first = outcomes.next().expect("a change follows a rule");
        if first.is_ok() { first } else { outcomes.find(Result::is_ok).unwrap_or(first) }
    }

    fn may_be_refused_with(&self, kind: RefusalKind, state: &State) -> bool {
        self.rules.iter().any(|rule| self.apply_under(*rule, state).is_err_and(|found| found == kind))
    }
}

/// Content of a call, with its outcome.
#[derive(Debug)]
pub(super) enum Step<'a> {
    Changed(PreparedChange<'a>, Mutated),
    Refused(PreparedChange<'a>, RefusalKind),
    Read(&'a RangeRead, &'a ReadAnswer),
    ReadRefused(&'a RangeRead, RefusalKind),
    Queried(&'a QueryCall, &'a [QueryAnswer]),
    QueryRefused(&'a QueryCall, RefusalKind),
    /// Whether a listing contains the object.
    Listed(bool),
}

/// A call whose outcome is known.
#[derive(Debug)]
pub(super) struct Sure<'a> {
    pub(super) call: CallId,
    /// Numbers of the events at which the call started and ended.
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) step: Step<'a>,
}

/// A change that takes effect once or never.
#[derive(Debug)]
pub(super) struct Maybe<'a> {
    pub(super) call: CallId,
    pub(super) start: u64,
    /// Number of the first event at which the change can no longer take effect.
    pub(super) until: u64,
    pub(super) change: PreparedChange<'a>,
}

/// Maximum number of bytes by which data seems to continue the data beside it by chance. More equal
/// bytes are unlikely.
const CHANCE: u64 = 8;

/// Effects of a change that answers show.
#[derive(Debug, Clone, Copy)]
struct Evidence {
    /// Lowest version in which an answer shows the effect; [`HIDDEN`] if these answers contain no
    /// version.
    version: u64,
}

/// A range of a fill that an answer shows. The object contains the range from the write on, at
/// least until this version, because each fill is written once.
#[derive(Debug, Clone)]
struct ShownRange {
    range: Range<u64>,
    version: u64,
}

impl ShownRange {
    fn implies(&self, other: &ShownRange) -> bool {
        self.version >= other.version
            && self.range.start <= other.range.start
            && self.range.end >= other.range.end
    }

    /// Adds the trace to a list of traces that do not imply one another.
    fn add_to(self, traces: &mut Vec<ShownRange>) {
        if !traces.iter().any(|trace| trace.implies(&self)) {
            traces.retain(|trace| !self.implies(trace));
            traces.push(self);
        }
    }
}

/// A set of small numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct CallSet(Vec<u64>);

impl CallSet {
    fn with_len(len: usize) -> CallSet {
        CallSet(vec![0; len.div_ceil(64)])
    }

    fn has(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    fn insert(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }
}

/// A state of the search: the calls that have their place, and the object after them.
#[derive(Debug, Clone, Default)]
struct Configuration {
    object: State,
    /// Version of the last change, or a lower bound of it.
    version: u64,
    /// Whether `version` is exact.
    is_known: bool,
    done: CallSet,
    used: CallSet,
    /// Lowest index of a sure call that is not done.
    first: usize,
    /// Number of sure calls that are done.
    done_count: usize,
    /// Number of answered changes that are done.
    changes: usize,
    /// Highest start of a call that is done.
    latest_start: u64,
    /// Sum of the penalties of the choices that led here.
    penalty: i64,
}

/// The next change in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Choice {
    /// The answered change with this index.
    Sure(usize),
    /// The change of unknown outcome with this index, and its version if a call mentions it.
    Maybe(usize, Option<u64>),
}

/// A place in the search from which all sequences fail.
#[derive(Debug)]
pub(super) struct DeadEnd {
    /// The changes before the place, in order.
    pub(super) path: Vec<Choice>,
    /// The calls that must follow but do not fit, with the reasons.
    pub(super) stuck: Vec<(CallId, String)>,
    /// The object at this place.
    pub(super) object: String,
}

/// Result of a search.
#[derive(Debug)]
pub(super) enum Found {
    /// A sequence explains all answers.
    Sequence,
    /// No sequence does.
    Nothing(Box<DeadEnd>),
    /// The search took too many steps.
    GaveUp(Box<DeadEnd>),
}

/// A configuration that the search has reached.
struct VisitedState {
    /// The configuration; an empty one after all choices were followed.
    config: Rc<Configuration>,
    /// The configuration before, and the choice that led here.
    parent: Option<(usize, Choice)>,
    /// Number of choices that were not followed yet.
    open: usize,
}

/// A choice that was not followed yet. The search follows the one with the highest priority, and
/// among these the latest.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NextChoice {
    /// Number of calls that have a place, without penalties.
    priority: i64,
    order: u64,
    node: usize,
    choice: Choice,
    penalty: i64,
}

/// All configurations that the search has reached.
#[derive(Default)]
struct SearchTree {
    nodes: Vec<VisitedState>,
    candidates: BinaryHeap<NextChoice>,
    /// Number of candidates that were taken.
    taken: u64,
    known: HashSet<[u64; 2]>,
    /// The configuration with the highest horizon, and among these the most progress.
    best: Option<((u64, i64), usize, Rc<Configuration>)>,
    empty: Rc<Configuration>,
    is_complete: bool,
}

impl SearchTree {
    fn take(&mut self) -> Option<NextChoice> {
        self.taken += 1;
        self.candidates.pop()
    }

    /// Records that a choice of a node was followed. Releases the memory after the last choice.
    fn close(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        node.open -= 1;
        if node.open == 0 {
            node.config = Rc::clone(&self.empty);
        }
    }
}

/// The calls on one object.
pub(super) struct Search<'a> {
    sure: Vec<Sure<'a>>,
    maybe: Vec<Maybe<'a>>,
    /// Indexes of the answered changes, in the order of their versions.
    changes: Vec<usize>,
    /// Versions in conditions.
    mentioned: Vec<u64>,
    /// Versions that calls mention, and that no answered change has.
    foreign: Vec<u64>,
    /// Those of `foreign` that an answer contains. A change has each of them.
    seen: Vec<u64>,
    /// Indexes of the calls that see a version.
    observers: BTreeMap<u64, Vec<usize>>,
    evidence: Vec<Option<Evidence>>,
    /// Ranges of each fill that answers show.
    traces: BTreeMap<u32, Vec<ShownRange>>,
    looks_ahead: bool,
}

impl<'a> Search<'a> {
    /// Creates a search that skips sequences as soon as they cannot explain a later answer.
    pub(super) fn new(sure: Vec<Sure<'a>>, maybe: Vec<Maybe<'a>>) -> Search<'a> {
        Search { looks_ahead: true, ..Search::plain(sure, maybe) }
    }

    /// Creates a search that follows each sequence until an answer does not fit. Such a search is
    /// slower, but its dead end shows the contradiction. The calls are in any order.
    pub(super) fn plain(mut sure: Vec<Sure<'a>>, mut maybe: Vec<Maybe<'a>>) -> Search<'a> {
        sure.sort_by_key(|call| call.start);
        maybe.sort_by_key(|call| call.start);
        let version_of = |call: &Sure<'_>| match &call.step {
            Step::Changed(_, mutated) => Some(mutated.version),
            _ => None,
        };
        let mut changes: Vec<usize> =
            (0..sure.len()).filter(|index| version_of(&sure[*index]).is_some()).collect();
        changes.sort_by_key(|index| (version_of(&sure[*index]), sure[*index].start));
        let mut observers: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let mut mentioned: Vec<u64> =
            maybe.iter().flat_map(|call| conditions_on_versions(&call.change.change.conditions)).collect();
        let mut shown: BTreeMap<u32, u64> = BTreeMap::new();
        let mut shown_values: BTreeMap<&Bytes, u64> = BTreeMap::new();
        let mut traces: BTreeMap<u32, Vec<ShownRange>> = BTreeMap::new();
        for (index, call) in sure.iter().enumerate() {
            let mut observe = |version| observers.entry(version).or_default().push(index);
            match &call.step {
                Step::Read(_, answer) => {
                    answer.version.into_iter().for_each(&mut observe);
                    for (len, piece) in answer.data.runs() {
                        if let DataOrigin::Fill { id, at } = piece {
                            let version = answer.version.unwrap_or(HIDDEN);
                            let lowest = shown.entry(*id).or_insert(version);
                            *lowest = version.min(*lowest);
                            // The bytes before and after this run may continue it by chance. No
                            // byte continues it before the first byte of the fill.
                            let start = if *at > 0 { at + CHANCE } else { 0 };
                            let end = (at + len).saturating_sub(CHANCE);
                            if version < HIDDEN && start < end {
                                let trace = ShownRange { range: start..end, version };
                                trace.add_to(traces.entry(*id).or_default());
                            }
                        }
                    }
                }
                Step::Queried(query, answers) => {
                    mentioned.extend(conditions_on_versions(&query.conditions));
                    let version = answers.iter().find_map(|answer| match answer {
                        QueryAnswer::Stat(stat) => Some(stat.version),
                        _ => None,
                    });
                    version.into_iter().for_each(&mut observe);
                    let values = answers.iter().flat_map(values_of_answer);
                    for value in values.filter(|_| !maybe.is_empty()) {
                        let version = version.unwrap_or(HIDDEN);
                        let lowest = shown_values.entry(value).or_insert(version);
                        *lowest = version.min(*lowest);
                    }
                }
                Step::QueryRefused(query, _) => {
                    mentioned.extend(conditions_on_versions(&query.conditions));
                }
                Step::ReadRefused(_, RefusalKind::Changed { found, .. }) if *found > 0 => observe(*found),
                Step::Changed(change, _) | Step::Refused(change, _) => {
                    mentioned.extend(conditions_on_versions(&change.change.conditions));
                }
                _ => {}
            }
        }
        let is_foreign = |version: &u64| {
            changes.binary_search_by_key(&Some(*version), |index| version_of(&sure[*index])).is_err()
        };
        let seen: Vec<u64> = observers.keys().copied().filter(is_foreign).collect();
        let mut foreign: Vec<u64> =
            mentioned.iter().copied().filter(is_foreign).chain(seen.iter().copied()).collect();
        foreign.sort_unstable();
        foreign.dedup();
        mentioned.sort_unstable();
        // Only values of a single call tell their origin.
        let mut setters: BTreeMap<&Bytes, usize> = BTreeMap::new();
        let sure_changes = sure.iter().filter_map(|call| match &call.step {
            Step::Changed(change, _) | Step::Refused(change, _) => Some(change),
            _ => None,
        });
        for change in sure_changes.chain(maybe.iter().map(|call| &call.change)) {
            if shown_values.is_empty() {
                break;
            }
            values_of_change(change).for_each(|value| *setters.entry(value).or_default() += 1);
        }
        let evidence = |call: &Maybe<'_>| {
            let values = values_of_change(&call.change).filter(|value| setters.get(value) == Some(&1));
            let values = values.filter_map(|value| shown_values.get(value).copied());
            let versions = call.change.change.fills().filter_map(|fill: Fill| shown.get(&fill.id).copied());
            versions.chain(values).min().map(|version| Evidence { version })
        };
        let evidence = maybe.iter().map(evidence).collect();
        Search {
            sure,
            maybe,
            changes,
            mentioned,
            foreign,
            seen,
            observers,
            evidence,
            traces,
            looks_ahead: false,
        }
    }

    pub(super) fn call_of(&self, choice: Choice) -> CallId {
        match choice {
            Choice::Sure(index) => self.sure[index].call,
            Choice::Maybe(index, _) => self.maybe[index].call,
        }
    }

    /// Searches for a sequence, with at most `steps_max` changes of the configuration.
    pub(super) fn run(&mut self, steps_max: usize) -> Found {
        let mut config = Configuration {
            object: None,
            version: 0,
            is_known: true,
            done: CallSet::with_len(self.sure.len()),
            used: CallSet::with_len(self.maybe.len()),
            first: 0,
            done_count: 0,
            changes: 0,
            latest_start: 0,
            penalty: 0,
        };
        self.settle(&mut config);
        let mut tree = SearchTree::default();
        self.grow(&mut tree, config, None);
        let mut steps = 0;
        while let Some(NextChoice { node, choice, penalty, .. }) = tree.take() {
            if tree.is_complete {
                return Found::Sequence;
            }
            steps += 1;
            if steps > steps_max {
                return Found::GaveUp(self.dead_end(&tree));
            }
            let config = Rc::clone(&tree.nodes[node].config);
            tree.close(node);
            if let Some(mut next) = self.follow(&config, choice, penalty) {
                self.settle(&mut next);
                self.grow(&mut tree, next, Some((node, choice)));
            }
        }
        if tree.is_complete { Found::Sequence } else { Found::Nothing(self.dead_end(&tree)) }
    }

    /// Adds a configuration to the tree, with the choices that follow it.
    fn grow(&self, tree: &mut SearchTree, config: Configuration, parent: Option<(usize, Choice)>) {
        if config.first == self.sure.len() {
            tree.is_complete = true;
        }
        if !tree.known.insert(key(&config)) {
            return;
        }
        let (node, choices) = (tree.nodes.len(), self.choices(&config));
        let horizon = self.horizon(&config);
        let progress = config.done_count as i64 - config.penalty;
        // The first choice of the latest configuration comes first.
        for (choice, penalty) in choices.iter().rev() {
            let order = tree.candidates.len() as u64 + tree.taken;
            let priority = progress - penalty;
            tree.candidates.push(NextChoice { priority, order, node, choice: *choice, penalty: *penalty });
        }
        let config = Rc::new(config);
        if tree.best.as_ref().is_none_or(|(best, _, _)| *best < (horizon, progress)) {
            tree.best = Some(((horizon, progress), node, Rc::clone(&config)));
        }
        tree.nodes.push(VisitedState { config, parent, open: choices.len() });
        if choices.is_empty() {
            tree.nodes[node].config = Rc::clone(&tree.empty);
        }
    }

    /// Describes the configuration that has its place for the most calls.
    fn dead_end(&self, tree: &SearchTree) -> Box<DeadEnd> {
        let ((horizon, _), node, config) = tree.best.as_ref().expect("the tree has a root");
        let parents = std::iter::successors(tree.nodes[*node].parent, |(node, _)| tree.nodes[*node].parent);
        let mut path: Vec<Choice> = parents.map(|(_, choice)| choice).collect();
        path.reverse();
        let open = self.open(config, *horizon);
        let stuck = open.map(|index| (self.sure[index].call, self.reason(index, config))).collect();
        Box::new(DeadEnd { path, stuck, object: describe(config) })
    }

    /// Returns the earliest end of a call that is not done. Calls that start later must wait.
    fn horizon(&self, config: &Configuration) -> u64 {
        let mut horizon = u64::MAX;
        for index in config.first..self.sure.len() {
            let call = &self.sure[index];
            if call.start > horizon {
                break;
            }
            if !config.done.has(index) {
                horizon = horizon.min(call.end);
            }
        }
        horizon
    }

    /// Returns the calls that may come next.
    fn open<'b>(&'b self, config: &'b Configuration, horizon: u64) -> impl Iterator<Item = usize> + 'b {
        (config.first..self.sure.len())
            .take_while(move |index| self.sure[*index].start < horizon)
            .filter(|index| !config.done.has(*index))
    }

    /// Gives all calls their place that change nothing and whose answer fits.
    fn settle(&self, config: &mut Configuration) {
        loop {
            let horizon = self.horizon(config);
            let mut is_settled = true;
            for index in config.first..self.sure.len() {
                let call = &self.sure[index];
                if call.start > horizon {
                    break;
                }
                if !config.done.has(index) && self.fits(index, config) {
                    config.done.insert(index);
                    config.done_count += 1;
                    config.latest_start = config.latest_start.max(call.start);
                    is_settled = false;
                }
            }
            while config.first < self.sure.len() && config.done.has(config.first) {
                config.first += 1;
            }
            if is_settled || self.horizon(config) == horizon {
                return;
            }
        }
    }

    /// Returns whether a call changes nothing and its answer fits.
    fn fits(&self, index: usize, config: &Configuration) -> bool {
        let object = config.object.as_ref();
        match &self.sure[index].step {
            Step::Changed(..) => false,
            Step::Refused(change, kind) => change.may_be_refused_with(*kind, &config.object),
            Step::Read(read, answer) => object.is_some_and(|object| {
                answer.version.is_none_or(|version| version == object.version)
                    && read.if_version.is_none_or(|version| version == object.version)
                    && answer.object_size.is_none_or(|size| size == object.size())
                    && object.data.read(read.offset, read.len).first_difference(&answer.data).is_none()
            }),
            Step::ReadRefused(read, RefusalKind::Changed { wanted, found }) => {
                let actual = object.map_or(0, |object| object.version);
                read.if_version == Some(*wanted) && found != wanted && *found == actual
            }
            Step::ReadRefused(_, kind) => *kind == RefusalKind::NoSuchObject && object.is_none(),
            Step::Queried(query, answers) => {
                query_error(query, &config.object).is_none()
                    && object.is_some_and(|object| {
                        query.ops.len() == answers.len()
                            && query
                                .ops
                                .iter()
                                .zip(*answers)
                                .all(|(op, answer)| is_answer(object, op, answer))
                    })
            }
            Step::QueryRefused(query, kind) => query_error(query, &config.object) == Some(*kind),
            Step::Listed(is_listed) => *is_listed == object.is_some(),
        }
    }

    /// Returns the changes that may come next, the most likely first, with their penalties.
    fn choices(&self, config: &Configuration) -> Vec<(Choice, i64)> {
        // A later state does not have this version.
        let is_awaited = |observers: &Vec<usize>| observers.iter().any(|index| !config.done.has(*index));
        if self.looks_ahead && config.is_known && self.observers.get(&config.version).is_some_and(is_awaited)
        {
            return Vec::new();
        }
        let horizon = self.horizon(config);
        let next = self.changes.get(config.changes).copied();
        let next_version = next.map_or(HIDDEN, |index| self.version_of(index));
        // The next version that a call saw must not be skipped.
        let later = &self.seen[self.seen.partition_point(|version| *version <= config.version)..];
        let awaited = later.first().copied().filter(|_| self.looks_ahead);
        let bound = |index: usize| self.evidence[index].map_or(HIDDEN, |evidence| evidence.version);
        let unused = |index: &usize| !config.used.has(*index);
        // A change whose effect is seen in a version has its place before the next version.
        let is_late = |version: u64, but: usize| {
            self.looks_ahead
                && (0..self.maybe.len()).filter(unused).any(|index| index != but && bound(index) <= version)
        };
        let mut choices = Vec::new();
        if let Some(index) = next
            && self.sure[index].start < horizon
            && next_version > config.version
            && awaited.is_none_or(|version| version >= next_version)
            && !is_late(next_version, usize::MAX)
        {
            choices.push((Choice::Sure(index), 0));
        }
        let sure = choices.len();
        for index in (0..self.maybe.len()).take_while(|index| self.maybe[*index].start < horizon) {
            if !unused(&index) || config.latest_start >= self.maybe[index].until {
                continue;
            }
            let penalty = if self.evidence[index].is_none() { PENALTY } else { 0 };
            let limit = next_version.min(bound(index).saturating_add(1));
            let from = self.foreign.partition_point(|version| *version <= config.version);
            for version in self.foreign[from..].iter().copied().take_while(|version| *version < limit) {
                if awaited.is_none_or(|awaited| version <= awaited) && !is_late(version, index) {
                    let penalty = if awaited == Some(version) { 0 } else { penalty };
                    choices.push((Choice::Maybe(index, Some(version)), penalty));
                }
            }
            if config.version + 1 < limit {
                choices.push((Choice::Maybe(index, None), penalty));
            }
        }
        choices[sure..].sort_by_key(|(_, penalty)| *penalty);
        choices
    }

    fn version_of(&self, index: usize) -> u64 {
        match &self.sure[index].step {
            Step::Changed(_, mutated) => mutated.version,
            _ => HIDDEN,
        }
    }

    /// Returns the configuration after a change, unless the change does not fit.
    fn follow(&self, config: &Configuration, choice: Choice, penalty: i64) -> Option<Configuration> {
        match choice {
            Choice::Sure(index) => {
                let call = &self.sure[index];
                let Step::Changed(change, mutated) = &call.step else { return None };
                let effect = change.apply(&config.object).ok()?;
                if (effect.size(), effect.appended_at) != (mutated.size, mutated.appended_at) {
                    return None;
                }
                if !self.keeps_traces(&config.object, &effect.object, mutated.version) {
                    return None;
                }
                let mut next = config.after(effect.object, mutated.version, true, call.start);
                next.done.insert(index);
                next.done_count += 1;
                next.changes += 1;
                while next.first < self.sure.len() && next.done.has(next.first) {
                    next.first += 1;
                }
                Some(next)
            }
            Choice::Maybe(index, version) => {
                let call = &self.maybe[index];
                let effect = call.change.apply(&config.object).ok()?;
                let (version, is_known) =
                    version.map_or((config.version + 1, false), |version| (version, true));
                if !self.keeps_traces(&config.object, &effect.object, version) {
                    return None;
                }
                let mut next = config.after(effect.object, version, is_known, call.start);
                next.used.insert(index);
                next.penalty += penalty;
                if !is_known {
                    // A change that no call sees does not matter, unless it has an effect or lets a
                    // condition on the version fail.
                    let is_same = |old: &ModelledObject<Seen>, new: &ModelledObject<Seen>| {
                        (&old.data, &old.xattrs, &old.omap) == (&new.data, &new.xattrs, &new.omap)
                    };
                    let matters = config.is_known && self.mentioned.binary_search(&config.version).is_ok();
                    let has_effect = match (&config.object, &next.object) {
                        (Some(old), Some(new)) => !is_same(old, new),
                        (old, new) => old.is_some() || new.is_some(),
                    };
                    if !has_effect && !matters {
                        return None;
                    }
                }
                Some(next)
            }
        }
    }

    /// Returns whether a change to a version leaves all bytes in place that a later version shows.
    /// Other data may replace them if it has the same bytes, as short data may have by chance.
    fn keeps_traces(&self, old: &State, new: &State, version: u64) -> bool {
        let Some(old) = old.as_ref().filter(|_| self.looks_ahead) else { return true };
        let new = new.as_ref();
        let mut end = 0;
        old.data.runs().iter().all(|(len, piece)| {
            let start = end;
            end += len;
            let DataOrigin::Fill { id, at } = piece else { return true };
            let mut traces = self.traces.get(id).into_iter().flatten();
            traces.all(|trace| {
                let shown = trace.range.start.max(*at)..trace.range.end.min(at + len);
                if trace.version < version || shown.is_empty() {
                    return true;
                }
                let (offset, len) = (start + shown.start - at, shown.end - shown.start);
                new.is_some_and(|new| {
                    let expected = old.data.read(offset, len);
                    new.data.read(offset, len).first_difference(&expected).is_none()
                })
            })
        })
    }

    /// Returns the reason why a call cannot come next.
    fn reason(&self, index: usize, config: &Configuration) -> String {
        let object = config.object.as_ref();
        match &self.sure[index].step {
            Step::Changed(change, mutated) => match change.apply(&config.object) {
                Err(kind) => format!("expected {kind:?}, seen {mutated:?}"),
                Ok(effect) => {
                    let (size, appended_at) = (effect.size(), effect.appended_at);
                    let version = match config.version {
                        version if mutated.version <= version => format!("a version above {version}, "),
                        _ => String::new(),
                    };
                    format!("expected {version}size {size}, appended_at {appended_at}, seen {mutated:?}")
                }
            },
            Step::Refused(change, kind) => match change.apply(&config.object) {
                Err(expected) => format!("expected {expected:?}, seen {kind:?}"),
                Ok(_) => format!("expected success, seen {kind:?}"),
            },
            Step::Read(read, answer) => {
                let Some(object) = object else { return "expected NoSuchObject, seen data".into() };
                let expected = object.data.read(read.offset, read.len);
                if let Some((at, ours, theirs)) = expected.first_difference(&answer.data) {
                    let at = read.offset + at;
                    let show = |piece: Option<DataOrigin>| {
                        piece.map_or("the end".into(), |piece| format!("{piece:?}"))
                    };
                    return format!("at byte {at}: expected {}, seen {}", show(ours), show(theirs));
                }
                let size = object.size();
                format!(
                    "expected version {}, size {size}, seen version {:?}, size {:?}",
                    show_version(config),
                    answer.version,
                    answer.object_size
                )
            }
            Step::ReadRefused(_, kind) => {
                format!("expected an answer of version {}, seen {kind:?}", show_version(config))
            }
            Step::Queried(query, answers) => match (query_error(query, &config.object), object) {
                (None, Some(object)) => {
                    let wrong =
                        query.ops.iter().zip(*answers).find(|(op, answer)| !is_answer(object, op, answer));
                    match wrong {
                        Some((op, answer)) => {
                            format!("expected {:?}, seen {answer:?}", model::answer(object, op).ok())
                        }
                        None => format!("expected {} answers, seen {}", query.ops.len(), answers.len()),
                    }
                }
                (error, _) => format!("expected {error:?}, seen {answers:?}"),
            },
            Step::QueryRefused(query, kind) => match query_error(query, &config.object) {
                Some(expected) => format!("expected {expected:?}, seen {kind:?}"),
                None => format!("expected an answer, seen {kind:?}"),
            },
            Step::Listed(is_listed) => {
                let verb = |is: bool| if is { "listed" } else { "not listed" };
                format!("expected the object to be {}, seen {}", verb(object.is_some()), verb(*is_listed))
            }
        }
    }
}

impl Configuration {
    /// Returns the configuration after a change with an effect.
    fn after(&self, mut object: State, version: u64, is_known: bool, start: u64) -> Configuration {
        if let Some(object) = &mut object {
            object.version = if is_known { version } else { HIDDEN };
        }
        let latest_start = self.latest_start.max(start);
        Configuration {
            object,
            version,
            is_known,
            latest_start,
            done: self.done.clone(),
            used: self.used.clone(),
            ..*self
        }
    }
}

/// Returns the values of xattrs and omap entries in an answer.
fn values_of_answer(answer: &QueryAnswer) -> Vec<&Bytes> {
    match answer {
        QueryAnswer::Xattr(value) => value.iter().collect(),
        QueryAnswer::Xattrs(entries) | QueryAnswer::Omap { entries, .. } => {
            entries.iter().map(|(_, value)| value).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the values of xattrs and omap entries that a change sets.
fn values_of_change<'b>(change: &'b PreparedChange<'_>) -> impl Iterator<Item = &'b Bytes> {
    change.ops.iter().flat_map(|op| match op {
        Mutation::SetXattr(_, value) => vec![value],
        Mutation::OmapSet(entries) => entries.iter().map(|(_, value)| value).collect(),
        _ => Vec::new(),
    })
}

/// Returns the versions in conditions.
fn conditions_on_versions(conditions: &[Condition]) -> impl Iterator<Item = u64> {
    conditions.iter().filter_map(|condition| match condition {
        Condition::Version(version) => Some(*version),
        _ => None,
    })
}

fn key(config: &Configuration) -> [u64; 2] {
    let mut hasher = Mixer([0; 2]);
    config.done.hash(&mut hasher);
    config.used.hash(&mut hasher);
    (config.version, config.is_known).hash(&mut hasher);
    hash_object(config.object.as_ref(), &mut hasher);
    hasher.0
}

/// A fast hash function with 128 bits, for data that no attacker chooses.
struct Mixer([u64; 2]);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let [a, b] = self.0;
        let product = u128::from(a ^ word ^ 0x9E37_79B9_7F4A_7C15) * 0x2545_F491_4F6C_DD1D;
        let a = (product as u64) ^ ((product >> 64) as u64);
        self.0 = [a, (b.rotate_left(23) ^ word).wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ (a >> 29)];
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn finish(&self) -> u64 {
        self.0[0]
    }
}

fn show_version(config: &Configuration) -> String {
    if config.is_known { config.version.to_string() } else { format!("{} or more", config.version) }
}

fn describe(config: &Configuration) -> String {
    let version = show_version(config);
    match &config.object {
        None => format!("does not exist (version {version})"),
        Some(object) => {
            let (xattrs, omap) = (&object.xattrs, &object.omap);
            format!("version {version}, data {:?}, xattrs {xattrs:?}, omap {omap:?}", object.data)
        }
    }
}

/// Returns the error that a query must get.
fn query_error(query: &QueryCall, object: &State) -> Option<RefusalKind> {
    if let Err(e) = model::check_conditions(&query.object, object.as_ref(), &query.conditions) {
        return Some(RefusalKind::of(&e));
    }
    object.is_none().then_some(RefusalKind::NoSuchObject)
}

/// Returns whether an answer to a query fits.
fn is_answer(object: &ModelledObject<Seen>, op: &QueryOp, answer: &QueryAnswer) -> bool {
    match (op, answer) {
        (QueryOp::Stat, QueryAnswer::Stat(stat)) => {
            (stat.version, stat.size, stat.manifest) == (object.version, object.size(), object.manifest)
        }
        // A page may have fewer entries than the limit.
        (QueryOp::OmapRange { from, to, limit }, QueryAnswer::Omap { entries, more }) => {
            let in_range = object
                .omap
                .range(from.clone()..)
                .take_while(|(key, _)| to.as_ref().is_none_or(|to| *key < to));
            let mut expected = in_range;
            let is_prefix = entries.iter().all(|(key, value)| expected.next() == Some((key, value)));
            is_prefix
                && entries.len() <= *limit as usize
                && if *more { !entries.is_empty() } else { expected.next().is_none() }
        }
        _ => model::answer(object, op).is_ok_and(|expected| expected == *answer),
    }
}
