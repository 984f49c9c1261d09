//! A job: one call that was not sent yet, with its payload and its prerequisites.

use std::sync::Arc;

use base::block::{BLOCK, Payload, crc32c, verify_pieces};
use base::clock::Instant;
use base::mem::ArenaBuf;
use base::phases::{self, Clock, Phase};
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use channel::{ChainTimes, EntryHeader, EntryKind, REFUSE, VERIFY};
use store::stripes::{Coded, FragmentBytes};
use store::{CollectionId, ObjectId, StageId, StoreError};

use super::host_ranges::HeldRange;
use super::regions::OpenedWindow;
use super::verify::Verify;
use super::{AnswerTo, CallError, Delivered};
use crate::messages::{
    CallAnswer, ChannelCall, NO_REPLY, ParityFrom, PayloadPlace, StoreCall, Stripes, TransactionPart,
    TransactionParts, encode, pack_checksums, unpack_checksums,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerUse {
    /// Passes the answer to the caller.
    Plain,
    /// The answer names a new stage, which the store channel registers.
    Stage,
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

/// What a job does, with the receivers of its answers.
pub(super) enum JobKind {
    /// Executes transactions, and belongs in the lanes of their targets.
    Transactions {
        parts: Vec<JobPart>,
        /// Stages whose writes must precede the job.
        stages: Vec<StageId>,
    },
    /// Reads into a buffer if there is one, and belongs in the lane of its target.
    Read { dest: Option<ArenaBuf>, answer_to: AnswerTo },
    /// Writes to a stage.
    StageWrite { stage: StageId, state: WriteState, answer_to: AnswerTo },
    /// Writes to the stages of several fragments. `coded` reports that parity was computed.
    Stripes { coded: Option<Coded>, answer_to: AnswerTo },
    /// Makes another call over the control socket.
    Call { answer_use: AnswerUse, answer_to: AnswerTo },
    /// Releases a stage. The host sends no answer.
    StageRelease,
    /// Concerns the channel itself.
    Channel(ChannelKind),
}

/// How a stage write is counted in its stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteState {
    /// Its payload is not ready.
    Unposted,
    /// It was posted, and no later transaction can overtake it.
    Sure,
    /// It was posted, and a later transaction could overtake it.
    Unsure,
}

/// Where the payload of a job is. A read has no payload, but the data that it reads needs a range
/// in the same way.
enum PayloadState {
    /// The job needs no range: it has no payload, or the payload travels with the request.
    Inline,
    /// The job waits for a range of this length, in bytes.
    WaitsForRange(usize),
    /// The job waits until DMA may use the window that contains its range.
    WaitsForWindow(HeldRange),
    /// DMA moves the payload into the range.
    Uploading(HeldRange, OpenedWindow),
    /// DMA moves the payload into the range together with the request, or the data out of it after
    /// the request.
    InWindow(HeldRange, OpenedWindow),
    /// DMA has moved the payload's first bytes into the range and moves no more of it. The control
    /// socket carries the rest.
    Arrived { range: HeldRange, bytes: usize },
}

/// Whether the host must verify the payload's checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PayloadCheck {
    Trusted,
    /// The host verifies the payload, and asks for it again if DMA could have damaged it.
    Suspect,
    /// The host has found the payload damaged. If the payload is damaged again, the host refuses
    /// the request.
    FoundDamaged,
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
pub(super) struct JobPart {
    target: u16,
    /// The receiver of the outcome, until the outcome is known.
    answer_to: Option<AnswerTo>,
}

impl JobPart {
    /// Delivers the outcome of the transaction. After a failure of DMA, an outcome may arrive
    /// twice.
    pub(super) fn answer(&mut self, outcome: Result<(), StoreError>) {
        if let Some(answer_to) = self.answer_to.take() {
            let answered = outcome.map(|()| Delivered::new(CallAnswer::Done, Vec::new()));
            // The caller may have been cancelled; ignore the error.
            let _ = answer_to.send(answered.map_err(CallError::Store));
        }
    }

    pub(super) fn is_answered(&self) -> bool {
        self.answer_to.is_none()
    }
}

/// A call with its payload. The store channel keeps it until it is answered, because it may have to
/// be sent again.
pub(super) struct Job {
    target: u16,
    after: u64,
    call: StoreCall,
    /// Control data that follows the encoded call.
    tail: Vec<u8>,
    /// Pieces of the payload, each with its offset in the range or in the data section, in bytes.
    upload: Vec<(usize, Bytes)>,
    payload: PayloadState,
    check: PayloadCheck,
    reply_max: usize,
    route: Route,
    kind: JobKind,
    /// When the call was made. `clock` measures the client's request that the call belongs to.
    since: Instant,
    clock: Option<Clock>,
    /// When DMA moved the entry of the request into the inbound ring.
    entry_times: Option<Arc<ChainTimes>>,
}

/// The parts of an answered job.
pub(super) struct AnsweredJob {
    pub(super) target: u16,
    pub(super) kind: JobKind,
    pub(super) upload: Vec<(usize, Bytes)>,
    pub(super) range: Option<HeldRange>,
    /// The window that contains the range, if DMA may use it.
    pub(super) window: Option<OpenedWindow>,
    pub(super) clock: Option<Clock>,
}

impl JobKind {
    /// Returns the receivers of the answers that are not known yet.
    pub(super) fn into_answers(self) -> Vec<AnswerTo> {
        match self {
            JobKind::Transactions { parts, .. } => {
                parts.into_iter().filter_map(|part| part.answer_to).collect()
            }
            JobKind::Read { answer_to, .. }
            | JobKind::StageWrite { answer_to, .. }
            | JobKind::Stripes { answer_to, .. }
            | JobKind::Call { answer_to, .. } => vec![answer_to],
            JobKind::StageRelease | JobKind::Channel(_) => Vec::new(),
        }
    }
}

/// Whether transactions fit into one ring entry, so that one transfer carries all of them.
pub(super) fn fits_inline(encoded: &EncodedTransactions) -> bool {
    encoded.control.len() + encoded.data_len <= MAX_INLINE
}

/// Whether one request may carry transactions of several targets. It holds its range until the
/// slowest target has answered, so the range must not be longer than that of the transaction of one
/// target.
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
    fn new(target: u16, after: u64, call: StoreCall, route: Route, kind: JobKind) -> Job {
        Job {
            target,
            after,
            call,
            tail: Vec::new(),
            upload: Vec::new(),
            payload: PayloadState::Inline,
            check: PayloadCheck::Trusted,
            reply_max: SMALL_REPLY,
            route,
            kind,
            since: Instant::now(),
            clock: phases::current(),
            entry_times: None,
        }
    }

    /// Creates a call to the channel itself.
    pub(super) fn of_channel(call: ChannelCall, kind: ChannelKind) -> Job {
        Job::new(0, 0, StoreCall::Channel(call), Route::Socket, JobKind::Channel(kind))
    }

    /// Creates a call on the control socket.
    pub(super) fn on_socket(
        target: u16,
        after: u64,
        call: StoreCall,
        answer_use: AnswerUse,
        answer_to: AnswerTo,
    ) -> Job {
        Job::new(target, after, call, Route::Socket, JobKind::Call { answer_use, answer_to })
    }

    /// Creates the release of a stage.
    pub(super) fn stage_release(target: u16, after: u64, host_id: u64) -> Job {
        let call = StoreCall::StageRelease { stage: host_id };
        Job::new(target, after, call, Route::Socket, JobKind::StageRelease)
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
        let kind = JobKind::StageWrite { stage, state: WriteState::Unposted, answer_to };
        Job {
            payload: want(data.len()),
            upload: vec![(0, data)],
            ..Job::new(target, 0, call, route(by_dma), kind)
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
            payload: want(fragments * len),
            upload,
            reply_max: 2 * SMALL_REPLY,
            ..Job::new(0, 0, call, route(by_dma), JobKind::Stripes { coded, answer_to })
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
        let payload = if in_entry { PayloadState::Inline } else { want(range_len(&encoded)) };
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
        let kind = JobKind::Transactions { parts: job_parts, stages: encoded.stages };
        Job { tail, upload, payload, reply_max, ..Job::new(0, 0, call, route(by_dma), kind) }
    }

    pub(super) fn read(target: u16, after: u64, read: ReadCall, by_dma: bool, answer_to: AnswerTo) -> Job {
        let ReadCall { cid, oid, offset, len, cover, dest } = read;
        let small = cover <= MAX_INLINE_READ;
        let payload = if small && by_dma { PayloadState::Inline } else { want(cover) };
        let data = if small { cover } else { 0 };
        let reply_max = SMALL_REPLY + cover.div_ceil(MIN_BUFFER) * 4 + data;
        let call = StoreCall::Read { cid, oid, offset, len, place: PayloadPlace::Inline };
        let kind = JobKind::Read { dest, answer_to };
        Job { payload, reply_max, ..Job::new(target, after, call, route(by_dma), kind) }
    }

    /// Length of the payload, in bytes.
    fn upload_len(&self) -> usize {
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

    pub(super) fn route(&self) -> Route {
        self.route
    }

    /// Pieces of the payload, each with its offset in the range or in the data section, in bytes.
    pub(super) fn upload(&self) -> &[(usize, Bytes)] {
        &self.upload
    }

    /// When the call was made.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    pub(super) fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    /// Returns where the engine records when it moves the entry of the request; `None` if the times
    /// are not needed.
    pub(super) fn time_entry(&mut self) -> Option<Arc<ChainTimes>> {
        self.entry_times = self.clock.as_ref().map(|_| Arc::default());
        self.entry_times.clone()
    }

    /// Records how long the request's entry waited for DMA, and how long DMA moved it, if the engine
    /// has recorded it.
    pub(super) fn book_entry(&self) {
        let times = self.entry_times.as_ref().and_then(|times| times.get());
        if let (Some(clock), Some((started, finished))) = (&self.clock, times) {
            clock.record(Phase::DmaWait, self.since, started);
            clock.record(Phase::Dma, started, finished);
        }
    }

    pub(super) fn reply_max(&self) -> usize {
        self.reply_max
    }

    /// The targets in whose lanes the job belongs.
    pub(super) fn lanes(&self) -> impl Iterator<Item = u16> {
        let (parts, of_read): (&[JobPart], _) = match &self.kind {
            JobKind::Transactions { parts, .. } => (parts, None),
            JobKind::Read { .. } => (&[], Some(self.target)),
            _ => (&[], None),
        };
        parts.iter().map(|part| part.target).chain(of_read)
    }

    /// The transactions of the job, if it consists of transactions.
    pub(super) fn parts_mut(&mut self) -> &mut [JobPart] {
        match &mut self.kind {
            JobKind::Transactions { parts, .. } => parts,
            _ => &mut [],
        }
    }

    /// Stages whose writes must precede the job.
    pub(super) fn named_stages(&self) -> &[StageId] {
        match &self.kind {
            JobKind::Transactions { stages, .. } => stages,
            _ => &[],
        }
    }

    /// The stage that the job writes to, if it is a stage write.
    pub(super) fn written_stage(&self) -> Option<StageId> {
        match self.kind {
            JobKind::StageWrite { stage, .. } => Some(stage),
            _ => None,
        }
    }

    /// The call to the channel itself that the job makes, if it makes one.
    pub(super) fn channel_kind(&self) -> Option<ChannelKind> {
        match self.kind {
            JobKind::Channel(kind) => Some(kind),
            _ => None,
        }
    }

    /// Takes the sender that reports that parity was computed.
    pub(super) fn take_coded(&mut self) -> Option<Coded> {
        match &mut self.kind {
            JobKind::Stripes { coded, .. } => coded.take(),
            _ => None,
        }
    }

    /// Whether the job belongs in a lane.
    pub(super) fn is_in_lane(&self) -> bool {
        matches!(self.kind, JobKind::Transactions { .. } | JobKind::Read { .. })
    }

    /// Whether the job must not overtake requests that were lost with the rings.
    pub(super) fn carries_data(&self) -> bool {
        self.is_in_lane() || matches!(self.kind, JobKind::StageWrite { .. } | JobKind::Stripes { .. })
    }

    /// Whether the job is a query that no other call waits for. Transactions wait for a query of an
    /// object.
    pub(super) fn is_query(&self) -> bool {
        matches!(self.kind, JobKind::Call { .. }) && !self.call.is_object_query()
    }

    pub(super) fn wants_reply(&self) -> bool {
        !matches!(self.kind, JobKind::StageRelease)
    }

    /// Whether the host or the accelerator computes the parity of the payload.
    fn is_coded_by_host(&self) -> bool {
        matches!(&self.call, StoreCall::StageStripes { stripes, .. } if matches!(stripes.parity, ParityFrom::By(_)))
    }

    /// Whether DMA carries or has carried any part of the payload.
    fn is_by_dma(&self) -> bool {
        self.route == Route::Ring && !self.upload.is_empty() || self.arrived() > 0
    }

    /// Whether the payload is in place, or travels with the request.
    pub(super) fn is_ready(&self) -> bool {
        match self.payload {
            PayloadState::Inline | PayloadState::InWindow(..) | PayloadState::Arrived { .. } => true,
            PayloadState::WaitsForRange(_)
            | PayloadState::WaitsForWindow(_)
            | PayloadState::Uploading(..) => false,
        }
    }

    /// Length of the range that the job waits for, in bytes.
    pub(super) fn wanted_range(&self) -> Option<usize> {
        match self.payload {
            PayloadState::WaitsForRange(len) => Some(len),
            _ => None,
        }
    }

    /// The range that the job holds.
    pub(super) fn range(&self) -> Option<&HeldRange> {
        match &self.payload {
            PayloadState::Inline | PayloadState::WaitsForRange(_) => None,
            PayloadState::WaitsForWindow(range)
            | PayloadState::Uploading(range, _)
            | PayloadState::InWindow(range, _)
            | PayloadState::Arrived { range, .. } => Some(range),
        }
    }

    /// The range and its window if DMA must move the payload before the request.
    pub(super) fn uploading(&self) -> Option<(&HeldRange, &OpenedWindow)> {
        match &self.payload {
            PayloadState::Uploading(range, window) => Some((range, window)),
            _ => None,
        }
    }

    /// The range and its window if DMA must move the payload together with the request.
    pub(super) fn in_window(&self) -> Option<(&HeldRange, &OpenedWindow)> {
        match &self.payload {
            PayloadState::InWindow(range, window) => Some((range, window)),
            _ => None,
        }
    }

    /// Bytes of the payload that DMA has moved into the range, of those that it will move before
    /// the request.
    pub(super) fn arrived(&self) -> usize {
        match self.payload {
            PayloadState::Arrived { bytes, .. } => bytes,
            _ => 0,
        }
    }

    /// Whether the control socket fills the range before the request.
    pub(super) fn is_put(&self) -> bool {
        self.route == Route::Socket && self.range().is_some() && !matches!(self.kind, JobKind::Read { .. })
    }

    /// Gives the job its range. The job then waits for its window.
    pub(super) fn grant(&mut self, range: HeldRange) {
        let before = std::mem::replace(&mut self.payload, PayloadState::WaitsForWindow(range));
        assert!(matches!(before, PayloadState::WaitsForRange(_)), "a job receives one range");
    }

    /// Continues without DMA a job that waits for its window.
    pub(super) fn skip_window(&mut self) {
        let PayloadState::WaitsForWindow(range) = self.take_payload() else {
            panic!("the job does not wait for a window")
        };
        self.payload = PayloadState::Arrived { range, bytes: 0 };
    }

    /// Uses DMA for the payload of a job that waits for its window. A short payload travels with
    /// the entry; the caller must upload a longer payload first.
    pub(super) fn use_window(&mut self, window: OpenedWindow) {
        assert_eq!(self.route, Route::Ring, "a job off the ring does not wait for a window");
        let PayloadState::WaitsForWindow(range) = self.take_payload() else {
            panic!("the job does not wait for a window")
        };
        self.payload = if self.upload_len() <= SHORT {
            PayloadState::InWindow(range, window)
        } else {
            PayloadState::Uploading(range, window)
        };
    }

    /// Records that DMA has moved `bytes` of the payload into the range, and moves no more of it.
    pub(super) fn uploaded(&mut self, bytes: usize) {
        let PayloadState::Uploading(range, _) = self.take_payload() else {
            panic!("the job is not being uploaded")
        };
        let len = self.upload_len();
        assert!(bytes <= len, "DMA moved {bytes} bytes of a payload of {len} bytes");
        self.payload = PayloadState::Arrived { range, bytes };
        if bytes < len {
            self.route = Route::Socket;
        }
    }

    /// Moves the job from the ring to the control socket. An upload in progress continues.
    pub(super) fn leave_ring(&mut self) {
        self.route = Route::Socket;
        self.payload = match self.take_payload() {
            PayloadState::InWindow(range, _) => PayloadState::Arrived { range, bytes: 0 },
            payload => payload,
        };
    }

    /// Whether DMA may have damaged the payload. `was_on_ring` says whether the ring carried the
    /// request.
    pub(super) fn is_exposed_to_dma(&self, was_on_ring: bool) -> bool {
        self.range().is_some() && !self.upload.is_empty() && (was_on_ring || self.arrived() > 0)
    }

    /// Prepares to send the whole payload again over the control socket, because the host found it
    /// damaged in its range.
    pub(super) fn found_damaged(&mut self) {
        self.leave_ring();
        match &mut self.payload {
            PayloadState::Arrived { bytes, .. } => *bytes = 0,
            _ => panic!("the payload of the request is not in a range"),
        }
        self.check = PayloadCheck::FoundDamaged;
    }

    /// Decides whether the host must verify the payload, each time before the job is sent. The host
    /// verifies the data of parity that it computes in any case. It asks for damaged data again
    /// only if the request is suspect.
    pub(super) fn choose_check(&mut self, verify: &mut Verify) {
        if self.check == PayloadCheck::FoundDamaged {
            return;
        }
        let is_suspect = match self.kind {
            JobKind::StageWrite { .. } => verify.next(),
            _ => !self.upload.is_empty() && (self.is_coded_by_host() || verify.next()),
        };
        self.check = if is_suspect { PayloadCheck::Suspect } else { PayloadCheck::Trusted };
    }

    /// Whether the host must verify the payload.
    pub(super) fn is_suspect(&self) -> bool {
        self.check != PayloadCheck::Trusted
    }

    /// Counts a stage write as posted, and as unsure if a transaction could overtake it. An unsure
    /// write stays unsure when it is sent again. Returns the previous state.
    pub(super) fn write_posted(&mut self, unsure: bool) -> WriteState {
        let JobKind::StageWrite { state, .. } = &mut self.kind else {
            panic!("only a stage write is counted in a stage")
        };
        let before = *state;
        *state = if unsure || before == WriteState::Unsure { WriteState::Unsure } else { WriteState::Sure };
        before
    }

    /// The header of the request. `id` is the job's id.
    pub(super) fn header(&self, id: u64) -> EntryHeader {
        // Payload that the control socket carries, or that was sent again, was damaged in this
        // process, so sending it again is useless.
        let refuses = match self.check {
            PayloadCheck::Trusted => false,
            PayloadCheck::Suspect => !self.is_by_dma(),
            PayloadCheck::FoundDamaged => true,
        };
        EntryHeader {
            after: self.after,
            reply_max: self.reply_max as u32,
            flags: if self.is_suspect() { VERIFY } else { 0 } | if refuses { REFUSE } else { 0 },
            ..EntryHeader::new(
                EntryKind::Request,
                self.target,
                if self.wants_reply() { id } else { NO_REPLY },
            )
        }
    }

    /// Encodes the control data of the request. `base` is the start of the data region, or `None`
    /// if there is no region.
    pub(super) fn encode(&mut self, base: Option<usize>) -> Vec<u8> {
        self.place_payload(base);
        let mut control = encode(&self.call);
        control.extend_from_slice(&self.tail);
        control
    }

    /// Sets the location of the payload in the call. The location is the range if DMA or the
    /// control socket fills the range.
    fn place_payload(&mut self, base: Option<usize>) {
        let range = match (base, self.range()) {
            (Some(base), Some(range)) => {
                PayloadPlace::Range { offset: (base + range.offset()) as u64, len: range.len() as u64 }
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

    /// Drops the payload after the request was sent, unless DMA has moved any part of it: the host
    /// may find that part damaged, and the store channel then sends the payload again.
    pub(super) fn drop_sent_payload(&mut self) {
        if self.route == Route::Socket && self.arrived() == 0 {
            self.upload.clear();
        }
    }

    /// Takes apart an answered job, or a job of an ended incarnation.
    pub(super) fn into_answered(self) -> AnsweredJob {
        let (range, window) = match self.payload {
            PayloadState::Inline | PayloadState::WaitsForRange(_) => (None, None),
            PayloadState::Uploading(range, window) | PayloadState::InWindow(range, window) => {
                (Some(range), Some(window))
            }
            PayloadState::WaitsForWindow(range) | PayloadState::Arrived { range, .. } => (Some(range), None),
        };
        let Job { target, kind, upload, clock, .. } = self;
        AnsweredJob { target, kind, upload, range, window, clock }
    }

    fn take_payload(&mut self) -> PayloadState {
        std::mem::replace(&mut self.payload, PayloadState::Inline)
    }
}

fn route(by_dma: bool) -> Route {
    if by_dma { Route::Ring } else { Route::Socket }
}

fn want(len: usize) -> PayloadState {
    if len == 0 { PayloadState::Inline } else { PayloadState::WaitsForRange(len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store_channel::host_ranges::HostRanges;
    use channel::{DmaRegion, OnDrop, RegionId};
    use std::sync::Arc;
    use tokio::sync::oneshot;

    const LEN: usize = 1 << 20;

    fn stage_write(len: usize) -> Job {
        let payload = Payload::compute(0, Bytes::from(vec![1; len]));
        Job::stage_write(0, StageId(1), 7, 0, payload, true, oneshot::channel().0)
    }

    fn granted(mut job: Job) -> Job {
        let len = job.wanted_range().unwrap();
        job.grant(HostRanges::new(LEN, LEN).take(len).unwrap());
        job
    }

    fn window() -> OpenedWindow {
        let region = Arc::new(DmaRegion::new(RegionId::NONE, LEN, OnDrop::new(|| ())));
        OpenedWindow { region, origin: 0 }
    }

    #[test]
    fn a_short_payload_travels_with_the_entry_and_a_long_payload_is_uploaded_first() {
        let mut short = granted(stage_write(SHORT));
        assert!(!short.is_ready(), "the window is not open");
        short.use_window(window());
        assert!(short.is_ready() && short.in_window().is_some());
        let mut long = granted(stage_write(SHORT + 4096));
        long.use_window(window());
        assert!(!long.is_ready() && long.uploading().is_some());
        long.uploaded(SHORT + 4096);
        assert!(long.is_ready() && long.in_window().is_none());
        assert_eq!(long.route(), Route::Ring);
    }

    #[test]
    fn a_partial_upload_continues_over_the_socket() {
        let mut job = granted(stage_write(SHORT + 4096));
        job.use_window(window());
        job.uploaded(4096);
        assert_eq!((job.route(), job.arrived()), (Route::Socket, 4096));
        assert!(job.is_put());
        job.drop_sent_payload();
        assert!(job.is_exposed_to_dma(false), "DMA may have damaged the first block");
        job.found_damaged();
        assert_eq!((job.arrived(), job.upload_len()), (0, SHORT + 4096));
        assert_eq!(job.header(1).flags, VERIFY | REFUSE);
    }

    #[test]
    fn a_job_that_leaves_the_ring_needs_no_window() {
        let mut waiting = granted(stage_write(4096));
        waiting.leave_ring();
        waiting.skip_window();
        let mut ready = granted(stage_write(4096));
        ready.use_window(window());
        ready.leave_ring();
        for mut job in [waiting, ready] {
            assert!(job.is_ready() && job.is_put() && job.in_window().is_none());
            job.drop_sent_payload();
            assert_eq!(job.upload_len(), 0, "the socket carries all of the payload");
        }
    }

    #[test]
    fn an_unsure_write_stays_unsure_when_it_is_sent_again() {
        let mut job = stage_write(4096);
        assert_eq!(job.write_posted(false), WriteState::Unposted);
        assert_eq!(job.write_posted(true), WriteState::Sure);
        assert_eq!(job.write_posted(false), WriteState::Unsure);
        assert_eq!(job.write_posted(false), WriteState::Unsure);
    }

    #[test]
    #[should_panic(expected = "a job receives one range")]
    fn a_job_cannot_receive_a_second_range() {
        let mut job = granted(stage_write(4096));
        job.grant(HostRanges::new(LEN, LEN).take(4096).unwrap());
    }
}
