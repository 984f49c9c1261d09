//! Writing striped objects: parts first, the head that makes them visible last.

use bytes::{Bytes, BytesMut};
use futures::stream::{FuturesUnordered, StreamExt};
use proto::{Manifest, Mutated, Mutation, PartId, UploadId};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::source::Content;
use crate::{Error, Object, PutOptions, Result};

/// Puts content of known length in parts.
pub(crate) async fn put_striped(object: &Object, content: Content, options: PutOptions) -> Result<Mutated> {
    let upload = Upload::start(object)?;
    let size = content.len();
    let mut parts = FuturesUnordered::new();
    for index in 0..size.div_ceil(upload.part_size) {
        let start = index * upload.part_size;
        let part = content.slice(start, (start + upload.part_size).min(size));
        if parts.len() == upload.in_flight {
            parts.next().await.transpose()?;
        }
        parts.push(upload.put_part(index, part)?);
    }
    while parts.next().await.transpose()?.is_some() {}
    upload.commit(size, options).await
}

/// Puts a stream: whole if it fits in one part, in parts if not.
pub(crate) async fn put_reader(
    object: &Object,
    mut reader: impl AsyncRead + Unpin,
    options: PutOptions,
) -> Result<Mutated> {
    let client_options = &object.parts().0.link.shared.options;
    let first_size = client_options.part_size.min(client_options.stripe_threshold).max(1);
    let first = read_up_to(&mut reader, first_size).await?;
    if (first.len() as u64) < first_size {
        return object.put_with(first, options).await;
    }
    let upload = Upload::start(object)?;
    let mut pending = first;
    let mut size = 0;
    let mut index = 0;
    let mut parts = FuturesUnordered::new();
    loop {
        let missing = upload.part_size - pending.len() as u64;
        let part = if missing == 0 {
            pending
        } else {
            let more = read_up_to(&mut reader, missing).await?;
            if pending.is_empty() { more } else { [pending, more].concat().into() }
        };
        pending = Bytes::new();
        if part.is_empty() {
            break;
        }
        size += part.len() as u64;
        let last = (part.len() as u64) < upload.part_size;
        if parts.len() == upload.in_flight {
            parts.next().await.transpose()?;
        }
        parts.push(upload.put_part(index, Content::Memory(part))?);
        index += 1;
        if last {
            break;
        }
    }
    while parts.next().await.transpose()?.is_some() {}
    upload.commit(size, options).await
}

/// An upload under way.
struct Upload<'a> {
    object: &'a Object,
    id: UploadId,
    part_size: u64,
    in_flight: usize,
}

impl<'a> Upload<'a> {
    fn start(object: &'a Object) -> Result<Upload<'a>> {
        let link = &object.parts().0.link;
        let session = link.session().ok_or(Error::Closed)?;
        let options = &link.shared.options;
        Ok(Upload {
            object,
            id: UploadId { session, number: link.next_upload() },
            part_size: options.part_size,
            in_flight: options.parts_in_flight,
        })
    }

    fn put_part(&self, index: u64, content: Content) -> Result<impl Future<Output = Result<Mutated>>> {
        let index = u32::try_from(index).ok().filter(|i| *i < proto::limits::MAX_PARTS).ok_or_else(|| {
            Error::Argument(format!(
                "the object has more than {} parts; set a larger part_size",
                proto::limits::MAX_PARTS
            ))
        })?;
        let part = PartId { upload: self.id, index };
        Ok(self.object.compound().write_full_content(content).commit_part(Some(part)))
    }

    async fn commit(&self, size: u64, options: PutOptions) -> Result<Mutated> {
        let manifest = Manifest { upload: self.id, part_size: self.part_size, size };
        self.object.put_compound(options).op(Mutation::SetManifest(manifest)).commit().await
    }
}

/// Up to `limit` bytes, fewer only at the stream's end.
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
