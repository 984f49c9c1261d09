//! Runs a cleanup script when this process ends, even by a signal.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::Result;

/// Runs a shell script when it is dropped, or when this process ends, even by a signal.
///
/// A shell in its own process group waits until its input ends, and then runs the script. The input
/// is a pipe whose other end only this process has open, so the input ends with this process.
#[derive(Debug)]
pub struct Cleaner(Child);

impl Cleaner {
    /// Starts the shell that waits and then runs `script`. The script receives `args` as `$1`, `$2`
    /// and so on.
    ///
    /// # Errors
    /// If the shell cannot be started.
    pub fn watch<S: AsRef<OsStr>>(script: &str, args: impl IntoIterator<Item = S>) -> Result<Cleaner> {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("cat\n{script}"), "cleaner"]).args(args);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Cleaner(shell.process_group(0).spawn()?))
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // Ignore an error: at worst, files are left behind.
        let _ = self.0.wait();
    }
}
