//! The index region: storage for `redb` with a checksum for every page.
//!
//! `redb` writes pages of 4 KiB into free space. Then it rewrites its header, at the start of page
//! 0, in place. This module writes the header to two slots in turn. The checksums of the other
//! pages are in a table. Each sector of the table has a checksum of its own. The same flush makes a
//! page and its checksum durable. No durable header refers to the page before that flush.
//!
//! `redb` writes one page at a time. The region keeps the pages in memory until the next flush, and
//! then writes them together, because most of them are adjacent.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;

use super::batch::WritePiece;
use super::checkpoint::CheckpointPart;
use super::drive::{Drive, read_stable};
use super::superblock::Region;

/// Size of `redb`'s header, in bytes. Writes to page 0 beyond the header fail.
const HEADER: usize = 320;
const SECTOR: usize = 512;
/// Number of checksums per sector of the table.
const ENTRIES: usize = (SECTOR - 8) / 4;
/// Number of checksums per block of the table.
const BLOCK_ENTRIES: usize = ENTRIES * (BLOCK_SIZE / SECTOR);
/// `redb` grows its storage by doubling it, up to this number of bytes, and then by this number of
/// bytes at a time.
pub(crate) const GROWTH: u64 = 4 << 30;
/// Maximum number of pages that are kept in memory until the next flush.
const BUFFERED_PAGES: usize = (32 << 20) / BLOCK_SIZE;
/// Number of pages that one call of `redb` may add beyond [`BUFFERED_PAGES`], approximately.
const MORE_PAGES: usize = (1 << 20) / BLOCK_SIZE;
/// Table entry of a page that was never written. The page reads as zeros.
const BLANK: u32 = 0;
/// Table entry of a page whose checksum was lost, because its sector of the table is damaged.
const LOST: u32 = u32::MAX;

/// Error: the region's content differs from the data that was written, or an access lies outside
/// the index's storage.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Damage(String);

/// Storage of the index. Clones share the same storage.
#[derive(Debug, Clone)]
pub(crate) struct IndexRegion {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    drive: Arc<dyn Drive>,
    region: Region,
    state: Mutex<State>,
    /// Number of reads from the drive.
    reads: AtomicU64,
    /// Held while buffered pages are written, so that a page is not written twice at once.
    writing: Mutex<()>,
    /// Memory for the buffered pages, which is suitable for direct I/O.
    memory: BufferPool,
}

#[derive(Debug)]
struct State {
    header: Vec<u8>,
    header_dirty: bool,
    /// Number of the next header. An even number selects slot 0, an odd number slot 1.
    next_header: u64,
    /// Number of the newest header that is durable.
    durable_header: u64,
    len: u64,
    checksums: Vec<u32>,
    dirty_table: BTreeSet<usize>,
    /// Pages that were not written to the drive yet, by page number.
    buffered: BTreeMap<usize, Bytes>,
    /// The commit whose pages are being written, for reports of the checkpoint's progress.
    commit: Option<CommitReport>,
    /// Number of pages that were ever written.
    written: usize,
    /// Whether a write or flush has failed. Then the drive's content is unknown, and the region
    /// refuses further writes. A retried flush could report success, although data of the failed
    /// flush never reached the drive.
    failed: bool,
}

/// Reports how many pages of a commit are written.
#[derive(Debug, Clone)]
struct CommitReport {
    part: CheckpointPart,
    /// Number of pages that are written.
    written: u64,
    /// Estimated number of pages of the commit. `redb` hands over the pages one at a time, and does
    /// not tell their number before.
    expected: u64,
}

impl CommitReport {
    /// Reports that a page is written. At least `more` other pages follow.
    fn count_page(&mut self, more: u64) {
        self.written += 1;
        self.part.step(self.written, self.expected.max(self.written + more));
    }
}

fn failed_before() -> io::Error {
    io::Error::other("an earlier write or flush of the index has failed")
}

fn damage(what: String) -> io::Error {
    io::Error::other(Damage(what))
}

/// Maps a page's checksum to a table entry that differs from [`BLANK`] and [`LOST`].
fn entry(crc: u32) -> u32 {
    crc.clamp(BLANK + 1, LOST - 1)
}

/// Returns the number of pages in a region of `len` bytes, without the two header slots and the
/// table.
fn pages(len: u64) -> usize {
    let blocks = (len / BLOCK).saturating_sub(2) as usize;
    blocks - blocks.div_ceil(BLOCK_ENTRIES + 1)
}

impl IndexRegion {
    /// Creates an empty region. Earlier content of the region is lost.
    ///
    /// # Errors
    /// If the drive fails.
    pub(crate) fn create(drive: Arc<dyn Drive>, region: Region) -> io::Result<IndexRegion> {
        let pages = pages(region.len);
        let state = State {
            header: vec![0; HEADER],
            header_dirty: true,
            next_header: 1,
            durable_header: 0,
            len: 0,
            checksums: vec![BLANK; pages],
            dirty_table: (0..pages.div_ceil(BLOCK_ENTRIES)).collect(),
            buffered: BTreeMap::new(),
            commit: None,
            written: 0,
            failed: false,
        };
        let this = IndexRegion::new(drive, region, state)?;
        this.sync()?;
        Ok(this)
    }

    /// Opens an existing region whose header has at least the number `least`.
    ///
    /// A crash while a header is written damages its slot, and the other slot is then right. If the
    /// damaged slot was durable, an older header would undo changes, and the next writes would make
    /// this permanent. The superblock therefore has the number of a durable header.
    ///
    /// # Errors
    /// If the drive fails, both header slots are damaged, or the header is older than `least`.
    pub(crate) fn open(drive: Arc<dyn Drive>, region: Region, least: u64) -> io::Result<IndexRegion> {
        let pages = pages(region.len);
        let table_blocks = pages.div_ceil(BLOCK_ENTRIES);
        let mut bytes = vec![0; (2 + table_blocks) * BLOCK_SIZE];
        read_stable(drive.as_ref(), region.offset, &mut bytes, is_intact)?;
        let (slots, table) = bytes.split_at(2 * BLOCK_SIZE);
        let newest = slots.chunks(BLOCK_SIZE).filter_map(decode_slot).max_by_key(|s| s.0);
        let (number, len, header) =
            newest.ok_or_else(|| damage("both copies of the index header are damaged".into()))?;
        if number < least {
            return Err(damage(format!(
                "header {least} of the index is damaged; only header {number} is left"
            )));
        }
        if len > pages as u64 * BLOCK {
            return Err(damage("the index is longer than its region".into()));
        }
        let mut checksums: Vec<u32> =
            table.chunks(SECTOR).enumerate().flat_map(|(i, s)| decode_table(i, s)).collect();
        checksums.truncate(pages);
        let written = checksums.iter().filter(|checksum| **checksum != BLANK).count();
        let state = State {
            header,
            header_dirty: false,
            next_header: number + 1,
            durable_header: number,
            len,
            checksums,
            dirty_table: BTreeSet::new(),
            buffered: BTreeMap::new(),
            commit: None,
            written,
            failed: false,
        };
        IndexRegion::new(drive, region, state)
    }

    fn new(drive: Arc<dyn Drive>, region: Region, state: State) -> io::Result<IndexRegion> {
        let buffered = state.checksums.len().clamp(1, BUFFERED_PAGES + MORE_PAGES);
        let memory = Arena::anonymous(buffered * BLOCK_SIZE).map_err(io::Error::other)?;
        let memory = BufferPool::new(memory, 0, BLOCK_SIZE);
        let (state, writing, reads) = (Mutex::new(state), Mutex::new(()), AtomicU64::new(0));
        Ok(IndexRegion { shared: Arc::new(Shared { drive, region, state, reads, writing, memory }) })
    }

    /// Copies a page. The copy is suitable for direct I/O if there is memory for that.
    fn copied(&self, page: &[u8]) -> Bytes {
        match self.shared.memory.try_alloc(page.len()) {
            Ok(Some(mut buffer)) => {
                buffer.copy_from_slice(page);
                buffer.freeze()
            }
            _ => Bytes::copy_from_slice(page),
        }
    }

    /// Reports the progress of the commit that begins now to `part`, until the next flush. The commit
    /// writes about `expected` pages.
    pub(crate) fn report_commit(&self, part: CheckpointPart, expected: u64) {
        self.lock().commit = Some(CommitReport { part, written: 0, expected });
    }

    /// Writes the header of a region that was just opened again, so that the next flush makes it
    /// durable. If a flush of the last process has failed, the drive may have dropped the header,
    /// although it can still be read.
    pub(crate) fn rewrite_header(&self) -> io::Result<()> {
        self.once_sound(|drive| {
            let state = self.lock();
            let number = state.next_header - 1;
            let slot = encode_slot(number, state.len, &state.header);
            drive.write_at(self.shared.region.offset + (number % 2) * BLOCK, &slot)
        })
    }

    /// Returns the number of bytes to which `redb`'s storage can grow in this region.
    pub(crate) fn reach(&self) -> u64 {
        let state = self.lock();
        let capacity = state.checksums.len() as u64 * BLOCK;
        let mut reach = state.len;
        loop {
            let next = reach + reach.min(GROWTH);
            if reach == 0 || next > capacity {
                return reach;
            }
            reach = next;
        }
    }

    /// Returns the bytes of all pages that were ever written. The index uses no other pages.
    pub(crate) fn written(&self) -> u64 {
        self.lock().written as u64 * BLOCK
    }

    /// Number of reads from the drive since the region was opened.
    pub(crate) fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::Relaxed)
    }

    /// Number of threads that should read at the same time if much is to be read.
    pub(crate) fn parallel_reads(&self) -> usize {
        self.shared.drive.parallel_reads()
    }

    /// Number of the newest header that is durable.
    pub(crate) fn header_number(&self) -> u64 {
        self.lock().durable_header
    }

    /// Whether a write or flush has failed. `redb` does not report every failed write.
    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn page_offset(&self, page: usize) -> u64 {
        let table_blocks = pages(self.shared.region.len).div_ceil(BLOCK_ENTRIES);
        self.shared.region.offset + (2 + table_blocks + page) as u64 * BLOCK
    }

    /// Returns the page numbers of an access to data after the header. Fails if the access does not
    /// cover whole pages of the storage.
    fn page_range(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let aligned = offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK_SIZE) && offset > 0;
        let end = offset + len as u64;
        if !aligned || end > self.lock().len {
            return Err(damage(format!(
                "the index accesses {len} bytes at offset {offset}, which are not whole pages of its storage"
            )));
        }
        Ok((offset / BLOCK) as usize..(end / BLOCK) as usize)
    }

    fn read_pages(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = self.page_range(offset, out.len())?;
        let (expected, buffered) = {
            let state = self.lock();
            let buffered: BTreeMap<usize, Bytes> =
                state.buffered.range(range.clone()).map(|(page, data)| (*page, data.clone())).collect();
            (state.checksums[range.clone()].to_vec(), buffered)
        };
        if buffered.len() < range.len() {
            self.shared.reads.fetch_add(1, Ordering::Relaxed);
            self.shared.drive.read_at(self.page_offset(range.start), out)?;
        }
        for ((page, data), expected) in range.zip(out.chunks_exact_mut(BLOCK_SIZE)).zip(expected) {
            if let Some(content) = buffered.get(&page) {
                data.copy_from_slice(content);
            } else if expected == BLANK {
                data.fill(0);
            } else if expected == LOST || entry(crc32c(data)) != expected {
                return Err(damage(format!("index page {page} has a wrong checksum")));
            }
        }
        Ok(())
    }

    /// Writes all buffered pages to the drive, and with them the blocks in `table` of the table of
    /// checksums. Reports the progress of the commit, whose last pages these are if `is_last`.
    fn write_buffered(&self, table: BTreeSet<usize>, is_last: bool) -> io::Result<()> {
        let _writing = self.shared.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let (pages, table, mut commit) = {
            let mut state = self.lock();
            let encoded = |block| (block, encode_table(block, &state.checksums));
            let table: Vec<(usize, Vec<u8>)> = table.into_iter().map(encoded).collect();
            (state.buffered.clone(), table, state.commit.take())
        };
        let table_offset = |block: usize| self.shared.region.offset + (2 + block as u64) * BLOCK;
        // The table is in front of the pages.
        let piece = |offset: u64, data: Bytes| WritePiece { offset, data };
        let mut pieces: Vec<WritePiece> =
            table.iter().map(|(block, data)| piece(table_offset(*block), self.copied(data))).collect();
        pieces.extend(pages.iter().map(|(page, data)| piece(self.page_offset(*page), data.clone())));
        let mut more = pieces.len() as u64;
        if let Some(commit) = commit.as_mut().filter(|_| is_last) {
            commit.expected = commit.written + more;
        }
        let mut completed = |bytes: usize| {
            for _ in 0..bytes / BLOCK_SIZE {
                more = more.saturating_sub(1);
                commit.iter_mut().for_each(|commit| commit.count_page(more));
            }
        };
        self.once_sound(|drive| drive.write_all(&pieces, &mut completed))?;
        let mut state = self.lock();
        state.commit = commit.filter(|_| !is_last);
        for (page, data) in &pages {
            // Keep a page that was changed in the meantime.
            if state.buffered.get(page).is_some_and(|now| now.as_ptr() == data.as_ptr()) {
                state.buffered.remove(page);
            }
        }
        Ok(())
    }

    /// Runs `f` on the drive, unless an earlier write or flush has failed.
    fn once_sound(&self, f: impl FnOnce(&dyn Drive) -> io::Result<()>) -> io::Result<()> {
        if self.lock().failed {
            return Err(failed_before());
        }
        f(self.shared.drive.as_ref()).inspect_err(|_| self.lock().failed = true)
    }

    fn sync(&self) -> io::Result<()> {
        let table = std::mem::take(&mut self.lock().dirty_table);
        self.write_buffered(table, true)?;
        self.once_sound(|drive| {
            let mut state = self.lock();
            if std::mem::take(&mut state.header_dirty) {
                let slot = encode_slot(state.next_header, state.len, &state.header);
                let offset = self.shared.region.offset + (state.next_header % 2) * BLOCK;
                drive.write_at(offset, &slot)?;
                state.next_header += 1;
            }
            let written = state.next_header - 1;
            drop(state);
            drive.flush()?;
            let mut state = self.lock();
            state.durable_header = state.durable_header.max(written);
            Ok(())
        })
    }
}

/// Whether header slots and table, as read from the drive, have correct checksums.
fn is_intact(bytes: &[u8]) -> bool {
    let (slots, table) = bytes.split_at(2 * BLOCK_SIZE);
    let numbers = slots.chunks(BLOCK_SIZE).map(decode_slot);
    numbers.into_iter().all(|slot| slot.is_some())
        && table.chunks(SECTOR).enumerate().all(|(number, sector)| is_table_sector(number, sector))
}

/// Whether `sector` is sector `number` of the table and has a correct checksum.
fn is_table_sector(number: usize, sector: &[u8]) -> bool {
    let word = |at: usize| u32::from_le_bytes(sector[at..at + 4].try_into().expect("four bytes"));
    crc32c(&sector[4..]) == word(0) && word(4) == number as u32
}

fn encode_slot(number: u64, len: u64, header: &[u8]) -> Vec<u8> {
    let mut out = vec![0; BLOCK_SIZE];
    out[4..12].copy_from_slice(&number.to_le_bytes());
    out[12..20].copy_from_slice(&len.to_le_bytes());
    out[20..20 + HEADER].copy_from_slice(header);
    let crc = crc32c(&out[4..]);
    out[..4].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Returns the number of the header, the length of the storage in bytes, and the header;
/// `None` if the slot is damaged.
pub(crate) fn decode_slot(slot: &[u8]) -> Option<(u64, u64, Vec<u8>)> {
    let word = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
    if slot.len() != BLOCK_SIZE || crc32c(&slot[4..]).to_le_bytes() != slot[..4] {
        return None;
    }
    Some((word(4)?, word(12)?, slot[20..20 + HEADER].to_vec()))
}

/// Encodes block `block` of the table. Each sector contains the CRC-32C of the rest of the sector
/// (u32), the sector's number (u32), and checksums of pages.
fn encode_table(block: usize, checksums: &[u32]) -> Vec<u8> {
    let mut out = vec![0; BLOCK_SIZE];
    for (i, sector) in out.chunks_exact_mut(SECTOR).enumerate() {
        let number = block * (BLOCK_SIZE / SECTOR) + i;
        sector[4..8].copy_from_slice(&(number as u32).to_le_bytes());
        let entries = checksums.iter().skip(number * ENTRIES);
        for (slot, checksum) in sector[8..].chunks_exact_mut(4).zip(entries) {
            slot.copy_from_slice(&checksum.to_le_bytes());
        }
        let crc = crc32c(&sector[4..]);
        sector[..4].copy_from_slice(&crc.to_le_bytes());
    }
    out
}

/// Returns the checksums in sector `number` of the table. If the sector is damaged, all checksums
/// are [`LOST`].
pub(crate) fn decode_table(number: usize, sector: &[u8]) -> Vec<u32> {
    if !is_table_sector(number, sector) {
        tracing::warn!(number, "a sector of the index's checksum table is damaged");
        return vec![LOST; ENTRIES];
    }
    let words = sector[8..].chunks_exact(4);
    words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect()
}

impl redb::StorageBackend for IndexRegion {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset == 0 && out.len() <= HEADER {
            out.copy_from_slice(&self.lock().header[..out.len()]);
            return Ok(());
        }
        self.read_pages(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        let capacity = state.checksums.len() as u64 * BLOCK;
        if len > capacity {
            let what = format!("the index needs {len} bytes, but its region has only {capacity} bytes");
            return Err(io::Error::new(io::ErrorKind::StorageFull, what));
        }
        let first = len.div_ceil(BLOCK) as usize;
        let end = state.len.div_ceil(BLOCK) as usize;
        for page in first..end {
            state.written -= usize::from(state.checksums[page] != BLANK);
            state.checksums[page] = BLANK;
            state.dirty_table.insert(page / BLOCK_ENTRIES);
        }
        drop(state.buffered.split_off(&first));
        state.len = len;
        state.header_dirty = true;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset == 0 && data.len() <= HEADER {
            let mut state = self.lock();
            state.header[..data.len()].copy_from_slice(data);
            state.header_dirty = true;
            return Ok(());
        }
        let range = self.page_range(offset, data.len())?;
        let mut state = self.lock();
        if state.failed {
            return Err(failed_before());
        }
        for (page, data) in range.zip(data.chunks_exact(BLOCK_SIZE)) {
            state.written += usize::from(state.checksums[page] == BLANK);
            state.checksums[page] = entry(crc32c(data));
            state.dirty_table.insert(page / BLOCK_ENTRIES);
            state.buffered.insert(page, self.copied(data));
        }
        let is_full = state.buffered.len() > BUFFERED_PAGES;
        drop(state);
        if is_full { self.write_buffered(BTreeSet::new(), false) } else { Ok(()) }
    }
}
