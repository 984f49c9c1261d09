//! Files as fragments: a stream of bytes cut into `k + m` files, of which any `k` give it back, and the others, too.
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
//! Stripe `s` is the file's bytes from `s * k * unit` on; fragment `j` < `k` has the `j`-th unit of each stripe, the others have
//! parity ([`Code`]). The units of the last stripe are as short as they can be: its bytes divided by `k`,
//! rounded up to 64; zeros fill it. An empty file has no stripes.
//!
//! The id is drawn anew for every encoding, so fragments of two files, or of two states of one file, are never mixed. The
//! header is written last: a fragment that was not finished is none. A record that cannot be read or has another
//! checksum counts as lost, in its stripe only. Everything works on one stripe at a time, in the memory that this takes.

mod decode;
mod encode;
mod header;

use std::io;

pub use decode::{FragmentSet, FragmentState};
pub use encode::encode;

use crate::{EcError, Geometry};

#[cfg(doc)]
use crate::Code;

/// Longest stripe unit of a fragment file, in bytes.
pub const UNIT_MAX: usize = 4 << 20;
/// What stripe units of fragment files are multiples of, in bytes.
pub const UNIT_MULTIPLE: usize = 64;
/// Bytes of a record's checksum.
const CRC: usize = 4;

/// How a file was cut; the same in all its fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLayout {
    /// The code.
    pub geometry: Geometry,
    /// Stripe unit, in bytes: a multiple of [`UNIT_MULTIPLE`] up to [`UNIT_MAX`].
    pub unit: usize,
    /// Length of the file, in bytes.
    pub len: u64,
    /// Tells this encoding from every other.
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

    /// Bytes of the file in a stripe.
    fn filled(&self, stripe: u64) -> usize {
        (self.len - stripe * self.stripe()).min(self.stripe()) as usize
    }

    /// Length of the units of a stripe.
    fn unit_of(&self, stripe: u64) -> usize {
        unit_for(self.filled(stripe), self.geometry.k())
    }

    /// Where a stripe's record begins in a fragment.
    fn record_at(&self, stripe: u64) -> u64 {
        header::LEN as u64 + stripe * (self.unit + CRC) as u64
    }

    /// Whether the file and its fragments are no longer than files can be.
    fn is_possible(&self) -> bool {
        let records = self.stripes().checked_mul((self.unit + CRC) as u64);
        let fragment = records.and_then(|records| records.checked_add(header::LEN as u64));
        [Some(self.len), fragment].iter().all(|len| len.is_some_and(|len| i64::try_from(len).is_ok()))
    }
}

/// The shortest unit for stripes of `filled` bytes.
fn unit_for(filled: usize, k: usize) -> usize {
    filled.div_ceil(k).next_multiple_of(UNIT_MULTIPLE)
}

/// Why a file cannot be cut or put together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FragmentError {
    /// The code refused it.
    #[error(transparent)]
    Code(#[from] EcError),
    /// The file to be cut cannot be read.
    #[error("the input cannot be read: {0}")]
    Read(io::Error),
    /// A fragment cannot be written.
    #[error("fragment {index} cannot be written: {error}")]
    WriteFragment {
        /// Which one.
        index: usize,
        /// Why.
        error: io::Error,
    },
    /// The file cannot be written.
    #[error("the output cannot be written: {0}")]
    Write(io::Error),
    /// Nothing that was given is a fragment.
    #[error("none of the {given} inputs is a fragment of a file; name those that `outboard ec encode` wrote")]
    NoFragments {
        /// How many inputs there were.
        given: usize,
    },
    /// Fragments of different encodings.
    #[error(
        "inputs {first} and {second} are fragments of different files, or of two encodings of one; name those of one only"
    )]
    Mixed {
        /// Position of one among the inputs, from 0.
        first: usize,
        /// Position of the other.
        second: usize,
    },
    /// The same fragment more than once.
    #[error("inputs {first} and {second} are both fragment {index}; name each fragment once")]
    Twice {
        /// Which fragment it is.
        index: usize,
        /// Position of one among the inputs, from 0.
        first: usize,
        /// Position of the other.
        second: usize,
    },
    /// A stripe of which too much is lost.
    #[error(
        "too much is lost: of {fragments} fragments {intact} are intact in stripe {stripe}, {needed} are needed; bring back at least {}",
        needed.saturating_sub(*intact)
    )]
    TooFew {
        /// Which stripe, from 0.
        stripe: u64,
        /// How many of its units are there and intact.
        intact: usize,
        /// How many are needed.
        needed: usize,
        /// How many fragments the file has.
        fragments: usize,
    },
}
