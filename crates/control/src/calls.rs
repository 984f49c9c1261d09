//! The conversion between administrative requests and the messages of gRPC.

use base::fault::Armed;
use wire::{
    AccessGrant, AdminReply, AdminRequest, ChannelTuning, Error, PoolInfo, PoolLoss, Redundancy, Role,
    SessionInfo, TenantInfo, TuningChange, UserInfo,
};

use crate::proto;

/// Error: a message of the peer is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the node's answer is not valid: {0}; use a program of the node's version")]
pub(crate) struct BadAnswer(pub(crate) String);

impl BadAnswer {
    pub(crate) fn of(e: impl std::fmt::Display) -> BadAnswer {
        BadAnswer(e.to_string())
    }
}

/// Reads a redundancy scheme of a message. An empty text means no redundancy, and a stripe unit of 0
/// means the default.
pub(crate) fn redundancy(text: &str, stripe_unit: u32) -> Result<Redundancy, Error> {
    let scheme = match text {
        "" => Ok(Redundancy::Single),
        text => text.parse::<Redundancy>(),
    };
    let scheme = scheme.map_err(|e| Error::BadRequest(format!("redundancy \"{text}\": {e}")))?;
    if stripe_unit == 0 { Ok(scheme) } else { scheme.with_stripe_unit(stripe_unit) }
}

/// Returns the stripe unit of a scheme for a message; 0 if the scheme has none.
pub(crate) fn stripe_unit(redundancy: &Redundancy) -> u32 {
    match *redundancy {
        Redundancy::ErasureCode { stripe_unit, .. } => stripe_unit,
        _ => 0,
    }
}

impl From<PoolInfo> for proto::Pool {
    fn from(pool: PoolInfo) -> proto::Pool {
        proto::Pool {
            id: pool.id,
            name: pool.name,
            pg_count: pool.pg_count,
            redundancy: pool.redundancy.to_string(),
            stripe_unit: stripe_unit(&pool.redundancy),
            created_ms: pool.made_ms,
        }
    }
}

/// Reads a pool of an answer.
pub(crate) fn pool_info(pool: proto::Pool) -> Result<PoolInfo, BadAnswer> {
    Ok(PoolInfo {
        id: pool.id,
        redundancy: redundancy(&pool.redundancy, pool.stripe_unit).map_err(BadAnswer::of)?,
        name: pool.name,
        pg_count: pool.pg_count,
        made_ms: pool.created_ms,
    })
}

impl From<PoolLoss> for proto::PoolLoss {
    fn from(loss: PoolLoss) -> proto::PoolLoss {
        proto::PoolLoss {
            pool: loss.pool,
            redundancy: loss.redundancy.to_string(),
            stripe_unit: stripe_unit(&loss.redundancy),
            groups: loss.groups,
            waiting: loss.waiting,
            emptied: loss.emptied,
        }
    }
}

/// Reads the loss of a pool of an answer.
pub(crate) fn pool_loss(loss: proto::PoolLoss) -> Result<PoolLoss, BadAnswer> {
    Ok(PoolLoss {
        redundancy: redundancy(&loss.redundancy, loss.stripe_unit).map_err(BadAnswer::of)?,
        pool: loss.pool,
        groups: loss.groups,
        waiting: loss.waiting,
        emptied: loss.emptied,
    })
}

impl From<&AccessGrant> for proto::Grant {
    fn from(grant: &AccessGrant) -> proto::Grant {
        proto::Grant { scope: grant.scope.to_string(), rights: grant.verbs.to_string() }
    }
}

impl From<TenantInfo> for proto::Tenant {
    fn from(tenant: TenantInfo) -> proto::Tenant {
        let TenantInfo { name, made_ms: created_ms, pools, users } = tenant;
        proto::Tenant { name, created_ms, pools, users }
    }
}

/// Reads a tenant of an answer.
pub(crate) fn tenant_info(tenant: proto::Tenant) -> TenantInfo {
    let proto::Tenant { name, created_ms: made_ms, pools, users } = tenant;
    TenantInfo { name, made_ms, pools, users }
}

impl From<UserInfo> for proto::User {
    fn from(user: UserInfo) -> proto::User {
        proto::User {
            name: user.user.to_string(),
            key: user.key.to_vec(),
            node_admin: user.is_node_admin,
            created_ms: user.made_ms,
            grants: user.grants.iter().map(proto::Grant::from).collect(),
        }
    }
}

/// Reads a user of an answer.
pub(crate) fn user_info(user: proto::User) -> Result<UserInfo, BadAnswer> {
    let grant = |grant: &proto::Grant| {
        let scope = grant.scope.parse().map_err(BadAnswer::of)?;
        Ok(AccessGrant { scope, verbs: grant.rights.parse().map_err(BadAnswer::of)? })
    };
    Ok(UserInfo {
        user: user.name.parse().map_err(BadAnswer::of)?,
        key: user.key.try_into().map_err(|_| BadAnswer("a key does not have 32 bytes".into()))?,
        is_node_admin: user.node_admin,
        made_ms: user.created_ms,
        grants: user.grants.iter().map(grant).collect::<Result<_, BadAnswer>>()?,
    })
}

impl From<SessionInfo> for proto::Session {
    fn from(session: SessionInfo) -> proto::Session {
        let SessionInfo { id, user, peer, opened_ms, connections } = session;
        proto::Session { id: id.to_string(), user, peer, opened_ms, connections }
    }
}

/// Reads a session of an answer.
pub(crate) fn session_info(session: proto::Session) -> Result<SessionInfo, BadAnswer> {
    let proto::Session { id, user, peer, opened_ms, connections } = session;
    Ok(SessionInfo { id: id.parse().map_err(BadAnswer)?, user, peer, opened_ms, connections })
}

impl From<Armed> for proto::ArmedFault {
    fn from(armed: Armed) -> proto::ArmedFault {
        let Armed { fault, fired } = armed;
        proto::ArmedFault { fault, fired }
    }
}

/// Reads the faults of a process of an answer.
pub(crate) fn faults(role: &str, faults: Vec<proto::ArmedFault>) -> Result<AdminReply, BadAnswer> {
    let known = [Role::Osd, Role::Node].into_iter().find(|known| known.as_str() == role);
    let role = known.ok_or_else(|| BadAnswer(format!("the role {role:?} is unknown")))?;
    let armed = |proto::ArmedFault { fault, fired }| Armed { fault, fired };
    Ok(AdminReply::Faults { role, armed: faults.into_iter().map(armed).collect() })
}

impl From<TuningChange> for proto::TuneChannelRequest {
    fn from(change: TuningChange) -> proto::TuneChannelRequest {
        let TuningChange { pipeline, region_cache, max_transfer, dma_queues, poll_us } = change;
        proto::TuneChannelRequest { pipeline, region_cache, max_transfer, dma_queues, poll_us }
    }
}

impl From<proto::TuneChannelRequest> for TuningChange {
    fn from(request: proto::TuneChannelRequest) -> TuningChange {
        let proto::TuneChannelRequest { pipeline, region_cache, max_transfer, dma_queues, poll_us } = request;
        TuningChange { pipeline, region_cache, max_transfer, dma_queues, poll_us }
    }
}

impl From<ChannelTuning> for proto::TuneChannelResponse {
    fn from(tuning: ChannelTuning) -> proto::TuneChannelResponse {
        let ChannelTuning { pipeline, region_cache, max_transfer, dma_queues, poll_us } = tuning;
        proto::TuneChannelResponse { pipeline, region_cache, max_transfer, dma_queues, poll_us }
    }
}

impl From<proto::TuneChannelResponse> for ChannelTuning {
    fn from(tuning: proto::TuneChannelResponse) -> ChannelTuning {
        let proto::TuneChannelResponse { pipeline, region_cache, max_transfer, dma_queues, poll_us } = tuning;
        ChannelTuning { pipeline, region_cache, max_transfer, dma_queues, poll_us }
    }
}

/// Returns the error for a reply that does not match its request.
pub(crate) fn unexpected(request: &AdminRequest, reply: &AdminReply) -> Error {
    Error::BadRequest(format!("the osd answered {request:?} with {reply:?}"))
}
