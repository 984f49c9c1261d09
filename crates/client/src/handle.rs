//! [`ObjectHandle`]: an object's name, with the client's way to send requests.

use std::sync::Arc;

use wire::{ObjectName, Query, QueryAnswer, QueryOp, StatAnswer};

use crate::requests::Requests;
use crate::{Error, Result};

/// The parts of an [`Object`](crate::Object) that its operations need.
#[derive(Debug, Clone)]
pub(crate) struct ObjectHandle {
    pub(crate) requests: Arc<Requests>,
    pub(crate) name: ObjectName,
}

impl ObjectHandle {
    /// Queries the object's metadata.
    pub(crate) async fn query(&self, ops: Vec<QueryOp>) -> Result<Vec<QueryAnswer>> {
        let query = Query { name: self.name.to_wire(), conditions: Vec::new(), ops };
        self.requests.query(query).await
    }

    /// Returns the object's size, version, time of the last change, and manifest.
    pub(crate) async fn stat(&self) -> Result<StatAnswer> {
        match self.query(vec![QueryOp::Stat]).await?.pop() {
            Some(QueryAnswer::Stat(stat)) => Ok(stat),
            other => Err(unexpected(other)),
        }
    }
}

/// Returns the error for an answer of the wrong kind.
pub(crate) fn unexpected(answer: Option<QueryAnswer>) -> Error {
    Error::Protocol(format!("unexpected answer {answer:?}"))
}
