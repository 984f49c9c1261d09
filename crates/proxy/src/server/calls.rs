//! One call on a store, and what its reply says.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use base::block::Payload;
use base::mem::ArenaBuf;
use base::pool::Lease;
use bytes::Bytes;
use channel::Header;
use store::{ObjectStore, ReadData, Result, StageId, StoreError};
use tokio::sync::oneshot;

use crate::transaction_codec;
use crate::wire::{Answer, Call, Outcome, Place, decode, pack_checksums, unpack_checksums};

/// By which way a request came, and its reply goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Via {
    Ring,
    Socket,
}

/// A request whose turn has come or will come.
pub(super) struct Request {
    pub(super) header: Header,
    pub(super) via: Via,
    /// The call, what follows it in the control data, and its payload; or why they cannot be read.
    pub(super) call: Result<(Call, Bytes, Bytes)>,
}

/// A call that is done.
pub(super) struct Done {
    pub(super) header: Header,
    pub(super) via: Via,
    pub(super) outcome: Outcome,
    pub(super) data: Vec<Bytes>,
}

/// A call that the store is at.
pub(super) type Running = Pin<Box<dyn Future<Output = Done>>>;

impl Request {
    pub(super) fn decode(header: Header, via: Via, control: &Bytes, data: Bytes) -> Request {
        let call = decode::<Call>(control).map(|(call, rest)| (call, control.slice_ref(rest), data));
        Request { header, via, call }
    }

    pub(super) fn is_transaction(&self) -> bool {
        matches!(self.call, Ok((Call::Transaction { .. }, ..)))
    }
}

/// Payload in host memory: says when the store has let go of it, because only then the osd may use the range again.
struct Claimed {
    buffer: ArenaBuf,
    _released: oneshot::Sender<()>,
}

impl AsRef<[u8]> for Claimed {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

/// Resolves when the payload's memory is free.
type Released = Option<oneshot::Receiver<()>>;

fn claim(lease: Option<&Lease>, offset: u64, len: u64) -> Result<ArenaBuf> {
    let lease = lease.ok_or_else(|| StoreError::InvalidArgument("this session has no host memory".into()))?;
    lease.claim(offset, len).map_err(|e| StoreError::InvalidArgument(e.to_string()))
}

/// The payload of a request, not copied.
fn payload_of(lease: Option<&Lease>, place: Place, data: Bytes) -> Result<(Bytes, Released)> {
    match place {
        Place::Inline => Ok((data, None)),
        Place::Range { offset, len } => {
            let buffer = claim(lease, offset, len)?;
            let (tx, rx) = oneshot::channel();
            Ok((Bytes::from_owner(Claimed { buffer, _released: tx }), Some(rx)))
        }
    }
}

type Returned = Result<(Answer, Vec<Bytes>)>;
type Calling = Pin<Box<dyn Future<Output = Returned>>>;

/// Makes the call: it takes its place in the store before this returns. `lease` is the data region of the session.
pub(super) fn make(store: &Arc<dyn ObjectStore>, lease: Option<&Lease>, request: Request) -> Running {
    let Request { header, via, call } = request;
    let calling: Result<(Calling, Released)> =
        call.and_then(|(call, rest, data)| start(store, lease, call, rest, data));
    Box::pin(async move {
        let returned = match calling {
            Ok((calling, released)) => {
                let returned = calling.await;
                if let Some(released) = released {
                    // The sender is dropped with the memory; nothing is ever sent.
                    let _ = released.await;
                }
                returned
            }
            Err(e) => Err(e),
        };
        let (outcome, data) = match returned {
            Ok((answer, data)) => (Ok(answer), data),
            Err(e) => (Err(e), Vec::new()),
        };
        Done { header, via, outcome, data }
    })
}

fn start(
    store: &Arc<dyn ObjectStore>,
    lease: Option<&Lease>,
    call: Call,
    rest: Bytes,
    data: Bytes,
) -> Result<(Calling, Released)> {
    match call {
        Call::StageWrite { stage, offset, phase, checksums, place } => {
            let checksums = unpack_checksums(&checksums)?;
            let (bytes, released) = payload_of(lease, place, data)?;
            let payload = Payload::from_parts(u64::from(phase), bytes, checksums)
                .map_err(|e| StoreError::InvalidArgument(e.to_string()))?;
            let writing = store.stage_write(StageId(stage), offset, payload);
            Ok((Box::pin(async move { writing.await.map(|()| (Answer::Done, Vec::new())) }), released))
        }
        Call::Transaction { control_len, place } => {
            let (control, data, released) = match place {
                Place::Inline => (rest, data, None),
                Place::Range { .. } => {
                    let (bytes, released) = payload_of(lease, place, data)?;
                    let (control, data) = split_transaction(bytes, control_len as usize)?;
                    (control, data, released)
                }
            };
            let queued = store.queue_transaction(transaction_codec::decode(control, &data)?);
            drop(data);
            Ok((Box::pin(async move { queued.await.map(|()| (Answer::Done, Vec::new())) }), released))
        }
        Call::Read { cid, oid, offset, len, place } => {
            let (dest, again) = match (place, lease) {
                (Place::Range { offset, len }, Some(lease)) => {
                    (Some(claim(Some(lease), offset, len)?), Some((lease.clone(), offset, len)))
                }
                _ => (None, None),
            };
            let reading = store.read(&cid, &oid, offset, len, dest);
            Ok((Box::pin(async move { read_answer(reading.await?, again) }), None))
        }
        other => Ok((metadata(store, other), None)),
    }
}

/// Copies the control part of a large transaction out of memory that the osd can reach; leaves its payload there.
fn split_transaction(bytes: Bytes, control_len: usize) -> Result<(Bytes, Bytes)> {
    let data_at = control_len.checked_next_multiple_of(base::pool::MIN_BUFFER);
    let (Some(control), Some(data_at)) = (bytes.get(..control_len), data_at) else {
        return Err(StoreError::InvalidArgument("a transaction is longer than its range".into()));
    };
    Ok((Bytes::copy_from_slice(control), bytes.slice(data_at.min(bytes.len())..)))
}

/// Makes sure that what was read is where the osd will fetch it.
fn read_answer(read: ReadData, range: Option<(Lease, u64, u64)>) -> Returned {
    let ReadData { offset, data, checksums, object_size } = read;
    let len = data.iter().map(|piece| piece.len() as u64).sum();
    let answer = Answer::Read { offset, len, checksums: pack_checksums(&checksums), object_size };
    let Some((lease, start, room)) = range else { return Ok((answer, data)) };
    if len > room {
        return Err(StoreError::Io(format!("the store read {len} bytes where {room} were asked for")));
    }
    let in_place = match data.as_slice() {
        [] => true,
        [one] => lease.offset_of(one) == Some(start),
        _ => false,
    };
    if !in_place {
        let mut buffer = claim(Some(&lease), start, room)?;
        let mut at = 0;
        for piece in &data {
            buffer[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }
    Ok((answer, Vec::new()))
}

fn metadata(store: &Arc<dyn ObjectStore>, call: Call) -> Calling {
    macro_rules! answer {
        ($future:expr, $map:expr) => {{
            let future = $future;
            Box::pin(async move {
                let map = $map;
                future.await.map(|value| (map(value), Vec::new()))
            })
        }};
    }
    match call {
        Call::Stage { len } => answer!(store.stage(len), |id: StageId| Answer::Stage(id.0)),
        Call::StageRelease { stage } => {
            store.stage_release(StageId(stage));
            Box::pin(std::future::ready(Ok((Answer::Done, Vec::new()))))
        }
        Call::Stat { cid, oid } => answer!(store.stat(&cid, &oid), Answer::Stat),
        Call::GetXattr { cid, oid, name } => answer!(store.get_xattr(&cid, &oid, name), Answer::Bytes),
        Call::GetXattrs { cid, oid } => answer!(store.get_xattrs(&cid, &oid), Answer::Pairs),
        Call::OmapGetHeader { cid, oid } => answer!(store.omap_get_header(&cid, &oid), Answer::Bytes),
        Call::OmapGet { cid, oid, keys } => answer!(store.omap_get(&cid, &oid, keys), Answer::Pairs),
        Call::OmapIterate { cid, oid, from, limit } => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            answer!(store.omap_iterate(&cid, &oid, from, limit), |(p, more)| Answer::PairsPage(p, more))
        }
        Call::List { cid, from, limit } => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            answer!(store.list(&cid, from, limit), |(ids, more)| Answer::Objects(ids, more))
        }
        Call::Collections => answer!(store.collections(), Answer::Collections),
        Call::StatFs => answer!(store.statfs(), Answer::StatFs),
        Call::Umount => answer!(store.umount(), |()| Answer::Done),
        Call::StageWrite { .. } | Call::Transaction { .. } | Call::Read { .. } => Box::pin(
            std::future::ready(Err(StoreError::InvalidArgument("no call of the control plane".into()))),
        ),
    }
}
