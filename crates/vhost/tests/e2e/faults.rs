//! Defective and malicious front ends and guests. They cost their own device only.

use std::os::fd::AsFd;
use std::sync::Arc;

use disk::{Disk, MemDisk};
use proptest::prelude::*;
use rustix::event::Timespec;
use vhost::{DeviceView, VhostError, VhostSession};

use super::back_end::{BackEnd, Gated, GatedDisk};
use super::front_end::*;
use super::guest::{GuestQueue, NEXT, wait_for};

const DISK: u64 = 8 << 20;
const PATIENCE: Option<Timespec> = Some(Timespec { tv_sec: 30, tv_nsec: 0 });

fn device() -> (BackEnd, FrontEnd, GuestQueue) {
    let (back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let queue = front_end.start_queue(0, 128);
    (back_end, front_end, queue)
}

#[test]
fn shrunk_memory_ends_its_device_only() {
    let disk = GatedDisk::new(DISK);
    let (back_end, stream) = BackEnd::start(Arc::new(Gated(Arc::clone(&disk))));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    let (_other_back_end, _other, mut other_queue) = device();
    disk.set_open(false);
    for number in 0..8 {
        let write = request(&queue, DATA + number * 8192, 1, number, 4096, false);
        write.set_data(&queue, &[7; 4096]);
        queue.put(&write.buffers);
    }
    queue.notify();
    disk.wait_for_started(8);
    rustix::fs::ftruncate(&front_end.file, 2 << 20).unwrap();
    disk.set_open(true);
    assert!(matches!(back_end.end(), Err(VhostError::Memory(_))));
    assert!(wait_for(&queue.error, PATIENCE));
    // Zeros in place of lost memory were not written to the disk.
    let data = futures::executor::block_on(disk.disk.extents(0, DISK)).unwrap();
    assert!(data.iter().all(|extent| !extent.has_data));
    let flush = request(&other_queue, DATA, 4, 0, 0, false);
    other_queue.put(&flush.buffers);
    other_queue.notify();
    other_queue.wait();
}

#[test]
fn lost_rings_end_the_device() {
    let (back_end, front_end, queue) = device();
    rustix::fs::ftruncate(&front_end.file, 0).unwrap();
    queue.notify_always();
    assert!(matches!(back_end.end(), Err(VhostError::Memory(_))));
}

#[test]
fn a_defective_driver_breaks_its_queue_only() {
    let (_back_end, front_end, mut queue) = device();
    let mut other = front_end.start_queue(1, 128);
    queue.describe(queue.start, 0, DATA, 16, NEXT, 1);
    queue.describe(queue.start, 1, DATA, 16, NEXT, 0);
    queue.offer_head(0);
    queue.notify();
    assert!(wait_for(&queue.error, PATIENCE));
    let flush = request(&other, DATA, 4, 0, 0, false);
    other.put(&flush.buffers);
    other.notify();
    other.wait();
    // The front end can stop the queue, and start it with new rings.
    front_end.stop_queue(0);
    queue = front_end.start_queue(0, 128);
    queue.store(queue.used_ring(), [0; 4]);
    queue.publish_index(0);
    front_end.stop_queue(0);
    front_end.set_up(0, &queue, 0);
    let flush = request(&queue, DATA, 4, 0, 0, false);
    queue.put(&flush.buffers);
    queue.publish();
    queue.notify_always();
    queue.wait();
}

#[test]
fn an_index_far_ahead_breaks_the_queue() {
    let (_back_end, _front_end, queue) = device();
    queue.publish_index(5000);
    queue.notify_always();
    assert!(wait_for(&queue.error, PATIENCE));
}

#[test]
fn a_request_without_header_or_status_breaks_the_queue() {
    for buffers in [vec![(DATA, 16, false)], vec![(DATA, 15, false), (DATA + 100, 1, true)]] {
        let (_back_end, _front_end, mut queue) = device();
        queue.put(&buffers);
        queue.notify();
        assert!(wait_for(&queue.error, PATIENCE));
    }
}

#[test]
fn rings_outside_guest_memory_do_not_start() {
    let (_back_end, front_end, _queue) = device();
    let queue = GuestQueue::new(Arc::clone(&front_end.ram), 1, 128, true);
    front_end.set(9, &[1, 0x1000, 0x2000, 0x3000, 0], &[]);
    front_end.set(14, &[1], &[queue.error.as_fd()]);
    front_end.set(12, &[1], &[queue.kick.as_fd()]);
    front_end.set(18, &[1 | 1 << 32], &[]);
    assert!(wait_for(&queue.error, PATIENCE));
    front_end.stop_queue(1);
}

#[test]
fn a_violation_of_the_protocol_ends_the_device() {
    type Violation = (u32, &'static [u64]);
    let violations: [Violation; 10] = [
        (2, &[1 << 63]),
        (16, &[1 << 63]),
        (8, &[3 << 32]),
        (8, &[2048 << 32]),
        (8, &[4 | 128 << 32]),
        (10, &[65536 << 32]),
        (12, &[256]),
        (12, &[0]),
        (1000, &[]),
        (5, &[9]),
    ];
    for (request, payload) in violations {
        let (back_end, front_end, _queue) = device();
        front_end.send(request, payload, &[]);
        let ended = back_end.end();
        assert!(matches!(ended, Err(VhostError::Protocol(_))), "{request} {payload:?}: {ended:?}");
        assert!(front_end.is_closed());
    }
}

#[test]
fn a_damaged_state_is_refused() {
    let (mut back_end, _front_end, _queue) = device();
    back_end.kill();
    let held = back_end.held.lock().unwrap();
    let state = held.state.as_ref().unwrap();
    assert!(VhostSession::restore(state, Vec::new()).is_err());
    assert!(VhostSession::restore(&state[..state.len() - 1], Vec::new()).is_err());
    assert!(VhostSession::restore(&[], Vec::new()).is_err());
}

fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, 1 | 8, payload.len() as u32].into_iter().flat_map(u32::to_ne_bytes);
    header.chain(payload.iter().copied()).collect()
}

proptest! {
    #[test]
    fn any_sequence_of_messages_keeps_the_session_restorable(
        messages in prop::collection::vec(
            (0u32..40, prop::collection::vec(prop::sample::select(vec![0u8, 1, 2, 16, 128, 255]), 0..48), 0usize..3),
            1..40,
        ),
    ) {
        let mut session = VhostSession::new(2);
        let mut kept = std::collections::BTreeMap::new();
        let features = [(1 << 3 | 1u64 << 12).to_ne_bytes()].concat();
        let first = message(16, &features);
        for bytes in std::iter::once((first, 0)).chain(messages.into_iter().map(|(request, payload, fds)| {
            // Most requests have payloads of whole words.
            let len = payload.len() - payload.len() % 8;
            (message(request, &payload[..len]), fds)
        })) {
            let (bytes, fds) = bytes;
            let fds = (0..fds).map(|_| super::guest::memory_file(0, 1 << 16).1).collect();
            let view = DeviceView { size: 1 << 20, ..DeviceView::default() };
            let Ok(answer) = session.handle(&bytes, fds, &view) else { continue };
            for (key, fd) in answer.keep {
                prop_assert!(kept.insert(key, fd).is_none());
            }
            for key in answer.drop {
                prop_assert!(kept.remove(&key).is_some());
            }
            let fds = kept.iter().map(|(key, fd)| (*key, fd.try_clone().unwrap())).collect();
            let restored = VhostSession::restore(&answer.state, fds).unwrap();
            prop_assert_eq!(format!("{restored:?}"), format!("{session:?}"));
        }
    }
}

#[test]
fn disks_are_shared_between_devices() {
    let disk: Arc<dyn Disk> = Arc::new(MemDisk::new(DISK));
    let front_ends: Vec<_> = (0..3)
        .map(|_| {
            let (back_end, stream) = BackEnd::start(Arc::clone(&disk));
            let front_end = FrontEnd::connect(stream, 0, 0);
            assert_eq!(front_end.disk_size(), DISK);
            (back_end, front_end)
        })
        .collect();
    for (back_end, front_end) in front_ends {
        drop(front_end);
        back_end.end().unwrap();
    }
}
