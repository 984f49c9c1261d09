//! Tests that are long and do not depend on the network.

mod coding;
mod compounds;
mod crash;
mod damage;
mod earlier;
mod extents;
mod forget;
mod full;
mod inherit;
mod listing;
mod recovery;
mod salvage;
mod salvage_damage;
mod sealed;
mod shards;
mod source;
mod stalls;
pub(crate) mod start;
mod times;
mod witness;
