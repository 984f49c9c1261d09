//! What the OSD knows of one object.

use std::cell::RefCell;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use wire::Manifest;

use crate::turnstile::Turnstile;

/// Name of the xattr that has the [`ObjectInfo`].
pub(crate) const INFO_XATTR: Bytes = Bytes::from_static(b"_");

/// Name of the xattr that has the upload which was committed last, on heads of objects that are or
/// were striped. An object that is written in full is not looked at first, so this tells the
/// collector whose parts that may have left behind.
pub(crate) const COMMITTED_XATTR: Bytes = Bytes::from_static(b"c");

/// What every object carries besides its data, in one xattr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ObjectInfo {
    pub(crate) version: u64,
    /// Size of the data in this store object, in bytes.
    pub(crate) size: u64,
    pub(crate) modified_ms: u64,
    /// Set on the head of a striped object, whose own size is then 0.
    pub(crate) manifest: Option<Manifest>,
}

impl ObjectInfo {
    /// Size of the object as users see it, in bytes.
    pub(crate) fn user_size(&self) -> u64 {
        self.manifest.map_or(self.size, |m| m.size)
    }

    /// As stored: a format byte, then postcard.
    pub(crate) fn encode(&self) -> Bytes {
        // Growing a vector cannot fail, and the type is plain data.
        postcard::to_extend(self, vec![1]).expect("plain data can be encoded").into()
    }

    /// The reverse of [`ObjectInfo::encode`]; `None` if it is something else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<ObjectInfo> {
        let (1, rest) = bytes.split_first().map(|(format, rest)| (*format, rest))? else { return None };
        postcard::from_bytes(rest).ok()
    }
}

/// The xattr's name in the store of one that a user named.
pub(crate) fn user_xattr(name: &[u8]) -> Bytes {
    [b"u", name].concat().into()
}

/// The reverse of [`user_xattr`]: `None` for what the OSD itself notes with an object.
pub(crate) fn user_xattr_name(stored: &Bytes) -> Option<Bytes> {
    stored.starts_with(b"u").then(|| stored.slice(1..))
}

/// An object in use, or used lately.
#[derive(Default)]
pub(crate) struct ObjectState {
    pub(crate) turnstile: Turnstile,
    /// What the object will be once everything queued is durable, and the incarnation in which that
    /// was learnt; forgotten should something of it fail. Inside: `None` if there is no such
    /// object.
    info: RefCell<Option<(u64, Option<ObjectInfo>)>>,
}

impl ObjectState {
    /// What is known of the object in this incarnation.
    pub(crate) fn known(&self, incarnation: u64) -> Option<Option<ObjectInfo>> {
        self.info.borrow().filter(|(learnt, _)| *learnt == incarnation).map(|(_, info)| info)
    }

    /// Remembers it.
    pub(crate) fn learn(&self, incarnation: u64, info: Option<ObjectInfo>) {
        *self.info.borrow_mut() = Some((incarnation, info));
    }

    /// Forgets it: to be read again.
    pub(crate) fn forget(&self) {
        *self.info.borrow_mut() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = ObjectInfo::decode(&bytes);
        }
    }

    #[test]
    fn info_survives_storage() {
        let info = ObjectInfo { version: 7, size: 1 << 40, modified_ms: 3, manifest: None };
        assert_eq!(ObjectInfo::decode(&info.encode()), Some(info));
    }
}
