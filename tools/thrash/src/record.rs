//! [`RoundRecord`]: what the threads of a round share: the ledgers of all objects, the times of the
//! faults, and the violations.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use client::{Error, NodeError};

use crate::ledger::{BrokenPromise, BrokenReport, ObjectLedger};

/// The time after the last fault after which calls must succeed.
pub const HEAL_TIME: Duration = Duration::from_secs(30);

/// A ledger that several tasks use.
pub type SharedLedger = Arc<Mutex<ObjectLedger>>;

/// A violation, and the ledger of the object concerned.
#[derive(Debug, Clone)]
pub struct RoundViolation {
    /// Ledger of the object, if the violation concerns one object.
    pub ledger: Option<SharedLedger>,
    /// Time since the start of the round.
    pub at: Duration,
    /// The broken promise.
    pub report: BrokenReport,
}

/// What excuses the failure of a call.
#[derive(Debug, Clone, Copy, Default)]
struct Excuses {
    /// Time since which targets may be full.
    full_since: Option<Instant>,
    /// Time until which targets may be full; `None` while they are full.
    full_until: Option<Instant>,
    /// A pool without redundancy has a damaged or stale target.
    data_is_lost: bool,
}

/// What the threads of a round share.
#[derive(Debug)]
pub struct RoundRecord {
    began: Instant,
    ledgers: Mutex<Vec<SharedLedger>>,
    violations: Mutex<Vec<RoundViolation>>,
    notes: Mutex<Vec<(Duration, String)>>,
    outcomes: Mutex<BTreeMap<String, u64>>,
    faults: Mutex<BTreeMap<String, u64>>,
    excuses: Mutex<Excuses>,
    /// End of the last fault.
    healed: Mutex<Option<Instant>>,
    /// The last success of a call, and the longest time between two successes.
    successes: Mutex<(Instant, Duration)>,
    changes: AtomicU64,
    acknowledged: AtomicU64,
    is_over: AtomicBool,
    /// Prints notes when they are made.
    verbose: bool,
}

impl RoundRecord {
    /// Creates an empty record. The round begins now.
    pub fn new(verbose: bool) -> RoundRecord {
        let now = Instant::now();
        RoundRecord {
            began: now,
            ledgers: Mutex::default(),
            violations: Mutex::default(),
            notes: Mutex::default(),
            outcomes: Mutex::default(),
            faults: Mutex::default(),
            excuses: Mutex::default(),
            healed: Mutex::default(),
            successes: Mutex::new((now, Duration::ZERO)),
            changes: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            verbose,
        }
    }

    /// Returns the time since the start of the round.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Creates the ledger of a new object. `writer` is a part of the object's name and number.
    pub fn new_object(&self, writer: usize) -> SharedLedger {
        let mut ledgers = locked(&self.ledgers);
        let serial = ledgers.len() as u64;
        let number = ((writer as u64 + 1) << 32) | serial;
        let ledger = Arc::new(Mutex::new(ObjectLedger::new(number, format!("w{writer}/{serial}"))));
        ledgers.push(Arc::clone(&ledger));
        ledger
    }

    /// Returns all ledgers.
    pub fn ledgers(&self) -> Vec<SharedLedger> {
        locked(&self.ledgers).clone()
    }

    /// Returns the number of a new change.
    pub fn next_change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of acknowledged changes.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Records an event for the report of a violation.
    pub fn note(&self, text: impl Into<String>) {
        let (at, text) = (self.now(), text.into());
        if self.verbose {
            crate::say(&format!("  {:8.3} {text}", at.as_secs_f64()));
        }
        locked(&self.notes).push((at, text));
    }

    /// Counts a fault that has had an effect.
    pub fn fired(&self, kind: &str) {
        *locked(&self.faults).entry(kind.to_owned()).or_default() += 1;
    }

    /// Returns the number of faults by kind.
    pub fn faults(&self) -> BTreeMap<String, u64> {
        locked(&self.faults).clone()
    }

    /// Returns the number of calls by outcome.
    pub fn outcomes(&self) -> BTreeMap<String, u64> {
        locked(&self.outcomes).clone()
    }

    /// Counts an outcome of a call. Returns the new count.
    fn count(&self, outcome: &str) -> u64 {
        let mut outcomes = locked(&self.outcomes);
        let count = outcomes.entry(outcome.to_owned()).or_default();
        *count += 1;
        *count
    }

    /// Records the success of a call.
    pub fn success(&self, what: &str) {
        self.count(what);
        if what == "changed" {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
        }
        let mut successes = locked(&self.successes);
        let pause = successes.0.elapsed();
        *successes = (Instant::now(), successes.1.max(pause));
    }

    /// Excludes the time until now from the longest time without a success, because the writers were
    /// paused.
    pub fn forget_pause(&self) {
        locked(&self.successes).0 = Instant::now();
    }

    /// Returns the longest time without a success.
    pub fn longest_pause(&self) -> Duration {
        locked(&self.successes).1
    }

    /// Records the failure of a call that began at `began`. Returns a report if nothing excuses it.
    pub fn failure(&self, what: &str, began: Instant, error: &Error) -> Result<(), BrokenReport> {
        let name = match error {
            Error::Node(error) => {
                let text = format!("{error:?}");
                text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
            }
            Error::OutcomeUnknown(_) => "OutcomeUnknown".to_owned(),
            Error::TimedOut(_) => "TimedOut".to_owned(),
            Error::Network(_) => "Network".to_owned(),
            Error::Closed => "Closed".to_owned(),
            _ => "other error".to_owned(),
        };
        // The first failures of each kind explain the counts of the summary.
        if self.count(&name) <= 2 {
            self.note(format!("{what} failed: {error}"));
        }
        let excuses = *locked(&self.excuses);
        let excused = match error {
            Error::Node(NodeError::NoSpace { .. }) => {
                excuses.full_since.is_some_and(|_| excuses.full_until.is_none_or(|until| began < until))
            }
            Error::Node(NodeError::Corrupt(_) | NodeError::WrongSize { .. }) => excuses.data_is_lost,
            _ => excuses.data_is_lost || locked(&self.healed).is_none_or(|healed| began < healed + HEAL_TIME),
        };
        if excused {
            return Ok(());
        }
        Err(BrokenReport { promise: BrokenPromise::Unavailable, text: format!("{what}: {error}") })
    }

    /// Targets may be full from now on.
    pub fn may_be_full(&self) {
        let mut excuses = locked(&self.excuses);
        excuses.full_since.get_or_insert_with(Instant::now);
        excuses.full_until = None;
    }

    /// The objects that filled the targets are removed. Calls may fail for another 30 s.
    pub fn is_no_longer_full(&self) {
        locked(&self.excuses).full_until = Some(Instant::now() + HEAL_TIME);
    }

    /// Returns whether the targets are full.
    pub fn is_full(&self) -> bool {
        let excuses = locked(&self.excuses);
        excuses.full_since.is_some() && excuses.full_until.is_none()
    }

    /// Sets whether the data of a target without redundancy is lost.
    pub fn set_data_is_lost(&self, is_lost: bool) {
        locked(&self.excuses).data_is_lost = is_lost;
    }

    /// Records the end of the last fault.
    pub fn heal(&self) -> Instant {
        let now = Instant::now();
        self.note("the last fault has ended");
        *locked(&self.healed) = Some(now);
        now
    }

    /// Records a violation, and ends the round.
    pub fn violated(&self, ledger: Option<&SharedLedger>, report: BrokenReport) {
        let text = report.to_string();
        self.note(format!("VIOLATION: {}", text.chars().take(200).collect::<String>()));
        let at = self.now();
        locked(&self.violations).push(RoundViolation { ledger: ledger.cloned(), at, report });
        self.end();
    }

    /// Records a violation, if there is one.
    pub fn check(&self, ledger: Option<&SharedLedger>, result: Result<(), BrokenReport>) {
        if let Err(report) = result {
            self.violated(ledger, report);
        }
    }

    /// Returns all violations.
    pub fn violations(&self) -> Vec<RoundViolation> {
        locked(&self.violations).clone()
    }

    /// Returns whether a violation was found.
    pub fn is_violated(&self) -> bool {
        !locked(&self.violations).is_empty()
    }

    /// Ends faults and writers.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Returns whether faults and writers end.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Returns all events as text.
    pub fn events(&self) -> String {
        let mut text = String::new();
        for (at, note) in locked(&self.notes).iter() {
            let _ = writeln!(text, "  {:9.3} {note}", at.as_secs_f64());
        }
        text
    }
}

/// Locks a mutex. A thread that panicked ends the whole run, so poisoning does not matter.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns the calls of a ledger as text.
pub fn history_of(ledger: &ObjectLedger) -> String {
    let mut text = format!("history of {} (number {:x}):\n", ledger.name(), ledger.number());
    for call in ledger.calls() {
        let ended = call.ended.map_or("never".to_owned(), |ended| format!("{:.3}", ended.as_secs_f64()));
        let _ = writeln!(text, "  {:9.3} - {ended:9} {}", call.began.as_secs_f64(), call.text);
    }
    text
}
