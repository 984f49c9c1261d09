//! One object as the osd sees it: the record that the store keeps, and the state that the osd
//! keeps in memory.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use wire::Manifest;

use crate::expectation::Expectation;
use crate::turnstile::Turnstile;

/// Name of the xattr that stores the [`ObjectInfo`].
pub(crate) const INFO_XATTR: Bytes = Bytes::from_static(b"_");

/// Name of the xattr in which the head object of a striped object stores its last committed upload.
/// The xattr stays when the object is no longer striped. A full write does not read the old object
/// first, so it cannot remove the object's old parts. The collector finds these parts by this
/// xattr.
pub(crate) const COMMITTED_XATTR: Bytes = Bytes::from_static(b"c");

/// The record of an object, which one xattr of the object stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ObjectInfo {
    pub(crate) version: u64,
    /// Size of the data in this store object, in bytes.
    pub(crate) size: u64,
    pub(crate) modified_ms: u64,
    /// Manifest of a striped object; `None` for other objects. The head object of a striped object
    /// has no data, so its `size` is 0.
    pub(crate) manifest: Option<Manifest>,
}

impl ObjectInfo {
    /// Returns the size of the object as users see it, in bytes.
    pub(crate) fn user_size(&self) -> u64 {
        self.manifest.map_or(self.size, |m| m.size)
    }

    /// Encodes the record: a format byte, then the fields in postcard format.
    pub(crate) fn encode(&self) -> Bytes {
        // Encoding plain data into a growing vector cannot fail.
        postcard::to_extend(self, vec![1]).expect("plain data can be encoded").into()
    }

    /// Decodes bytes from [`ObjectInfo::encode`]; `None` for other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<ObjectInfo> {
        let (1, rest) = bytes.split_first().map(|(format, rest)| (*format, rest))? else { return None };
        postcard::from_bytes(rest).ok()
    }
}

/// Returns the name under which the store keeps a user's xattr.
pub(crate) fn user_xattr(name: &[u8]) -> Bytes {
    [b"u", name].concat().into()
}

/// Returns the name that the user gave to a stored xattr; `None` for the osd's internal xattrs.
pub(crate) fn user_xattr_name(stored: &Bytes) -> Option<Bytes> {
    stored.starts_with(b"u").then(|| stored.slice(1..))
}

/// The state in memory of an object that is in use or was used recently.
#[derive(Default)]
pub(crate) struct ObjectState {
    pub(crate) turnstile: Turnstile,
    /// Predicts whether the conditions of a change hold.
    pub(crate) expects_success: Expectation,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = ObjectInfo::decode(&bytes);
        }
    }

    #[test]
    fn object_info_survives_encoding_and_decoding() {
        let info = ObjectInfo { version: 7, size: 1 << 40, modified_ms: 3, manifest: None };
        assert_eq!(ObjectInfo::decode(&info.encode()), Some(info));
    }
}
