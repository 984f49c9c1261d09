//! Authorization: which right each request needs, and whether its sender has it. No other module
//! decides this.
//!
//! A request about objects is decided by the capability of the session, which the osd has verified when
//! the session was opened. A request of an operator is decided by what the node's map says now about
//! the user who has proved the key of the connection.
//!
//! A name of a pool always means a pool of the sender's own tenant, unless a node's administrator names
//! another one. So a pool of another tenant and a pool that does not exist take the same path, and get
//! the same answer.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use capability::{CapabilityError, ClaimedGrant, Resource, Rights};
use identity::{Caller, NODE_ADMIN};
use messenger::PeerInfo;
use tokio::time::Instant;
use wire::{
    AccountRequest, AdminRequest, AdministratorOf, BulkDescriptor, BulkOwner, Condition, Data, Error, List,
    Mutate, ObjectRequest, PoolName, Query, Read, ReadFirst, Result, Scope, SessionId, Verb, WireName,
};

use crate::accounts::UserRights;
use crate::ids::IdLayout;
use crate::pool::ActivePool;
use crate::sessions::{AboutSession, SessionOwner};
use crate::shard::Shard;

/// The rights of a session on one connection.
pub(crate) struct SessionRights {
    rights: Rights,
    /// Time at which the capability expires. A change of the wall clock does not move it.
    until: Instant,
    /// Number of the user who has proved the key of the connection.
    presenter: u32,
    /// Number of changes of the map at the last comparison of the capability with the map.
    checked: Cell<u64>,
}

impl SessionRights {
    /// Verifies the capability that the client `presenter` has presented.
    ///
    /// # Errors
    /// [`Error::CapabilityRefused`] if it is not valid now.
    pub(crate) fn verify(
        shard: &Shard,
        capability: &[u8],
        presenter: &PeerInfo,
    ) -> Result<Rc<SessionRights>> {
        let now = Duration::from_millis(shard.config.clock.now_ms());
        let node = shard.map.borrow().node;
        let claims = shard.capability_key.verify(capability, (node, &presenter.key), now);
        let claims = claims.map_err(|e| shard.refusal_of(e))?;
        // A connection belongs to one tenant, and so do its protection domain and its queues.
        if presenter.user.as_ref().is_none_or(|user| user.tenant_id != claims.tenant) {
            return Err(shard.refusal_of(CapabilityError::OtherTenant));
        }
        let left = Duration::from_secs(claims.expires).saturating_sub(now);
        let rights = SessionRights {
            rights: Rights::new(claims),
            until: Instant::now() + left.min(capability::LIFETIME_MAX),
            presenter: presenter.user.as_ref().map_or(u32::MAX, |user| user.id),
            checked: Cell::new(u64::MAX),
        };
        rights.check(shard)?;
        Ok(Rc::new(rights))
    }

    /// Returns the name of the user: `TENANT/USER`.
    pub(crate) fn user(&self) -> &str {
        &self.rights.claims().name
    }

    /// Returns who owns a session with these rights, on a connection of `presenter`.
    pub(crate) fn owner(&self, presenter: &PeerInfo) -> SessionOwner {
        let user = self.rights.claims().user;
        SessionOwner { key: presenter.key, for_user: (user != self.presenter).then_some(user) }
    }

    /// Returns what operators see of a session with these rights.
    pub(crate) fn about(&self, shard: &Shard, peer: String) -> AboutSession {
        let claims = self.rights.claims();
        let (user, tenant, user_id) = (self.user().to_owned(), claims.tenant, claims.user);
        let opened_ms = shard.config.clock.now_ms();
        AboutSession { user, tenant, presenter: self.presenter, user_id, peer, opened_ms }
    }

    /// Checks that the capability is still valid.
    ///
    /// # Errors
    /// [`Error::CapabilityRefused`] if it has expired, or the rights of the user have changed since.
    fn check(&self, shard: &Shard) -> Result<()> {
        if Instant::now() >= self.until && !base::mutant!(IgnoreExpiry) {
            return Err(shard.refusal_of(CapabilityError::Expired));
        }
        let changes = shard.map_changes.get();
        if self.checked.get() != changes {
            let map = shard.map.borrow();
            let claims = self.rights.claims();
            // Another user may have issued the capability to the presenter.
            let revision = match claims.user {
                NODE_ADMIN => Some(shard.config.admin_revision),
                user => map.accounts.revision(user),
            };
            let is_current =
                revision == Some(claims.revision) && map.accounts.revision(self.presenter).is_some();
            if !is_current && !base::mutant!(IgnoreRevision) {
                return Err(shard.refusal_of(CapabilityError::Outdated));
            }
            self.checked.set(changes);
        }
        Ok(())
    }
}

/// The request concerns no other objects.
const NO_OTHERS: (&[u8], &[Bytes]) = (&[], &[]);

/// What a request about objects needs.
struct RequestNeed<'a> {
    pool: &'a [u8],
    place: Resource<'a>,
    verbs: &'static [Verb],
    /// The memory that the request names.
    memory: Option<&'a BulkDescriptor>,
    /// Namespace and names of other objects that the request may read or copy.
    others: (&'a [u8], &'a [Bytes]),
}

/// Checks that the sender of a request about objects may make it. Returns the pool that the request
/// concerns.
///
/// # Errors
/// [`Error::CapabilityRefused`] if the session has no valid capability, [`Error::NotPermitted`] if it
/// does not give the right, and [`Error::NoSuchPool`] if it gives the right to all pools.
pub(crate) fn authorize(
    shard: &Shard,
    sender: &SessionRights,
    request: &ObjectRequest,
) -> Result<Rc<ActivePool>> {
    sender.check(shard)?;
    let RequestNeed { pool: name, place, verbs, memory, others } = need(request)?;
    let claims = sender.rights.claims();
    let text = std::str::from_utf8(name).ok();
    let mut pool = text.and_then(|name| shard.pools.open_named(claims.tenant, name));
    if base::mutant!(CrossTenants) {
        let is_named = |pool: &Rc<ActivePool>| text == Some(&pool.record.name);
        pool = pool.or_else(|| shard.pools.all_open().into_iter().find(is_named));
    }
    let id = pool.as_ref().map(|pool| pool.record.id);
    // The cursors of such a pool show names outside of a prefix.
    let is_hashed = pool.as_ref().is_some_and(|pool| pool.record.ids == IdLayout::Hashed);
    let place = match request {
        ObjectRequest::List(_) if is_hashed => Resource::Pool,
        _ => place,
    };
    let permits = |verb: Verb, place: Resource<'_>| {
        let is_skipped = (verb == Verb::Read && base::mutant!(PermitReads))
            || (verb == Verb::Write && base::mutant!(PermitWrites))
            || (verb == Verb::List && base::mutant!(PermitLists));
        let covers_pool = |grant: &ClaimedGrant| grant.pool == id && grant.verbs.contains(verb);
        let is_skipped = is_skipped || (base::mutant!(IgnorePrefix) && claims.grants.iter().any(covers_pool));
        is_skipped || sender.rights.permits(verb, id, place)
    };
    let check = |verb: Verb, place: Resource<'_>| match permits(verb, place) {
        true => Ok(()),
        false => Err(Error::NotPermitted {
            user: claims.name.clone(),
            verb: verb.to_string(),
            place: scope(PoolName::from_wire(name)?, place),
        }),
    };
    verbs.iter().try_for_each(|verb| check(*verb, place))?;
    for other in others.1 {
        check(Verb::Read, resource(others.0, other)?)?;
    }
    if let Some(BulkOwner::Fabric(address)) = memory.map(|descriptor| &descriptor.owner)
        && !claims.memory.contains(address)
        && !base::mutant!(PermitForeignMemory)
    {
        let what = "name memory of a third party that the capability does not name".into();
        let user = claims.name.clone();
        return Err(Error::NotAdministrator { user, what, of: AdministratorOf::Node });
    }
    match pool {
        Some(pool) => Ok(pool),
        None => Err(Error::NoSuchPool(PoolName::from_wire(name)?.to_string())),
    }
}

/// Checks that a session may fence another session. Returns the client whose sessions it may fence: the
/// client that has opened it.
///
/// # Errors
/// [`Error::CapabilityRefused`] if the session has no valid capability, and [`Error::BadRequest`] if the
/// two sessions are the same.
pub(crate) fn authorize_fence(
    shard: &Shard,
    (sender, session, presenter): (&SessionRights, SessionId, &PeerInfo),
    fenced: SessionId,
) -> Result<SessionOwner> {
    sender.check(shard)?;
    if fenced == session {
        return Err(Error::BadRequest("a session cannot fence itself; close it instead".into()));
    }
    Ok(sender.owner(presenter))
}

/// Returns what a request needs.
fn need(request: &ObjectRequest) -> Result<RequestNeed<'_>> {
    match request {
        ObjectRequest::Read(Read { name, sink, .. }) => Ok(RequestNeed {
            pool: &name.pool,
            place: object(name)?,
            verbs: &[Verb::Read],
            memory: sink.as_ref(),
            others: NO_OTHERS,
        }),
        ObjectRequest::ReadFirst(ReadFirst { read: Read { name, sink, .. }, fallbacks }) => Ok(RequestNeed {
            pool: &name.pool,
            place: object(name)?,
            verbs: &[Verb::Read],
            memory: sink.as_ref(),
            others: (&name.namespace, fallbacks),
        }),
        ObjectRequest::Query(Query { name, .. }) => Ok(RequestNeed {
            pool: &name.pool,
            place: object(name)?,
            verbs: &[Verb::Read],
            memory: None,
            others: NO_OTHERS,
        }),
        ObjectRequest::Mutate(mutate @ Mutate { name, conditions, data, .. }) => {
            // The result of these conditions tells what the object contains.
            let reads = conditions.iter().any(|condition| match condition {
                Condition::Xattr(..) | Condition::Omap(..) | Condition::Bytes(..) => true,
                Condition::Exists | Condition::Absent | Condition::Version(_) => false,
            });
            let reads = reads && !base::mutant!(CompareWithoutRead);
            let verbs: &[Verb] = if reads { &[Verb::Write, Verb::Read] } else { &[Verb::Write] };
            let memory = match data {
                Data::Bulk(descriptor) => Some(descriptor),
                Data::None | Data::Inline => None,
            };
            let others = (&name.namespace[..], mutate.inherits_from().unwrap_or_default());
            Ok(RequestNeed { pool: &name.pool, place: object(name)?, verbs, memory, others })
        }
        ObjectRequest::List(list @ List { pool, prefix, .. }) => {
            let place = match list.checked_namespace()? {
                Some(namespace) => Resource::Names { namespace, prefix },
                None => Resource::Pool,
            };
            Ok(RequestNeed { pool, place, verbs: &[Verb::List], memory: None, others: NO_OTHERS })
        }
    }
}

fn object(name: &WireName) -> Result<Resource<'_>> {
    // The check finds the reason.
    resource(&name.namespace, &name.object).map_err(|e| name.check().map_or_else(Error::from, |_| e))
}

fn resource<'a>(namespace: &'a [u8], name: &'a [u8]) -> Result<Resource<'a>> {
    match (std::str::from_utf8(namespace), std::str::from_utf8(name)) {
        (Ok(namespace), Ok(name)) => Ok(Resource::Object { namespace, name }),
        _ => Err(Error::BadRequest("the name is not UTF-8".into())),
    }
}

/// Returns the text form of the scope that contains a place.
fn scope(pool: PoolName, place: Resource<'_>) -> String {
    let within = match place {
        Resource::Pool => None,
        Resource::Object { namespace, name } => Some((namespace, name.to_owned())),
        Resource::Names { namespace, prefix } => {
            Some((namespace, String::from_utf8_lossy(prefix).into_owned()))
        }
    };
    let within = within.map(|(namespace, prefix)| wire::Within { namespace: namespace.to_owned(), prefix });
    Scope::of(pool, within).to_string()
}

/// Who may make a request of an operator.
enum AdminNeed<'a> {
    /// Each user.
    Anyone,
    /// An administrator of the node.
    Node(&'static str),
    /// An administrator of the node or of a tenant; `None` for the caller's tenant.
    Tenant(Option<&'a str>, &'static str),
    /// An administrator of the node, or a user with the right to administer this pool of a tenant.
    Pool(Option<&'a str>, &'a [u8]),
}

/// What an operator may do with a request.
pub(crate) struct AdminGrant {
    /// What the operator may do on the node.
    pub(crate) rights: UserRights,
    /// The tenant that the request concerns.
    pub(crate) tenant: u32,
    /// The pool that the request concerns.
    pub(crate) pool: Option<Rc<ActivePool>>,
}

impl AdminGrant {
    /// Returns the tenant whose sessions the operator may see; `None` for all.
    pub(crate) fn sessions_of(&self) -> Option<u32> {
        (!self.rights.is_node_admin).then_some(self.tenant)
    }
}

/// Checks that the caller may make a request of an operator.
///
/// # Errors
/// [`Error::NotAdministrator`] or [`Error::NotPermitted`] if not, and [`Error::NoSuchPool`] or
/// [`Error::NoSuchAccount`] if the caller may know that the pool or tenant does not exist.
pub(crate) fn authorize_admin(shard: &Shard, caller: &Caller, request: &AdminRequest) -> Result<AdminGrant> {
    let map = shard.map.borrow();
    let refused = |user: &str, what: &str, of| {
        let (user, what) = (user.to_owned(), what.to_owned());
        Error::NotAdministrator { user, what, of }
    };
    let (of_node, of_tenant) = (AdministratorOf::Node, AdministratorOf::TenantOrNode);
    let unknown = || refused(&caller.user.to_string(), "use this node any more", of_tenant);
    let rights = map.accounts.rights(&caller.user).ok_or_else(unknown)?;
    // The number of the tenant, if the caller may name it.
    let tenant = |name: Option<&str>, what: &str| match name {
        None => Ok(rights.tenant),
        Some(name) if name == map.accounts.tenant_name(rights.tenant) => Ok(rights.tenant),
        Some(name) if rights.is_node_admin => map.accounts.tenant(name),
        Some(_) if base::mutant!(IgnoreTenantName) => Ok(rights.tenant),
        Some(_) => Err(refused(&rights.name, what, of_tenant)),
    };
    match admin_need(request) {
        AdminNeed::Node(what) if !rights.is_node_admin && !base::mutant!(PermitNodeAdmin) => {
            Err(refused(&rights.name, what, of_node))
        }
        AdminNeed::Node(_) | AdminNeed::Anyone => {
            let tenant = rights.tenant;
            Ok(AdminGrant { rights, tenant, pool: None })
        }
        AdminNeed::Tenant(name, what) => {
            let tenant = tenant(name, what)?;
            let is_own =
                tenant == rights.tenant && (rights.permits(Verb::Admin, None) || base::mutant!(PermitAdmin));
            if !rights.is_node_admin && !is_own {
                return Err(refused(&rights.name, what, of_tenant));
            }
            Ok(AdminGrant { rights, tenant, pool: None })
        }
        AdminNeed::Pool(name, pool) => {
            let tenant = tenant(name, "administer pools of other tenants")?;
            let name = PoolName::from_wire(pool)?;
            let pool = shard.pools.open_named(tenant, name.as_str());
            let id = pool.as_ref().map(|pool| pool.record.id);
            let is_own = tenant == rights.tenant
                && (rights.permits(Verb::Admin, id) || base::mutant!(PermitPoolAdmin));
            if !rights.is_node_admin && !is_own {
                let (user, verb, place) = (rights.name, Verb::Admin.to_string(), name.to_string());
                return Err(Error::NotPermitted { user, verb, place });
            }
            let pool = pool.ok_or_else(|| Error::NoSuchPool(name.to_string()))?;
            Ok(AdminGrant { rights, tenant, pool: Some(pool) })
        }
    }
}

/// Returns who may make a request.
fn admin_need(request: &AdminRequest) -> AdminNeed<'_> {
    match request {
        AdminRequest::PoolCreate { tenant, .. } => AdminNeed::Tenant(tenant.as_deref(), "create pools"),
        AdminRequest::PoolList { tenant: None } => AdminNeed::Anyone,
        AdminRequest::PoolList { tenant } => {
            AdminNeed::Tenant(tenant.as_deref(), "list all pools of a tenant")
        }
        AdminRequest::PoolRemove { name, tenant, .. } => AdminNeed::Pool(tenant.as_deref(), name),
        AdminRequest::Scrub { pool, tenant, .. } => AdminNeed::Pool(tenant.as_deref(), pool),
        AdminRequest::TargetSetOut { .. }
        | AdminRequest::TargetReplace { .. }
        | AdminRequest::TargetForget { .. } => AdminNeed::Node("administer targets"),
        AdminRequest::SetRebuildRate(_) => AdminNeed::Node("set the rate of rebuilds"),
        AdminRequest::SetCodingMode(_) => AdminNeed::Node("set the coding mode"),
        AdminRequest::Status => AdminNeed::Node("see the status of the node"),
        AdminRequest::Usage => AdminNeed::Node("see the use of the node's machines"),
        AdminRequest::CollectOrphans { .. } => AdminNeed::Node("collect orphans"),
        AdminRequest::IssueCapability { .. } | AdminRequest::WhoAmI => AdminNeed::Anyone,
        AdminRequest::ListSessions => AdminNeed::Tenant(None, "list sessions"),
        AdminRequest::KillSession(_) => AdminNeed::Tenant(None, "end sessions"),
        AdminRequest::Audit { .. } => AdminNeed::Node("read the audit log"),
        AdminRequest::Disk(request) => AdminNeed::Pool(None, request.pool.as_bytes()),
        AdminRequest::ServeGateway { .. } => AdminNeed::Tenant(None, "serve as a gateway"),
        AdminRequest::ArmFault(_) => AdminNeed::Node("arm faults"),
        AdminRequest::ListFaults => AdminNeed::Node("list armed faults"),
        AdminRequest::ClearFaults => AdminNeed::Node("disarm faults"),
        AdminRequest::TuneChannel(_) => AdminNeed::Node("tune the channel"),
        AdminRequest::Accounts(request) => match request {
            AccountRequest::CreateTenant { .. } => AdminNeed::Node("create tenants"),
            AccountRequest::RemoveTenant { .. } => AdminNeed::Node("remove tenants"),
            AccountRequest::ListTenants => AdminNeed::Anyone,
            AccountRequest::CreateUser { is_node_admin: true, .. } => {
                AdminNeed::Node("create an administrator of the node")
            }
            AccountRequest::CreateUser { user, .. } => AdminNeed::Tenant(Some(user.tenant()), "create users"),
            AccountRequest::ListUsers { tenant } => AdminNeed::Tenant(tenant.as_deref(), "list users"),
            AccountRequest::RemoveUser { user } => AdminNeed::Tenant(Some(user.tenant()), "remove users"),
            AccountRequest::Grant { user, .. } => AdminNeed::Tenant(Some(user.tenant()), "grant rights"),
            AccountRequest::Revoke { user, .. } => AdminNeed::Tenant(Some(user.tenant()), "revoke rights"),
        },
    }
}
