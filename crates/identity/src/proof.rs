//! [`ProofKey`]: a secret key by which its owner recognises its own proofs.

use std::fmt;
use std::sync::LazyLock;

use aws_lc_rs::hmac;

/// Length of a proof, in bytes.
const PROOF_LEN: usize = 32;

/// A secret key for proofs. The two sides of a handshake have a common one, with which each side
/// proves later, over another transport, that it took part in the handshake. A DPU has one of its own,
/// with which it recognises what it has stored or handed out. The key never crosses a network.
///
/// A proof is an HMAC-SHA-256 (RFC 2104) over a label and some parts. The label says who proves what,
/// so a proof for one purpose is invalid for every other purpose. In a proof for a peer, the peer must
/// have chosen one of the parts at random (a nonce), so that a recorded proof is invalid as well.
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

impl Default for ProofKey {
    /// The key of a process that keeps nothing beyond its end. It exists only in the memory of the
    /// process.
    fn default() -> ProofKey {
        static OF_PROCESS: LazyLock<ProofKey> = LazyLock::new(|| ProofKey::new(&of_process()));
        OF_PROCESS.clone()
    }
}

/// In a build for simulations, the key is the same in every process, so that a simulation can be
/// repeated.
#[cfg(feature = "sim")]
fn of_process() -> [u8; 32] {
    [0; 32]
}

#[cfg(not(feature = "sim"))]
fn of_process() -> [u8; 32] {
    random_secret()
}

/// Returns secret random bytes of the system.
///
/// # Panics
/// If the system has no random numbers.
#[must_use]
pub fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    aws_lc_rs::rand::fill(&mut secret).expect("the system has random numbers");
    secret
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
