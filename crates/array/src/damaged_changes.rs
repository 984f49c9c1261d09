//! [`DamagedChanges`]: the changes that cannot be copied to a member, because their data is damaged.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use crate::record::ChangeId;

/// Time that changes must have been damaged before they are given up. A drive or a memory that returns
/// wrong data for a while must not look like damage.
pub(crate) const CERTAIN_AFTER: Duration = Duration::from_secs(30);

/// Number of attempts in a row that must have found the damage. An attempt soon after another one does
/// not count.
pub(crate) const CERTAIN_ATTEMPTS: u32 = 10;

/// Shortest time between two attempts that count.
const APART: Duration = Duration::from_secs(3);

/// Changes whose data could not be read in the last attempts to copy them to a member.
#[derive(Debug, Default)]
pub(crate) struct DamagedChanges(RefCell<Option<FoundDamage>>);

#[derive(Debug)]
struct FoundDamage {
    changes: BTreeSet<ChangeId>,
    since: Instant,
    last_counted: Instant,
    attempts: u32,
}

impl DamagedChanges {
    /// Records that an attempt to copy these changes has found damage. Returns whether the damage is
    /// certain: all attempts of [`CERTAIN_AFTER`], and at least [`CERTAIN_ATTEMPTS`], have found it.
    pub(crate) fn add(&self, changes: &BTreeSet<ChangeId>) -> bool {
        let mut damage = self.0.borrow_mut();
        let now = Instant::now();
        match damage.as_mut().filter(|known| known.changes == *changes) {
            Some(known) if now - known.last_counted >= APART => {
                (known.last_counted, known.attempts) = (now, known.attempts + 1);
                known.attempts >= CERTAIN_ATTEMPTS && now - known.since >= CERTAIN_AFTER
            }
            Some(_) => false,
            None => {
                let changes = changes.clone();
                *damage = Some(FoundDamage { changes, since: now, last_counted: now, attempts: 1 });
                false
            }
        }
    }

    /// Records that an attempt has found no damage.
    pub(crate) fn clear(&self) {
        self.0.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn damage_is_certain_once_all_attempts_of_some_time_have_found_it() {
        let change = |number| BTreeSet::from([ChangeId { term: 1, number }]);
        let damaged = DamagedChanges::default();
        let attempts = async |count: u32| {
            for _ in 0..count {
                tokio::time::advance(CERTAIN_AFTER / CERTAIN_ATTEMPTS).await;
                assert!(!damaged.add(&change(1)));
            }
        };
        attempts(CERTAIN_ATTEMPTS).await;
        damaged.clear();
        attempts(CERTAIN_ATTEMPTS).await;
        assert!(!damaged.add(&change(2)), "other changes");
        attempts(CERTAIN_ATTEMPTS).await;
        tokio::time::advance(CERTAIN_AFTER / CERTAIN_ATTEMPTS).await;
        assert!(damaged.add(&change(1)));
        damaged.clear();
        for _ in 0..2 * CERTAIN_ATTEMPTS {
            assert!(!damaged.add(&change(1)));
        }
        tokio::time::advance(2 * CERTAIN_AFTER).await;
        assert!(!damaged.add(&change(1)), "the first attempts followed each other at once");
    }
}
