//! Queue of commands to the thread that runs a target.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::mem::Arena;
use crossbeam_queue::SegQueue;
use tokio::sync::watch;

use super::drive::DriveCalls;
use super::messages::{CoreCommand, CoreEvent, refuse};
use super::uring::Waker;
use crate::StoreError;

/// Most commands left in the queue while the thread sleeps.
const MOST_LEFT: usize = 64;

/// Handle of the queue.
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
    /// The target's driver has ended.
    pub(super) gone: AtomicBool,
    /// All handles are dropped, or the drive has failed.
    pub(super) abandoned: AtomicBool,
    /// Calls wait for space.
    pub(super) starved: AtomicBool,
    /// The reason why the target refuses writes until a remount.
    pub(super) failure: watch::Sender<Option<String>>,
    /// Calls wait for space while a checkpoint is carried out.
    pub(super) awaits_checkpoint: AtomicBool,
    /// Counter of the checkpoint thread's calls on the drive.
    pub(super) checkpoint_calls: DriveCalls,
}

impl Mailbox {
    pub(super) fn command(&self, command: CoreCommand) {
        self.shared.commands.push(command);
        self.waker.wake();
        if self.shared.gone.load(Ordering::SeqCst) {
            self.shared.refuse_all();
        }
    }

    /// Queues a command without waking the thread. The thread takes it before the next command, and
    /// no caller waits for it.
    pub(super) fn leave(&self, command: CoreCommand) {
        if self.shared.starved.load(Ordering::SeqCst) || self.shared.commands.len() >= MOST_LEFT {
            return self.command(command);
        }
        self.shared.commands.push(command);
        // The thread sets this flag when calls starve, and then checks for queued commands before
        // it sleeps.
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

    /// Returns the error for calls that the target's thread no longer executes. The caller must
    /// learn that the target has failed, even after the unmount that follows.
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
