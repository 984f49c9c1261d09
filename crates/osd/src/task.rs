//! Tasks of an osd.

use base::thread::ThreadClass;
use tokio::task::JoinHandle;

/// Starts a task on the osd's thread. The messenger uses the same thread, so the time of each task
/// is charged to its thread class.
pub(crate) fn spawn(task: impl Future<Output = ()> + 'static) -> JoinHandle<()> {
    base::task::spawn_local(ThreadClass::Osd, task)
}
