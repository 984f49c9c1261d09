//! What a mechanism of the channel is worth: measuring without it.

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

/// Exit status of a program that was interrupted.
const INTERRUPTED: i32 = 130;

/// Mechanisms of the channel that are changed while it is measured, and put back afterwards.
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
    /// Queues of the DMA engine; 1 has short requests wait for long ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub dma_queues: Option<u16>,
    /// How long the DPU's side looks for completions before it sleeps, in microseconds
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

    /// Tunes the osd, if anything is asked for. What was before comes back when the result is dropped.
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

/// A channel that is tuned; put back when this is dropped, or when the program is told to end before.
#[derive(Debug)]
pub struct Ablated {
    /// How it is now.
    pub during: ChannelTuning,
    path: PathBuf,
    before: ChannelTuning,
    /// Ends the thread that waits for signals.
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

/// From here on a signal that ends the program first has the channel put back, until the result is dropped.
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
