//! Splits a byte stream into `k + m` fragment files. Any `k` fragments restore the stream and the
//! other fragments.
//!
//! ```text
//! fragment file    ┌────────┬──────────┬──────────┬─────┬───────────┐
//!               │ header │ record 0 │ record 1 │  …  │ last one  │    one record per stripe
//!               └────────┴──────────┴──────────┴─────┴───────────┘
//! header, 64 B   0 magic "obshard\0"       8 version, u16: 1   10 k, u8     11 m, u8    12 index of this fragment, u8
//!               16 stripe unit, u32, B    24 length of the file, u64, B
//!               32 id of the encoding, 16 B                    60 CRC-32C of bytes 0 to 59, u32
//!                  the rest is 0; numbers are little endian
//! record         one unit of the fragment, then its CRC-32C, u32
//! ```
//!
//! Stripe `s` consists of the `k * unit` bytes of the file that begin at offset `s * k * unit`.
//! Fragment `j` < `k` contains unit `j` of each stripe. The other fragments contain parity
//! ([`Code`]). The last stripe may have shorter units: their length is the number of file bytes in
//! the stripe divided by `k`, rounded up to a multiple of 64. Zeros fill the units beyond the end
//! of the file. An empty file has no stripes.
//!
//! Each encoding has a new random id. So fragments of two files, or of two versions of one file,
//! are never mixed. The header is written last, so an unfinished fragment has no valid header. A
//! record that is unreadable or has a wrong checksum counts as lost, in its stripe only. All
//! operations process one stripe at a time, and need memory for one stripe.

mod decode;
mod encode;
mod header;

use std::io;

pub use decode::{FragmentSet, FragmentState};
pub use encode::encode;

use crate::{EcError, Geometry};

#[cfg(doc)]
use crate::Code;

/// Maximum size of the stripe unit of a fragment file, in bytes.
pub const UNIT_MAX: usize = 4 << 20;
/// Sizes of the stripe units of fragment files are multiples of this number of bytes.
pub const UNIT_MULTIPLE: usize = 64;
/// Size of a record's checksum in bytes.
const CRC: usize = 4;

/// The layout of an encoded file. All its fragments have the same layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLayout {
    /// Numbers of data and parity fragments of the code.
    pub geometry: Geometry,
    /// Stripe unit, in bytes: a multiple of [`UNIT_MULTIPLE`] up to [`UNIT_MAX`].
    pub unit: usize,
    /// Length of the file, in bytes.
    pub len: u64,
    /// Random id of this encoding.
    pub id: [u8; 16],
}

impl FileLayout {
    fn stripe(&self) -> u64 {
        (self.geometry.k() * self.unit) as u64
    }

    /// Number of stripes.
    fn stripes(&self) -> u64 {
        self.len.div_ceil(self.stripe())
    }

    /// Number of file bytes in a stripe.
    fn filled(&self, stripe: u64) -> usize {
        (self.len - stripe * self.stripe()).min(self.stripe()) as usize
    }

    /// Length of the units in a stripe.
    fn unit_of(&self, stripe: u64) -> usize {
        unit_for(self.filled(stripe), self.geometry.k())
    }

    /// Offset of a stripe's record in a fragment.
    fn record_at(&self, stripe: u64) -> u64 {
        header::LEN as u64 + stripe * (self.unit + CRC) as u64
    }

    /// Returns true if the lengths of the file and of its fragments, in bytes, fit into an `i64`.
    fn is_possible(&self) -> bool {
        let records = self.stripes().checked_mul((self.unit + CRC) as u64);
        let fragment = records.and_then(|records| records.checked_add(header::LEN as u64));
        [Some(self.len), fragment].iter().all(|len| len.is_some_and(|len| i64::try_from(len).is_ok()))
    }
}

/// Returns the length of the shortest units that can hold `filled` bytes of a stripe.
fn unit_for(filled: usize, k: usize) -> usize {
    filled.div_ceil(k).next_multiple_of(UNIT_MULTIPLE)
}

/// Reason why a file cannot be split or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FragmentError {
    /// The code reported an error.
    #[error(transparent)]
    Code(#[from] EcError),
    /// The input file cannot be read.
    #[error("the input cannot be read: {0}")]
    Read(io::Error),
    /// A fragment cannot be written.
    #[error("fragment {index} cannot be written: {error}")]
    WriteFragment {
        /// Index of the fragment.
        index: usize,
        /// Cause.
        error: io::Error,
    },
    /// The output file cannot be written.
    #[error("the output cannot be written: {0}")]
    Write(io::Error),
    /// None of the inputs is a fragment.
    #[error("none of the {given} inputs is a fragment of a file; name files that `outboard ec encode` wrote")]
    NoFragments {
        /// Number of inputs.
        given: usize,
    },
    /// The inputs are fragments of different encodings.
    #[error(
        "inputs {first} and {second} are fragments of different files, or of two encodings of one file; name fragments of one encoding only"
    )]
    Mixed {
        /// Index of one input.
        first: usize,
        /// Index of the other input.
        second: usize,
    },
    /// Two inputs are the same fragment.
    #[error("inputs {first} and {second} are both fragment {index}; name each fragment once")]
    Twice {
        /// Index of the fragment.
        index: usize,
        /// Index of one input.
        first: usize,
        /// Index of the other input.
        second: usize,
    },
    /// Too many units of a stripe are lost.
    #[error(
        "too much is lost: of {fragments} fragments {intact} are intact in stripe {stripe}, but {needed} are needed; bring back at least {} more",
        needed.saturating_sub(*intact)
    )]
    TooFew {
        /// Index of the stripe.
        stripe: u64,
        /// Number of units that are present and intact.
        intact: usize,
        /// Number of units needed.
        needed: usize,
        /// Total number of fragments of the file.
        fragments: usize,
    },
}
