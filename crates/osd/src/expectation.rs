//! [`Expectation`]: a predictor of yes-or-no outcomes.

use std::cell::Cell;

/// Predicts whether the next outcome is yes (two-bit saturating counter, as in a branch predictor).
/// The first prediction is yes.
pub(crate) struct Expectation(Cell<u8>);

impl Default for Expectation {
    fn default() -> Expectation {
        Expectation(Cell::new(3))
    }
}

impl Expectation {
    /// Predicts the next outcome.
    pub(crate) fn guess(&self) -> bool {
        self.0.get() >= 2
    }

    /// Records an outcome.
    pub(crate) fn learn(&self, outcome: bool) {
        let count = self.0.get();
        self.0.set(if outcome { (count + 1).min(3) } else { count.saturating_sub(1) });
    }
}
