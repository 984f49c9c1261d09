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
        // The task of the upkeep ends.
        self.upkeep.notify_one();
    }
}

struct Shared {
    config: GatewayConfig,
    devices: Option<VhostDevices>,
    attached: Mutex<BTreeMap<String, ServedDisk>>,
    /// Held while a disk is attached or detached.
    changing: tokio::sync::Mutex<()>,
    upkeep: Arc<Notify>,
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
        let devices = config.holder.clone().map(VhostDevices::connect);
        let gateway = Gateway(Arc::new(Shared {
            config,
            devices,
            attached: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            upkeep: Arc::default(),
        }));
        for attachment in list {
            base::task::spawn(ThreadClass::Client, attach_again(gateway.weak(), attachment));
        }
        let wanted = Arc::clone(&gateway.0.upkeep);
        base::task::spawn(ThreadClass::Client, keep_up(gateway.weak(), wanted));
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

    /// Returns the attached disk with the name `POOL/DISK`.
    pub(crate) fn attached(&self, place: &str) -> Option<AttachedDisk> {
        self.lock().get(place).map(|served| served.disk.clone())
    }

    /// Attaches a disk and serves its front end. Returns the address of the front end.
    pub(crate) async fn attach(
        &self,
        attachment: DiskAttachment,
        takes_over: bool,
    ) -> Result<DiskReply, GatewayError> {
        let _one_at_a_time = self.0.changing.lock().await;
        // A repeated request has the same answer.
        match self.lock().get(&attachment.place()) {
            Some(served) if served.attachment == attachment => {
                return Ok(DiskReply::Attached(served.front_end.address(&attachment.front_end)));
            }
            Some(_) => return Err(GatewayError::AttachedHere(attachment.place())),
            None => {}
        }
        // The list first: a gateway that ends meanwhile attaches the disk when it starts again.
        self.save_with(Some(&attachment))?;
        let address = self.serve(&attachment, takes_over).await;
        if address.is_err() {
            self.save_with(None)?;
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
        match self.serve(attachment, false).await {
            Ok(_) => true,
            Err(GatewayError::Disk(e @ (vdisk::Error::NoSuchDisk(_) | vdisk::Error::Attached { .. }))) => {
                tracing::warn!(disk = attachment.place(), error = %e, "a disk is not attached again");
                if let Err(e) = self.save_without(&attachment.place()) {
                    tracing::warn!(error = %e, "the list of attachments cannot be written");
                }
                true
            }
            Err(e) => {
                tracing::warn!(disk = attachment.place(), error = %e, "cannot attach a disk yet");
                false
            }
        }
    }

    /// Detaches a disk, and disconnects its guest or clients.
    pub(crate) async fn detach(&self, place: &str) -> Result<(), GatewayError> {
        let _one_at_a_time = self.0.changing.lock().await;
        let Some(served) = self.lock().remove(place) else {
            return Err(GatewayError::NotHere(place.to_owned()));
        };
        self.save_without(place)?;
        let ServedDisk { disk, front_end, .. } = served;
        front_end.stop().await;
        Ok(disk.detach().await?)
    }

    /// Saves the list of attachments, with one more.
    fn save_with(&self, one: Option<&DiskAttachment>) -> std::io::Result<()> {
        let mut list: Vec<DiskAttachment> =
            self.lock().values().map(|served| served.attachment.clone()).collect();
        list.extend(one.cloned());
        self.0.config.attachments.save(&list)
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
