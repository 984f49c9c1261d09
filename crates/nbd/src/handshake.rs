//! Receives the options of a client, and sends the replies.

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::{Error, NbdViolation};
use crate::export::Exports;
use crate::limits::NbdLimits;
use crate::negotiation::{Agreement, Negotiation, NegotiationStep, refuse_as_too_big};
use crate::option::{EXPORT_NAME, OPTION_MAGIC, OptionHeader};

const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;

/// Maximum length of option data that the server reads into memory, in bytes. It suffices for the
/// longest names, with some queries.
const DATA_MAX: u32 = 64 << 10;
/// Maximum length of option data that the server skips, in bytes.
const SKIP_MAX: u32 = 1 << 20;
/// Maximum number of options in a negotiation.
const OPTIONS_MAX: u32 = 256;

/// Negotiates with a client. Returns `None` if the client has ended the connection in an orderly way.
///
/// The caller limits the time.
///
/// # Errors
/// If the connection fails, or if the client violates the protocol.
pub(crate) async fn negotiate<R, W>(
    reader: &mut R,
    writer: &mut W,
    exports: &dyn Exports,
    limits: &NbdLimits,
) -> Result<Option<Agreement>, Error>
where
    R: AsyncBufRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut replies = BytesMut::new();
    replies.put_u64(GREETING_MAGIC);
    replies.put_u64(OPTION_MAGIC);
    replies.put_u16(FIXED_NEWSTYLE | NO_ZEROES);
    send(writer, &mut replies).await?;
    if reader.fill_buf().await?.is_empty() {
        return Ok(None);
    }
    let flags = reader.read_u32().await?;
    if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
        return Err(NbdViolation::ClientFlags(flags).into());
    }
    let omits_zeroes = flags & u32::from(NO_ZEROES) != 0;
    let mut negotiation = Negotiation::new(exports, limits.payload_bytes_max, omits_zeroes);
    for _ in 0..OPTIONS_MAX {
        if reader.fill_buf().await?.is_empty() {
            return Ok(None);
        }
        let mut header = [0; OptionHeader::LEN];
        reader.read_exact(&mut header).await?;
        let OptionHeader { kind, len } = OptionHeader::decode(&header)?;
        let step = match len {
            0..=DATA_MAX => {
                let mut data = vec![0; len as usize];
                reader.read_exact(&mut data).await?;
                negotiation.answer(kind, &data, &mut replies)?
            }
            ..=SKIP_MAX if kind != EXPORT_NAME => {
                skip(reader, len).await?;
                refuse_as_too_big(kind, &mut replies);
                NegotiationStep::NextOption
            }
            _ => return Err(NbdViolation::OptionTooLong { kind, len }.into()),
        };
        let sent = send(writer, &mut replies).await;
        match step {
            NegotiationStep::NextOption => sent?,
            NegotiationStep::Transmission(agreement) => {
                sent?;
                return Ok(Some(agreement));
            }
            // The client may have closed the connection without waiting for the reply.
            NegotiationStep::End => return Ok(None),
        }
    }
    Err(NbdViolation::TooManyOptions(OPTIONS_MAX).into())
}

async fn send<W: AsyncWrite + Unpin>(writer: &mut W, replies: &mut BytesMut) -> Result<(), Error> {
    writer.write_all_buf(replies).await?;
    writer.flush().await?;
    Ok(())
}

/// Skips `len` bytes without keeping them.
async fn skip<R: AsyncBufRead + Unpin>(reader: &mut R, len: u32) -> Result<(), Error> {
    let mut left = len as usize;
    while left > 0 {
        let available = reader.fill_buf().await?.len().min(left);
        if available == 0 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        reader.consume(available);
        left -= available;
    }
    Ok(())
}
