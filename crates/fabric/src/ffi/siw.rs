//! Deviations of the kernel's soft-iWARP driver (`siw`, Linux 6.1) and its rdma-core part (44) from
//! the verbs interface. This module contains no unsafe code.

use std::path::Path;

use super::Info;
use crate::info::ProviderKind;

/// Whether sends and writes may complete before reads that were posted earlier, so that they need a
/// fence. libfabric's `verbs` (1.17) assumes that the operations of an endpoint complete in the
/// order of posting. If the operations complete in another order, `verbs` uses memory that it has
/// freed. `siw` completes a send or a write as soon as the socket has accepted the data, but a read
/// only after the answer has arrived (`siw_qp_sq_process`).
pub(super) fn overtakes_reads(info: &Info) -> bool {
    is_siw(info)
}

/// Whether the driver of the device describes itself as `siw`.
pub(super) fn is_siw(info: &Info) -> bool {
    let described = Path::new("/sys/class/infiniband").join(info.domain_name()).join("node_desc");
    info.provider_kind() == ProviderKind::Verbs
        && std::fs::read_to_string(described).is_ok_and(|text| text.trim_end() == "Software iWARP stack")
}
