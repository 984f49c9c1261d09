//! [`SessionRecord`]: the state of a session, as it is stored outside of this process.

use serde::{Deserialize, Serialize};

use super::{QUEUES_MAX, RING_SIZE_MAX};
use crate::inflight::RecordLayout;
use crate::memory::{MemoryRange, REGIONS_MAX};

/// Version of the stored form.
const VERSION: u8 = 1;

/// The state of a session. File descriptors are named by keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SessionRecord {
    version: u8,
    /// Features that the front end has accepted.
    pub features: u64,
    /// Features of the protocol that the front end has accepted.
    pub protocol_features: u64,
    pub memory: Vec<KeptRegion>,
    pub queues: Vec<QueueState>,
    pub inflight: Option<KeptInflight>,
    pub channel: Option<u64>,
    /// Key of the next file descriptor. Keys are not used twice.
    pub next_key: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptRegion {
    pub range: MemoryRange,
    pub key: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptInflight {
    pub key: u64,
    pub layout: RecordLayout,
}

/// The state of a queue. Addresses are those of the front end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QueueState {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub base: u16,
    /// Event by which the driver announces requests. The queue is started while it has one.
    pub kick: Option<u64>,
    pub call: Option<u64>,
    pub error: Option<u64>,
    pub is_enabled: bool,
}

impl Default for QueueState {
    fn default() -> QueueState {
        QueueState {
            size: RING_SIZE_MAX,
            descriptors: 0,
            available: 0,
            used: 0,
            base: 0,
            kick: None,
            call: None,
            error: None,
            is_enabled: false,
        }
    }
}

impl SessionRecord {
    pub(super) fn new(queues: u16) -> SessionRecord {
        SessionRecord {
            version: VERSION,
            features: 0,
            protocol_features: 0,
            memory: Vec::new(),
            queues: vec![QueueState::default(); queues.into()],
            inflight: None,
            channel: None,
            next_key: 0,
        }
    }

    /// Returns true if the queue runs: it is started, and enabled where the front end can do that.
    pub(super) fn runs(&self, queue: usize) -> bool {
        let QueueState { kick, is_enabled, .. } = self.queues[queue];
        let can_be_disabled = self.features & super::feature::PROTOCOL_FEATURES != 0;
        kick.is_some() && (is_enabled || !can_be_disabled)
    }

    /// Returns the keys of all file descriptors.
    pub(super) fn keys(&self) -> impl Iterator<Item = u64> {
        let queues = self.queues.iter().flat_map(|queue| [queue.kick, queue.call, queue.error]).flatten();
        let inflight = self.inflight.iter().map(|inflight| inflight.key);
        self.memory.iter().map(|region| region.key).chain(queues).chain(inflight).chain(self.channel)
    }

    pub(super) fn write(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("a record can be serialized")
    }

    pub(super) fn read(bytes: &[u8]) -> Result<SessionRecord, String> {
        match bytes.first() {
            Some(&VERSION) => {}
            version => return Err(format!("its version is {version:?} instead of {VERSION}")),
        }
        let record: SessionRecord = postcard::from_bytes(bytes).map_err(|e| e.to_string())?;
        let counts = (record.queues.len(), record.memory.len());
        let has_valid_sizes = record.queues.iter().all(|queue| is_ring_size(queue.size.into()));
        let is_valid = (1..=usize::from(QUEUES_MAX)).contains(&counts.0) && counts.1 <= REGIONS_MAX;
        let has_old_keys = record.keys().all(|key| key < record.next_key);
        let has_inflight = record.inflight.is_some() || !(0..counts.0).any(|queue| record.runs(queue));
        if !is_valid || !has_valid_sizes || !has_old_keys || !has_inflight {
            return Err(format!("it is inconsistent: {record:?}"));
        }
        Ok(record)
    }
}

/// Returns true if a ring can have this number of descriptors.
pub(super) fn is_ring_size(size: u32) -> bool {
    size.is_power_of_two() && size <= RING_SIZE_MAX.into()
}
