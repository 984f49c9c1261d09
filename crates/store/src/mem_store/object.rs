//! An object of [`MemStore`](super::MemStore).

use std::collections::BTreeMap;

use base::block::{self, BLOCK, BLOCK_SIZE, Payload, ZERO_BLOCK_CRC};
use base::mem::ArenaBuf;
use bytes::{Bytes, BytesMut};

use crate::{ExtentsPage, MAX_READ, ObjectExtents, ReadData, Result, StoreError};

#[derive(Clone, Default)]
pub(super) struct MemObject {
    pub(super) size: u64,
    pub(super) blocks: BTreeMap<u64, MemBlock>,
    pub(super) xattrs: BTreeMap<Bytes, Bytes>,
    pub(super) omap: BTreeMap<Bytes, Bytes>,
    pub(super) header: Bytes,
}

/// A whole block. Its bytes beyond the object's end are zeros.
#[derive(Clone)]
pub(super) struct MemBlock {
    pub(super) data: Bytes,
    pub(super) crc: u32,
}

impl MemBlock {
    /// Creates a block from `piece`, padded with zeros. `crc` is the checksum of `piece`.
    pub(super) fn padded(piece: Bytes, crc: u32) -> MemBlock {
        let crc = block::pad_to_block(crc, piece.len());
        if piece.len() == BLOCK_SIZE {
            // Copy the bytes, because a store must not keep the payload's memory.
            return MemBlock { data: Bytes::copy_from_slice(&piece), crc };
        }
        let mut data = BytesMut::zeroed(BLOCK_SIZE);
        data[..piece.len()].copy_from_slice(&piece);
        MemBlock { data: data.freeze(), crc }
    }
}

impl MemObject {
    /// Writes `piece` to block `number`, from byte `at` of the block. The rest of the block does
    /// not change.
    pub(super) fn write_piece(&mut self, number: u64, at: usize, piece: &Bytes, crc: u32) -> Result<()> {
        let end = number * BLOCK + (at + piece.len()) as u64;
        let whole = at == 0 && (piece.len() == BLOCK_SIZE || end >= self.size);
        let block = if whole {
            MemBlock::padded(piece.clone(), crc)
        } else {
            if block::crc32c(piece) != crc {
                return Err(StoreError::BadPayload(format!(
                    "the data for block {number} does not match its checksum"
                )));
            }
            let mut data = BytesMut::zeroed(BLOCK_SIZE);
            if let Some(old) = self.blocks.get(&number) {
                if block::crc32c(&old.data) != old.crc {
                    let detail = "checksum mismatch".to_owned();
                    return Err(StoreError::Corrupt { what: format!("block {number}"), detail });
                }
                data.copy_from_slice(&old.data);
            }
            data[at..at + piece.len()].copy_from_slice(piece);
            MemBlock { crc: block::crc32c(&data), data: data.freeze() }
        };
        self.blocks.insert(number, block);
        self.size = self.size.max(end);
        Ok(())
    }

    pub(super) fn write(&mut self, offset: u64, payload: &Payload) -> Result<()> {
        let mut at = offset;
        let mut rest = payload.data().clone();
        for (len, crc) in block::piece_lengths(offset, rest.len() as u64).zip(payload.checksums()) {
            let piece = rest.split_to(len);
            self.write_piece(at / BLOCK, (at % BLOCK) as usize, &piece, *crc)?;
            at += len as u64;
        }
        Ok(())
    }

    pub(super) fn zero(&mut self, offset: u64, len: u64) -> Result<()> {
        let end = offset + len;
        let stop = end.min(self.size);
        if offset < stop {
            let (first, last) = (offset.next_multiple_of(BLOCK), block::align_down(stop));
            if first < last {
                self.zero_part(offset, first)?;
                let whole: Vec<u64> =
                    self.blocks.range(first / BLOCK..last / BLOCK).map(|(n, _)| *n).collect();
                whole.iter().for_each(|n| drop(self.blocks.remove(n)));
                self.zero_part(last, stop)?;
            } else {
                self.zero_part(offset, first.min(stop))?;
                self.zero_part(first.min(stop), stop)?;
            }
        }
        self.size = self.size.max(end);
        Ok(())
    }

    /// Sets bytes `from..to` of the object, which lie in one block, to zeros. Does nothing if the
    /// block is a hole.
    pub(super) fn zero_part(&mut self, from: u64, to: u64) -> Result<()> {
        if from >= to || !self.blocks.contains_key(&(from / BLOCK)) {
            return Ok(());
        }
        let zeros = Bytes::from(vec![0; (to - from) as usize]);
        let crc = block::crc32c(&zeros);
        self.write_piece(from / BLOCK, (from % BLOCK) as usize, &zeros, crc)
    }

    pub(super) fn truncate(&mut self, size: u64) -> Result<()> {
        if size < self.size {
            let end = block::align_up(self.size).unwrap_or(self.size);
            let old = std::mem::replace(&mut self.size, end);
            self.zero(size, end - size).inspect_err(|_| self.size = old)?;
            self.blocks.split_off(&size.div_ceil(BLOCK));
        }
        self.size = size;
        Ok(())
    }

    /// Returns bytes `offset..offset + len` of the object, with zeros for holes and beyond the
    /// object's end. Verifies the checksum of every block that it reads.
    pub(super) fn verified(&self, offset: u64, len: usize) -> Result<Bytes> {
        let mut out = BytesMut::zeroed(len);
        let mut done = 0;
        for len in block::piece_lengths(offset, len as u64) {
            let at = offset + done as u64;
            if let Some(block) = self.blocks.get(&(at / BLOCK)) {
                if block::crc32c(&block.data) != block.crc {
                    let what = format!("block {}", at / BLOCK);
                    return Err(StoreError::Corrupt { what, detail: "checksum mismatch".to_owned() });
                }
                let from = (at % BLOCK) as usize;
                out[done..done + len].copy_from_slice(&block.data[from..from + len]);
            }
            done += len;
        }
        Ok(out.freeze())
    }

    pub(super) fn clone_range(
        &mut self,
        src: &MemObject,
        src_offset: u64,
        len: u64,
        dst_offset: u64,
    ) -> Result<()> {
        let mut done = 0;
        for len in block::piece_lengths(dst_offset, len) {
            let (from, to) = (src_offset + done, dst_offset + done);
            if len == BLOCK_SIZE && from % BLOCK == 0 {
                match src.blocks.get(&(from / BLOCK)) {
                    Some(block) => self.blocks.insert(to / BLOCK, block.clone()),
                    None => self.blocks.remove(&(to / BLOCK)),
                };
                self.size = self.size.max(to + BLOCK);
            } else {
                let piece = src.verified(from, len)?;
                self.write_piece(to / BLOCK, (to % BLOCK) as usize, &piece, block::crc32c(&piece))?;
            }
            done += len as u64;
        }
        Ok(())
    }

    pub(super) fn extents(&self, offset: u64, len: u64) -> ObjectExtents {
        let mut page = ExtentsPage::new(offset, len, self.size);
        let wanted = page.wanted();
        for (number, _) in self.blocks.range(wanted.start / BLOCK..wanted.end.div_ceil(BLOCK)) {
            if !page.add(number * BLOCK..(number + 1) * BLOCK) {
                break;
            }
        }
        page.finish()
    }

    pub(super) fn read(&self, offset: u64, len: u64, dest: Option<ArenaBuf>) -> Result<ReadData> {
        let mut read =
            ReadData { offset: block::align_down(offset), object_size: self.size, ..ReadData::default() };
        let end = offset.checked_add(len).and_then(block::align_up).unwrap_or(u64::MAX).min(self.size);
        if len == 0 || offset >= self.size {
            return Ok(read);
        }
        if end - read.offset > MAX_READ {
            let (what, size) = ("size in bytes of the result of one read".to_owned(), end - read.offset);
            return Err(StoreError::TooLarge { what, size, limit: MAX_READ });
        }
        let mut bytes = BytesMut::with_capacity((end - read.offset) as usize);
        for number in read.offset / BLOCK..end.div_ceil(BLOCK) {
            let len = (end - number * BLOCK).min(BLOCK) as usize;
            match self.blocks.get(&number) {
                Some(block) => {
                    bytes.extend_from_slice(&block.data[..len]);
                    read.checksums.push(block.crc);
                }
                None => {
                    bytes.resize(bytes.len() + len, 0);
                    read.checksums.push(ZERO_BLOCK_CRC);
                }
            }
        }
        let data = match dest {
            None => bytes.freeze(),
            Some(mut dest) => {
                let room = bytes.len().next_multiple_of(BLOCK_SIZE);
                if dest.len() < room {
                    return Err(StoreError::InvalidArgument(format!(
                        "the destination has {} bytes, but the read needs {room}",
                        dest.len(),
                    )));
                }
                dest[..bytes.len()].copy_from_slice(&bytes);
                dest.truncate(bytes.len());
                dest.freeze()
            }
        };
        read.data.push(data);
        Ok(read)
    }
}
