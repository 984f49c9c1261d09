//! A gateway over storage in memory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::clock::WallClock;
use client::engine::MemEngine;
use client::{Client, Options};
use gateway::{AttachmentFile, Gateway, GatewayConfig};
use holder::{Framing, Holder, HolderClient, HolderConfig, HolderEvent};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::LocalSet;
use vdisk::OpenSession;
use wire::{DiskCommand, DiskReply, DiskRequest, Error, FrontEnd};

const MIB: u64 = 1 << 20;

struct World {
    root: Arc<MemEngine>,
    dir: tempfile::TempDir,
}

impl World {
    async fn new() -> World {
        let root = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&root) as _, Options::default());
        client.create_pool("pool").await.unwrap();
        // The holder refuses a directory that other users can enter.
        let private = std::fs::Permissions::from_mode(0o700);
        let dir = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        World { root, dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn gateway(&self, name: &str, has_holder: bool) -> Gateway {
        let root = Arc::clone(&self.root);
        let open_session: OpenSession = Arc::new(move || {
            let client = Client::over(Arc::new(root.sibling()), Options::default());
            Box::pin(async move { Ok(client) })
        });
        Gateway::start(GatewayConfig {
            name: name.into(),
            client: Client::over(Arc::clone(&self.root) as _, Options::default()),
            open_session,
            holder: has_holder.then(|| self.path("holder.sock").into()),
            attachments: AttachmentFile::at(&self.dir.path().join(format!("{name}.json"))),
            clock: WallClock::default(),
        })
        .unwrap()
    }
}

async fn ask(gateway: &Gateway, command: DiskCommand) -> wire::Result<DiskReply> {
    gateway.execute(DiskRequest { pool: "pool".into(), command }).await
}

fn create(disk: &str) -> DiskCommand {
    DiskCommand::Create { disk: disk.into(), size: 8 * MIB, chunk: MIB }
}

fn attach(disk: &str, front_end: FrontEnd, takes_over: bool) -> DiskCommand {
    let disk = disk.into();
    DiskCommand::Attach { disk, front_end, gateway: None, takes_over, is_read_only: false }
}

/// Returns whether an NBD server answers at a socket.
async fn has_server(path: &str) -> bool {
    let Ok(mut stream) = UnixStream::connect(path).await else { return false };
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting).await.is_ok() && greeting == *b"NBDMAGIC"
}

async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    for _ in 0..500 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}");
}

fn refused(answer: wire::Result<DiskReply>) -> String {
    match answer {
        Err(Error::CommandRefused(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_gateway_that_starts_again_serves_its_disks_again() {
    let world = World::new().await;
    let path = world.path("vm.sock");
    let front_end = || FrontEnd::Nbd(path.clone());
    {
        let gateway = world.gateway("one", false);
        ask(&gateway, create("vm")).await.unwrap();
        let attached = ask(&gateway, attach("vm", front_end(), false)).await.unwrap();
        assert_eq!(attached, DiskReply::Attached(front_end()));
        assert!(has_server(&path).await);
        assert_eq!(ask(&gateway, attach("vm", front_end(), false)).await, Ok(attached));
        let other = attach("vm", FrontEnd::Nbd(world.path("other.sock")), false);
        assert!(refused(ask(&gateway, other).await).contains("already"));
        ask(&gateway, DiskCommand::Snapshot { disk: "vm".into(), snapshot: "s".into() }).await.unwrap();
    }
    eventually("the first gateway has ended", async || !has_server(&path).await).await;
    let again = world.gateway("one", false);
    let name = Some("one".to_owned());
    eventually("the disk is attached again", async || {
        let stat = ask(&again, DiskCommand::Stat { disk: "vm".into() }).await;
        let is_attached = matches!(&stat, Ok(DiskReply::Disks(disks)) if disks[0].gateway == name);
        is_attached && has_server(&path).await
    })
    .await;
    ask(&again, DiskCommand::Snapshot { disk: "vm".into(), snapshot: "t".into() }).await.unwrap();

    let other = world.gateway("two", false);
    let taken = refused(ask(&other, attach("vm", front_end(), false)).await);
    assert!(taken.contains("attached to one"), "{taken}");
    let second = world.path("second.sock");
    ask(&other, attach("vm", FrontEnd::Nbd(second.clone()), true)).await.unwrap();
    assert!(has_server(&second).await);
    ask(&other, DiskCommand::Detach { disk: "vm".into() }).await.unwrap();
    assert!(!has_server(&second).await);
    let elsewhere = ask(&other, DiskCommand::Detach { disk: "vm".into() }).await;
    assert_eq!(elsewhere, Ok(DiskReply::NotHere));
    ask(&other, DiskCommand::Remove { disk: "vm".into(), with_snapshots: true }).await.unwrap();
    assert_eq!(ask(&other, DiskCommand::List).await.unwrap(), DiskReply::Disks(vec![]));
}

#[tokio::test]
async fn a_vhost_user_device_stays_with_the_holder_while_the_gateway_restarts() {
    let world = World::new().await;
    let holder = world.path("holder.sock");
    let test = async {
        let holder = Holder::bind(HolderConfig::new(Path::new(&holder))).unwrap();
        tokio::task::spawn_local(holder.run(std::future::pending::<()>()));
        let path = world.path("vhost.sock");
        let front_end = FrontEnd::VhostUser(path.clone());
        {
            let gateway = world.gateway("one", true);
            ask(&gateway, create("vm")).await.unwrap();
            ask(&gateway, attach("vm", front_end.clone(), false)).await.unwrap();
            UnixStream::connect(&path).await.unwrap();
        }
        UnixStream::connect(&path).await.unwrap();
        let gateway = world.gateway("one", true);
        eventually("the device can be detached", async || {
            ask(&gateway, DiskCommand::Detach { disk: "vm".into() }).await == Ok(DiskReply::Done)
        })
        .await;
        assert!(UnixStream::connect(&path).await.is_err(), "the holder has removed the device");
        let without = world.gateway("two", false);
        let why = refused(ask(&without, attach("vm", front_end, false)).await);
        assert!(why.contains("no holder"), "{why}");
        let stat = ask(&without, DiskCommand::Stat { disk: "vm".into() }).await.unwrap();
        assert!(matches!(stat, DiskReply::Disks(disks) if disks[0].gateway.is_none()), "it was detached");
    };
    LocalSet::new().run_until(test).await;
}

/// Asks a vhost-user device for its features.
async fn ask_features(front_end: &mut UnixStream) -> std::io::Result<u64> {
    let (get_features, version, no_payload) = (1_u32, 1_u32, 0_u32);
    let request = [get_features, version, no_payload].map(u32::to_le_bytes).concat();
    front_end.write_all(&request).await?;
    let mut reply = [0; 20];
    front_end.read_exact(&mut reply).await?;
    Ok(u64::from_le_bytes(reply[12..].try_into().unwrap()))
}

async fn connected(path: &str) -> UnixStream {
    eventually("the socket exists", async || UnixStream::connect(path).await.is_ok()).await;
    UnixStream::connect(path).await.unwrap()
}

#[tokio::test]
async fn a_front_end_gets_all_answers_while_the_link_to_the_holder_is_lost() {
    let world = World::new().await;
    let control = world.path("holder.sock");
    let test = async {
        let holder = Holder::bind(HolderConfig::new(Path::new(&control))).unwrap();
        tokio::task::spawn_local(holder.run(std::future::pending::<()>()));
        let (path, other) = (world.path("vhost.sock"), world.path("other.sock"));
        let gateway = world.gateway("one", true);
        for (disk, path) in [("vm", &path), ("other", &other)] {
            ask(&gateway, create(disk)).await.unwrap();
            ask(&gateway, attach(disk, FrontEnd::VhostUser(path.clone()), false)).await.unwrap();
        }
        let mut front_end = connected(&path).await;
        let features = ask_features(&mut front_end).await.unwrap();
        assert_ne!(features, 0);
        for round in 0..5 {
            let asking = async {
                for _ in 0..20 {
                    assert_eq!(ask_features(&mut front_end).await.unwrap(), features);
                }
            };
            let replacing = async {
                tokio::time::sleep(Duration::from_micros(300 * round)).await;
                // A newer gateway replaces the connection, and then ends.
                let replaced = HolderClient::connect(Path::new(&control)).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
                drop(replaced);
            };
            let both = async { tokio::join!(asking, replacing) };
            tokio::time::timeout(Duration::from_secs(20), both).await.expect("all requests are answered");
        }
        // Another front end takes the place of this one while there is no link.
        let replaced = HolderClient::connect(Path::new(&control)).await.unwrap();
        drop(front_end);
        let mut next = connected(&path).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(replaced);
        assert_eq!(ask_features(&mut next).await.unwrap(), features);
        drop(gateway);
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn a_holder_that_starts_again_gets_the_devices_again_and_loses_unlisted_ones() {
    let world = World::new().await;
    let control = world.path("holder.sock");
    let test = async {
        let start = || {
            let holder = Holder::bind(HolderConfig::new(Path::new(&control))).unwrap();
            tokio::task::spawn_local(holder.run(std::future::pending::<()>()))
        };
        let running = start();
        let (path, ghost) = (world.path("vhost.sock"), world.path("ghost.sock"));
        let gateway = world.gateway("one", true);
        ask(&gateway, create("vm")).await.unwrap();
        ask(&gateway, attach("vm", FrontEnd::VhostUser(path.clone()), false)).await.unwrap();
        let mut front_end = connected(&path).await;
        let features = ask_features(&mut front_end).await.unwrap();
        running.abort();
        running.await.unwrap_err();
        assert!(ask_features(&mut front_end).await.is_err(), "the holder has ended");
        let _running = start();
        let mut front_end = connected(&path).await;
        assert_eq!(ask_features(&mut front_end).await.unwrap(), features);

        // A device that the gateway has left behind.
        let (client, mut events) = HolderClient::connect(Path::new(&control)).await.unwrap();
        while !matches!(events.next().await.unwrap(), HolderEvent::InventoryComplete) {}
        client.add("pool/ghost", Path::new(&ghost), Framing::VHOST_USER).await.unwrap();
        drop((client, events));
        eventually("the device is removed", async || UnixStream::connect(&ghost).await.is_err()).await;
        assert_eq!(ask_features(&mut front_end).await.unwrap(), features);
        drop(gateway);
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn a_disk_that_cannot_be_attached_again_can_be_detached() {
    let world = World::new().await;
    let path = world.path("vm.sock");
    let gateway = world.gateway("one", false);
    ask(&gateway, create("vm")).await.unwrap();
    ask(&gateway, attach("vm", FrontEnd::Nbd(path.clone()), false)).await.unwrap();
    drop(gateway);
    eventually("the first gateway has ended", async || !Path::new(&path).exists()).await;
    std::fs::write(&path, "not a socket").unwrap();
    let gateway = world.gateway("one", false);
    let detached = ask(&gateway, DiskCommand::Detach { disk: "vm".into() }).await;
    assert_eq!(detached, Ok(DiskReply::Done));
    let stat = ask(&gateway, DiskCommand::Stat { disk: "vm".into() }).await.unwrap();
    assert!(matches!(stat, DiskReply::Disks(disks) if disks[0].gateway.is_none()));
    std::fs::remove_file(&path).unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!Path::new(&path).exists(), "the gateway does not attach it later");
    let again = ask(&gateway, DiskCommand::Detach { disk: "vm".into() }).await;
    assert_eq!(again, Ok(DiskReply::NotHere));
}

#[tokio::test]
async fn a_disk_that_another_gateway_has_taken_over_can_be_attached_again() {
    let world = World::new().await;
    let (path, second) = (world.path("one.sock"), world.path("two.sock"));
    let (one, two) = (world.gateway("one", false), world.gateway("two", false));
    ask(&one, create("vm")).await.unwrap();
    ask(&one, attach("vm", FrontEnd::Nbd(path.clone()), false)).await.unwrap();
    ask(&two, attach("vm", FrontEnd::Nbd(second), true)).await.unwrap();
    let snapshot = |name: &str| DiskCommand::Snapshot { disk: "vm".into(), snapshot: name.into() };
    // The first gateway learns that it has lost the disk.
    ask(&one, snapshot("a")).await.unwrap_err();
    assert_eq!(ask(&one, snapshot("b")).await, Ok(DiskReply::NotHere));
    let taken = refused(ask(&one, attach("vm", FrontEnd::Nbd(path.clone()), false)).await);
    assert!(taken.contains("attached to two"), "{taken}");
    ask(&one, attach("vm", FrontEnd::Nbd(path.clone()), true)).await.unwrap();
    assert!(has_server(&path).await);
    ask(&one, snapshot("c")).await.unwrap();
    // Detaching a lost disk only ends its front end.
    ask(&two, snapshot("d")).await.unwrap_err();
    ask(&two, DiskCommand::Detach { disk: "vm".into() }).await.unwrap();
    ask(&one, snapshot("e")).await.unwrap();
}
