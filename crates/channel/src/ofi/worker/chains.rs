//! The execution of chains: when and on which connection transfers are posted, and when a chain is
//! complete.

use std::sync::atomic::Ordering;

use base::clock::Instant;
use base::fault::{Action, Site};
use fabric::PostError;

use super::{EngineWorker, Tell};
use crate::dma::{PeerId, QueueId};
use crate::ofi::faults::{Fate, damaged_copy};
use crate::ofi::flow::ActiveChain;
use crate::ofi::hazards::Footprint;
use crate::ofi::lane::scratch;
use crate::ofi::shared::OfiItem;
use crate::{RegionId, Result, Transfer};

/// The peer of a transfer, and the memory that the transfer accesses.
struct TransferPlan {
    peer: PeerId,
    footprint: Footprint,
}

impl EngineWorker {
    /// Advances a queue as far as possible. Returns `false` if nothing could be done.
    pub(super) fn advance(&mut self, queue: QueueId) -> bool {
        let mut worked = self.finish(queue);
        loop {
            self.flows[queue].blocked = false;
            let unposted = self.flows[queue].last().filter(|(_, work)| !work.is_posted()).map(|(n, _)| n);
            if let Some(number) = unposted {
                if !self.push_on(queue, number) {
                    self.flows[queue].blocked = true;
                    break;
                }
                worked = true;
                continue;
            }
            worked |= self.finish(queue);
            let resetting = matches!(self.held[queue], Some(OfiItem::Reset));
            if resetting || self.held[queue].is_some() && !self.flows[queue].is_empty() {
                self.flows[queue].blocked = true;
                break;
            }
            match self.held[queue].take().or_else(|| self.shared.queues[queue].items.pop()) {
                None => break,
                Some(OfiItem::Chain(chain)) => {
                    self.flows[queue].push(ActiveChain::new(chain));
                    // Handle commands first: they register the memory that the chain uses. A reset
                    // that is queued now also cancels this chain.
                    self.take_commands();
                    self.settle(queue);
                }
                Some(OfiItem::Reset) => self.held[queue] = Some(OfiItem::Reset),
                Some(item) if self.flows[queue].is_empty() => self.forget(item),
                Some(item) => self.held[queue] = Some(item),
            }
            worked = true;
        }
        worked
    }

    /// Posts the next transfer of the queue's last chain, or rings the chain's doorbell. Returns
    /// `false` if the transfer or the doorbell has to wait.
    fn push_on(&mut self, queue: QueueId, number: u64) -> bool {
        let Some((_, work)) = self.flows[queue].last() else { return false };
        let Some(transfer) = work.next() else { return self.ring(queue) };
        let result = self.plan(&transfer).and_then(|plan| match self.may_go(queue, plan.peer)? {
            true => self.post(queue, number, plan),
            false => Ok(false),
        });
        let Some(work) = self.flows[queue].get(number) else { return true };
        match result {
            Ok(true) => {}
            Ok(false) => return false,
            Err(why) => work.fail(&why),
        }
        self.settle(queue);
        true
    }

    /// Resolves a transfer's regions into a peer and a footprint.
    fn plan(&self, transfer: &Transfer) -> Result<TransferPlan, String> {
        let Transfer { src, dst, len } = *transfer;
        let window = |id: RegionId| self.windows.get(&id);
        let (read, here, there) = match (window(src.region), window(dst.region)) {
            (Some(window), None) => (true, dst, (src.offset, window)),
            (None, Some(window)) => (false, src, (dst.offset, window)),
            (None, None) if !self.locals.contains_key(&src.region) => {
                return Err(format!("{:?} is not registered", src.region));
            }
            (None, None) => return Err(format!("{:?} is not registered with a peer", dst.region)),
            (Some(_), Some(_)) => return Err("source and destination are both peer memory".to_owned()),
        };
        let local =
            self.locals.get(&here.region).ok_or_else(|| format!("{:?} is not registered", here.region))?;
        let (at, (peer, window)) = there;
        let end = |offset: usize, limit: usize| offset.checked_add(len).filter(|end| *end <= limit);
        let (Some(here_end), Some(_)) = (end(here.offset, local.memory.arena().len()), end(at, window.len()))
        else {
            return Err(format!("{transfer:?} is outside its regions"));
        };
        let start = window.start + at;
        let footprint =
            Footprint { read, local: (here.region, here.offset..here_end), remote: start..start + len };
        Ok(TransferPlan { peer: *peer, footprint })
    }

    /// Decides whether the next transfer of the queue's last chain may be posted to this peer.
    /// Returns `false` if an injected fault delays the transfer, and an error if the fault makes it
    /// fail.
    fn may_go(&mut self, queue: QueueId, peer: PeerId) -> Result<bool, String> {
        let Some((_, work)) = self.flows[queue].last() else { return Ok(false) };
        match *work.fate.get_or_insert_with(|| Fate::of_transfer(&self.faults)) {
            Fate::Fails => Err("a fault was injected".to_owned()),
            Fate::Stalls(until) if until > Instant::now() => {
                // Record the peer, so that the end of its connection also ends the delayed chain.
                work.peer.get_or_insert(peer);
                Ok(false)
            }
            Fate::Goes | Fate::Corrupts | Fate::Stalls(_) => Ok(true),
        }
    }

    /// Posts a transfer. Returns `false` if the transfer must wait for a connection or for room.
    fn post(&mut self, queue: QueueId, number: u64, plan: TransferPlan) -> Result<bool, String> {
        let TransferPlan { peer: id, footprint } = plan;
        let Some(work) = self.flows[queue].get(number) else { return Ok(true) };
        if *work.peer.get_or_insert(id) != id {
            return Err("a chain names several peers".to_owned());
        }
        if !self.reach(id)? {
            return Ok(false);
        }
        let Some(work) = self.flows[queue].get(number) else { return Ok(true) };
        let peer = self.peers.get_mut(&id).ok_or("the peer is not attached")?;
        let lane = peer.lanes.get_mut(queue).ok_or("there is no connection to the peer")?;
        let local = self.locals.get(&footprint.local.0).and_then(|local| local.registered.as_ref());
        let local = &local.ok_or("the memory could not be registered")?.region;
        if !lane.has_room_for(&footprint) {
            return Ok(false);
        }
        let read = footprint.read;
        let (from, len) = (footprint.local.1.start, footprint.local.1.len());
        let copy = match (&self.port, self.locals.get(&footprint.local.0)) {
            (Some(port), Some(local)) if !read && work.fate == Some(Fate::Corrupts) => {
                Some(damaged_copy(port, &local.memory, from, len).map_err(|e| e.to_string())?)
            }
            _ => None,
        };
        let slice = copy.as_ref().map_or_else(|| local.slice(from, len), |copy| copy.slice(0, len));
        let posted = slice
            .map_err(PostError::from)
            .and_then(|slice| lane.post(number, footprint, slice, &peer.offer.memory));
        match posted {
            Ok(posted) => {
                work.has_posted(posted, read);
                work.copies.extend(copy);
                Ok(true)
            }
            Err(PostError::Full) => {
                self.retry = true;
                Ok(false)
            }
            Err(e) => {
                self.lose(id, &e.to_string(), Tell::Always);
                Err(e.to_string())
            }
        }
    }

    /// Rings the doorbell of the queue's last chain if the chain's reads have completed. Returns
    /// `false` if the doorbell must wait.
    fn ring(&mut self, queue: QueueId) -> bool {
        let Some((_, work)) = self.flows[queue].last() else { return false };
        let Some((id, count)) = work.chain.ring else { return false };
        if !work.has_read() {
            return false;
        }
        if *work.peer.get_or_insert(id) != id {
            work.fail("a chain names several peers");
            self.settle(queue);
            return true;
        }
        let reached = self.reach(id);
        let lane = self.peers.get_mut(&id).and_then(|peer| peer.lanes.get_mut(queue));
        let Some((_, work)) = self.flows[queue].last() else { return false };
        match (reached, lane) {
            (Ok(true), Some(lane)) => {
                if self.faults.hit(Site::DmaDoorbell) != Some(Action::Drop) {
                    lane.line.ring(count);
                    self.shared.doorbells.fetch_add(1, Ordering::Relaxed);
                }
                work.rung = true;
            }
            (Ok(_), _) => return false,
            (Err(why), _) => work.fail(&why),
        }
        self.settle(queue);
        true
    }

    /// If the queue's last chain is fully posted and needs a completion, records which writes must
    /// be confirmed before the completion.
    fn settle(&mut self, queue: QueueId) {
        let Some((_, work)) = self.flows[queue].last() else { return };
        if !work.is_posted() || work.chain.tag.is_none() && !work.has_failed() {
            return;
        }
        let lanes = self.peers.iter().filter_map(|(id, peer)| Some((*id, peer.lanes.get(queue)?)));
        let unconfirmed = lanes.filter(|(_, lane)| lane.confirmed < lane.last_write);
        work.awaits = unconfirmed.map(|(id, lane)| (id, lane.last_write)).collect();
    }

    /// Removes complete chains and reports their completions. Returns `true` if there were any.
    pub(super) fn finish(&mut self, queue: QueueId) -> bool {
        let mut worked = false;
        let peers = &self.peers;
        let confirmed = |id: PeerId, number: u64| {
            let lane = peers.get(&id).and_then(|peer| peer.lanes.get(queue));
            lane.is_none_or(|lane| lane.confirmed >= number)
        };
        while let Some(work) = self.flows[queue].pop_finished(confirmed) {
            worked = true;
            if work.has_failed() {
                self.shared.failed.fetch_add(1, Ordering::Relaxed);
            }
            if let Some(completion) = work.finish() {
                self.shared.completions.push(completion);
                self.completed = true;
            }
            self.completed |= self.shared.chain_ended(queue);
        }
        worked
    }

    /// Sends doorbells and requests the confirmations that chains await. Returns `true` if the
    /// connection to a peer was lost.
    pub(super) fn flush(&mut self) -> bool {
        let Some(port) = &self.port else { return false };
        let mut lost = Vec::new();
        for (id, peer) in &mut self.peers {
            for (lane, flow) in peer.lanes.iter_mut().zip(&mut self.flows) {
                let awaited = flow.iter_mut().flat_map(|work| &work.awaits).filter(|(p, _)| p == id);
                let awaited = awaited.map(|(_, number)| *number).find(|number| *number > lane.confirmed);
                let sent = lane.line.flush();
                let asked = awaited.map_or(Ok(()), |number| {
                    scratch(port)
                        .map_err(PostError::from)
                        .and_then(|s| lane.confirm(number, s, &peer.offer.memory))
                });
                self.retry |= matches!(sent, Ok(false)) || matches!(asked, Err(PostError::Full));
                match (sent, asked) {
                    (Err(e), _) => lost.push((*id, e.to_string())),
                    (_, Err(PostError::Failed(e))) => lost.push((*id, e.to_string())),
                    _ => {}
                }
            }
        }
        let any = !lost.is_empty();
        for (id, why) in lost {
            self.lose(id, &why, Tell::Always);
        }
        any
    }
}
