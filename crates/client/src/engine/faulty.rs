//! [`FaultyEngine`]: wraps an engine and injects faults.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;
use wire::{Error as NodeError, List, Listed, Mutated, Query, QueryAnswer, UploadId};

use super::{
    Administration, BoxCall, Call, Capabilities, ChangeRequest, Engine, EngineLimits, Fencing, ReadReply,
    ReadRequest,
};
use crate::{Error, Result};

/// Probability of each kind of fault in an attempt, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FaultRates {
    /// The attempt fails with a transient error before it reaches the engine.
    pub refuse: f64,
    /// The engine executes the attempt, but its answer is lost: the caller gets a transient error.
    pub lose_answer: f64,
    /// The engine executes the attempt, but the caller gets
    /// [`OutcomeUnknown`](Error::OutcomeUnknown), which is not transient. Only changes have this
    /// fault.
    pub unknown: f64,
    /// The attempt is delayed, before or after the engine executes it.
    pub delay: f64,
    /// Maximum delay.
    pub delay_max: Duration,
}

/// Number of injected faults, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultCounts {
    /// Number of faults of the kind [`FaultRates::refuse`].
    pub refused: u64,
    /// Number of faults of the kind [`FaultRates::lose_answer`].
    pub answers_lost: u64,
    /// Number of faults of the kind [`FaultRates::unknown`].
    pub unknown: u64,
    /// Number of faults of the kind [`FaultRates::delay`].
    pub delayed: u64,
}

/// Wraps an engine and injects random faults into attempts, from a seed. Administrative requests
/// have no faults.
pub struct FaultyEngine {
    inner: Arc<dyn Engine>,
    faults: FaultSource,
}

impl FaultyEngine {
    /// Wraps `inner`. The same seed and the same order of attempts cause the same faults.
    #[must_use]
    pub fn new(inner: Arc<dyn Engine>, rates: FaultRates, seed: u64) -> FaultyEngine {
        let rng = Mutex::new(StdRng::seed_from_u64(seed));
        let faults = FaultSource {
            rates,
            rng,
            refused: 0.into(),
            lost: 0.into(),
            unknown: 0.into(),
            delayed: 0.into(),
            closed: AtomicBool::new(false),
        };
        FaultyEngine { inner, faults }
    }

    /// Returns the number of faults injected so far.
    #[must_use]
    pub fn counts(&self) -> FaultCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        FaultCounts {
            refused: of(&self.faults.refused),
            answers_lost: of(&self.faults.lost),
            unknown: of(&self.faults.unknown),
            delayed: of(&self.faults.delayed),
        }
    }

    fn wrap<'a, T: Send + 'a>(&'a self, call: BoxCall<'a, T>, changes: bool) -> BoxCall<'a, T> {
        Box::new(FaultyCall { call, changes, faults: &self.faults })
    }
}

impl std::fmt::Debug for FaultyEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("FaultyEngine");
        shown.field("inner", &self.inner).field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl Engine for FaultyEngine {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn mutate(&self, request: ChangeRequest, deadline: Instant) -> BoxCall<'_, Mutated> {
        self.wrap(self.inner.mutate(request, deadline), true)
    }

    fn read(&self, request: ReadRequest, deadline: Instant) -> BoxCall<'_, ReadReply> {
        self.wrap(self.inner.read(request, deadline), false)
    }

    fn query(&self, request: Query, deadline: Instant) -> BoxCall<'_, Vec<QueryAnswer>> {
        self.wrap(self.inner.query(request, deadline), false)
    }

    fn list(&self, request: List, deadline: Instant) -> BoxCall<'_, Listed> {
        self.wrap(self.inner.list(request, deadline), false)
    }

    fn next_upload(&self) -> Result<UploadId> {
        self.inner.next_upload()
    }

    fn limits(&self) -> EngineLimits {
        self.inner.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn administration(&self) -> Option<&dyn Administration> {
        self.inner.administration()
    }

    fn fencing(&self) -> Option<&dyn Fencing> {
        self.inner.fencing()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.faults.closed.store(true, Ordering::Relaxed);
        self.inner.close()
    }
}

struct FaultSource {
    rates: FaultRates,
    rng: Mutex<StdRng>,
    refused: AtomicU64,
    lost: AtomicU64,
    unknown: AtomicU64,
    delayed: AtomicU64,
    /// Whether the engine is closed. Later attempts have no faults.
    closed: AtomicBool,
}

/// Faults of one attempt.
struct AttemptFate {
    before: Duration,
    after: Duration,
    refuse: bool,
    lose: bool,
    unknown: bool,
}

impl FaultSource {
    /// Chooses the faults of one attempt. Every attempt draws the same number of random numbers, so
    /// the faults of one attempt do not change those of the next.
    fn fate(&self) -> AttemptFate {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mut meets = |rate: f64| rng.random_bool(rate.clamp(0.0, 1.0));
        let rates = &self.rates;
        let (refuse, lose, unknown) = (meets(rates.refuse), meets(rates.lose_answer), meets(rates.unknown));
        let (delay, is_before) = (meets(rates.delay), meets(0.5));
        let pause = rates.delay_max.mul_f64(rng.random_range(0.0..=1.0));
        let pause = if delay { pause } else { Duration::ZERO };
        let (before, after) = if is_before { (pause, Duration::ZERO) } else { (Duration::ZERO, pause) };
        AttemptFate { before, after, refuse, lose, unknown }
    }

    async fn pause(&self, pause: Duration) {
        if !pause.is_zero() {
            self.delayed.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(pause).await;
        }
    }
}

struct FaultyCall<'a, T> {
    call: BoxCall<'a, T>,
    /// Whether the call changes an object.
    changes: bool,
    faults: &'a FaultSource,
}

impl<T: Send> Call<T> for FaultyCall<'_, T> {
    fn obstacle(&self) -> Option<String> {
        self.call.obstacle()
    }

    fn attempt(&mut self) -> BoxFuture<'_, Result<T>> {
        Box::pin(async {
            let faults = self.faults;
            if faults.closed.load(Ordering::Relaxed) {
                return Err(Error::Closed);
            }
            let fate = faults.fate();
            faults.pause(fate.before).await;
            if fate.refuse {
                faults.refused.fetch_add(1, Ordering::Relaxed);
                return Err(injected("refused"));
            }
            let outcome = self.call.attempt().await;
            faults.pause(fate.after).await;
            if fate.unknown && self.changes {
                faults.unknown.fetch_add(1, Ordering::Relaxed);
                return Err(Error::OutcomeUnknown(Box::new(injected("executed, but its outcome was lost"))));
            }
            if fate.lose {
                faults.lost.fetch_add(1, Ordering::Relaxed);
                return Err(injected("executed, but the answer was lost"));
            }
            outcome
        })
    }
}

fn injected(what: &str) -> Error {
    NodeError::Unavailable(format!("injected fault: the request was {what}")).into()
}
