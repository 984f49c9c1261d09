//! [`DmaTrace`]: a hash of all operations of a simulated part, with their times.

use base::clock::Instant;

/// A running hash (FNV-1a, 64 bits). Two runs with the same hash performed the same operations at
/// the same times.
#[derive(Debug)]
pub(super) struct DmaTrace {
    began: Instant,
    hash: u64,
    operations: u64,
}

impl Default for DmaTrace {
    fn default() -> DmaTrace {
        DmaTrace { began: Instant::now(), hash: 0xcbf2_9ce4_8422_2325, operations: 0 }
    }
}

impl DmaTrace {
    /// Adds an operation that happens now.
    pub(super) fn add(&mut self, what: &str, numbers: &[u64]) {
        let since = Instant::now().duration_since(self.began).as_nanos() as u64;
        tracing::trace!(since, ?numbers, "{what}");
        self.operations += 1;
        let numbers = std::iter::once(&since).chain(numbers).flat_map(|n| n.to_le_bytes());
        for byte in what.bytes().chain(numbers) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn operations(&self) -> u64 {
        self.operations
    }
}
