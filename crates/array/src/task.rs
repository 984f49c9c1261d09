//! Tasks on the group's thread.

use std::cell::Cell;

use base::thread::ThreadClass;
use tokio::task::JoinHandle;

/// Starts a task on this thread. The thread also serves connections, so the task's CPU time is
/// charged to the class `osd`.
pub(crate) fn spawn<F: Future<Output: 'static> + 'static>(task: F) -> JoinHandle<F::Output> {
    base::task::spawn_local(ThreadClass::Osd, task)
}

/// Says whether a task runs of which a group has only one at a time.
#[derive(Debug, Default)]
pub(crate) struct TaskFlag(Cell<bool>);

impl TaskFlag {
    /// Claims the task. Returns false if it runs already.
    pub(crate) fn claim(&self) -> bool {
        !self.0.replace(true)
    }

    /// Records that the task has ended.
    pub(crate) fn release(&self) {
        self.0.set(false);
    }
}
