//! [`NbdFailure`]: the error of a request, as the client sees it.

use disk::DiskError;

use crate::request::NbdCommand;

/// An error number of the protocol (section "Error values").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Errno {
    /// `EPERM`
    NotPermitted = 1,
    /// `EIO`
    Io = 5,
    /// `EINVAL`
    Invalid = 22,
    /// `ENOSPC`
    NoSpace = 28,
    /// `ESHUTDOWN`
    Shutdown = 108,
}

/// The error of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NbdFailure {
    /// Error number for programs.
    pub errno: Errno,
    /// Text for a user, which only structured replies contain.
    pub text: String,
}

impl NbdFailure {
    /// Creates a failure.
    pub fn new(errno: Errno, text: impl Into<String>) -> NbdFailure {
        NbdFailure { errno, text: text.into() }
    }

    /// Returns the failure for an error of the disk.
    pub fn of_disk(error: &DiskError, command: NbdCommand) -> NbdFailure {
        let errno = match error {
            DiskError::OutOfRange { offset, len, size } => {
                let is_behind_end = offset.checked_add(*len).is_none_or(|end| end > *size);
                let needs_space = matches!(command, NbdCommand::Write | NbdCommand::WriteZeroes { .. });
                if is_behind_end && needs_space { Errno::NoSpace } else { Errno::Invalid }
            }
            DiskError::NoSpace(_) => Errno::NoSpace,
            DiskError::Detached(_) => Errno::Shutdown,
            _ => Errno::Io,
        };
        NbdFailure::new(errno, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_a_disk_has_an_error_number() {
        let behind_end = DiskError::OutOfRange { offset: 8192, len: 512, size: 8192 };
        let overflow = DiskError::OutOfRange { offset: u64::MAX - 511, len: 512, size: 8192 };
        let unaligned = DiskError::OutOfRange { offset: 1, len: 512, size: 8192 };
        let text = String::new;
        let cases = [
            (behind_end.clone(), NbdCommand::Write, Errno::NoSpace),
            (behind_end.clone(), NbdCommand::WriteZeroes { keeps_space: true }, Errno::NoSpace),
            (overflow, NbdCommand::Write, Errno::NoSpace),
            (behind_end.clone(), NbdCommand::Read, Errno::Invalid),
            (behind_end, NbdCommand::Trim, Errno::Invalid),
            (unaligned, NbdCommand::Write, Errno::Invalid),
            (DiskError::NoSpace(text()), NbdCommand::Write, Errno::NoSpace),
            (DiskError::Detached(text()), NbdCommand::Read, Errno::Shutdown),
            (DiskError::Damaged(text()), NbdCommand::Read, Errno::Io),
            (DiskError::Memory(text()), NbdCommand::Read, Errno::Io),
            (DiskError::Failed(text()), NbdCommand::Write, Errno::Io),
        ];
        for (error, command, errno) in cases {
            assert_eq!(NbdFailure::of_disk(&error, command).errno, errno, "{error:?} of {command:?}");
        }
    }
}
