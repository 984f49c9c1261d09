//! What the node pulls the data of a write from.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use base::BoxFuture;
use base::block::Payload;
use bytes::Bytes;
use messenger::BulkSource;

/// Data of a write, from memory or from a file; clones share it.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    Memory(Bytes),
    /// Bytes `offset..offset + len` of a file, read when the node asks for them.
    File {
        file: Arc<File>,
        offset: u64,
        len: u64,
    },
}

impl Content {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::File { len, .. } => *len,
        }
    }

    /// The part `start..end`, which must be inside.
    pub(crate) fn slice(&self, start: u64, end: u64) -> Content {
        match self {
            Content::Memory(bytes) => Content::Memory(bytes.slice(start as usize..end as usize)),
            Content::File { file, offset, .. } => {
                Content::File { file: Arc::clone(file), offset: offset + start, len: end - start }
            }
        }
    }

    /// All of it, in memory.
    pub(crate) async fn load(&self) -> std::io::Result<Bytes> {
        match self {
            Content::Memory(bytes) => Ok(bytes.clone()),
            Content::File { len, .. } => self.read(0, *len as usize).await,
        }
    }

    async fn read(&self, at: u64, len: usize) -> std::io::Result<Bytes> {
        match self {
            Content::Memory(bytes) => Ok(bytes.slice(at as usize..at as usize + len)),
            Content::File { file, offset, .. } => {
                let (file, from) = (Arc::clone(file), offset + at);
                let read = move || {
                    let mut buf = vec![0; len];
                    file.read_exact_at(&mut buf, from).map(|()| Bytes::from(buf))
                };
                tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other)?
            }
        }
    }
}

/// A [`Content`] that is to lie at some offset of its object.
#[derive(Debug)]
pub(crate) struct ContentSource {
    pub(crate) content: Content,
    /// Object offset of the first byte.
    pub(crate) offset: u64,
}

impl BulkSource for ContentSource {
    fn len(&self) -> u64 {
        self.content.len()
    }

    fn phase(&self) -> u64 {
        self.offset % base::block::BLOCK
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>> {
        Box::pin(async move {
            if offset.checked_add(len as u64).is_none_or(|end| end > self.content.len()) {
                return Err(format!("range {offset}+{len} is outside the data"));
            }
            let data = self.content.read(offset, len).await.map_err(|e| e.to_string())?;
            Ok(Payload::compute(self.offset + offset, data))
        })
    }

    fn memory(&self) -> Option<Payload> {
        match &self.content {
            Content::Memory(data) => Some(Payload::compute(self.offset, data.clone())),
            Content::File { .. } => None,
        }
    }
}
