//! [`ControlWire`]: simulated control connections between osds and a store.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::bell::{self, BellDelays, SimBell, SimRinger};
use super::stream::{ControlConnection, SimControlStream};
use super::{Life, lock};
use crate::{HostDoorbells, Socket};

/// The osd's side of a connection.
const OSD: usize = 0;
/// The store's side of a connection.
const STORE: usize = 1;

/// Options of a wire.
#[derive(Debug, Clone)]
pub struct WireOptions {
    /// Determines all delays.
    pub seed: u64,
    /// Minimum delay of sent bytes.
    pub latency: Duration,
    /// Maximum of the random time that is added to each delay.
    pub jitter: Duration,
    /// Maximum delay of a doorbell.
    pub doorbell: Duration,
    /// Probability that a doorbell is late. Later rings of the same doorbell do not overtake it.
    pub late_doorbell: f64,
    /// Maximum delay of a late doorbell.
    pub late_doorbell_max: Duration,
}

impl Default for WireOptions {
    /// Returns the options of a socket within a machine.
    fn default() -> Self {
        let micros = Duration::from_micros;
        WireOptions {
            seed: 0,
            latency: micros(5),
            jitter: micros(50),
            doorbell: micros(20),
            late_doorbell: 0.0,
            late_doorbell_max: Duration::ZERO,
        }
    }
}

/// What has happened on a wire so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireStats {
    /// Connections that were established.
    pub connections: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections that were cut.
    pub cut: u64,
    /// Connections that ended because a role was severed.
    pub severed: u64,
    /// Reads that found bytes which the wire held back.
    pub held: u64,
    /// Doorbells that were late.
    pub late_doorbells: u64,
}

/// Simulated control connections between osds and one store. Clones share the wire.
///
/// The wire also makes the doorbells of host memory. It exists outside of the two roles.
#[derive(Clone)]
pub struct ControlWire(Arc<Mutex<WireState>>);

impl fmt::Debug for ControlWire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlWire")
    }
}

impl PartialEq for ControlWire {
    fn eq(&self, other: &ControlWire) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ControlWire {}

#[derive(Debug)]
struct WireState {
    options: WireOptions,
    rng: SmallRng,
    /// The connections that wait for the store to accept them, if a store listens.
    backlog: Option<WaitingOsds>,
    listeners: u64,
    connections: Vec<Weak<Mutex<ControlConnection>>>,
    /// The current life of each role.
    lives: [Life; 2],
    is_refusing: bool,
    is_held: bool,
    stats: WireStats,
    late_rings: Arc<AtomicU64>,
}

#[derive(Debug)]
struct WaitingOsds {
    listener: u64,
    waiting: VecDeque<SimControlStream>,
    waker: Option<Waker>,
}

/// Host memory of a simulated store, and its doorbells.
#[derive(Debug)]
pub struct SimMemory {
    /// The memfd of host memory.
    pub memory: OwnedFd,
    /// Rings the doorbell on which the store waits.
    pub host_doorbell: SimRinger,
    /// The doorbell on which the osd waits.
    pub osd_doorbell: SimBell,
}

/// Makes doorbells for the memory that a control connection carries.
#[derive(Debug, Clone)]
pub(crate) struct SimCarrier {
    pub(super) wire: ControlWire,
    pub(super) life: Life,
}

impl SimCarrier {
    pub(crate) fn share(&self, memory: OwnedFd) -> (HostDoorbells, SimMemory) {
        // The device rings the host's doorbell. A severed engine has no more chains to ring for.
        let (host_doorbell, host) = self.wire.doorbell(Life::default());
        let (osd, osd_doorbell) = self.wire.doorbell(self.life.clone());
        let ours = HostDoorbells { host: host.into(), osd: osd.into() };
        (ours, SimMemory { memory, host_doorbell, osd_doorbell })
    }
}

impl ControlWire {
    /// Creates a wire.
    #[must_use]
    pub fn new(options: WireOptions) -> ControlWire {
        let rng = SmallRng::seed_from_u64(options.seed);
        ControlWire(Arc::new(Mutex::new(WireState {
            options,
            rng,
            backlog: None,
            listeners: 0,
            connections: Vec::new(),
            lives: Default::default(),
            is_refusing: false,
            is_held: false,
            stats: WireStats::default(),
            late_rings: Arc::default(),
        })))
    }

    /// Listens for osds on behalf of the store. Replaces an earlier listener.
    #[must_use]
    pub fn listen(&self) -> SimListener {
        let mut state = lock(&self.0);
        state.listeners += 1;
        let (listener, life) = (state.listeners, state.lives[STORE].clone());
        let fresh = WaitingOsds { listener, waiting: VecDeque::new(), waker: None };
        let old = state.backlog.replace(fresh);
        drop(state);
        drop(old);
        SimListener { wire: self.clone(), listener, life }
    }

    /// Connects the osd to the store.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`] if no store listens, or the wire refuses connections.
    pub async fn connect(&self) -> io::Result<Socket> {
        let delay = self.delay();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let lives = lock(&self.0).lives.clone();
        let connection = Arc::new(Mutex::new(ControlConnection::new(lives)));
        let [osd, store] = [OSD, STORE].map(|side| SimControlStream::new(&connection, self, side));
        let mut state = lock(&self.0);
        if state.is_refusing || state.backlog.is_none() {
            state.stats.refused += 1;
            // The ends lock the state when they are dropped.
            drop(state);
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        state.stats.connections += 1;
        state.connections.retain(|connection| connection.strong_count() > 0);
        state.connections.push(Arc::downgrade(&connection));
        if let Some(backlog) = &mut state.backlog {
            backlog.waiting.push_back(store);
            if let Some(waker) = backlog.waker.take() {
                waker.wake();
            }
        }
        Ok(Socket::Sim(osd))
    }

    /// Refuses new connections from now on, or accepts them again.
    pub fn refuse(&self, refuse: bool) {
        lock(&self.0).is_refusing = refuse;
    }

    /// Holds all bytes of all connections back from now on, or delivers them again.
    pub fn hold(&self, hold: bool) {
        lock(&self.0).is_held = hold;
        self.for_each(|connection| {
            connection.wake();
            false
        });
    }

    /// Cuts all connections. Bytes on their way are lost, and both ends fail.
    pub fn cut(&self) {
        let cut = self.for_each(|connection| {
            let is_open = !connection.is_closed_at(OSD) && !connection.is_closed_at(STORE);
            connection.cut();
            is_open
        });
        lock(&self.0).stats.cut += cut;
    }

    /// Severs the store, because it is about to be killed. The osd reads the bytes that are on their
    /// way, and then the end of the stream, or an error at once.
    ///
    /// A store that listens afterwards counts as a new process.
    pub fn sever_store(&self) {
        self.sever(STORE);
    }

    /// Severs the osd, because it is about to be killed. See [`sever_store`](Self::sever_store).
    pub fn sever_osd(&self) {
        self.sever(OSD);
    }

    fn sever(&self, side: usize) {
        let (old, loses_bytes, backlog) = {
            let mut state = lock(&self.0);
            let old = std::mem::take(&mut state.lives[side]);
            let loses_bytes = state.rng.random_bool(0.5);
            let backlog = if side == STORE { state.backlog.take() } else { None };
            (old, loses_bytes, backlog)
        };
        let severed = self.for_each(|connection| {
            let is_open = !connection.is_closed_at(side);
            if is_open && loses_bytes {
                connection.cut();
            } else if is_open {
                connection.close(side, self);
            }
            is_open
        });
        old.sever();
        lock(&self.0).stats.severed += severed;
        drop(backlog);
    }

    /// What has happened on the wire so far.
    #[must_use]
    pub fn stats(&self) -> WireStats {
        let state = lock(&self.0);
        WireStats { late_doorbells: state.late_rings.load(Ordering::Relaxed), ..state.stats }
    }

    /// Calls `change` for each connection that an end still uses. Returns how often it returned
    /// true.
    fn for_each(&self, mut change: impl FnMut(&mut ControlConnection) -> bool) -> u64 {
        let connections: Vec<_> = lock(&self.0).connections.iter().filter_map(Weak::upgrade).collect();
        connections.iter().map(|connection| u64::from(change(&mut lock(connection)))).sum()
    }

    /// A random delay of sent bytes.
    pub(super) fn delay(&self) -> Duration {
        let state = &mut *lock(&self.0);
        state.options.latency + state.rng.random_range(Duration::ZERO..=state.options.jitter)
    }

    /// Whether the wire holds bytes back. Counts a read that finds `waiting` bytes.
    pub(super) fn holds(&self, waiting: usize) -> bool {
        let mut state = lock(&self.0);
        state.stats.held += u64::from(state.is_held && waiting > 0);
        state.is_held
    }

    fn doorbell(&self, life: Life) -> (SimRinger, SimBell) {
        let state = &mut *lock(&self.0);
        let delays = BellDelays {
            usual_max: state.options.doorbell,
            late: state.options.late_doorbell,
            late_max: state.options.late_doorbell_max,
            late_rings: Arc::clone(&state.late_rings),
        };
        bell::doorbell(life, delays, state.rng.random())
    }
}

/// Accepts the simulated connections of osds.
#[derive(Debug)]
pub struct SimListener {
    wire: ControlWire,
    listener: u64,
    life: Life,
}

impl SimListener {
    /// Accepts the next connection.
    ///
    /// # Errors
    /// Fails if another listener has replaced this one.
    pub async fn accept(&self) -> io::Result<Socket> {
        poll_fn(|cx| {
            if self.life.is_severed() {
                return Poll::Pending;
            }
            let mut state = lock(&self.wire.0);
            let ours = state.backlog.as_mut().filter(|backlog| backlog.listener == self.listener);
            let Some(backlog) = ours else {
                return Poll::Ready(Err(io::Error::other("another listener has replaced this one")));
            };
            match backlog.waiting.pop_front() {
                Some(stream) => Poll::Ready(Ok(Socket::Sim(stream))),
                None => {
                    backlog.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        if self.life.is_severed() {
            return;
        }
        let mut state = lock(&self.wire.0);
        let ours = state.backlog.take_if(|backlog| backlog.listener == self.listener);
        drop(state);
        // Dropping the waiting connections closes them.
        drop(ours);
    }
}
