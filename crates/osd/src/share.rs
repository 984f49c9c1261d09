//! [`GroupShare`]: the placement groups of one shard.

use wire::placement;

/// The share of one shard in the placement groups of each pool: every group whose number modulo the
/// number of shards is the shard's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupShare {
    shard: u16,
    shards: u16,
}

impl GroupShare {
    /// Returns the share of shard number `shard` of an osd with `shards` shards.
    pub(crate) fn new(shard: u16, shards: u16) -> GroupShare {
        assert!(shard < shards, "the shards are numbered from 0");
        GroupShare { shard, shards }
    }

    /// Returns the number of the shard.
    pub(crate) fn shard(self) -> u16 {
        self.shard
    }

    /// Returns the number of shards of the osd.
    pub(crate) fn shards(self) -> u16 {
        self.shards
    }

    /// Returns the number of the shard that serves a group.
    pub(crate) fn owner(self, group: u32) -> u16 {
        placement::shard(group, self.shards)
    }

    /// Returns the shard's groups of a pool with `groups` groups, in ascending order.
    pub(crate) fn groups(self, groups: u32) -> impl Iterator<Item = u32> {
        (u32::from(self.shard)..groups).step_by(usize::from(self.shards))
    }

    /// Returns the index of a group among the shard's groups; `None` if another shard serves it.
    pub(crate) fn index(self, group: u32) -> Option<usize> {
        (self.owner(group) == self.shard).then_some((group / u32::from(self.shards)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_belongs_to_exactly_one_shard() {
        for shards in 1..=9 {
            let all: Vec<GroupShare> = (0..shards).map(|shard| GroupShare::new(shard, shards)).collect();
            for group in 0..32 {
                let owners: Vec<&GroupShare> =
                    all.iter().filter(|share| share.index(group).is_some()).collect();
                assert_eq!(owners.len(), 1);
                assert_eq!(owners[0].shard(), owners[0].owner(group));
            }
            for share in all {
                for (index, group) in share.groups(32).enumerate() {
                    assert_eq!(share.index(group), Some(index));
                }
            }
        }
    }
}
