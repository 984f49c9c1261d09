//! `outboard debug`: injects faults, and switches mechanisms of the channel off.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::fault::{Fault, Site};
use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use serde::Serialize;
use wire::Placement;

use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::config::ChannelSection;
use node::debug::{self, ArmedFault, ChannelTuning, DebugAnswer, DebugRequest};
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::state::{NodeState, Role};
use node::units::ByteSize;

/// Maximum time to wait for a role that restarts.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two attempts to reach a role that restarts.
const PAUSE: Duration = Duration::from_millis(100);

/// The debugging commands.
#[derive(Debug, Clone, Subcommand)]
pub enum DebugCommand {
    /// Arm a fault in a running node
    #[command(long_about = fault_help())]
    #[command(after_help = "Examples:\n  \
        outboard debug fault dma.transfer=fail,after=100,count=1\n  \
        outboard debug fault dma.transfer=stall,late=500ms,probability=0.01\n  \
        outboard debug fault store.call=kill,after=5000,count=1")]
    Fault {
        /// The fault to arm
        #[arg(value_name = "FAULT")]
        fault: Fault,
    },
    /// List the armed faults, and how often each has fired
    Faults {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Disarm all faults
    Clear,
    Tune(TuneArgs),
}

/// The help of `debug fault`, with all sites.
fn fault_help() -> String {
    let site = |site: &Site| {
        let condition = site.condition().map(|condition| format!("; {condition}")).unwrap_or_default();
        format!("{} ({}{condition})", site.name(), site.actions().join(", "))
    };
    let sites = Site::ALL.iter().map(site).collect::<Vec<_>>().join(", ");
    format!(
        "Arm a fault in a running node\n\n\
         FAULT is SITE=ACTION[,after=N][,count=N][,probability=P][,late=TIMEms][,seed=N]. The sites \
         and their actions are: {sites}. The fault skips the first N occasions (after). Then it fires \
         with the given probability (default: always), at most N times (count; default: no limit). A \
         restart of the role disarms the fault. No armed fault makes the node lose an acknowledged \
         change."
    )
}

/// Switch mechanisms of the host-DPU channel off, to measure their benefit
///
/// Changes how the osd of a node in dpu placement uses the channel. A mechanism without an option
/// in the command works as configured, so the command without options undoes earlier changes. A
/// restart of the osd also undoes earlier changes. The command prints the resulting settings.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard debug tune --no-pipeline\n  \
    outboard bench write --pool p --object-size 8MiB\n  \
    outboard debug tune")]
pub struct TuneArgs {
    /// Receive, move and write the segments of a request one after the other
    #[arg(long)]
    no_pipeline: bool,
    /// Negotiate and register host memory for every request
    #[arg(long)]
    no_region_cache: bool,
    /// Maximum length of a DMA transfer, 4KiB to 2MiB; the engine's own limit also applies
    #[arg(long, value_name = "S")]
    max_transfer: Option<ByteSize>,
    /// Number of queues of the DMA engine, 1 to 64; with 1, short requests wait for long requests
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(ChannelSection::QUEUES))]
    dma_queues: Option<usize>,
    /// How long the DPU's side polls for completions before it sleeps, in microseconds, 0 to 10000
    #[arg(long, value_name = "US", value_parser = RangedU64ValueParser::<u64>::new().range(ChannelSection::POLL_US))]
    poll: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TuneArgs {
    /// Returns the configured tuning with the changes that the options name.
    fn applied_to(&self, configured: ChannelTuning) -> ChannelTuning {
        ChannelTuning {
            pipeline: configured.pipeline && !self.no_pipeline,
            region_cache: if self.no_region_cache { 0 } else { configured.region_cache },
            max_transfer: self.max_transfer.unwrap_or(configured.max_transfer),
            dma_queues: self.dma_queues.unwrap_or(configured.dma_queues),
            poll_us: self.poll.unwrap_or(configured.poll_us),
        }
    }
}

/// An armed fault, and the role in which it is armed.
#[derive(Debug, Serialize)]
struct FaultRow {
    role: &'static str,
    #[serde(flatten)]
    armed: ArmedFault,
}

/// Runs the command.
pub fn run(command: DebugCommand, node: &NodeArgs) -> Result<()> {
    match command {
        DebugCommand::Fault { fault } => {
            let role = match fault.site {
                Site::StoreDoorbell | Site::StoreDevice | Site::StoreCall => Role::Store,
                Site::DriveWrite => roles(node)?[0],
                // In host placement, these sites are in the process of the node.
                Site::EcOffload | Site::MessengerPath => *roles(node)?.last().unwrap_or(&Role::Osd),
                Site::DmaTransfer | Site::DmaDoorbell | Site::DmaDevice | Site::OsdReply => Role::Osd,
            };
            ask(role, node, &DebugRequest::Arm(fault.to_string())).map(drop)
        }
        DebugCommand::Clear => {
            for &role in roles(node)? {
                ask(role, node, &DebugRequest::Clear)?;
            }
            Ok(())
        }
        DebugCommand::Faults { json } => {
            let mut rows = Vec::new();
            for &role in roles(node)? {
                let armed = ask(role, node, &DebugRequest::Show)?.faults;
                rows.extend(armed.into_iter().map(|armed| FaultRow { role: role.as_str(), armed }));
            }
            if json {
                output::json(&rows);
            } else {
                for FaultRow { role, armed } in rows {
                    output::raw(format!("{role:<6} {:<50} fired {}\n", armed.fault, armed.fired));
                }
            }
            Ok(())
        }
        DebugCommand::Tune(args) => tune(&args, node),
    }
}

/// Tunes the channel and prints the tuning.
fn tune(args: &TuneArgs, node: &NodeArgs) -> Result<()> {
    let doing = "tuning the channel";
    if let Some(size) = args.max_transfer {
        let (range, unit) = (ChannelSection::MAX_TRANSFER, ChannelSection::MAX_TRANSFER_UNIT);
        if !range.contains(&size.0) || !size.0.is_multiple_of(unit.0) {
            let (least, most) = (ByteSize(*range.start()), ByteSize(*range.end()));
            let why = format!("--max-transfer must be {least} to {most}, a multiple of {unit}");
            return Err(Failure::usage(doing, why));
        }
    }
    let configured = |answer: DebugAnswer| {
        let why = "the osd uses no channel; start the node with placement dpu";
        answer.configured.ok_or_else(|| Failure::new(doing, why))
    };
    let wanted = args.applied_to(configured(ask(Role::Osd, node, &DebugRequest::Show)?)?);
    ask(Role::Osd, node, &DebugRequest::Tune(wanted))?;
    if args.json {
        output::json(&wanted);
    } else {
        let ChannelTuning { pipeline, region_cache, max_transfer, dma_queues, poll_us } = wanted;
        output::line(format_args!("pipeline      {}", if pipeline { "on" } else { "off" }));
        output::line(format_args!("region cache  {region_cache} windows"));
        output::line(format_args!("max transfer  {max_transfer}"));
        output::line(format_args!("DMA queues    {dma_queues}"));
        output::line(format_args!("polling       {poll_us} µs"));
    }
    Ok(())
}

/// Returns the roles of the node; the role that owns the drives is first.
fn roles(node: &NodeArgs) -> Result<&'static [Role]> {
    let dir = NodeDir::open(&locate::root(node)).doing("looking for the node")?;
    let is_host = NodeState::load(&dir).is_some_and(|state| state.placement == Placement::Host);
    Ok(if is_host { &[Role::Node] } else { &[Role::Store, Role::Osd] })
}

/// Returns the path of a role's debug socket.
fn socket(role: Role, node: &NodeArgs) -> Result<PathBuf> {
    let dir = NodeDir::open(&locate::root(node)).doing("looking for the node")?;
    Ok(dir.debug_socket(role.as_str()))
}

/// Sends a request to a role's debug socket. While the node is up, this function waits for a role
/// that restarts.
fn ask_patiently(path: &Path, node: &NodeArgs, request: &DebugRequest) -> std::io::Result<DebugAnswer> {
    let began = Instant::now();
    loop {
        let error = match debug::ask(path, request) {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        // Only these errors can mean that the role restarts. A socket that does not exist belongs
        // to a role that this node does not have.
        let restarts = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof
        );
        if !restarts || locate::endpoint(node).is_err() || began.elapsed() > PATIENCE {
            return Err(error);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Sends a request to a role of the node. A refusal is an error.
pub fn ask(role: Role, node: &NodeArgs, request: &DebugRequest) -> Result<DebugAnswer> {
    let doing = format!("sending a debug request to the {}", role.as_str());
    let path = socket(role, node)?;
    let answer = ask_patiently(&path, node, request).map_err(|e| {
        let why = format!("{e} ({}); is the node up, with placement dpu?", path.display());
        Failure::new(doing.clone(), why)
    })?;
    match answer.error {
        Some(why) => Err(Failure::new(doing, why)),
        None => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_debug_fault_names_all_sites_and_their_actions() {
        let mut debug = DebugCommand::augment_subcommands(clap::Command::new("debug"));
        let fault = debug.find_subcommand_mut("fault").unwrap();
        let help = fault.render_long_help().to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        for site in Site::ALL {
            let named = format!("{} ({}", site.name(), site.actions().join(", "));
            assert!(help.contains(&named), "{named} is missing: {help}");
        }
        assert!(help.starts_with("Arm a fault in a running node FAULT is SITE=ACTION"), "{help}");
        let about = debug.find_subcommand("fault").unwrap().get_about().unwrap().to_string();
        assert_eq!(about, "Arm a fault in a running node");
    }
}
