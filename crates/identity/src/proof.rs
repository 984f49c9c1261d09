//! [`ProofKey`]: a key that only the two sides of a handshake have.

use std::fmt;

use aws_lc_rs::hmac;

/// Length of a proof, in bytes.
pub const PROOF_LEN: usize = 32;

/// A key that only the two sides of a handshake have. With it, each side proves later, over another
/// transport, that it took part in the handshake. The key never crosses a network.
///
/// A proof is an HMAC-SHA-256 (RFC 2104) over a label and some parts. The label says who proves what,
/// so a proof for one purpose is invalid for every other purpose. The peer must have chosen one of
/// the parts at random (a nonce), so that a recorded proof is invalid as well.
#[derive(Clone)]
pub struct ProofKey(hmac::Key);

impl ProofKey {
    /// Creates a key from secret bytes.
    #[must_use]
    pub fn new(secret: &[u8; 32]) -> ProofKey {
        ProofKey(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Computes the proof for `label` and `parts`.
    #[must_use]
    pub fn prove(&self, label: &str, parts: &[&[u8]]) -> [u8; PROOF_LEN] {
        let mut context = hmac::Context::with_key(&self.0);
        // Each part is preceded by its length, so that no two lists of parts have the same proof.
        for part in [label.as_bytes()].iter().chain(parts) {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        let tag = context.sign();
        tag.as_ref().try_into().expect("an HMAC-SHA-256 has 32 bytes")
    }

    /// Returns whether `proof` is the proof for `label` and `parts`, or its first bytes: at least 8.
    /// The time that this takes does not depend on the bytes of the proof.
    #[must_use]
    pub fn verify(&self, label: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        let right = self.prove(label, parts);
        (8..=PROOF_LEN).contains(&proof.len())
            && aws_lc_rs::constant_time::verify_slices_are_equal(&right[..proof.len()], proof).is_ok()
    }
}

impl fmt::Debug for ProofKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProofKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_key_its_label_and_its_parts_only() {
        let key = ProofKey::new(&[7; 32]);
        let proof = key.prove("a", &[b"bc", b"d"]);
        assert!(key.verify("a", &[b"bc", b"d"], &proof));
        assert!(key.verify("a", &[b"bc", b"d"], &proof[..16]));
        assert!(!key.verify("a", &[b"bc", b"d"], &proof[..7]), "too short");
        assert!(!key.verify("a", &[b"bc", b"d"], &[]));
        assert!(!ProofKey::new(&[8; 32]).verify("a", &[b"bc", b"d"], &proof));
        for (label, parts) in [("b", [&b"bc"[..], b"d"]), ("a", [b"b", b"cd"]), ("ab", [b"c", b"d"])] {
            assert!(!key.verify(label, &parts, &proof), "{label}");
        }
        for byte in 0..PROOF_LEN {
            let mut wrong = proof;
            wrong[byte] ^= 1;
            assert!(!key.verify("a", &[b"bc", b"d"], &wrong));
        }
    }
}
