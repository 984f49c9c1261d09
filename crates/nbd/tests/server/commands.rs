//! The commands of the transmission, and the refusals of each.

use std::sync::Arc;

use disk::{Disk, DiskError, MemDisk};
use tokio::io::AsyncReadExt;

use crate::client::*;
use crate::disks::{SLOW_END, TestDisk};
use crate::{SIZE, exports, start};

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ seed).collect()
}

#[tokio::test]
async fn a_read_returns_what_was_written() {
    let (mut client, _task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    let data = pattern(300 << 10, 3);
    assert_eq!(client.call(write(7, 4096, &data)).await, Reply::Simple { cookie: 7, errno: 0 });
    assert_eq!(client.read(4096, 300 << 10).await, data);
    let whole = Request { flags: DONT_FRAGMENT | FUA, ..request(READ, 8, 0, 8192) };
    let expected = [&[0; 4096], &data[..4096]].concat();
    assert_eq!(client.call(whole).await, Reply::Data { cookie: 8, offset: 0, data: expected });
}

#[tokio::test]
async fn a_simple_reply_carries_the_data_of_a_read() {
    let (mut client, _task) = Client::connect(Arc::new(MemDisk::new(SIZE)), false).await;
    let data = pattern(1024, 9);
    assert_eq!(client.errno(write(1, 512, &data)).await, 0);
    assert_eq!(client.call(request(READ, 2, 512, 1024)).await, Reply::Simple { cookie: 2, errno: 0 });
    let mut content = vec![0; 1024];
    client.stream.read_exact(&mut content).await.unwrap();
    assert_eq!(content, data);
    // No data follows an error.
    assert_eq!(client.errno(request(READ, 3, SIZE, 512)).await, EINVAL);
    assert_eq!(client.errno(request(FLUSH, 4, 0, 0)).await, 0);
}

#[tokio::test]
async fn trim_and_write_zeroes_make_ranges_read_as_zeros() {
    let disk = Arc::new(MemDisk::new(SIZE));
    let (mut client, _task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
    client.call(write(1, 0, &[5; 4096])).await;
    assert_eq!(client.errno(Request { flags: FUA, ..request(TRIM, 2, 0, 512) }).await, 0);
    assert_eq!(client.errno(request(WRITE_ZEROES, 3, 1024, 512)).await, 0);
    let kept = Request { flags: NO_HOLE | FUA, ..request(WRITE_ZEROES, 4, 2048, 512) };
    assert_eq!(client.errno(kept).await, 0);
    let content = client.read(0, 4096).await;
    for (block, content) in content.chunks(512).enumerate() {
        assert_eq!(content.iter().all(|byte| *byte == 0), [0, 2, 4].contains(&block), "block {block}");
    }
    let extents: Vec<_> = disk.extents(0, 4096).await.unwrap().iter().map(|e| (e.len, e.has_data)).collect();
    assert_eq!(extents, [(512, false), (512, true), (512, false), (2560, true)]);
}

#[tokio::test]
async fn block_status_states_which_ranges_have_data() {
    let (mut client, _task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    client.call(write(1, 1024, &[5; 512])).await;
    let status = |cookie, extents: &[(u32, u32)]| Reply::Status { cookie, extents: extents.to_vec() };
    assert_eq!(
        client.call(request(BLOCK_STATUS, 2, 0, 4096)).await,
        status(2, &[(1024, 3), (512, 0), (2560, 3)])
    );
    let one = Request { flags: REQUEST_ONE, ..request(BLOCK_STATUS, 3, 512, 4096) };
    assert_eq!(client.call(one).await, status(3, &[(512, 3)]));
    assert_eq!(client.call(request(BLOCK_STATUS, 4, 1024, 512)).await, status(4, &[(512, 0)]));
    assert_eq!(client.errno(request(BLOCK_STATUS, 5, SIZE - 512, 1024)).await, EINVAL);
    let rest = client.call(request(BLOCK_STATUS, 6, 4096, (SIZE - 4096) as u32)).await;
    assert_eq!(rest, status(6, &[((SIZE - 4096) as u32, 3)]));
}

#[tokio::test]
async fn the_status_of_a_long_range_is_truncated() {
    let size = 8 << 30;
    let (mut client, _task) = Client::connect(Arc::new(disk::NullDisk::new(size)), true).await;
    let Reply::Status { extents, .. } = client.call(request(BLOCK_STATUS, 1, 0, 4 << 29)).await else {
        panic!("the status was refused");
    };
    assert_eq!(extents, [(128 << 20, 3)]);
    let behind_end = request(BLOCK_STATUS, 2, size - 4096, 1 << 30);
    assert_eq!(client.errno(behind_end).await, EINVAL, "the whole range is checked");
}

#[tokio::test]
async fn a_range_outside_the_disk_is_refused() {
    let (mut client, _task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    assert_eq!(client.errno(write(1, SIZE - 512, &[1; 1024])).await, ENOSPC);
    assert_eq!(client.errno(write(1, u64::MAX - 511, &[1; 1024])).await, ENOSPC);
    assert_eq!(client.errno(request(WRITE_ZEROES, 2, SIZE, 512)).await, ENOSPC);
    assert_eq!(client.errno(request(TRIM, 3, SIZE, 512)).await, EINVAL);
    assert_eq!(client.errno(request(READ, 4, SIZE, 512)).await, EINVAL);
    assert_eq!(client.errno(write(5, 0, &[1; 100])).await, EINVAL, "half a block");
    assert_eq!(client.errno(request(READ, 6, 1, 512)).await, EINVAL, "not at a block");
    assert_eq!(client.read(SIZE - 512, 512).await, [0; 512]);
}

#[tokio::test]
async fn the_disk_checks_ranges_after_a_resize() {
    let disk = Arc::new(MemDisk::new(SIZE));
    let (mut client, _task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
    disk.resize(2 * SIZE);
    assert_eq!(client.errno(write(1, SIZE, &[1; 512])).await, 0);
    disk.resize(4096);
    assert_eq!(client.errno(write(1, 4096, &[1; 512])).await, ENOSPC);
}

#[tokio::test]
async fn a_read_only_export_refuses_changes() {
    let mut exports = exports(Arc::new(MemDisk::new(SIZE)));
    exports.get_mut("disk").unwrap().is_read_only = true;
    let (stream, _task) = start(exports, nbd::NbdLimits::default());
    let mut client = Client::greet(stream).await;
    client.enter(true).await;
    assert_eq!(client.errno(write(1, 0, &[1; 8192])).await, EPERM);
    assert_eq!(client.errno(request(TRIM, 2, 0, 512)).await, EPERM);
    assert_eq!(client.errno(request(WRITE_ZEROES, 3, 0, 512)).await, EPERM);
    assert_eq!(client.errno(request(FLUSH, 4, 0, 0)).await, 0);
    assert_eq!(client.read(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn invalid_requests_are_refused_and_the_connection_continues() {
    let (mut client, _task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    let refused = [
        request(CACHE, 1, 0, 512),
        request(77, 1, 0, 512),
        request(READ, 1, 0, 0),
        write(1, 0, &[]),
        request(TRIM, 1, 0, 0),
        request(WRITE_ZEROES, 1, 0, 0),
        request(BLOCK_STATUS, 1, 0, 0),
        request(READ, 1, 0, (32 << 20) + 512),
        request(READ, 1, 0, u32::MAX),
        Request { flags: NO_HOLE, ..write(1, 0, &[1; 512]) },
        Request { flags: DONT_FRAGMENT, ..request(TRIM, 1, 0, 512) },
        Request { flags: FAST_ZERO, ..request(WRITE_ZEROES, 1, 0, 512) },
        Request { flags: 1 << 15, ..request(READ, 1, 0, 512) },
    ];
    for refused in refused {
        assert_eq!(client.errno(refused).await, EINVAL, "{refused:?}");
    }
    assert_eq!(client.read(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn errors_of_the_disk_reach_the_client_with_their_text() {
    let cases = [
        (DiskError::NoSpace("the pool is full".into()), ENOSPC),
        (DiskError::Damaged("block 7".into()), EIO),
        (DiskError::Failed("ü".repeat(2000)), EIO),
        (DiskError::Memory("gone".into()), EIO),
    ];
    for (error, expected) in cases {
        let (mut client, _task) = Client::connect(TestDisk::failing(error.clone()), true).await;
        for request in [write(1, SLOW_END, &[1; 512]), request(READ, 1, SLOW_END, 512)] {
            let Reply::Error { cookie: 1, errno, text } = client.call(request).await else {
                panic!("{error:?} was lost");
            };
            assert_eq!(errno, expected, "{error:?}");
            assert!(text.len() >= 10 && error.to_string().starts_with(&text), "{text}");
        }
    }
}
