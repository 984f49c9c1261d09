//! [`Seal`]: how the DPU recognises what it has stored on the targets.

use identity::ProofKey;

/// Length of a proof, in bytes.
pub(crate) const SEAL_LEN: usize = 32;

/// The key with which the DPU seals what must not be altered on the targets: the node's map and the
/// node's ages. The storage host does not have it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seal {
    key: ProofKey,
    /// Whether the operator accepts seals of another key, because the key was lost.
    accepts_foreign: bool,
}

/// What a seal says about its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sealing {
    /// The DPU has stored the content.
    Own,
    /// The content has no seal, because an earlier version has stored it.
    Missing,
    /// The seal is that of another key, and the operator accepts this.
    Accepted,
}

impl Seal {
    pub(crate) fn new(key: ProofKey, accepts_foreign: bool) -> Seal {
        Seal { key, accepts_foreign }
    }

    /// Returns the proof for `parts`. The label says what they are.
    pub(crate) fn prove(&self, label: &str, parts: &[&[u8]]) -> [u8; SEAL_LEN] {
        self.key.prove(label, parts)
    }

    /// Checks the proof of `parts`; `None` if the content was altered.
    pub(crate) fn check(&self, label: &str, parts: &[&[u8]], proof: &[u8]) -> Option<Sealing> {
        let is_own = proof.len() == SEAL_LEN && self.key.verify(label, parts, proof);
        match (is_own, self.accepts_foreign) {
            (true, _) => Some(Sealing::Own),
            (false, accepts) => accepts.then_some(Sealing::Accepted),
        }
    }
}
