//! The choice of a network stack. Only here do stacks have names.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::transport::ofi::{Ofi, OfiConfig, ReceiveQueueKind};
use crate::transport::tcp::Tcp;
use crate::{MessengerError, NetworkStack, Path, Result, SessionConfig, TcpStack};

/// What RDMA hardware is reached by.
const RDMA_PROVIDER: &str = "verbs";

/// The transports that may be used. TCP always may: sessions begin over it, and go on over it when another one fails.
///
/// As text: `auto`, `tcp`, or names of paths, separated by commas, the best first: `ofi:verbs`, `ofi:tcp`, …, each with where a
/// server listens, if that is not at its address for TCP: `ofi:verbs@192.0.2.1:7701`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum StackChoice {
    /// RDMA where both sides have it.
    #[default]
    Auto,
    /// These, beside TCP. A client that cannot use the best of them that its server has is told so.
    Paths(Vec<PathName>),
}

/// A path by its provider of libfabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathName {
    /// The provider, e.g. `verbs`.
    pub provider: String,
    /// Where a server listens.
    pub address: Option<String>,
}

impl StackChoice {
    /// TCP alone.
    pub const TCP: StackChoice = StackChoice::Paths(Vec::new());
}

/// Text that names no stack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no network stack; use `auto`, `tcp`, or `ofi:PROVIDER`, e.g. `ofi:verbs` or `ofi:tcp`")]
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

/// How a stack behaves.
#[derive(Debug, Clone)]
pub struct StackOptions {
    /// Its sessions.
    pub session: SessionConfig,
    /// Address of this machine that clients connect from over TCP; `None` leaves the choice to the system.
    pub source: Option<IpAddr>,
    /// Whose receive buffers are, on stacks that post them.
    pub receive_queue: ReceiveQueueKind,
    /// How long to look again before sleeping, while that pays.
    pub spin: Duration,
    /// How long a path that failed is left alone.
    pub cool_down: Duration,
}

impl Default for StackOptions {
    fn default() -> Self {
        StackOptions {
            session: SessionConfig::default(),
            source: None,
            receive_queue: ReceiveQueueKind::default(),
            spin: Duration::from_micros(20),
            cool_down: Duration::from_secs(30),
        }
    }
}

/// Opens a stack for a server, or for clients: these are then served by a thread of the stack's own if a path needs that.
///
/// # Errors
/// If a path is asked for by name that this machine has not.
pub fn open(choice: &StackChoice, options: &StackOptions, use_as: UseAs) -> Result<Arc<dyn NetworkStack>> {
    let transport = Tcp { source: options.source };
    let mut stack = TcpStack::over(transport, options.session.clone());
    let automatic = [PathName { provider: RDMA_PROVIDER.to_owned(), address: None }];
    let (names, is_required) = match choice {
        // Loading the library takes its time; without a device it is for nothing.
        StackChoice::Auto if !has_rdma_device() => ([].as_slice(), false),
        StackChoice::Auto => (automatic.as_slice(), false),
        StackChoice::Paths(paths) => (paths.as_slice(), true),
    };
    let mut has_paths = false;
    for PathName { provider, address } in names {
        let OfiConfig { packet_memory_bytes, .. } = OfiConfig::new(provider);
        let StackOptions { receive_queue, spin, .. } = *options;
        let config = OfiConfig { provider: provider.clone(), receive_queue, spin, packet_memory_bytes };
        let name = format!("ofi:{provider}");
        match Ofi::new(config) {
            Ok(ofi) => {
                let path = Path::new(&name, Arc::new(ofi), options.cool_down);
                stack = stack.with_path(path.at(address.clone()).required(is_required));
                has_paths = true;
            }
            Err(e) if is_required => {
                return Err(MessengerError::Unreachable { endpoint: name, reason: e.to_string() });
            }
            Err(e) => tracing::debug!(path = name, reason = %e, "not used"),
        }
    }
    if has_paths && use_as == UseAs::Client {
        stack = stack.on_own_thread().map_err(|e| MessengerError::Unreachable {
            endpoint: choice.to_string(),
            reason: e.to_string(),
        })?;
    }
    Ok(Arc::new(stack))
}

/// Whether the kernel knows a device that does RDMA.
fn has_rdma_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// What a stack is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseAs {
    /// To connect. Sessions are served also while the user's thread does something else.
    Client,
    /// To listen. Sessions are served by the thread that does.
    Server,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["auto", "tcp", "ofi:verbs", "ofi:verbs@192.0.2.1:7701,ofi:tcp"] {
            assert_eq!(text.parse::<StackChoice>().map(|choice| choice.to_string()).as_deref(), Ok(text));
        }
        assert_eq!("ofi:verbs,tcp".parse::<StackChoice>().map(|c| c.to_string()).as_deref(), Ok("ofi:verbs"));
        for text in ["", "rdma", "ofi:", "ofi", "ofi:a b", "tcp,,"] {
            assert!(text.parse::<StackChoice>().is_err(), "{text:?}");
        }
    }
}
