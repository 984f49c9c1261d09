//! `outboard ec mode`: shows or sets where a node computes the parity of large writes.

use clap::Args;
use wire::CodingMode;

use crate::args::NodeArgs;
use crate::commands::session;
use crate::output;
use node::failure::{Doing, Result};
use node::report::coding_line;

/// Show or set where a node computes the parity of large writes; a restart of the node resets the
/// mode
///
/// MODE is latency-sensitive (the host's processor computes all parity), async (the DPU computes
/// all parity), hybrid:A:B (of every A + B coding tasks, the host computes A and the DPU computes
/// B), or hybrid:auto (the node divides the coding tasks between host and DPU by the load and the
/// measured speed of both). While the host's processor is busy with other work, the DPU computes
/// all parity in every mode.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard ec mode\n  \
    outboard ec mode hybrid:auto\n  \
    outboard ec mode hybrid:3:1 --json")]
pub struct ModeArgs {
    /// The new mode [default: no change]
    #[arg(value_name = "MODE")]
    pub mode: Option<CodingMode>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: ModeArgs, node: &NodeArgs) -> Result<()> {
    let coding = session::administer(node, async move |client| {
        if let Some(mode) = args.mode {
            client.set_coding_mode(mode).await.doing("changing the coding mode")?;
        }
        Ok(client.status().await.doing("querying where parity is computed")?.coding)
    })?;
    if args.json {
        output::json(&coding);
    } else {
        output::line(coding_line(&coding));
    }
    Ok(())
}
