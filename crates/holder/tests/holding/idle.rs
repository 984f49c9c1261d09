//! An idle holder uses no CPU time.

use std::time::Duration;

use crate::support::{TestHolder, answer};

#[tokio::test]
async fn an_idle_holder_is_never_woken() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["a", "b"]).await;
    let front_end = holder.front_end("a");
    front_end.send(b"x", &[]);
    gateway.connected().await;
    let message = gateway.message().await;
    gateway.client.done(answer(&message, "s", "r")).await.unwrap();
    front_end.receive();
    // Also while a message waits for a gateway.
    front_end.send(b"y", &[]);
    gateway.message().await;
    drop(gateway);
    // The holder handles what has happened. Then it rests.
    let mut before = holder.wakes();
    let is_at_rest = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        std::mem::replace(&mut before, holder.wakes()) == holder.wakes()
    });
    assert!(is_at_rest, "the holder is woken again and again");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(holder.wakes(), before);
}
