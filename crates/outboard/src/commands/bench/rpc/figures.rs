//! What came out, and how it is shown.

use std::fmt;
use std::time::Duration;

use base::process::Usage;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::{Mode, RpcArgs};

/// Who takes part in a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// The messenger, polling adaptively or not at all.
    Messenger { spin: bool },
    /// fi_pingpong of libfabric.
    Pingpong,
    /// A TCP echo by epoll.
    BareEcho,
    /// A loop of fi_read.
    BareReads,
}

impl Contender {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Messenger { spin: true } => "messenger, spinning",
            Contender::Messenger { spin: false } => "messenger, sleeping",
            Contender::Pingpong => "fi_pingpong",
            Contender::BareEcho => "bare epoll echo",
            Contender::BareReads => "bare fi_read loop",
        }
    }

    fn is_reference(self) -> bool {
        !matches!(self, Contender::Messenger { .. })
    }
}

/// One run.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Messages or transfers that ended.
    pub operations: u64,
    pub elapsed: Duration,
    /// In ns; empty where it is not told one by one.
    pub latency: Histogram<u64>,
    /// Mean latency in ns where that is all there is.
    pub mean_ns: Option<f64>,
    /// Of both processes; `None` where it is not known.
    pub usage: Option<Usage>,
    /// Bytes that the messenger copied, in both processes.
    pub copied_bytes: Option<u64>,
    /// What idle connections brought in resident memory, in bytes, over both processes.
    pub idle_bytes: Option<u64>,
}

/// What is shown of a contender.
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
    pub idle_mib: Option<f64>,
}

/// The outcome of the command.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub stack: String,
    pub mode: Mode,
    pub size_bytes: u64,
    pub in_flight: u32,
    pub seconds: u32,
    pub rounds: u32,
    pub idle_connections: u32,
    pub contenders: Vec<Figures>,
    /// The messenger's latency over the reference's, and its throughput over the reference's; medians of the rounds' ratios.
    pub latency_ratio: Option<f64>,
    pub throughput_ratio: Option<f64>,
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

impl Sample {
    fn p50_us(&self) -> f64 {
        self.mean_ns.unwrap_or_else(|| self.latency.value_at_quantile(0.5) as f64) / 1e3
    }

    fn per_second(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64()
    }
}

impl Figures {
    /// An echo is two messages.
    fn new(contender: Contender, samples: &[Sample], args: &RpcArgs) -> Option<Figures> {
        let messages = if args.mode == Mode::Echo { 2.0 } else { 1.0 };
        let of =
            |figure: &dyn Fn(&Sample) -> Option<f64>| median(samples.iter().filter_map(figure).collect());
        let quantile = |q| {
            of(&|s: &Sample| (!s.latency.is_empty()).then(|| s.latency.value_at_quantile(q) as f64 / 1e3))
        };
        let usage = |figure: fn(&Usage) -> f64| {
            of(&|s: &Sample| Some(figure(s.usage.as_ref()?) / (s.operations as f64 * messages)))
        };
        let payload = |s: &Sample| s.operations as f64 * messages * args.size.0 as f64;
        let per_second = of(&|s| Some(s.per_second()))?;
        Some(Figures {
            name: contender.name(),
            operations_per_second: per_second,
            mb_per_s: per_second * args.size.0 as f64 / 1e6,
            p50_us: of(&|s| Some(s.p50_us()))?,
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            cpu_us_per_message: usage(|u| u.cpu_seconds * 1e6),
            cpu_us_per_mib: of(&|s| {
                Some(s.usage.as_ref()?.cpu_seconds * 1e6 / (payload(s) / f64::from(1 << 20)))
            }),
            context_switches_per_message: usage(|u| u.context_switches as f64),
            wake_ups_per_message: usage(|u| u.wake_ups as f64),
            copies_per_byte: of(&|s| Some(s.copied_bytes? as f64 / payload(s))),
            idle_mib: of(&|s| Some(s.idle_bytes? as f64 / f64::from(1 << 20))),
        })
    }
}

impl Report {
    pub fn new(args: &RpcArgs, contenders: &[Contender], samples: &[Vec<Sample>]) -> Report {
        let figures = contenders.iter().zip(samples).filter_map(|(c, s)| Figures::new(*c, s, args));
        let reference = contenders.iter().position(|c| c.is_reference());
        let ratio = |of: fn(&Sample) -> f64| {
            let (ours, theirs) = (samples.first()?, &samples[reference?]);
            median(ours.iter().zip(theirs).map(|(ours, theirs)| of(ours) / of(theirs)).collect())
        };
        Report {
            stack: args.stack.to_string(),
            mode: args.mode,
            size_bytes: args.size.0,
            in_flight: args.in_flight,
            seconds: args.seconds,
            rounds: args.rounds,
            idle_connections: args.idle,
            contenders: figures.collect(),
            latency_ratio: ratio(Sample::p50_us),
            throughput_ratio: ratio(Sample::per_second),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opt = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let mode = match self.mode {
            Mode::Echo => "echo",
            Mode::OneWay => "one way",
            Mode::BulkRead => "bulk read",
            Mode::BulkWrite => "bulk write",
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
        if let (Some(latency), Some(throughput)) = (self.latency_ratio, self.throughput_ratio) {
            let (ours, theirs) = (self.contenders.first(), self.contenders.last());
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                writeln!(
                    f,
                    "{} / {}: latency {latency:.2}, throughput {throughput:.2}",
                    ours.name, theirs.name
                )?;
            }
        }
        if let Some(mib) = self.contenders.iter().find_map(|c| c.idle_mib) {
            writeln!(f, "{} idle connections: {mib:.1} MiB, both ends", self.idle_connections)?;
        }
        Ok(())
    }
}
