//! The conversion between administrative requests and the messages of gRPC.

use wire::{AdminReply, AdminRequest, Error, PoolInfo, PoolLoss, Redundancy};

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

/// Reads a redundancy scheme of a request; an empty text means no redundancy.
pub(crate) fn redundancy(text: &str) -> Result<Redundancy, Error> {
    if text.is_empty() {
        return Ok(Redundancy::Single);
    }
    text.parse().map_err(|e| Error::BadRequest(format!("redundancy \"{text}\": {e}")))
}

impl From<PoolInfo> for proto::Pool {
    fn from(pool: PoolInfo) -> proto::Pool {
        proto::Pool {
            id: pool.id,
            name: pool.name,
            pg_count: pool.pg_count,
            redundancy: pool.redundancy.to_string(),
            created_ms: pool.made_ms,
        }
    }
}

/// Reads a pool of an answer.
pub(crate) fn pool_info(pool: proto::Pool) -> Result<PoolInfo, BadAnswer> {
    Ok(PoolInfo {
        id: pool.id,
        redundancy: pool.redundancy.parse().map_err(BadAnswer::of)?,
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
            groups: loss.groups,
            waiting: loss.waiting,
            emptied: loss.emptied,
        }
    }
}

/// Reads the loss of a pool of an answer.
pub(crate) fn pool_loss(loss: proto::PoolLoss) -> Result<PoolLoss, BadAnswer> {
    Ok(PoolLoss {
        redundancy: loss.redundancy.parse().map_err(BadAnswer::of)?,
        pool: loss.pool,
        groups: loss.groups,
        waiting: loss.waiting,
        emptied: loss.emptied,
    })
}

/// Returns the error for a reply that does not match its request.
pub(crate) fn unexpected(request: &AdminRequest, reply: &AdminReply) -> Error {
    Error::BadRequest(format!("the osd answered {request:?} with {reply:?}"))
}
