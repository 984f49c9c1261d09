//! [`SoleTarget`]: the target of a placement group without redundancy.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use wire::{Error, TargetState};

use crate::age;
use crate::fail::StepResult;
use crate::target::Target;
use crate::witness::NodeWitness;

/// The target of a placement group without redundancy. The group does not use the target while the
/// target has gone back to an earlier state, because no other target has the lost changes.
pub(crate) struct SoleTarget {
    target: Rc<Target>,
    witness: Arc<NodeWitness>,
    patience: Duration,
}

impl SoleTarget {
    /// Creates the state of a group's only target. Queries of the target wait at most `patience`.
    pub(crate) fn new(target: &Rc<Target>, witness: &Arc<NodeWitness>, patience: Duration) -> SoleTarget {
        SoleTarget { target: Rc::clone(target), witness: Arc::clone(witness), patience }
    }

    /// Returns whether the target has failed, and requests wait no longer for its remount.
    pub(crate) fn is_lost(&self) -> bool {
        self.target.state().0 == TargetState::Failed && !self.target.may_return_soon()
    }

    /// Checks that the target was not replaced, and has not gone back to an earlier state.
    ///
    /// # Errors
    /// [`Error::TargetFailed`] if it was or has, and other errors if this cannot be found out.
    pub(crate) async fn check(&self) -> StepResult<()> {
        if self.target.is_replaced() {
            let why =
                format!("target {} was replaced; restart the node to use the new target", self.target.uuid);
            return Err(Error::TargetFailed(why).into());
        }
        if !age::check(&self.target, &self.witness, self.patience).await? {
            return Ok(());
        }
        let why = format!(
            "target {} has gone back to an earlier state, and lacks acknowledged changes; restore its newer content, or accept the loss: outboard target forget ID --accept-loss",
            self.target.uuid
        );
        Err(Error::TargetFailed(why).into())
    }
}
