//! A front end that acts as QEMU does: it shares memory, negotiates, and starts queues.
//!
//! The parent module imports `GuestRam` and `MemoryRange`, and has the module `guest`.

#![allow(dead_code, reason = "several programs use parts of this module")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::guest::{Buffer, GuestQueue, RAM_START, USER_DISTANCE, memory_file};
use super::{GuestRam, MemoryRange};

pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT_DESC: u64 = 1 << 28;

/// Features of the protocol.
pub const INFLIGHT_SHMFD: u64 = 1 << 12;
pub const REPLY_ACK: u64 = 1 << 3;

pub const RAM_LEN: u64 = 16 << 20;
/// Start of the memory that tests use for requests.
pub const DATA: u64 = RAM_START + (2 << 20);

pub struct FrontEnd {
    pub stream: UnixStream,
    pub ram: Arc<GuestRam>,
    pub range: MemoryRange,
    pub file: OwnedFd,
    pub event_index: bool,
    pub protocol_features: u64,
}

impl FrontEnd {
    /// Negotiates all features, without those in `without` and `protocol_without`.
    pub fn connect(stream: UnixStream, without: u64, protocol_without: u64) -> FrontEnd {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let (range, file) = memory_file(RAM_START, RAM_LEN);
        let ram = Arc::new(GuestRam::map(&[(range, &file)]).unwrap());
        let mut front_end = FrontEnd { stream, ram, range, file, event_index: false, protocol_features: 0 };
        let features = front_end.get(1, &[]) & !without;
        assert_ne!(features & (VERSION_1 | PROTOCOL_FEATURES), 0);
        let protocol_features = front_end.get(15, &[]) & !protocol_without;
        front_end.send(16, &[protocol_features], &[]);
        front_end.protocol_features = protocol_features;
        front_end.set(3, &[], &[]);
        front_end.set(2, &[features], &[]);
        front_end.event_index = features & EVENT_IDX != 0;
        front_end
    }

    /// Shares the memory by one memory table.
    pub fn share_memory(&self) {
        let MemoryRange { guest_address, size, user_address, file_offset } = self.range;
        self.set(5, &[1, guest_address, size, user_address, file_offset], &[self.file.as_fd()]);
    }

    /// Starts a queue with new rings.
    pub fn start_queue(&self, number: u64, size: u16) -> GuestQueue {
        let queue = GuestQueue::new(Arc::clone(&self.ram), number, size, self.event_index);
        self.set_up(number, &queue, 0);
        queue
    }

    /// Starts a queue whose next request has the index `base`.
    pub fn set_up(&self, number: u64, queue: &GuestQueue, base: u64) {
        self.set(8, &[number | u64::from(queue.size) << 32], &[]);
        let [descriptors, used, available] =
            [queue.start, queue.used_ring(), queue.available_ring()].map(|at| at + USER_DISTANCE);
        self.set(10, &[number | base << 32], &[]);
        self.set(9, &[number, descriptors, used, available, 0], &[]);
        self.set(14, &[number], &[queue.error.as_fd()]);
        self.set(13, &[number], &[queue.call.as_fd()]);
        self.set(12, &[number], &[queue.kick.as_fd()]);
        self.set(18, &[number | 1 << 32], &[]);
    }

    /// Stops a queue. Returns the index of the next request.
    pub fn stop_queue(&self, number: u64) -> u64 {
        let reply = self.get(11, &[number]);
        assert_eq!(reply & 0xffff_ffff, number);
        reply >> 32
    }

    /// Size of the disk in the configuration space, in bytes.
    pub fn disk_size(&self) -> u64 {
        let config = self.config(0, 8);
        u64::from_le_bytes(config.try_into().unwrap()) * 512
    }

    /// Reads a part of the configuration space.
    pub fn config(&self, offset: u32, len: u32) -> Vec<u8> {
        let mut payload: Vec<u8> = [offset, len, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        payload.resize(12 + len as usize, 0);
        self.send_bytes(24, &payload, false, &[]);
        self.receive(24).0[12..].to_vec()
    }

    /// Sends a request that has a reply of 8 bytes.
    pub fn get(&self, request: u32, payload: &[u64]) -> u64 {
        self.send(request, payload, &[]);
        u64::from_ne_bytes(self.receive(request).0.try_into().unwrap())
    }

    /// Sends a request and waits for its acknowledgement, if that was negotiated.
    pub fn set(&self, request: u32, payload: &[u64], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_set(request, payload, fds), 0, "request {request} is refused");
    }

    /// As [`set`](Self::set). Returns the result that was acknowledged.
    pub fn try_set(&self, request: u32, payload: &[u64], fds: &[BorrowedFd<'_>]) -> u64 {
        let bytes: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let has_ack = self.protocol_features & REPLY_ACK != 0;
        self.send_bytes(request, &bytes, has_ack, fds);
        match has_ack {
            true => u64::from_ne_bytes(self.receive(request).0.try_into().unwrap()),
            false => 0,
        }
    }

    pub fn send(&self, request: u32, payload: &[u64], fds: &[BorrowedFd<'_>]) {
        let bytes: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.send_bytes(request, &bytes, false, fds);
    }

    pub fn send_bytes(&self, request: u32, payload: &[u8], needs_reply: bool, fds: &[BorrowedFd<'_>]) {
        let flags = 1 | if needs_reply { 8 } else { 0 };
        let mut message: Vec<u8> =
            [request, flags, payload.len() as u32].into_iter().flat_map(u32::to_ne_bytes).collect();
        message.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        let sent = rustix::net::sendmsg(
            &self.stream,
            &[IoSlice::new(&message)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(sent.unwrap(), message.len());
    }

    /// Receives the reply to a request.
    pub fn receive(&self, request: u32) -> (Vec<u8>, Vec<OwnedFd>) {
        let (number, flags, payload, fds) = receive(&self.stream).expect("the back end replies");
        assert_eq!((number, flags), (request, 1 | 4));
        (payload, fds)
    }

    /// Returns true if the back end has closed the connection.
    pub fn is_closed(&self) -> bool {
        receive(&self.stream).is_none()
    }
}

/// Receives a message: request, flags, payload and file descriptors. Returns `None` at the end of the
/// connection.
pub fn receive(stream: &UnixStream) -> Option<(u32, u32, Vec<u8>, Vec<OwnedFd>)> {
    use std::io::Read;
    let mut header = [0; 12];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut header)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    );
    assert_ne!(
        received.as_ref().err(),
        Some(&rustix::io::Errno::AGAIN),
        "the back end does not reply in time"
    );
    if received.map_or(0, |received| received.bytes) == 0 {
        return None;
    }
    let fds = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    let [request, flags, len] =
        [0, 4, 8].map(|at| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap()));
    let mut payload = vec![0; len as usize];
    (&mut &*stream).read_exact(&mut payload).unwrap();
    Some((request, flags, payload, fds))
}

/// The buffers of a request: header, data and status.
pub struct BlkBuffers {
    pub at: u64,
    pub data_len: u32,
    pub buffers: Vec<Buffer>,
}

/// Builds a request at a place in guest memory: the header, then the status, then the data.
pub fn request(
    queue: &GuestQueue,
    at: u64,
    kind: u32,
    sector: u64,
    data_len: u32,
    is_written: bool,
) -> BlkBuffers {
    queue.store(at, kind.to_le_bytes());
    queue.store(at + 4, [0; 4]);
    queue.store(at + 8, sector.to_le_bytes());
    queue.store(at + 16, [0xff]);
    let mut buffers = vec![(at, 16, false)];
    if data_len > 0 {
        buffers.push((at + 4096, data_len, is_written));
    }
    buffers.push((at + 16, 1, true));
    BlkBuffers { at, data_len, buffers }
}

impl BlkBuffers {
    pub fn status(&self, queue: &GuestQueue) -> u8 {
        use vm_memory::Bytes;
        queue.ram.read_obj(vm_memory::GuestAddress(self.at + 16)).unwrap()
    }

    pub fn data(&self, queue: &GuestQueue) -> Vec<u8> {
        use vm_memory::Bytes;
        let mut data = vec![0; self.data_len as usize];
        queue.ram.read_slice(&mut data, vm_memory::GuestAddress(self.at + 4096)).unwrap();
        data
    }

    pub fn set_data(&self, queue: &GuestQueue, data: &[u8]) {
        use vm_memory::Bytes;
        queue.ram.write_slice(data, vm_memory::GuestAddress(self.at + 4096)).unwrap();
    }
}
