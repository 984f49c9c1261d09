//! Tests of `disk import` and `disk export` on the reference engine.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use base::clock::WallClock;
use clap::Parser;
use client::engine::MemEngine;
use client::{Client, Options};
use node::failure::Result;
use std::sync::Arc;
use vdisk::{AttachOptions, AttachedDisk, CreateOptions, Disks, OpenSession};

use crate::cli::{self, Cli};

const MIB: u64 = 1 << 20;

/// A file of the reference engine with the pool `p`, and files beside it.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    async fn new() -> Place {
        let place = Place { dir: tempfile::tempdir().unwrap() };
        place.with(async |client, _| client.create_pool("p").await.unwrap()).await;
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `outboard disk` with the arguments; `FILE:NAME` stands for the path of a file.
    fn disk(&self, line: &str) -> Result<()> {
        let endpoint = format!("mem:{}", self.path("objects").display());
        let mut args = vec!["outboard".into(), "--endpoint".into(), endpoint, "disk".into()];
        for arg in line.split(' ') {
            args.push(match arg.strip_prefix("FILE:") {
                Some(name) => self.path(name).display().to_string(),
                None => arg.to_owned(),
            });
        }
        cli::run(Cli::try_parse_from(args).unwrap())
    }

    /// Works with the engine directly, between the commands.
    async fn with<T>(&self, work: impl AsyncFnOnce(&Client, &OpenSession) -> T) -> T {
        let engine = Arc::new(MemEngine::open(self.path("objects")).unwrap());
        let client = Client::over(Arc::clone(&engine) as _, Options::default());
        let sessions: OpenSession = Arc::new(move || {
            let client = Client::over(Arc::new(engine.sibling()), Options::default());
            Box::pin(async { Ok(client) })
        });
        work(&client, &sessions).await
    }

    /// Writes to a disk as a gateway does. Leaves it attached if `stays`.
    async fn write(&self, disk: &str, offset: u64, byte: u8, stays: bool) {
        let write = async |_: &Client, sessions: &OpenSession| {
            let options = AttachOptions {
                gateway: "gw1".into(),
                takes_over: false,
                open_session: Arc::clone(sessions),
                clock: WallClock::default(),
            };
            let disk = AttachedDisk::attach("p", disk, options).await.unwrap();
            disk::Disk::write(&disk, offset, vec![vec![byte; 4096].into()]).await.unwrap();
            if !stays {
                disk.detach().await.unwrap();
            }
        };
        self.with(write).await;
    }

    async fn disks<T>(&self, work: impl AsyncFnOnce(Disks) -> T) -> T {
        let with = async |client: &Client, _: &OpenSession| {
            work(Disks::open(client, "p", WallClock::default()).unwrap()).await
        };
        self.with(with).await
    }

    /// Writes a sparse file with data in the first and third MiB, and returns its content.
    fn image(&self, name: &str, size: u64) -> Vec<u8> {
        let file = File::create(self.path(name)).unwrap();
        file.set_len(size).unwrap();
        file.write_all_at(&[1; 10_000], 100).unwrap();
        file.write_all_at(&[2; 5000], 2 * MIB + 70_000).unwrap();
        fs::read(self.path(name)).unwrap()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }
}

#[tokio::test]
async fn an_exported_disk_has_the_content_and_holes_of_the_imported_file() {
    let place = Place::new().await;
    let mut content = place.image("image", 5 * MIB + 100);
    place.disk("import p/vm FILE:image --chunk 1MiB").unwrap();
    place.disk("export p/vm FILE:back").unwrap();
    content.resize(5 * MIB as usize + 512, 0);
    assert!(place.read("back") == content);
    let blocks = fs::metadata(place.path("back")).unwrap().blocks() * 512;
    assert!(blocks < 2 * MIB, "{blocks} bytes of a sparse file");
    for rest in ["back.part", "back.part.json"] {
        assert!(!place.path(rest).exists(), "{rest}");
    }
    let header = place.disks(async |disks| disks.stat("vm").await.unwrap()).await;
    assert!(header.owner.is_none() && header.size == content.len() as u64 && header.chunk == MIB);
    let usage = place.disks(async |disks| disks.usage("vm").await.unwrap()).await;
    assert_eq!(usage.chunks, 2, "holes of the file take no space");
}

#[tokio::test]
async fn a_disk_that_may_have_data_is_overwritten_only_on_demand() {
    let place = Place::new().await;
    let content = place.image("image", 4 * MIB);
    place
        .disks(async |disks| disks.create("vm", CreateOptions { size: 4 * MIB, chunk: MIB }).await)
        .await
        .unwrap();
    place.write("vm", MIB + 8192, 9, false).await;
    place.write("vm", 4096, 9, false).await;
    let refused = place.disk("import p/vm FILE:image").unwrap_err();
    assert!(refused.why().contains("--overwrite"), "{refused}");
    place.disk("import p/vm FILE:image --overwrite").unwrap();
    place.disk("export p/vm FILE:back").unwrap();
    assert!(place.read("back") == content);
}

#[tokio::test]
async fn a_resumed_import_repairs_what_differs_and_leaves_the_rest() {
    let place = Place::new().await;
    let content = place.image("image", 4 * MIB);
    place.disk("import p/vm FILE:image --chunk 1MiB").unwrap();
    place.write("vm", 3 * MIB, 9, false).await;
    place.write("vm", 2 * MIB + 512 * 1024, 9, false).await;
    place.write("vm", 4096, 9, false).await;
    place.disk("import p/vm FILE:image --resume").unwrap();
    place.disk("export p/vm FILE:back").unwrap();
    assert!(place.read("back") == content);
}

#[tokio::test]
async fn an_import_needs_a_disk_of_the_right_size() {
    let place = Place::new().await;
    place.image("image", 4 * MIB);
    let small = place.disk("import p/vm FILE:image --size 2MiB").unwrap_err();
    assert!(small.is_usage() && small.why().contains("--size"), "{small}");
    place.disk("import p/vm FILE:image --size 6MiB").unwrap();
    place.disk("export p/vm FILE:back").unwrap();
    assert_eq!(place.read("back").len() as u64, 6 * MIB);
    place.image("large", 7 * MIB);
    for (line, hint) in [
        ("import p/vm FILE:large --resume", "resize"),
        ("import p/vm FILE:image --resume --size 5MiB", "resize"),
        ("import p/vm FILE:image --resume --chunk 1MiB", "--chunk"),
        ("import p/vm FILE:missing", "No such file"),
        ("import p/vm FILE:", "directory"),
        ("import q/vm FILE:image", "q"),
    ] {
        let refused = place.disk(line).unwrap_err();
        assert!(refused.to_string().contains(hint), "{line}: {refused}");
    }
}

#[tokio::test]
async fn a_disk_that_is_attached_elsewhere_is_exported_from_a_snapshot() {
    let place = Place::new().await;
    let content = place.image("image", 4 * MIB);
    place.disk("import p/vm FILE:image").unwrap();
    place.disks(async |disks| disks.snapshot(&"vm@monday".parse().unwrap()).await).await.unwrap();
    place.write("vm", 0, 9, true).await;
    let refused = place.disk("export p/vm FILE:back").unwrap_err();
    assert!(refused.why().contains("gw1") && refused.why().contains("disk snapshot p/vm@NAME"), "{refused}");
    assert!(!place.path("back.part").exists(), "a refused export leaves no file");
    let refused = place.disk("import p/vm FILE:image --resume").unwrap_err();
    assert!(refused.why().contains("--force"), "{refused}");
    place.disk("export p/vm@monday FILE:back").unwrap();
    assert!(place.read("back") == content);
    place.disk("export p/vm FILE:now --force").unwrap();
    assert!(place.read("now")[..4096] == [9; 4096]);
}

#[tokio::test]
async fn an_interrupted_export_continues_only_if_the_disk_has_not_changed() {
    let place = Place::new().await;
    let content = place.image("image", 4 * MIB);
    place.disk("import p/vm FILE:image --chunk 1MiB").unwrap();
    // An earlier export was interrupted after 2 MiB. Its data is recognizable.
    let interrupt = async |epoch| {
        let nguid = place.disks(async |disks| disks.stat("vm").await.unwrap().nguid).await;
        let nguid = u128::from_be_bytes(nguid);
        let record = format!(
            r#"{{"source":"p/vm","nguid":"{nguid:032x}","epoch":{epoch},"size":{},"done":{}}}"#,
            4 * MIB,
            2 * MIB
        );
        let file = File::create(place.path("back.part")).unwrap();
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(&[7; 512], 0).unwrap();
        fs::write(place.path("back.part.json"), record).unwrap();
    };
    let epoch = async || place.disks(async |disks| disks.stat("vm").await.unwrap().epoch).await;
    interrupt(epoch().await).await;
    place.disk("export p/vm FILE:back --resume").unwrap();
    let back = place.read("back");
    assert!(back[..512] == [7; 512] && back[2 * MIB as usize..] == content[2 * MIB as usize..]);

    interrupt(epoch().await).await;
    place.write("vm", 0, 1, false).await;
    place.disk("export p/vm FILE:back --resume").unwrap();
    assert!(place.read("back")[..512] == [1; 512], "the export has started again");
    interrupt(epoch().await).await;
    place.disk("export p/vm FILE:back").unwrap();
    assert!(place.read("back")[..512] == [1; 512], "only --resume continues");
}

#[tokio::test]
async fn a_pipe_receives_all_bytes_of_a_disk() {
    let place = Place::new().await;
    let content = place.image("image", 3 * MIB);
    place.disk("import p/vm FILE:image").unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let reader = std::thread::spawn({
        let pipe = place.path("pipe");
        move || fs::read(pipe).unwrap()
    });
    place.disk("export p/vm FILE:pipe").unwrap();
    assert!(reader.join().unwrap() == content);
    let refused = place.disk("export p/vm FILE:pipe --resume").unwrap_err();
    assert!(refused.is_usage(), "{refused}");
    let refused = place.disk("export p/vm - --json").unwrap_err();
    assert!(refused.is_usage(), "{refused}");
}
