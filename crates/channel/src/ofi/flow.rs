//! The chains of one queue that were started and are not finished, in posting order.

use std::collections::VecDeque;

use base::clock::Instant;

use super::faults::Fate;
use crate::dma::{ChainFailure, PeerId};
use crate::{Chain, ChainCompletion, Transfer};
use fabric::MemoryRegion;

/// A chain that is in progress.
pub(super) struct ActiveChain {
    pub(super) chain: Chain,
    /// The peer of the chain's transfers and doorbell.
    pub(super) peer: Option<PeerId>,
    posted: Vec<PostedTransfer>,
    /// Whether the chain's doorbell, if any, was rung.
    pub(super) rung: bool,
    started: Option<Instant>,
    /// The writes that must be confirmed before the chain is complete: for each peer, all writes up
    /// to a number.
    pub(super) awaits: Vec<(PeerId, u64)>,
    failure: Option<String>,
    /// The effect of injected faults on the next transfer; `None` if it was not decided yet.
    pub(super) fate: Option<Fate>,
    /// Damaged copies of data, which the chain sends if a fault corrupts its writes.
    pub(super) copies: Vec<MemoryRegion>,
    /// Set when the connection to the chain's peer is lost: the number of transfers that were
    /// complete. The chain then waits for no other completion.
    abandoned: Option<usize>,
}

/// A posted transfer. `number` is its operation number on the connection.
struct PostedTransfer {
    number: u64,
    read: bool,
    complete: bool,
    /// Whether an injected fault damages the transfer's data.
    corrupt: bool,
}

impl ActiveChain {
    pub(super) fn new(chain: Chain) -> ActiveChain {
        ActiveChain {
            chain,
            peer: None,
            posted: Vec::new(),
            rung: false,
            started: None,
            awaits: Vec::new(),
            fate: None,
            copies: Vec::new(),
            failure: None,
            abandoned: None,
        }
    }

    /// The next transfer to post.
    pub(super) fn next(&self) -> Option<Transfer> {
        self.chain.transfers.get(self.posted.len()).copied()
    }

    /// Whether the chain's transfers and doorbell were posted, or the chain has failed.
    pub(super) fn is_posted(&self) -> bool {
        self.failure.is_some() || self.next().is_none() && (self.rung || self.chain.ring.is_none())
    }

    pub(super) fn has_posted(&mut self, number: u64, read: bool) {
        self.started.get_or_insert_with(Instant::now);
        let corrupt = self.fate.take() == Some(Fate::Corrupts);
        self.posted.push(PostedTransfer { number, read, complete: false, corrupt });
    }

    /// Handles the completion of a transfer. Returns whether an injected fault must damage the data
    /// that the transfer has read.
    pub(super) fn complete(&mut self, number: u64) -> bool {
        let Some(op) = self.posted.iter_mut().find(|op| op.number == number) else { return false };
        op.complete = true;
        op.corrupt && op.read
    }

    /// The time until which a fault delays the chain.
    pub(super) fn stalled(&self) -> Option<Instant> {
        match self.fate {
            Some(Fate::Stalls(until)) if self.failure.is_none() => Some(until),
            _ => None,
        }
    }

    /// Whether all reads in the chain have completed.
    pub(super) fn has_read(&self) -> bool {
        self.posted.iter().all(|op| op.complete || !op.read)
    }

    /// Whether all posted transfers have completed on this side, or the chain was abandoned.
    pub(super) fn is_complete(&self) -> bool {
        self.abandoned.is_some() || self.posted.iter().all(|op| op.complete)
    }

    /// Marks the chain as failed. Its remaining transfers are not posted.
    pub(super) fn fail(&mut self, why: &str) {
        self.failure.get_or_insert_with(|| why.to_owned());
    }

    /// Fails the chain because the connection to its peer was lost. The peer had confirmed writes
    /// up to `confirmed`.
    pub(super) fn abandon(&mut self, why: &str, confirmed: u64) {
        self.fail(why);
        if self.abandoned.is_none() {
            self.abandoned = Some(self.done(confirmed));
        }
        self.awaits.clear();
    }

    /// Number of transfers, from the start of the chain, that are complete on both sides.
    fn done(&self, confirmed: u64) -> usize {
        let done = |op: &&PostedTransfer| if op.read { op.complete } else { op.number <= confirmed };
        self.posted.iter().take_while(done).count()
    }

    /// Returns the chain's completion, or `None` if a chain without a tag was successful. The
    /// chain's writes must be confirmed, or the chain abandoned.
    pub(super) fn finish(self) -> Option<ChainCompletion> {
        let finished = Instant::now();
        let done = self.abandoned.unwrap_or(self.posted.len());
        let result = self.failure.map_or(Ok(()), |why| Err(ChainFailure { done, why }));
        if self.chain.tag.is_none() && result.is_ok() {
            return None;
        }
        let (tag, started) = (self.chain.tag.unwrap_or(0), self.started.unwrap_or(finished));
        Some(ChainCompletion { tag, result, started, finished })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }
}

/// The unfinished chains of one queue, in posting order and with consecutive numbers.
#[derive(Default)]
pub(super) struct Flow {
    works: VecDeque<ActiveChain>,
    first: u64,
    /// Whether the queue can advance only after another event, such as a completion.
    pub(super) blocked: bool,
}

impl Flow {
    pub(super) fn push(&mut self, work: ActiveChain) {
        self.works.push_back(work);
    }

    /// The time until which a fault delays the last chain.
    pub(super) fn stalled(&self) -> Option<Instant> {
        self.works.back().and_then(ActiveChain::stalled)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// The last chain and its number. Only the last chain may be partly posted.
    pub(super) fn last(&mut self) -> Option<(u64, &mut ActiveChain)> {
        let number = self.first + (self.works.len() as u64).checked_sub(1)?;
        self.works.back_mut().map(|work| (number, work))
    }

    pub(super) fn get(&mut self, number: u64) -> Option<&mut ActiveChain> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.works.get_mut(index)
    }

    /// Removes the first chain if it is posted and complete, and all writes that it awaits are
    /// `confirmed`.
    pub(super) fn pop_finished(&mut self, confirmed: impl Fn(PeerId, u64) -> bool) -> Option<ActiveChain> {
        let work = self.works.front()?;
        let finished =
            work.is_posted() && work.is_complete() && work.awaits.iter().all(|(p, n)| confirmed(*p, *n));
        if !finished {
            return None;
        }
        self.first += 1;
        self.works.pop_front()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ActiveChain> {
        self.works.iter_mut()
    }
}
