//! [`CallQueues`]: the calls that wait, and the order in which they run.
//!
//! Transactions on one collection run in the order of their arrival. A read or query runs when no
//! transaction that arrived before it on its collection, and that may change its result, is left. It
//! does not wait for other transactions, which may wait for room in the log. A transaction that
//! changes the object of an earlier read or query runs when this call has its metadata.

use std::collections::VecDeque;

use base::collections::HashMap;

use super::core::{CoreCall, Lack, PendingCall};
use super::reads::{LoadingLooks, Look};
use super::view::Loaded;
use crate::CollectionId;

/// The calls that wait.
#[derive(Debug, Default)]
pub(crate) struct CallQueues {
    pending: HashMap<u64, PendingCall>,
    /// The transactions on each collection, in the order of their arrival.
    queues: HashMap<CollectionId, VecDeque<u64>>,
    /// Calls that may be able to run.
    runnable: VecDeque<u64>,
    /// The reads and queries that wait for a transaction, by the transaction's number.
    followers: HashMap<u64, Vec<u64>>,
    looks: LoadingLooks,
    /// Transactions that wait for room in the log, in their order. If the first of them needs more
    /// room than later transactions, the later transactions do not use up the room.
    log_queue: VecDeque<u64>,
    /// Transactions that wait for free blocks or for room in the index.
    starved: Vec<u64>,
}

impl CallQueues {
    /// Number of calls that wait.
    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether calls wait for room in the log.
    pub(crate) fn awaits_log(&self) -> bool {
        !self.log_queue.is_empty()
    }

    /// Whether calls wait for free blocks, or for room in the log or the index.
    pub(crate) fn is_starved(&self) -> bool {
        !self.starved.is_empty() || self.awaits_log()
    }

    /// Returns what was loaded for the calls.
    pub(crate) fn loaded_mut(&mut self) -> impl Iterator<Item = &mut Loaded> {
        self.pending.values_mut().map(|call| &mut call.loaded)
    }

    pub(crate) fn get_mut(&mut self, op: u64) -> Option<&mut PendingCall> {
        self.pending.get_mut(&op)
    }

    /// Adds a call. Its number is higher than those of all calls before it.
    pub(crate) fn add(&mut self, op: u64, mut pending: PendingCall) {
        match &pending.call {
            CoreCall::Transaction(..) => {
                for cid in &pending.collections {
                    self.queues.entry(cid.clone()).or_default().push_back(op);
                }
            }
            CoreCall::Look(cid, look, _) => {
                if let Some(transaction) = self.last_before(cid, look) {
                    self.followers.entry(transaction).or_default().push(op);
                    pending.waits_for = 1;
                    if let Some(oid) = look.oid() {
                        self.looks.insert(op, cid, oid);
                    }
                }
            }
            CoreCall::Collections(_) => {
                for last in self.queues.values().filter_map(VecDeque::back) {
                    self.followers.entry(*last).or_default().push(op);
                    pending.waits_for += 1;
                }
            }
        }
        if pending.waits_for == 0 {
            self.runnable.push_back(op);
        }
        self.pending.insert(op, pending);
    }

    /// Returns the last queued transaction that may change the result of a read or query.
    fn last_before(&self, cid: &CollectionId, look: &Look) -> Option<u64> {
        let oid = look.oid();
        let queue = self.queues.get(cid)?;
        let may_change = |op: &u64| match (self.pending.get(op).map(|call| &call.call), oid) {
            (Some(CoreCall::Transaction(transaction, _)), Some(oid)) => transaction.changes(cid, oid),
            _ => true,
        };
        queue.iter().rev().find(|op| may_change(op)).copied()
    }

    /// Returns the next call that can run, and removes it. The caller executes the call, and then
    /// passes it to one of the methods `wait…` or `finished…`.
    pub(crate) fn next_runnable(&mut self) -> Option<(u64, PendingCall)> {
        while let Some(op) = self.runnable.pop_front() {
            let Some(call) = self.pending.get(&op) else { continue };
            let is_ready = call.loading == 0 && call.waits_for == 0 && call.lacks != Lack::Space;
            if is_ready && self.is_first(op, call) && !self.is_held_up(op, call) {
                return self.pending.remove(&op).map(|call| (op, call));
            }
        }
        None
    }

    /// Whether a call is first in the queues of its collections. Only transactions are queued.
    fn is_first(&self, op: u64, call: &PendingCall) -> bool {
        let is_transaction = matches!(call.call, CoreCall::Transaction(..));
        let first = |cid| self.queues.get(cid).and_then(|queue| queue.front());
        !is_transaction || call.collections.iter().all(|cid| first(cid) == Some(&op))
    }

    /// Whether a transaction must wait for an earlier read or query. It runs again when this call
    /// has its metadata.
    fn is_held_up(&self, op: u64, call: &PendingCall) -> bool {
        match &call.call {
            CoreCall::Transaction(transaction, _) => self.looks.hold_up(op, transaction, &call.collections),
            _ => false,
        }
    }

    /// Makes a call runnable whose data was loaded.
    pub(crate) fn run_again(&mut self, op: u64) {
        self.runnable.push_back(op);
    }

    /// Keeps a call that waits for loads. Transactions that change the object of a read or query
    /// then wait for it.
    pub(crate) fn wait_for_loads(&mut self, op: u64, call: PendingCall) {
        if let CoreCall::Look(cid, look, _) = &call.call
            && let Some(oid) = look.oid()
        {
            self.looks.insert(op, cid, oid);
        }
        self.pending.insert(op, call);
    }

    /// Whether a transaction must wait because earlier ones wait for room in the log.
    pub(crate) fn is_behind_in_log_queue(&self, op: u64) -> bool {
        self.log_queue.front().is_some_and(|first| *first != op)
    }

    /// Keeps a transaction until the log has room for it.
    pub(crate) fn wait_for_log(&mut self, op: u64, mut call: PendingCall) {
        if std::mem::replace(&mut call.lacks, Lack::Log) != Lack::Log {
            self.log_queue.push_back(op);
        }
        self.pending.insert(op, call);
    }

    /// Records that a transaction no longer waits for room in the log.
    pub(crate) fn leave_log_queue(&mut self, op: u64, call: &mut PendingCall) {
        if std::mem::replace(&mut call.lacks, Lack::Nothing) != Lack::Log {
            return;
        }
        if self.log_queue.front() == Some(&op) {
            self.log_queue.pop_front();
        } else {
            self.log_queue.retain(|waiting| *waiting != op);
        }
        self.runnable.extend(self.log_queue.front());
    }

    /// Keeps a transaction until blocks were freed or a checkpoint has ended.
    pub(crate) fn wait_for_space(&mut self, op: u64, mut call: PendingCall) {
        call.lacks = Lack::Space;
        self.starved.push(op);
        self.pending.insert(op, call);
    }

    /// Makes the calls runnable that wait for free blocks or for room in the index.
    pub(crate) fn run_starved(&mut self) {
        self.forget_lack(Lack::Space);
    }

    /// Makes the first call runnable that waits for room in the log.
    pub(crate) fn run_log_queue(&mut self) {
        self.runnable.extend(self.log_queue.front());
    }

    /// Makes all calls runnable that wait for space of any kind.
    pub(crate) fn run_all_starved(&mut self) {
        self.forget_lack(Lack::Log);
        self.forget_lack(Lack::Space);
    }

    fn forget_lack(&mut self, lack: Lack) {
        let calls = match lack {
            Lack::Nothing => return,
            Lack::Log => std::mem::take(&mut self.log_queue).into(),
            Lack::Space => std::mem::take(&mut self.starved),
        };
        for op in calls {
            if let Some(call) = self.pending.get_mut(&op) {
                call.lacks = Lack::Nothing;
            }
            self.runnable.push_back(op);
        }
    }

    /// Records that a read or query on `cid` is no longer waiting.
    pub(crate) fn finished_look(&mut self, op: u64, cid: &CollectionId) {
        if self.looks.remove(op, cid) {
            self.run_first(cid);
        }
    }

    /// Removes a transaction from the queues of its collections. Then makes the calls runnable that
    /// waited for it.
    pub(crate) fn finished_transaction(&mut self, op: u64, collections: &[CollectionId]) {
        for follower in self.followers.remove(&op).unwrap_or_default() {
            if let Some(call) = self.pending.get_mut(&follower) {
                call.waits_for -= 1;
                self.runnable.push_back(follower);
            }
        }
        for cid in collections {
            let first = self.queues.get_mut(cid).and_then(VecDeque::pop_front);
            assert_eq!(first, Some(op), "transactions of {cid} end in their order");
            self.run_first(cid);
        }
    }

    /// Makes the first transaction in the queue of a collection runnable.
    fn run_first(&mut self, cid: &CollectionId) {
        match self.queues.get(cid).map(VecDeque::front) {
            Some(Some(first)) => self.runnable.push_back(*first),
            Some(None) => drop(self.queues.remove(cid)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::channel::oneshot;
    use proptest::prelude::*;

    use super::super::reads::ReadRange;
    use super::*;
    use crate::{MetadataQuery, ObjectId, Op, Transaction};

    /// A call of the property test: a transaction on a collection that changes an object, a
    /// transaction that moves an object to the other collection, a read, a query or a listing.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum TestCall {
        Change(u8, u8),
        Move(u8, u8),
        Read(u8, u8),
        Stat(u8, u8),
        List(u8),
        Collections,
    }

    fn cid(number: u8) -> CollectionId {
        CollectionId::new(vec![number]).unwrap()
    }

    fn oid(number: u8) -> ObjectId {
        ObjectId::new(vec![number]).unwrap()
    }

    impl TestCall {
        fn is_transaction(self) -> bool {
            matches!(self, TestCall::Change(..) | TestCall::Move(..))
        }

        fn collections(self) -> Vec<u8> {
            match self {
                TestCall::Change(c, _) => vec![c],
                TestCall::Move(c, _) => vec![c, 1 - c],
                _ => Vec::new(),
            }
        }

        /// Whether this transaction may change the result of a read, query or listing.
        fn may_change(self, look: TestCall) -> bool {
            let touches = |collection, object| match self {
                TestCall::Change(c, o) => (c, o) == (collection, object),
                TestCall::Move(_, o) => o == object,
                _ => false,
            };
            match look {
                TestCall::Read(c, o) | TestCall::Stat(c, o) => touches(c, o),
                TestCall::List(c) => self.collections().contains(&c),
                _ => self.is_transaction(),
            }
        }

        fn pending(self) -> PendingCall {
            let reply = oneshot::channel().0;
            let call = match self {
                TestCall::Change(c, o) => {
                    CoreCall::Transaction(Transaction::new(cid(c)).with(Op::Touch { oid: oid(o) }), reply)
                }
                TestCall::Move(c, o) => {
                    let to = Op::MoveRename { src: oid(o), dst_collection: cid(1 - c), dst: oid(o) };
                    CoreCall::Transaction(Transaction::new(cid(c)).with(to), reply)
                }
                TestCall::Read(c, o) => {
                    let range = ReadRange { oid: oid(o), offset: 0, len: 1, dest: None };
                    CoreCall::Look(cid(c), Look::Read(range), reply)
                }
                TestCall::Stat(c, o) => {
                    CoreCall::Look(cid(c), Look::Query(MetadataQuery::Stat { oid: oid(o) }), reply)
                }
                TestCall::List(c) => {
                    let query = MetadataQuery::List { from: None, limit: 1 };
                    CoreCall::Look(cid(c), Look::Query(query), reply)
                }
                TestCall::Collections => CoreCall::Collections(reply),
            };
            PendingCall::new(call, self.collections().into_iter().map(cid).collect(), Vec::new())
        }
    }

    fn call() -> impl Strategy<Value = TestCall> {
        (0u8..9, 0u8..2, 0u8..3).prop_map(|(kind, c, o)| match kind {
            0..=2 => TestCall::Change(c, o),
            3 => TestCall::Move(c, o),
            4..=5 => TestCall::Read(c, o),
            6 => TestCall::Stat(c, o),
            7 => TestCall::List(c),
            _ => TestCall::Collections,
        })
    }

    proptest! {
        /// Each call waits some times before it is executed: for loads, for room in the log, or for
        /// free blocks. Then the order of execution must be right, and no call may be forgotten.
        #[test]
        fn calls_run_in_an_order_that_their_results_permit(
            calls in proptest::collection::vec((call(), 0u8..4, 0u8..4), 1..40),
            batch in 1usize..10,
        ) {
            let mut queues = CallQueues::default();
            let mut waits: Vec<u8> = calls.iter().map(|(_, waits, _)| *waits).collect();
            let mut loads = VecDeque::new();
            let mut order = Vec::new();
            let mut added = 0;
            let mut rounds = 0;
            while order.len() < calls.len() {
                rounds += 1;
                prop_assert!(rounds < 1000, "{queues:?}");
                for (number, (call, ..)) in calls.iter().enumerate().skip(added).take(batch) {
                    queues.add(number as u64, call.pending());
                }
                added = calls.len().min(added + batch);
                let executed = order.len();
                while let Some((op, mut pending)) = queues.next_runnable() {
                    let (call, _, way) = calls[op as usize];
                    let must_wait = waits[op as usize] > 0;
                    waits[op as usize] -= u8::from(must_wait);
                    if let CoreCall::Look(cid, ..) = &pending.call {
                        queues.finished_look(op, cid);
                    }
                    let is_behind = queues.is_behind_in_log_queue(op);
                    match way {
                        _ if call.is_transaction() && is_behind => queues.wait_for_log(op, pending),
                        0..=1 if must_wait && call != TestCall::Collections => {
                            queues.leave_log_queue(op, &mut pending);
                            pending.loading = 1;
                            queues.wait_for_loads(op, pending);
                            loads.push_back(op);
                        }
                        2 if must_wait && call.is_transaction() => queues.wait_for_log(op, pending),
                        3 if must_wait && call.is_transaction() => {
                            queues.leave_log_queue(op, &mut pending);
                            queues.wait_for_space(op, pending);
                        }
                        _ => {
                            queues.leave_log_queue(op, &mut pending);
                            if call.is_transaction() {
                                queues.finished_transaction(op, &pending.collections);
                            }
                            order.push(op as usize);
                        }
                    }
                }
                let is_stuck = loads.is_empty() && !queues.is_starved() && added == calls.len();
                prop_assert!(order.len() > executed || !is_stuck || order.len() == calls.len(), "{queues:?}");
                if let Some(op) = loads.pop_front() {
                    queues.get_mut(op).unwrap().loading = 0;
                    queues.run_again(op);
                }
                queues.run_starved();
                queues.run_log_queue();
            }
            prop_assert!(queues.is_empty() && queues.queues.is_empty() && queues.followers.is_empty());
            prop_assert!(queues.looks.is_empty() && !queues.is_starved(), "{queues:?}");
            for (at, later) in order.iter().enumerate() {
                for earlier in order[at..].iter().filter(|earlier| *earlier < later) {
                    // Call `later` has overtaken call `earlier`.
                    let (first, second) = (calls[*earlier].0, calls[*later].0);
                    let share = first.collections().iter().any(|c| second.collections().contains(c));
                    prop_assert!(!share, "transaction {} before {}", later, earlier);
                    prop_assert!(!first.is_transaction() || second.is_transaction() || !first.may_change(second));
                    let is_look = matches!(first, TestCall::Read(..) | TestCall::Stat(..));
                    prop_assert!(!is_look || !second.is_transaction() || !second.may_change(first));
                }
            }
        }
    }

    #[test]
    fn a_transaction_that_needs_much_room_in_the_log_is_not_overtaken() {
        let mut queues = CallQueues::default();
        (1..4).for_each(|op| queues.add(op, TestCall::Change((op % 2) as u8, 0).pending()));
        let (op, call) = queues.next_runnable().unwrap();
        queues.wait_for_log(op, call);
        let (second, call) = queues.next_runnable().unwrap();
        assert!(
            (op, second) == (1, 2) && queues.is_behind_in_log_queue(2) && !queues.is_behind_in_log_queue(1)
        );
        queues.wait_for_log(second, call);
        assert!(queues.next_runnable().is_none() && queues.awaits_log());
        queues.run_log_queue();
        let (op, mut call) = queues.next_runnable().unwrap();
        assert!(op == 1 && queues.next_runnable().is_none(), "only the first is tried again");
        queues.leave_log_queue(op, &mut call);
        queues.finished_transaction(op, &call.collections);
        let next = [queues.next_runnable(), queues.next_runnable()].map(|next| next.map(|(op, _)| op));
        assert!(next.contains(&Some(2)) && next.contains(&Some(3)), "{next:?}");
    }
}
