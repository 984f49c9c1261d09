//! The cost of many connections: requests over N connections with one request in flight each,
//! beside the same number of requests in flight over one connection.
//!
//! Small requests and replies of 4 KiB travel over TCP within this process. The server is an osd with
//! one shard, or the messenger alone on a thread with the event loop of an osd. A minimal epoll server
//! of the same shape is the reference: it shows how much of the cost is the kernel's.

mod figures;
mod reference;
mod through_messenger;
mod through_osd;

use std::time::Duration;

use base::process::ProcessUsage;
use base::thread::{self, ThreadClass};
use clap::Args;
use hdrhistogram::Histogram;
use node::failure::{Doing, Failure, Result};
use serde::Serialize;

use crate::output;
use figures::ConnectionFigures;

const DOING: &str = "measuring many connections";

/// Duration of the load before the measurement.
const WARM_UP: Duration = Duration::from_millis(200);

/// Measure the cost of many connections with few requests each
///
/// "server" and "client" are the CPU time of the server's and of the client's thread. The last
/// lines compare N connections that have 1 request in flight each with 1 connection that has N
/// requests in flight.
#[derive(Debug, Clone, Args)]
pub struct ConnectionsArgs {
    /// Number of connections, and of requests in flight
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=512))]
    connections: u32,
    /// Size of a request's header, in bytes; the osd's requests have their own size
    #[arg(long, default_value_t = 100, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=4096))]
    request_bytes: u32,
    /// Size of a reply's payload, in bytes
    #[arg(long, default_value_t = 4096, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=65536))]
    reply_bytes: u32,
    /// Seconds of each measurement
    #[arg(long, default_value = "1", value_name = "T", value_parser = crate::seconds)]
    seconds: Duration,
    /// Number of rounds; the output shows medians
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A server with its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum ConnectionContender {
    /// An osd with one shard, whose store is in memory.
    Osd,
    /// The messenger alone.
    Messenger,
    BareEpoll,
}

/// How requests are distributed over connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct ConnectionShape {
    connections: u32,
    in_flight: u32,
}

/// The result of one run.
struct ConnectionSample {
    seconds: f64,
    server_cpu_seconds: f64,
    client_cpu_seconds: f64,
    /// Latency in ns.
    latency: Histogram<u64>,
}

/// Runs the command.
pub fn run(args: &ConnectionsArgs) -> Result<()> {
    let shapes = [(1, args.connections), (args.connections, 1)]
        .map(|(connections, in_flight)| ConnectionShape { connections, in_flight });
    let cases: Vec<(ConnectionContender, ConnectionShape)> =
        [ConnectionContender::Osd, ConnectionContender::Messenger, ConnectionContender::BareEpoll]
            .into_iter()
            .flat_map(|contender| shapes.map(|shape| (contender, shape)))
            .collect();
    let mut samples: Vec<Vec<ConnectionSample>> = cases.iter().map(|_| Vec::new()).collect();
    for round in 0..args.rounds as usize {
        for i in 0..cases.len() {
            // Each round begins with another case.
            let at = (round + i) % cases.len();
            let (contender, shape) = cases[at];
            samples[at].push(measure(contender, shape, args)?);
        }
    }
    let figures = ConnectionFigures::new(&cases, &samples);
    if args.json {
        output::json(&figures);
    } else {
        output::raw(&figures);
    }
    Ok(())
}

/// Runs one measurement on a new thread.
fn measure(
    contender: ConnectionContender,
    shape: ConnectionShape,
    args: &ConnectionsArgs,
) -> Result<ConnectionSample> {
    let args = args.clone();
    let work = move || match contender {
        ConnectionContender::Osd => through_osd::measure(shape, &args),
        ConnectionContender::Messenger => through_messenger::measure(shape, &args),
        ConnectionContender::BareEpoll => reference::measure(shape, &args),
    };
    let thread = thread::spawn(ThreadClass::Client, "bench", work).doing(DOING)?;
    thread.join().unwrap_or_else(|_| Err(Failure::new(DOING, "the thread panicked; this is a bug")))
}

fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 600_000_000_000, 3).doing(DOING)
}

fn usage() -> Result<ProcessUsage> {
    ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process")
}

/// The CPU time of a class of threads, in seconds.
fn cpu_seconds(usage: &ProcessUsage, class: &str) -> f64 {
    usage.by_class.get(class).map_or(0.0, |usage| usage.cpu_seconds())
}

impl ConnectionSample {
    /// Creates a result from the usage of this process during the measurement. The threads of the
    /// server are of the class `osd`, and the threads of the client are of the class `client`.
    fn new(latency: Histogram<u64>, elapsed: Duration, used: &ProcessUsage) -> ConnectionSample {
        ConnectionSample {
            seconds: elapsed.as_secs_f64(),
            server_cpu_seconds: cpu_seconds(used, "osd"),
            client_cpu_seconds: cpu_seconds(used, "client"),
            latency,
        }
    }
}
