//! The node's age: how often its OSD has started, and for how long it has run in all.
//!
//! Both numbers only grow, whatever the time of day does, and lie on every target, in the omap of
//! an object beside the node's map. The count of starts is the generation of session ids. The
//! running time says for how long a session has changed nothing; time during which the OSD does not
//! run does not count, since no client can reach it then.
//!
//! No request is ever carried out twice because a number was lost: what was forgotten is noted per
//! placement group, by session ([`gone`](crate::gone)). A node that cannot write its age starts all
//! the same. If a generation is used twice, repeats of new sessions' first requests may be refused
//! although nothing was forgotten.

use std::rc::Rc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::future::join_all;
use store::{Op, StoreCalls, StoreError, Transaction};
use tokio::time::Instant;
use wire::SessionId;

use crate::ids;
use crate::start_error::StartError;
use crate::target::Target;

const FORMAT: u8 = 1;
/// The omap key.
const KEY: Bytes = Bytes::from_static(b"age");

/// See the [module](self) documentation.
pub(crate) struct Age {
    generation: u64,
    /// How long earlier starts have run, in milliseconds.
    before_ms: u64,
    started: Instant,
}

/// As stored: format byte, then both numbers, big-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoredAge {
    generation: u64,
    ran_ms: u64,
}

impl Age {
    /// Begins a generation: one more than any that the targets know of. Targets that do not take it
    /// within `patience` are left out.
    ///
    /// # Errors
    /// If no target can be asked.
    pub(crate) async fn begin(targets: &[Rc<Target>], patience: Duration) -> Result<Age, StartError> {
        let mut newest: Option<StoredAge> = None;
        let mut answers = 0;
        let mut failure = None;
        for target in targets.iter().filter(|target| target.failure().is_none()) {
            match read(target, patience).await {
                Ok(stored) => {
                    answers += 1;
                    let both = newest.into_iter().chain(stored);
                    newest = both.reduce(|a, b| StoredAge {
                        generation: a.generation.max(b.generation),
                        ran_ms: a.ran_ms.max(b.ran_ms),
                    });
                }
                Err(source) => failure = Some(StartError::Target { target: target.uuid, source }),
            }
        }
        if let (0, Some(failure)) = (answers, failure) {
            return Err(failure);
        }
        let generation = newest.map_or(SessionId::FIRST_GENERATION, |stored| stored.generation + 1);
        let before_ms = newest.map_or(0, |stored| stored.ran_ms);
        let age = Age { generation, before_ms, started: Instant::now() };
        age.save(targets, patience).await;
        Ok(age)
    }

    /// The generation of the sessions that are made now.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// How long the node has run in all, in milliseconds.
    pub(crate) fn ran_ms(&self) -> u64 {
        self.before_ms.saturating_add(u64::try_from(self.ran().as_millis()).unwrap_or(u64::MAX))
    }

    /// How long the node has run since this start.
    pub(crate) fn ran(&self) -> Duration {
        self.started.elapsed()
    }

    /// Puts the age on all targets that take it within `patience`.
    pub(crate) async fn save(&self, targets: &[Rc<Target>], patience: Duration) {
        let stored = StoredAge { generation: self.generation, ran_ms: self.ran_ms() };
        let there = targets.iter().filter(|target| target.failure().is_none());
        let saved = join_all(there.map(|target| write(target, stored, patience))).await;
        if !saved.contains(&true) {
            tracing::warn!(
                generation = self.generation,
                "no target takes the node's age; after a restart, repeats of some requests may be refused"
            );
        }
    }
}

async fn read(target: &Target, patience: Duration) -> store::Result<Option<StoredAge>> {
    let asked = target.store.omap_get(&ids::node_collection(), &ids::age_object(), vec![KEY]);
    let late = || StoreError::Disconnected(format!("no answer within {patience:?}"));
    match tokio::time::timeout(patience, asked).await.unwrap_or_else(|_| Err(late())) {
        Ok(found) => Ok(found.first().and_then(|(_, value)| StoredAge::decode(value))),
        Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether it is durable on a target.
async fn write(target: &Target, stored: StoredAge, patience: Duration) -> bool {
    let entries = vec![(KEY, stored.encode())];
    let set = Op::OmapSet { oid: ids::age_object(), entries };
    target.backing.incarnation();
    let queued = target.backing.queue(Transaction::new(ids::node_collection()).with(set).from_reserve());
    match tokio::time::timeout(patience, queued).await {
        Ok(Ok(())) => true,
        Ok(Err(e)) => {
            tracing::debug!(target_uuid = %target.uuid, error = %e, "the target does not take the node's age");
            false
        }
        Err(_) => false,
    }
}

impl StoredAge {
    fn encode(self) -> Bytes {
        let mut value = BytesMut::with_capacity(17);
        value.put_u8(FORMAT);
        value.put_u64(self.generation);
        value.put_u64(self.ran_ms);
        value.freeze()
    }

    /// The reverse of [`StoredAge::encode`]; `None` for what it does not make.
    fn decode(bytes: &[u8]) -> Option<StoredAge> {
        let (&FORMAT, rest) = bytes.split_first()? else { return None };
        let (generation, ran_ms) = rest.split_at_checked(8)?;
        let generation = u64::from_be_bytes(generation.try_into().ok()?);
        let ran_ms = u64::from_be_bytes(ran_ms.try_into().ok()?);
        // Half of the generations that fit in an id are left for the next starts.
        let possible = SessionId::FIRST_GENERATION..SessionId::FIRST_GENERATION + (1 << 46);
        possible.contains(&generation).then_some(StoredAge { generation, ran_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_impossible_age(bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
            if let Some(stored) = StoredAge::decode(&bytes) {
                prop_assert!(stored.generation >= SessionId::FIRST_GENERATION);
            }
        }
    }

    #[test]
    fn an_age_survives_storage() {
        let stored = StoredAge { generation: SessionId::FIRST_GENERATION + 5, ran_ms: 7 };
        assert_eq!(StoredAge::decode(&stored.encode()), Some(stored));
    }
}
