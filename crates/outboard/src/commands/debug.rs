//! `outboard debug`: injects faults.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::fault::{Fault, Site};
use clap::Subcommand;
use serde::Serialize;
use wire::Placement;

use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::debug::{self, ArmedFault, DebugRequest};
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::state::{NodeState, Role};

/// How long to wait for a role that restarts.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// The operations on faults.
#[derive(Debug, Clone, Subcommand)]
pub enum DebugCommand {
    /// Arm a fault: something goes wrong on purpose in a running node
    ///
    /// FAULT is SITE=ACTION[,after=N][,count=N][,probability=P][,late=TIMEms][,seed=N]. Sites and what can happen there:
    /// dma.transfer (fail, stall, corrupt), dma.doorbell (drop), dma.device (fail, engine ofi), store.doorbell (drop),
    /// store.device (fail, engine ofi), store.call (kill), osd.reply (kill).
    /// It passes N occasions (after), then fires at most N times (count; default: always) with a probability. A restart of
    /// the role disarms it. Nothing acknowledged is lost whatever is armed.
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
}

/// A fault and its role.
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
                Site::DmaTransfer
                | Site::DmaDoorbell
                | Site::DmaDevice
                | Site::OsdReply
                | Site::EcOffload => Role::Osd,
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
    }
}

/// Returns the roles of the node; the role that owns the drives is first.
fn roles(node: &NodeArgs) -> Result<&'static [Role]> {
    let dir = NodeDir::open(&locate::root(node)).doing("looking for the node")?;
    let is_host = NodeState::load(&dir).is_some_and(|state| state.placement == Placement::Host);
    Ok(if is_host { &[Role::Node] } else { &[Role::Store, Role::Osd] })
}

/// Returns the path of a role's debug socket.
pub fn socket(role: Role, node: &NodeArgs) -> Result<PathBuf> {
    let dir = NodeDir::open(&locate::root(node)).doing("looking for the node")?;
    Ok(dir.debug_socket(role.as_str()))
}

/// Sends a request to a role's debug socket. While the node is up, it waits for a role that
/// restarts.
fn ask_patiently(
    path: &Path,
    node: &NodeArgs,
    request: &DebugRequest,
) -> std::io::Result<debug::DebugAnswer> {
    let began = Instant::now();
    loop {
        let error = match debug::ask(path, request) {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        // A socket that was never there belongs to a role that this node does not have.
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
pub fn ask(role: Role, node: &NodeArgs, request: &DebugRequest) -> Result<debug::DebugAnswer> {
    let doing = format!("asking the {}", role.as_str());
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
