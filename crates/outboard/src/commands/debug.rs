//! `outboard debug`: injects faults, and switches mechanisms of the channel off.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::fault::{Armed, Fault, Site};
use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use serde::Serialize;
use wire::{AdminReply, AdminRequest, ChannelTuning, Placement, Role, TuningChange};

use super::tenant::unexpected;
use crate::args::NodeArgs;
use crate::commands::{locate, session};
use crate::output;
use node::config::ChannelSection;
use node::debug;
use node::debug_socket::{self, DebugAnswer, DebugRequest};
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::state::NodeState;
use node::units::ByteSize;

/// Maximum time to wait for a store that restarts.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two attempts to reach a store that restarts.
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
         change.\n\n\
         Faults of the osd's process are armed over the control plane, which also works from another \
         machine, with --endpoint; only an administrator of the node may do this. The store's process \
         has no control plane: its faults, at store.* and drive.write in placement dpu, are armed \
         with the directory of the node."
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
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<u64>::new().range(ChannelSection::QUEUES))]
    dma_queues: Option<u64>,
    /// How long the DPU's side polls for completions before it sleeps, in microseconds, 0 to 10000
    #[arg(long, value_name = "US", value_parser = RangedU64ValueParser::<u64>::new().range(ChannelSection::POLL_US))]
    poll: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TuneArgs {
    fn change(&self) -> TuningChange {
        TuningChange {
            pipeline: self.no_pipeline.then_some(false),
            region_cache: self.no_region_cache.then_some(0),
            max_transfer: self.max_transfer.map(|size| size.0),
            dma_queues: self.dma_queues,
            poll_us: self.poll,
        }
    }
}

/// An armed fault, and the role in which it is armed.
#[derive(Debug, Serialize)]
struct FaultRow {
    role: &'static str,
    #[serde(flatten)]
    armed: Armed,
}

/// The tuning of the channel, as `--json` shows it.
#[derive(Debug, Serialize)]
struct ShownTuning {
    pipeline: bool,
    region_cache: u64,
    max_transfer: ByteSize,
    dma_queues: u64,
    poll_us: u64,
}

/// Runs the command.
pub fn run(command: DebugCommand, node: &NodeArgs) -> Result<()> {
    match command {
        DebugCommand::Fault { fault } => arm(fault, node),
        DebugCommand::Clear => clear(node),
        DebugCommand::Faults { json } => list(json, node),
        DebugCommand::Tune(args) => tune(&args, node),
    }
}

fn arm(fault: Fault, node: &NodeArgs) -> Result<()> {
    let is_of_store = debug::role_of(fault.site, Placement::Dpu) == Some(Role::Store);
    match StoreSocket::find(node)?.filter(|_| is_of_store) {
        Some(store) => store.ask(&DebugRequest::Arm(fault.to_string())).map(drop),
        None => administer(node, AdminRequest::ArmFault(fault)).map(drop),
    }
}

fn clear(node: &NodeArgs) -> Result<()> {
    if let Some(store) = StoreSocket::find(node)? {
        store.ask(&DebugRequest::Clear)?;
    }
    let (role, _) = faults(administer(node, AdminRequest::ClearFaults)?)?;
    note_other_faults(role, node);
    Ok(())
}

fn list(json: bool, node: &NodeArgs) -> Result<()> {
    let mut rows = Vec::new();
    let mut add = |role: Role, armed: Vec<Armed>| {
        rows.extend(armed.into_iter().map(|armed| FaultRow { role: role.as_str(), armed }));
    };
    if let Some(store) = StoreSocket::find(node)? {
        add(Role::Store, store.ask(&DebugRequest::Show)?);
    }
    let (role, armed) = faults(administer(node, AdminRequest::ListFaults)?)?;
    add(role, armed);
    if json {
        output::json(&rows);
    } else {
        for FaultRow { role, armed } in rows {
            output::raw(format!("{role:<6} {:<50} fired {}\n", armed.fault, armed.fired));
        }
    }
    note_other_faults(role, node);
    Ok(())
}

/// Says that a command over an endpoint has not reached the faults of the store.
fn note_other_faults(role: Role, node: &NodeArgs) {
    if role == Role::Osd && node.endpoint.is_some() {
        output::note(
            "the faults of the store's process are not included; run the command on the machine of the store, with \
             --dir and without --endpoint",
        );
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
    let AdminReply::Tuned(tuning) = administer(node, AdminRequest::TuneChannel(args.change()))? else {
        return Err(Failure::new(doing, unexpected()));
    };
    let ChannelTuning { pipeline, region_cache, max_transfer, dma_queues, poll_us } = tuning;
    let max_transfer = ByteSize(max_transfer);
    if args.json {
        output::json(&ShownTuning { pipeline, region_cache, max_transfer, dma_queues, poll_us });
    } else {
        output::line(format_args!("pipeline      {}", if pipeline { "on" } else { "off" }));
        output::line(format_args!("region cache  {region_cache} windows"));
        output::line(format_args!("max transfer  {max_transfer}"));
        output::line(format_args!("DMA queues    {dma_queues}"));
        output::line(format_args!("polling       {poll_us} µs"));
    }
    Ok(())
}

/// Makes a request of an operator.
fn administer(node: &NodeArgs, request: AdminRequest) -> Result<AdminReply> {
    let doing = match &request {
        AdminRequest::ArmFault(_) => "arming the fault",
        AdminRequest::ListFaults => "listing the faults",
        AdminRequest::ClearFaults => "disarming the faults",
        _ => "tuning the channel",
    };
    session::administer(node, async move |client| client.administer(request).await.doing(doing))
}

/// Returns the faults of an answer, and the role of the process in which they are armed.
fn faults(answer: AdminReply) -> Result<(Role, Vec<Armed>)> {
    match answer {
        AdminReply::Faults { role, armed } => Ok((role, armed)),
        _ => Err(Failure::new("reading the faults", unexpected())),
    }
}

/// The debug socket of the store, in the directory of the node.
struct StoreSocket {
    path: PathBuf,
    node: NodeArgs,
}

impl StoreSocket {
    /// Finds the socket; `None` if the command reaches the node over an endpoint, or if the node has
    /// only one process.
    fn find(node: &NodeArgs) -> Result<Option<StoreSocket>> {
        if node.endpoint.is_some() {
            return Ok(None);
        }
        let dir = NodeDir::open(&locate::root(node)).doing("looking for the node")?;
        let is_host = NodeState::load(&dir).is_some_and(|state| state.placement == Placement::Host);
        Ok((!is_host).then(|| StoreSocket { path: dir.debug_socket(), node: node.clone() }))
    }

    /// Sends a request. Returns the armed faults. A refusal is an error.
    fn ask(&self, request: &DebugRequest) -> Result<Vec<Armed>> {
        let doing = "sending a debug request to the store";
        let answer = self.ask_patiently(request).map_err(|e| {
            let why = format!("{e} ({}); is the node up?", self.path.display());
            Failure::new(doing, why)
        })?;
        match answer.error {
            Some(why) => Err(Failure::new(doing, why)),
            None => Ok(answer.faults),
        }
    }

    /// Sends a request. While the node is up, this function waits for a store that restarts.
    fn ask_patiently(&self, request: &DebugRequest) -> std::io::Result<DebugAnswer> {
        let began = Instant::now();
        loop {
            let error = match debug_socket::ask(&self.path, request) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // Only these errors can mean that the store restarts.
            let restarts = matches!(
                error.kind(),
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof
            );
            if !restarts || locate::endpoint(&self.node).is_err() || began.elapsed() > PATIENCE {
                return Err(error);
            }
            std::thread::sleep(PAUSE);
        }
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
