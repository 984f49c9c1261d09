//! Removes a region or a peer from an engine after the engine has handled all chains that were
//! posted earlier to any of its queues.
//!
//! Each queue of the engine gets one reference (*share*) to the region or peer. A queue delivers
//! its items in order. When the engine takes a share out of a queue, it has therefore already
//! handled the earlier chains of that queue. The thread that takes the last share removes the
//! region or peer.

use std::sync::Arc;

/// Puts one share of `what` into each of `queues` queues by calling `send`. The thread that takes
/// the last share out of its queue gets `what` from [`Arc::into_inner`].
///
/// Only the queues hold references. If the sender kept another reference while it sends, the
/// receiving threads could empty the queues before the sender drops it. None of them would then
/// hold the last reference, and `what` would never be removed.
pub(crate) fn share_among_queues<T>(what: T, queues: usize, mut send: impl FnMut(usize, Arc<T>)) {
    // `repeat_n` moves the original into the last share and does not clone it.
    for (queue, share) in std::iter::repeat_n(Arc::new(what), queues).enumerate() {
        send(queue, share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_share_yields_the_object_even_if_shares_are_received_immediately() {
        let mut ended = Vec::new();
        share_among_queues("region", 5, |queue, share| {
            ended.extend(Arc::into_inner(share).map(|what| (queue, what)));
        });
        assert_eq!(ended, [(4, "region")]);
    }

    #[test]
    fn only_the_share_that_is_received_last_yields_the_object() {
        for late in 0..5 {
            let mut shares = Vec::new();
            share_among_queues("region", 5, |queue, share| shares.push((queue, share)));
            let held = shares.remove(late);
            assert!(shares.into_iter().all(|(_, share)| Arc::into_inner(share).is_none()));
            assert_eq!((held.0, Arc::into_inner(held.1)), (late, Some("region")));
        }
    }
}
