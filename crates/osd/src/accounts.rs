//! [`Accounts`]: the node's tenants, their users, and what each user may do. They are part of the
//! node's map.

use identity::{KeyHash, NODE_ADMIN, UserName};
use serde::{Deserialize, Serialize};
use wire::limits::{MAX_GRANTS, MAX_TENANTS, MAX_USERS};
use wire::{Error, Result, Verb, Verbs, Within};

/// Number of the tenant `main`, which every node has. Pools of nodes from before tenants belong to it.
pub(crate) const MAIN: u32 = identity::MAIN_TENANT;
/// Name of the tenant [`MAIN`].
pub(crate) const MAIN_NAME: &str = "main";

/// Maximum size of a grant in a capability, without its names, in bytes.
const GRANT_BYTES: usize = 32;
/// Maximum size of a capability without its grants, in bytes.
const CLAIM_BYTES: usize = 1024;

/// Increase of the users' revisions after the newest map was lost. It exceeds the number of changes
/// that the lost map may have.
const LOST_REVISIONS: u64 = 1 << 32;
/// Increase of the number of the next tenant or user after the newest map was lost.
const LOST_NUMBERS: u32 = 1 << 16;

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TenantRecord {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) made_ms: u64,
}

/// A user of a tenant. The node's own administrator has no record, because the file `keys/admin`
/// states the administrator's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserRecord {
    pub(crate) id: u32,
    pub(crate) tenant: u32,
    pub(crate) name: String,
    pub(crate) key: KeyHash,
    /// Whether the user administers the node.
    pub(crate) is_node_admin: bool,
    pub(crate) made_ms: u64,
    /// Number of changes of the grants. Capabilities from before the last change are invalid.
    pub(crate) revision: u64,
    pub(crate) grants: Vec<GrantRecord>,
}

/// The verbs that a user may apply to some objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GrantRecord {
    /// Number of the pool; `None` for all pools of the tenant.
    pub(crate) pool: Option<u32>,
    /// The part of the pool; `None` for the whole pool.
    pub(crate) within: Option<Within>,
    pub(crate) verbs: Verbs,
}

/// The tenants and users of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accounts {
    tenants: Vec<TenantRecord>,
    users: Vec<UserRecord>,
    /// Number of the next tenant or user. Numbers are not used again.
    next: u32,
}

/// What a user may do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UserRights {
    /// Number of the user; [`NODE_ADMIN`] for the node's own administrator.
    pub(crate) user: u32,
    pub(crate) tenant: u32,
    /// `TENANT/USER`.
    pub(crate) name: String,
    pub(crate) is_node_admin: bool,
    pub(crate) revision: u64,
    pub(crate) grants: Vec<GrantRecord>,
}

impl UserRights {
    /// Returns whether the user may apply `verb` to a whole pool of the own tenant; with `None`, to all
    /// pools.
    pub(crate) fn permits(&self, verb: Verb, pool: Option<u32>) -> bool {
        let covers = |grant: &&GrantRecord| grant.pool.is_none() || (pool.is_some() && grant.pool == pool);
        let whole = self.grants.iter().filter(|grant| grant.within.is_none());
        whole.filter(covers).any(|grant| grant.verbs.contains(verb))
    }

    /// Returns whether the user has any right to a pool of the own tenant.
    pub(crate) fn knows(&self, pool: u32) -> bool {
        self.grants.iter().any(|grant| grant.pool.is_none_or(|granted| granted == pool))
    }
}

impl Accounts {
    /// The accounts of a node that has the tenant `main` only.
    pub(crate) fn new(made_ms: u64) -> Accounts {
        let main = TenantRecord { id: MAIN, name: MAIN_NAME.to_owned(), made_ms };
        Accounts { tenants: vec![main], users: Vec::new(), next: NODE_ADMIN + 1 }
    }

    /// Returns the tenants, ordered by number.
    pub(crate) fn tenants(&self) -> &[TenantRecord] {
        &self.tenants
    }

    /// Returns the users, ordered by number.
    pub(crate) fn users(&self) -> &[UserRecord] {
        &self.users
    }

    /// Returns a tenant's name; empty if there is no such tenant.
    pub(crate) fn tenant_name(&self, id: u32) -> &str {
        self.tenants.iter().find(|tenant| tenant.id == id).map_or("", |tenant| &tenant.name)
    }

    /// Returns a tenant's number.
    ///
    /// # Errors
    /// [`Error::NoSuchAccount`] if there is none of this name.
    pub(crate) fn tenant(&self, name: &str) -> Result<u32> {
        let found = self.tenants.iter().find(|tenant| tenant.name == name);
        found.map(|tenant| tenant.id).ok_or_else(|| Error::NoSuchAccount(format!("tenant {name}")))
    }

    /// Adds a tenant.
    ///
    /// # Errors
    /// If the name is taken, or there are too many tenants.
    pub(crate) fn add_tenant(&mut self, name: &str, made_ms: u64) -> Result<()> {
        if self.tenant(name).is_ok() {
            return Err(Error::AccountExists(format!("tenant {name}")));
        }
        check_room("tenants", self.tenants.len(), MAX_TENANTS)?;
        let id = self.number()?;
        self.tenants.push(TenantRecord { id, name: name.to_owned(), made_ms });
        Ok(())
    }

    /// Removes a tenant. The caller has checked that all pools of the tenant are being removed.
    ///
    /// # Errors
    /// If the tenant does not exist, has users, or is `main`.
    pub(crate) fn remove_tenant(&mut self, name: &str) -> Result<()> {
        let id = self.tenant(name)?;
        if id == MAIN {
            return Err(Error::CommandRefused(format!("the tenant {MAIN_NAME} cannot be removed")));
        }
        if let Some(user) = self.users.iter().find(|user| user.tenant == id) {
            let why = format!("tenant {name} has the user {}; remove its users first", user.name);
            return Err(Error::CommandRefused(why));
        }
        self.tenants.retain(|tenant| tenant.id != id);
        Ok(())
    }

    /// Adds a user without grants.
    ///
    /// # Errors
    /// If the tenant does not exist, the name or the key is taken, or there are too many users.
    pub(crate) fn add_user(
        &mut self,
        (tenant, name): (&str, &str),
        key: KeyHash,
        is_node_admin: bool,
        made_ms: u64,
    ) -> Result<()> {
        let tenant_id = self.tenant(tenant)?;
        if self.index(tenant, name).is_ok() || is_own_administrator(tenant, name) {
            return Err(Error::AccountExists(format!("user {tenant}/{name}")));
        }
        if let Some(other) = self.users.iter().find(|user| user.key == key) {
            // The names of other tenants' users are none of the caller's business.
            let other = match other.tenant == tenant_id {
                true => format!("{tenant}/{}", other.name),
                false => "another user".to_owned(),
            };
            let why = format!("the key {key} belongs to {other}; each user needs a key of its own");
            return Err(Error::CommandRefused(why));
        }
        check_room("users", self.users.len(), MAX_USERS)?;
        let (id, name) = (self.number()?, name.to_owned());
        let (tenant, grants) = (tenant_id, Vec::new());
        self.users.push(UserRecord { id, tenant, name, key, is_node_admin, made_ms, revision: 1, grants });
        Ok(())
    }

    /// Returns the number of a user; `None` if there is none of this name.
    pub(crate) fn user_id(&self, tenant: &str, name: &str) -> Option<u32> {
        self.index(tenant, name).ok().map(|index| self.users[index].id)
    }

    /// Removes a user.
    ///
    /// # Errors
    /// [`Error::NoSuchAccount`] if there is no such user.
    pub(crate) fn remove_user(&mut self, tenant: &str, name: &str) -> Result<()> {
        let index = self.index(tenant, name)?;
        self.users.remove(index);
        Ok(())
    }

    /// Adds a grant. If the user has a grant for the same objects, its verbs are added to that one.
    ///
    /// # Errors
    /// If there is no such user, or the user has too many grants.
    pub(crate) fn grant(&mut self, (tenant, name): (&str, &str), grant: GrantRecord) -> Result<()> {
        let index = self.index(tenant, name)?;
        let user = &mut self.users[index];
        let same = |own: &&mut GrantRecord| (own.pool, &own.within) == (grant.pool, &grant.within);
        match user.grants.iter_mut().find(same) {
            Some(own) => own.verbs = own.verbs.with(grant.verbs),
            None => {
                check_room("grants of a user", user.grants.len(), MAX_GRANTS)?;
                let within = user.grants.iter().map(|own| own.within.as_ref());
                check_grants(user.grants.len() + 1, within.chain([grant.within.as_ref()]))?;
                user.grants.push(grant);
            }
        }
        user.revision += 1;
        Ok(())
    }

    /// Takes verbs from a user: from the grant for exactly these objects, or with `None` from all
    /// grants.
    ///
    /// # Errors
    /// If there is no such user, or no such grant.
    pub(crate) fn revoke(
        &mut self,
        (tenant, name): (&str, &str),
        objects: Option<(Option<u32>, Option<Within>)>,
        verbs: Verbs,
    ) -> Result<()> {
        let index = self.index(tenant, name)?;
        let user = &mut self.users[index];
        let is_meant = |grant: &GrantRecord| {
            objects.as_ref().is_none_or(|(pool, within)| (grant.pool, &grant.within) == (*pool, within))
        };
        if objects.is_some() && !user.grants.iter().any(is_meant) {
            let why =
                format!("{tenant}/{name} has no grant for exactly these objects; see `outboard user ls`");
            return Err(Error::CommandRefused(why));
        }
        for grant in user.grants.iter_mut().filter(|grant| is_meant(grant)) {
            grant.verbs = grant.verbs.without(verbs);
        }
        user.grants.retain(|grant| !grant.verbs.is_empty());
        user.revision += 1;
        Ok(())
    }

    /// Makes all capabilities invalid, and keeps numbers of users from being used again. A node
    /// does so when it has lost its newest map: the lost map may have given a revision to other
    /// rights, and a number to another user.
    pub(crate) fn outdate(&mut self) {
        self.users.iter_mut().for_each(|user| user.revision += LOST_REVISIONS);
        self.next = self.next.saturating_add(LOST_NUMBERS);
    }

    /// Removes the grants for a pool that does not exist any more.
    pub(crate) fn forget_pool(&mut self, pool: u32) {
        self.users.iter_mut().for_each(|user| user.grants.retain(|grant| grant.pool != Some(pool)));
    }

    /// Returns what a user may do; `None` if the user was removed.
    pub(crate) fn rights(&self, user: &UserName) -> Option<UserRights> {
        let name = user.to_string();
        if user.id == NODE_ADMIN {
            let grants = vec![GrantRecord { pool: None, within: None, verbs: Verbs::ALL }];
            let (user, tenant) = (NODE_ADMIN, MAIN);
            return Some(UserRights { user, tenant, name, is_node_admin: true, revision: 0, grants });
        }
        let record = self.users.iter().find(|record| record.id == user.id)?;
        let UserRecord { id, tenant, is_node_admin, revision, .. } = *record;
        Some(UserRights { user: id, tenant, name, is_node_admin, revision, grants: record.grants.clone() })
    }

    /// Returns the revision of a user's rights; `None` if the user was removed. The revision of the node's
    /// own administrator is that of the key ([`OsdConfig::admin_revision`](crate::OsdConfig)).
    pub(crate) fn revision(&self, user: u32) -> Option<u64> {
        if user == NODE_ADMIN {
            return Some(0);
        }
        let index = self.users.binary_search_by_key(&user, |record| record.id).ok()?;
        Some(self.users[index].revision)
    }

    fn index(&self, tenant: &str, name: &str) -> Result<usize> {
        let id = self.tenant(tenant)?;
        let found = self.users.iter().position(|user| user.tenant == id && user.name == name);
        found.ok_or_else(|| {
            if is_own_administrator(tenant, name) {
                let why =
                    "the key of main/admin is the node's own: change it on the node, in the file keys/admin";
                return Error::CommandRefused(why.into());
            }
            Error::NoSuchAccount(format!("user {tenant}/{name}"))
        })
    }

    fn number(&mut self) -> Result<u32> {
        let next = self.next.checked_add(1).ok_or_else(|| Error::Busy {
            what: "tenants and users since the node was made".into(),
            limit: u32::MAX.into(),
            advice: "make a new node".into(),
        })?;
        Ok(std::mem::replace(&mut self.next, next))
    }
}

/// Whether this is the name of the node's own administrator.
fn is_own_administrator(tenant: &str, user: &str) -> bool {
    (tenant, user) == (MAIN_NAME, "admin")
}

/// Checks that `count` grants for `within` fit into a capability.
///
/// # Errors
/// [`Error::TooLarge`] if they do not.
pub(crate) fn check_grants<'a>(count: usize, within: impl Iterator<Item = Option<&'a Within>>) -> Result<()> {
    let too_large = |what: &str, size: usize, limit: usize| Error::TooLarge {
        what: what.to_owned(),
        size: size as u64,
        limit: limit as u64,
    };
    if count > MAX_GRANTS {
        return Err(too_large("number of grants", count, MAX_GRANTS));
    }
    let names = within.flatten().map(|within| within.namespace.len() + within.prefix.len());
    let size = names.sum::<usize>() + count * GRANT_BYTES;
    let limit = capability::CAPABILITY_BYTES_MAX - CLAIM_BYTES;
    if size > limit {
        return Err(too_large("size of all grants of a user", size, limit));
    }
    Ok(())
}

fn check_room(what: &str, taken: usize, limit: usize) -> Result<()> {
    if taken < limit {
        return Ok(());
    }
    Err(Error::Busy {
        what: what.into(),
        limit: limit as u64,
        advice: "remove some that are not needed".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> KeyHash {
        KeyHash::from([n; 32])
    }

    fn user(id: u32) -> UserName {
        UserName { id, tenant_id: 1, tenant: "films".into(), user: "cutter".into() }
    }

    fn grant(pool: Option<u32>, verbs: &str) -> GrantRecord {
        GrantRecord { pool, within: None, verbs: verbs.parse().unwrap() }
    }

    fn accounts() -> Accounts {
        let mut accounts = Accounts::new(1);
        accounts.add_tenant("films", 2).unwrap();
        accounts.add_user(("films", "cutter"), key(1), false, 3).unwrap();
        accounts
    }

    #[test]
    fn the_grants_of_a_user_fit_into_a_capability() {
        let mut accounts = accounts();
        let long = |number: usize| GrantRecord {
            pool: Some(1),
            within: Some(Within { namespace: String::new(), prefix: format!("{number:01000}") }),
            verbs: "read".parse().unwrap(),
        };
        let who = ("films", "cutter");
        let refused = (0..MAX_GRANTS).find_map(|number| accounts.grant(who, long(number)).err());
        assert!(matches!(refused, Some(Error::TooLarge { .. })), "{refused:?}");
        let user = &accounts.users()[0];
        assert!(user.grants.len() > 10, "{} grants", user.grants.len());
        let claimed = |grant: &GrantRecord| capability::ClaimedGrant {
            pool: grant.pool,
            within: grant.within.clone(),
            verbs: grant.verbs,
        };
        let claims = capability::Claims {
            node: uuid::Uuid::max(),
            name: format!("{}/{}", "t".repeat(32), "u".repeat(32)),
            tenant: u32::MAX,
            user: u32::MAX,
            revision: u64::MAX,
            key: key(1),
            issued: 1 << 40,
            expires: 1 << 40,
            id: [0xff; 16],
            grants: user.grants.iter().map(claimed).collect(),
            qos_class: u8::MAX.into(),
            memory: Vec::new(),
        };
        let capability_key = capability::CapabilityKey::derive(&identity::ProofKey::default());
        assert!(capability_key.sign(&claims).is_some(), "they fit");
    }

    #[test]
    fn each_change_of_the_grants_makes_earlier_capabilities_invalid() {
        let mut accounts = accounts();
        let id = accounts.users()[0].id;
        let who = ("films", "cutter");
        assert_eq!(accounts.revision(id), Some(1));
        accounts.grant(who, grant(Some(1), "read")).unwrap();
        accounts.grant(who, grant(Some(1), "list")).unwrap();
        accounts.grant(who, grant(None, "list")).unwrap();
        assert_eq!((accounts.revision(id), accounts.users()[0].grants.len()), (Some(4), 2));
        let rights = accounts.rights(&user(id)).unwrap();
        assert!(rights.permits(Verb::Read, Some(1)) && rights.permits(Verb::List, None));
        assert!(!rights.permits(Verb::Read, Some(2)) && !rights.permits(Verb::Read, None));
        accounts.revoke(who, Some((Some(1), None)), "read".parse().unwrap()).unwrap();
        assert!(accounts.revoke(who, Some((Some(2), None)), Verbs::ALL).is_err());
        assert_eq!(accounts.revision(id), Some(5));
        assert!(!accounts.rights(&user(id)).unwrap().permits(Verb::Read, Some(1)));
        accounts.revoke(who, None, Verbs::ALL).unwrap();
        assert!(accounts.users()[0].grants.is_empty());
        accounts.outdate();
        assert_eq!(accounts.revision(id), Some(6 + LOST_REVISIONS), "an older map gives no revision twice");
        accounts.remove_user("films", "cutter").unwrap();
        assert_eq!((accounts.revision(id), accounts.rights(&user(id))), (None, None));
        accounts.add_user(who, key(1), false, 4).unwrap();
        assert_eq!(accounts.revision(id), None, "a user of the same name is another user");
    }

    #[test]
    fn names_and_keys_are_unique_and_tenants_with_users_stay() {
        let mut accounts = accounts();
        assert!(matches!(accounts.add_tenant("films", 1), Err(Error::AccountExists(_))));
        assert!(matches!(accounts.add_tenant("main", 1), Err(Error::AccountExists(_))));
        assert!(accounts.add_user(("films", "cutter"), key(2), false, 1).is_err());
        let taken = accounts.add_user(("main", "other"), key(1), false, 1).unwrap_err().to_string();
        assert!(taken.contains("belongs to another user"), "{taken}");
        let taken = accounts.add_user(("films", "other"), key(1), false, 1).unwrap_err().to_string();
        assert!(taken.contains("films/cutter"), "{taken}");
        assert!(matches!(accounts.add_user(("no", "other"), key(2), false, 1), Err(Error::NoSuchAccount(_))));
        assert!(accounts.add_user(("main", "admin"), key(2), false, 1).is_err());
        assert!(accounts.remove_tenant("films").is_err() && accounts.remove_tenant("main").is_err());
        accounts.remove_user("films", "cutter").unwrap();
        accounts.remove_tenant("films").unwrap();
        assert!(accounts.remove_user("main", "admin").unwrap_err().to_string().contains("keys/admin"));
    }

    #[test]
    fn the_nodes_own_administrator_has_all_rights_in_main() {
        let accounts = accounts();
        let own = UserName { id: NODE_ADMIN, tenant_id: MAIN, tenant: "main".into(), user: "admin".into() };
        let rights = accounts.rights(&own).unwrap();
        assert!(rights.is_node_admin && rights.permits(Verb::Write, Some(9)) && rights.tenant == MAIN);
        assert_eq!(accounts.revision(NODE_ADMIN), Some(0));
    }
}
