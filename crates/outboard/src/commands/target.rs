//! `outboard target`: lists the targets of a node, takes targets out of use and into use again, and
//! replaces lost targets.

use clap::Subcommand;
use client::{Client, NodeStatus};

use super::session;
use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::config_file;
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::identity::Identity;
use node::report::{ReportedState, trouble};
use node::targets;
use node::units::ByteSize;

/// The operations on targets.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard target ls\n  \
    outboard target out 3\n  \
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
        command => session::run(node, super::options(), async move |client| ask(&client, command).await),
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
        TargetCommand::Replace { .. } => Ok(()),
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

fn replace(id: u32, node: &NodeArgs) -> Result<()> {
    let doing = || format!("replacing target {id}");
    let dir = NodeDir::open(&locate::root(node)).doing(doing())?;
    let config = config_file::load(Some(&dir.config()), |name| std::env::var(name).ok()).doing(doing())?;
    let count = config.targets.len();
    let Some(path) = config.targets.get(id as usize) else {
        let why = format!("the node has targets 0 to {}", count.saturating_sub(1));
        return Err(Failure::usage(doing(), why));
    };
    if Identity::load(&dir).doing(doing())?.is_none() {
        let why = format!(
            "the node's identity {} is missing; restart the node, which writes the file: outboard down && outboard up",
            dir.identity().display()
        );
        return Err(Failure::new(doing(), why));
    }
    // Ask the node before any file is changed, because the node may refuse the replacement.
    let uuid = uuid::Uuid::new_v4();
    session::run(node, super::options(), async move |client| {
        client.replace_target(id, uuid).await.doing(format!("replacing target {id}"))
    })?;
    // Change the identity before the target is created, which takes long. If the command is
    // interrupted, the node starts without the new target, and the command can be repeated.
    Identity::replace_target(&dir, path, uuid).doing(doing())?;
    let path = dir.path().join(path);
    targets::make_replacement(&path, &config, uuid).doing(doing())?;
    output::line(format!(
        "created a new target {id} at {}; restart the node to rebuild its data: outboard down && outboard up",
        path.display()
    ));
    Ok(())
}
