//! Batches of writes: pieces that are adjacent on the drive share a write, and several writes are
//! in flight at once.

use std::io;

use base::mem::Arena;
use base::pool::BufferPool;

use super::drive::FileDrive;
use super::io::{IoOp, IoRequest};
use super::uring::IoRing;

/// Maximum size of a write of a batch, in bytes.
const RUN_BYTES: usize = 256 << 10;
/// Maximum number of bytes in flight.
const IN_FLIGHT_BYTES: usize = 4 << 20;

/// A piece of data and its offset on the drive. Offset and length are multiples of the block size,
/// and the length is at most [`RUN_BYTES`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct WritePiece<'a> {
    pub(crate) offset: u64,
    pub(crate) data: &'a [u8],
}

/// Splits pieces, which are sorted by their offsets, into runs. The pieces of a run are adjacent on
/// the drive.
pub(crate) fn runs<'a, 'b>(mut pieces: &'a [WritePiece<'b>]) -> impl Iterator<Item = &'a [WritePiece<'b>]> {
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
pub(crate) fn gather(run: &[WritePiece<'_>], mut out: &mut [u8]) {
    for piece in run {
        let (head, tail) = out.split_at_mut(piece.data.len());
        head.copy_from_slice(piece.data);
        out = tail;
    }
}

/// Writes all pieces, which are sorted by their offsets, and blocks the calling thread until the
/// writes have completed. Calls `completed` for each completed write. The pieces are copied, so
/// they need no alignment.
///
/// # Errors
/// If a write fails. Any of the pieces may then be on the drive.
pub(super) fn write(
    drive: &FileDrive,
    pieces: &[WritePiece<'_>],
    mut completed: impl FnMut(),
) -> io::Result<()> {
    if pieces.is_empty() {
        return Ok(());
    }
    let total: usize = pieces.iter().map(|piece| piece.data.len()).sum();
    let memory = Arena::anonymous(total.next_multiple_of(RUN_BYTES).min(IN_FLIGHT_BYTES));
    let pool = BufferPool::new(memory.map_err(io::Error::other)?, 0, RUN_BYTES);
    let mut ring = IoRing::new(drive.clone())?;
    ring.enable()?;
    let mut complete = |ring: &mut IoRing| {
        ring.wait(None, || false)?;
        for done in ring.completions() {
            completed();
            done.result?;
        }
        io::Result::Ok(())
    };
    for (id, run) in (0..).zip(runs(pieces)) {
        let len = run.iter().map(|piece| piece.data.len()).sum();
        let mut buffer = loop {
            match pool.try_alloc(len).map_err(io::Error::other)? {
                Some(buffer) => break buffer,
                None => complete(&mut ring)?,
            }
        };
        gather(run, &mut buffer);
        let op = IoOp::Write(vec![buffer.freeze()]);
        ring.submit(IoRequest { id, offset: run[0].offset, op })?;
    }
    while ring.in_flight() > 0 || ring.has_completions() {
        complete(&mut ring)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use base::block::BLOCK_SIZE;
    use proptest::prelude::*;

    use super::super::drive::Drive;
    use super::*;

    proptest! {
        #[test]
        fn runs_are_adjacent_and_contain_all_pieces(blocks in proptest::collection::btree_set(0u64..400, 0..300)) {
            let block = [0; BLOCK_SIZE];
            let all: Vec<WritePiece<'_>> =
                blocks.iter().map(|b| WritePiece { offset: b * BLOCK_SIZE as u64, data: &block }).collect();
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
        let blocks: Vec<Vec<u8>> = (0..3000usize).map(|i| vec![(i % 251) as u8 + 1; BLOCK_SIZE]).collect();
        let written = |block: usize| block % 7 != 3;
        let pieces: Vec<WritePiece<'_>> = (0..blocks.len())
            .filter(|block| written(*block))
            .map(|block| WritePiece { offset: (block * BLOCK_SIZE) as u64, data: &blocks[block] })
            .collect();
        let mut completed = 0;
        write(&drive, &pieces, || completed += 1).unwrap();
        assert_eq!(completed, runs(&pieces).count());
        let mut found = vec![0; BLOCK_SIZE];
        for (number, block) in blocks.iter().enumerate() {
            drive.read_at((number * BLOCK_SIZE) as u64, &mut found).unwrap();
            let expected = if written(number) { block } else { &vec![0; BLOCK_SIZE] };
            assert!(found == *expected, "block {number}");
        }
        write(&drive, &[], || unreachable!("nothing is written")).unwrap();
    }
}
