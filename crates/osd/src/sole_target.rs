//! [`SoleTarget`]: the target of a placement group without redundancy.

use std::rc::Rc;
use std::time::Duration;

use wire::Error;

use crate::age;
use crate::fail::StepResult;
use crate::target::Target;
use crate::witness::NodeWitness;

/// The target of a placement group without redundancy. The group does not use the target while the
/// target has gone back to an earlier state, because no other target has the lost changes.
pub(crate) struct SoleTarget {
    target: Rc<Target>,
    witness: Rc<NodeWitness>,
    patience: Duration,
}

impl SoleTarget {
    /// Creates the state of a group's only target. Queries of the target wait at most `patience`.
    pub(crate) fn new(target: &Rc<Target>, witness: &Rc<NodeWitness>, patience: Duration) -> SoleTarget {
        SoleTarget { target: Rc::clone(target), witness: Rc::clone(witness), patience }
    }

    /// Checks that the target has not gone back to an earlier state.
    ///
    /// # Errors
    /// [`Error::TargetFailed`] if it has, and other errors if this cannot be found out.
    pub(crate) async fn check(&self) -> StepResult<()> {
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
