//! Fuzzes what a client presents as its capability: arbitrary bytes, arbitrary claims in a valid
//! envelope, and a genuine capability in which an attacker flips bits.

#![no_main]

use std::time::Duration;

use capability::{CapabilityKey, ClaimedGrant, Claims, Resource, Rights};
use coset::{CborSerializable, CoseSign1, CoseSign1Builder};
use identity::{KeyHash, ProofKey};
use libfuzzer_sys::fuzz_target;
use wire::{Verb, Verbs, Within};

fuzz_target!(|data: &[u8]| {
    // The fuzzer learns genuine capabilities from comparisons, so their key is another one.
    let [key, other] = [1, 2].map(|secret| CapabilityKey::derive(&ProofKey::new(&[secret; 32])));
    presented(&other, data);
    presented(&other, &unsigned(data.to_vec()));
    altered(&key, data);
});

/// A COSE envelope with these claims, without a valid signature.
fn unsigned(claims: Vec<u8>) -> Vec<u8> {
    CoseSign1Builder::new().payload(claims).build().to_vec().expect("an envelope can be encoded")
}

/// A client presents bytes that the node has not signed.
fn presented(key: &CapabilityKey, bytes: &[u8]) {
    let holder = KeyHash::from([0; 32]);
    assert!(key.verify(bytes, (uuid::Uuid::nil(), &holder), Duration::ZERO).is_err());
    // The signature protects the claims, so their decoder is also called without it.
    let Some(claims) = Claims::unverified(bytes) else { return };
    let now = Duration::from_secs(claims.issued);
    assert!(key.verify(bytes, (claims.node, &claims.key), now).is_err(), "the node has not signed it");
    used(key, &claims);
}

/// The node signs claims, verifies them, and asks what they permit.
fn used(key: &CapabilityKey, claims: &Claims) {
    // Claims that can be decoded have one form, and can be signed again unless they are too long.
    let Some(signed) = key.sign(claims) else { return };
    assert_eq!(Claims::unverified(&signed).as_ref(), Some(claims));
    let now = Duration::from_secs(claims.issued);
    if let Ok(verified) = key.verify(&signed, (claims.node, &claims.key), now) {
        assert_eq!(verified, *claims);
    }
    let rights = Rights::new(claims.clone());
    for grant in &claims.grants {
        let (namespace, name) = match &grant.within {
            Some(Within { namespace, prefix }) => (namespace.as_str(), prefix.as_str()),
            None => ("", "name"),
        };
        for verb in Verb::ALL {
            let is_permitted = rights.permits(verb, grant.pool, Resource::Object { namespace, name });
            // A grant on all pools has no part of a pool.
            let applies = grant.pool.is_some() || grant.within.is_none();
            assert!(is_permitted || !applies || !grant.verbs.contains(verb), "{grant:?}");
            let _ = rights.permits(verb, grant.pool, Resource::Names { namespace, prefix: name.as_bytes() });
            let _ = rights.permits(verb, grant.pool, Resource::Pool);
        }
    }
}

/// An attacker flips bits of a genuine capability. Each change has 3 bytes: position (2 bytes),
/// bits. The first bytes of the input choose the grant of the capability.
fn altered(key: &CapabilityKey, data: &[u8]) {
    let Some(([pool, within, verbs], changes)) = data.split_first_chunk::<3>() else { return };
    let claims = Claims {
        node: uuid::Uuid::from_bytes([2; 16]),
        name: "tenant/user".into(),
        tenant: 3,
        user: 4,
        revision: 5,
        key: KeyHash::from([6; 32]),
        issued: 1_800_000_000,
        expires: 1_800_003_600,
        id: [7; 16],
        grants: vec![ClaimedGrant {
            pool: (*pool > 0).then_some(u32::from(*pool)),
            within: (*within > 0)
                .then(|| Within { namespace: "n".into(), prefix: "p".repeat(usize::from(*within)) }),
            verbs: Verbs::try_from(*verbs).unwrap_or(Verbs::ALL),
        }],
        qos_class: 8,
        memory: vec![vec![9; 16]],
    };
    used(key, &claims);
    let signed = key.sign(&claims).expect("a short capability");
    let now = Duration::from_secs(claims.issued);
    let present = |bytes: &[u8]| key.verify(bytes, (claims.node, &claims.key), now);
    assert_eq!(present(&signed).as_ref(), Ok(&claims));
    let with_changes = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        for [low, high, bits] in changes.as_chunks::<3>().0 {
            let at = usize::from(u16::from_le_bytes([*low, *high])) % bytes.len();
            bytes[at] ^= bits;
        }
        bytes
    };
    let forged = with_changes(&signed);
    if forged != signed {
        assert!(present(&forged).is_err(), "the capability was altered");
        let _ = Claims::unverified(&forged);
    }
    // The decoder of the claims sees the changes although no signature is valid.
    let envelope = CoseSign1::from_slice(&signed).expect("a genuine capability");
    let payload = envelope.payload.expect("a capability has claims");
    presented(key, &unsigned(with_changes(&payload)));
}
