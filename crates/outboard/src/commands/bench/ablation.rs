//! What a mechanism of the channel is worth: measuring without it.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::NodeArgs;
use crate::commands::debug::socket;
use crate::failure::{Failure, Result};
use crate::node::debug::{Request, Tuning, ask};
use crate::node::state::Role;
use crate::node::units::ByteSize;
use crate::output;

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
    /// Longest DMA transfer, at most the engine's
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
    fn of(&self, before: Tuning) -> Tuning {
        Tuning {
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
        let before = exchange(&path, &Request::Show)?;
        let during = self.of(before);
        exchange(&path, &Request::Tune(during))?;
        Ok(Some(Ablated { path, before, during }))
    }
}

fn exchange(path: &Path, request: &Request) -> Result<Tuning> {
    let doing = "tuning the channel";
    let answer = ask(path, request).map_err(|e| {
        Failure::new(doing, format!("{e} ({}); the node must be up, with placement dpu", path.display()))
    })?;
    match (answer.error, answer.tuning) {
        (None, Some(tuning)) => Ok(tuning),
        (error, _) => Err(Failure::new(doing, error.unwrap_or_else(|| "the osd has no channel".to_owned()))),
    }
}

/// A channel that is tuned; put back when this is dropped.
#[derive(Debug)]
pub struct Ablated {
    path: PathBuf,
    before: Tuning,
    /// How it is now.
    pub during: Tuning,
}

impl Drop for Ablated {
    fn drop(&mut self) {
        if let Err(failure) = exchange(&self.path, &Request::Tune(self.before)) {
            output::note(format!("the channel stays as it was measured until the osd restarts: {failure}"));
        }
    }
}
