//! [`SessionTurn`]: the handling of one message.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::state::{KeptInflight, KeptRegion, QueueState, SessionRecord, is_ring_size};
use super::{
    DeviceView, ProtocolError, RING_SIZE_MAX, SessionAnswer, SessionEffect, VhostSession, features,
    protocol_feature,
};
use crate::blk;
use crate::inflight::{self, InflightFile, RecordLayout};
use crate::memory::{GuestRam, MemoryRange, REGIONS_MAX};
use crate::message::{self, ConfigPart, FrontEndRequest, InflightPlace, MessageHeader, QueueEvent};

/// Why a message does not take effect.
enum TurnFailure {
    /// The front end violates the protocol.
    Violation(String),
    /// The message is valid, but cannot be executed. The front end learns this by the reply, if it
    /// wants one.
    Refusal(String),
    Os(&'static str, std::io::Error),
}

type MessageReply = (Vec<u8>, Vec<OwnedFd>);

/// The handling of one message. It changes copies, which replace the session's state at the end.
pub(super) struct SessionTurn<'a> {
    session: &'a mut VhostSession,
    header: MessageHeader,
    view: &'a DeviceView,
    record: SessionRecord,
    memory: Option<GuestRam>,
    inflight: Option<InflightFile>,
    added: BTreeMap<u64, Arc<OwnedFd>>,
    effects: Vec<SessionEffect>,
    request: String,
    /// Queues that start again if they still run.
    restarts: Vec<usize>,
}

impl<'a> SessionTurn<'a> {
    pub(super) fn new(
        session: &'a mut VhostSession,
        header: MessageHeader,
        view: &'a DeviceView,
        restarts: Vec<usize>,
    ) -> Self {
        let (record, inflight) = (session.record.clone(), session.inflight.clone());
        let (added, effects) = (BTreeMap::new(), Vec::new());
        let request = String::new();
        SessionTurn {
            session,
            header,
            view,
            record,
            memory: None,
            inflight,
            added,
            effects,
            request,
            restarts,
        }
    }

    pub(super) fn handle(
        mut self,
        request: FrontEndRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<SessionAnswer, ProtocolError> {
        self.request = name(&request);
        let expected = expected_fds(&request, fds.len());
        if fds.len() != expected {
            return Err(ProtocolError::Fds { request: self.request, expected, found: fds.len() });
        }
        for (queue, base) in &self.view.stopped {
            self.record.queues[*queue].base = *base;
        }
        let reply = self.execute(request, fds).and_then(|reply| self.prepare_inflight().map(|()| reply));
        let wants_ack =
            self.header.needs_reply && self.record.protocol_features & protocol_feature::REPLY_ACK != 0;
        let ack = |request: u32, result: u64| (message::reply(request, &result.to_ne_bytes()), Vec::new());
        match reply {
            Ok(Some(reply)) => self.finish(Some(reply)),
            Ok(None) => {
                let request = self.header.request;
                self.finish(wants_ack.then(|| ack(request, 0)))
            }
            Err(TurnFailure::Refusal(reason)) if wants_ack => {
                tracing::warn!("{} of a front end is refused: {reason}", self.request);
                let request = self.header.request;
                // Queues that were stopped for the message continue.
                let unchanged = SessionTurn::new(self.session, self.header, self.view, self.restarts);
                unchanged.keep_bases().finish(Some(ack(request, 1)))
            }
            Err(TurnFailure::Refusal(reason) | TurnFailure::Violation(reason)) => {
                Err(ProtocolError::Refused { request: self.request, reason })
            }
            Err(TurnFailure::Os(action, source)) => Err(ProtocolError::Os { action, source }),
        }
    }

    fn keep_bases(mut self) -> Self {
        for (queue, base) in &self.view.stopped {
            self.record.queues[*queue].base = *base;
        }
        self
    }

    fn execute(
        &mut self,
        request: FrontEndRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<MessageReply>, TurnFailure> {
        let word = |value: u64| value.to_ne_bytes();
        let mut fds = fds.into_iter();
        let payload = match request {
            FrontEndRequest::GetFeatures => word(features()),
            FrontEndRequest::GetProtocolFeatures => word(protocol_feature::ALL),
            FrontEndRequest::GetQueueNum => word(self.session.queues.into()),
            FrontEndRequest::GetMaxMemSlots => word(REGIONS_MAX as u64),
            FrontEndRequest::GetVringBase { queue } => self.stop(queue)?,
            FrontEndRequest::GetConfig(part) => return Ok(Some((self.config(part), Vec::new()))),
            FrontEndRequest::GetInflightFd(place) => return self.create_inflight(place).map(Some),
            other => return self.set(other, &mut fds).map(|()| None),
        };
        Ok(Some((message::reply(self.header.request, &payload), Vec::new())))
    }

    /// Executes a request without a reply of its own.
    fn set(
        &mut self,
        request: FrontEndRequest,
        fds: &mut dyn Iterator<Item = OwnedFd>,
    ) -> Result<(), TurnFailure> {
        match request {
            FrontEndRequest::SetFeatures(accepted) => {
                accept(accepted, features())?;
                self.record.features = accepted;
            }
            FrontEndRequest::SetProtocolFeatures(accepted) => {
                accept(accepted, protocol_feature::ALL)?;
                self.record.protocol_features = accepted;
            }
            FrontEndRequest::ResetOwner => self.queues(|queue| queue.is_enabled = false),
            FrontEndRequest::ResetDevice => {
                self.queues(|queue| *queue = QueueState::default());
                self.record.features = 0;
            }
            FrontEndRequest::SetMemTable(ranges) => {
                self.record.memory.clear();
                self.memory = Some(GuestRam::default());
                for range in ranges {
                    self.add_region(range, take(fds)?)?;
                }
            }
            FrontEndRequest::AddMemReg(range) => self.add_region(range, take(fds)?)?,
            FrontEndRequest::RemMemReg(range) => self.remove_region(range)?,
            FrontEndRequest::SetVringNum { queue, size } => {
                if !is_ring_size(size) {
                    return Err(TurnFailure::Violation(format!(
                        "a ring has a power of two of descriptors, at most {RING_SIZE_MAX}, not {size}"
                    )));
                }
                self.queue(queue)?.size = size as u16;
            }
            FrontEndRequest::SetVringAddr(addresses) => {
                let queue = self.queue(addresses.queue)?;
                queue.descriptors = addresses.descriptors;
                queue.available = addresses.available;
                queue.used = addresses.used;
            }
            FrontEndRequest::SetVringBase { queue, base } => {
                let base = u16::try_from(base);
                let base =
                    base.map_err(|_| TurnFailure::Violation("the index of a split ring has 16 bits".into()))?;
                self.queue(queue)?.base = base;
            }
            FrontEndRequest::SetVringEnable { queue, is_enabled } => {
                self.queue(queue)?.is_enabled = is_enabled;
            }
            FrontEndRequest::SetVringKick(event) => {
                if !event.has_fd {
                    return Err(TurnFailure::Violation(
                        "the device does not poll rings without an event".into(),
                    ));
                }
                self.set_event(event, fds.next(), |queue| &mut queue.kick)?;
            }
            FrontEndRequest::SetVringCall(event) => {
                self.set_event(event, fds.next(), |queue| &mut queue.call)?;
                self.effects.push(SessionEffect::QueueEvents(event.queue));
            }
            FrontEndRequest::SetVringErr(event) => {
                self.set_event(event, fds.next(), |queue| &mut queue.error)?;
                self.effects.push(SessionEffect::QueueEvents(event.queue));
            }
            FrontEndRequest::SetBackendReqFd => {
                self.record.channel = Some(self.add_fd(take(fds)?));
                self.effects.push(SessionEffect::Channel);
            }
            FrontEndRequest::SetInflightFd(place) => self.set_inflight(place, take(fds)?)?,
            FrontEndRequest::SetConfig(_) => {
                return Err(TurnFailure::Refusal("the configuration space cannot be written".into()));
            }
            // The session has one front end, which is the owner.
            FrontEndRequest::SetOwner => {}
            other => unreachable!("{other:?} has a reply of its own"),
        }
        Ok(())
    }

    fn queue(&mut self, queue: u32) -> Result<&mut QueueState, TurnFailure> {
        let found = self.record.queues.get_mut(queue as usize);
        found.ok_or_else(|| TurnFailure::Violation(format!("queue {queue} does not exist")))
    }

    fn queues(&mut self, change: impl Fn(&mut QueueState)) {
        self.record.queues.iter_mut().for_each(change);
    }

    fn set_event(
        &mut self,
        event: QueueEvent,
        fd: Option<OwnedFd>,
        field: fn(&mut QueueState) -> &mut Option<u64>,
    ) -> Result<(), TurnFailure> {
        let key = fd.map(|fd| self.add_fd(fd));
        *field(self.queue(event.queue as u32)?) = key;
        Ok(())
    }

    /// Stops a queue. Returns the payload of the reply: its number, and the index of the next request.
    fn stop(&mut self, queue: u32) -> Result<[u8; 8], TurnFailure> {
        let state = self.queue(queue)?;
        (state.kick, state.call) = (None, None);
        let mut payload = [0; 8];
        payload[..4].copy_from_slice(&queue.to_ne_bytes());
        payload[4..].copy_from_slice(&u32::from(state.base).to_ne_bytes());
        Ok(payload)
    }

    fn add_fd(&mut self, fd: OwnedFd) -> u64 {
        let key = self.record.next_key;
        self.record.next_key += 1;
        self.added.insert(key, Arc::new(fd));
        key
    }

    fn add_region(&mut self, range: MemoryRange, file: OwnedFd) -> Result<(), TurnFailure> {
        let memory = self.memory.as_ref().unwrap_or(&self.session.memory);
        self.memory = Some(memory.with(range, &file).map_err(|e| TurnFailure::Refusal(e.to_string()))?);
        let key = self.add_fd(file);
        self.record.memory.push(KeptRegion { range, key });
        Ok(())
    }

    fn remove_region(&mut self, range: MemoryRange) -> Result<(), TurnFailure> {
        let memory = self.session.memory.without(range);
        self.memory = Some(memory.map_err(|e| TurnFailure::Refusal(e.to_string()))?);
        self.record.memory.retain(|kept| kept.range.guest_address != range.guest_address);
        Ok(())
    }

    /// Returns the reply with a part of the configuration space, or an empty reply if the part does
    /// not exist.
    fn config(&self, mut part: ConfigPart) -> Vec<u8> {
        // Front ends may ask for more bytes than the device has.
        let mut space = blk::config_space(self.view.size, self.session.queues).to_vec();
        let end = part.offset as usize + part.bytes.len();
        space.resize(blk::CONFIG_LEN.max(end.min(2 * 256)), 0);
        part.bytes = space.get(part.offset as usize..end).unwrap_or_default().to_vec();
        message::config_reply(self.header.request, &part)
    }

    fn create_inflight(&mut self, place: InflightPlace) -> Result<MessageReply, TurnFailure> {
        let is_valid = (1..=self.session.queues).contains(&place.queues) && is_ring_size(place.size.into());
        if !is_valid {
            return Err(TurnFailure::Violation(format!("records for {place:?} are impossible")));
        }
        let layout = RecordLayout::new(place.queues, place.size);
        let file =
            inflight::create(layout).map_err(|e| TurnFailure::Os("create inflight records", e.into()))?;
        let place = InflightPlace { len: layout.len, offset: layout.offset, ..place };
        Ok((message::inflight_reply(&self.header, &place), vec![file]))
    }

    fn set_inflight(&mut self, place: InflightPlace, file: OwnedFd) -> Result<(), TurnFailure> {
        let InflightPlace { len, offset, queues, size } = place;
        let layout = RecordLayout { offset, len, queues, entries: size };
        self.inflight = Some(InflightFile::map(&file, layout).map_err(TurnFailure::Refusal)?);
        let key = self.add_fd(file);
        self.record.inflight = Some(KeptInflight { key, layout });
        Ok(())
    }

    /// Provides records of requests in flight for all running queues. If the front end keeps none,
    /// the session creates a file of its own.
    fn prepare_inflight(&mut self) -> Result<(), TurnFailure> {
        let running: Vec<usize> =
            (0..self.record.queues.len()).filter(|queue| self.record.runs(*queue)).collect();
        if running.is_empty() {
            return Ok(());
        }
        if self.record.inflight.is_none() {
            let layout = RecordLayout::new(self.session.queues, RING_SIZE_MAX);
            let file =
                inflight::create(layout).map_err(|e| TurnFailure::Os("create inflight records", e.into()))?;
            self.inflight = Some(InflightFile::map(&file, layout).map_err(TurnFailure::Refusal)?);
            let key = self.add_fd(file);
            self.record.inflight = Some(KeptInflight { key, layout });
        }
        let inflight = self.inflight.as_ref().expect("the records were just provided");
        let fits = |queue: &usize| inflight.record(*queue, self.record.queues[*queue].size).is_some();
        match running.iter().find(|queue| !fits(queue)) {
            Some(queue) => {
                Err(TurnFailure::Violation(format!("the inflight records have no room for queue {queue}")))
            }
            None => Ok(()),
        }
    }

    /// Replaces the state of the session.
    fn finish(self, reply: Option<MessageReply>) -> Result<SessionAnswer, ProtocolError> {
        let SessionTurn { session, record, memory, inflight, added, effects, restarts, .. } = self;
        let kept = |fd: &Arc<OwnedFd>| {
            let clone = fd.as_fd().try_clone_to_owned();
            clone.map_err(|source| ProtocolError::Os { action: "duplicate a file descriptor", source })
        };
        let used: std::collections::BTreeSet<u64> = record.keys().collect();
        let keep = added
            .iter()
            .filter(|(key, _)| used.contains(key))
            .map(|(key, fd)| Ok((*key, kept(fd)?)))
            .collect::<Result<Vec<_>, ProtocolError>>()?;
        let drop: Vec<u64> = session.fds.keys().filter(|key| !used.contains(key)).copied().collect();
        let mut effects = effects;
        if memory.is_some() {
            effects.insert(0, SessionEffect::Memory);
        }
        for queue in 0..record.queues.len() {
            let (before, after) = (session.record.runs(queue), record.runs(queue));
            if before && !after {
                effects.push(SessionEffect::QueueStopped(queue));
            } else if after && (!before || restarts.contains(&queue)) {
                effects.push(SessionEffect::QueueStarted(queue));
            }
        }
        session.fds.extend(added);
        session.fds.retain(|key, _| used.contains(key));
        session.record = record;
        session.inflight = inflight;
        if let Some(memory) = memory {
            session.memory = Arc::new(memory);
        }
        let reply = reply.map(|(bytes, fds)| (bytes.into(), fds));
        Ok(SessionAnswer { state: session.record.write().into(), keep, drop, reply, effects })
    }
}

fn accept(accepted: u64, offered: u64) -> Result<(), TurnFailure> {
    match accepted & !offered {
        0 => Ok(()),
        unknown => Err(TurnFailure::Violation(format!("the features {unknown:#x} were not offered"))),
    }
}

fn take(fds: &mut dyn Iterator<Item = OwnedFd>) -> Result<OwnedFd, TurnFailure> {
    fds.next().ok_or_else(|| TurnFailure::Violation("a file descriptor is missing".into()))
}

/// Returns the number of file descriptors of a request.
fn expected_fds(request: &FrontEndRequest, found: usize) -> usize {
    match request {
        FrontEndRequest::SetMemTable(ranges) => ranges.len(),
        FrontEndRequest::SetVringKick(event)
        | FrontEndRequest::SetVringCall(event)
        | FrontEndRequest::SetVringErr(event) => event.has_fd.into(),
        FrontEndRequest::AddMemReg(_)
        | FrontEndRequest::SetBackendReqFd
        | FrontEndRequest::SetInflightFd(_) => 1,
        // Some front ends send the file of the region, although it has no use.
        FrontEndRequest::RemMemReg(_) => found.min(1),
        _ => 0,
    }
}

/// Returns the name of a request.
fn name(request: &FrontEndRequest) -> String {
    let shown = format!("{request:?}");
    let end = shown.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(shown.len());
    shown[..end].to_owned()
}
