//! The guest's side: memory in one file, and the driver of a split virtqueue.
//!
//! The parent module imports `GuestRam` and `MemoryRange`.

#![allow(dead_code, reason = "several programs use parts of this module")]

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use vm_memory::{Bytes, GuestAddress};

use super::{GuestRam, MemoryRange};

/// Address of the guest's memory in the guest, and the distance to its address in the front end.
pub const RAM_START: u64 = 0x10_0000;
pub const USER_DISTANCE: u64 = 0x7f00_0000_0000;
/// Memory at the start for the rings of each queue.
const RINGS_LEN: u64 = 64 << 10;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// How long a test waits for the device.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// Creates the file and the description of `len` bytes of memory at a guest address.
pub fn memory_file(guest_address: u64, len: u64) -> (MemoryRange, OwnedFd) {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    let user_address = guest_address + USER_DISTANCE;
    (MemoryRange { guest_address, size: len, user_address, file_offset: 0 }, file)
}

pub fn event() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// Waits for an event. Returns false after the test's patience, or at once without patience.
pub fn wait_for(event: &OwnedFd, patience: Option<Timespec>) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(event, PollFlags::IN)];
    let ready = rustix::event::poll(&mut polled, Some(&patience.unwrap_or(at_once))).unwrap() > 0;
    if ready {
        rustix::io::read(event, &mut [0; 8]).unwrap();
    }
    ready
}

/// A buffer of a request: guest address, length, and whether the device writes it.
pub type Buffer = (u64, u32, bool);

/// The driver's side of a queue.
pub struct GuestQueue {
    pub ram: Arc<GuestRam>,
    pub size: u16,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
    /// Address of the rings.
    pub start: u64,
    pub event_index: bool,
    free: Vec<u16>,
    /// Descriptors of the requests in flight, by their heads.
    in_flight: BTreeMap<u16, Vec<u16>>,
    available: u16,
    announced: u16,
    used: u16,
}

impl GuestQueue {
    pub fn new(ram: Arc<GuestRam>, number: u64, size: u16, event_index: bool) -> GuestQueue {
        GuestQueue {
            ram,
            size,
            kick: event(),
            call: event(),
            error: event(),
            start: RAM_START + number * RINGS_LEN,
            event_index,
            free: (0..size).rev().collect(),
            in_flight: BTreeMap::new(),
            available: 0,
            announced: 0,
            used: 0,
        }
    }

    pub fn available_ring(&self) -> u64 {
        self.start + 16 * u64::from(self.size)
    }

    pub fn used_ring(&self) -> u64 {
        (self.available_ring() + 6 + 2 * u64::from(self.size)).next_multiple_of(4096)
    }

    /// Makes a request available, without a notification. Returns its head.
    pub fn put(&mut self, buffers: &[Buffer]) -> u16 {
        let taken = self.free.split_off(self.free.len() - buffers.len());
        for (at, (address, len, is_written)) in buffers.iter().enumerate() {
            let next = taken.get(at + 1);
            let flags = if *is_written { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
            self.describe(self.start, taken[at], *address, *len, flags, next.copied().unwrap_or(0));
        }
        self.offer(taken)
    }

    /// As [`put`](Self::put), by an indirect table at `table`.
    pub fn put_indirect(&mut self, table: u64, buffers: &[Buffer]) -> u16 {
        for (at, (address, len, is_written)) in buffers.iter().enumerate() {
            let is_last = at + 1 == buffers.len();
            let flags = if *is_written { WRITE } else { 0 } | if is_last { 0 } else { NEXT };
            self.describe(table, at as u16, *address, *len, flags, at as u16 + 1);
        }
        let head = self.free.pop().unwrap();
        self.describe(self.start, head, table, 16 * buffers.len() as u32, INDIRECT, 0);
        self.offer(vec![head])
    }

    /// Writes a descriptor.
    pub fn describe(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = table + 16 * u64::from(index);
        self.store(at, address.to_le_bytes());
        self.store(at + 8, len.to_le_bytes());
        self.store(at + 12, flags.to_le_bytes());
        self.store(at + 14, next.to_le_bytes());
    }

    fn offer(&mut self, descriptors: Vec<u16>) -> u16 {
        let head = descriptors[0];
        self.in_flight.insert(head, descriptors);
        self.offer_head(head);
        head
    }

    /// Puts a head into the available ring, even if it is not a free descriptor.
    pub fn offer_head(&mut self, head: u16) {
        let at = self.available_ring() + 4 + 2 * u64::from(self.available % self.size);
        self.store(at, head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
    }

    /// Publishes the index of the available ring. Returns true if the device wants a notification.
    pub fn publish(&mut self) -> bool {
        self.publish_index(self.available);
        fence(Ordering::SeqCst);
        let (old, new) = (self.announced, self.available);
        self.announced = new;
        if self.event_index {
            let event = self.load(self.used_ring() + 4 + 8 * u64::from(self.size));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.load(self.used_ring()) & 1 == 0
        }
    }

    pub fn publish_index(&self, index: u16) {
        let at = GuestAddress(self.available_ring() + 2);
        self.ram.store(index.to_le(), at, Ordering::Release).unwrap();
    }

    /// Publishes the requests and notifies the device if it wants that.
    pub fn notify(&mut self) {
        if self.publish() {
            self.notify_always();
        }
    }

    pub fn notify_always(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Takes the next completion: the head and the number of bytes written.
    pub fn completed(&mut self) -> Option<(u16, u32)> {
        let index: u16 = self.load(self.used_ring() + 2);
        if u16::from_le(index) == self.used {
            return None;
        }
        let at = self.used_ring() + 4 + 8 * u64::from(self.used % self.size);
        let head: u32 = self.ram.read_obj(GuestAddress(at)).unwrap();
        let len: u32 = self.ram.read_obj(GuestAddress(at + 4)).unwrap();
        self.used = self.used.wrapping_add(1);
        let head = u16::try_from(u32::from_le(head)).unwrap();
        let descriptors = self.in_flight.remove(&head).expect("a request in flight completes once");
        self.free.extend(descriptors);
        Some((head, u32::from_le(len)))
    }

    /// Asks for a notification of the next completion.
    pub fn want_call(&self) {
        let at = GuestAddress(self.available_ring() + 4 + 2 * u64::from(self.size));
        self.ram.store(self.used.to_le(), at, Ordering::Relaxed).unwrap();
        fence(Ordering::SeqCst);
    }

    /// Waits for the next completion.
    pub fn wait(&mut self) -> (u16, u32) {
        loop {
            if let Some(done) = self.completed() {
                return done;
            }
            self.want_call();
            if let Some(done) = self.completed() {
                return done;
            }
            assert!(wait_for(&self.call, Some(PATIENCE)), "the device does not complete a request");
        }
    }

    /// Number of requests that are not complete.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Number of free descriptors.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn store<const N: usize>(&self, at: u64, bytes: [u8; N]) {
        self.ram.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    fn load(&self, at: u64) -> u16 {
        self.ram.load(GuestAddress(at), Ordering::Acquire).unwrap()
    }
}
