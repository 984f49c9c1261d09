//! What can go wrong with a code.

use crate::Geometry;

/// Result of this crate's operations on codes.
pub type Result<T, E = EcError> = std::result::Result<T, E>;

/// Why a code cannot be made or applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EcError {
    /// Text that is no geometry.
    #[error("{text:?} is no geometry; write data fragments + parity fragments, such as 4+2")]
    Syntax {
        /// What was given.
        text: String,
    },
    /// Numbers of fragments that no code of this kind has.
    #[error(
        "there is no code of {k} data and {m} parity fragments; choose at least one of each, and at most 255 together"
    )]
    Geometry {
        /// Data fragments asked for.
        k: usize,
        /// Parity fragments asked for.
        m: usize,
    },
    /// A call with more or fewer slices than the code has fragments for.
    #[error("{found} slices were given as {what}, where {expected} are needed; give one per fragment")]
    Count {
        /// What the slices are.
        what: &'static str,
        /// How many are needed.
        expected: usize,
        /// How many there were.
        found: usize,
    },
    /// Slices of one call that are not of one length.
    #[error(
        "slice {index} of {what} has {found} bytes, where {expected} are needed; fragments are of one length"
    )]
    Length {
        /// What the slices are.
        what: &'static str,
        /// Position of the slice that differs.
        index: usize,
        /// Length needed, in bytes.
        expected: usize,
        /// Length found, in bytes.
        found: usize,
    },
    /// A fragment, a column or a row beyond the last.
    #[error("a {geometry} code has no {what} {index}; they are counted from 0")]
    NoSuch {
        /// What was asked for: `fragment`, `data fragment`, `parity row`.
        what: &'static str,
        /// Its number.
        index: usize,
        /// The code.
        geometry: Geometry,
    },
    /// A fragment or a row that is listed more than once.
    #[error("{what} {index} is listed twice; list each once")]
    Twice {
        /// What is listed: `fragment`, `parity row`.
        what: &'static str,
        /// Its number.
        index: usize,
    },
    /// More is lost than the code can make up for.
    #[error("{present} fragments are there and {needed} are needed; bring back at least {}", needed.saturating_sub(*present))]
    TooFew {
        /// How many fragments there are.
        present: usize,
        /// How many are needed.
        needed: usize,
    },
    /// A stripe unit that cannot be.
    #[error("a stripe unit of {unit} bytes cannot be used here; choose a multiple of {multiple} up to {max}")]
    Unit {
        /// What was asked for, in bytes.
        unit: usize,
        /// What it must be a multiple of.
        multiple: usize,
        /// The longest.
        max: usize,
    },
    /// Data that does not end where a stripe ends.
    #[error(
        "{len} bytes are not a whole number of stripes of {stripe} bytes; pad the last stripe with zeros"
    )]
    PartialStripe {
        /// Length of the data, in bytes.
        len: usize,
        /// Length of a stripe's data, in bytes.
        stripe: usize,
    },
    /// A kernel that does not exist.
    #[error("there is no kernel {name:?}; choose auto, gfni, isal or portable")]
    NoSuchKernel {
        /// What was asked for.
        name: String,
    },
    /// The processor's own instructions were asked for, and it has none.
    #[error("this processor has no GFNI and AVX-512; use the kernel isal or portable")]
    NoGfni,
    /// ISA-L was asked for and is not there.
    #[error(
        "ISA-L cannot be loaded: {why}; install it (Debian and Ubuntu: libisal2) or use the kernel portable"
    )]
    NoIsal {
        /// What the loader says.
        why: String,
    },
}
