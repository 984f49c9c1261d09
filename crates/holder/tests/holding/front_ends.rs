//! Front ends that come, go, wait, stall and lie.

use std::os::fd::AsFd;

use holder::{ClientError, Deposit, Done, FrontEndReply, HolderRefusal};

use crate::support::{Probe, TestHolder, answer, framed, new_file, shared};

#[tokio::test]
async fn messages_wait_while_no_gateway_is_connected() {
    let holder = TestHolder::start();
    drop(holder.gateway_with(&["d"]).await);
    let front_end = holder.front_end("d");
    for number in 0..50 {
        front_end.send(format!("{number}").as_bytes(), &[]);
    }
    let mut gateway = holder.gateway().await;
    // The holder may accept the front end before or after the gateway.
    if gateway.inventory[0].front_end.is_none() {
        gateway.connected().await;
    }
    for number in 0..50 {
        let message = gateway.message().await;
        assert_eq!(message.bytes, framed(format!("{number}").as_bytes()));
        gateway.client.done(answer(&message, "s", &format!("r{number}"))).await.unwrap();
        assert_eq!(front_end.receive_text(), format!("r{number}"));
    }
}

#[tokio::test]
async fn a_disconnect_drops_the_pending_message_the_state_and_the_descriptors() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let (sent, kept) = (Probe::new(), Probe::new());
    let front_end = holder.front_end("d");
    front_end.send(b"first", &[sent.borrow()]);
    let connection = gateway.connected().await;
    let message = gateway.message().await;
    let keep = vec![(1, shared(kept.borrow().try_clone_to_owned().unwrap()))];
    let deposit =
        Deposit { device: "d".into(), connection, state: Some("state".into()), keep, ..Deposit::default() };
    gateway.client.deposit(deposit.clone()).await.unwrap();
    drop(front_end);
    assert_eq!(gateway.disconnected().await, connection);
    for late in [gateway.client.done(answer(&message, "s", "r")), gateway.client.deposit(deposit)] {
        let ended = HolderRefusal::ConnectionEnded { device: "d".into(), connection };
        assert_eq!(late.await, Err(ClientError::Refused(ended)));
    }
    drop(message);
    sent.expect_closed();
    kept.expect_closed();
    let second = holder.front_end("d");
    let newer = gateway.connected().await;
    assert!(newer > connection);
    drop(gateway);
    let gateway = holder.gateway().await;
    let held = gateway.inventory[0].front_end.as_ref().unwrap();
    assert_eq!((held.connection, held.state.len(), held.kept.len()), (newer, 0, 0));
    drop(second);
}

#[tokio::test]
async fn the_end_of_a_front_end_is_noticed_while_many_of_its_messages_wait() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    for _ in 0..20 {
        front_end.send(b"x", &[]);
    }
    let connection = gateway.connected().await;
    gateway.message().await;
    drop(front_end);
    assert_eq!(gateway.disconnected().await, connection);
}

#[tokio::test]
async fn a_second_front_end_waits_until_the_first_has_disconnected() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let first = holder.front_end("d");
    let connection = gateway.connected().await;
    let second = holder.front_end("d");
    second.send(b"second", &[]);
    first.send(b"first", &[]);
    let message = gateway.message().await;
    assert_eq!(message.bytes, framed(b"first"));
    gateway.client.done(answer(&message, "s", "r1")).await.unwrap();
    assert_eq!(first.receive_text(), "r1");
    gateway.expect_silence().await;
    drop(first);
    assert_eq!(gateway.disconnected().await, connection);
    assert!(gateway.connected().await > connection);
    let message = gateway.message().await;
    assert_eq!((message.bytes.clone(), message.number), (framed(b"second"), 1));
    gateway.client.done(answer(&message, "s", "r2")).await.unwrap();
    assert_eq!(second.receive_text(), "r2");
}

#[tokio::test]
async fn a_stalled_front_end_costs_only_its_own_device() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["stalled", "other"]).await;
    let stalled = holder.front_end("stalled");
    gateway.connected().await;
    stalled.send_raw(&framed(b"half")[..14], &[]);
    let other = holder.front_end("other");
    gateway.connected().await;
    for _ in 0..10 {
        other.send(b"x", &[]);
        let message = gateway.message().await;
        assert_eq!(message.device, "other");
        gateway.client.done(answer(&message, "s", "r")).await.unwrap();
        other.receive();
    }
    stalled.send_raw(&framed(b"half")[14..], &[]);
    assert_eq!(gateway.message().await.bytes, framed(b"half"));
}

#[tokio::test]
async fn front_ends_that_violate_the_framing_are_disconnected() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let too_long = [&[0; 8][..], &5000u32.to_le_bytes()].concat();
    for garbage in [&too_long[..], &[0xff; 100]] {
        let front_end = holder.front_end("d");
        // The gateway is not told about a connection that ends before.
        gateway.connected().await;
        front_end.send_raw(garbage, &[]);
        front_end.expect_end();
        gateway.disconnected().await;
    }
    // Floods of descriptors: within a message, and in parts of a message.
    for parts in [1, 12] {
        let probe = Probe::new();
        let front_end = holder.front_end("d");
        gateway.connected().await;
        let message = framed(&[]);
        for part in message.chunks(12 / parts) {
            // The connection may end before the last part.
            let fds = vec![probe.borrow(); if parts == 1 { 253 } else { 5 }];
            let bytes = [std::io::IoSlice::new(part)];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
            let _ =
                rustix::net::sendmsg(&front_end.0, &bytes, &mut control, rustix::net::SendFlags::NOSIGNAL);
        }
        front_end.expect_end();
        gateway.disconnected().await;
        drop(front_end);
        probe.expect_closed();
    }
    // The device is as good as new.
    let front_end = holder.front_end("d");
    front_end.send(b"x", &[new_file().as_fd()]);
    gateway.connected().await;
    let message = gateway.message().await;
    assert_eq!((&message.bytes, message.fds.len()), (&framed(b"x"), 1));
}

#[tokio::test]
async fn a_front_end_that_does_not_read_holds_up_only_itself() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    let connection = gateway.connected().await;
    let long = || FrontEndReply { bytes: framed(&[1; 60_000]), fds: vec![] };
    let mut accepted = 0;
    let refused = loop {
        match gateway.client.send("d", connection, long()).await {
            Ok(()) => accepted += 1,
            Err(e) => break e,
        }
        assert!(accepted < 1000, "the holder limits what waits for a front end");
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    };
    assert_eq!(refused, ClientError::Refused(HolderRefusal::FrontEndBusy("d".into())));
    front_end.send(b"x", &[]);
    gateway.expect_silence().await;
    for _ in 0..accepted {
        assert_eq!(front_end.receive().0.len(), 60_000);
    }
    assert_eq!(gateway.message().await.bytes, framed(b"x"));
}

#[tokio::test]
async fn a_gateway_can_disconnect_a_front_end_after_a_last_reply() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    front_end.send(b"x", &[]);
    let connection = gateway.connected().await;
    let message = gateway.message().await;
    gateway.client.done(Done { close: true, ..answer(&message, "s", "bye") }).await.unwrap();
    assert_eq!(front_end.receive_text(), "bye");
    front_end.expect_end();
    assert_eq!(gateway.disconnected().await, connection);
}

#[tokio::test]
async fn a_device_that_is_removed_disconnects_its_front_end() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let probe = Probe::new();
    let front_end = holder.front_end("d");
    front_end.send(b"x", &[probe.borrow()]);
    gateway.connected().await;
    drop(gateway.message().await);
    gateway.client.remove("d").await.unwrap();
    front_end.expect_end();
    probe.expect_closed();
    assert!(!holder.socket("d").exists());
    gateway.expect_silence().await;
    drop(gateway);
    let gateway = holder.gateway_with(&["d"]).await;
    assert_eq!(gateway.inventory.len(), 0);
    holder.front_end("d");
}
