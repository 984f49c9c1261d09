//! Workarounds for the kernel's soft-iWARP driver (`siw`, Linux 6.1) and its rdma-core part (44),
//! which deviate from the verbs interface. No unsafe code here.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::{CompletionQueue, Domain, Fabric, Info};
use crate::Result;

/// Whether sends and writes end before the reads that were posted before them, and so must be held back with a fence: libfabric's
/// `verbs` (1.17) takes for granted that what an endpoint has posted ends in the order of posting, and otherwise uses memory that it
/// has given back. `siw` tells the end of a send or a write as soon as the socket has it, and of a read when the answer has come
/// (`siw_qp_sq_process`).
pub(super) fn overtakes_reads(info: &Info) -> bool {
    is_siw(info)
}

/// To be called before anything is made in the device's first domain.
///
/// Whatever is made has a place in its process's map of the device, the first that is free. rdma-core takes one of these places,
/// page [`NO_PLACE`], for a sign that there is none (`SIW_INVAL_UOBJ_KEY`): what gets it cannot be made, and so on until something else
/// is closed. Here that place is taken for ever, by being in the midst of a queue.
pub(super) fn prepare(fabric: &Fabric, info: &Info) {
    static PREPARED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let device = info.domain_name();
    // Held until it is done, so that others wait.
    let mut prepared = PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_siw(info) || prepared.contains(&device) {
        return;
    }
    match occupy(fabric, info) {
        Ok(()) => prepared.push(device),
        Err(e) => tracing::warn!(device, error = %e, "siw: some queues may be impossible to make"),
    }
}

/// In pages of the map.
const NO_PLACE: usize = 0x90;
/// Of a completion that a device has to tell (`struct siw_cqe`), in bytes.
const COMPLETION: usize = 32;
const PAGE: usize = 4096;

fn occupy(fabric: &Fabric, info: &Info) -> Result<()> {
    let domain = Domain::open_unprepared(fabric, info.duplicate()?)?;
    let queue = CompletionQueue::open(&domain, (NO_PLACE + 1) * PAGE / COMPLETION)?;
    std::mem::forget(queue);
    Ok(())
}

/// What the driver says of itself.
fn is_siw(info: &Info) -> bool {
    let described = Path::new("/sys/class/infiniband").join(info.domain_name()).join("node_desc");
    info.provider() == "verbs"
        && std::fs::read_to_string(described).is_ok_and(|text| text.trim_end() == "Software iWARP stack")
}
