//! Creation of a target, and recovery of a target after a crash.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use bytes::Bytes;
use uuid::Uuid;

use super::bitmap::Bitmap;
use super::changes::Changes;
use super::checkpoint::{Checkpoint, CheckpointPart, Deferred};
use super::drive::{Drive, read_stable};
use super::extent::Extent;
use super::index::Index;
use super::leaf::PackedLeaf;
use super::log::{self, GROUP_SECTORS, Record};
use super::records::{Meta, Onode, corrupt, key};
use super::region::{GROWTH, IndexRegion};
use super::superblock::{Region, SECTOR, SUPERBLOCKS, Superblock};
use crate::{Result, StoreError};

/// Minimum size of a target, in bytes.
pub(crate) const MIN_TARGET: u64 = 8 << 20;
/// Minimum size of the index region, in bytes.
const MIN_INDEX: u64 = 2 << 20;
/// Number of bytes that `mkfs` writes at once.
const FILL: usize = 4 << 20;

/// The UUID of a new target, and the sizes of its parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct TargetSizes {
    pub(crate) uuid: Option<Uuid>,
    pub(crate) log_bytes: Option<u64>,
    pub(crate) index_bytes: Option<u64>,
}

/// Creates a new target, which overwrites the whole drive.
///
/// # Errors
/// If the drive is too small or fails.
pub(crate) fn mkfs(
    drive: &Arc<dyn Drive>,
    sizes: &TargetSizes,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Uuid> {
    let mut superblock = layout(drive.size(), sizes)?;
    let zeros = vec![0; FILL];
    // Erase the superblocks first, so that an incomplete target is not recognised as a target.
    drive.write_at(0, &zeros[..SUPERBLOCKS as usize])?;
    drive.flush()?;
    fill(drive.as_ref(), &superblock, &zeros, progress)?;
    let region = IndexRegion::create(Arc::clone(drive), superblock.index)?;
    let index = Index::open(region, 1 << 20)?;
    let mut taken = Bitmap::new(superblock.data_blocks());
    taken.mark_all_dirty();
    let checkpoint = Checkpoint {
        changes: Arc::default(),
        bitmap: taken.take_dirty(),
        deferred: Arc::default(),
        meta: Meta {
            checkpoint: 1,
            log_generation: 1,
            log_start: superblock.log_sectors(),
            next_nid: 1,
            index_used: None,
        },
        superblock: superblock.clone(),
    };
    (_, superblock, _) = checkpoint.run(drive.as_ref(), &index, &CheckpointPart::silent())?;
    drop(index);
    superblock.write(drive.as_ref())?;
    Ok(superblock.uuid)
}

/// Returns the size of the log of a new target on a drive of `size` bytes. With a larger log, a
/// checkpoint has more changes, so that more of them are in the same pages of the index.
fn default_log(size: u64) -> u64 {
    (size / 8).min((size / 32).clamp(64 << 20, 256 << 20))
}

/// Returns the superblock of a new target on a drive of `size` bytes. The superblock contains the
/// locations of the target's parts.
///
/// # Errors
/// [`StoreError::InvalidArgument`] if the parts do not fit.
pub(crate) fn layout(size: u64, sizes: &TargetSizes) -> Result<Superblock> {
    if size < MIN_TARGET {
        return Err(StoreError::InvalidArgument(format!(
            "a target of {size} bytes is too small; it needs at least {MIN_TARGET} bytes"
        )));
    }
    let whole = |len: u64| len - len % BLOCK;
    let log_len = whole(sizes.log_bytes.unwrap_or_else(|| default_log(size)));
    let index_pages = sizes.index_bytes.unwrap_or_else(|| usable_len(size / 16).max(MIN_INDEX));
    // Add room for headers and checksums, so that storage of this size fits completely.
    let index_len = whole(index_pages.saturating_add(index_pages / 64 + (64 << 10)));
    let used = SUPERBLOCKS.checked_add(log_len).and_then(|l| l.checked_add(index_len));
    let Some(data) =
        used.filter(|u| *u + (1 << 20) <= size && log_len >= 256 << 10 && index_len >= MIN_INDEX)
    else {
        return Err(StoreError::InvalidArgument(format!(
            "a log of {log_len} bytes and an index of {index_len} bytes are too small, or do not fit into a target of {size} bytes"
        )));
    };
    Ok(Superblock {
        uuid: sizes.uuid.unwrap_or_else(base::entropy::uuid),
        generation: 0,
        size,
        log: Region { offset: SUPERBLOCKS, len: log_len },
        index: Region { offset: SUPERBLOCKS + log_len, len: index_len },
        data: Region { offset: data, len: whole(size - data) },
        clean: true,
        checkpoint: 1,
        index_header: 0,
        needs_both: false,
    })
}

/// Returns the size near `len` that the index can use completely: `redb` doubles its storage up to
/// [`GROWTH`], and then adds [`GROWTH`] at a time.
fn usable_len(len: u64) -> u64 {
    if len > GROWTH {
        return (len + GROWTH / 2) / GROWTH * GROWTH;
    }
    let above = len.next_power_of_two();
    let is_nearer_below = len * len < above * (above / 2);
    if is_nearer_below { above / 2 } else { above }
}

/// Writes every byte after the superblocks once: valid sectors to the log, and zeros elsewhere.
fn fill(drive: &dyn Drive, sb: &Superblock, zeros: &[u8], progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let mut sector = 0;
    while sector < sb.log_sectors() {
        let end = sb.log_sectors().min(sector + (FILL / SECTOR) as u64);
        drive.write_at(sb.log.offset + sector * SECTOR as u64, &log::blank(sector..end))?;
        sector = end;
        progress(sb.log.offset + sector * SECTOR as u64, sb.size);
    }
    let end = sb.data.offset + sb.data.len;
    let mut at = sb.index.offset;
    while at < end {
        let len = (end - at).min(FILL as u64);
        drive.write_at(at, &zeros[..len as usize])?;
        at += len;
        progress(at, sb.size);
    }
    Ok(drive.flush()?)
}

/// An offset on the drive, and the bytes there.
type DriveData = (u64, Vec<u8>);

/// The state of a target according to its last checkpoint and its log.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) superblock: Superblock,
    pub(crate) index: Arc<Index>,
    pub(crate) meta: Meta,
    pub(crate) taken: Bitmap,
    /// The changes of the index that the log contains.
    pub(crate) changes: Changes,
    pub(crate) deferred: Deferred,
    /// Sequence number after the last group of the log whose changes are in `changes`.
    log_end: u64,
    /// The highest generation of the log's sectors.
    log_generation: u64,
    /// The number that the next new collection or object gets.
    next_nid: u64,
    /// Data that recovery relies on, but that may not have been flushed, with its offset.
    unflushed: Vec<DriveData>,
    /// Sequence number of the first sector of the log that may not have been flushed.
    unflushed_log: u64,
    /// Keys of leaves that were absent when a patch was applied to them. The index may lack such a leaf
    /// if a checkpoint was interrupted after a part of its commits: a later record then removes the
    /// leaf or has all of it.
    baseless: BTreeSet<Bytes>,
    /// Descriptions of damage that was ignored. Empty unless the target is read for a repair.
    pub(crate) damage: Vec<String>,
}

/// The purpose of reading a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecoveryMode {
    /// Mount the target. If it was unmounted properly, its log is empty and is not read.
    Mount,
    /// Check the target. Damage of the log or of the bitmap is an error.
    Check,
    /// Repair the target. Damage of the log is listed and ends the log. Damage of the bitmap is
    /// listed, too.
    Repair,
}

/// Reads a target and applies its log in memory. Does not change the content of the target: `redb`
/// may write when it opens its storage, and a mount writes the header of the index again.
///
/// # Errors
/// [`StoreError::NotATarget`], [`StoreError::WrongVersion`], [`StoreError::Corrupt`], or
/// [`StoreError::Io`] if the drive fails.
pub(crate) fn recover(drive: &Arc<dyn Drive>, index_cache: usize, mode: RecoveryMode) -> Result<Recovered> {
    let repair = mode == RecoveryMode::Repair;
    let superblock = Superblock::read(drive.as_ref())?;
    let region = IndexRegion::open(Arc::clone(drive), superblock.index, superblock.index_header);
    let region = region.map_err(index_error)?;
    if mode == RecoveryMode::Mount {
        region.rewrite_header()?;
    }
    let index = Index::open(region, index_cache)?;
    let meta = index.meta()?;
    // The index may be ahead of the superblock by any number of checkpoints: the superblock is
    // written after each checkpoint, and each of these writes may have failed.
    if meta.checkpoint < superblock.checkpoint {
        return Err(corrupt(
            "index",
            format!(
                "it is at checkpoint {}, but the superblock is at checkpoint {}",
                meta.checkpoint, superblock.checkpoint
            ),
        ));
    }
    let mut damage = Vec::new();
    let taken = load_bitmap(&index, &superblock, repair.then_some(&mut damage))?;
    let scan = match mode {
        RecoveryMode::Mount if superblock.clean && superblock.checkpoint == meta.checkpoint => {
            log::Scan { generation: meta.log_generation, ..log::Scan::default() }
        }
        _ => log::scan(drive.as_ref(), &superblock, meta.log_generation, meta.log_start, repair)?,
    };
    damage.extend(scan.damage);
    let mut recovered = Recovered {
        index: Arc::new(index),
        taken,
        changes: Changes::new(),
        deferred: Deferred::new(),
        log_end: meta.log_start,
        log_generation: scan.generation,
        next_nid: meta.next_nid,
        unflushed: Vec::new(),
        unflushed_log: scan.witnessed.max(meta.log_start),
        meta,
        baseless: BTreeSet::new(),
        damage,
        superblock,
    };
    let records = scan.groups.iter().flat_map(|group| &group.records);
    let patched: BTreeSet<&Bytes> =
        records.flat_map(|record| record.patches.iter().map(|(name, _)| name)).collect();
    recovered.index.prefetch_keys(&patched.into_iter().collect::<Vec<_>>());
    'groups: for group in scan.groups {
        if group.end > scan.witnessed {
            let mut unflushed = Vec::new();
            for record in &group.records {
                let Some(data) = recovered.data_of(drive.as_ref(), record)? else {
                    tracing::info!(
                        end = group.end,
                        "the log ends with a group whose data was not written completely; its transactions are discarded"
                    );
                    break 'groups;
                };
                unflushed.extend(data);
            }
            recovered.unflushed.extend(unflushed);
        }
        // A group is replayed completely or not at all, because the next group is written behind it or
        // over it.
        group.records.into_iter().try_for_each(|record| recovered.replay(record, repair))?;
        recovered.log_end = group.end;
    }
    for name in std::mem::take(&mut recovered.baseless) {
        let detail = "the log changes it, but it does not exist";
        if !repair {
            return Err(damaged_leaf(&name, detail));
        }
        recovered.damage.push(format!("{} is removed: {detail}", leaf_name(&name)));
        recovered.changes.insert(name, None);
    }
    Ok(recovered)
}

/// Describes the leaf with the key `name`.
fn leaf_name(name: &Bytes) -> String {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_be_bytes);
    let (leaf, nid) = (number(&key::rest(name)), key::number(name).unwrap_or_default());
    format!("leaf {leaf} of the object with number {nid}")
}

fn damaged_leaf(name: &Bytes, detail: &str) -> StoreError {
    corrupt(&leaf_name(name), format!("{detail}; \"outboard fsck --repair\" removes the leaf"))
}

fn index_error(e: std::io::Error) -> StoreError {
    corrupt("index", e)
}

fn load_bitmap(index: &Index, sb: &Superblock, mut damage: Option<&mut Vec<String>>) -> Result<Bitmap> {
    let mut taken = Bitmap::new(sb.data_blocks());
    let (mut from, to) = key::kind_range(key::BITMAP);
    let mut pages = 0;
    loop {
        let found = index.scan(&from, &to, 256, usize::MAX)?;
        for (name, page) in found.entries {
            pages += 1;
            if !key::number(&name).is_some_and(|n| taken.load_page(n, &page)) {
                match &mut damage {
                    Some(list) => list.push("a page of the free-space bitmap is damaged".into()),
                    None => return Err(corrupt("free-space bitmap", "a page has a wrong size or number")),
                }
            }
        }
        match found.resume {
            Some(next) => from = next,
            None => break,
        }
    }
    if pages != taken.pages() && damage.is_none() {
        return Err(corrupt(
            "free-space bitmap",
            format!("it has {pages} pages instead of {}", taken.pages()),
        ));
    }
    let _ = taken.take_dirty();
    Ok(taken)
}

/// A recovered target that is ready for use.
#[derive(Debug)]
pub(crate) struct ReadyTarget {
    pub(crate) superblock: Superblock,
    /// The record of the last checkpoint.
    pub(crate) meta: Meta,
    pub(crate) taken: Bitmap,
    pub(crate) index: Arc<Index>,
    /// The changes of the index since the last checkpoint.
    pub(crate) changes: Changes,
    /// The blocks that were not written to the data area since the last checkpoint.
    pub(crate) deferred: Deferred,
    pub(crate) log_generation: u64,
    /// Sequence number of the next group.
    pub(crate) log_next: u64,
    /// The number that the next new collection or object gets.
    pub(crate) next_nid: u64,
}

impl Recovered {
    /// Returns the data of a record with its offsets on the drive; `None` if the data area does not
    /// have it. The data may be missing if it was not flushed before a crash.
    fn data_of(&self, drive: &dyn Drive, record: &Record) -> Result<Option<Vec<DriveData>>> {
        let mut data = Vec::new();
        let taken_by_record = |block| record.allocs.iter().any(|e| e.blocks().contains(&block));
        let deferred = |block| record.deferred.iter().any(|(b, _)| *b == block);
        let mut content = vec![0; BLOCK_SIZE];
        let leaf_in = |(name, value): &(Bytes, Option<Bytes>)| -> Result<_> {
            match (name.first(), value) {
                (Some(&key::LEAF), Some(value)) => Ok(Some(value.clone())),
                (Some(&key::ONODE), Some(value)) => Ok(Some(Onode::decode(value)?.leaf)),
                _ => Ok(None),
            }
        };
        let leaves = record.puts.iter().map(leaf_in);
        let patches = record.patches.iter().map(|(_, patch)| Ok(Some(patch.clone())));
        for leaf in leaves.chain(patches).filter_map(Result::transpose) {
            for block in PackedLeaf::from(leaf?).blocks(self.superblock.data_blocks()) {
                let block = block?;
                if !taken_by_record(block.block) || deferred(block.block) {
                    continue;
                }
                let at = self.superblock.data.offset + block.block * BLOCK;
                read_stable(drive, at, &mut content, |content| crc32c(content) == block.crc)?;
                if crc32c(&content) != block.crc {
                    return Ok(None);
                }
                data.push((at, content.clone()));
            }
        }
        Ok(Some(data))
    }

    /// Applies a patch to the leaf with the key `name`.
    fn patched(&mut self, name: &Bytes, patch: &PackedLeaf) -> Result<PackedLeaf> {
        let leaf = match self.changes.get(name) {
            Some(changed) => changed.clone(),
            None => self.index.get_many(std::slice::from_ref(name))?.pop().flatten(),
        };
        if leaf.is_none() {
            self.baseless.insert(name.clone());
        }
        PackedLeaf::from(leaf.unwrap_or_default()).patched(self.superblock.data_blocks(), patch)
    }

    /// Applies a record. With `repair`, lists leaves that cannot be read, and removes them.
    fn replay(&mut self, record: Record, repair: bool) -> Result<()> {
        let covered = |e: &Extent| self.taken.covers(*e);
        if !record.allocs.iter().chain(&record.frees).all(covered) {
            return Err(corrupt("log record", "it names blocks outside the data area"));
        }
        if record
            .deferred
            .iter()
            .any(|(b, content)| *b >= self.superblock.data_blocks() || content.len() != BLOCK_SIZE)
        {
            return Err(corrupt("log record", "it contains a block with a wrong size or number"));
        }
        let mut unexpected = 0;
        for extent in &record.allocs {
            unexpected += self.taken.set(*extent, true);
        }
        self.deferred.extend(record.deferred);
        for extent in &record.frees {
            unexpected += self.taken.set(*extent, false);
            extent.blocks().for_each(|b| drop(self.deferred.remove(&b)));
        }
        if unexpected > 0 {
            return Err(corrupt("log record", format!("{unexpected} blocks were allocated or freed twice")));
        }
        for (name, value) in record.puts {
            self.baseless.remove(&name);
            self.changes.insert(name, value);
        }
        for (name, patch) in record.patches {
            match self.patched(&name, &patch.into()) {
                Ok(leaf) => drop(self.changes.insert(name, Some(leaf.into()))),
                Err(e) => {
                    let detail = format!("the log changes it, but it cannot be read: {e}");
                    if !repair {
                        return Err(damaged_leaf(&name, &detail));
                    }
                    self.damage.push(format!("{} is removed: {detail}", leaf_name(&name)));
                    self.changes.insert(name, None);
                }
            }
        }
        self.next_nid = self.next_nid.max(record.next_nid);
        Ok(())
    }

    /// Calls `each` for every entry of one kind, in order of the keys. The entries include the
    /// log's changes.
    pub(crate) fn entries(&self, kind: u8, mut each: impl FnMut(Bytes, Bytes) -> Result<()>) -> Result<()> {
        let (mut from, to) = key::kind_range(kind);
        let mut changed = self.changes.range(from.clone()..to.clone()).peekable();
        loop {
            let found = self.index.scan(&from, &to, 4096, 4 << 20)?;
            for (name, value) in found.entries {
                while let Some((k, v)) = changed.next_if(|(k, _)| **k < name) {
                    v.iter().try_for_each(|v| each(k.clone(), v.clone()))?;
                }
                match changed.next_if(|(k, _)| **k == name) {
                    Some((k, v)) => v.iter().try_for_each(|v| each(k.clone(), v.clone()))?,
                    None => each(name, value)?,
                }
            }
            match found.resume {
                Some(next) => from = next,
                None => break,
            }
        }
        changed.try_for_each(|(k, v)| v.iter().try_for_each(|v| each(k.clone(), v.clone())))
    }

    /// Writes a repaired target. `fixes` replace the values of their keys, and exactly the blocks
    /// in `taken` are marked as allocated. The rest of the log, which may be damaged, is erased.
    ///
    /// # Errors
    /// If the drive fails.
    pub(crate) fn rewrite(mut self, drive: &dyn Drive, fixes: Changes, mut taken: Bitmap) -> Result<()> {
        self.changes.extend(fixes);
        taken.mark_all_dirty();
        self.taken = taken;
        let end = self.meta.log_start + self.superblock.log_sectors();
        log::erase(drive, &self.superblock, self.log_end..end)?;
        self.checkpoint(drive, true).map(drop)
    }

    /// Prepares the target for use without a checkpoint: makes everything durable that was recovered,
    /// and begins a new generation of the log. If the log has no room for that, runs a checkpoint
    /// first.
    ///
    /// # Errors
    /// If the drive fails.
    pub(crate) fn resume(mut self, drive: &dyn Drive) -> Result<ReadyTarget> {
        if self.log_end + GROUP_SECTORS > self.meta.log_start + self.superblock.log_sectors() {
            self = self.checkpoint(drive, false)?;
        }
        self.make_durable(drive)?;
        self.superblock.checkpoint = self.meta.checkpoint;
        self.superblock.clean = false;
        self.superblock.index_header = self.index.header_number();
        // Written even if nothing has changed: the copy that was read may not be durable.
        self.superblock.write(drive)?;
        // Transactions after `log_end` are discarded. Overwrite the first of them, so that they stay
        // discarded even if their data is now written by other transactions.
        let log_generation = self.log_generation + 1;
        let first = log::encode_group(log_generation, self.log_end, self.log_end, &[]);
        let slot = self.log_end % self.superblock.log_sectors();
        drive.write_at(self.superblock.log.offset + slot * SECTOR as u64, &first)?;
        drive.flush()?;
        Ok(ReadyTarget {
            superblock: self.superblock,
            meta: self.meta,
            taken: self.taken,
            index: self.index,
            changes: self.changes,
            deferred: self.deferred,
            log_generation,
            log_next: self.log_end + GROUP_SECTORS,
            next_nid: self.next_nid,
        })
    }

    /// Makes durable what recovery has read. If a flush of the last process has failed, the drive may
    /// have dropped data that can still be read, and a later flush does not bring such data back.
    /// So this method writes the data again.
    fn make_durable(&self, drive: &dyn Drive) -> Result<()> {
        log::rewrite(drive, &self.superblock, self.unflushed_log..self.log_end)?;
        for (offset, content) in &self.unflushed {
            drive.write_at(*offset, content)?;
        }
        Ok(drive.flush()?)
    }

    /// Runs a checkpoint with all changes. The log is then empty. `clean` says whether the target
    /// will be left as it is.
    ///
    /// # Errors
    /// If the drive fails.
    pub(crate) fn checkpoint(mut self, drive: &dyn Drive, clean: bool) -> Result<Recovered> {
        self.log_generation += 1;
        self.superblock.checkpoint = self.meta.checkpoint + 1;
        self.superblock.clean = clean;
        let checkpoint = Checkpoint {
            changes: Arc::new(std::mem::take(&mut self.changes)),
            bitmap: self.taken.take_dirty(),
            deferred: Arc::new(std::mem::take(&mut self.deferred)),
            meta: Meta {
                checkpoint: self.superblock.checkpoint,
                log_generation: self.log_generation,
                log_start: self.log_end,
                next_nid: self.next_nid,
                index_used: None,
            },
            superblock: self.superblock.clone(),
        };
        self.make_durable(drive)?;
        (self.meta, self.superblock, _) = checkpoint.run(drive, &self.index, &CheckpointPart::silent())?;
        (self.unflushed, self.unflushed_log) = (Vec::new(), self.log_end);
        Ok(self)
    }
}

/// Damages a target for a test: marks free blocks as allocated, and adds references to a block that
/// has none.
#[cfg(test)]
pub(crate) fn spoil_for_test(drive: &Arc<dyn Drive>) {
    let mut recovered = recover(drive, 1 << 20, RecoveryMode::Check).expect("a sound target");
    let free = recovered.taken.find_free(0, 9).expect("free blocks");
    recovered.taken.set(free, true);
    let page = super::records::RefPage { extra: [(7, 3)].into() };
    recovered.changes.insert(key::refs(1 << 20), page.encode());
    recovered.checkpoint(drive.as_ref(), true).expect("a working drive");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_has_a_size_that_it_can_use_completely() {
        let (mib, gib) = (1 << 20, 1 << 30);
        let sizes = [(488 * mib, 512 * mib), (512 * mib, 512 * mib), (362 * mib, 256 * mib)];
        for (len, usable) in sizes.into_iter().chain([(3 * gib, 4 * gib), (9 * gib, 8 * gib)]) {
            assert_eq!(usable_len(len), usable);
        }
        let sizes = TargetSizes::default();
        let index = layout(7812 * mib, &sizes).unwrap().index.len;
        assert!(index > 512 * mib && index < 530 * mib, "{index}");
    }
}
