//! The conformance suite that every network stack runs in its tests.
//!
//! A check panics with a description of the failure. A [`Rig`] provides the stack, its addresses,
//! and a way to break its transports.

mod bulk;
mod order;
mod resume;
mod rig;

pub use bulk::{
    a_pull_from_a_slow_source_times_out, bulk_transfers_deliver_the_right_bytes,
    cancelled_pulls_never_write_to_reused_buffers, concurrent_transfers_and_messages_all_complete,
    invalid_uses_of_offers_are_refused, large_transfers_finish_one_after_the_other,
    sent_data_does_not_keep_its_memory, wrong_addresses_or_keys_in_a_descriptor_lose_no_data,
};
pub use order::{
    messages_keep_their_order, messages_over_the_limits_are_refused, unread_messages_block_the_sender,
};
pub use resume::{
    a_lost_connection_fails_its_transfers, a_server_restart_ends_the_connections_of_its_clients,
    a_silent_peer_is_detected_and_its_connection_resumes, a_thousand_closed_connections_leave_no_task_behind,
    closing_a_connection_first_sends_its_queued_messages,
    heartbeats_keep_idle_and_busy_connections_on_their_transport,
    messages_arrive_exactly_once_across_broken_transports, pushes_survive_broken_transports,
};
pub use rig::{Buffer, Rig, pool, random_bytes, seed};

/// Calls the macro `run` with the name of every check. A stack's tests use this macro to define one
/// test per check.
#[macro_export]
macro_rules! for_each_conformance_check {
    ($run:ident) => {
        $run!(messages_keep_their_order);
        $run!(messages_over_the_limits_are_refused);
        $run!(unread_messages_block_the_sender);
        $run!(bulk_transfers_deliver_the_right_bytes);
        $run!(concurrent_transfers_and_messages_all_complete);
        $run!(sent_data_does_not_keep_its_memory);
        $run!(large_transfers_finish_one_after_the_other);
        $run!(invalid_uses_of_offers_are_refused);
        $run!(wrong_addresses_or_keys_in_a_descriptor_lose_no_data);
        $run!(a_pull_from_a_slow_source_times_out);
        $run!(cancelled_pulls_never_write_to_reused_buffers);
        $run!(messages_arrive_exactly_once_across_broken_transports);
        $run!(pushes_survive_broken_transports);
        $run!(a_silent_peer_is_detected_and_its_connection_resumes);
        $run!(heartbeats_keep_idle_and_busy_connections_on_their_transport);
        $run!(a_server_restart_ends_the_connections_of_its_clients);
        $run!(closing_a_connection_first_sends_its_queued_messages);
        $run!(a_lost_connection_fails_its_transfers);
        $run!(a_thousand_closed_connections_leave_no_task_behind);
    };
}
