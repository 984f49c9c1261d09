//! [`SimNetwork`]: the network, its control, and the task that executes its events.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use base::clock::Instant;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::Notify;

use super::CutKind;
use super::faults::{SimCounts, SimFaults, SimRoute};
use super::host::SimHost;
use super::state::State;

/// How long the task of the network sleeps if there is no future event.
const IDLE: Duration = Duration::from_secs(3600);

/// A simulated network. Its clones are the same network.
#[derive(Clone)]
pub struct SimNetwork(pub(super) Arc<SimNetworkInner>);

pub(super) struct SimNetworkInner {
    state: Mutex<State>,
    /// Wakes the task when an event was added. The task outlives this value for a moment.
    changed: Arc<Notify>,
    pub(super) counts: Arc<SimCounts>,
}

impl SimNetwork {
    /// Creates a network with random `faults`. `seed` determines when they occur.
    #[must_use]
    pub fn new(seed: u64, faults: SimFaults) -> SimNetwork {
        let counts = Arc::new(SimCounts::default());
        let state = State::new(StdRng::seed_from_u64(seed), faults, Arc::clone(&counts));
        let changed = Arc::new(Notify::new());
        SimNetwork(Arc::new(SimNetworkInner { state: Mutex::new(state), changed, counts }))
    }

    /// The process that runs on the host `name`. Creates the host if it does not exist.
    #[must_use]
    pub fn host(&self, name: &str) -> SimHost {
        let process = self.0.with(|state| state.process_on(name));
        SimHost::new(self.clone(), process)
    }

    /// Sets the route from each of the two hosts to the other.
    pub fn set_route(&self, one: &str, other: &str, route: SimRoute) {
        self.0.with(|state| {
            let (one, other) = (state.host(one), state.host(other));
            state.routes.insert((one, other), route);
            state.routes.insert((other, one), route);
        });
    }

    /// Cuts two hosts off from each other, in both directions.
    pub fn cut(&self, one: &str, other: &str, kind: CutKind) {
        self.cut_one_way(one, other, kind);
        self.cut_one_way(other, one, kind);
    }

    /// Cuts the way from one host to another.
    pub fn cut_one_way(&self, from: &str, to: &str, kind: CutKind) {
        self.0.with(|state| {
            let (from, to) = (state.host(from), state.host(to));
            state.cut(from, to, kind);
        });
    }

    /// Ends all cuts between two hosts.
    pub fn heal(&self, one: &str, other: &str) {
        self.0.with(|state| {
            let (one, other) = (state.host(one), state.host(other));
            state.cuts.retain(|way, _| *way != (one, other) && *way != (other, one));
            state.resume_held();
        });
    }

    /// Ends all cuts.
    pub fn heal_all(&self) {
        self.0.with(|state| {
            state.cuts.clear();
            state.resume_held();
        });
    }

    /// Breaks all transports. Returns their number.
    pub fn break_all(&self) -> usize {
        self.0.with(State::break_all)
    }

    /// Breaks all links, and refuses new ones as long as `is_down`. Streams are not affected, so
    /// connections fall back to them.
    pub fn links_down(&self, is_down: bool) {
        self.0.with(|state| state.set_links_down(is_down));
    }

    /// Number of memory regions that peers may still access, or that are kept because a peer might
    /// be accessing them.
    #[must_use]
    pub fn exposed_regions(&self) -> usize {
        self.0.with(|state| state.regions.len() + state.kept.len())
    }

    /// Number of transports that at least one process still uses.
    #[must_use]
    pub fn transports(&self) -> usize {
        self.0.with(|state| state.transports.len())
    }

    /// Freezes or unfreezes the network. While it is frozen, no data arrives and no transport
    /// breaks.
    pub fn freeze(&self, is_frozen: bool) {
        self.0.with(|state| {
            state.is_frozen = is_frozen;
            state.resume_held();
        });
    }

    /// Ends the random faults. The latency and bandwidth of routes remain.
    pub fn calm(&self) {
        self.0.with(|state| state.is_calm = true);
    }

    /// Ends the process on a host: its listeners vanish, and its peers notice that its transports
    /// break. Calls and destructors of the process have no effect from now on.
    pub fn sever(&self, host: &str) {
        self.0.with(|state| {
            let host = state.host(host);
            state.sever(host);
        });
    }

    /// Number of faults that have occurred.
    #[must_use]
    pub fn counts(&self) -> &SimCounts {
        &self.0.counts
    }

    /// A hash of all deliveries so far, with their times.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.0.with(|state| state.trace())
    }
}

impl SimNetworkInner {
    /// Runs `call` on the state. Then wakes the tasks that wait for a change that `call` made.
    pub(super) fn with<T>(self: &Arc<Self>, call: impl FnOnce(&mut State) -> T) -> T {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.next_event();
        let result = call(&mut state);
        let after = state.next_event();
        let wakers = std::mem::take(&mut state.wakers);
        let trash = std::mem::take(&mut state.trash);
        let starts = state.needs_task && !state.has_task;
        state.has_task |= starts;
        drop(state);
        drop(trash);
        wakers.into_iter().for_each(Waker::wake);
        if starts {
            #[expect(clippy::disallowed_methods, reason = "the task belongs to the network, not to a role")]
            tokio::spawn(execute(Arc::downgrade(self), Arc::clone(&self.changed)));
        } else if after.is_some_and(|after| before.is_none_or(|before| after < before)) {
            self.changed.notify_one();
        }
        result
    }
}

impl Drop for SimNetworkInner {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

impl fmt::Debug for SimNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimNetwork").field(&self.0.counts).finish()
    }
}

/// Executes the events of a network at their times, until the network is dropped.
async fn execute(network: Weak<SimNetworkInner>, changed: Arc<Notify>) {
    loop {
        let Some(this) = network.upgrade() else { return };
        let next = this.with(|state| {
            state.execute_due();
            state.next_event()
        });
        drop(this);
        let next = next.unwrap_or_else(|| Instant::now() + IDLE);
        tokio::select! {
            biased;
            () = changed.notified() => {}
            () = tokio::time::sleep_until(next) => {}
        }
    }
}
