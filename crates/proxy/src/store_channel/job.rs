//! A job: one call that was not sent yet, with its payload and its prerequisites.

use base::block::{BLOCK, Payload, crc32c, verify_pieces};
use base::clock::Instant;
use base::mem::ArenaBuf;
use base::phases::{self, Clock};
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use store::stripes::{Coded, FragmentBytes};
use store::{CollectionId, ObjectId, StageId};

use super::regions::OpenedWindow;
use super::{AnswerTo, HeldRange};
use crate::messages::{
    ChannelCall, ParityFrom, PayloadPlace, StoreCall, Stripes, TransactionPart, TransactionParts,
    pack_checksums, unpack_checksums,
};
use crate::transaction_codec::EncodedTransactions;

/// Maximum length of control data plus payload in a ring entry, in bytes. Three transactions with a
/// block of payload each fit.
const MAX_INLINE: usize = 16 << 10;
/// Maximum length of a read whose data fits in the reply's entry, in bytes.
const MAX_INLINE_READ: usize = 8 << 10;
/// Space reserved for a reply without data, such as an error text or a stat, in bytes.
const SMALL_REPLY: usize = 1024;
/// Maximum length of a payload that shares a chain with its ring entry, in bytes. With one chain,
/// no task needs to be woken between the transfers of payload and entry.
const SHORT: usize = 256 << 10;

/// How a request reaches the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Ring,
    Socket,
}

/// What the store channel does with the answer to a call.
#[derive(Debug)]
pub(crate) enum AnswerUse {
    /// Passes the answer to the caller.
    Plain,
    /// The answer names a new stage, which the store channel registers.
    Stage,
    /// The answer describes data that the store channel must fetch, into this buffer if there is
    /// one.
    Read(Option<ArenaBuf>),
    /// The answer concerns the channel itself.
    Channel(ChannelKind),
}

/// The call to the channel itself that an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelKind {
    /// Opens this window to DMA.
    Export(usize),
    /// Gets the data of this read over the control socket.
    Get(u64),
    /// Asks for the host's ring positions.
    Positions,
    /// Closes the rings.
    Close,
    /// Asks the host to offer its memory again.
    Offer,
    /// Asks the host to copy the probe.
    Probe,
    /// Opens the rings.
    Open,
}

/// Whether a job needs a range of host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RangeUse {
    None,
    Wanted(usize),
    Held(HeldRange),
}

/// The arguments of a read.
pub(crate) struct ReadCall {
    pub(crate) cid: CollectionId,
    pub(crate) oid: ObjectId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Length of the blocks that cover the read bytes, in bytes.
    pub(crate) cover: usize,
    pub(crate) dest: Option<ArenaBuf>,
}

/// The transaction of one target in a job.
pub(crate) struct JobPart {
    pub(super) target: u16,
    /// The receiver of the outcome, until the outcome is known.
    pub(super) answer_to: Option<AnswerTo>,
}

/// A call that was not sent yet.
pub(crate) struct Job {
    pub(super) target: u16,
    pub(super) after: u64,
    pub(super) call: StoreCall,
    /// Control data that follows the encoded call.
    pub(super) tail: Vec<u8>,
    /// Pieces of the payload, each with its offset in the range or in the data section, in bytes.
    pub(super) upload: Vec<(usize, Bytes)>,
    /// Bytes of the payload that are already in the range.
    pub(super) arrived: usize,
    pub(super) range: RangeUse,
    /// The open window that contains the range, while DMA may use it.
    pub(super) region: Option<OpenedWindow>,
    pub(super) reply_max: usize,
    pub(super) route: Route,
    /// Whether the payload is in place or travels with the request.
    pub(super) payload_ready: bool,
    /// The transactions of the job, if it consists of transactions. The job belongs in the lanes of
    /// their targets. A lane is the ordered queue of a target's transactions and reads.
    pub(super) parts: Vec<JobPart>,
    /// Whether the job is a read, which belongs in the lane of its target.
    pub(super) is_read: bool,
    /// The stage that the job writes to, if it is a stage write.
    pub(super) writes_stage: Option<StageId>,
    /// Whether the host must verify the payload's checksums.
    pub(super) suspect: bool,
    /// Whether the host has found the payload damaged. If the payload is damaged again, the host
    /// refuses the request.
    pub(super) found_damaged: bool,
    /// Whether the stage counts the job as a write that a transaction could overtake.
    pub(super) unsure: bool,
    /// Stages whose writes must be posted before the job.
    pub(super) names_stages: Vec<StageId>,
    pub(super) kind: AnswerUse,
    pub(super) answer_to: Option<AnswerTo>,
    /// The sender that reports that parity was computed.
    pub(super) coded: Option<Coded>,
    /// When the call was made. `clock` measures the client's request that the call belongs to.
    pub(super) since: Instant,
    pub(super) clock: Option<Clock>,
}

/// Whether transactions fit into one ring entry, so that one transfer carries all of them.
pub(super) fn fits_inline(encoded: &EncodedTransactions) -> bool {
    encoded.control.len() + encoded.data_len <= MAX_INLINE
}

/// Whether one request may carry transactions of several targets. It holds its range until the slowest
/// target has answered, so the range must not be longer than that of the transaction of one target.
pub(super) fn may_join(encoded: &EncodedTransactions) -> bool {
    fits_inline(encoded) || data_at(encoded) == 0 && encoded.data_len <= encoded.longest_data
}

/// Offset of the data section of transactions in their range, in bytes. It is 0 if the control data
/// fits in the entry. Otherwise the range begins with the control data, and the data section starts
/// on the next page.
fn data_at(encoded: &EncodedTransactions) -> usize {
    let control_len = encoded.control.len();
    if control_len <= MAX_INLINE { 0 } else { control_len.next_multiple_of(MIN_BUFFER) }
}

/// Length of the range that holds transactions, in bytes.
pub(super) fn range_len(encoded: &EncodedTransactions) -> usize {
    data_at(encoded) + encoded.data_len
}

impl Job {
    pub(super) fn new(
        target: u16,
        after: u64,
        call: StoreCall,
        route: Route,
        answer_to: Option<AnswerTo>,
    ) -> Job {
        Job {
            target,
            after,
            call,
            tail: Vec::new(),
            upload: Vec::new(),
            arrived: 0,
            range: RangeUse::None,
            region: None,
            reply_max: SMALL_REPLY,
            route,
            payload_ready: false,
            parts: Vec::new(),
            is_read: false,
            writes_stage: None,
            suspect: false,
            found_damaged: false,
            unsure: false,
            names_stages: Vec::new(),
            kind: AnswerUse::Plain,
            answer_to,
            coded: None,
            since: Instant::now(),
            clock: phases::current(),
        }
    }

    /// Creates a call to the channel itself.
    pub(super) fn of_channel(call: ChannelCall, kind: ChannelKind) -> Job {
        Job {
            kind: AnswerUse::Channel(kind),
            ..Job::new(0, 0, StoreCall::Channel(call), Route::Socket, None)
        }
    }

    pub(super) fn on_socket(
        target: u16,
        after: u64,
        call: StoreCall,
        kind: AnswerUse,
        answer_to: AnswerTo,
    ) -> Job {
        Job { kind, ..Job::new(target, after, call, Route::Socket, Some(answer_to)) }
    }

    /// Creates a stage write. It depends only on the creation of its stage, not on any transaction.
    /// Later transactions that name the stage wait for the write.
    pub(super) fn stage_write(
        target: u16,
        stage: StageId,
        host_id: u64,
        offset: u64,
        payload: Payload,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let block_offset = payload.block_offset() as u16;
        let (data, checksums) = payload.into_parts();
        let checksums = pack_checksums(&checksums);
        let call = StoreCall::StageWrite {
            stage: host_id,
            offset,
            block_offset,
            checksums,
            place: PayloadPlace::Inline,
        };
        Job {
            range: want(data.len()),
            upload: vec![(0, data)],
            writes_stage: Some(stage),
            ..Job::new(target, 0, call, route(by_dma), Some(answer_to))
        }
    }

    /// Creates a stripe write. It depends only on the creation of its stages. Callers must not name
    /// these stages in another call until this call is answered.
    pub(super) fn stripes(
        stripes: Stripes,
        data: Vec<FragmentBytes>,
        by_dma: bool,
        answer_to: AnswerTo,
        coded: Option<Coded>,
    ) -> Job {
        let len = stripes.len as usize;
        let fragments =
            if matches!(stripes.parity, ParityFrom::By(_)) { stripes.parts.len() } else { data.len() };
        // Fragments are sent one after the other; DMA gathers their pieces.
        let mut upload = Vec::new();
        let mut at = 0;
        for piece in data.into_iter().flat_map(|fragment| fragment.pieces) {
            upload.push((at, piece.clone()));
            at += piece.len();
        }
        let call = StoreCall::StageStripes { stripes, place: PayloadPlace::Inline };
        Job {
            range: want(fragments * len),
            upload,
            reply_max: 2 * SMALL_REPLY,
            coded,
            ..Job::new(0, 0, call, route(by_dma), Some(answer_to))
        }
    }

    /// Creates a job that consists of transactions. `answers` has the receivers of the outcomes.
    pub(super) fn transactions(
        parts: Vec<TransactionPart>,
        encoded: EncodedTransactions,
        by_dma: bool,
        answers: impl Iterator<Item = AnswerTo>,
    ) -> Job {
        let in_entry = by_dma && fits_inline(&encoded);
        let range = if in_entry { RangeUse::None } else { want(range_len(&encoded)) };
        let data_at = data_at(&encoded);
        let rides = !by_dma || data_at == 0;
        let control_crc = if rides { 0 } else { crc32c(&encoded.control) };
        let (tail, upload) = if rides {
            (encoded.control, encoded.data)
        } else {
            let control = (0, Bytes::from(encoded.control));
            let data = encoded.data.into_iter().map(|(at, bytes)| (data_at + at, bytes));
            (Vec::new(), std::iter::once(control).chain(data).collect())
        };
        let job_parts = parts.iter().zip(answers);
        let job_parts = job_parts.map(|(part, to)| JobPart { target: part.target, answer_to: Some(to) });
        let job_parts: Vec<JobPart> = job_parts.collect();
        // The host may answer each part on its own.
        let reply_max = SMALL_REPLY / 2 * (parts.len() + 1);
        let transactions = TransactionParts { parts, lengths: encoded.lengths, control_crc };
        let call = StoreCall::Transactions { transactions, place: PayloadPlace::Inline };
        Job {
            tail,
            upload,
            range,
            parts: job_parts,
            reply_max,
            names_stages: encoded.stages,
            ..Job::new(0, 0, call, route(by_dma), None)
        }
    }

    pub(super) fn read(target: u16, after: u64, read: ReadCall, by_dma: bool, answer_to: AnswerTo) -> Job {
        let ReadCall { cid, oid, offset, len, cover, dest } = read;
        let small = cover <= MAX_INLINE_READ;
        let range = if small && by_dma { RangeUse::None } else { want(cover) };
        let data = if small { cover } else { 0 };
        let reply_max = SMALL_REPLY + cover.div_ceil(MIN_BUFFER) * 4 + data;
        let call = StoreCall::Read { cid, oid, offset, len, place: PayloadPlace::Inline };
        Job {
            range,
            reply_max,
            is_read: true,
            kind: AnswerUse::Read(dest),
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
        }
    }

    /// Length of the payload, in bytes.
    pub(super) fn upload_len(&self) -> usize {
        self.upload.iter().map(|(_, piece)| piece.len()).sum()
    }

    /// Whether staged data already did not match its checksums before it was sent.
    pub(super) fn was_wrong_before(&self) -> bool {
        match (&self.call, &self.upload[..]) {
            (StoreCall::StageWrite { block_offset, checksums, .. }, [(_, data)]) => {
                let checksums = unpack_checksums(checksums).unwrap_or_default();
                verify_pieces(u64::from(*block_offset), data, &checksums).is_err()
            }
            (StoreCall::StageStripes { stripes, .. }, pieces) => {
                let checksums = unpack_checksums(&stripes.checksums).unwrap_or_default();
                let mut checksums = &checksums[..];
                pieces.iter().any(|(_, piece)| {
                    let count = (piece.len() / BLOCK as usize).min(checksums.len());
                    let (of_piece, rest) = checksums.split_at(count);
                    checksums = rest;
                    verify_pieces(0, piece, of_piece).is_err()
                })
            }
            _ => false,
        }
    }

    /// The targets in whose lanes the job belongs.
    pub(super) fn lanes(&self) -> impl Iterator<Item = u16> {
        let of_read = self.is_read.then_some(self.target);
        self.parts.iter().map(|part| part.target).chain(of_read)
    }

    pub(super) fn is_transactions(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Takes the receivers of the outcomes that are not known yet.
    pub(super) fn take_answers(&mut self) -> impl Iterator<Item = AnswerTo> {
        let of_parts = self.parts.iter_mut().filter_map(|part| part.answer_to.take());
        self.answer_to.take().into_iter().chain(of_parts)
    }

    /// Whether the job belongs in a lane.
    pub(super) fn is_in_lane(&self) -> bool {
        self.is_read || self.is_transactions()
    }

    /// Whether the job must not overtake requests that were lost with the rings.
    pub(super) fn carries_data(&self) -> bool {
        self.is_in_lane()
            || self.writes_stage.is_some()
            || matches!(self.call, StoreCall::StageStripes { .. })
    }

    /// Whether DMA carries or has carried any part of the payload.
    pub(super) fn is_by_dma(&self) -> bool {
        self.route == Route::Ring && !self.upload.is_empty() || self.arrived > 0
    }

    /// Whether the host or the accelerator computes the parity of the payload.
    pub(super) fn is_coded_by_host(&self) -> bool {
        matches!(&self.call, StoreCall::StageStripes { stripes, .. } if matches!(stripes.parity, ParityFrom::By(_)))
    }

    /// Whether the job is a query that no other call waits for. Transactions wait for a query of an
    /// object.
    pub(super) fn is_query(&self) -> bool {
        self.answer_to.is_some()
            && matches!(self.kind, AnswerUse::Plain | AnswerUse::Stage)
            && !self.carries_data()
            && !self.call.is_object_query()
    }

    /// Whether the payload is short enough to share a chain with its entry.
    pub(super) fn is_short(&self) -> bool {
        self.upload_len() <= SHORT
    }

    pub(super) fn reply_max(&self) -> usize {
        self.reply_max
    }

    pub(super) fn wants_reply(&self) -> bool {
        self.answer_to.is_some() || self.is_transactions() || matches!(self.kind, AnswerUse::Channel(_))
    }

    /// Sets the location of the payload in the call. The location is the range if DMA or the control
    /// socket fills the range. `base` is the start of the data region, or `None` if there is no
    /// region.
    pub(super) fn place_payload(&mut self, base: Option<usize>) {
        let range = match (base, self.range) {
            (Some(base), RangeUse::Held(range)) => {
                PayloadPlace::Range { offset: (base + range.offset) as u64, len: range.len as u64 }
            }
            _ => PayloadPlace::Inline,
        };
        match &mut self.call {
            StoreCall::StageWrite { place, .. }
            | StoreCall::StageStripes { place, .. }
            | StoreCall::Transactions { place, .. } => *place = range,
            StoreCall::Read { place, .. } => {
                *place = if self.route == Route::Ring { range } else { PayloadPlace::Inline };
            }
            _ => {}
        }
    }
}

fn route(by_dma: bool) -> Route {
    if by_dma { Route::Ring } else { Route::Socket }
}

fn want(len: usize) -> RangeUse {
    if len == 0 { RangeUse::None } else { RangeUse::Wanted(len) }
}
