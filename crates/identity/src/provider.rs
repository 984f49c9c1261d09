//! The cryptography of the handshake: aws-lc-rs. In simulations, it takes its random numbers from a
//! seed.

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, SupportedKxGroup, aws_lc_rs};

/// Returns the cryptography of the handshake.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(make()));
    Arc::clone(&PROVIDER)
}

#[cfg(not(feature = "sim"))]
fn make() -> CryptoProvider {
    let kx_groups: Vec<&'static dyn SupportedKxGroup> =
        vec![aws_lc_rs::kx_group::X25519, aws_lc_rs::kx_group::SECP256R1];
    CryptoProvider { kx_groups, ..aws_lc_rs::default_provider() }
}

#[cfg(feature = "sim")]
fn make() -> CryptoProvider {
    let kx_groups: Vec<&'static dyn SupportedKxGroup> = vec![&seeded::X25519];
    CryptoProvider { kx_groups, secure_random: &seeded::Random, ..aws_lc_rs::default_provider() }
}

/// Key exchange and random numbers that come from `base::entropy`, so that a simulation can repeat
/// them. On a thread without a seed, these are the random numbers of the system.
#[cfg(feature = "sim")]
mod seeded {
    use ::aws_lc_rs::agreement::{self, PrivateKey, UnparsedPublicKey};
    use base::entropy::random;
    use rustls::crypto::{ActiveKeyExchange, GetRandomFailed, SecureRandom, SharedSecret, SupportedKxGroup};
    use rustls::{Error, NamedGroup, PeerMisbehaved};

    #[derive(Debug)]
    pub(super) struct Random;

    impl SecureRandom for Random {
        fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
            bytes.fill_with(random);
            Ok(())
        }
    }

    #[derive(Debug)]
    pub(super) struct X25519;

    struct X25519Exchange {
        private: PrivateKey,
        public: Vec<u8>,
    }

    impl SupportedKxGroup for X25519 {
        fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
            let secret: [u8; 32] = random();
            let failed = |_| Error::General("no X25519 key".into());
            let private =
                PrivateKey::from_private_key(&agreement::X25519, &secret).map_err(|_| failed(()))?;
            let public = private.compute_public_key().map_err(|_| failed(()))?.as_ref().to_vec();
            Ok(Box::new(X25519Exchange { private, public }))
        }

        fn name(&self) -> NamedGroup {
            NamedGroup::X25519
        }
    }

    impl ActiveKeyExchange for X25519Exchange {
        fn complete(self: Box<Self>, peer: &[u8]) -> Result<SharedSecret, Error> {
            let peer = UnparsedPublicKey::new(&agreement::X25519, peer);
            let refused = Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare);
            agreement::agree(&self.private, peer, refused, |secret| Ok(SharedSecret::from(secret)))
        }

        fn pub_key(&self) -> &[u8] {
            &self.public
        }

        fn group(&self) -> NamedGroup {
            NamedGroup::X25519
        }
    }
}
