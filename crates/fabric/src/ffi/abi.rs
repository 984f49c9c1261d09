//! Layout of the libfabric structures that this crate uses.
//!
//! Most calls of libfabric are functions in tables that objects point to. libfabric's headers only
//! wrap these calls. Structures that libfabric allocates are declared here only up to the last
//! field that the crate uses. This is sufficient, because the crate accesses them by pointer.
//! Structures that this crate allocates and passes to libfabric are complete. The layouts are those
//! of symbol version `FABRIC_1.3` (libfabric 1.14 to 1.17). Later libraries keep these layouts for
//! programs that request this version. The tests compare offsets with those of a C compiler.

use std::ffi::{c_char, c_int, c_void};

/// The requested version of the interface: 1.14.
pub(super) const API_VERSION: u32 = 1 << 16 | 14;

/// A function pointer that this crate does not use.
type Unused = *const c_void;

pub(super) const EP_MSG: c_int = 1;
pub(super) const PROTO_IWARP: u32 = 2;
pub(super) const THREAD_SAFE: c_int = 1;
pub(super) const PROGRESS_MANUAL: c_int = 2;
pub(super) const WAIT_FD: c_int = 3;
pub(super) const CQ_FORMAT_MSG: c_int = 2;
pub(super) const FORMAT_UNSPEC: u32 = 0;

pub(super) const MSG: u64 = 1 << 1;
pub(super) const RMA: u64 = 1 << 2;
pub(super) const READ: u64 = 1 << 8;
pub(super) const WRITE: u64 = 1 << 9;
pub(super) const RECV: u64 = 1 << 10;
pub(super) const SEND: u64 = 1 << 11;
pub(super) const TRANSMIT: u64 = SEND;
pub(super) const REMOTE_READ: u64 = 1 << 12;
pub(super) const REMOTE_WRITE: u64 = 1 << 13;
pub(super) const FENCE: u64 = 1 << 21;
pub(super) const COMPLETION: u64 = 1 << 24;
pub(super) const INJECT: u64 = 1 << 25;
pub(super) const SELECTIVE_COMPLETION: u64 = 1 << 59;
/// The number of receive contexts that requests a shared receive context.
pub(super) const SHARED_CONTEXT: usize = usize::MAX;
pub(super) const NUMERICHOST: u64 = 1 << 55;
pub(super) const SOURCE: u64 = 1 << 57;

/// A read takes effect after the writes that were posted before it.
pub(super) const ORDER_RAW: u64 = 1 << 1;
/// A message arrives after the writes that were posted before it.
pub(super) const ORDER_SAW: u64 = 1 << 7;
/// A message arrives after the messages that were posted before it.
pub(super) const ORDER_SAS: u64 = 1 << 8;

pub(super) const MR_LOCAL: c_int = 1 << 2;
pub(super) const MR_VIRT_ADDR: c_int = 1 << 4;
pub(super) const MR_ALLOCATED: c_int = 1 << 5;
pub(super) const MR_PROV_KEY: c_int = 1 << 6;

pub(super) const CONTROL_GETWAIT: c_int = 5;
pub(super) const CONTROL_ENABLE: c_int = 6;
pub(super) const OPT_ENDPOINT: c_int = 0;
pub(super) const OPT_CM_DATA_SIZE: c_int = 1;

pub(super) const EVENT_CONNREQ: u32 = 1;
pub(super) const EVENT_CONNECTED: u32 = 2;
pub(super) const EVENT_SHUTDOWN: u32 = 3;

/// Error number: the queue has an error entry, which must be read first.
pub(super) const EAVAIL: i32 = 259;
/// Error number: the requested key is in use.
pub(super) const ENOKEY: i32 = 266;

/// The first field of every libfabric object.
#[repr(C)]
pub(super) struct Fid {
    pub(super) class: usize,
    pub(super) context: *mut c_void,
    pub(super) ops: *const FidOps,
}

#[repr(C)]
pub(super) struct FidOps {
    pub(super) size: usize,
    pub(super) close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub(super) bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub(super) control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
}

#[repr(C)]
pub(super) struct FidFabric {
    pub(super) fid: Fid,
    pub(super) ops: *const FabricOps,
}

#[repr(C)]
pub(super) struct FabricOps {
    pub(super) size: usize,
    pub(super) domain:
        unsafe extern "C" fn(*mut FidFabric, *mut FiInfo, *mut *mut FidDomain, *mut c_void) -> c_int,
    pub(super) passive_ep:
        unsafe extern "C" fn(*mut FidFabric, *mut FiInfo, *mut *mut FidPep, *mut c_void) -> c_int,
    pub(super) eq_open:
        unsafe extern "C" fn(*mut FidFabric, *mut EqAttr, *mut *mut FidEq, *mut c_void) -> c_int,
    pub(super) wait_open: Unused,
    pub(super) trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
}

#[repr(C)]
pub(super) struct FidDomain {
    pub(super) fid: Fid,
    pub(super) ops: *const DomainOps,
    pub(super) mr: *const MrOps,
}

#[repr(C)]
pub(super) struct DomainOps {
    pub(super) size: usize,
    pub(super) av_open: Unused,
    pub(super) cq_open:
        unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int,
    pub(super) endpoint:
        unsafe extern "C" fn(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, *mut c_void) -> c_int,
    pub(super) scalable_ep: Unused,
    pub(super) cntr_open: Unused,
    pub(super) poll_open: Unused,
    pub(super) stx_ctx: Unused,
    pub(super) srx_ctx:
        unsafe extern "C" fn(*mut FidDomain, *mut RxAttr, *mut *mut FidEp, *mut c_void) -> c_int,
}

#[repr(C)]
pub(super) struct MrOps {
    pub(super) size: usize,
    pub(super) reg: unsafe extern "C" fn(
        *mut Fid,
        *const c_void,
        usize,
        u64,
        u64,
        u64,
        u64,
        *mut *mut FidMr,
        *mut c_void,
    ) -> c_int,
}

#[repr(C)]
pub(super) struct FidMr {
    pub(super) fid: Fid,
    pub(super) mem_desc: *mut c_void,
    pub(super) key: u64,
}

#[repr(C)]
pub(super) struct FidPep {
    pub(super) fid: Fid,
    pub(super) ops: *const EpOps,
    pub(super) cm: *const CmOps,
}

#[repr(C)]
pub(super) struct FidEp {
    pub(super) fid: Fid,
    pub(super) ops: *const EpOps,
    pub(super) cm: *const CmOps,
    pub(super) msg: *const MsgOps,
    pub(super) rma: *const RmaOps,
}

#[repr(C)]
pub(super) struct EpOps {
    pub(super) size: usize,
    pub(super) cancel: Unused,
    pub(super) getopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *mut c_void, *mut usize) -> c_int,
}

#[repr(C)]
pub(super) struct CmOps {
    pub(super) size: usize,
    pub(super) setname: Unused,
    pub(super) getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
    pub(super) getpeer: Unused,
    pub(super) connect: unsafe extern "C" fn(*mut FidEp, *const c_void, *const c_void, usize) -> c_int,
    pub(super) listen: unsafe extern "C" fn(*mut FidPep) -> c_int,
    pub(super) accept: unsafe extern "C" fn(*mut FidEp, *const c_void, usize) -> c_int,
    pub(super) reject: unsafe extern "C" fn(*mut FidPep, *mut Fid, *const c_void, usize) -> c_int,
}

#[repr(C)]
pub(super) struct MsgOps {
    pub(super) size: usize,
    pub(super) recv:
        unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
    pub(super) recvv: Unused,
    pub(super) recvmsg: Unused,
    pub(super) send: Unused,
    pub(super) sendv: Unused,
    pub(super) sendmsg: unsafe extern "C" fn(*mut FidEp, *const FiMsg, u64) -> isize,
}

#[repr(C)]
pub(super) struct RmaOps {
    pub(super) size: usize,
    pub(super) read: Unused,
    pub(super) readv: Unused,
    pub(super) readmsg: unsafe extern "C" fn(*mut FidEp, *const FiMsgRma, u64) -> isize,
    pub(super) write: Unused,
    pub(super) writev: Unused,
    pub(super) writemsg: unsafe extern "C" fn(*mut FidEp, *const FiMsgRma, u64) -> isize,
}

#[repr(C)]
pub(super) struct FiMsg {
    pub(super) msg_iov: *const libc::iovec,
    pub(super) desc: *mut *mut c_void,
    pub(super) iov_count: usize,
    pub(super) addr: u64,
    pub(super) context: *mut c_void,
    pub(super) data: u64,
}

#[repr(C)]
pub(super) struct FiRmaIov {
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) key: u64,
}

#[repr(C)]
pub(super) struct FiMsgRma {
    pub(super) msg_iov: *const libc::iovec,
    pub(super) desc: *mut *mut c_void,
    pub(super) iov_count: usize,
    pub(super) addr: u64,
    pub(super) rma_iov: *const FiRmaIov,
    pub(super) rma_iov_count: usize,
    pub(super) context: *mut c_void,
    pub(super) data: u64,
}

#[repr(C)]
pub(super) struct FidEq {
    pub(super) fid: Fid,
    pub(super) ops: *const EqOps,
}

#[repr(C)]
pub(super) struct EqOps {
    pub(super) size: usize,
    pub(super) read: unsafe extern "C" fn(*mut FidEq, *mut u32, *mut c_void, usize, u64) -> isize,
    pub(super) readerr: unsafe extern "C" fn(*mut FidEq, *mut EqErrEntry, u64) -> isize,
}

#[repr(C)]
pub(super) struct FidCq {
    pub(super) fid: Fid,
    pub(super) ops: *const CqOps,
}

#[repr(C)]
pub(super) struct CqOps {
    pub(super) size: usize,
    pub(super) read: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize) -> isize,
    pub(super) readfrom: Unused,
    pub(super) readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, u64) -> isize,
}

#[repr(C)]
pub(super) struct EqAttr {
    pub(super) size: usize,
    pub(super) flags: u64,
    pub(super) wait_obj: c_int,
    pub(super) signaling_vector: c_int,
    pub(super) wait_set: *mut c_void,
}

#[repr(C)]
pub(super) struct CqAttr {
    pub(super) size: usize,
    pub(super) flags: u64,
    pub(super) format: c_int,
    pub(super) wait_obj: c_int,
    pub(super) signaling_vector: c_int,
    pub(super) wait_cond: c_int,
    pub(super) wait_set: *mut c_void,
}

#[repr(C)]
pub(super) struct EqCmEntry {
    pub(super) fid: *mut Fid,
    pub(super) info: *mut FiInfo,
}

#[repr(C)]
pub(super) struct EqErrEntry {
    pub(super) fid: *mut Fid,
    pub(super) context: *mut c_void,
    pub(super) data: u64,
    pub(super) err: c_int,
    pub(super) prov_errno: c_int,
    pub(super) err_data: *mut c_void,
    pub(super) err_data_size: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CqMsgEntry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
}

#[repr(C)]
pub(super) struct CqErrEntry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
    pub(super) buf: *mut c_void,
    pub(super) data: u64,
    pub(super) tag: u64,
    pub(super) olen: usize,
    pub(super) err: c_int,
    pub(super) prov_errno: c_int,
    pub(super) err_data: *mut c_void,
    pub(super) err_data_size: usize,
    /// Space for the fields that later versions of the library append.
    pub(super) later: [u64; 8],
}

#[repr(C)]
pub(super) struct FiInfo {
    pub(super) next: *mut FiInfo,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) addr_format: u32,
    pub(super) src_addrlen: usize,
    pub(super) dest_addrlen: usize,
    pub(super) src_addr: *mut c_void,
    pub(super) dest_addr: *mut c_void,
    pub(super) handle: *mut Fid,
    pub(super) tx_attr: *mut TxAttr,
    pub(super) rx_attr: *mut RxAttr,
    pub(super) ep_attr: *mut EpAttr,
    pub(super) domain_attr: *mut DomainAttr,
    pub(super) fabric_attr: *mut FabricAttr,
}

#[repr(C)]
pub(super) struct TxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) inject_size: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
}

#[repr(C)]
pub(super) struct RxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) total_buffered_recv: usize,
    pub(super) size: usize,
}

#[repr(C)]
pub(super) struct EpAttr {
    pub(super) kind: c_int,
    pub(super) protocol: u32,
    pub(super) protocol_version: u32,
    pub(super) max_msg_size: usize,
    pub(super) msg_prefix_size: usize,
    pub(super) max_order_raw_size: usize,
    pub(super) max_order_war_size: usize,
    pub(super) max_order_waw_size: usize,
    pub(super) mem_tag_format: u64,
    pub(super) tx_ctx_cnt: usize,
    pub(super) rx_ctx_cnt: usize,
}

#[repr(C)]
pub(super) struct DomainAttr {
    pub(super) domain: *mut FidDomain,
    pub(super) name: *mut c_char,
    pub(super) threading: c_int,
    pub(super) control_progress: c_int,
    pub(super) data_progress: c_int,
    pub(super) resource_mgmt: c_int,
    pub(super) av_type: c_int,
    pub(super) mr_mode: c_int,
    pub(super) mr_key_size: usize,
}

#[repr(C)]
pub(super) struct FabricAttr {
    pub(super) fabric: *mut FidFabric,
    pub(super) name: *mut c_char,
    pub(super) prov_name: *mut c_char,
    pub(super) prov_version: u32,
    pub(super) api_version: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// A C program with libfabric 1.17's headers printed these numbers on 64-bit Linux.
    #[test]
    fn structure_fields_have_the_same_offsets_as_in_the_c_headers() {
        assert_eq!(offset_of!(FiInfo, src_addr), 48);
        assert_eq!(offset_of!(FiInfo, handle), 64);
        assert_eq!(offset_of!(FiInfo, tx_attr), 72);
        assert_eq!(offset_of!(FiInfo, fabric_attr), 104);
        assert_eq!(offset_of!(TxAttr, inject_size), 40);
        assert_eq!(offset_of!(TxAttr, size), 48);
        assert_eq!(offset_of!(RxAttr, size), 48);
        assert_eq!(offset_of!(TxAttr, iov_limit), 56);
        assert_eq!(offset_of!(EpAttr, max_msg_size), 16);
        assert_eq!(offset_of!(EpAttr, rx_ctx_cnt), 72);
        assert_eq!((size_of::<FiMsg>(), offset_of!(FiMsg, context)), (48, 32));
        assert_eq!((size_of::<FiMsgRma>(), offset_of!(FiMsgRma, context)), (64, 48));
        assert_eq!(size_of::<FiRmaIov>(), 24);
        assert_eq!(offset_of!(DomainAttr, mr_mode), 36);
        assert_eq!(offset_of!(DomainAttr, mr_key_size), 40);
        assert_eq!(size_of::<FabricAttr>(), 32);
        assert_eq!(size_of::<Fid>(), 24);
        assert_eq!(offset_of!(FidEp, rma), 48);
        assert_eq!(offset_of!(FidPep, cm), 32);
        assert_eq!(size_of::<FidMr>(), 40);
        assert_eq!(size_of::<FidDomain>(), 40);
        assert_eq!(size_of::<EqAttr>(), 32);
        assert_eq!(size_of::<CqAttr>(), 40);
        assert_eq!(size_of::<EqCmEntry>(), 16);
        assert_eq!(size_of::<EqErrEntry>(), 48);
        assert_eq!(size_of::<CqMsgEntry>(), 24);
        assert_eq!(offset_of!(CqErrEntry, err), 56);
        assert_eq!(offset_of!(CqErrEntry, err_data_size), 72);
        assert_eq!(offset_of!(CqErrEntry, later), 80);
    }

    #[test]
    fn function_pointers_have_the_same_offsets_as_in_the_c_headers() {
        let word = size_of::<usize>();
        assert_eq!(offset_of!(FidOps, control), 3 * word);
        assert_eq!(offset_of!(FabricOps, trywait), 5 * word);
        assert_eq!(offset_of!(DomainOps, endpoint), 3 * word);
        assert_eq!(offset_of!(DomainOps, srx_ctx), 8 * word);
        assert_eq!(offset_of!(MrOps, reg), word);
        assert_eq!(offset_of!(EpOps, getopt), 2 * word);
        assert_eq!(offset_of!(CmOps, getname), 2 * word);
        assert_eq!(offset_of!(CmOps, reject), 7 * word);
        assert_eq!(offset_of!(MsgOps, send), 4 * word);
        assert_eq!(offset_of!(MsgOps, sendmsg), 6 * word);
        assert_eq!(offset_of!(RmaOps, readmsg), 3 * word);
        assert_eq!(offset_of!(RmaOps, write), 4 * word);
        assert_eq!(offset_of!(RmaOps, writemsg), 6 * word);
        assert_eq!(offset_of!(EqOps, readerr), 2 * word);
        assert_eq!(offset_of!(CqOps, readerr), 3 * word);
    }
}
