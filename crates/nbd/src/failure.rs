//! [`Failure`]: the error of a request, as the client sees it.

use disk::DiskError;

use crate::request::Command;

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
pub(crate) struct Failure {
    /// Error number for programs.
    pub errno: Errno,
    /// Text for a user, which only structured replies contain.
    pub text: String,
}

impl Failure {
    /// Creates a failure.
    pub fn new(errno: Errno, text: impl Into<String>) -> Failure {
        Failure { errno, text: text.into() }
    }

    /// Returns the failure for an error of the disk.
    pub fn of_disk(error: &DiskError, command: Command) -> Failure {
        let errno = match error {
            DiskError::OutOfRange { offset, len, size } => {
                let is_behind_end = offset.checked_add(*len).is_none_or(|end| end > *size);
                let needs_space = matches!(command, Command::Write | Command::WriteZeroes { .. });
                if is_behind_end && needs_space { Errno::NoSpace } else { Errno::Invalid }
            }
            DiskError::NoSpace(_) => Errno::NoSpace,
            DiskError::Detached(_) => Errno::Shutdown,
            _ => Errno::Io,
        };
        Failure::new(errno, error.to_string())
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
            (behind_end.clone(), Command::Write, Errno::NoSpace),
            (behind_end.clone(), Command::WriteZeroes { keeps_space: true }, Errno::NoSpace),
            (overflow, Command::Write, Errno::NoSpace),
            (behind_end.clone(), Command::Read, Errno::Invalid),
            (behind_end, Command::Trim, Errno::Invalid),
            (unaligned, Command::Write, Errno::Invalid),
            (DiskError::NoSpace(text()), Command::Write, Errno::NoSpace),
            (DiskError::Detached(text()), Command::Read, Errno::Shutdown),
            (DiskError::Damaged(text()), Command::Read, Errno::Io),
            (DiskError::Memory(text()), Command::Read, Errno::Io),
            (DiskError::Failed(text()), Command::Write, Errno::Io),
        ];
        for (error, command, errno) in cases {
            assert_eq!(Failure::of_disk(&error, command).errno, errno, "{error:?} of {command:?}");
        }
    }
}
