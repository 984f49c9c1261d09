//! [`Injector`]: injects the faults of the node: of its processes, its drives and its space. It
//! keeps account of the targets that may lack data, so that faults stay within the tolerance of the
//! pool.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;
use rustix::process::Signal;
use tokio::runtime::Handle;
use tokio::sync::RwLock;

use crate::calls::{CheckedPool, POOL};
use crate::filler::Filler;
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::plan::{RoundConfig, ThrashFault};
use crate::record::RoundRecord;
use crate::relay::Relay;
use crate::thrashed_node::{NodeSummary, ProcessRecord, ScrubSummary, ThrashedNode, state_of, wait};

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
}

type InjectResult<T = ()> = Result<T, InjectError>;

fn not_possible<T>(why: impl Into<String>) -> InjectResult<T> {
    Err(InjectError::NotPossible(why.into()))
}

fn file_error(error: std::io::Error) -> InjectError {
    InjectError::NotPossible(format!("a file of a target cannot be changed: {error}"))
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
    filler: Filler,
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

    // Processes.

    /// Returns the running process of a random role, except the supervisor and `other`.
    fn random_role(&mut self, other: Option<&str>) -> InjectResult<ProcessRecord> {
        let roles: Vec<ProcessRecord> = self.node.processes().into_iter().collect();
        let roles: Vec<_> = roles
            .into_iter()
            .filter(|process| process.role != "supervisor" && other != Some(process.role.as_str()))
            .collect();
        if roles.is_empty() {
            return not_possible("no role runs");
        }
        Ok(roles[self.random.random_range(0..roles.len())].clone())
    }

    fn kill_role(&mut self, other: Option<&str>) -> InjectResult<String> {
        let process = self.random_role(other)?;
        match self.node.kill(&process) {
            Ok(()) => Ok(format!("the {} ({}) is dead", process.role, process.pid)),
            Err(why) => not_possible(why),
        }
    }

    /// Kills the role that owns the targets.
    fn kill_owner(&self) -> InjectResult {
        let role = self.owner();
        let Some(process) = self.node.process(role) else { return not_possible(format!("no {role} runs")) };
        self.node.kill(&process).or_else(not_possible)
    }

    fn owner(&self) -> &'static str {
        match self.config.placement {
            client::Placement::Dpu => "store",
            client::Placement::Host => "node",
        }
    }

    fn kill_supervisor(&mut self) -> InjectResult<String> {
        let Some(process) = self.node.process("supervisor") else {
            return not_possible("no supervisor runs");
        };
        self.node.kill(&process).or_else(not_possible)?;
        let ended = wait(Duration::from_secs(45), || self.node.processes().is_empty());
        if !ended {
            self.record.note("kill-supervisor: roles have survived their supervisor for 45 s");
            self.kill_all()?;
        }
        self.start()
    }

    fn stop_process(&mut self, left: Duration) -> InjectResult<String> {
        let processes = self.node.processes();
        if processes.is_empty() {
            return not_possible("no process runs");
        }
        // The supervisor does little, so it is stopped less often than the roles.
        let process = match self.random.random_range(0..5) {
            0 => processes[0].clone(),
            _ => self.random_role(None)?,
        };
        // Short and long stops are equally likely, from 0.1 to 60 s.
        let seconds = 0.1 * 600_f64.powf(self.random.random_range(0.0..1.0));
        let time = Duration::from_secs_f64(seconds).min(left.max(Duration::from_secs(2)));
        let kills = self.random.random_range(0..4) == 0;
        let ProcessRecord { role, pid, .. } = &process;
        self.node.signal(&process, Signal::STOP).or_else(not_possible)?;
        if !wait(Duration::from_secs(5), || state_of(*pid) == Some('T')) {
            let _ = self.node.signal(&process, Signal::CONT);
            return not_possible(format!("the {role} ({pid}) does not stop"));
        }
        self.record.note(format!("stop: the {role} ({pid}) is stopped for {:.1} s", time.as_secs_f64()));
        self.sleep(time / 2);
        if kills && let Ok(what) = self.kill_role(Some(role)) {
            self.record.note(format!("stop: meanwhile {what}"));
        }
        self.sleep(time / 2);
        let outcome = match self.node.signal(&process, Signal::CONT) {
            Ok(()) => "continues",
            Err(_) => "was killed by its supervisor",
        };
        Ok(format!("the {role} ({pid}) {outcome} after {:.1} s", time.as_secs_f64()))
    }

    // Drives.

    /// Updates the account of targets that may lack data.
    fn refresh(&mut self) -> NodeSummary {
        let summary = self.node.summary().unwrap_or_default();
        let not_in = summary.targets_not_in();
        let only_away = not_in.iter().all(|target| self.away.contains_key(target));
        if !summary.pools.is_empty() && only_away && (summary.is_whole() || !self.away.is_empty()) {
            let (away, damaged) = (&self.away, &self.damaged);
            self.lacking.retain(|target| away.contains_key(target) || damaged.contains(target));
        }
        summary
    }

    /// Chooses a target whose data may be lost now, for a time.
    fn choose_target(&mut self) -> InjectResult<usize> {
        let tolerated = self.config.redundancy.tolerates();
        if self.lacking.len() >= tolerated.max(1) {
            self.return_drives();
        }
        // Wait for targets that are about to return: an absent target is remounted after up to 16 s.
        let mut unfit = String::new();
        for attempt in 0..50 {
            let summary = self.refresh();
            let candidates: Vec<usize> =
                (0..self.config.targets).filter(|target| !self.lacking.contains(target)).collect();
            let not_in = summary.targets_not_in();
            let others_serve = candidates.iter().all(|target| !not_in.contains(target));
            let has_room = match tolerated {
                // A target that has returned may not have the node's newest map yet.
                0 => self.away.is_empty() && self.lacking.is_empty(),
                _ => self.lacking.len() < tolerated,
            };
            let is_settled = !summary.pools.is_empty() && (summary.is_whole() || !self.lacking.is_empty());
            if others_serve && has_room && is_settled {
                return Ok(candidates[self.random.random_range(0..candidates.len())]);
            }
            if others_serve && is_settled && !self.damaged.is_empty() && summary.is_whole() {
                self.repair_damage();
                continue;
            }
            unfit = format!("targets {:?} lack data, targets {not_in:?} are not in", self.lacking);
            if attempt == 16 && self.replace_unusable()? {
                continue;
            }
            self.sleep(Duration::from_millis(500));
        }
        not_possible(unfit)
    }

    /// Scrubs the pool until a scrub finds nothing. Damaged data is then repaired.
    fn repair_damage(&mut self) {
        for _ in 0..3 {
            match self.node.scrub(POOL) {
                Ok(ScrubSummary { damaged: 0, inconsistent: 0 }) => {
                    self.record.note(format!("a scrub finds no damage on targets {:?}", self.damaged));
                    self.damaged.clear();
                    return;
                }
                Ok(found) => self.record.note(format!("a scrub found and repaired damage: {found:?}")),
                Err(why) => self.record.note(format!("a scrub failed: {why}")),
            }
        }
        self.sleep(Duration::from_secs(1));
    }

    /// Moves the file of a target away.
    fn take_away(&mut self, target: usize) -> InjectResult {
        let image = self.node.image(target);
        let path = image.with_extension("away");
        fs::rename(&image, &path).map_err(file_error)?;
        self.away.insert(target, path);
        self.lacking.insert(target);
        Ok(())
    }

    /// Moves the files of all targets back.
    fn return_drives(&mut self) {
        for (target, path) in std::mem::take(&mut self.away) {
            match fs::rename(&path, self.node.image(target)) {
                Ok(()) => self.record.note(format!("target {target} returns")),
                Err(error) => self.record.note(format!("target {target} cannot return: {error}")),
            }
        }
    }

    /// Waits until the node reports that it does not use a target.
    fn await_failed(&self, target: usize) -> bool {
        wait(Duration::from_secs(60), || {
            self.record.is_over()
                || self.node.summary().is_ok_and(|summary| summary.targets_not_in().contains(&target))
        })
    }

    fn lose_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        self.take_away(target)?;
        self.kill_owner()?;
        let noticed = self.await_failed(target);
        Ok(format!("target {target} is lost{}", if noticed { "" } else { ", but not reported as failed" }))
    }

    fn fail_drive(&mut self) -> InjectResult<String> {
        let chosen = self.choose_target()?;
        // The fault hits the next write of any target. No target can be remounted without its file,
        // and the others keep their open files.
        let there: Vec<usize> =
            (0..self.config.targets).filter(|target| !self.away.contains_key(target)).collect();
        let hidden = |target: usize| self.node.image(target).with_extension("hidden");
        for target in &there {
            fs::rename(self.node.image(*target), hidden(*target)).map_err(file_error)?;
        }
        let armed = self.node.run(&["debug", "fault", "drive.write=fail,count=1"]);
        let mut failed = None;
        if armed.is_ok() {
            wait(Duration::from_secs(20), || {
                let not_in = self.node.summary().unwrap_or_default().targets_not_in();
                failed = not_in.into_iter().find(|target| there.contains(target));
                failed.is_some() || self.record.is_over()
            });
        }
        let cleared = self.node.run(&["debug", "clear"]);
        for target in &there {
            if Some(*target) == failed {
                fs::rename(hidden(*target), self.node.image(*target).with_extension("away"))
                    .map_err(file_error)?;
            } else {
                fs::rename(hidden(*target), self.node.image(*target)).map_err(file_error)?;
            }
        }
        match failed {
            Some(target) => {
                self.away.insert(target, self.node.image(target).with_extension("away"));
                self.lacking.insert(target);
                Ok(format!("target {target} has failed"))
            }
            None => {
                // The fault may have hit a write shortly before it was cleared.
                if self.config.redundancy.tolerates() > 0 {
                    self.lacking.insert(chosen);
                }
                not_possible(format!("no write failed: {armed:?}, {cleared:?}"))
            }
        }
    }

    fn write_error(&mut self) -> InjectResult<String> {
        if !self.lacking.is_empty() {
            return not_possible(format!("targets {:?} lack data", self.lacking));
        }
        self.choose_target()?;
        self.node.run(&["debug", "fault", "drive.write=fail,count=1"]).or_else(not_possible)?;
        let fired = wait(Duration::from_secs(20), || self.armed_fault_has_fired());
        let cleared = self.node.run(&["debug", "clear"]);
        if !fired {
            return not_possible(format!("no write failed; cleared: {cleared:?}"));
        }
        // Any target may be concerned. Until the node is whole, no other target may lose data.
        let whole = wait(Duration::from_secs(60), || {
            self.record.is_over()
                || self.node.summary().is_ok_and(|s| s.is_whole() && s.targets_not_in().is_empty())
        });
        match whole {
            true => Ok("a write failed, and the target was remounted".to_owned()),
            false => Err(InjectError::not_healed(format!(
                "60 s after a failed write, the node is not whole: {:?}",
                self.node.summary().map(|summary| summary.problems)
            ))),
        }
    }

    /// Returns whether an armed fault has fired.
    fn armed_fault_has_fired(&self) -> bool {
        let faults = self.node.run(&["debug", "faults", "--json"]).unwrap_or_default();
        let faults: serde_json::Value = serde_json::from_str(&faults).unwrap_or_default();
        let rows = faults.as_array().map_or(&[][..], Vec::as_slice);
        rows.iter().any(|fault| fault["fired"].as_u64().unwrap_or(0) > 0)
    }

    fn start_without_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let how = self.halt()?;
        self.take_away(target)?;
        self.start()?;
        Ok(format!("the node was {how}, and started without target {target}"))
    }

    fn replace_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let image = self.node.image(target);
        fs::rename(&image, image.with_extension("lost")).map_err(file_error)?;
        self.lacking.insert(target);
        self.kill_owner()?;
        self.await_failed(target);
        self.replace_target(target)?;
        let _ = fs::remove_file(image.with_extension("lost"));
        Ok(format!("target {target} is lost, and was replaced"))
    }

    /// Replaces a target as an operator does.
    fn replace_target(&mut self, target: usize) -> InjectResult {
        let id = target.to_string();
        // The operator repeats a command that fails because a role is being restarted.
        let mut last = String::new();
        let done = wait(Duration::from_secs(60), || {
            let out = self.node.run(&["target", "out", &id]);
            let replaced = out.and_then(|_| self.node.run(&["target", "replace", &id]));
            replaced.map_err(|why| last = why).is_ok()
        });
        if !done {
            return Err(InjectError::not_healed(format!("target {target} cannot be replaced: {last}")));
        }
        self.down()?;
        self.start()?;
        Ok(())
    }

    /// Replaces damaged targets that the node does not use. Returns whether there were any.
    fn replace_unusable(&mut self) -> InjectResult<bool> {
        if self.config.redundancy.tolerates() == 0 {
            return Ok(false);
        }
        let not_in = self.node.summary().unwrap_or_default().targets_not_in();
        let unusable: Vec<usize> =
            not_in.into_iter().filter(|target| self.damaged.contains(target)).collect();
        for target in &unusable {
            self.record.note(format!("the operator replaces the damaged target {target}"));
            self.replace_target(*target)?;
            self.damaged.remove(target);
        }
        Ok(!unusable.is_empty())
    }

    fn stale_image(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let image = self.node.image(target);
        let old = image.with_extension("old");
        self.halt()?;
        fs::copy(&image, &old).map_err(file_error)?;
        self.start()?;
        let before = self.record.acknowledged();
        let pause = self.random.random_range(3.0..8.0);
        self.sleep(Duration::from_secs_f64(pause));
        // Other faults may have hidden the writers' progress.
        wait(Duration::from_secs(30), || self.record.acknowledged() > before + 50 || self.record.is_over());
        let changes = self.record.acknowledged() - before;
        if changes == 0 {
            return not_possible("no change was acknowledged since the copy");
        }
        if self.config.redundancy.tolerates() == 0 {
            return self.without_data("stale", target, |image| fs::rename(&old, image));
        }
        self.choose_target()?;
        let how = self.halt()?;
        self.lacking.insert(target);
        self.damaged.insert(target);
        self.was_damaged = true;
        fs::rename(&old, &image).map_err(file_error)?;
        self.start()?;
        Ok(format!("the node was {how}, and target {target} is {changes} changes old"))
    }

    fn damage(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let seed = self.random.random();
        let image = self.node.image(target);
        let before = block_hashes(&image).map_err(file_error)?;
        let pause = self.random.random_range(0.2..2.0);
        self.sleep(Duration::from_secs_f64(pause));
        if self.config.redundancy.tolerates() == 0 {
            let flip = |image: &PathBuf| flip_bits(image, &before, seed).map(|_| ());
            return self.without_data("damaged", target, flip);
        }
        let how = self.halt()?;
        self.lacking.insert(target);
        self.damaged.insert(target);
        self.was_damaged = true;
        let flipped = flip_bits(&image, &before, seed).map_err(file_error)?;
        self.start()?;
        Ok(format!("the node was {how}, and target {target} has flipped bits in bytes {flipped:?}"))
    }

    /// Harms a target of a pool without redundancy while no client changes anything, checks that no
    /// read returns wrong data and that the node reports a stale target, and undoes the harm.
    fn without_data(
        &mut self,
        what: &str,
        target: usize,
        harm: impl FnOnce(&PathBuf) -> std::io::Result<()>,
    ) -> InjectResult<String> {
        let gate = Arc::clone(&self.gate);
        let Ok(closed) = self
            .runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(60), gate.write()).await })
        else {
            return not_possible("calls are in progress for more than 60 s");
        };
        let image = self.node.image(target);
        let intact = image.with_extension("intact");
        self.halt()?;
        fs::copy(&image, &intact).map_err(file_error)?;
        self.record.set_data_is_lost(true);
        harm(&image).map_err(file_error)?;
        let started = self.start();
        let reported = match &started {
            Err(_) => true,
            Ok(_) => {
                let ledgers = self.record.ledgers();
                let pool = self.pool.clone();
                let short = Duration::from_secs(3);
                self.runtime.block_on(async move {
                    for ledger in &ledgers {
                        // A target that is not used delays calls until their deadline.
                        let _ = tokio::time::timeout(short, pool.check(ledger)).await;
                    }
                });
                wait(Duration::from_secs(10), || {
                    let summary = self.node.summary().unwrap_or_default();
                    summary.targets_not_in().contains(&target) || !summary.problems.is_empty()
                })
            }
        };
        // Undo the harm before the result is judged, so that the round can continue.
        // If the node has refused to start, there is nothing to kill.
        let _ = self.kill_all();
        fs::rename(&intact, &image).map_err(file_error)?;
        self.start()?;
        // The node has used the damaged file, so the intact one is an older copy for it. The operator
        // knows that no client has changed anything meanwhile.
        let _ = self.node.run(&["target", "forget", &target.to_string(), "--accept-loss"]);
        self.record.set_data_is_lost(false);
        drop(closed);
        self.record.forget_pause();
        if what == "stale" && !reported {
            let text = format!("target {target} was replaced by an older copy, but status shows no problem");
            return Err(InjectError::Broken(BrokenReport { promise: BrokenPromise::NotReported, text }));
        }
        let start = started.err().map_or("started".to_owned(), |_| "refused to start".to_owned());
        Ok(format!("the node with the {what} target {target} {start}, reported: {reported}"))
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
        let fired = wait(Duration::from_secs(15), || self.armed_fault_has_fired() || self.record.is_over());
        self.sleep(Duration::from_secs(2));
        // If the role was restarted, the fault is gone.
        let _ = self.node.run(&["debug", "clear"]);
        if fired { Ok(format!("{fault} has fired")) } else { not_possible(format!("{fault} has not fired")) }
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

/// Length of the blocks in which the file of a target is compared.
const BLOCK: usize = 4096;

/// Returns a hash of each block of a file.
fn block_hashes(path: &Path) -> std::io::Result<Vec<u64>> {
    let mut file = fs::File::open(path)?;
    let mut hashes = Vec::new();
    let mut block = [0; BLOCK];
    while file.read_exact(&mut block).is_ok() {
        hashes.push(xxhash_rust::xxh3::xxh3_64(&block));
    }
    Ok(hashes)
}

/// Flips bits in up to four blocks of a file, and returns the offsets of the damaged bytes. Hits
/// blocks that have changed since `before`: the newest entries of the log, and new data. The log
/// occupies an eighth of the file (`docs/format.md`) and is hit half the time.
fn flip_bits(path: &Path, before: &[u64], seed: u64) -> std::io::Result<Vec<u64>> {
    use rand::SeedableRng;
    let mut random = SmallRng::seed_from_u64(seed);
    let now = block_hashes(path)?;
    let changed: Vec<usize> = (0..now.len()).filter(|n| before.get(*n) != now.get(*n)).collect();
    let log: Vec<usize> = changed.iter().copied().filter(|n| *n < now.len() / 8).collect();
    let file = fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut offsets = Vec::new();
    for _ in 0..random.random_range(1..=4) {
        let hits_log = random.random_range(0..2) == 0;
        let (choice, at) = (random.random_range(0.0..1.0), random.random_range(0..BLOCK as u64));
        let blocks = if hits_log && !log.is_empty() { &log } else { &changed };
        let Some(block) = blocks.get((choice * blocks.len() as f64) as usize) else { continue };
        let offset = (*block * BLOCK) as u64 + at;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset)?;
        byte[0] ^= 1 << random.random_range(0..8);
        file.write_all_at(&byte, offset)?;
        offsets.push(offset);
    }
    file.sync_all()?;
    Ok(offsets)
}
