//! Fuzzes what a peer sends before it has proved its identity: the bytes of the TLS handshake on
//! both sides, the certificate with its key, and the ticket in a connect request over RDMA. The
//! first byte of the input chooses.

#![no_main]

use identity::{Handshake, ProofKey, Protocol, Trust};
use libfuzzer_sys::fuzz_target;
use messenger::transport::ConnectTicket;

/// Number of flights of a handshake: the client's hello, the server's answer, the client's proof.
const FLIGHTS: usize = 3;
/// Length of the header of a TLS record, in bytes.
const RECORD_HEADER: usize = 5;
/// Content type of an encrypted TLS record.
const ENCRYPTED: u8 = 23;

fuzz_target!(|data: &[u8]| {
    let Some((choice, rest)) = data.split_first() else { return };
    // All inputs see the same handshake.
    let _seeded = base::entropy::seed_this_thread(1);
    match choice % 4 {
        0 => foreign(rest),
        1 => altered(rest),
        2 => identity::fuzz::certificate(rest),
        _ => ticket(rest),
    }
});

fn ends() -> (Handshake, Handshake) {
    let trust = Trust::default();
    let client = Handshake::client(&trust, Protocol::Messenger).expect("the trust has both roles");
    let server = Handshake::server(&trust, Protocol::Messenger).expect("the trust has both roles");
    (client, server)
}

/// Both sides receive the input, which the first byte divides into two flights.
fn foreign(data: &[u8]) {
    let Some((at, rest)) = data.split_first() else { return };
    let (first, second) = rest.split_at(usize::from(*at).min(rest.len()));
    let (mut client, mut server) = ends();
    let _ = client.output();
    for flight in [first, second] {
        // Ignore the results: each side may refuse the bytes, but must not panic.
        let _ = (server.input(flight), client.input(flight));
        let _ = (server.output(), client.output(), server.read(), client.read());
    }
    assert!(server.peer().is_none() && client.peer().is_none(), "no proof was made");
}

/// The two sides exchange a handshake, and an attacker flips bits. Each change has 4 bytes: number
/// of the flight, position in the flight (2 bytes), bits.
fn altered(changes: &[u8]) {
    let (mut client, mut server) = ends();
    let (mut is_altered, mut is_noticeable) = (false, false);
    for number in 0..FLIGHTS {
        let (from, to) =
            if number % 2 == 0 { (&mut client, &mut server) } else { (&mut server, &mut client) };
        let flight = from.output();
        let mut sent = flight.clone();
        for [chosen, low, high, bits] in changes.as_chunks::<4>().0 {
            let position = usize::from(u16::from_le_bytes([*low, *high]));
            if usize::from(*chosen) % FLIGHTS == number && !sent.is_empty() {
                let at = position % sent.len();
                sent[at] ^= bits;
            }
        }
        is_altered |= sent != flight;
        is_noticeable |= is_protected_altered(&flight, &sent);
        let is_refused = to.input(&sent).is_err();
        assert!(!is_noticeable || to.peer().is_none(), "flight {number} was altered");
        if is_refused {
            // The side may have sent an alert.
            let _ = from.input(&to.output());
            assert!(is_altered, "a genuine handshake is accepted");
            return;
        }
    }
    assert!(is_noticeable || (client.peer().is_some() && server.peer().is_some()), "nothing was altered");
}

/// Whether a byte has changed that a receiver must not ignore. It may ignore the second byte of the
/// version in the header of each TLS record (RFC 8446, section 5.1), and rustls also ignores the
/// content type of encrypted records, which is always the same.
fn is_protected_altered(flight: &[u8], sent: &[u8]) -> bool {
    let mut start = 0;
    while let Some([content_type, _, _, high, low]) = flight[start..].first_chunk::<RECORD_HEADER>() {
        let end = start + RECORD_HEADER + usize::from(u16::from_be_bytes([*high, *low]));
        let is_protected = |at: usize| at != start + 2 && (at != start || *content_type != ENCRYPTED);
        if (start..end).any(|at| is_protected(at) && flight[at] != sent[at]) {
            return true;
        }
        start = end;
    }
    false
}

/// The listener decodes a ticket before the peer has any other right.
fn ticket(data: &[u8]) {
    let check = |data: &[u8], key: &ProofKey| {
        if let Some(ticket) = ConnectTicket::decode(data) {
            assert_eq!(ticket.encode(), data[..ConnectTicket::LEN]);
            assert!(!ticket.is_of(key), "no such ticket was made");
        }
    };
    // The fuzzer learns the genuine ticket from the comparison below, so this key is another one.
    check(data, &ProofKey::new(&[2; 32]));
    // A genuine ticket with altered and additional bytes.
    let key = ProofKey::new(&[1; 32]);
    let genuine = ConnectTicket::new(&key, 7).encode();
    let mut altered = genuine.to_vec();
    altered.iter_mut().zip(data).for_each(|(byte, bits)| *byte ^= bits);
    altered.extend(data.iter().skip(genuine.len()));
    if altered[..genuine.len()] != genuine {
        check(&altered, &key);
    }
}
