//! [`VhostDevices`]: serves vhost-user devices, whose connections the holder keeps.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::thread::ThreadClass;
use disk::Disk;
use holder::{
    Done, Framing, FrontEndReply, HeldConnection, HeldMessage, HolderClient, HolderEvent, SharedFd,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vhost::{BlkDevice, DeviceOptions, SessionAnswer, VhostControl, VhostMessage, VhostSession};

/// Pause before another attempt to reach the holder.
const PAUSE: Duration = Duration::from_millis(200);

/// What the holder tells about one device.
enum DeviceNews {
    /// A front end has connected, or was connected before the gateway has started.
    Connected(HeldConnection),
    Message {
        connection: u64,
        number: u64,
        message: VhostMessage,
    },
    Disconnected {
        connection: u64,
    },
}

#[derive(Default)]
struct DeviceTable {
    /// Channels to the tasks of the devices, by the devices' names.
    tasks: BTreeMap<String, mpsc::UnboundedSender<DeviceNews>>,
    /// Devices with connections that the holder has and that no task serves yet.
    waiting: BTreeMap<String, Vec<DeviceNews>>,
    /// Names of the devices that the holder has.
    known: Vec<String>,
}

/// The connection to the holder, and the devices.
#[derive(Clone)]
pub(crate) struct VhostDevices {
    devices: Arc<Mutex<DeviceTable>>,
    /// The connection to the holder; `None` while there is none.
    client: watch::Receiver<Option<HolderClient>>,
}

impl std::fmt::Debug for VhostDevices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VhostDevices")
    }
}

/// A device that is being served. Dropping it stops the service, but leaves the device with the holder.
#[derive(Debug)]
pub(crate) struct VhostDevice {
    name: String,
    devices: VhostDevices,
    task: JoinHandle<()>,
}

impl VhostDevices {
    /// Connects to the holder at `path`, and again whenever the connection is lost.
    pub(crate) fn connect(path: PathBuf) -> VhostDevices {
        let (sender, client) = watch::channel(None);
        let devices = Arc::new(Mutex::new(DeviceTable::default()));
        let task = receive(path, Arc::clone(&devices), sender);
        base::task::spawn(ThreadClass::Client, task);
        VhostDevices { devices, client }
    }

    fn lock(&self) -> MutexGuard<'_, DeviceTable> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connection to the holder. Waits until there is one.
    async fn client(&self) -> HolderClient {
        let mut client = self.client.clone();
        loop {
            if let Some(client) = &*client.borrow_and_update() {
                return client.clone();
            }
            if client.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Begins to serve a device at the socket `path`.
    pub(crate) async fn start(
        &self,
        name: &str,
        path: &Path,
        disk: Arc<dyn Disk>,
    ) -> io::Result<VhostDevice> {
        let (sender, news) = mpsc::unbounded_channel();
        let client = self.client().await;
        let is_known = {
            let mut devices = self.lock();
            for waiting in devices.waiting.remove(name).unwrap_or_default() {
                drop(sender.send(waiting));
            }
            devices.tasks.insert(name.to_owned(), sender);
            devices.known.iter().any(|known| known == name)
        };
        if !is_known && let Err(e) = client.add(name, path, Framing::VHOST_USER).await {
            self.lock().tasks.remove(name);
            return Err(io::Error::other(e));
        }
        let task =
            Serving { name: name.to_owned(), path: path.to_owned(), devices: self.clone(), disk, news };
        let task = base::task::spawn(ThreadClass::Client, task.run());
        Ok(VhostDevice { name: name.to_owned(), devices: self.clone(), task })
    }
}

impl VhostDevice {
    /// Stops the service and removes the device, which disconnects its front end.
    pub(crate) async fn remove(self) {
        let client = self.devices.client().await;
        if let Err(e) = client.remove(&self.name).await {
            tracing::warn!(device = self.name, error = %e, "the holder has not removed a device");
        }
        self.devices.lock().known.retain(|known| *known != self.name);
    }
}

impl Drop for VhostDevice {
    fn drop(&mut self) {
        self.task.abort();
        self.devices.lock().tasks.remove(&self.name);
    }
}

/// Receives the events of the holder, and passes them to the tasks of the devices.
async fn receive(
    path: PathBuf,
    devices: Arc<Mutex<DeviceTable>>,
    sender: watch::Sender<Option<HolderClient>>,
) {
    let lock = || devices.lock().unwrap_or_else(PoisonError::into_inner);
    while !sender.is_closed() {
        let (client, mut events) = match HolderClient::connect(&path).await {
            Ok(connected) => connected,
            Err(e) => {
                tracing::warn!(error = %e, "cannot reach the holder");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        lock().known.clear();
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = sender.closed() => return,
            };
            let (device, news) = match event {
                Ok(HolderEvent::Device(device)) => {
                    lock().known.push(device.device.clone());
                    match device.front_end {
                        Some(front_end) => (device.device, DeviceNews::Connected(front_end)),
                        None => continue,
                    }
                }
                Ok(HolderEvent::InventoryComplete) => {
                    sender.send_replace(Some(client.clone()));
                    continue;
                }
                Ok(HolderEvent::Connected { device, connection }) => {
                    let front_end =
                        HeldConnection { connection, state: Default::default(), kept: Vec::new() };
                    (device, DeviceNews::Connected(front_end))
                }
                Ok(HolderEvent::Message(message)) => {
                    let HeldMessage { device, connection, number, bytes, fds } = message;
                    let fds = match fds.into_iter().map(owned).collect::<io::Result<Vec<OwnedFd>>>() {
                        Ok(fds) => fds,
                        Err(e) => {
                            tracing::warn!(device, error = %e, "cannot take over descriptors of a message");
                            continue;
                        }
                    };
                    let message = VhostMessage { bytes: bytes.to_vec(), fds };
                    (device, DeviceNews::Message { connection, number, message })
                }
                Ok(HolderEvent::Disconnected { device, connection }) => {
                    (device, DeviceNews::Disconnected { connection })
                }
                Ok(_) => continue,
                Err(e) => {
                    tracing::warn!(error = %e, "the connection to the holder has ended");
                    break;
                }
            };
            let mut devices = lock();
            match devices.tasks.get(&device) {
                Some(task) => drop(task.send(news)),
                None => devices.waiting.entry(device).or_default().push(news),
            }
        }
        sender.send_replace(None);
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns a descriptor of its own.
fn owned(fd: SharedFd) -> io::Result<OwnedFd> {
    Arc::try_unwrap(fd).or_else(|shared| shared.try_clone())
}

/// The task of a device: serves one front end after the other.
struct Serving {
    name: String,
    path: PathBuf,
    devices: VhostDevices,
    disk: Arc<dyn Disk>,
    news: mpsc::UnboundedReceiver<DeviceNews>,
}

impl Serving {
    async fn run(mut self) {
        while let Some(news) = self.news.recv().await {
            if let DeviceNews::Connected(front_end) = news {
                self.serve(front_end).await;
            }
        }
    }

    /// Serves a front end until it disconnects.
    async fn serve(&mut self, front_end: HeldConnection) {
        let HeldConnection { connection, state, kept } = front_end;
        let options = DeviceOptions::default();
        let device = match restored(&state, kept, &options) {
            Ok(session) => BlkDevice::with(Arc::clone(&self.disk), session, &options),
            Err(e) => {
                tracing::warn!(device = self.name, error = %e, "cannot continue the session of a front end");
                return self.disconnect().await;
            }
        };
        let client = self.devices.client().await;
        let mut control = HolderControl {
            device: &self.name,
            connection,
            client,
            news: &mut self.news,
            number: 0,
            has_ended: false,
        };
        let ended = device.run(&mut control).await;
        if let (Err(_), false) = (ended, control.has_ended) {
            self.disconnect().await;
        }
    }

    /// Disconnects the front end. It may connect again.
    async fn disconnect(&self) {
        let client = self.devices.client().await;
        let removed = client.remove(&self.name).await;
        let added = client.add(&self.name, &self.path, Framing::VHOST_USER).await;
        if let Err(e) = removed.and(added) {
            tracing::warn!(device = self.name, error = %e, "cannot disconnect a front end");
        }
    }
}

/// Returns the session that the holder has kept, or a new one.
fn restored(state: &[u8], kept: Vec<(u64, SharedFd)>, options: &DeviceOptions) -> io::Result<VhostSession> {
    if state.is_empty() {
        return Ok(VhostSession::new(options.queues));
    }
    let kept = kept.into_iter().map(|(key, fd)| Ok((key, owned(fd)?))).collect::<io::Result<Vec<_>>>()?;
    VhostSession::restore(state, kept).map_err(io::Error::other)
}

/// The way to a front end by the holder.
struct HolderControl<'a> {
    device: &'a str,
    connection: u64,
    client: HolderClient,
    news: &'a mut mpsc::UnboundedReceiver<DeviceNews>,
    /// Number of the message that was received last.
    number: u64,
    has_ended: bool,
}

impl HolderControl<'_> {
    /// Waits for the next message; `None` if the front end has disconnected.
    async fn next(&mut self) -> Option<VhostMessage> {
        while !self.has_ended {
            match self.news.recv().await {
                Some(DeviceNews::Message { connection, number, message })
                    if connection == self.connection =>
                {
                    self.number = number;
                    return Some(message);
                }
                Some(DeviceNews::Disconnected { connection }) if connection == self.connection => {
                    self.has_ended = true;
                }
                Some(_) => {}
                None => self.has_ended = true,
            }
        }
        None
    }
}

impl VhostControl for HolderControl<'_> {
    async fn receive(&mut self) -> io::Result<Option<VhostMessage>> {
        Ok(self.next().await)
    }

    async fn answer(&mut self, answer: SessionAnswer) -> io::Result<()> {
        let SessionAnswer { state, keep, drop, reply, .. } = answer;
        let done = Done {
            device: self.device.to_owned(),
            connection: self.connection,
            number: self.number,
            state: Some(state),
            keep: keep.into_iter().map(|(key, fd)| (key, Arc::new(fd))).collect(),
            drop,
            reply: reply
                .map(|(bytes, fds)| FrontEndReply { bytes, fds: fds.into_iter().map(Arc::new).collect() }),
            close: false,
        };
        self.client.done(done).await.map_err(io::Error::other)
    }

    async fn disconnected(&mut self) {
        // The holder sends no other message before the answer.
        drop(self.next().await);
    }
}
