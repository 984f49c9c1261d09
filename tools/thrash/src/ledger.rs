//! [`ObjectLedger`]: the calls on one object, and the states that explain all their answers.
//!
//! One writer at a time changes an object, and waits for each answer. The state after an
//! acknowledged change is therefore known. A change with an unknown outcome may take effect once, at
//! any later time, or never: the ledger keeps one *explanation* per possible state. Each answer
//! removes the explanations that contradict it. If no explanation is left, a promise was broken.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use wire::Mutated;

use crate::content::{self, StampOrigin, StampedRun};
use crate::expected::{ExpectedObject, ExpectedRefusal, StampedChange};

/// A possible state: an object, or `None` if the object does not exist.
pub type PossibleState = Option<Arc<ExpectedObject>>;

/// Number of earlier states that the ledger keeps to diagnose a violation.
const PAST_STATES: usize = 64;
/// Number of parts of an object's data that the report of a violation describes.
const DESCRIBED_RUNS: usize = 40;
/// An object with this number of changes of unknown outcome is changed no more.
pub const UNKNOWN_MAX: usize = 3;

/// A state that explains all answers so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Explanation {
    state: PossibleState,
    /// The object's version, or a lower bound if the version is not known.
    version: u64,
    version_is_known: bool,
    /// Changes of unknown outcome that have not taken effect in this explanation.
    open: Vec<u64>,
}

/// The answer to a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeAnswer {
    /// The change was acknowledged.
    Acknowledged(Mutated),
    /// The node refused the change because of the object's state.
    Refused(ExpectedRefusal, String),
    /// The change failed without effect, for the given reason.
    Unchanged(String),
    /// It is unknown whether the change took effect, for the given reason.
    Unknown(String),
}

/// A reader's view of the whole object, at one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectView {
    /// The object does not exist.
    Absent,
    /// The object exists.
    Present {
        /// Version of the object.
        version: u64,
        /// Data.
        data: Vec<u8>,
        /// Xattrs.
        xattrs: BTreeMap<String, String>,
        /// Omap.
        omap: BTreeMap<String, String>,
    },
}

/// The promise that was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BrokenPromise {
    /// An acknowledged change is lost.
    LostChange,
    /// The content of an object consists of parts that do not belong together.
    MixedContent,
    /// A change took effect twice.
    RepeatedChange,
    /// An answer contradicts the earlier answers in another way.
    WrongAnswer,
    /// A call failed although no fault excuses the failure.
    Unavailable,
    /// The node did not report a target that lost changes.
    NotReported,
    /// The node did not start, or did not become whole.
    NotHealed,
}

/// A broken promise, with a description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenReport {
    /// The promise.
    pub promise: BrokenPromise,
    /// What was observed, and what was expected.
    pub text: String,
}

impl fmt::Display for BrokenReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.promise {
            BrokenPromise::LostChange => "an acknowledged change is lost",
            BrokenPromise::MixedContent => "content is mixed",
            BrokenPromise::RepeatedChange => "a change was made twice",
            BrokenPromise::WrongAnswer => "an answer contradicts earlier answers",
            BrokenPromise::Unavailable => "a call failed without a fault that excuses the failure",
            BrokenPromise::NotReported => "a target with lost changes is not reported",
            BrokenPromise::NotHealed => "the node has not recovered",
        };
        write!(f, "{name}: {}", self.text)
    }
}

/// A call in the history of an object.
#[derive(Debug, Clone)]
pub struct LedgerCall {
    /// Start of the call, as time since the start of the round.
    pub began: Duration,
    /// End of the call; `None` if its client was killed.
    pub ended: Option<Duration>,
    /// The request and its answer.
    pub text: String,
}

/// The calls on one object, and the states that explain all their answers.
#[derive(Debug)]
pub struct ObjectLedger {
    number: u64,
    name: String,
    explanations: Vec<Explanation>,
    /// Changes of unknown outcome.
    unknown: BTreeMap<u64, StampedChange>,
    in_progress: Option<(StampedChange, Duration)>,
    /// The states that each read in progress may see.
    readers: BTreeMap<u64, Vec<PossibleState>>,
    reads: u64,
    calls: Vec<LedgerCall>,
    /// The newest states that were certain, with the changes after which they were certain.
    past: VecDeque<(PossibleState, Option<StampedChange>)>,
}

impl ObjectLedger {
    /// Creates the ledger of an object that does not exist. Its data contains its number.
    pub fn new(number: u64, name: String) -> ObjectLedger {
        let explanation = Explanation { state: None, version: 0, version_is_known: false, open: Vec::new() };
        ObjectLedger {
            number,
            name,
            explanations: vec![explanation],
            unknown: BTreeMap::new(),
            in_progress: None,
            readers: BTreeMap::new(),
            reads: 0,
            calls: Vec::new(),
            past: VecDeque::new(),
        }
    }

    /// Returns the number in the object's data.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the object's name in its pool.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the calls, in the order of their ends.
    pub fn calls(&self) -> &[LedgerCall] {
        &self.calls
    }

    /// Returns whether the outcomes of so many changes are unknown that no further change should be
    /// made.
    pub fn is_retired(&self) -> bool {
        self.explanations.iter().any(|explanation| explanation.open.len() >= UNKNOWN_MAX)
    }

    /// Returns one of the possible states, for the choice of the next change.
    pub fn likely_state(&self) -> PossibleState {
        self.explanations.first().and_then(|explanation| explanation.state.clone())
    }

    /// Returns whether the object exists; `None` if this is not certain.
    pub fn exists(&self) -> Option<bool> {
        let mut states = self.reachable().into_iter().map(|state| state.is_some());
        let first = states.next()?;
        states.all(|exists| exists == first).then_some(first)
    }

    /// Records the start of a change.
    ///
    /// # Panics
    /// If another change is in progress.
    pub fn begin(&mut self, change: StampedChange, at: Duration) {
        assert!(self.in_progress.is_none(), "one writer at a time changes an object");
        self.in_progress = Some((change, at));
        if !self.readers.is_empty() {
            let reachable = self.reachable();
            self.readers.values_mut().for_each(|seen| seen.extend(reachable.iter().cloned()));
        }
    }

    /// Records that the client of the change in progress, if there is one, was killed.
    pub fn abandon(&mut self) {
        if let Some((change, began)) = self.in_progress.take() {
            let text = format!("{change} => its client was killed");
            self.calls.push(LedgerCall { began, ended: None, text });
            self.add_unknown(change);
        }
    }

    /// Records the answer to the change in progress.
    ///
    /// # Errors
    /// The promise that the answer breaks.
    ///
    /// # Panics
    /// If no change is in progress.
    pub fn end(&mut self, at: Duration, answer: ChangeAnswer) -> Result<(), BrokenReport> {
        let (change, began) = self.in_progress.take().expect("a change is in progress");
        let text = match &answer {
            ChangeAnswer::Acknowledged(done) => {
                format!("version {}, {} bytes, appended at {}", done.version, done.size, done.appended_at)
            }
            ChangeAnswer::Refused(_, why) => format!("refused: {why}"),
            ChangeAnswer::Unchanged(why) => format!("failed: {why}"),
            ChangeAnswer::Unknown(why) => format!("unknown: {why}"),
        };
        self.calls.push(LedgerCall { began, ended: Some(at), text: format!("{change} => {text}") });
        match answer {
            ChangeAnswer::Acknowledged(done) => self.acknowledged(change, done),
            ChangeAnswer::Refused(why, text) => self.refused(&change, why, &text),
            ChangeAnswer::Unchanged(_) => Ok(()),
            ChangeAnswer::Unknown(_) => {
                self.add_unknown(change);
                Ok(())
            }
        }
    }

    fn add_unknown(&mut self, change: StampedChange) {
        self.explanations.iter_mut().for_each(|explanation| explanation.open.push(change.id));
        self.unknown.insert(change.id, change);
    }

    fn acknowledged(&mut self, change: StampedChange, done: Mutated) -> Result<(), BrokenReport> {
        let before = self.extended();
        let mut after: Vec<Explanation> = Vec::new();
        for explanation in &before {
            let Ok(effect) = change.apply(explanation.state.as_deref()) else { continue };
            let size = effect.object.as_ref().map_or(0, ExpectedObject::size);
            if (size, effect.appended_at) == (done.size, done.appended_at)
                && done.version > explanation.version
            {
                let next = Explanation {
                    state: effect.object.map(Arc::new),
                    version: done.version,
                    version_is_known: true,
                    open: explanation.open.clone(),
                };
                push_new(&mut after, next);
            }
        }
        if after.is_empty() {
            let fits = |state: Option<&ExpectedObject>| {
                let effect = change.apply(state).ok();
                effect.is_some_and(|effect| {
                    let size = effect.object.as_ref().map_or(0, ExpectedObject::size);
                    (size, effect.appended_at) == (done.size, done.appended_at)
                })
            };
            let text = format!("the answer to {change} was {done:?}");
            return Err(self.report(&before, &fits, BrokenPromise::WrongAnswer, text));
        }
        self.explanations = after;
        self.remember(Some(change));
        Ok(())
    }

    fn refused(
        &mut self,
        change: &StampedChange,
        why: ExpectedRefusal,
        text: &str,
    ) -> Result<(), BrokenReport> {
        let before = self.extended();
        let fits = |state: Option<&ExpectedObject>| change.apply(state) == Err(why);
        let after: Vec<Explanation> =
            before.iter().filter(|explanation| fits(explanation.state.as_deref())).cloned().collect();
        if after.is_empty() {
            let text = format!("the node refused {change}: {text}");
            return Err(self.report(&before, &fits, BrokenPromise::WrongAnswer, text));
        }
        self.explanations = after;
        Ok(())
    }

    /// Records a view of the whole object by its writer.
    ///
    /// # Errors
    /// The promise that the view breaks.
    pub fn observe(
        &mut self,
        began: Duration,
        ended: Duration,
        view: &ObjectView,
    ) -> Result<(), BrokenReport> {
        let seen = match view {
            ObjectView::Absent => "absent".to_owned(),
            ObjectView::Present { version, data, .. } => format!("version {version}, {} bytes", data.len()),
        };
        self.calls.push(LedgerCall { began, ended: Some(ended), text: format!("read all => {seen}") });
        let fits = |state: Option<&ExpectedObject>| match (state, view) {
            (None, ObjectView::Absent) => true,
            (Some(object), ObjectView::Present { data, xattrs, omap, .. }) => {
                object.xattrs == *xattrs && object.omap == *omap && object.has_data(self.number, data)
            }
            _ => false,
        };
        let before = self.extended();
        let mut after: Vec<Explanation> = Vec::new();
        for explanation in before.iter().filter(|explanation| fits(explanation.state.as_deref())) {
            let mut explanation = explanation.clone();
            if let ObjectView::Present { version, .. } = view {
                let agrees = match explanation.version_is_known {
                    true => *version == explanation.version,
                    false => *version >= explanation.version,
                };
                if !agrees {
                    continue;
                }
                (explanation.version, explanation.version_is_known) = (*version, true);
            }
            push_new(&mut after, explanation);
        }
        if !after.is_empty() {
            self.explanations = after;
            return Ok(());
        }
        let text = format!("the object was read as {}", describe(view));
        if let Some(same) = before.iter().find(|explanation| fits(explanation.state.as_deref())) {
            let ObjectView::Present { version, .. } = view else {
                return Err(self.report(&before, &fits, BrokenPromise::WrongAnswer, text));
            };
            let promise = match *version > same.version {
                true => BrokenPromise::RepeatedChange,
                false => BrokenPromise::LostChange,
            };
            let text = format!("{text}; only the version differs from the expected {}", same.version);
            return Err(self.report(&before, &|_| false, promise, text));
        }
        Err(self.report(&before, &fits, self.diagnose_data(view), text))
    }

    /// Records the start of a read of the data by any client. Returns the number of the read.
    pub fn begin_read(&mut self) -> u64 {
        self.reads += 1;
        let reachable = self.reachable();
        self.readers.insert(self.reads, reachable);
        self.reads
    }

    /// Records the end of the read with the number `read`. `data` is `None` if the read failed, and
    /// `Some(None)` if the object did not exist.
    ///
    /// # Errors
    /// The promise that the data breaks.
    pub fn end_read(
        &mut self,
        read: u64,
        began: Duration,
        ended: Duration,
        data: Option<Option<&[u8]>>,
    ) -> Result<(), BrokenReport> {
        let possible = self.readers.remove(&read).unwrap_or_default();
        let Some(data) = data else { return Ok(()) };
        let seen = data.map_or("absent".to_owned(), |data| format!("{} bytes", data.len()));
        self.calls.push(LedgerCall { began, ended: Some(ended), text: format!("concurrent read => {seen}") });
        let fits = |state: Option<&ExpectedObject>| match (state, data) {
            (None, None) => true,
            (Some(object), Some(data)) => object.has_data(self.number, data),
            _ => false,
        };
        if possible.iter().any(|state| fits(state.as_deref())) {
            return Ok(());
        }
        let view = match data {
            None => ObjectView::Absent,
            Some(data) => ObjectView::Present {
                version: 0,
                data: data.to_vec(),
                xattrs: BTreeMap::new(),
                omap: BTreeMap::new(),
            },
        };
        let text = format!("another client read the object's data as {}", describe(&view));
        Err(self.report(&self.extended(), &fits, self.diagnose_data(&view), text))
    }

    /// Returns all states that the object may have now or, because of the change in progress, soon.
    fn reachable(&self) -> Vec<PossibleState> {
        let mut explanations = self.explanations.clone();
        let mut all = self.unknown.clone();
        if let Some((change, _)) = &self.in_progress {
            explanations.iter_mut().for_each(|explanation| explanation.open.push(change.id));
            all.insert(change.id, change.clone());
        }
        let mut states: Vec<PossibleState> = Vec::new();
        for explanation in extend(&explanations, &all) {
            push_new(&mut states, explanation.state);
        }
        states
    }

    /// Returns the explanations, and those in which further changes of unknown outcome have taken
    /// effect.
    fn extended(&self) -> Vec<Explanation> {
        extend(&self.explanations, &self.unknown)
    }

    fn remember(&mut self, change: Option<StampedChange>) {
        if let [explanation] = self.explanations.as_slice() {
            self.past.push_back((explanation.state.clone(), change));
            if self.past.len() > PAST_STATES {
                self.past.pop_front();
            }
        }
    }

    /// Finds the promise that an answer breaks. `fits` returns whether a state explains the answer,
    /// and `otherwise` is the result if neither an earlier state nor a repeated change explains it.
    fn report(
        &self,
        before: &[Explanation],
        fits: &dyn Fn(Option<&ExpectedObject>) -> bool,
        otherwise: BrokenPromise,
        text: String,
    ) -> BrokenReport {
        let repeated = || {
            let recent = self.past.iter().rev().take(8).filter_map(|(_, change)| change.as_ref());
            recent.chain(self.unknown.values()).find(|change| {
                before.iter().any(|explanation| {
                    let effect = change.apply(explanation.state.as_deref()).ok();
                    effect.is_some_and(|effect| {
                        explanation.state.as_deref() != effect.object.as_ref() && fits(effect.object.as_ref())
                    })
                })
            })
        };
        let earlier = || {
            let past = self.past.iter().rev().find(|(state, _)| fits(state.as_deref()));
            past.or((!self.past.is_empty() && fits(None)).then_some(&(None, None)))
        };
        // After the repetition of an old overwrite, the state is also an earlier one. A lost change is
        // the more likely cause.
        let (promise, cause) = if let Some((_, after)) = earlier() {
            let state = match after {
                Some(change) => format!("; this is the earlier state after {change}"),
                None => "; this is the state before the first change".to_owned(),
            };
            (BrokenPromise::LostChange, state)
        } else if let Some(change) = repeated() {
            (BrokenPromise::RepeatedChange, format!("; this is the state after a second {change}"))
        } else {
            (otherwise, String::new())
        };
        let expected: Vec<String> = before.iter().map(|explanation| explanation.to_string()).collect();
        BrokenReport {
            promise,
            text: format!("{}: {text}{cause}; expected {}", self.name, expected.join(", or ")),
        }
    }

    /// Returns the promise that data breaks which no earlier state explains.
    fn diagnose_data(&self, view: &ObjectView) -> BrokenPromise {
        let ObjectView::Present { data, .. } = view else { return BrokenPromise::LostChange };
        let runs = content::recognise(data);
        let mut parts: Vec<(u64, u64, u64)> = Vec::new();
        for StampedRun { len, origin, .. } in runs {
            let StampOrigin::Records { object, change, at } = origin else { continue };
            if object != self.number {
                return BrokenPromise::MixedContent;
            }
            if parts.iter().any(|&(other, from, to)| other == change && from < at + len && at < to) {
                return BrokenPromise::RepeatedChange;
            }
            parts.push((change, at, at + len));
        }
        BrokenPromise::MixedContent
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            None => write!(f, "no object")?,
            Some(object) => write!(f, "{object}")?,
        }
        let relation = if self.version_is_known { "" } else { "at least " };
        write!(f, " (version {relation}{}", self.version)?;
        if !self.open.is_empty() {
            write!(f, ", without the unacknowledged changes {:?}", self.open)?;
        }
        write!(f, ")")
    }
}

fn push_new<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

/// Returns the explanations, and those in which more of the changes `all` have taken effect.
fn extend(explanations: &[Explanation], all: &BTreeMap<u64, StampedChange>) -> Vec<Explanation> {
    let mut extended: Vec<Explanation> = Vec::new();
    explanations.iter().for_each(|explanation| push_new(&mut extended, explanation.clone()));
    let mut next = 0;
    while next < extended.len() {
        let from = extended[next].clone();
        for id in &from.open {
            let Some(effect) = all.get(id).and_then(|change| change.apply(from.state.as_deref()).ok()) else {
                continue;
            };
            let after = Explanation {
                state: effect.object.map(Arc::new),
                version: from.version + 1,
                version_is_known: false,
                open: from.open.iter().copied().filter(|other| other != id).collect(),
            };
            push_new(&mut extended, after);
        }
        next += 1;
    }
    extended
}

fn describe(view: &ObjectView) -> String {
    match view {
        ObjectView::Absent => "no object".to_owned(),
        ObjectView::Present { version, data, xattrs, omap } => {
            let runs = content::recognise(data);
            let more = runs.len().saturating_sub(DESCRIBED_RUNS);
            let mut runs: Vec<String> = runs.iter().take(DESCRIBED_RUNS).map(ToString::to_string).collect();
            if more > 0 {
                runs.push(format!("and {more} more parts"));
            }
            let len = data.len();
            format!("{len} bytes; {}; xattrs {xattrs:?}; omap {omap:?} (version {version})", runs.join("; "))
        }
    }
}

#[cfg(test)]
#[path = "ledger_test.rs"]
mod ledger_test;
