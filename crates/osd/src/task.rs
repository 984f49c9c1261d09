//! Tasks of an OSD.

use base::thread::ThreadClass;
use tokio::task::JoinHandle;

/// Starts a task on the OSD's thread. Connections share this thread, so each task's CPU time is
/// counted by class.
pub(crate) fn spawn(task: impl Future<Output = ()> + 'static) -> JoinHandle<()> {
    tokio::task::spawn_local(base::work::booked(ThreadClass::Osd, task))
}
