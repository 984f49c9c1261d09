//! Helpers that run a store's server and an osd's attachment to it in one process.

#![allow(dead_code, reason = "each test program uses only some of the helpers")]

pub mod engine;
pub mod load;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use channel::ofi::{OfiEngine, OfiHostOptions, OfiOptions};
use channel::{MemoryLayout, MemoryOptions};
use outboard_proxy::{
    Attachment, AttachmentOptions, ServedTarget, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::{
    BlockStore, CollectionId, MemStore, MkfsOptions, MountOptions, ObjectId, ObjectStore, Op, StoreCalls,
    Transaction,
};
use uuid::Uuid;

/// The path of payload between osd and store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    Dma,
    Unix,
    Tcp,
    /// Payload is sent by libfabric, and the control socket is a UNIX socket.
    Ofi,
    /// Payload is sent by libfabric, and the control socket uses TCP. Only the network joins osd
    /// and store.
    OfiTcp,
}

impl Path {
    pub fn by_dma(self) -> bool {
        !matches!(self, Path::Unix | Path::Tcp)
    }

    fn by_ofi(self) -> bool {
        matches!(self, Path::Ofi | Path::OfiTcp)
    }
}

/// The libfabric provider to test, and an address of this machine that it can use.
pub fn fabric() -> (String, IpAddr) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("OUTBOARD_TEST_FABRIC must be PROVIDER@ADDRESS");
    (provider.to_owned(), address.parse().expect("OUTBOARD_TEST_FABRIC must contain an IP address"))
}

/// Returns `time`, or a multiple of it if the tests use an RDMA device: the machine with this device
/// is usually emulated and slow (tests/rdma). Use it for time limits, and for delays that must exceed
/// them.
pub fn scaled(time: Duration) -> Duration {
    if fabric().0 == "verbs" { 3 * time } else { time }
}

/// Starts an engine `ofi` with these options and the provider to test.
///
/// # Panics
/// If libfabric cannot be used.
pub fn ofi_engine(options: OfiOptions) -> Arc<OfiEngine> {
    OfiEngine::start(OfiOptions { provider: fabric().0, ..options })
        .unwrap_or_else(|e| panic!("libfabric cannot be used: {e}; run \"scripts/setup test\""))
}

/// Returns these options with an engine `ofi`.
pub fn by_ofi(options: AttachmentOptions) -> AttachmentOptions {
    let (faults, attach_timeout) = (options.faults.clone(), scaled(Duration::from_secs(10)));
    let engine = ofi_engine(OfiOptions { attach_timeout, faults, ..OfiOptions::default() });
    AttachmentOptions { engine: Some(engine), ..options }
}

/// Options of a server that can also offer memory by libfabric.
pub fn offering() -> ServerOptions {
    let (provider, address) = fabric();
    let ofi = Some(OfiHostOptions::new(&provider, SocketAddr::new(address, 0)));
    ServerOptions { ofi, ..ServerOptions::default() }
}

/// Runs the ignored test `name` of this test program in a child process.
///
/// # Panics
/// If the test does not run or does not pass.
pub fn child_process(name: &str) {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", name, "--test-threads=1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{name} failed:\n{said}");
}

pub struct Node {
    pub attachment: Attachment,
    pub server: Server,
    pub store: Arc<dyn ObjectStore>,
    pub endpoint: StoreEndpoint,
    _dir: tempfile::TempDir,
}

pub fn options() -> AttachmentOptions {
    AttachmentOptions {
        memory: MemoryOptions {
            layout: MemoryLayout { ring_len: 128 << 10, data_len: 32 << 20 },
            pool_len: 16 << 20,
            largest_buffer: 4 << 20,
        },
        wait_for_store: scaled(Duration::from_secs(10)),
        ..AttachmentOptions::default()
    }
}

pub fn target(store: Arc<dyn ObjectStore>) -> ServedTarget {
    ServedTarget { uuid: Uuid::from_u128(1), store }
}

pub async fn node(path: Path) -> Node {
    node_of(path, Arc::new(MemStore::new()), options()).await
}

pub async fn node_of(path: Path, behind: Arc<dyn ObjectStore>, options: AttachmentOptions) -> Node {
    node_with(path, behind, options, offering()).await
}

pub async fn node_with(
    path: Path,
    behind: Arc<dyn ObjectStore>,
    options: AttachmentOptions,
    server: ServerOptions,
) -> Node {
    node_over(path, vec![target(behind)], options, server).await
}

pub async fn node_over(
    path: Path,
    targets: Vec<ServedTarget>,
    options: AttachmentOptions,
    server: ServerOptions,
) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let (listener, endpoint) = match path {
        Path::Dma | Path::Unix | Path::Ofi => {
            let at = dir.path().join("store.sock");
            (StoreListener::unix(&at).unwrap(), StoreEndpoint::Unix(at))
        }
        Path::Tcp | Path::OfiTcp => {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            (StoreListener::Tcp(listener), StoreEndpoint::Tcp(address))
        }
    };
    let server = Server::serve(listener, targets, server).unwrap();
    let attachment = attach(path, endpoint.clone(), options).await;
    let store = attachment.store(0);
    Node { attachment, server, store, endpoint, _dir: dir }
}

/// Attaches an osd, or one more seat of an osd, whose payload takes this path.
pub async fn attach(path: Path, endpoint: StoreEndpoint, options: AttachmentOptions) -> Attachment {
    let options = AttachmentOptions { socket_only: path == Path::Unix, ..options };
    let options = if path.by_ofi() { by_ofi(options) } else { options };
    let attachment = Attachment::connect(endpoint, options).await.unwrap();
    assert_eq!(attachment.status().by_dma, path.by_dma(), "{:?}", attachment.status());
    attachment
}

pub fn cid() -> CollectionId {
    CollectionId::new("c").unwrap()
}

pub fn oid(n: usize) -> ObjectId {
    ObjectId::new(format!("object {n}")).unwrap()
}

pub fn transaction(op: Op) -> Transaction {
    Transaction::new(cid()).with(op)
}

pub async fn make_collection(store: &Arc<dyn ObjectStore>) {
    store.queue_transaction(transaction(Op::CreateCollection)).await.unwrap();
}

/// Bytes that depend on `seed` and on their position.
pub fn pattern(seed: u64, len: usize) -> Bytes {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8).collect()
}

pub fn payload(seed: u64, len: usize) -> Payload {
    Payload::compute(0, pattern(seed, len))
}

/// Mounts a store on a file. Creates the store first if the file does not exist.
pub fn on_drive(at: &std::path::Path) -> Arc<dyn ObjectStore> {
    if !at.exists() {
        let options = MkfsOptions {
            size: Some(48 << 20),
            log_bytes: Some(9 << 20),
            index_bytes: Some(16 << 20),
            ..MkfsOptions::default()
        };
        BlockStore::mkfs(at, &options, |_, _| {}).unwrap();
    }
    BlockStore::mount(at, &MountOptions::default()).unwrap()
}
