//! [`Gateway`]: the attached disks of this process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::clock::WallClock;
use base::thread::ThreadClass;
use client::Client;
use disk::Disk;
use tokio::sync::Notify;
use vdisk::{AttachOptions, AttachedDisk, DiskWorker, Disks, OpenSession};
use wire::{DiskReply, FrontEnd};

use crate::attachments::{AttachmentFile, DiskAttachment};
use crate::front_end::ServedFrontEnd;
use crate::vhost_devices::VhostDevices;

/// First pause before another attempt to attach a disk or to do the upkeep. It doubles up to
/// [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// The reason why a gateway cannot start, or cannot execute a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// The disk is attached here already.
    #[error("the disk \"{0}\" is attached to this gateway already, in another way; detach it first")]
    AttachedHere(String),
    /// The disk is not attached to this gateway.
    #[error("the disk \"{0}\" is not attached to this gateway")]
    NotHere(String),
    /// The front end cannot be served.
    #[error("cannot serve {front_end}: {source}")]
    FrontEnd {
        /// The front end.
        front_end: FrontEnd,
        /// Why.
        source: std::io::Error,
    },
    /// The list of attachments cannot be read or written.
    #[error("the list of attachments: {0}")]
    List(#[from] std::io::Error),
    /// An operation on disks has failed.
    #[error(transparent)]
    Disk(#[from] vdisk::Error),
}

/// How a gateway works.
pub struct GatewayConfig {
    /// Name of the gateway, which stays the same when it starts again.
    pub name: String,
    /// A client for the management of disks.
    pub client: Client,
    /// Opens the exclusive session of a disk.
    pub open_session: OpenSession,
    /// The holder's control socket; `None` if there is no holder.
    pub holder: Option<PathBuf>,
    /// The list of attachments.
    pub attachments: AttachmentFile,
    /// Time of day.
    pub clock: WallClock,
}

/// A gateway. Clones are the same gateway.
#[derive(Clone)]
pub struct Gateway(Arc<Shared>);

impl Drop for Shared {
    fn drop(&mut self) {
        // The tasks of the upkeep and of the holder end.
        self.upkeep.notify_one();
        self.holder_found.notify_one();
    }
}

struct Shared {
    config: GatewayConfig,
    devices: Option<VhostDevices>,
    attached: Mutex<BTreeMap<String, ServedDisk>>,
    /// Held while a disk is attached or detached.
    changing: tokio::sync::Mutex<()>,
    upkeep: Arc<Notify>,
    /// Notified when a holder has listed its devices.
    holder_found: Arc<Notify>,
}

/// A disk with its front end.
struct ServedDisk {
    attachment: DiskAttachment,
    disk: AttachedDisk,
    front_end: ServedFrontEnd,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("name", &self.0.config.name).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Starts a gateway, which attaches the disks of its list again in the background. Must run in a tokio
    /// runtime.
    ///
    /// # Errors
    /// If the list of attachments cannot be read.
    pub fn start(config: GatewayConfig) -> Result<Gateway, GatewayError> {
        let list = config.attachments.load()?;
        let holder_found = Arc::<Notify>::default();
        let holder = config.holder.clone();
        let devices = holder.map(|path| VhostDevices::connect(path, Arc::clone(&holder_found)));
        let gateway = Gateway(Arc::new(Shared {
            config,
            devices,
            attached: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            upkeep: Arc::default(),
            holder_found: Arc::clone(&holder_found),
        }));
        for attachment in list {
            base::task::spawn(ThreadClass::Client, attach_again(gateway.weak(), attachment));
        }
        let wanted = Arc::clone(&gateway.0.upkeep);
        base::task::spawn(ThreadClass::Client, keep_up(gateway.weak(), wanted));
        base::task::spawn(ThreadClass::Client, remove_unlisted(gateway.weak(), holder_found));
        Ok(gateway)
    }

    /// Returns a handle that does not keep the gateway alive. When the last gateway is dropped, its front
    /// ends are no longer served, as if its process were killed.
    fn weak(&self) -> Weak<Shared> {
        Arc::downgrade(&self.0)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ServedDisk>> {
        self.0.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name of the gateway.
    pub(crate) fn name(&self) -> &str {
        &self.0.config.name
    }

    /// Returns the management of a pool's disks.
    pub(crate) fn disks(&self, pool: &str) -> vdisk::Result<Disks> {
        Disks::open(&self.0.config.client, pool, self.0.config.clock.clone())
    }

    /// Returns the attached disk with the name `POOL/DISK`, unless another process has taken it over.
    pub(crate) fn attached(&self, place: &str) -> Option<AttachedDisk> {
        self.lock().get(place).map(|served| served.disk.clone()).filter(|disk| disk.end().is_none())
    }

    /// Attaches a disk and serves its front end. Returns the address of the front end.
    pub(crate) async fn attach(
        &self,
        attachment: DiskAttachment,
        takes_over: bool,
    ) -> Result<DiskReply, GatewayError> {
        let _one_at_a_time = self.0.changing.lock().await;
        let place = attachment.place();
        let ended = {
            let mut attached = self.lock();
            match attached.get(&place) {
                // Another process has taken the disk over.
                Some(served) if served.disk.end().is_some() => attached.remove(&place),
                // A repeated request has the same answer.
                Some(served) if served.attachment == attachment => {
                    return Ok(DiskReply::Attached(served.front_end.address(&attachment.front_end)));
                }
                Some(_) => return Err(GatewayError::AttachedHere(place)),
                None => None,
            }
        };
        let list = &self.0.config.attachments;
        let before = list.load()?;
        let mut others = before.clone();
        others.retain(|one| one.place() != place);
        let is_other = before.len() != others.len() && !before.contains(&attachment);
        if ended.is_some() || is_other {
            drop(ended);
            list.save(&others)?;
            self.remove_unlisted_devices().await;
        }
        // The list first: a gateway that ends meanwhile attaches the disk when it starts again.
        others.push(attachment.clone());
        list.save(&others)?;
        let address = self.serve(&attachment, takes_over).await;
        if address.is_err() {
            list.save(&before)?;
            self.remove_unlisted_devices().await;
        }
        Ok(DiskReply::Attached(address?))
    }

    async fn serve(&self, attachment: &DiskAttachment, takes_over: bool) -> Result<FrontEnd, GatewayError> {
        let GatewayConfig { name, open_session, clock, .. } = &self.0.config;
        let options = AttachOptions {
            gateway: name.clone(),
            takes_over,
            open_session: Arc::clone(open_session),
            clock: clock.clone(),
        };
        let disk = AttachedDisk::attach(&attachment.pool, &attachment.disk, options).await?;
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        let served = ServedFrontEnd::start(attachment, shared, self.0.devices.as_ref()).await;
        let front_end = match served {
            Ok(front_end) => front_end,
            Err(source) => {
                disk.detach().await?;
                return Err(GatewayError::FrontEnd { front_end: attachment.front_end.clone(), source });
            }
        };
        let address = front_end.address(&attachment.front_end);
        let served = ServedDisk { attachment: attachment.clone(), disk, front_end };
        self.lock().insert(attachment.place(), served);
        Ok(address)
    }

    /// Attaches a disk of the list again, after the gateway has started. Returns false if it must try once
    /// more.
    async fn attach_again(&self, attachment: &DiskAttachment) -> bool {
        let _one_at_a_time = self.0.changing.lock().await;
        let is_listed = self.0.config.attachments.load().map(|list| list.contains(attachment));
        if self.lock().contains_key(&attachment.place()) || matches!(is_listed, Ok(false)) {
            // An operator has attached or detached the disk meanwhile.
            return true;
        }
        match self.serve(attachment, false).await {
            Ok(_) => true,
            Err(GatewayError::Disk(e @ (vdisk::Error::NoSuchDisk(_) | vdisk::Error::Attached { .. }))) => {
                tracing::warn!(disk = attachment.place(), error = %e, "a disk is not attached again");
                if let Err(e) = self.save_without(&attachment.place()) {
                    tracing::warn!(error = %e, "the list of attachments cannot be written");
                }
                self.remove_unlisted_devices().await;
                true
            }
            Err(e) => {
                tracing::warn!(disk = attachment.place(), error = %e, "cannot attach a disk yet");
                false
            }
        }
    }

    /// Detaches a disk, and disconnects its guest or clients. Also gives up a disk that this gateway has
    /// not attached again yet.
    pub(crate) async fn detach(&self, pool: &str, name: &str) -> Result<(), GatewayError> {
        let _one_at_a_time = self.0.changing.lock().await;
        let place = format!("{pool}/{name}");
        let served = self.lock().remove(&place);
        match served {
            Some(ServedDisk { disk, front_end, .. }) => {
                drop(front_end);
                if let Err(e) = disk.detach().await {
                    // Its session may have ended. This one may change the record, too.
                    tracing::debug!(disk = place, error = %e, "releasing a disk in another session");
                    self.disks(pool)?.release(name, self.name()).await?;
                }
            }
            None => {
                let disks = self.disks(pool)?;
                let is_owner = match disks.stat(name).await {
                    Ok(header) => header.owner.is_some_and(|owner| owner.gateway == *self.name()),
                    Err(vdisk::Error::NoSuchDisk(_)) => false,
                    Err(e) => return Err(e.into()),
                };
                let is_listed = self.0.config.attachments.load()?.iter().any(|one| one.place() == place);
                if !is_owner && !is_listed {
                    return Err(GatewayError::NotHere(place));
                }
                disks.release(name, self.name()).await?;
            }
        }
        // The list last: a gateway that ends meanwhile attaches the disk again, so nothing is left behind.
        self.save_without(&place)?;
        self.remove_unlisted_devices().await;
        Ok(())
    }

    /// Removes the holder's devices whose disks are not listed: the gateway ended while it detached them,
    /// or another gateway has taken them over. The caller holds the lock on changes.
    async fn remove_unlisted_devices(&self) {
        let Some(devices) = &self.0.devices else { return };
        match self.0.config.attachments.load() {
            Ok(list) => {
                let listed: Vec<String> = list.iter().map(DiskAttachment::place).collect();
                devices.remove_others(&listed).await;
            }
            Err(e) => tracing::warn!(error = %e, "the list of attachments cannot be read"),
        }
    }

    fn save_without(&self, place: &str) -> std::io::Result<()> {
        let list: Vec<DiskAttachment> =
            self.0.config.attachments.load()?.into_iter().filter(|one| one.place() != place).collect();
        self.0.config.attachments.save(&list)
    }

    /// Lets the upkeep look for work.
    pub(crate) fn wake_upkeep(&self) {
        self.0.upkeep.notify_one();
    }

    async fn upkeep(&self) -> vdisk::Result<()> {
        let GatewayConfig { name, open_session, client, .. } = &self.0.config;
        let worker = DiskWorker { gateway: name.clone(), open_session: Arc::clone(open_session) };
        let mut result = Ok(());
        for pool in client.pools().await? {
            let done = self.disks(&pool.name)?.upkeep(&worker).await;
            result = result.and(done.map(drop));
        }
        result
    }
}

/// Attaches a disk of the list again.
async fn attach_again(gateway: Weak<Shared>, attachment: DiskAttachment) {
    let mut pause = PAUSE;
    while let Some(shared) = gateway.upgrade() {
        let is_done = Gateway(shared).attach_again(&attachment).await;
        if is_done {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Does the upkeep of the disks of all pools: at the start, and after each request that leaves work.
async fn keep_up(gateway: Weak<Shared>, wanted: Arc<Notify>) {
    let mut pause = PAUSE;
    while let Some(shared) = gateway.upgrade() {
        // The handle must not live while the task waits.
        let outcome = Gateway(shared).upkeep().await;
        match outcome {
            Ok(()) => {
                pause = PAUSE;
                wanted.notified().await;
            }
            Err(e) => {
                match e {
                    vdisk::Error::InUse(_) => tracing::debug!(error = %e, "the upkeep of disks waits"),
                    e => tracing::warn!(error = %e, "the upkeep of disks has failed; trying again"),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// Removes devices that no disk needs, after each connection to a holder.
async fn remove_unlisted(gateway: Weak<Shared>, holder_found: Arc<Notify>) {
    loop {
        holder_found.notified().await;
        let Some(shared) = gateway.upgrade() else { return };
        let _one_at_a_time = shared.changing.lock().await;
        Gateway(Arc::clone(&shared)).remove_unlisted_devices().await;
    }
}
