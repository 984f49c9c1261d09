//! Errors of erasure codes.

/// Result of an operation on erasure codes.
pub type Result<T, E = EcError> = std::result::Result<T, E>;

/// Reason why a code cannot be created or applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EcError {
    /// The text is not a geometry.
    #[error("{text:?} is not a geometry; write the numbers of data and parity fragments, for example 4+2")]
    Syntax {
        /// The text.
        text: String,
    },
    /// No code has these numbers of fragments.
    #[error(
        "there is no code of {k} data and {m} parity fragments; choose at least one of each, and at most 255 in total"
    )]
    Geometry {
        /// Number of data fragments requested.
        k: usize,
        /// Number of parity fragments requested.
        m: usize,
    },
    /// A call has too many or too few slices for the code's fragments.
    #[error("{found} slices were passed as {what}, but {expected} are needed; pass one slice per fragment")]
    Count {
        /// Purpose of the slices.
        what: &'static str,
        /// Number of slices needed.
        expected: usize,
        /// Number of slices passed.
        found: usize,
    },
    /// The slices of one call differ in length.
    #[error(
        "slice {index} of {what} has {found} bytes, but {expected} are needed; all fragments must have the same length"
    )]
    Length {
        /// Purpose of the slices.
        what: &'static str,
        /// Index of the slice that differs.
        index: usize,
        /// Expected length in bytes.
        expected: usize,
        /// Actual length in bytes.
        found: usize,
    },
    /// The code has no fragment, column or row with this index.
    #[error("a {k}+{m} code has no {what} {index}; indices start at 0")]
    NoSuch {
        /// Kind of index: `fragment`, `data fragment` or `parity row`.
        what: &'static str,
        /// The index.
        index: usize,
        /// Number of the code's data fragments.
        k: usize,
        /// Number of the code's parity fragments.
        m: usize,
    },
    /// A fragment or a row is listed more than once.
    #[error("{what} {index} is listed twice; list each index once")]
    Twice {
        /// Kind of index: `fragment` or `parity row`.
        what: &'static str,
        /// The index.
        index: usize,
    },
    /// Too few fragments are present to reconstruct the lost fragments.
    #[error("{present} fragments are present, but {needed} are needed; bring back at least {} more", needed.saturating_sub(*present))]
    TooFew {
        /// Number of fragments present.
        present: usize,
        /// Number of fragments needed.
        needed: usize,
    },
    /// The stripe unit has an invalid size.
    #[error(
        "a stripe unit of {unit} bytes is not possible; choose a multiple of {multiple} bytes, at most {max} bytes"
    )]
    Unit {
        /// The size in bytes.
        unit: usize,
        /// The size must be a multiple of this number of bytes.
        multiple: usize,
        /// Maximum size in bytes.
        max: usize,
    },
    /// The data does not end at a stripe boundary.
    #[error(
        "{len} bytes are not a whole number of stripes of {stripe} bytes; pad the last stripe with zeros"
    )]
    PartialStripe {
        /// Length of the data in bytes.
        len: usize,
        /// Length of a stripe's data in bytes.
        stripe: usize,
    },
    /// A block that is coded does not match its checksum.
    #[error(
        "slice {index} is damaged: the checksum of the block at offset {offset} is {found:#010x} instead of {expected:#010x}"
    )]
    Damaged {
        /// Index of the damaged slice.
        index: usize,
        /// Offset of the block in its slice, in bytes.
        offset: usize,
        /// The checksum that came with the block.
        expected: u32,
        /// The checksum computed from the block.
        found: u32,
    },
    /// There is no kernel with this name.
    #[error("there is no kernel {name:?}; choose auto, gfni, isal or portable")]
    NoSuchKernel {
        /// The name.
        name: String,
    },
    /// The kernel `gfni` was requested, but the processor does not have both GFNI and AVX-512.
    #[error("this processor does not have both GFNI and AVX-512; use the kernel isal or portable")]
    NoGfni,
    /// The kernel `isal` was requested, but ISA-L cannot be loaded.
    #[error(
        "ISA-L cannot be loaded: {why}; install it (Debian and Ubuntu: libisal2) or use the kernel portable"
    )]
    NoIsal {
        /// Error message of the dynamic loader.
        why: String,
    },
}
