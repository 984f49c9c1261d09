//! What every network stack must do: one suite that all of them run, for their tests.
//!
//! Each check panics with what is wrong. [`Rig`] says which stack, where, and how to break its transports.

mod bulk;
mod order;
mod rig;

pub use bulk::{bulk_both_ways, many_transfers_at_once, offers_are_guarded, slow_source_times_out};
pub use order::{messages_keep_their_order, sizes_over_the_limits, unread_messages_hold_the_sender_back};
pub use rig::{Buffer, Rig, pool, random_bytes};
