//! [`NullDisk`]: completes each request at once.

use std::future::ready;
use std::sync::Arc;

use base::BoxFuture;
use bytes::Bytes;
use tokio::sync::watch;

use crate::{Disk, DiskExtent, DiskIdentity, Memory, Result, check_range};

/// A disk that stores nothing and completes each request at once. Reads do not write to the memory of
/// the caller. It measures the cost of a front end alone.
#[derive(Debug)]
pub struct NullDisk {
    identity: DiskIdentity,
    size: watch::Sender<u64>,
}

impl NullDisk {
    /// Creates a disk of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> NullDisk {
        let identity = DiskIdentity { serial: "null".into(), nguid: [0; 16], chunk: 4 << 20 };
        NullDisk { identity, size: watch::Sender::new(size) }
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len, *self.size.borrow())
    }
}

impl Disk for NullDisk {
    fn identity(&self) -> &DiskIdentity {
        &self.identity
    }

    fn size(&self) -> watch::Receiver<u64> {
        self.size.subscribe()
    }

    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<Bytes>>> {
        let checked = self.check(offset, len);
        Box::pin(ready(checked.map(|()| vec![Bytes::from(vec![0; len as usize])])))
    }

    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.check(offset, memory.len())))
    }

    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, Result<()>> {
        let len = data.iter().map(|piece| piece.len() as u64).sum();
        Box::pin(ready(self.check(offset, len)))
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.check(offset, memory.len())))
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.check(offset, len)))
    }

    fn write_zeroes(&self, offset: u64, len: u64, _: bool) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.check(offset, len)))
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<DiskExtent>>> {
        let checked = self.check(offset, len);
        Box::pin(ready(checked.map(|()| vec![DiskExtent { len, has_data: false }])))
    }
}
