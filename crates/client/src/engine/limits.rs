//! Limits on the requests to an engine.

use wire::limits;

/// Limits on the requests to an engine. The engine refuses larger requests with a typed error; the
/// caller must split them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineLimits {
    /// Maximum size of an object that is not striped, and of a part of a striped object, in bytes.
    pub object_bytes_max: u64,
    /// Maximum number of parts of a striped object.
    pub parts_max: u32,
    /// Maximum size of an append that is one atomic step, in bytes.
    pub append_bytes_max: u64,
    /// Maximum number of conditions, and of operations, in one change or query.
    pub operations_max: usize,
    /// Maximum length of an xattr's name, in bytes.
    pub xattr_name_bytes_max: usize,
    /// Maximum size of an xattr's value, in bytes.
    pub xattr_bytes_max: usize,
    /// Maximum total size of the names and values of an object's xattrs, in bytes. The engine's own
    /// xattrs use some of these bytes.
    pub xattrs_bytes_max: usize,
    /// Maximum length of an omap key, in bytes.
    pub omap_key_bytes_max: usize,
    /// Maximum size of an omap value, in bytes.
    pub omap_value_bytes_max: usize,
    /// Maximum total size of a change's conditions and operations, in bytes, without the data of
    /// the operation with the most data.
    pub change_bytes_max: usize,
    /// Maximum number of entries in one page of a listing or of an omap.
    pub page_entries_max: u32,
}

impl EngineLimits {
    /// The limits of the object protocol.
    pub(crate) const PROTOCOL: EngineLimits = EngineLimits {
        object_bytes_max: limits::MAX_OBJECT_SIZE,
        parts_max: limits::MAX_PARTS,
        append_bytes_max: limits::MAX_APPEND,
        operations_max: limits::MAX_OPS,
        xattr_name_bytes_max: limits::MAX_XATTR_NAME,
        xattr_bytes_max: limits::MAX_XATTR_VALUE,
        xattrs_bytes_max: limits::MAX_XATTRS,
        omap_key_bytes_max: limits::MAX_OMAP_KEY,
        omap_value_bytes_max: limits::MAX_OMAP_VALUE,
        change_bytes_max: limits::MAX_HEADER,
        page_entries_max: limits::MAX_PAGE,
    };
}
