//! File descriptors of a process: counts them, and reads and raises their limit.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number and limit of a process's file descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdUsage {
    /// Number of open descriptors.
    pub open: u64,
    /// Soft limit of open descriptors; `u64::MAX` for no limit.
    pub most: u64,
}

impl FdUsage {
    /// Returns the number and the limit of the descriptors of process `pid`.
    ///
    /// # Errors
    /// If the process does not exist, or if this user may not inspect it.
    pub fn of(pid: u32) -> io::Result<FdUsage> {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
        let soft = limits.lines().find_map(|line| {
            line.strip_prefix("Max open files").and_then(|rest| rest.split_ascii_whitespace().next())
        });
        let most = soft.and_then(|soft| if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() });
        let most = most.ok_or_else(|| {
            io::Error::other("the limits of the process do not contain a limit of open files")
        })?;
        Ok(FdUsage { open, most })
    }
}

/// Raises this process's soft limit of descriptors to the hard limit. Returns the limit before and
/// after; `None` means no limit.
///
/// # Errors
/// If the operating system reports an error.
pub fn raise_limit() -> io::Result<(Option<u64>, Option<u64>)> {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: before.maximum, maximum: before.maximum })?;
    Ok((before.current, before.maximum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_limit_and_open_descriptors_are_counted() {
        let (_, now) = raise_limit().unwrap();
        let before = FdUsage::of(std::process::id()).unwrap();
        assert_eq!(before.most, now.unwrap_or(u64::MAX));
        let files: Vec<_> = (0..50).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let after = FdUsage::of(std::process::id()).unwrap();
        // Other tests in this process open and close descriptors, too.
        assert!(after.open >= 50 && after.open + 25 > before.open, "{before:?} {after:?}");
        drop(files);
    }
}
