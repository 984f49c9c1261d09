//! [`VhostDevices`]: serves vhost-user devices, whose connections the holder keeps.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::thread::ThreadClass;
use disk::Disk;
use holder::{
    ClientError, Done, Framing, FrontEndReply, HeldConnection, HeldMessage, HolderClient, HolderEvent,
    HolderEvents, HolderRefusal, InventoryDevice, SharedFd,
};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use vhost::{BlkDevice, DeviceOptions, SessionAnswer, VhostControl, VhostMessage, VhostSession};

/// Pause before another attempt to reach the holder.
const PAUSE: Duration = Duration::from_millis(200);
/// Maximum time of a change of the holder's devices. Other changes wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the holder tells about one device.
enum DeviceNews {
    /// A front end has connected, or was connected before the gateway has.
    Connected(HeldConnection),
    Message {
        connection: u64,
        number: u64,
        message: VhostMessage,
    },
    Disconnected {
        connection: u64,
    },
    /// The gateway has connected to a holder again, which has this connection of the device.
    Resumed {
        connection: Option<u64>,
    },
}

#[derive(Default)]
struct DeviceTable {
    /// The devices that are served, by their names.
    served: BTreeMap<String, ServedDevice>,
    /// Devices with connections that the holder has and that no task serves yet.
    waiting: BTreeMap<String, Vec<DeviceNews>>,
    /// Names of the devices that the holder has.
    known: BTreeSet<String>,
}

/// A device that a task serves.
struct ServedDevice {
    path: PathBuf,
    /// The channel to the task.
    news: mpsc::UnboundedSender<DeviceNews>,
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

/// A device that is being served. Dropping it stops the service. The holder keeps the device until
/// [`VhostDevices::remove_others`].
#[derive(Debug)]
pub(crate) struct VhostDevice {
    name: String,
    devices: VhostDevices,
    /// The channel to the task.
    news: mpsc::WeakUnboundedSender<DeviceNews>,
    task: JoinHandle<()>,
}

impl VhostDevices {
    /// Connects to the holder at `path`, and again whenever the connection is lost. `found` is notified
    /// after each connection.
    pub(crate) fn connect(path: PathBuf, found: Arc<Notify>) -> VhostDevices {
        let (sender, client) = watch::channel(None);
        let devices = VhostDevices { devices: Arc::default(), client };
        let table = Arc::clone(&devices.devices);
        base::task::spawn(ThreadClass::Client, stay_connected(path, table, sender, found));
        devices
    }

    fn lock(&self) -> MutexGuard<'_, DeviceTable> {
        lock(&self.devices)
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
        let none = |_| io::Error::other("the holder does not answer; start it");
        let client = timeout(PATIENCE, self.client()).await.map_err(none)?;
        let (sender, news) = mpsc::unbounded_channel();
        let weak = sender.downgrade();
        let is_known = {
            let mut devices = self.lock();
            for waiting in devices.waiting.remove(name).unwrap_or_default() {
                drop(sender.send(waiting));
            }
            devices.served.insert(name.to_owned(), ServedDevice { path: path.to_owned(), news: sender });
            devices.known.contains(name)
        };
        let task =
            Serving { name: name.to_owned(), path: path.to_owned(), devices: self.clone(), disk, news };
        let task = base::task::spawn(ThreadClass::Client, task.run());
        // From here on, an error removes the device from the table.
        let device = VhostDevice { name: name.to_owned(), devices: self.clone(), news: weak, task };
        if !is_known {
            timeout(PATIENCE, self.add(&client, name, path))
                .await
                .map_err(none)?
                .map_err(io::Error::other)?;
        }
        Ok(device)
    }

    /// Adds a device to the holder, unless the holder has it.
    async fn add(&self, client: &HolderClient, name: &str, path: &Path) -> Result<(), ClientError> {
        match client.add(name, path, Framing::VHOST_USER).await {
            Ok(()) | Err(ClientError::Refused(HolderRefusal::DeviceExists(_))) => {
                self.lock().known.insert(name.to_owned());
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Removes a device from the holder, which disconnects its front end.
    async fn remove(&self, client: &HolderClient, name: &str) -> Result<(), ClientError> {
        match client.remove(name).await {
            Ok(()) | Err(ClientError::Refused(HolderRefusal::UnknownDevice(_))) => {
                self.lock().known.remove(name);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Removes all devices of the holder except these. Devices that cannot be removed now are removed at the
    /// next call.
    pub(crate) async fn remove_others(&self, listed: &[String]) {
        let Ok(client) = timeout(PATIENCE, self.client()).await else {
            return tracing::warn!("the holder does not answer; devices are removed later");
        };
        let others: Vec<String> = {
            let devices = self.lock();
            devices.known.iter().filter(|name| !listed.contains(name)).cloned().collect()
        };
        for name in others {
            match timeout(PATIENCE, self.remove(&client, &name)).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => {
                    tracing::warn!(device = name, error = %e, "the holder has not removed a device")
                }
                Err(_) => tracing::warn!(device = name, "the holder does not answer; it keeps a device"),
            }
            self.lock().waiting.remove(&name);
        }
    }
}

impl Drop for VhostDevice {
    fn drop(&mut self) {
        self.task.abort();
        let mut devices = self.devices.lock();
        let is_own =
            |served: &ServedDevice| self.news.upgrade().is_some_and(|news| news.same_channel(&served.news));
        if devices.served.get(&self.name).is_some_and(is_own) {
            devices.served.remove(&self.name);
        }
    }
}

fn lock(devices: &Mutex<DeviceTable>) -> MutexGuard<'_, DeviceTable> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to the holder again and again, until the gateway ends.
async fn stay_connected(
    path: PathBuf,
    devices: Arc<Mutex<DeviceTable>>,
    sender: watch::Sender<Option<HolderClient>>,
    found: Arc<Notify>,
) {
    let mut is_warned = false;
    while !sender.is_closed() {
        match HolderClient::connect(&path).await {
            Ok((client, events)) => {
                let link = HolderConnection { devices: &devices, sender: &sender, client, found: &found };
                let Err(e) = link.receive(events).await else { return };
                tracing::warn!(error = %e, "the connection to the holder has ended");
                is_warned = false;
            }
            Err(e) if !is_warned => {
                tracing::warn!(error = %e, "cannot reach the holder; trying again");
                is_warned = true;
            }
            Err(e) => tracing::debug!(error = %e, "cannot reach the holder"),
        }
        sender.send_replace(None);
        tokio::time::sleep(PAUSE).await;
    }
}

/// A connection to the holder.
struct HolderConnection<'a> {
    devices: &'a Arc<Mutex<DeviceTable>>,
    sender: &'a watch::Sender<Option<HolderClient>>,
    client: HolderClient,
    found: &'a Notify,
}

impl HolderConnection<'_> {
    /// Receives the events of the holder, and passes them to the tasks of the devices. Returns when the
    /// gateway ends.
    async fn receive(&self, mut events: HolderEvents) -> Result<(), ClientError> {
        let mut connected = BTreeMap::new();
        {
            // The holder tells everything again.
            let mut devices = lock(self.devices);
            devices.known.clear();
            devices.waiting.clear();
        }
        loop {
            let event = tokio::select! {
                event = events.next() => event?,
                () = self.sender.closed() => return Ok(()),
            };
            let (device, news) = match event {
                HolderEvent::Device(InventoryDevice { device, front_end, .. }) => {
                    lock(self.devices).known.insert(device.clone());
                    let Some(front_end) = front_end else { continue };
                    connected.insert(device.clone(), front_end.connection);
                    (device, DeviceNews::Connected(front_end))
                }
                HolderEvent::InventoryComplete => {
                    self.resume(&connected);
                    continue;
                }
                HolderEvent::Connected { device, connection } => {
                    let front_end =
                        HeldConnection { connection, state: Default::default(), kept: Vec::new() };
                    (device, DeviceNews::Connected(front_end))
                }
                HolderEvent::Message(HeldMessage { device, connection, number, bytes, fds }) => {
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
                HolderEvent::Disconnected { device, connection } => {
                    (device, DeviceNews::Disconnected { connection })
                }
                _ => continue,
            };
            let mut devices = lock(self.devices);
            match devices.served.get(&device) {
                Some(served) => drop(served.news.send(news)),
                None => devices.waiting.entry(device).or_default().push(news),
            }
        }
    }

    /// Tells the tasks which connections the holder still has, and adds the devices that it lacks.
    fn resume(&self, connected: &BTreeMap<String, u64>) {
        let devices = lock(self.devices);
        for (name, ServedDevice { path, news }) in &devices.served {
            drop(news.send(DeviceNews::Resumed { connection: connected.get(name).copied() }));
            if !devices.known.contains(name) {
                let (client, name, path) = (self.client.clone(), name.clone(), path.clone());
                let table =
                    VhostDevices { devices: Arc::clone(self.devices), client: self.sender.subscribe() };
                base::task::spawn(ThreadClass::Client, async move {
                    if let Err(e) = table.add(&client, &name, &path).await {
                        tracing::warn!(device = name, error = %e, "cannot add a device to the holder again");
                    }
                });
            }
        }
        drop(devices);
        self.sender.send_replace(Some(self.client.clone()));
        self.found.notify_one();
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
        let mut next = None;
        loop {
            match next.take() {
                Some(front_end) => next = self.serve(front_end).await,
                None => match self.news.recv().await {
                    Some(DeviceNews::Connected(front_end)) => next = Some(front_end),
                    Some(_) => {}
                    None => return,
                },
            }
        }
    }

    /// Serves a front end until it disconnects. Returns the next one if it has connected already.
    async fn serve(&mut self, front_end: HeldConnection) -> Option<HeldConnection> {
        let HeldConnection { connection, state, kept } = front_end;
        let options = DeviceOptions::default();
        let device = match restored(&state, kept, &options) {
            Ok(session) => BlkDevice::with(Arc::clone(&self.disk), session, &options),
            Err(e) => {
                tracing::warn!(device = self.name, error = %e, "cannot continue the session of a front end");
                self.disconnect().await;
                return None;
            }
        };
        let mut control = HolderControl {
            device: &self.name,
            connection,
            client: &self.devices.client,
            news: &mut self.news,
            number: 0,
            last: None,
            has_ended: false,
            next: None,
        };
        let ended = device.run(&mut control).await;
        let HolderControl { has_ended, next, .. } = control;
        if let (Err(_), false) = (ended, has_ended) {
            self.disconnect().await;
        }
        next
    }

    /// Disconnects the front end. It may connect again.
    async fn disconnect(&self) {
        let client = self.devices.client().await;
        let removed = self.devices.remove(&client, &self.name).await;
        let added = self.devices.add(&client, &self.name, &self.path).await;
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
    client: &'a watch::Receiver<Option<HolderClient>>,
    news: &'a mut mpsc::UnboundedReceiver<DeviceNews>,
    /// Number of the message that was received last.
    number: u64,
    /// The last answer. The holder repeats a message if it has not received the answer before the
    /// connection to the gateway was lost.
    last: Option<Done>,
    has_ended: bool,
    /// Another front end, which has connected.
    next: Option<HeldConnection>,
}

impl HolderControl<'_> {
    /// Waits for the next message; `None` if the front end has disconnected.
    async fn next(&mut self) -> Option<VhostMessage> {
        while !self.has_ended {
            match self.news.recv().await {
                Some(DeviceNews::Message { connection, number, message })
                    if connection == self.connection =>
                {
                    if number > self.number {
                        self.number = number;
                        return Some(message);
                    }
                    let last = self.last.clone().filter(|last| last.number == number);
                    if let Some(last) = last
                        && let Err(e) = self.send(last).await
                    {
                        tracing::debug!(device = self.device, error = %e, "cannot repeat an answer");
                    }
                }
                Some(DeviceNews::Disconnected { connection }) if connection == self.connection => {
                    self.has_ended = true;
                }
                Some(DeviceNews::Resumed { connection }) => {
                    self.has_ended = connection != Some(self.connection);
                }
                Some(DeviceNews::Connected(front_end)) if front_end.connection != self.connection => {
                    self.has_ended = true;
                    self.next = Some(front_end);
                }
                Some(_) => {}
                None => self.has_ended = true,
            }
        }
        None
    }

    /// Sends an answer. Without a connection to the holder, has no effect: the holder then repeats the
    /// message, or the front end's connection has ended.
    async fn send(&self, done: Done) -> Result<(), ClientError> {
        let client = self.client.borrow().clone();
        let Some(client) = client else { return Ok(()) };
        match client.done(done).await {
            Err(
                ClientError::Lost(_)
                | ClientError::Replaced
                | ClientError::Protocol(_)
                | ClientError::Refused(HolderRefusal::NotPending { .. }),
            ) => Ok(()),
            answered => answered,
        }
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
        self.last = Some(done.clone());
        self.send(done).await.map_err(io::Error::other)
    }

    async fn disconnected(&mut self) {
        // The holder sends no other message before the answer.
        drop(self.next().await);
    }
}
