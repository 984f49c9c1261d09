//! A separate thread for the connections of clients. The thread serves these connections even while
//! the user's thread is busy.

use std::future::Future;
use std::sync::Mutex;

use base::thread::ThreadClass;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A thread that serves connections. It ends when this value is dropped. The connections that it
/// serves keep this value alive.
pub(crate) struct Home {
    handle: Handle,
    /// Dropping the sender stops the thread. The mutex only makes the type `Sync`.
    _stop: Mutex<oneshot::Sender<()>>,
}

impl Home {
    /// Starts the thread, which is named `msgr-client`.
    pub(crate) fn start() -> std::io::Result<Home> {
        let runtime = base::task::runtime()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        base::thread::spawn(ThreadClass::Messenger, "client", move || {
            // An error means that the sender was dropped, which is the signal to stop.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Home { handle, _stop: Mutex::new(stop) })
    }

    /// Runs `work` on the thread. Dropping the returned future cancels the work. Returns `None` if
    /// the work panicked or the thread ended.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let task = AbortOnDrop(self.handle.spawn(work));
        task.await
    }
}

struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Future for AbortOnDrop<T> {
    type Output = Option<T>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<T>> {
        std::pin::Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
