//! Socket addresses in the layout of the C library.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Decodes a `sockaddr_in` or `sockaddr_in6`. Returns `None` if `bytes` has another address family
/// or is too short.
pub(crate) fn decode(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    let ip = match i32::from(family) {
        libc::AF_INET => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?)),
        libc::AF_INET6 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_socket_addresses_are_decoded_and_invalid_ones_are_refused() {
        let v4 = [&libc::AF_INET.to_ne_bytes()[..2], &[0x1f, 0x90, 127, 0, 0, 1], &[0; 8]].concat();
        assert_eq!(decode(&v4), Some("127.0.0.1:8080".parse().unwrap()));
        let mut v6 = [&libc::AF_INET6.to_ne_bytes()[..2], &[0, 80], &[0; 24]].concat();
        v6[23] = 1;
        assert_eq!(decode(&v6), Some("[::1]:80".parse().unwrap()));
        assert_eq!(decode(&v6[..20]), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[0; 16]), None);
    }
}
