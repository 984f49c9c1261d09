//! The conformance suite that every network stack runs in its tests.
//!
//! A check panics with a description of the failure. A [`Rig`] provides the stack, its addresses,
//! and a way to break its transports.

mod bulk;
mod order;
mod resume;
mod rig;

pub use bulk::{
    bulk_both_ways, given_up_pulls_never_write_late, large_transfers_go_one_after_the_other,
    lies_about_memory_are_harmless, many_transfers_at_once, offers_are_guarded, slow_source_times_out,
};
pub use order::{messages_keep_their_order, sizes_over_the_limits, unread_messages_hold_the_sender_back};
pub use resume::{
    a_lost_session_fails_its_transfers, a_restarted_server_ends_the_session,
    a_thousand_sessions_leave_nothing, closing_sends_what_is_queued, exactly_once_across_broken_transports,
    heartbeats_keep_the_transport, pushes_survive_broken_transports, silence_is_noticed,
};
pub use rig::{Buffer, Rig, pool, random_bytes, seed};

/// Calls the macro `run` with the name of every check, so that a stack's tests write one test for each.
#[macro_export]
macro_rules! for_each_conformance_check {
    ($run:ident) => {
        $run!(messages_keep_their_order);
        $run!(sizes_over_the_limits);
        $run!(unread_messages_hold_the_sender_back);
        $run!(bulk_both_ways);
        $run!(many_transfers_at_once);
        $run!(large_transfers_go_one_after_the_other);
        $run!(offers_are_guarded);
        $run!(lies_about_memory_are_harmless);
        $run!(slow_source_times_out);
        $run!(given_up_pulls_never_write_late);
        $run!(exactly_once_across_broken_transports);
        $run!(pushes_survive_broken_transports);
        $run!(silence_is_noticed);
        $run!(heartbeats_keep_the_transport);
        $run!(a_restarted_server_ends_the_session);
        $run!(closing_sends_what_is_queued);
        $run!(a_lost_session_fails_its_transfers);
        $run!(a_thousand_sessions_leave_nothing);
    };
}
