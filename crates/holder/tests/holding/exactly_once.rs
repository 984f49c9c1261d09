//! Each message of a front end takes effect exactly once, although gateways are killed at any point.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;

use bytes::Bytes;
use holder::{Done, FrontEndReply, HeldMessage, HolderClient, HolderEvent, InventoryDevice, SharedFd};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::support::{FrontEnd, TestHolder, framed, inode, new_file};

/// Number of messages of each front end.
const MESSAGES: u64 = 150;
/// Number of keys under which the gateway keeps descriptors, in turn.
const KEYS: u64 = 5;

/// A front end that sends numbered messages, each with a new file. The gateway must count the messages,
/// and return the file of the message before with each reply.
pub struct NumberedFrontEnd {
    stream: FrontEnd,
    sent: u64,
    replies: u64,
    inodes: Vec<u64>,
}

impl NumberedFrontEnd {
    pub fn connect(socket: &Path) -> NumberedFrontEnd {
        NumberedFrontEnd { stream: FrontEnd::connect(socket), sent: 0, replies: 0, inodes: Vec::new() }
    }

    pub fn send(&mut self) {
        let file = new_file();
        self.inodes.push(inode(&file));
        self.stream.send(&self.sent.to_le_bytes(), &[file.as_fd()]);
        self.sent += 1;
    }

    /// Receives the next reply and checks it.
    pub fn receive(&mut self) {
        let (payload, fds) = self.stream.receive();
        let expected = [self.replies, self.replies + 1].map(u64::to_le_bytes).concat();
        assert_eq!(payload, expected, "message {} takes effect once, in order", self.replies);
        let before = self.replies.saturating_sub(1) as usize;
        let returned: Vec<u64> = fds.iter().map(inode).collect();
        assert_eq!(returned, [self.inodes[before]], "reply {} has the kept file", self.replies);
        self.replies += 1;
    }

    pub fn run(mut self, mut random: StdRng) {
        while self.replies < MESSAGES {
            let window = random.random_range(1..9);
            while self.sent < MESSAGES && self.sent < self.replies + window {
                self.send();
            }
            self.receive();
        }
    }
}

/// A gateway's view of a device: how many messages took effect, and the files of the last ones.
#[derive(Default)]
struct Counter {
    count: u64,
    kept: BTreeMap<u64, SharedFd>,
}

/// A gateway that counts messages.
#[derive(Default)]
pub struct CountingGateway(BTreeMap<String, Counter>);

impl CountingGateway {
    pub fn list(&mut self, device: InventoryDevice) {
        let mut counter = Counter::default();
        if let Some(front_end) = device.front_end {
            counter.count = front_end.state.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
            counter.kept = front_end.kept.into_iter().collect();
            assert_eq!(counter.kept.len() as u64, counter.count.min(KEYS));
        }
        assert!(self.0.insert(device.device, counter).is_none(), "each device is listed once");
    }

    pub fn answer(&mut self, message: HeldMessage, state_padding: usize) -> Done {
        let counter = self.0.entry(message.device.clone()).or_default();
        let sent = u64::from_le_bytes(*message.bytes[12..].first_chunk().unwrap());
        let [file] = &message.fds[..] else { panic!("the message has one file") };
        counter.count += 1;
        counter.kept.insert(sent % KEYS, file.clone());
        let returned = counter.kept[&(sent.saturating_sub(1) % KEYS)].clone();
        let mut state = counter.count.to_le_bytes().to_vec();
        state.resize(8 + state_padding, 0);
        Done {
            device: message.device,
            connection: message.connection,
            number: message.number,
            state: Some(Bytes::from(state)),
            keep: vec![(sent % KEYS, file.clone())],
            reply: Some(FrontEndReply {
                bytes: framed(&[sent, counter.count].map(u64::to_le_bytes).concat()),
                fds: vec![returned],
            }),
            ..Done::default()
        }
    }
}

/// Runs gateways, one after the other, each of which is killed at a random point.
async fn run_mortal_gateways(control: &Path, mut random: StdRng, kills: &Cell<u64>) {
    loop {
        let (client, mut events) = HolderClient::connect(control).await.unwrap();
        let mut gateway = CountingGateway::default();
        let mut life = random.random_range(0..30);
        while life > 0 {
            life -= 1;
            match events.next().await.unwrap() {
                HolderEvent::Device(device) => gateway.list(device),
                HolderEvent::Message(message) => {
                    if life == 0 && random.random() {
                        break;
                    }
                    // A long state does not fit into the buffer of the socket.
                    let padding = if random.random_ratio(1, 4) { 900_000 } else { 10 };
                    let answer = client.done(gateway.answer(message, padding));
                    if life > 0 || random.random() {
                        answer.await.unwrap();
                    } else {
                        for _ in 0..random.random_range(0..6) {
                            tokio::task::yield_now().await;
                        }
                    }
                }
                // A front end that has received all replies disconnects.
                HolderEvent::InventoryComplete
                | HolderEvent::Connected { .. }
                | HolderEvent::Disconnected { .. } => {}
                event => panic!("unexpected: {event:?}"),
            }
        }
        kills.set(kills.get() + 1);
    }
}

fn seed() -> u64 {
    let seed = std::env::var("OUTBOARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| rand::rng().random());
    println!("OUTBOARD_SEED={seed}");
    seed
}

#[tokio::test]
async fn each_message_takes_effect_once_although_gateways_are_killed_at_random_points() {
    let seed = seed();
    let holder = TestHolder::start();
    let (devices, control) = (["a", "b", "c"], holder.control());
    drop(holder.gateway_with(&devices).await);
    let front_ends = devices.iter().enumerate().map(|(number, device)| {
        let front_end = NumberedFrontEnd::connect(&holder.socket(device));
        let random = StdRng::seed_from_u64(seed.wrapping_add(number as u64 + 1));
        tokio::task::spawn_blocking(move || front_end.run(random))
    });
    let front_ends: Vec<_> = front_ends.collect();
    let kills = Cell::new(0);
    let all = async {
        for front_end in front_ends {
            front_end.await.unwrap();
        }
    };
    tokio::select! {
        () = all => {}
        () = run_mortal_gateways(&control, StdRng::seed_from_u64(seed), &kills) => {}
    }
    assert!(kills.get() > 3, "gateways were killed");
}
