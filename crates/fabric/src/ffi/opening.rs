//! Opens domains, after a workaround for the driver `siw`. This module contains no unsafe code.

use std::sync::{Mutex, PoisonError};

use super::{CompletionQueue, Domain, Fabric, Info, siw};
use crate::Result;

impl Domain {
    /// Opens the domain that `info` names.
    ///
    /// # Errors
    /// If the provider fails.
    pub fn open(fabric: &Fabric, info: Info) -> Result<Domain> {
        prepare(fabric, &info);
        Domain::open_unprepared(fabric, info)
    }
}

/// Avoids a defect that makes the creation of objects fail. The caller must call this function
/// before it creates any object in the device's first domain.
///
/// Each object occupies pages in the process's memory map of the device, from the first free page.
/// rdma-core takes page [`NO_PLACE`] as a sign that the object has no page (`SIW_INVAL_UOBJ_KEY`).
/// The creation of an object that gets this page fails, and so does every later creation until
/// another object is closed. This function opens a queue that covers the page, and never closes the
/// queue.
fn prepare(fabric: &Fabric, info: &Info) {
    static PREPARED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let device = info.domain_name();
    // The lock is held until the queue is open, so that other threads wait.
    let mut prepared = PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
    if !siw::is_siw(info) || prepared.contains(&device) {
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
