//! [`SourceFile`]: what an import reads, cut into units.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use disk::BLOCK;
use futures::stream::{self, BoxStream, StreamExt};
use node::failure::{Doing, Failure, Result};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncReadExt};

/// The file, device or stream that an import reads.
pub enum SourceFile {
    /// A regular file or a block device, with its size in bytes.
    File(Arc<File>, u64),
    /// A pipe, whose size is unknown.
    Stream(Box<dyn AsyncRead + Send + Unpin>),
}

/// A part of the disk that the import writes at once. It lies within one chunk.
#[derive(Debug)]
pub struct ImportUnit {
    /// Offset in the disk and in the source, in bytes.
    pub offset: u64,
    /// Length, in bytes: a multiple of the size of a block.
    pub len: u64,
    pub content: ImportContent,
}

/// The content of a unit.
#[derive(Debug)]
pub enum ImportContent {
    /// All bytes are zero.
    Hole,
    /// These bytes.
    Bytes(Bytes),
    /// The bytes of the file at the offset of the unit. After the end of the file, zeros.
    File(Arc<File>),
}

impl SourceFile {
    /// Opens a file, or standard input for `-`.
    ///
    /// # Errors
    /// If it cannot be opened, or is a directory.
    pub fn open(path: &Path) -> Result<SourceFile> {
        if path == Path::new("-") {
            return Ok(SourceFile::Stream(Box::new(tokio::io::stdin())));
        }
        let doing = format!("reading {}", path.display());
        let mut file = File::open(path).doing(&doing)?;
        let kind = file.metadata().doing(&doing)?.file_type();
        if kind.is_dir() {
            return Err(Failure::usage(doing, "it is a directory; name the file with the image of a disk"));
        }
        if kind.is_file() || kind.is_block_device() {
            // The metadata of a block device does not have its size.
            let size = file.seek(SeekFrom::End(0)).doing(doing)?;
            return Ok(SourceFile::File(Arc::new(file), size));
        }
        Ok(SourceFile::Stream(Box::new(tokio::fs::File::from_std(file))))
    }

    /// Returns the size that a disk needs for the content, in bytes: a multiple of the size of a block.
    /// `None` for a stream.
    pub fn needed(&self) -> Option<u64> {
        match self {
            SourceFile::File(_, size) => Some(size.next_multiple_of(BLOCK)),
            SourceFile::Stream(_) => None,
        }
    }

    /// Cuts the content into units, for a disk of `size` bytes with chunks of `chunk` bytes. The units cover
    /// the disk: after the end of the content come holes.
    ///
    /// The units of a stream end with a failure if it is longer than the disk.
    pub fn units(self, size: u64, chunk: u64) -> BoxStream<'static, Result<ImportUnit>> {
        match self {
            SourceFile::File(file, len) => {
                let end = len.next_multiple_of(BLOCK).min(size);
                let mut data = FileData { file, next: 0 };
                let cut = cuts(0, end, chunk).map(move |(offset, len)| data.unit(offset, len));
                let rest = cuts(end, size, chunk).map(|(offset, len)| Ok(ImportUnit::hole(offset, len)));
                stream::iter(cut.chain(rest)).boxed()
            }
            SourceFile::Stream(reader) => {
                let state = StreamState { reader: Some(reader), at: 0 };
                stream::try_unfold(state, move |state| state.next(size, chunk)).boxed()
            }
        }
    }
}

impl ImportUnit {
    fn hole(offset: u64, len: u64) -> ImportUnit {
        ImportUnit { offset, len, content: ImportContent::Hole }
    }
}

impl ImportContent {
    /// Returns the bytes of a unit; `None` for a hole.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn load(self, offset: u64, len: u64) -> std::io::Result<Option<Bytes>> {
        let file = match self {
            ImportContent::Hole => return Ok(None),
            ImportContent::Bytes(bytes) => return Ok(Some(bytes)),
            ImportContent::File(file) => file,
        };
        let read = move || {
            let mut bytes = BytesMut::zeroed(len as usize);
            let mut filled = 0;
            while filled < bytes.len() {
                match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                    Ok(0) => break,
                    Ok(read) => filled += read,
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(Some(bytes.freeze()))
        };
        tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other)?
    }
}

/// Finds the holes of a file.
struct FileData {
    file: Arc<File>,
    /// Offset of the next data: up to there, the file has a hole.
    next: u64,
}

impl FileData {
    /// Returns a unit of the file.
    fn unit(&mut self, offset: u64, len: u64) -> Result<ImportUnit> {
        if self.next <= offset {
            self.next = match rustix::fs::seek(&*self.file, rustix::fs::SeekFrom::Data(offset)) {
                Ok(next) => next,
                // No data follows.
                Err(Errno::NXIO) => u64::MAX,
                // The file system does not know holes.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => offset,
                Err(e) => return Err(e).doing("looking for holes in the file"),
            };
        }
        let content = match self.next >= offset + len {
            true => ImportContent::Hole,
            false => ImportContent::File(Arc::clone(&self.file)),
        };
        Ok(ImportUnit { offset, len, content })
    }
}

/// The state of the units of a stream.
struct StreamState {
    /// `None` after the end of the stream.
    reader: Option<Box<dyn AsyncRead + Send + Unpin>>,
    at: u64,
}

impl StreamState {
    async fn next(mut self, size: u64, chunk: u64) -> Result<Option<(ImportUnit, StreamState)>> {
        let doing = "reading the stream";
        let (offset, len) = (self.at, chunk.min(size - self.at));
        let Some(reader) = &mut self.reader else {
            self.at += len;
            return Ok((len > 0).then_some((ImportUnit::hole(offset, len), self)));
        };
        // One more byte tells whether the stream ends with the disk.
        let wanted = if len == 0 { 1 } else { len };
        let mut bytes = Vec::new();
        reader.take(wanted).read_to_end(&mut bytes).await.doing(doing)?;
        if len == 0 && !bytes.is_empty() {
            let why = format!("it is longer than the disk of {size} bytes; choose a larger disk with --size");
            return Err(Failure::new(doing, why));
        }
        if (bytes.len() as u64) < wanted {
            self.reader = None;
        }
        if len == 0 {
            return Ok(None);
        }
        bytes.resize(len as usize, 0);
        self.at += len;
        Ok(Some((ImportUnit { offset, len, content: ImportContent::Bytes(bytes.into()) }, self)))
    }
}

/// Cuts `from..to` at the ends of chunks. Returns offsets and lengths.
pub fn cuts(from: u64, to: u64, chunk: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = from;
    std::iter::from_fn(move || {
        let offset = at;
        at = ((offset / chunk + 1) * chunk).min(to);
        (offset < to).then(|| (offset, at - offset))
    })
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    const CHUNK: u64 = 1 << 20;

    #[test]
    fn ranges_are_cut_at_the_ends_of_chunks() {
        let cut = |from, to| cuts(from, to, 10).collect::<Vec<_>>();
        assert_eq!(cut(0, 25), [(0, 10), (10, 10), (20, 5)]);
        assert_eq!(cut(8, 12), [(8, 2), (10, 2)]);
        assert_eq!(cut(20, 20), []);
    }

    #[tokio::test]
    async fn holes_of_a_file_are_found_and_the_rest_of_the_disk_is_a_hole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(5 * CHUNK + 100).unwrap();
        file.write_all_at(&[7; 4096], 2 * CHUNK + 8192).unwrap();
        let source = SourceFile::open(&path).unwrap();
        assert_eq!(source.needed(), Some(5 * CHUNK + 512));
        let units: Vec<_> = source.units(7 * CHUNK, CHUNK).try_collect().await.unwrap();
        let mut at = 0;
        for unit in &units {
            assert_eq!(unit.offset, at);
            at += unit.len;
        }
        assert_eq!(at, 7 * CHUNK);
        let data: Vec<_> = units.iter().filter(|unit| !matches!(unit.content, ImportContent::Hole)).collect();
        assert_eq!(data.iter().map(|unit| unit.offset).collect::<Vec<_>>(), [2 * CHUNK]);
    }

    #[tokio::test]
    async fn a_stream_is_padded_and_must_fit_the_disk() {
        let units = async |len: usize, size: u64| {
            let source = SourceFile::Stream(Box::new(std::io::Cursor::new(vec![1; len])));
            source.units(size, CHUNK).try_collect::<Vec<_>>().await
        };
        let some = units(CHUNK as usize + 100, 3 * CHUNK).await.unwrap();
        assert_eq!(some.iter().map(|unit| unit.len).sum::<u64>(), 3 * CHUNK);
        assert!(matches!(some[2].content, ImportContent::Hole));
        assert_eq!(units(CHUNK as usize, CHUNK).await.unwrap().len(), 1);
        let long = units(CHUNK as usize + 1, CHUNK).await.unwrap_err();
        assert!(long.why().contains("--size"), "{long}");
    }
}
