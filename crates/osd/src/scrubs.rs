//! [`Scrubs`]: the running and finished scrubs of pools.

use std::cell::RefCell;
use std::collections::BTreeMap;

use array::Findings;
use wire::{Error, ScrubStatus};

/// A scrub of one pool.
#[derive(Debug, Clone, Default)]
struct Scrub {
    running: bool,
    /// Whether the scrub repairs objects of the wrong size.
    repair: bool,
    groups: u32,
    groups_done: u32,
    findings: Findings,
    failure: Option<String>,
}

/// The last scrub of each pool, by the pool's name.
#[derive(Default)]
pub(crate) struct Scrubs(RefCell<BTreeMap<String, Scrub>>);

impl Scrubs {
    /// Records a new scrub of a pool with `groups` placement groups, unless a scrub is running.
    /// Returns whether the caller must run the new scrub.
    ///
    /// # Errors
    /// If `repair` is set and a scrub without repair is running.
    pub(crate) fn begin(&self, pool: &str, groups: u32, repair: bool) -> wire::Result<bool> {
        let mut scrubs = self.0.borrow_mut();
        match scrubs.get(pool).filter(|scrub| scrub.running) {
            Some(under_way) if repair && !under_way.repair => {
                let advice = "a scrub without --repair is running, wait until it ends".into();
                Err(Error::Busy { what: format!("scrubs of pool {pool}"), limit: 1, advice })
            }
            Some(_) => Ok(false),
            None => {
                let scrub = Scrub { running: true, repair, groups, ..Scrub::default() };
                scrubs.insert(pool.to_owned(), scrub);
                Ok(true)
            }
        }
    }

    /// Adds findings of a pool's scrub.
    pub(crate) fn found(&self, pool: &str, found: &Findings) {
        self.with(pool, |scrub| scrub.findings.add(found));
    }

    /// Records that the scrub of a placement group is done.
    pub(crate) fn group_done(&self, pool: &str) {
        self.with(pool, |scrub| scrub.groups_done += 1);
    }

    /// Records that a pool's scrub has ended.
    pub(crate) fn end(&self, pool: &str, failure: Option<String>) {
        self.with(pool, |scrub| {
            scrub.running = false;
            scrub.failure = failure;
        });
    }

    fn with(&self, pool: &str, change: impl FnOnce(&mut Scrub)) {
        if let Some(scrub) = self.0.borrow_mut().get_mut(pool) {
            change(scrub);
        }
    }

    /// Returns the progress of a pool's last scrub.
    pub(crate) fn status(&self, pool: &str) -> ScrubStatus {
        let scrub = self.0.borrow().get(pool).cloned().unwrap_or_default();
        let Findings { objects, bytes, damaged, repaired, inconsistent, wrong_size, resized } =
            scrub.findings;
        let Scrub { running, groups, groups_done, failure, .. } = scrub;
        ScrubStatus {
            running,
            groups,
            groups_done,
            objects,
            bytes,
            damaged,
            repaired,
            inconsistent,
            wrong_size,
            resized,
            failure,
        }
    }
}
