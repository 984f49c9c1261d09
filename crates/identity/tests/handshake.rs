//! Two sides prove their identities to each other, and attackers try to.

use std::sync::Arc;

use identity::{Handshake, Identity, IdentityError, KeyHash, Protocol, Trust, UserDirectory, UserName};

/// Accepts these keys.
struct Users(Vec<KeyHash>);

impl UserDirectory for Users {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        self.0.contains(key).then(|| UserName {
            id: 1,
            tenant_id: 1,
            tenant: "main".into(),
            user: "someone".into(),
        })
    }
}

struct World {
    client: Trust,
    server: Trust,
}

fn new_world() -> World {
    let (user, node) = (Identity::generate(), Identity::generate());
    let users = Arc::new(Users(vec![user.key()]));
    World { client: Trust::client(&user, node.key()), server: Trust::server(&node, users) }
}

/// Passes bytes between the sides until neither has more. `tamper` may change each flight; its number
/// counts from 0.
fn run(
    client: &mut Handshake,
    server: &mut Handshake,
    mut tamper: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), IdentityError> {
    for flight in 0..6 {
        let (from, to) =
            if flight % 2 == 0 { (&mut *client, &mut *server) } else { (&mut *server, &mut *client) };
        let mut bytes = from.output();
        tamper(flight, &mut bytes);
        to.input(&bytes)?;
    }
    Ok(())
}

fn both(world: &World) -> (Handshake, Handshake) {
    (
        Handshake::client(&world.client, Protocol::Messenger).unwrap(),
        Handshake::server(&world.server, Protocol::Messenger).unwrap(),
    )
}

#[test]
fn both_sides_learn_the_peers_key_and_have_a_common_secret() {
    let world = new_world();
    for attempt in 0..2 {
        let (mut client, mut server) = both(&world);
        assert_eq!((client.peer(), server.peer()), (None, None));
        run(&mut client, &mut server, |_, _| {}).unwrap();
        assert_eq!((client.peer(), server.peer()), (Some(world.server.key()), Some(world.client.key())));
        assert_eq!(world.server.user_of(&server.peer().unwrap()).unwrap().user, "someone");
        client.write(b"hello");
        server.input(&client.output()).unwrap();
        assert_eq!(server.read(), b"hello");
        server.write(b"welcome");
        client.input(&server.output()).unwrap();
        assert_eq!(client.read(), b"welcome");
        let proof = client.proof_key().prove("label", &[b"nonce"]);
        assert!(server.proof_key().verify("label", &[b"nonce"], &proof));
        // The second handshake continues the first one. It also proves the client's key.
        assert_eq!(server.is_resumed(), attempt == 1);
    }
}

#[test]
fn the_client_refuses_a_server_with_another_key() {
    let (world, other) = (new_world(), new_world());
    let (mut client, mut server) = (
        Handshake::client(&world.client, Protocol::Messenger).unwrap(),
        Handshake::server(&other.server, Protocol::Messenger).unwrap(),
    );
    let error = run(&mut client, &mut server, |_, _| {}).unwrap_err();
    let (expected, found) = (world.server.key(), other.server.key());
    assert_eq!(error, IdentityError::OtherServer { expected, found });
    assert_eq!((client.peer(), server.peer()), (None, None));
}

#[test]
fn a_stranger_proves_its_key_but_belongs_to_no_user() {
    let (world, stranger) = (new_world(), Identity::generate());
    let trust = Trust::client(&stranger, world.server.key());
    let (mut client, mut server) = (
        Handshake::client(&trust, Protocol::Messenger).unwrap(),
        Handshake::server(&world.server, Protocol::Messenger).unwrap(),
    );
    run(&mut client, &mut server, |_, _| {}).unwrap();
    let key = server.peer().unwrap();
    assert_eq!((key, world.server.user_of(&key)), (stranger.key(), None));
}

#[test]
fn a_side_acts_only_in_the_role_that_it_has() {
    let world = new_world();
    assert_eq!(
        Handshake::client(&world.server, Protocol::Messenger).err(),
        Some(IdentityError::NoRole("client"))
    );
    assert_eq!(
        Handshake::server(&world.client, Protocol::Messenger).err(),
        Some(IdentityError::NoRole("server"))
    );
    assert_eq!(world.client.user_of(&world.client.key()), None);
    let process = Trust::default();
    assert!(process.user_of(&process.key()).is_some() && process.user_of(&world.client.key()).is_none());
}

/// No changed byte of a handshake lets a side accept a peer that the other side does not accept, and
/// none makes a side panic.
#[test]
fn a_changed_byte_of_any_flight_is_refused() {
    let world = new_world();
    let mut lengths = Vec::new();
    let (mut client, mut server) = both(&world);
    run(&mut client, &mut server, |_, bytes| lengths.push(bytes.len())).unwrap();
    assert!(lengths[0] > 100 && lengths[1] > 400 && lengths[2] > 300, "{lengths:?}");
    let (mut mounted, mut without_effect) = (0, 0);
    for (flight, len) in lengths.iter().take(3).enumerate() {
        for at in (0..*len).step_by(3) {
            // New parties, so that no handshake continues an earlier one.
            let fresh = new_world();
            let (mut client, mut server) = both(&fresh);
            let mut hit = false;
            let _ = run(&mut client, &mut server, |number, bytes| {
                if number == flight && at < bytes.len() {
                    bytes[at] ^= 1 << (at % 8);
                    hit = true;
                }
            });
            assert!(hit || at >= len - 8, "flight {flight}, byte {at}");
            mounted += usize::from(hit);
            // The version of a record has no meaning in TLS 1.3, so a changed version has no effect.
            let agree =
                client.peer() == Some(fresh.server.key()) && server.peer() == Some(fresh.client.key());
            assert!(agree || server.peer().is_none(), "flight {flight}, byte {at}");
            if agree {
                without_effect += 1;
                let proof = client.proof_key().prove("x", &[]);
                assert!(server.proof_key().verify("x", &[], &proof));
            }
        }
    }
    assert!(mounted > 300 && without_effect < 10, "{mounted}, {without_effect} without effect");
}

#[test]
fn a_recorded_handshake_proves_nothing() {
    let world = new_world();
    let (mut client, mut server) = both(&world);
    let mut recorded = Vec::new();
    run(&mut client, &mut server, |flight, bytes| {
        if flight % 2 == 0 {
            recorded.push(bytes.clone());
        }
    })
    .unwrap();
    let mut victim = Handshake::server(&world.server, Protocol::Messenger).unwrap();
    victim.input(&recorded[0]).unwrap();
    assert!(!victim.output().is_empty());
    assert!(victim.input(&recorded[1]).is_err());
    assert_eq!(victim.peer(), None);
}

#[test]
fn a_handshake_for_another_protocol_is_refused() {
    let world = new_world();
    let all = [Protocol::Messenger, Protocol::Control, Protocol::Channel];
    for (asked, served) in all.iter().flat_map(|asked| all.iter().map(move |served| (*asked, *served))) {
        let mut client = Handshake::client(&world.client, asked).unwrap();
        let mut server = Handshake::server(&world.server, served).unwrap();
        let result = run(&mut client, &mut server, |_, _| {});
        assert_eq!(result.is_ok(), asked == served, "{asked:?} instead of {served:?}: {result:?}");
        assert_eq!(server.peer().is_some(), asked == served);
    }
}

/// An attacker in the network makes the client's first message offer TLS 1.2 only.
#[test]
fn a_handshake_is_not_downgraded_to_an_older_tls() {
    let world = new_world();
    let (mut client, mut server) = both(&world);
    let mut is_mounted = false;
    let result = run(&mut client, &mut server, |flight, bytes| {
        // The extension with the versions that the client supports.
        let versions = [0x00, 0x2b, 0x00, 0x03, 0x02, 0x03, 0x04];
        if flight == 0
            && let Some(at) = bytes.windows(versions.len()).position(|found| found == versions)
        {
            bytes[at + 6] = 0x03;
            is_mounted = true;
        }
    });
    assert!(is_mounted && result.is_err(), "{result:?}");
    assert_eq!((client.peer(), server.peer()), (None, None));
}

#[test]
fn a_handshake_without_end_is_refused() {
    let world = new_world();
    let mut server = Handshake::server(&world.server, Protocol::Messenger).unwrap();
    // A change of the cipher, which TLS 1.3 ignores.
    let record = [20, 3, 3, 0, 1, 1];
    let mut sent = 0;
    let error = loop {
        match server.input(&record) {
            Ok(()) => sent += record.len(),
            Err(e) => break e,
        }
        assert!(sent <= identity::MAX_HANDSHAKE_BYTES, "the handshake has a limit");
    };
    assert!(matches!(error, IdentityError::Handshake(_) | IdentityError::HandshakeTooLong { .. }), "{error}");
}

mod arbitrary {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_complete_a_handshake(flights in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 1..4)) {
            let mut server = Handshake::server(&Trust::default(), Protocol::Messenger).unwrap();
            let mut client = Handshake::client(&Trust::default(), Protocol::Messenger).unwrap();
            let _ = client.output();
            for flight in &flights {
                let _ = (server.input(flight), client.input(flight));
            }
            prop_assert_eq!((server.peer(), client.peer()), (None, None));
        }
    }
}

#[cfg(feature = "sim")]
#[test]
fn a_seed_repeats_every_byte_of_a_handshake() {
    let record = |seed| {
        let _seeded = base::entropy::seed_this_thread(seed);
        let (user, node) = (Identity::from_seed([1; 32]), Identity::from_seed([2; 32]));
        let users = Arc::new(Users(vec![user.key()]));
        let client = Trust::client(&user, node.key()).without_resumption();
        let server = Trust::server(&node, users).without_resumption();
        let (mut client, mut server) = both(&World { client, server });
        let mut flights = Vec::new();
        run(&mut client, &mut server, |_, bytes| flights.push(bytes.clone())).unwrap();
        assert!(server.peer().is_some());
        flights
    };
    assert_eq!(record(7), record(7));
    assert_ne!(record(7), record(8));
}
