//! Reading: the first request brings as much as the others together have in flight, and finds out what the object is; the
//! rest of it is fetched several requests at a time.

use bytes::{Bytes, BytesMut};
use futures::stream::{FuturesOrdered, StreamExt};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use wire::{Manifest, ObjectReply, ObjectRequest, PartId, Read, ReplyBody};

use crate::client::unexpected;
use crate::pending::Bulk;
use crate::{Error, Object, Result};

/// How often a read starts again because the object was changed meanwhile.
const TRIES: usize = 8;

/// Most that the first request brings, in bytes: it may have to be repeated as a whole.
const FIRST_MAX: u64 = 16 << 20;

/// Up to `len` bytes at `offset` in one piece.
pub(crate) async fn get_range(object: &Object, offset: u64, len: u64) -> Result<Bytes> {
    let mut last = None;
    for _ in 0..TRIES {
        let mut all = Collected::default();
        match Download::run(object, offset, len, &mut all).await {
            Ok(_) => return Ok(all.finish()),
            Err(e @ Error::Node(wire::Error::Changed { .. })) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or(Error::Closed))
}

/// The whole object into a writer.
pub(crate) async fn get_to_writer(
    object: &Object,
    mut writer: impl AsyncWrite + Unpin + Send,
) -> Result<u64> {
    let mut tries = 1;
    loop {
        let mut out = Written { writer: &mut writer, started: false };
        match Download::run(object, 0, u64::MAX, &mut out).await {
            Err(Error::Node(wire::Error::Changed { .. })) if !out.started && tries < TRIES => tries += 1,
            Err(e) => return Err(e),
            Ok(size) => {
                writer.flush().await?;
                return Ok(size);
            }
        }
    }
}

/// Takes data in order.
trait Output: Send {
    fn take(&mut self, data: Bytes) -> impl Future<Output = Result<()>> + Send;
}

#[derive(Default)]
struct Collected {
    pieces: Vec<Bytes>,
}

impl Collected {
    fn finish(mut self) -> Bytes {
        if self.pieces.len() <= 1 {
            return self.pieces.pop().unwrap_or_default();
        }
        let mut all = BytesMut::with_capacity(self.pieces.iter().map(Bytes::len).sum());
        self.pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        all.freeze()
    }
}

impl Output for Collected {
    async fn take(&mut self, data: Bytes) -> Result<()> {
        self.pieces.push(data);
        Ok(())
    }
}

struct Written<'a, W> {
    writer: &'a mut W,
    started: bool,
}

impl<W: AsyncWrite + Unpin + Send> Output for Written<'_, W> {
    async fn take(&mut self, data: Bytes) -> Result<()> {
        self.started = true;
        Ok(self.writer.write_all(&data).await?)
    }
}

/// What the first request found.
enum Found {
    Plain { version: u64, size: u64, data: Vec<Bytes> },
    Striped { version: u64, manifest: Manifest },
}

/// A range of a store object to be read.
struct Piece {
    part: Option<PartId>,
    if_version: Option<u64>,
    offset: u64,
    len: u64,
}

struct Download<'a> {
    object: &'a Object,
}

impl Download<'_> {
    /// Reads `offset..offset + len` as far as the object goes; returns the object's size.
    async fn run(object: &Object, offset: u64, len: u64, out: &mut impl Output) -> Result<u64> {
        let this = Download { object };
        let options = &object.parts().0.link.shared.options;
        let first = len.min(options.read_size.saturating_mul(options.reads_in_flight as u64)).min(FIRST_MAX);
        let piece = Piece { part: None, if_version: None, offset, len: first };
        match this.read(&piece).await? {
            Found::Plain { version, size, data } => {
                let expected = offset.saturating_add(first).min(size).saturating_sub(offset);
                let came = data.iter().map(Bytes::len).sum::<usize>() as u64;
                if came != expected {
                    let what = format!("{came} bytes came of an object of {size}, not {expected}");
                    return Err(Error::Protocol(what));
                }
                for piece in data {
                    out.take(piece).await?;
                }
                let end = offset.saturating_add(len).min(size);
                let from = offset.saturating_add(first);
                let piece = |offset, len| Piece { part: None, if_version: Some(version), offset, len };
                this.fetch(cut(from, end, options.read_size).map(|(at, len)| piece(at, len)), out).await?;
                Ok(size)
            }
            Found::Striped { version, manifest } => {
                let end = offset.saturating_add(len).min(manifest.size);
                let pieces = part_pieces(manifest, offset, end, options.read_size);
                match this.fetch(pieces, out).await {
                    Err(e) if e.is_not_found() => Err(this.part_missing(version).await),
                    done => done.map(|()| manifest.size),
                }
            }
        }
    }

    /// A part is gone: either the object was replaced, or it is damaged.
    async fn part_missing(&self, version: u64) -> Error {
        match self.object.stat().await {
            Ok(stat) if stat.version == version => {
                wire::Error::Corrupt(format!("{}: a part of it is missing", self.object.name())).into()
            }
            Ok(stat) => wire::Error::Changed { wanted: version, found: stat.version }.into(),
            Err(e) => e,
        }
    }

    /// Reads pieces, several at a time, and gives them out in order.
    async fn fetch(&self, pieces: impl Iterator<Item = Piece> + Send, out: &mut impl Output) -> Result<()> {
        let in_flight = self.object.parts().0.link.shared.options.reads_in_flight;
        let mut pieces = pieces.map(|piece| async move {
            let wanted = piece.len;
            match self.read(&piece).await? {
                Found::Plain { data, .. } if data.iter().map(Bytes::len).sum::<usize>() as u64 == wanted => {
                    Ok(data)
                }
                Found::Plain { version, .. } | Found::Striped { version, .. } => {
                    let name = self.object.name();
                    match piece.part {
                        Some(_) => {
                            Err(wire::Error::Corrupt(format!("{name}: a part of it is too short")).into())
                        }
                        None => Err(wire::Error::Changed {
                            wanted: piece.if_version.unwrap_or(0),
                            found: version,
                        }
                        .into()),
                    }
                }
            }
        });
        let mut reads: FuturesOrdered<_> = pieces.by_ref().take(in_flight).collect();
        while let Some(data) = reads.next().await {
            let data: Result<Vec<Bytes>> = data;
            for chunk in data? {
                out.take(chunk).await?;
            }
            if let Some(next) = pieces.next() {
                reads.push_back(next);
            }
        }
        Ok(())
    }

    /// One read request, cut to the bytes asked for.
    async fn read(&self, piece: &Piece) -> Result<Found> {
        let (client, name) = self.object.parts();
        let start = base::block::align_down(piece.offset);
        let end = base::block::align_up(piece.offset.saturating_add(piece.len)).unwrap_or(u64::MAX);
        let room = end - start;
        let bulk = if room <= client.link.inline_max() { Bulk::None } else { Bulk::Sink(room) };
        let body = ObjectRequest::Read(Read {
            name: name.to_wire(),
            part: piece.part,
            offset: piece.offset,
            len: piece.len,
            if_version: piece.if_version,
            sink: None,
        });
        let answer = client.link.call(body, bulk).await?;
        match answer.body {
            ReplyBody::Object(ObjectReply::Read { version, object_size, .. }) => {
                let data = trim(answer.data, piece.offset - start, piece.len);
                Ok(Found::Plain { version, size: object_size, data })
            }
            ReplyBody::Object(ObjectReply::Striped { version, manifest }) => {
                manifest.check()?;
                Ok(Found::Striped { version, manifest })
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// Cuts `from..end` at multiples of `step`: offsets and lengths.
fn cut(from: u64, end: u64, step: u64) -> impl Iterator<Item = (u64, u64)> + Send {
    let mut at = from;
    std::iter::from_fn(move || {
        let len = end.checked_sub(at).filter(|left| *left > 0)?.min(step - at % step);
        at += len;
        Some((at - len, len))
    })
}

/// The pieces of parts that make up `offset..end` of a striped object.
fn part_pieces(manifest: Manifest, offset: u64, end: u64, step: u64) -> impl Iterator<Item = Piece> + Send {
    cut(offset, end, manifest.part_size).flat_map(move |(at, len)| {
        let part = PartId { upload: manifest.upload, index: (at / manifest.part_size) as u32 };
        let from = at % manifest.part_size;
        cut(from, from + len, step).map(move |(offset, len)| Piece {
            part: Some(part),
            if_version: None,
            offset,
            len,
        })
    })
}

/// Drops `skip` bytes at the front and what is beyond `len` bytes.
fn trim(data: Vec<Bytes>, skip: u64, len: u64) -> Vec<Bytes> {
    let (mut skip, mut left) = (skip, len);
    let mut out = Vec::with_capacity(data.len());
    for chunk in data {
        let start = skip.min(chunk.len() as u64);
        skip -= start;
        let end = (start + left.min(chunk.len() as u64 - start)) as usize;
        let chunk = chunk.slice(start as usize..end);
        left -= chunk.len() as u64;
        if !chunk.is_empty() {
            out.push(chunk);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_at_steps_and_parts() {
        assert_eq!(cut(5, 25, 10).collect::<Vec<_>>(), [(5, 5), (10, 10), (20, 5)]);
        assert_eq!(cut(25, 5, 10).count(), 0);
        let upload = wire::UploadId { session: wire::SessionId(1), number: 1 };
        let manifest = Manifest { upload, part_size: 8192, size: 20_000 };
        let pieces: Vec<_> = part_pieces(manifest, 8000, 17_000, 4096)
            .map(|p| (p.part.unwrap().index, p.offset, p.len))
            .collect();
        assert_eq!(pieces, [(0, 8000, 192), (1, 0, 4096), (1, 4096, 4096), (2, 0, 616)]);
    }

    #[test]
    fn trimming_keeps_the_bytes_asked_for() {
        let data = vec![Bytes::from("abcd"), Bytes::from("efgh")];
        assert_eq!(trim(data.clone(), 1, 5).concat(), b"bcdef");
        assert_eq!(trim(data.clone(), 5, 100).concat(), b"fgh");
        assert_eq!(trim(data, 9, 1).concat(), b"");
    }
}
