//! The task of a gateway's connection to the holder: sends calls, and sorts what arrives into answers
//! and events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{mpsc, oneshot};

use crate::client::{HeldConnection, HeldMessage, HolderEvent, InventoryDevice};
use crate::error::{ClientError, HolderRefusal};
use crate::framing::{Cutter, RawMessage};
use crate::protocol::{FRAMES, HolderCall, HolderFrame, Kept, SharedFd, ToGateway, ToHolder, decode, open};
use crate::socket::{FdStream, ReceiveError, Sending};

/// What the task of the connection sends.
#[derive(Debug)]
pub(crate) enum Queued {
    /// A call.
    Call { body: HolderCall, fds: Vec<SharedFd>, answer: oneshot::Sender<Result<(), ClientError>> },
    /// The acknowledgement of a disconnect.
    Acknowledge { device: String, connection: u64 },
}

/// The task of a connection.
pub(crate) struct GatewayLink {
    stream: FdStream,
    cutter: Cutter,
    queued: mpsc::UnboundedReceiver<Queued>,
    events: mpsc::UnboundedSender<HolderEvent>,
    /// The device of the inventory whose kept descriptors are arriving, and how many are missing.
    listed: Option<(InventoryDevice, usize)>,
    /// Number of the last call.
    calls: u64,
    /// The calls without an answer, in their order.
    waiting: VecDeque<(u64, oneshot::Sender<Result<(), ClientError>>)>,
    unanswered: Arc<AtomicUsize>,
}

impl GatewayLink {
    /// Prepares the task for a connection on which both sides have agreed on a version.
    pub fn new(
        stream: FdStream,
        queued: mpsc::UnboundedReceiver<Queued>,
        events: mpsc::UnboundedSender<HolderEvent>,
        unanswered: Arc<AtomicUsize>,
    ) -> GatewayLink {
        let cutter = Cutter::new(FRAMES);
        GatewayLink {
            stream,
            cutter,
            queued,
            events,
            listed: None,
            calls: 0,
            waiting: VecDeque::new(),
            unanswered,
        }
    }

    /// Exchanges frames until the connection ends. Then all callers, and `end`, get the reason.
    pub async fn run(mut self, end: oneshot::Sender<ClientError>) {
        let error = self.exchange().await;
        // The receivers may have been dropped; ignore the errors.
        for (_, answer) in self.waiting.drain(..) {
            let _ = answer.send(Err(error.clone()));
        }
        self.queued.close();
        while let Ok(queued) = self.queued.try_recv() {
            if let Queued::Call { answer, .. } = queued {
                let _ = answer.send(Err(error.clone()));
            }
        }
        let _ = end.send(error);
    }

    /// Sends calls and receives frames until the connection ends. Returns the reason.
    async fn exchange(&mut self) -> ClientError {
        let mut sending: Option<Sending> = None;
        loop {
            let is_idle = sending.is_none();
            let write = async {
                match &mut sending {
                    Some(sending) => self.stream.send(sending).await,
                    None => std::future::pending().await,
                }
            };
            // Frames are also received while a call is being sent. So the holder, which sends while it
            // reads, never waits for this side.
            tokio::select! {
                received = self.stream.receive(&mut self.cutter) => {
                    if let Err(e) = self.received(received) {
                        return e;
                    }
                }
                written = write => match written {
                    Ok(()) => sending = None,
                    Err(e) => return self.farewell(&e.to_string()).await,
                },
                queued = self.queued.recv(), if is_idle => match queued {
                    Some(queued) => sending = Some(self.encode(queued).into()),
                    None => return ClientError::Lost("this gateway has closed it".to_owned()),
                },
                () = self.events.closed() => {
                    return ClientError::Lost("this gateway has closed it".to_owned());
                }
            }
        }
    }

    /// Reads the remaining frames after a failed write: the last one may tell the reason.
    async fn farewell(&mut self, reason: &str) -> ClientError {
        loop {
            match self.stream.receive(&mut self.cutter).await {
                Err(_) => return ClientError::Lost(reason.to_owned()),
                received => {
                    if let Err(e) = self.received(received) {
                        return e;
                    }
                }
            }
        }
    }

    fn encode(&mut self, queued: Queued) -> HolderFrame {
        match queued {
            Queued::Call { body, fds, answer } => {
                self.calls += 1;
                self.waiting.push_back((self.calls, answer));
                HolderFrame::of(&ToHolder::Call { call: self.calls, body }, fds)
            }
            Queued::Acknowledge { device, connection } => {
                HolderFrame::of(&ToHolder::Acknowledge { device, connection }, Vec::new())
            }
        }
    }

    /// Handles a frame of the holder. Returns the reason if the connection ends.
    fn received(&mut self, received: Result<RawMessage, ReceiveError>) -> Result<(), ClientError> {
        let protocol = |e: &dyn std::fmt::Display| ClientError::Protocol(e.to_string());
        let frame = received.map_err(|e| match e {
            ReceiveError::Violation(violation) => protocol(&violation),
            e => ClientError::Lost(e.to_string()),
        })?;
        let (body, fds) = open(frame).map_err(|e| protocol(&e))?;
        let fds: Vec<SharedFd> = fds.into_iter().map(SharedFd::new).collect();
        let event = match decode::<ToGateway>(&body).map_err(|e| protocol(&e))? {
            ToGateway::Answer { call, result } => return self.answered(call, result),
            ToGateway::Device { device, path, framing, front_end } => {
                let (front_end, missing) = match front_end {
                    Some(Kept { connection, state, fds }) => {
                        (Some(HeldConnection { connection, state, kept: Vec::new() }), fds as usize)
                    }
                    None => (None, 0),
                };
                let listed = InventoryDevice { device, path: path.into(), framing, front_end };
                if self.listed.replace((listed, missing)).is_some() {
                    return Err(protocol(&"a device lacks kept descriptors"));
                }
                self.pass_listed();
                return Ok(());
            }
            ToGateway::Keys(keys) => return self.keys(keys, fds),
            ToGateway::InventoryComplete => HolderEvent::InventoryComplete,
            ToGateway::Connected { device, connection } => HolderEvent::Connected { device, connection },
            ToGateway::Message { device, connection, number, bytes } => {
                HolderEvent::Message(HeldMessage { device, connection, number, bytes, fds })
            }
            ToGateway::Disconnected { device, connection } => {
                HolderEvent::Disconnected { device, connection }
            }
            ToGateway::Replaced => return Err(ClientError::Replaced),
        };
        self.pass(event);
        Ok(())
    }

    fn answered(&mut self, call: u64, result: Result<(), HolderRefusal>) -> Result<(), ClientError> {
        match self.waiting.pop_front() {
            Some((number, answer)) if number == call => {
                let before = self.unanswered.fetch_sub(1, Ordering::Relaxed);
                assert!(before > 0, "each call was counted");
                // The caller may not wait for the answer.
                let _ = answer.send(result.map_err(ClientError::Refused));
                Ok(())
            }
            _ => Err(ClientError::Protocol(format!("call {call} was answered out of order"))),
        }
    }

    fn keys(&mut self, keys: Vec<u64>, fds: Vec<SharedFd>) -> Result<(), ClientError> {
        let unexpected = || ClientError::Protocol("unexpected kept descriptors".to_owned());
        let (device, missing) = self.listed.as_mut().ok_or_else(unexpected)?;
        let front_end = device.front_end.as_mut().ok_or_else(unexpected)?;
        *missing = missing.checked_sub(keys.len()).ok_or_else(unexpected)?;
        if keys.is_empty() || keys.len() != fds.len() {
            return Err(unexpected());
        }
        front_end.kept.extend(keys.into_iter().zip(fds));
        self.pass_listed();
        Ok(())
    }

    /// Passes the device of the inventory on if it is complete.
    fn pass_listed(&mut self) {
        if let Some((device, _)) = self.listed.take_if(|(_, missing)| *missing == 0) {
            self.pass(HolderEvent::Device(device));
        }
    }

    fn pass(&self, event: HolderEvent) {
        // If the events were dropped, the task ends next.
        let _ = self.events.send(event);
    }
}
