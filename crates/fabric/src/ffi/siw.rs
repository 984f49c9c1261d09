//! Workarounds for the kernel's soft-iWARP driver (`siw`, Linux 6.1) and its rdma-core part (44),
//! which deviate from the verbs interface. This module contains no unsafe code.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::{CompletionQueue, Domain, Fabric, Info};
use crate::Result;
use crate::info::ProviderKind;

/// Whether sends and writes may complete before reads that were posted earlier, so that they need a
/// fence. libfabric's `verbs` (1.17) assumes that the operations of an endpoint complete in the
/// order of posting. If the operations complete in another order, `verbs` uses memory that it has
/// freed. `siw` completes a send or a write as soon as the socket has accepted the data, but a read
/// only after the answer has arrived (`siw_qp_sq_process`).
pub(super) fn overtakes_reads(info: &Info) -> bool {
    is_siw(info)
}

/// Avoids a defect that makes the creation of objects fail. The caller must call this function
/// before it creates any object in the device's first domain.
///
/// Each object occupies pages in the process's memory map of the device, from the first free page.
/// rdma-core takes page [`NO_PLACE`] as a sign that the object has no page (`SIW_INVAL_UOBJ_KEY`).
/// The creation of an object that gets this page fails, and so does every later creation until
/// another object is closed. This function opens a queue that covers the page, and never closes the
/// queue.
pub(super) fn prepare(fabric: &Fabric, info: &Info) {
    static PREPARED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let device = info.domain_name();
    // The lock is held until the queue is open, so that other threads wait.
    let mut prepared = PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_siw(info) || prepared.contains(&device) {
        return;
    }
    match occupy(fabric, info) {
        Ok(()) => prepared.push(device),
        Err(e) => {
            tracing::warn!(device, error = %e, "siw: cannot work around a driver defect; some queues may fail to open")
        }
    }
}

/// Number of the page at which no object may start, counted from the start of the memory map.
const NO_PLACE: usize = 0x90;
/// Size of a completion entry in a device's queue (`struct siw_cqe`), in bytes.
const COMPLETION: usize = 32;
const PAGE: usize = 4096;

fn occupy(fabric: &Fabric, info: &Info) -> Result<()> {
    let domain = Domain::open_unprepared(fabric, info.duplicate()?)?;
    let queue = CompletionQueue::open(&domain, (NO_PLACE + 1) * PAGE / COMPLETION)?;
    std::mem::forget(queue);
    Ok(())
}

/// Whether the driver of the device describes itself as `siw`.
fn is_siw(info: &Info) -> bool {
    let described = Path::new("/sys/class/infiniband").join(info.domain_name()).join("node_desc");
    info.provider_kind() == ProviderKind::Verbs
        && std::fs::read_to_string(described).is_ok_and(|text| text.trim_end() == "Software iWARP stack")
}
