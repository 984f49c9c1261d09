//! The queue of commands and events for the thread that runs a target.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::mem::Arena;
use base::watch;
use crossbeam_queue::SegQueue;

use super::drive::DriveCalls;
use super::flush_gate::FlushGate;
use super::messages::{CoreCommand, CoreEvent, refuse};
use super::uring::Waker;
use crate::StoreError;

/// Maximum number of commands that remain in the queue while the thread sleeps.
const MOST_LEFT: usize = 64;

/// Handle of the queue. Any thread may use it.
#[derive(Debug, Clone)]
pub(super) struct Mailbox {
    pub(super) shared: Arc<MailboxState>,
    pub(super) waker: Waker,
}

#[derive(Debug, Default)]
pub(super) struct MailboxState {
    pub(super) commands: SegQueue<CoreCommand>,
    pub(super) events: SegQueue<CoreEvent>,
    /// Memory to register with the ring.
    pub(super) arenas: SegQueue<Arc<Arena>>,
    /// Whether the target's driver has ended.
    pub(super) gone: AtomicBool,
    /// Whether the store was dropped or the I/O ring has failed.
    pub(super) abandoned: AtomicBool,
    /// Whether calls wait for free blocks, or for room in the log or the index.
    pub(super) starved: AtomicBool,
    /// The reason why the target refuses writes until a remount.
    pub(super) failure: watch::Sender<Option<String>>,
    /// Whether a checkpoint runs while calls wait for free blocks, or for room in the log or the
    /// index.
    pub(super) awaits_checkpoint: AtomicBool,
    /// Counter of the checkpoint thread's calls to the drive.
    pub(super) checkpoint_calls: DriveCalls,
    /// The gate of the drive's flushes. On a simulated drive, no thread uses the gate.
    pub(super) flush_gate: Arc<FlushGate>,
}

impl Mailbox {
    pub(super) fn command(&self, command: CoreCommand) {
        self.shared.commands.push(command);
        self.waker.wake();
        if self.shared.gone.load(Ordering::SeqCst) {
            self.shared.refuse_all();
        }
    }

    /// Queues a command for which no caller waits. Does not wake the thread unless calls wait for
    /// space or many commands are queued. The thread executes the command before all later
    /// commands.
    pub(super) fn leave(&self, command: CoreCommand) {
        if self.shared.starved.load(Ordering::SeqCst) || self.shared.commands.len() >= MOST_LEFT {
            return self.command(command);
        }
        self.shared.commands.push(command);
        // The thread sets this flag when calls wait for space, and checks for queued commands
        // afterwards, before it sleeps.
        if self.shared.starved.load(Ordering::SeqCst) {
            self.waker.wake();
        }
        if self.shared.gone.load(Ordering::SeqCst) {
            self.shared.refuse_all();
        }
    }

    pub(super) fn memory(&self, arena: Arc<Arena>) {
        self.shared.arenas.push(arena);
        self.waker.wake();
    }

    pub(super) fn event(&self, event: CoreEvent) {
        self.shared.events.push(event);
        self.waker.wake();
    }
}

impl MailboxState {
    pub(super) fn refuse_all(&self) {
        while let Some(command) = self.commands.pop() {
            refuse(command, &self.end_reason("the target is unmounted"));
        }
    }

    /// Returns the error for calls that the target's thread no longer executes. If the target has
    /// failed, the caller must learn this even after the target was unmounted.
    pub(super) fn end_reason(&self, otherwise: &str) -> StoreError {
        match &*self.failure.borrow() {
            Some(reason) => StoreError::Poisoned(reason.clone()),
            None => StoreError::Disconnected(otherwise.to_owned()),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        !self.commands.is_empty()
            || !self.events.is_empty()
            || !self.arenas.is_empty()
            || self.abandoned.load(Ordering::SeqCst)
    }
}
