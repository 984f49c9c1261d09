//! A holder on a thread of its own, and a model of a front end.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use holder::{
    Done, Framing, FrontEndReply, HeldMessage, Holder, HolderClient, HolderConfig, HolderEvent, HolderEvents,
    HolderLimits, InventoryDevice, SharedFd, Stopped,
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// Limits that also fit into a process with 1024 descriptors.
pub const LIMITS: HolderLimits = HolderLimits { devices_max: 4, kept_fds_max: 32 };
/// A test that waits longer than this for a message has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A holder on a thread of its own.
pub struct TestHolder {
    dir: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Stopped>>,
    wakes: Arc<AtomicUsize>,
}

impl TestHolder {
    pub fn start() -> TestHolder {
        TestHolder::with_limits(LIMITS)
    }

    pub fn with_limits(limits: HolderLimits) -> TestHolder {
        let dir = tempfile::tempdir().unwrap();
        let config = HolderConfig { limits, ..HolderConfig::new(dir.path().join("holder/control")) };
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let wakes = Arc::new(AtomicUsize::new(0));
        let woken = wakes.clone();
        let thread = std::thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().on_thread_unpark(move || {
                let _ = woken.fetch_add(1, Ordering::SeqCst);
            });
            runtime.build().unwrap().block_on(tokio::task::LocalSet::new().run_until(async {
                let holder = Holder::bind(config).unwrap();
                ready.send(()).unwrap();
                // A test that fails drops the sender.
                holder.run(async { drop(stopped.await) }).await
            }))
        });
        is_ready.recv().unwrap();
        TestHolder { dir, stop: Some(stop), thread: Some(thread), wakes }
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("holder/control")
    }

    /// Returns the path of the socket of a device.
    pub fn socket(&self, device: &str) -> PathBuf {
        self.dir.path().join(device)
    }

    /// Connects a gateway, which has read the inventory.
    pub async fn gateway(&self) -> Gateway {
        Gateway::connect(&self.control()).await
    }

    /// Connects a gateway to a new holder and adds devices.
    pub async fn gateway_with(&self, devices: &[&str]) -> Gateway {
        let gateway = self.gateway().await;
        for device in devices {
            gateway.client.add(device, &self.socket(device), Framing::VHOST_USER).await.unwrap();
        }
        gateway
    }

    pub fn front_end(&self, device: &str) -> FrontEnd {
        FrontEnd::connect(&self.socket(device))
    }

    /// Returns how often the thread of the holder was woken.
    pub fn wakes(&self) -> usize {
        self.wakes.load(Ordering::SeqCst)
    }

    /// Stops the holder as a signal does. Returns its directory.
    pub fn stop(mut self) -> TempDir {
        self.stop.take().unwrap().send(()).unwrap();
        assert_eq!(self.thread.take().unwrap().join().unwrap(), Stopped::Asked);
        self.dir
    }

    /// Waits until a gateway has stopped the holder. Returns its directory.
    pub fn stopped_by_gateway(mut self) -> TempDir {
        assert_eq!(self.thread.take().unwrap().join().unwrap(), Stopped::ByGateway);
        self.dir
    }
}

/// A connected gateway.
pub struct Gateway {
    pub client: HolderClient,
    pub events: HolderEvents,
    pub inventory: Vec<InventoryDevice>,
}

impl Gateway {
    pub async fn connect(control: &Path) -> Gateway {
        let (client, mut events) = HolderClient::connect(control).await.unwrap();
        let mut inventory = Vec::new();
        loop {
            match next(&mut events).await {
                HolderEvent::Device(device) => inventory.push(device),
                HolderEvent::InventoryComplete => return Gateway { client, events, inventory },
                event => panic!("the inventory comes first, not {event:?}"),
            }
        }
    }

    pub async fn next(&mut self) -> HolderEvent {
        next(&mut self.events).await
    }

    pub async fn connected(&mut self) -> u64 {
        match self.next().await {
            HolderEvent::Connected { connection, .. } => connection,
            event => panic!("a front end connects, not {event:?}"),
        }
    }

    pub async fn message(&mut self) -> HeldMessage {
        match self.next().await {
            HolderEvent::Message(message) => message,
            event => panic!("a message arrives, not {event:?}"),
        }
    }

    pub async fn disconnected(&mut self) -> u64 {
        match self.next().await {
            HolderEvent::Disconnected { connection, .. } => connection,
            event => panic!("a front end disconnects, not {event:?}"),
        }
    }

    /// Waits until the holder has handled everything that it received before, and checks that nothing
    /// happened.
    pub async fn expect_silence(&mut self) {
        for _ in 0..20 {
            let refused = self.client.remove("no such device").await;
            assert!(matches!(
                refused,
                Err(holder::ClientError::Refused(holder::HolderRefusal::UnknownDevice(_)))
            ));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let mut next = std::pin::pin!(self.events.next());
        let polled =
            std::future::poll_fn(|context| std::task::Poll::Ready(next.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "nothing happens, not {polled:?}");
    }
}

async fn next(events: &mut HolderEvents) -> HolderEvent {
    tokio::time::timeout(PATIENCE, events.next()).await.expect("an event arrives in time").unwrap()
}

/// Answers a message with this reply and this state.
pub fn answer(message: &HeldMessage, state: &str, reply: &str) -> Done {
    Done {
        device: message.device.clone(),
        connection: message.connection,
        number: message.number,
        state: Some(Bytes::copy_from_slice(state.as_bytes())),
        reply: Some(FrontEndReply { bytes: framed(reply.as_bytes()), fds: Vec::new() }),
        ..Done::default()
    }
}

/// Returns a message of vhost-user with this payload.
pub fn framed(payload: &[u8]) -> Bytes {
    [&[7; 8][..], &(payload.len() as u32).to_le_bytes(), payload].concat().into()
}

/// A model of a front end. It blocks.
pub struct FrontEnd(pub UnixStream);

impl FrontEnd {
    pub fn connect(socket: &Path) -> FrontEnd {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        FrontEnd(stream)
    }

    pub fn send(&self, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_raw(&framed(payload), fds);
    }

    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        let sent =
            rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Receives the payload and the descriptors of a reply.
    pub fn receive(&self) -> (Vec<u8>, Vec<OwnedFd>) {
        let (mut bytes, mut fds) = (vec![0; 12], Vec::new());
        let mut filled = 0;
        while filled < bytes.len() {
            let read = self.read(&mut bytes[filled..], &mut fds);
            assert!(read > 0, "the connection has ended");
            filled += read;
            if filled == 12 {
                let payload = u32::from_le_bytes(*bytes[8..].first_chunk().unwrap());
                bytes.resize(12 + payload as usize, 0);
            }
        }
        (bytes.split_off(12), fds)
    }

    pub fn receive_text(&self) -> String {
        String::from_utf8(self.receive().0).unwrap()
    }

    /// Waits until the holder has disconnected this front end.
    pub fn expect_end(&self) {
        match std::io::Read::read(&mut &self.0, &mut [0]) {
            Ok(read) => assert_eq!(read, 0, "the connection ends without further bytes"),
            // The holder has not read all bytes.
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }

    fn read(&self, space: &mut [u8], fds: &mut Vec<OwnedFd>) -> usize {
        let mut control_space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = RecvAncillaryBuffer::new(&mut control_space);
        let read = rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(space)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let read = read.unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        read.bytes
    }
}

/// Returns a new file that only its inode number distinguishes from others.
pub fn new_file() -> OwnedFd {
    rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

pub fn shared(fd: OwnedFd) -> SharedFd {
    Arc::new(fd)
}

pub fn inode(fd: impl AsFd) -> u64 {
    File::from(fd.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap().ino()
}

/// A descriptor that shows when all its copies are closed.
pub struct Probe {
    pub fd: Option<OwnedFd>,
    other: UnixStream,
}

impl Probe {
    pub fn new() -> Probe {
        let (fd, other) = UnixStream::pair().unwrap();
        other.set_read_timeout(Some(PATIENCE)).unwrap();
        Probe { fd: Some(fd.into()), other }
    }

    pub fn borrow(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().unwrap().as_fd()
    }

    /// Waits until no process has the descriptor.
    pub fn expect_closed(mut self) {
        self.fd = None;
        assert_eq!(std::io::Read::read(&mut self.other, &mut [0]).unwrap(), 0);
    }
}
