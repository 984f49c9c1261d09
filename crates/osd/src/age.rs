//! The node's age: how often the node's osd has started, and how long the osd has run in total.
//!
//! Both numbers only grow, independently of the wall clock. Every target stores both numbers in the
//! omap of an object in the collection of the node's map. The number of starts becomes the
//! generation in the ids of new sessions. The running time measures how long a session has been
//! idle. Time in which the osd does not run does not count, because no client can reach the osd
//! then.
//!
//! The witness records, for each target, the last age that the target has certainly stored. A target
//! that has an older age has gone back to an earlier state. Redundancy schemes do not depend on this.
//! A pool without redundancy does: it does not use the target until the operator accepts the loss.
//!
//! Even if the age is lost, the osd executes no request twice, because each placement group records
//! the sessions whose results it forgot ([`gone`](crate::gone)). A node that cannot write its age
//! starts anyway. Its next start then uses the same generation again, and the osd may refuse
//! retries of the first requests of new sessions, although it has not forgotten the results of
//! these requests.

use std::rc::Rc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::future::join_all;
use store::{Op, StoreCalls, StoreError, Transaction};
use tokio::sync::Mutex;
use tokio::time::Instant;
use uuid::Uuid;
use wire::SessionId;

use crate::ids;
use crate::seal::Seal;
use crate::start_error::StartError;
use crate::target::Target;
use crate::witness::NodeWitness;

const FORMAT: u8 = 3;
/// Format of ages without a seal.
const FORMAT_UNSEALED: u8 = 2;
/// Format of ages without a counter of the witness.
const OLD_FORMAT: u8 = 1;
/// Label of the proof by which the DPU recognises its ages.
const SEAL: &str = "outboard node age";
/// Key of the age in the omap.
const KEY: Bytes = Bytes::from_static(b"age");

/// The node's age: how often the osd has started, and how long it has run in total.
pub(crate) struct Age {
    generation: u64,
    /// Total time that the osd ran before this start, in milliseconds.
    before_ms: u64,
    started: Instant,
    /// Lock that is held during a save, so that a target's age never goes back.
    saving: Mutex<()>,
}

/// The age as stored: a format byte, then the numbers, big-endian, then the seal: the DPU's proof for the
/// target's UUID and the numbers. So the storage host can neither make an age nor copy one to another
/// target. Older versions of the node store no seal, and even older ones no counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoredAge {
    generation: u64,
    ran_ms: u64,
    /// Counter of the [witness](crate::witness); 0 if none was stored.
    witness: u64,
}

impl Age {
    /// Begins a new generation. Its number is one more than the highest generation that is known: the
    /// highest that a target stores, or has stored according to the witness. Waits at most `patience`
    /// for each answer of a target. Does not fail if targets do not store the new age.
    ///
    /// # Errors
    /// If no target can be read.
    pub(crate) async fn begin(
        targets: &[Rc<Target>],
        witness: &NodeWitness,
        patience: Duration,
    ) -> Result<Age, StartError> {
        let mut newest: Option<StoredAge> = None;
        let mut answers = 0;
        let mut failure = None;
        for target in targets.iter().filter(|target| target.failure().is_none()) {
            match read(target, witness, patience).await {
                Ok(stored) => {
                    answers += 1;
                    newest = newest.into_iter().chain(stored).reduce(StoredAge::max);
                }
                Err(source) => failure = Some(StartError::Target { target: target.uuid, source }),
            }
        }
        if let (0, Some(failure)) = (answers, failure) {
            return Err(failure);
        }
        // The targets with the newest age may be missing.
        let known =
            witness.newest_age().map(|(generation, ran_ms)| StoredAge { generation, ran_ms, witness: 0 });
        let newest = newest.into_iter().chain(known).reduce(StoredAge::max);
        let generation = newest.map_or(SessionId::FIRST_GENERATION, |stored| stored.generation + 1);
        let before_ms = newest.map_or(0, |stored| stored.ran_ms);
        let age = Age { generation, before_ms, started: Instant::now(), saving: Mutex::default() };
        age.save(targets, witness, patience).await;
        Ok(age)
    }

    /// Returns the generation that new sessions belong to.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the node's total running time, in milliseconds.
    pub(crate) fn ran_ms(&self) -> u64 {
        self.before_ms.saturating_add(u64::try_from(self.ran().as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the time since this start of the osd.
    pub(crate) fn ran(&self) -> Duration {
        self.started.elapsed()
    }

    /// Writes the age, and the counter of the witness, to all usable targets that have not gone back.
    /// Gives up on a target after `patience`. The witness then records which targets have stored the
    /// age.
    pub(crate) async fn save(&self, targets: &[Rc<Target>], witness: &NodeWitness, patience: Duration) {
        let _one_at_a_time = self.saving.lock().await;
        let counter = witness.counter();
        let stored = StoredAge { generation: self.generation, ran_ms: self.ran_ms(), witness: counter };
        let there = targets.iter().filter(|target| target.failure().is_none());
        let saved = join_all(there.map(async |target| {
            drop(check(target, witness, patience).await);
            // The store may have a new incarnation since the check, in which nothing is known.
            let is_stored =
                target.went_back() == Some(false) && write(target, stored, witness, patience).await;
            is_stored.then_some(target.uuid)
        }));
        let saved: Vec<Uuid> = saved.await.into_iter().flatten().collect();
        if saved.is_empty() {
            tracing::warn!(
                generation = self.generation,
                "no target stored the node's age; after a restart, retries of some requests may be refused"
            );
        }
        if let Err(e) = witness.store_ages(&saved, stored.when()).await {
            tracing::warn!(error = %e, "the witness did not store the ages of the targets; older copies of them may not be noticed");
        }
    }
}

/// Compares the age that a target has stored with the age that it had stored according to the witness.
/// Returns whether the target has gone back. Reads the age only once per incarnation of the store.
/// Waits at most `patience`.
///
/// # Errors
/// If the age cannot be read.
pub(crate) async fn check(target: &Target, witness: &NodeWitness, patience: Duration) -> store::Result<bool> {
    if let Some(known) = target.went_back() {
        return Ok(known);
    }
    let incarnation = target.store.incarnation();
    // The first shard may write a newer age at any time, first to the target and then to the witness.
    // The age that the witness has now is therefore at most as new as the age that is read next. If
    // the witness changes meanwhile, the operator may have accepted that the target has gone back.
    let (when, expected) = loop {
        let expected = witness.age_of(target.uuid);
        let stored = read(target, witness, patience).await?;
        if witness.age_of(target.uuid) == expected {
            break (stored.map_or((0, 0), StoredAge::when), expected);
        }
    };
    let has_gone_back =
        expected.is_some_and(|expected| when < expected) && !base::mutant!(TrustReturnedTarget);
    if has_gone_back {
        tracing::error!(target_uuid = %target.uuid, ?when, ?expected, "the target has gone back to an earlier state: it lacks an age of the node that it had stored");
        metrics::counter!("outboard_osd_targets_went_back_total").increment(1);
    }
    target.set_went_back(incarnation, has_gone_back);
    Ok(has_gone_back)
}

/// Returns the highest counter of the witness that any usable target stores; 0 if the targets store
/// none, and `None` if no counter was found and not all targets have answered. Waits at most `patience`
/// for each target.
pub(crate) async fn witness_counter(
    targets: &[Rc<Target>],
    witness: &NodeWitness,
    patience: Duration,
) -> Option<u64> {
    let there = targets.iter().filter(|target| target.failure().is_none());
    let read = join_all(there.map(|target| read(target, witness, patience))).await;
    let all_answered = read.iter().all(Result::is_ok);
    let counters = read.into_iter().flatten().flatten().map(|stored| stored.witness);
    let highest = counters.max().unwrap_or(0);
    (highest > 0 || all_answered).then_some(highest)
}

async fn read(
    target: &Target,
    witness: &NodeWitness,
    patience: Duration,
) -> store::Result<Option<StoredAge>> {
    let asked = target.store.omap_get(&ids::node_collection(), &ids::age_object(), vec![KEY]);
    let late = || StoreError::Disconnected(format!("no answer within {patience:?}"));
    match tokio::time::timeout(patience, asked).await.unwrap_or_else(|_| Err(late())) {
        Ok(found) => Ok(found.first().and_then(|(_, value)| {
            let must_be_sealed = witness.has_sealed_age(target.uuid);
            let stored = StoredAge::decode(value, (witness.seal(), target.uuid), must_be_sealed)?;
            // The storage host can write a high counter without a seal, with which the witness would count
            // as lost.
            let is_unproven = value[0] != FORMAT && witness.is_sealing();
            Some(StoredAge { witness: if is_unproven { 0 } else { stored.witness }, ..stored })
        })),
        Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes the age to a target. Returns whether the target has stored the age durably.
async fn write(target: &Target, stored: StoredAge, witness: &NodeWitness, patience: Duration) -> bool {
    let entries = vec![(KEY, stored.encode((witness.seal(), target.uuid)))];
    let set = Op::OmapSet { oid: ids::age_object(), entries };
    target.backing.incarnation();
    let queued = target.backing.queue(Transaction::new(ids::node_collection()).with(set).from_reserve());
    match tokio::time::timeout(patience, queued).await {
        Ok(Ok(())) => true,
        Ok(Err(e)) => {
            tracing::debug!(target_uuid = %target.uuid, error = %e, "the target did not store the node's age");
            false
        }
        Err(_) => false,
    }
}

impl StoredAge {
    /// Returns the greater of each pair of numbers.
    fn max(self, other: StoredAge) -> StoredAge {
        StoredAge {
            generation: self.generation.max(other.generation),
            ran_ms: self.ran_ms.max(other.ran_ms),
            witness: self.witness.max(other.witness),
        }
    }

    /// Returns the generation and the running time. Later ages have greater pairs.
    fn when(self) -> (u64, u64) {
        (self.generation, self.ran_ms)
    }

    fn encode(self, (seal, target): (&Seal, Uuid)) -> Bytes {
        let mut value = BytesMut::with_capacity(57);
        value.put_u8(FORMAT);
        value.put_u64(self.generation);
        value.put_u64(self.ran_ms);
        value.put_u64(self.witness);
        let proof = seal.prove(SEAL, &[target.as_bytes(), &value]);
        value.put_slice(&proof);
        value.freeze()
    }

    /// Decodes bytes from [`StoredAge::encode`] for the same target, or with `must_be_sealed == false` of
    /// an older version; `None` for other bytes.
    fn decode(bytes: &[u8], (seal, target): (&Seal, Uuid), must_be_sealed: bool) -> Option<StoredAge> {
        let (format, rest) = bytes.split_first()?;
        let rest = match *format {
            FORMAT => {
                let (numbers, proof) = rest.split_at_checked(24)?;
                seal.check(SEAL, &[target.as_bytes(), &bytes[..25]], proof)?;
                numbers
            }
            _ => (!must_be_sealed).then_some(rest)?,
        };
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_be_bytes);
        let (generation, rest) = rest.split_at_checked(8)?;
        let (ran_ms, rest) = rest.split_at_checked(8)?;
        let (generation, ran_ms) = (number(generation)?, number(ran_ms)?);
        let witness = match *format {
            FORMAT | FORMAT_UNSEALED => number(rest)?,
            OLD_FORMAT => rest.is_empty().then_some(0)?,
            _ => return None,
        };
        // A generation beyond this range counts as damage. Half of the generations that fit into a
        // session id therefore remain for later starts.
        let possible = SessionId::FIRST_GENERATION..SessionId::FIRST_GENERATION + (1 << 46);
        possible.contains(&generation).then_some(StoredAge { generation, ran_ms, witness })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_decode_to_a_generation_below_the_first(bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
            if let Some(stored) = StoredAge::decode(&bytes, (&Seal::default(), Uuid::nil()), false) {
                prop_assert!(stored.generation >= SessionId::FIRST_GENERATION);
            }
        }
    }

    #[test]
    fn an_age_survives_encoding_and_decoding() {
        let stored = StoredAge { generation: SessionId::FIRST_GENERATION + 5, ran_ms: 7, witness: 3 };
        let (key, target) = (Seal::default(), Uuid::from_u128(1));
        let sealed = stored.encode((&key, target));
        let decode = |bytes: &[u8], must_be_sealed| StoredAge::decode(bytes, (&key, target), must_be_sealed);
        assert_eq!(decode(&sealed, true), Some(stored));
        let unsealed = [&[FORMAT_UNSEALED], &sealed[1..25]].concat();
        assert_eq!((decode(&unsealed, false), decode(&unsealed, true)), (Some(stored), None));
        let old = [&[OLD_FORMAT], &sealed[1..17]].concat();
        assert_eq!(decode(&old, false), Some(StoredAge { witness: 0, ..stored }));
        assert_eq!(StoredAge::decode(&sealed, (&key, Uuid::nil()), false), None, "of another target");
        assert_eq!(
            StoredAge::decode(&sealed, (&Seal::new(identity::ProofKey::new(&[1; 32]), false), target), false),
            None
        );
        for at in 1..sealed.len() {
            let mut altered = sealed.to_vec();
            altered[at] ^= 1;
            assert_eq!(decode(&altered, false), None, "byte {at}");
        }
        assert_eq!(decode(&sealed[..56], false), None, "a shorter proof");
    }
}
