//! [`SimDrive`]: a drive in simulated time, with faults and power failures.
//!
//! **Time.** Requests of the I/O ring complete after a latency that depends on the drive's random
//! numbers. The completions are delivered by timers of the Tokio runtime, whose clock a simulation
//! pauses. Requests that are due at the same tick complete in the order of their exact times.
//!
//! **Blocking operations.** Recovery and checkpoints are synchronous code. Their writes and flushes
//! enter a queue, and succeed at once. The drive executes the queue in order, in simulated time.
//! Blocking reads see the content of the queue. A mount or a checkpoint is complete when the drive
//! has executed its operations, so a crash can hit every point of a checkpoint. Blocking reads take
//! no time. The drive sorts the writes between two flushes by offset, because the index writes its
//! pages in the order of a hash table, which depends on the processor.
//!
//! **Durability.** A completed write is visible, but volatile until a flush that was submitted
//! after the write's completion has completed. A [power failure](SimDrive::power_failure) loses any
//! volatile sectors. The [end of a mount](SimDrive::sever) without a power failure loses only
//! writes that have not completed.

mod backend;
mod faults;
mod image;
mod mount;
mod state;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::block::BLOCK;
use base::clock::Instant;
use rand::Rng;
use rand::rngs::StdRng;

use super::log;
use super::superblock::{SECTOR, SUPERBLOCKS, Superblock};

pub(super) use backend::SimBackend;
pub use faults::{DriveCounts, DriveFault, DriveFaultKind};
use image::{Image, ImageDrive};
use state::State;

/// Latencies of a simulated drive. A request takes its base latency, a random part of the jitter,
/// and the transfer time of its blocks. Timers of Tokio round the end up to a whole millisecond.
#[derive(Debug, Clone)]
pub struct DriveTimes {
    /// Base latency of a read.
    pub read: Duration,
    /// Base latency of a write.
    pub write: Duration,
    /// Base latency of a flush.
    pub flush: Duration,
    /// Maximum random addition.
    pub jitter: Duration,
    /// Transfer time of a block of 4 KiB.
    pub block: Duration,
    /// Probability that a request takes [`slow`](Self::slow) longer.
    pub slow_probability: f64,
    /// Maximum addition for a slow request.
    pub slow: Duration,
}

impl Default for DriveTimes {
    /// Returns the latencies of a solid-state drive with occasional pauses.
    fn default() -> DriveTimes {
        DriveTimes {
            read: Duration::from_micros(80),
            write: Duration::from_micros(20),
            flush: Duration::from_micros(400),
            jitter: Duration::from_micros(300),
            block: Duration::from_micros(2),
            slow_probability: 0.01,
            slow: Duration::from_millis(20),
        }
    }
}

/// The volatile content that survives a power failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survivors {
    /// No volatile write.
    Nothing,
    /// All submitted writes.
    Everything,
    /// A random choice of whole writes.
    Writes,
    /// A random choice of 512-byte sectors.
    Sectors,
}

/// A part of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrivePart {
    /// The two copies of the superblock.
    Superblock,
    /// The redo log.
    Log,
    /// The index.
    Index,
    /// The data area.
    Data,
}

/// A copy of a drive's content. Copies share memory with the drive.
#[derive(Clone)]
pub struct DriveImage(Image);

impl fmt::Debug for DriveImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriveImage").field("size", &self.0.size()).finish_non_exhaustive()
    }
}

/// A simulated drive. It outlives the mounts of its target, as a real drive does.
///
/// All random decisions come from the generator that the creator supplies. A drive is used by one
/// thread, inside a Tokio runtime with time enabled.
pub struct SimDrive {
    state: Mutex<State>,
}

impl fmt::Debug for SimDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDrive").finish_non_exhaustive()
    }
}

impl SimDrive {
    /// Creates a drive of `size` zero bytes. `size` must be a multiple of the block size.
    ///
    /// # Panics
    /// Outside of a Tokio runtime with time enabled.
    #[must_use]
    pub fn new(size: u64, rng: StdRng, times: DriveTimes) -> Arc<SimDrive> {
        assert!(size.is_multiple_of(BLOCK), "the size of a drive must be a multiple of the block size");
        SimDrive::with_image(&DriveImage(Image::zeros(size)), rng, times)
    }

    /// Creates a drive with the content of `image`.
    ///
    /// # Panics
    /// Outside of a Tokio runtime with time enabled.
    #[must_use]
    pub fn with_image(image: &DriveImage, rng: StdRng, times: DriveTimes) -> Arc<SimDrive> {
        let state = State::new(image.0.clone(), rng, times);
        Arc::new(SimDrive { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the drive and completes all requests that are due.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.advance(Instant::now());
        state
    }

    /// Returns the size of the drive, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.lock().cache.size()
    }

    /// Whether a store has mounted the drive's target.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.lock().mounted
    }

    /// Returns the counts of requests and of faults.
    #[must_use]
    pub fn counts(&self) -> DriveCounts {
        self.lock().counts
    }

    /// Returns a hash of all events of the drive and of their times.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// Injects a fault into later requests. Several faults may be active at a time.
    pub fn inject(&self, fault: DriveFault) {
        self.lock().faults.arm(fault);
    }

    /// Ends all injected faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Ends the current mount, as a kill of the store's process does. Each request in progress
    /// either completes or has no effect. From now on, requests of this mount do not reach the
    /// drive.
    pub fn sever(&self) {
        self.now().sever();
    }

    /// Ends the current mount by a power failure. Loses volatile content at random. Returns which
    /// volatile content may have survived.
    pub fn power_failure(&self) -> Survivors {
        let mut state = self.now();
        let survivors = match state.rng.random_range(0..4u32) {
            0 => Survivors::Nothing,
            1 => Survivors::Everything,
            2 => Survivors::Writes,
            _ => Survivors::Sectors,
        };
        state.power_failure(survivors);
        survivors
    }

    /// Like [`power_failure`](Self::power_failure), with a given choice of volatile content.
    pub fn power_failure_with(&self, survivors: Survivors) {
        self.now().power_failure(survivors);
    }

    /// Returns the content that the drive could have after a power failure at this time. The drive
    /// does not change, except for the state of its random numbers.
    #[must_use]
    pub fn image_after_power_failure(&self, survivors: Survivors) -> DriveImage {
        DriveImage(self.now().survived(survivors).0)
    }

    /// Removes the drive. The drive loses volatile content as in a power failure. All requests of
    /// the current mount fail, even after the drive has [returned](Self::reinsert).
    pub fn remove(&self) {
        self.now().remove();
    }

    /// Reinserts a removed drive with its old content.
    pub fn reinsert(&self) {
        self.lock().absent = false;
    }

    /// Creates another drive with the content that reads return at this time, and with the same
    /// latencies.
    #[must_use]
    pub fn copy(&self, rng: StdRng) -> Arc<SimDrive> {
        let times = self.lock().times.clone();
        SimDrive::with_image(&self.image(), rng, times)
    }

    /// Returns a copy of the content that reads return at this time.
    #[must_use]
    pub fn image(&self) -> DriveImage {
        DriveImage(self.now().cache.clone())
    }

    /// Replaces the content of the drive, for example by an older content. Ends the current mount.
    ///
    /// # Panics
    /// If the image has another size than the drive.
    pub fn restore(&self, image: &DriveImage) {
        let mut state = self.now();
        assert_eq!(image.0.size(), state.cache.size(), "the image has the size of the drive");
        state.lose_volatile(Survivors::Nothing);
        state.end_mount();
        state.cache = image.0.clone();
        state.durable = image.0.clone();
    }

    /// Flips one random bit of a random durable block in `range` that is not zero. Returns the
    /// offset of the bit's byte; `None` if the range has no suitable block.
    pub fn flip_bit(&self, range: Range<u64>) -> Option<u64> {
        self.now().flip_bit(range)
    }

    /// Flips one random bit as [`flip_bit`](Self::flip_bit) does, in a part of the target. Returns
    /// `None` if the part has no suitable block, or if the drive has no target.
    pub fn flip_bit_in(&self, part: DrivePart) -> Option<u64> {
        let range = self.part(part)?;
        self.flip_bit(range)
    }

    /// Flips one random bit of the last group of the log but `before`, if the group is durable. Returns the
    /// offset of the bit's byte; `None` if nothing is flipped.
    pub fn flip_bit_at_log_end(&self, before: u64) -> Option<u64> {
        let drive = ImageDrive::new(self.image().0);
        let superblock = Superblock::read(&drive).ok()?;
        let newest = log::newest_sector(&drive, &superblock).ok()??;
        let group = (newest / log::GROUP_SECTORS).checked_sub(before)? * log::GROUP_SECTORS;
        let at = superblock.log.offset + group % superblock.log_sectors() * SECTOR as u64;
        self.flip_bit(at..at + BLOCK)
    }

    /// Returns the range of a part of the target, in bytes; `None` if the drive has no target.
    #[must_use]
    pub fn part(&self, part: DrivePart) -> Option<Range<u64>> {
        let superblock = Superblock::read(&ImageDrive::new(self.image().0)).ok()?;
        let region = match part {
            DrivePart::Superblock => return Some(0..SUPERBLOCKS),
            DrivePart::Log => superblock.log,
            DrivePart::Index => superblock.index,
            DrivePart::Data => superblock.data,
        };
        Some(region.offset..region.offset + region.len)
    }
}
