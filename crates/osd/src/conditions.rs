//! Conditions of changes and queries.

use store::{Op, StoreCalls, StoreError};
use wire::{Condition, Error};

use crate::fail::StepResult;
use crate::object::{ObjectInfo, user_xattr};
use crate::pool::ObjectLocation;

/// Checks conditions on an object whose latest record is `info`. The caller must hold the object's
/// turn.
///
/// # Errors
/// [`Error::ConditionFailed`] for the first condition that does not hold.
pub(crate) async fn check_conditions(
    place: &ObjectLocation,
    name: &str,
    conditions: &[Condition],
    info: Option<&ObjectInfo>,
) -> StepResult<()> {
    for (index, condition) in conditions.iter().enumerate() {
        check(place, name, (index, condition), info).await?;
    }
    Ok(())
}

/// Checks the conditions that need no lookup of an xattr or an omap entry. Returns guards for the
/// other conditions, which the store checks when it executes the transaction of the change.
///
/// # Errors
/// [`Error::ConditionFailed`] if a checked condition does not hold. An earlier condition may also
/// not hold.
pub(crate) async fn guard_conditions(
    place: &ObjectLocation,
    name: &str,
    conditions: &[Condition],
    info: Option<&ObjectInfo>,
) -> StepResult<Vec<Op>> {
    let mut guards = Vec::new();
    for (index, condition) in conditions.iter().enumerate() {
        match guard(place, condition) {
            Some(guard) => guards.push(guard),
            None => check(place, name, (index, condition), info).await?,
        }
    }
    Ok(guards)
}

/// Whether a guard can check the condition, which otherwise needs a lookup in the store.
pub(crate) fn has_guard(condition: &Condition) -> bool {
    matches!(condition, Condition::Xattr(..) | Condition::Omap(..))
}

fn guard(place: &ObjectLocation, condition: &Condition) -> Option<Op> {
    let oid = place.oid.clone();
    match condition {
        Condition::Xattr(name, value) => {
            Some(Op::GuardXattr { oid, name: user_xattr(name), value: value.clone() })
        }
        Condition::Omap(key, value) => Some(Op::GuardOmap { oid, key: key.clone(), value: value.clone() }),
        _ => None,
    }
}

async fn check(
    place: &ObjectLocation,
    name: &str,
    (index, condition): (usize, &Condition),
    info: Option<&ObjectInfo>,
) -> StepResult<()> {
    match violation(place, name, condition, info).await? {
        Some(detail) => {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            Err(Error::ConditionFailed { index, detail }.into())
        }
        None => Ok(()),
    }
}

/// Returns whether the error means that the object does not exist, and so has no xattrs and no omap
/// entries. A query does not create the collection of its group, so the collection may be missing, too.
fn lacks_object(e: &StoreError) -> bool {
    matches!(e, StoreError::NoSuchObject(_) | StoreError::NoSuchCollection(_))
}

/// Returns why a condition does not hold; `None` if it holds.
async fn violation(
    place: &ObjectLocation,
    name: &str,
    condition: &Condition,
    info: Option<&ObjectInfo>,
) -> StepResult<Option<String>> {
    let (pg, oid) = (&place.pg, &place.oid);
    let store = &pg.backing;
    Ok(match condition {
        Condition::Exists => info.is_none().then(|| "the object does not exist".into()),
        Condition::Absent => info.map(|i| format!("the object exists with version {}", i.version)),
        Condition::Version(wanted) => match info {
            Some(i) if i.version == *wanted => None,
            Some(i) => Some(format!("the object has version {} instead of {wanted}", i.version)),
            None => Some("the object does not exist".into()),
        },
        Condition::Xattr(xattr, wanted) => {
            let found = match store.get_xattr(&pg.cid, oid, user_xattr(xattr)).await {
                Ok(value) => Some(value),
                Err(StoreError::NoSuchXattr(_)) => None,
                Err(e) if lacks_object(&e) => None,
                Err(e) => return Err(e.into()),
            };
            (found != *wanted)
                .then(|| format!("xattr \"{}\" does not have the expected value", xattr.escape_ascii()))
        }
        Condition::Omap(key, wanted) => {
            let found = match store.omap_get(&pg.cid, oid, vec![key.clone()]).await {
                Ok(mut found) => found.pop().map(|(_, value)| value),
                Err(e) if lacks_object(&e) => None,
                Err(e) => return Err(e.into()),
            };
            (found != *wanted)
                .then(|| format!("omap entry \"{}\" does not have the expected value", key.escape_ascii()))
        }
        Condition::Bytes(offset, wanted) => {
            let Some(info) = info else { return Ok(Some("the object does not exist".into())) };
            if info.manifest.is_some() {
                let what = "comparing bytes".into();
                return Err(Error::Striped { name: name.into(), what }.into());
            }
            let len = wanted.len() as u64;
            let read = store.read(&pg.cid, oid, *offset, len, None).await?;
            read.verify().map_err(|e| Error::Corrupt(format!("{name} ({e})")))?;
            (read.slice(*offset, len) != *wanted)
                .then(|| format!("the bytes at offset {offset} differ from the expected bytes"))
        }
    })
}
