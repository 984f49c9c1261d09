//! The store on a drive. `docs/format.md` draws what lies there.
//!
//! [`store`] is the handle and its threads; [`core`] the state of a target, without any I/O of its own, [`messages`] what it takes and gives; [`apply`] turns
//! transactions into changes, [`commit`] makes them durable, [`query`] reads; [`checkpoint`] brings the index forward and
//! [`recovery`] brings a target to order. [`records`], [`log`], [`superblock`] and [`region`] are the formats.

mod alloc;
mod apply;
mod bitmap;
mod checkpoint;
mod commit;
mod core;
#[cfg(test)]
mod crash_test;
mod drive;
mod extent;
mod fsck;
mod index;
mod io;
mod log;
mod messages;
mod query;
mod records;
mod recovery;
mod region;
#[cfg(test)]
mod sim;
mod staged;
mod store;
mod superblock;
mod uring;
mod view;

pub use fsck::{FsckReport, Problem, fsck};
pub use store::{BlockStore, MkfsOptions, MountOptions};
