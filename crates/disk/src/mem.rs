//! [`MemDisk`]: keeps its content in memory.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::BoxFuture;
use bytes::Bytes;
use tokio::sync::watch;

use crate::{BLOCK, Disk, DiskExtent, DiskIdentity, Memory, Result, check_range};

/// A disk whose content is in memory. It completes each request at once.
#[derive(Debug)]
pub struct MemDisk {
    identity: DiskIdentity,
    size: watch::Sender<u64>,
    /// The blocks that have data, by their numbers.
    blocks: Mutex<BTreeMap<u64, Box<[u8; BLOCK as usize]>>>,
}

impl MemDisk {
    /// Creates a disk of `size` bytes that reads as zeros.
    #[must_use]
    pub fn new(size: u64) -> MemDisk {
        let identity = DiskIdentity { serial: "memory".into(), nguid: [1; 16], chunk: 4 << 20 };
        MemDisk { identity, size: watch::Sender::new(size), blocks: Mutex::default() }
    }

    /// Changes the size. Data after the new end is dropped.
    pub fn resize(&self, size: u64) {
        self.blocks().retain(|block, _| block * BLOCK < size);
        self.size.send_replace(size);
    }

    fn blocks(&self) -> MutexGuard<'_, BTreeMap<u64, Box<[u8; BLOCK as usize]>>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len, *self.size.borrow())
    }

    fn get(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        self.check(offset, len)?;
        let blocks = self.blocks();
        let mut content = vec![0; len as usize];
        for (number, piece) in (offset / BLOCK..).zip(content.chunks_mut(BLOCK as usize)) {
            if let Some(block) = blocks.get(&number) {
                piece.copy_from_slice(&block[..]);
            }
        }
        Ok(content)
    }

    fn put(&self, offset: u64, content: &[u8]) -> Result<()> {
        self.check(offset, content.len() as u64)?;
        let mut blocks = self.blocks();
        for (number, piece) in (offset / BLOCK..).zip(content.chunks_exact(BLOCK as usize)) {
            blocks.insert(number, Box::new(piece.try_into().expect("a block")));
        }
        Ok(())
    }

    fn clear(&self, offset: u64, len: u64) -> Result<()> {
        self.check(offset, len)?;
        let range = offset / BLOCK..(offset + len) / BLOCK;
        self.blocks().retain(|number, _| !range.contains(number));
        Ok(())
    }

    fn data_extents(&self, offset: u64, len: u64) -> Result<Vec<DiskExtent>> {
        self.check(offset, len)?;
        let blocks = self.blocks();
        let mut extents: Vec<DiskExtent> = Vec::new();
        for number in offset / BLOCK..(offset + len) / BLOCK {
            let has_data = blocks.contains_key(&number);
            match extents.last_mut() {
                Some(last) if last.has_data == has_data => last.len += BLOCK,
                _ => extents.push(DiskExtent { len: BLOCK, has_data }),
            }
        }
        Ok(extents)
    }
}

impl Disk for MemDisk {
    fn identity(&self) -> &DiskIdentity {
        &self.identity
    }

    fn size(&self) -> watch::Receiver<u64> {
        self.size.subscribe()
    }

    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<Bytes>>> {
        Box::pin(ready(self.get(offset, len).map(|content| vec![content.into()])))
    }

    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        let content = self.get(offset, memory.len());
        Box::pin(ready(content.and_then(|content| memory.copy_in(0, &content))))
    }

    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.put(offset, &data.concat())))
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>> {
        let put = self.check(offset, memory.len()).and_then(|()| {
            let mut content = vec![0; memory.len() as usize];
            memory.copy_out(0, &mut content)?;
            self.put(offset, &content)
        });
        Box::pin(ready(put))
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<()>> {
        Box::pin(ready(self.clear(offset, len)))
    }

    fn write_zeroes(&self, offset: u64, len: u64, keeps_space: bool) -> BoxFuture<'static, Result<()>> {
        let zeroed = match keeps_space {
            true => self.check(offset, len).and_then(|()| self.put(offset, &vec![0; len as usize])),
            false => self.clear(offset, len),
        };
        Box::pin(ready(zeroed))
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<DiskExtent>>> {
        Box::pin(ready(self.data_extents(offset, len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn discarded_and_zeroed_ranges_read_as_zeros() {
        let disk = MemDisk::new(64 << 10);
        disk.write(1024, vec![Bytes::from(vec![7; 4096])]).await.unwrap();
        disk.discard(1536, 512).await.unwrap();
        disk.write_zeroes(3072, 512, true).await.unwrap();
        let content = disk.read(1024, 4096).await.unwrap().concat();
        let expected: Vec<u8> = (0..4096)
            .map(|at| if (512..1024).contains(&at) || (2048..2560).contains(&at) { 0 } else { 7 })
            .collect();
        assert_eq!(content, expected);
        let extents = disk.extents(0, 8192).await.unwrap();
        let expected = [(1024, false), (512, true), (512, false), (3072, true), (3072, false)];
        assert_eq!(extents, expected.map(|(len, has_data)| DiskExtent { len, has_data }));
    }

    #[tokio::test]
    async fn a_request_outside_the_disk_or_inside_a_block_is_refused() {
        let disk = MemDisk::new(8192);
        for (offset, len) in [(8192, 512), (1, 512), (0, 100), (u64::MAX - 511, 512), (7680, 1024)] {
            let read = disk.read(offset, len).await;
            assert!(matches!(read, Err(crate::DiskError::OutOfRange { .. })), "{offset} {len}: {read:?}");
            assert!(disk.discard(offset, len).await.is_err());
        }
        disk.resize(16384);
        disk.write(8192, vec![Bytes::from(vec![1; 512])]).await.unwrap();
        disk.resize(8192);
        disk.resize(16384);
        assert_eq!(disk.read(8192, 512).await.unwrap().concat(), [0; 512]);
    }
}
