//! Tests of the state machine, among them a comparison of random runs with a model.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

const LIMITS: DeviceLimits = DeviceLimits { kept_fds_max: 3, reply_fds_max: 2 };

fn device() -> DeviceMachine {
    DeviceMachine::new("d".into(), LIMITS)
}

fn content(bytes: &str) -> MessageContent {
    MessageContent { bytes: Bytes::copy_from_slice(bytes.as_bytes()), fds: Vec::new() }
}

fn fd() -> SharedFd {
    Arc::new(std::fs::File::open("/dev/null").unwrap().into())
}

fn change(connection: u64) -> HeldChange {
    HeldChange { device: "d".into(), connection, state: None, keep: Vec::new(), drop: Vec::new() }
}

fn done(connection: u64, number: u64, reply: Option<&str>) -> HeldDeviceEvent {
    let reply = reply.map(content);
    HeldDeviceEvent::Done { number, change: change(connection), kept: Vec::new(), reply, close: false }
}

fn ended(connection: u64) -> HolderRefusal {
    HolderRefusal::ConnectionEnded { device: "d".into(), connection }
}

/// Expects the message of this number as the only news.
fn expect_message(device: &mut DeviceMachine, expected: u64, bytes: &str) {
    match device.news() {
        Some(News::Message { number, content, .. }) => {
            assert_eq!((number, &content.bytes[..]), (expected, bytes.as_bytes()));
        }
        other => panic!("message {expected} is pending, not {other:?}"),
    }
    assert!(device.news().is_none(), "one message is pending at a time");
}

#[test]
fn the_pending_message_is_told_once_per_gateway_and_until_it_is_answered() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(5)).unwrap();
    device.step(HeldDeviceEvent::Received(content("a"))).unwrap();
    device.step(HeldDeviceEvent::Received(content("b"))).unwrap();
    assert!(matches!(device.news(), Some(News::Connected(5))));
    expect_message(&mut device, 1, "a");
    for _ in 0..3 {
        device.step(HeldDeviceEvent::GatewayLost).unwrap();
        assert!(!device.has_news(), "no gateway is there");
        assert_eq!(device.inventory().unwrap().kept.connection, 5);
        expect_message(&mut device, 1, "a");
    }
    device.step(done(5, 1, None)).unwrap();
    expect_message(&mut device, 2, "b");
    let refused = device.step(done(5, 1, None)).unwrap_err();
    assert_eq!(refused, HolderRefusal::NotPending { device: "d".into(), number: 1 }, "it was answered");
    device.step(HeldDeviceEvent::GatewayLost).unwrap();
    device.inventory();
    let refused = device.step(done(5, 2, None)).unwrap_err();
    assert_eq!(
        refused,
        HolderRefusal::NotPending { device: "d".into(), number: 2 },
        "this gateway does not know it"
    );
}

#[test]
fn state_and_descriptors_change_with_the_answer_and_survive_the_gateway() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(1)).unwrap();
    device.step(HeldDeviceEvent::Received(content("a"))).unwrap();
    while device.news().is_some() {}
    let keep = |keep: &[u64], drop: &[u64]| HeldChange {
        state: Some("s".into()),
        keep: keep.to_vec(),
        drop: drop.to_vec(),
        ..change(1)
    };
    let (first, second) = (fd(), fd());
    let kept = vec![first.clone(), second.clone()];
    let event = HeldDeviceEvent::Done {
        number: 1,
        change: keep(&[7, 8], &[]),
        kept,
        reply: Some(content("r")),
        close: false,
    };
    device.step(event).unwrap();
    assert_eq!(&device.outgoing().unwrap().bytes[..], b"r");
    // The new descriptor of key 8 replaces the old one. Key 7 is dropped, key 9 is not known.
    let replaced = fd();
    let deposit = HeldDeviceEvent::Deposit { change: keep(&[8], &[7, 9]), kept: vec![replaced.clone()] };
    device.step(deposit).unwrap();
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1), "both are dropped");
    device.step(HeldDeviceEvent::GatewayLost).unwrap();
    let snapshot = device.inventory().unwrap();
    assert_eq!((&snapshot.kept.state[..], snapshot.kept.fds), (&b"s"[..], 1));
    assert!(snapshot.fds[0].0 == 8 && Arc::ptr_eq(&snapshot.fds[0].1, &replaced));
    device.step(HeldDeviceEvent::Ended).unwrap();
    drop(snapshot);
    assert_eq!(Arc::strong_count(&replaced), 1, "the end of the connection drops the descriptors");
}

#[test]
fn a_refused_call_changes_nothing() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(1)).unwrap();
    device.step(HeldDeviceEvent::Received(content("a"))).unwrap();
    while device.news().is_some() {}
    let call = |change: HeldChange, reply: Option<MessageContent>| {
        let kept = change.keep.iter().map(|_| fd()).collect();
        HeldDeviceEvent::Done { number: 1, change, kept, reply, close: true }
    };
    let state = |len: usize| Some(Bytes::from(vec![0; len]));
    let too_many = MessageContent { bytes: "r".into(), fds: vec![fd(), fd(), fd()] };
    let refused = [
        (
            call(HeldChange { keep: vec![1, 2, 3, 4], state: state(1), ..change(1) }, None),
            HolderRefusal::TooManyKeptFds { count: 4, max: 3 },
        ),
        (
            call(HeldChange { keep: vec![1], ..change(1) }, Some(too_many)),
            HolderRefusal::TooManyReplyFds { count: 3, max: 2 },
        ),
        (call(HeldChange { state: state(1), ..change(2) }, None), ended(2)),
    ];
    for (event, expected) in refused {
        assert_eq!(device.step(event), Err(expected));
    }
    // A key counts once, whether it is replaced or given twice.
    let twice = HeldChange { keep: vec![1, 1, 2, 3], state: state(STATE_BYTES_MAX), ..change(1) };
    device.step(HeldDeviceEvent::GatewayLost).unwrap();
    let before = device.inventory().unwrap();
    assert_eq!((before.kept.state.len(), before.fds.len()), (0, 0));
    expect_message(&mut device, 1, "a");
    device.step(call(twice, None)).unwrap();
    assert!(device.is_over());
}

#[test]
fn a_gateway_learns_of_a_further_connection_after_it_acknowledged_the_end_of_the_last() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(1)).unwrap();
    assert!(matches!(device.news(), Some(News::Connected(1))));
    device.step(HeldDeviceEvent::Ended).unwrap();
    // Connection 2 comes and goes unnoticed.
    device.step(HeldDeviceEvent::Connected(2)).unwrap();
    device.step(HeldDeviceEvent::Ended).unwrap();
    device.step(HeldDeviceEvent::Connected(3)).unwrap();
    device.step(HeldDeviceEvent::Received(content("a"))).unwrap();
    assert!(matches!(device.news(), Some(News::Disconnected(1))));
    assert_eq!(device.step(done(1, 1, None)), Err(ended(1)));
    assert_eq!(device.step(done(2, 1, None)), Err(ended(2)));
    assert!(!device.has_news());
    device.step(HeldDeviceEvent::Acknowledged(2)).unwrap();
    assert!(!device.has_news(), "another connection was acknowledged");
    device.step(HeldDeviceEvent::Acknowledged(1)).unwrap();
    assert!(matches!(device.news(), Some(News::Connected(3))));
    expect_message(&mut device, 1, "a");
}

#[test]
fn a_front_end_that_does_not_read_gets_no_further_message_answered() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(1)).unwrap();
    for number in 1..=UNANSWERED_MAX {
        assert!(device.reads(), "message {number} has space");
        device.step(HeldDeviceEvent::Received(content("m"))).unwrap();
    }
    assert!(!device.reads(), "the front end has to wait");
    assert!(matches!(device.news(), Some(News::Connected(1))));
    expect_message(&mut device, 1, "m");
    let send = || HeldDeviceEvent::Send { connection: 1, content: content("s") };
    for _ in 1..OUTBOX_MAX {
        device.step(send()).unwrap();
    }
    assert_eq!(device.step(send()), Err(HolderRefusal::FrontEndBusy("d".into())));
    device.step(done(1, 1, Some("r"))).unwrap();
    for _ in 0..OUTBOX_MAX {
        assert!(!device.has_news(), "replies are not written");
        device.step(HeldDeviceEvent::Written).unwrap();
    }
    expect_message(&mut device, 2, "m");
}

#[test]
fn a_closed_connection_ends_after_its_last_reply() {
    let mut device = device();
    device.step(HeldDeviceEvent::Connected(1)).unwrap();
    device.step(HeldDeviceEvent::Received(content("a"))).unwrap();
    device.step(HeldDeviceEvent::Received(content("b"))).unwrap();
    while device.news().is_some() {}
    let close = HeldDeviceEvent::Done {
        number: 1,
        change: change(1),
        kept: vec![],
        reply: Some(content("bye")),
        close: true,
    };
    device.step(close).unwrap();
    assert!(!device.is_over() && !device.reads() && !device.has_news());
    assert_eq!(device.step(HeldDeviceEvent::Deposit { change: change(1), kept: vec![] }), Err(ended(1)));
    device.step(HeldDeviceEvent::GatewayLost).unwrap();
    assert!(device.inventory().is_none(), "a connection that ends is not in the inventory");
    assert!(!device.has_news());
    device.step(HeldDeviceEvent::Written).unwrap();
    assert!(device.is_over());
    device.step(HeldDeviceEvent::Ended).unwrap();
    assert!(!device.has_news());
}

/// A step of a random run.
#[derive(Debug, Clone)]
enum Step {
    Front(u8),
    Gateway(u8),
    KillGateway,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<u8>().prop_map(Step::Front),
        6 => any::<u8>().prop_map(Step::Gateway),
        1 => Just(Step::KillGateway),
    ]
}

/// A front end and a gateway around a device. The gateway counts messages in the device's state and
/// replies with the count.
struct World {
    device: DeviceMachine,
    /// Number of the last connection, and whether it is connected.
    connection: (u64, bool),
    sent: u64,
    replies: u64,
    /// What the gateway received and has not answered.
    received: Option<(u64, u64)>,
    unacknowledged: Option<u64>,
    state: u64,
}

impl World {
    fn front(&mut self, choice: u8) {
        match choice % 8 {
            0 if self.connection.1 => {
                self.connection.1 = false;
                self.device.step(HeldDeviceEvent::Ended).unwrap();
            }
            _ if !self.connection.1 => {
                self.connection = (self.connection.0 + 1, true);
                (self.sent, self.replies) = (0, 0);
                self.device.step(HeldDeviceEvent::Connected(self.connection.0)).unwrap();
            }
            1..=4 if self.device.reads() => {
                self.sent += 1;
                self.device.step(HeldDeviceEvent::Received(content(&self.sent.to_string()))).unwrap();
            }
            _ => {
                let Some(reply) = self.device.outgoing() else { return };
                self.replies += 1;
                assert_eq!(reply.bytes, self.replies.to_string(), "each message takes effect once, in order");
                self.device.step(HeldDeviceEvent::Written).unwrap();
            }
        }
        assert!(self.replies <= self.sent);
    }

    fn gateway(&mut self, choice: u8) {
        match choice % 3 {
            0 => match self.device.news() {
                None => {}
                Some(News::Connected(_)) => self.state = 0,
                Some(News::Disconnected(connection)) => self.unacknowledged = Some(connection),
                Some(News::Message { connection, number, content }) => {
                    assert_eq!(content.bytes, number.to_string());
                    self.received = Some((connection, number));
                }
            },
            1 => {
                let Some((connection, number)) = self.received.take() else { return };
                let count = self.state + 1;
                let state = Some(Bytes::from(count.to_string()));
                let change = HeldChange { state, ..change(connection) };
                let reply = Some(content(&count.to_string()));
                let call = HeldDeviceEvent::Done { number, change, kept: vec![], reply, close: false };
                match self.device.step(call) {
                    Ok(()) => self.state = count,
                    Err(refusal) => assert_eq!(refusal, ended(connection)),
                }
            }
            _ => {
                if let Some(connection) = self.unacknowledged.take() {
                    self.device.step(HeldDeviceEvent::Acknowledged(connection)).unwrap();
                }
            }
        }
    }

    fn kill_gateway(&mut self) {
        (self.received, self.unacknowledged) = (None, None);
        self.device.step(HeldDeviceEvent::GatewayLost).unwrap();
        self.state = match self.device.inventory() {
            Some(snapshot) if !snapshot.kept.state.is_empty() => {
                std::str::from_utf8(&snapshot.kept.state).unwrap().parse().unwrap()
            }
            _ => 0,
        };
    }
}

proptest! {
    #[test]
    fn each_message_takes_effect_exactly_once_although_gateways_are_killed(
        steps in proptest::collection::vec(any_step(), 1..400),
    ) {
        let mut world = World {
            device: device(), connection: (0, false), sent: 0, replies: 0, received: None,
            unacknowledged: None, state: 0,
        };
        for step in steps {
            match step {
                Step::Front(choice) => world.front(choice),
                Step::Gateway(choice) => world.gateway(choice),
                Step::KillGateway => world.kill_gateway(),
            }
        }
        // Without further kills, all messages are answered.
        for choice in 0..60 {
            world.gateway(choice);
            if world.connection.1 {
                world.front(7);
            }
        }
        prop_assert!(!world.connection.1 || world.replies == world.sent);
    }
}
