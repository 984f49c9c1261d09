//! Starts the tasks of a role.
//!
//! A role that has a process of its own runs its tasks on the runtime of its thread. A simulation
//! runs several roles on one thread. It polls each role's tasks in a `LocalSet` of the role, inside
//! [`in_role`], so that dropping the set ends all tasks of the role, as a kill ends a process.

use std::cell::Cell;
use std::pin::Pin;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::thread::ThreadClass;
use crate::work::{booked, thread_woke};

thread_local! {
    static IN_ROLE: Cell<bool> = const { Cell::new(false) };
}

/// Creates the runtime of a thread that serves clients, stores or connections. It counts the wake-ups
/// of its thread, by class ([`crate::work`]).
///
/// # Errors
/// If the system cannot create the descriptors for waiting.
pub fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().on_thread_unpark(thread_woke).build()
}

/// Starts a task of the current role that may move between threads. The task's CPU time is booked
/// for `class`.
///
/// The task is boxed: otherwise, the compiler would generate tokio's code of a task again for each
/// caller, which makes builds slow.
pub fn spawn<T: Send + 'static>(
    class: ThreadClass,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let task: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(task);
    #[expect(clippy::disallowed_methods, reason = "this is the only function that starts such tasks")]
    if IN_ROLE.get() {
        tokio::task::spawn_local(booked(class, task))
    } else {
        tokio::spawn(booked(class, task))
    }
}

/// Starts a task of the current role on this thread, inside a `LocalSet`. The task's CPU time is
/// booked for `class`. It is boxed, as in [`spawn`].
///
/// # Panics
/// If the caller does not run in a `LocalSet`.
pub fn spawn_local<T: 'static>(class: ThreadClass, task: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let task: Pin<Box<dyn Future<Output = T>>> = Box::pin(task);
    #[expect(clippy::disallowed_methods, reason = "this is the only function that starts such tasks")]
    tokio::task::spawn_local(booked(class, task))
}

/// Runs `poll`. Tasks that [`spawn`] starts meanwhile run in the current `LocalSet`, and end with
/// it.
pub fn in_role<T>(poll: impl FnOnce() -> T) -> T {
    struct Leave(bool);
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_ROLE.set(self.0);
        }
    }
    let _leave = Leave(IN_ROLE.replace(true));
    poll()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;

    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn the_tasks_of_a_role_end_with_its_local_set() {
        let alive = Arc::new(());
        let role = LocalSet::new();
        let held = Arc::clone(&alive);
        role.spawn_local(async move {
            let inner = Arc::clone(&held);
            spawn(ThreadClass::Osd, async move {
                let _inner = inner;
                std::future::pending::<()>().await;
            });
            std::future::pending::<()>().await;
        });
        let mut role = pin!(Some(role));
        let once = poll_fn(|cx| {
            let set = role.as_mut().as_pin_mut().expect("the role has not ended");
            assert!(in_role(|| set.poll(cx)).is_pending());
            std::task::Poll::Ready(())
        });
        once.await;
        assert_eq!(Arc::strong_count(&alive), 3, "both tasks are running");
        role.set(None);
        assert_eq!(Arc::strong_count(&alive), 1, "no task is running");
    }
}
