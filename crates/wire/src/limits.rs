//! Limits that client and osd share. The osd refuses a request that exceeds a limit, with a typed
//! error.

/// Maximum length of an object name, in bytes of UTF-8.
pub const MAX_OBJECT_NAME: usize = 1024;
/// Maximum length of a pool name, in bytes.
pub const MAX_POOL_NAME: usize = 64;
/// Maximum length of a namespace, in bytes.
pub const MAX_NAMESPACE: usize = 64;
/// Maximum size of an object that is not striped, and of a part of a striped object, in bytes.
pub const MAX_OBJECT_SIZE: u64 = 128 << 20;
/// Maximum number of parts of a striped object.
pub const MAX_PARTS: u32 = 1 << 20;
/// Maximum number of conditions, and of ops, in one request.
pub const MAX_OPS: usize = 64;
/// Maximum number of objects from which a change may inherit, or to which a read may fall back.
pub const MAX_FALLBACKS: usize = 1024;
/// Maximum length of an xattr's name, in bytes.
pub const MAX_XATTR_NAME: usize = 255;
/// Maximum size of an xattr's value, in bytes.
pub const MAX_XATTR_VALUE: usize = 60 * 1024;
/// Maximum total size of the names and values of an object's xattrs, in bytes. The osd's own xattrs
/// use about 100 of these bytes, and one more byte for each xattr of a user.
pub const MAX_XATTRS: usize = 64 * 1024;
/// Maximum length of an omap key, in bytes.
pub const MAX_OMAP_KEY: usize = 1024;
/// Maximum size of an omap value, in bytes.
pub const MAX_OMAP_VALUE: usize = 128 * 1024;
/// Maximum number of entries in one page of a listing or of an omap.
pub const MAX_PAGE: u32 = 4096;
/// Maximum total size of the entries in one page of an omap, in bytes. The first entry of a page
/// may be larger.
pub const OMAP_PAGE_BYTES: usize = 48 << 10;
/// Maximum size of an append that the osd executes as one atomic step, in bytes. The client
/// performs a larger append as a conditional write.
pub const MAX_APPEND: u64 = 2 << 20;
/// Maximum size of an encoded request or reply, without its payload and its bulk data, in bytes.
pub const MAX_HEADER: usize = 256 << 10;
/// Maximum difference between the request numbers of a session's oldest unanswered request and of
/// its newest request. For each session and placement group, the osd keeps the results of at least
/// this number of requests.
pub const REQUEST_WINDOW: u64 = 1024;
/// Maximum number of strands of a connection to one shard: sessions that share the connection.
pub const MAX_STRANDS: usize = 1024;
/// Maximum number of pools of a node.
pub const MAX_POOLS: usize = 1024;
/// Maximum length of the name of a tenant or user, in bytes.
pub const MAX_ACCOUNT_NAME: usize = 32;
/// Maximum number of tenants of a node.
pub const MAX_TENANTS: usize = 1024;
/// Maximum number of users of a node.
pub const MAX_USERS: usize = 4096;
/// Maximum number of grants of a user.
pub const MAX_GRANTS: usize = 64;
/// Maximum number of placement groups of a pool.
pub const MAX_PG_COUNT: u32 = 4096;
/// Default number of placement groups of a pool.
pub const DEFAULT_PG_COUNT: u32 = 32;
/// Maximum number of shards of an osd.
pub const MAX_SHARDS: u16 = 64;
