//! Threads whose names state their class, so that CPU time can be measured per class.

use std::cell::Cell;
use std::panic::{UnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The nice value of a thread in the background. With it, the thread gets about a third of the CPU
/// time of another thread on the same CPU.
const BACKGROUND_NICE: i32 = 5;

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` and turns a panic into an error with the panic's message. Use it for calls into
/// libraries that panic on damaged input. The process's panic hook normally ends the process, but
/// does not do so while [`is_catching`] returns true.
///
/// # Errors
/// The panic's message.
pub fn catch_panic<T>(body: impl FnOnce() -> T + UnwindSafe) -> Result<T, String> {
    let outer = CATCHING.replace(true);
    let result = catch_unwind(body);
    CATCHING.set(outer);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
    })
}

/// Returns true if this thread is inside [`catch_panic`].
#[must_use]
pub fn is_catching() -> bool {
    CATCHING.get()
}

/// The purpose of a thread. The class is the part of the thread's name before the dash, for example
/// `store` in `store-0`. The serialized form is this part of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[non_exhaustive]
pub enum ThreadClass {
    /// Network connections that no shard serves in its own loop.
    Messenger,
    /// An osd shard: request handling, and the connections pinned to it.
    Osd,
    /// The host–DPU channel's software: rings, doorbells, control socket.
    Channel,
    /// Operations of libfabric for the host–DPU channel's engine `ofi`. With a provider that emulates
    /// RDMA by software, the threads also do the work of the NIC.
    Fabric,
    /// Emulated DMA hardware. A real device would do this work without CPU time.
    Dma,
    /// Erasure coding by software on the DPU.
    Coding,
    /// Emulated erasure-coding hardware. A real device would do this work without CPU time.
    CodingDevice,
    /// Erasure coding by software on the host.
    HostCoding,
    /// A target: drive I/O, log, index.
    Store,
    /// The client library and the programs that use it.
    Client,
    /// Supervision, metrics and other housekeeping.
    Admin,
}

impl ThreadClass {
    /// All classes, in the order of their declaration.
    pub const ALL: [ThreadClass; 11] = [
        ThreadClass::Messenger,
        ThreadClass::Osd,
        ThreadClass::Channel,
        ThreadClass::Fabric,
        ThreadClass::Dma,
        ThreadClass::Coding,
        ThreadClass::CodingDevice,
        ThreadClass::HostCoding,
        ThreadClass::Store,
        ThreadClass::Client,
        ThreadClass::Admin,
    ];

    /// Prefix of the names of threads of this class.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            ThreadClass::Messenger => "msgr",
            ThreadClass::Osd => "osd",
            ThreadClass::Channel => "chan",
            ThreadClass::Fabric => "ofi",
            ThreadClass::Dma => "dma",
            ThreadClass::Coding => "ec",
            ThreadClass::CodingDevice => "eca",
            ThreadClass::HostCoding => "ech",
            ThreadClass::Store => "store",
            ThreadClass::Client => "client",
            ThreadClass::Admin => "admin",
        }
    }

    /// Returns the class of the thread with this name; `None` if the name has no known prefix.
    #[must_use]
    pub fn of_name(name: &str) -> Option<ThreadClass> {
        let (prefix, _) = name.split_once('-')?;
        ThreadClass::of_prefix(prefix)
    }

    fn of_prefix(prefix: &str) -> Option<ThreadClass> {
        ThreadClass::ALL.into_iter().find(|class| class.prefix() == prefix)
    }
}

impl From<ThreadClass> for &'static str {
    fn from(class: ThreadClass) -> &'static str {
        class.prefix()
    }
}

impl TryFrom<String> for ThreadClass {
    type Error = String;

    fn try_from(prefix: String) -> Result<ThreadClass, String> {
        ThreadClass::of_prefix(&prefix).ok_or_else(|| format!("{prefix:?} is not a class of threads"))
    }
}

/// Starts a thread called `<class>-<suffix>`. Linux keeps the first 15 bytes of a thread's name.
///
/// # Errors
/// If the system cannot create another thread.
pub fn spawn<T: Send + 'static>(
    class: ThreadClass,
    suffix: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    #[expect(clippy::disallowed_methods, reason = "this is the only function that starts threads")]
    Builder::new().name(format!("{}-{suffix}", class.prefix())).spawn(body)
}

/// Runs `body` for each item, on a thread of its own. Returns when all of them have ended. If the
/// system cannot create a thread, runs `body` on the calling thread. The threads have the priority of
/// the calling thread.
///
/// # Panics
/// If `body` panics.
pub fn for_each_in_parallel<T: Copy + Send>(
    class: ThreadClass,
    suffix: &str,
    items: impl IntoIterator<Item = T>,
    body: impl Fn(T) + Sync,
) {
    std::thread::scope(|scope| {
        for item in items {
            let (name, body) = (format!("{}-{suffix}", class.prefix()), &body);
            if Builder::new().name(name).spawn_scoped(scope, move || body(item)).is_err() {
                body(item);
            }
        }
    });
}

/// Lowers the priority of the calling thread, so that it gets little CPU time while other threads
/// need the CPU. Does nothing if the system refuses that.
pub fn become_background() {
    // Linux applies the value to the calling thread only (setpriority(2)).
    if let Err(error) = rustix::process::setpriority_process(None, BACKGROUND_NICE) {
        tracing::debug!(%error, "cannot lower the priority of a thread");
    }
}

/// CPU time that the calling thread has used so far.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_is_found_by_the_name_of_its_threads() {
        for class in ThreadClass::ALL {
            assert_eq!(ThreadClass::of_name(&format!("{}-0", class.prefix())), Some(class));
        }
        assert_eq!(ThreadClass::of_name("eca"), None, "a name without a dash has no class");
    }

    #[test]
    fn the_cpu_time_of_a_thread_grows_while_it_works() {
        let before = cpu_time();
        while cpu_time() - before < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
        assert!(
            std::thread::spawn(cpu_time).join().unwrap() < cpu_time(),
            "each thread has its own CPU time"
        );
    }

    #[test]
    fn a_caught_panic_becomes_an_error_and_the_thread_continues() {
        assert!(!is_catching());
        assert_eq!(catch_panic(is_catching), Ok(true));
        assert_eq!(
            catch_panic(|| -> u8 { panic!("page {} is damaged", 7) }),
            Err("page 7 is damaged".to_owned())
        );
        assert_eq!(catch_panic(|| -> u8 { panic!("plain") }), Err("plain".to_owned()));
        assert!(!is_catching());
    }
}
