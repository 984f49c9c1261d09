//! The second process of a measurement.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use base::process::{ProcessUsage, Usage};
use serde::{Deserialize, Serialize};

use super::RpcMode;
use node::failure::{Doing, Failure, Result};

/// What the peer process of an RPC measurement does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum PeerJob {
    /// Accept connections of the messenger, and answer their messages as the mode requires.
    Serve { stack: PeerStack, address: String, mode: RpcMode },
    /// Connect to an endpoint of the messenger, and offer memory for bulk transfers of the mode.
    Offer { stack: PeerStack, endpoint: String, mode: RpcMode, size: u64, in_flight: u32 },
    /// Accept a TCP connection, and send back all bytes that arrive.
    BareEcho { address: String },
    /// Accept a libfabric connection, and expose memory to `fi_read`.
    BareMemory { provider: String, address: String, size: u64, spins: bool },
}

/// The network stack of the peer process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeerStack {
    /// The name of the stack.
    pub name: String,
    /// Time for which the stack polls before it sleeps, in microseconds.
    pub spin_us: u64,
    /// The credential file of the peer process. It names the first process as the node.
    pub credentials: PathBuf,
}

/// A handle on the second process. Dropping it ends the process.
pub struct PeerProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl PeerProcess {
    pub fn start(job: &PeerJob) -> Result<PeerProcess> {
        let doing = "starting the second process";
        let program = std::env::current_exe().doing(doing)?;
        let job = serde_json::to_string(job).doing(doing)?;
        let mut child = Command::new(program)
            .args(["rpc", "--peer", &job])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .doing(doing)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err(Failure::new(doing, "the process has no standard input or output"));
        };
        Ok(PeerProcess { child, input, output: BufReader::new(output) })
    }

    /// Returns the next line of the process's output.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).doing("reading the output of the second process")?;
        match line.trim_end() {
            "" => Err(Failure::new(
                "reading the output of the second process",
                "the process has ended; see its error above",
            )),
            line => Ok(line.to_owned()),
        }
    }

    /// Queries how many bytes the messenger of the process has copied.
    pub fn copied_bytes(&mut self) -> Result<u64> {
        writeln!(self.input, "copied").doing("querying the second process")?;
        self.line()?.parse().doing("reading the output of the second process")
    }

    /// Returns the CPU use of the process so far.
    pub fn usage(&self) -> Result<Usage> {
        Ok(self.read()?.total)
    }

    pub fn read(&self) -> Result<ProcessUsage> {
        ProcessUsage::read(self.child.id()).doing("reading the CPU time of the second process")
    }

    /// Returns the resident memory of the process, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        resident_bytes(self.child.id())
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // Ignore errors: the process may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the resident memory of process `pid`, in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// Adds the CPU use of both processes.
pub fn sum(a: Usage, b: Usage) -> Usage {
    Usage {
        cpu_ns: a.cpu_ns + b.cpu_ns,
        user_ns: a.user_ns + b.user_ns,
        context_switches: a.context_switches + b.context_switches,
        wake_ups: a.wake_ups + b.wake_ups,
    }
}
