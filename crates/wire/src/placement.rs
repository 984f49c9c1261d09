//! Maps an object to its target: name → hash → placement group → target.
//!
//! The hash is the low half of xxh3-64 over the namespace, a zero byte and the placement key. For a
//! part of a striped object, the hash also covers the part's id. The placement key is the name of the
//! object; in a system namespace, only the part of the name after its last `/`. Objects of a system
//! namespace with the same placement key are therefore in the same placement group. The low bits of the hash select the
//! placement group, so doubling the number of groups of a pool splits each group in two. A group's
//! target is the target with the highest random weight (rendezvous hashing). Adding or removing a
//! target therefore moves only the groups that the target gains or loses.

use uuid::Uuid;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::limits::{DEFAULT_PG_COUNT, MAX_PG_COUNT};
use crate::{Error, PartId, Result, is_system_namespace};

/// Returns the placement key of an object: the part of its name that determines its placement group.
#[must_use]
pub fn key<'a>(namespace: &str, object: &'a str) -> &'a str {
    match object.rsplit_once('/') {
        Some((_, key)) if is_system_namespace(namespace) => key,
        _ => object,
    }
}

/// Returns the hash of an object's name, or of one part of a striped object.
#[must_use]
pub fn hash(namespace: &str, object: &str, part: Option<&PartId>) -> u32 {
    let mut h = Xxh3::new();
    h.update(namespace.as_bytes());
    h.update(&[0]);
    h.update(key(namespace, object).as_bytes());
    if let Some(part) = part {
        h.update(&[0]);
        h.update(&part.upload.to_bytes());
        h.update(&part.index.to_be_bytes());
    }
    h.digest() as u32
}

/// Checks the number of placement groups that a user chose for a new pool; 0 selects the default.
/// Returns the number of groups.
///
/// # Errors
/// [`Error::OutOfRange`] if the number is not a power of two, or exceeds [`MAX_PG_COUNT`].
pub fn pg_count(chosen: u32) -> Result<u32> {
    match chosen {
        0 => Ok(DEFAULT_PG_COUNT),
        count if count.is_power_of_two() && count <= MAX_PG_COUNT => Ok(count),
        count => {
            let detail = format!("{count} is not a power of two up to {MAX_PG_COUNT}");
            Err(Error::OutOfRange { what: "number of placement groups".into(), detail })
        }
    }
}

/// Checks that a pool of `pg_count` placement groups has the group that a request names.
///
/// # Errors
/// [`Error::OutOfRange`] otherwise.
pub fn check_group(group: u32, pg_count: u32) -> Result<()> {
    if group >= pg_count {
        let detail = format!("{group} is not below {pg_count}, the number of groups of the pool");
        return Err(Error::OutOfRange { what: "placement group".into(), detail });
    }
    Ok(())
}

/// Returns the number of the placement group that a hash selects in a pool of `pg_count` groups.
/// `pg_count` must be a power of two.
#[must_use]
pub fn group(hash: u32, pg_count: u32) -> u32 {
    debug_assert!(pg_count.is_power_of_two(), "the number of placement groups must be a power of two");
    hash & (pg_count - 1)
}

/// Returns the number of the shard that serves a placement group. `shards` is the osd's number of
/// shards, at least 1.
#[must_use]
pub fn shard(group: u32, shards: u16) -> u16 {
    debug_assert!(shards > 0, "an osd has at least one shard");
    (group % u32::from(shards)) as u16
}

/// Returns the index of a placement group's target in `targets`; `None` if there are no targets.
#[must_use]
pub fn target(pool_id: u32, pg: u32, targets: &[Uuid]) -> Option<usize> {
    let seed = (u64::from(pool_id) << 32) | u64::from(pg);
    let weight = |uuid: &Uuid| (xxh3_64_with_seed(uuid.as_bytes(), seed), *uuid);
    (0..targets.len()).max_by_key(|&i| weight(&targets[i]))
}

/// Returns the indices of all `targets`, in the order in which a placement group prefers the
/// targets. The first index is the index that [`target`] returns.
#[must_use]
pub fn ranked(pool_id: u32, pg: u32, targets: &[Uuid]) -> Vec<usize> {
    let seed = (u64::from(pool_id) << 32) | u64::from(pg);
    let mut order: Vec<usize> = (0..targets.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse((xxh3_64_with_seed(targets[i].as_bytes(), seed), targets[i])));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_object_names_never_change_and_targets_get_similar_shares() {
        // These values determine where objects are stored. With other values, a node could not find
        // the objects that its drives already contain.
        assert_eq!(hash("", "object", None), 0x6136_2e53);
        assert_eq!(hash("_disk", "7/1.2", None), 0x3c71_39fa);
        let targets: Vec<Uuid> = (1..=4u128).map(Uuid::from_u128).collect();
        let mut groups = [0usize; 4];
        for pg in 0..1024 {
            groups[target(1, pg, &targets).unwrap()] += 1;
        }
        for pg in 0..64 {
            let ranked = ranked(1, pg, &targets);
            assert_eq!(Some(ranked[0]), target(1, pg, &targets));
            assert_eq!(ranked.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
        }
        assert!(groups.iter().all(|&n| (200..320).contains(&n)), "{groups:?}");
    }

    #[test]
    fn only_in_a_system_namespace_the_placement_key_is_a_part_of_the_name() {
        assert_eq!(key("_disk", "7/1.2"), "1.2");
        assert_eq!(key("_disk", "directory"), "directory");
        assert_eq!(key("_disk", "a/b/"), "");
        assert_eq!(key("disk_", "7/1.2"), "7/1.2");
        assert_eq!(key("", "7/1.2"), "7/1.2");
        assert_eq!(hash("_disk", "7/1.2", None), hash("_disk", "8/1.2", None));
        assert_ne!(hash("disk", "7/1.2", None), hash("disk", "8/1.2", None));
    }

    #[test]
    fn a_new_target_moves_only_the_placement_groups_that_it_gains() {
        let old: Vec<Uuid> = (1..=3u128).map(Uuid::from_u128).collect();
        let new: Vec<Uuid> = (1..=4u128).map(Uuid::from_u128).collect();
        for pg in 0..512 {
            let (before, after) = (target(7, pg, &old).unwrap(), target(7, pg, &new).unwrap());
            assert!(before == after || after == 3);
        }
        assert_eq!(target(7, 0, &[]), None);
    }
}
