//! [`serve_connection`]: serves one client from its greeting to its last reply.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, split};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::error::Error;
use crate::execution::{ExecutedRequest, NbdExecution, NbdOutcome};
use crate::export::Exports;
use crate::failure::{Errno, NbdFailure};
use crate::handshake::negotiate;
use crate::limits::NbdLimits;
use crate::negotiation::Agreement;
use crate::receive::receive;
use crate::reply_queue::ReplyQueue;
use crate::reservation::InFlightLimit;

/// Memory for received bytes, in bytes. It holds the headers of many requests. Longer reads of
/// payload bypass it.
const RECEIVE_BUFFER: usize = 8 << 10;

/// Serves a client until it disconnects. The requests in flight have completed when the future ends.
///
/// The future does all work of the connection and starts no tasks. It may be dropped at any time,
/// which leaves the outcome of the requests in flight open. For TCP, the caller should disable Nagle's
/// algorithm and enable keepalive, because a client may be idle for any time.
///
/// # Errors
/// The reason for the end, if the client has not ended the connection in an orderly way.
///
/// # Panics
/// If `limits` contradict each other.
pub async fn serve_connection<S>(stream: S, exports: &dyn Exports, limits: &NbdLimits) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite,
{
    limits.assert_consistent();
    let (reader, mut writer) = split(stream);
    let mut reader = BufReader::with_capacity(RECEIVE_BUFFER, reader);
    let negotiation = negotiate(&mut reader, &mut writer, exports, limits);
    let agreement = match timeout(limits.negotiation_timeout, negotiation).await {
        Err(_) => return Err(Error::NegotiationTimeout(limits.negotiation_timeout)),
        Ok(negotiated) => negotiated?,
    };
    match agreement {
        Some(agreement) => {
            // Requests of an earlier client must not take effect after those of this one.
            agreement.export.disk.quiesce().await;
            transmit(reader, writer, &agreement, limits).await
        }
        None => Ok(()),
    }
}

/// Receives requests, executes them and sends replies, until the client disconnects and all requests
/// in flight have completed.
async fn transmit<R, W>(
    reader: R,
    mut writer: W,
    agreement: &Agreement,
    limits: &NbdLimits,
) -> Result<(), Error>
where
    R: AsyncBufRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let limit = InFlightLimit::new(limits);
    let (started, mut starts) = mpsc::channel::<NbdExecution>(limits.requests_max);
    let receive = receive(reader, agreement, limits.payload_bytes_max, &limit, started);
    // None when no further requests are received.
    let mut receiving = Some(Box::pin(receive));
    let mut executions = FuturesUnordered::new();
    let mut replies = ReplyQueue::new(agreement.is_structured);
    let mut is_writable = true;
    // The first reason to end the connection counts.
    let mut result = Ok(());
    while receiving.is_some() || !starts.is_empty() || !executions.is_empty() {
        // Replies are written when nothing else can be done, so that one call writes many of them.
        // The limit of requests in flight bounds the delay.
        tokio::select! {
            biased;
            end = async { receiving.as_mut().expect("checked below").await }, if receiving.is_some() => {
                receiving = None;
                result = result.and(end);
            }
            Some(execution) = starts.recv() => executions.push(execution),
            Some(executed) = executions.next() => {
                if let Some(text) = detached(&executed) {
                    receiving = None;
                    result = result.and(Err(Error::Detached(text)));
                }
                if is_writable {
                    replies.push(executed);
                }
            }
            sent = replies.send(&mut writer), if is_writable && !replies.is_empty() => {
                if let Err(error) = sent {
                    receiving = None;
                    is_writable = false;
                    result = result.and(Err(error.into()));
                }
            }
        }
    }
    if !is_writable {
        return result;
    }
    match timeout(limits.close_timeout, close(&mut replies, &mut writer)).await {
        Err(_) => result.and(Err(Error::CloseTimeout(limits.close_timeout))),
        Ok(closed) => result.and(closed),
    }
}

/// Returns the error text if a request has found that the disk is detached.
fn detached(executed: &ExecutedRequest) -> Option<String> {
    match &executed.outcome {
        NbdOutcome::Failed(NbdFailure { errno: Errno::Shutdown, text }) => Some(text.clone()),
        _ => None,
    }
}

/// Sends the last replies, and tells the client that none follow.
async fn close<W: AsyncWrite + Unpin>(replies: &mut ReplyQueue, writer: &mut W) -> Result<(), Error> {
    replies.send_all(writer).await?;
    // The client may already have closed the connection.
    let _ = writer.shutdown().await;
    Ok(())
}
