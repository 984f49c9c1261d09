//! Compares the recorded size of an object with the size of its data in the store.
//!
//! One transaction changes an object's record and its data, so the two sizes agree. Nodes that
//! spoke a version of the object protocol below 5 could break this rule. If a compound truncated an
//! object to a size inside a block that was a hole, the node recorded this size correctly. But the
//! stored data lacked the bytes of this block up to the new size. Reads of the object then failed.
//! The missing bytes are zeros, because an earlier op of the same compound had made the hole. A
//! scrub of any pool finds these objects. A scrub with repair extends the data to the recorded size.

use std::collections::BTreeMap;

use array::{Findings, SIZE_XATTR, UNFINISHED_XATTR};
use base::block;
use bytes::Bytes;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::fail::{Fail, StepResult, refusal};
use crate::ids;
use crate::object::{INFO_XATTR, ObjectInfo};
use crate::patience::in_turn;
use crate::pool::ObjectLocation;
use crate::shard::Shard;

/// The two sizes of an object, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ObjectSizes {
    /// Size in the object's record; `None` if the record cannot be decoded.
    recorded: Option<u64>,
    stored: u64,
}

impl ObjectSizes {
    /// Creates the pair from the record and the size of the data, as the store or array returned
    /// them.
    fn new(record: Option<&Bytes>, stored: u64) -> ObjectSizes {
        ObjectSizes {
            recorded: record.and_then(|bytes| ObjectInfo::decode(bytes)).map(|info| info.size),
            stored,
        }
    }

    fn agree(self) -> bool {
        self.recorded == Some(self.stored)
    }

    /// Returns the recorded size if the missing bytes are certain to be zeros, and `None`
    /// otherwise. They are certain to be zeros if the data ends within the object's last block or
    /// right before it. The defect of old nodes is the only known cause of this state.
    fn repairable(self) -> Option<u64> {
        self.recorded.filter(|&size| self.stored < size && self.stored >= block::align_down(size))
    }

    fn describe(self) -> String {
        match self.recorded {
            Some(recorded) => {
                format!("its data has {} bytes, but its record says {recorded} bytes", self.stored)
            }
            None => "its record cannot be decoded".into(),
        }
    }
}

/// Returns a description of what is wrong with an object or fragment on a target, or `None` if
/// nothing is wrong. `fsck` calls this function for one target at a time, so the function checks
/// only the stored `size` in bytes and the xattrs.
#[must_use]
pub fn inspect_object(oid: &ObjectId, size: u64, xattrs: &BTreeMap<Bytes, Bytes>) -> Option<String> {
    let name = ids::parse(oid)?;
    if xattrs.contains_key(&UNFINISHED_XATTR) {
        // The rebuild of the target was interrupted, and replaces this copy when it continues.
        return None;
    }
    // A fragment stores the size of its object in an xattr.
    let stored = match xattrs.get(&SIZE_XATTR) {
        Some(bytes) => u64::from_be_bytes(bytes[..].try_into().ok()?),
        None => size,
    };
    let sizes = ObjectSizes::new(xattrs.get(&INFO_XATTR), stored);
    if sizes.agree() {
        return None;
    }
    let advice = match sizes.repairable() {
        Some(_) => "start the node and run \"outboard scrub --repair POOL\"",
        None => "restore it from a copy, or remove the object",
    };
    Some(format!("object \"{}\": {}; {advice}", name.object.escape_default(), sizes.describe()))
}

impl Shard {
    /// Compares the recorded size of a user's object with the stored size. With `repair`, sets the
    /// stored size to the recorded size if the missing bytes are certain to be zeros.
    ///
    /// # Errors
    /// If the store is unreachable for longer than requests wait for it.
    pub(crate) async fn audit(&self, place: &ObjectLocation, repair: bool) -> wire::Result<Findings> {
        let mut found = Findings::default();
        // Most objects are correct. This first check takes no turn on the object, so it delays no
        // client.
        if let Ok(sizes) = sizes(place).await
            && sizes.is_none_or(ObjectSizes::agree)
        {
            return Ok(found);
        }
        let resized =
            in_turn(place, self.config.store_patience, async |_, _| resize(place, repair).await).await;
        match resized {
            Ok(AuditOutcome::Right) => {}
            Ok(AuditOutcome::Wrong(sizes)) => {
                found.wrong_size = 1;
                tracing::warn!(oid = %place.oid, ?sizes, "a scrub found an object of the wrong size");
            }
            Ok(AuditOutcome::Resized(sizes)) => {
                (found.wrong_size, found.resized) = (1, 1);
                metrics::counter!("outboard_osd_objects_resized_total").increment(1);
                tracing::warn!(oid = %place.oid, ?sizes, "a scrub extended an object's data to its recorded size");
            }
            Err(Fail::Refused(e)) => {
                found.damaged = 1;
                tracing::warn!(oid = %place.oid, error = %e, "a scrub cannot read an object's sizes");
            }
            Err(fail) => return Err(refusal(fail)),
        }
        Ok(found)
    }
}

/// Outcome of an audit.
enum AuditOutcome {
    Right,
    Wrong(ObjectSizes),
    Resized(ObjectSizes),
}

/// Reads the sizes of an object; `None` if the object does not exist.
async fn sizes(place: &ObjectLocation) -> StepResult<Option<ObjectSizes>> {
    let (store, cid, oid) = (&place.pg.backing, &place.pg.cid, &place.oid);
    let record = match store.get_xattr(cid, oid, INFO_XATTR).await {
        Ok(bytes) => Some(bytes),
        Err(StoreError::NoSuchXattr(_)) => None,
        Err(StoreError::NoSuchObject(_)) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    // Unlike a stat, the extents of no bytes tell the size also of an object with too much damage.
    match store.extents(cid, oid, 0, 0).await {
        Ok(none) => Ok(Some(ObjectSizes::new(record.as_ref(), none.object_size))),
        Err(StoreError::NoSuchObject(_)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Compares the sizes of an object; the caller must hold the object's turn. With `repair`, makes
/// the sizes agree if the missing bytes are certain to be zeros.
async fn resize(place: &ObjectLocation, repair: bool) -> StepResult<AuditOutcome> {
    let Some(sizes) = sizes(place).await?.filter(|sizes| !sizes.agree()) else {
        return Ok(AuditOutcome::Right);
    };
    let Some(size) = sizes.repairable().filter(|_| repair) else { return Ok(AuditOutcome::Wrong(sizes)) };
    let truncate = Op::Truncate { oid: place.oid.clone(), size };
    let transaction = Transaction::new(place.pg.cid.clone()).with(truncate).from_reserve();
    place.pg.backing.queue(transaction).await?;
    Ok(AuditOutcome::Resized(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::IdLayout;

    fn inspect(recorded: u64, stored: u64, fragment: Option<u64>) -> Option<String> {
        let info = ObjectInfo { version: 1, size: recorded, modified_ms: 0, manifest: None };
        let mut xattrs = BTreeMap::from([(INFO_XATTR, info.encode())]);
        xattrs.extend(fragment.map(|size| (SIZE_XATTR, Bytes::copy_from_slice(&size.to_be_bytes()))));
        let inspect_id = |layout: IdLayout| inspect_object(&layout.id(7, "", "film", None), stored, &xattrs);
        let found = inspect_id(IdLayout::ByName);
        assert_eq!(found, inspect_id(IdLayout::Hashed));
        found
    }

    #[test]
    fn an_object_whose_two_sizes_differ_is_reported_with_advice() {
        assert_eq!(inspect(18_450, 18_450, None), None);
        assert_eq!(inspect(18_450, 8192, Some(18_450)), None, "a fragment is shorter than its object");
        for short in [inspect(18_450, 16_384, None), inspect(18_450, 8192, Some(16_384))] {
            let short = short.unwrap();
            assert!(short.contains("\"film\"") && short.contains("scrub --repair"), "{short}");
        }
        let lost = inspect(18_450, 4096, None).unwrap();
        assert!(lost.contains("restore it"), "more than the last block is missing: {lost}");
        let long = inspect(100, 4096, None).unwrap();
        assert!(long.contains("restore it"), "{long}");
        assert_eq!(inspect_object(&ids::meta_object(), 5, &BTreeMap::new()), None);
        let unfinished = BTreeMap::from([(UNFINISHED_XATTR, Bytes::new())]);
        assert_eq!(inspect_object(&IdLayout::ByName.id(7, "", "object", None), 0, &unfinished), None);
    }
}
