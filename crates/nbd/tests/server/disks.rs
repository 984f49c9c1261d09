//! [`TestDisk`]: a disk that waits or fails on demand.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use base::BoxFuture;
use bytes::Bytes;
use disk::{Disk, DiskError, DiskExtent, DiskIdentity, MemDisk, Memory, Result};
use tokio::sync::{Semaphore, watch};

use crate::SIZE;

/// Requests below this offset wait for [`TestDisk::release`].
pub const SLOW_END: u64 = 64 << 10;

/// A disk in memory, whose requests below [`SLOW_END`] wait, and which may fail all requests.
#[derive(Debug)]
pub struct TestDisk {
    pub content: MemDisk,
    gate: Arc<Semaphore>,
    started: AtomicUsize,
    completed: Arc<AtomicUsize>,
    error: Mutex<Option<DiskError>>,
}

impl TestDisk {
    /// Creates a disk.
    pub fn new() -> Arc<TestDisk> {
        Arc::new(TestDisk {
            content: MemDisk::new(SIZE),
            gate: Arc::new(Semaphore::new(0)),
            started: AtomicUsize::new(0),
            completed: Arc::default(),
            error: Mutex::default(),
        })
    }

    /// Creates a disk that fails all requests with `error`.
    pub fn failing(error: DiskError) -> Arc<TestDisk> {
        let disk = TestDisk::new();
        *disk.error.lock().unwrap() = Some(error);
        disk
    }

    /// Lets `count` waiting requests complete.
    pub fn release(&self, count: usize) {
        self.gate.add_permits(count);
    }

    /// Returns the number of requests that were started.
    pub fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    /// Returns the number of requests that have completed.
    pub fn completed(&self) -> usize {
        self.completed.load(Ordering::SeqCst)
    }

    fn delayed<T: Send + 'static>(
        &self,
        offset: u64,
        call: impl FnOnce() -> BoxFuture<'static, Result<T>>,
    ) -> BoxFuture<'static, Result<T>> {
        self.started.fetch_add(1, Ordering::SeqCst);
        let error = self.error.lock().unwrap().clone();
        let (gate, completed, call) = (Arc::clone(&self.gate), Arc::clone(&self.completed), call());
        Box::pin(async move {
            if offset < SLOW_END && error.is_none() {
                gate.acquire().await.unwrap().forget();
            }
            completed.fetch_add(1, Ordering::SeqCst);
            match error {
                Some(error) => Err(error),
                None => call.await,
            }
        })
    }
}

impl Disk for TestDisk {
    fn identity(&self) -> &DiskIdentity {
        self.content.identity()
    }

    fn size(&self) -> watch::Receiver<u64> {
        self.content.size()
    }

    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<Bytes>>> {
        self.delayed(offset, || self.content.read(offset, len))
    }

    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        self.delayed(offset, || self.content.read_into(offset, memory))
    }

    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, Result<()>> {
        self.delayed(offset, || self.content.write(offset, data))
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        self.delayed(offset, || self.content.write_from(offset, memory))
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<()>> {
        self.delayed(offset, || self.content.discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, keeps_space: bool) -> BoxFuture<'static, Result<()>> {
        self.delayed(offset, || self.content.write_zeroes(offset, len, keeps_space))
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<DiskExtent>>> {
        self.delayed(offset, || self.content.extents(offset, len))
    }
}
