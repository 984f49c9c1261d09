//! The stages of one attachment.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::collections::HashSet;
use store::{Op, Result, StageId, StoreError, Transaction, WriteSource};

use super::Counts;

/// The stages that an attachment has allocated and not released. A stage belongs to its attachment:
/// calls of another attachment that name it fail.
pub(super) struct OwnStages {
    /// The index of each stage's target, and the stage.
    stages: HashSet<(u16, StageId)>,
    counts: Arc<Counts>,
}

impl OwnStages {
    pub(super) fn new(counts: Arc<Counts>) -> OwnStages {
        OwnStages { stages: HashSet::default(), counts }
    }

    /// Adds a stage that `target` has allocated.
    pub(super) fn insert(&mut self, target: u16, stage: StageId) {
        let is_new = self.stages.insert((target, stage));
        assert!(is_new, "a target allocates each stage once");
        self.counts.stages.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a stage. Returns `false` if the stage does not belong to this attachment.
    pub(super) fn remove(&mut self, target: u16, stage: StageId) -> bool {
        let was_held = self.stages.remove(&(target, stage));
        self.counts.stages.fetch_sub(usize::from(was_held), Ordering::Relaxed);
        was_held
    }

    /// Removes all stages.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (u16, StageId)> + use<> {
        let all = std::mem::take(&mut self.stages);
        self.counts.stages.fetch_sub(all.len(), Ordering::Relaxed);
        all.into_iter()
    }

    /// Checks that the attachment may use a stage of `target`.
    ///
    /// # Errors
    /// [`StoreError::NoSuchStage`] if the stage does not belong to this attachment.
    pub(super) fn check(&self, target: u16, stage: StageId) -> Result<()> {
        let is_held = self.stages.contains(&(target, stage));
        if is_held { Ok(()) } else { Err(StoreError::NoSuchStage(stage.0)) }
    }

    /// Checks that the attachment may use all stages that a transaction of `target` names.
    ///
    /// # Errors
    /// [`StoreError::NoSuchStage`] if a stage does not belong to this attachment.
    pub(super) fn check_all(&self, target: u16, transaction: &Transaction) -> Result<()> {
        transaction.ops.iter().try_for_each(|op| match op {
            Op::Write { source: WriteSource::Staged { stage, .. }, .. } => self.check(target, *stage),
            _ => Ok(()),
        })
    }
}
