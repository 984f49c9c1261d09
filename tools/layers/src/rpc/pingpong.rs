//! Runs libfabric's program fi_pingpong as a reference.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::RpcArgs;
use super::figures::RpcSample;
use node::failure::{Doing, Failure, Result};

/// Minimum number of round trips in one run. fi_pingpong accepts a number of round trips, but no
/// duration.
const ITERATIONS_MIN: u64 = 1000;

/// Runs one measurement. Returns `None` if fi_pingpong is not installed, if the stack does not use
/// libfabric, or if more than one message is in flight, because fi_pingpong has only one in flight.
pub fn measure(args: &RpcArgs) -> Result<Option<RpcSample>> {
    let Some(provider) = args.provider().filter(|_| args.in_flight == 1) else { return Ok(None) };
    if Command::new("fi_pingpong").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return Ok(None);
    }
    // From a short run, estimate the number of round trips that take as long as the runs of the
    // other contenders.
    let short = run(args, provider, ITERATIONS_MIN)?;
    let count = (args.duration().as_secs_f64() * 1e9 / short) as u64;
    let mean_ns = run(args, provider, count.max(ITERATIONS_MIN))?;
    Ok(Some(RpcSample {
        operations: (args.duration().as_secs_f64() * 1e9 / mean_ns.max(1.0)) as u64,
        elapsed: args.duration(),
        latency: Histogram::new(3).doing("creating a histogram")?,
        mean_ns: Some(mean_ns),
        usage: None,
        copied_bytes: None,
        idle: None,
    }))
}

/// Returns the mean round-trip time of a message, in ns.
fn run(args: &RpcArgs, provider: &str, iterations: u64) -> Result<f64> {
    let doing = "running fi_pingpong";
    let port = free_port(args).doing(doing)?;
    let command = |address: Option<String>| {
        let mut command = Command::new("fi_pingpong");
        command.args(["-p", provider, "-e", "msg", "-I", &iterations.to_string()]);
        command.args(["-S", &args.size.0.to_string()]);
        match address {
            None => command.args(["-B", &port.to_string()]),
            Some(address) => command.args(["-P", &port.to_string(), &address]),
        };
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut server = command(None).stdout(Stdio::null()).spawn().doing(doing)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    let text = loop {
        // The server does not report when it is ready. So the client tries again until it succeeds.
        std::thread::sleep(Duration::from_millis(200));
        let output = command(Some(args.address.to_string())).output().doing(doing)?;
        if output.status.success() || Instant::now() > deadline {
            break String::from_utf8_lossy(&output.stdout).into_owned();
        }
    };
    // Ignore errors: the server ends by itself after it has served a client.
    let _ = server.kill();
    let _ = server.wait();
    // The columns are: bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec. A round trip
    // consists of two transfers.
    let fields = text.lines().last().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let per_transfer =
        fields.and_then(|fields| fields.get(fields.len().checked_sub(2)?)?.parse::<f64>().ok());
    per_transfer
        .map(|us| us * 2e3)
        .ok_or_else(|| Failure::new(doing, format!("cannot parse the output of the program: {text:?}")))
}

fn free_port(args: &RpcArgs) -> std::io::Result<u16> {
    Ok(TcpListener::bind((args.address, 0))?.local_addr()?.port())
}
