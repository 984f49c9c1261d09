//! Fuzzes what a peer sends before it has proved its identity: the bytes of the TLS handshake, on both
//! sides, and the ticket in a connect request.

#![no_main]

use identity::{Handshake, Protocol, Trust};
use libfuzzer_sys::fuzz_target;
use messenger::transport::ConnectTicket;

fuzz_target!(|data: &[u8]| {
    // The first byte divides the input into two flights.
    let Some((at, rest)) = data.split_first() else { return };
    let (first, second) = rest.split_at(usize::from(*at).min(rest.len()));
    let trust = Trust::default();
    let mut server = Handshake::server(&trust, Protocol::Messenger).expect("the trust has both roles");
    let mut client = Handshake::client(&trust, Protocol::Messenger).expect("the trust has both roles");
    let _ = client.output();
    for flight in [first, second] {
        // Ignore the results: each side may refuse the bytes, but must not panic.
        let _ = (server.input(flight), client.input(flight));
        let _ = (server.output(), client.output(), server.read(), client.read());
    }
    assert!(server.peer().is_none() && client.peer().is_none(), "no proof was made");
    if let Some(ticket) = ConnectTicket::decode(data) {
        assert_eq!(ticket.encode(), data[..ConnectTicket::LEN]);
    }
});
