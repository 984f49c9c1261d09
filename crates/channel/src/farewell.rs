//! Ends a region or a peer after everything that was posted before, in every queue.
//!
//! Something that ends is shared among all queues of an engine. Each queue is in order, so by the time that a share comes
//! out of its queue, the chains before it have been taken up. The thread that takes out the last share ends the thing.

use std::sync::Arc;

/// Shares `what` among `queues` queues; `send` puts a share into a queue. [`Arc::into_inner`] gives `what` to the
/// thread that takes the last share out of its queue.
///
/// The queues hold all references. With one more, kept by the sender until it has sent every share, a thread that empties
/// the queues faster than the sender goes on would not find any share to be the last, and `what` would never end.
pub(crate) fn share_among_queues<T>(what: T, queues: usize, mut send: impl FnMut(usize, Arc<T>)) {
    // The last share is the original, not a copy of it.
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
