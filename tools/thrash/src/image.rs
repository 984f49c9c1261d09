//! Damages the file of a target.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Length of the blocks in which the file of a target is compared.
const BLOCK: usize = 4096;

/// Returns a hash of each block of a file.
pub fn block_hashes(path: &Path) -> std::io::Result<Vec<u64>> {
    let mut file = fs::File::open(path)?;
    let mut hashes = Vec::new();
    let mut block = [0; BLOCK];
    while file.read_exact(&mut block).is_ok() {
        hashes.push(xxhash_rust::xxh3::xxh3_64(&block));
    }
    Ok(hashes)
}

/// Flips bits in up to four blocks of a file, and returns the offsets of the damaged bytes. Hits
/// blocks that have changed since `before`: the newest entries of the log, and new data. The log
/// occupies an eighth of the file (`docs/format.md`) and is hit half the time.
pub fn flip_bits(path: &Path, before: &[u64], seed: u64) -> std::io::Result<Vec<u64>> {
    let mut random = SmallRng::seed_from_u64(seed);
    let now = block_hashes(path)?;
    let changed: Vec<usize> = (0..now.len()).filter(|n| before.get(*n) != now.get(*n)).collect();
    let log: Vec<usize> = changed.iter().copied().filter(|n| *n < now.len() / 8).collect();
    let file = fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut offsets = Vec::new();
    for _ in 0..random.random_range(1..=4) {
        let hits_log = random.random_range(0..2) == 0;
        let (choice, at) = (random.random_range(0.0..1.0), random.random_range(0..BLOCK as u64));
        let blocks = if hits_log && !log.is_empty() { &log } else { &changed };
        let Some(block) = blocks.get((choice * blocks.len() as f64) as usize) else { continue };
        let offset = (*block * BLOCK) as u64 + at;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset)?;
        byte[0] ^= 1 << random.random_range(0..8);
        file.write_all_at(&byte, offset)?;
        offsets.push(offset);
    }
    file.sync_all()?;
    Ok(offsets)
}
