//! Starting, stopping and restarting, and changes of the disk and the memory.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use disk::{Disk, MemDisk};
use vhost::memory::GuestRam;

use super::back_end::{BackEnd, Gated, GatedDisk};
use super::front_end::*;
use super::guest::{GuestQueue, RAM_START, USER_DISTANCE, memory_file};

const DISK: u64 = 8 << 20;

#[test]
fn the_front_end_learns_that_the_size_has_changed() {
    let disk = GatedDisk::new(DISK);
    let (_back_end, stream) = BackEnd::start(Arc::new(Gated(Arc::clone(&disk))));
    let front_end = FrontEnd::connect(stream, 0, 0);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    front_end.set(21, &[], &[theirs.as_fd()]);
    drop(theirs);
    disk.disk.resize(2 * DISK);
    let (request, flags, payload, _) = receive(&ours).unwrap();
    assert_eq!((request, flags, payload.len()), (2, 1, 0));
    assert_eq!(front_end.disk_size(), 2 * DISK);
}

#[test]
fn a_stop_waits_for_requests_in_flight_and_a_start_goes_on() {
    let disk = GatedDisk::new(DISK);
    let (_back_end, stream) = BackEnd::start(Arc::new(Gated(Arc::clone(&disk))));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    disk.set_open(false);
    for number in 0..3 {
        let write = request(&queue, DATA + number * 8192, 1, number, 512, false);
        queue.put(&write.buffers);
    }
    queue.notify();
    disk.wait_for_started(3);
    front_end.send(11, &[0], &[]);
    // The reply comes after the requests, which are held back.
    front_end.stream.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let peeked = rustix::net::recv(&front_end.stream, &mut [0; 1][..], rustix::net::RecvFlags::PEEK);
    assert_eq!(peeked.err(), Some(rustix::io::Errno::AGAIN));
    front_end.stream.set_nonblocking(false).unwrap();
    disk.set_open(true);
    let reply = u64::from_ne_bytes(front_end.receive(11).0.try_into().unwrap());
    assert_eq!(reply >> 32, 3);
    assert_eq!(std::iter::from_fn(|| queue.completed()).count(), 3);
    // Requests while the queue is stopped wait for its start.
    let write = request(&queue, DATA, 1, 0, 512, false);
    queue.put(&write.buffers);
    queue.publish();
    front_end.set_up(0, &queue, 3);
    queue.wait();
    assert_eq!(write.status(&queue), 0);
}

#[test]
fn a_front_end_that_leaves_during_a_stop_ends_the_device() {
    let disk = GatedDisk::new(DISK);
    let (back_end, stream) = BackEnd::start(Arc::new(Gated(Arc::clone(&disk))));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    disk.set_open(false);
    let write = request(&queue, DATA, 1, 0, 512, false);
    queue.put(&write.buffers);
    queue.notify();
    disk.wait_for_started(1);
    front_end.send(11, &[0], &[]);
    drop(front_end);
    back_end.end().unwrap();
}

#[test]
fn a_disabled_queue_rests_until_it_is_enabled() {
    let (_back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 16);
    front_end.set(18, &[0], &[]);
    let flush = request(&queue, DATA, 4, 0, 0, false);
    queue.put(&flush.buffers);
    queue.publish();
    queue.notify_always();
    // The device handles messages in order, so it would have seen the notification.
    front_end.get(17, &[]);
    assert!(queue.completed().is_none());
    front_end.set(18, &[1 << 32], &[]);
    queue.wait();
}

#[test]
fn memory_is_added_and_removed_while_queues_run() {
    let (_back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    let words = |range: vhost::memory::MemoryRange| {
        [0, range.guest_address, range.size, range.user_address, range.file_offset]
    };
    front_end.set(37, &words(front_end.range), &[front_end.file.as_fd()]);
    let mut queue = front_end.start_queue(0, 128);
    let (range, file) = memory_file(1 << 40, 1 << 20);
    front_end.set(37, &words(range), &[file.as_fd()]);
    let both = [(front_end.range, &front_end.file), (range, &file)];
    queue.ram = Arc::new(GuestRam::map(&both).unwrap());
    for _ in 0..3 {
        let write = request(&queue, range.guest_address, 1, 0, 4096, false);
        queue.put(&write.buffers);
        queue.notify();
        queue.wait();
        assert_eq!(write.status(&queue), 0);
    }
    // The same memory again, and memory after the end of the file, are refused.
    assert_eq!(front_end.try_set(37, &words(range), &[file.as_fd()]), 1);
    let beyond =
        vhost::memory::MemoryRange { guest_address: 1 << 41, user_address: 1 << 50, size: 2 << 20, ..range };
    assert_eq!(front_end.try_set(37, &words(beyond), &[file.as_fd()]), 1);
    front_end.set(38, &words(range), &[]);
    assert_eq!(front_end.try_set(38, &words(range), &[]), 1);
    let flush = request(&queue, DATA, 4, 0, 0, false);
    queue.put(&flush.buffers);
    queue.notify();
    queue.wait();
    let lost = request(&queue, range.guest_address, 4, 0, 0, false);
    queue.put(&lost.buffers);
    queue.notify();
    assert!(super::guest::wait_for(&queue.error, Some(rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 })));
}

#[test]
fn the_parameters_of_a_queue_may_come_in_any_order() {
    let (_back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    let mut queue = GuestQueue::new(Arc::clone(&front_end.ram), 0, 128, front_end.event_index);
    front_end.set(18, &[1 << 32], &[]);
    front_end.set(12, &[0], &[queue.kick.as_fd()]);
    front_end.set(13, &[0], &[queue.call.as_fd()]);
    front_end.set(8, &[128 << 32], &[]);
    let [descriptors, used, available] =
        [queue.start, queue.used_ring(), queue.available_ring()].map(|at| at + USER_DISTANCE);
    front_end.set(9, &[0, descriptors, used, available, 0], &[]);
    front_end.share_memory();
    let flush = request(&queue, DATA, 4, 0, 0, false);
    queue.put(&flush.buffers);
    queue.notify();
    assert_eq!(queue.wait().1, 1);
}

/// Kills the back end while requests are in flight, and restarts it.
fn restart_with_requests_in_flight(protocol_without: u64) {
    let disk = GatedDisk::new(DISK);
    let gated = || Arc::new(Gated(Arc::clone(&disk))) as Arc<dyn Disk>;
    let (mut back_end, stream) = BackEnd::start(gated());
    let front_end = FrontEnd::connect(stream, 0, protocol_without);
    front_end.share_memory();
    if front_end.protocol_features & INFLIGHT_SHMFD != 0 {
        let payload = [[0; 16].as_slice(), &[4, 0, 128, 0], &[0; 4]].concat();
        front_end.send_bytes(31, &payload, false, &[]);
        let (place, fds) = front_end.receive(31);
        front_end.send_bytes(32, &place, true, &[fds[0].as_fd()]);
        assert_eq!(front_end.receive(32).0, [0; 8]);
    }
    let mut queues = [front_end.start_queue(0, 128), front_end.start_queue(1, 32)];
    let mut started = 0;
    for round in 0..5u64 {
        disk.set_open(false);
        let mut writes = Vec::new();
        for (number, queue) in queues.iter_mut().enumerate() {
            for request_number in 0..5 {
                let sector = number as u64 * 1000 + round * 10 + request_number;
                let at = DATA + sector * 8192;
                let write = request(queue, at, 1, sector, 512, false);
                write.set_data(queue, &[sector as u8; 512]);
                queue.put(&write.buffers);
                writes.push((number, write));
            }
            queue.notify();
        }
        started += 10;
        disk.wait_for_started(started);
        back_end.kill();
        // Requests that arrive while no back end runs are executed later.
        for (number, queue) in queues.iter_mut().enumerate() {
            let sector = number as u64 * 1000 + round * 10 + 5;
            let write = request(queue, DATA + sector * 8192, 1, sector, 512, false);
            write.set_data(queue, &[sector as u8; 512]);
            queue.put(&write.buffers);
            queue.notify();
            writes.push((number, write));
        }
        back_end.resume(gated());
        started += 12;
        disk.wait_for_started(started);
        assert!(queues.iter_mut().all(|queue| queue.completed().is_none()));
        disk.set_open(true);
        for queue in &mut queues {
            (0..6).for_each(|_| assert_eq!(queue.wait().1, 1));
            assert!(queue.completed().is_none() && queue.in_flight() == 0);
        }
        assert!(writes.iter().all(|(number, write)| write.status(&queues[*number]) == 0));
    }
    for number in 0..2u64 {
        assert_eq!(front_end.stop_queue(number), 30);
        for sector in (0..50).filter(|sector| sector % 10 < 6) {
            let sector = number * 1000 + sector;
            let data = futures::executor::block_on(disk.disk.read(sector * 512, 512)).unwrap().concat();
            assert_eq!(data, [sector as u8; 512]);
        }
    }
    drop(front_end);
    back_end.end().unwrap();
}

#[test]
fn a_restart_executes_requests_in_flight_by_the_record_of_the_front_end() {
    restart_with_requests_in_flight(0);
}

#[test]
fn a_restart_executes_requests_in_flight_without_a_record_of_the_front_end() {
    restart_with_requests_in_flight(INFLIGHT_SHMFD);
}

#[test]
fn a_message_that_was_not_answered_is_handled_after_a_restart() {
    let disk = GatedDisk::new(DISK);
    let gated = || Arc::new(Gated(Arc::clone(&disk))) as Arc<dyn Disk>;
    let (mut back_end, stream) = BackEnd::start(gated());
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    disk.set_open(false);
    let write = request(&queue, DATA, 1, 0, 512, false);
    queue.put(&write.buffers);
    queue.notify();
    disk.wait_for_started(1);
    front_end.send(11, &[0], &[]);
    // The back end waits for the request when it is killed.
    std::thread::sleep(Duration::from_millis(50));
    back_end.kill();
    back_end.resume(gated());
    disk.wait_for_started(2);
    disk.set_open(true);
    let reply = u64::from_ne_bytes(front_end.receive(11).0.try_into().unwrap());
    assert_eq!(reply >> 32, 1);
    assert_eq!(queue.wait().1, 1);
}

#[test]
fn a_restarted_back_end_announces_the_size_of_its_disk() {
    let disk = GatedDisk::new(DISK);
    let gated = || Arc::new(Gated(Arc::clone(&disk))) as Arc<dyn Disk>;
    let (mut back_end, stream) = BackEnd::start(gated());
    let front_end = FrontEnd::connect(stream, 0, 0);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    front_end.set(21, &[], &[theirs.as_fd()]);
    back_end.kill();
    disk.disk.resize(3 * DISK);
    back_end.resume(gated());
    assert_eq!(receive(&ours).unwrap().0, 2);
    assert_eq!(front_end.disk_size(), 3 * DISK);
}

#[test]
fn a_reset_stops_all_queues() {
    let (_back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    front_end.set(34, &[], &[]);
    let flush = request(&queue, DATA, 4, 0, 0, false);
    queue.put(&flush.buffers);
    queue.publish();
    queue.notify_always();
    front_end.get(17, &[]);
    assert!(queue.completed().is_none());
    front_end.set(2, &[VERSION_1 | PROTOCOL_FEATURES | EVENT_IDX], &[]);
    front_end.set_up(0, &queue, 0);
    queue.wait();
    assert_eq!(RAM_START, front_end.range.guest_address);
}
