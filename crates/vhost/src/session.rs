//! [`VhostSession`]: the protocol with one front end, as a state machine without sockets.
//!
//! The session handles one message after the other. The result of a message is an [`SessionAnswer`]: the
//! new state as bytes, the file descriptors to keep and to drop, and the reply. The caller stores
//! the state and the file descriptors outside of this process, and sends the reply, in one atomic
//! step. After this process was killed, [`VhostSession::restore`] continues with the stored state,
//! and the caller passes the message that was not answered again.
//!
//! The session maps the memory that the front end shares. It never accesses this memory.
//!
//! Source: QEMU's docs/interop/vhost-user.rst.

mod state;
mod turn;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use vm_memory::GuestAddress;

use crate::blk;
use crate::inflight::InflightFile;
use crate::memory::{GuestRam, GuestRamError};
use crate::message::{DecodeMessageError, FrontEndRequest};
use crate::ring::{RING_SIZE_MAX, RingPlace};
use state::{QueueState, SessionRecord};
use turn::SessionTurn;

/// Maximum number of queues of a device.
pub const QUEUES_MAX: u16 = 16;

/// Bits of the features of virtio.
mod feature {
    pub(super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(super) const EVENT_IDX: u64 = 1 << 29;
    /// The front end can negotiate features of the protocol.
    pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(super) const VERSION_1: u64 = 1 << 32;
}

/// Bits of the features of the protocol.
mod protocol_feature {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const BACKEND_REQ: u64 = 1 << 5;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const BACKEND_SEND_FD: u64 = 1 << 10;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const RESET_DEVICE: u64 = 1 << 13;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(super) const ALL: u64 = MQ
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | BACKEND_SEND_FD
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

fn features() -> u64 {
    let transport = feature::INDIRECT_DESC | feature::EVENT_IDX | feature::VERSION_1;
    blk::device_features() | transport | feature::PROTOCOL_FEATURES
}

/// The front end has violated the protocol. Its connection must be closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The message cannot be decoded.
    #[error("the front end sent an invalid message: {0}")]
    Decode(#[from] DecodeMessageError),
    /// The message has too many or too few file descriptors.
    #[error("{request} came with {found} file descriptors instead of {expected}")]
    Fds {
        /// Name of the request.
        request: String,
        /// Number of file descriptors that the request has.
        expected: usize,
        /// Number of file descriptors of the message.
        found: usize,
    },
    /// The message is not allowed in this state, or a value is out of range.
    #[error("{request} is refused: {reason}")]
    Refused {
        /// Name of the request.
        request: String,
        /// The reason.
        reason: String,
    },
    /// The operating system refused an operation for the session.
    #[error("cannot {action}: {source}")]
    Os {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Why a session cannot be continued. Its connection must be closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The state is damaged, or of another version of this program.
    #[error("the stored state of the front end cannot be read: {0}")]
    State(String),
    /// A file descriptor of the state is missing.
    #[error("the file descriptor {0} of the front end is missing")]
    MissingFd(u64),
    /// The memory cannot be mapped again.
    #[error(transparent)]
    Memory(#[from] GuestRamError),
    /// The records of requests in flight cannot be mapped again.
    #[error("the records of requests in flight cannot be used: {0}")]
    Inflight(String),
    /// The process has no file descriptors left.
    #[error("cannot duplicate a file descriptor: {0}")]
    Os(#[from] std::io::Error),
}

/// What a session needs to know of its device when it handles a message.
#[derive(Debug, Clone, Default)]
pub struct DeviceView {
    /// Size of the disk, in bytes.
    pub size: u64,
    /// For each queue that the device has stopped: index of the next request to take.
    pub stopped: BTreeMap<usize, u16>,
}

/// What has changed by a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEffect {
    /// The memory table ([`VhostSession::memory`]).
    Memory,
    /// The queue does not run any more.
    QueueStopped(usize),
    /// The queue runs, possibly with other rings than before.
    QueueStarted(usize),
    /// The events of the queue for the front end are other ones.
    QueueEvents(usize),
    /// The channel for requests to the front end ([`VhostSession::channel`]).
    Channel,
}

/// What to do after a message was handled.
#[derive(Debug)]
pub struct SessionAnswer {
    /// The new state of the session, for [`VhostSession::restore`].
    pub state: Bytes,
    /// File descriptors to keep, under keys that were not in use before.
    pub keep: Vec<(u64, OwnedFd)>,
    /// Keys of file descriptors to drop.
    pub drop: Vec<u64>,
    /// Reply to the front end, with file descriptors.
    pub reply: Option<(Bytes, Vec<OwnedFd>)>,
    /// What the device has to do after the other parts were stored.
    pub effects: Vec<SessionEffect>,
}

/// A queue that runs.
#[derive(Debug)]
pub(crate) struct RunningQueue {
    pub kick: Arc<OwnedFd>,
    pub events: QueueEvents,
    /// Index of the next request to take, if the record of the queue is new.
    pub base: u16,
}

/// The events of a queue for the front end.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueEvents {
    /// Signals completed requests.
    pub call: Option<Arc<OwnedFd>>,
    /// Signals that the queue is broken.
    pub error: Option<Arc<OwnedFd>>,
}

/// The protocol with one front end, as a state machine without sockets.
pub struct VhostSession {
    queues: u16,
    record: SessionRecord,
    /// The file descriptors of the record, by their keys.
    fds: BTreeMap<u64, Arc<OwnedFd>>,
    memory: Arc<GuestRam>,
    inflight: Option<InflightFile>,
}

impl VhostSession {
    /// Creates the session of a front end that has just connected, for a device of `queues` queues.
    ///
    /// # Panics
    /// If `queues` is 0 or more than [`QUEUES_MAX`].
    #[must_use]
    pub fn new(queues: u16) -> VhostSession {
        assert!((1..=QUEUES_MAX).contains(&queues), "a device has 1 to {QUEUES_MAX} queues");
        let record = SessionRecord::new(queues);
        VhostSession { queues, record, fds: BTreeMap::new(), memory: Arc::default(), inflight: None }
    }

    /// Continues a session with the state and the file descriptors that were stored last.
    ///
    /// # Errors
    /// If the state is invalid, or the front end has shrunk its memory.
    pub fn restore(state: &[u8], fds: Vec<(u64, OwnedFd)>) -> Result<VhostSession, RestoreError> {
        let record = SessionRecord::read(state).map_err(RestoreError::State)?;
        let fds: BTreeMap<u64, Arc<OwnedFd>> = fds.into_iter().map(|(key, fd)| (key, Arc::new(fd))).collect();
        let fd = |key: u64| fds.get(&key).ok_or(RestoreError::MissingFd(key));
        for key in record.keys() {
            fd(key)?;
        }
        let mut memory = GuestRam::default();
        for region in &record.memory {
            memory = memory.with(region.range, &**fd(region.key)?)?;
        }
        let inflight = match &record.inflight {
            Some(kept) => {
                Some(InflightFile::map(&**fd(kept.key)?, kept.layout).map_err(RestoreError::Inflight)?)
            }
            None => None,
        };
        let queues = record.queues.len() as u16;
        Ok(VhostSession { queues, record, fds, memory: Arc::new(memory), inflight })
    }

    /// Returns the queues that the device must stop before the session handles `message`. All their
    /// requests must be complete. [`DeviceView::stopped`] then has an entry for each of them that was
    /// running.
    #[must_use]
    pub fn stops(&self, message: &[u8]) -> Vec<usize> {
        let Ok((_, request)) = FrontEndRequest::read(message) else { return Vec::new() };
        let all = 0..usize::from(self.queues);
        match request {
            FrontEndRequest::SetVringNum { queue, .. }
            | FrontEndRequest::SetVringBase { queue, .. }
            | FrontEndRequest::GetVringBase { queue }
            | FrontEndRequest::SetVringEnable { queue, is_enabled: false } => {
                all.filter(|number| *number == queue as usize).collect()
            }
            FrontEndRequest::SetVringAddr(addresses) => {
                all.filter(|number| *number == addresses.queue as usize).collect()
            }
            FrontEndRequest::SetVringKick(event) => all.filter(|number| *number == event.queue).collect(),
            FrontEndRequest::SetFeatures(features) if features != self.record.features => all.collect(),
            FrontEndRequest::ResetOwner
            | FrontEndRequest::ResetDevice
            | FrontEndRequest::SetInflightFd(_) => all.collect(),
            _ => Vec::new(),
        }
    }

    /// Handles a message. The session changes only if the message is valid.
    ///
    /// # Errors
    /// If the front end violates the protocol, or the operating system refuses an operation.
    pub fn handle(
        &mut self,
        message: &[u8],
        fds: Vec<OwnedFd>,
        view: &DeviceView,
    ) -> Result<SessionAnswer, ProtocolError> {
        let (header, request) = FrontEndRequest::read(message)?;
        let restarts = self.stops(message);
        SessionTurn::new(self, header, view, restarts).handle(request, fds)
    }

    /// Number of queues of the device.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        self.queues
    }

    /// Returns the memory table.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestRam> {
        &self.memory
    }

    /// Returns the socket for requests to the front end, if there is one.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<OwnedFd>> {
        self.record.channel.map(|key| self.fd(key))
    }

    /// Returns a queue, if it runs.
    pub(crate) fn running(&self, queue: usize) -> Option<RunningQueue> {
        let state = &self.record.queues[queue];
        let kick = state.kick.filter(|_| self.record.runs(queue))?;
        Some(RunningQueue { kick: Arc::clone(self.fd(kick)), events: self.events(queue), base: state.base })
    }

    /// Returns the events of a queue.
    pub(crate) fn events(&self, queue: usize) -> QueueEvents {
        let state = &self.record.queues[queue];
        let fd = |key: Option<u64>| key.map(|key| Arc::clone(self.fd(key)));
        QueueEvents { call: fd(state.call), error: fd(state.error) }
    }

    /// Returns where the rings of a queue are, or `None` if an address is not guest memory.
    pub(crate) fn ring_place(&self, queue: usize) -> Option<RingPlace> {
        let state: &QueueState = &self.record.queues[queue];
        let [descriptors, available, used]: [Option<GuestAddress>; 3] =
            [state.descriptors, state.available, state.used].map(|at| self.memory.guest_address(at));
        Some(RingPlace {
            size: state.size,
            descriptors: descriptors?,
            available: available?,
            used: used?,
            event_index: self.record.features & feature::EVENT_IDX != 0,
            indirect: self.record.features & feature::INDIRECT_DESC != 0,
        })
    }

    /// Number of descriptors of a queue.
    pub(crate) fn ring_size(&self, queue: usize) -> u16 {
        self.record.queues[queue].size
    }

    /// Returns the records of requests in flight. A session with a running queue has records.
    pub(crate) fn inflight(&self) -> Option<&InflightFile> {
        self.inflight.as_ref()
    }

    fn fd(&self, key: u64) -> &Arc<OwnedFd> {
        self.fds.get(&key).expect("the session holds all file descriptors of its record")
    }
}

impl fmt::Debug for VhostSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostSession").field("record", &self.record).finish_non_exhaustive()
    }
}
