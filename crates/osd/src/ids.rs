//! Names of collections and objects in the store.
//!
//! ```text
//! collection of a placement group   'P'  pool (4 bytes, big-endian)  pg (4 bytes, big-endian)
//! collection of the node's map      'N'
//!
//! object by name       00 00 00 00  3  namespace  00  name
//! part by name         00 00 00 00  4  namespace  00  name  00  upload (24 bytes)  index (4 bytes)
//! hashed object        hash (4 bytes)  1  namespace  00  name
//! hashed part          hash (4 bytes)  2  namespace  00  name  00  upload (24 bytes)  index (4 bytes)
//! internal object      00 00 00 00  0  name
//! ```
//!
//! The fifth byte is the *kind*. It tells which layout an id has, so an id can be decoded without
//! the pool's record. The record says which layout the ids of the pool have ([`IdLayout`]).
//!
//! By name, the objects of a placement group are ordered by namespace and name, and all parts
//! follow all objects. The hash of a hashed id is bit-reversed and big-endian, so these ids have no
//! useful order. Pools that an earlier version created have hashed ids.

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use store::{CollectionId, ObjectId};
use wire::{PartId, UploadId};

const KIND_HASHED_OBJECT: u8 = 1;
const KIND_HASHED_PART: u8 = 2;
const KIND_OBJECT: u8 = 3;
const KIND_PART: u8 = 4;
/// Start of the ids by name of all objects.
const BY_NAME: [u8; 5] = [0, 0, 0, 0, KIND_OBJECT];
/// Length of a hash, or of the zeros in its place, in bytes.
const HASH: usize = 4;

/// Layout of the ids of a pool's objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IdLayout {
    /// Ids begin with a hash of the name. Only pools that an earlier version created have these ids.
    Hashed,
    /// Ids are ordered by namespace and name.
    ByName,
}

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

impl IdLayout {
    /// Returns the store's id of an object or part. `hash` is the placement hash of the name.
    pub(crate) fn id(self, hash: u32, namespace: &str, name: &str, part: Option<&PartId>) -> ObjectId {
        let (first, kind) = match (self, part) {
            (IdLayout::Hashed, None) => (hash.reverse_bits(), KIND_HASHED_OBJECT),
            (IdLayout::Hashed, Some(_)) => (hash.reverse_bits(), KIND_HASHED_PART),
            (IdLayout::ByName, None) => (0, KIND_OBJECT),
            (IdLayout::ByName, Some(_)) => (0, KIND_PART),
        };
        let mut id = BytesMut::with_capacity(HASH + 1 + namespace.len() + 1 + name.len() + 29);
        id.put_u32(first);
        id.put_u8(kind);
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

    /// Returns a lower bound for the ids of all parts; `None` if only the smallest id is one.
    pub(crate) fn first_part(self) -> Option<ObjectId> {
        match self {
            IdLayout::Hashed => None,
            IdLayout::ByName => Some(fixed(ObjectId::new(vec![0, 0, 0, 0, KIND_PART]))),
        }
    }
}

/// Returns a lower bound for the ids by name of objects in a namespace whose names start with a
/// prefix; with `None`, for the ids of all objects. `namespace` and `prefix` must obey the limits of
/// names.
pub(crate) fn first_object(of: Option<(&str, &[u8])>) -> ObjectId {
    let mut id = BytesMut::from(&BY_NAME[..]);
    if let Some((namespace, prefix)) = of {
        id.put_slice(namespace.as_bytes());
        id.put_u8(0);
        id.put_slice(prefix);
    }
    fixed(ObjectId::new(id))
}

/// Returns a lower bound for the ids by name of objects in the namespaces behind `namespace`.
/// Namespaces contain no bytes 0 and 1, so the bound also exceeds all ids in `namespace` itself.
pub(crate) fn first_of_later_namespaces(namespace: &str) -> ObjectId {
    fixed(ObjectId::new([&BY_NAME[..], namespace.as_bytes(), &[1]].concat()))
}

/// Returns whether an id is the id by name of an object, and not of a part.
pub(crate) fn is_object_by_name(id: &ObjectId) -> bool {
    id.as_bytes().starts_with(&BY_NAME)
}

/// The names contained in an object's id in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredName<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) object: &'a str,
    pub(crate) part: Option<PartId>,
}

/// Decodes an object id of any layout; `None` for the osd's internal objects and for invalid ids.
pub(crate) fn parse(id: &ObjectId) -> Option<StoredName<'_>> {
    let (hash, rest) = id.as_bytes().split_at_checked(HASH)?;
    let (kind, rest) = rest.split_first()?;
    let mut pieces = rest.splitn(3, |b| *b == 0);
    let namespace = std::str::from_utf8(pieces.next()?).ok()?;
    let object = std::str::from_utf8(pieces.next()?).ok()?;
    let is_hashed = matches!(*kind, KIND_HASHED_OBJECT | KIND_HASHED_PART);
    if !is_hashed && hash.iter().any(|byte| *byte != 0) {
        return None;
    }
    let part = match (*kind, pieces.next()) {
        (KIND_HASHED_OBJECT | KIND_OBJECT, None) => None,
        (KIND_HASHED_PART | KIND_PART, Some(tail)) => {
            let (upload, index) = tail.split_at_checked(24)?;
            let index = u32::from_be_bytes(index.try_into().ok()?);
            Some(PartId { upload: UploadId::from_bytes(upload)?, index })
        }
        _ => return None,
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

    fn part() -> impl Strategy<Value = Option<PartId>> {
        any::<Option<(u128, u64, u32)>>().prop_map(|part| {
            part.map(|(s, number, index)| PartId {
                upload: UploadId { session: SessionId(s), number },
                index,
            })
        })
    }

    proptest! {
        #[test]
        fn an_id_of_any_layout_decodes_to_the_names_that_it_was_built_from(hash: u32, ns in "[a-z]{0,64}", name in "[^\0]{1,200}", part in part()) {
            for layout in [IdLayout::Hashed, IdLayout::ByName] {
                let id = layout.id(hash, &ns, &name, part.as_ref());
                prop_assert_eq!(parse(&id), Some(StoredName { namespace: &ns, object: &name, part }));
            }
        }

        #[test]
        fn decoding_arbitrary_ids_never_panics(bytes in proptest::collection::vec(any::<u8>(), 1..80)) {
            let _ = parse(&ObjectId::new(bytes).unwrap());
        }

        #[test]
        fn ids_by_name_sort_by_namespace_and_name_and_before_all_parts(
            a in ("[a.-]{0,3}", "[\x01aü]{1,3}"), b in ("[a.-]{0,3}", "[\x01aü]{1,3}"), other in part(), hash: u32
        ) {
            let layout = IdLayout::ByName;
            let (id_a, id_b) = (layout.id(hash, &a.0, &a.1, None), layout.id(hash, &b.0, &b.1, None));
            prop_assert_eq!(id_a.cmp(&id_b), a.cmp(&b));
            if let Some(other) = other {
                let first_part = layout.first_part().unwrap();
                prop_assert!(id_a < first_part && first_part < layout.id(hash, &b.0, &b.1, Some(&other)));
            }
            prop_assert!(meta_object() < id_a);
        }
    }

    #[test]
    fn the_id_of_an_internal_object_decodes_to_no_name() {
        assert_eq!(parse(&meta_object()), None);
    }

    #[test]
    fn ids_that_earlier_versions_stored_decode_and_are_built_again() {
        // The hash 0x0102_0304 in reversed bits.
        let stored = ObjectId::new(&b"\x20\xc0\x40\x80\x01ns\0film"[..]).unwrap();
        assert_eq!(parse(&stored), Some(StoredName { namespace: "ns", object: "film", part: None }));
        assert_eq!(IdLayout::Hashed.id(0x0102_0304, "ns", "film", None), stored);
        let by_name = ObjectId::new(&b"\0\0\0\0\x03ns\0film"[..]).unwrap();
        assert_eq!(IdLayout::ByName.id(0x0102_0304, "ns", "film", None), by_name);
        // Ids by name begin with zeros.
        assert_eq!(parse(&ObjectId::new(&b"\x20\xc0\x40\x80\x03ns\0film"[..]).unwrap()), None);
    }
}
