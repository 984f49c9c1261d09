//! Lets changes wait for space that other changes are about to free.
//!
//! A change that replaces data needs space for the new data before the old data is freed. A group
//! with redundancy keeps the data that a transaction overwrites until a later transaction trims
//! (frees) this data. A change that finds no space therefore makes the groups trim, and then waits
//! while other changes run. Waiting changes do not count as running. If all changes wait, all of
//! them fail.

use std::cell::Cell;
use std::rc::Rc;

use array::Group;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;

use crate::task::spawn;

/// Counter of the running changes, which may free space when they end.
#[derive(Default)]
pub(crate) struct SpaceReclaim {
    running: Cell<u32>,
    /// Number of changes that have ended, except changes that found no space. Each of these changes
    /// may have freed space.
    progress: Cell<u64>,
    /// Notified when `progress` grows, and when no change is running any more.
    changed: Notify,
    /// Lock that is held while groups trim.
    trimming: Mutex<()>,
    /// Number of trims that freed space.
    trims: Cell<u64>,
}

/// A running change. Dropping it ends the change.
pub(crate) struct ActiveChange<'a> {
    space: &'a SpaceReclaim,
    /// Value of `progress` when the change began.
    seen: u64,
    is_fruitless: bool,
}

impl SpaceReclaim {
    /// Records that a change starts or continues.
    pub(crate) fn enter(&self) -> ActiveChange<'_> {
        self.running.set(self.running.get() + 1);
        ActiveChange { space: self, seen: self.progress.get(), is_fruitless: false }
    }

    /// Waits for space after a change found none. `seen` is the value of `progress` when that
    /// change began. Returns `true` once other changes or trims may have freed space. Returns
    /// `false` if no change is running that could free space, or if no space was freed by `until`.
    /// `trim` makes the groups of all shards trim overwritten data, and returns whether any group
    /// freed data.
    pub(crate) async fn may_come(&self, seen: u64, until: Instant, trim: impl Future<Output = bool>) -> bool {
        if Instant::now() >= until {
            return false;
        }
        // A group that waits for a member may take long to trim.
        match tokio::time::timeout_at(until, trim).await {
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

    /// Returns whether any change is running.
    pub(crate) fn is_active(&self) -> bool {
        self.running.get() > 0
    }

    /// Makes the groups trim overwritten data. Returns whether any group freed data.
    pub(crate) async fn trim(&self, groups: impl Fn() -> Vec<Rc<Group>>) -> bool {
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
            // The trim continues in its own task if the waiting change gives up.
            let trimmed = Rc::clone(&group);
            let trim = spawn(async move {
                if let Err(e) = trimmed.trim().await {
                    tracing::debug!(error = %e, "overwritten data could not be freed and is kept");
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
    /// Records that the change has found no space. Returns the value of `progress` when the change
    /// began. More space can be free only if `progress` has grown since then.
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
        // A waiting change that fails again must not wake the other waiting changes.
        if !self.is_fruitless || left == 0 {
            self.space.changed.notify_waiters();
        }
    }
}
