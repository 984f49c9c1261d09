//! [`ChangeChain`]: the changes of one object that are queued and not durable yet.
//!
//! Each change of an object is computed from the state that the object has once all earlier changes
//! of the chain are durable. The change's transaction contains a guard on that state
//! ([`store::Op::GuardXattr`]). If a change fails, the store therefore refuses all later changes of
//! the chain: they are *withdrawn*, and must be computed again.
//!
//! ```text
//!   durable state ── change 7 ── change 8 ── change 9      latest state: after change 9
//!                    └──────── pending ────────┘
//! ```
//!
//! A reader may see the state after any change of the chain, but must not show it before that
//! change is durable. A read whose range no pending change modifies sees the durable state, and
//! waits for nothing.
//!
//! This module is pure: it does not wait and has no wakers. `turnstile` adds both.

use std::collections::VecDeque;
use std::ops::Range;

use base::block;
use store::{ObjectId, Op};

use crate::object::ObjectInfo;

/// The bytes of an object that a change may modify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModifiedRange {
    /// No bytes: the change modifies only metadata.
    Nothing,
    /// Bytes of this range. A change that makes the object longer modifies all bytes after the old
    /// end.
    Bytes(Range<u64>),
    /// Any bytes, or the existence of the object.
    All,
}

impl ModifiedRange {
    /// Returns the bytes that the ops of a transaction modify of the object `oid`, whose state
    /// before the transaction is `before` and after it is `after`; `None` if the object does not
    /// exist.
    pub(crate) fn of(
        oid: &ObjectId,
        ops: &[Op],
        before: Option<&ObjectInfo>,
        after: Option<&ObjectInfo>,
    ) -> ModifiedRange {
        let (Some(before), Some(after)) = (before, after) else { return ModifiedRange::All };
        if before.manifest != after.manifest {
            return ModifiedRange::All;
        }
        let mut modified: Option<Range<u64>> = None;
        for op in ops {
            let (changed, range) = match op {
                Op::Write { oid, offset, source } => (oid, *offset..offset + source.len()),
                Op::Zero { oid, offset, len } => (oid, *offset..offset + len),
                Op::Truncate { oid, size } if *size >= before.size => (oid, before.size..*size),
                Op::Truncate { oid, .. } | Op::Remove { oid } => (oid, 0..u64::MAX),
                _ => continue,
            };
            if changed == oid {
                let known = modified.get_or_insert(range.clone());
                *known = known.start.min(range.start)..known.end.max(range.end);
            }
        }
        match modified {
            Some(all) if all == (0..u64::MAX) => ModifiedRange::All,
            Some(range) if range.end > before.size => {
                ModifiedRange::Bytes(block::align_down(range.start.min(before.size))..u64::MAX)
            }
            Some(range) if range.start < range.end => {
                let end = block::align_up(range.end).unwrap_or(u64::MAX);
                ModifiedRange::Bytes(block::align_down(range.start)..end)
            }
            _ => ModifiedRange::Nothing,
        }
    }

    /// Whether the change may modify bytes of `range`. An empty range counts as one byte.
    fn overlaps(&self, range: &Range<u64>) -> bool {
        match self {
            ModifiedRange::Nothing => false,
            ModifiedRange::Bytes(modified) => {
                modified.start < range.end.max(range.start.saturating_add(1)) && range.start < modified.end
            }
            ModifiedRange::All => true,
        }
    }
}

/// Number of a change in its chain. Later changes have higher numbers. 0 stands for the durable
/// state before the first change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ChainPosition(u64);

/// A change that is queued and not durable yet.
#[derive(Debug)]
struct ChainLink {
    position: ChainPosition,
    /// Incarnation of the store in which the change was queued.
    incarnation: u64,
    epoch: u64,
    modified: ModifiedRange,
    /// State of the object after the change; `None` if the change removes the object.
    after: Option<ObjectInfo>,
}

/// The pending changes of one object, and the state before them.
#[derive(Debug, Default)]
pub(crate) struct ChangeChain {
    /// The object's durable state, and the incarnation in which it was learnt. `None` if the state
    /// is unknown. The inner `None` means that the object does not exist.
    durable: Option<(u64, Option<ObjectInfo>)>,
    pending: VecDeque<ChainLink>,
    /// Position of the last change that was queued.
    last: ChainPosition,
    /// Position of the first change that has failed since the last change was queued.
    first_failed: Option<ChainPosition>,
    /// Number of changes that have failed. All pending changes of an earlier epoch will fail.
    epoch: u64,
}

impl ChangeChain {
    /// Whether no change is pending.
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Number of changes that have failed.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether a pending change was queued in another incarnation, or will fail because an earlier
    /// change has failed. No change may be computed until this is no longer so.
    pub(crate) fn is_broken(&self, incarnation: u64) -> bool {
        // `push` makes sure that all later changes agree with the first one.
        self.pending
            .front()
            .is_some_and(|first| first.incarnation != incarnation || first.epoch != self.epoch)
    }

    /// Returns the state that the object has once all pending changes are durable, if it is known
    /// in this incarnation. The inner `None` means that the object does not exist.
    pub(crate) fn latest(&self, incarnation: u64) -> Option<Option<ObjectInfo>> {
        let known = match self.pending.back() {
            Some(link) if link.epoch == self.epoch => Some((link.incarnation, link.after)),
            Some(_) => None,
            None => self.durable,
        };
        Self::current(known, incarnation)
    }

    /// Returns the oldest state of which a read of `range` sees the same bytes as of the latest
    /// state, and the position of the change that made it. If a later state has the version
    /// `wanted`, returns this state. The read must not show the state before the change at this
    /// position is durable. Returns `None` if the state is not known in this incarnation.
    pub(crate) fn visible(
        &self,
        incarnation: u64,
        range: &Range<u64>,
        wanted: Option<u64>,
    ) -> Option<(Option<ObjectInfo>, ChainPosition)> {
        let has_version = |link: &&ChainLink| wanted.is_some() && link.after.map(|i| i.version) == wanted;
        let overlapping = self.pending.iter().rposition(|link| link.modified.overlaps(range));
        let later = self.pending.range(overlapping.map_or(0, |index| index + 1)..);
        let seen = later.rev().find(has_version).or_else(|| self.pending.get(overlapping?));
        let (known, position) = match seen {
            Some(link) => (Some((link.incarnation, link.after)), link.position),
            None => (self.durable, ChainPosition::default()),
        };
        Self::current(known, incarnation).map(|info| (info, position))
    }

    fn current(known: Option<(u64, Option<ObjectInfo>)>, incarnation: u64) -> Option<Option<ObjectInfo>> {
        let is_current = |learnt| learnt == incarnation || base::mutant!(KeepCacheAtFailover);
        known.filter(|(learnt, _)| is_current(*learnt)).map(|(_, info)| info)
    }

    /// Position of the change that made the latest state.
    pub(crate) fn position(&self) -> ChainPosition {
        self.pending.back().map(|link| link.position).unwrap_or_default()
    }

    /// Records the state of the object in the store. No change may be pending.
    pub(crate) fn learn(&mut self, incarnation: u64, info: Option<ObjectInfo>) {
        assert!(self.pending.is_empty(), "a state that was read is durable only if no change is pending");
        self.durable = Some((incarnation, info));
    }

    /// Adds a change that was queued in `incarnation` and makes the state `after`.
    pub(crate) fn push(
        &mut self,
        incarnation: u64,
        modified: ModifiedRange,
        after: Option<ObjectInfo>,
    ) -> ChainPosition {
        assert!(!self.is_broken(incarnation), "a change was computed from changes that will fail");
        let position = ChainPosition(self.last.0 + 1);
        self.last = position;
        // The changes that depended on a failed change are no longer pending.
        self.first_failed = None;
        let epoch = self.epoch;
        self.pending.push_back(ChainLink { position, incarnation, epoch, modified, after });
        position
    }

    /// Records that a pending change is durable. All earlier changes are durable, too, because
    /// otherwise its guard would have failed; their outcomes may become known later.
    pub(crate) fn committed(&mut self, position: ChainPosition) {
        let Some(index) = self.index(position) else { return };
        if let Some(link) = self.pending.drain(..=index).next_back()
            && link.epoch == self.epoch
        {
            self.durable = Some((link.incarnation, link.after));
        }
    }

    /// Records that a pending change has failed, or that its outcome is unknown. The state of the
    /// object must be read again once no change is pending. Returns false if the change is known to
    /// be durable, because a later one is.
    pub(crate) fn failed(&mut self, position: ChainPosition) -> bool {
        let Some(link) = self.index(position).and_then(|index| self.pending.remove(index)) else {
            return false;
        };
        self.epoch += 1;
        self.first_failed = Some(self.first_failed.map_or(position, |first| first.min(position)));
        self.durable = base::mutant!(KeepCacheAtFailover).then_some((link.incarnation, link.after));
        true
    }

    /// Whether an earlier change has failed from which the pending change at `position` was
    /// computed.
    pub(crate) fn has_failed_base(&self, position: ChainPosition) -> bool {
        self.first_failed.is_some_and(|first| first < position)
    }

    /// Position of the pending change before the one at `position`.
    pub(crate) fn before(&self, position: ChainPosition) -> ChainPosition {
        let before = self.pending.iter().rev().find(|link| link.position < position);
        before.map(|link| link.position).unwrap_or_default()
    }

    fn index(&self, position: ChainPosition) -> Option<usize> {
        self.pending.binary_search_by_key(&position, |link| link.position).ok()
    }
}

#[cfg(test)]
mod tests {
    use base::block::{BLOCK, Payload};
    use proptest::prelude::*;
    use store::WriteSource;

    use super::*;

    fn info(version: u64, size: u64) -> ObjectInfo {
        ObjectInfo { version, size, modified_ms: 0, manifest: None }
    }

    fn oid() -> ObjectId {
        ObjectId::new("o").unwrap()
    }

    fn write(offset: u64, len: u64) -> Op {
        let payload = Payload::compute(offset, vec![0; len as usize].into());
        Op::Write { oid: oid(), offset, source: WriteSource::Inline(payload) }
    }

    #[test]
    fn the_modified_range_of_a_transaction_covers_all_bytes_that_it_may_modify() {
        let of = |ops: &[Op], before: u64, after: u64| {
            ModifiedRange::of(&oid(), ops, Some(&info(1, before)), Some(&info(2, after)))
        };
        let (size, b) = (100 * BLOCK, BLOCK);
        assert_eq!(of(&[], size, size), ModifiedRange::Nothing);
        assert_eq!(of(&[write(b, b)], size, size), ModifiedRange::Bytes(b..2 * b));
        assert_eq!(of(&[write(b, b), write(5 * b, b)], size, size), ModifiedRange::Bytes(b..6 * b));
        let zero = Op::Zero { oid: oid(), offset: b, len: 2 * b };
        assert_eq!(of(&[zero], size, size), ModifiedRange::Bytes(b..3 * b));
        assert_eq!(
            of(&[write(size, 10)], size, size + 10),
            ModifiedRange::Bytes(size..u64::MAX),
            "an append"
        );
        assert_eq!(of(&[write(2 * b, 10)], 100, 2 * b + 10), ModifiedRange::Bytes(0..u64::MAX), "a gap");
        let grow = Op::Truncate { oid: oid(), size: size + b };
        assert_eq!(of(&[grow], size, size + b), ModifiedRange::Bytes(size..u64::MAX));
        let cut = Op::Truncate { oid: oid(), size: 0 };
        assert_eq!(of(&[cut, write(0, size)], size, size), ModifiedRange::All, "a replacement");
        let other = ObjectId::new("other").unwrap();
        assert_eq!(of(&[Op::Remove { oid: other }], size, size), ModifiedRange::Nothing);
        let touch = [Op::Touch { oid: oid() }];
        assert_eq!(
            ModifiedRange::of(&oid(), &touch, None, Some(&info(2, 0))),
            ModifiedRange::All,
            "a creation"
        );
    }

    #[test]
    fn a_read_sees_the_durable_state_unless_a_pending_change_overlaps_its_range() {
        let mut chain = ChangeChain::default();
        chain.learn(1, Some(info(1, 1000)));
        let first = chain.push(1, ModifiedRange::Bytes(0..100), Some(info(2, 1000)));
        let second = chain.push(1, ModifiedRange::Bytes(200..300), Some(info(3, 1000)));
        chain.push(1, ModifiedRange::Nothing, Some(info(4, 1000)));
        let visible = |chain: &ChangeChain, range: Range<u64>, wanted| {
            let (info, position) = chain.visible(1, &range, wanted).unwrap();
            (info.unwrap().version, position)
        };
        let durable = ChainPosition::default();
        assert_eq!(visible(&chain, 100..200, None), (1, durable));
        assert_eq!(visible(&chain, 0..200, None), (2, first));
        assert_eq!(visible(&chain, 0..201, None), (3, second));
        assert_eq!(visible(&chain, 100..200, Some(3)), (3, second), "a later segment of a longer read");
        assert_eq!(visible(&chain, 0..300, Some(2)), (3, second), "version 2 has other bytes");
        assert_eq!(visible(&chain, 99..99, None), (2, first), "an empty range counts as one byte");
        assert_eq!(chain.visible(2, &(0..1), None), None);
        chain.committed(first);
        assert_eq!(visible(&chain, 0..200, None), (2, durable));
    }

    #[test]
    fn a_change_that_is_durable_makes_all_earlier_ones_durable() {
        let mut chain = ChangeChain::default();
        chain.learn(1, Some(info(1, 0)));
        let first = chain.push(1, ModifiedRange::All, Some(info(2, 0)));
        let second = chain.push(1, ModifiedRange::All, Some(info(3, 0)));
        chain.committed(second);
        assert!(chain.is_empty() && chain.latest(1) == Some(Some(info(3, 0))));
        assert!(!chain.failed(first), "its outcome was only unknown");
        assert_eq!(chain.latest(1), Some(Some(info(3, 0))));
    }

    #[test]
    fn a_change_has_a_failed_base_only_if_an_earlier_change_has_failed() {
        let mut chain = ChangeChain::default();
        chain.learn(1, Some(info(1, 0)));
        let [first, second, third] =
            [2, 3, 4].map(|version| chain.push(1, ModifiedRange::All, Some(info(version, 0))));
        assert!(!chain.has_failed_base(third));
        chain.failed(second);
        assert!(!chain.has_failed_base(first) && chain.has_failed_base(third));
        chain.committed(first);
        chain.failed(third);
        chain.learn(1, Some(info(2, 0)));
        let next = chain.push(1, ModifiedRange::All, Some(info(5, 0)));
        assert!(!chain.has_failed_base(next));
    }

    /// A store that executes transactions in order. A transaction is refused if its guard does not
    /// hold.
    #[derive(Default)]
    struct TestStore {
        version: u64,
        /// The queued transactions: position, guard, version that it writes, whether the store
        /// refuses it for another reason.
        queue: VecDeque<(ChainPosition, Option<u64>, u64, bool)>,
    }

    proptest! {
        /// Changes are queued, refused and committed in any order that a store permits.
        #[test]
        fn no_change_is_executed_on_another_state_than_it_was_computed_from(
            steps in proptest::collection::vec((0u8..4, any::<bool>()), 1..200),
        ) {
            let mut chain = ChangeChain::default();
            let mut store = TestStore::default();
            let mut outcomes = VecDeque::new();
            let mut next = 0;
            let mut committed = vec![0];
            let mut conclude = |chain: &mut ChangeChain, (position, outcome): (ChainPosition, Option<u64>)| {
                match outcome {
                    Some(version) => { committed.push(version); chain.committed(position) }
                    None => _ = chain.failed(position),
                }
            };
            for (step, fails) in steps {
                match step {
                    // Computes and queues a change.
                    0 | 1 if !chain.is_broken(1) => {
                        let latest = match chain.latest(1) {
                            Some(latest) => latest,
                            None => {
                                // The store's answer shows all queued transactions.
                                prop_assert!(store.queue.is_empty());
                                chain.learn(1, Some(info(store.version, 0)));
                                chain.latest(1).unwrap()
                            }
                        };
                        let base = latest.unwrap().version;
                        let guard = (!chain.is_empty()).then_some(base);
                        next += 1;
                        let position = chain.push(1, ModifiedRange::All, Some(info(next, 0)));
                        store.queue.push_back((position, guard, next, fails));
                        prop_assert_eq!(chain.latest(1).unwrap().unwrap().version, next);
                        prop_assert_eq!(chain.position(), position);
                    }
                    // The store executes the next transaction.
                    2 => {
                        let Some((position, guard, version, fails)) = store.queue.pop_front() else { continue };
                        let is_refused = fails || guard.is_some_and(|guard| guard != store.version);
                        if !is_refused {
                            store.version = version;
                        }
                        outcomes.push_back((position, (!is_refused).then_some(version)));
                    }
                    // The osd learns an outcome, not always in the order of the changes.
                    _ => {
                        let outcome = if fails { outcomes.pop_back() } else { outcomes.pop_front() };
                        outcome.into_iter().for_each(|outcome| conclude(&mut chain, outcome));
                    }
                }
                let is_broken = chain.is_broken(1);
                if let Some(Some(latest)) = chain.latest(1) && chain.is_empty() && !is_broken {
                    prop_assert_eq!(latest.version, store.version);
                }
            }
            outcomes.into_iter().for_each(|outcome| conclude(&mut chain, outcome));
            prop_assert_eq!(committed.into_iter().max(), Some(store.version));
        }
    }
}
