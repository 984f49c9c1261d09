//! `outboard target`: lists the targets of a node, takes targets out of use and into use again,
//! accepts the loss of targets, and replaces lost targets.

use clap::Subcommand;
use client::{Client, NodeStatus, PoolLoss, Redundancy};

use super::session;
use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::config_file;
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::report::{ReportedState, trouble};
use node::roster::{Roster, RosterError};
use node::state::{NodeState, Process, ProcessState, Role};
use node::targets;
use node::units::ByteSize;

/// The operations on targets.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard target ls\n  \
    outboard target out 3\n  \
    outboard target forget 3\n  \
    outboard target replace 3")]
pub enum TargetCommand {
    /// List the targets with their numbers
    #[command(after_help = "Examples:\n  outboard target ls\n  outboard target ls --json")]
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Take a target out of use: pools with redundancy rebuild its fragments on other targets, if
    /// possible
    ///
    /// Until the rebuild ends, the pools are degraded as if the target had failed. Pools without
    /// redundancy continue to use the target.
    #[command(after_help = "Example:\n  outboard target out 3")]
    Out {
        /// Number of the target
        id: u32,
    },
    /// Use a target again that was taken out or has failed; it first receives the changes that it
    /// missed
    #[command(after_help = "Example:\n  outboard target in 3")]
    In {
        /// Number of the target
        id: u32,
    },
    /// Accept the loss of a target: what only this target has is lost, and the node stops waiting for
    /// it
    ///
    /// Without --accept-loss, the command only prints what would be lost. Also works while the node
    /// is stopped, or while the osd does not start because the target is missing; the osd then
    /// applies the decision when it starts.
    #[command(after_help = "Examples:\n  \
        outboard target forget 3                  # print what would be lost\n  \
        outboard target forget 3 --accept-loss\n  \
        outboard target forget 3 --accept-loss && outboard target replace 3")]
    Forget {
        /// Number of the target
        id: u32,
        /// Accept the loss
        #[arg(long)]
        accept_loss: bool,
        /// Print the loss as JSON
        #[arg(long)]
        json: bool,
    },
    /// Replace a lost target by a new target; the node rebuilds the target's data after the node's
    /// next start
    ///
    /// The new target is created at the same path, with the configured size, or on the device that
    /// has this path now. If the old file still exists, it is renamed and kept in the same
    /// directory.
    #[command(after_help = "Example:\n  \
        outboard target replace 3 && outboard down && outboard up --detach")]
    Replace {
        /// Number of the target
        id: u32,
    },
    /// Limit the speed of rebuilds and scrubs until the node's next start
    #[command(after_help = "Examples:\n  outboard target rate 100MiB\n  outboard target rate 0")]
    Rate {
        /// Maximum rate in bytes per second; 0 means no limit
        rate: ByteSize,
    },
}

/// Runs the command.
pub fn run(command: TargetCommand, node: &NodeArgs) -> Result<()> {
    match command {
        TargetCommand::Replace { id } => replace(id, node),
        TargetCommand::Forget { id, accept_loss, json } => forget(id, accept_loss, json, node),
        command => {
            let drops_marks = matches!(command, TargetCommand::In { .. });
            session::administer(node, async move |client| ask(&client, command).await)?;
            if drops_marks { drop_marks(node) } else { Ok(()) }
        }
    }
}

async fn ask(client: &Client, command: TargetCommand) -> Result<()> {
    match command {
        TargetCommand::Ls { json } => {
            let status = client.status().await.doing("listing the targets")?;
            if json {
                output::json(&status.targets);
            } else {
                lines(&status).into_iter().for_each(output::line);
            }
            Ok(())
        }
        TargetCommand::Out { id } => {
            client.set_target_out(id, true).await.doing(format!("taking target {id} out of use"))
        }
        TargetCommand::In { id } => {
            client.set_target_out(id, false).await.doing(format!("taking target {id} into use"))
        }
        TargetCommand::Rate { rate } => {
            client.set_rebuild_rate(rate.0).await.doing("limiting the rate of rebuilds")
        }
        TargetCommand::Replace { .. } | TargetCommand::Forget { .. } => Ok(()),
    }
}

/// Formats the table of targets, one line per target below the header.
fn lines(status: &NodeStatus) -> Vec<String> {
    let mut lines = vec![format!("{:>3}  {:<11}  {:>10}  {:>10}  TARGET", "ID", "STATE", "FREE", "SIZE")];
    for (id, target) in status.targets.iter().enumerate() {
        let size = |bytes: u64| format!("{:.1}", ByteSize(bytes));
        let (free, total) = match &target.space {
            Ok(space) => (size(space.free), size(space.total)),
            Err(_) => ("-".into(), "-".into()),
        };
        let why = trouble(target).map_or(String::new(), |why| format!("  {why}"));
        lines.push(format!(
            "{id:>3}  {:<11}  {free:>10}  {total:>10}  {}{why}",
            ReportedState::of(target),
            target.uuid
        ));
    }
    lines
}

fn forget(id: u32, accept_loss: bool, json: bool, node: &NodeArgs) -> Result<()> {
    let doing = || format!("accepting the loss of target {id}");
    let refusal = "nothing was changed; repeat the command with --accept-loss to accept the loss";
    if node.endpoint.is_none() {
        let dir = NodeDir::open(&locate::root(node)).doing(doing())?;
        if !session::answers(node) {
            if is_ready(&dir) {
                let why = "the osd is ready, but does not answer; repeat the command, or stop the node first: outboard down";
                return Err(Failure::new(doing(), why));
            }
            if !accept_loss {
                let why = format!(
                    "the node does not serve requests, so it cannot tell what would be lost; {refusal}"
                );
                return Err(Failure::new(doing(), why));
            }
            let target = Roster::forget_target(&dir, id).doing(doing())?;
            let (path, uuid) = (target.path(), target.uuid());
            match json {
                true => output::json(&Vec::<PoolLoss>::new()),
                false => output::line(format!(
                    "recorded that the loss of target {id} ({}, {uuid}) is accepted; the osd applies this when it starts",
                    path.display()
                )),
            }
            return Ok(());
        }
    }
    let loss = session::administer(node, async move |client| {
        client.forget_target(id, accept_loss).await.doing(format!("accepting the loss of target {id}"))
    })?;
    if accept_loss {
        drop_marks(node)?;
    }
    if json {
        output::json(&loss);
    } else {
        loss.iter().for_each(|loss| output::line(loss_line(loss, id)));
    }
    if accept_loss { Ok(()) } else { Err(Failure::new(doing(), refusal)) }
}

/// Removes decisions from the node's roster that no start of the osd has applied yet. The operator
/// has given another command since.
fn drop_marks(node: &NodeArgs) -> Result<()> {
    let doing = "updating the node's roster";
    let Some(dir) = node.endpoint.is_none().then(|| NodeDir::open(&locate::root(node))) else {
        return Ok(());
    };
    let dir = dir.doing(doing)?;
    let forgotten = Roster::load(&dir).doing(doing)?.map(|roster| roster.forgotten()).unwrap_or_default();
    if forgotten.is_empty() { Ok(()) } else { Roster::osd_knows(&dir, &forgotten).doing(doing) }
}

/// Returns whether the supervisor has recorded that the role that serves clients is ready.
fn is_ready(dir: &NodeDir) -> bool {
    let serves = |process: &Process| {
        matches!(process.role, Role::Osd | Role::Node) && process.state == ProcessState::Running
    };
    let is_up = dir.owner().is_ok_and(|owner| owner.is_some());
    is_up && NodeState::load(dir).is_some_and(|state| state.processes.iter().any(serves))
}

/// Describes what a pool loses with a target.
fn loss_line(loss: &PoolLoss, id: u32) -> String {
    let PoolLoss { pool, redundancy, groups, waiting, emptied } = loss;
    let changes = format!("changes that only target {id} has, on");
    match redundancy {
        Redundancy::Single => {
            format!("pool {pool} ({redundancy}): all objects on {waiting} of {groups} placement groups")
        }
        _ if *emptied == 0 => {
            format!("pool {pool} ({redundancy}): {changes} {waiting} of {groups} placement groups")
        }
        _ => format!(
            "pool {pool} ({redundancy}): {changes} {waiting} of {groups} placement groups; all objects on {emptied} of them, unless other missing targets return"
        ),
    }
}

fn replace(id: u32, node: &NodeArgs) -> Result<()> {
    let doing = || format!("replacing target {id}");
    let dir = NodeDir::open(&locate::root(node)).doing(doing())?;
    let config = config_file::load(Some(&dir.config()), |name| std::env::var(name).ok()).doing(doing())?;
    let roster = Roster::load_existing(&dir).doing(doing())?;
    let path = match roster.place_of(&dir, id) {
        Err(e @ RosterError::NoTarget { .. }) => return Err(Failure::usage(doing(), e)),
        place => place.doing(doing())?,
    };
    // Ask the node before any file is changed, because the node may refuse the replacement.
    let uuid = uuid::Uuid::new_v4();
    session::administer(node, async move |client| {
        client.replace_target(id, uuid).await.doing(format!("replacing target {id}"))
    })?;
    // Change the roster before the target is created, which takes long. If the command is
    // interrupted, the node starts without the new target, and the command can be repeated.
    Roster::replace_target(&dir, id, uuid).doing(doing())?;
    targets::make_replacement(&path, &config, uuid).doing(doing())?;
    output::line(format!(
        "created a new target {id} at {}; restart the node to rebuild its data: outboard down && outboard up",
        path.display()
    ));
    Ok(())
}
