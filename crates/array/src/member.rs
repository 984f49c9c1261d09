//! [`Member`]: what a group must know of a target that can be a member.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use store::{CollectionId, ObjectStore, StoreError};
use uuid::Uuid;

/// A target that can be a member of groups: its store, and what its owner knows of its health.
pub trait Member {
    /// The target's identity.
    fn uuid(&self) -> Uuid;

    /// The target's store.
    fn store(&self) -> &Arc<dyn ObjectStore>;

    /// A counter that changes whenever groups may start or must stop to use the target.
    fn generation(&self) -> u64;

    /// Whether groups may use the target.
    fn is_usable(&self) -> bool;

    /// Whether the operator has taken the target out.
    fn is_out(&self) -> bool;

    /// Whether the target is slow: a group that needs it waits for it.
    fn is_slow(&self) -> bool;

    /// Whether the target may be usable again before clients give up.
    fn is_hopeful(&self) -> bool;

    /// Why the target is not usable; `None` if it is.
    fn failure(&self) -> Option<String>;

    /// Reports an error that says something about the target.
    fn fail(&self, e: &StoreError);

    /// Reports that a call in a collection was not answered for `waited`.
    fn overdue(&self, cid: &CollectionId, waited: Duration);

    /// Sends a probe, and reports an error. Returns whether the probe failed.
    fn fails(&self) -> LocalBoxFuture<'_, bool>;

    /// Resolves when the target is slow: at once, or as soon as it becomes so.
    fn until_slow(&self) -> LocalBoxFuture<'_, ()>;

    /// Resolves when the target has answered a probe that is sent from now on. If a probe fails, the future never
    /// resolves.
    fn answers(self: Rc<Self>) -> LocalBoxFuture<'static, ()>;
}
