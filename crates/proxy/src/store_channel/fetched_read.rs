//! [`FetchedRead`]: an answered read whose data is being fetched.

use std::ops::Range;
use std::sync::Arc;

use base::mem::ArenaBuf;
use bytes::Bytes;
use channel::{ChannelError, Transfer};
use store::ReadData;

use super::host_ranges::HeldRange;
use super::regions::OpenedWindow;
use super::{AnswerTo, Delivered, RingSide};
use crate::messages::{CallAnswer, unpack_checksums};

/// Where the data of a read is placed.
pub(super) enum ReadLanding {
    /// Directly in the buffers that the caller receives.
    Buffers(Vec<ArenaBuf>),
    /// In the mirror of the read's range, because no other memory that DMA can reach was available.
    /// The data is then copied to the caller's buffer, if there is one.
    Mirror(Option<ArenaBuf>),
    /// The control socket carries the data. The data is copied into the caller's buffer if there is
    /// one. Otherwise, the caller receives the frame's own memory.
    Socket(Option<ArenaBuf>),
}

/// A read that the host has answered, and whose data DMA or the control socket fetches from its
/// range.
pub(super) struct FetchedRead {
    answer: CallAnswer,
    landing: ReadLanding,
    /// Length of the data, in bytes. It fits in the range.
    len: usize,
    range: HeldRange,
    /// Bytes that DMA moved before it failed. They are not fetched again.
    fetched: usize,
    /// How the data from DMA differed from its checksums, if it did.
    doubt: Option<String>,
    answer_to: AnswerTo,
}

/// What follows the arrival of a read's data.
pub(super) enum ReadOutcome {
    /// The read is complete. `damage` says how DMA had damaged its data before, if it did.
    Complete { range: HeldRange, answer_to: AnswerTo, delivered: Delivered, damage: Option<String> },
    /// The data is damaged. The control socket must carry all of it.
    FetchAll(FetchedRead),
}

impl FetchedRead {
    /// `len` is the length of the data, in bytes, which must fit in `range`.
    pub(super) fn new(
        answer: CallAnswer,
        landing: ReadLanding,
        len: usize,
        range: HeldRange,
        answer_to: AnswerTo,
    ) -> FetchedRead {
        assert!(len <= range.len(), "the data of a read exceeds its range");
        FetchedRead { answer, landing, len, range, fetched: 0, doubt: None, answer_to }
    }

    /// The transfers that move the data from the range in an open window to its landing.
    pub(super) fn transfers(&self, ring: &RingSide, window: &OpenedWindow) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        let from = ring.range_offset(&self.range);
        match &self.landing {
            ReadLanding::Buffers(buffers) => {
                let mut at = from;
                for buffer in buffers {
                    ring.fetch_range(&mut transfers, at, buffer.offset(), buffer.len(), window);
                    at += buffer.len();
                }
            }
            _ => ring.fetch_range(&mut transfers, from, from, self.len, window),
        }
        transfers
    }

    /// The range that contains the data.
    pub(super) fn range(&self) -> &HeldRange {
        &self.range
    }

    /// The part of the data that DMA has not moved, in bytes from the start of the range.
    pub(super) fn rest(&self) -> Range<usize> {
        self.fetched..self.len
    }

    /// Records that DMA has moved `bytes` of the data, and moves no more of it.
    pub(super) fn interrupt(&mut self, bytes: usize) {
        assert!(bytes <= self.len, "DMA moved {bytes} bytes of a read of {} bytes", self.len);
        self.fetched = bytes;
    }

    /// Takes the memory that late DMA may still write. The control socket carries all of the data.
    pub(super) fn abandon_landing(&mut self) -> ReadLanding {
        self.fetched = 0;
        std::mem::replace(&mut self.landing, ReadLanding::Socket(None))
    }

    /// Handles the arrival of all data by DMA.
    pub(super) fn moved(mut self, ring: &RingSide) -> ReadOutcome {
        let data = match self.abandon_landing() {
            ReadLanding::Buffers(buffers) => buffers.into_iter().map(ArenaBuf::freeze).collect(),
            ReadLanding::Mirror(dest) | ReadLanding::Socket(dest) => {
                vec![copy_from_mirror(ring, &self.range, self.len, dest)]
            }
        };
        match verify(&self.answer, &data) {
            Ok(()) => self.complete(data, true, None),
            // The data was damaged either by DMA or before DMA. The copy from the control socket
            // shows which is the case.
            Err(why) => {
                self.doubt = Some(why);
                ReadOutcome::FetchAll(self)
            }
        }
    }

    /// Handles the arrival of the rest of the data over the control socket.
    pub(super) fn completed(mut self, rest: Bytes, ring: &RingSide) -> Result<ReadOutcome, ChannelError> {
        let (fetched, expected) = (self.fetched, self.rest().len());
        if rest.len() != expected {
            let what = format!("it sent {} bytes of data instead of the requested {expected}", rest.len());
            return Err(ChannelError::Protocol(what));
        }
        let data = match self.abandon_landing() {
            ReadLanding::Buffers(mut buffers) if fetched > 0 => {
                fill(&mut buffers, fetched, &rest);
                buffers.into_iter().map(ArenaBuf::freeze).collect()
            }
            ReadLanding::Mirror(_) if fetched > 0 => {
                vec![copy_from_mirror(ring, &self.range, fetched, None), rest]
            }
            ReadLanding::Socket(dest) if fetched == 0 => vec![landed(rest, dest)],
            _ => vec![rest],
        };
        let is_right = verify(&self.answer, &data).is_ok();
        // The data that DMA moved before it failed may be damaged.
        if !is_right && fetched > 0 {
            return Ok(ReadOutcome::FetchAll(self));
        }
        let damage = self.doubt.take().filter(|_| is_right);
        Ok(self.complete(data, is_right, damage))
    }

    /// Takes apart a read of an ended incarnation.
    pub(super) fn into_unfinished(self) -> (AnswerTo, ReadLanding) {
        (self.answer_to, self.landing)
    }

    fn complete(self, data: Vec<Bytes>, verified: bool, damage: Option<String>) -> ReadOutcome {
        let FetchedRead { answer, range, answer_to, .. } = self;
        ReadOutcome::Complete { range, answer_to, delivered: Delivered { answer, data, verified }, damage }
    }
}

/// Returns data that came inside a frame, copied into the caller's buffer if there is one. The
/// buffer must be large enough.
pub(super) fn landed(data: Bytes, dest: Option<ArenaBuf>) -> Bytes {
    match dest {
        Some(mut dest) => {
            dest.truncate(data.len());
            dest.copy_from_slice(&data);
            dest.freeze()
        }
        None => data,
    }
}

/// Chooses the memory for a read's data. If the engine can reach the caller's buffer, the function
/// chooses this buffer. If the caller has no buffer, the function allocates staging buffers from
/// the pool. Otherwise it chooses the mirror. The function never waits for a free buffer: the
/// buffer's holder may itself wait for this incarnation, which would be a deadlock.
pub(super) fn choose_landing(ring: &RingSide, dest: Option<ArenaBuf>, len: usize) -> ReadLanding {
    if let Some(mut dest) = dest {
        if Arc::ptr_eq(dest.arena(), ring.arena()) {
            dest.truncate(len);
            return ReadLanding::Buffers(vec![dest]);
        }
        return ReadLanding::Mirror(Some(dest));
    }
    let pool = ring.memory().pool();
    let mut buffers = Vec::new();
    for at in (0..len).step_by(pool.largest()) {
        match pool.try_alloc(pool.largest().min(len - at)) {
            Ok(Some(buffer)) => buffers.push(buffer),
            _ => return ReadLanding::Mirror(None),
        }
    }
    ReadLanding::Buffers(buffers)
}

/// Copies the first `len` bytes of a range from the mirror, into the caller's buffer if there is
/// one.
fn copy_from_mirror(ring: &RingSide, range: &HeldRange, len: usize, dest: Option<ArenaBuf>) -> Bytes {
    ring.count_landed(len);
    let at = ring.range_offset(range);
    match dest {
        Some(mut dest) => {
            dest.truncate(len);
            let inside = ring.arena().copy_out(at, &mut dest);
            assert!(inside, "the range is inside the mirror");
            dest.freeze()
        }
        None => {
            let mut copy = vec![0; len];
            let inside = ring.arena().copy_out(at, &mut copy);
            assert!(inside, "the range is inside the mirror");
            Bytes::from(copy)
        }
    }
}

/// Verifies the checksums of a read's data.
fn verify(answer: &CallAnswer, data: &[Bytes]) -> Result<(), String> {
    let CallAnswer::Read { offset, checksums, object_size, .. } = answer else { return Ok(()) };
    let checksums = unpack_checksums(checksums).map_err(|e| e.to_string())?;
    let data = data.to_vec();
    let read = ReadData { offset: *offset, data, checksums, object_size: *object_size, verified: false };
    read.verify().map_err(|e| e.to_string())
}

/// Copies `rest` into the buffers, which count as one contiguous range, starting at byte `at`.
fn fill(buffers: &mut [ArenaBuf], at: usize, rest: &[u8]) {
    let (mut skip, mut rest) = (at, rest);
    for buffer in buffers {
        let from = skip.min(buffer.len());
        skip -= from;
        let part = (buffer.len() - from).min(rest.len());
        buffer[from..from + part].copy_from_slice(&rest[..part]);
        rest = &rest[part..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::pack_checksums;
    use crate::store_channel::host_ranges::HostRanges;
    use crate::store_channel::ring_side::tests::ring_without_host;
    use base::block::Payload;
    use tokio::sync::oneshot;

    const BLOCKS: usize = 2 * 4096;

    /// A read of two blocks of ones, whose data lands in the mirror.
    fn read() -> FetchedRead {
        let checksums = pack_checksums(Payload::compute(0, ones()).checksums());
        let answer =
            CallAnswer::Read { offset: 0, len: BLOCKS as u64, checksums, object_size: BLOCKS as u64 };
        let range = HostRanges::new(1 << 20, 1 << 20).take(BLOCKS).unwrap();
        FetchedRead::new(answer, ReadLanding::Mirror(None), BLOCKS, range, oneshot::channel().0)
    }

    fn ones() -> Bytes {
        Bytes::from(vec![1; BLOCKS])
    }

    /// Writes into the mirror as DMA would.
    fn move_data(ring: &RingSide, read: &FetchedRead, data: &[u8]) {
        assert!(ring.arena().copy_in(ring.range_offset(read.range()), data));
    }

    fn fetched_again(outcome: ReadOutcome) -> FetchedRead {
        let ReadOutcome::FetchAll(read) = outcome else { panic!("the damage was not detected") };
        assert_eq!(read.rest(), 0..BLOCKS);
        read
    }

    fn complete(outcome: ReadOutcome) -> (Delivered, Option<String>) {
        let ReadOutcome::Complete { delivered, damage, .. } = outcome else { panic!("data is missing") };
        (delivered, damage)
    }

    #[test]
    fn a_correct_second_copy_proves_that_dma_damaged_the_first() {
        let ring = ring_without_host();
        let first = read();
        move_data(&ring, &first, &[7; BLOCKS]);
        let again = fetched_again(first.moved(&ring));
        let (delivered, damage) = complete(again.completed(ones(), &ring).unwrap());
        assert!(damage.is_some() && delivered.verified);
        assert_eq!(delivered.data, [ones()]);
    }

    #[test]
    fn a_wrong_second_copy_does_not_blame_dma() {
        let ring = ring_without_host();
        let first = read();
        let wrong = Bytes::from(vec![7; BLOCKS]);
        move_data(&ring, &first, &wrong);
        let again = fetched_again(first.moved(&ring));
        let (delivered, damage) = complete(again.completed(wrong, &ring).unwrap());
        assert!(damage.is_none() && !delivered.verified);
    }

    #[test]
    fn the_socket_completes_a_partial_transfer_and_repeats_a_damaged_one() {
        let ring = ring_without_host();
        for (moved, is_right) in [([1; 4096], true), ([7; 4096], false)] {
            let mut read = read();
            move_data(&ring, &read, &moved);
            read.interrupt(4096);
            assert_eq!(read.rest(), 4096..BLOCKS);
            let outcome = read.completed(ones().slice(4096..), &ring).unwrap();
            if is_right {
                assert!(complete(outcome).0.verified);
            } else {
                fetched_again(outcome);
            }
        }
    }

    #[test]
    fn an_answer_of_another_length_is_refused() {
        let ring = ring_without_host();
        assert!(read().completed(ones().slice(1..), &ring).is_err());
    }
}
