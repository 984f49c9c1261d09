//! [`Injector`]: injects the faults of the node: of its processes, its drives and its space. It
//! keeps account of the targets that may lack data, so that faults stay within the tolerance of the
//! pool.

mod drives;
mod processes;
mod single;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;
use tokio::runtime::Handle;
use tokio::sync::RwLock;

use crate::calls::{CheckedPool, POOL};
use crate::filler::Filler;
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::plan::{RoundConfig, ThrashFault};
use crate::record::RoundRecord;
use crate::relay::Relay;
use crate::thrashed_node::{ThrashedNode, wait};

/// Why a fault was not injected, or what went wrong.
#[derive(Debug)]
pub enum InjectError {
    /// The fault is not possible now.
    NotPossible(String),
    /// The node broke a promise.
    Broken(BrokenReport),
}

impl InjectError {
    fn not_healed(text: String) -> InjectError {
        InjectError::Broken(BrokenReport { promise: BrokenPromise::NotHealed, text })
    }

    /// Puts a text before the text of the error.
    fn preceded_by(self, first: &str) -> InjectError {
        let joined = |text: String| format!("{first}; {text}");
        match self {
            InjectError::NotPossible(why) => InjectError::NotPossible(joined(why)),
            InjectError::Broken(BrokenReport { promise, text }) => {
                InjectError::Broken(BrokenReport { promise, text: joined(text) })
            }
        }
    }
}

type InjectResult<T = ()> = Result<T, InjectError>;

fn not_possible<T>(why: impl Into<String>) -> InjectResult<T> {
    Err(InjectError::NotPossible(why.into()))
}

/// Injects the faults of the node.
#[derive(Debug)]
pub struct Injector {
    /// The node.
    pub node: ThrashedNode,
    config: RoundConfig,
    record: Arc<RoundRecord>,
    relays: Vec<Relay>,
    runtime: Handle,
    gate: Arc<RwLock<()>>,
    /// Access to the pool that no fault of the network hits.
    pool: CheckedPool,
    /// Fills the targets.
    pub filler: Filler,
    random: SmallRng,
    /// Targets that may lack data.
    lacking: BTreeSet<usize>,
    /// Files of targets that are away, and the paths to which they were moved.
    away: BTreeMap<usize, PathBuf>,
    /// Targets that may contain damaged or old data. A scrub repairs it.
    damaged: BTreeSet<usize>,
    /// Whether a target was damaged or replaced by an older copy in this round.
    pub was_damaged: bool,
}

/// What an injector needs besides its node.
#[derive(Debug)]
pub struct InjectorParts {
    /// The record of the round.
    pub record: Arc<RoundRecord>,
    /// Relays, which must know the node's address.
    pub relays: Vec<Relay>,
    /// Runtime of `pool`.
    pub runtime: Handle,
    /// Pauses the writers.
    pub gate: Arc<RwLock<()>>,
    /// Access to the pool that no fault of the network hits.
    pub pool: CheckedPool,
    /// Source of random choices.
    pub random: SmallRng,
}

impl Injector {
    /// Creates the injector of a node that runs.
    pub fn new(node: ThrashedNode, config: RoundConfig, parts: InjectorParts) -> Injector {
        let InjectorParts { record, relays, runtime, gate, pool, random } = parts;
        let filler = Filler::new(pool.clone(), Arc::clone(&record));
        Injector {
            node,
            config,
            record,
            relays,
            runtime,
            gate,
            pool,
            filler,
            random,
            lacking: BTreeSet::new(),
            away: BTreeMap::new(),
            damaged: BTreeSet::new(),
            was_damaged: false,
        }
    }

    /// Injects random faults until the end of the time for faults.
    pub fn run(&mut self, kinds: &[ThrashFault]) {
        let end = Duration::from_secs(self.config.fault_seconds);
        while !self.record.is_over() && self.record.now() < end {
            // Some faults follow at once, during the recovery from the one before.
            let pause = match self.random.random_range(0..3) {
                0 => 0.0,
                _ => self.random.random_range(0.2..3.0),
            };
            self.sleep(Duration::from_secs_f64(pause));
            if !self.away.is_empty() && self.random.random_range(0..3) == 0 {
                self.return_drives();
            }
            let Some(kind) = ThrashFault::choose(kinds, &mut self.random) else { return };
            self.inject(kind, end.saturating_sub(self.record.now()));
        }
    }

    fn inject(&mut self, kind: ThrashFault, left: Duration) {
        self.refresh();
        self.record.note(format!("{kind}: begins"));
        match self.try_inject(kind, left) {
            Ok(what) => {
                self.record.fired(kind.name());
                self.record.note(format!("{kind}: {what}"));
            }
            Err(InjectError::NotPossible(why)) => self.record.note(format!("{kind}: not possible: {why}")),
            Err(InjectError::Broken(report)) => self.record.violated(None, report),
        }
    }

    fn try_inject(&mut self, kind: ThrashFault, left: Duration) -> InjectResult<String> {
        match kind {
            ThrashFault::Kill => self.kill_role(None),
            ThrashFault::KillSupervisor => self.kill_supervisor(),
            ThrashFault::KillAll => {
                self.kill_all()?;
                self.start()
            }
            ThrashFault::Stop => self.stop_process(left),
            ThrashFault::Restart => {
                self.down()?;
                self.start()
            }
            ThrashFault::LoseDrive => self.lose_drive(),
            ThrashFault::FailDrive => self.fail_drive(),
            ThrashFault::StartWithoutDrive => self.start_without_drive(),
            ThrashFault::ReplaceDrive => self.replace_drive(),
            ThrashFault::StaleImage | ThrashFault::StaleSingle => self.stale_image(),
            ThrashFault::Damage => self.damage(),
            ThrashFault::WriteError => self.write_error(),
            ThrashFault::Dma => self.dma(),
            ThrashFault::Fill => self.fill(),
            ThrashFault::Cut | ThrashFault::Hold | ThrashFault::Delay | ThrashFault::KillClient => {
                not_possible("another thread injects faults of the network")
            }
        }
    }

    /// Waits, but no longer than until the end of the round.
    fn sleep(&self, time: Duration) {
        let until = self.record.now() + time;
        while self.record.now() < until && !self.record.is_over() {
            std::thread::sleep((until - self.record.now().min(until)).min(Duration::from_millis(50)));
        }
    }

    // Start and stop.

    /// Starts the node, and tells its address to the relays.
    fn start(&mut self) -> InjectResult<String> {
        let endpoint = self.node.up().map_err(InjectError::not_healed)?;
        self.relays.iter().for_each(|relay| relay.set_upstream(&endpoint));
        Ok(format!("the node runs again at {endpoint}"))
    }

    fn down(&self) -> InjectResult {
        self.node.down().map_err(InjectError::not_healed)?;
        match self.node.processes() {
            left if left.is_empty() => Ok(()),
            left => Err(InjectError::not_healed(format!("outboard down has left processes: {left:?}"))),
        }
    }

    fn kill_all(&self) -> InjectResult {
        match self.node.kill_all() {
            Ok(0) => not_possible("no process was running"),
            Ok(_) => Ok(()),
            Err(why) => not_possible(why),
        }
    }

    /// Stops the node, by `down` or by SIGKILL.
    fn halt(&mut self) -> InjectResult<&'static str> {
        if self.random.random_range(0..2) == 0 {
            self.down()?;
            Ok("stopped")
        } else {
            self.kill_all()?;
            Ok("killed")
        }
    }

    // DMA and space.

    fn dma(&mut self) -> InjectResult<String> {
        let faults = [
            "dma.transfer=fail,count=20",
            "dma.transfer=stall,late=3000ms,count=5",
            "dma.doorbell=drop,count=5",
            "store.doorbell=drop,count=5",
        ];
        let fault = faults[self.random.random_range(0..faults.len())];
        self.node.run(&["debug", "fault", fault]).or_else(not_possible)?;
        let mut fired = false;
        wait(Duration::from_secs(15), || {
            fired = self.armed_fault_has_fired();
            fired || self.record.is_over()
        });
        self.sleep(Duration::from_secs(2));
        // If the role was restarted, the fault is gone.
        let _ = self.node.run(&["debug", "clear"]);
        if fired { Ok(format!("{fault} has fired")) } else { not_possible(format!("{fault} has not fired")) }
    }

    /// Returns whether an armed fault has fired.
    fn armed_fault_has_fired(&self) -> bool {
        let faults = self.node.run(&["debug", "faults", "--json"]).unwrap_or_default();
        let faults: serde_json::Value = serde_json::from_str(&faults).unwrap_or_default();
        let rows = faults.as_array().map_or(&[][..], Vec::as_slice);
        rows.iter().any(|fault| fault["fired"].as_u64().unwrap_or(0) > 0)
    }

    fn fill(&mut self) -> InjectResult<String> {
        if self.config.redundancy.tolerates() == 0 {
            // Calls on an absent target would wait for its return.
            self.return_drives();
        }
        let hold = Duration::from_secs_f64(self.random.random_range(1.0..8.0));
        let keeps = self.random.random_range(0..3) == 0;
        let filled = self.runtime.block_on(self.filler.fill());
        self.sleep(hold);
        // Groups may wait for an absent target, and only this thread returns it.
        self.return_drives();
        if !keeps {
            self.empty()?;
        }
        match filled {
            Some(count) => Ok(format!("{count} objects filled the targets; kept: {keeps}")),
            None => not_possible("the targets did not become full in time"),
        }
    }

    /// Removes the objects that fill the targets.
    fn empty(&mut self) -> InjectResult {
        match self.runtime.block_on(self.filler.empty()) {
            Ok(()) => Ok(()),
            Err(text) => Err(InjectError::Broken(BrokenReport { promise: BrokenPromise::Unavailable, text })),
        }
    }

    // The end of the round.

    /// Ends all faults, except that the targets may stay full. An operator replaces damaged targets
    /// that the node refuses to use.
    pub fn heal(&mut self) -> InjectResult {
        self.return_drives();
        let _ = self.node.run(&["debug", "clear"]);
        if self.node.process("supervisor").is_none() {
            self.record.note("the node does not run, and is started");
            self.start()?;
        }
        if !self.damaged.is_empty() {
            wait(Duration::from_secs(20), || {
                self.node.summary().is_ok_and(|s| !s.pools.is_empty() && s.targets_not_in().is_empty())
            });
            self.replace_unusable()?;
        }
        Ok(())
    }

    /// Waits until all placement groups have all their targets. After a while, replaces targets that
    /// do not return.
    pub fn await_whole(&mut self) -> InjectResult {
        let whole = |node: &ThrashedNode| {
            node.summary().is_ok_and(|summary| summary.is_whole() && summary.targets_not_in().is_empty())
        };
        if wait(Duration::from_secs(60), || whole(&self.node)) {
            return Ok(());
        }
        self.replace_unusable()?;
        if wait(Duration::from_secs(180), || whole(&self.node)) {
            return Ok(());
        }
        Err(InjectError::not_healed(format!(
            "the node is not whole 4 minutes after the last fault; problems: {:?}",
            self.node.summary().map(|summary| summary.problems)
        )))
    }

    /// Scrubs the pool twice. The second scrub must find nothing, and neither may the first one,
    /// unless a fault has damaged a drive.
    pub fn scrub(&self) -> InjectResult {
        for first in [true, false] {
            let found = self.node.scrub(POOL).map_err(InjectError::not_healed)?;
            let excused = first && self.was_damaged;
            if (found.damaged > 0 || found.inconsistent > 0) && !excused {
                let report = BrokenReport {
                    promise: BrokenPromise::MixedContent,
                    text: format!("a scrub found {found:?}"),
                };
                return Err(InjectError::Broken(report));
            }
        }
        Ok(())
    }

    /// Removes the objects that fill the targets, if there are any.
    ///
    /// # Errors
    /// If an object cannot be removed.
    pub fn empty_at_last(&mut self) -> InjectResult {
        if self.record.is_full() { self.empty() } else { Ok(()) }
    }

    /// Stops the node, and checks its targets.
    pub fn fsck(&self) -> InjectResult {
        self.down()?;
        match self.node.run(&["fsck"]) {
            Ok(_) => Ok(()),
            Err(why) => Err(InjectError::not_healed(format!("fsck: {why}"))),
        }
    }
}
