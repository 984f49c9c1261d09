//! [`LogSpace`]: the positions in the log, and the room in its ring.

use super::log::{GROUP_SECTORS, group_sectors};
use super::superblock::SECTOR;

/// Maximum size of the changes of one transaction on a target with a large log, in bytes.
const MAX_RECORD: usize = 16 << 20;
/// Part of the room behind a checkpoint that transactions may use before the checkpoint has made
/// any progress, in thousandths.
const AT_ONCE: u64 = 250;

/// Positions in the log, as sequence numbers of sectors, and the room in its ring.
///
/// While a checkpoint runs, transactions may use only a part of the remaining room: the part grows
/// with the progress of the checkpoint. So writes slow down if they fill the log faster than the
/// checkpoint frees it, but they do not stop until the checkpoint ends.
#[derive(Debug)]
pub(crate) struct LogSpace {
    /// Number of sectors in the ring.
    ring: u64,
    /// The first sector that recovery still needs.
    start: u64,
    /// The next group's first sector.
    next: u64,
    /// All sectors before this one are flushed.
    flushed: u64,
    /// All sectors before this one were flushed, and the log states that. After a mount, this includes
    /// the first group of the mount, which is flushed but states only what is before it.
    witnessed: u64,
    /// The sector after the last group that has transactions.
    content_end: u64,
    checkpoint: Option<LogCheckpoint>,
}

/// A checkpoint that will free a part of the log.
#[derive(Debug, Clone, Copy)]
struct LogCheckpoint {
    /// The checkpoint frees the log before this sector.
    position: u64,
    /// Progress of the checkpoint, in thousandths.
    progress: u64,
}

impl LogSpace {
    /// The space of a log of `ring` sectors, of which the sectors from `start` to `next` are flushed
    /// and not in the index yet.
    pub(crate) fn new(start: u64, next: u64, ring: u64) -> LogSpace {
        let space = LogSpace {
            ring,
            start,
            next,
            flushed: next,
            witnessed: next,
            content_end: next,
            checkpoint: None,
        };
        space.check();
        space
    }

    /// Checks the order of the positions. A violation is a defect of this program, and continuing
    /// could overwrite sectors that recovery needs.
    fn check(&self) {
        assert!(
            self.start <= self.flushed
                && self.witnessed <= self.flushed
                && self.flushed <= self.next
                && self.content_end <= self.next
                && self.next - self.start <= self.ring,
            "the positions in the log are wrong: {self:?}"
        );
    }

    /// Returns the maximum size of the changes of one transaction, in bytes.
    pub(crate) fn max_record(&self) -> usize {
        (self.ring as usize * SECTOR / 4).min(MAX_RECORD)
    }

    /// Returns the sector at which the next group starts.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the sector before which all sectors are flushed.
    pub(crate) fn flushed(&self) -> u64 {
        self.flushed
    }

    /// Returns the sector before which all sectors were flushed, according to a durable sector.
    pub(crate) fn witnessed(&self) -> u64 {
        self.witnessed
    }

    /// Whether recovery needs no sector.
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.start
    }

    /// Returns the size of the part of the log that recovery still needs, and the size of the log, in
    /// bytes.
    pub(crate) fn used_bytes(&self) -> (u64, u64) {
        ((self.next - self.start) * SECTOR as u64, self.ring * SECTOR as u64)
    }

    /// Splits `sectors` sectors at `sequence` where the ring begins again. Returns the slots of the
    /// parts and their numbers of sectors.
    pub(crate) fn slots(&self, sequence: u64, sectors: u64) -> [(u64, u64); 2] {
        let slot = sequence % self.ring;
        let first = sectors.min(self.ring - slot);
        [(slot, first), (0, sectors - first)]
    }

    /// Whether transactions with `bytes` bytes of records, which belong to no group yet, may be
    /// applied. All applied transactions fit into the log: a checkpoint makes room in the log, but it
    /// begins only when all applied transactions are in the log.
    pub(crate) fn admits(&self, bytes: usize) -> bool {
        let position = self.checkpoint.map_or(self.start, |checkpoint| checkpoint.position);
        let limit = position + self.usable_now(self.start + self.ring - position);
        // Leave room for groups that only state what was flushed.
        self.next + group_sectors(bytes) + 2 * GROUP_SECTORS <= limit
    }

    /// Returns the part of `room` that transactions may use now. `room` is space that must suffice
    /// until the checkpoint has ended. Without a checkpoint, this is all of `room`.
    pub(crate) fn usable_now(&self, room: u64) -> u64 {
        self.checkpoint.map_or(room, |LogCheckpoint { progress, .. }| {
            room * (AT_ONCE + progress * (1000 - AT_ONCE) / 1000) / 1000
        })
    }

    /// Whether `bytes` bytes of records fit into an empty log.
    pub(crate) fn has_ring_for(&self, bytes: usize) -> bool {
        group_sectors(bytes) + 2 * GROUP_SECTORS <= self.ring
    }

    /// Returns the maximum size of a record that [`has_ring_for`](Self::has_ring_for) accepts,
    /// approximately, in bytes.
    pub(crate) fn ring_bytes(&self) -> u64 {
        (self.ring - 2 * GROUP_SECTORS) * SECTOR as u64
    }

    /// Whether a group of `sectors` sectors fits into the log.
    pub(crate) fn fits(&self, sectors: u64) -> bool {
        self.next + sectors + GROUP_SECTORS <= self.start + self.ring
    }

    /// Whether a checkpoint should start, so that the log gets room. The rest of the log must suffice
    /// for the transactions that arrive while the checkpoint runs.
    pub(crate) fn needs_room(&self) -> bool {
        self.next - self.start > self.ring / 2
    }

    /// Whether the log does not state yet that its whole content was flushed.
    pub(crate) fn wants_witness(&self) -> bool {
        self.witnessed < self.content_end
    }

    /// Takes the sectors of a new group. Returns the first of them.
    pub(crate) fn append(&mut self, sectors: u64, has_transactions: bool) -> u64 {
        let first = self.next;
        self.next += sectors;
        if has_transactions {
            self.content_end = self.next;
        }
        self.check();
        first
    }

    /// Records that the group that ends before sector `end` is flushed. The group states that the
    /// sectors before `witnessed` were flushed.
    pub(crate) fn flushed_group(&mut self, end: u64, witnessed: u64) {
        assert!(self.flushed < end, "groups are flushed in order: {end}, {self:?}");
        self.flushed = end;
        self.witnessed = self.witnessed.max(witnessed);
        self.check();
    }

    /// Records that a checkpoint has begun, which will free the log before sector `position`.
    pub(crate) fn checkpoint_began(&mut self, position: u64) {
        assert!(self.start <= position && position <= self.next, "{position}, {self:?}");
        self.checkpoint = Some(LogCheckpoint { position, progress: 0 });
    }

    /// Records the progress of the checkpoint, in thousandths. The progress decreases if the checkpoint
    /// starts again.
    pub(crate) fn checkpoint_advanced(&mut self, progress: u64) {
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.progress = progress.min(1000);
        }
    }

    /// Records that the checkpoint has succeeded, which frees a part of the log.
    pub(crate) fn checkpoint_ended(&mut self) {
        if let Some(checkpoint) = self.checkpoint.take() {
            self.start = checkpoint.position;
            self.check();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 1024;

    /// Appends and flushes groups of 8 sectors while transactions are admitted.
    fn fill(log: &mut LogSpace) -> u64 {
        let before = log.next();
        while log.admits(8 * 480) {
            let first = log.append(8, true);
            log.flushed_group(first + 8, first);
        }
        log.next() - before
    }

    #[test]
    fn the_log_admits_transactions_until_only_room_for_empty_groups_is_left() {
        let mut log = LogSpace::new(40, 40, RING);
        assert_eq!(fill(&mut log), RING - 2 * GROUP_SECTORS);
        assert!(log.fits(8) && !log.fits(16) && log.needs_room());
    }

    #[test]
    fn the_room_for_transactions_grows_with_the_progress_of_the_checkpoint() {
        let mut log = LogSpace::new(0, 0, RING);
        while !log.needs_room() {
            let first = log.append(8, true);
            log.flushed_group(first + 8, first);
        }
        log.checkpoint_began(log.next());
        let room = RING - log.next();
        let mut total = fill(&mut log);
        assert!(total <= room / 4 && total + 32 > room / 4, "{total} of {room}");
        for progress in (100..=1000).step_by(100) {
            log.checkpoint_advanced(progress);
            let more = fill(&mut log);
            assert!((room / 20..room / 10).contains(&more), "{more} of {room} at {progress}");
            total += more;
        }
        assert_eq!(total, room - 2 * GROUP_SECTORS);
        // The checkpoint starts again because the index has too little room for a single commit.
        log.checkpoint_advanced(10);
        assert_eq!(fill(&mut log), 0);
        log.checkpoint_ended();
        assert_eq!(log.used_bytes(), (total * SECTOR as u64, RING * SECTOR as u64));
        assert!(log.admits(8 * 480));
    }

    #[test]
    fn the_largest_record_fits_into_an_empty_log() {
        let log = LogSpace::new(8, 8, 512);
        let lists = log.max_record() / 4;
        assert!(log.admits(log.max_record() + lists));
    }

    #[test]
    fn a_group_that_wraps_around_has_two_parts() {
        let log = LogSpace::new(0, 0, RING);
        assert_eq!(log.slots(RING * 3 + 1000, 40), [(1000, 24), (0, 16)]);
        assert_eq!(log.slots(16, 8), [(16, 8), (0, 0)]);
    }

    #[test]
    #[should_panic(expected = "the positions in the log are wrong")]
    fn a_group_never_overwrites_sectors_that_recovery_needs() {
        LogSpace::new(0, RING - 8, RING).append(16, true);
    }

    #[test]
    #[should_panic(expected = "groups are flushed in order")]
    fn groups_are_flushed_in_order() {
        let mut log = LogSpace::new(0, 0, RING);
        log.append(16, true);
        log.flushed_group(16, 0);
        log.flushed_group(8, 0);
    }
}
