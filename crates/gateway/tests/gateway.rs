//! A gateway over storage in memory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::clock::WallClock;
use client::engine::MemEngine;
use client::{Client, Options};
use gateway::{AttachmentFile, Gateway, GatewayConfig};
use holder::{Holder, HolderConfig};
use tokio::io::AsyncReadExt;
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
