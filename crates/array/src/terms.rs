//! [`Terms`]: the terms that a group has seen, and the choice of the next term.

use std::cell::Cell;
use std::rc::Rc;

use base::clock::WallClock;

use crate::decision::WitnessEntry;
use crate::record::GroupRecord;
use crate::witness::Witness;

/// Minimum increase of the term after an operator has accepted the loss of members. It makes the new term
/// exceed all terms that the lost members may know. The new term is also at least this step times
/// the number of seconds since 1970, so that the most recent declaration wins.
pub(crate) const LOSS_STEP: u64 = 1 << 32;

/// The numbers of a group's terms: the highest one, and what the witness knows.
pub(crate) struct Terms {
    clock: WallClock,
    /// Highest term that was ever seen or proposed. Each new term is higher.
    highest: Cell<u64>,
    witness: Rc<dyn Witness>,
    /// The group's place, by which the witness knows it.
    place: (u32, u32),
}

impl Terms {
    /// Creates the terms of a group that has seen no term. `clock` orders the declarations of
    /// operators.
    pub(crate) fn new(clock: WallClock, witness: Rc<dyn Witness>, place: (u32, u32)) -> Terms {
        Terms { clock, highest: Cell::new(0), witness, place }
    }

    /// Highest term seen so far.
    pub(crate) fn highest(&self) -> u64 {
        self.highest.get()
    }

    /// Records a term that a member has stored or that is being proposed.
    pub(crate) fn heard_of(&self, term: u64) {
        self.highest.set(self.highest.get().max(term));
    }

    /// Returns a term above all terms seen so far. `on_word` is true if an operator has accepted
    /// the loss of members; these members may know higher terms.
    pub(crate) fn next(&self, on_word: bool) -> u64 {
        let next = self.highest.get().saturating_add(1);
        if !on_word {
            return next;
        }
        let seconds = self.clock.now_ms() / 1000;
        next.saturating_add(LOSS_STEP).max(seconds.saturating_mul(LOSS_STEP))
    }

    /// What the witness knows about the group.
    pub(crate) fn witness(&self) -> Option<WitnessEntry> {
        self.witness.entry(self.place)
    }

    /// Tells the witness that all members in sync have stored a record, at least as a proposal.
    /// Waits until the witness has stored this.
    ///
    /// # Errors
    /// [`StoreError::Disconnected`](store::StoreError::Disconnected) if the witness cannot store it.
    pub(crate) async fn testify(&self, record: &GroupRecord) -> store::Result<()> {
        self.heard_of(record.term);
        let in_sync = record.in_sync().map(|position| record.members[position].target).collect();
        self.witness.store(self.place, WitnessEntry { term: record.term, in_sync }).await
    }
}
