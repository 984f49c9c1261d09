//! The results of `connections` and their output.

use std::fmt;

use serde::Serialize;

use super::{ConnectionContender, ConnectionSample, ConnectionShape};

/// The result of the command.
#[derive(Serialize)]
pub struct ConnectionFigures {
    cases: Vec<CaseFigures>,
    ratios: Vec<ShapeRatio>,
}

/// The medians of the rounds of one contender with one shape.
#[derive(Serialize)]
struct CaseFigures {
    contender: ConnectionContender,
    shape: ConnectionShape,
    operations_per_second: f64,
    server_us_per_operation: f64,
    client_us_per_operation: f64,
    p50_us: f64,
    p99_us: f64,
}

/// The ratios of many connections to one connection: medians of the rounds' ratios.
#[derive(Serialize)]
struct ShapeRatio {
    contender: ConnectionContender,
    server: f64,
    client: f64,
    p99: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

impl ConnectionSample {
    fn operations(&self) -> f64 {
        self.latency.len() as f64
    }

    fn server_us(&self) -> f64 {
        self.server_cpu_seconds * 1e6 / self.operations()
    }

    fn client_us(&self) -> f64 {
        self.client_cpu_seconds * 1e6 / self.operations()
    }

    fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1e3
    }
}

impl ConnectionFigures {
    /// Computes the results. The cases of each contender are one connection, then many connections.
    pub fn new(
        cases: &[(ConnectionContender, ConnectionShape)],
        samples: &[Vec<ConnectionSample>],
    ) -> ConnectionFigures {
        let figures = |at: usize| {
            let of =
                |figure: &dyn Fn(&ConnectionSample) -> f64| median(samples[at].iter().map(figure).collect());
            CaseFigures {
                contender: cases[at].0,
                shape: cases[at].1,
                operations_per_second: of(&|s| s.operations() / s.seconds),
                server_us_per_operation: of(&ConnectionSample::server_us),
                client_us_per_operation: of(&ConnectionSample::client_us),
                p50_us: of(&|s| s.quantile_us(0.5)),
                p99_us: of(&|s| s.quantile_us(0.99)),
            }
        };
        let ratio = |one: usize| {
            let rounds = samples[one].iter().zip(&samples[one + 1]);
            let of = |figure: &dyn Fn(&ConnectionSample) -> f64| {
                median(rounds.clone().map(|(one, many)| figure(many) / figure(one)).collect())
            };
            ShapeRatio {
                contender: cases[one].0,
                server: of(&ConnectionSample::server_us),
                client: of(&ConnectionSample::client_us),
                p99: of(&|s| s.quantile_us(0.99)),
            }
        };
        ConnectionFigures {
            cases: (0..cases.len()).map(figures).collect(),
            ratios: (0..cases.len()).step_by(2).map(ratio).collect(),
        }
    }
}

impl fmt::Display for ConnectionContender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ConnectionContender::Osd => "osd",
            ConnectionContender::Messenger => "messenger",
            ConnectionContender::BareEpoll => "bare epoll",
        })
    }
}

impl fmt::Display for ConnectionFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "contender   connections      ops/s  server us/op  client us/op   p50 us   p99 us")?;
        for case in &self.cases {
            let shape = format!("{} x {}", case.shape.connections, case.shape.in_flight);
            writeln!(
                f,
                "{:<11} {shape:>11} {:>10.0} {:>13.2} {:>13.2} {:>8.0} {:>8.0}",
                case.contender,
                case.operations_per_second,
                case.server_us_per_operation,
                case.client_us_per_operation,
                case.p50_us,
                case.p99_us
            )?;
        }
        for ratio in &self.ratios {
            writeln!(
                f,
                "{}: many connections cost {:.2} x the server's CPU, {:.2} x the client's CPU; p99 {:.2} x",
                ratio.contender, ratio.server, ratio.client, ratio.p99
            )?;
        }
        Ok(())
    }
}
