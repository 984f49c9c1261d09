//! What one tenant may use of the limits of a node's map: a quarter. So a tenant's administrator cannot
//! keep other tenants from creating pools and users.

use std::collections::BTreeMap;

use wire::limits::{MAX_POOLS, MAX_USERS};
use wire::{Error, Result};

use crate::accounts::MAIN;
use crate::map::{MAP_BYTES_MAX, NodeMap};

/// Part of each limit that one tenant may use: one in this many. The tenant `main` has no limit of its
/// own, because it has the pools of nodes from before tenants.
const SHARE: usize = 4;

/// What a tenant uses of the map.
#[derive(Debug, Default, Clone, Copy)]
struct MapShare {
    pools: usize,
    users: usize,
    /// Length of the users' records with their grants, in bytes.
    bytes: usize,
}

impl MapShare {
    /// Returns each use with its name and its limit.
    fn parts(&self) -> [(&'static str, usize, usize); 3] {
        [
            ("pools of a tenant", self.pools, MAX_POOLS / SHARE),
            ("users of a tenant", self.users, MAX_USERS / SHARE),
            ("bytes of a tenant's users and grants", self.bytes, MAP_BYTES_MAX as usize / SHARE),
        ]
    }
}

/// Checks that no tenant uses more of a changed map than it may. A change that a tenant's use does not
/// grow by is always possible.
///
/// # Errors
/// [`Error::Busy`] names the limit.
pub(crate) fn check(before: &NodeMap, after: &NodeMap) -> Result<()> {
    let before = uses(before);
    for (tenant, after) in uses(after) {
        let before = before.get(&tenant).copied().unwrap_or_default();
        for ((what, now, limit), (_, earlier, _)) in after.parts().into_iter().zip(before.parts()) {
            if now > limit && now > earlier {
                let advice = "remove some that are not needed".into();
                return Err(Error::Busy { what: what.into(), limit: limit as u64, advice });
            }
        }
    }
    Ok(())
}

/// Returns what each tenant but `main` uses.
fn uses(map: &NodeMap) -> BTreeMap<u32, MapShare> {
    let mut uses = BTreeMap::<u32, MapShare>::new();
    for pool in map.pools.iter().filter(|pool| pool.tenant != MAIN) {
        uses.entry(pool.tenant).or_default().pools += 1;
    }
    for user in map.accounts.users().iter().filter(|user| user.tenant != MAIN) {
        let used = uses.entry(user.tenant).or_default();
        used.users += 1;
        // Encoding plain data into a vector cannot fail.
        used.bytes += postcard::to_allocvec(user).expect("a record can be encoded").len();
    }
    uses
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use wire::Within;

    use super::*;
    use crate::accounts::GrantRecord;

    fn limit_of(refused: Result<()>) -> (String, u64) {
        match refused {
            Err(Error::Busy { what, limit, .. }) => (what, limit),
            other => panic!("{other:?}"),
        }
    }

    fn with_users(tenant: &str, count: u32) -> NodeMap {
        let mut map = NodeMap::new(vec![Uuid::from_u128(1)]);
        map.accounts.add_tenant("films", 1).unwrap();
        for n in 0..count {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&n.to_le_bytes());
            map.accounts.add_user((tenant, &format!("u{n}")), key.into(), false, 1).unwrap();
        }
        map
    }

    #[test]
    fn a_tenant_may_have_a_quarter_of_all_users_and_main_has_no_share() {
        let most = (MAX_USERS / SHARE) as u32;
        check(&with_users("films", most - 1), &with_users("films", most)).unwrap();
        let refused = check(&with_users("films", most), &with_users("films", most + 1));
        assert_eq!(limit_of(refused), ("users of a tenant".into(), u64::from(most)));
        check(&with_users("films", most + 2), &with_users("films", most + 1)).unwrap();
        check(&with_users("main", most), &with_users("main", most + 1)).unwrap();
    }

    #[test]
    fn the_grants_of_one_tenant_leave_room_in_the_map() {
        let mut map = with_users("films", 200);
        let refused = (0..64).find_map(|n| {
            let before = map.clone();
            for user in 0..200 {
                let within = Within { namespace: "n".repeat(20), prefix: format!("{n:020}") };
                let verbs = "read".parse().unwrap();
                let grant = GrantRecord { pool: None, within: Some(within), verbs };
                map.accounts.grant(("films", &format!("u{user}")), grant).unwrap();
            }
            check(&before, &map).err()
        });
        let (what, limit) = limit_of(refused.map_or(Ok(()), Err));
        assert_eq!((&*what, limit), ("bytes of a tenant's users and grants", MAP_BYTES_MAX / 4));
        assert!((map.encoded_len() as u64) < MAP_BYTES_MAX / 3);
    }
}
