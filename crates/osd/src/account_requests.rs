//! Execution of requests about tenants, users and capabilities.

use std::rc::Rc;

use capability::{ClaimedGrant, Claims, Resource, Rights};
use identity::{Caller, KeyHash};
use wire::{
    AccessGrant, AccountName, AccountRequest, AdminReply, AdminRequest, AdministratorOf, Error, PoolName,
    Result, Scope, TenantInfo, UserInfo, Verb, Verbs, check_account,
};

use crate::accounts::{GrantRecord, UserRights};
use crate::authorize::{AdminGrant, authorize_admin};
use crate::map::{NodeMap, PoolRecord};
use crate::osd::Osd;

impl Osd {
    /// Executes a request about accounts. `is_repeated` says whether an earlier attempt may have taken
    /// effect.
    pub(crate) async fn administer_accounts(
        self: &Rc<Osd>,
        caller: &Caller,
        request: AccountRequest,
        is_repeated: bool,
    ) -> Result<AdminReply> {
        // The rights of the caller may change while the request waits, so they are checked afterwards.
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        let caller = &authorize_admin(&self.shard, caller, &AdminRequest::Accounts(request.clone()))?;
        let made_ms = self.shard.config.clock.now_ms();
        let changed = match request {
            AccountRequest::ListTenants => return Ok(AdminReply::Tenants(self.list_tenants(caller))),
            AccountRequest::ListUsers { tenant } => {
                return Ok(AdminReply::Users(self.list_users(caller, tenant.is_none())));
            }
            AccountRequest::CreateTenant { name } => {
                check_account(&name)?;
                let change = |map: &mut NodeMap| map.accounts.add_tenant(&name, made_ms);
                self.change_accounts(change).await
            }
            AccountRequest::RemoveTenant { name } => {
                let change = |map: &mut NodeMap| {
                    let id = map.accounts.tenant(&name)?;
                    map.accounts.remove_tenant(&name)?;
                    // Pools that are being removed go on without the tenant: its number is not used
                    // again.
                    let keeps = |pool: &&PoolRecord| pool.tenant == id && !pool.removing;
                    if let Some(pool) = map.pools.iter().find(keeps) {
                        let why = format!("tenant {name} has the pool {}; remove its pools first", pool.name);
                        return Err(Error::CommandRefused(why));
                    }
                    Ok(())
                };
                self.change_accounts(change).await
            }
            AccountRequest::CreateUser { user, key, is_node_admin } => {
                let change = |map: &mut NodeMap| {
                    let name = (user.tenant(), user.user());
                    map.accounts.add_user(name, KeyHash::from(key), is_node_admin, made_ms)
                };
                self.change_accounts(change).await
            }
            AccountRequest::RemoveUser { user } => {
                self.check_may_change(caller, &user)?;
                let id = self.shard.map.borrow().accounts.user_id(user.tenant(), user.user());
                let change = |map: &mut NodeMap| map.accounts.remove_user(user.tenant(), user.user());
                match (self.change_accounts(change).await, id) {
                    (Ok(()), Some(id)) => self.end_user(id).await,
                    (removed, _) => removed,
                }
            }
            AccountRequest::Grant { user, grant } => {
                self.check_may_change(caller, &user)?;
                grant.check().map_err(|e| Error::BadRequest(e.to_string()))?;
                let AccessGrant { scope, verbs } = grant;
                let change = |map: &mut NodeMap| {
                    let (pool, within) = (pool_of(map, caller.tenant, &scope)?, scope.within().cloned());
                    map.accounts.grant((user.tenant(), user.user()), GrantRecord { pool, within, verbs })
                };
                self.change_accounts(change).await
            }
            AccountRequest::Revoke { user, scope, verbs } => {
                self.check_may_change(caller, &user)?;
                let change = |map: &mut NodeMap| {
                    let objects = match &scope {
                        Some(scope) => Some((pool_of(map, caller.tenant, scope)?, scope.within().cloned())),
                        None => None,
                    };
                    map.accounts.revoke((user.tenant(), user.user()), objects, verbs)
                };
                self.change_accounts(change).await
            }
        };
        match changed {
            Err(Error::AccountExists(_) | Error::NoSuchAccount(_)) if is_repeated => Ok(AdminReply::Done),
            changed => changed.map(|()| AdminReply::Done),
        }
    }

    /// Changes the accounts in the map. When this returns, all shards use the new ones. The caller must
    /// hold the lock of the map keeper.
    async fn change_accounts(&self, change: impl FnOnce(&mut NodeMap) -> Result<()>) -> Result<()> {
        let mut map = self.shard.map.borrow().clone();
        change(&mut map)?;
        self.check_size(&map)?;
        self.save_map(map).await
    }

    /// Checks that a changed map is not too large, and that no tenant uses too much of it. A change that
    /// makes the map smaller is always possible.
    pub(crate) fn check_size(&self, map: &NodeMap) -> Result<()> {
        crate::tenant_share::check(&self.shard.map.borrow(), map)?;
        let (len, limit) = (map.encoded_len(), crate::map::MAP_BYTES_MAX);
        if len as u64 <= limit || len <= self.shard.map.borrow().encoded_len() {
            return Ok(());
        }
        let (what, advice) =
            ("bytes of pools, accounts and grants".into(), "remove some that are not needed".into());
        Err(Error::Busy { what, limit, advice })
    }

    /// Checks that the caller may change a user: only an administrator of the node may change another
    /// one.
    fn check_may_change(&self, caller: &AdminGrant, user: &AccountName) -> Result<()> {
        let map = self.shard.map.borrow();
        let is_meant = |record: &&crate::accounts::UserRecord| {
            record.name == user.user() && map.accounts.tenant_name(record.tenant) == user.tenant()
        };
        let is_node_admin = map.accounts.users().iter().find(is_meant).is_some_and(|user| user.is_node_admin);
        if is_node_admin && !caller.rights.is_node_admin {
            let what = "change an administrator of the node".to_owned();
            let user = caller.rights.name.clone();
            return Err(Error::NotAdministrator { user, what, of: AdministratorOf::Node });
        }
        Ok(())
    }

    fn list_tenants(&self, caller: &AdminGrant) -> Vec<TenantInfo> {
        let map = self.shard.map.borrow();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let tenants = map.accounts.tenants().iter();
        let seen = tenants.filter(|tenant| caller.rights.is_node_admin || tenant.id == caller.tenant);
        let info = |tenant: &crate::accounts::TenantRecord| TenantInfo {
            name: tenant.name.clone(),
            made_ms: tenant.made_ms,
            pools: count(map.pools.iter().filter(|pool| pool.tenant == tenant.id && !pool.removing).count()),
            users: count(map.accounts.users().iter().filter(|user| user.tenant == tenant.id).count()),
        };
        let mut tenants: Vec<TenantInfo> = seen.map(info).collect();
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        tenants
    }

    /// Lists the users of the caller's tenant; with `all`, those of all tenants if the caller administers
    /// the node.
    fn list_users(&self, caller: &AdminGrant, all: bool) -> Vec<UserInfo> {
        let map = self.shard.map.borrow();
        let all = all && caller.rights.is_node_admin;
        let users = map.accounts.users().iter().filter(|user| all || user.tenant == caller.tenant);
        let info = |user: &crate::accounts::UserRecord| {
            let name = AccountName::new(map.accounts.tenant_name(user.tenant), user.name.clone()).ok()?;
            Some(UserInfo {
                user: name,
                key: *user.key.as_bytes(),
                is_node_admin: user.is_node_admin,
                made_ms: user.made_ms,
                grants: grants_of(&map, &user.grants),
            })
        };
        let mut users: Vec<UserInfo> = users.filter_map(info).collect();
        users.sort_by(|a, b| a.user.cmp(&b.user));
        users
    }

    /// Returns who the caller is.
    pub(crate) fn who_am_i(&self, caller: &Caller, rights: &UserRights) -> Result<UserInfo> {
        let map = self.shard.map.borrow();
        let record = map.accounts.users().iter().find(|user| user.id == rights.user);
        Ok(UserInfo {
            user: rights.name.parse::<AccountName>()?,
            key: *caller.key.as_bytes(),
            is_node_admin: rights.is_node_admin,
            made_ms: record.map_or(0, |record| record.made_ms),
            grants: grants_of(&map, &rights.grants),
        })
    }

    /// Issues a capability of the caller.
    ///
    /// # Errors
    /// [`Error::NotPermitted`] if `grants` exceed the rights of the caller.
    pub(crate) fn issue_capability(
        &self,
        (caller, rights): (&Caller, UserRights),
        grants: Option<Vec<AccessGrant>>,
        key: Option<[u8; 32]>,
        lifetime_s: u32,
    ) -> Result<Vec<u8>> {
        let map = self.shard.map.borrow();
        let max = capability::LIFETIME_MAX.as_secs();
        let lifetime = if lifetime_s == 0 { max } else { u64::from(lifetime_s) };
        if lifetime > max {
            let detail = format!("{lifetime} s, but a capability is valid for at most {max} s");
            return Err(Error::OutOfRange { what: "lifetime".into(), detail });
        }
        let issued = self.shard.config.clock.now_ms() / 1000;
        let claimed = |grant: &GrantRecord| ClaimedGrant {
            pool: grant.pool,
            within: grant.within.clone(),
            verbs: grant.verbs,
        };
        let own = Claims {
            node: map.node,
            name: rights.name.clone(),
            tenant: rights.tenant,
            user: rights.user,
            revision: match rights.user {
                identity::NODE_ADMIN => self.shard.config.admin_revision,
                _ => rights.revision,
            },
            key: key.map_or(caller.key, KeyHash::from),
            issued,
            expires: issued + lifetime,
            id: *base::entropy::uuid().as_bytes(),
            grants: rights.grants.iter().map(claimed).collect(),
            qos_class: 0,
            memory: Vec::new(),
        };
        let own = match rights.is_node_admin && base::mutant!(NodeAdminReads) {
            true => {
                Claims { grants: vec![ClaimedGrant { pool: None, within: None, verbs: Verbs::ALL }], ..own }
            }
            false => own,
        };
        let claims = match grants {
            None => own,
            Some(grants) => {
                let all = Rights::new(own.clone());
                let narrow = |grant: &AccessGrant| narrowed(&map, &rights, &all, grant);
                Claims { grants: grants.iter().map(narrow).collect::<Result<_>>()?, ..own }
            }
        };
        crate::accounts::check_grants(claims.grants.len(), claims.grants.iter().map(|g| g.within.as_ref()))?;
        self.shard.capability_key.sign(&claims).ok_or_else(|| {
            Error::CommandRefused("the capability is too large; issue one for fewer grants".into())
        })
    }
}

/// Returns a grant of a capability, if the user has the rights.
fn narrowed(map: &NodeMap, user: &UserRights, rights: &Rights, grant: &AccessGrant) -> Result<ClaimedGrant> {
    grant.check().map_err(|e| Error::BadRequest(e.to_string()))?;
    let AccessGrant { scope, verbs } = grant;
    let found = pool_of(map, user.tenant, scope);
    let place = scope.within().map_or(Resource::Pool, |within| Resource::Names {
        namespace: &within.namespace,
        prefix: within.prefix.as_bytes(),
    });
    let wanted = Verb::ALL.into_iter().filter(|verb| verbs.contains(*verb));
    for verb in wanted {
        // Without rights to all pools, the user does not learn whether the pool exists.
        if !rights.permits(verb, found.as_ref().copied().unwrap_or_default(), place)
            && !base::mutant!(WidenCapabilities)
        {
            let (user, verb, place) = (user.name.clone(), verb.to_string(), scope.to_string());
            return Err(Error::NotPermitted { user, verb, place });
        }
    }
    Ok(ClaimedGrant { pool: found?, within: scope.within().cloned(), verbs: *verbs })
}

/// Returns the number of a scope's pool; `None` for all pools of the tenant.
fn pool_of(map: &NodeMap, tenant: u32, scope: &Scope) -> Result<Option<u32>> {
    let Some(name) = scope.pool() else { return Ok(None) };
    let is_meant = |pool: &&PoolRecord| pool.tenant == tenant && pool.name == name.as_str();
    let pool = map.pools.iter().find(|pool| is_meant(pool) && !pool.removing);
    pool.map(|pool| Some(pool.id)).ok_or_else(|| Error::NoSuchPool(name.to_string()))
}

/// Returns grants with the names of their pools.
fn grants_of(map: &NodeMap, grants: &[GrantRecord]) -> Vec<AccessGrant> {
    let grant = |grant: &GrantRecord| {
        let scope = match grant.pool {
            None => Scope::ALL,
            Some(id) => {
                let name = &map.pools.iter().find(|pool| pool.id == id)?.name;
                Scope::of(PoolName::new(name.clone()).ok()?, grant.within.clone())
            }
        };
        Some(AccessGrant { scope, verbs: grant.verbs })
    };
    grants.iter().filter_map(grant).collect()
}
