//! [`BlkRequest`]: a request to the block device (virtio 1.2, section 5.2.6).

use std::sync::Arc;

use base::BoxFuture;
use disk::{BLOCK, Disk, DiskError, Memory, check_range};

use super::config::{CLEAR_BLOCKS_MAX, CLEAR_RANGES_MAX, DATA_MAX};
use crate::memory::Segments;
use crate::ring::{RingError, TakenRequest};

/// Length of the header of a request, in bytes.
const HEADER_LEN: u64 = 16;
/// Length of the description of a range to discard or to zero, in bytes.
const RANGE_LEN: u64 = 16;
/// Length of the serial number, in bytes.
const SERIAL_LEN: usize = 20;

/// Types of requests.
mod kind {
    pub(super) const IN: u32 = 0;
    pub(super) const OUT: u32 = 1;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const GET_ID: u32 = 8;
    pub(super) const DISCARD: u32 = 11;
    pub(super) const WRITE_ZEROES: u32 = 13;
}

/// Flag of a range to zero: the disk may give back its space.
const UNMAP: u32 = 1;

/// The status of a completed request. The device has no status for lack of space, so that
/// [`DiskError::NoSpace`] is an I/O error like all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlkStatus {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A valid request, or one that is refused by its status.
#[derive(Debug)]
pub(crate) struct BlkRequest {
    action: BlkAction,
    completion: BlkCompletion,
}

/// How to complete a request.
#[derive(Debug)]
pub(crate) struct BlkCompletion {
    head: u16,
    status: Segments,
    /// Number of bytes before the status that the device writes if the request succeeds.
    data_len: u32,
}

#[derive(Debug)]
enum BlkAction {
    Read { offset: u64, into: Segments },
    Write { offset: u64, from: Segments },
    Flush,
    Serial { into: Segments },
    Discard(Vec<(u64, u64)>),
    Zero(Vec<(u64, u64, bool)>),
    Refuse(BlkStatus),
}

/// A request that was started.
pub(crate) enum BlkExecution {
    /// It is already complete.
    Done(disk::Result<()>),
    /// The device refuses it.
    Refused(BlkStatus),
    /// The disk executes it.
    Waiting(BoxFuture<'static, disk::Result<()>>),
}

impl BlkRequest {
    /// Reads a request to a disk of `size` bytes. The driver may divide header, data and status into
    /// buffers as it likes.
    ///
    /// # Errors
    /// If the request has no header or no byte for its status.
    pub(crate) fn read(taken: TakenRequest, size: u64) -> Result<BlkRequest, RingError> {
        let TakenRequest { head, chain } = taken;
        let (mut readable, mut writable) = (chain.readable, chain.writable);
        let unframed = || RingError::Unframed(head);
        let header_at = readable.take_front(HEADER_LEN).ok_or_else(unframed)?;
        let status = writable.take_back(1).ok_or_else(unframed)?;
        let mut header = [0; HEADER_LEN as usize];
        header_at.copy_out(0, &mut header).map_err(|_| unframed())?;
        let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
        let action =
            BlkAction::read(kind, sector, readable, writable, size).unwrap_or_else(BlkAction::Refuse);
        let data_len = match &action {
            BlkAction::Read { into, .. } => into.len() as u32,
            BlkAction::Serial { .. } => SERIAL_LEN as u32,
            _ => 0,
        };
        Ok(BlkRequest { action, completion: BlkCompletion { head, status, data_len } })
    }

    /// Starts the request on the disk.
    pub(crate) fn start(self, disk: &Arc<dyn Disk>) -> (BlkCompletion, BlkExecution) {
        (self.completion, self.action.start(disk))
    }
}

impl BlkCompletion {
    /// First descriptor of the request.
    pub(crate) fn head(&self) -> u16 {
        self.head
    }

    /// Writes the status. Returns the number of bytes that the device has written.
    ///
    /// # Errors
    /// [`DiskError::Memory`] if the guest's memory is lost.
    pub(crate) fn finish(&self, status: BlkStatus) -> Result<u32, DiskError> {
        self.status.copy_in(0, &[status as u8])?;
        Ok(1 + if status == BlkStatus::Ok { self.data_len } else { 0 })
    }
}

impl BlkAction {
    fn start(self, disk: &Arc<dyn Disk>) -> BlkExecution {
        match self {
            BlkAction::Read { offset, into } => BlkExecution::Waiting(disk.read_into(offset, Arc::new(into))),
            BlkAction::Write { offset, from } => {
                BlkExecution::Waiting(disk.write_from(offset, Arc::new(from)))
            }
            BlkAction::Flush => BlkExecution::Done(Ok(())),
            BlkAction::Serial { into } => {
                let mut serial = [0; SERIAL_LEN];
                for (to, from) in serial.iter_mut().zip(disk.identity().serial.bytes()) {
                    *to = from;
                }
                BlkExecution::Done(into.copy_in(0, &serial))
            }
            BlkAction::Discard(ranges) => {
                all(ranges.into_iter().map(|(offset, len)| disk.discard(offset, len)).collect())
            }
            BlkAction::Zero(ranges) => all(ranges
                .into_iter()
                .map(|(offset, len, keeps_space)| disk.write_zeroes(offset, len, keeps_space))
                .collect()),
            BlkAction::Refuse(status) => BlkExecution::Refused(status),
        }
    }

    fn read(
        kind: u32,
        sector: u64,
        readable: Segments,
        writable: Segments,
        size: u64,
    ) -> Result<BlkAction, BlkStatus> {
        let offset = sector.checked_mul(BLOCK);
        let in_disk = |len: u64| {
            let offset = offset.filter(|_| len <= DATA_MAX).ok_or(BlkStatus::IoError)?;
            check_range(offset, len, size).map(|()| offset).map_err(|_| BlkStatus::IoError)
        };
        match kind {
            kind::IN => Ok(BlkAction::Read { offset: in_disk(writable.len())?, into: writable }),
            kind::OUT => Ok(BlkAction::Write { offset: in_disk(readable.len())?, from: readable }),
            kind::FLUSH => Ok(BlkAction::Flush),
            kind::GET_ID if writable.len() >= SERIAL_LEN as u64 => Ok(BlkAction::Serial { into: writable }),
            kind::GET_ID => Err(BlkStatus::IoError),
            kind::DISCARD | kind::WRITE_ZEROES => {
                let ranges = clear_ranges(&readable, size, kind == kind::WRITE_ZEROES)?;
                Ok(match kind {
                    kind::DISCARD => {
                        BlkAction::Discard(ranges.into_iter().map(|(at, len, _)| (at, len)).collect())
                    }
                    _ => BlkAction::Zero(ranges),
                })
            }
            _ => Err(BlkStatus::Unsupported),
        }
    }
}

/// Reads the ranges to discard or to zero: offset and length in bytes, and whether the range keeps
/// its space.
fn clear_ranges(from: &Segments, size: u64, may_unmap: bool) -> Result<Vec<(u64, u64, bool)>, BlkStatus> {
    let count = from.len() / RANGE_LEN;
    if !from.len().is_multiple_of(RANGE_LEN) || count == 0 || count > u64::from(CLEAR_RANGES_MAX) {
        return Err(BlkStatus::IoError);
    }
    (0..count)
        .map(|number| {
            let mut range = [0; RANGE_LEN as usize];
            from.copy_out(number * RANGE_LEN, &mut range).map_err(|_| BlkStatus::IoError)?;
            let [sector_low, sector_high, blocks, flags] =
                [0, 4, 8, 12].map(|at| u32::from_le_bytes(range[at..at + 4].try_into().expect("4 bytes")));
            if flags & !UNMAP != 0 || (flags & UNMAP != 0 && !may_unmap) {
                return Err(BlkStatus::Unsupported);
            }
            let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
            let len = u64::from(blocks) * BLOCK;
            let offset = sector.checked_mul(BLOCK).filter(|_| blocks <= CLEAR_BLOCKS_MAX);
            let offset = offset.ok_or(BlkStatus::IoError)?;
            check_range(offset, len, size).map_err(|_| BlkStatus::IoError)?;
            Ok((offset, len, flags & UNMAP == 0))
        })
        .collect()
}

/// Waits for requests that were started together.
fn all(mut started: Vec<BoxFuture<'static, disk::Result<()>>>) -> BlkExecution {
    match started.len() {
        1 => BlkExecution::Waiting(started.remove(0)),
        _ => BlkExecution::Waiting(Box::pin(async move {
            // All of them complete, even if one fails.
            futures::future::join_all(started).await.into_iter().collect()
        })),
    }
}
