//! A peer that writes arbitrary bytes to a raw socket.

use std::sync::Arc;
use std::time::Duration;

use base::block::{Payload, crc32c};
use bytes::{Bytes, BytesMut};
use identity::{ProofKey, Trust};
use outboard_messenger::frame::{self, Body, Frame, HEADER_LEN, Hello, Resume, Welcome};
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, ConnectionEvent, Ends, Incoming, Limits, Listener, Message,
    MessengerError, NetworkStack, TcpStack,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

pub(crate) use crate::begin::{Beginning, hello, proof};

/// Time limit for each step of these tests, so that no test hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The address at which the servers of these tests listen. The environment variable
/// `OUTBOARD_TEST_ADDRESS` chooses another address of this machine.
pub(crate) fn address() -> String {
    std::env::var("OUTBOARD_TEST_ADDRESS").unwrap_or_else(|_| "127.0.0.1".to_owned())
}

/// A raw socket that is connected to a messenger.
pub(crate) struct Raw {
    stream: TcpStream,
    read: BytesMut,
    limits: Limits,
}

/// Encodes a frame.
pub(crate) fn bytes(body: &Body, seq: u64, ack: u64, payload: &Payload) -> Vec<u8> {
    let mut out = Vec::new();
    frame::encode_head(&mut out, body.kind(), seq, ack, payload, |o| body.encode(o));
    out.extend_from_slice(payload.data());
    out
}

/// Changes bytes of a frame's fixed header, starting at byte `at`, and corrects the header's
/// checksum.
pub(crate) fn forge(mut frame: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    frame[at..at + with.len()].copy_from_slice(with);
    let crc = crc32c(&frame[..36]);
    frame[36..HEADER_LEN].copy_from_slice(&crc.to_le_bytes());
    frame
}

/// A connection that a raw peer has begun.
#[derive(Clone)]
pub(crate) struct Begun {
    pub(crate) welcome: Welcome,
    pub(crate) key: ProofKey,
}

impl Begun {
    /// The request to resume the connection. The peer has received `received` frames.
    pub(crate) fn resume(&self, received: u64) -> Resume {
        Resume { connection: self.welcome.connection, nonce: [7; 16], received, granted: 1 << 20 }
    }
}

impl Raw {
    pub(crate) async fn connect(endpoint: &str) -> Raw {
        Raw::over(TcpStream::connect(endpoint).await.unwrap())
    }

    /// Connects from an address of this machine, such as 127.0.0.2.
    pub(crate) async fn connect_from(source: &str, endpoint: &str) -> Raw {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
        Raw::over(socket.connect(endpoint.parse().unwrap()).await.unwrap())
    }

    pub(crate) fn over(stream: TcpStream) -> Raw {
        let limits = ConnectionConfig::default().limits;
        Raw { stream, read: BytesMut::new(), limits }
    }

    /// Connects a socket and begins a messenger connection on it.
    pub(crate) async fn connection(endpoint: &str) -> (Raw, Begun) {
        Raw::connect(endpoint).await.begin().await
    }

    /// Begins a messenger connection.
    pub(crate) async fn begin(mut self) -> (Raw, Begun) {
        match self.begin_as(&Trust::default(), hello()).await {
            (Some(Body::Welcome(welcome)), key) => (self, Begun { welcome, key }),
            (other, _) => panic!("{other:?} instead of a welcome"),
        }
    }

    /// Performs a TLS handshake, and returns the answer to `hello`; `None` if the server closes the
    /// socket.
    pub(crate) async fn begin_as(&mut self, trust: &Trust, hello: Hello) -> (Option<Body>, ProofKey) {
        let mut beginning = Beginning::new(trust, hello);
        loop {
            self.write(&beginning.output()).await;
            let Some(frame) = self.next().await else { return (None, beginning.key()) };
            if let Some(answer) = beginning.frame(&frame.body) {
                return (Some(answer), beginning.key());
            }
        }
    }

    /// Resumes a messenger connection with the right proof. Returns the server's answer.
    pub(crate) async fn resume(&mut self, key: &ProofKey, resume: Resume) -> Option<Body> {
        self.send(&Body::Resume(resume.clone()), 0).await;
        match self.next().await?.body {
            Body::Challenge(challenge) => self.send(&proof(key, &resume, &challenge), 0).await,
            other => panic!("{other:?} instead of a challenge"),
        }
        self.next().await.map(|frame| frame.body)
    }

    pub(crate) async fn send(&mut self, body: &Body, seq: u64) {
        self.write(&bytes(body, seq, 0, &Payload::default())).await;
    }

    /// Writes `bytes`. Ignores errors, because the peer may have closed the socket already.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        let _ = timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("the peer reads or closes");
    }

    /// Reads the next frame. Returns `None` if the peer has closed the socket.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        loop {
            let now = Bytes::copy_from_slice(&self.read);
            if let Some((frame, len)) =
                frame::decode(&now, &self.limits).expect("the peer writes valid frames")
            {
                let _ = self.read.split_to(len);
                return Some(frame);
            }
            let read = self.stream.read_buf(&mut self.read);
            match timeout(PATIENCE, read).await.expect("the peer answers or closes") {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Reads the next frame that is not a window. Returns `None` if the peer has closed the socket.
    pub(crate) async fn next_answer(&mut self) -> Option<Body> {
        loop {
            match self.next().await?.body {
                Body::Window(_) => {}
                other => return Some(other),
            }
        }
    }

    /// Waits until the peer has closed the socket.
    pub(crate) async fn closed(&mut self) {
        while self.next().await.is_some() {}
    }
}

/// A server under attack. It also has one connection with a client that follows the protocol. Each
/// test checks that this connection still works after the attack.
pub(crate) struct Victim {
    pub(crate) listener: Box<dyn Listener>,
    pub(crate) endpoint: String,
    bystander: (Ends, Ends),
}

impl Victim {
    pub(crate) async fn new() -> Victim {
        let config = ConnectionConfig {
            heartbeat: Duration::from_secs(1),
            grace: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(1),
            hold: Duration::from_secs(1),
            ..ConnectionConfig::default()
        };
        let stack = TcpStack::new(config);
        let mut listener = stack.listen(&format!("{}:0", address())).await.unwrap();
        let endpoint = listener.endpoint();
        let (client, server) =
            tokio::join!(stack.connect(&endpoint, ConnectOptions::default()), listener.accept());
        Victim { listener, endpoint, bystander: (client.unwrap(), server.unwrap()) }
    }

    /// Begins a raw connection. Also returns the server's end of it.
    pub(crate) async fn attack(&mut self) -> (Raw, Begun, Ends) {
        let endpoint = self.endpoint.clone();
        let (connection, server) = tokio::join!(Raw::connection(&endpoint), self.accepted());
        (connection.0, connection.1, server)
    }

    pub(crate) async fn accepted(&mut self) -> Ends {
        loop {
            if let Ok(ends) = timeout(PATIENCE, self.listener.accept()).await.expect("a connection") {
                return ends;
            }
        }
    }

    /// Waits for the error of the next failed handshake.
    pub(crate) async fn refused(&mut self) -> MessengerError {
        match timeout(PATIENCE, self.listener.accept()).await.expect("an error") {
            Ok((connection, _)) => panic!("the server accepted {:?}", connection.peer()),
            Err(e) => e,
        }
    }

    /// Checks that the connection of the other client still works.
    pub(crate) async fn is_well(&mut self) {
        let (client, server) = &mut self.bystander;
        let message = Message { header: "well?".into(), payload: Payload::default() };
        client.0.send(message.clone()).await.unwrap();
        match timeout(PATIENCE, server.1.next()).await.expect("the other client's message") {
            ConnectionEvent::Message(got) => assert_eq!(got, message),
            other => panic!("the attack affected another client: {other:?}"),
        }
    }
}

/// Waits until the connection is lost, and returns the reason. Skips other events.
pub(crate) async fn lost(incoming: &mut dyn Incoming) -> MessengerError {
    loop {
        if let ConnectionEvent::Lost(why) =
            timeout(PATIENCE, incoming.next()).await.expect("the connection ends")
        {
            return why;
        }
    }
}

/// A source with this number of zero bytes.
pub(crate) struct Zeros(pub(crate) u64);

impl outboard_messenger::BulkSource for Zeros {
    fn len(&self) -> u64 {
        self.0
    }

    fn block_offset(&self) -> u64 {
        0
    }

    fn read(&self, offset: u64, len: usize) -> base::BoxFuture<'_, Result<Payload, String>> {
        Box::pin(async move { Ok(Payload::compute(offset, vec![0; len].into())) })
    }
}

/// Offers `len` zero bytes. Returns the offer and its key. Dropping the offer withdraws it.
pub(crate) fn offer(ends: &Ends, len: u64) -> (outboard_messenger::BulkRegion, u64) {
    let region = ends.0.offer_source(Arc::new(Zeros(len))).unwrap();
    let key = region.descriptor.segments[0].key;
    (region, key)
}
