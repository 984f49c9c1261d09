//! The object store: the part of Outboard that runs on the host. Each drive (*target*) has one
//! [`ObjectStore`].
//!
//! [`ObjectStore`] follows the semantics of Ceph's interface of the same name. One conformance
//! suite checks all implementations. The store does not know pools, object names, clients or
//! networks: it treats ids as opaque bytes.
//!
//! [`BlockStore`] keeps a target on a file or block device; `docs/format.md` describes the format.
//! [`MemStore`] keeps everything in memory; tests use it as the reference model for other stores.
//! [`stripes`] writes data to several stores at once. [`fsck`](fn@fsck) checks a target that is not
//! mounted. All `unsafe` code of this crate is in two modules: the I/O ring, and the buffer
//! segments that the ring fills.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

#[cfg(all(feature = "sim", not(debug_assertions)))]
compile_error!(
    "a release must not contain the simulator's parts: leave out crate outboard-sim, for example with `-p outboard`"
);

mod absent;
mod api;
mod block;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
mod extents;
mod found;
/// A store on a drive that records its history, for tests of power failures.
#[cfg(any(test, feature = "conformance"))]
pub mod simulation {
    pub use crate::block::sim::{Crashes, RecordedDrive, SimStore};
}
/// A target on a simulated drive, which runs in simulated time and without threads.
#[cfg(feature = "sim")]
pub mod sim {
    pub use crate::block::sim_drive::{
        DriveCounts, DriveFault, DriveFaultKind, DriveImage, DrivePart, DriveTimes, SimDrive, Survivors,
    };
}
#[doc(hidden)]
pub mod fuzz;
mod mem_store;
mod remount;
mod request;
mod stage;
pub mod stripes;
mod transaction;

pub use absent::AbsentStore;
pub use api::{ObjectStore, ReplyOf, StoreCalls, StoreFuture, Submit, check_incarnation, done, ready};
pub use block::{
    BlockStore, CheckpointWatch, DriveCalls, Driver, FsckReport, Inspect, MkfsOptions, MountOptions, Problem,
    fsck,
};
pub use error::{Area, Result, StoreError};
pub use extents::{ExtentsPage, MAX_EXTENTS, ObjectExtents};
pub use found::{Page, ReadData, Stat};
pub use mem_store::MemStore;
pub use remount::RemountedStore;
pub use request::{MetadataQuery, QueryReply, StoreReply, StoreRequest};
pub use stage::StageId;
pub use transaction::{
    CollectionId, MAX_CLONE_RANGE, MAX_COLLECTION_ID, MAX_OBJECT_ID, MAX_READ, MAX_STORED_KEY,
    MAX_STORED_OBJECT, MAX_STORED_VALUE, MAX_XATTRS, ObjectId, Op, Transaction, WriteSource,
};
pub use wire::Space;
