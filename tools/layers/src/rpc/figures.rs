//! The results of `rpc` and their output.

use std::fmt;
use std::time::Duration;

use base::process::Usage;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::{RpcArgs, RpcMode};

/// A program, or a variant of the messenger, that `rpc` measures and compares with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// The messenger, with or without adaptive polling, alone or together with idle connections.
    Messenger { spin: bool, alone: bool },
    /// fi_pingpong of libfabric.
    Pingpong,
    /// A minimal TCP echo over epoll.
    BareEcho,
    /// A minimal loop of `fi_read`, which polls all the time or sleeps while it is idle.
    BareReads { spin: bool },
}

impl Contender {
    /// Returns the name for output.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Messenger { spin: true, alone: false } => "messenger, spinning",
            Contender::Messenger { spin: false, alone: false } => "messenger, sleeping",
            Contender::Messenger { spin: true, alone: true } => "spinning, alone",
            Contender::Messenger { spin: false, alone: true } => "sleeping, alone",
            Contender::Pingpong => "fi_pingpong",
            Contender::BareEcho => "bare epoll echo",
            Contender::BareReads { spin: true } => "bare fi_read, spin",
            Contender::BareReads { spin: false } => "bare fi_read, sleep",
        }
    }

    fn is_reference(self) -> bool {
        !matches!(self, Contender::Messenger { .. })
    }
}

/// The result of one run.
#[derive(Debug, Clone)]
pub struct RpcSample {
    /// Number of completed echoes, messages or transfers.
    pub operations: u64,
    pub elapsed: Duration,
    /// Latency in ns; empty if single latencies are unknown.
    pub latency: Histogram<u64>,
    /// Mean latency in ns, if only the mean is known.
    pub mean_ns: Option<f64>,
    /// CPU use of both processes; `None` if it is unknown.
    pub usage: Option<Usage>,
    /// Bytes that the messenger copied in user space, in both processes. `None` for the reference
    /// programs.
    pub copied_bytes: Option<u64>,
    /// Cost of the idle connections.
    pub idle: Option<IdleCost>,
}

/// Cost of idle connections.
#[derive(Debug, Clone, Copy)]
pub struct IdleCost {
    /// Growth of resident memory until the end of the run, in bytes: client's process, server's
    /// process.
    pub bytes: (u64, u64),
    /// CPU use of both processes without any requests, as a share of one core.
    pub core: f64,
}

/// The displayed results of a contender: medians of its rounds.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    pub name: &'static str,
    pub operations_per_second: f64,
    pub mb_per_s: f64,
    pub p50_us: f64,
    pub p99_us: Option<f64>,
    pub p999_us: Option<f64>,
    pub cpu_us_per_message: Option<f64>,
    pub cpu_us_per_mib: Option<f64>,
    pub context_switches_per_message: Option<f64>,
    pub wake_ups_per_message: Option<f64>,
    pub copies_per_byte: Option<f64>,
    pub idle_client_mib: Option<f64>,
    pub idle_server_mib: Option<f64>,
    pub idle_core_percent: Option<f64>,
}

/// What the kernel copies if the data passes through sockets. This is a property of sockets, not a
/// measurement.
const KERNEL_COPIES: &str = "only those of the messenger in user space; the kernel copies each byte into the sender's socket and out of the receiver's socket";

/// The result of the command.
#[derive(Debug, Clone, Serialize)]
pub struct RpcReport {
    pub stack: String,
    pub mode: RpcMode,
    pub size_bytes: u64,
    pub in_flight: u32,
    pub seconds: u32,
    pub rounds: u32,
    pub idle_connections: u32,
    /// Copies of the kernel, which `copies_per_byte` does not include.
    pub kernel_copies: Option<&'static str>,
    pub contenders: Vec<Figures>,
    /// Ratios of the messenger to the fastest reference program, and to the messenger without idle
    /// connections.
    pub ratios: Vec<Ratio>,
}

/// The ratios of the contender `of` to the contender `to`: medians of the rounds' ratios.
#[derive(Debug, Clone, Serialize)]
pub struct Ratio {
    pub of: &'static str,
    pub to: &'static str,
    pub latency: f64,
    pub throughput: f64,
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

impl RpcSample {
    /// Creates the result of a reference run without the messenger.
    pub fn of_reference(latency: Histogram<u64>, elapsed: Duration, usage: Usage) -> RpcSample {
        let usage = Some(usage);
        RpcSample {
            operations: latency.len(),
            elapsed,
            latency,
            mean_ns: None,
            usage,
            copied_bytes: None,
            idle: None,
        }
    }

    fn p50_us(&self) -> f64 {
        self.mean_ns.unwrap_or_else(|| self.latency.value_at_quantile(0.5) as f64) / 1e3
    }

    fn per_second(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64()
    }
}

impl Figures {
    /// Computes the results of a contender. Returns `None` if it has no samples. An echo counts as
    /// two messages.
    fn new(contender: Contender, samples: &[RpcSample], args: &RpcArgs) -> Option<Figures> {
        let messages = if args.mode == RpcMode::Echo { 2.0 } else { 1.0 };
        let of =
            |figure: &dyn Fn(&RpcSample) -> Option<f64>| median(samples.iter().filter_map(figure).collect());
        let quantile = |q| {
            of(&|s: &RpcSample| (!s.latency.is_empty()).then(|| s.latency.value_at_quantile(q) as f64 / 1e3))
        };
        let usage = |figure: fn(&Usage) -> f64| {
            of(&|s: &RpcSample| Some(figure(s.usage.as_ref()?) / (s.operations as f64 * messages)))
        };
        let payload = |s: &RpcSample| s.operations as f64 * messages * args.size.0 as f64;
        let per_second = of(&|s| Some(s.per_second()))?;
        Some(Figures {
            name: contender.name(),
            operations_per_second: per_second,
            mb_per_s: per_second * args.size.0 as f64 / 1e6,
            p50_us: of(&|s| Some(s.p50_us()))?,
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            cpu_us_per_message: usage(|u| u.cpu_seconds() * 1e6),
            cpu_us_per_mib: of(&|s| {
                Some(s.usage.as_ref()?.cpu_seconds() * 1e6 / (payload(s) / f64::from(1 << 20)))
            }),
            context_switches_per_message: usage(|u| u.context_switches as f64),
            wake_ups_per_message: usage(|u| u.wake_ups as f64),
            copies_per_byte: of(&|s| Some(s.copied_bytes? as f64 / payload(s))),
            idle_client_mib: of(&|s| Some(s.idle?.bytes.0 as f64 / f64::from(1 << 20))),
            idle_server_mib: of(&|s| Some(s.idle?.bytes.1 as f64 / f64::from(1 << 20))),
            idle_core_percent: of(&|s| Some(s.idle?.core * 100.0)),
        })
    }
}

impl RpcReport {
    pub fn new(args: &RpcArgs, contenders: &[Contender], samples: &[Vec<RpcSample>]) -> RpcReport {
        let figures = contenders.iter().zip(samples).filter_map(|(c, s)| Figures::new(*c, s, args));
        let ratio = |of: usize, to: usize| {
            let median_of = |figure: fn(&RpcSample) -> f64| {
                let rounds = samples[of].iter().zip(&samples[to]);
                median(rounds.map(|(ours, theirs)| figure(ours) / figure(theirs)).collect())
            };
            let (latency, throughput) = (median_of(RpcSample::p50_us)?, median_of(RpcSample::per_second)?);
            Some(Ratio { of: contenders[of].name(), to: contenders[to].name(), latency, throughput })
        };
        let speed =
            |at: usize| median(samples[at].iter().map(RpcSample::per_second).collect()).unwrap_or(0.0);
        let references = (0..contenders.len()).filter(|at| contenders[*at].is_reference());
        let best = references.max_by(|a, b| speed(*a).total_cmp(&speed(*b)));
        let mut ratios: Vec<Ratio> = best.and_then(|best| ratio(0, best)).into_iter().collect();
        for (at, contender) in contenders.iter().enumerate() {
            if let Contender::Messenger { spin, alone: false } = *contender {
                let alone = Contender::Messenger { spin, alone: true };
                let alone = contenders.iter().position(|c| *c == alone);
                ratios.extend(alone.and_then(|alone| ratio(at, alone)));
            }
        }
        RpcReport {
            stack: args.stack.to_string(),
            mode: args.mode,
            size_bytes: args.size.0,
            in_flight: args.in_flight,
            seconds: args.seconds,
            rounds: args.rounds,
            idle_connections: args.idle,
            kernel_copies: args.uses_sockets().then_some(KERNEL_COPIES),
            contenders: figures.collect(),
            ratios,
        }
    }
}

impl fmt::Display for RpcReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opt = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let mode = match self.mode {
            RpcMode::Echo => "echo",
            RpcMode::OneWay => "one way",
            RpcMode::BulkRead => "bulk read",
            RpcMode::BulkWrite => "bulk write",
        };
        writeln!(
            f,
            "{mode} over {}, {} bytes, {} in flight; medians of {} rounds of {} s",
            self.stack, self.size_bytes, self.in_flight, self.rounds, self.seconds
        )?;
        writeln!(
            f,
            "{:<20} {:>10} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
            "",
            "ops/s",
            "MB/s",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "CPU/msg",
            "CPU/MiB",
            "switches",
            "wakes",
            "copies"
        )?;
        for c in &self.contenders {
            writeln!(
                f,
                "{:<20} {:>10.0} {:>8.0} {:>9.1} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
                c.name,
                c.operations_per_second,
                c.mb_per_s,
                c.p50_us,
                opt(c.p99_us, 1),
                opt(c.p999_us, 1),
                opt(c.cpu_us_per_message, 2),
                opt(c.cpu_us_per_mib, 0),
                opt(c.context_switches_per_message, 2),
                opt(c.wake_ups_per_message, 2),
                opt(c.copies_per_byte, 3),
            )?;
        }
        if let Some(note) = self.kernel_copies {
            writeln!(f, "copies: {note}")?;
        }
        for Ratio { of, to, latency, throughput } in &self.ratios {
            writeln!(f, "{of} / {to}: latency {latency:.2}, throughput {throughput:.2}")?;
        }
        for c in &self.contenders {
            if let (Some(client), Some(server), Some(core)) =
                (c.idle_client_mib, c.idle_server_mib, c.idle_core_percent)
            {
                writeln!(
                    f,
                    "{}: {} idle connections cost {client:.1} MiB in the client, {server:.1} MiB in the server; {core:.2} % of a core in both",
                    c.name, self.idle_connections
                )?;
            }
        }
        Ok(())
    }
}
