//! Checks of messages: order, sizes, backpressure.

use std::time::Duration;

use base::block::Payload;
use rand::Rng;
use tokio::time::timeout;

use super::rig::{Rig, message, next_message, random_bytes};
use crate::{Message, MessengerError};

/// Messages of mixed sizes arrive complete and in order, in both directions at the same time. Both
/// sides see the connection's number and the peer's key, and the server sees the tenant.
pub async fn messages_keep_their_order(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, mut from_client)) = rig.pair(&mut *listener).await;
    let own = identity::Trust::default().key();
    assert_eq!((client.peer().key, server.peer().key), (own, own));
    assert_eq!(server.peer().user.as_ref().map(|user| &*user.tenant), Some("main"));
    assert_eq!(client.peer().connection, server.peer().connection);
    let mut random = rig.random();
    let sent: Vec<Message> = (0..500u32)
        .map(|i| {
            let len = if random.random_bool(0.2) { random.random_range(0..100_000) } else { i as usize % 9 };
            let block_offset = random.random_range(0..4096);
            let data = random_bytes(&mut random, len);
            let payload =
                if data.is_empty() { Payload::default() } else { Payload::compute(block_offset, data) };
            let header = random_bytes(&mut random, i as usize % 3000);
            Message { header, payload }
        })
        .collect();
    let send = |connection: std::sync::Arc<dyn crate::Connection>| {
        let sent = sent.clone();
        async move {
            for message in sent {
                connection.send(message).await.expect("sent");
            }
        }
    };
    let receive = async |incoming: &mut dyn crate::Incoming| {
        for (i, expected) in sent.iter().enumerate() {
            assert_eq!(&next_message(incoming).await, expected, "message {i}");
        }
    };
    tokio::join!(biased; send(client), send(server), receive(&mut *from_server), receive(&mut *from_client));
}

/// The sending side refuses a header or payload over the limits. The connection continues, and a
/// message of the maximum size arrives.
pub async fn messages_over_the_limits_are_refused(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, _in), (_server, mut from_client)) = rig.pair(&mut *listener).await;
    let limits = client.limits();
    let too_long = Message { header: vec![0; limits.max_header + 1].into(), payload: Payload::default() };
    assert!(matches!(client.send(too_long).await, Err(MessengerError::TooLarge { .. })));
    let payload = Payload::compute(0, vec![0; limits.max_inline + 1].into());
    let too_large = Message { header: "h".into(), payload };
    assert!(matches!(client.send(too_large).await, Err(MessengerError::TooLarge { .. })));
    let largest = Message {
        header: vec![1; limits.max_header].into(),
        payload: Payload::compute(4095, vec![2; limits.max_inline].into()),
    };
    client.send(largest.clone()).await.expect("a message of the maximum size is accepted");
    assert_eq!(next_message(&mut *from_client).await, largest);
}

/// A receiver that takes no message blocks the sender after a bounded number of bytes. No message
/// is lost.
pub async fn unread_messages_block_the_sender(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, _in), (_server, mut from_client)) = rig.pair(&mut *listener).await;
    let payload = Payload::compute(0, vec![7; 60_000].into());
    let mut sent = 0u32;
    loop {
        let message = Message { header: sent.to_le_bytes().to_vec().into(), payload: payload.clone() };
        match timeout(Duration::from_millis(300), client.send(message)).await {
            Ok(result) => result.expect("sent"),
            Err(_) => break,
        }
        sent += 1;
        assert!(sent < 2000, "120 MB were accepted although the receiver reads nothing");
    }
    assert!(sent > 10, "the sender was blocked after only {sent} messages");
    for i in 0..sent {
        assert_eq!(next_message(&mut *from_client).await.header.as_ref(), i.to_le_bytes());
    }
    client.send(message(b"again")).await.expect("the sender has credit again");
    assert_eq!(next_message(&mut *from_client).await.header.as_ref(), b"again");
}
