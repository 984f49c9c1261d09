//! [`Witness`]: what is known about the membership records of groups outside the targets.

use futures::future::LocalBoxFuture;

pub use crate::decision::WitnessEntry;

/// Knows the last term of each group and its members in sync, outside the targets
/// (`docs/redundancy.md`).
pub trait Witness {
    /// The entry of the group at a place (pool id and group number); `None` if the witness does not
    /// know the group.
    fn entry(&self, place: (u32, u32)) -> Option<WitnessEntry>;

    /// Stores the entry of the group at a place. The future resolves once the entry is durable.
    ///
    /// # Errors
    /// [`StoreError::Disconnected`](store::StoreError::Disconnected) if the entry cannot be stored.
    /// It may be stored nevertheless.
    fn store(&self, place: (u32, u32), entry: WitnessEntry) -> LocalBoxFuture<'_, store::Result<()>>;
}
