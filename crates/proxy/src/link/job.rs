//! A job: one call on its way to the host, with its payload and what it waits for.

use std::time::Instant;

use base::block::{BLOCK, Payload, crc32c, verify_pieces};
use base::mem::ArenaBuf;
use base::phases::{self, Clock};
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use store::stripes::{Coded, FragmentBytes};
use store::{CollectionId, ObjectId, StageId};

use super::regions::OpenedWindow;
use super::{AnswerTo, HeldRange};
use crate::messages::{
    ChannelCall, ParityFrom, PayloadPlace, StoreCall, Stripes, pack_checksums, unpack_checksums,
};
use crate::transaction_codec::EncodedTransaction;

/// Longest control data and payload together that ride in an entry of the ring, in bytes.
const MAX_INLINE: usize = 12 << 10;
/// Longest read whose data rides in the reply's entry, in bytes.
const MAX_INLINE_READ: usize = 8 << 10;
/// Room for a reply without data, in bytes: an error with its text, a stat.
const SMALL_REPLY: usize = 1024;
/// Payload up to that length goes with its entry, in bytes: one chain, and nobody need be woken in between.
const SHORT: usize = 64 << 10;

/// Which way a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Ring,
    Socket,
}

/// What is done with the answer.
#[derive(Debug)]
pub(crate) enum AnswerUse {
    /// It is passed on.
    Plain,
    /// It names a new stage.
    Stage,
    /// It tells of data that has to be fetched, if possible to there.
    Read(Option<ArenaBuf>),
    /// It concerns the channel itself.
    Channel(ChannelKind),
}

/// What is done with the answer to a call to the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelKind {
    /// This window is open to DMA.
    Export(usize),
    /// Data of this read.
    Get(u64),
    /// How far the host has come.
    Positions,
    /// The rings are closed.
    Close,
    /// Host memory was offered anew.
    Offer,
    /// The probe was copied.
    Probe,
    /// The rings are open.
    Open,
}

/// Whether a job needs a range of host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RangeUse {
    None,
    Wanted(usize),
    Held(HeldRange),
}

/// Arguments of a read.
pub(crate) struct ReadCall {
    pub(crate) cid: CollectionId,
    pub(crate) oid: ObjectId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Length of the blocks that cover the range, in bytes.
    pub(crate) cover: usize,
    pub(crate) dest: Option<ArenaBuf>,
}

/// A call that has not been sent.
pub(crate) struct Job {
    pub(super) target: u16,
    pub(super) after: u64,
    pub(super) call: StoreCall,
    /// Follows the call in the control data.
    pub(super) tail: Vec<u8>,
    /// Payload, and where it goes: from the start of the range, or of the data section.
    pub(super) upload: Vec<(usize, Bytes)>,
    /// Bytes of the payload that are in the range already.
    pub(super) arrived: usize,
    pub(super) range: RangeUse,
    /// The part of host memory that the range is in, while DMA may use it.
    pub(super) region: Option<OpenedWindow>,
    pub(super) reply_max: usize,
    pub(super) route: Route,
    /// The payload is where it belongs, or goes with the request.
    pub(super) payload_ready: bool,
    /// Takes its place in the target's lane.
    pub(super) in_lane: bool,
    /// Counted as unposted write of this stage.
    pub(super) writes_stage: Option<u64>,
    /// The host is to compare the payload with its checksums.
    pub(super) suspect: bool,
    /// Counted as write of that stage that could be overtaken.
    pub(super) unsure: bool,
    /// Stages whose writes must have been posted before.
    pub(super) names_stages: Vec<StageId>,
    pub(super) kind: AnswerUse,
    pub(super) answer_to: Option<AnswerTo>,
    /// Is told when parity was computed.
    pub(super) coded: Option<Coded>,
    /// When it was called, and for which of the OSD's requests.
    pub(super) since: Instant,
    pub(super) clock: Option<Clock>,
}

/// Whether a transaction rides in one entry, so that one transfer carries it all.
pub(super) fn fits_inline(encoded: &EncodedTransaction) -> bool {
    encoded.control.len() + encoded.data_len <= MAX_INLINE
}

/// Where the data section of a transaction begins in its range: at the start, as the control data rides in the entry, or, if
/// that is too long, behind the control data, on a page of its own.
fn data_at(encoded: &EncodedTransaction) -> usize {
    let control_len = encoded.control.len();
    if control_len <= MAX_INLINE { 0 } else { control_len.next_multiple_of(MIN_BUFFER) }
}

/// Length of the range that holds a transaction.
pub(super) fn range_len(encoded: &EncodedTransaction) -> usize {
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
            in_lane: false,
            writes_stage: None,
            suspect: false,
            unsure: false,
            names_stages: Vec::new(),
            kind: AnswerUse::Plain,
            answer_to,
            coded: None,
            since: Instant::now(),
            clock: phases::current(),
        }
    }

    /// A call to the channel itself.
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

    /// It follows no transaction, only the making of its stage: transactions that are called later wait for it.
    pub(super) fn stage_write(
        target: u16,
        stage: StageId,
        host_id: u64,
        offset: u64,
        payload: Payload,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let phase = payload.phase() as u16;
        let (data, checksums) = payload.into_parts();
        let checksums = pack_checksums(&checksums);
        let call =
            StoreCall::StageWrite { stage: host_id, offset, phase, checksums, place: PayloadPlace::Inline };
        Job {
            range: want(data.len()),
            upload: vec![(0, data)],
            writes_stage: Some(stage.0),
            ..Job::new(target, 0, call, route(by_dma), Some(answer_to))
        }
    }

    /// It follows nothing but the making of its stages, and nothing is called that names them before it is answered.
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
        // Fragment by fragment: DMA puts the pieces together.
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

    pub(super) fn transaction(
        target: u16,
        after: u64,
        encoded: EncodedTransaction,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let in_entry = by_dma && fits_inline(&encoded);
        let range = if in_entry { RangeUse::None } else { want(range_len(&encoded)) };
        let data_at = data_at(&encoded);
        let rides = !by_dma || data_at == 0;
        let control_len = encoded.control.len() as u32;
        let control_crc = if rides { 0 } else { crc32c(&encoded.control) };
        let (tail, upload) = if rides {
            (encoded.control, encoded.data)
        } else {
            let control = (0, Bytes::from(encoded.control));
            let data = encoded.data.into_iter().map(|(at, bytes)| (data_at + at, bytes));
            (Vec::new(), std::iter::once(control).chain(data).collect())
        };
        let call = StoreCall::Transaction { control_len, control_crc, place: PayloadPlace::Inline };
        Job {
            tail,
            upload,
            range,
            in_lane: true,
            names_stages: encoded.stages,
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
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
            in_lane: true,
            kind: AnswerUse::Read(dest),
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
        }
    }

    /// Length of the payload, in bytes.
    pub(super) fn upload_len(&self) -> usize {
        self.upload.iter().map(|(_, piece)| piece.len()).sum()
    }

    /// Whether staged data did not fit its checksums before it was sent.
    pub(super) fn was_wrong_before(&self) -> bool {
        match (&self.call, &self.upload[..]) {
            (StoreCall::StageWrite { phase, checksums, .. }, [(_, data)]) => {
                let checksums = unpack_checksums(checksums).unwrap_or_default();
                verify_pieces(u64::from(*phase), data, &checksums).is_err()
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

    /// The target's lane, if it takes its place there.
    pub(super) fn lane(&self) -> Option<usize> {
        self.in_lane.then_some(usize::from(self.target))
    }

    /// Whether it must not overtake requests that were lost with the rings.
    pub(super) fn carries_data(&self) -> bool {
        self.in_lane || self.writes_stage.is_some() || matches!(self.call, StoreCall::StageStripes { .. })
    }

    /// Whether any of its payload goes by DMA.
    pub(super) fn is_by_dma(&self) -> bool {
        self.route == Route::Ring && !self.upload.is_empty() || self.arrived > 0
    }

    /// Whether no other call waits for it.
    pub(super) fn is_query(&self) -> bool {
        self.answer_to.is_some()
            && matches!(self.kind, AnswerUse::Plain | AnswerUse::Stage)
            && !self.carries_data()
    }

    /// Whether its payload goes with its entry, in one chain.
    pub(super) fn is_short(&self) -> bool {
        self.upload_len() <= SHORT
    }

    pub(super) fn reply_max(&self) -> usize {
        self.reply_max
    }

    pub(super) fn wants_reply(&self) -> bool {
        self.answer_to.is_some() || matches!(self.kind, AnswerUse::Channel(_))
    }

    /// The call, with the place of its payload filled in: the range, if it goes by DMA or the socket fills the range in its
    /// place. `base` is where the data region starts, `None` without one.
    pub(super) fn placed_call(&self, base: Option<usize>) -> StoreCall {
        let mut call = self.call.clone();
        let (Some(base), RangeUse::Held(range)) = (base, self.range) else { return call };
        match &mut call {
            StoreCall::StageWrite { place, .. }
            | StoreCall::StageStripes { place, .. }
            | StoreCall::Transaction { place, .. } => place.put(base, range),
            StoreCall::Read { place, .. } if self.route == Route::Ring => place.put(base, range),
            _ => {}
        }
        call
    }
}

impl PayloadPlace {
    fn put(&mut self, base: usize, range: HeldRange) {
        *self = PayloadPlace::Range { offset: (base + range.offset) as u64, len: range.len as u64 };
    }
}

fn route(by_dma: bool) -> Route {
    if by_dma { Route::Ring } else { Route::Socket }
}

fn want(len: usize) -> RangeUse {
    if len == 0 { RangeUse::None } else { RangeUse::Wanted(len) }
}
