//! The ports that clients connect to: one per shard, one after the other. A node chooses the first of
//! them at its first start and records it in its configuration.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

use base::entropy;

/// The first port that a new node tries.
const DEFAULT_PORT: u16 = 7400;
/// The last port that a new node tries after `DEFAULT_PORT`. The ports from `DEFAULT_PORT` to
/// `LAST_PORT` lie outside of the range that the system uses for outgoing TCP traffic. A node
/// therefore usually finds its port free when it starts again.
const LAST_PORT: u16 = 7499;
/// The ports that a new node tries if there are not enough ports in a row up to `LAST_PORT`. They too
/// lie below the system's range for outgoing traffic, so no connection, not even a closed one that the
/// system remembers for a minute, breaks the row.
pub(super) const FURTHER_PORTS: RangeInclusive<u16> = 20_000..=32_767;

pub(super) fn port_of(listen: &str) -> Option<u16> {
    listen.rsplit_once(':')?.1.parse().ok()
}

/// Replaces port 0 in the address `listen` by a port of [`FURTHER_PORTS`] that is free and that no
/// other node has claimed, as are the ports of `shards - 1` further shards after it. An osd that
/// restarts can then listen to the same ports. Also returns a claim on the ports. Returns other
/// addresses, and addresses that cannot be used, as they are, without a claim.
///
/// The system would choose a port of its range for outgoing traffic. A connection of another program
/// could then take the port between this call and the moment at which the osd listens.
pub fn settle(listen: &str, shards: u16) -> (String, Option<PortClaim>) {
    let unchanged = || (listen.to_owned(), None);
    let Some((host, "0")) = listen.rsplit_once(':') else { return unchanged() };
    if TcpListener::bind(listen).is_err() {
        return unchanged();
    }
    let claimed =
        |first| claim_row(host, first, shards).map(|claim| (format!("{host}:{first}"), Some(claim)));
    let settled = further_ports().take(TRIES).find_map(claimed);
    settled.unwrap_or_else(unchanged)
}

/// Returns the ports of [`FURTHER_PORTS`], beginning with a random one: other nodes rarely choose the
/// same port, also while this node is down.
pub(super) fn further_ports() -> impl Iterator<Item = u16> {
    let (first, last) = FURTHER_PORTS.into_inner();
    let start = first + entropy::random::<u16>() % (last - first + 1);
    (start..=last).chain(first..start)
}

/// Claims the ports of `shards` shards, of which the first is `first`. Returns `None` if a port is not
/// in [`FURTHER_PORTS`], not free at `host`, or claimed by another node.
fn claim_row(host: &str, first: u16, shards: u16) -> Option<PortClaim> {
    let row = ports(first, shards).filter(|row| FURTHER_PORTS.contains(row.end()))?;
    let claim = |port: u16| {
        let socket = PortClaim::take(port).ok().flatten()?;
        TcpListener::bind(format!("{host}:{port}")).is_ok().then_some(socket)
    };
    Some(PortClaim { sockets: row.map(claim).collect::<Option<_>>()? })
}

/// Returns how many of `shards` shards, of which the first listens at the address `listen`, have a port
/// that is free; at least 1. The first port counts as free.
pub fn free_for_shards(listen: &str, shards: u16) -> u16 {
    let Some((host, port)) =
        listen.rsplit_once(':').zip(port_of(listen)).map(|((host, _), port)| (host, port))
    else {
        return shards;
    };
    if port == 0 {
        return shards;
    }
    let is_free = |shard: &u16| {
        let port = port.checked_add(*shard);
        port.is_some_and(|port| TcpListener::bind(format!("{host}:{port}")).is_ok())
    };
    1 + (1..shards).take_while(is_free).count() as u16
}

/// Returns the ports of `shards` shards, of which the first is `first`; `None` if there are not enough
/// ports after `first`.
fn ports(first: u16, shards: u16) -> Option<RangeInclusive<u16>> {
    Some(first..=first.checked_add(shards.max(1) - 1)?)
}

/// Number of ports from which a row of free ports may begin.
const TRIES: usize = 4096;

/// A reservation that keeps other starting nodes from choosing the ports of a node's shards, until it
/// is dropped.
///
/// Without a claim, another node could choose a port before the osd listens on it, or while the osd
/// restarts. The claim consists of a UNIX socket per port, in the abstract namespace of the same
/// network namespace as the ports. The claim ends when the last process that holds the sockets ends.
#[derive(Debug)]
pub struct PortClaim {
    sockets: Vec<UnixDatagram>,
}

impl PortClaim {
    /// Claims one port; `None` if another node has claimed it.
    fn take(port: u16) -> io::Result<Option<UnixDatagram>> {
        let name = UnixAddr::from_abstract_name(format!("outboard/port/{port}"))?;
        match UnixDatagram::bind_addr(&name) {
            Ok(socket) => Ok(Some(socket)),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Claims the ports of `shards` shards, of which the first listens at the address `listen`, up to
    /// the first port that another node has claimed. Returns `None` if the address names no port, or if
    /// another node has claimed the first port.
    pub fn of(listen: &str, shards: u16) -> Option<PortClaim> {
        let first = port_of(listen).filter(|port| *port != 0)?;
        let claims = ports(first, shards).unwrap_or(first..=u16::MAX).map(PortClaim::take);
        let sockets: Vec<UnixDatagram> = claims.map_while(|claim| claim.ok().flatten()).collect();
        (!sockets.is_empty()).then_some(PortClaim { sockets })
    }

    /// Makes the processes that this process starts from now on inherit the claim.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn hand_down(&self) -> io::Result<()> {
        for socket in &self.sockets {
            rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    }
}

/// Listens at `listen` to check that the address can be used.
///
/// # Errors
/// The error of the operating system if the address cannot be used.
pub fn check(listen: &str) -> io::Result<TcpListener> {
    TcpListener::bind(listen)
}

/// Chooses ports of the loopback interface for `shards` shards: the first free ports in a row from
/// [`DEFAULT_PORT`] to [`LAST_PORT`], or in [`FURTHER_PORTS`] if these are taken. Returns the address
/// of the first.
///
/// # Errors
/// If no such ports are free, or if the operating system reports another error.
pub fn choose(shards: u16) -> io::Result<(SocketAddr, PortClaim)> {
    let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let shards = shards.max(1);
    for range in [DEFAULT_PORT..=LAST_PORT, FURTHER_PORTS] {
        // The claims of the free ports in a row that end with the last port looked at.
        let mut sockets = Vec::new();
        for port in range {
            match PortClaim::take(port)? {
                Some(socket) if TcpListener::bind(address(port)).is_ok() => sockets.push(socket),
                _ => sockets.clear(),
            }
            if sockets.len() == usize::from(shards) {
                return Ok((address(port - (shards - 1)), PortClaim { sockets }));
            }
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_can_be_claimed_by_only_one_node_at_a_time() {
        let (first, claim) = choose(1).unwrap();
        let (second, _) = choose(1).unwrap();
        assert_ne!(first, second);
        assert!(PortClaim::of(&first.to_string(), 1).is_none());
        drop(claim);
        assert!(PortClaim::of("127.0.0.1:0", 1).is_none() && PortClaim::of("nonsense", 1).is_none());
    }

    #[test]
    fn the_ports_of_all_shards_are_claimed() {
        for shards in [2, 16, 64, 200] {
            let (first, claim) = choose(shards).unwrap();
            for shard in [0, 1, shards - 1] {
                let port = SocketAddr::new(first.ip(), first.port() + shard).to_string();
                assert!(PortClaim::of(&port, 1).is_none(), "{port} is claimed");
                assert!(check(&port).is_ok(), "{port} is free");
            }
            assert_eq!(claim.sockets.len(), usize::from(shards));
        }
    }

    #[test]
    fn ports_in_use_by_outgoing_traffic_do_not_break_a_long_row() {
        // No 200 ports in a row are free in the system's usual range for outgoing traffic.
        let busy: Vec<_> = (32_768..=60_999)
            .step_by(150)
            .map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)))
            .collect();
        let (first, _claim) = choose(200).unwrap();
        assert!(FURTHER_PORTS.contains(&first.port()), "{first}");
        drop(busy);
    }

    #[test]
    fn a_node_claims_its_ports_up_to_a_neighbours_port() {
        // Other tests claim the first hundreds of these ports.
        let settled = (0..100).map(|_| settle("127.0.0.1:0", 3).0);
        let first = settled.map(|address| address.parse::<SocketAddr>().unwrap());
        let first = first.into_iter().find(|first| first.port() > 22_000).unwrap();
        let port = |shard| SocketAddr::new(first.ip(), first.port() + shard).to_string();
        let neighbour = PortClaim::of(&port(2), 1).unwrap();
        assert_eq!(PortClaim::of(&port(0), 3).unwrap().sockets.len(), 2);
        assert!(PortClaim::of(&port(2), 3).is_none());
        drop(neighbour);
        let _listener = TcpListener::bind(port(1)).unwrap();
        assert_eq!([1, 2, 3].map(|shards| free_for_shards(&port(0), shards)), [1, 1, 1]);
        assert_eq!(free_for_shards(&port(2), 1), 1);
        assert_eq!(free_for_shards("127.0.0.1:65535", 3), 1);
        assert_eq!(free_for_shards("127.0.0.1:0", 3), 3);
    }

    #[test]
    fn port_0_becomes_a_port_that_is_followed_by_free_ports() {
        let (settled, claim) = settle("127.0.0.1:0", 4);
        assert!(FURTHER_PORTS.contains(&port_of(&settled).unwrap()), "{settled}");
        assert_eq!(free_for_shards(&settled, 4), 4);
        assert!(PortClaim::of(&settled, 4).is_none(), "the ports are claimed");
        assert_eq!(claim.unwrap().sockets.len(), 4);
        for unchanged in ["127.0.0.1:7", "nonsense:0", "192.0.2.1:0"] {
            let (settled, claim) = settle(unchanged, 4);
            assert!(settled == unchanged && claim.is_none(), "{settled}");
        }
    }

    #[test]
    fn a_port_in_use_is_not_chosen() {
        let (first, claim) = choose(1).unwrap();
        let _listener = TcpListener::bind(first).unwrap();
        drop(claim);
        assert!(check(&first.to_string()).is_err());
        assert_ne!(choose(1).unwrap().0, first);
    }
}
