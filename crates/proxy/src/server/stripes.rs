//! Calls that write stripes to several stores of the attachment.

use std::time::Duration;

use base::block::{BLOCK, ChecksumMismatch, Payload, verify_pieces};
use base::pool::{Lease, Released};
use bytes::Bytes;
use channel::{REFUSE, VERIFY};
use futures::future::join_all;
use store::stripes::{
    Coded, Engines, FragmentBuf, FragmentBytes, Parity, StoreStage, StripeError, check_shape, write_parts,
};
use store::{StageId, StoreError};
use tokio::sync::oneshot;

use super::ServedTarget;
use super::calls::{Finished, FinishedCall, ReceivedCall, RunningCall, bad_payload, claim};
use super::stages::OwnStages;
use crate::messages::{
    CallAnswer, CallOutcome, NO_REPLY, ParityFrom, PayloadPlace, StoreCall, Stripes, unpack_checksums,
};

/// Fragments in host memory or in a frame, ready to be written.
struct Fragments {
    data: Vec<Payload>,
    parity: Parity,
    /// Buffers for parity that the host computes.
    buffers: Vec<FragmentBuf>,
    /// Each future resolves when the stores have released a part of host memory.
    released: Vec<Released>,
}

/// Starts the call. Returns two futures: first the notice that parity was computed, and second the
/// result of the call.
pub(super) fn make(
    targets: &[ServedTarget],
    stages: &OwnStages,
    engines: &Engines,
    lease: Option<&Lease>,
    request: ReceivedCall,
) -> [RunningCall; 2] {
    let (coded, is_coded) = oneshot::channel();
    let (noticed, is_noticed) = oneshot::channel::<()>();
    let verifies = request.verifies();
    let ReceivedCall { header, came, via, call, .. } = request;
    let started = call.and_then(|(call, _, data)| match call {
        StoreCall::StageStripes { stripes, place } => {
            let is_unverified = verifies && place == PayloadPlace::Inline;
            let parts = parts(targets, stages, &stripes)?;
            start(engines, lease, stripes, parts, place, data, (coded, is_unverified))
        }
        _ => Err(StoreError::InvalidArgument("the call is not a write of stripes".into())),
    });
    let done = Box::pin(async move {
        let outcome = match started {
            Ok((writing, released)) => {
                let written = writing.await;
                join_all(released.into_iter().map(Released::wait)).await;
                answer(written, header.flags)
            }
            Err(e) => Err(e),
        };
        // Wait until the notice was queued or dropped, because it must precede the answer.
        let _ = is_noticed.await;
        Finished::Call(FinishedCall { header, came, via, outcome, data: Vec::new(), is_first: false })
    });
    let notice = Box::pin(async move {
        let took: Result<Option<Duration>, _> = is_coded.await;
        drop(noticed);
        // Send no notice if no parity was computed.
        let header = if took.is_ok() { header } else { channel::EntryHeader { id: NO_REPLY, ..header } };
        let took = took.ok().flatten().map(|took| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        let outcome = Ok(CallAnswer::Coded(took));
        Finished::Call(FinishedCall { header, came, via, outcome, data: Vec::new(), is_first: true })
    });
    [notice, done]
}

fn answer(written: Result<(), StripeError>, flags: u32) -> CallOutcome {
    match written {
        Ok(()) => Ok(CallAnswer::Done),
        Err(StripeError::Coding(why)) => Ok(CallAnswer::NotCoded(why)),
        // The transfer may have damaged the data. The osd has the data and can send it again.
        Err(StripeError::Damaged(_)) if flags & (VERIFY | REFUSE) == VERIFY => Ok(CallAnswer::Damaged),
        Err(StripeError::Damaged(what)) => Err(StoreError::BadPayload(what)),
        Err(StripeError::Part(number, e)) => Ok(CallAnswer::PartFailed(number as u16, e)),
        Err(StripeError::Store(e)) => Err(e),
    }
}

type Writing = base::BoxFuture<'static, Result<(), StripeError>>;

/// The stages to which stripes are written.
fn parts(
    targets: &[ServedTarget],
    stages: &OwnStages,
    stripes: &Stripes,
) -> store::Result<Vec<Option<StoreStage>>> {
    let find = |part: &Option<(u16, u64)>| {
        let Some((target, stage)) = *part else { return Ok(None) };
        stages.check(target, StageId(stage))?;
        Ok(Some((std::sync::Arc::clone(&targets[usize::from(target)].store), StageId(stage))))
    };
    stripes.parts.iter().map(find).collect()
}

fn start(
    engines: &Engines,
    lease: Option<&Lease>,
    stripes: Stripes,
    parts: Vec<Option<StoreStage>>,
    place: PayloadPlace,
    data: Bytes,
    (coded, is_unverified): (Coded, bool),
) -> store::Result<(Writing, Vec<Released>)> {
    check_shape(stripes.len, stripes.data.into(), stripes.parts.len(), stripes.offset)?;
    let Fragments { data, parity, buffers, released } = fragments(&stripes, lease, place, data)?;
    let computes = matches!(parity, Parity::By(_));
    if is_unverified && !computes {
        verify(&data, &parity).map_err(bad_payload)?;
    }
    let coded = computes.then_some(coded);
    Ok((write_parts(engines, parts, stripes.offset, data, parity, buffers, coded), released))
}

/// Compares all fragments of the request with their checksums.
fn verify(data: &[Payload], parity: &Parity) -> Result<(), ChecksumMismatch> {
    data.iter().try_for_each(Payload::verify)?;
    let Parity::Here(parity) = parity else { return Ok(()) };
    let whole = |fragment: &FragmentBytes| verify_pieces(0, &fragment.pieces.concat(), &fragment.checksums);
    parity.iter().try_for_each(whole)
}

fn fragments(
    stripes: &Stripes,
    lease: Option<&Lease>,
    place: PayloadPlace,
    inline: Bytes,
) -> store::Result<Fragments> {
    let len = stripes.len as usize;
    let (k, m) = (usize::from(stripes.data), stripes.parts.len() - usize::from(stripes.data));
    let sent = stripes.sent();
    let computed = if matches!(stripes.parity, ParityFrom::By(_)) { m } else { 0 };
    let mut released = Vec::new();
    let wrong = |what: String| StoreError::InvalidArgument(format!("stripes of {k}+{m} fragments: {what}"));
    let too_long = || wrong(format!("fragments of {len} bytes are too long"));
    let sent_len = len.checked_mul(sent).ok_or_else(too_long)?;
    let (payload, buffers) = match place {
        PayloadPlace::Inline if inline.len() == sent_len => {
            (inline, (0..computed).map(|_| FragmentBuf::heap(len)).collect())
        }
        PayloadPlace::Inline => {
            return Err(wrong(format!("the request carries {} bytes, not {sent_len}", inline.len())));
        }
        PayloadPlace::Range { offset, len: room } => {
            let all = len.checked_mul(sent + computed).ok_or_else(too_long)?;
            if room < all as u64 {
                return Err(wrong(format!("{all} bytes do not fit in a range of {room}")));
            }
            let mut take = |at: usize, len: usize| {
                let (buffer, free) = claim(lease, offset + at as u64, len as u64)?;
                released.push(free);
                Ok::<_, StoreError>(buffer)
            };
            let payload = take(0, sent_len)?.freeze();
            let buffer = |row: usize| Ok(FragmentBuf::Arena(take(sent_len + row * len, len)?));
            (payload, (0..computed).map(buffer).collect::<store::Result<_>>()?)
        }
    };
    let checksums = unpack_checksums(&stripes.checksums)?;
    let blocks = len / BLOCK as usize;
    if checksums.len() != blocks * sent {
        return Err(wrong(format!(
            "the request has {} checksums for {} blocks",
            checksums.len(),
            blocks * sent
        )));
    }
    let fragment = |number: usize| {
        let bytes = payload.slice(number * len..(number + 1) * len);
        let sums = checksums[number * blocks..(number + 1) * blocks].to_vec();
        Payload::from_parts(0, bytes, sums).map_err(|e| wrong(e.to_string()))
    };
    let mut data = (0..sent).map(fragment).collect::<store::Result<Vec<Payload>>>()?;
    let rest = data.split_off(k);
    let parity = match stripes.parity {
        ParityFrom::Payload => Parity::Here(rest.into_iter().map(FragmentBytes::from).collect()),
        ParityFrom::Copies if k == 1 => Parity::Copies,
        ParityFrom::Copies => return Err(wrong("only a single data fragment can be copied".into())),
        ParityFrom::By(coder) => Parity::By(coder),
    };
    Ok(Fragments { data, parity, buffers, released })
}
