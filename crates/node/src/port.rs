//! The port that clients connect to. A node chooses it at its first start and records it in its
//! configuration.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

/// The first port that a new node tries.
const DEFAULT_PORT: u16 = 7400;
/// The last port that a new node tries after `DEFAULT_PORT`. The ports from `DEFAULT_PORT` to
/// `LAST_PORT` lie outside of the range that the system uses for outgoing TCP traffic. A node
/// therefore usually finds its port free when it starts again.
const LAST_PORT: u16 = 7499;

/// A reservation that keeps other starting nodes from choosing a port, until it is dropped.
///
/// Without a claim, another node could choose the port before the osd listens on it, or while the
/// osd restarts. The claim is a UNIX socket in the abstract namespace of the same network namespace
/// as the port. The claim ends when the last process that holds the socket ends.
#[derive(Debug)]
pub struct PortClaim {
    socket: UnixDatagram,
}

impl PortClaim {
    /// Claims a port; `None` if another node has claimed it.
    fn take(port: u16) -> io::Result<Option<PortClaim>> {
        let name = UnixAddr::from_abstract_name(format!("outboard/port/{port}"))?;
        match UnixDatagram::bind_addr(&name) {
            Ok(socket) => Ok(Some(PortClaim { socket })),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Claims the port of an address; `None` if the address names no port, or if another node has
    /// claimed the port.
    pub fn of(listen: &str) -> Option<PortClaim> {
        let port = listen.rsplit_once(':')?.1.parse().ok().filter(|port| *port != 0)?;
        PortClaim::take(port).ok().flatten()
    }

    /// Makes the processes that this process starts from now on inherit the claim.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn hand_down(&self) -> io::Result<()> {
        Ok(rustix::io::fcntl_setfd(&self.socket, rustix::io::FdFlags::empty())?)
    }
}

/// Listens at `listen` to check that the address can be used.
///
/// # Errors
/// The error of the operating system if the address cannot be used.
pub fn check(listen: &str) -> io::Result<TcpListener> {
    TcpListener::bind(listen)
}

/// Chooses a port of the loopback interface: the first free port from [`DEFAULT_PORT`] to
/// [`LAST_PORT`], or any free port if all of these are taken.
///
/// # Errors
/// If no port is free, or if the operating system reports another error.
pub fn choose() -> io::Result<(SocketAddr, PortClaim)> {
    let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    for port in DEFAULT_PORT..=LAST_PORT {
        if let Some(claim) = PortClaim::take(port)?
            && TcpListener::bind(address(port)).is_ok()
        {
            return Ok((address(port), claim));
        }
    }
    const TRIES: usize = 16;
    for _ in 0..TRIES {
        let free = TcpListener::bind(address(0))?.local_addr()?;
        if let Some(claim) = PortClaim::take(free.port())? {
            return Ok((free, claim));
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_can_be_claimed_by_only_one_node_at_a_time() {
        let (first, claim) = choose().unwrap();
        let (second, _) = choose().unwrap();
        assert_ne!(first, second);
        assert!(PortClaim::of(&first.to_string()).is_none());
        drop(claim);
        assert!(PortClaim::of("127.0.0.1:0").is_none() && PortClaim::of("nonsense").is_none());
    }

    #[test]
    fn a_port_in_use_is_not_chosen() {
        let (first, claim) = choose().unwrap();
        let _listener = TcpListener::bind(first).unwrap();
        drop(claim);
        assert!(check(&first.to_string()).is_err());
        assert_ne!(choose().unwrap().0, first);
    }
}
