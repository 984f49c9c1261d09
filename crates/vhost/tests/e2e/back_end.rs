//! The back end under test, in a thread of its own, and a disk that holds requests back.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use base::BoxFuture;
use bytes::Bytes;
use disk::{Disk, DiskExtent, DiskIdentity, MemDisk, Memory};
use tokio::sync::{oneshot, watch};
use vhost::direct::DirectControl;
use vhost::{BlkDevice, DeviceOptions, SessionAnswer, VhostControl, VhostError, VhostMessage, VhostSession};

/// What outlives the back end: the front end's socket, the state of the session, and the message that
/// is not answered yet.
#[derive(Default)]
pub struct Held {
    pub state: Option<Bytes>,
    pub fds: BTreeMap<u64, OwnedFd>,
    pending: Option<(Vec<u8>, Vec<OwnedFd>)>,
}

/// The way to the front end, which stores answers in [`Held`].
struct HeldControl {
    held: Arc<Mutex<Held>>,
    direct: DirectControl,
}

fn copies<'a>(fds: impl IntoIterator<Item = &'a OwnedFd>) -> Vec<OwnedFd> {
    fds.into_iter().map(|fd| fd.try_clone().unwrap()).collect()
}

impl VhostControl for HeldControl {
    async fn receive(&mut self) -> io::Result<Option<VhostMessage>> {
        let pending = {
            let held = self.held.lock().unwrap();
            held.pending.as_ref().map(|(bytes, fds)| (bytes.clone(), copies(fds)))
        };
        if let Some((bytes, fds)) = pending {
            return Ok(Some(VhostMessage { bytes, fds }));
        }
        let Some(message) = self.direct.receive().await? else { return Ok(None) };
        self.held.lock().unwrap().pending = Some((message.bytes.clone(), copies(&message.fds)));
        Ok(Some(message))
    }

    async fn answer(&mut self, mut answer: SessionAnswer) -> io::Result<()> {
        {
            let mut held = self.held.lock().unwrap();
            held.state = Some(answer.state.clone());
            for (key, fd) in answer.keep.drain(..) {
                assert!(held.fds.insert(key, fd).is_none(), "a key is used once");
            }
            for key in &answer.drop {
                held.fds.remove(key).expect("only kept file descriptors are dropped");
            }
            held.pending = None;
        }
        self.direct.answer(answer).await
    }

    async fn disconnected(&mut self) {
        self.direct.disconnected().await;
    }
}

/// How a back end ended, or `None` if it was killed.
type Ended = Option<Result<(), VhostError>>;

/// A back end in a thread.
pub struct BackEnd {
    pub held: Arc<Mutex<Held>>,
    socket: UnixStream,
    thread: Option<(oneshot::Sender<()>, JoinHandle<Ended>)>,
}

impl BackEnd {
    /// Starts a back end for a new front end. Returns the front end's socket.
    pub fn start(disk: Arc<dyn Disk>) -> (BackEnd, UnixStream) {
        let (socket, front_end) = UnixStream::pair().unwrap();
        let mut back_end = BackEnd { held: Arc::default(), socket, thread: None };
        back_end.resume(disk);
        (back_end, front_end)
    }

    /// Starts the back end again with what was stored.
    pub fn resume(&mut self, disk: Arc<dyn Disk>) {
        let (stop, stopped) = oneshot::channel();
        let (held, socket) = (Arc::clone(&self.held), self.socket.try_clone().unwrap());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                socket.set_nonblocking(true).unwrap();
                let stream = tokio::net::UnixStream::from_std(socket).unwrap();
                let options = DeviceOptions { queues: 4, ..DeviceOptions::default() };
                let restored = {
                    let held = held.lock().unwrap();
                    let fds = held.fds.keys().copied().zip(copies(held.fds.values())).collect();
                    held.state.as_ref().map(|state| VhostSession::restore(state, fds).unwrap())
                };
                let device = match restored {
                    Some(session) => BlkDevice::with(disk, session, &options),
                    None => BlkDevice::new(disk, &options),
                };
                let mut control = HeldControl { held, direct: DirectControl::new(stream) };
                tokio::select! {
                    result = device.run(&mut control) => Some(result),
                    _ = stopped => None,
                }
            })
        });
        self.thread = Some((stop, thread));
    }

    /// Stops the back end wherever it is.
    pub fn kill(&mut self) {
        let (stop, thread) = self.thread.take().unwrap();
        drop(stop);
        assert!(thread.join().unwrap().is_none(), "the back end runs until it is killed");
    }

    /// Waits for the end of the back end.
    pub fn end(mut self) -> Result<(), VhostError> {
        let (stop, thread) = self.thread.take().unwrap();
        let result = thread.join().unwrap();
        drop(stop);
        // The front end sees the end of the connection.
        result.expect("the back end was not killed")
    }
}

/// A [`MemDisk`] that holds requests back while it is closed.
#[derive(Debug)]
pub struct GatedDisk {
    pub disk: MemDisk,
    open: watch::Sender<bool>,
    /// Number of requests that were started.
    started: (Mutex<u64>, Condvar),
}

impl GatedDisk {
    pub fn new(size: u64) -> Arc<GatedDisk> {
        let (disk, open) = (MemDisk::new(size), watch::Sender::new(true));
        Arc::new(GatedDisk { disk, open, started: Default::default() })
    }

    pub fn set_open(&self, is_open: bool) {
        self.open.send_replace(is_open);
    }

    /// Waits until the disk has started this number of requests in total.
    pub fn wait_for_started(&self, count: u64) {
        let started = self.started.0.lock().unwrap();
        drop(self.started.1.wait_while(started, |started| *started < count).unwrap());
    }

    fn gated<T: Send + 'static>(
        &self,
        request: impl FnOnce() -> BoxFuture<'static, disk::Result<T>> + Send + 'static,
    ) -> BoxFuture<'static, disk::Result<T>> {
        *self.started.0.lock().unwrap() += 1;
        self.started.1.notify_all();
        let mut open = self.open.subscribe();
        Box::pin(async move {
            open.wait_for(|is_open| *is_open).await.unwrap();
            request().await
        })
    }
}

/// A shared [`GatedDisk`].
#[derive(Debug, Clone)]
pub struct Gated(pub Arc<GatedDisk>);

impl Disk for Gated {
    fn identity(&self) -> &DiskIdentity {
        self.0.disk.identity()
    }

    fn size(&self) -> watch::Receiver<u64> {
        self.0.disk.size()
    }

    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<Vec<Bytes>>> {
        self.0.disk.read(offset, len)
    }

    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, disk::Result<()>> {
        let disk = Arc::clone(&self.0);
        self.0.gated(move || disk.disk.read_into(offset, memory))
    }

    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, disk::Result<()>> {
        self.0.disk.write(offset, data)
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, disk::Result<()>> {
        let disk = Arc::clone(&self.0);
        self.0.gated(move || disk.disk.write_from(offset, memory))
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<()>> {
        self.0.disk.discard(offset, len)
    }

    fn write_zeroes(&self, offset: u64, len: u64, keeps: bool) -> BoxFuture<'static, disk::Result<()>> {
        self.0.disk.write_zeroes(offset, len, keeps)
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<Vec<DiskExtent>>> {
        self.0.disk.extents(offset, len)
    }
}
