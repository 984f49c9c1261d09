//! A value that tasks watch for changes.
//!
//! The type has the calls of `tokio::sync::watch` that the project uses. It wakes receivers in the
//! order in which they began to wait. Tokio's type chooses a random order if a value has several
//! receivers, so that a simulation would not repeat.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The sender of the value was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sender of the watched value was dropped")]
pub struct SenderGone;

struct WatchedValue<T> {
    value: Mutex<T>,
    /// Number of changes so far. It is incremented while `value` is locked.
    version: AtomicU64,
    is_closed: AtomicBool,
    changed: Notify,
}

/// Changes a watched value.
pub struct Sender<T>(Arc<WatchedValue<T>>);

/// Watches a value. A clone has seen the same changes as its original.
pub struct Receiver<T> {
    watched: Arc<WatchedValue<T>>,
    /// The last change that this receiver has seen.
    seen: u64,
}

/// Creates a watched value.
pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let sender = Sender::new(value);
    let receiver = sender.subscribe();
    (sender, receiver)
}

impl<T> WatchedValue<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        // A panic in `send_if_modified` can only leave a value that the closure has chosen.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are more changes than `seen`, and updates `seen`.
    async fn change_after(&self, seen: &mut u64) -> Result<(), SenderGone> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on, a change wakes this task.
            changed.as_mut().enable();
            let is_closed = self.is_closed.load(Ordering::Acquire);
            let version = self.version.load(Ordering::Acquire);
            if version != *seen {
                *seen = version;
                return Ok(());
            }
            if is_closed {
                return Err(SenderGone);
            }
            changed.await;
        }
    }
}

impl<T> Sender<T> {
    /// Creates a watched value without receivers.
    pub fn new(value: T) -> Sender<T> {
        Sender(Arc::new(WatchedValue {
            value: Mutex::new(value),
            version: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            changed: Notify::new(),
        }))
    }

    /// Returns a new receiver, which has seen the current value.
    #[must_use]
    pub fn subscribe(&self) -> Receiver<T> {
        Receiver { seen: self.0.version.load(Ordering::Acquire), watched: Arc::clone(&self.0) }
    }

    /// Locks the value for reading. Do not wait while the guard exists.
    pub fn borrow(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    /// Replaces the value, and wakes all receivers. Returns the earlier value.
    pub fn send_replace(&self, value: T) -> T {
        let mut before = value;
        self.send_modify(|current| std::mem::swap(current, &mut before));
        before
    }

    /// Changes the value, and wakes all receivers.
    pub fn send_modify(&self, change: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            change(value);
            true
        });
    }

    /// Changes the value. Wakes all receivers if `change` returns `true`, and returns its result.
    pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        let mut value = self.0.lock();
        let is_modified = change(&mut value);
        if is_modified {
            self.0.version.fetch_add(1, Ordering::Release);
        }
        drop(value);
        if is_modified {
            self.0.changed.notify_waiters();
        }
        is_modified
    }
}

impl<T: Default> Default for Sender<T> {
    fn default() -> Sender<T> {
        Sender::new(T::default())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::Release);
        self.0.changed.notify_waiters();
    }
}

impl<T> Receiver<T> {
    /// Locks the value for reading. Do not wait while the guard exists.
    pub fn borrow(&self) -> MutexGuard<'_, T> {
        self.watched.lock()
    }

    /// Locks the value for reading, and records that this receiver has seen it. Do not wait while
    /// the guard exists.
    pub fn borrow_and_update(&mut self) -> MutexGuard<'_, T> {
        let value = self.watched.lock();
        self.seen = self.watched.version.load(Ordering::Acquire);
        value
    }

    /// Waits until the value has changed since this receiver last saw it. Cancel safe.
    ///
    /// # Errors
    /// If the sender was dropped, and this receiver has seen the last value.
    pub async fn changed(&mut self) -> Result<(), SenderGone> {
        self.watched.change_after(&mut self.seen).await
    }

    /// Waits until the value fulfils a condition, and locks it for reading. Cancel safe.
    ///
    /// # Errors
    /// If the sender was dropped, and the last value does not fulfil the condition.
    pub async fn wait_for(
        &mut self,
        mut is_wanted: impl FnMut(&T) -> bool,
    ) -> Result<MutexGuard<'_, T>, SenderGone> {
        let Receiver { watched, seen } = self;
        loop {
            {
                let value = watched.lock();
                *seen = watched.version.load(Ordering::Acquire);
                if is_wanted(&value) {
                    return Ok(value);
                }
            }
            watched.change_after(seen).await?;
        }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        Receiver { watched: Arc::clone(&self.watched), seen: self.seen }
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn receivers_wake_in_the_order_in_which_they_began_to_wait() {
        let sender = Sender::new(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let tasks: Vec<_> = (0..20)
            .map(|number| {
                let (mut receiver, order) = (sender.subscribe(), Arc::clone(&order));
                tokio::spawn(async move {
                    receiver.changed().await.unwrap();
                    order.lock().unwrap().push(number);
                })
            })
            .collect();
        tokio::task::yield_now().await;
        sender.send_replace(1);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_receiver_learns_the_last_value_and_then_the_end() {
        let (sender, mut receiver) = channel(1);
        let mut late = receiver.clone();
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(sender.send_replace(2), 1);
        sender.send_modify(|value| *value += 1);
        drop(sender);
        assert_eq!(receiver.changed().await, Ok(()));
        assert_eq!(*receiver.borrow_and_update(), 3);
        assert_eq!(receiver.changed().await, Err(SenderGone));
        assert_eq!(late.wait_for(|value| *value == 3).await.map(|value| *value), Ok(3));
        assert!(late.wait_for(|value| *value == 4).await.is_err());
    }

    #[tokio::test]
    async fn changes_of_another_thread_are_not_missed() {
        let (sender, mut receiver) = channel(0);
        let thread =
            std::thread::spawn(move || (1..=10_000).for_each(|n| sender.send_modify(|value| *value = n)));
        assert_eq!(receiver.wait_for(|n| *n == 10_000).await.map(|n| *n), Ok(10_000));
        thread.join().unwrap();
    }
}
