//! The Prometheus page of a process: `GET /metrics` over HTTP/1.1.
//!
//! One `admin-metrics` thread answers one request at a time. A request is at most 8 KiB and has two seconds; that is
//! enough for a scraper and bounds what anybody else can do.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use base::process::ProcessUsage;
use base::thread::ThreadClass;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use rustix::event::{PollFd, PollFlags, Timespec};

const REQUEST_BYTES: usize = 8 << 10;
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// How often samples of histograms are folded in when nobody scrapes; without it they would pile up.
const UPKEEP: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Installs the recorder of this process and serves its page at `listen`; returns the address.
///
/// # Errors
/// The address cannot be used.
pub fn serve(listen: &str) -> io::Result<String> {
    let listener = TcpListener::bind(listen)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?.to_string();
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(io::Error::other)?;
    describe();
    base::thread::spawn(ThreadClass::Admin, "metrics", move || answer(&listener, &handle))?;
    Ok(address)
}

fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge};
    describe_gauge!(
        "outboard_process_cpu_seconds",
        Unit::Seconds,
        "CPU time by thread class; `ended` is of threads that are gone"
    );
    describe_counter!("outboard_process_context_switches", Unit::Count, "Context switches by thread class");
    describe_gauge!("outboard_process_peak_resident_bytes", Unit::Bytes, "Most memory ever resident");
}

fn answer(listener: &TcpListener, handle: &PrometheusHandle) {
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        // An interrupted or failed poll is taken up again: accept says what there is.
        let _ = rustix::event::poll(&mut ready, Some(&UPKEEP));
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Err(e) = respond(stream, handle) {
                    tracing::debug!(%peer, "metrics request failed: {e}");
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => handle.run_upkeep(),
            Err(e) => {
                tracing::warn!("cannot accept a metrics connection: {e}");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

fn respond(mut stream: TcpStream, handle: &PrometheusHandle) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(REQUEST_TIME))?;
    let request = read_request(&mut stream)?;
    let (status, body) = match request.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        ["GET", "/metrics" | "/", ..] => {
            record_process();
            handle.run_upkeep();
            ("200 OK", handle.render())
        }
        ["GET", ..] => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    stream.write_all(body.as_bytes())
}

/// The first line of a request, once all of its head has come.
fn read_request(stream: &mut TcpStream) -> io::Result<String> {
    let deadline = Instant::now() + REQUEST_TIME;
    let mut head = vec![0; REQUEST_BYTES];
    let mut have = 0;
    while have < head.len() {
        let left = deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        let got = stream.read(&mut head[have..])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        have += got;
        if head[..have].windows(4).any(|w| w == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&head[..have]);
            return Ok(text.lines().next().unwrap_or("").to_owned());
        }
    }
    Err(io::Error::other("the request's head is too long"))
}

/// Brings the figures of the process itself up to date.
fn record_process() {
    let Ok(usage) = ProcessUsage::read(std::process::id()) else { return };
    let mut ended = usage.total.cpu_seconds;
    for (class, used) in &usage.by_class {
        ended -= used.cpu_seconds;
        metrics::gauge!("outboard_process_cpu_seconds", "class" => class.clone()).set(used.cpu_seconds);
        metrics::counter!("outboard_process_context_switches", "class" => class.clone())
            .absolute(used.context_switches);
    }
    metrics::gauge!("outboard_process_cpu_seconds", "class" => "ended").set(ended.max(0.0));
    metrics::gauge!("outboard_process_peak_resident_bytes").set(usage.peak_resident_bytes as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(address: &str, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn the_page_has_process_figures_and_bad_requests_cost_only_themselves() {
        let address = serve("127.0.0.1:0").unwrap();
        metrics::counter!("outboard_test_things").increment(3);
        assert!(ask(&address, "POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(ask(&address, "GET /secret HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        ask(&address, &"x".repeat(2 * REQUEST_BYTES));
        drop(TcpStream::connect(&address).unwrap());
        let page = ask(&address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(page.contains("outboard_test_things 3"), "{page}");
        assert!(page.contains("outboard_process_cpu_seconds{class=\"admin\"}"), "{page}");
        assert!(page.contains("outboard_process_peak_resident_bytes"), "{page}");
    }
}
