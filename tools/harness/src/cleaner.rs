//! Runs a cleanup script when this process ends, even by a signal.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::Result;

/// Runs a shell script when it is dropped, or when this process ends, even by a signal.
///
/// The script waits in a process group of its own for the end of its input. Only this process holds the other end open.
#[derive(Debug)]
pub struct Cleaner(Child);

impl Cleaner {
    /// Starts the shell. `script` gets `args` as `$1`, `$2` and so on.
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
        // A failure leaves files behind, at worst.
        let _ = self.0.wait();
    }
}
