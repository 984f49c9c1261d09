//! Creation, mount and check of a target on a simulated drive.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::block::{BLOCK, BLOCK_SIZE};
use uuid::Uuid;

use super::super::drive::Drive;
use super::super::driver::Driver;
use super::super::fsck::{FsckReport, Inspect, check};
use super::super::mailbox::Mailbox;
use super::super::mount::mount;
use super::super::recovery::{TargetSizes, mkfs};
use super::super::store::{BlockStore, MkfsOptions, MountOptions};
use super::super::superblock::{SUPERBLOCKS, Superblock};
use super::super::uring::Waker;
use super::backend::{SimBackend, SimMount};
use super::image::{Image, ImageDrive};
use super::{DriveImage, SimDrive};
use crate::{Result, StoreError};

/// Size of a drive, size of the log and size of the index, which determine the content of a new
/// target.
type Layout = (u64, Option<u64>, Option<u64>);

thread_local! {
    /// Content of new targets. The content depends only on the layout and the UUID, so a simulation
    /// does not notice whether an image was made before.
    static NEW_TARGETS: RefCell<Vec<(Layout, Image)>> = const { RefCell::new(Vec::new()) };
}

/// Returns the content of a new target with the UUID `uuid`.
fn new_target(layout: Layout, uuid: Uuid) -> Result<Image> {
    let known = NEW_TARGETS.with_borrow(|known| {
        known.iter().find(|(other, _)| *other == layout).map(|(_, image)| image.clone())
    });
    let image = match known {
        Some(image) => image,
        None => {
            // The creation must not take random numbers of the simulation, because it happens only
            // once per layout.
            let _seeded = base::entropy::seed_this_thread(0);
            let drive = Arc::new(ImageDrive::new(Image::zeros(layout.0)));
            let shared: Arc<dyn Drive> = Arc::clone(&drive) as Arc<dyn Drive>;
            let (log_bytes, index_bytes) = (layout.1, layout.2);
            let sizes = TargetSizes { uuid: Some(Uuid::nil()), log_bytes, index_bytes };
            mkfs(&shared, &sizes, &mut |_, _| {})?;
            let image = drive.image();
            NEW_TARGETS.with_borrow_mut(|known| known.push((layout, image.clone())));
            image
        }
    };
    let drive = ImageDrive::new(image);
    for offset in (0..SUPERBLOCKS).step_by(BLOCK as usize) {
        let mut copy = vec![0; BLOCK_SIZE];
        drive.read_at(offset, &mut copy)?;
        let superblock = Superblock { uuid, ..Superblock::decode(&copy)? };
        drive.write_at(offset, &superblock.encode())?;
    }
    Ok(drive.image())
}

impl SimDrive {
    /// Creates a target on the drive. The creation takes no simulated time, and the new content is
    /// durable. `options.size` is ignored. Returns the target's uuid.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if the drive is mounted, [`StoreError::InvalidArgument`] if it is too
    /// small.
    pub fn mkfs(&self, options: &MkfsOptions) -> Result<Uuid> {
        if self.is_mounted() {
            return Err(StoreError::InUse("the simulated drive".into()));
        }
        let uuid = options.uuid.unwrap_or_else(base::entropy::uuid);
        let layout = (self.size(), options.log_bytes, options.index_bytes);
        self.restore(&DriveImage(new_target(layout, uuid)?));
        Ok(uuid)
    }

    /// Returns the uuid of the target on the drive.
    ///
    /// # Errors
    /// Those of [`BlockStore::uuid_at`].
    pub fn target_uuid(&self) -> Result<Uuid> {
        Ok(Superblock::read(&ImageDrive::new(self.image().0))?.uuid)
    }

    /// Checks the target on the drive as [`fsck`](fn@crate::fsck) does, in no simulated time. The
    /// check works on a copy of the content, so the drive may be mounted. It does not notice
    /// injected faults of requests.
    ///
    /// # Errors
    /// Those of [`fsck`](fn@crate::fsck).
    pub fn fsck(&self, inspect: Inspect<'_>) -> Result<FsckReport> {
        let drive: Arc<dyn Drive> = Arc::new(ImageDrive::new(self.image().0));
        check(&drive, false, inspect, &mut |_, _| {})
    }
}

impl BlockStore {
    /// Mounts the target on a simulated drive. The caller must [run](Driver::run) the returned
    /// driver. The mount takes simulated time; a kill or a power failure may interrupt it.
    ///
    /// # Errors
    /// Those of [`mount`](Self::mount), and [`StoreError::Io`] if the drive is removed.
    pub async fn mount_simulated(
        drive: &Arc<SimDrive>,
        options: &MountOptions,
    ) -> Result<(Arc<BlockStore>, Driver)> {
        let access = Arc::new(begin(drive, options).await?);
        let shared: Arc<dyn Drive> = Arc::clone(&access) as Arc<dyn Drive>;
        let mounted = mount(&shared, options.expected_uuid, &options.limits());
        drop(shared);
        access.drained().await;
        access.check()?;
        let (core, index) = mounted?;
        core.stages.last().store(options.stages_after, Ordering::Relaxed);
        let mailbox = Mailbox { shared: Arc::default(), waker: Waker::of_task() };
        let path = PathBuf::from(format!("simulated-{}", options.index));
        let store = BlockStore::of(&core, &mailbox, &path, options.index, false);
        let backend = SimBackend::new(access, index, mailbox.clone());
        Ok((Arc::new(store), Driver::simulated(core, backend, mailbox)))
    }
}

/// Begins a mount. Waits briefly for the end of another mount, as for the lock of a real drive.
async fn begin(drive: &Arc<SimDrive>, options: &MountOptions) -> Result<SimMount> {
    const TRIES: usize = 25;
    for _ in 0..TRIES {
        if let Some(access) = SimMount::begin(drive, options.faults.clone()) {
            return Ok(access);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(StoreError::InUse("the simulated drive".into()))
}
