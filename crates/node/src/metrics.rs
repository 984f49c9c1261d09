//! The Prometheus page of a process: `GET /metrics` over HTTP/1.1.
//!
//! One `admin-metrics` thread serves up to `CONNECTIONS` connections concurrently. A request is at
//! most 8 KiB. Receiving a request and sending its answer may take two seconds each. At the limit
//! of connections, a new connection replaces the oldest connection of an address with more than its
//! fair share. Silent peers therefore cannot keep a scraper out.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use base::budget::Budget;
use base::clock::Instant;
use base::process::ProcessUsage;
use base::thread::ThreadClass;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::descriptors::FdUsage;

/// Maximum number of simultaneous connections.
const CONNECTIONS: usize = 32;
/// Maximum number of connections to accept before the existing connections are served.
const ACCEPTED_AT_ONCE: usize = CONNECTIONS;
/// Maximum length of a request's head, in bytes.
const REQUEST_BYTES: usize = 8 << 10;
/// Time limit for receiving a request, and again for sending its answer.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// Pause after a failed attempt to accept a connection, for example because no file descriptor was
/// free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time between two aggregations of histogram samples. Without these aggregations, samples would
/// accumulate while no scraper reads the page.
const UPKEEP: Duration = Duration::from_secs(5);

/// Installs the recorder of this process and serves its page at `listen`; returns the address.
///
/// # Errors
/// If the address cannot be used.
pub fn serve(listen: &str) -> io::Result<String> {
    let listener = TcpListener::bind(listen)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?.to_string();
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(ByShard(recorder)).map_err(io::Error::other)?;
    describe();
    base::thread::spawn(ThreadClass::Admin, "metrics", move || MetricsServer::new(listener, handle).run())?;
    Ok(address)
}

thread_local! {
    static SHARD: Cell<Option<u16>> = const { Cell::new(None) };
}

/// Declares that the calling thread runs a shard. From then on, metrics that this thread registers have
/// the label `shard`.
pub fn label_thread(shard: u16) {
    SHARD.set(Some(shard));
}

/// Adds the label `shard` to the metrics of a shard's thread. Without it, all shards would share the
/// counters of the process, and each increment would move a cache line between their CPUs. A gauge
/// would show the value of the shard that has set it last.
struct ByShard<R>(R);

impl<R> ByShard<R> {
    fn labelled(key: &Key) -> Cow<'_, Key> {
        match SHARD.get() {
            Some(shard) if key.labels().all(|label| label.key() != "shard") => {
                Cow::Owned(key.with_extra_labels(vec![Label::new("shard", shard.to_string())]))
            }
            _ => Cow::Borrowed(key),
        }
    }
}

impl<R: Recorder> Recorder for ByShard<R> {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.0.describe_counter(key, unit, description);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.0.describe_gauge(key, unit, description);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.0.describe_histogram(key, unit, description);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        self.0.register_counter(&Self::labelled(key), metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        self.0.register_gauge(&Self::labelled(key), metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.0.register_histogram(&Self::labelled(key), metadata)
    }
}

fn describe() {
    use metrics::{describe_counter, describe_gauge};
    describe_gauge!(
        "outboard_process_cpu_seconds",
        Unit::Seconds,
        "CPU time by thread class; `ended` is the time of threads that have ended"
    );
    describe_gauge!(
        "outboard_process_user_seconds",
        Unit::Seconds,
        "Part of the CPU time that threads spent in user mode, by thread class"
    );
    describe_counter!("outboard_process_context_switches", Unit::Count, "Context switches by thread class");
    describe_gauge!(
        "outboard_process_peak_resident_bytes",
        Unit::Bytes,
        "Maximum resident memory since the start of the process"
    );
    describe_counter!(
        "outboard_metrics_connections_reclaimed_total",
        Unit::Count,
        "Connections to the metrics page that were closed in favour of a newer connection"
    );
    describe_counter!(
        "outboard_osd_sessions_reclaimed_total",
        Unit::Count,
        "Connected sessions that the osd closed in favour of another client"
    );
    describe_counter!(
        "outboard_store_connections_reclaimed_total",
        Unit::Count,
        "Connections of silent peers to the store's control socket that were closed in favour of another peer"
    );
    describe_counter!(
        "outboard_messenger_connections_reclaimed_total",
        Unit::Count,
        "Handshakes and connections that were closed in favour of another client, by scarce resource"
    );
    describe_counter!(
        "outboard_messenger_connections_refused_total",
        Unit::Count,
        "Connections that were refused because a resource was scarce, by resource"
    );
    for (name, what) in [
        ("outboard_store_index_used_bytes", "Used part of the index of a target, by target"),
        ("outboard_store_index_bytes", "Size of the index of a target, by target"),
        (
            "outboard_store_log_used_bytes",
            "Part of the log of a target that no checkpoint has freed, by target",
        ),
        ("outboard_store_log_bytes", "Size of the log of a target, by target"),
        ("outboard_store_cache_used_bytes", "Memory of the cached values of an index, by target"),
        ("outboard_store_cache_limit_bytes", "Maximum memory of the cached values of an index, by target"),
    ] {
        describe_gauge!(name, Unit::Bytes, what);
    }
    describe_gauge!("outboard_process_open_fds", Unit::Count, "Number of open file descriptors");
    describe_gauge!("outboard_process_max_fds", Unit::Count, "Maximum number of open file descriptors");
}

/// A connection: receives its request, then sends its answer.
struct Exchange {
    stream: TcpStream,
    /// The received part of the request.
    request: Vec<u8>,
    /// The unsent part of the answer; empty while the request is being received.
    answer: Vec<u8>,
    /// Time at which the connection is closed even if the exchange is incomplete.
    deadline: Instant,
}

/// The state of a connection after [`Exchange::go_on`].
enum ExchangeState {
    /// The connection waits for its peer.
    Waits,
    /// The answer was sent, or the peer has closed the connection.
    Over,
}

struct MetricsServer {
    listener: TcpListener,
    handle: PrometheusHandle,
    budget: Budget<u64>,
    exchanges: BTreeMap<u64, Exchange>,
    last_id: u64,
    upkeep_at: Instant,
    /// Earliest time at which the server accepts the next connection.
    accept_at: Instant,
}

impl MetricsServer {
    fn new(listener: TcpListener, handle: PrometheusHandle) -> MetricsServer {
        let now = Instant::now();
        MetricsServer {
            listener,
            handle,
            budget: Budget::new(CONNECTIONS, Duration::ZERO),
            exchanges: BTreeMap::new(),
            last_id: 0,
            upkeep_at: now + UPKEEP,
            accept_at: now,
        }
    }

    fn run(mut self) {
        loop {
            let ready = self.wait();
            let now = Instant::now();
            if now >= self.upkeep_at {
                self.handle.run_upkeep();
                self.upkeep_at = now + UPKEEP;
            }
            for id in ready {
                self.turn(id);
            }
            let late = self.exchanges.iter().filter(|(_, exchange)| exchange.deadline <= now);
            for id in late.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.end(id);
            }
            if now >= self.accept_at {
                self.accept(now);
            }
        }
    }

    /// Sleeps until a connection can proceed, a new connection arrives or a time limit passes.
    /// Returns the connections that may be able to proceed.
    fn wait(&self) -> Vec<u64> {
        let now = Instant::now();
        let takes = now >= self.accept_at;
        let limits = self.exchanges.values().map(|exchange| exchange.deadline);
        let wake_at = limits.chain([self.upkeep_at]).chain((!takes).then_some(self.accept_at)).min();
        let pause = wake_at.map_or(UPKEEP, |at| at.saturating_duration_since(now)).min(UPKEEP);
        let pause = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
        let exchanges = self.exchanges.values().map(|exchange| {
            let wanted = if exchange.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::new(&exchange.stream, wanted)
        });
        let listens = takes.then(|| PollFd::new(&self.listener, PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> = exchanges.chain(listens).collect();
        // Ignore an interrupted or failed poll. The loop polls again, and its reads and accepts do
        // not block.
        let _ = rustix::event::poll(&mut polled, Some(&pause));
        let ready = self.exchanges.keys().zip(&polled).filter(|(_, fd)| !fd.revents().is_empty());
        ready.map(|(id, _)| *id).collect()
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    self.last_id += 1;
                    let id = self.last_id;
                    match self.budget.admit(id, peer.ip().into(), now) {
                        Ok(Some(victim)) => {
                            metrics::counter!("outboard_metrics_connections_reclaimed_total").increment(1);
                            self.exchanges.remove(&victim);
                        }
                        Ok(None) => {}
                        // The time after which a silent connection may be replaced is zero, so an
                        // address can always replace one of its own connections.
                        Err(full) => {
                            tracing::debug!(%peer, "refused a metrics connection: {full}");
                            continue;
                        }
                    }
                    self.exchanges.insert(id, Exchange::new(stream, now + REQUEST_TIME));
                    self.turn(id);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(e) => {
                    tracing::warn!("cannot accept a metrics connection: {e}");
                    // Close a connection: the next attempt may need its descriptor.
                    if let Some(victim) = self.budget.shed(now) {
                        self.exchanges.remove(&victim);
                    }
                    self.accept_at = now + ACCEPT_PAUSE;
                    return;
                }
            }
        }
    }

    fn turn(&mut self, id: u64) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        match exchange.go_on(&self.handle) {
            Ok(ExchangeState::Waits) => {}
            Ok(ExchangeState::Over) => self.end(id),
            Err(e) => {
                tracing::debug!("a metrics request failed: {e}");
                self.end(id);
            }
        }
    }

    fn end(&mut self, id: u64) {
        self.exchanges.remove(&id);
        self.budget.remove(id);
    }
}

impl Exchange {
    fn new(stream: TcpStream, deadline: Instant) -> Exchange {
        Exchange { stream, request: Vec::new(), answer: Vec::new(), deadline }
    }

    /// Receives available data and sends as much as possible.
    fn go_on(&mut self, handle: &PrometheusHandle) -> io::Result<ExchangeState> {
        while self.answer.is_empty() {
            let mut chunk = [0; 1024];
            let got = match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(ExchangeState::Over),
                Ok(got) => got,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(ExchangeState::Waits),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.request.extend_from_slice(&chunk[..got]);
            if self.request.windows(4).any(|w| w == b"\r\n\r\n") {
                self.answer = answer(&self.request, handle);
                self.deadline = Instant::now() + REQUEST_TIME;
            } else if self.request.len() >= REQUEST_BYTES {
                return Err(io::Error::other("the request's head is too long"));
            }
        }
        while !self.answer.is_empty() {
            match self.stream.write(&self.answer) {
                Ok(written) => drop(self.answer.drain(..written)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(ExchangeState::Waits),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(ExchangeState::Over)
    }
}

/// Answers a request whose head is complete.
fn answer(request: &[u8], handle: &PrometheusHandle) -> Vec<u8> {
    let request = String::from_utf8_lossy(request);
    let line = request.lines().next().unwrap_or("");
    let (status, body) = match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        ["GET", "/metrics" | "/", ..] => {
            record_process();
            handle.run_upkeep();
            ("200 OK", handle.render())
        }
        ["GET", ..] => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        _ => (
            "405 Method Not Allowed",
            "only GET is supported
"
            .to_owned(),
        ),
    };
    let (kind, length) = ("text/plain; version=0.0.4", body.len());
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    [head, body].concat().into_bytes()
}

/// Updates the metrics of this process: descriptors, CPU time and memory.
fn record_process() {
    if let Ok(descriptors) = FdUsage::of(std::process::id()) {
        metrics::gauge!("outboard_process_open_fds").set(descriptors.open as f64);
        metrics::gauge!("outboard_process_max_fds").set(descriptors.most as f64);
    }
    let Ok(usage) = ProcessUsage::read(std::process::id()) else { return };
    let mut ended = usage.total.cpu_ns;
    for (class, used) in &usage.by_class {
        ended = ended.saturating_sub(used.cpu_ns);
        metrics::gauge!("outboard_process_cpu_seconds", "class" => class.clone()).set(used.cpu_seconds());
        metrics::gauge!("outboard_process_user_seconds", "class" => class.clone()).set(used.user_seconds());
        metrics::counter!("outboard_process_context_switches", "class" => class.clone())
            .absolute(used.context_switches);
    }
    metrics::gauge!("outboard_process_cpu_seconds", "class" => "ended").set(ended as f64 / 1e9);
    metrics::gauge!("outboard_process_peak_resident_bytes").set(usage.peak_resident_bytes as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(address: &str, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        // This timeout is shorter than the time that all connections of the test would take one
        // after the other.
        stream.set_read_timeout(Some(CONNECTIONS as u32 * REQUEST_TIME)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn the_metrics_page_is_served_despite_bad_requests_and_silent_connections() {
        let address = serve("127.0.0.1:0").unwrap();
        silent_connections_do_not_keep_a_scraper_out(&address);
        metrics::counter!("outboard_test_things").increment(3);
        let of_shard = || {
            label_thread(7);
            metrics::counter!("outboard_test_things").increment(4);
            metrics::gauge!("outboard_test_level", "shard" => "own").set(5.0);
        };
        std::thread::spawn(of_shard).join().unwrap();
        assert!(ask(&address, "POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(ask(&address, "GET /secret HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        ask(&address, &"x".repeat(2 * REQUEST_BYTES));
        drop(TcpStream::connect(&address).unwrap());
        let page = ask(&address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        for line in [
            "outboard_test_things 3",
            "outboard_test_things{shard=\"7\"} 4",
            "outboard_test_level{shard=\"own\"} 5",
        ] {
            assert!(page.lines().any(|of_page| of_page == line), "{line}: {page}");
        }
        assert!(page.contains("outboard_process_cpu_seconds{class=\"admin\"}"), "{page}");
        for gauge in ["peak_resident_bytes", "open_fds", "max_fds"] {
            assert!(page.contains(&format!("outboard_process_{gauge}")), "{gauge}: {page}");
        }
    }

    /// This check is a part of the test above, because a process can install its recorder only
    /// once.
    fn silent_connections_do_not_keep_a_scraper_out(address: &str) {
        let mut crowd: Vec<TcpStream> =
            (0..2 * CONNECTIONS).map(|_| TcpStream::connect(address).unwrap()).collect();
        // These connections send an incomplete request. The others send nothing.
        for stream in &mut crowd[CONNECTIONS..] {
            stream.write_all(b"GET /").unwrap();
        }
        let page = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        let name = "outboard_metrics_connections_reclaimed_total ";
        let reclaimed =
            page.lines().find_map(|line| line.strip_prefix(name)).expect("the page contains the counter");
        assert!(reclaimed.parse::<u64>().unwrap() > 0, "{page}");
        // The oldest connections were closed.
        let mut rest = String::new();
        crowd[0].set_read_timeout(Some(REQUEST_TIME)).unwrap();
        assert!(!matches!(crowd[0].read_to_string(&mut rest), Err(e) if e.kind() == ErrorKind::WouldBlock));
    }
}
