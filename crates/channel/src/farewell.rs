//! Ends a region or a peer after all work that was posted before, in every queue.
//!
//! All queues of an engine share the object that ends: each queue gets one share of it. Each queue
//! works in order. When a share leaves its queue, the engine has therefore started all chains
//! before it. The thread that takes the last share ends the object.

use std::sync::Arc;

/// Puts one share of `what` into each of `queues` queues, with `send`. The thread that takes the
/// last share out of its queue gets `what` from [`Arc::into_inner`].
///
/// Only the queues hold references. If the sender kept another reference until the end, the
/// receiving threads could empty the queues first. None of them would then find the last share, and
/// `what` would never end.
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
    fn the_last_share_is_found_although_queues_are_emptied_while_it_is_sent() {
        let mut ended = Vec::new();
        share_among_queues("region", 5, |queue, share| {
            ended.extend(Arc::into_inner(share).map(|what| (queue, what)));
        });
        assert_eq!(ended, [(4, "region")]);
    }

    #[test]
    fn the_last_share_is_the_one_that_comes_out_last_of_all() {
        for late in 0..5 {
            let mut shares = Vec::new();
            share_among_queues("region", 5, |queue, share| shares.push((queue, share)));
            let held = shares.remove(late);
            assert!(shares.into_iter().all(|(_, share)| Arc::into_inner(share).is_none()));
            assert_eq!((held.0, Arc::into_inner(held.1)), (late, Some("region")));
        }
    }
}
