//! Serves the connection of a gateway: executes its calls, and tells it the inventory and the news.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::net::UnixStream;
use tokio::sync::Notify;

use crate::device::{DeviceMachine, News};
use crate::devices::{Devices, Shared};
use crate::framing::{Cutter, Framing, RawMessage};
use crate::held_device::HeldDevice;
use crate::protocol::{
    BadFrame, CALL_FDS_MAX, FRAMES, GatewayHello, HolderCall, HolderFrame, HolderWelcome, ToGateway,
    ToHolder, Versions, decode, open,
};
use crate::socket::{FdStream, ReceiveError, Sending};

/// Maximum number of answers that wait until the gateway reads. With so many answers, the holder reads
/// no further call.
const ANSWERS_MAX: usize = 64;
/// The framing of a hello.
const HELLO: Framing = Framing { message_bytes_max: 128, message_fds_max: 0, ..FRAMES };

/// How the connection of a gateway ended.
#[derive(Debug)]
pub(crate) enum GatewayEnd {
    /// The gateway has stopped the holder.
    Stopped,
    /// Another gateway has connected.
    Replaced,
    /// The connection failed, or the gateway violated the protocol.
    Lost(String),
}

/// Receives the hello of a process that has connected. Returns the reason if the process cannot become
/// the gateway.
pub(crate) async fn greet(stream: UnixStream) -> Result<FdStream, String> {
    let stream = FdStream::new(stream);
    let uid = stream.peer_uid().map_err(|e| format!("its user is unknown: {e}"))?;
    if uid != rustix::process::geteuid().as_raw() {
        return Err(format!("it belongs to another user (uid {uid})"));
    }
    let hello = stream.receive(&mut Cutter::new(HELLO)).await.map_err(|e| e.to_string())?;
    let GatewayHello(versions) =
        open(hello).and_then(|(body, _)| GatewayHello::decode(&body)).map_err(|e| e.to_string())?;
    let chosen = Versions::OWN.common(versions);
    let welcome = HolderWelcome { supported: Versions::OWN, chosen };
    let mut sending = HolderFrame::raw(&welcome.encode(), Vec::new()).into();
    stream.send(&mut sending).await.map_err(|e| e.to_string())?;
    match chosen {
        Some(_) => Ok(stream),
        None => Err(format!("it uses versions {versions} of the protocol, this holder {}", Versions::OWN)),
    }
}

/// Serves a gateway until its connection ends, or until another gateway takes its place.
pub(crate) async fn serve(
    stream: FdStream,
    devices: Rc<RefCell<Devices>>,
    replaced: Rc<Notify>,
) -> GatewayEnd {
    let mut cutter = Cutter::new(FRAMES);
    let mut frames = Frames::new(&devices.borrow());
    let shared = devices.borrow().shared().clone();
    let mut sending: Option<Sending> = None;
    let mut is_stopping = false;
    loop {
        if sending.is_none() {
            sending = frames.next(is_stopping).map(Sending::from);
            if sending.is_none() && is_stopping {
                return GatewayEnd::Stopped;
            }
        }
        let is_idle = sending.is_none();
        let reads = !is_stopping && frames.answers.len() < ANSWERS_MAX;
        let is_begun = sending.as_ref().is_some_and(Sending::is_begun);
        let write = async {
            match &mut sending {
                Some(sending) => stream.send(sending).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = replaced.notified() => {
                if !is_begun {
                    // A gateway that does not read only notices the end of its connection.
                    let _ = stream.send_now(&mut HolderFrame::of(&ToGateway::Replaced, Vec::new()).into());
                }
                return GatewayEnd::Replaced;
            }
            written = write => match written {
                Ok(()) => sending = None,
                Err(e) => return GatewayEnd::Lost(e.to_string()),
            },
            () = shared.news.arrived(), if is_idle => {}
            received = stream.receive(&mut cutter), if reads => match execute(received, &devices) {
                Ok(ExecutedFrame { answer, stops }) => {
                    frames.answers.extend(answer);
                    is_stopping = stops;
                }
                Err(reason) => return GatewayEnd::Lost(reason),
            },
        }
    }
}

/// The outcome of a frame of the gateway.
struct ExecutedFrame {
    answer: Option<ToGateway>,
    /// Whether the holder ends now.
    stops: bool,
}

/// Executes a frame of the gateway. Returns the reason if the connection cannot be used any more.
fn execute(
    received: Result<RawMessage, ReceiveError>,
    devices: &RefCell<Devices>,
) -> Result<ExecutedFrame, String> {
    let frame = received.map_err(|e| e.to_string())?;
    let executed = open(frame).and_then(|(body, fds)| {
        let mut devices = devices.borrow_mut();
        match decode(&body)? {
            ToHolder::Acknowledge { device, connection } => {
                devices.acknowledge(&device, connection);
                Ok(ExecutedFrame { answer: None, stops: false })
            }
            ToHolder::Call { call, body } => {
                let stops = matches!(body, HolderCall::Stop);
                let result = devices.execute(body, fds)?;
                Ok(ExecutedFrame { answer: Some(ToGateway::Answer { call, result }), stops })
            }
        }
    });
    executed.map_err(|e: BadFrame| e.to_string())
}

/// The frames for a gateway, in the order of their urgency.
struct Frames {
    answers: VecDeque<ToGateway>,
    /// The rest of the frames of one device in the inventory.
    begun: VecDeque<HolderFrame>,
    /// The devices that the inventory does not have yet.
    unlisted: VecDeque<Rc<HeldDevice>>,
    is_complete: bool,
    shared: Rc<Shared>,
}

impl Frames {
    fn new(devices: &Devices) -> Frames {
        Frames {
            answers: VecDeque::new(),
            begun: VecDeque::new(),
            unlisted: devices.all().cloned().collect(),
            is_complete: false,
            shared: devices.shared().clone(),
        }
    }

    /// Returns the next frame to send. At the end, only answers are sent.
    fn next(&mut self, only_answers: bool) -> Option<HolderFrame> {
        if let Some(answer) = self.answers.pop_front() {
            return Some(HolderFrame::of(&answer, Vec::new()));
        }
        if only_answers {
            return None;
        }
        self.begun.pop_front().or_else(|| self.inventory()).or_else(|| self.news())
    }

    fn inventory(&mut self) -> Option<HolderFrame> {
        while let Some(device) = self.unlisted.pop_front() {
            if !device.is_removed() {
                self.begun = list(&device).into();
                // The pending message was not news before.
                self.shared.news.offer(&device);
                return self.begun.pop_front();
            }
        }
        (!std::mem::replace(&mut self.is_complete, true))
            .then(|| HolderFrame::of(&ToGateway::InventoryComplete, Vec::new()))
    }

    fn news(&self) -> Option<HolderFrame> {
        while let Some(device) = self.shared.news.take() {
            if let Some(news) = device.take(DeviceMachine::news).filter(|_| !device.is_removed()) {
                self.shared.news.offer(&device);
                return Some(tell(&device.name, news));
            }
        }
        None
    }
}

/// Returns the frames that list a device in the inventory.
fn list(device: &HeldDevice) -> Vec<HolderFrame> {
    let snapshot = device.take(DeviceMachine::inventory);
    let (kept, fds) = snapshot.map(|snapshot| (snapshot.kept, snapshot.fds)).unzip();
    let listed = ToGateway::Device {
        device: device.name.clone(),
        path: device.path.clone(),
        framing: device.framing,
        front_end: kept,
    };
    let mut frames = vec![HolderFrame::of(&listed, Vec::new())];
    for part in fds.unwrap_or_default().chunks(CALL_FDS_MAX) {
        let (keys, fds) = part.iter().cloned().unzip();
        frames.push(HolderFrame::of(&ToGateway::Keys(keys), fds));
    }
    frames
}

fn tell(name: &str, news: News) -> HolderFrame {
    let device = name.to_owned();
    match news {
        News::Connected(connection) => {
            HolderFrame::of(&ToGateway::Connected { device, connection }, Vec::new())
        }
        News::Disconnected(connection) => {
            HolderFrame::of(&ToGateway::Disconnected { device, connection }, Vec::new())
        }
        News::Message { connection, number, content } => {
            let message = ToGateway::Message { device, connection, number, bytes: content.bytes };
            HolderFrame::of(&message, content.fds)
        }
    }
}
