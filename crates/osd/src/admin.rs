//! Executes administrative requests, which manage pools, targets, scrubs and rates, or read the
//! node's status.

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use base::collections::HashMap;
use identity::{Caller, KeyHash};
use wire::{AccountRequest, AdminReply, AdminRequest, DiskCommand, DiskRequest, Error, Result};

use crate::audit_log::{AuditEvent, AuditKind};
use crate::authorize::authorize_admin;
use crate::mailbox::Addresses;
use crate::osd::Osd;
use crate::pool::ActivePool;
use crate::shard::Shard;
use crate::status;

/// Maximum number of requests of one key at a time.
const REQUESTS_PER_KEY: usize = 32;

/// Administers an osd. Any thread may use it. Requests wait until the osd has started.
#[derive(Clone)]
pub struct OsdAdministrator {
    addresses: Addresses,
    /// Number of the requests in progress of each key.
    in_progress: Arc<Mutex<HashMap<KeyHash, usize>>>,
}

/// A request in progress. It counts until it is dropped.
struct AdminPlace {
    key: KeyHash,
    in_progress: Arc<Mutex<HashMap<KeyHash, usize>>>,
}

impl Drop for AdminPlace {
    fn drop(&mut self) {
        let mut in_progress = self.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = in_progress.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                in_progress.remove(&self.key);
            }
        }
    }
}

impl std::fmt::Debug for OsdAdministrator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OsdAdministrator")
    }
}

impl OsdAdministrator {
    pub(crate) fn new(addresses: Addresses) -> OsdAdministrator {
        OsdAdministrator { addresses, in_progress: Arc::default() }
    }

    /// Executes an administrative request of `caller`. `is_repeated` says whether an earlier attempt of the
    /// request may have taken effect. The request continues if the returned future is dropped.
    ///
    /// # Errors
    /// The reason of a refusal. [`Error::Busy`] if the caller's key has 32 requests in progress.
    /// [`Error::Unavailable`] if the osd ends meanwhile: the request may have taken effect.
    pub fn administer(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'static, Result<AdminReply>> {
        let counted = match self.count(caller.key) {
            Ok(counted) => counted,
            Err(e) => return Box::pin(std::future::ready(Err(e))),
        };
        let administered = self.addresses.on_first(move |osd| async move {
            let _counted = counted;
            osd.administer(&caller, request, is_repeated).await
        });
        Box::pin(async { administered.await.map_err(Error::from).flatten() })
    }

    /// Counts a request of a key. Requests continue when their callers give up, so a caller who makes
    /// request after request would otherwise keep the first shard busy.
    fn count(&self, key: KeyHash) -> Result<AdminPlace> {
        let mut in_progress = self.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        let count = in_progress.entry(key).or_default();
        if *count >= REQUESTS_PER_KEY {
            return Err(Error::Busy {
                what: "administrative requests of one user".into(),
                limit: REQUESTS_PER_KEY as u64,
                advice: "wait for the answers to earlier ones".into(),
            });
        }
        *count += 1;
        Ok(AdminPlace { key, in_progress: Arc::clone(&self.in_progress) })
    }
}

impl Osd {
    /// Executes an administrative request. `is_repeated` says whether the request is a retry. A retry
    /// may find that an earlier attempt has already created or removed the pool; the retry then
    /// succeeds.
    async fn administer(
        self: &Rc<Osd>,
        caller: &Caller,
        body: AdminRequest,
        is_repeated: bool,
    ) -> Result<AdminReply> {
        let counted = self.shard.requests.enter();
        let described = audited(&body, is_repeated);
        let mut result = self.try_administer(caller, body, is_repeated).await;
        self.note(caller, described, &result);
        drop(counted);
        if let Err(Error::NoSpace { target, .. }) = &mut result {
            *target = self.shard.map.borrow().name_of(target);
        }
        result
    }

    /// Notes a request in the audit log if it has changed something or was refused.
    fn note(&self, caller: &Caller, (kind, what): (Option<AuditKind>, String), result: &Result<AdminReply>) {
        let (event, why) = match (kind, result) {
            (_, Err(e @ (Error::NotPermitted { .. } | Error::NotAdministrator { .. }))) => {
                (AuditKind::Refused, Some(e.to_string()))
            }
            (Some(_), Err(e)) => (AuditKind::Failed, Some(e.to_string())),
            (Some(kind), Ok(_)) => (kind, None),
            (None, _) => return,
        };
        self.shard.config.audit.record(|| AuditEvent {
            at_ms: self.shard.config.clock.now_ms(),
            event,
            user: Some(caller.user.to_string()),
            key: caller.key,
            peer: None,
            what,
            why,
        });
    }

    async fn try_administer(
        self: &Rc<Osd>,
        caller: &Caller,
        body: AdminRequest,
        is_repeated: bool,
    ) -> Result<AdminReply> {
        let grant = match (authorize_admin(&self.shard, caller, &body), &body) {
            (Err(Error::NoSuchPool(_)), AdminRequest::PoolRemove { .. }) if is_repeated => {
                return Ok(AdminReply::Done);
            }
            (granted, _) => granted?,
        };
        // The rights of the caller may change while a request waits for other changes of the map.
        let again = body.clone();
        let still_permitted = || authorize_admin(&self.shard, caller, &again).map(drop);
        let pool = || grant.pool.as_deref().ok_or_else(|| Error::BadRequest("no pool is named".into()));
        match body {
            AdminRequest::PoolCreate { name, pg_count, redundancy, tenant: _ } => {
                match self.create_pool((grant.tenant, &name), pg_count, redundancy, still_permitted).await {
                    Err(Error::PoolExists(_)) if is_repeated => {}
                    created => created?,
                }
            }
            AdminRequest::PoolList { tenant } => {
                let all = tenant.is_some() || grant.rights.is_node_admin;
                let listed = |pool: &ActivePool| {
                    let is_seen = all || grant.rights.knows(pool.record.id);
                    (pool.record.tenant == grant.tenant && is_seen).then(|| pool.record.name.clone())
                };
                return Ok(AdminReply::Pools(self.list_pools(listed)));
            }
            AdminRequest::PoolRemove { force, .. } => {
                match self.remove_pool(pool()?.record.id, force, still_permitted).await {
                    Err(Error::NoSuchPool(_)) if is_repeated => {}
                    removed => removed?,
                }
            }
            AdminRequest::TargetSetOut { index, out } => self.set_target_out(index, out).await?,
            AdminRequest::TargetReplace { index, uuid } => self.replace_target(index, uuid).await?,
            AdminRequest::TargetForget { index, accept_loss } => {
                return Ok(AdminReply::Loss(self.forget_target(index, accept_loss).await?));
            }
            AdminRequest::Scrub { start, repair, .. } => {
                return Ok(AdminReply::Scrub(Box::new(self.scrub(pool()?, start, repair).await?)));
            }
            AdminRequest::SetRebuildRate(rate) => {
                self.shard.pace.set_rate(rate);
            }
            AdminRequest::SetCodingMode(mode) => {
                let set = self.shard.each(async move |shard: Rc<Shard>| shard.coding.set_mode(mode)).await?;
                set.into_iter().collect::<Result<()>>()?;
            }
            AdminRequest::Status => return Ok(AdminReply::Status(Box::new(status::status(self).await?))),
            AdminRequest::CollectOrphans { older_than_ms } => {
                let grace = Duration::from_millis(older_than_ms);
                let removed = self.shard.each(move |shard| shard.collect_orphans(grace)).await?;
                return Ok(AdminReply::Collected(removed.into_iter().sum()));
            }
            AdminRequest::Usage => return Ok(AdminReply::Usage(status::usage(&self.shard.config).await)),
            AdminRequest::Accounts(request) => {
                return self.administer_accounts(caller, request, is_repeated).await;
            }
            AdminRequest::IssueCapability { grants, key, lifetime_s } => {
                let issued = self.issue_capability((caller, grant.rights), grants, key, lifetime_s)?;
                return Ok(AdminReply::Capability(issued.into()));
            }
            AdminRequest::ListSessions => {
                return Ok(AdminReply::Sessions(self.list_sessions(grant.sessions_of())));
            }
            AdminRequest::KillSession(id) => self.kill_session(id, grant.sessions_of()).await?,
            AdminRequest::Audit { limit } => {
                let Some(sink) = &self.shard.config.audit.0 else { return Ok(AdminReply::Audit(Vec::new())) };
                return Ok(AdminReply::Audit(sink.recent(limit as usize).await));
            }
            AdminRequest::Disk(request) => {
                let gateways = self.shard.config.gateways.clone();
                return Ok(AdminReply::Disk(gateways.execute(grant.tenant, request, is_repeated).await?));
            }
            AdminRequest::ServeGateway { .. } => return Ok(AdminReply::Gateway(grant.tenant)),
            AdminRequest::WhoAmI => {
                return Ok(AdminReply::Me(Box::new(self.who_am_i(caller, &grant.rights)?)));
            }
            AdminRequest::ArmFault(fault) => {
                let controls = self.shard.config.debug.controls()?;
                // The process may have restarted since the earlier attempt, which disarms the fault.
                let is_armed = || controls.armed().iter().any(|armed| armed.fault == fault.to_string());
                if !is_repeated || !is_armed() {
                    controls.arm(fault)?;
                }
            }
            AdminRequest::ListFaults => {
                let controls = self.shard.config.debug.controls()?;
                return Ok(AdminReply::Faults { role: controls.role(), armed: controls.armed() });
            }
            AdminRequest::ClearFaults => {
                let controls = self.shard.config.debug.controls()?;
                return Ok(AdminReply::Faults { role: controls.role(), armed: controls.clear() });
            }
            AdminRequest::TuneChannel(change) => {
                return Ok(AdminReply::Tuned(self.shard.config.debug.controls()?.tune(change)?));
            }
        }
        Ok(AdminReply::Done)
    }
}

/// Returns what a request changes, and its text in the audit log. `None` for a request that changes
/// nothing.
fn audited(request: &AdminRequest, is_repeated: bool) -> (Option<AuditKind>, String) {
    let kind = match request {
        AdminRequest::PoolCreate { .. }
        | AdminRequest::PoolRemove { .. }
        | AdminRequest::TargetSetOut { .. }
        | AdminRequest::TargetReplace { .. }
        | AdminRequest::TargetForget { accept_loss: true, .. }
        | AdminRequest::Scrub { start: true, .. }
        | AdminRequest::SetRebuildRate(_)
        | AdminRequest::SetCodingMode(_)
        | AdminRequest::CollectOrphans { .. }
        | AdminRequest::ArmFault(_)
        | AdminRequest::ClearFaults
        | AdminRequest::TuneChannel(_) => Some(AuditKind::Changed),
        AdminRequest::Accounts(AccountRequest::ListTenants | AccountRequest::ListUsers { .. }) => None,
        AdminRequest::Accounts(_) => Some(AuditKind::Changed),
        AdminRequest::IssueCapability { .. } => Some(AuditKind::Issued),
        AdminRequest::Disk(DiskRequest { command, .. }) => command.is_change().then_some(AuditKind::Changed),
        // The control plane repeats the request while the gateway serves, to check its rights.
        AdminRequest::ServeGateway { .. } => (!is_repeated).then_some(AuditKind::Changed),
        AdminRequest::KillSession(_) => Some(AuditKind::SessionKilled),
        AdminRequest::PoolList { .. }
        | AdminRequest::TargetForget { .. }
        | AdminRequest::Scrub { .. }
        | AdminRequest::Status
        | AdminRequest::Usage
        | AdminRequest::WhoAmI
        | AdminRequest::ListSessions
        | AdminRequest::ListFaults
        | AdminRequest::Audit { .. } => None,
    };
    (kind, described(request))
}

/// Returns a request about disks as text for operators.
fn described_disk(pool: &str, command: &DiskCommand) -> String {
    let place = match command.disk() {
        Some(disk) => format!("{pool}/{disk}"),
        None => pool.to_owned(),
    };
    match command {
        DiskCommand::Create { size, .. } => format!("create disk {place} of {size} bytes"),
        DiskCommand::List => format!("list disks of {place}"),
        DiskCommand::Stat { .. } => format!("show disk {place}"),
        DiskCommand::Remove { .. } => format!("remove disk {place}"),
        DiskCommand::Resize { size, .. } => format!("resize disk {place} to {size} bytes"),
        DiskCommand::Snapshot { snapshot, .. } => format!("take snapshot {place}@{snapshot}"),
        DiskCommand::RemoveSnapshot { snapshot, .. } => format!("remove snapshot {place}@{snapshot}"),
        DiskCommand::Clone { snapshot, clone, .. } => format!("clone {place}@{snapshot} to {pool}/{clone}"),
        DiskCommand::Flatten { .. } => format!("flatten disk {place}"),
        DiskCommand::Usage { .. } => format!("show the space of disk {place}"),
        DiskCommand::Attach { front_end, .. } => format!("attach disk {place} as {front_end}"),
        DiskCommand::Detach { .. } => format!("detach disk {place}"),
        other => format!("{other:?}"),
    }
}

/// Returns a request as text for operators.
fn described(request: &AdminRequest) -> String {
    let of =
        |tenant: &Option<String>| tenant.as_ref().map_or(String::new(), |tenant| format!(" of {tenant}"));
    let name = |name: &[u8]| name.escape_ascii().to_string();
    match request {
        AdminRequest::PoolCreate { name: pool, redundancy, tenant, .. } => {
            format!("create pool {}{} with {redundancy}", name(pool), of(tenant))
        }
        AdminRequest::PoolList { tenant } => format!("list pools{}", of(tenant)),
        AdminRequest::PoolRemove { name: pool, force, tenant } => {
            let force = if *force { " with its objects" } else { "" };
            format!("remove pool {}{}{force}", name(pool), of(tenant))
        }
        AdminRequest::TargetSetOut { index, out } => {
            format!("take target {index} {} use", if *out { "out of" } else { "into" })
        }
        AdminRequest::TargetReplace { index, uuid } => format!("replace target {index} by {uuid}"),
        AdminRequest::TargetForget { index, accept_loss } => {
            format!("{} the loss of target {index}", if *accept_loss { "accept" } else { "show" })
        }
        AdminRequest::Scrub { pool, repair, tenant, .. } => {
            format!("scrub pool {}{}{}", name(pool), of(tenant), if *repair { " with repair" } else { "" })
        }
        AdminRequest::SetRebuildRate(rate) => format!("limit rebuilds to {rate} bytes/s"),
        AdminRequest::SetCodingMode(mode) => format!("set the coding mode {mode}"),
        AdminRequest::CollectOrphans { .. } => "collect orphans".into(),
        AdminRequest::IssueCapability { grants, key, .. } => {
            let rights = match grants {
                None => "all rights".to_owned(),
                Some(grants) => {
                    let grant = |grant: &wire::AccessGrant| format!("{} on {}", grant.verbs, grant.scope);
                    grants.iter().map(grant).collect::<Vec<_>>().join(", ")
                }
            };
            let holder = key.map_or(String::new(), |key| format!(" for the key {}", KeyHash::from(key)));
            format!("issue a capability with {rights}{holder}")
        }
        AdminRequest::KillSession(id) => format!("end session {id}"),
        AdminRequest::Status => "show the status".into(),
        AdminRequest::Usage => "show the use of the machines".into(),
        AdminRequest::WhoAmI => "show the caller".into(),
        AdminRequest::ListSessions => "list sessions".into(),
        AdminRequest::Audit { .. } => "show the audit log".into(),
        AdminRequest::Disk(DiskRequest { pool, command }) => described_disk(pool, command),
        AdminRequest::ServeGateway { name } => format!("serve as the gateway {name}"),
        AdminRequest::ArmFault(fault) => format!("arm the fault {fault}"),
        AdminRequest::ListFaults => "list armed faults".into(),
        AdminRequest::ClearFaults => "disarm all faults".into(),
        AdminRequest::TuneChannel(change) => format!("tune the channel: {change}"),
        AdminRequest::Accounts(request) => match request {
            AccountRequest::CreateTenant { name } => format!("create tenant {name}"),
            AccountRequest::ListTenants => "list tenants".into(),
            AccountRequest::RemoveTenant { name } => format!("remove tenant {name}"),
            AccountRequest::CreateUser { user, key, is_node_admin } => {
                let role = if *is_node_admin { " as administrator of the node" } else { "" };
                format!("create user {user}{role} with the key {}", KeyHash::from(*key))
            }
            AccountRequest::ListUsers { .. } => "list users".into(),
            AccountRequest::RemoveUser { user } => format!("remove user {user}"),
            AccountRequest::Grant { user, grant } => {
                format!("grant {user} {} on {}", grant.verbs, grant.scope)
            }
            AccountRequest::Revoke { user, scope, verbs } => {
                let scope = scope.as_ref().map_or("everything".to_owned(), ToString::to_string);
                format!("revoke {verbs} on {scope} from {user}")
            }
        },
    }
}
