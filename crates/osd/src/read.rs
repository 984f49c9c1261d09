//! Execution of reads.
//!
//! A read draws a ticket for the object. During its turn, it submits its call to the store, whose
//! answer shows all pending changes, and ends its turn. The turn ends before the data arrives, so
//! neither a slow store nor a slow client blocks the object. The read returns the newest state
//! whose bytes it has read: the durable state if no pending change overlaps its range, or else the
//! state after the last change that overlaps it, once this change is durable.
//!
//! A long read repeats these steps for each segment, and detects by the object's version whether
//! the object changed between two segments. The size of the object is known before the data of the
//! first segment arrives, so the other segments start at once.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use futures::future::Either;
use futures::stream::{FuturesUnordered, StreamExt};
use store::{ReadData, ReplyOf, StoreCalls};
use tokio::time::Instant;
use wire::{BulkDescriptor, BulkDirection, Error, ObjectName, ObjectReply, Read, ReadFirst};

use crate::backing::BackingFuture;
use crate::fail::{Fail, StepResult, refusal};
use crate::object::{ObjectInfo, ObjectState};
use crate::patience::{PAUSE, longer, patiently};
use crate::pool::{ActivePool, ObjectLocation};
use crate::request::RequestContext;
use crate::shard::Shard;
use crate::turnstile::Observation;

/// Maximum length of a segment of a read, in bytes. A segment shows one version of the object, and
/// clients rely on this length (docs/semantics.md), so it does not depend on the engine. The channel
/// divides a segment into transfers.
const SEGMENT: u64 = 2 << 20;

/// Data up to this size, in bytes, travels inside the reply, even if the client offers a sink.
const INLINE: u64 = 64 << 10;

/// A segment that was requested from the store.
struct Begun<'a> {
    info: ObjectInfo,
    /// The pending change that the segment shows.
    seen: Observation<'a>,
    incarnation: u64,
    at: u64,
    len: u64,
    /// `None` if there is nothing to read: the object ends before `at`, or the object is striped.
    reading: Option<ReplyOf<BackingFuture, ReadData>>,
}

/// A read in progress.
struct ObjectRead<'a> {
    shard: &'a Shard,
    request: &'a RequestContext,
    read: &'a Read,
    name: String,
    place: ObjectLocation,
    object: Rc<ObjectState>,
}

/// Reads data of an object into the reply's payload or into the client's sink.
pub(crate) async fn read(
    shard: &Shard,
    request: &RequestContext,
    pool: &ActivePool,
    read: &Read,
) -> wire::Result<(ObjectReply, Payload)> {
    let name: ObjectName = read.name.check()?;
    let place = pool.place(name.namespace(), name.object(), read.part.as_ref())?;
    let object = place.pg.object(&place.oid);
    let reader = ObjectRead { shard, request, read, name: name.to_string(), place, object };
    reader.run().await.map_err(refusal)
}

/// Reads data of the first of several objects that exists.
pub(crate) async fn read_first(
    shard: &Shard,
    request: &RequestContext,
    pool: &ActivePool,
    wanted: &ReadFirst,
) -> wire::Result<(ObjectReply, Payload)> {
    wanted.check()?;
    let read = &wanted.read;
    let name: ObjectName = read.name.check()?;
    let ObjectLocation { pg, oid } = pool.place(name.namespace(), name.object(), None)?;
    let mut oids = vec![oid];
    oids.extend(pool.siblings(&name, &wanted.fallbacks)?);
    let name = name.to_string();
    loop {
        let (place, patience) =
            (ObjectLocation { pg: Rc::clone(&pg), oid: oids[0].clone() }, request.patience(&shard.config));
        let first = async || {
            let incarnation = pg.settle().await?;
            let found = pg.first_of(&oids, incarnation).await;
            pg.backing.still(incarnation)?;
            found
        };
        let found = patiently(&place, patience, first).await.map_err(refusal)?;
        let Some((index, _)) = found else { return Err(Error::NoSuchObject(name)) };
        let place = ObjectLocation { oid: oids[index].clone(), ..place };
        let object = pg.object(&place.oid);
        let reader = ObjectRead { shard, request, read, name: name.clone(), place, object };
        return match reader.run().await.map_err(refusal) {
            Ok((ObjectReply::Read { version, object_size, sent }, payload)) => {
                let found = index as u32;
                Ok((ObjectReply::ReadFirst { found, version, object_size, sent }, payload))
            }
            // The object has moved, was removed, or its creation has failed.
            Err(Error::NoSuchObject(_)) => continue,
            read => read,
        };
    }
}

impl ObjectRead<'_> {
    async fn run(&self) -> StepResult<(ObjectReply, Payload)> {
        let start = block::align_down(self.read.offset);
        let wanted_end = block::align_up(self.read.offset.saturating_add(self.read.len)).unwrap_or(u64::MAX);
        let room = match &self.read.sink {
            Some(sink) => sink_room(sink)?,
            None => self.request.connection.limits().max_inline as u64,
        };
        if self.read.sink.is_none() && wanted_end - start > room {
            let what = "data in a reply".into();
            return Err(Error::TooLarge { what, size: wanted_end - start, limit: room }.into());
        }
        let end = wanted_end.min(start.saturating_add(room));
        let until = Instant::now() + self.patience();
        let mut pause = PAUSE;
        loop {
            let first = self.begin_first(start, end).await?;
            let (info, incarnation) = (first.info, first.incarnation);
            if info.manifest.is_some() {
                match first.seen.durable().await {
                    Err(Fail::Withdrawn) => continue,
                    seen => seen?,
                }
                return Ok((striped(&info), Payload::default()));
            }
            let sent = end.min(info.size).saturating_sub(start);
            let body = ObjectReply::Read { version: info.version, object_size: info.size, sent };
            if let (Some(sink), true) = (&self.read.sink, first.len < sent) {
                match self.push_all(sink, first, start + sent).await {
                    Err(Fail::Withdrawn) => continue,
                    pushed => pushed?,
                }
                return Ok((body, Payload::default()));
            }
            debug_assert_eq!(first.len, sent, "a read without a sink has only one segment");
            match (self.finish(first).await, &self.read.sink) {
                // Nothing has been sent yet, so the next attempt may return another version of the
                // object.
                (Err(Fail::Lost(why)), _) if Instant::now() < until => {
                    tracing::debug!(why, "the store is unreachable; reading again");
                    self.place.pg.backing.lost(incarnation);
                    // A member that has the data may be about to be rebuilt, which can take long.
                    tokio::time::sleep(pause).await;
                    pause = longer(pause);
                }
                (Err(Fail::Withdrawn), _) => {}
                (Ok(data), Some(sink)) if data.len() as u64 > self.inline_max() => {
                    self.push(sink, 0, data).await?;
                    return Ok((body, Payload::default()));
                }
                (read, _) => return Ok((body, read?)),
            }
        }
    }

    /// Returns the maximum time to wait for the store.
    fn patience(&self) -> Duration {
        self.request.patience(&self.shard.config)
    }

    /// Returns the maximum number of bytes of data in the reply if the client offers a sink.
    fn inline_max(&self) -> u64 {
        INLINE.min(self.request.connection.limits().eager as u64)
    }

    /// Pushes the first segment and all later segments up to `end`, several segments at a time.
    ///
    /// # Errors
    /// [`Fail::Withdrawn`] if a segment shows a change that has failed.
    async fn push_all(&self, sink: &BulkDescriptor, first: Begun<'_>, end: u64) -> StepResult<()> {
        let (start, version) = (first.at, first.info.version);
        let step = self.step();
        let mut at = start + first.len;
        let mut segments = FuturesUnordered::new();
        segments.push(Either::Left(async { self.push(sink, 0, self.finish_first(first).await?).await }));
        let mut failed = None;
        loop {
            if segments.len() < self.shard.config.segments_in_flight() && at < end && failed.is_none() {
                let len = step.min(end - at);
                segments.push(Either::Right(self.move_segment(sink, start, at, len, version)));
                at += len;
                continue;
            }
            match segments.next().await {
                // The caller reads again. No push may be in progress then.
                Some(Err(Fail::Withdrawn)) => failed = Some(Fail::Withdrawn),
                // The version may be gone because its change has failed. Then the first segment
                // fails, too.
                Some(Err(changed @ Fail::Refused(Error::Changed { .. }))) => {
                    failed = failed.or(Some(changed))
                }
                Some(moved) => moved?,
                None => return failed.map_or(Ok(()), Err),
            }
        }
    }

    /// Returns the maximum length of a segment, in bytes.
    fn step(&self) -> u64 {
        SEGMENT.min(self.shard.staging.largest() as u64)
    }

    /// Requests the first segment from the store: from `start` up to `end`, but at most the maximum
    /// length of a segment. The object's state need not be cached.
    async fn begin_first(&self, start: u64, end: u64) -> StepResult<Begun<'_>> {
        let whole = (end - start).min(self.step());
        // The buffer is allocated before the object's size is known. An uncached object is expected
        // to be small.
        let likely = match self.object.turnstile.latest(self.place.pg.backing.incarnation()) {
            Some(Some(info)) => {
                block::align_up(info.size).unwrap_or(u64::MAX).saturating_sub(start).max(BLOCK)
            }
            _ => INLINE,
        };
        // The first segment shows the state in which the later segments are read, too.
        let range = start..end;
        let attempt = async || self.begin(start, whole, range.clone(), likely, self.read.if_version).await;
        patiently(&self.place, self.patience(), attempt).await
    }

    /// Returns the data of the first segment.
    ///
    /// # Errors
    /// [`Fail::Withdrawn`] if the version that the segment shows may never have become durable.
    async fn finish_first(&self, first: Begun<'_>) -> StepResult<Payload> {
        let (at, len, info, incarnation) = (first.at, first.len, first.info, first.incarnation);
        match self.finish(first).await {
            Err(Fail::Lost(_)) => {
                self.place.pg.backing.lost(incarnation);
                match self.segment(at, len, info.version).await {
                    // A pending change may have had this version, and has failed since.
                    Err(Fail::Refused(Error::Changed { .. })) => Err(Fail::Withdrawn),
                    outcome => outcome,
                }
            }
            outcome => outcome,
        }
    }

    /// Reads another segment of the given version, and pushes it to the client.
    async fn move_segment(
        &self,
        sink: &BulkDescriptor,
        start: u64,
        at: u64,
        len: u64,
        version: u64,
    ) -> StepResult<()> {
        self.push(sink, at - start, self.segment(at, len, version).await?).await
    }

    async fn push(&self, sink: &BulkDescriptor, at: u64, payload: Payload) -> StepResult<()> {
        if payload.is_empty() {
            return Ok(());
        }
        self.shard.times.pushed(payload.len());
        let timeout = self.shard.config.transfer_timeout;
        Ok(self.request.connection.bulk_write(sink, at, payload, timeout).await?)
    }

    /// Reads a segment of the given version.
    ///
    /// # Errors
    /// [`Fail::Withdrawn`] if the change with this version has failed.
    async fn segment(&self, at: u64, len: u64, version: u64) -> StepResult<Payload> {
        let range = at..at + len;
        let attempt = async || {
            let segment =
                async { self.finish(self.begin(at, len, range.clone(), len, Some(version)).await?).await };
            match segment.await {
                // No other attempt can find this version any more.
                Err(Fail::Withdrawn) => Ok(None),
                segment => segment.map(Some),
            }
        };
        patiently(&self.place, self.patience(), attempt).await?.ok_or(Fail::Withdrawn)
    }

    /// Waits for a turn on the object, and then requests a segment of up to `segment` bytes from
    /// the store. The segment shows a state in which the bytes of `range` are up to date. `likely`
    /// is the expected length of the segment; the first buffer has this size.
    async fn begin(
        &self,
        at: u64,
        segment: u64,
        range: Range<u64>,
        likely: u64,
        if_version: Option<u64>,
    ) -> StepResult<Begun<'_>> {
        let pg = &self.place.pg;
        let mut room = segment.min(likely);
        loop {
            // Allocate memory before the turn, because waiting for memory must not block the
            // object. The store fills whole blocks.
            let dest = match room {
                0 => None,
                _ => Some(self.shard.staging.alloc((room as usize).next_multiple_of(BLOCK_SIZE)).await?),
            };
            let ticket = self.object.turnstile.ticket();
            let (turn, incarnation) = pg.enter(&ticket, async || pg.settle().await).await?;
            pg.info(&self.place.oid, &turn, incarnation).await?;
            pg.backing.still(incarnation)?;
            let visible = turn.observe_range(incarnation, &range, if_version);
            let (info, seen) = visible.ok_or(Fail::Withdrawn)?;
            let info = match (info, if_version) {
                (Some(info), Some(wanted)) if info.version != wanted => {
                    Err(Error::Changed { wanted, found: info.version })
                }
                (Some(info), _) => Ok(info),
                (None, _) => Err(Error::NoSuchObject(self.name.clone())),
            };
            let info = match info {
                Ok(info) => info,
                Err(e) => {
                    drop(turn);
                    seen.durable().await?;
                    return Err(e.into());
                }
            };
            let len = segment.min(info.size.saturating_sub(at));
            let has_data = len > 0 && info.manifest.is_none();
            if has_data && len > room {
                // The loop repeats at most once, because the next buffer has room for the whole
                // segment.
                room = segment;
                continue;
            }
            let reading = has_data.then(|| pg.backing.read(&pg.cid, &self.place.oid, at, len, dest));
            drop(turn);
            return Ok(Begun { info, seen, incarnation, at, len, reading });
        }
    }

    /// Waits for the segment's data from the store, and verifies it. Waits until the data is
    /// durable.
    async fn finish(&self, begun: Begun<'_>) -> StepResult<Payload> {
        let data = match begun.reading {
            Some(reading) => Some(reading.await),
            None => None,
        };
        // The result is valid only in the same incarnation, even if it is an error.
        self.place.pg.backing.still(begun.incarnation)?;
        if !base::mutant!(ReadOvertakesWrite) {
            begun.seen.durable().await?;
        }
        match data {
            Some(data) => self.check(&begun.info, begun.at, begun.len, &data?),
            None => Ok(Payload::default()),
        }
    }

    /// Verifies the store's data and converts it into a payload. If the segment ends inside a
    /// block, the checksum of its last piece is computed again.
    fn check(&self, info: &ObjectInfo, at: u64, len: u64, data: &ReadData) -> StepResult<Payload> {
        let corrupt = |what: String| Fail::Refused(Error::Corrupt(format!("{} ({what})", self.name)));
        data.verify().map_err(|e| corrupt(e.to_string()))?;
        if data.object_size < info.size {
            let (name, stored, recorded) = (self.name.clone(), data.object_size, info.size);
            return Err(Error::WrongSize { name, stored, recorded }.into());
        }
        if data.offset != at || data.len() < len {
            return Err(corrupt(format!(
                "the store returned {} bytes at offset {} instead of {len} bytes at {at}",
                data.len(),
                data.offset
            )));
        }
        let bytes = data.contiguous().slice(..len as usize);
        let mut checksums = data.checksums.clone();
        checksums.truncate(block::piece_count(at, len) as usize);
        let tail = (len % BLOCK) as usize;
        if let (Some(last), true) = (checksums.last_mut(), tail != 0) {
            // The block may continue after the bytes that are sent.
            let all = data.contiguous();
            let start = bytes.len() - tail;
            let piece = &all[start..all.len().min(start + block::BLOCK_SIZE)];
            let whole = block::crc_without_padding(piece, *last);
            *last = block::crc_of_start(piece, whole, tail);
        }
        Payload::from_parts(at, bytes, checksums).map_err(|e| corrupt(e.to_string()))
    }
}

fn striped(info: &ObjectInfo) -> ObjectReply {
    match info.manifest {
        Some(manifest) => ObjectReply::Striped { version: info.version, manifest },
        None => ObjectReply::Read { version: info.version, object_size: info.size, sent: 0 },
    }
}

fn sink_room(sink: &BulkDescriptor) -> StepResult<u64> {
    if sink.direction != BulkDirection::Write || sink.block_offset != 0 {
        return Err(Error::BadRequest(
            "the sink is not writable, or does not begin at a block boundary".into(),
        )
        .into());
    }
    let overflow =
        || Error::OutOfRange { what: "sink".into(), detail: "its length does not fit into 64 bits".into() };
    Ok(sink.len().ok_or_else(overflow)?)
}
