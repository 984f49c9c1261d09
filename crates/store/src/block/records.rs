//! Keys and values of the index. See `docs/format.md`.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::{CollectionId, ObjectId, Result, StoreError};

/// Number of blocks that a page of reference counts covers.
pub(crate) const REF_BLOCKS: u64 = 1024;

/// Builds keys. The first byte of a key is its kind. Numbers are big endian, so that keys sort by
/// number.
pub(crate) mod key {
    use super::{BufMut, Bytes, BytesMut, CollectionId};

    pub(crate) const META: &[u8] = b"M";
    pub(crate) const COLLECTION: u8 = b'C';
    pub(crate) const ONODE: u8 = b'O';
    pub(crate) const LEAF: u8 = b'S';
    pub(crate) const OMAP: u8 = b'P';
    pub(crate) const REFS: u8 = b'R';
    pub(crate) const BITMAP: u8 = b'B';

    fn make(kind: u8, number: u64, rest: &[u8]) -> Bytes {
        let mut key = BytesMut::with_capacity(9 + rest.len());
        key.put_u8(kind);
        key.put_u64(number);
        key.put_slice(rest);
        key.freeze()
    }

    pub(crate) fn collection(cid: &CollectionId) -> Bytes {
        [&[COLLECTION], &cid.as_bytes()[..]].concat().into()
    }

    pub(crate) fn onode(collection: u64, oid: &[u8]) -> Bytes {
        make(ONODE, collection, oid)
    }

    pub(crate) fn leaf(nid: u64, leaf: u64) -> Bytes {
        make(LEAF, nid, &leaf.to_be_bytes())
    }

    pub(crate) fn omap(nid: u64, key: &[u8]) -> Bytes {
        make(OMAP, nid, key)
    }

    pub(crate) fn refs(chunk: u64) -> Bytes {
        make(REFS, chunk, &[])
    }

    pub(crate) fn bitmap(page: u64) -> Bytes {
        make(BITMAP, page, &[])
    }

    /// Returns the first possible key with this kind and number, and the first key after all keys
    /// with this kind and number.
    pub(crate) fn range(kind: u8, number: u64) -> (Bytes, Bytes) {
        (make(kind, number, &[]), make(kind, number + 1, &[]))
    }

    /// Returns the first possible key of a kind, and the first key after all keys of the kind.
    pub(crate) fn kind_range(kind: u8) -> (Bytes, Bytes) {
        (vec![kind].into(), vec![kind + 1].into())
    }

    /// Returns the number in a key that begins with a kind and a number.
    pub(crate) fn number(key: &[u8]) -> Option<u64> {
        Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
    }

    /// Returns the part of a key after kind and number.
    pub(crate) fn rest(key: &Bytes) -> Bytes {
        key.slice(9.min(key.len())..)
    }
}

/// Returns the error that an item of the target, named `what`, is corrupt.
pub(crate) fn corrupt(what: &str, detail: impl ToString) -> StoreError {
    StoreError::Corrupt { what: what.to_owned(), detail: detail.to_string() }
}

/// State of the index, which each checkpoint stores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// Number of the checkpoint.
    pub(crate) checkpoint: u64,
    /// Generation of the log. Sectors written after the checkpoint carry this number.
    pub(crate) log_generation: u64,
    /// Sequence number of the first log sector whose changes are not in the index.
    pub(crate) log_start: u64,
    /// The number that the next new collection or object gets.
    pub(crate) next_nid: u64,
    /// Estimate of the bytes of storage that the index uses; `None` if an earlier version wrote the
    /// record.
    pub(crate) index_used: Option<u64>,
}

/// The meta record as earlier versions wrote it: without the last field of [`Meta`].
#[derive(Serialize, Deserialize)]
struct EarlierMeta {
    checkpoint: u64,
    log_generation: u64,
    log_start: u64,
    next_nid: u64,
}

/// The onode of an object: all metadata of the object except its omap entries and all leaves of its
/// extent map but the first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Onode {
    /// The object's number, which is part of the keys of its leaves and omap entries.
    pub(crate) nid: u64,
    /// Size, in bytes.
    pub(crate) size: u64,
    /// Number of blocks that are not holes.
    pub(crate) blocks: u64,
    /// Whether the object may have omap entries.
    pub(crate) has_omap: bool,
    pub(crate) omap_header: Bytes,
    pub(crate) xattrs: BTreeMap<Bytes, Bytes>,
    /// The encoded first leaf of the extent map. If it is empty, the leaf may have a key of its own.
    #[serde(skip)]
    pub(crate) leaf: Bytes,
}

impl Onode {
    /// Encodes the onode. The first leaf follows the other fields.
    pub(crate) fn encode(&self) -> Bytes {
        let xattrs: usize = self.xattrs.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        let out = Vec::with_capacity(64 + self.omap_header.len() + xattrs + self.leaf.len());
        let mut out = postcard::to_extend(self, out).expect("an onode can always be encoded");
        out.extend_from_slice(&self.leaf);
        out.into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Onode> {
        let (onode, leaf): (Onode, &[u8]) =
            postcard::take_from_bytes(bytes).map_err(|e| corrupt("onode", e))?;
        Ok(Onode { leaf: Bytes::copy_from_slice(leaf), ..onode })
    }
}

impl Meta {
    pub(crate) fn encode(&self) -> Bytes {
        postcard::to_allocvec(self).expect("the meta record can always be encoded").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Meta> {
        if let Ok(meta) = postcard::from_bytes(bytes) {
            return Ok(meta);
        }
        let EarlierMeta { checkpoint, log_generation, log_start, next_nid } =
            postcard::from_bytes(bytes).map_err(|e| corrupt("meta record of the index", e))?;
        Ok(Meta { checkpoint, log_generation, log_start, next_nid, index_used: None })
    }
}

/// Decodes the entry of a collection: its id from the key, and its number from the value.
pub(crate) fn decode_collection(key: &[u8], value: &[u8]) -> Result<(CollectionId, u64)> {
    let id =
        CollectionId::new(key.get(1..).unwrap_or_default().to_vec()).map_err(|e| corrupt("collection", e))?;
    let number = value.try_into().map_err(|_| corrupt("collection", "its number does not have 8 bytes"))?;
    Ok((id, u64::from_le_bytes(number)))
}

/// Returns the object id in an onode's key.
pub(crate) fn decode_oid(key: &Bytes) -> Result<ObjectId> {
    ObjectId::new(key::rest(key)).map_err(|e| corrupt("key of an onode", e))
}

/// Reference counts of 1024 blocks: the number of references of each block beyond the first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RefPage {
    pub(crate) extra: BTreeMap<u16, u32>,
}

impl RefPage {
    /// Encodes the counts as runs of equal counts: {first block u16, number of blocks u16, extra
    /// references u32}. Returns `None` if no block has extra references.
    pub(crate) fn encode(&self) -> Option<Bytes> {
        let mut runs: Vec<(u16, u16, u32)> = Vec::new();
        for (&block, &extra) in &self.extra {
            match runs.last_mut() {
                Some((start, len, same)) if *start + *len == block && *same == extra => *len += 1,
                _ => runs.push((block, 1, extra)),
            }
        }
        let mut out = BytesMut::with_capacity(runs.len() * 8);
        for (start, len, extra) in runs {
            out.put_u16_le(start);
            out.put_u16_le(len);
            out.put_u32_le(extra);
        }
        (!out.is_empty()).then(|| out.freeze())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<RefPage> {
        let mut page = RefPage::default();
        if !bytes.len().is_multiple_of(8) {
            return Err(corrupt("reference counts", "the length is not a multiple of 8"));
        }
        let mut next = 0;
        for run in bytes.chunks_exact(8) {
            let start = u16::from_le_bytes([run[0], run[1]]);
            let len = u16::from_le_bytes([run[2], run[3]]);
            let extra = u32::from_le_bytes([run[4], run[5], run[6], run[7]]);
            let end = u64::from(start) + u64::from(len);
            if start < next || len == 0 || extra == 0 || end > REF_BLOCKS {
                return Err(corrupt("reference counts", "a run is out of order, out of range or empty"));
            }
            page.extra.extend((start..start + len).map(|b| (b, extra)));
            next = start + len;
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_meta_record_of_an_earlier_version_can_be_read() {
        let (checkpoint, log_generation, log_start, next_nid) = (300, 2, 1 << 40, 77);
        let earlier = EarlierMeta { checkpoint, log_generation, log_start, next_nid };
        let found = Meta::decode(&postcard::to_allocvec(&earlier).unwrap()).unwrap();
        let meta = Meta { checkpoint, log_generation, log_start, next_nid, index_used: None };
        assert_eq!(found, meta);
        let meta = Meta { index_used: Some(5 << 20), ..meta };
        assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
    }

    proptest! {
        #[test]
        fn reference_counts_survive_encoding_and_decoding(extra in proptest::collection::btree_map(0u16..1024, 1u32..3, 0..200)) {
            let page = RefPage { extra };
            let found = page.encode().map_or(RefPage::default(), |b| RefPage::decode(&b).unwrap());
            prop_assert_eq!(found, page);
        }

        #[test]
        fn decoding_arbitrary_bytes_as_index_entries_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = (RefPage::decode(&bytes), Onode::decode(&bytes), Meta::decode(&bytes));
            let _ = decode_collection(&bytes, &bytes);
        }
    }
}
