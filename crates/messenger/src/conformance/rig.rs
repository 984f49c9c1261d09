//! The environment in which the checks of the suite run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use base::block::{Payload, piece_lengths};
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

use crate::{
    BulkSink, BulkSource, ConnectOptions, ConnectionEvent, Ends, Incoming, Listener, Message, NetworkStack,
};

/// A stack to be checked.
pub struct Rig {
    /// The stack of both ends.
    pub stack: Arc<dyn NetworkStack>,
    /// The address at which to listen. It must be possible to listen at this address several times.
    pub address: String,
    /// Breaks all transports at once, even in the middle of a frame. Returns their number.
    pub cut: Box<dyn Fn() -> usize>,
    /// Called with `true`: stops all bytes on all transports. Called with `false`: lets the bytes
    /// move again.
    pub freeze: Box<dyn Fn(bool)>,
    /// The grace period of the stack: [`ConnectionConfig::grace`](crate::ConnectionConfig::grace).
    pub grace: Duration,
    /// Time limit of a transfer that transports interrupt, and four times the limit of an attempt to
    /// connect or to resume a connection.
    pub patience: Duration,
    /// Whether connecting is slow. If so, checks create fewer connections and move less data.
    pub slow: bool,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Rig {
    /// The usual `patience`.
    pub const PATIENCE: Duration = Duration::from_secs(120);

    /// Listens at the rig's address.
    ///
    /// # Panics
    /// If the stack cannot listen.
    pub async fn listen(&self) -> Box<dyn Listener> {
        self.stack.listen(&self.address).await.expect("the stack listens")
    }

    /// Opens a connection to `listener`. Returns the client's end and the server's end.
    pub(super) async fn pair(&self, listener: &mut dyn Listener) -> (Ends, Ends) {
        let options = ConnectOptions { timeout: self.patience / 4 };
        let endpoint = listener.endpoint();
        let mut connecting = self.stack.connect(&endpoint, options);
        let mut client: Option<Ends> = None;
        let mut accepted: Vec<Ends> = Vec::new();
        // On a faulty network, an attempt may fail or its answer may be lost. The server then has a
        // connection that no client uses, so only the connection with the client's number is
        // returned.
        loop {
            let connection = client.as_ref().map(|(client, _)| client.peer().connection);
            let ours = accepted.iter().position(|(server, _)| Some(server.peer().connection) == connection);
            if let (Some(client), Some(ours)) = (client.take_if(|_| ours.is_some()), ours) {
                return (client, accepted.swap_remove(ours));
            }
            tokio::select! {
                biased;
                connected = &mut connecting, if client.is_none() => {
                    client = Some(connected.expect("the client connects"));
                }
                ends = listener.accept() => accepted.extend(ends),
            }
        }
    }

    /// Creates a random number generator from the seed.
    #[must_use]
    pub fn random(&self) -> StdRng {
        StdRng::seed_from_u64(self.seed)
    }
}

/// Waits for the next message. Skips interruptions and resumptions.
pub(super) async fn next_message(incoming: &mut dyn Incoming) -> Message {
    loop {
        match incoming.next().await {
            ConnectionEvent::Message(message) => return message,
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            ConnectionEvent::Lost(why) => panic!("connection lost: {why}"),
        }
    }
}

/// A message without a payload.
#[must_use]
pub(super) fn message(header: &[u8]) -> Message {
    Message { header: Bytes::copy_from_slice(header), payload: Payload::default() }
}

/// A pool of 64 MiB with buffers of up to 16 MiB.
///
/// # Panics
/// If the system lacks this much memory.
#[must_use]
pub fn pool() -> BufferPool {
    BufferPool::new(Arena::anonymous(64 << 20).expect("64 MiB of memory"), 0, 16 << 20)
}

/// Returns `len` random bytes.
#[must_use]
pub fn random_bytes(random: &mut StdRng, len: usize) -> Bytes {
    let mut data = vec![0; len];
    random.fill_bytes(&mut data);
    data.into()
}

/// A buffer that can be offered as a source and as a sink.
pub struct Buffer {
    block_offset: u64,
    data: Mutex<Vec<u8>>,
    filled: Mutex<Vec<(u64, u64)>>,
    taken: AtomicU64,
    len: u64,
    likely: u64,
    in_memory: bool,
    /// The time that each read takes.
    pub delay: Duration,
}

impl Buffer {
    /// Creates a buffer with `data`. `block_offset` is the offset of its first byte within the
    /// object, modulo 4096.
    #[must_use]
    pub fn new(block_offset: u64, data: &[u8]) -> Arc<Buffer> {
        Arc::new(Buffer::slow(block_offset, data, Duration::ZERO))
    }

    /// Creates a buffer that peers may read by one-sided transfers, if the stack supports this.
    #[must_use]
    pub fn in_memory(block_offset: u64, data: &[u8]) -> Arc<Buffer> {
        Arc::new(Buffer { in_memory: true, ..Buffer::slow(block_offset, data, Duration::ZERO) })
    }

    /// Creates a sink of which peers may write only the first `likely` bytes by one-sided
    /// transfers.
    #[must_use]
    pub fn partly_exposed(block_offset: u64, len: usize, likely: usize) -> Arc<Buffer> {
        let likely = likely as u64;
        Arc::new(Buffer { likely, ..Buffer::slow(block_offset, &vec![0; len], Duration::ZERO) })
    }

    /// Creates a buffer whose reads take the time `delay` each.
    #[must_use]
    pub fn slow(block_offset: u64, data: &[u8], delay: Duration) -> Buffer {
        let len = data.len() as u64;
        Buffer {
            block_offset,
            data: Mutex::new(data.to_vec()),
            filled: Mutex::default(),
            taken: AtomicU64::new(0),
            len,
            likely: len,
            in_memory: false,
            delay,
        }
    }

    /// The current content of the buffer.
    #[must_use]
    pub fn content(&self) -> Vec<u8> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of bytes read from this source. One-sided reads are not counted.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Number of bytes written to this sink.
    #[must_use]
    pub fn filled(&self) -> u64 {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(s, e)| e - s).sum()
    }
}

impl BulkSource for Buffer {
    fn len(&self) -> u64 {
        self.len
    }

    fn block_offset(&self) -> u64 {
        self.block_offset
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>> {
        Box::pin(async move {
            if !self.delay.is_zero() {
                tokio::time::sleep(self.delay).await;
            }
            self.taken.fetch_add(len as u64, Ordering::Relaxed);
            let start = offset as usize;
            let all = self.data.lock().unwrap_or_else(PoisonError::into_inner);
            let data = all.get(start..start + len).map(Bytes::copy_from_slice);
            drop(all);
            let data = data.ok_or_else(|| "the requested range is outside the source".to_owned())?;
            let boundary = piece_lengths(self.block_offset, offset)
                .last()
                .is_none_or(|_| offset == 0 || (self.block_offset + offset).is_multiple_of(4096));
            if boundary {
                Ok(Payload::compute(self.block_offset + offset, data))
            } else {
                Err("the requested range does not start at a piece boundary".into())
            }
        })
    }

    fn memory(&self) -> Option<Payload> {
        self.in_memory.then(|| Payload::compute(self.block_offset, self.content().into()))
    }
}

impl BulkSink for Buffer {
    fn len(&self) -> u64 {
        self.len
    }

    fn likely_len(&self) -> u64 {
        self.likely
    }

    fn write(&self, offset: u64, payload: Payload) -> bool {
        let (start, end) = (offset, offset + payload.len() as u64);
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        if filled.iter().any(|&(s, e)| start < e && s < end) {
            return false;
        }
        filled.push((start, end));
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        data[start as usize..end as usize].copy_from_slice(payload.data());
        true
    }
}

/// Returns the seed of this run: `OUTBOARD_SEED`, or else a random one. Prints the seed, so that a
/// failed run can be repeated.
///
/// # Panics
/// If `OUTBOARD_SEED` is not a number.
#[expect(clippy::print_stdout, reason = "the report of a failed test needs the seed")]
pub fn seed() -> u64 {
    let seed = std::env::var("OUTBOARD_SEED").map_or_else(
        |_| base::entropy::random::<u32>().into(),
        |seed| seed.parse().expect("OUTBOARD_SEED is a number"),
    );
    println!("OUTBOARD_SEED={seed}");
    seed
}
