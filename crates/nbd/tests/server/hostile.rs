//! Clients that violate the protocol lose their own connection only.

use std::sync::Arc;
use std::time::Duration;

use disk::{Disk, MemDisk};
use nbd::{Error, NbdLimits, NbdViolation};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;

use crate::client::*;
use crate::disks::TestDisk;
use crate::{SIZE, mem_exports, start};

/// Sends `bytes` after the greeting, and returns how the connection ended.
async fn end_of_negotiation(flags: u32, bytes: &[u8]) -> Result<(), Error> {
    let (stream, task) = start(mem_exports(), NbdLimits::default());
    let mut client = Client::greet_with(stream, flags).await;
    let _ = client.stream.write_all(bytes).await;
    let _ = client.stream.shutdown().await;
    client.rest().await;
    task.await.unwrap()
}

/// Sends `bytes` after the negotiation, and returns the replies, and how the connection ended.
async fn end_of_transmission(bytes: &[u8]) -> (Vec<u8>, Result<(), Error>) {
    let (mut client, task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    let _ = client.stream.write_all(bytes).await;
    let _ = client.stream.shutdown().await;
    let replies = client.rest().await;
    (replies, task.await.unwrap())
}

fn option_head(kind: u32, len: u32) -> Vec<u8> {
    [b"IHAVEOPT", &kind.to_be_bytes()[..], &len.to_be_bytes()].concat()
}

#[tokio::test]
async fn violations_end_the_negotiation() {
    let end = end_of_negotiation(4, &[]).await;
    assert!(matches!(end, Err(Error::Violation(NbdViolation::ClientFlags(4)))), "{end:?}");
    let end = end_of_negotiation(3, &[b'x'; 16]).await;
    assert!(matches!(end, Err(Error::Violation(NbdViolation::OptionMagic(_)))), "{end:?}");
    for (kind, len) in [(77, u32::MAX), (OPT_GO, (1 << 20) + 1), (OPT_EXPORT_NAME, (64 << 10) + 1)] {
        let end = end_of_negotiation(3, &option_head(kind, len)).await;
        assert!(matches!(end, Err(Error::Violation(NbdViolation::OptionTooLong { .. }))), "{end:?}");
    }
    for name in [vec![b'x'; 4097], vec![0xff], vec![0]] {
        let end = end_of_negotiation(3, &option_bytes(OPT_EXPORT_NAME, &name)).await;
        assert!(matches!(end, Err(Error::Violation(NbdViolation::ExportName(_)))), "{end:?}");
    }
}

#[tokio::test]
async fn the_number_of_options_is_limited() {
    let end = end_of_negotiation(3, &option_bytes(99, &[]).repeat(300)).await;
    assert!(matches!(end, Err(Error::Violation(NbdViolation::TooManyOptions(_)))), "{end:?}");
}

#[tokio::test]
async fn long_data_of_an_option_is_skipped() {
    let (stream, _task) = start(mem_exports(), NbdLimits::default());
    let mut client = Client::greet(stream).await;
    for kind in [OPT_LIST, 77] {
        assert_eq!(client.final_reply(kind, &vec![1; 1 << 20]).await, ERR_TOO_BIG);
    }
    client.enter(true).await;
}

#[tokio::test]
async fn a_client_may_leave_between_options_only() {
    assert!(end_of_negotiation(3, &[]).await.is_ok());
    assert!(end_of_negotiation(3, &option_bytes(OPT_LIST, &[])).await.is_ok());
    for cut in [option_head(OPT_GO, 9), b"IHAVE".to_vec(), option_head(77, 100 << 10)] {
        assert!(matches!(end_of_negotiation(3, &cut).await, Err(Error::Io(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_negotiation_is_limited() {
    let beginnings =
        [vec![], option_head(OPT_GO, 9), option_head(77, 100 << 10), option_bytes(OPT_LIST, &[])];
    for bytes in beginnings {
        let (stream, task) = start(mem_exports(), NbdLimits::default());
        let mut client = Client::greet(stream).await;
        client.stream.write_all(&bytes).await.unwrap();
        assert!(matches!(task.await.unwrap(), Err(Error::NegotiationTimeout(_))));
    }
    // A client that does not even greet.
    let (_stream, task) = start(mem_exports(), NbdLimits::default());
    assert!(matches!(task.await.unwrap(), Err(Error::NegotiationTimeout(_))));
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_negotiation_is_limited_if_replies_are_not_received() {
    let (stream, task) = start(mem_exports(), NbdLimits::default());
    let mut client = Client::greet(stream).await;
    let options = option_bytes(OPT_INFO, &info_data("disk", &[1, 2])).repeat(10_000);
    let _ = tokio::time::timeout(Duration::from_secs(60), client.stream.write_all(&options)).await;
    let end = task.await.unwrap();
    let is_limited =
        matches!(end, Err(Error::NegotiationTimeout(_) | Error::Violation(NbdViolation::TooManyOptions(_))));
    assert!(is_limited, "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn an_established_connection_may_be_idle() {
    let (mut client, task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
    tokio::time::sleep(Duration::from_secs(1 << 20)).await;
    assert!(!task.is_finished());
    assert_eq!(client.errno(request(FLUSH, 1, 0, 0)).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_wrong_magic_number_ends_the_transmission_after_the_replies() {
    let disk = TestDisk::new();
    let (mut client, task) = Client::connect(Arc::clone(&disk) as Arc<dyn Disk>, true).await;
    client.send(write(1, 0, &[1; 512])).await;
    client.stream.write_all(&[0; 28]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(!task.is_finished(), "a request is in flight");
    disk.release(1);
    assert_eq!(client.reply().await, Reply::Simple { cookie: 1, errno: 0 });
    assert!(client.rest().await.is_empty());
    assert!(matches!(task.await.unwrap(), Err(Error::Violation(NbdViolation::RequestMagic(0)))));
}

#[tokio::test]
async fn a_write_that_is_too_long_is_refused_and_ends_the_transmission() {
    for len in [u32::MAX, (32 << 20) + 1] {
        let (mut client, task) = Client::connect(Arc::new(MemDisk::new(SIZE)), true).await;
        assert_eq!(client.errno(request(WRITE, 1, 0, len)).await, EINVAL);
        assert!(client.rest().await.is_empty());
        let end = task.await.unwrap();
        assert!(matches!(end, Err(Error::Violation(NbdViolation::PayloadTooLong { .. }))), "{end:?}");
    }
}

#[tokio::test]
async fn a_write_without_its_payload_has_no_effect() {
    let mut bytes = request_bytes(write(1, 0, &[1; 4096]));
    bytes.truncate(bytes.len() - 1);
    let (replies, end) = end_of_transmission(&bytes).await;
    assert!(replies.is_empty());
    assert!(matches!(end, Err(Error::Io(_))));
    let (_, end) = end_of_transmission(&bytes[..10]).await;
    assert!(matches!(end, Err(Error::Io(_))));
}

fn in_runtime<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

proptest! {
    #[test]
    fn no_negotiation_panics(
        flags in 0u32..5,
        options in prop::collection::vec((0u32..12, prop::collection::vec(0u8..6, 0..24)), 0..8),
        rest in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut bytes: Vec<u8> = options.iter().flat_map(|(kind, data)| option_bytes(*kind, data)).collect();
        bytes.extend(rest);
        let _ = in_runtime(end_of_negotiation(flags, &bytes));
    }

    #[test]
    fn no_transmission_panics(
        requests in prop::collection::vec((0u16..9, 0u16..32, any::<u16>(), 0u32..3000), 0..20),
        rest in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let payload = [7; 3000];
        let mut bytes = Vec::new();
        for (kind, flags, offset, len) in requests {
            let payload = if kind == WRITE { &payload[..len as usize] } else { &[] };
            let offset = u64::from(offset) * 64;
            bytes.extend(request_bytes(Request { kind, flags, cookie: 1, offset, len, payload }));
        }
        bytes.extend(rest);
        let _ = in_runtime(end_of_transmission(&bytes));
    }
}
