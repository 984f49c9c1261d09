//! [`ChunkStates`]: what the owner of a disk knows about the objects of its chunks.

use std::sync::atomic::{AtomicU8, Ordering};

/// Where the data of a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkState {
    /// The owner does not know.
    Unknown,
    /// The top layer has the chunk.
    Top,
    /// The top layer does not have the chunk, and an older layer has it.
    Older,
    /// No layer has the chunk, so it reads as zeros.
    Nowhere,
}

/// The states of all chunks of a disk, one byte each.
#[derive(Debug)]
pub(crate) struct ChunkStates(Vec<AtomicU8>);

impl ChunkState {
    fn code(self) -> u8 {
        match self {
            ChunkState::Unknown => 0,
            ChunkState::Top => 1,
            ChunkState::Older => 2,
            ChunkState::Nowhere => 3,
        }
    }

    fn of(code: u8) -> ChunkState {
        match code {
            1 => ChunkState::Top,
            2 => ChunkState::Older,
            3 => ChunkState::Nowhere,
            _ => ChunkState::Unknown,
        }
    }
}

impl ChunkStates {
    /// Creates the states of a disk with this number of chunks.
    pub(crate) fn new(chunks: u64) -> ChunkStates {
        ChunkStates((0..chunks).map(|_| AtomicU8::new(0)).collect())
    }

    pub(crate) fn get(&self, index: u64) -> ChunkState {
        self.0
            .get(index as usize)
            .map_or(ChunkState::Unknown, |state| ChunkState::of(state.load(Ordering::Acquire)))
    }

    /// Records the effect of a change: the top layer has the chunk, or nothing is known any more.
    pub(crate) fn set(&self, index: u64, state: ChunkState) {
        if let Some(known) = self.0.get(index as usize) {
            known.store(state.code(), Ordering::Release);
        }
    }

    /// Records what a read has found. A change that has ended meanwhile knows better.
    pub(crate) fn learn(&self, index: u64, found: ChunkState) {
        if let Some(known) = self.0.get(index as usize) {
            let (unknown, found) = (ChunkState::Unknown.code(), found.code());
            // Otherwise the state is known already.
            let _ = known.compare_exchange(unknown, found, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Records that a new layer was put on top. No request may be in progress.
    pub(crate) fn new_layer(&mut self) {
        for state in &mut self.0 {
            if *state.get_mut() == ChunkState::Top.code() {
                *state.get_mut() = ChunkState::Older.code();
            }
        }
    }

    /// Records a new number of chunks. Forgets the states of chunks from `kept` on.
    pub(crate) fn resize(&mut self, chunks: u64, kept: u64) {
        self.0.truncate(kept as usize);
        self.0.resize_with(chunks as usize, AtomicU8::default);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_does_not_overwrite_what_a_change_has_made_meanwhile() {
        let mut states = ChunkStates::new(4);
        states.learn(0, ChunkState::Nowhere);
        states.set(1, ChunkState::Top);
        states.learn(1, ChunkState::Nowhere);
        assert_eq!(
            [0, 1, 2, 9].map(|index| states.get(index)),
            [ChunkState::Nowhere, ChunkState::Top, ChunkState::Unknown, ChunkState::Unknown]
        );
        states.new_layer();
        assert_eq!(
            [0, 1, 2].map(|index| states.get(index)),
            [ChunkState::Nowhere, ChunkState::Older, ChunkState::Unknown]
        );
        states.resize(6, 1);
        assert_eq!(
            [0, 1, 5].map(|index| states.get(index)),
            [ChunkState::Nowhere, ChunkState::Unknown, ChunkState::Unknown]
        );
    }
}
