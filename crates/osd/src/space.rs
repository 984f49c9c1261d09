//! Waiting for space that is on its way.
//!
//! A change that replaces data needs room for the new data before the old is given back, and a
//! redundant group keeps what a transaction has overwritten until a later one trims it. So a change
//! that finds no space waits while other changes run, and has groups trimmed. Changes that wait do
//! not count as running: when all do, they fail.

use std::cell::Cell;
use std::rc::Rc;

use array::Group;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;

use crate::task::spawn;

/// Changes at work, which may give space back when they end.
#[derive(Default)]
pub(crate) struct SpaceReclaim {
    running: Cell<u32>,
    /// Counts changes that have ended otherwise than for want of space: they may have given space
    /// back.
    progress: Cell<u64>,
    /// There is progress, or no change runs any more.
    changed: Notify,
    /// Held while groups are trimmed.
    trimming: Mutex<()>,
    /// Counts how often that brought something.
    trims: Cell<u64>,
}

/// A change at work, until dropped.
pub(crate) struct ActiveChange<'a> {
    space: &'a SpaceReclaim,
    /// The progress when the change began.
    seen: u64,
    is_fruitless: bool,
}

impl SpaceReclaim {
    /// Says that a change begins, or goes on.
    pub(crate) fn enter(&self) -> ActiveChange<'_> {
        self.running.set(self.running.get() + 1);
        ActiveChange { space: self, seen: self.progress.get(), is_fruitless: false }
    }

    /// Waits until there may be more space than a change found that began when the progress was
    /// `seen`, at most until `until`. `groups` lists the groups that may give space back. `false`
    /// if none is on its way, or not in time.
    pub(crate) async fn may_come(
        &self,
        seen: u64,
        until: Instant,
        groups: impl Fn() -> Vec<Rc<Group>>,
    ) -> bool {
        if Instant::now() >= until {
            return false;
        }
        // A group that waits for a member may trim for long.
        match tokio::time::timeout_at(until, self.trim(groups)).await {
            Ok(false) => {}
            Ok(true) => return true,
            Err(_) => return false,
        }
        loop {
            let changed = self.changed.notified();
            if self.progress.get() != seen {
                return true;
            }
            if self.running.get() == 0 || tokio::time::timeout_at(until, changed).await.is_err() {
                return false;
            }
        }
    }

    /// Has groups give back what they keep of overwritten data; whether any did.
    async fn trim(&self, groups: impl Fn() -> Vec<Rc<Group>>) -> bool {
        let before = self.trims.get();
        let _one_at_a_time = self.trimming.lock().await;
        if self.trims.get() != before {
            return true;
        }
        for group in groups() {
            let kept = group.undo_objects();
            if kept == 0 {
                continue;
            }
            // The group goes on trimming by itself if the change that waits gives up.
            let trimmed = Rc::clone(&group);
            let trim = spawn(async move {
                if let Err(e) = trimmed.trim().await {
                    tracing::debug!(error = %e, "overwritten data is kept for the time being");
                }
            });
            drop(trim.await);
            if group.undo_objects() < kept {
                self.trims.set(before + 1);
            }
        }
        self.trims.get() != before
    }
}

impl ActiveChange<'_> {
    /// The change has found no space. Returns the progress when it began: more space can only be
    /// there if there is more progress by now.
    pub(crate) fn found_no_space(mut self) -> u64 {
        self.is_fruitless = true;
        self.seen
    }
}

impl Drop for ActiveChange<'_> {
    fn drop(&mut self) {
        let left = self.space.running.get().checked_sub(1).expect("a change that ends was counted");
        self.space.running.set(left);
        if !self.is_fruitless {
            self.space.progress.set(self.space.progress.get() + 1);
        }
        // Changes that wait must not wake each other by failing again.
        if !self.is_fruitless || left == 0 {
            self.space.changed.notify_waiters();
        }
    }
}
