//! The store on a drive, [`BlockStore`]. `docs/format.md` describes the on-disk format.
//!
//! - [`store`] is the handle of a target, and [`driver`] runs the target. [`mailbox`] passes
//!   commands from the handle to the driver.
//! - [`backend`] is the interface between the driver and its I/O ring and workers. [`hardware`]
//!   implements it with io_uring and threads, and `sim_drive` in simulated time.
//! - [`core`] is the state of a target, without any I/O. [`messages`] defines the core's inputs and
//!   outputs.
//! - [`calls`] executes calls: [`apply`] turns transactions into changes, [`stages`] handles staged
//!   data, [`commit`] makes changes durable, and [`query`] executes reads and queries.
//! - The core consists of objects that need no drive: [`queues`] orders calls, [`staged`] contains
//!   the stages, and [`requests`] contains the requests to the drive. [`commits`] follows applied
//!   transactions to the index; it consists of [`groups`], [`log_space`] and [`quarantine`].
//! - [`checkpoint`] updates the index, [`recovery`] makes a target consistent after a crash, and
//!   [`mount`] prepares the target for calls.
//! - [`drive`] is blocking access to a drive, and [`batch`] writes many pieces at once.
//! - [`records`], [`log`], [`superblock`] and [`region`] define the formats.

mod alloc;
mod apply;
mod backend;
mod batch;
mod bitmap;
mod cache;
mod calls;
mod changes;
mod checkpoint;
#[cfg(test)]
mod checkpoint_test;
mod commit;
mod commits;
mod core;
#[cfg(test)]
mod crash_test;
mod drive;
mod driver;
mod extent;
mod flush_gate;
mod fsck;
#[cfg(test)]
mod full_test;
mod gauges;
mod groups;
mod hardware;
mod index;
mod io;
mod leaf;
#[cfg(test)]
mod leaf_test;
mod log;
mod log_space;
mod mailbox;
mod messages;
mod mount;
mod need;
#[cfg(test)]
mod order_test;
mod page_bounds;
mod presence;
mod quarantine;
mod query;
mod queues;
mod reads;
mod records;
mod recovery;
mod region;
mod requests;
#[cfg(any(test, feature = "conformance"))]
pub mod sim;
#[cfg(feature = "sim")]
pub mod sim_drive;
#[cfg(all(test, feature = "sim"))]
mod sim_drive_test;
#[cfg(all(test, feature = "sim"))]
mod sim_fault_test;
mod staged;
mod stages;
mod store;
mod superblock;
mod transfers;
mod uring;
mod usage;
mod view;

pub use drive::DriveCalls;
pub use driver::Driver;
pub use fsck::{FsckReport, Inspect, Problem, fsck};
pub use store::{BlockStore, CheckpointWatch, MkfsOptions, MountOptions};

/// Feeds `bytes` to every decoder of the on-disk format: superblock, log group and record, onode,
/// leaf, reference counts, meta record, collection, header slot and checksum table of the index.
pub(crate) fn decode_all(bytes: &[u8]) {
    let mut block = bytes.to_vec();
    block.resize(base::block::BLOCK_SIZE, 0);
    let _ = (
        superblock::Superblock::decode(&block),
        superblock::Superblock::decode(&superblock::seal(block.clone())),
    );
    let _ = (log::decode_group(bytes), log::Record::decode(bytes));
    let _ = (
        records::Onode::decode(bytes),
        leaf::MapLeaf::decode(bytes, 1 << 20),
        records::RefPage::decode(bytes),
    );
    let _ = (records::Meta::decode(bytes), records::decode_collection(bytes, bytes));
    let _ = (region::decode_slot(&block), region::decode_table(0, &block[..superblock::SECTOR]));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoders_never_panic_on_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            super::decode_all(&bytes);
        }
    }
}
