//! Keys: [`KeyHash`] names a public key, and [`Identity`] holds a private key.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use aws_lc_rs::digest;
use rcgen::{CertificateParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, SignatureAlgorithm};
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use crate::IdentityError;

/// Name of a public key: the SHA-256 hash of the key as a `SubjectPublicKeyInfo` in DER (RFC 5280,
/// section 4.1.2.7). Its text form has 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Returns the hash of the key in a certificate. `None` if the certificate is malformed.
    pub(crate) fn of_certificate(certificate: &CertificateDer<'_>) -> Option<KeyHash> {
        let parsed = ParsedCertificate::try_from(certificate).ok()?;
        let key = parsed.subject_public_key_info();
        let hash = digest::digest(&digest::SHA256, key.as_ref());
        hash.as_ref().try_into().ok().map(KeyHash)
    }

    /// Returns the bytes of the hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for KeyHash {
    fn from(bytes: [u8; 32]) -> KeyHash {
        KeyHash(bytes)
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for KeyHash {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<KeyHash, IdentityError> {
        let bad = || IdentityError::BadKeyHash(text.chars().take(80).collect());
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let mut hash = [0; 32];
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(bad()) };
        if pairs.len() != hash.len() {
            return Err(bad());
        }
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            let (high, low) = (digit(*high).ok_or_else(bad)?, digit(*low).ok_or_else(bad)?);
            *byte = high << 4 | low;
        }
        Ok(KeyHash(hash))
    }
}

/// A private key, with the self-signed certificate that carries its public key. Cloning is cheap.
///
/// The private key is an Ed25519 or a P-256 key. Neither `Debug` nor any error shows it.
#[derive(Clone)]
pub struct Identity(Arc<IdentityParts>);

struct IdentityParts {
    hash: KeyHash,
    keys: KeyPair,
    certified: Arc<CertifiedKey>,
}

impl Identity {
    /// Generates an Ed25519 key.
    ///
    /// # Panics
    /// If the system has no random numbers.
    #[must_use]
    pub fn generate() -> Identity {
        let keys = KeyPair::generate_for(&PKCS_ED25519).expect("the system has random numbers");
        Identity::of(keys).expect("a generated key can be used")
    }

    /// The identity of the processes that trust only themselves. In a build for simulations, it is
    /// the same in every process, so that a simulation can be repeated.
    pub(crate) fn of_process() -> Identity {
        #[cfg(feature = "sim")]
        return Identity::from_seed([0; 32]);
        #[cfg(not(feature = "sim"))]
        Identity::generate()
    }

    /// Makes an Ed25519 key from a seed, for simulations.
    ///
    /// # Panics
    /// If the library cannot encode the key.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Identity {
        let keys = aws_lc_rs::signature::Ed25519KeyPair::from_seed_unchecked(&seed).expect("32 bytes");
        let encoded = keys.to_pkcs8v1().expect("a key can be encoded");
        let private = PrivatePkcs8KeyDer::from(encoded.as_ref().to_vec());
        let keys = KeyPair::from_pkcs8_der_and_sign_algo(&private, &PKCS_ED25519).expect("a valid key");
        Identity::of(keys).expect("a valid key can be used")
    }

    /// Reads an Ed25519 or P-256 key in PKCS #8 PEM form.
    ///
    /// # Errors
    /// [`IdentityError::BadKey`] if the text is not such a key.
    pub fn from_pem(private_key: &str) -> Result<Identity, IdentityError> {
        let algorithms: [&'static SignatureAlgorithm; 2] = [&PKCS_ED25519, &PKCS_ECDSA_P256_SHA256];
        // The text of an error could contain parts of the key.
        let bad = || IdentityError::BadKey("it is not a valid key of this kind".into());
        let read = |algorithm| KeyPair::from_pkcs8_pem_and_sign_algo(private_key, algorithm).ok();
        let keys = algorithms.into_iter().find_map(read).ok_or_else(bad)?;
        Identity::of(keys)
    }

    fn of(keys: KeyPair) -> Result<Identity, IdentityError> {
        let bad = |e: &dyn fmt::Display| IdentityError::BadKey(e.to_string());
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, "outboard");
        let certificate = parameters.self_signed(&keys).map_err(|e| bad(&e))?;
        let certificate = certificate.der().clone();
        let hash =
            KeyHash::of_certificate(&certificate).ok_or_else(|| bad(&"its certificate is malformed"))?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(keys.serialize_der()));
        let signing = any_supported_type(&private).map_err(|e| bad(&e))?;
        let certified = Arc::new(CertifiedKey::new(vec![certificate], signing));
        Ok(Identity(Arc::new(IdentityParts { hash, keys, certified })))
    }

    /// Returns the private key in PKCS #8 PEM form. The caller must keep the text secret.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.0.keys.serialize_pem()
    }

    /// Returns the hash of the public key.
    #[must_use]
    pub fn key(&self) -> KeyHash {
        self.0.hash
    }

    pub(crate) fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.certified)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.0.hash).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_read_from_its_pem_form_has_the_same_key() {
        let made = Identity::generate();
        let read = Identity::from_pem(&made.to_pem()).unwrap();
        assert_eq!(read.key(), made.key());
        assert_ne!(Identity::generate().key(), made.key());
        let p256 = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap().serialize_pem();
        assert_eq!(Identity::from_pem(&p256).unwrap().key(), Identity::from_pem(&p256).unwrap().key());
    }

    #[test]
    fn other_keys_are_refused_and_no_message_shows_a_key() {
        let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap().serialize_pem();
        let made = Identity::generate();
        let damaged = made.to_pem().replace("MFECAQEw", "MFECAQEx");
        for text in ["", "secret", &p384, &damaged] {
            let error = Identity::from_pem(text).unwrap_err();
            assert!(matches!(error, IdentityError::BadKey(_)), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let secret = made.to_pem().lines().nth(1).unwrap().to_owned();
        assert!(!format!("{made:?}").contains(&secret[..20]));
    }

    #[test]
    fn a_key_hash_is_parsed_from_its_displayed_text() {
        let hash = Identity::generate().key();
        assert_eq!(hash.to_string().parse::<KeyHash>().unwrap(), hash);
        let long = "0".repeat(66);
        for text in ["", "00", &long[..63], &long, &"zz".repeat(32), "é"] {
            assert!(text.parse::<KeyHash>().is_err(), "{text}");
        }
    }
}
