//! The state machine of one device, without sockets.
//!
//! [`DeviceMachine::step`] takes an event. After each step, the owner asks for what is to be done:
//! whether to read from the front end ([`DeviceMachine::reads`]), what to write to it
//! ([`DeviceMachine::outgoing`]), whether to disconnect it ([`DeviceMachine::is_over`]), and what
//! to tell the gateway ([`DeviceMachine::news`]). News are derived from the difference between the
//! device's state and what the gateway was told, so they need no queue: a gateway that reads slowly
//! misses connections that came and went meanwhile.
//!
//! ```text
//!              what the gateway was told (GatewayView)
//!
//!  (no gateway) ─── inventory() ──▶ Nothing ◀──────────────────────────┐
//!    Unlisted                          │ news: Connected               │ Acknowledged
//!       ▲   └────── inventory() ─────▶ Connection { connection, number }    │
//!       │                              │ news: Message, once per number│
//!       │                              │ news: Disconnected            │
//!       └── GatewayLost                └──────────────▶ Gone ──────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;

use crate::error::HolderRefusal;
use crate::protocol::{
    CALL_FDS_MAX, HeldChange, Kept, OUTBOX_MAX, REPLY_BYTES_MAX, STATE_BYTES_MAX, SharedFd,
};

/// Maximum number of messages of a front end that the holder has read and that are not answered.
pub(crate) const UNANSWERED_MAX: usize = 4;

/// The limits of one device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceLimits {
    /// Maximum number of kept descriptors.
    pub kept_fds_max: usize,
    /// Maximum number of descriptors of a message to the front end.
    pub reply_fds_max: u32,
}

/// Bytes and descriptors to or from a front end.
#[derive(Debug, Clone)]
pub(crate) struct MessageContent {
    /// The bytes.
    pub bytes: Bytes,
    /// The descriptors.
    pub fds: Vec<SharedFd>,
}

/// An event of a device.
#[derive(Debug)]
pub(crate) enum HeldDeviceEvent {
    /// A front end has connected. The number is greater than those of all connections before.
    Connected(u64),
    /// The front end has sent a message.
    Received(MessageContent),
    /// The first message of [`DeviceMachine::outgoing`] was written.
    Written,
    /// The connection of the front end has ended.
    Ended,
    /// The gateway has received the news that the connection of this number has ended.
    Acknowledged(u64),
    /// The gateway's connection has ended.
    GatewayLost,
    /// A call of the gateway: answers the pending message.
    Done {
        /// Number of the message.
        number: u64,
        /// Change of the state.
        change: HeldChange,
        /// Descriptors of the change.
        kept: Vec<SharedFd>,
        /// The reply.
        reply: Option<MessageContent>,
        /// Whether the connection ends after the reply.
        close: bool,
    },
    /// A call of the gateway: changes the state.
    Deposit {
        /// Change of the state.
        change: HeldChange,
        /// Descriptors of the change.
        kept: Vec<SharedFd>,
    },
    /// A call of the gateway: sends a message to the front end.
    Send {
        /// Number of the front end's connection.
        connection: u64,
        /// The message.
        content: MessageContent,
    },
}

/// What to tell the gateway.
#[derive(Debug)]
pub(crate) enum News {
    /// A front end has connected.
    Connected(u64),
    /// The pending message of a connection.
    Message {
        /// Number of the connection.
        connection: u64,
        /// Number of the message.
        number: u64,
        /// The message.
        content: MessageContent,
    },
    /// A connection has ended.
    Disconnected(u64),
}

/// What the holder keeps for the connected front end, for the inventory.
#[derive(Debug)]
pub(crate) struct DeviceSnapshot {
    /// The connection and its state.
    pub kept: Kept,
    /// The kept descriptors with their keys.
    pub fds: Vec<(u64, SharedFd)>,
}

/// What the gateway was told about the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GatewayView {
    /// No gateway is connected, or its inventory lacks the device.
    Unlisted,
    /// No front end is connected.
    Nothing,
    /// A front end is connected, and has sent the message of this number; 0 for no message.
    Connection { connection: u64, number: u64 },
    /// The connection has ended. The gateway has not acknowledged this.
    Gone { connection: u64 },
}

/// The connection of a front end, and what the holder keeps for it.
#[derive(Debug)]
struct HeldFrontEnd {
    connection: u64,
    /// Messages that the gateway has not answered. The first is the pending message.
    unanswered: VecDeque<MessageContent>,
    /// Number of the pending message, or of the next one.
    number: u64,
    state: Bytes,
    kept: BTreeMap<u64, SharedFd>,
    /// Messages to the front end. The first may be written in part.
    outbox: VecDeque<MessageContent>,
    /// Whether the connection ends when the outbox is empty.
    is_closing: bool,
}

/// A device: the connection of its front end, and what the gateway knows about it.
#[derive(Debug)]
pub(crate) struct DeviceMachine {
    name: String,
    limits: DeviceLimits,
    front_end: Option<HeldFrontEnd>,
    told: GatewayView,
    /// Number of the newest connection.
    newest: u64,
}

impl DeviceMachine {
    /// Creates a device that the present gateway has added.
    pub fn new(name: String, limits: DeviceLimits) -> DeviceMachine {
        DeviceMachine { name, limits, front_end: None, told: GatewayView::Nothing, newest: 0 }
    }

    /// Applies an event. A refused call changes nothing; no other event is refused. The lengths of the
    /// parts of a call were checked before.
    pub fn step(&mut self, event: HeldDeviceEvent) -> Result<(), HolderRefusal> {
        match event {
            HeldDeviceEvent::Connected(connection) => self.connected(connection),
            HeldDeviceEvent::Received(content) => self.received(content),
            HeldDeviceEvent::Written => self.written(),
            HeldDeviceEvent::Ended => {
                assert!(self.front_end.is_some(), "a front end was connected");
                self.front_end = None;
            }
            HeldDeviceEvent::Acknowledged(connection) => {
                // A gateway can acknowledge only what it was told; ignore others.
                if self.told == (GatewayView::Gone { connection }) {
                    self.told = GatewayView::Nothing;
                }
            }
            HeldDeviceEvent::GatewayLost => self.told = GatewayView::Unlisted,
            HeldDeviceEvent::Done { number, change, kept, reply, close } => {
                return self.done(number, change, kept, reply, close);
            }
            HeldDeviceEvent::Deposit { change, kept } => {
                self.check_change(&change, &kept)?;
                self.current(change.connection)?.apply(change, kept);
            }
            HeldDeviceEvent::Send { connection, content } => return self.send(connection, content),
        }
        Ok(())
    }

    /// Whether to read a message of the front end.
    pub fn reads(&self) -> bool {
        self.front_end.as_ref().is_some_and(|f| !f.is_closing && f.unanswered.len() < UNANSWERED_MAX)
    }

    /// Returns the message to write to the front end. It stays the same until
    /// [`HeldDeviceEvent::Written`].
    pub fn outgoing(&self) -> Option<MessageContent> {
        self.front_end.as_ref().and_then(|f| f.outbox.front()).cloned()
    }

    /// Whether to disconnect the front end.
    pub fn is_over(&self) -> bool {
        self.front_end.as_ref().is_some_and(|f| f.is_closing && f.outbox.is_empty())
    }

    /// Whether [`DeviceMachine::news`] would return news.
    pub fn has_news(&self) -> bool {
        match (self.told, &self.front_end) {
            (GatewayView::Unlisted | GatewayView::Gone { .. }, _) | (GatewayView::Nothing, None) => false,
            (GatewayView::Nothing, Some(front_end)) => !front_end.is_closing,
            (GatewayView::Connection { connection, number }, Some(f)) if f.connection == connection => {
                // A front end that does not read gets no further message answered, so that the outbox
                // has space for the reply.
                f.number > number && !f.unanswered.is_empty() && f.outbox.is_empty()
            }
            (GatewayView::Connection { .. }, _) => true,
        }
    }

    /// Returns the next news. The caller must pass them to the gateway.
    pub fn news(&mut self) -> Option<News> {
        if !self.has_news() {
            return None;
        }
        match (self.told, &self.front_end) {
            (GatewayView::Nothing, Some(HeldFrontEnd { connection, .. })) => {
                self.told = GatewayView::Connection { connection: *connection, number: 0 };
                Some(News::Connected(*connection))
            }
            (GatewayView::Connection { connection, .. }, Some(f)) if f.connection == connection => {
                let content = f.unanswered.front().cloned().expect("a message is pending");
                self.told = GatewayView::Connection { connection, number: f.number };
                Some(News::Message { connection, number: f.number, content })
            }
            (GatewayView::Connection { connection, .. }, _) => {
                self.told = GatewayView::Gone { connection };
                Some(News::Disconnected(connection))
            }
            (GatewayView::Unlisted | GatewayView::Gone { .. } | GatewayView::Nothing, _) => {
                unreachable!("there are no news")
            }
        }
    }

    /// Returns what a new gateway needs to know. From now on, it gets the news, beginning with the
    /// pending message.
    pub fn inventory(&mut self) -> Option<DeviceSnapshot> {
        assert_eq!(self.told, GatewayView::Unlisted, "a gateway gets one inventory");
        let front_end = self.front_end.as_ref().filter(|f| !f.is_closing);
        self.told = match front_end {
            Some(f) => GatewayView::Connection { connection: f.connection, number: 0 },
            None => GatewayView::Nothing,
        };
        front_end.map(|f| DeviceSnapshot {
            kept: Kept { connection: f.connection, state: f.state.clone(), fds: f.kept.len() as u32 },
            fds: f.kept.iter().map(|(key, fd)| (*key, fd.clone())).collect(),
        })
    }

    fn connected(&mut self, connection: u64) {
        assert!(self.front_end.is_none(), "one front end at a time");
        assert!(connection > self.newest, "numbers of connections grow");
        self.newest = connection;
        self.front_end = Some(HeldFrontEnd {
            connection,
            unanswered: VecDeque::new(),
            number: 1,
            state: Bytes::new(),
            kept: BTreeMap::new(),
            outbox: VecDeque::new(),
            is_closing: false,
        });
    }

    fn received(&mut self, content: MessageContent) {
        assert!(self.reads(), "a message was read without space for it");
        let front_end = self.front_end.as_mut().expect("a front end that reads is connected");
        front_end.unanswered.push_back(content);
    }

    fn written(&mut self) {
        let front_end = self.front_end.as_mut().expect("a front end was connected");
        let written = front_end.outbox.pop_front();
        assert!(written.is_some(), "a message was being written");
    }

    fn done(
        &mut self,
        number: u64,
        change: HeldChange,
        kept: Vec<SharedFd>,
        reply: Option<MessageContent>,
        close: bool,
    ) -> Result<(), HolderRefusal> {
        let connection = change.connection;
        // Check everything before the first change.
        self.check_change(&change, &kept)?;
        if let Some(reply) = &reply {
            self.check_reply(reply)?;
        }
        let is_told = self.told == GatewayView::Connection { connection, number };
        let front_end = self.current(connection)?;
        if !is_told || number == 0 || front_end.number != number || front_end.unanswered.is_empty() {
            return Err(HolderRefusal::NotPending { device: change.device, number });
        }
        front_end.apply(change, kept);
        front_end.unanswered.pop_front();
        front_end.number += 1;
        assert!(front_end.outbox.len() < OUTBOX_MAX, "one place in the outbox is for the reply");
        front_end.outbox.extend(reply);
        if close {
            front_end.close();
        }
        Ok(())
    }

    fn send(&mut self, connection: u64, content: MessageContent) -> Result<(), HolderRefusal> {
        self.check_reply(&content)?;
        let busy = HolderRefusal::FrontEndBusy(self.name.clone());
        let front_end = self.current(connection)?;
        // The last place is for the reply to the pending message.
        if front_end.outbox.len() + 1 >= OUTBOX_MAX {
            return Err(busy);
        }
        front_end.outbox.push_back(content);
        Ok(())
    }

    /// Returns the front end if it has this connection.
    fn current(&mut self, connection: u64) -> Result<&mut HeldFrontEnd, HolderRefusal> {
        match &mut self.front_end {
            Some(f) if f.connection == connection && !f.is_closing => Ok(f),
            _ => Err(HolderRefusal::ConnectionEnded { device: self.name.clone(), connection }),
        }
    }

    fn check_change(&mut self, change: &HeldChange, kept: &[SharedFd]) -> Result<(), HolderRefusal> {
        assert_eq!(change.keep.len(), kept.len(), "each key has a descriptor");
        assert!(kept.len() <= CALL_FDS_MAX, "a frame has a limited number of descriptors");
        assert!(
            change.state.as_ref().is_none_or(|state| state.len() <= STATE_BYTES_MAX),
            "the call was checked"
        );
        let max = self.limits.kept_fds_max;
        let front_end = self.current(change.connection)?;
        let keys: BTreeSet<_> = change.keep.iter().collect();
        let dropped: BTreeSet<_> = change.drop.iter().collect();
        let stay = front_end.kept.keys().filter(|key| !dropped.contains(key) && !keys.contains(key)).count();
        let count = stay + keys.len();
        if count > max { Err(HolderRefusal::TooManyKeptFds { count, max }) } else { Ok(()) }
    }

    fn check_reply(&self, reply: &MessageContent) -> Result<(), HolderRefusal> {
        assert!((1..=REPLY_BYTES_MAX).contains(&reply.bytes.len()), "the call was checked");
        let (count, max) = (reply.fds.len(), self.limits.reply_fds_max);
        if count > max as usize { Err(HolderRefusal::TooManyReplyFds { count, max }) } else { Ok(()) }
    }
}

impl HeldFrontEnd {
    fn apply(&mut self, change: HeldChange, kept: Vec<SharedFd>) {
        for key in change.drop {
            self.kept.remove(&key);
        }
        self.kept.extend(change.keep.into_iter().zip(kept));
        if let Some(state) = change.state {
            self.state = state;
        }
    }

    /// Ends the connection after the outbox is written. What the holder kept for it goes at once.
    fn close(&mut self) {
        self.is_closing = true;
        self.unanswered.clear();
        self.kept.clear();
        self.state = Bytes::new();
    }
}

#[cfg(test)]
mod tests;
