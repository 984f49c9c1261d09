//! [`Client`]: sends and receives raw messages.

use std::sync::Arc;

use disk::Disk;
use nbd::NbdLimits;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};

use crate::{ServerTask, exports, start};

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;

pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const ERR_UNSUPPORTED: u32 = 0x8000_0001;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DONT_FRAGMENT: u16 = 4;
pub const REQUEST_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const ESHUTDOWN: u32 = 108;

/// A client of the server.
pub struct Client<S> {
    pub stream: S,
}

/// A request to send.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub kind: u16,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
    pub payload: &'a [u8],
}

/// A reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A simple reply. The data of a read follows it.
    Simple { cookie: u64, errno: u32 },
    /// The only part of a structured reply with data of a read.
    Data { cookie: u64, offset: u64, data: Vec<u8> },
    /// The only part of a structured reply with extents: their lengths and flags.
    Status { cookie: u64, extents: Vec<(u32, u32)> },
    /// The only part of a structured reply with an error.
    Error { cookie: u64, errno: u32, text: String },
}

/// Creates a request without payload.
pub fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Request<'static> {
    Request { kind, flags: 0, cookie, offset, len, payload: &[] }
}

/// Creates a request to write.
pub fn write(cookie: u64, offset: u64, payload: &[u8]) -> Request<'_> {
    Request { kind: WRITE, flags: 0, cookie, offset, len: payload.len() as u32, payload }
}

/// Encodes a text, preceded by its length.
pub fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// Encodes the data of `INFO` and `GO`.
pub fn info_data(name: &str, items: &[u16]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend((items.len() as u16).to_be_bytes());
    data.extend(items.iter().flat_map(|item| item.to_be_bytes()));
    data
}

/// Encodes the data of the options about metadata contexts.
pub fn context_data(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(export);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| counted(query)));
    data
}

/// Encodes an option with its data.
pub fn option_bytes(kind: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &kind.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

/// Encodes a request with its payload.
pub fn request_bytes(request: Request) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(request.flags.to_be_bytes());
    bytes.extend(request.kind.to_be_bytes());
    bytes.extend(request.cookie.to_be_bytes());
    bytes.extend(request.offset.to_be_bytes());
    bytes.extend(request.len.to_be_bytes());
    bytes.extend(request.payload);
    bytes
}

impl Client<DuplexStream> {
    /// Connects to a server of `disk`, with default limits.
    pub async fn connect(disk: Arc<dyn Disk>, is_structured: bool) -> (Client<DuplexStream>, ServerTask) {
        Client::connect_within(disk, is_structured, NbdLimits::default()).await
    }

    /// Connects to a server of `disk`.
    pub async fn connect_within(
        disk: Arc<dyn Disk>,
        is_structured: bool,
        limits: NbdLimits,
    ) -> (Client<DuplexStream>, ServerTask) {
        let (stream, task) = start(exports(disk), limits);
        let mut client = Client::greet(stream).await;
        client.enter(is_structured).await;
        (client, task)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    /// Receives the greeting, and declines the reserved zeros.
    pub async fn greet(stream: S) -> Client<S> {
        Client::greet_with(stream, 3).await
    }

    /// Receives the greeting, and replies with `flags`.
    pub async fn greet_with(mut stream: S, flags: u32) -> Client<S> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&flags.to_be_bytes()).await.unwrap();
        Client { stream }
    }

    /// Completes the negotiation for the export `disk`. A client with structured replies also selects
    /// `base:allocation`.
    pub async fn enter(&mut self, is_structured: bool) {
        if is_structured {
            assert_eq!(self.final_reply(OPT_STRUCTURED_REPLY, &[]).await, REP_ACK);
            let data = context_data("disk", &["base:allocation"]);
            assert_eq!(self.final_reply(OPT_SET_META_CONTEXT, &data).await, REP_ACK);
        }
        assert_eq!(self.final_reply(OPT_GO, &info_data("disk", &[])).await, REP_ACK);
    }

    /// Sends an option, and returns the types and the data of all replies.
    pub async fn option(&mut self, kind: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.stream.write_all(&option_bytes(kind, data)).await.unwrap();
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.stream.read_u64().await.unwrap(), 0x0003_e889_0455_65a9);
            assert_eq!(self.stream.read_u32().await.unwrap(), kind);
            let code = self.stream.read_u32().await.unwrap();
            let data = self.counted_bytes().await;
            replies.push((code, data));
            if code == REP_ACK || code >= 1 << 31 {
                return replies;
            }
        }
    }

    /// Sends an option, and returns the type of the last reply.
    pub async fn final_reply(&mut self, kind: u32, data: &[u8]) -> u32 {
        self.option(kind, data).await.last().unwrap().0
    }

    /// Sends a request.
    pub async fn send(&mut self, request: Request<'_>) {
        self.stream.write_all(&request_bytes(request)).await.unwrap();
    }

    /// Receives a reply.
    pub async fn reply(&mut self) -> Reply {
        match self.stream.read_u32().await.unwrap() {
            0x6744_6698 => {
                let errno = self.stream.read_u32().await.unwrap();
                Reply::Simple { errno, cookie: self.stream.read_u64().await.unwrap() }
            }
            0x668e_33ef => {
                assert_eq!(self.stream.read_u16().await.unwrap(), 1, "the part is the last one");
                let kind = self.stream.read_u16().await.unwrap();
                let cookie = self.stream.read_u64().await.unwrap();
                let payload = self.counted_bytes().await;
                part(kind, cookie, &payload)
            }
            magic => panic!("a reply began with {magic:#x}"),
        }
    }

    /// Sends a request, and receives the reply to it.
    pub async fn call(&mut self, request: Request<'_>) -> Reply {
        self.send(request).await;
        self.reply().await
    }

    /// Sends a request, and returns the error number of the reply, or 0.
    pub async fn errno(&mut self, request: Request<'_>) -> u32 {
        match self.call(request).await {
            Reply::Simple { errno, .. } | Reply::Error { errno, .. } => errno,
            Reply::Data { .. } | Reply::Status { .. } => 0,
        }
    }

    /// Reads a range by a structured reply.
    pub async fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        match self.call(request(READ, 1, offset, len)).await {
            Reply::Data { cookie: 1, offset: at, data } if at == offset => data,
            other => panic!("{other:?}"),
        }
    }

    /// Receives all bytes until the server closes the connection.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A server that has not received all bytes may reset the connection.
        let _ = self.stream.read_to_end(&mut rest).await;
        rest
    }

    async fn counted_bytes(&mut self) -> Vec<u8> {
        let mut data = vec![0; self.stream.read_u32().await.unwrap() as usize];
        self.stream.read_exact(&mut data).await.unwrap();
        data
    }
}

fn part(kind: u16, cookie: u64, payload: &[u8]) -> Reply {
    let word = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
    match kind {
        1 => {
            let offset = u64::from_be_bytes(payload[..8].try_into().unwrap());
            Reply::Data { cookie, offset, data: payload[8..].to_vec() }
        }
        5 => {
            assert_eq!(word(0), 1, "the context is base:allocation");
            let extents = (4..payload.len()).step_by(8).map(|at| (word(at), word(at + 4))).collect();
            Reply::Status { cookie, extents }
        }
        0x8001 => {
            let len = usize::from(u16::from_be_bytes([payload[4], payload[5]]));
            assert_eq!(payload.len(), 6 + len);
            Reply::Error { cookie, errno: word(0), text: String::from_utf8(payload[6..].to_vec()).unwrap() }
        }
        _ => panic!("unknown part {kind:#x}"),
    }
}
