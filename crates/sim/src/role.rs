//! Roles: parts of the system that are processes in the product.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::task::LocalSet;

/// A role of the simulated system, for example the osd or a client. All tasks of a role run in one
/// set of tasks, and end together.
#[derive(Clone)]
pub struct SimRole {
    inner: Rc<Inner>,
}

struct Inner {
    /// The role's tasks; `None` after the end of the role.
    tasks: RefCell<Option<LocalSet>>,
    is_paused: Cell<bool>,
    /// Whether the body has returned.
    has_returned: Cell<bool>,
    /// Wakes the task that polls the role.
    waker: RefCell<Option<Waker>>,
    /// Wakes the task that waits for the end of the role.
    observer: RefCell<Option<Waker>>,
}

impl SimRole {
    /// Starts a role, which ends when `body` returns. The caller must run in a `LocalSet`.
    pub fn start(body: impl Future<Output = ()> + 'static) -> SimRole {
        let tasks = LocalSet::new();
        let inner = Rc::new(Inner {
            tasks: RefCell::new(None),
            is_paused: Cell::new(false),
            has_returned: Cell::new(false),
            waker: RefCell::default(),
            observer: RefCell::default(),
        });
        let this = Rc::downgrade(&inner);
        tasks.spawn_local(async move {
            body.await;
            if let Some(this) = this.upgrade() {
                this.has_returned.set(true);
            }
        });
        *inner.tasks.borrow_mut() = Some(tasks);
        let polled = Rc::clone(&inner);
        #[expect(
            clippy::disallowed_methods,
            reason = "this task belongs to the simulator, and not to a role"
        )]
        drop(tokio::task::spawn_local(poll_fn(move |cx| polled.poll(cx))));
        SimRole { inner }
    }

    /// Ends all tasks of the role at once, like the kill of a process. Does nothing if the role has
    /// ended. A role cannot kill itself.
    pub fn kill(&self) {
        self.inner.end();
        self.inner.wake();
    }

    /// Stops the role's tasks until [`resume`](Self::resume), like a stopped process. Time passes
    /// meanwhile.
    pub fn pause(&self) {
        self.inner.is_paused.set(true);
    }

    /// Continues the role's tasks.
    pub fn resume(&self) {
        self.inner.is_paused.set(false);
        self.inner.wake();
    }

    /// Whether the role has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.inner.tasks.borrow().is_none()
    }

    /// Waits for the end of the role. Only one task may wait.
    pub async fn ended(&self) {
        poll_fn(|cx| {
            *self.inner.observer.borrow_mut() = Some(cx.waker().clone());
            if self.has_ended() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Inner {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        let mut tasks = self.tasks.borrow_mut();
        let Some(set) = tasks.as_mut() else { return Poll::Ready(()) };
        if self.is_paused.get() {
            return Poll::Pending;
        }
        let ended = base::task::in_role(|| Pin::new(set).poll(cx)).is_ready();
        drop(tasks);
        if ended || self.has_returned.get() {
            self.end();
            return Poll::Ready(());
        }
        Poll::Pending
    }

    fn end(&self) {
        let tasks = self.tasks.borrow_mut().take();
        base::task::in_role(|| drop(tasks));
        if let Some(observer) = self.observer.borrow_mut().take() {
            observer.wake();
        }
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn run<T>(body: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        LocalSet::new().block_on(&runtime.unwrap(), body)
    }

    /// A role that counts seconds.
    fn counting(count: &Rc<Cell<u32>>) -> SimRole {
        let count = Rc::clone(count);
        SimRole::start(async move {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                count.set(count.get() + 1);
            }
        })
    }

    #[test]
    fn a_paused_role_continues_and_a_killed_role_does_not() {
        run(async {
            let count = Rc::new(Cell::new(0));
            let role = counting(&count);
            tokio::time::sleep(Duration::from_millis(2500)).await;
            assert_eq!(count.get(), 2);
            role.pause();
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(count.get(), 2);
            role.resume();
            tokio::time::sleep(Duration::from_millis(2500)).await;
            assert_eq!(count.get(), 5, "the timer that expired during the pause, and two more");
            role.kill();
            role.ended().await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!((count.get(), role.has_ended()), (5, true));
            assert_eq!(Rc::strong_count(&count), 1, "the role's memory is released");
        });
    }

    #[test]
    fn a_role_ends_with_its_body_and_takes_its_other_tasks_along() {
        run(async {
            let alive = Rc::new(());
            let held = Rc::clone(&alive);
            let role = SimRole::start(async move {
                base::task::spawn_local(base::thread::ThreadClass::Osd, async move {
                    let _held = held;
                    std::future::pending::<()>().await;
                });
            });
            role.ended().await;
            assert_eq!(Rc::strong_count(&alive), 1);
        });
    }
}
