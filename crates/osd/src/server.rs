//! Starts and stops an osd.
//!
//! Each shard runs on a thread of its own. The first shard opens the node, and then passes what it
//! has read to the further shards. No shard serves clients before all shards listen.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::pool::BufferPool;
use base::thread::ThreadClass;
use base::watch;
use futures::future::{LocalBoxFuture, join_all};
use messenger::{Listener, NetworkStack};
use store::ObjectStore;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, LocalSet};
use uuid::Uuid;
use wire::limits::MAX_SHARDS;

use crate::admin::OsdAdministrator;
use crate::config::OsdConfig;
use crate::mailbox::{Addresses, ShardMailbox, mailboxes};
use crate::osd::{Osd, open_node};
use crate::serve;
use crate::shard::{FIRST, NodeBasis, Shard, ShardEndpoint, make_targets};
use crate::share::GroupShare;
use crate::start_error::StartError;
use crate::task::spawn;

/// Maximum time that a stopping osd waits for requests in progress.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum time that a stopping osd waits for the targets to store the node's age.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What an osd announces when clients can connect.
#[derive(Debug, Clone)]
pub struct OsdStarted {
    /// The address that clients connect to: the address of the first shard.
    pub endpoint: String,
    /// UUID of the node to which all targets belong.
    pub node: Uuid,
    /// UUIDs of the node's targets. The index of a target in this list is its number.
    pub targets: Vec<Uuid>,
    /// Administers the osd.
    pub administrator: OsdAdministrator,
}

/// What one shard works with.
pub struct ShardResources {
    /// Configuration. It is the same for all shards, except where it refers to the shard's own
    /// attachment to the store.
    pub config: OsdConfig,
    /// All targets of the node with their ids, in any order. The stores may be shared by all shards,
    /// or be the shard's own access to them.
    pub targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
    /// Staging memory of the shard, which must have room for at least a few segments of 2 MiB.
    pub staging: BufferPool,
}

/// The first shard of an osd that is about to start. It opens the node and has the state of the
/// whole osd.
pub struct FirstShard {
    addresses: Addresses,
    mailbox: ShardMailbox,
    further: Vec<oneshot::Sender<Beginning>>,
    unfinished: Unfinished,
}

/// A further shard of an osd that is about to start.
pub struct FurtherShard {
    share: GroupShare,
    addresses: Addresses,
    mailbox: ShardMailbox,
    beginning: oneshot::Receiver<Beginning>,
    unfinished: Unfinished,
}

/// What the first shard passes to a further shard.
struct Beginning {
    basis: NodeBasis,
    /// Address that the shard listens to.
    listen: String,
    /// Receives the shard's port.
    ready: oneshot::Sender<Result<u16, StartError>>,
    /// Sends the ports of all shards once all of them are ready.
    ports: oneshot::Receiver<Vec<u16>>,
}

/// Creates the shards of an osd. Each of them must be served on its own thread, or all of them on
/// one thread.
///
/// # Panics
/// If `count` is 0 or exceeds [`MAX_SHARDS`].
#[must_use]
pub fn shards(count: u16) -> (FirstShard, Vec<FurtherShard>) {
    assert!((1..=MAX_SHARDS).contains(&count), "an osd has 1 to {MAX_SHARDS} shards");
    let (addresses, mailboxes) = mailboxes(count);
    let mut parts = mailboxes.into_iter().zip(Unfinished::each(count));
    let (mailbox, unfinished) = parts.next().expect("the osd has a first shard");
    let mut senders = Vec::new();
    let further = |(number, (mailbox, unfinished))| {
        let (sender, beginning) = oneshot::channel();
        senders.push(sender);
        let share = GroupShare::new(number, count);
        FurtherShard { share, addresses: addresses.clone(), mailbox, beginning, unfinished }
    };
    let further_shards = (1..count).zip(parts).map(further).collect();
    (FirstShard { addresses, mailbox, further: senders, unfinished }, further_shards)
}

/// Receives the announcement of an osd, or the reason why it did not start.
type StartReceiver<'a> = Box<dyn FnOnce(Result<OsdStarted, StartError>) + 'a>;

impl FirstShard {
    /// Returns the administrator of the osd.
    #[must_use]
    pub fn administrator(&self) -> OsdAdministrator {
        OsdAdministrator::new(self.addresses.clone())
    }

    /// Opens the node and runs the first shard on the current thread until `stop` resolves. The
    /// caller must run in a [`LocalSet`]. `listen` is an address in the network stack's form
    /// (`host:port`); shard n listens to the port that is greater by n. With port 0, each shard
    /// chooses a free port. `ready` receives the announcement, or the reason why the osd did not
    /// start.
    pub fn serve<'a>(
        self,
        resources: ShardResources,
        stack: Arc<dyn NetworkStack>,
        listen: &'a str,
        ready: impl FnOnce(Result<OsdStarted, StartError>) + 'a,
        stop: impl Future<Output = ()> + 'a,
    ) -> LocalBoxFuture<'a, ()> {
        self.serve_until(resources, stack, listen, Box::new(ready), Box::pin(stop))
    }

    /// Does the work of [`serve`](Self::serve). It is not generic, so its code is generated only in
    /// this crate.
    fn serve_until<'a>(
        self,
        resources: ShardResources,
        stack: Arc<dyn NetworkStack>,
        listen: &'a str,
        ready: StartReceiver<'a>,
        stop: LocalBoxFuture<'a, ()>,
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async move {
            let mailbox = MailboxTask::default();
            let administrator = self.administrator();
            let (osd, listener, unfinished) = match self.start(resources, stack, listen, &mailbox).await {
                Ok(started) => started,
                Err(e) => return ready(Err(e)),
            };
            let shard = Rc::clone(&osd.shard);
            let started = {
                let map = shard.map.borrow();
                let targets = map.targets.iter().map(|record| record.uuid).collect();
                OsdStarted { endpoint: listener.endpoint(), node: map.node, targets, administrator }
            };
            ready(Ok(started));
            let removing: Vec<_> = shard.map.borrow().pools.iter().filter(|p| p.removing).cloned().collect();
            removing.into_iter().for_each(|record| osd.empty_in_background(record));
            let upkeep = spawn(Rc::clone(&osd).look_after_targets());
            run(&shard, listener, unfinished, stop).await;
            upkeep.abort();
            shard.age.save(&shard.targets, &shard.witness, LAST_WORD).await;
        })
    }

    async fn start(
        self,
        resources: ShardResources,
        stack: Arc<dyn NetworkStack>,
        listen: &str,
        mailbox: &MailboxTask,
    ) -> Result<(Rc<Osd>, Box<dyn Listener>, Unfinished), StartError> {
        let FirstShard { addresses, mailbox: errands, further, unfinished } = self;
        let ShardResources { config, targets, staging } = resources;
        let share = GroupShare::new(FIRST, further.len() as u16 + 1);
        let targets = make_targets(&config, targets, &staging);
        let basis = open_node(&config, &targets).await?;
        let shard = Shard::new(config, share, addresses, staging, targets, basis.clone())?;
        let osd = Osd::new(Rc::clone(&shard));
        mailbox.start(errands, &shard);
        let listener = stack.listen(listen).await?;
        // Without a port, the network chooses one.
        let chosen = split_port(listen).map_or(0, |(_, port)| port);
        let (_, port) = split_port(&listener.endpoint())?;
        let (mut ports, mut waiting) = (vec![port], Vec::new());
        for (number, sender) in (1..).zip(further) {
            let listen = if chosen == 0 { listen.to_owned() } else { with_offset(listen, number)? };
            let ((ready, is_ready), (all, ports)) = (oneshot::channel(), oneshot::channel());
            // The shard's thread has ended if sending fails. Then it is not ready either.
            let _ = sender.send(Beginning { basis: basis.clone(), listen, ready, ports });
            waiting.push((is_ready, all));
        }
        let mut announcing = Vec::new();
        for (is_ready, all) in waiting {
            ports.push(is_ready.await.map_err(|_| StartError::Died)??);
            announcing.push(all);
        }
        for all in announcing {
            // A shard that has ended since then is not reachable; clients see this as a lost connection.
            let _ = all.send(ports.clone());
        }
        shard.listens(endpoint(&*listener, ports));
        Ok((osd, listener, unfinished))
    }
}

impl FurtherShard {
    /// Runs the shard on the current thread until `stop` resolves. The caller must run in a
    /// [`LocalSet`]. Returns at once if the osd does not start.
    pub fn serve<'a>(
        self,
        resources: ShardResources,
        stack: Arc<dyn NetworkStack>,
        stop: impl Future<Output = ()> + 'a,
    ) -> LocalBoxFuture<'a, ()> {
        self.serve_until(resources, stack, Box::pin(stop))
    }

    /// Does the work of [`serve`](Self::serve), as [`FirstShard::serve_until`] does.
    fn serve_until<'a>(
        self,
        resources: ShardResources,
        stack: Arc<dyn NetworkStack>,
        stop: LocalBoxFuture<'a, ()>,
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async move {
            let FurtherShard { share, addresses, mailbox: errands, beginning, unfinished } = self;
            let Ok(Beginning { basis, listen, ready, ports }) = beginning.await else { return };
            let ShardResources { config, targets, staging } = resources;
            let targets = make_targets(&config, targets, &staging);
            let mailbox = MailboxTask::default();
            let start = async {
                let shard = Shard::new(config, share, addresses, staging, targets, basis)?;
                let listener = stack.listen(&listen).await?;
                let (_, port) = split_port(&listener.endpoint())?;
                Ok((shard, listener, port))
            };
            let (shard, listener) = match start.await {
                Ok((shard, listener, port)) => {
                    mailbox.start(errands, &shard);
                    // If the first shard has ended, it sends no ports either.
                    let _ = ready.send(Ok(port));
                    (shard, listener)
                }
                Err(e) => return drop(ready.send(Err(e))),
            };
            let Ok(ports) = ports.await else { return };
            shard.listens(endpoint(&*listener, ports));
            run(&shard, listener, unfinished, stop).await;
        })
    }
}

/// A shard of an osd that has not finished its requests in progress. Until all shards have finished,
/// they run each other's errands. Dropping the value means that the shard has finished.
#[derive(Debug)]
struct Unfinished(Arc<watch::Sender<u16>>);

impl Unfinished {
    /// Creates a value for each of `shards` shards.
    fn each(shards: u16) -> impl Iterator<Item = Unfinished> {
        let left = Arc::new(watch::Sender::new(shards));
        (0..shards).map(move |_| Unfinished(Arc::clone(&left)))
    }

    /// Records that this shard has finished, and waits until all shards have finished.
    async fn finish(self) {
        let mut left = self.0.subscribe();
        drop(self);
        // An error means that the last value was dropped.
        drop(left.wait_for(|left| *left == 0).await);
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.send_modify(|left| *left -= 1);
    }
}

/// The task that runs the errands of other shards. Dropping the value ends the task.
#[derive(Default)]
struct MailboxTask(OnceCell<JoinHandle<()>>);

impl MailboxTask {
    fn start(&self, mailbox: ShardMailbox, shard: &Rc<Shard>) {
        let started = self.0.set(spawn(mailbox.serve(Rc::clone(shard))));
        assert!(started.is_ok(), "a shard has one mailbox");
    }
}

impl Drop for MailboxTask {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|task| task.abort());
    }
}

/// Serves clients until `stop` resolves, and then waits for requests in progress, on all shards.
async fn run(
    shard: &Rc<Shard>,
    listener: Box<dyn Listener>,
    unfinished: Unfinished,
    stop: LocalBoxFuture<'_, ()>,
) {
    let collector = spawn(Rc::clone(shard).collect_for_ever());
    let upkeep = spawn(Rc::clone(shard).look_after_groups());
    let accepting = spawn(serve::accept(Rc::clone(shard), listener));
    stop.await;
    accepting.abort();
    collector.abort();
    upkeep.abort();
    let drained = async {
        while shard.requests.now() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        unfinished.finish().await;
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        let (number, requests) = (shard.share.shard(), shard.requests.now());
        tracing::warn!(shard = number, requests, "the osd stops although requests are still in progress");
    }
}

fn endpoint(listener: &dyn Listener, ports: Vec<u16>) -> ShardEndpoint {
    let (address, paths, admissions) = (listener.endpoint(), listener.paths(), listener.admissions());
    ShardEndpoint { address, ports, paths, admissions }
}

/// Splits an address of the form `host:port`.
fn split_port(address: &str) -> Result<(&str, u16), StartError> {
    let split = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    split.ok_or_else(|| StartError::NoPort(address.to_owned()))
}

/// Returns the address whose port is greater by `offset`.
fn with_offset(address: &str, offset: u16) -> Result<String, StartError> {
    let (host, port) = split_port(address)?;
    let port = port.checked_add(offset).ok_or(StartError::PortsEnd { first: port, offset })?;
    Ok(format!("{host}:{port}"))
}

/// A running osd, with a thread for each shard. Dropping it stops the osd without waiting for
/// requests in progress.
#[derive(Debug)]
pub struct OsdServer {
    endpoint: String,
    administrator: OsdAdministrator,
    threads: Vec<ShardThread>,
}

/// The thread of a shard.
#[derive(Debug)]
struct ShardThread {
    stop: oneshot::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl ShardThread {
    /// Starts a thread that runs the future of `serve` until it is stopped.
    fn start<F: Future<Output = ()>>(
        number: u16,
        serve: impl FnOnce(oneshot::Receiver<()>) -> F + Send + 'static,
    ) -> std::io::Result<ShardThread> {
        let (stop, stopped) = oneshot::channel();
        let runtime = base::task::runtime()?;
        let body = move || LocalSet::new().block_on(&runtime, serve(stopped));
        let thread = base::thread::spawn(ThreadClass::Osd, &number.to_string(), body)?;
        Ok(ShardThread { stop, thread })
    }
}

impl OsdServer {
    /// Starts an osd with one shard for each element of `resources`, on threads named `osd-N`.
    /// Returns once clients can connect.
    ///
    /// `listen` is an address in the network stack's form (`host:port`), as
    /// [`FirstShard::serve`] describes.
    ///
    /// This call blocks until the osd has started. The stores must be able to make progress while
    /// the calling thread is blocked.
    ///
    /// # Errors
    /// If the targets do not all belong to one node or cannot be read, or if an address is in use.
    ///
    /// # Panics
    /// If `resources` is empty.
    pub fn start(
        resources: Vec<ShardResources>,
        stack: Arc<dyn NetworkStack>,
        listen: &str,
    ) -> Result<OsdServer, StartError> {
        let (first, further) = shards(resources.len() as u16);
        let mut resources = resources.into_iter();
        let own = resources.next().expect("an osd has at least one shard");
        let (started, wait) = mpsc::channel();
        let (listen, own_stack) = (listen.to_owned(), Arc::clone(&stack));
        let serve = move |stopped: oneshot::Receiver<()>| async move {
            let ready = |result| drop(started.send(result));
            first.serve(own, own_stack, &listen, ready, async { drop(stopped.await) }).await;
        };
        let mut threads = vec![ShardThread::start(FIRST, serve)?];
        for (further, resources) in further.into_iter().zip(resources) {
            let (number, stack) = (further.share.shard(), Arc::clone(&stack));
            let serve = move |stopped: oneshot::Receiver<()>| async move {
                further.serve(resources, stack, async { drop(stopped.await) }).await;
            };
            threads.push(ShardThread::start(number, serve)?);
        }
        let OsdStarted { endpoint, administrator, .. } = wait.recv().map_err(|_| StartError::Died)??;
        Ok(OsdServer { endpoint, administrator, threads })
    }

    /// Returns the address that clients connect to.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the administrator of the osd.
    #[must_use]
    pub fn administrator(&self) -> &OsdAdministrator {
        &self.administrator
    }

    /// Stops the osd. The osd accepts no more connections, and waits up to five seconds for
    /// requests in progress. This call blocks until the osd has stopped.
    pub fn stop(self) {
        let stopped = self.threads.into_iter().map(|ShardThread { stop, thread }| {
            // If the receiver was dropped, the shard has already stopped.
            let _ = stop.send(());
            thread
        });
        for thread in stopped.collect::<Vec<_>>() {
            // The panic hook has already reported a panic of the thread.
            drop(thread.join());
        }
    }

    /// Runs an osd with one shard for each element of `resources` on the current thread, until `stop`
    /// resolves. The caller must run in a [`LocalSet`]. Simulations and programs with their own event
    /// loop use this function. `ready` receives the announcement, or the reason why the osd did not
    /// start.
    ///
    /// # Panics
    /// If `resources` is empty.
    pub async fn serve_on_one_thread(
        resources: Vec<ShardResources>,
        stack: Arc<dyn NetworkStack>,
        listen: &str,
        ready: impl FnOnce(Result<OsdStarted, StartError>),
        stop: impl Future<Output = ()>,
    ) {
        let (first, further) = shards(resources.len() as u16);
        let mut resources = resources.into_iter();
        let own = resources.next().expect("an osd has at least one shard");
        let stopped = watch::Sender::new(false);
        let until_stopped = || {
            let mut stopped = stopped.subscribe();
            async move { drop(stopped.wait_for(|stopped| *stopped).await) }
        };
        let further = further
            .into_iter()
            .zip(resources)
            .map(|(further, resources)| further.serve(resources, Arc::clone(&stack), until_stopped()));
        let further: Vec<_> = further.collect();
        let first = async {
            let stop = async {
                stop.await;
                stopped.send_replace(true);
            };
            first.serve(own, Arc::clone(&stack), listen, ready, stop).await;
        };
        tokio::join!(first, join_all(further));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn a_shard_waits_until_the_other_shards_have_finished_or_ended() {
        let mut shards: Vec<Unfinished> = Unfinished::each(3).collect();
        let ended = shards.pop();
        let (last, first) = (shards.pop().unwrap(), shards.pop().unwrap());
        let mut first = std::pin::pin!(first.finish());
        assert!(first.as_mut().now_or_never().is_none());
        drop(ended);
        assert!(first.as_mut().now_or_never().is_none(), "another shard has not finished");
        last.finish().await;
        first.await;
    }

    #[test]
    fn shards_listen_to_consecutive_ports() {
        assert_eq!(with_offset("[::1]:7001", 2).unwrap(), "[::1]:7003");
        assert!(matches!(
            with_offset("host:65535", 1),
            Err(StartError::PortsEnd { first: 65535, offset: 1 })
        ));
        assert!(matches!(split_port("host"), Err(StartError::NoPort(_))));
    }
}
