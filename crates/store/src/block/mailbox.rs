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

/// Commands left for a thread that sleeps.
const MOST_LEFT: usize = 64;

/// The way to the thread that runs a target.
#[derive(Debug, Clone)]
pub(super) struct Mailbox {
    pub(super) shared: Arc<MailboxState>,
    pub(super) waker: Waker,
}

#[derive(Debug, Default)]
pub(super) struct MailboxState {
    pub(super) commands: SegQueue<CoreCommand>,
    pub(super) events: SegQueue<CoreEvent>,
    /// Memory to be registered with the ring.
    pub(super) arenas: SegQueue<Arc<Arena>>,
    /// Nobody runs the target any more.
    pub(super) gone: AtomicBool,
    /// Nobody asks it any more, or its drive has failed.
    pub(super) abandoned: AtomicBool,
    /// Calls wait for space.
    pub(super) starved: AtomicBool,
    /// Why the target refuses writes for good.
    pub(super) failure: watch::Sender<Option<String>>,
    /// Calls wait for space while a checkpoint is carried out.
    pub(super) awaits_checkpoint: AtomicBool,
    /// Calls of the thread that carries checkpoints out.
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

    /// Leaves a command for which that thread need not be woken: it comes before the next one, and nobody waits
    /// for it.
    pub(super) fn leave(&self, command: CoreCommand) {
        if self.shared.starved.load(Ordering::SeqCst) || self.shared.commands.len() >= MOST_LEFT {
            return self.command(command);
        }
        self.shared.commands.push(command);
        // The thread says that calls starve, and then looks whether a command was left, before it sleeps.
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

    /// Returns the error of calls that the target's thread no longer carries out. The caller of a
    /// failed target must learn that the target has failed, also after the unmount that follows.
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
