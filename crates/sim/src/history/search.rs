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
//! Changes of unknown outcome that left no trace in any answer are tried last.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use base::collections::HashSet;
use client::engine::model::{self, BulkRule, Effect, ObjectState};
use wire::{Mutated, Mutation, QueryAnswer, QueryOp};

use super::object::hash_object;
use super::{CallId, Change, Fill, Piece, Query, Read, ReadAnswer, RefusalKind, Seen};

/// Version of a state whose version no call mentions.
const HIDDEN: u64 = u64::MAX;

/// State of an object; `None` if it does not exist.
type State = Option<ObjectState<Seen>>;

/// A change, prepared for repeated execution.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    change: &'a Change,
    ops: Vec<Mutation>,
    /// Rules for bulk data that the node may follow.
    rules: &'static [BulkRule],
}

impl<'a> Prepared<'a> {
    pub(super) fn new(change: &'a Change, rules: &'static [BulkRule]) -> Prepared<'a> {
        Prepared { change, ops: change.ops_with(|_| bytes::Bytes::new()), rules }
    }

    pub(super) fn apply_under(&self, rule: BulkRule, state: &State) -> Result<Effect<Seen>, RefusalKind> {
        let change = model::Change {
            name: &self.change.object,
            conditions: &self.change.conditions,
            ops: &self.ops,
            pieces: self.change.pieces(),
            bulk_rule: rule,
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
    Changed(Prepared<'a>, Mutated),
    Refused(Prepared<'a>, RefusalKind),
    Read(&'a Read, &'a ReadAnswer),
    ReadRefused(&'a Read, RefusalKind),
    Queried(&'a Query, &'a [QueryAnswer]),
    QueryRefused(&'a Query, RefusalKind),
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
    pub(super) change: Prepared<'a>,
}

/// Effects of a change that answers show.
#[derive(Debug, Clone, Copy)]
struct Evidence {
    /// Lowest version in which an answer shows the effect; [`HIDDEN`] if these answers contain no
    /// version.
    version: u64,
}

/// A set of small numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Bits(Vec<u64>);

impl Bits {
    fn with_len(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)])
    }

    fn has(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    fn insert(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }
}

/// A state of the search: the calls that have their place, and the object after them.
#[derive(Debug, Clone)]
struct Config {
    object: State,
    /// Version of the last change, or a lower bound of it.
    version: u64,
    /// Whether `version` is exact.
    is_known: bool,
    done: Bits,
    used: Bits,
    /// Lowest index of a sure call that is not done.
    first: usize,
    /// Number of answered changes that are done.
    changes: usize,
    /// Highest start of a call that is done.
    latest_start: u64,
    /// Number of changes without evidence that may still be used.
    spare: usize,
}

/// The next change in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    horizon: u64,
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

/// A configuration on the way, and the choices that follow.
struct Frame {
    config: Config,
    choices: Vec<Choice>,
    next: usize,
}

/// The calls on one object.
pub(super) struct Search<'a> {
    sure: Vec<Sure<'a>>,
    maybe: Vec<Maybe<'a>>,
    /// Indexes of the answered changes, in the order of their versions.
    changes: Vec<usize>,
    /// Versions that calls mention, and that no answered change has.
    foreign: Vec<u64>,
    /// Those of `foreign` that an answer contains. A change has each of them.
    seen: Vec<u64>,
    /// Indexes of the calls that see a version.
    observers: BTreeMap<u64, Vec<usize>>,
    evidence: Vec<Option<Evidence>>,
    failed: HashSet<[u64; 2]>,
    dead_end: Option<Box<DeadEnd>>,
    steps: usize,
    /// Whether a change without evidence was not tried.
    is_limited: bool,
}

impl<'a> Search<'a> {
    /// Creates a search. The calls are in any order.
    pub(super) fn new(mut sure: Vec<Sure<'a>>, mut maybe: Vec<Maybe<'a>>) -> Search<'a> {
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
            maybe.iter().flat_map(|call| conditions_on_versions(&call.change)).collect();
        let mut shown: BTreeMap<u32, u64> = BTreeMap::new();
        for (index, call) in sure.iter().enumerate() {
            let mut observe = |version| observers.entry(version).or_default().push(index);
            match &call.step {
                Step::Read(_, answer) => {
                    answer.version.into_iter().for_each(&mut observe);
                    for (_, piece) in answer.data.runs() {
                        if let Piece::Fill { id, .. } = piece {
                            let version = answer.version.unwrap_or(HIDDEN);
                            shown
                                .entry(*id)
                                .and_modify(|lowest| *lowest = version.min(*lowest))
                                .or_insert(version);
                        }
                    }
                }
                Step::Queried(_, answers) => answers.iter().for_each(|answer| {
                    if let QueryAnswer::Stat(stat) = answer {
                        observe(stat.version);
                    }
                }),
                Step::ReadRefused(_, RefusalKind::Changed { found, .. }) if *found > 0 => observe(*found),
                Step::Changed(change, _) | Step::Refused(change, _) => {
                    mentioned.extend(conditions_on_versions(change));
                }
                _ => {}
            }
        }
        let is_foreign = |version: &u64| {
            changes.binary_search_by_key(&Some(*version), |index| version_of(&sure[*index])).is_err()
        };
        let seen: Vec<u64> = observers.keys().copied().filter(is_foreign).collect();
        let mut foreign: Vec<u64> =
            mentioned.into_iter().filter(is_foreign).chain(seen.iter().copied()).collect();
        foreign.sort_unstable();
        foreign.dedup();
        let evidence = |call: &Maybe<'_>| {
            let versions = call.change.change.fills().filter_map(|fill: Fill| shown.get(&fill.id).copied());
            versions.min().map(|version| Evidence { version })
        };
        let evidence = maybe.iter().map(evidence).collect();
        Search {
            sure,
            maybe,
            changes,
            foreign,
            seen,
            observers,
            evidence,
            failed: HashSet::default(),
            dead_end: None,
            steps: 0,
            is_limited: false,
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
        let without_evidence = self.evidence.iter().filter(|evidence| evidence.is_none()).count();
        let mut spare = 0;
        loop {
            self.failed.clear();
            self.is_limited = false;
            match self.run_with(spare, steps_max) {
                Some(true) => return Found::Sequence,
                Some(false) if !self.is_limited || spare >= without_evidence => {
                    return Found::Nothing(self.dead_end());
                }
                Some(false) => spare = (spare + 1 + spare / 2).min(without_evidence),
                None => return Found::GaveUp(self.dead_end()),
            }
        }
    }

    fn dead_end(&mut self) -> Box<DeadEnd> {
        let nowhere = || {
            let (object, stuck) = ("does not exist".into(), Vec::new());
            Box::new(DeadEnd { path: Vec::new(), stuck, object, horizon: 0 })
        };
        self.dead_end.take().unwrap_or_else(nowhere)
    }

    /// Searches for a sequence with at most `spare` changes without evidence. Returns `None` after
    /// too many steps.
    fn run_with(&mut self, spare: usize, steps_max: usize) -> Option<bool> {
        let mut config = Config {
            object: None,
            version: 0,
            is_known: true,
            done: Bits::with_len(self.sure.len()),
            used: Bits::with_len(self.maybe.len()),
            first: 0,
            changes: 0,
            latest_start: 0,
            spare,
        };
        self.settle(&mut config);
        if config.first == self.sure.len() {
            return Some(true);
        }
        let choices = self.choices(&config);
        let mut stack = vec![Frame { config, choices, next: 0 }];
        while let Some(frame) = stack.last_mut() {
            let Some(choice) = frame.choices.get(frame.next).copied() else {
                self.fail(&stack);
                stack.pop();
                continue;
            };
            frame.next += 1;
            self.steps += 1;
            if self.steps > steps_max {
                self.fail(&stack);
                return None;
            }
            let Some(mut config) = self.follow(&frame.config, choice) else { continue };
            self.settle(&mut config);
            if config.first == self.sure.len() {
                return Some(true);
            }
            if !self.failed.is_empty() && self.failed.contains(&key(&config)) {
                continue;
            }
            let choices = self.choices(&config);
            stack.push(Frame { config, choices, next: 0 });
        }
        Some(false)
    }

    /// Records that all sequences through the last configuration fail.
    fn fail(&mut self, stack: &[Frame]) {
        let Some(frame) = stack.last() else { return };
        self.failed.insert(key(&frame.config));
        let horizon = self.horizon(&frame.config);
        if self.dead_end.as_ref().is_some_and(|found| found.horizon >= horizon) {
            return;
        }
        let path = stack[..stack.len() - 1].iter().map(|frame| frame.choices[frame.next - 1]).collect();
        let config = &frame.config;
        let open = self.open(config, horizon);
        let stuck = open.map(|index| (self.sure[index].call, self.reason(index, config))).collect();
        let object = describe(config);
        self.dead_end = Some(Box::new(DeadEnd { path, stuck, object, horizon }));
    }

    /// Returns the earliest end of a call that is not done. Calls that start later must wait.
    fn horizon(&self, config: &Config) -> u64 {
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
    fn open<'b>(&'b self, config: &'b Config, horizon: u64) -> impl Iterator<Item = usize> + 'b {
        (config.first..self.sure.len())
            .take_while(move |index| self.sure[*index].start < horizon)
            .filter(|index| !config.done.has(*index))
    }

    /// Gives all calls their place that change nothing and whose answer fits.
    fn settle(&self, config: &mut Config) {
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
    fn fits(&self, index: usize, config: &Config) -> bool {
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

    /// Returns the changes that may come next, the most likely first.
    fn choices(&mut self, config: &Config) -> Vec<Choice> {
        // A later state does not have this version.
        let is_awaited = |observers: &Vec<usize>| observers.iter().any(|index| !config.done.has(*index));
        if config.is_known && self.observers.get(&config.version).is_some_and(is_awaited) {
            return Vec::new();
        }
        let horizon = self.horizon(config);
        let next = self.changes.get(config.changes).copied();
        let next_version = next.map_or(HIDDEN, |index| self.version_of(index));
        // The next version that a call saw must not be skipped.
        let awaited =
            self.seen[self.seen.partition_point(|version| *version <= config.version)..].first().copied();
        let bound = |index: usize| self.evidence[index].map_or(HIDDEN, |evidence| evidence.version);
        let unused = |index: &usize| !config.used.has(*index);
        // A change whose effect is seen in a version has its place before the next version.
        let is_late = |version: u64, but: usize| {
            (0..self.maybe.len()).filter(unused).any(|index| index != but && bound(index) <= version)
        };
        let mut choices = Vec::new();
        if let Some(index) = next
            && self.sure[index].start < horizon
            && next_version > config.version
            && awaited.is_none_or(|version| version >= next_version)
            && !is_late(next_version, usize::MAX)
        {
            choices.push(Choice::Sure(index));
        }
        let sure = choices.len();
        let mut is_limited = false;
        for index in (0..self.maybe.len()).take_while(|index| self.maybe[*index].start < horizon) {
            if !unused(&index) || config.latest_start >= self.maybe[index].until {
                continue;
            }
            if self.evidence[index].is_none() && config.spare == 0 {
                is_limited = true;
                continue;
            }
            let limit = next_version.min(bound(index).saturating_add(1));
            let from = self.foreign.partition_point(|version| *version <= config.version);
            for version in self.foreign[from..].iter().copied().take_while(|version| *version < limit) {
                if awaited.is_none_or(|awaited| version <= awaited) && !is_late(version, index) {
                    choices.push(Choice::Maybe(index, Some(version)));
                }
            }
            if config.version + 1 < limit {
                choices.push(Choice::Maybe(index, None));
            }
        }
        self.is_limited |= is_limited;
        let is_unproved = |choice: &Choice| match choice {
            Choice::Maybe(index, _) => self.evidence[*index].is_none(),
            Choice::Sure(_) => false,
        };
        choices[sure..].sort_by_key(is_unproved);
        choices
    }

    fn version_of(&self, index: usize) -> u64 {
        match &self.sure[index].step {
            Step::Changed(_, mutated) => mutated.version,
            _ => HIDDEN,
        }
    }

    /// Returns the configuration after a change, unless the change does not fit.
    fn follow(&self, config: &Config, choice: Choice) -> Option<Config> {
        match choice {
            Choice::Sure(index) => {
                let call = &self.sure[index];
                let Step::Changed(change, mutated) = &call.step else { return None };
                let effect = change.apply(&config.object).ok()?;
                if (effect.size(), effect.appended_at) != (mutated.size, mutated.appended_at) {
                    return None;
                }
                let mut next = config.after(effect.object, mutated.version, true, call.start);
                next.done.insert(index);
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
                let mut next = config.after(effect.object, version, is_known, call.start);
                next.used.insert(index);
                next.spare -= usize::from(self.evidence[index].is_none());
                Some(next)
            }
        }
    }

    /// Returns the reason why a call cannot come next.
    fn reason(&self, index: usize, config: &Config) -> String {
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
                    let show =
                        |piece: Option<Piece>| piece.map_or("the end".into(), |piece| format!("{piece:?}"));
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

impl Config {
    /// Returns the configuration after a change with an effect.
    fn after(&self, mut object: State, version: u64, is_known: bool, start: u64) -> Config {
        if let Some(object) = &mut object {
            object.version = if is_known { version } else { HIDDEN };
        }
        let latest_start = self.latest_start.max(start);
        Config {
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

/// Returns the versions in the conditions of a change.
fn conditions_on_versions<'b>(change: &'b Prepared<'_>) -> impl Iterator<Item = u64> + 'b {
    change.change.conditions.iter().filter_map(|condition| match condition {
        wire::Condition::Version(version) => Some(*version),
        _ => None,
    })
}

fn key(config: &Config) -> [u64; 2] {
    let hash = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        config.done.hash(&mut hasher);
        config.used.hash(&mut hasher);
        (config.version, config.is_known).hash(&mut hasher);
        hash_object(config.object.as_ref(), &mut hasher);
        hasher.finish()
    };
    [hash(0), hash(1)]
}

fn show_version(config: &Config) -> String {
    if config.is_known { config.version.to_string() } else { format!("{} or more", config.version) }
}

fn describe(config: &Config) -> String {
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
fn query_error(query: &Query, object: &State) -> Option<RefusalKind> {
    if let Err(e) = model::check_conditions(&query.object, object.as_ref(), &query.conditions) {
        return Some(RefusalKind::of(&e));
    }
    object.is_none().then_some(RefusalKind::NoSuchObject)
}

/// Returns whether an answer to a query fits.
fn is_answer(object: &ObjectState<Seen>, op: &QueryOp, answer: &QueryAnswer) -> bool {
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
