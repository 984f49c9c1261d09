//! Faults of drives. Keeps account of the targets that may lack data, so that faults stay within the
//! tolerance of the pool.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use rand::Rng;

use super::single::TargetHarm;
use super::{InjectError, InjectResult, Injector, not_possible};
use crate::calls::POOL;
use crate::image::{block_hashes, flip_bits};
use crate::thrashed_node::{NodeSummary, ScrubSummary, wait};

pub(super) fn file_error(error: std::io::Error) -> InjectError {
    InjectError::NotPossible(format!("a file of a target cannot be changed: {error}"))
}

impl Injector {
    /// Updates the account of targets that may lack data.
    pub(super) fn refresh(&mut self) -> NodeSummary {
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
            // A scrub does not read a damaged target that the node does not use.
            let is_damage_readable = not_in.iter().all(|target| !self.damaged.contains(target));
            if others_serve
                && is_settled
                && !self.damaged.is_empty()
                && is_damage_readable
                && summary.is_whole()
            {
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
                    // The scrub does not read a target that has failed, perhaps because of the damage.
                    let not_in = self.node.summary().unwrap_or_default().targets_not_in();
                    let (damaged, intact): (BTreeSet<usize>, BTreeSet<usize>) =
                        self.damaged.iter().partition(|target| not_in.contains(target));
                    self.record.note(format!("a scrub finds no damage on targets {intact:?}"));
                    self.damaged = damaged;
                    return;
                }
                Ok(found) => self.record.note(format!("a scrub found and repaired damage: {found:?}")),
                Err(why) => self.record.note(format!("a scrub failed: {why}")),
            }
        }
        self.sleep(Duration::from_secs(1));
    }

    /// Moves the file of a target away.
    pub(super) fn take_away(&mut self, target: usize) -> InjectResult {
        let image = self.node.image(target);
        let path = image.with_extension("away");
        fs::rename(&image, &path).map_err(file_error)?;
        self.away.insert(target, path);
        self.lacking.insert(target);
        Ok(())
    }

    /// Moves the files of all targets back.
    pub(super) fn return_drives(&mut self) {
        for (target, path) in std::mem::take(&mut self.away) {
            match fs::rename(&path, self.node.image(target)) {
                Ok(()) => self.record.note(format!("target {target} returns")),
                Err(error) => self.record.note(format!("target {target} cannot return: {error}")),
            }
        }
    }

    /// Waits until the node reports that a target has failed.
    fn await_failed(&self, target: usize) -> InjectResult {
        let mut has_failed = false;
        wait(Duration::from_secs(60), || {
            let summary = self.node.summary().unwrap_or_default();
            has_failed = summary.targets_in_state("failed").contains(&target);
            has_failed || self.record.is_over()
        });
        if has_failed { Ok(()) } else { not_possible(format!("target {target} was not reported as failed")) }
    }

    pub(super) fn lose_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        self.take_away(target)?;
        self.kill_owner()?;
        self.await_failed(target)?;
        Ok(format!("target {target} is lost"))
    }

    pub(super) fn fail_drive(&mut self) -> InjectResult<String> {
        let chosen = self.choose_target()?;
        // The fault hits the next write of any target. No target can be remounted without its file,
        // and the others keep their open files.
        let there: Vec<usize> =
            (0..self.config.targets).filter(|target| !self.away.contains_key(target)).collect();
        let before = self.node.summary().or_else(not_possible)?.targets_in_state("failed");
        let hidden = |target: usize| self.node.image(target).with_extension("hidden");
        for target in &there {
            fs::rename(self.node.image(*target), hidden(*target)).map_err(file_error)?;
        }
        let armed = self.node.run(&["debug", "fault", "drive.write=fail,count=1"]);
        let mut failed = None;
        if armed.is_ok() {
            wait(Duration::from_secs(20), || {
                let now = self.node.summary().unwrap_or_default().targets_in_state("failed");
                failed = now.into_iter().find(|target| there.contains(target) && !before.contains(target));
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

    pub(super) fn write_error(&mut self) -> InjectResult<String> {
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

    pub(super) fn start_without_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let how = self.halt()?;
        self.take_away(target)?;
        self.start()?;
        self.await_failed(target)?;
        Ok(format!("the node was {how}, and started without target {target}"))
    }

    pub(super) fn replace_drive(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        self.take_away(target)?;
        self.kill_owner()?;
        // A target that is not lost returns later.
        self.await_failed(target)?;
        let lost = self.away.remove(&target);
        self.replace_target(target)?;
        let _ = lost.map(fs::remove_file);
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
    pub(super) fn replace_unusable(&mut self) -> InjectResult<bool> {
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

    pub(super) fn stale_image(&mut self) -> InjectResult<String> {
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
            return self.harm_single(target, &TargetHarm::Stale(old));
        }
        self.choose_target()?;
        let how = self.halt()?;
        self.mark_damaged(target);
        fs::rename(&old, &image).map_err(file_error)?;
        self.start()?;
        Ok(format!("the node was {how}, and target {target} is {changes} changes old"))
    }

    /// Records that a target may contain damaged or old data.
    fn mark_damaged(&mut self, target: usize) {
        self.lacking.insert(target);
        self.damaged.insert(target);
        self.was_damaged = true;
    }

    pub(super) fn damage(&mut self) -> InjectResult<String> {
        let target = self.choose_target()?;
        let seed = self.random.random();
        let image = self.node.image(target);
        let before = block_hashes(&image).map_err(file_error)?;
        let pause = self.random.random_range(0.2..2.0);
        self.sleep(Duration::from_secs_f64(pause));
        if self.config.redundancy.tolerates() == 0 {
            return self.harm_single(target, &TargetHarm::Damaged { before, seed });
        }
        let how = self.halt()?;
        let flipped = flip_bits(&image, &before, seed);
        // A failed attempt may have flipped some bits.
        if flipped.as_ref().map_or(true, |flipped| !flipped.is_empty()) {
            self.mark_damaged(target);
        }
        self.start()?;
        let flipped = flipped.map_err(file_error)?;
        if flipped.is_empty() {
            return not_possible(format!("the node was {how}, and no block of target {target} has changed"));
        }
        Ok(format!("the node was {how}, and target {target} has flipped bits in bytes {flipped:?}"))
    }
}
