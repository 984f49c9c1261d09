//! Commit groups: the group that is being formed ([`OpenGroup`]), and the groups that were formed
//! but are not durable yet ([`GroupsInFlight`]).

use std::collections::VecDeque;

use base::collections::HashMap;
use bytes::Bytes;

use super::apply::TransactionEffect;
use super::extent::{Extent, total};
use super::log::record_bytes;
use super::messages::{ReplySender, send};
use crate::StoreError;

/// Applied transactions that belong to no group yet.
#[derive(Debug, Default)]
pub(super) struct OpenGroup {
    records: Vec<Vec<u8>>,
    record_bytes: usize,
    replies: Vec<ReplySender>,
    /// Data for which no write was submitted yet: first block and bytes.
    writes: Vec<(u64, Bytes)>,
    write_bytes: usize,
    frees: Vec<Extent>,
}

/// The content of a group whose log sectors are to be written.
#[derive(Debug)]
pub(super) struct FormedGroup {
    pub(super) records: Vec<Vec<u8>>,
    pub(super) replies: Vec<ReplySender>,
    pub(super) frees: Vec<Extent>,
}

impl OpenGroup {
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Number of transactions.
    pub(super) fn transactions(&self) -> usize {
        self.records.len()
    }

    /// Size of the records in the log, in bytes.
    pub(super) fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// Number of bytes of data for which no write was submitted yet.
    pub(super) fn write_bytes(&self) -> usize {
        self.write_bytes
    }

    /// Number of blocks that the transactions free.
    pub(super) fn freed_blocks(&self) -> u64 {
        total(&self.frees)
    }

    /// Adds an applied transaction with its encoded record.
    pub(super) fn push(&mut self, effect: &TransactionEffect, record: Vec<u8>, reply: ReplySender) {
        self.record_bytes += record_bytes(record.len());
        self.records.push(record);
        self.replies.push(reply);
        self.write_bytes += effect.writes.iter().map(|(_, data)| data.len()).sum::<usize>();
        self.writes.extend(effect.writes.iter().cloned());
        self.frees.extend(&effect.record.frees);
    }

    /// Takes the data for which no write was submitted yet.
    pub(super) fn take_writes(&mut self) -> Vec<(u64, Bytes)> {
        self.write_bytes = 0;
        std::mem::take(&mut self.writes)
    }

    /// Takes all transactions, whose data must have been taken before.
    pub(super) fn form(&mut self) -> FormedGroup {
        assert!(self.writes.is_empty(), "the data of a group is submitted before its log sectors");
        let OpenGroup { records, replies, frees, .. } = std::mem::take(self);
        FormedGroup { records, replies, frees }
    }

    /// Fails all transactions. Their data will not be written.
    fn fail(&mut self, error: &StoreError) {
        fail_all(&mut self.replies, error);
        drop(self.take_writes());
    }
}

fn fail_all(replies: &mut Vec<ReplySender>, error: &StoreError) {
    std::mem::take(replies).into_iter().for_each(|reply| drop(reply.send(Err(error.clone()))));
}

/// A group whose writes were submitted, but that is not durable yet.
#[derive(Debug)]
pub(super) struct CommitGroup {
    /// Sequence number after the group's last sector.
    pub(super) end: u64,
    /// The group states that all sectors before this one were flushed.
    pub(super) flushed_through: u64,
    pub(super) replies: Vec<ReplySender>,
}

/// The groups that are not durable yet, in the order in which they were formed. Groups have
/// consecutive numbers and become durable in this order.
#[derive(Debug)]
pub(super) struct GroupsInFlight {
    groups: VecDeque<CommitGroup>,
    /// Number of the last group that is durable. The groups in flight have the next numbers.
    durable: u64,
    /// Number of outstanding drive requests by group number. The next group, which is not formed
    /// yet, may have requests, too.
    outstanding: HashMap<u64, usize>,
    /// Number of the last group that the current flush covers.
    flushing: Option<u64>,
}

impl GroupsInFlight {
    pub(super) fn new() -> GroupsInFlight {
        GroupsInFlight {
            groups: VecDeque::new(),
            durable: 0,
            outstanding: HashMap::default(),
            flushing: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the number that the next group will get.
    pub(super) fn next_number(&self) -> u64 {
        self.durable + self.groups.len() as u64 + 1
    }

    /// Whether a group is durable.
    pub(super) fn is_durable(&self, group: u64) -> bool {
        group <= self.durable
    }

    /// Counts a submitted request of a group.
    pub(super) fn add_io(&mut self, group: u64) {
        assert!(group > self.durable && group <= self.next_number(), "a request of group {group}");
        *self.outstanding.entry(group).or_default() += 1;
    }

    /// Counts a completed request of a group.
    pub(super) fn io_done(&mut self, group: u64) {
        if let Some(left) = self.outstanding.get_mut(&group) {
            *left -= 1;
            if *left == 0 {
                self.outstanding.remove(&group);
            }
        }
    }

    /// Adds a group. Returns its number.
    pub(super) fn push(&mut self, group: CommitGroup) -> u64 {
        let number = self.next_number();
        self.groups.push_back(group);
        number
    }

    /// Whether a group of `transactions` transactions should wait, so that groups grow with the
    /// load. It waits while another group is being written. It also waits while a group with more
    /// transactions is being flushed.
    pub(super) fn is_too_early(&self, transactions: usize) -> bool {
        match self.groups.back() {
            None => false,
            Some(_) if self.outstanding.contains_key(&(self.next_number() - 1)) => true,
            Some(last) => self.groups.len() > 1 || transactions < last.replies.len(),
        }
    }

    /// Returns whether a flush should be submitted: groups are completely written, and no flush is in
    /// progress. The caller then submits the flush.
    pub(super) fn begin_flush(&mut self) -> bool {
        if self.flushing.is_some() {
            return false;
        }
        let numbers = self.durable + 1..self.next_number();
        self.flushing = numbers.take_while(|number| !self.outstanding.contains_key(number)).last();
        self.flushing.is_some()
    }

    /// Handles the completion of the current flush. Returns the groups that are now durable.
    pub(super) fn flushed(&mut self) -> Vec<CommitGroup> {
        let Some(last) = self.flushing.take() else { return Vec::new() };
        let covered = (last - self.durable) as usize;
        assert!(covered <= self.groups.len(), "a flush of group {last}: {self:?}");
        self.durable = last;
        self.groups.drain(..covered).collect()
    }

    /// Fails all transactions of the groups.
    fn fail(&mut self, error: &StoreError) {
        self.groups.iter_mut().for_each(|group| fail_all(&mut group.replies, error));
    }

    /// Acknowledges the groups that the current flush covers, before they are durable.
    pub(super) fn acknowledge_early(&mut self) {
        let covered = self.flushing.map_or(0, |last| last - self.durable);
        let groups = self.groups.iter_mut().take(covered as usize);
        groups.for_each(|group| acknowledge(std::mem::take(&mut group.replies)));
    }
}

/// Reports to the callers of transactions that the transactions are durable.
pub(super) fn acknowledge(replies: Vec<ReplySender>) {
    replies.into_iter().for_each(|reply| send(reply, Ok(())));
}

/// Fails every transaction that is not durable.
pub(super) fn fail_groups(open: &mut OpenGroup, in_flight: &mut GroupsInFlight, error: &StoreError) {
    in_flight.fail(error);
    open.fail(error);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(end: u64, transactions: usize) -> CommitGroup {
        let replies = (0..transactions).map(|_| futures::channel::oneshot::channel().0).collect();
        CommitGroup { end, flushed_through: 0, replies }
    }

    #[test]
    fn a_flush_covers_the_groups_before_the_first_that_is_being_written() {
        let mut groups = GroupsInFlight::new();
        for (end, number) in [(8, 1), (16, 2), (24, 3)] {
            groups.add_io(number);
            assert_eq!(groups.push(group(end, 1)), number);
        }
        assert!(!groups.begin_flush(), "group 1 is being written");
        [1, 3].into_iter().for_each(|number| groups.io_done(number));
        assert!(groups.begin_flush() && !groups.begin_flush(), "one flush at a time");
        groups.io_done(2);
        assert_eq!(groups.flushed().iter().map(|g| g.end).collect::<Vec<_>>(), [8]);
        assert!(groups.is_durable(1) && !groups.is_durable(2) && groups.flushed().is_empty());
        assert!(groups.begin_flush());
        assert_eq!(groups.flushed().iter().map(|g| g.end).collect::<Vec<_>>(), [16, 24]);
        assert!(groups.is_empty() && groups.next_number() == 4);
    }

    #[test]
    fn groups_grow_while_another_group_is_written_or_flushed() {
        let mut groups = GroupsInFlight::new();
        assert!(!groups.is_too_early(0));
        groups.add_io(1);
        groups.push(group(8, 2));
        assert!(groups.is_too_early(100), "group 1 is being written");
        groups.io_done(1);
        assert!(groups.is_too_early(1) && !groups.is_too_early(2), "group 1 is being flushed");
        groups.push(group(16, 5));
        assert!(groups.is_too_early(100), "two groups wait for their flush");
    }

    #[test]
    #[should_panic(expected = "a request of group 1")]
    fn a_durable_group_has_no_requests() {
        let mut groups = GroupsInFlight::new();
        groups.push(group(8, 1));
        groups.begin_flush();
        groups.flushed();
        groups.add_io(1);
    }
}
