//! An attacker between a client and a server changes one byte of a frame that begins or resumes a
//! connection, and corrects the checksums of the frame.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::block::crc32c;

use outboard_messenger::frame::{FrameHeader, FrameKind, HEADER_LEN};
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
    /// The frames that began or resumed the connection in the first transport since the last order.
    frames: Vec<(Sender, Vec<u8>)>,
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
        state.frames.clear();
    }

    /// The frames that the sender has sent in the first transport since the last order.
    fn frames(&self, sender: Sender) -> Vec<Vec<u8>> {
        let state = self.state.lock().unwrap();
        let own = state.frames.iter().filter(|(from, _)| *from == sender);
        own.map(|(_, frame)| frame.clone()).collect()
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
            state.frames.push((sender, frame.clone()));
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

/// Attempts to make a change. One attempt may fail: the random number of a connection is encoded in
/// 18 or 19 bytes, so the last byte of a frame with it does not always exist. On a busy machine, a
/// handshake may also end before the change, because its time is over.
const ATTEMPTS: usize = 20;

/// Position of a byte in the frames of one sender: number of the frame, and offset in the frame.
type Position = (usize, usize);

/// Length of the header of a TLS record, in bytes: content type, version (2 bytes), length (2
/// bytes).
const RECORD_HEADER: usize = 5;
/// Content type of an encrypted TLS record (RFC 8446, section 5.2).
const ENCRYPTED: u8 = 23;
/// Bytes at the start and at the end of a record that a sample contains.
const RECORD_ENDS: usize = 16;
/// A sample contains one in this many of the other bytes of the records.
const SAMPLE_STEP: usize = 64;

/// A TLS record in the frames of one sender.
struct Record {
    content_type: u8,
    /// Positions of the record's bytes, including its header. A record may extend over several
    /// frames.
    bytes: Vec<Position>,
}

/// The TLS records in the frames of one sender.
fn records(frames: &[Vec<u8>]) -> Vec<Record> {
    let of_tls = frames.iter().enumerate().filter(|(_, frame)| frame[5] == FrameKind::Handshake as u8);
    let bytes: Vec<(Position, u8)> = of_tls
        .flat_map(|(number, frame)| (HEADER_LEN..frame.len()).map(move |at| ((number, at), frame[at])))
        .collect();
    let mut records = Vec::new();
    let mut rest = bytes.as_slice();
    while let Some([(_, content_type), _, _, (_, high), (_, low)]) = rest.first_chunk::<RECORD_HEADER>() {
        let len = RECORD_HEADER + usize::from(u16::from_be_bytes([*high, *low]));
        let (record, others) = rest.split_at(len);
        let bytes = record.iter().map(|(position, _)| *position).collect();
        records.push(Record { content_type: *content_type, bytes });
        rest = others;
    }
    assert!(rest.is_empty(), "the frames of TLS end with a record");
    records
}

/// The bytes of the records that may change unnoticed, because no receiver uses them:
///
/// - The second byte of the version of each record. RFC 8446, section 5.1: `legacy_record_version`
///   "MUST be ignored for all purposes". rustls checks the first byte only.
/// - The content type of an encrypted record. RFC 8446, section 5.2: it is always 23, and the type
///   that counts is encrypted. It is part of the additional data of the encryption, as is the
///   version. rustls computes the additional data from the values that these fields must have
///   (`make_tls13_aad`), so a change of these two fields has no effect.
fn unprotected(records: &[Record]) -> Vec<Position> {
    let of_record = |record: &Record| {
        let content_type = (record.content_type == ENCRYPTED).then_some(record.bytes[0]);
        [Some(record.bytes[2]), content_type].into_iter().flatten()
    };
    records.iter().flat_map(of_record).collect()
}

/// The bytes of the records that a sample contains: each header, both ends of each record, and one
/// in [`SAMPLE_STEP`] of the bytes between them, from the byte `start` on.
fn sample(records: &[Record], start: usize) -> Vec<Position> {
    let of_record = |record: &Record| {
        let (first, last) = (RECORD_HEADER + RECORD_ENDS, record.bytes.len().saturating_sub(RECORD_ENDS));
        let at = (0..record.bytes.len())
            .filter(move |at| !(first..last).contains(at) || at % SAMPLE_STEP == start % SAMPLE_STEP);
        at.map(|at| record.bytes[at]).collect::<Vec<_>>()
    };
    records.iter().flat_map(of_record).collect()
}

/// The positions of all fields of the frames' headers except the checksum, and of all bytes after
/// the headers.
fn positions(frames: &[Vec<u8>]) -> impl Iterator<Item = Position> {
    let of_frame = |(number, frame): (usize, &Vec<u8>)| {
        let at: Vec<usize> = (0..36).chain(HEADER_LEN..frame.len()).collect();
        at.into_iter().map(move |at| (number, at))
    };
    frames.iter().enumerate().flat_map(of_frame)
}

/// Whether the receiver uses the changed field: a frame without payload has no offset in a block, and
/// a handshake acknowledges nothing.
fn has_meaning(change: &Change) -> bool {
    change.at != 6 && !(24..32).contains(&change.at)
}

/// Changes each byte of each frame, one per attempt. On a slow machine, the environment variable
/// `OUTBOARD_TEST_SAMPLE` limits the test to a sample of the bytes after the headers of the frames.
#[expect(clippy::print_stdout, reason = "the test harness shows the start when the test fails")]
#[tokio::test]
async fn a_changed_byte_of_a_frame_that_begins_a_connection_is_refused() {
    let mut tasks = JoinSet::new();
    let middle = Middle::before(echo(&mut tasks).await).await;
    let mut ends = connect(&middle.endpoint).await.expect("the attacker has not begun");
    assert!(is_answered(&mut ends, 0).await);
    let sampled_from = std::env::var_os("OUTBOARD_TEST_SAMPLE").map(|_| rand::random_range(0..SAMPLE_STEP));
    println!("start of the sample: {sampled_from:?}");
    let (mut changes, mut permitted) = (Vec::new(), Vec::new());
    for sender in [Sender::Client, Sender::Server] {
        let frames = middle.frames(sender);
        let records = records(&frames);
        assert!(frames.len() >= 2 && records.len() >= 4, "{sender:?}: {frames:?}");
        let sampled = sampled_from.map(|start| sample(&records, start));
        let is_chosen = |position: &Position| {
            position.1 < HEADER_LEN || sampled.as_ref().is_none_or(|sampled| sampled.contains(position))
        };
        let change = |(frame, at)| Change { sender, frame, at };
        changes.extend(positions(&frames).filter(is_chosen).map(change));
        permitted.extend(unprotected(&records).into_iter().map(change));
    }
    let mut accepted = Vec::new();
    for change in &changes {
        for attempt in 0.. {
            middle.order(Some(*change));
            let connected = connect(&middle.endpoint).await.ok();
            let is_mounted = middle.result().0;
            if let Some(mut ends) = connected {
                assert!(is_answered(&mut ends, 1).await, "{change:?}");
                accepted.extend((is_mounted && middle.result().1 == 1).then_some(*change));
            }
            if is_mounted {
                break;
            }
            assert!(attempt < ATTEMPTS, "{change:?} does not happen");
        }
    }
    accepted.retain(|change| has_meaning(change) && !permitted.contains(change));
    assert_eq!(accepted, [], "these changes of {} were accepted", changes.len());
}

#[tokio::test]
async fn a_changed_byte_of_a_frame_that_resumes_a_connection_is_refused() {
    let mut tasks = JoinSet::new();
    let middle = Middle::before(echo(&mut tasks).await).await;
    let mut ends = connect(&middle.endpoint).await.expect("the attacker has not begun");
    assert!(is_answered(&mut ends, 0).await);
    middle.order(None);
    assert!(is_answered(&mut ends, 1).await);
    let changes: Vec<Change> = [Sender::Client, Sender::Server]
        .into_iter()
        .flat_map(|sender| {
            let positions = positions(&middle.frames(sender)).collect::<Vec<_>>();
            positions.into_iter().map(move |(frame, at)| Change { sender, frame, at })
        })
        .collect();
    assert!(changes.len() > 250, "{changes:?}");
    let (mut accepted, mut lost) = (Vec::new(), 0);
    let mut numbers = 2..;
    for change in &changes {
        for attempt in 0.. {
            middle.order(Some(*change));
            let is_alive = is_answered(&mut ends, numbers.next().unwrap()).await;
            let (is_mounted, transports) = middle.result();
            if is_alive && is_mounted && transports == 1 {
                accepted.push(*change);
            }
            lost += usize::from(!is_alive);
            if !is_alive || !is_mounted {
                // A new connection has another number.
                middle.order(None);
                ends = connect(&middle.endpoint).await.expect("a new connection");
                assert!(is_answered(&mut ends, 0).await);
            }
            if is_mounted {
                break;
            }
            assert!(attempt < ATTEMPTS, "{change:?} does not happen");
        }
    }
    accepted.retain(has_meaning);
    assert_eq!(accepted, [], "these changes were accepted");
    assert!(lost < changes.len(), "{lost} connections lost");
}
