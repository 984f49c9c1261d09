//! `outboard-layers rpc`: measures the messenger between two processes of this machine, compared
//! with other programs over the same network.

mod bare;
mod client;
mod figures;
mod peer;
mod pingpong;
mod reference;
mod serve;

use std::time::Duration;

use base::thread::{self, ThreadClass};
use clap::{Args, ValueEnum};
use messenger::{PathName, StackChoice};
use serde::{Deserialize, Serialize};

use crate::output;
use figures::{Contender, RpcReport, RpcSample};
use node::failure::{Doing, Failure, Result};
use node::units::ByteSize;

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RpcMode {
    /// Send messages and receive replies
    Echo,
    /// Send messages in one direction
    OneWay,
    /// The server reads memory that the client offers
    BulkRead,
    /// The server writes memory that the client offers
    BulkWrite,
}

/// Measure messages and bulk transfers between two processes, compared with programs without the
/// messenger
///
/// Starts a second process of this program and needs no node. The messenger and the other
/// contenders run in turns for the same time, and the output shows medians of the rounds.
/// "spinning" is the messenger with adaptive polling, and "sleeping" is the messenger without it.
///
/// For an echo, the other contender is a minimal TCP echo over epoll (stack tcp), or fi_pingpong if
/// it is installed (stacks ofi). For bulk reads over stacks ofi, the other contender is a loop of
/// fi_read with the same number of reads in flight, which polls all the time or sleeps. Only the
/// messenger verifies checksums.
///
/// CPU is the sum over both processes. "wakes" is the number of times that a sleeping thread was
/// woken. An echo counts as two messages. "copies" is the number of bytes that the messenger itself
/// copies in user space per byte of payload, counted in both processes; copies of libfabric's
/// provider and of the kernel are not included. Over sockets, a note states what the kernel copies.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard-layers rpc --stack tcp --size 4KiB --in-flight 1 --seconds 2\n  \
    outboard-layers rpc --stack ofi:tcp --size 1MiB --in-flight 8 --mode bulk-read --json\n  \
    outboard-layers rpc --stack ofi:verbs --address 192.0.2.1")]
pub struct RpcArgs {
    /// The network stack: tcp, ofi:tcp, ofi:verbs, …
    #[arg(long, default_value = "tcp", value_name = "STACK")]
    pub stack: StackChoice,
    /// Operation to measure
    #[arg(long, value_enum, default_value = "echo")]
    pub mode: RpcMode,
    /// Size of each payload
    #[arg(long, default_value = "4KiB", value_name = "S")]
    pub size: ByteSize,
    /// Messages or transfers in flight
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub in_flight: u32,
    /// Seconds that each contender runs in each round
    #[arg(long, default_value_t = 2, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Number of rounds; the output shows medians
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Number of additional idle connections; with them, the messenger is also measured without
    /// them
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4000))]
    pub idle: u32,
    /// Local address to listen at
    #[arg(long, default_value = "127.0.0.1", value_name = "IP")]
    pub address: std::net::IpAddr,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Run as the second process
    #[arg(long, hide = true)]
    pub peer: Option<String>,
}

impl RpcArgs {
    /// Returns libfabric's provider, if the stack uses libfabric.
    fn provider(&self) -> Option<&str> {
        match &self.stack {
            StackChoice::Paths(paths) => paths.first().map(|PathName { provider, .. }| provider.as_str()),
            StackChoice::Auto => None,
        }
    }

    /// Returns whether the data passes through the kernel's sockets.
    fn uses_sockets(&self) -> bool {
        matches!(self.provider(), None | Some("tcp"))
    }

    fn duration(&self) -> Duration {
        Duration::from_secs(u64::from(self.seconds))
    }
}

/// Duration of adaptive polling in measurements that use it.
const SPIN: Duration = Duration::from_micros(50);

/// Runs the command.
pub fn run(args: RpcArgs) -> Result<()> {
    if let Some(job) = &args.peer {
        return serve::run(job);
    }
    if args.stack == StackChoice::Auto {
        return Err(Failure::usage(
            "measuring the messenger",
            "the stack auto cannot be measured; name a stack, e.g. --stack ofi:verbs",
        ));
    }
    let is_message = matches!(args.mode, RpcMode::Echo | RpcMode::OneWay);
    let most = if is_message { ByteSize(256 << 10) } else { ByteSize(64 << 20) };
    if args.size.0 == 0 || args.size > most {
        return Err(Failure::usage(
            "measuring the messenger",
            format!("--size must be from 1 byte to {most} in this mode"),
        ));
    }
    let contenders = contenders(&args);
    let mut samples: Vec<Vec<RpcSample>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..args.rounds as usize {
        for i in 0..contenders.len() {
            // Each round begins with another contender.
            let at = (round + i) % contenders.len();
            match run_one(&contenders[at], &args)? {
                Some(sample) => samples[at].push(sample),
                None if round == 0 => {
                    output::note(format!(
                        "{} is not measured, because it is not installed",
                        contenders[at].name()
                    ));
                }
                None => {}
            }
        }
    }
    let report = RpcReport::new(&args, &contenders, &samples);
    if args.json {
        output::json(&report);
    } else {
        output::raw(&report);
    }
    Ok(())
}

/// Returns the contenders for the requested mode and stack: the messenger in one or several
/// variants, and reference programs.
fn contenders(args: &RpcArgs) -> Vec<Contender> {
    let mut contenders = Vec::new();
    let is_ofi = args.provider().is_some();
    if is_ofi {
        contenders.push(Contender::Messenger { spin: true, alone: false });
    }
    contenders.push(Contender::Messenger { spin: false, alone: false });
    if args.idle > 0 {
        let others = contenders.iter().filter_map(|c| match *c {
            Contender::Messenger { spin, .. } => Some(Contender::Messenger { spin, alone: true }),
            _ => None,
        });
        let others: Vec<Contender> = others.collect();
        contenders.extend(others);
    }
    match (args.mode, is_ofi) {
        (RpcMode::Echo, true) => contenders.push(Contender::Pingpong),
        (RpcMode::Echo, false) => contenders.push(Contender::BareEcho),
        (RpcMode::BulkRead, true) => {
            contenders.extend([true, false].map(|spin| Contender::BareReads { spin }));
        }
        _ => {}
    }
    contenders
}

/// Runs one measurement on a new thread. Returns `None` if the contender is not available.
fn run_one(contender: &Contender, args: &RpcArgs) -> Result<Option<RpcSample>> {
    let (contender, args) = (*contender, args.clone());
    let work = move || match contender {
        Contender::Messenger { spin, alone } => {
            let idle = if alone { 0 } else { args.idle };
            client::measure(&RpcArgs { idle, ..args }, spin).map(Some)
        }
        Contender::Pingpong => pingpong::measure(&args),
        Contender::BareEcho => reference::echo(&args).map(Some),
        Contender::BareReads { spin } => bare::reads(&args, spin).map(Some),
    };
    let thread = thread::spawn(ThreadClass::Messenger, "bench", work).doing("starting a measurement")?;
    thread.join().unwrap_or_else(|_| {
        Err(Failure::new("measuring the messenger", "the thread panicked; this is a bug"))
    })
}
