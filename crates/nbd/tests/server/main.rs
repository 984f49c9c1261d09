//! Tests of the server with a client that sends raw messages.

mod client;
mod commands;
mod concurrency;
mod disks;
mod hostile;
mod negotiation;

use std::collections::BTreeMap;
use std::sync::Arc;

use disk::{Disk, MemDisk};
use nbd::{Error, Export, NbdLimits, serve_connection};
use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;

/// Size of the disks, in bytes.
const SIZE: u64 = 1 << 20;
/// Bytes that the emulated socket holds in each direction.
const SOCKET_BUFFER: usize = 64 << 10;

/// The connection's task on the server.
type ServerTask = JoinHandle<Result<(), Error>>;

/// Exports `disk` as `disk`.
fn exports(disk: Arc<dyn Disk>) -> BTreeMap<String, Export> {
    let export = Export { disk, is_read_only: false, description: "a disk".into() };
    BTreeMap::from([("disk".to_owned(), export)])
}

fn mem_exports() -> BTreeMap<String, Export> {
    exports(Arc::new(MemDisk::new(SIZE)))
}

/// Starts to serve a connection.
fn start(exports: BTreeMap<String, Export>, limits: NbdLimits) -> (DuplexStream, ServerTask) {
    let (client, server) = duplex(SOCKET_BUFFER);
    let task = tokio::spawn(async move { serve_connection(server, &exports, &limits).await });
    (client, task)
}
