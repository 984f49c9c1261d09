//! [`Reclaim`]: a future that returns a reservation if its caller is cancelled.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;
use tokio::sync::oneshot::error::RecvError;

/// Waits for the reply to a call that reserves something, for example space. If the future is
/// dropped after the reply was sent, but before the future has returned the reply, `give_back`
/// receives the reply. If the reply is sent after the future was dropped, sending fails, and the
/// sender must release the reservation.
#[derive(Debug)]
pub struct Reclaim<T, F: FnOnce(T)> {
    answer: oneshot::Receiver<T>,
    give_back: Option<F>,
}

impl<T, F: FnOnce(T)> Reclaim<T, F> {
    /// Waits for `answer`. `give_back` runs in `drop`, so it must not block.
    pub fn new(answer: oneshot::Receiver<T>, give_back: F) -> Reclaim<T, F> {
        Reclaim { answer, give_back: Some(give_back) }
    }
}

impl<T, F: FnOnce(T) + Unpin> Future for Reclaim<T, F> {
    type Output = Result<T, RecvError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(cx)
    }
}

impl<T, F: FnOnce(T)> Drop for Reclaim<T, F> {
    fn drop(&mut self) {
        // From here on, the sender cannot send a reply.
        self.answer.close();
        if let (Ok(answer), Some(give_back)) = (self.answer.try_recv(), self.give_back.take()) {
            give_back(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reclaim(given_back: &mut Option<u32>) -> (oneshot::Sender<u32>, Reclaim<u32, impl FnOnce(u32)>) {
        let (sender, answer) = oneshot::channel();
        (sender, Reclaim::new(answer, |answer| *given_back = Some(answer)))
    }

    #[tokio::test]
    async fn a_received_reply_is_not_given_back() {
        let mut given_back = None;
        let (sender, mut waiting) = reclaim(&mut given_back);
        sender.send(7).unwrap();
        assert_eq!((&mut waiting).await, Ok(7));
        drop(waiting);
        assert_eq!(given_back, None);
    }

    #[test]
    fn a_reply_that_is_sent_but_not_received_is_given_back() {
        let mut given_back = None;
        let (sender, waiting) = reclaim(&mut given_back);
        sender.send(7).unwrap();
        drop(waiting);
        assert_eq!(given_back, Some(7));
    }

    #[test]
    fn the_sender_gets_its_reply_back_if_the_receiver_was_dropped() {
        let mut given_back = None;
        let (sender, waiting) = reclaim(&mut given_back);
        drop(waiting);
        assert_eq!(sender.send(7), Err(7));
        assert_eq!(given_back, None);
    }
}
