//! Writes striped objects: first the parts, then the head object, which makes the data visible.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt};
use wire::{Manifest, Mutated, Mutation, PartId, UploadId};

use crate::engine::Source;
use crate::handle::ObjectHandle;
use crate::{Compound, Error, PutOptions, Result};

/// Time limit for removing the parts of a failed upload. After this time, the node's collector
/// removes the remaining parts.
const ABANDON: Duration = Duration::from_secs(5);

/// Stores content of known length as a striped object.
pub(crate) async fn put_striped(
    object: &ObjectHandle,
    source: Source,
    options: PutOptions,
) -> Result<Mutated> {
    let upload = Upload::start(object)?;
    let mut parts = FuturesUnordered::new();
    let sent = async {
        let size = source.len();
        for index in 0..size.div_ceil(upload.part_size) {
            let start = index * upload.part_size;
            let part = source.slice(start, (start + upload.part_size).min(size))?;
            upload.room_for_one(&mut parts).await?;
            parts.push(upload.put_part(index, part)?);
        }
        Ok(size)
    };
    let sent = sent.await;
    upload.finish(sent, parts, options).await
}

/// Stores the content of a stream. Content that is shorter than one part is stored as one object,
/// longer content as a striped object.
pub(crate) async fn put_reader(
    object: &ObjectHandle,
    mut reader: impl AsyncRead + Unpin,
    options: PutOptions,
) -> Result<Mutated> {
    let client_options = object.requests.options();
    let first_size = client_options.part_size.min(client_options.stripe_threshold).max(1);
    let first = read_up_to(&mut reader, first_size).await?;
    if (first.len() as u64) < first_size {
        return Compound::of_put(object.clone(), options).write_full(first).commit().await;
    }
    let upload = Upload::start(object)?;
    let mut parts = FuturesUnordered::new();
    let sent = async {
        let mut begun = first;
        let mut size = 0;
        for index in 0.. {
            let missing = upload.part_size - begun.len() as u64;
            let part = match missing {
                0 => begun,
                _ => {
                    let more = read_up_to(&mut reader, missing).await?;
                    if begun.is_empty() { more } else { [begun, more].concat().into() }
                }
            };
            begun = Bytes::new();
            let len = part.len() as u64;
            size += len;
            if len > 0 {
                upload.room_for_one(&mut parts).await?;
                parts.push(upload.put_part(index, Source::Bytes(part))?);
            }
            if len < upload.part_size {
                break;
            }
        }
        Ok(size)
    };
    let sent = sent.await;
    upload.finish(sent, parts, options).await
}

/// An upload in progress.
struct Upload<'a> {
    object: &'a ObjectHandle,
    id: UploadId,
    part_size: u64,
    in_flight: usize,
    /// Number of parts that were sent, including parts whose sending failed.
    begun: AtomicU32,
}

impl<'a> Upload<'a> {
    fn start(object: &'a ObjectHandle) -> Result<Upload<'a>> {
        let requests = &object.requests;
        let options = requests.options();
        Ok(Upload {
            object,
            id: requests.engine().next_upload()?,
            part_size: options.part_size,
            in_flight: options.parts_in_flight,
            begun: AtomicU32::new(0),
        })
    }

    fn compound(&self) -> Compound {
        Compound::new(self.object.clone())
    }

    fn put_part(&self, index: u64, source: Source) -> Result<impl Future<Output = Result<Mutated>>> {
        let most = self.object.requests.engine().limits().parts_max;
        let index = u32::try_from(index).ok().filter(|i| *i < most).ok_or_else(|| {
            Error::Argument(format!("the object has more than {most} parts; set a larger part_size"))
        })?;
        let part = PartId { upload: self.id, index };
        self.begun.store(index + 1, Ordering::Relaxed);
        Ok(self.compound().write_full_from(source).commit_part(Some(part)))
    }

    /// Waits until the number of parts in flight is below its limit.
    async fn room_for_one(
        &self,
        parts: &mut FuturesUnordered<impl Future<Output = Result<Mutated>>>,
    ) -> Result<()> {
        if parts.len() >= self.in_flight {
            parts.next().await.transpose()?;
        }
        Ok(())
    }

    /// Waits until all parts are stored, then writes the head object, which makes the data visible.
    /// If it is certain that the head object was not written, removes the parts.
    async fn finish(
        &self,
        sent: Result<u64>,
        mut parts: FuturesUnordered<impl Future<Output = Result<Mutated>>>,
        options: PutOptions,
    ) -> Result<Mutated> {
        let all = async {
            let size = sent?;
            while parts.next().await.transpose()?.is_some() {}
            Ok(size)
        };
        let size = match all.await {
            Ok(size) => size,
            Err(e) => {
                self.abandon(parts).await;
                return Err(e);
            }
        };
        let manifest = Manifest { upload: self.id, part_size: self.part_size, size };
        let head = Compound::of_put(self.object.clone(), options).op(Mutation::SetManifest(manifest));
        let committed = head.commit().await;
        // After other errors, the head object may have been committed, so the parts must stay.
        if matches!(&committed, Err(e) if e.is_conflict()) {
            self.abandon(parts).await;
        }
        committed
    }

    /// Tries to remove the parts sent so far.
    async fn abandon(&self, mut parts: FuturesUnordered<impl Future<Output = Result<Mutated>>>) {
        let removal = async {
            while parts.next().await.is_some() {}
            for index in 0..self.begun.load(Ordering::Relaxed) {
                let part = PartId { upload: self.id, index };
                if let Err(e) = self.compound().remove().commit_part(Some(part)).await {
                    tracing::debug!(index, error = %e, "cannot remove a part of a failed upload; the node's collector will remove it");
                }
            }
        };
        if tokio::time::timeout(ABANDON, removal).await.is_err() {
            tracing::debug!(
                "cannot remove the parts of a failed upload in time; the node's collector will remove them"
            );
        }
    }
}

/// Reads `limit` bytes, or fewer at the stream's end.
async fn read_up_to(reader: &mut (impl AsyncRead + Unpin), limit: u64) -> Result<Bytes> {
    let mut buf = BytesMut::new();
    let mut reader = reader.take(limit);
    while reader.limit() > 0 {
        buf.reserve((reader.limit() as usize).min(1 << 20));
        if reader.read_buf(&mut buf).await? == 0 {
            break;
        }
    }
    Ok(buf.freeze())
}
