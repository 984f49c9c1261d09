//! Fencing: a client ends another session of the same client for good.

use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::Payload;
use client::engine::Capability;
use client::{Client, Object, Options};
use futures::future::join_all;
use messenger::{BulkSource, UseAs};
use tokio::sync::watch;
use wire::{AdminRequest, Data, Error, Mutation, OpBytes, ReplyBody, RequestBody, SessionId};

use crate::common::{Node, capability, data, stack};
use crate::raw::{Raw, head, mutate};
use crate::redundancy::Rig;
use crate::rights::World;
use crate::strands::Strands;

fn fence(session: SessionId) -> RequestBody {
    RequestBody::Fence { session }
}

async fn owner(node: &Node) -> Client {
    let options = node.options(Options { exclusive: true, ..Options::default() });
    let client = Client::connect(&node.endpoint, options).await.unwrap();
    client.require(&[Capability::Fence]).unwrap();
    client
}

#[tokio::test]
async fn no_write_of_a_fenced_owner_takes_effect_after_the_fencing() {
    let mut node = Node::start();
    let (_operator, _) = node.pool().await;
    let mut before = owner(&node).await;
    for round in 0..6_u64 {
        let writes = join_all((0..24_u64).map(|n| {
            let before = before.clone();
            async move {
                let object = before.pool("pool").unwrap().object(&format!("object {n}")).unwrap();
                // Small, pulled and staged data.
                let size = [100, 300 << 10, 2 << 20][n as usize % 3];
                for attempt in 0.. {
                    match object.put(data(size, n + attempt)).await {
                        Ok(_) => {}
                        Err(client::Error::Fenced(_)) => return attempt,
                        Err(client::Error::OutcomeUnknown(_)) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                unreachable!("the owner is fenced")
            }
        }));
        let writes = tokio::spawn(writes);
        tokio::time::sleep(Duration::from_millis(50 * round)).await;
        let after = owner(&node).await;
        after.fence(&before.owner().unwrap()).await.unwrap();
        let objects: Vec<_> =
            (0..24).map(|n| after.pool("pool").unwrap().object(&format!("object {n}")).unwrap()).collect();
        let put = |n: usize| data(1000 + n, round);
        join_all(
            objects.iter().enumerate().map(|(n, object)| async move { object.put(put(n)).await.unwrap() }),
        )
        .await;
        if round == 3 {
            node.restart();
        }
        let attempts = writes.await.unwrap();
        assert!(attempts.iter().any(|attempts| *attempts > 0) || round == 0, "the owner has written");
        assert!(matches!(before.owner(), Err(client::Error::Fenced(_))));
        for (n, object) in objects.iter().enumerate() {
            assert_eq!(object.get().await.unwrap(), put(n), "round {round}, object {n}");
        }
        before = after;
    }
}

#[tokio::test]
async fn a_fenced_session_cannot_be_resumed_also_after_a_restart() {
    let mut node = Node::start();
    let (_operator, _) = node.pool().await;
    let capability = capability(&node.endpoint).await;
    let mut strands = Strands::connect(stack(UseAs::Client), &node.endpoint).await;
    let old = strands.open(1, None, &capability).await.unwrap();
    let new = strands.open(2, None, &capability).await.unwrap();
    strands.append(1, 1).await.unwrap();
    for _ in 0..2 {
        let fenced = strands.call(2, 1, fence(old)).await;
        assert_eq!(fenced, Ok(ReplyBody::Fenced), "a repeated fence has no effect");
    }
    let refused = |opened: wire::Result<SessionId>| match opened {
        Err(Error::SessionRefused { session, .. }) => assert_eq!(session, old),
        other => panic!("{other:?}"),
    };
    refused(strands.open(3, Some(old), &capability).await);
    node.restart();
    let mut strands = Strands::connect(stack(UseAs::Client), &node.endpoint).await;
    refused(strands.open(1, Some(old), &capability).await);
    assert_eq!(strands.open(2, Some(new), &capability).await, Ok(new));
    assert_eq!(strands.append(2, 2).await, Ok(2));
}

/// A source of 1 MiB whose data arrives when the test releases it.
struct Late {
    is_pulled: watch::Sender<bool>,
    released: watch::Sender<bool>,
}

impl BulkSource for Late {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn block_offset(&self) -> u64 {
        0
    }
    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>> {
        self.is_pulled.send_replace(true);
        let mut released = self.released.subscribe();
        Box::pin(async move {
            drop(released.wait_for(|released| *released).await);
            Ok(Payload::compute(offset, vec![b'-'; len].into()))
        })
    }
}

#[tokio::test]
async fn a_write_whose_data_arrives_after_the_fencing_is_refused() {
    let node = Node::start();
    let (_operator, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let mut old = Raw::connect(&node.endpoint, None).await;
    let (is_pulled, released) = (watch::Sender::new(false), watch::Sender::new(false));
    let late = Arc::new(Late { is_pulled, released });
    let offer = old.connection.offer_source(Arc::clone(&late) as _).unwrap();
    let ops = vec![Mutation::WriteFull(OpBytes::Payload)];
    let body = mutate("object", ops, Data::Bulk(offer.descriptor.clone()));
    old.send(wire::encode_request(&head(1), &body), Payload::default()).await;
    late.is_pulled.subscribe().wait_for(|pulled| *pulled).await.unwrap();

    let mut new = Raw::connect(&node.endpoint, None).await;
    assert_eq!(new.call(head(1), fence(old.session)).await, Ok(ReplyBody::Fenced));
    object.put("new").await.unwrap();
    late.released.send_replace(true);
    loop {
        // The notice that the session has ended has the number 0.
        match old.reply().await {
            Some(reply) if reply.seq == 0 => {}
            Some(reply) => {
                assert!(matches!(reply.result, Err(Error::SessionRefused { .. })), "{:?}", reply.result);
                break;
            }
            None => break,
        }
    }
    assert_eq!(object.get().await.unwrap(), "new");
}

#[tokio::test]
async fn a_fence_waits_for_writes_that_a_store_has_queued() {
    for redundancy in ["single", "mirror:2", "ec:2+1"] {
        let rig = Rig::new(redundancy, 16).await;
        let node = &rig.node;
        let old = owner(node).await;
        let objects = |client: &Client| -> Vec<Object> {
            (0..16).map(|n| client.pool("pool").unwrap().object(&format!("{n}")).unwrap()).collect()
        };
        let put = |object: Object, salt: u64| async move { object.put(data(70_000, salt)).await.map(drop) };
        join_all(objects(&old).into_iter().map(|object| put(object, 1))).await;
        let new = owner(node).await;
        // One member of each group holds its transactions.
        node.stores[0].hold(true);
        let late = tokio::spawn(join_all(objects(&old).into_iter().map(|object| put(object, 2))));
        node.waited(1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let name = old.owner().unwrap();
        let fencing = new.fence(&name);
        tokio::pin!(fencing);
        let early = tokio::time::timeout(Duration::from_millis(100), &mut fencing).await;
        assert!(early.is_err(), "{redundancy}: the fence waits for the queued writes: {early:?}");
        node.stores[0].hold(false);
        fencing.await.unwrap();
        join_all(objects(&new).into_iter().map(|object| put(object, 3))).await;
        for outcome in late.await.unwrap() {
            let is_open = outcome.is_ok() || matches!(outcome, Err(client::Error::OutcomeUnknown(_)));
            assert!(is_open || matches!(outcome, Err(client::Error::Fenced(_))), "{outcome:?}");
        }
        for object in objects(&new) {
            assert!(object.get().await.unwrap() == data(70_000, 3), "{redundancy}: a late write took effect");
        }
    }
}

#[tokio::test]
async fn a_fence_succeeds_only_once_the_map_stores_it() {
    let node = Node::start();
    let (_operator, _) = node.pool().await;
    let old = owner(&node).await;
    let object = old.pool("pool").unwrap().object("x").unwrap();
    object.put("1").await.unwrap();
    let name = old.owner().unwrap();
    let others = join_all((0..4).map(|_| owner(&node))).await;
    let all_fence = || join_all(others.iter().map(|other| other.fence(&name)));
    node.stores[0].set_full_for_map(true);
    for fenced in all_fence().await {
        assert!(fenced.is_err(), "the map is not saved");
    }
    object.put("2").await.unwrap();
    node.stores[0].set_full_for_map(false);
    for fenced in all_fence().await {
        fenced.unwrap();
    }
    object.put("3").await.unwrap_err();
    assert!(matches!(object.put("4").await, Err(client::Error::Fenced(_))));
    assert_eq!(others[0].pool("pool").unwrap().object("x").unwrap().get().await.unwrap(), "2");
}

#[tokio::test]
async fn a_client_fences_only_its_own_sessions() {
    let world = World::start().await;
    let capability = world.capability(&world.caller("owner"), 0).await.unwrap();
    let stranger = world.capability(&world.caller("read-only"), 0).await.unwrap();
    let mut strands = Strands::connect(world.stack("films/owner"), world.endpoint()).await;
    let mut others = Strands::connect(world.stack("films/reader"), world.endpoint()).await;
    let session = strands.open(1, None, &capability).await.unwrap();
    others.open(1, None, &stranger).await.unwrap();
    for id in [session, SessionId(session.0 ^ 1), SessionId(0)] {
        let refused = others.call(1, 1, fence(id)).await;
        assert!(matches!(refused, Err(Error::SessionRefused { .. })), "{id}: {refused:?}");
    }
    let own = strands.call(1, 1, fence(session)).await;
    assert!(matches!(own, Err(Error::BadRequest(_))), "{own:?}");
    assert_eq!(strands.open(2, Some(session), &capability).await, Ok(session));

    // An administrator ends it, also while it is not connected.
    drop(strands);
    let administrator = world.client("node admin").await.unwrap();
    for id in [SessionId(1), SessionId(u128::MAX)] {
        administrator.administer(AdminRequest::KillSession(id)).await.unwrap_err();
    }
    administrator.administer(AdminRequest::KillSession(session)).await.unwrap();
    assert_eq!(others.call(1, 2, fence(session)).await, Ok(ReplyBody::Fenced));
    let mut strands = Strands::connect(world.stack("films/owner"), world.endpoint()).await;
    let refused = strands.open(1, Some(session), &capability).await;
    assert!(matches!(refused, Err(Error::SessionRefused { .. })), "{refused:?}");
}
