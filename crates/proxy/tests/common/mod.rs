//! A store's server and an osd's session with it, in one process.

#![allow(dead_code, reason = "each test uses a part")]

use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use channel::{Layout, MemoryOptions};
use outboard_proxy::{Endpoint, Listener, Server, ServerOptions, Session, SessionOptions, Target};
use store::{
    BlockStore, CollectionId, MemStore, MkfsOptions, MountOptions, ObjectId, ObjectStore, Op, Transaction,
};

/// Which way payload goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    Dma,
    Unix,
    Tcp,
}

pub struct Node {
    pub session: Session,
    pub server: Server,
    pub store: Arc<dyn ObjectStore>,
    pub endpoint: Endpoint,
    _dir: tempfile::TempDir,
}

pub fn options() -> SessionOptions {
    SessionOptions {
        memory: MemoryOptions {
            layout: Layout { ring_len: 128 << 10, data_len: 32 << 20 },
            pool_len: 16 << 20,
            largest_buffer: 4 << 20,
        },
        wait_for_store: Duration::from_secs(10),
        ..SessionOptions::default()
    }
}

pub fn target(store: Arc<dyn ObjectStore>) -> Target {
    Target { uuid: 1, store }
}

pub async fn node(path: Path) -> Node {
    node_of(path, Arc::new(MemStore::new()), options()).await
}

pub async fn node_of(path: Path, behind: Arc<dyn ObjectStore>, options: SessionOptions) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let (listener, endpoint) = match path {
        Path::Dma | Path::Unix => {
            let at = dir.path().join("store.sock");
            (Listener::unix(&at).unwrap(), Endpoint::Unix(at))
        }
        Path::Tcp => {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            (Listener::Tcp(listener), Endpoint::Tcp(address))
        }
    };
    let server = Server::serve(listener, vec![target(behind)], ServerOptions::default()).unwrap();
    let options = SessionOptions { socket_only: path == Path::Unix, ..options };
    let session = Session::connect(endpoint.clone(), options).await.unwrap();
    assert_eq!(session.status().by_dma, path == Path::Dma);
    let store = session.store(0);
    Node { session, server, store, endpoint, _dir: dir }
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

/// Bytes that differ by `seed` and position.
pub fn pattern(seed: u64, len: usize) -> Bytes {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8).collect()
}

pub fn payload(seed: u64, len: usize) -> Payload {
    Payload::compute(0, pattern(seed, len))
}

/// A store on a file, made if it is not there yet.
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
