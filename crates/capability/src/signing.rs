//! [`CapabilityKey`]: signs and verifies capabilities.

use std::time::Duration;

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use coset::{CborSerializable, CoseSign1, CoseSign1Builder, Header, HeaderBuilder, iana};
use identity::{KeyHash, ProofKey};
use uuid::Uuid;

use crate::Claims;

/// Maximum lifetime of a capability.
pub const LIFETIME_MAX: Duration = Duration::from_secs(3600);
/// Maximum size of a capability, in bytes.
pub const CAPABILITY_BYTES_MAX: usize = 16 << 10;

/// Time by which the clock of the issuer may be ahead of the clock of the verifier.
const SKEW: Duration = Duration::from_secs(60);

/// Reason why a capability is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CapabilityError {
    /// The client has presented none.
    #[error("the client has presented no capability")]
    None,
    /// The capability cannot be decoded, or its signature is not that of the node.
    #[error("the capability was altered, or another node has issued it")]
    Forged,
    /// The capability names another node.
    #[error("the capability is for another node")]
    OtherNode,
    /// The capability belongs to the holder of another key.
    #[error("the capability belongs to the holder of another key")]
    OtherKey,
    /// The capability names another tenant than the one that the connection belongs to.
    #[error("the capability belongs to another tenant than the connection")]
    OtherTenant,
    /// The time of the capability is over.
    #[error("the capability has expired")]
    Expired,
    /// The capability is from the future: a clock was set back.
    #[error("the capability is not valid yet: the clock of the node or of the control plane is wrong")]
    FromFuture,
    /// The capability is valid for more than [`LIFETIME_MAX`].
    #[error("the capability is valid for too long")]
    TooLong,
    /// The rights of the user have changed since the capability was issued.
    #[error("the rights of the user have changed since the capability was issued")]
    Outdated,
}

/// The key with which a node signs its capabilities and recognises them. It derives from the secret key
/// of the DPU.
pub struct CapabilityKey(Ed25519KeyPair);

impl std::fmt::Debug for CapabilityKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CapabilityKey")
    }
}

impl CapabilityKey {
    /// Derives the key from the secret key of the DPU.
    ///
    /// # Panics
    /// Never: every 32 bytes are the seed of an Ed25519 key.
    #[must_use]
    pub fn derive(dpu_key: &ProofKey) -> CapabilityKey {
        let seed = dpu_key.prove("outboard capability signing key", &[]);
        CapabilityKey(Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed has 32 bytes"))
    }

    /// Signs claims. `None` if they are too large for a capability.
    #[must_use]
    pub fn sign(&self, claims: &Claims) -> Option<Vec<u8>> {
        let signed = CoseSign1Builder::new()
            .protected(protected())
            .payload(claims.encode()?)
            .create_signature(b"", |bytes| self.0.sign(bytes).as_ref().to_vec())
            .build();
        let bytes = signed.to_vec().ok()?;
        (bytes.len() <= CAPABILITY_BYTES_MAX).then_some(bytes)
    }

    /// Verifies a capability that the holder of the key `presenter` has presented to `node`, and returns
    /// its claims. `now` is the time of the node's clock since 1970. The caller must check the claimed
    /// revision.
    ///
    /// # Errors
    /// The reason why the capability is not valid.
    pub fn verify(
        &self,
        capability: &[u8],
        (node, presenter): (Uuid, &KeyHash),
        now: Duration,
    ) -> Result<Claims, CapabilityError> {
        if capability.is_empty() {
            return Err(CapabilityError::None);
        }
        let claims = self.authentic(capability).ok_or(CapabilityError::Forged)?;
        let (issued, expires) = (Duration::from_secs(claims.issued), Duration::from_secs(claims.expires));
        if claims.node != node {
            return Err(CapabilityError::OtherNode);
        }
        if claims.key != *presenter {
            return Err(CapabilityError::OtherKey);
        }
        if expires.saturating_sub(issued) > LIFETIME_MAX {
            return Err(CapabilityError::TooLong);
        }
        if now >= expires {
            return Err(CapabilityError::Expired);
        }
        if issued > now + SKEW {
            return Err(CapabilityError::FromFuture);
        }
        Ok(claims)
    }

    /// Returns the claims if the node has signed them.
    fn authentic(&self, capability: &[u8]) -> Option<Claims> {
        if capability.len() > CAPABILITY_BYTES_MAX {
            return None;
        }
        let signed = CoseSign1::from_slice(capability).ok()?;
        let is_ours = signed.protected.header == protected() && signed.unprotected == Header::default();
        is_ours.then_some(())?;
        let public = UnparsedPublicKey::new(&ED25519, self.0.public_key().as_ref());
        signed.verify_signature(b"", |signature, bytes| public.verify(bytes, signature)).ok()?;
        let claims = Claims::decode(signed.payload.as_deref()?)?;
        // The signature covers the content, but not how the outer array is written.
        (signed.to_vec().ok()? == capability).then_some(claims)
    }
}

/// The protected header: it names the algorithm.
fn protected() -> Header {
    HeaderBuilder::new().algorithm(iana::Algorithm::EdDSA).build()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wire::{Verbs, Within};

    use super::*;
    use crate::ClaimedGrant;

    const NODE: Uuid = Uuid::from_u128(9);
    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn key() -> CapabilityKey {
        CapabilityKey::derive(&ProofKey::new(&[1; 32]))
    }

    fn holder() -> KeyHash {
        KeyHash::from([4; 32])
    }

    fn claims() -> Claims {
        let part = Within { namespace: "n".into(), prefix: "é/".into() };
        let grants = vec![
            ClaimedGrant { pool: None, within: None, verbs: Verbs::ALL },
            ClaimedGrant { pool: Some(7), within: Some(part), verbs: Verbs::of(wire::Verb::Read) },
        ];
        Claims {
            node: NODE,
            name: "films/cutter".into(),
            tenant: 3,
            user: 5,
            revision: u64::MAX,
            key: holder(),
            issued: NOW.as_secs() - 10,
            expires: NOW.as_secs() + 600,
            id: [6; 16],
            grants,
            qos_class: 1,
            memory: vec![vec![1, 2]],
        }
    }

    fn verified(claims: &Claims, now: Duration) -> Result<Claims, CapabilityError> {
        key().verify(&key().sign(claims).unwrap(), (NODE, &holder()), now)
    }

    #[test]
    fn a_signed_capability_can_be_verified_until_it_expires() {
        let claims = claims();
        assert_eq!(verified(&claims, NOW), Ok(claims.clone()));
        let end = Duration::from_secs(claims.expires);
        assert_eq!(verified(&claims, end - Duration::from_nanos(1)), Ok(claims.clone()));
        assert_eq!(verified(&claims, end), Err(CapabilityError::Expired));
        let issued = Duration::from_secs(claims.issued);
        assert_eq!(verified(&claims, issued - SKEW), Ok(claims.clone()));
        let before = issued - SKEW - Duration::from_nanos(1);
        assert_eq!(verified(&claims, before), Err(CapabilityError::FromFuture));
        let long = Claims { expires: claims.issued + 3601, ..claims };
        assert_eq!(verified(&long, NOW), Err(CapabilityError::TooLong));
    }

    #[test]
    fn a_capability_is_valid_for_its_holder_and_its_node_only() {
        let signed = key().sign(&claims()).unwrap();
        let verify = |node, presenter: KeyHash| key().verify(&signed, (node, &presenter), NOW).unwrap_err();
        assert_eq!(verify(NODE, KeyHash::from([5; 32])), CapabilityError::OtherKey);
        assert_eq!(verify(Uuid::nil(), holder()), CapabilityError::OtherNode);
        let other = CapabilityKey::derive(&ProofKey::new(&[2; 32]));
        assert_eq!(other.verify(&signed, (NODE, &holder()), NOW), Err(CapabilityError::Forged));
        assert_eq!(key().verify(&[], (NODE, &holder()), NOW), Err(CapabilityError::None));
    }

    #[test]
    fn each_altered_bit_and_each_other_length_is_refused() {
        let signed = key().sign(&claims()).unwrap();
        for bit in 0..signed.len() * 8 {
            let mut altered = signed.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            let refused = key().verify(&altered, (NODE, &holder()), NOW);
            assert_eq!(refused, Err(CapabilityError::Forged), "bit {bit}");
        }
        for len in 1..signed.len() {
            assert_eq!(key().verify(&signed[..len], (NODE, &holder()), NOW), Err(CapabilityError::Forged));
        }
        let longer = [&signed[..], &[0]].concat();
        assert_eq!(key().verify(&longer, (NODE, &holder()), NOW), Err(CapabilityError::Forged));
    }

    #[test]
    fn a_header_outside_of_the_signature_is_refused() {
        let mut signed = CoseSign1::from_slice(&key().sign(&claims()).unwrap()).unwrap();
        signed.unprotected = HeaderBuilder::new().key_id(b"x".to_vec()).build();
        let bytes = signed.to_vec().unwrap();
        assert_eq!(key().verify(&bytes, (NODE, &holder()), NOW), Err(CapabilityError::Forged));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 1..200)) {
            prop_assert_eq!(key().verify(&bytes, (NODE, &holder()), NOW), Err(CapabilityError::Forged));
        }
    }
}
