//! Messages between the shards of an osd.
//!
//! A shard owns its state alone. To use the state of another shard, it sends an *errand*: a closure
//! that the other shard runs on its own thread. Errands from one shard to another run in the order
//! in which they were sent. The data path sends no errands.

use std::cell::Cell;
use std::rc::Rc;

use futures::future::{LocalBoxFuture, try_join_all};
use metrics::{Counter, counter};
use tokio::sync::{mpsc, oneshot};
use wire::Error;

use crate::osd::Osd;
use crate::shard::{FIRST, Shard};
use crate::task::spawn;

/// A closure that a shard runs on its own thread.
type Errand = Box<dyn FnOnce(&Rc<Shard>) + Send>;

/// The receiving end of a shard's errands.
pub(crate) struct ShardMailbox(mpsc::UnboundedReceiver<Errand>);

/// The sending ends of the mailboxes of all shards, by the shards' numbers.
#[derive(Clone)]
pub(crate) struct Addresses(Vec<mpsc::UnboundedSender<Errand>>);

impl Addresses {
    /// Runs a task with the state of the whole osd, on the first shard, and returns its result. The
    /// task continues even if the caller is cancelled.
    ///
    /// # Errors
    /// If the osd ends before it has run the task.
    pub(crate) fn on_first<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<Osd>) -> F + Send + 'static,
    ) -> impl Future<Output = Result<T, ShardGone>> + Send + 'static {
        let (done, result) = oneshot::channel();
        let errand = move |shard: &Rc<Shard>| {
            let Some(osd) = shard.osd() else { return };
            let running = task(osd);
            spawn(async move {
                // The caller may have been cancelled; ignore the error.
                let _ = done.send(running.await);
            });
        };
        // If the shard has ended, it drops the errand, and the result's sender with it.
        let _ = self.0[usize::from(FIRST)].send(Box::new(errand));
        async move { result.await.map_err(|_| ShardGone) }
    }
}

/// A shard has ended, or ends before it has run an errand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardGone;

impl From<ShardGone> for Error {
    fn from(_: ShardGone) -> Error {
        Error::Unavailable("the osd is stopping".into())
    }
}

/// Creates the mailboxes of `shards` shards.
pub(crate) fn mailboxes(shards: u16) -> (Addresses, Vec<ShardMailbox>) {
    let ends = (0..shards).map(|_| mpsc::unbounded_channel());
    let (senders, receivers): (Vec<_>, Vec<_>) = ends.unzip();
    (Addresses(senders), receivers.into_iter().map(ShardMailbox).collect())
}

impl ShardMailbox {
    /// Runs the errands of other shards until the task is aborted.
    pub(crate) async fn serve(mut self, shard: Rc<Shard>) {
        while let Some(errand) = self.0.recv().await {
            errand(&shard);
        }
    }
}

/// The other shards of the osd, as one shard sees them.
pub(crate) struct Peers {
    addresses: Addresses,
    /// Number of messages that this shard has sent to other shards.
    sent: Cell<u64>,
    counted: Counter,
}

impl Peers {
    /// Returns the peers of shard number `own`.
    pub(crate) fn new(own: u16, addresses: Addresses) -> Peers {
        let counted = counter!("outboard_osd_shard_messages_total", "shard" => own.to_string());
        Peers { addresses, sent: Cell::new(0), counted }
    }

    /// Returns the number of messages that this shard has sent to other shards.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.get()
    }

    fn count(&self) {
        self.sent.set(self.sent.get() + 1);
        self.counted.increment(1);
    }

    fn send(&self, shard: u16, errand: Errand) -> Result<(), ShardGone> {
        self.count();
        self.addresses.0[usize::from(shard)].send(errand).map_err(|_| ShardGone)
    }
}

impl Shard {
    /// Runs `errand` on a shard, without waiting for it. On the own shard, runs it at once. Does
    /// nothing if the shard has ended.
    pub(crate) fn tell(self: &Rc<Self>, shard: u16, errand: impl FnOnce(&Rc<Shard>) + Send + 'static) {
        if shard == self.share.shard() {
            return errand(self);
        }
        // A shard that has ended has no state that the errand could change.
        let _ = self.peers.send(shard, Box::new(errand));
    }

    /// Runs `errand` on every shard, and waits until all have run it. On the own shard, runs it
    /// before the function returns its future.
    pub(crate) fn tell_each(
        self: &Rc<Self>,
        errand: impl Fn(&Rc<Shard>) + Clone + Send + 'static,
    ) -> impl Future<Output = Result<(), ShardGone>> + 'static {
        let told = (0..self.share.shards()).map(|shard| {
            let (done, told) = oneshot::channel();
            let errand = errand.clone();
            self.tell(shard, move |shard| {
                errand(shard);
                // The caller may have been cancelled; ignore the error.
                let _ = done.send(());
            });
            told
        });
        let told: Vec<_> = told.collect();
        async move { try_join_all(told).await.map(drop).map_err(|_| ShardGone) }
    }

    /// Runs a task on a shard and returns its result. The task continues even if the caller is
    /// cancelled, unless it runs on the own shard. The boxed futures keep the code of each caller
    /// small.
    ///
    /// # Errors
    /// If the shard has ended.
    pub(crate) fn on<T: Send + 'static, F: Future<Output = T> + 'static>(
        self: &Rc<Self>,
        shard: u16,
        task: impl FnOnce(Rc<Shard>) -> F + Send + 'static,
    ) -> LocalBoxFuture<'static, Result<T, ShardGone>> {
        if shard == self.share.shard() {
            return Box::pin(here(Box::pin(task(Rc::clone(self)))));
        }
        let (done, result) = oneshot::channel();
        let errand = move |shard: &Rc<Shard>| {
            let running = Box::pin(task(Rc::clone(shard)));
            spawn(answer(Rc::clone(shard), running, done));
        };
        let sent = self.peers.send(shard, Box::new(errand));
        Box::pin(answered(sent, result))
    }

    /// Runs a task on every shard at the same time. Returns the results by the shards' numbers.
    ///
    /// # Errors
    /// If a shard has ended.
    pub(crate) async fn each<T: Send + 'static, F: Future<Output = T> + 'static>(
        self: &Rc<Self>,
        task: impl FnOnce(Rc<Shard>) -> F + Clone + Send + 'static,
    ) -> Result<Vec<T>, ShardGone> {
        try_join_all((0..self.share.shards()).map(|shard| self.on(shard, task.clone()))).await
    }
}

/// Runs a task on the own shard.
async fn here<T>(running: LocalBoxFuture<'static, T>) -> Result<T, ShardGone> {
    Ok(running.await)
}

/// Completes a task for another shard.
async fn answer<T>(shard: Rc<Shard>, running: LocalBoxFuture<'static, T>, done: oneshot::Sender<T>) {
    let result = running.await;
    shard.peers.count();
    // The caller may have been cancelled; ignore the error.
    let _ = done.send(result);
}

/// Waits for the result of a task on another shard.
async fn answered<T>(sent: Result<(), ShardGone>, result: oneshot::Receiver<T>) -> Result<T, ShardGone> {
    sent?;
    result.await.map_err(|_| ShardGone)
}
