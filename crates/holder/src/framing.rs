//! Cuts the byte stream of a socket into messages, without I/O.
//!
//! A reader asks the [`Cutter`] for the space of the next read. The space never extends beyond the end
//! of the current message, so descriptors that arrive with a read belong to this message.

use std::os::fd::OwnedFd;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Maximum length of a header, in bytes.
pub const HEADER_BYTES_MAX: u32 = 64;
/// Maximum length of a message of a front end with its header, in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 64 << 10;
/// Maximum number of descriptors of a message of a front end.
pub const MESSAGE_FDS_MAX: u32 = 32;
/// Length of the field that states the length of a message, in bytes.
const LENGTH_BYTES: u32 = 4;

/// Describes how the messages of a front end are cut. Each message begins with a header of fixed
/// length. The header contains the length of the message as an unsigned 32-bit number, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Framing {
    /// Length of the header, in bytes.
    pub header_len: u32,
    /// Offset of the length field in the header, in bytes.
    pub length_at: u32,
    /// Whether the length field counts the header, too.
    pub length_counts_header: bool,
    /// Maximum length of a message with its header, in bytes.
    pub message_bytes_max: u32,
    /// Maximum number of descriptors that arrive with a message.
    pub message_fds_max: u32,
}

impl Framing {
    /// The framing of vhost-user: request, flags and length of the payload, of 4 bytes each, then the
    /// payload (QEMU, `docs/interop/vhost-user.rst`, section "Message Specification").
    pub const VHOST_USER: Framing = Framing {
        header_len: 12,
        length_at: 8,
        length_counts_header: false,
        message_bytes_max: 12 + (4 << 10),
        message_fds_max: 8,
    };

    /// Checks the numbers against each other, and against the limits of this module.
    ///
    /// # Errors
    /// If no message could be cut, or if a message could exceed a limit.
    pub fn check(&self) -> Result<(), FramingError> {
        let field_end = self.length_at.checked_add(LENGTH_BYTES);
        if self.header_len > HEADER_BYTES_MAX || field_end.is_none_or(|end| end > self.header_len) {
            return Err(FramingError::Header { header_len: self.header_len, length_at: self.length_at });
        }
        if !(self.header_len..=MESSAGE_BYTES_MAX).contains(&self.message_bytes_max) {
            return Err(FramingError::MessageBytes(self.message_bytes_max));
        }
        if self.message_fds_max > MESSAGE_FDS_MAX {
            return Err(FramingError::MessageFds(self.message_fds_max));
        }
        Ok(())
    }

    /// Returns the length of the message that begins with `header`.
    fn message_len(&self, header: &[u8]) -> Result<usize, FramingViolation> {
        assert_eq!(header.len(), self.header_len as usize, "the header is complete");
        let at = self.length_at as usize;
        let field = header[at..].first_chunk().expect("the framing was checked: the header has the field");
        let length = u64::from(u32::from_le_bytes(*field));
        let header_len = u64::from(self.header_len);
        let len = if self.length_counts_header { length } else { header_len + length };
        if len < header_len {
            return Err(FramingViolation::TooShort { len, header_len });
        }
        if len > u64::from(self.message_bytes_max) {
            return Err(FramingViolation::TooLong { len, max: self.message_bytes_max });
        }
        Ok(len as usize)
    }
}

/// The reason why a framing cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum FramingError {
    /// The header is too long, or does not contain the length field.
    #[error(
        "a header of {header_len} bytes with a length field of {LENGTH_BYTES} bytes at offset {length_at} is not \
         possible; use a header of up to {HEADER_BYTES_MAX} bytes that contains the field"
    )]
    Header {
        /// Length of the header, in bytes.
        header_len: u32,
        /// Offset of the length field, in bytes.
        length_at: u32,
    },
    /// The maximum length of a message is shorter than the header, or exceeds the limit.
    #[error(
        "a maximum of {0} bytes per message is not possible; use the header's length or more, up to \
         {MESSAGE_BYTES_MAX} bytes"
    )]
    MessageBytes(u32),
    /// The number of descriptors exceeds the limit.
    #[error("{0} descriptors per message are too many; use up to {MESSAGE_FDS_MAX}")]
    MessageFds(u32),
}

/// A violation of the framing by the peer. The peer's connection cannot be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FramingViolation {
    /// The length field states less than the header.
    #[error("a message claims a length of {len} bytes, but its header alone has {header_len} bytes")]
    TooShort {
        /// Length of the message, in bytes.
        len: u64,
        /// Length of the header, in bytes.
        header_len: u64,
    },
    /// The length field states more than the maximum.
    #[error("a message claims a length of {len} bytes, but {max} bytes are the maximum")]
    TooLong {
        /// Length of the message, in bytes.
        len: u64,
        /// Maximum length, in bytes.
        max: u32,
    },
    /// More descriptors arrived with a message than the framing permits.
    #[error("more than {max} descriptors arrived with a message")]
    TooManyFds {
        /// Maximum number of descriptors.
        max: u32,
    },
    /// The kernel discarded descriptors.
    #[error(
        "descriptors of a message were lost: the message had more than {max} descriptors, or this process reached \
         its limit of open files (`ulimit -n`)"
    )]
    FdsLost {
        /// Maximum number of descriptors.
        max: u32,
    },
}

/// A complete message with its header, and the descriptors that arrived with it.
#[derive(Debug)]
pub struct RawMessage {
    /// Header and payload.
    pub bytes: Bytes,
    /// The descriptors, in the order of their arrival.
    pub fds: Vec<OwnedFd>,
}

/// Collects the bytes and descriptors of one message after the other.
#[derive(Debug)]
pub struct Cutter {
    framing: Framing,
    /// Space for the header, or for the whole message once the header is complete.
    buffer: Vec<u8>,
    filled: usize,
    fds: Vec<OwnedFd>,
}

impl Cutter {
    /// Creates a cutter for a framing that [`Framing::check`] has accepted.
    #[must_use]
    pub fn new(framing: Framing) -> Cutter {
        assert!(framing.length_at + LENGTH_BYTES <= framing.header_len, "the framing was checked");
        assert!(framing.header_len <= framing.message_bytes_max, "the framing was checked");
        Cutter { framing, buffer: vec![0; framing.header_len as usize], filled: 0, fds: Vec::new() }
    }

    /// Returns the space for the next read, which is never empty.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Returns the number of descriptors that may still arrive with the current message.
    #[must_use]
    pub fn fds_left(&self) -> usize {
        self.framing.message_fds_max as usize - self.fds.len()
    }

    /// Takes the result of a read: the first `len` bytes of [`Cutter::space`] are filled, and `fds`
    /// arrived with them. Returns the message if it is complete.
    ///
    /// # Errors
    /// If the peer violates the framing. The cutter must not be used after that.
    pub fn fill(
        &mut self,
        len: usize,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Option<RawMessage>, FramingViolation> {
        assert!(len <= self.buffer.len() - self.filled, "a read stays within its space");
        if fds.len() > self.fds_left() {
            return Err(FramingViolation::TooManyFds { max: self.framing.message_fds_max });
        }
        self.fds.append(&mut fds);
        self.filled += len;
        if self.filled < self.buffer.len() {
            return Ok(None);
        }
        let header_len = self.framing.header_len as usize;
        if self.filled == header_len {
            let message_len = self.framing.message_len(&self.buffer)?;
            self.buffer.resize(message_len, 0);
            if message_len > header_len {
                return Ok(None);
            }
        }
        let bytes = Bytes::from(std::mem::replace(&mut self.buffer, vec![0; header_len]));
        self.filled = 0;
        Ok(Some(RawMessage { bytes, fds: std::mem::take(&mut self.fds) }))
    }

    /// Returns the error for descriptors that the kernel has discarded.
    pub(crate) fn fds_lost(&self) -> FramingViolation {
        FramingViolation::FdsLost { max: self.framing.message_fds_max }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `stream` to a cutter in reads of these lengths, which repeat.
    fn cut(framing: Framing, stream: &[u8], reads: &[usize]) -> Result<Vec<Bytes>, FramingViolation> {
        let mut cutter = Cutter::new(framing);
        let (mut at, mut messages) = (0, Vec::new());
        for read in reads.iter().cycle() {
            let space = cutter.space();
            assert!(!space.is_empty() && space.len() <= framing.message_bytes_max as usize);
            let len = space.len().min(*read).min(stream.len() - at);
            space[..len].copy_from_slice(&stream[at..at + len]);
            at += len;
            messages.extend(cutter.fill(len, Vec::new())?.map(|message| message.bytes));
            if at == stream.len() {
                break;
            }
        }
        Ok(messages)
    }

    fn vhost_user(payload: &[u8]) -> Vec<u8> {
        let mut message = vec![7; 8];
        message.extend((payload.len() as u32).to_le_bytes());
        message.extend(payload);
        message
    }

    fn any_framing() -> impl Strategy<Value = Framing> {
        let numbers = (any::<u32>(), 0..80u32, 0..80u32, 0..70_000u32, 0..40u32, any::<bool>());
        numbers.prop_map(|(random, header_len, length_at, message_bytes_max, message_fds_max, counts)| {
            let length_at = if random.is_multiple_of(16) { random } else { length_at };
            Framing {
                header_len,
                length_at,
                length_counts_header: counts,
                message_bytes_max,
                message_fds_max,
            }
        })
    }

    proptest! {
        #[test]
        fn messages_do_not_depend_on_the_lengths_of_reads(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..8),
            reads in proptest::collection::vec(1..400usize, 1..8),
        ) {
            let messages: Vec<Vec<u8>> = payloads.iter().map(|payload| vhost_user(payload)).collect();
            let cut = cut(Framing::VHOST_USER, &messages.concat(), &reads).unwrap();
            prop_assert_eq!(cut, messages);
        }

        #[test]
        fn arbitrary_bytes_and_framings_never_panic(
            framing in any_framing(),
            stream in proptest::collection::vec(any::<u8>(), 1..600),
            reads in proptest::collection::vec(1..100usize, 1..4),
        ) {
            if framing.check().is_ok() {
                // The cutter may refuse the bytes.
                let _ = cut(framing, &stream, &reads);
            }
        }
    }

    #[test]
    fn a_length_may_count_the_header() {
        let framing =
            Framing { length_counts_header: true, length_at: 0, header_len: 4, ..Framing::VHOST_USER };
        assert_eq!(
            cut(framing, &[6, 0, 0, 0, 1, 2, 4, 0, 0, 0], &[100]).unwrap(),
            [&[6, 0, 0, 0, 1, 2][..], &[4, 0, 0, 0][..]]
        );
        let refused = cut(framing, &[3, 0, 0, 0], &[100]).unwrap_err();
        assert_eq!(refused, FramingViolation::TooShort { len: 3, header_len: 4 });
    }

    #[test]
    fn a_message_longer_than_the_maximum_is_refused_at_its_header() {
        let longest = vhost_user(&[0; 4096]);
        assert_eq!(cut(Framing::VHOST_USER, &longest, &[5000]).unwrap(), [longest]);
        let refused = cut(Framing::VHOST_USER, &vhost_user(&[0; 4097])[..12], &[12]).unwrap_err();
        assert_eq!(refused, FramingViolation::TooLong { len: 4109, max: 4108 });
        let wrapped = [[7; 8].as_slice(), &u32::MAX.to_le_bytes()].concat();
        assert!(matches!(cut(Framing::VHOST_USER, &wrapped, &[12]), Err(FramingViolation::TooLong { .. })));
    }

    #[test]
    fn descriptors_are_counted_per_message() {
        let null =
            |count: usize| (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect();
        let mut cutter = Cutter::new(Framing::VHOST_USER);
        let header = vhost_user(&[]);
        cutter.space().copy_from_slice(&header);
        assert!(cutter.fill(4, null(5)).unwrap().is_none());
        let message = cutter.fill(8, null(3)).unwrap().unwrap();
        assert_eq!((message.fds.len(), cutter.fds_left()), (8, 8));
        assert!(cutter.fill(4, null(5)).unwrap().is_none());
        assert_eq!(cutter.fill(1, null(4)).unwrap_err(), FramingViolation::TooManyFds { max: 8 });
    }

    #[test]
    fn impossible_framings_are_refused() {
        let good = Framing::VHOST_USER;
        assert_eq!(good.check(), Ok(()));
        for bad in [
            Framing { header_len: 3, length_at: 0, ..good },
            Framing { header_len: 65, ..good },
            Framing { length_at: 9, ..good },
            Framing { length_at: u32::MAX, ..good },
        ] {
            assert!(matches!(bad.check(), Err(FramingError::Header { .. })), "{bad:?}");
        }
        for bad in [11, MESSAGE_BYTES_MAX + 1] {
            let bad = Framing { message_bytes_max: bad, ..good };
            assert!(matches!(bad.check(), Err(FramingError::MessageBytes(_))), "{bad:?}");
        }
        let bad = Framing { message_fds_max: MESSAGE_FDS_MAX + 1, ..good };
        assert_eq!(bad.check(), Err(FramingError::MessageFds(33)));
    }
}
