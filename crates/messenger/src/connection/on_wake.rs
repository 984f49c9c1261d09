//! [`OnWake`]: a future that is polled only when it can make progress.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Polls a future only if something has woken it since its last poll. A task that runs several
/// futures together otherwise polls all of them on each wake-up, even if the wake-up concerns only
/// one of them.
pub(super) struct OnWake<F> {
    future: Pin<Box<F>>,
    wake: Arc<FutureWake>,
    /// The waker of the future, which refers to `wake`.
    waker: Waker,
}

struct FutureWake {
    /// Whether the future was woken since its last poll.
    woken: AtomicBool,
    /// The task that polls the future.
    task: AtomicWaker,
}

impl<F: Future> OnWake<F> {
    pub(super) fn new(future: F) -> OnWake<F> {
        let wake = Arc::new(FutureWake { woken: AtomicBool::new(true), task: AtomicWaker::new() });
        OnWake { future: Box::pin(future), waker: Waker::from(Arc::clone(&wake)), wake }
    }
}

impl<F: Future> Future for OnWake<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let OnWake { future, wake, waker } = &mut *self;
        // The task is registered first, so that a wake-up after the check reaches it.
        wake.task.register(cx.waker());
        if !wake.woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        future.as_mut().poll(&mut Context::from_waker(waker))
    }
}

impl Wake for FutureWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::time::Duration;

    use futures::FutureExt;
    use tokio::sync::Notify;
    use tokio::time::{sleep, timeout};

    use super::*;

    #[test]
    fn a_future_is_polled_once_per_wake_up() {
        let (polls, notify) = (Cell::new(0), Notify::new());
        let mut notified = Box::pin(notify.notified());
        let mut future = OnWake::new(poll_fn(|cx| {
            polls.set(polls.get() + 1);
            notified.as_mut().poll(cx)
        }));
        for _ in 0..3 {
            assert!((&mut future).now_or_never().is_none());
        }
        assert_eq!(polls.get(), 1);
        notify.notify_one();
        assert!((&mut future).now_or_never().is_some());
        assert_eq!(polls.get(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_reaches_the_task_that_polls_the_future() {
        let notify = Notify::new();
        let woken = OnWake::new(async {
            notify.notified().await;
            sleep(Duration::from_secs(1)).await;
        });
        let both = async { tokio::join!(woken, async { notify.notify_one() }) };
        timeout(Duration::from_secs(2), both).await.expect("the future ends after a second");
    }
}
