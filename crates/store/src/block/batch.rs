//! Batches of writes: pieces that are adjacent on the drive share a write, and several writes are
//! in flight at once.

use std::io;

use base::block::BLOCK_SIZE;
use base::collections::HashMap;
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;

use super::drive::{Drive, FileDrive};
use super::io::{IoOp, IoRequest};
use super::uring::IoRing;

/// Maximum size of a write of a batch, in bytes.
const RUN_BYTES: usize = 256 << 10;
/// Maximum number of writes in flight.
const IN_FLIGHT: usize = 16;

/// A piece of data and its offset on the drive. Offset and length are multiples of the block size,
/// and the length is at most [`RUN_BYTES`].
#[derive(Debug, Clone)]
pub(crate) struct WritePiece {
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
}

/// Splits pieces, which are sorted by their offsets, into runs. The pieces of a run are adjacent on
/// the drive.
pub(crate) fn runs(mut pieces: &[WritePiece]) -> impl Iterator<Item = &[WritePiece]> {
    std::iter::from_fn(move || {
        let first = pieces.first()?;
        let (mut count, mut len) = (1, first.data.len());
        for piece in &pieces[1..] {
            if piece.offset != first.offset + len as u64 || len + piece.data.len() > RUN_BYTES {
                break;
            }
            (count, len) = (count + 1, len + piece.data.len());
        }
        let (run, rest) = pieces.split_at(count);
        pieces = rest;
        Some(run)
    })
}

/// Copies the pieces of a run to `out`, one directly after another.
pub(crate) fn gather(run: &[WritePiece], mut out: &mut [u8]) {
    for piece in run {
        let (head, tail) = out.split_at_mut(piece.data.len());
        head.copy_from_slice(&piece.data);
        out = tail;
    }
}

/// Writes all pieces, which are sorted by their offsets, one run after another. Calls `completed` with
/// the number of bytes of each completed write.
///
/// # Errors
/// If a write fails. Any of the pieces may then be on the drive.
pub(super) fn write_each<D: Drive + ?Sized>(
    drive: &D,
    pieces: &[WritePiece],
    completed: &mut dyn FnMut(usize),
) -> io::Result<()> {
    runs(pieces).try_for_each(|run| {
        let mut data = vec![0; run.iter().map(|piece| piece.data.len()).sum()];
        gather(run, &mut data);
        drive.write_at(run[0].offset, &data)?;
        completed(data.len());
        Ok(())
    })
}

/// Writes all pieces, which are sorted by their offsets, and blocks the calling thread until the
/// writes have completed. Calls `completed` with the number of bytes of each completed write. Copies
/// runs with a piece whose memory is not aligned to the block size.
///
/// # Errors
/// If a write fails. Any of the pieces may then be on the drive.
pub(super) fn write(
    drive: &FileDrive,
    pieces: &[WritePiece],
    mut completed: impl FnMut(usize),
) -> io::Result<()> {
    if pieces.is_empty() {
        return Ok(());
    }
    // A failed write makes the target refuse all writes. A lack of descriptors or memory is no reason
    // for that.
    let mut ring = match IoRing::new(drive.clone()).and_then(|mut ring| ring.enable().map(|()| ring)) {
        Ok(ring) => ring,
        Err(error) => {
            tracing::warn!(%error, "cannot create an I/O ring; the index is written without one");
            return write_each(drive, pieces, &mut completed);
        }
    };
    let mut lens: HashMap<u64, usize> = HashMap::default();
    let mut complete = |ring: &mut IoRing, lens: &mut HashMap<u64, usize>| {
        ring.wait(None, || false)?;
        for done in ring.completions() {
            completed(lens.remove(&done.id).unwrap_or_default());
            done.result?;
        }
        io::Result::Ok(())
    };
    let mut copies: Option<BufferPool> = None;
    for (id, run) in (0..).zip(runs(pieces)) {
        while lens.len() >= IN_FLIGHT {
            complete(&mut ring, &mut lens)?;
        }
        let len = run.iter().map(|piece| piece.data.len()).sum();
        let is_aligned = |piece: &WritePiece| piece.data.as_ptr().align_offset(BLOCK_SIZE) == 0;
        let data = if run.iter().all(is_aligned) {
            run.iter().map(|piece| piece.data.clone()).collect()
        } else {
            let pool = match &copies {
                Some(pool) => pool,
                None => {
                    let memory = Arena::anonymous(IN_FLIGHT * RUN_BYTES).map_err(io::Error::other)?;
                    copies.insert(BufferPool::new(memory, 0, RUN_BYTES))
                }
            };
            let buffer = pool.try_alloc(len).map_err(io::Error::other)?;
            let mut buffer = buffer.ok_or_else(|| io::Error::other("too many writes are in flight"))?;
            gather(run, &mut buffer);
            vec![buffer.freeze()]
        };
        lens.insert(id, len);
        ring.submit(IoRequest { id, offset: run[0].offset, op: IoOp::Write(data) })?;
    }
    while ring.in_flight() > 0 || ring.has_completions() {
        complete(&mut ring, &mut lens)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_adjacent_and_contain_all_pieces(blocks in proptest::collection::btree_set(0u64..400, 0..300)) {
            let block = Bytes::from(vec![0; BLOCK_SIZE]);
            let piece = |b: &u64| WritePiece { offset: b * BLOCK_SIZE as u64, data: block.clone() };
            let all: Vec<WritePiece> = blocks.iter().map(piece).collect();
            let mut offsets = Vec::new();
            let (mut end, mut last_len) = (None, 0);
            for run in runs(&all) {
                let len = run.len() * BLOCK_SIZE;
                prop_assert!(len <= RUN_BYTES);
                prop_assert!(end != Some(run[0].offset) || last_len == RUN_BYTES, "adjacent runs are joined");
                for (piece, at) in run.iter().zip((run[0].offset..).step_by(BLOCK_SIZE)) {
                    prop_assert_eq!(piece.offset, at);
                    offsets.push(at);
                }
                (end, last_len) = (Some(run[0].offset + len as u64), len);
            }
            prop_assert!(offsets.into_iter().eq(all.iter().map(|piece| piece.offset)));
        }
    }

    #[test]
    fn a_batch_writes_all_pieces_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let drive = FileDrive::open(&dir.path().join("drive"), Some(16 << 20)).unwrap();
        // Every third run of 100 blocks has aligned memory.
        let pool = BufferPool::new(Arena::anonymous(8 << 20).unwrap(), 0, BLOCK_SIZE);
        let block = |i: usize| {
            let content = vec![(i % 251) as u8 + 1; BLOCK_SIZE];
            if !(i / 100).is_multiple_of(3) {
                return Bytes::from(content);
            }
            let mut buffer = pool.try_alloc(BLOCK_SIZE).unwrap().unwrap();
            buffer.copy_from_slice(&content);
            buffer.freeze()
        };
        let blocks: Vec<Bytes> = (0..3000).map(block).collect();
        let written = |block: usize| block % 7 != 3;
        let pieces: Vec<WritePiece> = (0..blocks.len())
            .filter(|block| written(*block))
            .map(|block| WritePiece { offset: (block * BLOCK_SIZE) as u64, data: blocks[block].clone() })
            .collect();
        let mut completed = 0;
        write(&drive, &pieces, |bytes| completed += bytes).unwrap();
        assert_eq!(completed, pieces.len() * BLOCK_SIZE);
        let mut found = vec![0; BLOCK_SIZE];
        for (number, block) in blocks.iter().enumerate() {
            drive.read_at((number * BLOCK_SIZE) as u64, &mut found).unwrap();
            let expected = if written(number) { &block[..] } else { &[0; BLOCK_SIZE] };
            assert!(found == expected, "block {number}");
        }
        write(&drive, &[], |_| unreachable!("nothing is written")).unwrap();
    }
}
