//! Checks a target: every entry of the index, every reference count, the free-space bitmap, and the
//! checksum of every block.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use base::collections::{HashMap, HashSet};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::bitmap::Bitmap;
use super::changes::Changes;
use super::drive::{Drive, FileDrive};
use super::extent::Extent;
use super::leaf::{LEAF_BLOCKS, MapLeaf};
use super::records::{Onode, REF_BLOCKS, RefPage, decode_collection, decode_oid, key};
use super::recovery::{Recovered, RecoveryMode, recover};
use crate::{ObjectId, Result, StoreError};

/// Size of the cache of index pages, in bytes.
const INDEX_CACHE: usize = 32 << 20;
/// Maximum number of problems that the report lists individually.
const MAX_LISTED: usize = 1000;

/// A problem that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The damaged item.
    pub what: String,
    /// Description of the problem.
    pub detail: String,
    /// Whether the check repaired the problem.
    pub repaired: bool,
}

/// Result of a check of a target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// The first thousand problems.
    pub problems: Vec<Problem>,
    /// Number of problems, listed or not.
    pub problem_count: u64,
    /// Number of repaired problems.
    pub repaired_count: u64,
    /// Whether the check could read everything.
    pub complete: bool,
    /// Whether the target was unmounted properly.
    pub was_clean: bool,
    /// Number of collections.
    pub collections: u64,
    /// Number of objects.
    pub objects: u64,
    /// Number of blocks that belong to objects.
    pub blocks: u64,
    /// Number of bytes that were compared with their checksums.
    pub bytes_checked: u64,
    /// Number of blocks that were marked as allocated but belong to no object.
    pub leaked_blocks: u64,
}

impl FsckReport {
    /// Whether the check was complete, and found no problem or repaired all problems.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.complete && self.problem_count == self.repaired_count
    }

    fn problem(&mut self, what: impl Into<String>, detail: impl Into<String>, repaired: bool) {
        self.problem_count += 1;
        self.repaired_count += u64::from(repaired);
        if self.problems.len() < MAX_LISTED {
            self.problems.push(Problem { what: what.into(), detail: detail.into(), repaired });
        }
    }
}

/// Checks an object by its id, its size in bytes and its xattrs. Returns a description of the
/// problem, or `None` if the object has no problem. The caller of fsck supplies this function,
/// because the store does not know the meaning of xattrs.
pub type Inspect<'a> = &'a dyn Fn(&ObjectId, u64, &BTreeMap<Bytes, Bytes>) -> Option<String>;

/// Checks the target at `path`, which must not be mounted. With `repair`, this function discards a
/// damaged end of the log, corrects the bitmap, the reference counts and the block counts of
/// objects, and removes entries that belong to no object. Blocks with wrong checksums are reported
/// but cannot be repaired: restore their objects from copies. The report includes the problems that
/// `inspect` finds. `progress` receives the number of blocks checked so far and the number of
/// blocks that belong to objects.
///
/// # Errors
/// If the file is not a target of this version, if it is in use, or if the drive fails. Damage is
/// not an error; it is in the report.
pub fn fsck(
    path: &Path,
    repair: bool,
    inspect: Inspect<'_>,
    mut progress: impl FnMut(u64, u64),
) -> Result<FsckReport> {
    let drive: Arc<dyn Drive> = Arc::new(FileDrive::open(path, None)?);
    check(&drive, repair, inspect, &mut progress)
}

/// Checks the target on `drive`; see [`fsck`].
pub(crate) fn check(
    drive: &Arc<dyn Drive>,
    repair: bool,
    inspect: Inspect<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FsckReport> {
    let mut report = FsckReport::default();
    let recovered =
        match recover(drive, INDEX_CACHE, if repair { RecoveryMode::Repair } else { RecoveryMode::Check }) {
            Ok(recovered) => recovered,
            Err(StoreError::Corrupt { what, detail }) => {
                report.problem(what, detail, false);
                return Ok(report);
            }
            Err(error) => return Err(error),
        };
    report.was_clean = recovered.superblock.clean;
    for damage in &recovered.damage {
        report.problem(
            "log or bitmap",
            format!("{damage}; the repair discards the damaged part and, in the log, everything after it"),
            repair,
        );
    }
    let mut check = Check {
        drive: drive.as_ref(),
        repair,
        inspect,
        report,
        objects: HashMap::default(),
        seen: Bitmap::new(recovered.superblock.data_blocks()),
        shared: BTreeMap::new(),
        fixes: Changes::new(),
        recovered: &recovered,
    };
    let result = check.everything(progress);
    let Check { mut report, fixes, seen, .. } = check;
    match result {
        Ok(()) => report.complete = true,
        Err(StoreError::Corrupt { what, detail }) => report.problem(what, detail, false),
        Err(error) => return Err(error),
    }
    if repair && report.complete && report.problem_count > 0 {
        recovered.rewrite(drive.as_ref(), fixes, seen)?;
    }
    Ok(report)
}

/// Summary of an onode.
struct OnodeSummary {
    size: u64,
    blocks: u64,
    has_omap: bool,
    key: Bytes,
    mapped: u64,
}

/// A leaf of an extent map.
struct FoundLeaf {
    /// Number of the leaf's object.
    nid: u64,
    /// Number of the leaf in the object.
    number: u64,
    leaf: MapLeaf,
    /// Key of the entry that contains the leaf.
    key: Bytes,
    /// The onode that contains the leaf; `None` if the leaf has a key of its own.
    onode: Option<Onode>,
}

struct Check<'a> {
    drive: &'a dyn Drive,
    repair: bool,
    inspect: Inspect<'a>,
    report: FsckReport,
    objects: HashMap<u64, OnodeSummary>,
    /// Blocks that objects refer to.
    seen: Bitmap,
    /// Number of references beyond the first, by block.
    shared: BTreeMap<u64, u32>,
    fixes: Changes,
    recovered: &'a Recovered,
}

impl Check<'_> {
    fn everything(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let collections = self.collections()?;
        self.onodes(&collections)?;
        self.count_references()?;
        self.blocks(progress)?;
        self.counters()?;
        self.omaps()?;
        self.reference_counts()?;
        self.bitmap();
        Ok(())
    }

    fn collections(&mut self) -> Result<HashSet<u64>> {
        let mut numbers = HashSet::default();
        let report = &mut self.report;
        self.recovered.entries(key::COLLECTION, |name, value| {
            match decode_collection(&name, &value) {
                Ok((_, number)) => drop(numbers.insert(number)),
                Err(error) => report.problem("collection", error.to_string(), false),
            }
            Ok(())
        })?;
        report.collections = numbers.len() as u64;
        Ok(numbers)
    }

    fn onodes(&mut self, collections: &HashSet<u64>) -> Result<()> {
        let (report, objects, inspect) = (&mut self.report, &mut self.objects, self.inspect);
        self.recovered.entries(key::ONODE, |name, value| {
            let place = format!("onode {}", name.escape_ascii());
            let onode = match Onode::decode(&value) {
                Ok(onode) => onode,
                Err(error) => {
                    report.problem(place, error.to_string(), false);
                    return Ok(());
                }
            };
            if !key::number(&name).is_some_and(|n| collections.contains(&n)) {
                report.problem(&place, "its collection does not exist", false);
            }
            report.objects += 1;
            match decode_oid(&name) {
                Ok(oid) => {
                    let wrong = inspect(&oid, onode.size, &onode.xattrs);
                    wrong.into_iter().for_each(|detail| report.problem(&place, detail, false));
                }
                Err(error) => report.problem(&place, error.to_string(), false),
            }
            let Onode { nid, size, blocks, has_omap, .. } = onode;
            let object = OnodeSummary { size, blocks, has_omap, key: name, mapped: 0 };
            if let Some(other) = objects.insert(nid, object) {
                report.problem(
                    place,
                    format!("it has the same object number as onode {}", other.key.escape_ascii()),
                    false,
                );
            }
            Ok(())
        })
    }

    /// Calls `each` for every leaf: first for those that onodes contain, then for those with keys of
    /// their own. Skips leaves that are unusable; with `report`, also reports the problem and lets a
    /// repair remove the leaf.
    fn each_leaf(
        &mut self,
        report: bool,
        mut each: impl FnMut(&mut Self, FoundLeaf) -> Result<()>,
    ) -> Result<()> {
        let recovered = self.recovered;
        let blocks = recovered.superblock.data_blocks();
        let mut inline = HashSet::default();
        recovered.entries(key::ONODE, |name, value| {
            let Some(onode) = Onode::decode(&value).ok().filter(|onode| !onode.leaf.is_empty()) else {
                return Ok(());
            };
            inline.insert(onode.nid);
            match MapLeaf::decode(&onode.leaf, blocks) {
                Ok(leaf) => {
                    each(self, FoundLeaf { nid: onode.nid, number: 0, leaf, key: name, onode: Some(onode) })
                }
                Err(error) if report => {
                    let place = format!("leaf in onode {}", name.escape_ascii());
                    self.report.problem(place, error.to_string(), self.repair);
                    self.fixes.insert(name, Some(Onode { leaf: Bytes::new(), ..onode }.encode()));
                    Ok(())
                }
                Err(_) => Ok(()),
            }
        })?;
        recovered.entries(key::LEAF, |name, value| {
            let nid = key::number(&name).unwrap_or_default();
            let number = <[u8; 8]>::try_from(&key::rest(&name)[..]).map(u64::from_be_bytes);
            let what = match (number, MapLeaf::decode(&value, blocks)) {
                _ if !self.objects.contains_key(&nid) => "it belongs to no object".to_owned(),
                (Ok(0), _) if inline.contains(&nid) => {
                    "the onode of its object contains this leaf".to_owned()
                }
                (Ok(number), Ok(leaf)) => {
                    return each(self, FoundLeaf { nid, number, leaf, key: name, onode: None });
                }
                (_, Err(error)) => error.to_string(),
                (Err(_), _) => "its key is damaged".to_owned(),
            };
            if report {
                self.report.problem(format!("leaf {}", name.escape_ascii()), what, self.repair);
                self.fixes.insert(name, None);
            }
            Ok(())
        })
    }

    fn count_references(&mut self) -> Result<()> {
        self.each_leaf(true, |this, FoundLeaf { nid, leaf, .. }| {
            for block in leaf.blocks.iter().flatten() {
                if this.seen.set(Extent { start: block.block, len: 1 }, true) > 0 {
                    *this.shared.entry(block.block).or_default() += 1;
                }
            }
            if let Some(object) = this.objects.get_mut(&nid) {
                object.mapped += leaf.mapped();
            }
            Ok(())
        })?;
        self.report.blocks = self.seen.used();
        Ok(())
    }

    /// Reads every block and compares it with its checksum. Also checks that shared blocks are
    /// marked as shared, and that no block lies beyond its object's end.
    fn blocks(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let mut done = 0;
        self.each_leaf(false, |this, FoundLeaf { nid, number, mut leaf, key, onode }| {
            let place = |this: &Self, i: usize| {
                let object = this.objects.get(&nid).map(|o| o.key.escape_ascii().to_string());
                let offset = (number * LEAF_BLOCKS + i as u64) * BLOCK;
                format!("object {} at {offset}", object.unwrap_or_default())
            };
            let mut unmarked = false;
            for i in 0..leaf.blocks.len() {
                let Some(block) = &mut leaf.blocks[i] else { continue };
                if this.shared.contains_key(&block.block) && !block.shared {
                    block.shared = true;
                    unmarked = true;
                    let what = place(this, i);
                    this.report.problem(what, "a shared block is not marked as shared", this.repair);
                }
                if this.objects.get(&nid).is_some_and(|o| (number * LEAF_BLOCKS + i as u64) * BLOCK >= o.size)
                {
                    this.report.problem(place(this, i), "a block lies beyond the object's end", false);
                }
            }
            for i in this.damaged(&leaf)? {
                this.report.problem(
                    place(this, i),
                    "checksum mismatch: restore the object from a copy",
                    false,
                );
            }
            done += leaf.mapped();
            this.report.bytes_checked = done * BLOCK;
            progress(done, this.report.blocks);
            if unmarked {
                let leaf = Bytes::from(leaf.encode());
                let fixed = onode.map_or(leaf.clone(), |onode| Onode { leaf, ..onode }.encode());
                this.fixes.insert(key, Some(fixed));
            }
            Ok(())
        })
    }

    /// Returns the positions in a leaf whose blocks do not match their checksums.
    fn damaged(&self, leaf: &MapLeaf) -> Result<Vec<usize>> {
        let mut damaged = Vec::new();
        let mut at = 0;
        let mut content = vec![0; leaf.blocks.len() * BLOCK_SIZE];
        while at < leaf.blocks.len() {
            let Some(first) = leaf.blocks[at] else {
                at += 1;
                continue;
            };
            let follows =
                |i: &usize| leaf.blocks[*i].is_some_and(|b| b.block == first.block + (*i - at) as u64);
            let len = 1 + (at + 1..leaf.blocks.len()).take_while(follows).count();
            let bytes = &mut content[..len * BLOCK_SIZE];
            self.drive.read_at(self.recovered.superblock.data.offset + first.block * BLOCK, bytes)?;
            for (i, found) in (at..at + len).zip(bytes.chunks_exact(BLOCK_SIZE)) {
                let Some(block) = leaf.blocks[i] else { continue };
                let deferred = self.recovered.deferred.get(&block.block);
                if crc32c(deferred.map_or(found, |d| &d[..])) != block.crc {
                    damaged.push(i);
                }
            }
            at += len;
        }
        Ok(damaged)
    }

    fn counters(&mut self) -> Result<()> {
        let wrong: Vec<_> = self.objects.values().filter(|o| o.blocks != o.mapped).collect();
        for object in wrong {
            let detail = format!(
                "its block count is {}, but its extent map has {} blocks",
                object.blocks, object.mapped
            );
            self.report.problem(format!("object {}", object.key.escape_ascii()), detail, self.repair);
            let changed = self.fixes.get(&object.key).or_else(|| self.recovered.changes.get(&object.key));
            let stored = match changed {
                Some(value) => value.clone(),
                None => self.recovered.index.get_many(std::slice::from_ref(&object.key))?.pop().flatten(),
            };
            if let Some(bytes) = stored {
                let onode = Onode { blocks: object.mapped, ..Onode::decode(&bytes)? };
                self.fixes.insert(object.key.clone(), Some(onode.encode()));
            }
        }
        Ok(())
    }

    fn omaps(&mut self) -> Result<()> {
        let recovered = self.recovered;
        recovered.entries(key::OMAP, |name, _| {
            let owner = key::number(&name).and_then(|nid| self.objects.get(&nid));
            if !owner.is_some_and(|o| o.has_omap) {
                let what = format!("omap entry {}", name.escape_ascii());
                self.report.problem(what, "it belongs to no object", self.repair);
                self.fixes.insert(name, None);
            }
            Ok(())
        })
    }

    fn reference_counts(&mut self) -> Result<()> {
        let mut expected: BTreeMap<u64, RefPage> = BTreeMap::new();
        for (&block, &extra) in &self.shared {
            expected.entry(block / REF_BLOCKS).or_default().extra.insert((block % REF_BLOCKS) as u16, extra);
        }
        let recovered = self.recovered;
        recovered.entries(key::REFS, |name, value| {
            let right = key::number(&name).and_then(|chunk| expected.remove(&chunk)).unwrap_or_default();
            if RefPage::decode(&value).ok().as_ref() != Some(&right) {
                let what = format!("reference counts {}", name.escape_ascii());
                self.report.problem(what, "they do not match the extent maps of the objects", self.repair);
                self.fixes.insert(name, right.encode());
            }
            Ok(())
        })?;
        for (chunk, page) in expected {
            self.report.problem(
                format!("reference counts {chunk}"),
                "these reference counts are missing",
                self.repair,
            );
            self.fixes.insert(key::refs(chunk), page.encode());
        }
        Ok(())
    }

    fn bitmap(&mut self) {
        let taken = &self.recovered.taken;
        let blocks = 0..taken.blocks();
        let differ = |b: &u64| taken.contains(*b) != self.seen.contains(*b);
        let (mut leaked, mut unmarked) = (0, 0);
        blocks.filter(differ).for_each(|b| if taken.contains(b) { leaked += 1 } else { unmarked += 1 });
        self.report.leaked_blocks = leaked;
        if leaked > 0 {
            self.report.problem(
                "free-space bitmap",
                format!("{leaked} blocks are marked as allocated but belong to no object"),
                self.repair,
            );
        }
        if unmarked > 0 {
            let detail = format!("{unmarked} blocks of objects are marked as free");
            self.report.problem("free-space bitmap", detail, self.repair);
        }
    }
}
