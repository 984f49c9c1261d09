//! Where a store's process listens for its osd.

use std::fmt;
use std::net::TcpListener;
use std::path::PathBuf;
use std::str::FromStr;

use proxy::{StoreEndpoint, StoreListener};

use super::cpus::Cpus;

/// A UNIX socket (`run/store.sock`) or a TCP address (`tcp:10.0.0.7:7401`). Payload goes by DMA beside a UNIX socket with
/// every engine, and beside TCP with the engine `ofi`; with `shm` everything goes through the TCP connection. TCP is not
/// authenticated: for trusted networks only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAddress {
    /// A path.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl FromStr for StoreAddress {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<StoreAddress, Self::Err> {
        Ok(match text.strip_prefix("tcp:") {
            Some(address) => StoreAddress::Tcp(address.to_owned()),
            None => StoreAddress::Unix(text.into()),
        })
    }
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreAddress::Unix(path) => write!(f, "{}", path.display()),
            StoreAddress::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl StoreAddress {
    /// CPUs for a process at this end: over TCP the other end may be another machine, so there is nothing to divide.
    pub fn cpus(&self, configured: Cpus) -> Cpus {
        match (self, configured) {
            (StoreAddress::Tcp(_), Cpus::Auto) => Cpus::Any,
            (_, configured) => configured,
        }
    }

    /// Listens there.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self) -> std::io::Result<StoreListener> {
        match self {
            StoreAddress::Unix(path) => StoreListener::unix(path),
            StoreAddress::Tcp(address) => Ok(StoreListener::Tcp(TcpListener::bind(address)?)),
        }
    }

    /// For connecting to it.
    pub fn endpoint(&self) -> StoreEndpoint {
        match self {
            StoreAddress::Unix(path) => StoreEndpoint::Unix(path.clone()),
            StoreAddress::Tcp(address) => StoreEndpoint::Tcp(address.clone()),
        }
    }
}
