//! The order in which the host hands calls to a store. The order does not depend on whether a call
//! came through the ring or the control socket.

use std::collections::BTreeMap;

/// Holds a call back until the numbered call that it follows was handed to the store. Transactions
/// and queries of objects have numbers, counted from 1: they are handed over in this order. There is
/// one `Admission` per target and attachment.
#[derive(Debug)]
pub(crate) struct Admission<T> {
    /// Number of the last numbered call handed over.
    admitted: u64,
    /// Numbered calls that arrived before their predecessor. The key is the call's number minus one.
    numbered: BTreeMap<u64, T>,
    /// Other calls that arrived before the numbered call that they follow. The key is that call's
    /// number.
    others: BTreeMap<u64, Vec<T>>,
    /// Number of calls held back.
    held: usize,
}

impl<T> Default for Admission<T> {
    fn default() -> Self {
        Admission { admitted: 0, numbered: BTreeMap::new(), others: BTreeMap::new(), held: 0 }
    }
}

impl<T> Admission<T> {
    /// Accepts a call that follows the call with the number `after`. Returns the calls that can now be
    /// handed to the store, in order.
    ///
    /// # Errors
    /// Returns the call if it has a number that was used before.
    pub(crate) fn offer(&mut self, after: u64, is_numbered: bool, call: T) -> Result<Vec<T>, T> {
        if !is_numbered {
            if after <= self.admitted {
                return Ok(vec![call]);
            }
            self.others.entry(after).or_default().push(call);
            self.held += 1;
            return Ok(Vec::new());
        }
        if after < self.admitted || self.numbered.contains_key(&after) {
            return Err(call);
        }
        self.numbered.insert(after, call);
        self.held += 1;
        let mut turn = Vec::new();
        while let Some(numbered) = self.numbered.remove(&self.admitted) {
            turn.push(numbered);
            self.admitted += 1;
            turn.extend(self.others.remove(&self.admitted).unwrap_or_default());
        }
        self.held -= turn.len();
        Ok(turn)
    }

    /// Number of calls held back.
    pub(crate) fn held(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_wait_for_the_numbered_calls_that_they_follow() {
        let mut admission = Admission::default();
        assert_eq!(admission.offer(0, false, "stat 0"), Ok(vec!["stat 0"]));
        assert_eq!(admission.offer(2, false, "stat 2"), Ok(vec![]));
        assert_eq!(admission.offer(1, true, "transaction 2"), Ok(vec![]));
        assert_eq!(admission.offer(1, false, "stat 1"), Ok(vec![]));
        assert_eq!(admission.held(), 3);
        assert_eq!(
            admission.offer(0, true, "transaction 1"),
            Ok(vec!["transaction 1", "stat 1", "transaction 2", "stat 2"])
        );
        assert_eq!(admission.held(), 0);
        assert_eq!(admission.offer(1, true, "again"), Err("again"));
    }
}
