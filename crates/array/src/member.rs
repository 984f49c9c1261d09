//! [`Member`]: the interface through which a group uses a target.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use store::{CollectionId, ObjectStore, StoreError};
use uuid::Uuid;

/// A target that can be a member of groups. Provides the target's store, and its health as the osd
/// sees it.
pub trait Member {
    /// The target's identity.
    fn uuid(&self) -> Uuid;

    /// The target's store.
    fn store(&self) -> &Arc<dyn ObjectStore>;

    /// A counter that changes whenever groups may start using the target, or must stop using it.
    fn generation(&self) -> u64;

    /// Returns true if groups may use the target.
    fn is_usable(&self) -> bool;

    /// Returns true if the operator has taken the target out.
    fn is_out(&self) -> bool;

    /// Returns true if the target is slow. A group waits for a slow target only if it needs the
    /// target.
    fn is_slow(&self) -> bool;

    /// Returns true if the target may become usable again before clients give up.
    fn is_hopeful(&self) -> bool;

    /// Why the target is unusable; `None` if it is usable.
    fn failure(&self) -> Option<String>;

    /// Reports an error that indicates a failure of the target.
    fn fail(&self, e: &StoreError);

    /// Reports that the target has not answered a call in a collection for `waited`.
    fn overdue(&self, cid: &CollectionId, waited: Duration);

    /// Sends a probe and reports any error. Returns true if the probe failed.
    fn fails(&self) -> LocalBoxFuture<'_, bool>;

    /// Resolves when the target is slow: immediately, or as soon as it becomes slow.
    fn until_slow(&self) -> LocalBoxFuture<'_, ()>;

    /// Sends a probe. Resolves when the target has answered it. If the probe fails, the future
    /// never resolves.
    fn answers(self: Rc<Self>) -> LocalBoxFuture<'static, ()>;
}
