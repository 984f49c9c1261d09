//! Gateways that are processes of their own, and that are killed.

use std::path::PathBuf;
use std::process::{Child, Command};

use holder::{HolderClient, HolderEvent};
use rand::Rng;

use crate::exactly_once::{CountingGateway, NumberedFrontEnd};
use crate::support::TestHolder;

/// The environment variable with the path of the control socket.
const CONTROL: &str = "OUTBOARD_TEST_HOLDER_CONTROL";
/// Number of gateways that are killed.
const KILLS: usize = 8;

fn spawn_gateway(holder: &TestHolder) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "processes::child_process_that_counts_messages"])
        .env(CONTROL, holder.control())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn a_front_end_does_not_notice_that_gateway_processes_are_killed() {
    let holder = TestHolder::start();
    drop(holder.gateway_with(&["d"]).await);
    let mut front_end = NumberedFrontEnd::connect(&holder.socket("d"));
    for _ in 0..KILLS {
        let mut gateway = spawn_gateway(&holder);
        for _ in 0..5 {
            front_end.send();
        }
        for _ in 0..5 {
            front_end.send();
            front_end.receive();
        }
        // Five messages are on their way. The kill strikes at a random point of their handling.
        let received = rand::rng().random_range(0..5);
        (0..received).for_each(|_| front_end.receive());
        gateway.kill().unwrap();
        gateway.wait().unwrap();
        let mut successor = spawn_gateway(&holder);
        (received..5).for_each(|_| front_end.receive());
        successor.kill().unwrap();
        successor.wait().unwrap();
    }
}

#[ignore = "a child process of another test"]
#[tokio::test]
async fn child_process_that_counts_messages() {
    let control = PathBuf::from(std::env::var(CONTROL).unwrap());
    let (client, mut events) = HolderClient::connect(&control).await.unwrap();
    let mut gateway = CountingGateway::default();
    loop {
        match events.next().await.unwrap() {
            HolderEvent::Device(device) => gateway.list(device),
            HolderEvent::Message(message) => drop(client.done(gateway.answer(message, 300_000))),
            _ => {}
        }
    }
}
