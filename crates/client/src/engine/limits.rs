//! Largest requests of an engine.

use wire::limits;

/// Largest requests that an engine takes. Larger ones are refused with a typed error; splitting
/// them is the caller's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineLimits {
    /// Largest object that is not striped, and largest part of a striped object, in bytes.
    pub object_bytes_max: u64,
    /// Most parts of a striped object.
    pub parts_max: u32,
    /// Largest append that is one atomic step, in bytes.
    pub append_bytes_max: u64,
    /// Most conditions, and most operations, of one change or query.
    pub operations_max: usize,
    /// Largest xattr value, in bytes.
    pub xattr_bytes_max: usize,
    /// Longest omap key, in bytes.
    pub omap_key_bytes_max: usize,
    /// Largest omap value, in bytes.
    pub omap_value_bytes_max: usize,
    /// Most entries of a page of names or omap entries.
    pub page_entries_max: u32,
}

impl EngineLimits {
    /// The limits of the object protocol.
    pub(crate) const PROTOCOL: EngineLimits = EngineLimits {
        object_bytes_max: limits::MAX_OBJECT_SIZE,
        parts_max: limits::MAX_PARTS,
        append_bytes_max: limits::MAX_APPEND,
        operations_max: limits::MAX_OPS,
        xattr_bytes_max: limits::MAX_XATTR_VALUE,
        omap_key_bytes_max: limits::MAX_OMAP_KEY,
        omap_value_bytes_max: limits::MAX_OMAP_VALUE,
        page_entries_max: limits::MAX_PAGE,
    };
}
