//! Receives the requests of a client, and starts them.

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};
use tokio::sync::mpsc;

use crate::error::{Error, NbdViolation};
use crate::execution::{NbdExecution, memory};
use crate::failure::{Errno, NbdFailure};
use crate::negotiation::Agreement;
use crate::request::RequestHeader;
use crate::reservation::InFlightLimit;

/// Starts the requests of a client and sends them to `started`, until the client ends the connection
/// in an orderly way. While too many requests are in flight, nothing is received.
///
/// # Errors
/// If the connection fails, or if the client violates the protocol.
pub(crate) async fn receive<R: AsyncBufRead + Unpin>(
    mut reader: R,
    agreement: &Agreement,
    payload_bytes_max: u32,
    limit: &InFlightLimit,
    started: mpsc::Sender<NbdExecution>,
) -> Result<(), Error> {
    loop {
        if reader.fill_buf().await?.is_empty() {
            return Ok(());
        }
        let mut header = [0; RequestHeader::LEN];
        reader.read_exact(&mut header).await?;
        let header = RequestHeader::decode(&header)?;
        if header.is_disconnect() {
            return Ok(());
        }
        let len = header.payload_len();
        if len > payload_bytes_max {
            let failure = NbdFailure::new(Errno::Invalid, "the length exceeds the maximum payload");
            send(&started, NbdExecution::refused(header, failure, None)).await;
            return Err(NbdViolation::PayloadTooLong { len, max: payload_bytes_max }.into());
        }
        let command = header.command(agreement, payload_bytes_max);
        let reservation = limit.reserve(memory(&header, &command)).await;
        let payload = read_payload(&mut reader, len as usize).await?;
        let execution = match command {
            Ok(command) => {
                NbdExecution::start(&*agreement.export.disk, header, command, payload, reservation)
            }
            Err(failure) => NbdExecution::refused(header, failure, Some(reservation)),
        };
        send(&started, execution).await;
    }
}

/// The receiver is dropped after this task, so that sending cannot fail.
async fn send(started: &mpsc::Sender<NbdExecution>, execution: NbdExecution) {
    assert!(started.send(execution).await.is_ok(), "the connection takes all executions");
}

/// Reads a payload directly into the memory in which the disk gets it. The bytes that the reader had
/// already buffered are copied.
async fn read_payload<R: AsyncBufRead + Unpin>(reader: &mut R, len: usize) -> Result<Bytes, Error> {
    let mut payload = BytesMut::with_capacity(len);
    while payload.len() < len {
        let missing = len - payload.len();
        if reader.read_buf(&mut (&mut payload).limit(missing)).await? == 0 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
    }
    Ok(payload.freeze())
}
