//! [`Object`]: operations on one object.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use wire::{Mutated, ObjectName, QueryAnswer, QueryOp, StatAnswer};

use crate::engine::{Capability, SinkMemory, Source};
use crate::handle::{ObjectHandle, unexpected};
use crate::requests::lacks;
use crate::{Compound, Error, PutOptions, RangeReader, Result};

/// Maximum number of attempts of an append that is too large for one append op. An attempt fails if
/// another client changes the object during the attempt.
const APPEND_TRIES: usize = 32;
/// Maximum number of attempts of a query for extents that needs several requests. An attempt fails if
/// another client changes the object during the attempt.
const EXTENTS_TRIES: usize = 8;

/// A handle of an object, which does not have to exist. Clones are cheap.
#[derive(Debug, Clone)]
pub struct Object(ObjectHandle);

/// An object's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Size, version, time of the last change, and manifest.
    pub stat: StatAnswer,
    /// All xattrs, ordered by name.
    pub xattrs: Vec<(Bytes, Bytes)>,
}

/// A page of omap entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OmapPage {
    /// Keys and values, ordered by key.
    pub entries: Vec<(Bytes, Bytes)>,
    /// Whether more entries follow.
    pub more: bool,
}

impl Object {
    pub(crate) fn new(handle: ObjectHandle) -> Object {
        Object(handle)
    }

    /// Returns the object's full name.
    #[must_use]
    pub fn name(&self) -> &ObjectName {
        &self.0.name
    }

    /// Replaces the object's data, or creates the object. Xattrs and omap do not change. Readers
    /// see either the old or the new data.
    ///
    /// # Errors
    /// An error of the node or of the network, or [`Error::TimedOut`].
    pub async fn put(&self, data: impl Into<Bytes>) -> Result<Mutated> {
        self.put_with(data, PutOptions::default()).await
    }

    /// Like [`Object::put`], with conditions and xattrs.
    ///
    /// # Errors
    /// [`Exists`](wire::Error::Exists) or [`ConditionFailed`](wire::Error::ConditionFailed) if a
    /// condition does not hold.
    pub async fn put_with(&self, data: impl Into<Bytes>, options: PutOptions) -> Result<Mutated> {
        self.put_from(Source::Bytes(data.into()), options).await
    }

    /// Like [`Object::put_with`], with data from a file. The client reads the file while the node
    /// requests the data. The file must not change during the call.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened.
    pub async fn put_file(&self, path: impl AsRef<Path>, options: PutOptions) -> Result<Mutated> {
        let path = path.as_ref().to_owned();
        let open = move || {
            let file = std::fs::File::open(path)?;
            let len = file.metadata()?.len();
            Ok::<_, std::io::Error>(Source::File { file: Arc::new(file), offset: 0, len })
        };
        #[expect(clippy::disallowed_methods, reason = "the data of a simulated client is in memory")]
        let source = tokio::task::spawn_blocking(open).await.map_err(std::io::Error::other)??;
        self.put_from(source, options).await
    }

    /// Like [`Object::put_with`], with data from a stream of any length, in constant memory. The
    /// object changes only after the end of the stream.
    ///
    /// # Errors
    /// [`Error::Io`] if the stream fails.
    pub async fn put_reader(
        &self,
        reader: impl AsyncRead + Unpin + Send,
        options: PutOptions,
    ) -> Result<Mutated> {
        crate::upload::put_reader(&self.0, reader, options).await
    }

    /// Like [`Object::put_with`], with data from any source.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read, [`Error::Unsupported`] for a bulk descriptor.
    pub async fn put_from(&self, source: Source, options: PutOptions) -> Result<Mutated> {
        if source.len() > self.0.requests.options().stripe_threshold {
            return crate::upload::put_striped(&self.0, source, options).await;
        }
        Compound::of_put(self.0.clone(), options).write_full_from(source).commit().await
    }

    /// Returns all data of the object, from one version of the object.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist, or another error.
    pub async fn get(&self) -> Result<Bytes> {
        self.get_range(0, u64::MAX).await
    }

    /// Reads up to `len` bytes at `offset`, from one version of the object. Returns fewer bytes if
    /// the object ends earlier, and no bytes beyond its end.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist, or another error.
    pub async fn get_range(&self, offset: u64, len: u64) -> Result<Bytes> {
        crate::download::get_range(&self.0, offset, len).await
    }

    /// Reads up to `len` bytes at `offset` into the caller's memory, from one version of the
    /// object. Returns the number of bytes of the range that exist. Data is written to the memory
    /// as it arrives. If the object changes during the read, the read starts again and overwrites
    /// the memory.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist, or another error.
    /// After an error, the memory's content is undefined.
    pub async fn read_into(&self, offset: u64, len: u64, memory: Arc<dyn SinkMemory>) -> Result<u64> {
        crate::download::read_into(&self.0, offset, len, &memory).await
    }

    /// Streams up to `len` bytes at `offset`, in order, from one version of the object. The sizes
    /// of the chunks are arbitrary. The first call of [`RangeReader::next`] sends the first
    /// request.
    #[must_use]
    pub fn read_stream(&self, offset: u64, len: u64) -> RangeReader {
        RangeReader::new(self.0.clone(), offset, len)
    }

    /// Writes all data of the object to `writer`, in constant memory. Returns the object's size in
    /// bytes.
    ///
    /// # Errors
    /// [`Changed`](wire::Error::Changed) if the object changes during the read. The data written so
    /// far is then invalid.
    pub async fn get_to_writer(&self, writer: impl AsyncWrite + Unpin + Send) -> Result<u64> {
        crate::download::get_to_writer(&self.0, writer).await
    }

    /// Writes data at an offset, in bytes. Creates or extends the object if necessary; holes read
    /// as zeros.
    ///
    /// # Errors
    /// [`Striped`](wire::Error::Striped) on a striped object, [`TooLarge`](wire::Error::TooLarge)
    /// if the write would end beyond 128 MiB.
    pub async fn write(&self, offset: u64, data: impl Into<Bytes>) -> Result<Mutated> {
        self.compound().write(offset, data).commit().await
    }

    /// Writes data at the end of the object. The result contains the offset of the data. Appends of
    /// several clients never overlap.
    ///
    /// # Errors
    /// The same errors as [`Object::write`]. If other clients keep changing the object, an append
    /// of more than 2 MiB can fail with [`ConditionFailed`](wire::Error::ConditionFailed), without
    /// effect.
    pub async fn append(&self, data: impl Into<Bytes>) -> Result<Mutated> {
        let data = data.into();
        if data.len() as u64 <= self.0.requests.engine().limits().append_bytes_max {
            return self.compound().append(data).commit().await;
        }
        let mut last = None;
        for _ in 0..APPEND_TRIES {
            let (at, compound) = match self.stat().await {
                Ok(stat) => (stat.size, self.compound().if_version(stat.version)),
                Err(e) if e.is_not_found() => (0, self.compound().if_absent()),
                Err(e) => return Err(e),
            };
            match compound.write(at, data.clone()).commit().await {
                Ok(mutated) => return Ok(Mutated { appended_at: at, ..mutated }),
                Err(e) if e.is_conflict() => last = Some(e),
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or(Error::Closed))
    }

    /// Sets the object's size, in bytes. New bytes are zeros.
    ///
    /// # Errors
    /// The same errors as [`Object::write`].
    pub async fn truncate(&self, size: u64) -> Result<Mutated> {
        self.compound().truncate(size).commit().await
    }

    /// Sets the `len` bytes from `offset` to zero, and extends the object if necessary.
    ///
    /// # Errors
    /// The same errors as [`Object::write`].
    pub async fn zero(&self, offset: u64, len: u64) -> Result<Mutated> {
        self.compound().zero(offset, len).commit().await
    }

    /// Creates an empty object.
    ///
    /// # Errors
    /// [`Exists`](wire::Error::Exists) if the object exists.
    pub async fn create(&self) -> Result<Mutated> {
        self.compound().create().commit().await
    }

    /// Removes the object.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn remove(&self) -> Result<Mutated> {
        self.compound().remove().commit().await
    }

    /// Starts a compound: several changes of the object, applied atomically, with conditions.
    pub fn compound(&self) -> Compound {
        Compound::new(self.0.clone())
    }

    /// Returns the object's size, version, time of the last change, and manifest.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn stat(&self) -> Result<StatAnswer> {
        self.0.stat().await
    }

    /// Returns the answer of [`Object::stat`] and all xattrs of the object, with one request.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn describe(&self) -> Result<Description> {
        let mut answers = self.0.query(vec![QueryOp::Stat, QueryOp::Xattrs]).await?;
        match (answers.pop(), answers.pop()) {
            (Some(QueryAnswer::Xattrs(xattrs)), Some(QueryAnswer::Stat(stat))) => {
                Ok(Description { stat, xattrs })
            }
            (other, _) => Err(unexpected(other)),
        }
    }

    /// Returns the value of an xattr; `None` if the object does not have the xattr.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn xattr(&self, name: impl Into<Bytes>) -> Result<Option<Bytes>> {
        match self.0.query(vec![QueryOp::Xattr(name.into())]).await?.pop() {
            Some(QueryAnswer::Xattr(value)) => Ok(value),
            other => Err(unexpected(other)),
        }
    }

    /// Returns all xattrs, ordered by name.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn xattrs(&self) -> Result<Vec<(Bytes, Bytes)>> {
        match self.0.query(vec![QueryOp::Xattrs]).await?.pop() {
            Some(QueryAnswer::Xattrs(xattrs)) => Ok(xattrs),
            other => Err(unexpected(other)),
        }
    }

    /// Sets an xattr, and creates the object if necessary.
    ///
    /// # Errors
    /// [`TooLarge`](wire::Error::TooLarge) if a name, key or value is too large, or another error.
    pub async fn set_xattr(&self, name: impl Into<Bytes>, value: impl Into<Bytes>) -> Result<Mutated> {
        self.compound().set_xattr(name, value).commit().await
    }

    /// Removes an xattr of an existing object.
    ///
    /// # Errors
    /// [`ConditionFailed`](wire::Error::ConditionFailed) if the object does not exist.
    pub async fn remove_xattr(&self, name: impl Into<Bytes>) -> Result<Mutated> {
        self.compound().if_exists().remove_xattr(name).commit().await
    }

    /// Returns the omap entries with the given keys, ordered by key. Ignores keys without an entry.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn omap_get(&self, keys: Vec<Bytes>) -> Result<Vec<(Bytes, Bytes)>> {
        Ok(self.omap(QueryOp::OmapGet(keys)).await?.entries)
    }

    /// Returns up to `limit` omap entries with `from <= key` and, if `to` is given, `key < to`,
    /// ordered by key.
    ///
    /// # Errors
    /// [`NoSuchObject`](wire::Error::NoSuchObject) if the object does not exist.
    pub async fn omap_range(
        &self,
        from: impl Into<Bytes>,
        to: Option<Bytes>,
        limit: u32,
    ) -> Result<OmapPage> {
        self.omap(QueryOp::OmapRange { from: from.into(), to, limit }).await
    }

    /// Sets omap entries, and creates the object if necessary.
    ///
    /// # Errors
    /// [`TooLarge`](wire::Error::TooLarge) if a name, key or value is too large, or another error.
    pub async fn omap_set(&self, entries: Vec<(Bytes, Bytes)>) -> Result<Mutated> {
        self.compound().omap_set(entries).commit().await
    }

    /// Removes omap entries of an existing object. Missing entries are ignored.
    ///
    /// # Errors
    /// [`ConditionFailed`](wire::Error::ConditionFailed) if the object does not exist.
    pub async fn omap_remove(&self, keys: Vec<Bytes>) -> Result<Mutated> {
        self.compound().if_exists().omap_remove(keys).commit().await
    }

    /// Returns the drive space of the object's extents, in bytes: a multiple of the block size. Parity,
    /// and the copies of a mirror beyond the first, do not count.
    ///
    /// # Errors
    /// [`Striped`](wire::Error::Striped) on a striped object, [`Error::Unsupported`] if the engine
    /// lacks [`Capability::Extents`].
    pub async fn allocated(&self) -> Result<u64> {
        self.require_extents()?;
        match self.0.query(vec![QueryOp::Allocated]).await?.pop() {
            Some(QueryAnswer::Allocated(bytes)) => Ok(bytes),
            other => Err(unexpected(other)),
        }
    }

    /// Returns the extents of the object in the `len` bytes at `offset`, from one version of the object:
    /// the ranges that have data, in ascending order. All other bytes are zero. Extents consist of
    /// blocks of 4 KiB, and end at the end of the range or of the object.
    ///
    /// # Errors
    /// [`Striped`](wire::Error::Striped) on a striped object, [`Error::Unsupported`] if the engine
    /// lacks [`Capability::Extents`], [`Changed`](wire::Error::Changed) if other clients keep changing
    /// the object.
    pub async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Range<u64>>> {
        self.require_extents()?;
        let end = offset.saturating_add(len).min(self.0.requests.engine().limits().object_bytes_max);
        let mut seen = (0, 0);
        for _ in 0..EXTENTS_TRIES {
            match self.extents_once(offset.min(end)..end).await? {
                Ok(extents) => return Ok(extents),
                Err(versions) => seen = versions,
            }
        }
        let (wanted, found) = seen;
        Err(wire::Error::Changed { wanted, found }.into())
    }

    /// Queries extents page by page. If the object changes meanwhile, returns its version before and
    /// after the change.
    async fn extents_once(&self, wanted: Range<u64>) -> Result<Result<Vec<Range<u64>>, (u64, u64)>> {
        let mut extents: Vec<Range<u64>> = Vec::new();
        let (mut at, mut version) = (wanted.start, None);
        loop {
            let ops = vec![QueryOp::Stat, QueryOp::Extents { offset: at, len: wanted.end - at }];
            let mut answers = self.0.query(ops).await?;
            let (ranges, end, stat) = match (answers.pop(), answers.pop()) {
                (Some(QueryAnswer::Extents { ranges, end }), Some(QueryAnswer::Stat(stat))) => {
                    (ranges, end, stat)
                }
                (other, _) => return Err(unexpected(other)),
            };
            let (from, first) = (at, *version.get_or_insert(stat.version));
            if first != stat.version {
                return Ok(Err((first, stat.version)));
            }
            for (start, len) in ranges {
                let stop = start.saturating_add(len);
                if len == 0 || start < at || stop > end {
                    return Err(Error::Protocol(format!("the extent {start}..{stop} is not in {at}..{end}")));
                }
                match extents.last_mut() {
                    Some(last) if last.end == start => last.end = stop,
                    _ => extents.push(start..stop),
                }
                at = stop;
            }
            if end >= wanted.end || end >= stat.size {
                return Ok(Ok(extents));
            }
            if end <= from {
                return Err(Error::Protocol(format!(
                    "the answer about extents from {from} on ends at {end}"
                )));
            }
            at = end;
        }
    }

    fn require_extents(&self) -> Result<()> {
        let engine = self.0.requests.engine();
        if engine.capabilities().has(Capability::Extents) {
            return Ok(());
        }
        Err(Error::Unsupported(lacks(engine, Capability::Extents)))
    }

    async fn omap(&self, op: QueryOp) -> Result<OmapPage> {
        match self.0.query(vec![op]).await?.pop() {
            Some(QueryAnswer::Omap { entries, more }) => Ok(OmapPage { entries, more }),
            other => Err(unexpected(other)),
        }
    }
}
