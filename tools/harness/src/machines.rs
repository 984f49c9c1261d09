//! Two network namespaces that a link joins, in place of two machines.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::Result;

/// Address of the node's side of the link.
pub const NODE_ADDRESS: &str = "10.77.0.1";

/// Makes the namespaces and the link, reports that they exist, and waits until its input ends. The
/// namespaces end with this shell and the programs in them.
const MAKE: &str = "set -e
mount -t tmpfs none /run
mkdir -p /run/netns
for machine in node client; do
    ip netns add $machine
    ip -n $machine link set lo up
done
ip link add eth0 netns node type veth peer name eth0 netns client
ip -n node addr add 10.77.0.1/24 dev eth0
ip -n client addr add 10.77.0.2/24 dev eth0
for machine in node client; do
    ip -n $machine link set eth0 up
    # Over loopback, connections of the node use this congestion control too.
    ip -n $machine route change 10.77.0.0/24 dev eth0 congctl reno
done
echo ready
exec cat";

/// One of the namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// The node's.
    Node,
    /// The client's.
    Client,
}

impl Machine {
    fn name(self) -> &'static str {
        match self {
            Machine::Node => "node",
            Machine::Client => "client",
        }
    }
}

/// The namespaces. Dropping the value stops the process that keeps them. Programs in them should have
/// ended before.
#[derive(Debug)]
pub struct Machines(Child);

impl Machines {
    /// Makes the namespaces. No privileges are necessary if the system allows user namespaces.
    ///
    /// # Errors
    /// If the system does not allow it, or the programs `unshare`, `nsenter`, `ip` and `tc` are missing.
    pub fn make() -> Result<Machines> {
        let mut holder = Command::new("unshare")
            .args(["--map-root-user", "--net", "--mount", "sh", "-c", MAKE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("unshare cannot be started: {e}"))?;
        let mut said = String::new();
        let output = holder.stdout.take().ok_or("the shell has no standard output")?;
        BufReader::new(output).read_line(&mut said)?;
        let machines = Machines(holder);
        if said.trim() == "ready" { Ok(machines) } else { Err(machines.failure().into()) }
    }

    fn failure(mut self) -> String {
        drop(self.0.stdin.take());
        let said = self.0.stderr.take().map(std::io::read_to_string);
        let said = said.and_then(std::result::Result::ok).unwrap_or_default();
        format!("network namespaces cannot be made: {}", said.trim())
    }

    /// Returns the beginning of the command line of a program that runs in a namespace.
    #[must_use]
    pub fn enter(&self, machine: Machine) -> Vec<String> {
        let pid = self.0.id().to_string();
        let into = ["nsenter", "--target", &pid, "--user", "--preserve-credentials", "--mount", "--net"];
        let exec = ["ip", "netns", "exec", machine.name()];
        into.into_iter().chain(exec).map(str::to_owned).collect()
    }

    /// Limits the rate of the link in both directions with a token bucket, in bits per second. `None`
    /// removes the limit.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn shape(&self, bits_per_second: Option<u64>) -> Result<()> {
        for machine in [Machine::Node, Machine::Client] {
            let rate = bits_per_second.map(|rate| format!("{rate}bit"));
            let bucket =
                ["root", "tbf", "rate", rate.as_deref().unwrap_or(""), "burst", "256kb", "latency", "20ms"];
            let discipline: &[&str] = match rate {
                Some(_) => &bucket,
                None => &["root", "pfifo"],
            };
            let tc = [&["tc", "qdisc", "replace", "dev", "eth0"], discipline].concat();
            let command = [self.enter(machine), tc.iter().map(|part| (*part).to_owned()).collect()].concat();
            let output = Command::new(&command[0]).args(&command[1..]).output()?;
            if !output.status.success() {
                let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                return Err(format!("the link cannot be shaped: {why}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // Ignore an error: the shell ends with this process at the latest.
        let _ = self.0.wait();
    }
}
