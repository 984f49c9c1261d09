//! The state of an attachment: the current store channel, or the calls that wait for the next store
//! channel.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::clock::Instant;
use base::health::OffloadHealth;
use base::mem::OutsideAccess;
use base::watch;
use channel::{ChannelError, DmaEngine, DmaRegion, DpuMemory, TargetInfo};
use store::StoreError;
use tokio::sync::Notify;

use crate::options::{AttachmentOptions, DmaTuning, StoreEndpoint};
use crate::store_channel::{CallError, StoreChannel};

/// Maximum number of calls that wait for the store's return. The osd has a lower limit of requests
/// in flight.
const MAX_WAITING: usize = 1 << 14;
/// Maximum time for which the engine polls before it sleeps. An emulated engine shares its CPU with
/// other threads.
const ENGINE_SPIN: Duration = Duration::from_micros(10);

/// Closes the attachment when it is dropped.
pub(crate) struct AttachmentHandle {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for AttachmentHandle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) memory: DpuMemory,
    pub(crate) engine: Arc<dyn DmaEngine>,
    pub(crate) local: DmaRegion,
    pub(crate) endpoint: StoreEndpoint,
    pub(crate) options: AttachmentOptions,
    pub(crate) closing: Notify,
    pub(crate) incarnation: watch::Sender<u64>,
    /// Whether the store has returned with other targets.
    pub(crate) superseded: watch::Sender<bool>,
    pub(crate) health: Arc<OffloadHealth>,
    tuning: Mutex<DmaTuning>,
}

pub(crate) struct State {
    attachment: AttachmentState,
    pub(crate) targets: Option<Vec<TargetInfo>>,
    /// Number of incarnations of the store so far.
    pub(crate) incarnations: u64,
    pub(crate) last_failure: Option<String>,
    pub(crate) why_no_dma: Option<String>,
}

enum AttachmentState {
    Up(Arc<StoreChannel>),
    Away(VecDeque<WaitingCall>),
    Closed,
}

/// A call that was made while no store was connected.
struct WaitingCall {
    deadline: Instant,
    call: StoreChannelCall,
}

type StoreChannelCall = Box<dyn FnOnce(Result<&Arc<StoreChannel>, CallError>) + Send>;

impl State {
    /// The current store channel, if the store is connected.
    pub(crate) fn store_channel(&self) -> Option<&Arc<StoreChannel>> {
        match &self.attachment {
            AttachmentState::Up(store_channel) => Some(store_channel),
            AttachmentState::Away(_) | AttachmentState::Closed => None,
        }
    }
}

impl Shared {
    /// Creates the state of an attachment and registers DPU memory with the engine. The store is
    /// not connected yet, so calls wait.
    #[allow(unsafe_code)]
    pub(crate) fn new(
        memory: DpuMemory,
        engine: Arc<dyn DmaEngine>,
        endpoint: StoreEndpoint,
        options: AttachmentOptions,
    ) -> Result<Arc<Shared>, ChannelError> {
        let health = Arc::new(OffloadHealth::new("dma", options.cool_down));
        let tuning = options.tuning;
        // SAFETY: only this crate posts chains with the region. The store channels post a transfer
        // to a staging buffer only while they own the buffer and do not use it, and a transfer from
        // a buffer only while they hold it as `Bytes`. They keep the buffer until the transfer has
        // completed.
        let access = unsafe { OutsideAccess::new(memory.arena()) };
        let local = engine.register_local(&access)?;
        let state = State {
            attachment: AttachmentState::Away(VecDeque::new()),
            targets: None,
            incarnations: 0,
            last_failure: None,
            why_no_dma: None,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            memory,
            engine,
            local,
            endpoint,
            options,
            closing: Notify::new(),
            incarnation: watch::Sender::new(0),
            superseded: watch::Sender::new(false),
            health,
            tuning: Mutex::new(tuning),
        });
        shared.tune_engine(tuning);
        Ok(shared)
    }

    pub(crate) fn targets(&self) -> Vec<TargetInfo> {
        self.lock().targets.clone().unwrap_or_default()
    }

    pub(crate) fn tuning(&self) -> DmaTuning {
        *self.tuning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the DMA settings from now on.
    pub(crate) fn tune(&self, tuning: DmaTuning) {
        *self.tuning.lock().unwrap_or_else(PoisonError::into_inner) = tuning;
        self.tune_engine(tuning);
        if let Some(store_channel) = self.lock().store_channel() {
            store_channel.tune(tuning.queues, tuning.region_cache, tuning.poll);
        }
    }

    fn tune_engine(&self, tuning: DmaTuning) {
        let spin = tuning.poll.min(ENGINE_SPIN);
        self.engine.tune(channel::EngineTuning { max_transfer: tuning.max_transfer, spin: Some(spin) });
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call on the current store channel at once, or on the next store channel. Calls keep
    /// their order.
    pub(crate) fn with_store_channel(
        &self,
        call: impl FnOnce(Result<&Arc<StoreChannel>, CallError>) + Send + 'static,
    ) {
        let mut state = self.lock();
        match &mut state.attachment {
            AttachmentState::Up(store_channel) => {
                let store_channel = Arc::clone(store_channel);
                // Make the call under the lock, so that it stays behind the earlier calls that
                // waited for the store channel.
                call(Ok(&store_channel));
            }
            AttachmentState::Away(waiting) if waiting.len() < MAX_WAITING => {
                let deadline = Instant::now() + self.options.wait_for_store;
                waiting.push_back(WaitingCall { deadline, call: Box::new(call) });
            }
            // Return a store error. The caller would retry a lost call, and the retry would be
            // refused as well.
            AttachmentState::Away(_) => {
                let why = "too many calls wait for the store".to_owned();
                call(Err(StoreError::Disconnected(why).into()));
            }
            AttachmentState::Closed => call(Err(CallError::Lost("the attachment was closed".into()))),
        }
    }

    /// The incarnation to which a call made now belongs: the current incarnation, or the next one
    /// while no store is connected.
    pub(crate) fn incarnation(&self) -> u64 {
        let state = self.lock();
        if matches!(state.attachment, AttachmentState::Up(_)) {
            state.incarnations
        } else {
            state.incarnations + 1
        }
    }

    /// Whether a call that failed because its incarnation ended may be retried.
    pub(crate) fn may_retry(&self) -> bool {
        !matches!(self.lock().attachment, AttachmentState::Closed)
    }

    pub(crate) fn close(&self) {
        let before = std::mem::replace(&mut self.lock().attachment, AttachmentState::Closed);
        self.closing.notify_waiters();
        self.closing.notify_one();
        if let AttachmentState::Away(waiting) = before {
            fail(waiting, "the attachment was closed");
        }
    }

    pub(crate) fn closed(&self) -> bool {
        matches!(self.lock().attachment, AttachmentState::Closed)
    }

    /// Fails calls whose deadline has passed.
    pub(crate) fn expire(&self) {
        let mut state = self.lock();
        let AttachmentState::Away(waiting) = &mut state.attachment else { return };
        let now = Instant::now();
        let due = waiting.iter().take_while(|w| w.deadline <= now).count();
        let due: VecDeque<WaitingCall> = waiting.drain(..due).collect();
        let why = state.last_failure.clone().unwrap_or_else(|| "the store does not answer".into());
        drop(state);
        fail(due, &format!("the store did not return in time: {why}"));
    }

    /// Handles the end of the incarnation. From now on, new calls wait for the next incarnation.
    pub(crate) fn away(&self, why: &str) {
        let mut state = self.lock();
        state.last_failure = Some(why.to_owned());
        if matches!(state.attachment, AttachmentState::Up(_)) {
            state.attachment = AttachmentState::Away(VecDeque::new());
        }
    }

    /// Handles the start of an incarnation. Runs the waiting calls, and then admits new calls.
    pub(crate) fn up(&self, store_channel: &Arc<StoreChannel>, targets: Vec<TargetInfo>) {
        let mut state = self.lock();
        let AttachmentState::Away(waiting) = &mut state.attachment else { return };
        for waiting in std::mem::take(waiting) {
            (waiting.call)(Ok(store_channel));
        }
        state.attachment = AttachmentState::Up(Arc::clone(store_channel));
        state.targets = Some(targets);
        state.incarnations += 1;
    }
}

fn fail(waiting: VecDeque<WaitingCall>, why: &str) {
    for waiting in waiting {
        (waiting.call)(Err(CallError::Lost(why.to_owned())));
    }
}
