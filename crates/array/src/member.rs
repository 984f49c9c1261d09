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

    /// A counter that changes whenever the target becomes usable or unusable.
    fn generation(&self) -> u64;

    /// Returns true if groups may use the target.
    fn is_usable(&self) -> bool;

    /// Returns true if the operator has taken the target out of use.
    fn is_out(&self) -> bool;

    /// Returns true if the target is slow: a call on it was not answered in time. A group waits for
    /// a slow target only if the group cannot work without it.
    fn is_slow(&self) -> bool;

    /// Returns true if the target may become usable again before clients give up.
    fn is_hopeful(&self) -> bool;

    /// Why the target is unusable; `None` if it is usable.
    fn failure(&self) -> Option<String>;

    /// Marks the target as failed, because of the error `e` of a call in an incarnation of the
    /// store. Has no effect if the store has begun another incarnation since, because the target may
    /// have been remounted.
    fn fail(&self, incarnation: u64, e: &StoreError);

    /// Reports that the target has not answered a call on the collection `cid` for the time
    /// `waited`.
    fn overdue(&self, cid: &CollectionId, waited: Duration);

    /// Sends a probe to the target. Returns true if the probe fails. An error of the probe may also
    /// mark the target as failed.
    fn fails(&self) -> LocalBoxFuture<'_, bool>;

    /// Resolves immediately if the target is slow, or else as soon as it becomes slow.
    fn until_slow(&self) -> LocalBoxFuture<'_, ()>;

    /// Sends a probe to the target. Resolves when the target has answered a probe that was sent
    /// after this call. If the target never answers, the future never resolves.
    fn answers(self: Rc<Self>) -> LocalBoxFuture<'static, ()>;
}
