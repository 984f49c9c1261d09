//! Sums of the time that requests took, by phase, and of the time that a shard's thread worked,
//! by thread class. The sums are 0 when the osd starts.

use std::cell::Cell;

use base::phases::Breakdown;
use base::thread::ThreadClass;
use base::work;
use metrics::{Counter, counter};
use wire::{ObjectRequest, PhaseTimes, RequestBody, RequestTimes, ThreadTimes};

/// Thread classes to which a shard's thread charges its work.
const CLASSES: [ThreadClass; 3] = [ThreadClass::Messenger, ThreadClass::Osd, ThreadClass::Channel];

/// Kinds of requests with separate sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Write,
    Read,
    Other,
}

impl RequestKind {
    pub(crate) fn of(body: &RequestBody) -> RequestKind {
        match body {
            RequestBody::Object(ObjectRequest::Mutate(_)) => RequestKind::Write,
            RequestBody::Object(ObjectRequest::Read(_) | ObjectRequest::ReadFirst(_)) => RequestKind::Read,
            _ => RequestKind::Other,
        }
    }
}

/// The sums of one shard.
pub(crate) struct Times {
    write: Sum,
    read: Sum,
    other: Sum,
    /// Counters of requests: mutate, read, query, list and all others.
    kinds: [Counter; 5],
    refused: Counter,
    /// Bulk data that was pulled from clients and pushed to clients, in bytes.
    pulled: Counter,
    pushed: Counter,
    thread: [(ThreadClass, ClassTime); CLASSES.len()],
}

struct Sum {
    count: Cell<u64>,
    sum: Cell<Breakdown>,
    counted: Counter,
    /// Counters of the phases host, DMA, DMA wait and others.
    phases: [Counter; 4],
}

/// Metric of the time of one thread class, and the time that was already added to the metric.
struct ClassTime {
    counter: Counter,
    counted: Cell<u64>,
}

impl Times {
    /// Creates the sums of shard number `shard`. Each shard has its own metrics, so that the shards'
    /// threads share no counters.
    pub(crate) fn new(shard: u16) -> Times {
        let shard = shard.to_string();
        let thread = CLASSES.map(|class| {
            let labels = [("class", class.prefix().to_owned()), ("shard", shard.clone())];
            let counter = counter!("outboard_osd_thread_nanoseconds_total", &labels);
            (class, ClassTime { counter, counted: Cell::default() })
        });
        let sum = |op| Sum::new(op, &shard);
        let kind = |kind| counter!("outboard_osd_requests_total", "kind" => kind, "shard" => shard.clone());
        Times {
            write: sum("write"),
            read: sum("read"),
            other: sum("other"),
            kinds: ["mutate", "read", "query", "list", "admin"].map(kind),
            refused: counter!("outboard_osd_refused_total", "shard" => shard.clone()),
            pulled: counter!("outboard_osd_pulled_bytes", "shard" => shard.clone()),
            pushed: counter!("outboard_osd_pushed_bytes", "shard" => shard.clone()),
            thread,
        }
    }

    /// Counts a request that begins.
    pub(crate) fn count(&self, body: &RequestBody) {
        let [mutate, read, query, list, admin] = &self.kinds;
        let counter = match body {
            RequestBody::Object(ObjectRequest::Mutate(_)) => mutate,
            RequestBody::Object(ObjectRequest::Read(_) | ObjectRequest::ReadFirst(_)) => read,
            RequestBody::Object(ObjectRequest::Query(_)) => query,
            RequestBody::Object(ObjectRequest::List(_)) => list,
            _ => admin,
        };
        counter.increment(1);
    }

    /// Counts a request that was refused.
    pub(crate) fn refused(&self) {
        self.refused.increment(1);
    }

    /// Counts `len` bytes of bulk data that were pulled from a client.
    pub(crate) fn pulled(&self, len: usize) {
        self.pulled.increment(len as u64);
    }

    /// Counts `len` bytes of bulk data that are pushed to a client.
    pub(crate) fn pushed(&self, len: usize) {
        self.pushed.increment(len as u64);
    }

    /// Adds the time of a request whose reply was passed to the connection.
    pub(crate) fn add(&self, kind: RequestKind, time: Breakdown) {
        let sum = match kind {
            RequestKind::Write => &self.write,
            RequestKind::Read => &self.read,
            RequestKind::Other => &self.other,
        };
        sum.add(time);
        let work = work::of_this_thread();
        for (class, booked) in &self.thread {
            let ns = work.ns(*class);
            booked.counter.increment(ns.saturating_sub(booked.counted.replace(ns)));
        }
    }

    /// Returns the sums of the time that requests took, by kind of request.
    pub(crate) fn requests(&self) -> RequestTimes {
        RequestTimes { write: self.write.get(), read: self.read.get(), other: self.other.get() }
    }

    /// Returns the time that the osd's thread worked, by thread class, in ns.
    pub(crate) fn thread(&self) -> ThreadTimes {
        let work = work::of_this_thread();
        let [messenger, osd, channel] = CLASSES.map(|class| work.ns(class));
        ThreadTimes { messenger, osd, channel }
    }
}

impl Sum {
    fn new(op: &'static str, shard: &str) -> Sum {
        let phase = |phase: &'static str| {
            let labels = [("op", op.to_owned()), ("phase", phase.to_owned()), ("shard", shard.to_owned())];
            counter!("outboard_osd_request_nanoseconds_total", &labels)
        };
        Sum {
            count: Cell::default(),
            sum: Cell::default(),
            counted: counter!("outboard_osd_requests_timed_total", "op" => op, "shard" => shard.to_owned()),
            phases: ["host", "dma", "dma_wait", "others"].map(phase),
        }
    }

    fn add(&self, time: Breakdown) {
        let mut sum = self.sum.get();
        sum += time;
        self.sum.set(sum);
        self.count.set(self.count.get() + 1);
        self.counted.increment(1);
        let phases = [time.host_ns, time.dma_ns, time.dma_wait_ns, time.others_ns];
        self.phases.iter().zip(phases).for_each(|(counter, ns)| counter.increment(ns));
    }

    fn get(&self) -> PhaseTimes {
        let Breakdown { total_ns, host_ns, dma_ns, dma_wait_ns, others_ns } = self.sum.get();
        PhaseTimes { count: self.count.get(), total_ns, host_ns, dma_ns, dma_wait_ns, others_ns }
    }
}
