//! [`Scrubs`]: the running and finished scrubs of pools, on one shard.

use std::cell::RefCell;
use std::collections::BTreeMap;

use array::Findings;
use wire::ScrubStatus;

/// What a scrub does about objects of the wrong size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ScrubKind {
    /// The scrub only reports them.
    #[default]
    Check,
    /// The scrub repairs them if it can.
    Repair,
}

/// A scrub of the shard's share of one pool.
#[derive(Debug, Clone, Default)]
struct Scrub {
    running: bool,
    kind: ScrubKind,
    groups: u32,
    groups_done: u32,
    findings: Findings,
    failure: Option<String>,
}

/// The last scrub of each pool, by the pool's label.
#[derive(Default)]
pub(crate) struct Scrubs(RefCell<BTreeMap<String, Scrub>>);

impl Scrubs {
    /// Returns the kind of the running scrub of a pool; `None` if none is running.
    pub(crate) fn running(&self, pool: &str) -> Option<ScrubKind> {
        self.0.borrow().get(pool).filter(|scrub| scrub.running).map(|scrub| scrub.kind)
    }

    /// Records a new scrub of a pool with `groups` placement groups, unless a scrub is running.
    /// Returns whether the caller must run the new scrub.
    pub(crate) fn begin(&self, pool: &str, groups: u32, kind: ScrubKind) -> bool {
        let starts = self.running(pool).is_none();
        if starts {
            let scrub = Scrub { running: true, kind, groups, ..Scrub::default() };
            self.0.borrow_mut().insert(pool.to_owned(), scrub);
        }
        starts
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
