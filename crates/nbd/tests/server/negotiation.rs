//! The options of the negotiation, and their replies.

use std::collections::BTreeMap;
use std::sync::Arc;

use disk::MemDisk;
use nbd::{Error, Export, NbdLimits};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::client::*;
use crate::{SIZE, ServerTask, mem_exports, start};

/// `HAS_FLAGS`, `SEND_FLUSH`, `SEND_FUA` and `CAN_MULTI_CONN`.
const COMMON_FLAGS: u16 = 0x10d;
/// `SEND_TRIM` and `SEND_WRITE_ZEROES`.
const CHANGE_FLAGS: u16 = 0x60;
const READ_ONLY: u16 = 0x2;
const SEND_DF: u16 = 0x80;

async fn negotiating(exports: BTreeMap<String, Export>) -> (Client<DuplexStream>, ServerTask) {
    let (stream, task) = start(exports, NbdLimits::default());
    (Client::greet(stream).await, task)
}

fn two_exports() -> BTreeMap<String, Export> {
    let mut exports = mem_exports();
    let disk = Arc::new(MemDisk::new(8192));
    exports.insert("iso".into(), Export { disk, is_read_only: true, description: String::new() });
    exports
}

fn info(item: u16, content: &[u8]) -> (u32, Vec<u8>) {
    (REP_INFO, [&item.to_be_bytes(), content].concat())
}

fn size_and_flags(size: u64, flags: u16) -> (u32, Vec<u8>) {
    info(0, &[&size.to_be_bytes()[..], &flags.to_be_bytes()].concat())
}

#[tokio::test]
async fn export_name_begins_the_transmission() {
    for (client_flags, zeros) in [(1, 124), (3, 0), (0, 124)] {
        let (stream, task) = start(mem_exports(), NbdLimits::default());
        let mut client = Client::greet_with(stream, client_flags).await;
        client.stream.write_all(&option_bytes(OPT_EXPORT_NAME, b"disk")).await.unwrap();
        assert_eq!(client.stream.read_u64().await.unwrap(), SIZE);
        assert_eq!(client.stream.read_u16().await.unwrap(), COMMON_FLAGS | CHANGE_FLAGS);
        let mut reserved = vec![1; zeros];
        client.stream.read_exact(&mut reserved).await.unwrap();
        assert!(reserved.iter().all(|byte| *byte == 0));
        assert_eq!(client.errno(request(FLUSH, 1, 0, 0)).await, 0);
        drop(client);
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn info_and_go_describe_the_export() {
    let (mut client, _task) = negotiating(two_exports()).await;
    let blocks = info(3, &[0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
    let described = client.option(OPT_INFO, &info_data("disk", &[1, 2, 3, 77])).await;
    let flags = COMMON_FLAGS | CHANGE_FLAGS;
    let expected = [
        size_and_flags(SIZE, flags),
        blocks.clone(),
        info(1, b"disk"),
        info(2, b"a disk"),
        (REP_ACK, vec![]),
    ];
    assert_eq!(described, expected);
    client.option(OPT_STRUCTURED_REPLY, &[]).await;
    let described = client.option(OPT_GO, &info_data("iso", &[])).await;
    let flags = COMMON_FLAGS | READ_ONLY | SEND_DF;
    assert_eq!(described, [size_and_flags(8192, flags), blocks, (REP_ACK, vec![])]);
    assert_eq!(client.read(0, 512).await, [0; 512], "the transmission has begun");
}

#[tokio::test]
async fn list_contains_every_export() {
    let (mut client, _task) = negotiating(two_exports()).await;
    let expected = [
        (REP_SERVER, [&counted("disk")[..], b"a disk"].concat()),
        (REP_SERVER, counted("iso")),
        (REP_ACK, vec![]),
    ];
    assert_eq!(client.option(OPT_LIST, &[]).await, expected);
}

#[tokio::test]
async fn tls_and_unknown_options_are_unsupported() {
    let (mut client, _task) = negotiating(mem_exports()).await;
    for (kind, data) in [(OPT_STARTTLS, vec![]), (4, vec![1]), (11, vec![]), (u32::MAX, vec![7; 5000])] {
        assert_eq!(client.final_reply(kind, &data).await, ERR_UNSUPPORTED, "option {kind}");
    }
    client.enter(false).await;
}

#[tokio::test]
async fn malformed_options_are_refused_and_the_negotiation_continues() {
    let (mut client, _task) = negotiating(mem_exports()).await;
    for kind in [OPT_LIST, OPT_STRUCTURED_REPLY] {
        assert_eq!(client.final_reply(kind, &[0]).await, ERR_INVALID, "option {kind}");
    }
    client.option(OPT_STRUCTURED_REPLY, &[]).await;
    for kind in [OPT_INFO, OPT_GO, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        for data in [&[][..], &[0, 0, 0, 9, b'd'], &[255; 12]] {
            assert_eq!(client.final_reply(kind, data).await, ERR_INVALID, "option {kind}");
        }
    }
    client.enter(true).await;
}

#[tokio::test]
async fn an_unknown_export_is_refused() {
    let (mut client, task) = negotiating(mem_exports()).await;
    assert_eq!(client.final_reply(OPT_GO, &info_data("none", &[])).await, ERR_UNKNOWN);
    assert_eq!(client.final_reply(OPT_INFO, &info_data("", &[])).await, ERR_UNKNOWN);
    client.stream.write_all(&option_bytes(OPT_EXPORT_NAME, b"none")).await.unwrap();
    assert!(client.rest().await.is_empty());
    assert!(matches!(task.await.unwrap(), Err(Error::UnknownExport(name)) if name == "none"));
}

#[tokio::test]
async fn contexts_need_structured_replies() {
    let (mut client, _task) = negotiating(mem_exports()).await;
    for kind in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        let data = context_data("disk", &["base:allocation"]);
        assert_eq!(client.final_reply(kind, &data).await, ERR_INVALID);
    }
}

#[tokio::test]
async fn contexts_are_found_by_queries() {
    let (mut client, _task) = negotiating(mem_exports()).await;
    client.option(OPT_STRUCTURED_REPLY, &[]).await;
    let context = |id: u8| vec![(REP_META_CONTEXT, [&[0, 0, 0, id], &b"base:allocation"[..]].concat())];
    let cases: [(u32, &[&str], _); 8] = [
        (OPT_LIST_META_CONTEXT, &[], context(0)),
        (OPT_LIST_META_CONTEXT, &["base:"], context(0)),
        (OPT_LIST_META_CONTEXT, &["x-other:", "base:allocation"], context(0)),
        (OPT_LIST_META_CONTEXT, &["x-other:"], vec![]),
        (OPT_SET_META_CONTEXT, &[], vec![]),
        (OPT_SET_META_CONTEXT, &["base:"], vec![]),
        (OPT_SET_META_CONTEXT, &["base:allocation", "base:allocation"], context(1)),
        (OPT_SET_META_CONTEXT, &["qemu:dirty-bitmap:b"], vec![]),
    ];
    for (kind, queries, mut expected) in cases {
        expected.push((REP_ACK, vec![]));
        assert_eq!(client.option(kind, &context_data("disk", queries)).await, expected, "{kind} {queries:?}");
    }
    let unknown = context_data("none", &["base:allocation"]);
    assert_eq!(client.final_reply(OPT_SET_META_CONTEXT, &unknown).await, ERR_UNKNOWN);
}

#[tokio::test]
async fn contexts_of_another_export_do_not_count() {
    let (mut client, _task) = negotiating(two_exports()).await;
    client.option(OPT_STRUCTURED_REPLY, &[]).await;
    client.option(OPT_SET_META_CONTEXT, &context_data("iso", &["base:allocation"])).await;
    client.option(OPT_GO, &info_data("disk", &[])).await;
    assert_eq!(client.errno(request(BLOCK_STATUS, 1, 0, 512)).await, EINVAL);
}

#[tokio::test]
async fn abort_is_acknowledged_and_ends_the_connection() {
    let (mut client, task) = negotiating(mem_exports()).await;
    assert_eq!(client.final_reply(OPT_ABORT, &[]).await, REP_ACK);
    assert!(client.rest().await.is_empty());
    task.await.unwrap().unwrap();
}
