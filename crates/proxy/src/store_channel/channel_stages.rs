//! [`ChannelStages`]: the stages of one incarnation, and the writes to them.

use base::collections::HashMap;
use store::{StageId, StoreError};

/// The stages that the store has created in this incarnation.
pub(super) struct ChannelStages {
    incarnation: u64,
    last: u64,
    stages: HashMap<StageId, StageState>,
}

/// The state of a stage. Every unposted or unsure write is also unanswered.
struct StageState {
    host_id: u64,
    /// Number of writes that were submitted and not posted yet. A transaction that names the stage
    /// is posted after these writes.
    unposted: u32,
    /// Number of posted, unanswered writes that a later transaction could overtake. These are the
    /// writes on the control socket, and the writes whose checksums the host verifies, because they
    /// may have to be sent again.
    unsure: u32,
    /// Number of writes that were submitted and not answered yet.
    unanswered: u32,
    /// Payload of answered writes that DMA has carried, in bytes, unless it was counted before.
    carried: usize,
    /// Whether the stage was released. A released stage is removed once all its writes are
    /// answered.
    released: bool,
}

impl StageState {
    fn check(&self) {
        let open = u64::from(self.unposted) + u64::from(self.unsure);
        assert!(open <= u64::from(self.unanswered), "a stage has {open} open writes, but they are answered");
    }
}

impl ChannelStages {
    pub(super) fn new(incarnation: u64) -> ChannelStages {
        ChannelStages { incarnation, last: 0, stages: HashMap::default() }
    }

    /// Registers a new stage of the host.
    pub(super) fn create(&mut self, host_id: u64) -> StageId {
        self.last += 1;
        // The stage's number includes the number of the incarnation. A stage that was lost with its
        // incarnation can therefore not be confused with a later stage.
        let id = StageId((self.incarnation << 40) | self.last);
        let state =
            StageState { host_id, unposted: 0, unsure: 0, unanswered: 0, carried: 0, released: false };
        assert!(self.stages.insert(id, state).is_none(), "stage {id:?} was created twice");
        id
    }

    /// The number on the host of a stage that was not released.
    pub(super) fn host_id(&self, id: StageId) -> Result<u64, StoreError> {
        let stage = self.stages.get(&id).filter(|stage| !stage.released);
        stage.map(|stage| stage.host_id).ok_or(StoreError::NoSuchStage(id.0))
    }

    /// Number of stages that were not released.
    pub(super) fn count(&self) -> usize {
        self.stages.values().filter(|stage| !stage.released).count()
    }

    /// Counts a submitted write. Returns the stage's number on the host.
    pub(super) fn begin_write(&mut self, id: StageId) -> Result<u64, StoreError> {
        let host_id = self.host_id(id)?;
        let stage = self.written(id);
        stage.unposted += 1;
        stage.unanswered += 1;
        stage.check();
        Ok(host_id)
    }

    /// Counts a submitted write as posted. Jobs that become ready from now on are sent after the
    /// write. `unsure` says whether a transaction could overtake it.
    pub(super) fn write_posted(&mut self, id: StageId, unsure: bool) {
        let stage = self.written(id);
        stage.unposted = stage.unposted.checked_sub(1).expect("a posted write was submitted before");
        stage.unsure += u32::from(unsure);
        stage.check();
    }

    /// Counts a posted write as one that a transaction could overtake.
    pub(super) fn write_doubted(&mut self, id: StageId) {
        let stage = self.written(id);
        stage.unsure += 1;
        stage.check();
    }

    /// Counts a posted write as answered. `unsure` says whether a transaction could have overtaken
    /// it, and `carried` is the number of its bytes that DMA has carried.
    pub(super) fn write_answered(&mut self, id: StageId, unsure: bool, carried: usize) {
        let stage = self.written(id);
        stage.carried += carried;
        stage.unsure = stage.unsure.checked_sub(u32::from(unsure)).expect("an unsure write was counted");
        stage.unanswered = stage.unanswered.checked_sub(1).expect("an answered write was submitted before");
        stage.check();
        self.forget_if_done(id);
    }

    /// Returns how many bytes of answered writes to the stage DMA has carried since the last call.
    pub(super) fn take_carried(&mut self, id: StageId) -> usize {
        self.stages.get_mut(&id).map_or(0, |stage| std::mem::take(&mut stage.carried))
    }

    /// Whether all writes to these stages certainly precede a transaction that is posted now.
    pub(super) fn writes_precede(&self, ids: &[StageId]) -> bool {
        let mut stages = ids.iter().filter_map(|id| self.stages.get(id));
        stages.all(|stage| stage.unposted == 0 && stage.unsure == 0)
    }

    /// Releases a stage. Returns its number on the host, or `None` if there is no such stage.
    pub(super) fn release(&mut self, id: StageId) -> Option<u64> {
        let stage = self.stages.get_mut(&id).filter(|stage| !stage.released)?;
        stage.released = true;
        let host_id = stage.host_id;
        self.forget_if_done(id);
        Some(host_id)
    }

    /// Drops all stages.
    pub(super) fn clear(&mut self) {
        self.stages.clear();
    }

    fn forget_if_done(&mut self, id: StageId) {
        if self.stages.get(&id).is_some_and(|stage| stage.released && stage.unanswered == 0) {
            self.stages.remove(&id);
        }
    }

    fn written(&mut self, id: StageId) -> &mut StageState {
        self.stages.get_mut(&id).expect("a stage exists until all its writes are answered")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_waits_for_unposted_and_unsure_writes_of_its_stages() {
        let mut stages = ChannelStages::new(1);
        let id = stages.create(7);
        assert_eq!(stages.begin_write(id).unwrap(), 7);
        stages.begin_write(id).unwrap();
        assert!(!stages.writes_precede(&[id]), "two writes were not posted");
        stages.write_posted(id, false);
        stages.write_posted(id, true);
        assert!(!stages.writes_precede(&[id]), "a transaction could overtake the second write");
        stages.write_answered(id, true, 0);
        assert!(stages.writes_precede(&[id]), "the first write precedes the transaction on the ring");
        stages.write_doubted(id);
        assert!(!stages.writes_precede(&[id]), "the first write is sent again");
        stages.write_answered(id, true, 0);
        assert!(stages.writes_precede(&[id]));
    }

    #[test]
    fn a_released_stage_exists_until_its_writes_are_answered() {
        let mut stages = ChannelStages::new(1);
        let id = stages.create(7);
        stages.begin_write(id).unwrap();
        assert_eq!(stages.release(id), Some(7));
        assert_eq!((stages.release(id), stages.count()), (None, 0), "a stage is released once");
        assert_eq!(stages.begin_write(id), Err(StoreError::NoSuchStage(id.0)));
        stages.write_posted(id, false);
        stages.write_answered(id, false, 0);
        assert!(stages.stages.is_empty());
    }

    #[test]
    fn incarnations_have_different_stages() {
        let (mut first, mut second) = (ChannelStages::new(1), ChannelStages::new(2));
        let id = first.create(7);
        assert_ne!(second.create(7), id);
        assert_eq!(second.host_id(id), Err(StoreError::NoSuchStage(id.0)));
    }

    #[test]
    #[should_panic(expected = "a posted write was submitted before")]
    fn a_write_cannot_be_posted_twice() {
        let mut stages = ChannelStages::new(1);
        let id = stages.create(7);
        stages.begin_write(id).unwrap();
        stages.write_posted(id, false);
        stages.write_posted(id, false);
    }

    #[test]
    #[should_panic(expected = "a stage has 1 open writes, but they are answered")]
    fn a_write_cannot_be_answered_before_it_is_posted() {
        let mut stages = ChannelStages::new(1);
        let id = stages.create(7);
        stages.begin_write(id).unwrap();
        stages.write_answered(id, false, 0);
    }
}
