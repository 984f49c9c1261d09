//! Chooses a network stack by name. No other module parses the names of stacks.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use base::fault::Faults;

use crate::transport::ofi::{Ofi, OfiConfig, ReceiveQueueKind};
use crate::transport::tcp::Tcp;
use crate::{ConnectionConfig, MessengerError, NetworkStack, Path, Result, TcpStack};

/// The provider for RDMA hardware.
const RDMA_PROVIDER: &str = "verbs";

/// The transports that a stack may use. TCP is always one of them: connections begin over it, and
/// continue over it when another transport fails.
///
/// The text form is `auto`, `tcp`, or a list of path names (`ofi:verbs`, `ofi:tcp`, …), separated
/// by commas, with the best path first. A server may add its listening address to a path if it
/// differs from the TCP address: `ofi:verbs@192.0.2.1:7701`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum StackChoice {
    /// RDMA if both sides have it, and otherwise TCP.
    #[default]
    Auto,
    /// TCP and these paths. A client uses the first of these paths that its server offers. The
    /// client fails to connect if the server offers none of the paths, or if the chosen path fails.
    Paths(Vec<PathName>),
}

/// A path, named by its libfabric provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathName {
    /// The provider, such as `verbs`.
    pub provider: String,
    /// The address at which a server listens on the path. `None` means the server's TCP address
    /// with a free port.
    pub address: Option<String>,
}

impl StackChoice {
    /// The choice of TCP without any path.
    pub const TCP: StackChoice = StackChoice::Paths(Vec::new());

    /// Returns the choice of a further listener of the same server: the ports of the addresses of
    /// paths are greater by `offset`. Port 0, which lets the system choose, stays 0, and so does an
    /// address without a valid port.
    #[must_use]
    pub fn with_port_offset(&self, offset: u16) -> StackChoice {
        let shifted = |address: &String| {
            let (host, port) = fixed_port(address)?;
            Some(format!("{host}:{}", port.checked_add(offset)?))
        };
        let path = |path: &PathName| PathName {
            provider: path.provider.clone(),
            address: path.address.as_ref().map(|address| shifted(address).unwrap_or_else(|| address.clone())),
        };
        match self {
            StackChoice::Auto => StackChoice::Auto,
            StackChoice::Paths(paths) => StackChoice::Paths(paths.iter().map(path).collect()),
        }
    }

    /// Returns whether a server listens on a fixed port for one of the paths.
    #[must_use]
    pub fn has_fixed_port(&self) -> bool {
        match self {
            StackChoice::Auto => false,
            StackChoice::Paths(paths) => {
                paths.iter().filter_map(|path| path.address.as_deref()).any(|at| fixed_port(at).is_some())
            }
        }
    }
}

/// Returns the host and the port of an address; `None` if the address does not fix the port.
fn fixed_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port.parse().ok().filter(|port| *port != 0)?))
}

/// Error: the text names no stack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a network stack; use `auto`, `tcp`, or `ofi:PROVIDER`, e.g. `ofi:verbs` or `ofi:tcp`")]
pub struct NoSuchStack(String);

impl FromStr for StackChoice {
    type Err = NoSuchStack;

    fn from_str(text: &str) -> std::result::Result<StackChoice, NoSuchStack> {
        if text == "auto" {
            return Ok(StackChoice::Auto);
        }
        let names = text.split(',').map(str::trim).filter(|name| *name != "tcp");
        let paths: std::result::Result<Vec<PathName>, NoSuchStack> = names
            .map(|name| {
                let no = || NoSuchStack(name.to_owned());
                let (provider, address) = match name.strip_prefix("ofi:").ok_or_else(no)?.split_once('@') {
                    Some((provider, address)) => (provider, Some(address.to_owned())),
                    None => (name.strip_prefix("ofi:").ok_or_else(no)?, None),
                };
                let is_name = !provider.is_empty() && provider.len() <= 24;
                let is_name =
                    is_name && provider.chars().all(|c| c.is_ascii_alphanumeric() || "_;-".contains(c));
                if is_name { Ok(PathName { provider: provider.to_owned(), address }) } else { Err(no()) }
            })
            .collect();
        paths.map(StackChoice::Paths)
    }
}

impl fmt::Display for StackChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StackChoice::Auto => f.write_str("auto"),
            StackChoice::Paths(paths) if paths.is_empty() => f.write_str("tcp"),
            StackChoice::Paths(paths) => {
                for (i, path) in paths.iter().enumerate() {
                    let comma = if i == 0 { "" } else { "," };
                    write!(f, "{comma}ofi:{}", path.provider)?;
                    if let Some(address) = &path.address {
                        write!(f, "@{address}")?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// Options with which [`open`] creates a network stack.
#[derive(Debug, Clone)]
pub struct StackOptions {
    /// Configuration of the stack's connections.
    pub connection: ConnectionConfig,
    /// Local address from which clients connect over TCP. `None` lets the system choose.
    pub source: Option<IpAddr>,
    /// Whether the connections over libfabric share receive buffers.
    pub receive_queue: ReceiveQueueKind,
    /// Time for which a libfabric stack polls for events before it sleeps. After repeated polls
    /// without events, the stack mostly sleeps without polling first.
    pub spin: Duration,
    /// Time for which a failed path is not used.
    pub cool_down: Duration,
    /// Faults to inject into the paths.
    pub faults: Faults,
}

impl Default for StackOptions {
    fn default() -> Self {
        StackOptions {
            connection: ConnectionConfig::default(),
            source: None,
            receive_queue: ReceiveQueueKind::default(),
            spin: Duration::from_micros(20),
            cool_down: Duration::from_secs(30),
            faults: Faults::default(),
        }
    }
}

/// Opens a stack for a server or for clients. If a client's stack has a path besides TCP, the stack
/// starts a thread that serves the connections.
///
/// # Errors
/// If the machine lacks a path that `choice` names, or if the thread cannot be started.
pub fn open(choice: &StackChoice, options: &StackOptions, use_as: UseAs) -> Result<Arc<dyn NetworkStack>> {
    let transport = Tcp { source: options.source };
    let mut stack = TcpStack::over(transport, options.connection.clone());
    let automatic = [PathName { provider: RDMA_PROVIDER.to_owned(), address: None }];
    let (names, is_required) = match choice {
        // Without an RDMA device, do not load libfabric, because loading takes time.
        StackChoice::Auto if !has_rdma_device() => ([].as_slice(), false),
        StackChoice::Auto => (automatic.as_slice(), false),
        StackChoice::Paths(paths) => (paths.as_slice(), true),
    };
    let mut has_paths = false;
    for PathName { provider, address } in names {
        let StackOptions { receive_queue, spin, ref faults, .. } = *options;
        let config = OfiConfig { receive_queue, spin, faults: faults.clone(), ..OfiConfig::new(provider) };
        let name = format!("ofi:{provider}");
        match Ofi::new(config) {
            Ok(ofi) => {
                let path = Path::new(&name, Arc::new(ofi), options.cool_down);
                stack = stack.with_path(path.at(address.clone()).required(is_required));
                has_paths = true;
            }
            Err(e) if is_required => {
                return Err(MessengerError::NetworkUnusable { network: name, reason: e.to_string() });
            }
            Err(e) => tracing::debug!(path = name, reason = %e, "the network path is not used"),
        }
    }
    if has_paths && use_as == UseAs::Client {
        stack = stack.on_own_thread().map_err(|e| MessengerError::NetworkUnusable {
            network: choice.to_string(),
            reason: e.to_string(),
        })?;
    }
    Ok(Arc::new(stack))
}

/// Whether the kernel has an RDMA device.
fn has_rdma_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// The purpose for which a stack is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseAs {
    /// To connect. If the stack has a path besides TCP, a separate thread serves the connections,
    /// even while the user's thread is busy.
    Client,
    /// To listen. The thread that listens serves the connections.
    Server,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_listeners_use_greater_ports() {
        let choice: StackChoice = "ofi:verbs@192.0.2.1:7701,ofi:tcp@[::1]:0,ofi:tcp".parse().unwrap();
        let further = choice.with_port_offset(3).to_string();
        assert_eq!(further, "ofi:verbs@192.0.2.1:7704,ofi:tcp@[::1]:0,ofi:tcp");
        assert!(choice.has_fixed_port());
        for text in ["auto", "tcp", "ofi:verbs", "ofi:tcp@[::1]:0"] {
            assert!(!text.parse::<StackChoice>().unwrap().has_fixed_port(), "{text}");
        }
    }

    #[test]
    fn a_stack_choice_is_parsed_from_its_displayed_text() {
        for text in ["auto", "tcp", "ofi:verbs", "ofi:verbs@192.0.2.1:7701,ofi:tcp"] {
            assert_eq!(text.parse::<StackChoice>().map(|choice| choice.to_string()).as_deref(), Ok(text));
        }
        assert_eq!("ofi:verbs,tcp".parse::<StackChoice>().map(|c| c.to_string()).as_deref(), Ok("ofi:verbs"));
        for text in ["", "rdma", "ofi:", "ofi", "ofi:a b", "tcp,,"] {
            assert!(text.parse::<StackChoice>().is_err(), "{text:?}");
        }
    }
}
