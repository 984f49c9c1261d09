//! Tasks of an OSD.

use base::thread::ThreadClass;
use tokio::task::JoinHandle;

/// Starts a task on the OSD's thread. Connections share that thread, so the CPU time of its tasks is
/// booked by class.
pub(crate) fn spawn(task: impl Future<Output = ()> + 'static) -> JoinHandle<()> {
    tokio::task::spawn_local(base::work::booked(ThreadClass::Osd, task))
}
