//! Tests with changes that arrive while the outcome of earlier changes is not known yet.

use base::block::Payload;
use bytes::Bytes;
use client::engine::{ReadReply, ReadRequest, Sink};
use client::{Error, NodeError, Object};
use wire::{Data, List, Mutation, ObjectReply, ObjectRequest, OpBytes, ReplyBody, RequestBody};

use crate::common::{Node, data};
use crate::raw::{Raw, append, head, mutate};

const BLOCK: usize = 4096;

fn overwrite(offset: usize, bytes: &Bytes) -> RequestBody {
    let source = OpBytes::Embedded(bytes.clone());
    mutate("object", vec![Mutation::Write { offset: offset as u64, source }], Data::None)
}

/// Returns an object that does not exist yet, in a placement group that is in use.
async fn object(node: &Node) -> Object {
    let (_client, pool) = node.pool_of(1).await;
    pool.object("other").unwrap().put("x").await.unwrap();
    pool.object("object").unwrap()
}

/// Holds the outcome of `first` until the request `then` has arrived, and then releases both.
/// Returns both outcomes.
async fn while_pending<T>(
    node: &Node,
    first: impl Future<Output = T>,
    then: RequestBody,
) -> (T, wire::Result<ReplyBody>) {
    let mut raw = Raw::connect(&node.endpoint, None).await;
    node.hold(true);
    let following = async {
        node.waited(1).await;
        raw.send(wire::encode_request(&head(1), &then), Payload::default()).await;
        // Requests of one connection begin in order. Once the listing of a missing pool is refused,
        // the request `then` has therefore progressed as far as it can.
        let refused = RequestBody::Object(ObjectRequest::List(List {
            pool: "missing".into(),
            namespace: None,
            prefix: Default::default(),
            group: None,
            cursor: Default::default(),
            limit: 1,
            skip_unavailable: false,
        }));
        raw.send(wire::encode_request(&head(2), &refused), Payload::default()).await;
        assert_eq!(raw.reply().await.unwrap().seq, 2);
        node.hold(false);
        raw.reply().await.unwrap().result
    };
    tokio::join!(first, following)
}

fn size(changed: wire::Result<ReplyBody>) -> u64 {
    match changed.unwrap() {
        ReplyBody::Object(ObjectReply::Mutated(mutated)) => mutated.size,
        other => panic!("{other:?}"),
    }
}

async fn assert_is(object: &Object, expected: &[u8]) {
    assert_eq!(object.stat().await.unwrap().size, expected.len() as u64);
    assert!(object.get().await.unwrap() == expected);
}

/// Regression test: the later write recorded the size that the refused change would have set.
#[tokio::test]
async fn a_write_during_a_refused_truncation_keeps_the_old_size() {
    let node = Node::start();
    let object = object(&node).await;
    let (old, new) = (data(4 * BLOCK, 1), data(BLOCK, 2));
    object.put(old.clone()).await.unwrap();
    object.set_xattr("a", data(40 << 10, 3)).await.unwrap();
    let cut = object.compound().truncate(BLOCK as u64).set_xattr("b", data(40 << 10, 4)).commit();
    let (cut, written) = while_pending(&node, cut, overwrite(0, &new)).await;
    assert!(matches!(cut, Err(Error::Node(NodeError::TooLarge { .. }))), "{cut:?}");
    assert_eq!(size(written), 4 * BLOCK as u64);
    assert_is(&object, &[&new[..], &old[BLOCK..]].concat()).await;
}

/// Regression test: the later write created an object with the recorded size of the refused write,
/// so that the object could not be read.
#[tokio::test]
async fn a_write_during_a_refused_put_records_its_own_size() {
    let node = Node::start();
    let object = object(&node).await;
    let new = data(BLOCK, 2);
    node.arm_refusal();
    let fired = node.fired();
    let (put, written) = while_pending(&node, object.put(data(2 * BLOCK, 1)), overwrite(0, &new)).await;
    assert_eq!(node.fired(), fired + 1, "the fault fired");
    assert!(matches!(put, Err(Error::Node(NodeError::TooLarge { .. }))), "{put:?}");
    assert_eq!(size(written), BLOCK as u64);
    assert_is(&object, &new).await;
}

#[tokio::test]
async fn a_write_during_a_refused_extension_records_its_own_size() {
    let node = Node::start();
    let object = object(&node).await;
    let (old, new) = (data(2 * BLOCK, 1), data(BLOCK, 2));
    object.put(old.clone()).await.unwrap();
    node.arm_refusal();
    let fired = node.fired();
    let grow = object.write(2 * BLOCK as u64, data(2 * BLOCK, 3));
    let (grown, written) = while_pending(&node, grow, overwrite(2 * BLOCK, &new)).await;
    assert_eq!(node.fired(), fired + 1, "the fault fired");
    assert!(matches!(grown, Err(Error::Node(NodeError::TooLarge { .. }))), "{grown:?}");
    assert_eq!(size(written), 3 * BLOCK as u64);
    assert_is(&object, &[&old[..], &new[..]].concat()).await;
}

#[tokio::test]
async fn overwrites_within_an_object_run_in_parallel_and_fail_independently() {
    let node = Node::start();
    let object = object(&node).await;
    let (old, new) = (data(4 * BLOCK, 1), data(BLOCK, 2));
    object.put(old.clone()).await.unwrap();
    node.arm_refusal();
    node.hold(true);
    let refused = object.write(0, data(BLOCK, 3));
    let taken = async {
        node.waited(1).await;
        object.write(BLOCK as u64, new.clone()).await
    };
    let both_pending = async {
        node.waited(2).await;
        node.hold(false);
    };
    let (refused, taken, ()) = tokio::join!(refused, taken, both_pending);
    assert!(matches!(refused, Err(Error::Node(NodeError::TooLarge { .. }))), "{refused:?}");
    taken.unwrap();
    assert_is(&object, &[&old[..BLOCK], &new[..], &old[2 * BLOCK..]].concat()).await;
}

/// Regression test: the read was refused as if the object had changed.
#[tokio::test]
async fn a_long_read_during_a_refused_write_returns_the_old_data_although_the_store_was_lost() {
    let node = Node::start();
    let object = object(&node).await;
    // The osd reads the object in two segments.
    let old = data(3 << 20, 1);
    object.put(old.clone()).await.unwrap();
    node.arm_refusal();
    node.hold(true);
    let fired = node.fired();
    let refused = object.write(0, data(BLOCK, 2));
    // The methods of `Object` would repeat a read that is refused.
    let client = node.client().await;
    let read = async {
        node.waited(1).await;
        node.stores.iter().for_each(|store| store.arm_late_reads(2));
        let (name, sink) = ("pool/object".parse().unwrap(), Sink::Bytes);
        let request = ReadRequest {
            name,
            part: None,
            offset: 0,
            len: 4 << 20,
            if_version: None,
            sink,
            fallbacks: vec![],
        };
        match client.read(request).await.unwrap() {
            ReadReply::Data { chunks, .. } => chunks.concat(),
            other => panic!("{other:?}"),
        }
    };
    let lost = async {
        // The write is pending, and both segments have been requested.
        node.waited(3).await;
        node.stores.iter().for_each(|store| store.end_session());
        node.hold(false);
    };
    let (refused, read, ()) = tokio::join!(refused, read, lost);
    assert!(node.fired() >= fired + 2, "the refusal and the loss fired");
    assert!(matches!(refused, Err(Error::Node(NodeError::TooLarge { .. }))), "{refused:?}");
    assert!(read == old);
}

/// Only the store knows whether the change took effect, and the store fails.
#[tokio::test]
async fn a_retry_has_an_unknown_outcome_if_its_store_cannot_be_read() {
    let mut node = Node::start();
    let object = object(&node).await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    raw.changed(head(1), append("object", "x")).await.unwrap();
    // The restarted osd has cached nothing about the change.
    node.restart();
    let mut raw = Raw::connect(&node.endpoint, Some(raw.session)).await;
    let retry = wire::RequestHead { retry: true, ..head(1) };
    let fired = node.fired();
    node.stores.iter().for_each(|store| store.set_down(true));
    let refused = raw.changed(retry, append("object", "x")).await;
    assert!(node.fired() > fired, "the store failed");
    assert!(matches!(refused, Err(NodeError::OutcomeUnknown(_))), "{refused:?}");
    node.stores.iter().for_each(|store| store.set_down(false));
    raw.changed(retry, append("object", "x")).await.unwrap();
    assert_eq!(object.get().await.unwrap(), "x", "the change took effect once");
}
