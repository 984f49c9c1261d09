//! The object store: what stays on the host, one [`ObjectStore`] per drive (*target*).
//!
//! [`ObjectStore`] follows the semantics of Ceph's interface of that name. Its implementations agree by one
//! conformance suite. The store knows nothing of pools, names, clients or networks: ids are opaque bytes.

mod api;
mod error;
mod transaction;

pub use api::{ObjectStore, Page, ReadData, StageId, Stat, StatFs};
pub use error::{Result, StoreError};
pub use transaction::{
    CollectionId, MAX_COLLECTION_ID, MAX_OBJECT_ID, MAX_XATTRS, ObjectId, Op, Transaction, WriteSource,
};
