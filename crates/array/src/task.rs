//! Tasks on the group's thread.

use base::thread::ThreadClass;
use tokio::task::JoinHandle;

/// Starts a task on this thread. The thread also serves connections, so the task's CPU time is
/// charged to the class `osd`.
pub(crate) fn spawn<F: Future<Output: 'static> + 'static>(task: F) -> JoinHandle<F::Output> {
    base::task::spawn_local(ThreadClass::Osd, task)
}
