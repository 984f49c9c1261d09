//! The content of a simulated drive.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::block::BLOCK_SIZE;

use super::super::drive::Drive;
use super::super::superblock::SECTOR;

/// Content of one block; `None` for zeros.
pub(super) type SimPage = Option<Arc<[u8; BLOCK_SIZE]>>;

const ZEROS: [u8; BLOCK_SIZE] = [0; BLOCK_SIZE];

/// Content of a drive. It takes memory only for blocks that are not zero. Copies share their
/// blocks.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pages: Vec<SimPage>,
}

/// Returns the content of the blocks in `data`, whose length is a multiple of the block size.
pub(super) fn pages(data: &[u8]) -> impl Iterator<Item = SimPage> {
    data.chunks_exact(BLOCK_SIZE).map(|block| {
        let block: &[u8; BLOCK_SIZE] = block.try_into().expect("a whole block");
        (*block != ZEROS).then(|| Arc::new(*block))
    })
}

/// Returns the bytes of a block.
pub(super) fn bytes(page: &SimPage) -> &[u8; BLOCK_SIZE] {
    page.as_deref().unwrap_or(&ZEROS)
}

/// Returns `old` with those sectors of `new` for which `choose` returns `true`.
pub(super) fn mix(old: &SimPage, new: &SimPage, mut choose: impl FnMut() -> bool) -> SimPage {
    let mut mixed = *bytes(old);
    for (to, from) in mixed.chunks_exact_mut(SECTOR).zip(bytes(new).chunks_exact(SECTOR)) {
        if choose() {
            to.copy_from_slice(from);
        }
    }
    Some(Arc::new(mixed))
}

/// Returns `page` with one flipped bit.
pub(super) fn flip(page: &SimPage, bit: usize) -> SimPage {
    let mut flipped = *bytes(page);
    flipped[bit / 8] ^= 1 << (bit % 8);
    Some(Arc::new(flipped))
}

impl Image {
    /// Returns `size` zero bytes. `size` must be a multiple of the block size.
    pub(super) fn zeros(size: u64) -> Image {
        Image { pages: vec![None; size as usize / BLOCK_SIZE] }
    }

    pub(super) fn size(&self) -> u64 {
        (self.pages.len() * BLOCK_SIZE) as u64
    }

    pub(super) fn page(&self, number: usize) -> &SimPage {
        &self.pages[number]
    }

    pub(super) fn set(&mut self, number: usize, page: SimPage) {
        self.pages[number] = page;
    }

    /// Returns the numbers of the blocks in `range` that are not zero.
    pub(super) fn written(&self, range: std::ops::Range<u64>) -> Vec<usize> {
        let end = (range.end as usize).div_ceil(BLOCK_SIZE).min(self.pages.len());
        (range.start as usize / BLOCK_SIZE..end).filter(|n| self.pages[*n].is_some()).collect()
    }

    /// Returns the numbers of the blocks of an access.
    ///
    /// # Errors
    /// If the access is not aligned or extends beyond the end of the drive.
    pub(super) fn range(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let start = offset as usize;
        if !start.is_multiple_of(BLOCK_SIZE) || !len.is_multiple_of(BLOCK_SIZE) {
            return Err(io::Error::other(format!("{len} bytes at offset {offset} are not whole blocks")));
        }
        let range = start / BLOCK_SIZE..start / BLOCK_SIZE + len / BLOCK_SIZE;
        if range.end > self.pages.len() {
            return Err(io::Error::other(format!("{len} bytes at offset {offset} are not on the drive")));
        }
        Ok(range)
    }
}

/// A drive without simulated time and faults.
#[derive(Debug)]
pub(super) struct ImageDrive(Mutex<Image>);

impl ImageDrive {
    pub(super) fn new(image: Image) -> ImageDrive {
        ImageDrive(Mutex::new(image))
    }

    fn lock(&self) -> MutexGuard<'_, Image> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn image(&self) -> Image {
        self.lock().clone()
    }
}

impl Drive for ImageDrive {
    fn size(&self) -> u64 {
        self.lock().size()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let image = self.lock();
        let range = image.range(offset, out.len())?;
        for (number, block) in range.zip(out.chunks_exact_mut(BLOCK_SIZE)) {
            block.copy_from_slice(bytes(image.page(number)));
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut image = self.lock();
        let range = image.range(offset, data.len())?;
        range.zip(pages(data)).for_each(|(number, page)| image.set(number, page));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
