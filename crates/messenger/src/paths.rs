//! Paths to a peer that are faster than the base transport. The base transport is always available.
//!
//! A connection begins over the base transport. The server's answer to the handshake lists its
//! other [paths](PathOffer). A client that also supports one of them moves the connection there, by
//! the same resumption that replaces broken transports. If the path fails, the client moves the
//! connection back. The offload health of [`base::health`], which all connections of a stack share,
//! decides whether a path is used. After a failure, a path is not used during its cool-down. The
//! first attempt to connect over the path after the cool-down is a probe, which decides whether the
//! path is used again.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::health::{HealthState, OffloadHealth};

use crate::frame::PathOffer;
use crate::transport::{ConnectTicket, Transport, Wire};

/// Time limit for connecting over a path. After it, the connection continues without the path.
pub(crate) const PATH_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of paths that a server lists in its answer to a handshake.
pub(crate) const MAX_PATHS: usize = 8;

/// Maximum length of a path's name, in bytes.
pub(crate) const MAX_PATH_NAME: usize = 32;

/// A transport that a stack prefers to the base transport, as long as the preferred transport
/// works.
pub struct Path {
    /// The name of the path's kind, such as `ofi:verbs`, by which client and server match their
    /// paths.
    pub(crate) name: String,
    pub(crate) transport: Arc<dyn Transport>,
    /// The address at which a server listens. `None` means the base transport's address
    /// with a free port.
    pub(crate) address: Option<String>,
    /// Whether a new connection fails if it cannot move to the path. If false, the connection stays
    /// on the base transport.
    pub(crate) is_required: bool,
    pub(crate) health: OffloadHealth,
}

impl Path {
    /// Creates an optional path. After a failure, the path is not used for the time `cool_down`.
    #[must_use]
    pub fn new(name: &str, transport: Arc<dyn Transport>, cool_down: Duration) -> Path {
        let health = OffloadHealth::new("network path", cool_down);
        Path { name: name.to_owned(), transport, address: None, is_required: false, health }
    }

    /// Sets the address at which a server listens. Without it, the server uses the base transport's
    /// address with a free port.
    #[must_use]
    pub fn at(mut self, address: Option<String>) -> Path {
        self.address = address;
        self
    }

    /// Sets whether a new connection fails if it cannot move to the path, instead of staying on the
    /// base transport.
    #[must_use]
    pub fn required(mut self, is_required: bool) -> Path {
        self.is_required = is_required;
        self
    }
}

/// A path that both the client and the server of a connection have.
#[derive(Clone)]
pub(crate) struct CommonPath {
    pub(crate) path: Arc<Path>,
    pub(crate) endpoint: String,
}

impl CommonPath {
    /// Chooses the first of `paths` that the server offers. `dialed` is the address at which the
    /// client reached the server.
    pub(crate) fn choose(paths: &[Arc<Path>], offers: &[PathOffer], dialed: &str) -> Option<CommonPath> {
        paths.iter().find_map(|path| {
            let offer = offers.iter().find(|offer| offer.name == path.name)?;
            let endpoint = reachable(&offer.endpoint, dialed)?;
            Some(CommonPath { path: Arc::clone(path), endpoint })
        })
    }

    pub(crate) fn is_active(&self) -> bool {
        self.path.health.report().state == HealthState::Active
    }

    pub(crate) fn failed(&self, why: &str) {
        self.path.health.failed(why, Instant::now());
    }

    /// Waits until the path can be used and dials it. The returned transport has not performed the
    /// handshake yet.
    pub(crate) async fn upgrade(&self, ticket: impl Fn() -> ConnectTicket) -> (Wire, ConnectTicket) {
        loop {
            match self.path.health.probe_at() {
                Some(at) => tokio::time::sleep_until(at).await,
                None if self.is_active() => {}
                // Another connection is probing the path.
                None => tokio::time::sleep(PATH_TIMEOUT).await,
            }
            let probes = self.path.health.begin_probe(Instant::now());
            if !probes && !self.is_active() {
                continue;
            }
            // The guard reports an outcome of the probe even if this connection ends first.
            let probe = Probe { path: &self.path, is_pending: probes };
            let ticket = ticket();
            let dialed = self.path.transport.dial(&self.endpoint, Some(&ticket));
            match tokio::time::timeout(PATH_TIMEOUT, dialed).await {
                Ok(Ok(wire)) => {
                    probe.end(Ok(()));
                    return (wire, ticket);
                }
                Ok(Err(e)) => probe.end(Err(&e.to_string())),
                Err(_) => probe.end(Err("the connection was not established in time")),
            }
        }
    }
}

/// An attempt to connect over a path. Its outcome is reported to the path's health, even if the
/// attempt is dropped.
struct Probe<'a> {
    path: &'a Path,
    /// Whether the path's health waits for the outcome of this attempt.
    is_pending: bool,
}

impl Probe<'_> {
    fn end(mut self, result: Result<(), &str>) {
        if std::mem::take(&mut self.is_pending) {
            self.path.health.probed(result, Instant::now());
        } else if let Err(why) = result {
            self.path.health.failed(why, Instant::now());
        }
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if self.is_pending {
            self.path.health.probed(Err("the attempt to connect was cancelled"), Instant::now());
        }
    }
}

/// Returns an endpoint that the client can reach. If the server listens on all its addresses, this
/// endpoint consists of the address that the client dialled and the offered port.
fn reachable(offered: &str, dialed: &str) -> Option<String> {
    let address: SocketAddr = offered.parse().ok()?;
    let is_any = match address.ip() {
        IpAddr::V4(ip) => ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_unspecified(),
    };
    if !is_any {
        return Some(offered.to_owned());
    }
    let (host, _) = dialed.rsplit_once(':')?;
    Some(format!("{host}:{}", address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_server_address_is_replaced_by_the_dialed_address() {
        assert_eq!(reachable("192.0.2.1:5", "node:7700").as_deref(), Some("192.0.2.1:5"));
        assert_eq!(reachable("0.0.0.0:5", "node:7700").as_deref(), Some("node:5"));
        assert_eq!(reachable("[::]:5", "[2001:db8::1]:7700").as_deref(), Some("[2001:db8::1]:5"));
        assert_eq!(reachable("nonsense", "node:7700"), None);
    }
}
