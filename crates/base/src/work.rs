//! Measures how a thread's work divides among several classes.
//!
//! The thread of an osd shard runs tasks of connections, of requests and of the channel's driver,
//! but the kernel reports only one CPU time for the whole thread. Each task is therefore booked for
//! a class (see [`Booked`]). The time inside the polls of its future is summed by thread and class.
//! These sums divide the thread's CPU time among the classes.
//!
//! The division is an estimate. The clock also runs while the kernel preempts the thread, and the
//! time that the runtime spends between polls belongs to no class.
//!
//! Polls are counted by class. If the thread's runtime reports wake-ups
//! ([`thread_woke`]), the class of the first task that runs after a wake-up gets the wake-up.
//!
//! The cost is two clock readings per poll (about 60 ns), without locks or system calls.

use std::cell::Cell;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use serde::{Deserialize, Serialize};

use crate::clock::Instant;
use crate::thread::ThreadClass;

const CLASSES: usize = ThreadClass::ALL.len();

thread_local! {
    static BOOK: ThreadBook = ThreadBook::open();
}

/// The pages of all running threads that have booked work.
static PAGES: Mutex<Vec<Weak<BookPage>>> = Mutex::new(Vec::new());

/// The booked work of one thread, and its current class of work.
struct ThreadBook {
    /// The current class of work and its start.
    open: Cell<Option<(ThreadClass, Instant)>>,
    /// Whether the thread has slept since its last task.
    woke: Cell<bool>,
    page: Arc<BookPage>,
}

/// The booked work of one thread, by class. Other threads may read it, but only the thread itself
/// writes it.
struct BookPage {
    thread: Option<ThreadClass>,
    ns: [AtomicU64; CLASSES],
    polls: [AtomicU64; CLASSES],
    wake_ups: [AtomicU64; CLASSES],
}

/// What threads have done for one class of work since they were started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassWork {
    /// Time in tasks, in ns.
    pub ns: u64,
    /// How often a task was polled.
    pub polls: u64,
    /// How often a task was the first to run after the thread had waited for events. A wait that
    /// finds an event at once also counts.
    pub wake_ups: u64,
}

impl ClassWork {
    /// Returns the work since `earlier`; zero if `earlier` counts more, because threads have ended.
    #[must_use]
    pub fn since(self, earlier: ClassWork) -> ClassWork {
        ClassWork {
            ns: self.ns.saturating_sub(earlier.ns),
            polls: self.polls.saturating_sub(earlier.polls),
            wake_ups: self.wake_ups.saturating_sub(earlier.wake_ups),
        }
    }

    fn plus(self, other: ClassWork) -> ClassWork {
        ClassWork {
            ns: self.ns.saturating_add(other.ns),
            polls: self.polls.saturating_add(other.polls),
            wake_ups: self.wake_ups.saturating_add(other.wake_ups),
        }
    }
}

/// What threads have done since they were started, by class of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work([ClassWork; CLASSES]);

/// The work of all running threads of one class that run tasks of several classes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedThreads {
    /// Class of the threads.
    pub threads: ThreadClass,
    /// The threads' work for each class that they have worked for.
    pub work: Vec<(ThreadClass, ClassWork)>,
}

/// Guard of a class of work. When it is dropped, the thread returns to its previous class.
#[derive(Debug)]
#[must_use = "the work ends when this is dropped"]
pub struct Entered {
    outer: Option<ThreadClass>,
    /// Binds the guard to the thread that created it.
    _local: PhantomData<*const ()>,
}

pin_project! {
    /// A future whose polls are booked for a class of work.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct Booked<F> {
        class: ThreadClass,
        #[pin]
        future: F,
    }
}

/// Books a future's polls for `class`, on any thread that polls it. Bookings may be nested: the
/// inner class gets its own time, and the outer class gets the rest.
pub fn booked<F: Future>(class: ThreadClass, future: F) -> Booked<F> {
    Booked { class, future }
}

/// Books the thread's time for `class` until the returned guard is dropped.
pub fn enter(class: ThreadClass) -> Entered {
    Entered { outer: BOOK.with(|book| book.begin(class)), _local: PhantomData }
}

/// Reports that this thread has waited for events, and continues. The thread's runtime calls it
/// ([`crate::task::runtime`]).
pub fn thread_woke() {
    BOOK.with(|book| book.woke.set(true));
}

/// Returns the work that this thread has booked so far.
#[must_use]
pub fn of_this_thread() -> Work {
    BOOK.with(|book| {
        book.turn_to(book.open.get().map(|(class, _)| class));
        book.page.work()
    })
}

/// Returns the booked work of all running threads of a class. Does not count time in work that is
/// still in progress.
#[must_use]
pub fn of_threads(class: ThreadClass) -> Work {
    let pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let of_class = pages.iter().filter_map(Weak::upgrade).filter(|page| page.thread == Some(class));
    of_class
        .map(|page| page.work())
        .fold(Work::default(), |sum, work| Work(std::array::from_fn(|at| sum.0[at].plus(work.0[at]))))
}

/// Returns the booked work of all running threads, by class of the threads.
#[must_use]
pub fn of_shared_threads() -> Vec<SharedThreads> {
    let of = |threads| {
        let work = of_threads(threads);
        let work = ThreadClass::ALL.into_iter().map(|class| (class, work.of(class)));
        let work: Vec<_> = work.filter(|(_, work)| work.polls > 0).collect();
        (!work.is_empty()).then_some(SharedThreads { threads, work })
    };
    ThreadClass::ALL.into_iter().filter_map(of).collect()
}

impl BookPage {
    fn work(&self) -> Work {
        let read = |counts: &[AtomicU64; CLASSES], at: usize| counts[at].load(Ordering::Relaxed);
        Work(std::array::from_fn(|at| ClassWork {
            ns: read(&self.ns, at),
            polls: read(&self.polls, at),
            wake_ups: read(&self.wake_ups, at),
        }))
    }
}

/// Adds to a count that only this thread writes.
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).saturating_add(more), Ordering::Relaxed);
}

impl ThreadBook {
    fn open() -> ThreadBook {
        let thread = std::thread::current().name().and_then(ThreadClass::of_name);
        let page = Arc::new(BookPage {
            thread,
            ns: Default::default(),
            polls: Default::default(),
            wake_ups: Default::default(),
        });
        let mut pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
        pages.retain(|page| page.strong_count() > 0);
        pages.push(Arc::downgrade(&page));
        ThreadBook { open: Cell::new(None), woke: Cell::new(false), page }
    }

    /// Starts a poll of `class`. Returns the previous class.
    fn begin(&self, class: ThreadClass) -> Option<ThreadClass> {
        let at = class as usize;
        add(&self.page.polls[at], 1);
        if self.woke.replace(false) {
            add(&self.page.wake_ups[at], 1);
        }
        self.turn_to(Some(class))
    }

    /// Adds the elapsed time to the current class and switches to `next`. Returns the previous
    /// class.
    fn turn_to(&self, next: Option<ThreadClass>) -> Option<ThreadClass> {
        let now = Instant::now();
        let (class, since) = self.open.replace(next.map(|class| (class, now)))?;
        let spent = u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX);
        add(&self.page.ns[class as usize], spent);
        Some(class)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        BOOK.with(|book| book.turn_to(self.outer));
    }
}

impl<F: Future> Future for Booked<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let _inside = enter(*this.class);
        this.future.poll(cx)
    }
}

impl Work {
    /// The work for a class.
    #[must_use]
    pub fn of(&self, class: ThreadClass) -> ClassWork {
        self.0[class as usize]
    }

    /// Time spent on a class, in ns.
    #[must_use]
    pub fn ns(&self, class: ThreadClass) -> u64 {
        self.of(class).ns
    }

    /// Time spent on all classes, in ns.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.0.iter().map(|work| work.ns).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MSGR: ThreadClass = ThreadClass::Messenger;
    const OSD: ThreadClass = ThreadClass::Osd;
    const PAUSE: Duration = Duration::from_millis(50);

    fn spin() {
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(2) {}
    }

    fn at_least_one_spin(ns: u64) -> bool {
        ns >= 2_000_000
    }

    #[test]
    fn nested_work_counts_once_and_for_the_inner_class() {
        let started = Instant::now();
        let outer = enter(OSD);
        spin();
        {
            let _inner = enter(MSGR);
            spin();
            assert!(at_least_one_spin(of_this_thread().ns(MSGR)), "work in progress counts, too");
        }
        drop(outer);
        let work = of_this_thread();
        assert!(at_least_one_spin(work.ns(OSD)) && at_least_one_spin(work.ns(MSGR)));
        assert_eq!(work.total_ns(), work.ns(OSD) + work.ns(MSGR));
        assert!(u128::from(work.total_ns()) <= started.elapsed().as_nanos());
        spin();
        assert_eq!(of_this_thread(), work, "time outside of booked work is not counted");
    }

    #[tokio::test]
    async fn only_the_time_inside_polls_counts_as_work() {
        let started = Instant::now();
        booked(MSGR, async {
            spin();
            tokio::time::sleep(PAUSE).await;
        })
        .await;
        let work = of_this_thread();
        assert!(at_least_one_spin(work.ns(MSGR)));
        assert_eq!(work.total_ns(), work.ns(MSGR));
        assert!(Duration::from_nanos(work.total_ns()) + PAUSE <= started.elapsed(), "{work:?}");
    }

    #[test]
    fn other_threads_can_read_the_booked_time_of_a_class() {
        let before = of_threads(ThreadClass::Dma);
        let (done, wait) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = crate::thread::spawn(ThreadClass::Dma, "9", move || {
            {
                let _inside = enter(OSD);
                spin();
            }
            done.send(()).unwrap();
            let _ = ended.recv();
        });
        wait.recv().unwrap();
        let work = of_threads(ThreadClass::Dma);
        assert!(at_least_one_spin(work.ns(OSD) - before.ns(OSD)));
        drop(end);
        thread.unwrap().join().unwrap();
        assert_eq!(
            of_threads(ThreadClass::Dma).ns(OSD),
            before.ns(OSD),
            "a thread that has ended is not counted"
        );
    }

    #[test]
    fn the_first_task_after_a_wait_gets_the_wake_up() {
        let runtime = crate::task::runtime().unwrap();
        let work = runtime.block_on(async {
            booked(OSD, async {
                // The runtime polls this task, waits, and polls it again.
                tokio::time::sleep(Duration::from_millis(1)).await;
                // A task that yields is polled again, but the thread does not wait.
                tokio::task::yield_now().await;
            })
            .await;
            booked(MSGR, std::future::ready(())).await;
            of_this_thread()
        });
        assert_eq!((work.of(OSD).polls, work.of(MSGR).polls), (3, 1));
        assert_eq!((work.of(OSD).wake_ups, work.of(MSGR).wake_ups), (1, 0));
    }

    #[test]
    fn a_panic_ends_the_booked_work() {
        let result = std::panic::catch_unwind(|| {
            let _inside = enter(OSD);
            panic!("for a test");
        });
        assert!(result.is_err());
        let work = of_this_thread();
        spin();
        assert_eq!(of_this_thread(), work);
    }
}
