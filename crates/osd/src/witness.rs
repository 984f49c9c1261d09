//! The witness: what the osd stores outside the targets, so that a node can tell after a restart
//! whether missing targets may have newer data than the available ones.
//!
//! The witness has an entry for each placement group with redundancy: its last term, and the targets
//! in sync in this term (`docs/redundancy.md`). It also has the epoch of the node's map. It is one
//! small file beside the node's configuration, which is replaced as a whole:
//!
//! ```text
//! magic "OBWITNES", format (1 byte), CRC-32C of the rest (4 bytes, big-endian)
//! node, counter, map epoch, targets, groups, ages, has sealed map, sealed, begun epoch (postcard)
//! ```
//!
//! The witness stores two epochs of maps. The *begun epoch* is stored before any target receives a map
//! with this epoch, and the *map epoch* after the map was saved. No later map gets an epoch up to the
//! begun epoch, even if the osd restarts between the two writes. So an epoch identifies one map, and the
//! storage host cannot keep a map whose save has failed, and offer it in place of a later one.
//!
//! One write stores all entries that have changed since the last write began. A failure of a target
//! therefore costs one or two writes, although it concerns many groups.
//!
//! The counter grows with each write. The targets store the counter together with the node's age. A
//! witness with a lower counter than any target's is an old copy, and counts as lost. A witness of
//! another node counts as lost, too. A lost witness is replaced by a new one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};

use array::WitnessEntry;
use base::BoxFuture;
use base::block::crc32c;
use futures::future::LocalBoxFuture;
use serde::{Deserialize, Serialize};
use store::StoreError;
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::map::MISSING_STEP;
use crate::seal::Seal;
use crate::start_error::StartError;

const MAGIC: &[u8] = b"OBWITNES";
const FORMAT: u8 = 4;
/// Format of witnesses without a begun epoch.
const FORMAT_NO_BEGUN: u8 = 3;
/// Format of witnesses that do not know whether the map is sealed.
const FORMAT_UNSEALED: u8 = 2;
/// Format of witnesses without ages.
const FORMAT_NO_AGES: u8 = 1;
/// Maximum amount by which the epoch of a map whose save has failed exceeds the map epoch in a witness
/// without a begun epoch: one such step for a start without some targets, and less for all attempts to
/// save.
const EPOCHS_IN_DOUBT: u64 = 2 * MISSING_STEP;
/// Length of the magic, the format and the checksum.
const HEAD: usize = MAGIC.len() + 5;

/// Stores the content of the witness durably, outside the node's targets.
pub trait WitnessStorage: Send + Sync {
    /// Reads the content; `None` if there is none.
    ///
    /// # Errors
    /// If there is content that cannot be read.
    fn load(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the content. When the future resolves, the new content is durable. If the process or
    /// the machine ends earlier, [`load`](WitnessStorage::load) returns the old or the new content.
    ///
    /// # Errors
    /// If the content cannot be stored. Either content may be stored in this case.
    fn replace(&self, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>>;
}

/// Configuration of where the osd stores its witness.
#[derive(Clone)]
pub struct WitnessAt(pub Arc<dyn WitnessStorage>);

impl std::fmt::Debug for WitnessAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WitnessAt")
    }
}

/// The content of the witness, as stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredWitness {
    node: Uuid,
    counter: u64,
    /// Epoch of the last map that was saved; 0 if none is known.
    map_epoch: u64,
    targets: Vec<Uuid>,
    groups: Vec<StoredEntry>,
    ages: BTreeMap<Uuid, (u64, u64)>,
    /// Whether a sealed map was saved.
    has_sealed_map: bool,
    /// The targets that have stored a sealed age.
    sealed: BTreeSet<Uuid>,
    /// Highest epoch of a map that a target may have received; 0 if none is known.
    begun_epoch: u64,
}

/// A group's entry, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredEntry {
    pool: u32,
    group: u32,
    term: u64,
    /// Indices into [`StoredWitness::targets`].
    in_sync: Vec<u16>,
}

/// What the witness knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Knowledge {
    node: Uuid,
    map_epoch: u64,
    begun_epoch: u64,
    groups: BTreeMap<(u32, u32), WitnessEntry>,
    /// The last age of the node that each target has certainly stored: generation and running time in
    /// milliseconds.
    ages: BTreeMap<Uuid, (u64, u64)>,
    /// Whether the node has saved a map with a seal, so that a map without one is older.
    has_sealed_map: bool,
    /// The targets that have stored an age with a seal, so that an age without one is older.
    sealed: BTreeSet<Uuid>,
}

/// The witness of a node, which all shards share. It is not part of the data path. If it has no
/// storage, it is lost when the osd ends.
pub(crate) struct NodeWitness {
    storage: Option<WitnessAt>,
    seal: Seal,
    state: std::sync::Mutex<WitnessState>,
    writing: Mutex<()>,
}

/// What the witness knows, and how much of it is stored.
struct WitnessState {
    knowledge: Knowledge,
    /// Number of changes of `knowledge`.
    changes: u64,
    /// Number of changes that are stored.
    stored: u64,
    /// Counter of the last write, which may have failed.
    last_counter: u64,
    /// Counter of the last write that has succeeded.
    durable: u64,
}

/// The witness, as the placement groups of one shard see it.
pub(crate) struct SharedWitness(pub(crate) Arc<NodeWitness>);

impl NodeWitness {
    /// Reads the witness. Damaged content counts as lost.
    ///
    /// # Errors
    /// [`StartError::UnreadableWitness`] if the content cannot be read. It may be intact, so it does
    /// not count as lost.
    pub(crate) fn load(storage: Option<WitnessAt>, seal: Seal) -> Result<NodeWitness, StartError> {
        let loaded = storage.as_ref().map_or(Ok(None), |at| at.0.load());
        let bytes = loaded.map_err(StartError::UnreadableWitness)?;
        let content = bytes.and_then(|bytes| {
            let content = StoredWitness::decode(&bytes);
            if content.is_none() {
                tracing::error!("the witness is damaged, and counts as lost; groups whose targets are all present continue");
            }
            content
        });
        let content = content.unwrap_or_default();
        let counter = content.counter;
        let state = WitnessState {
            knowledge: content.into(),
            changes: 0,
            stored: 0,
            last_counter: counter,
            durable: counter,
        };
        Ok(NodeWitness { storage, seal, state: std::sync::Mutex::new(state), writing: Mutex::default() })
    }

    /// Returns the seal of the DPU.
    pub(crate) fn seal(&self) -> &Seal {
        &self.seal
    }

    /// Returns whether the node has saved a map with a seal.
    pub(crate) fn has_sealed_map(&self, node: Uuid) -> bool {
        let knowledge = &self.lock().knowledge;
        knowledge.node == node && knowledge.has_sealed_map
    }

    /// Returns whether the last node that used the witness stores with seals.
    pub(crate) fn is_sealing(&self) -> bool {
        self.lock().knowledge.has_sealed_map
    }

    /// Returns whether a target has stored an age with a seal.
    pub(crate) fn has_sealed_age(&self, target: Uuid) -> bool {
        self.lock().knowledge.sealed.contains(&target)
    }

    fn lock(&self) -> MutexGuard<'_, WitnessState> {
        // No code panics while it holds the lock and has changed only a part of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the epoch of the last map of the node that was saved; `None` if it is unknown.
    pub(crate) fn map_epoch(&self, node: Uuid) -> Option<u64> {
        let knowledge = &self.lock().knowledge;
        (knowledge.node == node && knowledge.map_epoch > 0).then_some(knowledge.map_epoch)
    }

    /// Returns the highest epoch of a map of the node that a target may have received; 0 if it is
    /// unknown.
    pub(crate) fn begun_epoch(&self, node: Uuid) -> u64 {
        let knowledge = &self.lock().knowledge;
        if knowledge.node == node { knowledge.begun_epoch } else { 0 }
    }

    /// Returns whether the witness survives the end of the osd.
    pub(crate) fn is_durable(&self) -> bool {
        self.storage.is_some()
    }

    /// Returns the counter that is stored. The targets store it, too.
    pub(crate) fn counter(&self) -> u64 {
        self.lock().durable
    }

    /// Checks that the witness belongs to the node, and that it is not older than the counter that
    /// the targets have stored. Otherwise, forgets what it knows.
    pub(crate) fn check(&self, node: Uuid, counter: u64) {
        let mut state = self.lock();
        let is_empty = state.knowledge == Knowledge::default();
        if state.knowledge.node == node && state.last_counter >= counter {
            return;
        }
        if !is_empty {
            let (own, found) = (state.last_counter, state.knowledge.node);
            tracing::error!(%node, found = %found, own, expected = counter, "the witness belongs to another node or is an old copy, and counts as lost");
        }
        // An old copy of the witness is right about the seal, and about the epochs that are in use.
        let before = std::mem::take(&mut state.knowledge);
        state.knowledge.node = node;
        if before.node == node {
            state.knowledge.has_sealed_map = before.has_sealed_map;
            state.knowledge.sealed = before.sealed;
            state.knowledge.begun_epoch = before.begun_epoch;
        }
        state.last_counter = state.last_counter.max(counter);
        state.changes += 1;
    }

    /// Stores that targets may receive a map with this epoch from now on.
    ///
    /// # Errors
    /// If the witness cannot be stored. Then no target may receive the map.
    pub(crate) async fn begin_map(&self, epoch: u64) -> store::Result<()> {
        let note = |knowledge: &mut Knowledge| {
            let is_new = epoch > knowledge.begun_epoch;
            knowledge.begun_epoch = knowledge.begun_epoch.max(epoch);
            is_new
        };
        self.change(note).await
    }

    /// Stores the epoch of the map, which was saved with a seal.
    ///
    /// # Errors
    /// If the witness cannot be stored.
    pub(crate) async fn store_map_epoch(&self, epoch: u64) -> store::Result<()> {
        let note = |knowledge: &mut Knowledge| {
            let was_sealed = std::mem::replace(&mut knowledge.has_sealed_map, true);
            std::mem::replace(&mut knowledge.map_epoch, epoch) != epoch || !was_sealed
        };
        self.change(note).await
    }

    /// Returns the last age of the node that a target has certainly stored; `None` if it is unknown.
    pub(crate) fn age_of(&self, target: Uuid) -> Option<(u64, u64)> {
        self.lock().knowledge.ages.get(&target).copied()
    }

    /// Returns the greatest age of the node that any target has certainly stored.
    pub(crate) fn newest_age(&self) -> Option<(u64, u64)> {
        self.lock().knowledge.ages.values().max().copied()
    }

    /// Notes that a target must have stored an age of the node, although it is not known which one. The
    /// next write stores this.
    pub(crate) fn expect_age(&self, target: Uuid) {
        let mut state = self.lock();
        state.knowledge.ages.entry(target).or_insert((0, 1));
        state.changes += 1;
    }

    /// Stores that these targets have stored an age of the node, with a seal.
    ///
    /// # Errors
    /// If the witness cannot be stored.
    pub(crate) async fn store_ages(&self, targets: &[Uuid], age: (u64, u64)) -> store::Result<()> {
        let insert = |knowledge: &mut Knowledge| {
            let differs = |uuid: &Uuid| {
                let is_first = knowledge.sealed.insert(*uuid);
                knowledge.ages.insert(*uuid, age) != Some(age) || is_first
            };
            targets.iter().map(differs).fold(false, |changes, differs| changes | differs)
        };
        self.change(insert).await
    }

    /// Forgets the age that a target has stored, because the operator has accepted that the target
    /// has gone back. The next write stores this.
    pub(crate) fn forget_age(&self, target: Uuid) {
        let mut state = self.lock();
        if state.knowledge.ages.remove(&target).is_some() {
            state.changes += 1;
        }
    }

    /// Forgets the ages of targets for which `is_target` returns false. The next write stores this.
    pub(crate) fn retain_targets(&self, is_target: impl Fn(Uuid) -> bool) {
        self.lock().knowledge.ages.retain(|uuid, _| is_target(*uuid));
    }

    /// Forgets the groups of pools for which `is_pool` returns false. The next write stores this.
    pub(crate) fn retain_pools(&self, is_pool: impl Fn(u32) -> bool) {
        self.lock().knowledge.groups.retain(|(pool, _), _| is_pool(*pool));
    }

    /// Changes what the witness knows, and waits until it is stored. `change` returns whether it has
    /// changed anything.
    async fn change(&self, change: impl FnOnce(&mut Knowledge) -> bool) -> store::Result<()> {
        let needed = {
            let mut state = self.lock();
            if change(&mut state.knowledge) {
                state.changes += 1;
            }
            if state.stored >= state.changes {
                return Ok(());
            }
            state.changes
        };
        let _one_at_a_time = self.writing.lock().await;
        let (storage, content, changes, counter) = {
            let mut state = self.lock();
            if state.stored >= needed {
                return Ok(());
            }
            let Some(storage) = &self.storage else {
                state.stored = state.changes;
                return Ok(());
            };
            state.last_counter += 1;
            let content = StoredWitness::new(&state.knowledge, state.last_counter);
            (storage, content, state.changes, state.last_counter)
        };
        storage.0.replace(content.encode()).await.map_err(|e| {
            tracing::error!(error = %e, "the witness cannot be stored; placement groups whose members change wait");
            StoreError::Disconnected(format!("the witness cannot be stored: {e}"))
        })?;
        metrics::counter!("outboard_osd_witness_writes_total").increment(1);
        let mut state = self.lock();
        state.stored = changes;
        state.durable = counter;
        Ok(())
    }
}

impl array::Witness for SharedWitness {
    fn entry(&self, place: (u32, u32)) -> Option<WitnessEntry> {
        self.0.lock().knowledge.groups.get(&place).cloned()
    }

    fn store(&self, place: (u32, u32), entry: WitnessEntry) -> LocalBoxFuture<'_, store::Result<()>> {
        Box::pin(self.0.change(move |knowledge| {
            let old = knowledge.groups.insert(place, entry.clone());
            old.as_ref() != Some(&entry)
        }))
    }
}

impl StoredWitness {
    fn new(knowledge: &Knowledge, counter: u64) -> StoredWitness {
        let mut targets: Vec<Uuid> =
            knowledge.groups.values().flat_map(|entry| entry.in_sync.iter().copied()).collect();
        targets.sort_unstable();
        targets.dedup();
        let index = |uuid: &Uuid| targets.binary_search(uuid).unwrap_or_default() as u16;
        let entry = |(&(pool, group), entry): (&(u32, u32), &WitnessEntry)| StoredEntry {
            pool,
            group,
            term: entry.term,
            in_sync: entry.in_sync.iter().map(index).collect(),
        };
        let groups = knowledge.groups.iter().map(entry).collect();
        StoredWitness {
            node: knowledge.node,
            counter,
            map_epoch: knowledge.map_epoch,
            targets,
            groups,
            ages: knowledge.ages.clone(),
            has_sealed_map: knowledge.has_sealed_map,
            sealed: knowledge.sealed.clone(),
            begun_epoch: knowledge.begun_epoch,
        }
    }

    fn encode(&self) -> Vec<u8> {
        // Encoding plain data into a growing vector cannot fail.
        let body = postcard::to_allocvec(self).expect("plain data can be encoded");
        let mut bytes = [MAGIC, &[FORMAT]].concat();
        bytes.extend_from_slice(&crc32c(&body).to_be_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Decodes bytes from [`StoredWitness::encode`]; `None` for other bytes.
    fn decode(bytes: &[u8]) -> Option<StoredWitness> {
        let (head, body) = bytes.split_at_checked(HEAD)?;
        let (format, crc) = head.strip_prefix(MAGIC)?.split_first()?;
        (crc == crc32c(body).to_be_bytes()).then_some(())?;
        // What follows in the newest format: the length of an empty map, false, the length of an empty
        // set, and 0.
        let missing: &[u8] = match *format {
            FORMAT => &[],
            FORMAT_NO_BEGUN => &[0],
            FORMAT_UNSEALED => &[0, 0, 0],
            FORMAT_NO_AGES => &[0, 0, 0, 0],
            _ => return None,
        };
        let mut content: StoredWitness = postcard::from_bytes(&[body, missing].concat()).ok()?;
        if *format != FORMAT && content.map_epoch > 0 {
            content.begun_epoch = content.map_epoch.saturating_add(EPOCHS_IN_DOUBT);
        }
        let known = |index: &u16| usize::from(*index) < content.targets.len();
        content.groups.iter().flat_map(|entry| &entry.in_sync).all(known).then_some(content)
    }
}

impl From<StoredWitness> for Knowledge {
    fn from(content: StoredWitness) -> Knowledge {
        let targets = &content.targets;
        let entry = |stored: &StoredEntry| {
            let in_sync = stored.in_sync.iter().map(|index| targets[usize::from(*index)]).collect();
            ((stored.pool, stored.group), WitnessEntry { term: stored.term, in_sync })
        };
        let groups = content.groups.iter().map(entry).collect();
        let StoredWitness { node, map_epoch, begun_epoch, ages, has_sealed_map, sealed, .. } = content;
        Knowledge { node, map_epoch, begun_epoch, groups, ages, has_sealed_map, sealed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_of_the_older_format_can_be_read() {
        let uuid = Uuid::from_u128(1);
        let groups = vec![StoredEntry { pool: 1, group: 2, term: 3, in_sync: vec![0] }];
        let ages = BTreeMap::from([(uuid, (4, 5))]);
        let new = StoredWitness {
            node: uuid,
            counter: 9,
            map_epoch: 7,
            targets: vec![uuid],
            groups,
            ages,
            has_sealed_map: true,
            sealed: BTreeSet::from([uuid]),
            begun_epoch: 8,
        };
        assert_eq!(StoredWitness::decode(&new.encode()).as_ref(), Some(&new));
        // No map with an epoch that is in doubt may be made again.
        let new = StoredWitness { begun_epoch: 7 + EPOCHS_IN_DOUBT, ..new };
        let old = (new.node, new.counter, new.map_epoch, new.targets.clone(), new.groups.clone());
        let body = postcard::to_allocvec(&(&old, &new.ages, new.has_sealed_map, &new.sealed)).unwrap();
        let bytes = [MAGIC, &[FORMAT_NO_BEGUN], &crc32c(&body).to_be_bytes(), &body].concat();
        assert_eq!(StoredWitness::decode(&bytes).as_ref(), Some(&new));
        let unsealed = StoredWitness { has_sealed_map: false, sealed: BTreeSet::new(), ..new.clone() };
        let body = postcard::to_allocvec(&(&old, &new.ages)).unwrap();
        let bytes = [MAGIC, &[FORMAT_UNSEALED], &crc32c(&body).to_be_bytes(), &body].concat();
        assert_eq!(StoredWitness::decode(&bytes).as_ref(), Some(&unsealed));
        let body = postcard::to_allocvec(&old).unwrap();
        let crc = crc32c(&body).to_be_bytes();
        let mut bytes = [MAGIC, &[FORMAT_NO_AGES], &crc, &body].concat();
        let without_ages = StoredWitness { ages: BTreeMap::new(), ..unsealed };
        assert_eq!(StoredWitness::decode(&bytes), Some(without_ages));
        bytes[HEAD] ^= 1;
        assert_eq!(StoredWitness::decode(&bytes), None);
    }
}
