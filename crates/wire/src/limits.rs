//! Limits that client and OSD share. The OSD refuses a request beyond a limit with a typed error.

/// Longest object name, in bytes of UTF-8.
pub const MAX_OBJECT_NAME: usize = 1024;
/// Longest pool name, in bytes.
pub const MAX_POOL_NAME: usize = 64;
/// Longest namespace, in bytes.
pub const MAX_NAMESPACE: usize = 64;
/// Largest object that is not striped, and largest part of a striped one, in bytes.
pub const MAX_OBJECT_SIZE: u64 = 128 << 20;
/// Most parts that a striped object can have.
pub const MAX_PARTS: u32 = 1 << 20;
/// Most conditions, and most ops, in one request.
pub const MAX_OPS: usize = 64;
/// Longest name of an xattr, in bytes.
pub const MAX_XATTR_NAME: usize = 255;
/// Largest value of an xattr, in bytes. The store limits all xattrs of an object together to 64
/// KiB.
pub const MAX_XATTR_VALUE: usize = 60 * 1024;
/// Longest omap key, in bytes.
pub const MAX_OMAP_KEY: usize = 1024;
/// Largest omap value, in bytes.
pub const MAX_OMAP_VALUE: usize = 128 * 1024;
/// Most entries in one page of a listing or of an omap.
pub const MAX_PAGE: u32 = 4096;
/// Largest append that the OSD executes as one atomic step, in bytes. The client performs a larger
/// append as a conditional write.
pub const MAX_APPEND: u64 = 2 << 20;
/// Limit of the request numbers between a session's oldest unanswered request and its newest one.
/// The OSD keeps the results of at least as many requests per session and placement group.
pub const REQUEST_WINDOW: u64 = 1024;
/// Most pools of a node.
pub const MAX_POOLS: usize = 1024;
/// Most placement groups of a pool.
pub const MAX_PG_COUNT: u32 = 4096;
/// Default number of placement groups of a pool.
pub const DEFAULT_PG_COUNT: u32 = 32;
