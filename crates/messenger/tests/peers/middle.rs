//! An attacker between a client and a server changes one byte of a frame that begins or resumes a
//! connection, and corrects the checksums of the frame.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::block::crc32c;

use outboard_messenger::frame::{FrameHeader, HEADER_LEN};
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, ConnectionEvent, Ends, Limits, Message, NetworkStack, TcpStack,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use crate::raw::{PATIENCE, address};

/// Kinds of frames that carry content after the handshake have at least this number.
const FIRST_CONTENT: u8 = 16;

/// The sender of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sender {
    Client,
    Server,
}

/// A byte that the attacker changes once: byte `at` of the frame that `sender` sends as number `frame`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Change {
    sender: Sender,
    frame: usize,
    at: usize,
}

#[derive(Default)]
struct State {
    change: Option<Change>,
    /// Number of transports since the last order.
    transports: usize,
    /// Lengths of the frames in the first transport since the last order.
    lengths: Vec<(Sender, usize)>,
    /// The tasks of the open transports.
    open: Vec<AbortHandle>,
}

/// The attacker.
struct Middle {
    endpoint: String,
    state: Arc<Mutex<State>>,
    _task: JoinSet<()>,
}

impl Middle {
    async fn before(server: String) -> Middle {
        let listener = TcpListener::bind((address(), 0)).await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(State::default()));
        let mut task = JoinSet::new();
        let own = Arc::clone(&state);
        task.spawn(async move {
            let mut transports = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let state = Arc::clone(&own);
                let is_first = {
                    let mut state = state.lock().unwrap();
                    state.transports += 1;
                    state.transports == 1
                };
                let server = server.clone();
                let forwards = async move {
                    let server = TcpStream::connect(&server).await.unwrap();
                    let ((from_client, to_client), (from_server, to_server)) =
                        (client.into_split(), server.into_split());
                    // When one direction ends, both end.
                    tokio::select! {
                        () = forward(Sender::Client, (from_client, to_server), &state, is_first) => {}
                        () = forward(Sender::Server, (from_server, to_client), &state, is_first) => {}
                    }
                };
                let open = transports.spawn(forwards);
                own.lock().unwrap().open.push(open);
            }
        });
        Middle { endpoint, state, _task: task }
    }

    /// Orders a change in the next transport, and cuts all open transports.
    fn order(&self, change: Option<Change>) {
        let mut state = self.state.lock().unwrap();
        state.open.drain(..).for_each(|task| task.abort());
        (state.change, state.transports) = (change, 0);
        state.lengths.clear();
    }

    /// Whether the ordered change was made, and the number of transports since the order.
    fn result(&self) -> (bool, usize) {
        let state = self.state.lock().unwrap();
        (state.change.is_none(), state.transports)
    }
}

/// Forwards frames in one direction, and the bytes after the handshake as they are.
async fn forward(
    sender: Sender,
    (mut from, mut to): (OwnedReadHalf, OwnedWriteHalf),
    state: &Mutex<State>,
    is_first: bool,
) {
    for number in 0.. {
        let mut frame = vec![0; HEADER_LEN];
        if from.read_exact(&mut frame).await.is_err() {
            return;
        }
        let header = FrameHeader::decode(frame.first_chunk().unwrap(), &limits()).unwrap();
        frame.resize(HEADER_LEN + header.body_len(), 0);
        if from.read_exact(&mut frame[HEADER_LEN..]).await.is_err() {
            return;
        }
        let is_content = frame[5] >= FIRST_CONTENT;
        if !is_content && is_first {
            let mut state = state.lock().unwrap();
            state.lengths.push((sender, frame.len()));
            let is_hit = |change: &mut Change| {
                (change.sender, change.frame) == (sender, number) && change.at < frame.len()
            };
            if let Some(Change { at, .. }) = state.change.take_if(is_hit) {
                change(&mut frame, at);
            }
        }
        if to.write_all(&frame).await.is_err() {
            return;
        }
        if is_content {
            let _ = tokio::io::copy(&mut from, &mut to).await;
            return;
        }
    }
}

/// Changes a byte, and corrects the checksums.
fn change(frame: &mut [u8], at: usize) {
    frame[at] ^= 1 << (at % 8);
    if at >= HEADER_LEN {
        let crc = crc32c(&frame[HEADER_LEN..]).to_le_bytes();
        frame[32..36].copy_from_slice(&crc);
    }
    let crc = crc32c(&frame[..36]).to_le_bytes();
    frame[36..HEADER_LEN].copy_from_slice(&crc);
}

fn limits() -> Limits {
    ConnectionConfig::default().limits
}

fn config() -> ConnectionConfig {
    ConnectionConfig { handshake_timeout: Duration::from_millis(300), ..ConnectionConfig::default() }
}

/// Starts a server that answers each message with the same message. Returns its endpoint.
async fn echo(tasks: &mut JoinSet<()>) -> String {
    let mut listener = TcpStack::new(config()).listen(&format!("{}:0", address())).await.unwrap();
    let endpoint = listener.endpoint();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let Ok((connection, mut incoming)) = listener.accept().await else { continue };
            connections.spawn(async move {
                loop {
                    match incoming.next().await {
                        ConnectionEvent::Message(message) => drop(connection.send(message).await),
                        ConnectionEvent::Lost(_) => return,
                        ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                    }
                }
            });
        }
    });
    endpoint
}

/// Connects a client that has never connected before, so that no TLS session is resumed.
async fn connect(endpoint: &str) -> Result<Ends, outboard_messenger::MessengerError> {
    let stack = TcpStack::new(config());
    stack.connect(endpoint, ConnectOptions { timeout: PATIENCE }).await
}

/// Sends a message, and waits for the answer. Returns `false` if the connection was lost.
async fn is_answered(ends: &mut Ends, number: usize) -> bool {
    let header = number.to_le_bytes().to_vec();
    if ends.0.send(Message { header: header.clone().into(), ..Message::default() }).await.is_err() {
        return false;
    }
    loop {
        match timeout(PATIENCE, ends.1.next()).await.expect("an answer or the end of the connection") {
            ConnectionEvent::Message(message) => {
                assert_eq!(message.header, header, "each answer arrives once, in order");
                return true;
            }
            ConnectionEvent::Lost(_) => return false,
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
        }
    }
}

/// The bytes to change in frames of these lengths: all fields of the header, and one in `step` of the
/// bytes after it.
fn changes(lengths: &[(Sender, usize)], step: usize) -> Vec<Change> {
    let mut all = Vec::new();
    for sender in [Sender::Client, Sender::Server] {
        let frames = lengths.iter().filter(|(from, _)| *from == sender);
        for (frame, (_, len)) in frames.enumerate() {
            let bytes = (0..36).chain((HEADER_LEN..*len).step_by(step));
            all.extend(bytes.map(|at| Change { sender, frame, at }));
        }
    }
    all
}

/// Whether the receiver uses the changed field: a frame without payload has no offset in a block, and
/// a handshake acknowledges nothing.
fn has_meaning(change: &Change) -> bool {
    change.at != 6 && !(24..32).contains(&change.at)
}

#[tokio::test]
async fn a_changed_byte_of_a_frame_that_begins_a_connection_is_refused() {
    let mut tasks = JoinSet::new();
    let middle = Middle::before(echo(&mut tasks).await).await;
    let mut ends = connect(&middle.endpoint).await.expect("the attacker has not begun");
    assert!(is_answered(&mut ends, 0).await);
    let lengths = middle.state.lock().unwrap().lengths.clone();
    assert!(lengths.len() >= 4, "{lengths:?}");
    let (mut mounted, mut accepted) = (0, Vec::new());
    for change in changes(&lengths, 7) {
        middle.order(Some(change));
        match connect(&middle.endpoint).await {
            Ok(mut ends) => {
                assert!(is_answered(&mut ends, 1).await, "{change:?}");
                let (is_mounted, transports) = middle.result();
                accepted.extend((is_mounted && transports == 1).then_some(change));
            }
            Err(why) => assert!(middle.result().0, "{change:?}: {why}"),
        }
        mounted += usize::from(middle.result().0);
    }
    accepted.retain(has_meaning);
    // The type and the version of a TLS record have no meaning in TLS 1.3.
    let is_of_record = |change: &Change| change.at >= HEADER_LEN;
    assert!(accepted.len() < 5 && accepted.iter().all(is_of_record), "{accepted:?} was accepted");
    assert!(mounted > 300, "{mounted} changes of {lengths:?}");
}

#[tokio::test]
async fn a_changed_byte_of_a_frame_that_resumes_a_connection_is_refused() {
    let mut tasks = JoinSet::new();
    let middle = Middle::before(echo(&mut tasks).await).await;
    let mut ends = connect(&middle.endpoint).await.expect("the attacker has not begun");
    assert!(is_answered(&mut ends, 0).await);
    middle.order(None);
    assert!(is_answered(&mut ends, 1).await);
    let lengths = middle.state.lock().unwrap().lengths.clone();
    let (mut mounted, mut accepted, mut lost) = (0, Vec::new(), 0);
    for (number, change) in changes(&lengths, 1).into_iter().enumerate() {
        middle.order(Some(change));
        let is_alive = is_answered(&mut ends, number + 2).await;
        let (is_mounted, transports) = middle.result();
        mounted += usize::from(is_mounted);
        if is_alive && is_mounted && transports == 1 {
            accepted.push(change);
        }
        if !is_alive {
            lost += 1;
            middle.order(None);
            ends = connect(&middle.endpoint).await.expect("a new connection");
            assert!(is_answered(&mut ends, number).await);
        }
    }
    accepted.retain(has_meaning);
    assert_eq!(accepted, [], "these changes were accepted");
    assert!(mounted > 250 && lost < mounted, "{mounted} changes of {lengths:?}, {lost} connections lost");
}
