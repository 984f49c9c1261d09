//! Decodes the requests that a client sends after the negotiation.
//!
//! Source: the sections "Request message" and "Request types" of the NBD protocol.

use bytes::Buf;

use crate::error::NbdViolation;
use crate::failure::{Errno, NbdFailure};
use crate::negotiation::Agreement;

const REQUEST_MAGIC: u32 = 0x2560_9513;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

/// The change is durable before the reply. All changes are.
const FUA: u16 = 1 << 0;
const NO_HOLE: u16 = 1 << 1;
/// The reply has one part with data. All replies have.
const DONT_FRAGMENT: u16 = 1 << 2;
const REQUEST_ONE: u16 = 1 << 3;

/// The header of a request, whose command has not been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    flags: u16,
    kind: u16,
    /// Number by which the client recognises the reply.
    pub cookie: u64,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length of the range, in bytes.
    pub len: u32,
}

/// A command that the export permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NbdCommand {
    /// Read the range.
    Read,
    /// Write the payload to the range.
    Write,
    /// Make completed changes durable.
    Flush,
    /// Discard the range.
    Trim,
    /// Fill the range with zeros.
    WriteZeroes {
        /// Whether later writes to the range shall need no new space.
        keeps_space: bool,
    },
    /// State which parts of the range have data.
    BlockStatus,
}

impl RequestHeader {
    /// Length of a header, in bytes.
    pub const LEN: usize = 28;

    /// Decodes a header.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(bytes: &[u8; RequestHeader::LEN]) -> Result<RequestHeader, NbdViolation> {
        let mut bytes = &bytes[..];
        match bytes.get_u32() {
            REQUEST_MAGIC => Ok(RequestHeader {
                flags: bytes.get_u16(),
                kind: bytes.get_u16(),
                cookie: bytes.get_u64(),
                offset: bytes.get_u64(),
                len: bytes.get_u32(),
            }),
            magic => Err(NbdViolation::RequestMagic(magic)),
        }
    }

    /// Returns true if the client wants to end the connection.
    pub fn is_disconnect(&self) -> bool {
        self.kind == DISCONNECT
    }

    /// Returns true if the client wants the status of only the first part of the range.
    pub fn wants_one(&self) -> bool {
        self.flags & REQUEST_ONE != 0
    }

    /// Returns the length of the payload that follows the header, in bytes.
    pub fn payload_len(&self) -> u32 {
        if self.kind == WRITE { self.len } else { 0 }
    }

    /// Checks the command against the agreement with the client. The disk checks the range.
    ///
    /// # Errors
    /// The error for the client, if the command is refused.
    pub fn command(&self, agreement: &Agreement, payload_bytes_max: u32) -> Result<NbdCommand, NbdFailure> {
        let (command, own_flags) = match self.kind {
            READ if agreement.is_structured => (NbdCommand::Read, DONT_FRAGMENT),
            READ => (NbdCommand::Read, 0),
            WRITE => (NbdCommand::Write, 0),
            FLUSH => (NbdCommand::Flush, 0),
            TRIM => (NbdCommand::Trim, 0),
            WRITE_ZEROES => (NbdCommand::WriteZeroes { keeps_space: self.flags & NO_HOLE != 0 }, NO_HOLE),
            BLOCK_STATUS if agreement.has_allocation => (NbdCommand::BlockStatus, REQUEST_ONE),
            BLOCK_STATUS => return Err(invalid("the client has not selected base:allocation")),
            _ => return Err(invalid("the server does not know this command")),
        };
        if self.flags & !(FUA | own_flags) != 0 {
            return Err(invalid("the command does not have this flag"));
        }
        if command == NbdCommand::Flush {
            return Ok(command);
        }
        if command.is_change() && agreement.export.is_read_only {
            return Err(NbdFailure::new(Errno::NotPermitted, "the export is read-only"));
        }
        if self.len == 0 {
            return Err(invalid("the length is 0"));
        }
        if command == NbdCommand::Read && self.len > payload_bytes_max {
            return Err(invalid("the length exceeds the maximum payload"));
        }
        Ok(command)
    }
}

impl NbdCommand {
    fn is_change(self) -> bool {
        matches!(self, NbdCommand::Write | NbdCommand::Trim | NbdCommand::WriteZeroes { .. })
    }
}

fn invalid(text: &'static str) -> NbdFailure {
    NbdFailure::new(Errno::Invalid, text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use disk::MemDisk;
    use proptest::prelude::*;

    use super::*;
    use crate::export::Export;

    fn agreement(is_read_only: bool, is_structured: bool) -> Agreement {
        let export =
            Export { disk: Arc::new(MemDisk::new(1 << 20)), is_read_only, description: String::new() };
        Agreement { export, is_structured, has_allocation: is_structured }
    }

    fn header(kind: u16, flags: u16, len: u32) -> RequestHeader {
        RequestHeader { flags, kind, cookie: 1, offset: 0, len }
    }

    #[test]
    fn flags_are_accepted_only_with_their_command() {
        let structured = agreement(false, true);
        let valid = [
            (READ, DONT_FRAGMENT),
            (WRITE, 0),
            (FLUSH, 0),
            (TRIM, 0),
            (WRITE_ZEROES, NO_HOLE),
            (BLOCK_STATUS, REQUEST_ONE),
        ];
        for (kind, own) in valid {
            for flag in (0..16).map(|bit| 1 << bit) {
                let command = header(kind, flag, 512).command(&structured, 4096);
                assert_eq!(command.is_ok(), flag == FUA || flag == own, "command {kind}, flag {flag:#x}");
            }
        }
        let plain = agreement(false, false);
        assert!(header(READ, DONT_FRAGMENT, 512).command(&plain, 4096).is_err());
        assert!(header(BLOCK_STATUS, 0, 512).command(&plain, 4096).is_err());
    }

    #[test]
    fn a_read_only_export_permits_no_change() {
        let agreement = agreement(true, true);
        for kind in [WRITE, TRIM, WRITE_ZEROES] {
            let refused = header(kind, 0, 512).command(&agreement, 4096).unwrap_err();
            assert_eq!(refused.errno, Errno::NotPermitted);
        }
        assert_eq!(header(FLUSH, 0, 0).command(&agreement, 4096), Ok(NbdCommand::Flush));
        assert_eq!(header(READ, 0, 512).command(&agreement, 4096), Ok(NbdCommand::Read));
    }

    proptest! {
        #[test]
        fn no_request_panics(mut bytes: [u8; RequestHeader::LEN], is_valid: bool, kind in 0u16..9) {
            if is_valid {
                bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
                bytes[6..8].copy_from_slice(&kind.to_be_bytes());
            }
            if let Ok(header) = RequestHeader::decode(&bytes) {
                let command = header.command(&agreement(false, true), 4096);
                prop_assert!(command != Ok(NbdCommand::Read) || header.len <= 4096);
            }
        }
    }
}
