//! A transport that injects random faults: delays, stalls, breaks in the middle of a frame, and
//! flipped bits. A seed determines the faults.
//!
//! Every byte between a client and its server passes through a pump. The pump divides the stream
//! into random pieces and may delay, stall, damage or end it. Each stream has its own delays, so
//! streams overtake each other. On tokio's paused clock and over [`super::memory::MemoryNetwork`],
//! nothing depends on the machine, so the same seed repeats a run exactly.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::sync::watch;
use tokio::time::sleep;

use super::memory::wire;
use super::{Acceptor, ConnectClaim, Road, Transport, TransportReader, TransportWriter, Wire};

/// The faults to inject, and their frequency.
#[derive(Debug, Clone, Copy)]
pub struct StreamFaults {
    /// Maximum delay of each piece.
    pub delay_max: Duration,
    /// Maximum length of the pieces that the stream is divided into, in bytes.
    pub piece_max: usize,
    /// Average number of bytes after which a stream breaks, in each direction; 0 for never.
    pub break_after_bytes: u64,
    /// On average, one in this many pieces stalls; 0 for none.
    pub stall_one_in: u32,
    /// Duration of a stall.
    pub stall: Duration,
    /// On average, one bit is flipped in one of this many pieces; 0 for none.
    pub flip_one_in: u32,
    /// On average, one in this many attempts to connect is refused; 0 for none.
    pub refuse_one_in: u32,
    /// On average, one in this many attempts to connect is never answered; 0 for none.
    pub ignore_one_in: u32,
}

impl StreamFaults {
    /// No random faults. Faults occur only on request.
    pub const NONE: StreamFaults = StreamFaults {
        delay_max: Duration::ZERO,
        piece_max: 64 << 10,
        break_after_bytes: 0,
        stall_one_in: 0,
        stall: Duration::ZERO,
        flip_one_in: 0,
        refuse_one_in: 0,
        ignore_one_in: 0,
    };
}

/// Counters of injected faults.
#[derive(Debug, Default)]
pub struct StreamFaultCounts {
    /// Number of delayed pieces.
    pub delays: AtomicU64,
    /// Number of streams that broke at random.
    pub breaks: AtomicU64,
    /// Number of streams that [`FaultControl::cut`] broke.
    pub cuts: AtomicU64,
    /// Number of stalled pieces.
    pub stalls: AtomicU64,
    /// Number of flipped bits.
    pub flips: AtomicU64,
    /// Number of refused attempts to connect.
    pub refusals: AtomicU64,
    /// Number of attempts to connect that were never answered.
    pub ignored: AtomicU64,
}

/// Injects faults on request.
pub struct FaultControl {
    /// Number of injected faults of each kind.
    pub counts: StreamFaultCounts,
    faults: StreamFaults,
    /// Whether random faults have been switched off.
    quiet: AtomicBool,
    /// Number of calls of [`FaultControl::cut`]. A change breaks all streams.
    cuts: watch::Sender<u64>,
    frozen: watch::Sender<bool>,
    random: Mutex<StdRng>,
}

impl FaultControl {
    /// Breaks all streams. Returns their number.
    pub fn cut(&self) -> usize {
        let live = self.cuts.receiver_count();
        self.cuts.send_modify(|n| *n += 1);
        live
    }

    /// Freezes or unfreezes all streams. While streams are frozen, no byte moves and no stream
    /// breaks at random.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    /// Ends the random faults.
    pub fn calm(&self) {
        self.quiet.store(true, Ordering::Relaxed);
    }

    /// Decides whether a fault with the probability `1 / n` occurs, and counts it.
    fn one_in(&self, random: &mut StdRng, n: u32, count: &AtomicU64) -> bool {
        let hit = n > 0 && !self.quiet.load(Ordering::Relaxed) && random.random_ratio(1, n);
        if hit {
            count.fetch_add(1, Ordering::Relaxed);
        }
        hit
    }
}

/// A transport that injects [`StreamFaults`] into the streams that clients dial.
#[derive(Clone)]
pub struct Faulty<T> {
    inner: T,
    control: Arc<FaultControl>,
}

impl<T: Transport> Faulty<T> {
    /// Creates a transport that adds faults to `inner`.
    #[must_use]
    pub fn new(inner: T, faults: StreamFaults, seed: u64) -> Faulty<T> {
        let control = FaultControl {
            counts: StreamFaultCounts::default(),
            faults,
            quiet: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
            frozen: watch::Sender::new(false),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
        };
        Faulty { inner, control: Arc::new(control) }
    }

    /// The control that injects faults on request and counts them.
    #[must_use]
    pub fn control(&self) -> Arc<FaultControl> {
        Arc::clone(&self.control)
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        self.inner.bind(address)
    }

    fn dial<'a>(&'a self, endpoint: &'a str, claim: &'a ConnectClaim) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let control = &self.control;
            let mut random = {
                let mut root = control.random.lock().unwrap_or_else(PoisonError::into_inner);
                StdRng::from_rng(&mut *root)
            };
            if control.one_in(&mut random, control.faults.refuse_one_in, &control.counts.refusals) {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            if control.one_in(&mut random, control.faults.ignore_one_in, &control.counts.ignored) {
                return std::future::pending().await;
            }
            let real = streams(self.inner.dial(endpoint, claim).await?)?;
            let (ours, theirs) = duplex(64 << 10);
            let cuts = control.cuts.subscribe();
            let near = streams(wire(theirs, endpoint))?;
            tokio::spawn(stream(Arc::clone(control), random, near, real, cuts));
            Ok(wire(ours, endpoint))
        })
    }
}

fn streams(wire: Wire) -> io::Result<(TransportReader, TransportWriter)> {
    match wire.road {
        Road::Stream(reader, writer) => Ok((reader, writer)),
        Road::Packets(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Pumps both directions of one stream until it ends or is broken.
async fn stream(
    control: Arc<FaultControl>,
    mut random: StdRng,
    near: (TransportReader, TransportWriter),
    far: (TransportReader, TransportWriter),
    mut cuts: watch::Receiver<u64>,
) {
    let there = Pump::new(&control, &mut random);
    let back = Pump::new(&control, &mut random);
    let both = async {
        // An error in one direction ends both directions, as in a broken connection.
        let _ = tokio::try_join!(biased; there.run(near.0, far.1), back.run(far.0, near.1));
    };
    tokio::select! {
        biased;
        _ = cuts.changed() => {
            control.counts.cuts.fetch_add(1, Ordering::Relaxed);
        }
        () = both => {}
    }
}

/// One direction of a stream.
struct Pump<'a> {
    control: &'a FaultControl,
    random: StdRng,
    /// Number of bytes after which the stream breaks.
    life: u64,
}

impl<'a> Pump<'a> {
    fn new(control: &'a FaultControl, random: &mut StdRng) -> Pump<'a> {
        let mut random = StdRng::from_rng(random);
        let mean = control.faults.break_after_bytes;
        let life = if mean == 0 { u64::MAX } else { random.random_range(0..2 * mean) };
        Pump { control, random, life }
    }

    async fn run(
        mut self,
        mut from: impl tokio::io::AsyncRead + Unpin,
        mut to: impl tokio::io::AsyncWrite + Unpin,
    ) -> io::Result<()> {
        let faults = self.control.faults;
        let mut frozen = self.control.frozen.subscribe();
        let mut buf = vec![0; faults.piece_max];
        loop {
            let most =
                if faults.delay_max.is_zero() { buf.len() } else { self.random.random_range(1..=buf.len()) };
            let len = from.read(&mut buf[..most]).await?;
            if len == 0 {
                return to.shutdown().await;
            }
            // The control outlives every pump.
            let _ = frozen.wait_for(|frozen| !*frozen).await;
            self.wait().await;
            let piece = &mut buf[..len];
            if self.control.one_in(&mut self.random, faults.flip_one_in, &self.control.counts.flips) {
                let bit = self.random.random_range(0..len * 8);
                piece[bit / 8] ^= 1 << (bit % 8);
            }
            let breaks = (len as u64) > self.life && !self.control.quiet.load(Ordering::Relaxed);
            let passed = if breaks { self.life as usize } else { len };
            to.write_all(&piece[..passed]).await?;
            if breaks {
                self.control.counts.breaks.fetch_add(1, Ordering::Relaxed);
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            self.life = self.life.saturating_sub(len as u64);
        }
    }

    async fn wait(&mut self) {
        let StreamFaults { delay_max, stall, stall_one_in, .. } = self.control.faults;
        if !delay_max.is_zero() && !self.control.quiet.load(Ordering::Relaxed) {
            self.control.counts.delays.fetch_add(1, Ordering::Relaxed);
            sleep(delay_max.mul_f64(self.random.random_range(0.0..1.0))).await;
        }
        if self.control.one_in(&mut self.random, stall_one_in, &self.control.counts.stalls) {
            sleep(stall).await;
        }
    }
}
