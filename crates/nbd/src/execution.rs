//! [`NbdExecution`]: a request that runs on the disk.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base::BoxFuture;
use bytes::Bytes;
use disk::{BLOCK, Disk, DiskError, DiskExtent, check_range};

use crate::failure::{Errno, NbdFailure};
use crate::request::{NbdCommand, RequestHeader};
use crate::reservation::Reservation;

/// Maximum length of the range for which one request gets the status, in bytes. The client asks again
/// for the rest. The limit bounds the memory that the disk needs for its answer.
const STATUS_RANGE_MAX: u64 = 128 << 20;
/// Memory for the answer to a request for the status, if each block is an extent, in bytes.
const STATUS_BYTES_MAX: u32 = (STATUS_RANGE_MAX / BLOCK) as u32 * size_of::<DiskExtent>() as u32;

/// A request in flight. The future completes when the disk has executed the request.
pub(crate) struct NbdExecution {
    header: RequestHeader,
    call: DiskCall,
    reservation: Option<Reservation>,
}

/// The call of the disk for a request.
enum DiskCall {
    /// No call is necessary, or the request was refused.
    Finished(Option<NbdOutcome>),
    Read(BoxFuture<'static, disk::Result<Vec<Bytes>>>),
    Change(NbdCommand, BoxFuture<'static, disk::Result<()>>),
    Extents(BoxFuture<'static, disk::Result<Vec<DiskExtent>>>),
}

/// The outcome of a request.
#[derive(Debug)]
pub(crate) enum NbdOutcome {
    /// The request has taken effect.
    Done,
    /// The content of the range.
    Data(Vec<Bytes>),
    /// The parts of the range, or of its beginning.
    Extents(Vec<DiskExtent>),
    /// The request has failed.
    Failed(NbdFailure),
}

/// A request that the disk has executed.
pub(crate) struct ExecutedRequest {
    /// The header of the request.
    pub header: RequestHeader,
    /// The outcome of the request.
    pub outcome: NbdOutcome,
    /// Held until the reply is written.
    pub reservation: Option<Reservation>,
}

/// Returns how many bytes of memory a request needs for its payload, or for the data of its reply.
pub(crate) fn memory(header: &RequestHeader, command: &Result<NbdCommand, NbdFailure>) -> u32 {
    match command {
        Ok(NbdCommand::Read) => header.len,
        Ok(NbdCommand::BlockStatus) => STATUS_BYTES_MAX,
        // A payload is also received if the request was refused.
        _ => header.payload_len(),
    }
}

impl NbdExecution {
    /// Starts a request. `payload` is the data to write, which is empty for other commands.
    pub fn start(
        disk: &dyn Disk,
        header: RequestHeader,
        command: NbdCommand,
        payload: Bytes,
        reservation: Reservation,
    ) -> NbdExecution {
        let (offset, len) = (header.offset, u64::from(header.len));
        let call = match command {
            NbdCommand::Read => DiskCall::Read(disk.read(offset, len)),
            NbdCommand::Write => DiskCall::Change(command, disk.write(offset, vec![payload])),
            NbdCommand::Flush => DiskCall::Finished(Some(NbdOutcome::Done)),
            NbdCommand::Trim => DiskCall::Change(command, disk.discard(offset, len)),
            NbdCommand::WriteZeroes { keeps_space } => {
                DiskCall::Change(command, disk.write_zeroes(offset, len, keeps_space))
            }
            NbdCommand::BlockStatus => status(disk, offset, len),
        };
        NbdExecution { header, call, reservation: Some(reservation) }
    }

    /// Creates a request that fails without a call of the disk.
    pub fn refused(
        header: RequestHeader,
        failure: NbdFailure,
        reservation: Option<Reservation>,
    ) -> NbdExecution {
        NbdExecution { header, call: DiskCall::Finished(Some(NbdOutcome::Failed(failure))), reservation }
    }
}

fn status(disk: &dyn Disk, offset: u64, len: u64) -> DiskCall {
    // The whole range is checked, because the disk sees only its beginning.
    let size = *disk.size().borrow();
    if let Err(error) = check_range(offset, len, size) {
        let failure = NbdFailure::of_disk(&error, NbdCommand::BlockStatus);
        return DiskCall::Finished(Some(NbdOutcome::Failed(failure)));
    }
    DiskCall::Extents(disk.extents(offset, len.min(STATUS_RANGE_MAX)))
}

impl Future for NbdExecution {
    type Output = ExecutedRequest;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ExecutedRequest> {
        let header = self.header;
        let outcome = match &mut self.call {
            DiskCall::Finished(outcome) => outcome.take().expect("the future is not polled after its end"),
            DiskCall::Read(call) => match ready!(call.as_mut().poll(cx)) {
                Ok(data) => data_of(&header, data),
                Err(error) => failed(&error, NbdCommand::Read),
            },
            DiskCall::Change(command, call) => match ready!(call.as_mut().poll(cx)) {
                Ok(()) => NbdOutcome::Done,
                Err(error) => failed(&error, *command),
            },
            DiskCall::Extents(call) => match ready!(call.as_mut().poll(cx)) {
                Ok(extents) => extents_of(&header, extents),
                Err(error) => failed(&error, NbdCommand::BlockStatus),
            },
        };
        Poll::Ready(ExecutedRequest { header, outcome, reservation: self.reservation.take() })
    }
}

fn failed(error: &DiskError, command: NbdCommand) -> NbdOutcome {
    NbdOutcome::Failed(NbdFailure::of_disk(error, command))
}

/// A reply with another length than the request would shift all further replies, so the length of the
/// data is checked.
fn data_of(header: &RequestHeader, data: Vec<Bytes>) -> NbdOutcome {
    let len: usize = data.iter().map(Bytes::len).sum();
    if len as u64 == u64::from(header.len) {
        return NbdOutcome::Data(data);
    }
    tracing::error!(offset = header.offset, asked = header.len, len, "the disk returned a wrong length");
    NbdOutcome::Failed(NbdFailure::new(Errno::Io, "the disk returned a wrong length"))
}

/// Merges adjacent extents of one kind, and cuts them at the end of the range.
fn extents_of(header: &RequestHeader, extents: Vec<DiskExtent>) -> NbdOutcome {
    let mut left = u64::from(header.len);
    let mut merged: Vec<DiskExtent> = Vec::new();
    for DiskExtent { len, has_data } in extents {
        let len = len.min(left);
        left -= len;
        match merged.last_mut() {
            _ if len == 0 => (),
            Some(last) if last.has_data == has_data => last.len += len,
            _ => merged.push(DiskExtent { len, has_data }),
        }
    }
    if merged.is_empty() {
        tracing::error!(offset = header.offset, len = header.len, "the disk returned no extents");
        return NbdOutcome::Failed(NbdFailure::new(Errno::Io, "the disk returned no extents"));
    }
    NbdOutcome::Extents(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request to read or to get the status of `len` bytes.
    fn header(len: u32) -> RequestHeader {
        let mut bytes = [0; RequestHeader::LEN];
        bytes[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
        bytes[24..].copy_from_slice(&len.to_be_bytes());
        RequestHeader::decode(&bytes).unwrap()
    }

    fn extent(len: u64, has_data: bool) -> DiskExtent {
        DiskExtent { len, has_data }
    }

    #[test]
    fn extents_are_merged_and_cut_at_the_end_of_the_range() {
        let extents = [(512, true), (0, false), (512, true), (1024, false), (4096, false), (512, true)];
        let extents = extents.map(|(len, has_data)| extent(len, has_data)).to_vec();
        let NbdOutcome::Extents(merged) = extents_of(&header(4096), extents) else { panic!("refused") };
        assert_eq!(merged, [extent(1024, true), extent(3072, false)]);
    }

    #[test]
    fn a_wrong_answer_of_the_disk_becomes_an_error() {
        for extents in [vec![], vec![extent(0, true)]] {
            assert!(matches!(extents_of(&header(512), extents), NbdOutcome::Failed(_)));
        }
        for len in [511, 513] {
            let data = vec![Bytes::from(vec![0; len])];
            assert!(matches!(data_of(&header(512), data), NbdOutcome::Failed(_)));
        }
    }
}
