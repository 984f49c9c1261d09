//! Requests of the guest, and what their results are.

use std::sync::Arc;

use disk::{Disk, MemDisk};

use super::back_end::BackEnd;
use super::front_end::*;
use super::guest::GuestQueue;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const DISK: u64 = 8 << 20;

fn device(without: u64) -> (BackEnd, FrontEnd, GuestQueue) {
    let (back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(DISK)));
    let front_end = FrontEnd::connect(stream, without, 0);
    front_end.share_memory();
    let queue = front_end.start_queue(0, 128);
    (back_end, front_end, queue)
}

/// Executes one request. Returns its status and the number of bytes written.
fn execute(queue: &mut GuestQueue, request: &BlkBuffers) -> (u8, u32) {
    let head = queue.put(&request.buffers);
    queue.notify();
    let (done, written) = queue.wait();
    assert_eq!(done, head);
    (request.status(queue), written)
}

fn write(queue: &mut GuestQueue, sector: u64, data: &[u8]) -> u8 {
    let request = request(queue, DATA, 1, sector, data.len() as u32, false);
    request.set_data(queue, data);
    let (status, written) = execute(queue, &request);
    assert_eq!(written, 1);
    status
}

fn read(queue: &mut GuestQueue, sector: u64, len: u32) -> (u8, Vec<u8>) {
    let request = request(queue, DATA, 0, sector, len, true);
    let (status, written) = execute(queue, &request);
    assert_eq!(written, if status == OK { len + 1 } else { 1 });
    (status, request.data(queue))
}

/// A range to discard or to zero.
fn range(sector: u64, blocks: u32, flags: u32) -> Vec<u8> {
    [sector.to_le_bytes().to_vec(), blocks.to_le_bytes().to_vec(), flags.to_le_bytes().to_vec()].concat()
}

fn clear(queue: &mut GuestQueue, kind: u32, ranges: &[u8]) -> u8 {
    let request = request(queue, DATA, kind, 0, ranges.len() as u32, false);
    request.set_data(queue, ranges);
    execute(queue, &request).0
}

#[test]
fn data_that_was_written_is_read() {
    for without in [0, EVENT_IDX, INDIRECT_DESC | EVENT_IDX] {
        let (_back_end, _front_end, mut queue) = device(without);
        let data: Vec<u8> = (0..12_288u32).map(|at| (at % 251) as u8).collect();
        assert_eq!(write(&mut queue, 8, &data), OK);
        assert_eq!(read(&mut queue, 8, 12_288), (OK, data.clone()));
        assert_eq!(read(&mut queue, 9, 512), (OK, data[512..1024].to_vec()));
        assert_eq!(read(&mut queue, 1000, 512), (OK, vec![0; 512]));
        let flush = request(&queue, DATA, 4, 0, 0, false);
        assert_eq!(execute(&mut queue, &flush), (OK, 1));
    }
}

#[test]
fn the_serial_number_is_padded_with_zeros() {
    let (_back_end, _front_end, mut queue) = device(0);
    let id = request(&queue, DATA, 8, 0, 20, true);
    assert_eq!(execute(&mut queue, &id), (OK, 21));
    assert_eq!(id.data(&queue), b"memory\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    let short = request(&queue, DATA, 8, 0, 19, true);
    assert_eq!(execute(&mut queue, &short).0, IO_ERROR);
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let (_back_end, _front_end, mut queue) = device(0);
    assert_eq!(write(&mut queue, 0, &[7; 8192]), OK);
    assert_eq!(clear(&mut queue, 11, &range(1, 2, 0)), OK);
    let two = [range(4, 1, 0), range(6, 1, 1)].concat();
    assert_eq!(clear(&mut queue, 13, &two), OK);
    let expected: Vec<u8> =
        (0..16).flat_map(|s| [if [1, 2, 4, 6].contains(&s) { 0 } else { 7 }; 512]).collect();
    assert_eq!(read(&mut queue, 0, 8192), (OK, expected));
}

#[test]
fn invalid_requests_have_a_status_and_the_queue_goes_on() {
    let (_back_end, _front_end, mut queue) = device(0);
    let last = DISK / 512;
    assert_eq!(read(&mut queue, last, 512).0, IO_ERROR);
    assert_eq!(read(&mut queue, last - 1, 1024).0, IO_ERROR);
    assert_eq!(read(&mut queue, u64::MAX, 512).0, IO_ERROR);
    assert_eq!(read(&mut queue, 0, 100).0, IO_ERROR);
    assert_eq!(write(&mut queue, last, &[1; 512]), IO_ERROR);
    let unknown = request(&queue, DATA, 999, 0, 512, true);
    assert_eq!(execute(&mut queue, &unknown), (UNSUPPORTED, 1));
    assert_eq!(clear(&mut queue, 11, &range(0, 1, 1)), UNSUPPORTED);
    assert_eq!(clear(&mut queue, 13, &range(0, 1, 2)), UNSUPPORTED);
    assert_eq!(clear(&mut queue, 13, &range(last, 1, 0)), IO_ERROR);
    assert_eq!(clear(&mut queue, 11, &range(0, u32::MAX, 0)), IO_ERROR);
    assert_eq!(clear(&mut queue, 11, &range(u64::MAX, 1, 0)), IO_ERROR);
    assert_eq!(clear(&mut queue, 11, &[0; 15]), IO_ERROR);
    assert_eq!(clear(&mut queue, 11, &range(0, 0, 0).repeat(33)), IO_ERROR);
    assert_eq!(read(&mut queue, 0, 512), (OK, vec![0; 512]));
}

#[test]
fn a_request_longer_than_the_limit_is_an_io_error() {
    let (back_end, stream) = BackEnd::start(Arc::new(MemDisk::new(1 << 30)));
    let front_end = FrontEnd::connect(stream, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    // 12 buffers of 3 MiB over the same memory.
    let mut long = request(&queue, DATA, 0, 0, 3 << 20, true);
    let data = long.buffers[1];
    (0..11).for_each(|_| long.buffers.insert(1, data));
    assert_eq!(execute(&mut queue, &long).0, IO_ERROR);
    long.buffers.drain(1..3);
    assert_eq!(execute(&mut queue, &long), (OK, (30 << 20) + 1));
    drop(front_end);
    back_end.end().unwrap();
}

#[test]
fn header_data_and_status_may_be_divided_in_any_way() {
    let (_back_end, _front_end, mut queue) = device(0);
    assert_eq!(write(&mut queue, 0, &[5; 1024]), OK);
    let mut read = request(&queue, DATA, 0, 0, 1024, true);
    let status_after_data = DATA + 4096 + 1024;
    queue.store(status_after_data, [0xff]);
    // The header is divided, and one buffer has the rest of the data and the status.
    read.buffers = vec![
        (DATA, 3, false),
        (DATA + 3, 13, false),
        (DATA + 4096, 700, true),
        (DATA + 4096 + 700, 325, true),
    ];
    queue.put(&read.buffers);
    queue.notify();
    assert_eq!(queue.wait().1, 1025);
    assert_eq!(read.data(&queue), [5; 1024]);
    let at = vm_memory::GuestAddress(status_after_data);
    assert_eq!(vm_memory::Bytes::read_obj::<u8>(&*queue.ram, at).unwrap(), OK);
}

#[test]
fn indirect_requests_fill_the_ring() {
    let (_back_end, front_end, mut queue) = device(0);
    assert_eq!(write(&mut queue, 0, &[9; 512]), OK);
    let requests: Vec<BlkBuffers> = (0..128u64)
        .map(|number| {
            let at = DATA + number * 8192;
            let request = request(&queue, at, 0, 0, 512, true);
            queue.put_indirect(at + 64, &request.buffers);
            request
        })
        .collect();
    queue.notify();
    (0..128).for_each(|_| assert_eq!(queue.wait().1, 513));
    for request in &requests {
        assert_eq!((request.status(&queue), request.data(&queue)), (OK, vec![9; 512]));
    }
    assert_eq!(queue.in_flight(), 0);
    assert_eq!(front_end.stop_queue(0), 129);
}

#[test]
fn queues_work_side_by_side() {
    let (_back_end, front_end, first) = device(0);
    let mut queues = vec![first];
    queues.extend((1..4).map(|number| front_end.start_queue(number, 64)));
    for round in 0..50u64 {
        for (number, queue) in queues.iter_mut().enumerate() {
            let number = number as u64;
            let at = DATA + number * 65536;
            let write = request(queue, at, 1, number * 100 + round, 512, false);
            write.set_data(queue, &[(number * 60 + round) as u8; 512]);
            queue.put(&write.buffers);
            queue.notify();
        }
        for queue in &mut queues {
            queue.wait();
        }
    }
    for number in 0..4u64 {
        let (status, data) = read(&mut queues[3 - number as usize], number * 100, 50 * 512);
        let expected: Vec<u8> = (0..50).flat_map(|round| [(number * 60 + round) as u8; 512]).collect();
        assert_eq!((status, data), (OK, expected));
    }
}

#[test]
fn the_configuration_space_describes_the_disk() {
    let disk = Arc::new(MemDisk::new(DISK));
    let (_back_end, stream) = BackEnd::start(Arc::clone(&disk) as Arc<dyn Disk>);
    let front_end = FrontEnd::connect(stream, 0, 0);
    assert_eq!(front_end.get(17, &[]), 4);
    assert!(front_end.get(36, &[]) >= 8);
    let config = front_end.config(0, 60);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!(front_end.disk_size(), DISK);
    assert_eq!((word(12), word(20), config[24]), (126, 512, 3));
    assert_eq!(&config[32..36], &[0, 0, 4, 0]);
    assert_eq!(front_end.config(20, 4), 512u32.to_le_bytes());
    // Front ends may ask for more than the device has.
    assert_eq!(front_end.config(0, 256)[60..], [0; 196]);
}
