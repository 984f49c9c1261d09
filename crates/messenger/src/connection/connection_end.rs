//! [`ConnectionEnd`]: the progress of a connection towards its end.

use base::watch;

/// The reason why this side closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CloseReason {
    /// The user closed the connection, or dropped its handles.
    User,
    /// The slot of the connection is given to another connection.
    Reclaimed,
}

/// The phases of a connection, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EndPhase {
    Open,
    /// This side has asked to close the connection. A later reason replaces an earlier one only if
    /// it is more urgent.
    Closing(CloseReason),
    /// The task of the connection has ended.
    Ended,
}

/// The progress of a connection towards its end: open, closing, ended. The phase only moves
/// forward. Any thread may use this type.
pub(super) struct ConnectionEnd(watch::Sender<EndPhase>);

impl ConnectionEnd {
    pub(super) fn new() -> ConnectionEnd {
        ConnectionEnd(watch::Sender::new(EndPhase::Open))
    }

    /// Asks the task of the connection to close it. May be called more than once.
    pub(super) fn close(&self, reason: CloseReason) {
        self.advance(EndPhase::Closing(reason));
    }

    /// Records that the task of the connection has ended. Must be called only once.
    pub(super) fn finish(&self) {
        let is_first = self.advance(EndPhase::Ended);
        assert!(is_first, "a connection has only one task, which ends once");
    }

    /// The reason why this side closes the connection, [`CloseReason::User`] by default.
    pub(super) fn reason(&self) -> CloseReason {
        match *self.0.borrow() {
            EndPhase::Closing(reason) => reason,
            EndPhase::Open | EndPhase::Ended => CloseReason::User,
        }
    }

    /// Waits until this side has asked to close the connection.
    pub(super) async fn close_requested(&self) {
        self.reached(EndPhase::Closing(CloseReason::User)).await;
    }

    /// Waits until the task of the connection has ended.
    pub(super) async fn ended(&self) {
        self.reached(EndPhase::Ended).await;
    }

    /// Moves forward to `next`. Returns `false` if the connection has already come that far.
    fn advance(&self, next: EndPhase) -> bool {
        self.0.send_if_modified(|phase| {
            let is_forward = *phase < next;
            if is_forward {
                *phase = next;
            }
            is_forward
        })
    }

    async fn reached(&self, phase: EndPhase) {
        // The watched value cannot lose its sender while `self` exists.
        drop(self.0.subscribe().wait_for(|current| *current >= phase).await);
    }
}

impl CloseReason {
    /// The reason in words, which the peer receives.
    pub(super) fn text(self) -> &'static str {
        match self {
            CloseReason::User => "its user closed it",
            CloseReason::Reclaimed => "its slot was needed for another client",
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_connection_opens_closes_and_ends() {
        let end = ConnectionEnd::new();
        assert!(end.close_requested().now_or_never().is_none());
        end.close(CloseReason::User);
        assert!(end.close_requested().now_or_never().is_some());
        assert!(end.ended().now_or_never().is_none());
        end.finish();
        assert!(end.ended().now_or_never().is_some());
        end.close(CloseReason::Reclaimed);
        assert!(end.ended().now_or_never().is_some(), "an ended connection stays ended");
    }

    #[test]
    fn a_reclaimed_slot_is_more_urgent_than_a_close_by_the_user() {
        let end = ConnectionEnd::new();
        end.close(CloseReason::User);
        end.close(CloseReason::Reclaimed);
        assert_eq!(end.reason(), CloseReason::Reclaimed);
        end.close(CloseReason::User);
        assert_eq!(end.reason(), CloseReason::Reclaimed);
    }

    #[test]
    #[should_panic(expected = "ends once")]
    fn a_connection_ends_only_once() {
        let end = ConnectionEnd::new();
        end.finish();
        end.finish();
    }
}
