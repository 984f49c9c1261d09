//! Faults of a simulated drive.

use std::ops::Range;
use std::time::Duration;

use base::clock::Instant;
use rand::Rng;
use rand::rngs::StdRng;

/// A fault of a simulated drive's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveFaultKind {
    /// A read fails.
    ReadError,
    /// A write fails. The drive may have stored any of its sectors.
    WriteError,
    /// A flush fails. The drive may drop any of the writes that it covers; then reads return the
    /// older content.
    FlushError,
    /// A flush fails. The writes that it covers stay visible but are volatile forever, as in a page
    /// cache that marks pages as clean after a failed flush. Only writing the data again makes it
    /// durable.
    LostFlush,
    /// A read, write or flush takes this much longer. The blocking reads of recovery and of index
    /// lookups are not affected.
    Stall(Duration),
    /// A read returns one flipped bit. The content of the drive stays correct.
    FlipInRead,
    /// A write stores one flipped bit.
    FlipInWrite,
    /// A flush reports success, but the writes that it covers may still be lost in a power failure.
    /// No store can keep its promises on this drive.
    LyingFlush,
}

/// A fault that is injected into some of a drive's requests.
#[derive(Debug, Clone)]
pub struct DriveFault {
    /// The fault.
    pub kind: DriveFaultKind,
    /// Number of matching requests before the fault can fire.
    pub after: u64,
    /// Maximum number of times that the fault fires; `None` for no limit.
    pub count: Option<u64>,
    /// Probability that the fault fires at a matching request, 0 to 1.
    pub probability: f64,
    /// The fault hits only reads and writes that touch this range, in bytes; `None` for the whole
    /// drive. A flush matches every range.
    pub range: Option<Range<u64>>,
    /// End of the time in which the fault fires; `None` for no end.
    pub until: Option<Instant>,
}

impl DriveFault {
    /// Returns a fault that hits every request of its kind.
    #[must_use]
    pub fn always(kind: DriveFaultKind) -> DriveFault {
        DriveFault { kind, after: 0, count: None, probability: 1.0, range: None, until: None }
    }

    /// Returns a fault that hits the next request of its kind.
    #[must_use]
    pub fn once(kind: DriveFaultKind) -> DriveFault {
        DriveFault { count: Some(1), ..DriveFault::always(kind) }
    }
}

/// Counts of a simulated drive's requests, and of the faults that have fired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DriveCounts {
    /// Submitted reads, without blocking reads.
    pub reads: u64,
    /// Submitted writes.
    pub writes: u64,
    /// Submitted flushes.
    pub flushes: u64,
    /// Failed reads, without the reads of a removed drive.
    pub read_errors: u64,
    /// Failed writes.
    pub write_errors: u64,
    /// Failed flushes.
    pub flush_errors: u64,
    /// Delayed requests.
    pub stalls: u64,
    /// Reads that returned a flipped bit.
    pub flips_in_reads: u64,
    /// Writes that stored a flipped bit.
    pub flips_in_writes: u64,
    /// Flushes that falsely reported success.
    pub lying_flushes: u64,
    /// Bits that were flipped at rest.
    pub flips_at_rest: u64,
    /// Requests that failed because the drive was removed.
    pub absent_errors: u64,
    /// Power failures.
    pub power_failures: u64,
    /// Sectors that power failures have lost.
    pub lost_sectors: u64,
    /// Ends of mounts by [`sever`](super::SimDrive::sever).
    pub severed: u64,
    /// Requests of severed mounts that the drive has refused.
    pub refused: u64,
    /// Blocking writes and flushes that the end of a mount has cut off.
    pub cut_off: u64,
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DriveRequestKind {
    Read,
    /// A read that takes no simulated time.
    InstantRead,
    Write,
    Flush,
}

/// The faults that hit one request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FaultVerdict {
    pub(super) fails: bool,
    pub(super) flips: bool,
    pub(super) orphans: bool,
    pub(super) lies: bool,
    pub(super) stall: Duration,
    /// End of the time in which requests that start are stalled; `None` for no end.
    pub(super) stalls_until: Option<Instant>,
}

/// The faults of a drive.
#[derive(Debug, Default)]
pub(super) struct DriveFaults {
    armed: Vec<ArmedDriveFault>,
}

#[derive(Debug)]
struct ArmedDriveFault {
    fault: DriveFault,
    occasions: u64,
    fired: u64,
}

impl DriveFaults {
    pub(super) fn arm(&mut self, fault: DriveFault) {
        self.armed.push(ArmedDriveFault { fault, occasions: 0, fired: 0 });
    }

    pub(super) fn clear(&mut self) {
        self.armed.clear();
    }

    /// Decides which faults hit a request, and counts them.
    pub(super) fn judge(
        &mut self,
        kind: DriveRequestKind,
        range: Range<u64>,
        now: Instant,
        rng: &mut StdRng,
        counts: &mut DriveCounts,
    ) -> FaultVerdict {
        let mut verdict = FaultVerdict::default();
        for armed in &mut self.armed {
            if !armed.fires(kind, &range, now, rng) {
                continue;
            }
            let count = match armed.fault.kind {
                DriveFaultKind::ReadError
                | DriveFaultKind::WriteError
                | DriveFaultKind::FlushError
                | DriveFaultKind::LostFlush => {
                    verdict.fails = true;
                    verdict.orphans |= armed.fault.kind == DriveFaultKind::LostFlush;
                    match kind {
                        DriveRequestKind::Read | DriveRequestKind::InstantRead => &mut counts.read_errors,
                        DriveRequestKind::Write => &mut counts.write_errors,
                        DriveRequestKind::Flush => &mut counts.flush_errors,
                    }
                }
                DriveFaultKind::Stall(late) => {
                    verdict.stall += late;
                    verdict.stalls_until = armed.fault.until;
                    &mut counts.stalls
                }
                DriveFaultKind::FlipInRead => {
                    verdict.flips = true;
                    &mut counts.flips_in_reads
                }
                DriveFaultKind::FlipInWrite => {
                    verdict.flips = true;
                    &mut counts.flips_in_writes
                }
                DriveFaultKind::LyingFlush => {
                    verdict.lies = true;
                    &mut counts.lying_flushes
                }
            };
            *count += 1;
        }
        verdict
    }
}

impl ArmedDriveFault {
    fn fires(&mut self, kind: DriveRequestKind, range: &Range<u64>, now: Instant, rng: &mut StdRng) -> bool {
        let matches = match self.fault.kind {
            DriveFaultKind::ReadError | DriveFaultKind::FlipInRead => {
                matches!(kind, DriveRequestKind::Read | DriveRequestKind::InstantRead)
            }
            DriveFaultKind::WriteError | DriveFaultKind::FlipInWrite => kind == DriveRequestKind::Write,
            DriveFaultKind::FlushError | DriveFaultKind::LostFlush | DriveFaultKind::LyingFlush => {
                kind == DriveRequestKind::Flush
            }
            DriveFaultKind::Stall(_) => kind != DriveRequestKind::InstantRead,
        };
        let touches = |only: &Range<u64>| range.start < only.end && only.start < range.end;
        let in_range = kind == DriveRequestKind::Flush || self.fault.range.as_ref().is_none_or(touches);
        if !matches || !in_range || self.fault.until.is_some_and(|until| now >= until) {
            return false;
        }
        self.occasions += 1;
        let spent = self.fault.count.is_some_and(|count| self.fired >= count);
        let fires = !spent && self.occasions > self.fault.after && rng.random_bool(self.fault.probability);
        self.fired += u64::from(fires);
        fires
    }
}
