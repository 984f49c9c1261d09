//! [`Terms`]: the terms that a group has seen, and the choice of the next term.

use std::cell::{Cell, RefCell};

use base::clock::WallClock;

use crate::decision::WitnessEntry;
use crate::record::GroupRecord;

/// Minimum increase of the term after an operator has declared members lost. It makes the new term
/// exceed all terms that the lost members may know. The new term is also at least this step times
/// the number of seconds since 1970, so that the most recent declaration wins.
const LOSS_STEP: u64 = 1 << 32;

/// The numbers of a group's terms: the highest one, and what is known about the last term.
pub(crate) struct Terms {
    clock: WallClock,
    /// Highest term that was ever seen or proposed. Each new term is higher.
    highest: Cell<u64>,
    /// The last term of which this process knows that all members in sync have stored its record
    /// as a proposal; `None` before the first interval.
    witness: RefCell<Option<WitnessEntry>>,
}

impl Terms {
    /// Creates the terms of a group that has seen no term. `clock` orders the declarations of
    /// operators.
    pub(crate) fn new(clock: WallClock) -> Terms {
        Terms { clock, highest: Cell::new(0), witness: RefCell::default() }
    }

    /// Highest term seen so far.
    pub(crate) fn highest(&self) -> u64 {
        self.highest.get()
    }

    /// Records a term that a member has stored or that is being proposed.
    pub(crate) fn heard_of(&self, term: u64) {
        self.highest.set(self.highest.get().max(term));
    }

    /// Returns a term above all terms seen so far. `on_word` is true if an operator has declared
    /// members lost; these members may know higher terms.
    pub(crate) fn next(&self, on_word: bool) -> u64 {
        let next = self.highest.get().saturating_add(1);
        if !on_word {
            return next;
        }
        let seconds = self.clock.now_ms() / 1000;
        next.saturating_add(LOSS_STEP).max(seconds.saturating_mul(LOSS_STEP))
    }

    /// The last term that the members in sync know, if there was one.
    pub(crate) fn witness(&self) -> Option<WitnessEntry> {
        self.witness.borrow().clone()
    }

    /// Records that all members in sync have stored a record, at least as a proposal.
    pub(crate) fn testify(&self, record: &GroupRecord) {
        let in_sync = record.in_sync().map(|position| record.members[position].target).collect();
        *self.witness.borrow_mut() = Some(WitnessEntry { term: record.term, in_sync });
        self.heard_of(record.term);
    }
}
