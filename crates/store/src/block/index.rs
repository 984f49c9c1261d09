//! The index: an ordered map on the drive, which only checkpoints update.
//!
//! The index is a `redb` database with one table. After a storage error, `redb` fails every later
//! operation, so the store reopens the database. Then only operations that read a damaged page
//! fail. After a failed write, the database cannot be reopened, and the target must be remounted.

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use base::thread::{ThreadClass, for_each_in_parallel};
use bytes::Bytes;
use redb::{Builder, Database, ReadableDatabase, StorageBackend, TableDefinition};

use super::changes::Changes;
use super::checkpoint::CheckpointPart;
use super::drive::DriveCalls;
use super::records::{Meta, corrupt, key};
use super::region::{Damage, IndexRegion};
use super::usage::{IndexSpace, IndexUsage};
use crate::{Area, Result, StoreError};

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("outboard");

/// Entries of the index that one scan returns.
#[derive(Debug, Default)]
pub(crate) struct EntryBatch {
    pub(crate) entries: Vec<(Bytes, Bytes)>,
    /// The key at which to continue the scan, if entries remain.
    pub(crate) resume: Option<Bytes>,
}

#[cfg(test)]
std::thread_local! {
    /// Whether all changes are applied in steps. Crash tests set this flag.
    pub(crate) static ALWAYS_IN_STEPS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

fn always_in_steps() -> bool {
    #[cfg(test)]
    return ALWAYS_IN_STEPS.get();
    #[cfg(not(test))]
    false
}

type EntryChange<'a> = (&'a Bytes, &'a Option<Bytes>);

/// Number of adjacent changes that a commit applies together.
const WINDOW: usize = 4096;
/// If more than one of this number of changes needs a read from the drive, a commit reads the pages
/// of the next window in advance.
const COLD: u64 = 16;
/// Minimum number of changes per commit when the index has no room for all changes in one commit.
const STEP: usize = 8;

/// Returns all changes of a window, first three of five in their order, and then the others in their order.
///
/// If keys are inserted in ascending order, `redb` leaves pages half full, because it splits each
/// full page in the middle. The second pass fills these pages to about five sixths.
fn in_two_passes<'a, 'b>(changes: &'b [EntryChange<'a>]) -> impl Iterator<Item = &'b EntryChange<'a>> {
    let pass = |first: bool| {
        let numbered = changes.iter().enumerate();
        numbered.filter(move |(number, _)| (number % 5 < 3) == first).map(|(_, change)| change)
    };
    pass(true).chain(pass(false))
}

/// The storage of one database. When the database ends, `redb` would trim its storage. The storage can only
/// grow by doubling, so it could then never grow again if more than half of the region is in use. A database
/// that has ended therefore does nothing more: its last commit stays, as after a crash.
#[derive(Debug)]
struct DatabaseStorage {
    region: IndexRegion,
    has_ended: Arc<AtomicBool>,
}

impl DatabaseStorage {
    fn unless_ended(&self) -> io::Result<&IndexRegion> {
        match self.has_ended.load(Ordering::Acquire) {
            true => Err(io::Error::other("the database has ended")),
            false => Ok(&self.region),
        }
    }
}

impl StorageBackend for DatabaseStorage {
    fn len(&self) -> io::Result<u64> {
        self.region.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.unless_ended()?.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.unless_ended()?.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.unless_ended()?.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.unless_ended()?.write(offset, data)
    }
}

/// A database that does nothing when it ends.
#[derive(Debug)]
struct OpenDatabase {
    has_ended: Arc<AtomicBool>,
    database: Database,
}

impl Drop for OpenDatabase {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
    }
}

/// The index. Any thread may call its methods, which block.
#[derive(Debug)]
pub(crate) struct Index {
    region: IndexRegion,
    cache_bytes: usize,
    database: RwLock<Option<OpenDatabase>>,
    usage: Mutex<IndexUsage>,
}

impl Index {
    /// Opens the index in `region`. Creates the index if the region is new.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the index is damaged.
    pub(crate) fn open(region: IndexRegion, cache_bytes: usize) -> Result<Index> {
        let usage = Mutex::new(IndexUsage::at_most(u64::MAX));
        let index = Index { region, cache_bytes, database: RwLock::new(None), usage };
        *index.database.write().unwrap_or_else(PoisonError::into_inner) = Some(index.open_database()?);
        let is_empty = index.get_many(&[Bytes::from_static(key::META)])?[0].is_none();
        if !is_empty && let Some(used) = index.meta()?.index_used {
            *index.usage() = IndexUsage::at_most(used);
        }
        Ok(index)
    }

    fn usage(&self) -> MutexGuard<'_, IndexUsage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the newest header of the index's storage that is durable.
    pub(crate) fn header_number(&self) -> u64 {
        self.region.header_number()
    }

    fn open_database(&self) -> Result<OpenDatabase> {
        guarded(|| {
            let has_ended = Arc::new(AtomicBool::new(false));
            let storage = DatabaseStorage { region: self.region.clone(), has_ended: Arc::clone(&has_ended) };
            let database = Builder::new().set_cache_size(self.cache_bytes).create_with_backend(storage)?;
            Ok(OpenDatabase { has_ended, database })
        })
    }

    /// Whether a write of the index has failed. The index can then not be opened again.
    pub(crate) fn has_failed(&self) -> bool {
        self.region.has_failed()
    }

    /// Runs `f`. If `f` fails, reopens the database and runs `f` again.
    fn with<T>(&self, f: impl Fn(&Database) -> Result<T, redb::Error>) -> Result<T> {
        {
            let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(database) = &*database {
                match guarded(|| f(&database.database)) {
                    Ok(value) => return Ok(value),
                    Err(error) => {
                        tracing::warn!(%error, "an operation of the index has failed; the index is opened again")
                    }
                }
            }
        }
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(broken) = database.take() {
            let _ = guarded(|| {
                drop(broken);
                Ok(())
            });
        }
        let fresh = self.open_database()?;
        let result = guarded(|| f(&fresh.database));
        *database = Some(fresh);
        result
    }

    /// Returns the values of `keys`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if a page that the call reads is damaged.
    pub(crate) fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>> {
        self.with(|database| {
            let table = match database.begin_read()?.open_table(TABLE) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(vec![None; keys.len()]),
                other => other?,
            };
            keys.iter().map(|k| Ok(table.get(&k[..])?.map(|v| Bytes::copy_from_slice(v.value())))).collect()
        })
    }

    /// Returns entries with `from <= key < to`, in order of the keys: at most `limit` entries and
    /// about `max_bytes` bytes. If entries remain, the result says at which key to continue.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if a page that the call reads is damaged.
    pub(crate) fn scan(
        &self,
        from: &Bytes,
        to: &Bytes,
        limit: usize,
        max_bytes: usize,
    ) -> Result<EntryBatch> {
        self.with(|database| {
            let mut found = EntryBatch::default();
            if from >= to {
                return Ok(found);
            }
            let table = match database.begin_read()?.open_table(TABLE) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(found),
                other => other?,
            };
            let mut bytes = 0;
            for entry in table.range::<&[u8]>(&from[..]..&to[..])? {
                let (key, value) = entry?;
                let key = Bytes::copy_from_slice(key.value());
                if found.entries.len() >= limit || bytes > max_bytes {
                    found.resume = Some(key);
                    break;
                }
                bytes += key.len() + value.value().len();
                found.entries.push((key, Bytes::copy_from_slice(value.value())));
            }
            Ok(found)
        })
    }

    /// Applies `changes`, then `last` and `meta`, and makes them durable. If the region has enough
    /// room, one commit applies all of them or none of them. The commit needs room because every
    /// page on the path to a change is rewritten before the old page is free. Without enough room,
    /// this method first applies `changes` in steps, beginning with removals. A crash can then
    /// leave some changes together with the old `meta`. Replaying the log from the position in the
    /// old `meta` leads to the same final state. Reports the progress to `whole`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if a page that the call reads is damaged, [`StoreError::NoSpace`] if
    /// the region is full.
    pub(crate) fn apply(
        &self,
        changes: &Changes,
        last: &Changes,
        meta: &Meta,
        whole: &CheckpointPart,
    ) -> Result<()> {
        let space = self.estimate();
        let count = changes.len() + last.len();
        if count > space.keys_in(space.free / 3) {
            self.free_replaced_pages()?;
        }
        // A commit must leave room for the next one, which needs some pages before the pages that
        // this commit replaces are free.
        if count <= space.keys_in(space.free / 4 * 3).max(STEP) && !always_in_steps() {
            let all: Vec<EntryChange<'_>> = changes.iter().chain(last.iter()).collect();
            match self.commit(&all, Some(meta), whole) {
                Err(StoreError::NoSpace { .. }) => {}
                result => return result,
            }
        }
        tracing::info!(
            changes = changes.len(),
            "the index is nearly full; a checkpoint applies its changes in steps"
        );
        let step = if always_in_steps() { STEP } else { space.keys_in(space.free / 3).max(STEP) };
        let (removed, set): (Vec<EntryChange<'_>>, Vec<_>) = changes.iter().partition(|(_, v)| v.is_none());
        let share = (900 * removed.len() / changes.len().max(1)) as u64;
        self.apply_in_steps(&removed, step, &whole.part(0, share))?;
        self.apply_in_steps(&set, step, &whole.part(share, 900))?;
        self.commit(&last.iter().collect::<Vec<_>>(), Some(meta), &whole.part(900, 1000))
    }

    /// Applies changes in several commits with up to `step` changes each. If the region has too
    /// little room for a commit, the next commits have fewer changes.
    fn apply_in_steps(
        &self,
        mut changes: &[EntryChange<'_>],
        mut step: usize,
        part: &CheckpointPart,
    ) -> Result<()> {
        let (mut has_freed, total) = (false, changes.len() as u64);
        while !changes.is_empty() {
            let (now, later) = changes.split_at(changes.len().min(step));
            match self.commit(now, None, &CheckpointPart::silent()) {
                Ok(()) => {
                    (changes, has_freed) = (later, false);
                    part.report(total - later.len() as u64, total);
                }
                Err(StoreError::NoSpace { .. }) if !has_freed || step > STEP => {
                    self.free_replaced_pages()?;
                    has_freed = true;
                    step = (step / 4).max(STEP);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Frees the pages that the last commit has replaced. `redb` frees them in the next commit.
    fn free_replaced_pages(&self) -> Result<()> {
        self.commit(&[], None, &CheckpointPart::silent())
    }

    /// Applies all changes or none of them, and makes them durable. Writes `meta`, with the use of
    /// the index, as the last change. Reports the progress to `part`.
    fn commit(&self, changes: &[EntryChange<'_>], meta: Option<&Meta>, part: &CheckpointPart) -> Result<()> {
        let usage = *self.usage();
        let usage = self.with(|database| {
            let (mut usage, total) = (usage, changes.len() as u64);
            let mut transaction = database.begin_write()?;
            transaction.set_two_phase_commit(true);
            transaction.set_quick_repair(true);
            {
                let mut table = transaction.open_table(TABLE)?;
                let (changed, mut number, mut is_cold) = (part.part(0, 500), 0, false);
                for window in changes.chunks(WINDOW) {
                    let reads = self.region.reads();
                    if is_cold {
                        self.prefetch(database, &window.iter().map(|(key, _)| *key).collect::<Vec<_>>());
                    }
                    for (key, value) in in_two_passes(window) {
                        number += 1;
                        changed.step(number, total);
                        let old = match value {
                            Some(value) => table.insert(&key[..], &value[..])?,
                            None => table.remove(&key[..])?,
                        };
                        let bytes = |value: usize| key.len() + value;
                        let before = old.map_or(0, |old| bytes(old.value().len()));
                        usage.replace(before, value.as_ref().map_or(0, |value| bytes(value.len())));
                    }
                    is_cold = self.region.reads() - reads > window.len() as u64 / COLD;
                }
                if let Some(meta) = meta {
                    let meta =
                        Meta { index_used: Some(usage.bytes().min(self.region.written())), ..meta.clone() };
                    table.insert(key::META, &meta.encode()[..])?;
                }
            }
            // Most changes are in pages of their own if they are few beside the keys of the index.
            self.region.report_commit(part.part(500, 1000), total);
            transaction.commit()?;
            Ok(usage)
        })?;
        *self.usage() = usage;
        Ok(())
    }

    /// Reads the pages with these keys, which are sorted, into the cache, with several reads at a time.
    /// Errors are left to later reads.
    pub(crate) fn prefetch_keys(&self, keys: &[&Bytes]) {
        if keys.is_empty() {
            return;
        }
        let _ = self.with(|database| {
            self.prefetch(database, keys);
            Ok(())
        });
    }

    fn prefetch(&self, database: &Database, keys: &[&Bytes]) {
        let threads = self.region.parallel_reads();
        if threads < 2 {
            return;
        }
        let calls = DriveCalls::of_this_thread();
        let parts = keys.chunks(keys.len().div_ceil(threads));
        for_each_in_parallel(ThreadClass::Store, "read", parts, |part| {
            if let Some(calls) = &calls {
                calls.count_this_thread();
            }
            let _ = guarded(|| {
                let table = database.begin_read()?.open_table(TABLE)?;
                part.iter().try_for_each(|key| table.get(&key[..]).map(drop))?;
                Ok(())
            });
        });
    }

    /// Returns the meta record of the index, which contains the index's position in the log.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the record is missing or damaged.
    pub(crate) fn meta(&self) -> Result<Meta> {
        match self.get_many(&[Bytes::from_static(key::META)])?.pop().flatten() {
            Some(bytes) => Meta::decode(&bytes),
            None => Err(corrupt("index", "it has no meta record")),
        }
    }

    /// Returns the usable space of the index, and an estimate of how much of it is free.
    pub(crate) fn estimate(&self) -> IndexSpace {
        let total = self.region.reach();
        let usage = *self.usage();
        let used = usage.bytes().min(self.region.written());
        let free = total.saturating_sub(used);
        IndexSpace { total, free, may_be_more: free < total / 4 && usage.is_worth_measuring(total) }
    }

    /// Like [`estimate`](Self::estimate). But if the index may be more than three quarters full and
    /// has changed, reads the whole index to measure its use. If that fails, keeps the estimate.
    pub(crate) fn space(&self) -> IndexSpace {
        let space = self.estimate();
        if !space.may_be_more {
            return space;
        }
        let measured = self.with(|database| {
            let transaction = database.begin_write()?;
            let stats = transaction.stats()?;
            transaction.abort()?;
            Ok(stats.allocated_pages() * stats.page_size() as u64)
        });
        // If a page cannot be read, this does not fill the index.
        if let Ok(measured) = measured {
            *self.usage() = IndexUsage::of(measured);
        }
        self.estimate()
    }
}

/// Runs `f` and converts its panics and `redb`'s errors to [`StoreError`].
fn guarded<T>(f: impl FnOnce() -> Result<T, redb::Error>) -> Result<T> {
    match base::thread::catch_panic(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(map_error(error)),
        Err(why) => Err(corrupt("index", format!("its structure is damaged ({why})"))),
    }
}

fn map_error(error: redb::Error) -> StoreError {
    match error {
        redb::Error::Io(e) if e.kind() == std::io::ErrorKind::StorageFull => {
            StoreError::NoSpace { target: uuid::Uuid::nil(), area: Area::Index, needed: 0, free: 0 }
        }
        redb::Error::Io(e) => match e.get_ref().and_then(|inner| inner.downcast_ref::<Damage>()) {
            Some(damage) => corrupt("index", damage),
            None => StoreError::Io(format!("index: {e}")),
        },
        other => corrupt("index", other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, AtomicUsize};

    use super::super::drive::Drive;
    use super::super::messages::load;
    use super::super::need::Need;
    use super::super::sim::RecordedDrive;
    use super::super::superblock::Region;
    use super::*;

    /// A drive whose writes can fail, and whose reads can return wrong data. It counts reads that
    /// overlap, and written bytes.
    #[derive(Debug)]
    struct FaultyDrive {
        drive: Arc<RecordedDrive>,
        damages_reads: AtomicBool,
        refuses_writes: AtomicBool,
        reading: AtomicUsize,
        most_reading: AtomicUsize,
        written: AtomicU64,
    }

    impl FaultyDrive {
        fn new(len: usize) -> Arc<FaultyDrive> {
            let drive = RecordedDrive::new(vec![0; len]);
            let (damages_reads, refuses_writes) = (AtomicBool::new(false), AtomicBool::new(false));
            let (reading, most_reading) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let written = AtomicU64::new(0);
            Arc::new(FaultyDrive { drive, damages_reads, refuses_writes, reading, most_reading, written })
        }
    }

    impl Drive for FaultyDrive {
        fn size(&self) -> u64 {
            self.drive.size()
        }

        fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            let reading = self.reading.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_reading.fetch_max(reading, Ordering::Relaxed);
            // Other threads read meanwhile.
            std::thread::yield_now();
            let result = self.drive.read_at(offset, out);
            self.reading.fetch_sub(1, Ordering::Relaxed);
            out[0] ^= u8::from(self.damages_reads.load(Ordering::Relaxed));
            result
        }

        fn parallel_reads(&self) -> usize {
            4
        }

        fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            match self.refuses_writes.load(Ordering::Relaxed) {
                true => Err(io::Error::other("injected")),
                false => {
                    self.written.fetch_add(data.len() as u64, Ordering::Relaxed);
                    self.drive.write_at(offset, data)
                }
            }
        }

        fn flush(&self) -> io::Result<()> {
            self.drive.flush()
        }
    }

    const META: Meta = Meta { checkpoint: 1, log_generation: 1, log_start: 0, next_nid: 1, index_used: None };

    fn set(index: &Index, keys: std::ops::Range<u32>, value: &Option<Bytes>) -> Result<()> {
        let key = |n: u32| Bytes::from(format!("{:08x}", n.wrapping_mul(0x9e37_79b1)));
        index.apply(
            &keys.map(|n| (key(n), value.clone())).collect(),
            &Changes::new(),
            &META,
            &CheckpointPart::silent(),
        )
    }

    /// Fills an index up to a fifth of its bytes, and returns the number of keys.
    fn fill(index: &Index) -> Result<u32> {
        let value = Some(Bytes::from(vec![1; 3000]));
        for first in (0..).step_by(10) {
            set(index, first..first + 10, &value)?;
            let IndexSpace { total, free, .. } = index.space();
            if first > 100 && free < total / 5 {
                return Ok(first + 10);
            }
        }
        unreachable!("the index has limited space")
    }

    #[test]
    fn reads_of_an_index_whose_write_has_failed_ask_for_a_remount() {
        let drive = FaultyDrive::new(5 << 20);
        let region = Region { offset: 0, len: 5 << 20 };
        let region = IndexRegion::create(Arc::clone(&drive) as Arc<dyn Drive>, region).unwrap();
        // The cache holds less than the index.
        let index = Index::open(region, 64 << 10).unwrap();
        set(&index, 0..1000, &Some(Bytes::from(vec![1; 3000]))).unwrap();
        let read_all = || {
            let (from, to) = (Bytes::new(), Bytes::from_static(b"g"));
            load(&index, &[Need::Range { from, to, limit: 1000 }])
        };
        assert!(read_all().is_ok());
        drive.damages_reads.store(true, Ordering::Relaxed);
        drive.refuses_writes.store(true, Ordering::Relaxed);
        // The read fails, and then the write with which the index is opened again.
        let failed = read_all();
        assert!(matches!(failed, Err(StoreError::Poisoned(_))), "{failed:?}");
        drive.damages_reads.store(false, Ordering::Relaxed);
        drive.refuses_writes.store(false, Ordering::Relaxed);
        let again = read_all();
        assert!(matches!(again, Err(StoreError::Poisoned(_))), "{again:?}");
    }

    /// The use of an index that is nearly full cannot be measured, with and without an earlier
    /// measurement.
    #[test]
    fn an_index_that_cannot_be_read_does_not_count_as_full() {
        let drive = FaultyDrive::new(5 << 20);
        let region = Region { offset: 0, len: 5 << 20 };
        let storage = IndexRegion::create(Arc::clone(&drive) as Arc<dyn Drive>, region).unwrap();
        let index = Index::open(storage.clone(), 64 << 10).unwrap();
        fill(&index).unwrap();
        // Measures the use, of which only an estimate is known.
        *index.usage() = IndexUsage::at_most(u64::MAX);
        let IndexSpace { total, free, .. } = index.space();
        assert!(free > total / 10 && storage.reach() == total);
        drive.damages_reads.store(true, Ordering::Relaxed);
        let estimate = index.space().free;
        assert!(estimate > total / 10 && estimate <= total / 2, "{estimate} of {total} bytes are free");
        *index.usage() = IndexUsage::at_most(u64::MAX);
        let estimate = index.space().free;
        assert!(estimate > 0 && estimate <= free, "{estimate} of {total} bytes are free");
        drive.damages_reads.store(false, Ordering::Relaxed);
        let measured = index.space().free;
        assert!(measured > total / 10 && measured <= free, "{measured} of {total} bytes are free");
    }

    /// Two checkpoints change all keys, with a cache for the whole index and with a small cache.
    #[test]
    fn a_commit_whose_pages_are_not_cached_reads_them_in_advance() {
        const KEYS: u32 = 3 * WINDOW as u32;
        for (cache, is_cold) in [(64 << 20, false), (4 << 20, true)] {
            let drive = FaultyDrive::new(40 << 20);
            let region = Region { offset: 0, len: 40 << 20 };
            let storage = IndexRegion::create(Arc::clone(&drive) as Arc<dyn Drive>, region).unwrap();
            let index = Index::open(storage, cache).unwrap();
            set(&index, 0..KEYS, &Some(Bytes::from(vec![1; 700]))).unwrap();
            drive.most_reading.store(0, Ordering::Relaxed);
            set(&index, 0..KEYS, &Some(Bytes::from(vec![2; 700]))).unwrap();
            let most = drive.most_reading.load(Ordering::Relaxed);
            assert_eq!(most > 1, is_cold, "{most} reads at the same time with a cache of {cache} bytes");
            let (from, to) = (Bytes::from_static(b"0"), Bytes::from_static(b"g"));
            let found = index.scan(&from, &to, usize::MAX, usize::MAX).unwrap().entries;
            let values = found.iter().filter(|(key, _)| key[..] != *key::META).map(|(_, value)| value);
            assert_eq!(values.filter(|value| value[..] == [2; 700]).count(), KEYS as usize);
        }
    }

    /// The commit has more pages than are kept in memory.
    #[test]
    fn a_commit_reports_its_progress_while_its_pages_are_written() {
        let drive = FaultyDrive::new(140 << 20);
        let region = Region { offset: 0, len: 140 << 20 };
        let storage = IndexRegion::create(Arc::clone(&drive) as Arc<dyn Drive>, region).unwrap();
        let index = Index::open(storage, 128 << 20).unwrap();
        let changes: Changes = (0..16_000u32)
            .map(|n| (Bytes::from(format!("{n:08}")), Some(Bytes::from(vec![1; 3000]))))
            .collect();
        let reports = Arc::new(Mutex::new(Vec::new()));
        let (reported, written_to) = (Arc::clone(&reports), Arc::clone(&drive));
        let whole = CheckpointPart::whole(Arc::new(move |progress| {
            reported.lock().unwrap().push((progress, written_to.written.load(Ordering::Relaxed)));
        }));
        let begin = drive.written.load(Ordering::Relaxed);
        index.apply(&changes, &Changes::new(), &META, &whole).unwrap();
        let total = drive.written.load(Ordering::Relaxed) - begin;
        assert!(total > 56 << 20, "{total} bytes");
        let reports = reports.lock().unwrap();
        assert!(reports.is_sorted(), "{reports:?}");
        let silent = reports.windows(2).map(|pair| pair[1].1 - pair[0].1).max().unwrap();
        assert!(silent < total / 20, "{silent} of {total} bytes were written without a report");
        // Half of the pages are written at about half of this part of the progress.
        let half = reports.iter().find(|(_, written)| *written - begin > total / 2).unwrap();
        assert!((650..850).contains(&half.0), "{half:?}");
    }

    /// The estimate after a mount may be too high, so the first checkpoint measures the use.
    #[test]
    fn a_measurement_corrects_the_estimate_of_a_target_that_was_just_mounted() {
        let drive: Arc<dyn Drive> = RecordedDrive::new(vec![0; 5 << 20]);
        let region = Region { offset: 0, len: 5 << 20 };
        let index = Index::open(IndexRegion::create(Arc::clone(&drive), region).unwrap(), 1 << 20).unwrap();
        let most = fill(&index).unwrap();
        set(&index, 0..most / 2, &None).unwrap();
        drop(index);
        let index = Index::open(IndexRegion::open(drive, region, 0).unwrap(), 1 << 20).unwrap();
        let estimate = index.estimate();
        assert!(estimate.may_be_more && estimate.free < estimate.total / 4, "{estimate:?}");
        let measured = index.space();
        assert!(!measured.may_be_more && measured.free > measured.total / 3, "{measured:?}");
    }

    #[test]
    fn keys_in_ascending_order_leave_little_of_their_pages_unused() {
        let drive: Arc<dyn Drive> = RecordedDrive::new(vec![0; 70 << 20]);
        let region = Region { offset: 0, len: 70 << 20 };
        let index = Index::open(IndexRegion::create(drive, region).unwrap(), 64 << 20).unwrap();
        let value = Some(Bytes::from(vec![1; 150]));
        for first in (0..80_000).step_by(8000) {
            let key = |n: u32| Bytes::from(format!("{n:08x}"));
            let changes: Changes = (first..first + 8000).map(|n| (key(n), value.clone())).collect();
            index.apply(&changes, &Changes::new(), &META, &CheckpointPart::silent()).unwrap();
        }
        *index.usage() = IndexUsage::at_most(u64::MAX);
        let IndexSpace { total, free, .. } = index.space();
        let content = 80_000 * (150 + 8);
        let used = total - free;
        assert!(used < content * 3 / 2, "{used} bytes for {content} bytes of keys and values");
    }

    /// The storage can only grow by doubling, so it must keep its size when the index ends.
    #[test]
    fn an_index_that_is_more_than_half_full_can_be_filled_after_it_was_closed() {
        let drive: Arc<dyn Drive> = RecordedDrive::new(vec![0; 5 << 20]);
        let region = Region { offset: 0, len: 5 << 20 };
        let index = Index::open(IndexRegion::create(Arc::clone(&drive), region).unwrap(), 1 << 20).unwrap();
        let most = fill(&index).unwrap();
        set(&index, most / 3 * 2..most, &None).unwrap();
        let total = index.space().total;
        drop(index);
        for _ in 0..3 {
            let region = IndexRegion::open(Arc::clone(&drive), region, 0).unwrap();
            drop(Index::open(region, 1 << 20).unwrap());
        }
        let index = Index::open(IndexRegion::open(drive, region, 0).unwrap(), 1 << 20).unwrap();
        assert_eq!(index.space().total, total);
        let again = fill(&index).unwrap();
        assert!(again >= most / 10 * 9, "{again} instead of {most} keys; {:?}", *index.usage());
    }
}
