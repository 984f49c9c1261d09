//! Names of collections and objects in the store.
//!
//! ```text
//! collection of a placement group   'P' pool (4 bytes, big-endian) pg (4 bytes, big-endian)
//! collection of the node's map      'N' object   hash, bits reversed (4 bytes, big-endian)  kind
//! (1 byte)  namespace  00  name part     the same, then
//! 00  upload (24 bytes)  index (4 bytes)
//! ```
//!
//! The low bits of the hash select the placement group. An object's id begins with the reversed
//! hash, so these bits come first. If a group were split into two groups, the ids of each new group
//! would therefore form one contiguous range.

use bytes::{BufMut, Bytes, BytesMut};
use store::{CollectionId, ObjectId};
use wire::{PartId, UploadId};

const KIND_INTERNAL: u8 = 0;
const KIND_HEAD: u8 = 1;
const KIND_PART: u8 = 2;

/// Returns the collection of a placement group.
pub(crate) fn collection(pool: u32, pg: u32) -> CollectionId {
    let mut id = BytesMut::with_capacity(9);
    id.put_u8(b'P');
    id.put_u32(pool);
    id.put_u32(pg);
    fixed(CollectionId::new(id))
}

/// Returns the collection of the node's map.
pub(crate) fn node_collection() -> CollectionId {
    fixed(CollectionId::new(Bytes::from_static(b"N")))
}

/// Returns the object that stores the node's map.
pub(crate) fn map_object() -> ObjectId {
    fixed(ObjectId::new(Bytes::from_static(b"map")))
}

/// Returns the object that stores the node's age, in the map's collection.
pub(crate) fn age_object() -> ObjectId {
    fixed(ObjectId::new(Bytes::from_static(b"runs")))
}

/// Returns the object in which a placement group stores results of requests, marks of sessions and
/// its reservation of versions.
pub(crate) fn meta_object() -> ObjectId {
    fixed(ObjectId::new(Bytes::from_static(b"\0\0\0\0\0meta")))
}

/// Returns the store's id of an object or part with hash `hash`.
pub(crate) fn object(hash: u32, namespace: &str, name: &str, part: Option<&PartId>) -> ObjectId {
    let mut id = BytesMut::with_capacity(4 + 1 + namespace.len() + 1 + name.len() + 29);
    id.put_u32(hash.reverse_bits());
    id.put_u8(if part.is_some() { KIND_PART } else { KIND_HEAD });
    id.put_slice(namespace.as_bytes());
    id.put_u8(0);
    id.put_slice(name.as_bytes());
    if let Some(part) = part {
        id.put_u8(0);
        id.put_slice(&part.upload.to_bytes());
        id.put_u32(part.index);
    }
    fixed(ObjectId::new(id))
}

/// The names contained in an object's id in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredName {
    pub(crate) namespace: String,
    pub(crate) object: String,
    pub(crate) part: Option<PartId>,
}

/// Decodes an object id; `None` for the osd's internal objects and for invalid ids.
pub(crate) fn parse(id: &ObjectId) -> Option<StoredName> {
    let (kind, rest) = id.as_bytes().get(4..)?.split_first()?;
    let mut pieces = rest.splitn(3, |b| *b == 0);
    let namespace = std::str::from_utf8(pieces.next()?).ok()?.to_owned();
    let object = std::str::from_utf8(pieces.next()?).ok()?.to_owned();
    let part = match (*kind, pieces.next()) {
        (KIND_HEAD, None) => None,
        (KIND_PART, Some(tail)) => {
            let (upload, index) = tail.split_at_checked(24)?;
            let index = u32::from_be_bytes(index.try_into().ok()?);
            Some(PartId { upload: UploadId::from_bytes(upload)?, index })
        }
        (KIND_INTERNAL.., _) => return None,
    };
    Some(StoredName { namespace, object, part })
}

/// Unwraps an id. The ids built in this module are never empty. Names are checked before, and are
/// far shorter than the limit for ids.
fn fixed<T>(id: store::Result<T>) -> T {
    id.expect("an id of bounded, non-zero length")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wire::SessionId;

    proptest! {
        #[test]
        fn an_object_id_decodes_to_the_names_that_it_was_built_from(hash: u32, ns in "[a-z]{0,64}", name in "[^\0]{1,200}", part: Option<(u128, u64, u32)>) {
            let part = part.map(|(s, number, index)| PartId { upload: UploadId { session: SessionId(s), number }, index });
            let id = object(hash, &ns, &name, part.as_ref());
            prop_assert_eq!(parse(&id), Some(StoredName { namespace: ns, object: name, part }));
        }

        #[test]
        fn decoding_arbitrary_ids_never_panics(bytes in proptest::collection::vec(any::<u8>(), 1..80)) {
            let _ = parse(&ObjectId::new(bytes).unwrap());
        }

        #[test]
        fn the_ids_of_a_group_and_of_each_half_of_it_form_a_range(a: u32, b: u32, order in 0u32..12) {
            let groups = 1 << order;
            let id = |hash| object(hash, "", "x", None);
            prop_assert!(wire::placement::group(a, groups) == wire::placement::group(b, groups)
                || (id(a) < id(b)) == (wire::placement::group(a, groups).reverse_bits() < wire::placement::group(b, groups).reverse_bits()));
        }
    }

    #[test]
    fn the_id_of_an_internal_object_decodes_to_no_name() {
        assert_eq!(parse(&meta_object()), None);
    }
}
