//! Ablation: measures the benefit of a mechanism of the channel by switching it off.

use std::path::{Path, PathBuf};

use base::thread::{self, ThreadClass};
use clap::Args;
use tokio::sync::oneshot;

use crate::args::NodeArgs;
use crate::commands::debug::socket;
use crate::output;
use node::debug::{ChannelTuning, DebugRequest, ask};
use node::failure::{Doing, Failure, Result};
use node::role::StopSignals;
use node::state::Role;
use node::units::ByteSize;

/// Exit status of an interrupted program.
const INTERRUPTED: i32 = 130;

/// Mechanisms of the channel to change during the measurement. Their settings are restored
/// afterwards.
#[derive(Debug, Clone, Copy, Args)]
#[command(
    next_help_heading = "Without a mechanism of the host-DPU channel (dpu placement, a node of this machine)"
)]
pub struct Ablations {
    /// Receive, move and write the segments of a request one after the other
    #[arg(long)]
    pub no_pipeline: bool,
    /// Negotiate and register host memory for every request
    #[arg(long)]
    pub no_region_cache: bool,
    /// Longest DMA transfer: 4KiB to 2MiB, at most the engine's
    #[arg(long, value_name = "S")]
    pub max_transfer: Option<ByteSize>,
    /// Number of queues of the DMA engine; with 1, short requests wait for long requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub dma_queues: Option<u16>,
    /// How long the DPU's side polls for completions before it sleeps, in microseconds
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub poll: Option<u64>,
}

impl Ablations {
    fn of(&self, before: ChannelTuning) -> ChannelTuning {
        ChannelTuning {
            pipeline: before.pipeline && !self.no_pipeline,
            region_cache: if self.no_region_cache { 0 } else { before.region_cache },
            max_transfer: self.max_transfer.unwrap_or(before.max_transfer),
            dma_queues: self.dma_queues.map_or(before.dma_queues, usize::from),
            poll_us: self.poll.unwrap_or(before.poll_us),
        }
    }

    /// Tunes the osd if any option is set. Dropping the result restores the previous tuning.
    pub fn apply(&self, node: &NodeArgs) -> Result<Option<Ablated>> {
        let Ablations { no_pipeline, no_region_cache, max_transfer, dma_queues, poll } = self;
        if !no_pipeline
            && !no_region_cache
            && max_transfer.is_none()
            && dma_queues.is_none()
            && poll.is_none()
        {
            return Ok(None);
        }
        if max_transfer.is_some_and(|most| most.0 < 4096 || !most.0.is_multiple_of(4096)) {
            let why = "--max-transfer must be a multiple of 4KiB";
            return Err(Failure::usage("tuning the channel", why));
        }
        let path = socket(Role::Osd, node)?;
        let before = exchange(&path, &DebugRequest::Show)?;
        let during = self.of(before);
        let watch = restore_when_interrupted(path.clone(), before)?;
        exchange(&path, &DebugRequest::Tune(during))?;
        Ok(Some(Ablated { during, path, before, _watch: watch }))
    }
}

fn exchange(path: &Path, request: &DebugRequest) -> Result<ChannelTuning> {
    let doing = "tuning the channel";
    let answer = ask(path, request).map_err(|e| {
        Failure::new(doing, format!("{e} ({}); the node must be up, with placement dpu", path.display()))
    })?;
    match (answer.error, answer.tuning) {
        (None, Some(tuning)) => Ok(tuning),
        (error, _) => Err(Failure::new(doing, error.unwrap_or_else(|| "the osd has no channel".to_owned()))),
    }
}

/// A tuned channel. The previous tuning is restored when this is dropped or when a signal ends the
/// program.
#[derive(Debug)]
pub struct Ablated {
    /// The tuning during the measurement.
    pub during: ChannelTuning,
    path: PathBuf,
    before: ChannelTuning,
    /// Dropping this sender ends the thread that waits for signals.
    _watch: oneshot::Sender<()>,
}

impl Drop for Ablated {
    fn drop(&mut self) {
        restore(&self.path, self.before);
    }
}

fn restore(path: &Path, before: ChannelTuning) {
    if let Err(failure) = exchange(path, &DebugRequest::Tune(before)) {
        output::note(format!("the channel stays as it was measured until the osd restarts: {failure}"));
    }
}

/// Makes a signal that ends the program restore the channel first, until the result is dropped.
fn restore_when_interrupted(path: PathBuf, before: ChannelTuning) -> Result<oneshot::Sender<()>> {
    let doing = "preparing for signals";
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(doing)?;
    let mut signals = {
        let _context = runtime.enter();
        StopSignals::catch()?
    };
    let (watch, mut ended) = oneshot::channel();
    let body = move || {
        let interrupted = runtime.block_on(async {
            tokio::select! {
                _ = &mut ended => false,
                () = signals.next() => true,
            }
        });
        if interrupted {
            restore(&path, before);
            std::process::exit(INTERRUPTED);
        }
    };
    thread::spawn(ThreadClass::Admin, "signals", body).doing(doing)?;
    Ok(watch)
}
