//! Requests in flight: order, limits and the end of a connection.

use std::sync::Arc;
use std::time::Duration;

use disk::{Disk, DiskError, MemDisk};
use nbd::{Error, NbdLimits, serve_connection};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::client::*;
use crate::disks::{SLOW_END, TestDisk};
use crate::{SIZE, SOCKET_BUFFER, exports};

/// Waits until no task can run. The clock of the tests stands still while a task can run.
async fn until_idle() {
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_fast_request_overtakes_a_slow_one() {
    let disk = TestDisk::new();
    let (mut client, _task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
    client.send(write(1, 0, &[1; 512])).await;
    client.send(request(READ, 2, 4096, 512)).await;
    let fast = client.call(request(READ, 3, SLOW_END, 512)).await;
    assert_eq!(fast, Reply::Data { cookie: 3, offset: SLOW_END, data: vec![0; 512] });
    assert_eq!((disk.started(), disk.completed()), (3, 1));
    disk.release(2);
    assert_eq!(client.reply().await, Reply::Simple { cookie: 1, errno: 0 });
    assert_eq!(client.reply().await, Reply::Data { cookie: 2, offset: 4096, data: vec![0; 512] });
}

#[tokio::test(start_paused = true)]
async fn the_number_of_requests_in_flight_is_limited() {
    let disk = TestDisk::new();
    let limits = NbdLimits { requests_max: 5, ..NbdLimits::default() };
    let (mut client, _task) = Client::connect_within(Arc::clone(&disk) as Arc<dyn Disk>, true, limits).await;
    for cookie in 0..12 {
        client.send(request(READ, cookie, 0, 512)).await;
    }
    until_idle().await;
    assert_eq!(disk.started(), 5);
    disk.release(3);
    until_idle().await;
    assert_eq!((disk.started(), disk.completed()), (8, 3));
    disk.release(9);
    for cookie in 0..12 {
        assert_eq!(client.reply().await, Reply::Data { cookie, offset: 0, data: vec![0; 512] });
    }
}

#[tokio::test(start_paused = true)]
async fn the_payload_in_flight_is_limited() {
    const LEN: usize = 64 << 10;
    let disk = TestDisk::new();
    let limits = NbdLimits {
        in_flight_bytes_max: 3 * LEN as u32,
        payload_bytes_max: LEN as u32,
        ..NbdLimits::default()
    };
    let (mut client, _task) = Client::connect_within(Arc::clone(&disk) as Arc<dyn Disk>, true, limits).await;
    let payload = vec![1; LEN];
    let mut accepted = 0;
    let sends = async {
        loop {
            client.send(write(accepted, 0, &payload)).await;
            accepted += 1;
        }
    };
    timeout(Duration::from_secs(1), sends).await.expect_err("the server stops to receive");
    assert_eq!(disk.started(), 3);
    let buffered = SOCKET_BUFFER.div_ceil(LEN) as u64;
    assert!(accepted <= 3 + buffered, "{accepted} writes were received");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_receive_holds_limited_memory() {
    const LEN: u32 = 64 << 10;
    let disk = TestDisk::new();
    let limits = NbdLimits { in_flight_bytes_max: 3 * LEN, payload_bytes_max: LEN, ..NbdLimits::default() };
    let (mut client, _task) = Client::connect_within(Arc::clone(&disk) as Arc<dyn Disk>, true, limits).await;
    for cookie in 0..20 {
        client.send(request(READ, cookie, SLOW_END, LEN)).await;
    }
    until_idle().await;
    // The socket has taken a part of the replies.
    let taken = SOCKET_BUFFER.div_ceil(LEN as usize);
    assert!((3..=3 + taken).contains(&disk.completed()), "{}", disk.completed());
    for cookie in 0..20 {
        let data = vec![0; LEN as usize];
        assert_eq!(client.reply().await, Reply::Data { cookie, offset: SLOW_END, data });
    }
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_complete_after_a_disconnect() {
    for disconnects in [true, false] {
        let disk = TestDisk::new();
        let (mut client, task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
        client.send(write(1, 0, &[7; 512])).await;
        client.send(write(2, 512, &[8; 512])).await;
        if disconnects {
            client.send(request(DISCONNECT, 3, 0, 0)).await;
        } else {
            client.stream.shutdown().await.unwrap();
        }
        until_idle().await;
        assert!(!task.is_finished(), "two requests are in flight");
        disk.release(2);
        for cookie in [1, 2] {
            assert_eq!(client.reply().await, Reply::Simple { cookie, errno: 0 });
        }
        assert!(client.rest().await.is_empty());
        task.await.unwrap().unwrap();
        assert_eq!(disk.content.read(0, 1024).await.unwrap().concat(), [[7; 512], [8; 512]].concat());
    }
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_complete_after_the_client_is_gone() {
    let disk = TestDisk::new();
    let (mut client, task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
    for cookie in 0..3 {
        client.send(write(cookie, 0, &[7; 512])).await;
    }
    until_idle().await;
    drop(client);
    disk.release(1);
    until_idle().await;
    assert!(!task.is_finished(), "two requests are in flight");
    disk.release(2);
    assert!(matches!(task.await.unwrap(), Err(Error::Io(_))), "the replies could not be sent");
    assert_eq!(disk.completed(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_detached_disk_ends_the_connection_after_the_error_replies() {
    let disk = TestDisk::failing(DiskError::Detached("fenced".into()));
    let (mut client, task) = Client::connect(disk, true).await;
    for cookie in [1, 2] {
        client.send(request(READ, cookie, 0, 512)).await;
    }
    for expected in [1, 2] {
        let Reply::Error { cookie, errno, .. } = client.reply().await else { panic!("no error") };
        assert_eq!((cookie, errno), (expected, ESHUTDOWN));
    }
    let rest = timeout(Duration::from_secs(1), client.rest()).await;
    assert!(rest.expect("the server ends the connection").is_empty());
    assert!(matches!(task.await.unwrap(), Err(Error::Detached(text)) if text.contains("fenced")));
}

#[tokio::test(start_paused = true)]
async fn last_replies_that_the_client_does_not_receive_end_by_timeout() {
    let (mut client, task) = Client::connect(TestDisk::new(), true).await;
    client.send(request(READ, 1, SLOW_END, 2 * SOCKET_BUFFER as u32)).await;
    client.send(request(DISCONNECT, 2, 0, 0)).await;
    assert!(matches!(task.await.unwrap(), Err(Error::CloseTimeout(_))));
}

/// A write or a read of the blocks that belong to the request's position in its batch, so that
/// requests of a batch do not overlap.
#[derive(Debug, Clone)]
struct Step {
    is_write: bool,
    first: usize,
    blocks: usize,
    fill: u8,
}

fn step() -> impl Strategy<Value = Step> {
    (any::<bool>(), 0usize..32, 1usize..32, 1u8..255).prop_map(|(is_write, first, blocks, fill)| Step {
        is_write,
        first,
        blocks,
        fill,
    })
}

/// Sends batches of requests without waiting for replies, and compares the replies with a model.
async fn run_batches(batches: Vec<Vec<Step>>) {
    let (stream, server) = UnixStream::pair().unwrap();
    let exports = exports(Arc::new(MemDisk::new(SIZE)));
    let task = tokio::spawn(async move { serve_connection(server, &exports, &NbdLimits::default()).await });
    let mut client = Client::greet(stream).await;
    client.enter(true).await;
    let mut model = vec![0; SIZE as usize];
    for batch in batches {
        let range = |position: usize, step: &Step| {
            let start = (position * 64 + step.first) * 512;
            start..start + step.blocks * 512
        };
        for (position, step) in batch.iter().enumerate() {
            let range = range(position, step);
            if step.is_write {
                model[range.clone()].fill(step.fill);
                client.send(write(position as u64, range.start as u64, &model[range.clone()])).await;
            } else {
                client.send(request(READ, position as u64, range.start as u64, range.len() as u32)).await;
            }
        }
        for _ in &batch {
            match client.reply().await {
                Reply::Simple { cookie, errno } => {
                    assert!(errno == 0 && batch[cookie as usize].is_write);
                }
                Reply::Data { cookie, offset, data } => {
                    let range = range(cookie as usize, &batch[cookie as usize]);
                    assert_eq!(offset as usize, range.start);
                    assert!(data == model[range], "the content is wrong");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    client.send(request(DISCONNECT, 0, 0, 0)).await;
    task.await.unwrap().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    #[test]
    fn batches_of_requests_agree_with_a_model(
        batches in prop::collection::vec(prop::collection::vec(step(), 1..8), 1..8),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run_batches(batches));
    }
}
