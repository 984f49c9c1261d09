//! The audit log: who has changed the node, opened sessions, and was refused.

use std::sync::Arc;

use base::BoxFuture;
use identity::KeyHash;
use serde::Serialize;

/// An entry of the audit log. It contains no secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditEvent {
    /// Time of the event, in milliseconds since 1970.
    pub at_ms: u64,
    /// What has happened.
    pub event: AuditKind,
    /// Name of the user, `TENANT/USER`; `None` if the key is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Hash of the key that the client has proved.
    #[serde(serialize_with = "as_text")]
    pub key: KeyHash,
    /// Address of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The request, or the session.
    pub what: String,
    /// Reason of the refusal or failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Kind of an [`AuditEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditKind {
    /// An operator has changed the node, its pools, or its accounts.
    Changed,
    /// A change by an operator has failed. Possibly a part of it has taken effect.
    Failed,
    /// The node has issued a capability.
    Issued,
    /// A client has opened a new session.
    SessionOpened,
    /// An operator has ended a session.
    SessionKilled,
    /// The node has refused a client or a request, because the client has no right to it.
    Refused,
}

fn as_text<S: serde::Serializer>(key: &KeyHash, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(key)
}

/// Stores the audit log. Any thread may call it.
pub trait AuditSink: Send + Sync {
    /// Adds an entry. Does not wait; if entries arrive faster than they can be stored, the sink counts
    /// those that it drops.
    fn record(&self, event: AuditEvent);

    /// Returns the last entries, as lines of JSON, the oldest first.
    fn recent(&self, limit: usize) -> BoxFuture<'static, Vec<String>>;
}

/// Where the osd stores its audit log. The default stores nothing.
#[derive(Clone, Default)]
pub struct AuditAt(pub Option<Arc<dyn AuditSink>>);

impl std::fmt::Debug for AuditAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuditAt")
    }
}

impl AuditAt {
    pub(crate) fn record(&self, event: impl FnOnce() -> AuditEvent) {
        if let Some(sink) = &self.0 {
            sink.record(event());
        }
    }
}
