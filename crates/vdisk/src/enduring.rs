//! [`Enduring`]: a request that goes on if its caller drops it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base::BoxFuture;
use base::thread::ThreadClass;
use tokio::sync::watch;

/// Counts the requests in progress that their callers have dropped.
#[derive(Debug, Clone)]
pub(crate) struct Orphans(Arc<watch::Sender<usize>>);

impl Default for Orphans {
    fn default() -> Orphans {
        Orphans(Arc::new(watch::Sender::new(0)))
    }
}

impl Orphans {
    /// Waits until there is none.
    pub(crate) fn none(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut count = self.0.subscribe();
        async move {
            // The sender is gone only if there is no disk and no request any more.
            drop(count.wait_for(|count| *count == 0).await);
        }
    }

    fn begin(&self) -> Orphan {
        self.0.send_modify(|count| *count += 1);
        Orphan(self.clone())
    }
}

/// One orphan. Dropping it ends it.
struct Orphan(Orphans);

impl Drop for Orphan {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// A request that goes on in a task of its own if its future is dropped after the first poll.
pub(crate) struct Enduring<T: Send + 'static> {
    request: Option<BoxFuture<'static, T>>,
    has_begun: bool,
    orphans: Orphans,
}

impl<T: Send + 'static> fmt::Debug for Enduring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enduring").field("has_begun", &self.has_begun).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Enduring<T> {
    pub(crate) fn new(request: BoxFuture<'static, T>, orphans: &Orphans) -> Enduring<T> {
        Enduring { request: Some(request), has_begun: false, orphans: orphans.clone() }
    }
}

impl<T: Send + 'static> Future for Enduring<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        let request = self.request.as_mut().expect("a completed request is not polled again");
        let done = std::task::ready!(request.as_mut().poll(cx));
        self.request = None;
        Poll::Ready(done)
    }
}

impl<T: Send + 'static> Drop for Enduring<T> {
    fn drop(&mut self) {
        // Without a runtime, the process ends.
        if let Some(request) = self.request.take()
            && self.has_begun
            && tokio::runtime::Handle::try_current().is_ok()
        {
            let orphan = self.orphans.begin();
            base::task::spawn(ThreadClass::Client, async move {
                let _orphan = orphan;
                request.await
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_dropped_request_goes_on_and_is_waited_for() {
        let orphans = Orphans::default();
        let (release, released) = oneshot::channel::<()>();
        let (done, mut is_done) = oneshot::channel();
        let request = async move {
            released.await.unwrap();
            done.send(()).unwrap();
        };
        let mut request = Enduring::new(Box::pin(request), &orphans);
        assert!(futures::poll!(&mut request).is_pending());
        orphans.none().await;
        drop(request);
        let mut none = Box::pin(orphans.none());
        yield_now().await;
        assert!(futures::poll!(&mut none).is_pending());
        release.send(()).unwrap();
        none.await;
        is_done.try_recv().unwrap();
    }

    #[tokio::test]
    async fn a_request_that_has_not_begun_does_not_take_place() {
        let orphans = Orphans::default();
        let (done, mut is_done) = oneshot::channel();
        drop(Enduring::new(Box::pin(async move { done.send(()).unwrap() }), &orphans));
        yield_now().await;
        orphans.none().await;
        assert!(is_done.try_recv().is_err());
    }
}
