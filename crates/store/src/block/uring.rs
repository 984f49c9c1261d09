//! The I/O ring, which executes [`IoRequest`]s with io_uring. Other threads can wake the thread
//! that waits for completions.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use base::collections::HashMap;
use base::mem::{Arena, ArenaRegistration, HUGE_PAGE};
use bytes::Bytes;
use futures::task::AtomicWaker;
use io_uring::types::{Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};

use super::drive::FileDrive;
use super::io::{IoDone, IoOp, IoRequest, Segment};

/// Number of entries of the submission queue. When the queue is full, its entries are submitted to
/// the kernel before the next request is added.
const ENTRIES: u32 = 256;
/// Maximum number of memory ranges that are registered with one ring. An osd with 64 shards has 64
/// arenas, of usually one range each.
const BUFFERS: u32 = 256;
/// Maximum size of a memory range that the kernel registers, in bytes.
const MAX_BUFFER: usize = 1 << 30;
/// Request id of the completions that report writes to the wake-up descriptor.
const WAKE: u64 = u64::MAX;

/// Wakes the driver of the target: the thread that waits in [`IoRing::wait`], or the task that
/// [listens](Self::listen). Any thread may use it.
#[derive(Debug, Clone)]
pub(crate) struct Waker {
    shared: Arc<WakeState>,
}

#[derive(Debug)]
struct WakeState {
    /// The descriptor that wakes a waiting thread; `None` if the driver is always a task.
    event: Option<Arc<OwnedFd>>,
    task: AtomicWaker,
    asleep: AtomicBool,
}

impl Waker {
    fn new(event: Option<Arc<OwnedFd>>) -> Waker {
        let state = WakeState { event, task: AtomicWaker::new(), asleep: AtomicBool::new(false) };
        Waker { shared: Arc::new(state) }
    }

    /// Creates the waker of a driver that always runs as a task.
    #[cfg(feature = "sim")]
    pub(crate) fn of_task() -> Waker {
        Waker::new(None)
    }

    /// Wakes the driver if it sleeps. Otherwise does nothing, because the driver looks for new work
    /// before it sleeps.
    pub(crate) fn wake(&self) {
        if self.shared.asleep.swap(false, Ordering::SeqCst) {
            match self.shared.task.take() {
                Some(task) => task.wake(),
                // The write can fail only if the counter overflows, and then the thread is already
                // awake.
                None => {
                    if let Some(event) = &self.shared.event {
                        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                    }
                }
            }
        }
    }

    /// Registers a task, which the next [`wake`](Self::wake) wakes once.
    pub(crate) fn listen(&self, task: &std::task::Waker) {
        self.shared.task.register(task);
        self.shared.asleep.store(true, Ordering::SeqCst);
    }
}

/// A request that the kernel executes, with the memory that the request uses.
#[derive(Debug)]
enum KernelRequest {
    Read(Segment),
    Write { pieces: Vec<Bytes>, vectors: Vec<libc::iovec> },
    Flush,
}

impl KernelRequest {
    fn len(&self) -> usize {
        match self {
            KernelRequest::Read(segment) => segment.len(),
            KernelRequest::Write { pieces, .. } => pieces.iter().map(Bytes::len).sum(),
            KernelRequest::Flush => 0,
        }
    }
}

/// A registered range of memory.
#[derive(Debug)]
struct Registered {
    memory: ArenaRegistration,
    /// Offset of the range from the arena's start, in bytes.
    start: usize,
    len: usize,
}

impl Registered {
    fn holds(&self, memory: &[u8]) -> bool {
        let offset = self.memory.arena().offset_of(memory);
        offset.is_some_and(|at| at >= self.start && at + memory.len() <= self.start + self.len)
    }
}

/// Splits an arena of `len` bytes into ranges that are registered separately. Returns the start and
/// the length of each range, in bytes. The kernel limits the size of a range. The kernel can treat
/// huge pages as units only in a range without other pages.
fn ranges(len: usize) -> Vec<(usize, usize)> {
    let huge = len - len % HUGE_PAGE;
    let pieces = (0..huge).step_by(MAX_BUFFER).map(|start| (start, MAX_BUFFER.min(huge - start)));
    pieces.chain((len > huge).then_some((huge, len - huge))).collect()
}

/// The ring of one target. Only one thread may use it.
pub(crate) struct IoRing {
    ring: IoUring,
    waker: Waker,
    /// The descriptor that wakes the thread in [`wait`](Self::wait).
    event: Arc<OwnedFd>,
    /// Whether the kernel will complete a request when the wake-up descriptor is written.
    event_armed: bool,
    /// Whether [`enable`](Self::enable) must still be called.
    disabled: bool,
    in_flight: HashMap<u64, KernelRequest>,
    /// The flushes that wait until another flush of the drive has ended: their ids, and the injected
    /// fault of each.
    held_flushes: VecDeque<(u64, io::Result<()>)>,
    /// Completions of requests that failed before they reached the kernel.
    failed: Vec<IoDone>,
    /// Registered memory, by its index in the kernel's table; `None` if the kernel does not support
    /// the table. A free entry of the table is `None`, too.
    buffers: Option<Vec<Option<Registered>>>,
    /// Counters of the reads and writes that use registered memory, and of the reads and writes
    /// that do not.
    registered_io: metrics::Counter,
    unregistered_io: metrics::Counter,
    // Dropped last, because the kernel may use the file until the ring is closed.
    drive: FileDrive,
}

#[allow(unsafe_code)]
// SAFETY: the raw pointers in `in_flight` point into memory that its `Bytes` keep alive. The ring
// itself may move between threads if only one thread uses it at a time, which `&mut self` ensures.
unsafe impl Send for IoRing {}

impl IoRing {
    /// Creates a ring for requests to `drive`.
    ///
    /// # Errors
    /// If the kernel refuses to create the ring.
    pub(crate) fn new(drive: FileDrive) -> io::Result<IoRing> {
        // With these flags, the kernel does not interrupt the thread for completions, but processes
        // them when the thread asks for them. The flags need Linux 6.1.
        let deferred = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .build(ENTRIES);
        let disabled = deferred.is_ok();
        let ring = deferred
            .or_else(|_| IoUring::builder().setup_coop_taskrun().build(ENTRIES))
            .or_else(|_| IoUring::new(ENTRIES))?;
        ring.submitter().register_files(&[drive.fd().as_raw_fd()])?;
        let buffers = ring.submitter().register_buffers_sparse(BUFFERS).is_ok().then(Vec::new);
        let event = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?);
        Ok(IoRing {
            ring,
            waker: Waker::new(Some(Arc::clone(&event))),
            event,
            event_armed: false,
            disabled,
            in_flight: HashMap::default(),
            held_flushes: VecDeque::new(),
            failed: Vec::new(),
            buffers,
            registered_io: metrics::counter!("outboard_store_registered_io_total"),
            unregistered_io: metrics::counter!("outboard_store_unregistered_io_total"),
            drive,
        })
    }

    /// Makes the calling thread the only user of the ring. Call this method before the first
    /// request.
    ///
    /// # Errors
    /// If the kernel refuses the operation.
    pub(crate) fn enable(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.disabled) {
            self.ring.submitter().register_enable_rings()?;
        }
        Ok(())
    }

    /// Registers the memory of `arena`, so that the kernel pins it once instead of for every
    /// request. The kernel may refuse the registration because of the limit on locked memory, or
    /// the table may be full. In both cases, requests work without registration. Ends the
    /// registration of all memory that only I/O rings still refer to.
    pub(crate) fn register(&mut self, arena: &Arc<Arena>) {
        self.release_unused();
        let Some(buffers) = &self.buffers else { return };
        if buffers.iter().flatten().any(|b| Arc::ptr_eq(b.memory.arena(), arena)) {
            return;
        }
        for (start, len) in ranges(arena.len()) {
            if let Err(error) =
                self.register_range(Registered { memory: ArenaRegistration::new(arena), start, len })
            {
                tracing::warn!(%error, len, "memory could not be registered with the I/O ring, so requests cost more CPU time");
                return;
            }
        }
    }

    /// Ends the registration of memory that only I/O rings still refer to, so that this memory is
    /// unmapped. The kernel keeps the memory of requests in progress.
    #[allow(unsafe_code)]
    fn release_unused(&mut self) {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for (index, entry) in self.buffers.iter_mut().flatten().enumerate() {
            if !entry.as_ref().is_some_and(|registered| registered.memory.is_all_there_is()) {
                continue;
            }
            // SAFETY: the entry becomes empty, so the kernel gets no memory.
            match unsafe { self.ring.submitter().register_buffers_update(index as u32, &[none], None) } {
                Ok(()) => *entry = None,
                Err(error) => tracing::warn!(%error, "memory stays registered with the I/O ring"),
            }
        }
    }

    #[allow(unsafe_code)]
    fn register_range(&mut self, range: Registered) -> io::Result<()> {
        let Some(buffers) = &mut self.buffers else { return Ok(()) };
        let index = buffers.iter().position(Option::is_none).unwrap_or(buffers.len());
        if index >= BUFFERS as usize {
            return Err(io::Error::other("the table of registered memory is full"));
        }
        let (base, _) = range.memory.arena().as_raw();
        let vector = libc::iovec { iov_base: base.wrapping_add(range.start).cast(), iov_len: range.len };
        // SAFETY: the range is part of a valid mapping, and `buffers` keeps it until the ring is
        // closed.
        unsafe { self.ring.submitter().register_buffers_update(index as u32, &[vector], None) }?;
        match buffers.get_mut(index) {
            Some(place) => *place = Some(range),
            None => buffers.push(Some(range)),
        }
        Ok(())
    }

    /// Returns the index of the registered range that contains `memory`. Counts the request as a
    /// request with or without registered memory.
    fn registered(&self, memory: &[u8]) -> Option<u16> {
        let holds = |entry: &Option<Registered>| entry.as_ref().is_some_and(|range| range.holds(memory));
        let index = self.buffers.as_ref().and_then(|all| all.iter().position(holds));
        match index {
            Some(_) => self.registered_io.increment(1),
            None => self.unregistered_io.increment(1),
        }
        index.and_then(|index| u16::try_from(index).ok())
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Returns the number of requests that have not completed.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len() + self.held_flushes.len()
    }

    /// Queues a request. The request reaches the kernel at the latest with the next call of
    /// [`wait`](Self::wait) or [`start`](Self::start).
    ///
    /// # Errors
    /// If the kernel accepts no more requests.
    pub(crate) fn submit(&mut self, request: IoRequest) -> io::Result<()> {
        match request.op {
            IoOp::Read(_) => return self.push(request),
            IoOp::Write(_) => match self.drive.injected() {
                Ok(()) => return self.push(request),
                Err(error) => self.failed.push(IoDone { id: request.id, result: Err(error) }),
            },
            IoOp::Flush => self.held_flushes.push_back((request.id, self.drive.injected())),
        }
        self.start_flush()
    }

    /// Hands the next held flush to the kernel, unless another flush of the drive runs.
    fn start_flush(&mut self) -> io::Result<()> {
        while let Some((id, injected)) = self.held_flushes.pop_front() {
            let begun = match self.drive.gate().try_begin() {
                Ok(false) => {
                    self.held_flushes.push_front((id, injected));
                    return Ok(());
                }
                Ok(true) => injected.inspect_err(|_| self.drive.gate().end(false)),
                Err(error) => Err(error),
            };
            match begun {
                Ok(()) => self.push(IoRequest { id, offset: 0, op: IoOp::Flush })?,
                Err(error) => self.failed.push(IoDone { id, result: Err(error) }),
            }
        }
        Ok(())
    }

    /// Hands a request to the kernel.
    #[allow(unsafe_code)]
    fn push(&mut self, request: IoRequest) -> io::Result<()> {
        let file = Fixed(0);
        let (mut state, offset, id) = match request.op {
            IoOp::Read(segment) => (KernelRequest::Read(segment), request.offset, request.id),
            IoOp::Write(pieces) => {
                let vector =
                    |p: &Bytes| libc::iovec { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() };
                let vectors = pieces.iter().map(vector).collect();
                (KernelRequest::Write { pieces, vectors }, request.offset, request.id)
            }
            IoOp::Flush => (KernelRequest::Flush, 0, request.id),
        };
        let entry = match &mut state {
            KernelRequest::Read(segment) => {
                let (start, len) = (segment.as_mut_ptr(), segment.len() as u32);
                match self.registered(segment) {
                    Some(index) => opcode::ReadFixed::new(file, start, len, index).offset(offset).build(),
                    None => opcode::Read::new(file, start, len).offset(offset).build(),
                }
            }
            KernelRequest::Write { pieces, .. } if pieces.len() == 1 => {
                let (start, len) = (pieces[0].as_ptr(), pieces[0].len() as u32);
                match self.registered(&pieces[0]) {
                    Some(index) => opcode::WriteFixed::new(file, start, len, index).offset(offset).build(),
                    None => opcode::Write::new(file, start, len).offset(offset).build(),
                }
            }
            KernelRequest::Write { vectors, .. } => {
                self.unregistered_io.increment(1);
                opcode::Writev::new(file, vectors.as_ptr(), vectors.len() as u32).offset(offset).build()
            }
            KernelRequest::Flush => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        };
        let entry = entry.user_data(id);
        // The heap memory that the entry points to does not move with `state`.
        self.in_flight.insert(id, state);
        // SAFETY: `in_flight` keeps segment, pieces and vectors alive until the request has
        // completed, and `drop` waits for all requests.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    /// Submits the queued requests and waits for a completion or a wake-up, but at most for
    /// `timeout`. Does not wait if `ready` returns `true`. `ready` runs after wake-ups were
    /// enabled, so that no wake-up is missed.
    ///
    /// # Errors
    /// If the kernel refuses the operation.
    #[allow(unsafe_code)]
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> io::Result<()> {
        self.start_flush()?;
        self.waker.shared.asleep.store(true, Ordering::SeqCst);
        if ready() || self.has_completions() {
            self.waker.shared.asleep.store(false, Ordering::SeqCst);
            return self.ring.submit().map(drop);
        }
        if !self.event_armed {
            let fd = io_uring::types::Fd(self.event.as_raw_fd());
            // One request reports all future wake-ups. The descriptor is never read, because each
            // write to it is a wake-up.
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build().user_data(WAKE);
            // SAFETY: the request refers to no memory, and the descriptor lives as long as the
            // ring.
            while unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.ring.submit()?;
            }
            self.event_armed = true;
        }
        let result = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let time = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        self.waker.shared.asleep.store(false, Ordering::SeqCst);
        match result {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Makes the kernel write to an event descriptor whenever a request completes outside of
    /// [`start`](Self::start), and returns a duplicate of this descriptor. The descriptor need not
    /// be read. Use it in a thread that does not [`wait`](Self::wait).
    ///
    /// # Errors
    /// If the kernel refuses the operation.
    pub(crate) fn notify(&self) -> io::Result<OwnedFd> {
        self.ring.submitter().register_eventfd(self.event.as_raw_fd())?;
        self.event.try_clone()
    }

    /// Submits the queued requests and lets the kernel deliver completions, without waiting.
    /// Returns whether completions or requests remain to be processed.
    ///
    /// # Errors
    /// If the kernel refuses the operation.
    pub(crate) fn start(&mut self) -> io::Result<bool> {
        self.start_flush()?;
        let submission = self.ring.submission();
        let has_work = !submission.is_empty() || submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if !has_work {
            // The descriptor reports requests that complete from here on.
            return Ok(self.has_completions());
        }
        self.ring.completion().disable_eventfd();
        let result = self.ring.submit();
        self.ring.completion().enable_eventfd();
        // The descriptor reports requests that complete from here on. The check below sees requests
        // that completed before.
        fence(Ordering::SeqCst);
        match result {
            Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => return Err(e),
            _ => {}
        }
        let submission = self.ring.submission();
        let waiting = !submission.is_empty() || submission.taskrun();
        drop(submission);
        Ok(waiting || self.has_completions())
    }

    /// Whether [`completions`](Self::completions) would return a completed request, or a held flush
    /// can begin.
    pub(crate) fn has_completions(&mut self) -> bool {
        let can_flush = !self.held_flushes.is_empty() && self.drive.gate().is_open();
        can_flush || !self.failed.is_empty() || !self.ring.completion().is_empty()
    }

    /// Returns the requests that have completed since the last call.
    pub(crate) fn completions(&mut self) -> Vec<IoDone> {
        let mut done = std::mem::take(&mut self.failed);
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                self.event_armed = io_uring::cqueue::more(entry.flags());
                continue;
            }
            let id = entry.user_data();
            let Some(state) = self.in_flight.remove(&id) else { continue };
            let result = match usize::try_from(entry.result()) {
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                Ok(n) if n == state.len() => Ok(()),
                Ok(n) => Err(io::Error::other(format!("only {n} of {} bytes were transferred", state.len()))),
            };
            if let KernelRequest::Flush = state {
                self.drive.gate().end(result.is_ok());
            }
            done.push(IoDone { id, result });
        }
        done
    }
}

impl Drop for IoRing {
    fn drop(&mut self) {
        // Wait until the kernel no longer uses memory of the requests.
        while !self.in_flight.is_empty() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => drop(self.completions()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.drive.gate().end(false);
                    // The kernel may still write to this memory and this drive. Leak both, so that
                    // the memory is not reused and the drive stays locked against another mount.
                    std::mem::forget(std::mem::take(&mut self.in_flight));
                    std::mem::forget(self.buffers.take());
                    std::mem::forget(self.drive.clone());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(dir: &std::path::Path, name: &str) -> IoRing {
        IoRing::new(FileDrive::open(&dir.join(name), Some(1 << 20)).unwrap()).unwrap()
    }

    /// Two targets have one ring each, and both rings register the memory of every attachment.
    #[test]
    fn registered_memory_is_released_when_only_io_rings_refer_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut rings = [ring(dir.path(), "a"), ring(dir.path(), "b")];
        let mut earlier = Vec::new();
        for _ in 0..3 * BUFFERS {
            let arena = Arena::anonymous(1 << 16).unwrap();
            rings.iter_mut().for_each(|ring| ring.register(&arena));
            earlier.push(Arc::downgrade(&arena));
        }
        let kept = earlier.iter().filter(|arena| arena.upgrade().is_some()).count();
        assert!(kept <= 1, "{kept} arenas of earlier attachments are kept");
    }

    /// An osd with many shards stops, and then one with a single shard attaches.
    #[test]
    fn a_registration_releases_all_memory_of_ended_attachments() {
        let dir = tempfile::tempdir().unwrap();
        let mut rings = [ring(dir.path(), "a"), ring(dir.path(), "b")];
        let arenas: Vec<_> = (0..64).map(|_| Arena::anonymous(1 << 16).unwrap()).collect();
        let earlier: Vec<_> = arenas.iter().map(Arc::downgrade).collect();
        for arena in &arenas {
            rings.iter_mut().for_each(|ring| ring.register(arena));
        }
        drop(arenas);
        let next = Arena::anonymous(1 << 16).unwrap();
        // The first ring finds the memory still registered with the second ring.
        rings.iter_mut().for_each(|ring| ring.register(&next));
        let kept = earlier.iter().filter(|arena| arena.upgrade().is_some()).count();
        assert_eq!(kept, 0, "arenas of ended attachments are kept");
    }

    #[test]
    fn the_whole_arena_is_registered_with_huge_pages_in_separate_ranges() {
        assert_eq!(ranges(4096), [(0, 4096)]);
        assert_eq!(ranges(2 * HUGE_PAGE), [(0, 2 * HUGE_PAGE)]);
        assert_eq!(ranges(HUGE_PAGE + 4096), [(0, HUGE_PAGE), (HUGE_PAGE, 4096)]);
        let large = ranges(2 * MAX_BUFFER + HUGE_PAGE + 4096);
        assert_eq!(large.iter().map(|(_, len)| len).sum::<usize>(), 2 * MAX_BUFFER + HUGE_PAGE + 4096);
        assert!(large.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0));
        assert_eq!(large.len(), 4);
    }
}
