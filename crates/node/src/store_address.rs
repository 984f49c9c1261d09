//! The address at which a store's process listens for its osd.

use std::fmt;
use std::net::TcpListener;
use std::path::PathBuf;
use std::str::FromStr;

use proxy::{StoreEndpoint, StoreListener};

use super::cpus::Cpus;

/// A UNIX socket (`run/store.sock`) or a TCP address (`tcp:10.0.0.7:7401`). With a UNIX socket,
/// every engine transfers payload by DMA. With TCP, only the engine `ofi` transfers payload by DMA;
/// the engine `shm` is not used, and all payload goes through the TCP stream. Over TCP, both ends
/// prove their keys, but the data is not encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAddress {
    /// Path of a UNIX socket.
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
    /// Returns the CPUs for the process at one end of this connection. Over TCP, the other end may
    /// be on a different machine, so the two processes do not divide the CPUs of one machine.
    pub fn cpus(&self, configured: Cpus) -> Cpus {
        match (self, configured) {
            (StoreAddress::Tcp(_), Cpus::Auto) => Cpus::Any,
            (_, configured) => configured,
        }
    }

    /// Listens at this address.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn listen(&self) -> std::io::Result<StoreListener> {
        match self {
            StoreAddress::Unix(path) => StoreListener::unix(path),
            StoreAddress::Tcp(address) => Ok(StoreListener::Tcp(TcpListener::bind(address)?)),
        }
    }

    /// Returns the endpoint for connecting to this address.
    pub fn endpoint(&self) -> StoreEndpoint {
        match self {
            StoreAddress::Unix(path) => StoreEndpoint::Unix(path.clone()),
            StoreAddress::Tcp(address) => StoreEndpoint::Tcp(address.clone()),
        }
    }
}
