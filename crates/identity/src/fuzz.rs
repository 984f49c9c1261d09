//! Entry point for fuzzing the decoder of certificates. Not part of the API.

use std::sync::LazyLock;

use rustls::pki_types::CertificateDer;

use crate::{Identity, KeyHash};

/// Decodes the certificate of a peer. A peer can present any bytes before it has proved anything.
/// The bytes are also decoded as changes of a genuine certificate. Each change has 3 bytes:
/// position (2 bytes), bits to flip.
pub fn certificate(bytes: &[u8]) {
    static OWN: LazyLock<Identity> = LazyLock::new(Identity::of_process);
    // Fuzzing checks for panics only; ignore the results.
    let _ = KeyHash::of_certificate(&CertificateDer::from(bytes));
    let mut altered = OWN.certified().cert[0].to_vec();
    for [low, high, bits] in bytes.as_chunks::<3>().0 {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % altered.len();
        altered[at] ^= bits;
    }
    let _ = KeyHash::of_certificate(&CertificateDer::from(altered));
}
