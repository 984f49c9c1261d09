//! The execution of one call on a store, and its reply.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use base::block::{ChecksumMismatch, Payload, crc32c_of, verify_pieces};
use base::clock::Instant;
use base::mem::ArenaBuf;
use base::pool::{Lease, Released};
use bytes::Bytes;
use channel::{EntryHeader, VERIFY};
use store::{
    ObjectStore, Op, ReadData, Result, StageId, StoreCalls, StoreError, StoreReply, StoreRequest,
    Transaction, WriteSource,
};

use super::stages::OwnStages;
use super::transactions::FinishedTransaction;
use crate::messages::{
    CallAnswer, CallOutcome, ParityFrom, PayloadPlace, StoreCall, TransactionParts, decode, pack_checksums,
    unpack_checksums,
};
use crate::transaction_codec;

/// The path on which a request arrived and on which its reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Via {
    Ring,
    Socket,
}

/// A request that was received and not executed yet.
pub(super) struct ReceivedCall {
    pub(super) header: EntryHeader,
    pub(super) came: Instant,
    pub(super) via: Via,
    /// Length of the request's frame, in bytes.
    pub(super) size: usize,
    /// The call, the control data that follows it, and its payload; or why they cannot be decoded.
    pub(super) call: Result<(StoreCall, Bytes, Bytes)>,
}

/// A call that is complete, with the data for its reply.
pub(super) struct FinishedCall {
    pub(super) header: EntryHeader,
    pub(super) came: Instant,
    pub(super) via: Via,
    pub(super) outcome: CallOutcome,
    pub(super) data: Vec<Bytes>,
    /// Whether another reply to the same request follows.
    pub(super) is_first: bool,
}

/// The end of a call, or of one of the transactions of a request.
pub(super) enum Finished {
    Call(FinishedCall),
    Transaction(FinishedTransaction),
}

/// A call that the store is executing.
pub(super) type RunningCall = Pin<Box<dyn Future<Output = Finished>>>;

impl ReceivedCall {
    pub(super) fn decode(header: EntryHeader, via: Via, control: &Bytes, data: Bytes) -> ReceivedCall {
        let size = header.total_len();
        let call = decode::<StoreCall>(control).map(|(call, rest)| (call, control.slice_ref(rest), data));
        ReceivedCall { header, came: Instant::now(), via, size, call }
    }

    /// Completes the call with this outcome and without data.
    pub(super) fn done(self, outcome: CallOutcome) -> FinishedCall {
        let ReceivedCall { header, came, via, .. } = self;
        FinishedCall { header, came, via, outcome, data: Vec::new(), is_first: false }
    }

    /// Length of the request's frame and of the range with its payload, in bytes.
    pub(super) fn cost(&self) -> usize {
        let range = match &self.call {
            Ok((
                StoreCall::StageWrite { place: PayloadPlace::Range { len, .. }, .. }
                | StoreCall::Transactions { place: PayloadPlace::Range { len, .. }, .. }
                | StoreCall::StageStripes { place: PayloadPlace::Range { len, .. }, .. },
                ..,
            )) => usize::try_from(*len).unwrap_or(usize::MAX),
            _ => 0,
        };
        self.size.saturating_add(range)
    }

    /// Whether the host must verify the payload's checksums.
    pub(super) fn verifies(&self) -> bool {
        self.header.flags & VERIFY != 0 && !base::mutant!(TrustTransferredPayload)
    }

    /// Whether the part of the request that is in a range of host memory arrived damaged. An
    /// encoded transaction is always verified, and payload only if the request demands that. The
    /// data of parity is verified when the parity is computed, and payload inside the entry when the
    /// call starts: the entry itself was verified when it was read, so a transfer cannot have damaged
    /// it. An invalid range does not count as damaged, because the call itself then fails.
    pub(super) fn is_damaged(&self, lease: Option<&Lease>) -> bool {
        let payload = self.verifies();
        let Ok((call, rest, data)) = &self.call else { return false };
        match call {
            StoreCall::StageWrite {
                block_offset,
                checksums,
                place: place @ PayloadPlace::Range { .. },
                ..
            } if payload => {
                let Ok((bytes, _)) = payload_of(lease, *place, data.clone()) else { return false };
                let Ok(checksums) = unpack_checksums(checksums) else { return false };
                let payload = Payload::from_parts(u64::from(*block_offset), bytes, checksums);
                payload.is_ok_and(|payload| payload.verify().is_err())
            }
            StoreCall::Transactions { transactions, place: place @ PayloadPlace::Range { .. } } => {
                let is_in_range = rest.is_empty();
                if !is_in_range && !payload {
                    return false;
                }
                let Ok((bytes, _)) = payload_of(lease, *place, data.clone()) else { return false };
                let parts = split_transactions(transactions, *place, rest.clone(), bytes);
                let Ok((controls, data)) = parts else { return false };
                let crc = || crc32c_of(controls.iter().map(|control| &control[..]));
                is_in_range && crc() != transactions.control_crc
                    || payload && controls.into_iter().any(|control| holds_damage(control, &data))
            }
            StoreCall::StageStripes { stripes, .. } if matches!(stripes.parity, ParityFrom::By(_)) => false,
            StoreCall::StageStripes { stripes, place: place @ PayloadPlace::Range { .. } } if payload => {
                let sent = (stripes.len as usize).saturating_mul(stripes.sent());
                let Ok((bytes, _)) = payload_of(lease, *place, data.clone()) else { return false };
                let (Some(bytes), Ok(checksums)) = (bytes.get(..sent), unpack_checksums(&stripes.checksums))
                else {
                    return false;
                };
                verify_pieces(0, bytes, &checksums).is_err()
            }
            _ => false,
        }
    }
}

fn holds_damage(control: Bytes, data: &Bytes) -> bool {
    transaction_codec::decode(control, data)
        .is_ok_and(|transaction| verify_transaction(&transaction).is_err())
}

/// Compares the payload of a transaction with its checksums.
pub(super) fn verify_transaction(transaction: &Transaction) -> Result<(), ChecksumMismatch> {
    transaction.ops.iter().try_for_each(|op| match op {
        Op::Write { source: WriteSource::Inline(payload), .. } => payload.verify(),
        _ => Ok(()),
    })
}

/// The error for payload that was damaged before it was sent.
pub(super) fn bad_payload(e: ChecksumMismatch) -> StoreError {
    StoreError::BadPayload(format!("it was damaged before the osd sent it: {e}"))
}

pub(super) fn claim(lease: Option<&Lease>, offset: u64, len: u64) -> Result<(ArenaBuf, Released)> {
    let lease =
        lease.ok_or_else(|| StoreError::InvalidArgument("this attachment has no host memory".into()))?;
    lease.claim(offset, len).map_err(|e| StoreError::InvalidArgument(e.to_string()))
}

/// The payload of a request, without copying.
pub(super) fn payload_of(
    lease: Option<&Lease>,
    place: PayloadPlace,
    data: Bytes,
) -> Result<(Bytes, Option<Released>)> {
    match place {
        PayloadPlace::Inline => Ok((data, None)),
        PayloadPlace::Range { offset, len } => {
            let (buffer, released) = claim(lease, offset, len)?;
            Ok((buffer.freeze(), Some(released)))
        }
    }
}

type Returned = Result<(CallAnswer, Vec<Bytes>)>;
type Calling = Pin<Box<dyn Future<Output = Returned>>>;

/// Starts the call. Its position in the store's order is fixed when this function returns. `lease`
/// is the attachment's data region, and `stages` are its stages. The call completes only after the store has released the host
/// memory of the request, because the osd may then reuse that memory.
pub(super) fn make(
    store: &Arc<dyn ObjectStore>,
    stages: &OwnStages,
    lease: Option<&Lease>,
    request: ReceivedCall,
) -> RunningCall {
    let verifies = request.verifies();
    let ReceivedCall { header, came, via, call, .. } = request;
    let is_own = |stage| stages.check(header.target, stage);
    let calling: Result<(Calling, Option<Released>)> =
        call.and_then(|(call, _, data)| start(store, is_own, lease, verifies, call, data));
    Box::pin(async move {
        let returned = match calling {
            Ok((calling, released)) => {
                let returned = calling.await;
                if let Some(released) = released {
                    released.wait().await;
                }
                returned
            }
            Err(e) => Err(e),
        };
        let (outcome, data) = match returned {
            Ok((answer, data)) => (Ok(answer), data),
            Err(e) => (Err(e), Vec::new()),
        };
        Finished::Call(FinishedCall { header, came, via, outcome, data, is_first: false })
    })
}

/// Starts a call. Payload in host memory was verified before, so `verifies` concerns only payload
/// inside the request. `is_own` checks that a stage belongs to the attachment.
fn start(
    store: &Arc<dyn ObjectStore>,
    is_own: impl FnOnce(StageId) -> Result<()>,
    lease: Option<&Lease>,
    verifies: bool,
    call: StoreCall,
    data: Bytes,
) -> Result<(Calling, Option<Released>)> {
    match call {
        StoreCall::StageWrite { stage, offset, block_offset, checksums, place } => {
            let checksums = unpack_checksums(&checksums)?;
            let (bytes, released) = payload_of(lease, place, data)?;
            let payload = Payload::from_parts(u64::from(block_offset), bytes, checksums)
                .map_err(|e| StoreError::InvalidArgument(e.to_string()))?;
            if verifies && place == PayloadPlace::Inline {
                payload.verify().map_err(bad_payload)?;
            }
            is_own(StageId(stage))?;
            let writing = store.stage_write(StageId(stage), offset, payload);
            Ok((Box::pin(async move { writing.await.map(|()| (CallAnswer::Done, Vec::new())) }), released))
        }
        StoreCall::Read { cid, oid, offset, len, place } => {
            let PayloadPlace::Range { offset: start, len: room } = place else {
                let reading = store.read(&cid, &oid, offset, len, None);
                return Ok((Box::pin(async move { Ok(read_answer(reading.await?)) }), None));
            };
            let (dest, released) = claim(lease, start, room)?;
            let lease = lease.cloned();
            let reading = store.read(&cid, &oid, offset, len, Some(dest));
            Ok((Box::pin(read_into(reading, lease, start, room, released)), None))
        }
        other => Ok((control(store, other), None)),
    }
}

/// Returns the encoded transactions of a request, and their data section. `rest` follows the call,
/// and `bytes` is the payload. Encoded transactions in memory that the osd can write are copied. The
/// data stays in that memory.
pub(super) fn split_transactions(
    transactions: &TransactionParts,
    place: PayloadPlace,
    mut rest: Bytes,
    mut bytes: Bytes,
) -> Result<(Vec<Bytes>, Bytes)> {
    let wrong =
        || StoreError::InvalidArgument("transactions do not have the lengths of their request".into());
    let len = transactions.lengths.iter().try_fold(0_usize, |sum, len| sum.checked_add(*len as usize));
    let len = len.ok_or_else(wrong)?;
    if matches!(place, PayloadPlace::Range { .. }) && rest.is_empty() {
        let data_at = len.checked_next_multiple_of(base::pool::MIN_BUFFER).ok_or_else(wrong)?;
        rest = Bytes::copy_from_slice(bytes.get(..len).ok_or_else(wrong)?);
        bytes = bytes.slice(data_at.min(bytes.len())..);
    }
    if rest.len() != len {
        return Err(wrong());
    }
    Ok((transactions.lengths.iter().map(|len| rest.split_to(*len as usize)).collect(), bytes))
}

/// The answer to a read, and its data.
fn read_answer(read: ReadData) -> (CallAnswer, Vec<Bytes>) {
    let ReadData { offset, data, checksums, object_size, .. } = read;
    let len = data.iter().map(|piece| piece.len() as u64).sum();
    (CallAnswer::Read { offset, len, checksums: pack_checksums(&checksums), object_size }, data)
}

/// Waits for a read into the range `start..start + room` of the data region. Makes sure that the
/// data is in the range and that only the osd still uses the range.
async fn read_into(
    reading: impl Future<Output = Result<ReadData>>,
    lease: Option<Lease>,
    start: u64,
    room: u64,
    released: Released,
) -> Returned {
    let (answer, data) = match reading.await {
        Ok(read) => read_answer(read),
        Err(e) => {
            released.wait().await;
            return Err(e);
        }
    };
    let in_place = match data.as_slice() {
        [] => true,
        [one] => lease.as_ref().and_then(|lease| lease.offset_of(one)) == Some(start),
        _ => false,
    };
    if in_place {
        drop(data);
        released.wait().await;
        return Ok((answer, Vec::new()));
    }
    released.wait().await;
    let len: usize = data.iter().map(Bytes::len).sum();
    if len as u64 > room {
        return Err(StoreError::Io(format!(
            "the store returned {len} bytes for a read into a range of {room}"
        )));
    }
    let (mut buffer, again) = claim(lease.as_ref(), start, room)?;
    let mut at = 0;
    for piece in &data {
        buffer[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
    metrics::counter!("outboard_proxy_range_copy_bytes").increment(len as u64);
    drop(buffer);
    again.wait().await;
    Ok((answer, Vec::new()))
}

/// Starts a call whose reply has no data.
fn control(store: &Arc<dyn ObjectStore>, call: StoreCall) -> Calling {
    let request = match call {
        StoreCall::Stage { len } => StoreRequest::Stage { len },
        StoreCall::StageRelease { stage } => StoreRequest::StageRelease { stage: StageId(stage) },
        StoreCall::Query { cid, query } => StoreRequest::Query { cid, query },
        StoreCall::Collections => StoreRequest::Collections,
        StoreCall::Space => StoreRequest::Space,
        StoreCall::Umount => StoreRequest::Umount,
        StoreCall::StageWrite { .. }
        | StoreCall::StageStripes { .. }
        | StoreCall::HostReading { .. }
        | StoreCall::Usage
        | StoreCall::Transactions { .. }
        | StoreCall::Read { .. }
        | StoreCall::Channel(_) => {
            let refused =
                StoreError::InvalidArgument("this call cannot be executed as a call without data".into());
            return Box::pin(std::future::ready(Err(refused)));
        }
    };
    let reply = store.submit(request);
    Box::pin(async move {
        let answer = match reply.await? {
            StoreReply::Done => CallAnswer::Done,
            StoreReply::Stage(stage) => CallAnswer::Stage(stage.0),
            StoreReply::Query(found) => CallAnswer::Query(found),
            StoreReply::Collections(collections) => CallAnswer::Collections(collections),
            StoreReply::Space(space) => CallAnswer::Space(space),
            StoreReply::Read(_) => {
                return Err(StoreError::Io(
                    "the store replied with data to a call that returns no data".into(),
                ));
            }
        };
        Ok((answer, Vec::new()))
    })
}
