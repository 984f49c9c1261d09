//! Fuzzes what a client presents as its capability.

#![no_main]

use std::time::Duration;

use capability::{CapabilityKey, Claims};
use identity::{KeyHash, ProofKey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let key = CapabilityKey::derive(&ProofKey::new(&[1; 32]));
    // The signature protects the claims, so their decoder is also called without it.
    let Some(claims) = Claims::unverified(data) else {
        let holder = KeyHash::from([0; 32]);
        assert!(key.verify(data, (uuid::Uuid::nil(), &holder), Duration::ZERO).is_err());
        return;
    };
    // Claims that can be decoded have one form, and can be signed again unless they are too long.
    let Some(signed) = key.sign(&claims) else { return };
    assert_eq!(Claims::unverified(&signed).as_ref(), Some(&claims));
    let now = Duration::from_secs(claims.issued);
    if let Ok(verified) = key.verify(&signed, (claims.node, &claims.key), now) {
        assert_eq!(verified, claims);
    }
});
