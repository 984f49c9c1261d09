//! Requests with one transaction on each of several targets.
//!
//! Each transaction takes its own place in the order of its target, so a transaction never waits for
//! another target. One answer carries all outcomes. If some targets are slower than the others, the
//! outcomes that are known are answered first.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use base::clock::Instant;
use base::pool::{Lease, Released};
use bytes::Bytes;
use channel::{ChannelError, EntryHeader};
use futures::stream::FuturesUnordered;
use store::{ObjectStore, Result, StoreCalls, StoreError};
use tokio::time::Sleep;

use super::calls::{
    Finished, FinishedCall, ReceivedCall, RunningCall, Via, bad_payload, payload_of, split_transactions,
    verify_transaction,
};
use super::stages::OwnStages;
use crate::messages::{
    CallAnswer, MAX_PARTS, PayloadPlace, StoreCall, TransactionPart, TransactionParts, shorten,
};
use crate::transaction_codec;

/// How long after the first outcome of a request the host waits for the others before it answers.
const SLOW_AFTER: Duration = Duration::from_millis(10);

/// A request whose transactions are being executed.
pub(super) struct JointRequest {
    header: EntryHeader,
    came: Instant,
    via: Via,
    /// Length of the request, in bytes.
    size: usize,
    state: RefCell<JointState>,
}

struct JointState {
    /// Outcomes that were not answered yet.
    outcomes: Vec<Option<Result<()>>>,
    /// Number of outcomes that are not known yet.
    unknown: usize,
    /// Whether every further outcome is answered at once, because some targets are slow.
    is_slow: bool,
    /// Resolves when the stores have released the host memory of the request.
    released: Option<Released>,
    /// Number of transactions that wait for their turn. They keep the whole request in memory.
    held: usize,
}

/// One transaction of a request, which was not executed yet.
pub(super) struct ReceivedTransaction {
    request: Rc<JointRequest>,
    number: usize,
    /// Index of the target.
    pub(super) target: u16,
    /// Number of the transaction on its target, minus 1.
    pub(super) after: u64,
    /// The encoded transaction and the data section of the request, or why the transaction fails.
    encoded: Result<(Bytes, Bytes)>,
    is_unverified: bool,
}

/// The outcome of one transaction of a request.
pub(super) struct FinishedTransaction {
    request: Rc<JointRequest>,
    number: usize,
    outcome: Result<()>,
}

/// Checks the transactions of a request. `targets` is the number of targets.
///
/// # Errors
/// [`ChannelError::Protocol`] if a transaction names no target of the attachment, or if there are too
/// many transactions or encodings.
pub(super) fn check(targets: usize, transactions: &TransactionParts) -> channel::Result<()> {
    let TransactionParts { parts, lengths, .. } = transactions;
    let is_known = parts.iter().all(|part| usize::from(part.target) < targets);
    if is_known && !parts.is_empty() && parts.len() <= MAX_PARTS && lengths.len() <= MAX_PARTS {
        return Ok(());
    }
    let (count, encodings) = (parts.len(), lengths.len());
    let what = format!("it sent {count} transactions with {encodings} encodings, or named an unknown target");
    Err(ChannelError::Protocol(what))
}

/// Divides a request, which was [checked](check), into its transactions. With `refused`, all of them
/// take their places in the order, and then fail with this error.
pub(super) fn receive(
    lease: Option<&Lease>,
    request: ReceivedCall,
    refused: Option<StoreError>,
) -> Vec<ReceivedTransaction> {
    let is_unverified = request.verifies();
    let ReceivedCall { header, came, via, size, call } = request;
    let Ok((StoreCall::Transactions { transactions, place }, rest, data)) = call else {
        return Vec::new();
    };
    let count = transactions.parts.len();
    let mut released = None;
    let split = || {
        refused.map_or(Ok(()), Err)?;
        let (bytes, of_range) = payload_of(lease, place, data)?;
        released = of_range;
        split_transactions(&transactions, place, rest, bytes)
    };
    let parts = split();
    let state = JointState { outcomes: vec![None; count], unknown: count, is_slow: false, released, held: 0 };
    let request = Rc::new(JointRequest { header, came, via, size, state: RefCell::new(state) });
    let is_unverified = is_unverified && place == PayloadPlace::Inline;
    let part = |(number, part): (usize, &TransactionPart)| {
        let encoded = match &parts {
            Ok((controls, data)) => match controls.get(usize::from(part.encoding)) {
                Some(control) => Ok((control.clone(), data.clone())),
                None => Err(StoreError::InvalidArgument("a transaction's encoding is missing".into())),
            },
            Err(e) => Err(e.clone()),
        };
        let (target, after, request) = (part.target, part.after, Rc::clone(&request));
        ReceivedTransaction { request, number, target, after, encoded, is_unverified }
    };
    transactions.parts.iter().enumerate().map(part).collect()
}

impl ReceivedTransaction {
    /// Records that the transaction begins to wait for its turn. Returns the number of bytes that are
    /// held back because of that.
    pub(super) fn hold(&self) -> usize {
        let mut state = self.request.state.borrow_mut();
        state.held += 1;
        if state.held == 1 { self.request.size } else { 0 }
    }

    /// Records that the turn of the transaction has come. Returns the number of bytes that are no
    /// longer held back.
    pub(super) fn let_go(&self) -> usize {
        let mut state = self.request.state.borrow_mut();
        state.held -= 1;
        if state.held == 0 { self.request.size } else { 0 }
    }

    /// Starts the transaction. Its position in the store's order is fixed when this function returns.
    pub(super) fn start(self, store: &Arc<dyn ObjectStore>, stages: &OwnStages) -> RunningCall {
        let ReceivedTransaction { request, number, target, encoded, is_unverified, .. } = self;
        let queued = encoded.and_then(|(control, data)| {
            let transaction = transaction_codec::decode(control, &data)?;
            stages.check_all(target, &transaction)?;
            if is_unverified {
                verify_transaction(&transaction).map_err(bad_payload)?;
            }
            Ok(store.queue_transaction(transaction))
        });
        Box::pin(async move {
            let outcome = match queued {
                Ok(queued) => queued.await,
                Err(e) => Err(e),
            };
            Finished::Transaction(FinishedTransaction { request, number, outcome })
        })
    }
}

impl JointRequest {
    /// The answer with the outcomes that are known and were not answered yet.
    fn answer(&self) -> FinishedCall {
        let mut state = self.state.borrow_mut();
        let outcomes = state.outcomes.iter_mut().map(Option::take).collect();
        let is_first = state.unknown > 0;
        let JointRequest { header, came, via, .. } = *self;
        let outcome = Ok(CallAnswer::Transactions(outcomes));
        FinishedCall { header, came, via, outcome, data: Vec::new(), is_first }
    }

    fn is_complete(&self) -> bool {
        self.state.borrow().unknown == 0
    }
}

/// Requests for which some outcomes are known.
#[derive(Default)]
pub(super) struct JointRequests {
    /// The requests and the times of their first outcomes, oldest first. A request may be complete.
    begun: VecDeque<(Rc<JointRequest>, Instant)>,
    /// Fires when the first request in `begun` is slow.
    timer: Option<Pin<Box<Sleep>>>,
}

impl JointRequests {
    /// Takes an outcome. Returns the answer that must be sent now. If the answer must wait until the
    /// stores have released the host memory of the request, adds it to `running` instead.
    pub(super) fn finish(
        &mut self,
        done: FinishedTransaction,
        running: &FuturesUnordered<RunningCall>,
    ) -> Option<FinishedCall> {
        let FinishedTransaction { request, number, outcome } = done;
        let mut state = request.state.borrow_mut();
        let begins = state.unknown == state.outcomes.len();
        // With short errors, all answers together fit into the space that the osd has reserved.
        state.outcomes[number] = Some(outcome.map_err(shorten));
        state.unknown -= 1;
        let (is_complete, is_slow) = (state.unknown == 0, state.is_slow);
        let released = state.released.take_if(|_| is_complete);
        drop(state);
        if let Some(released) = released {
            running.push(Box::pin(async move {
                released.wait().await;
                Finished::Call(request.answer())
            }));
            return None;
        }
        if is_complete || is_slow {
            return Some(request.answer());
        }
        if begins {
            self.begun.push_back((request, Instant::now()));
        }
        None
    }

    /// Returns the answers of slow requests with the outcomes that are known.
    pub(super) fn slow(&mut self, cx: &mut Context<'_>) -> Vec<FinishedCall> {
        let mut answers = Vec::new();
        loop {
            if let Some(timer) = &mut self.timer
                && timer.as_mut().poll(cx).is_pending()
            {
                return answers;
            }
            self.timer = None;
            let now = Instant::now();
            while let Some((request, since)) = self.begun.front() {
                if !request.is_complete() {
                    if now < *since + SLOW_AFTER {
                        break;
                    }
                    request.state.borrow_mut().is_slow = true;
                    answers.push(request.answer());
                }
                self.begun.pop_front();
            }
            let Some((_, since)) = self.begun.front() else { return answers };
            self.timer = Some(Box::pin(tokio::time::sleep_until(*since + SLOW_AFTER)));
        }
    }
}
