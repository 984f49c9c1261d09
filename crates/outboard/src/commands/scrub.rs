//! `outboard scrub`: compares what a pool's targets have with what they should have.

use std::time::Duration;

use clap::Args;
use client::ScrubStatus;

use super::session;
use crate::cli::NodeArgs;
use crate::failure::{Doing, Failure, Result};
use crate::output;
use crate::progress::Progress;

/// Pause between two questions how far it has come.
const INTERVAL: Duration = Duration::from_millis(200);

/// Read all of a pool, compare it with its checksums and its redundancy, and repair what can be
///
/// The node does it in the background and goes on if this command is interrupted; a second call watches the first scrub.
/// Clients go first. Fails if something is damaged and could not be repaired.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard scrub photos\n  \
    outboard scrub photos --json")]
pub struct ScrubArgs {
    /// The pool
    pub pool: String,
    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: ScrubArgs, node: &NodeArgs) -> Result<()> {
    let doing = format!("scrubbing pool {}", args.pool);
    let pool = args.pool.clone();
    let asking = doing.clone();
    let status = session::run(node, super::options(), async move |client| {
        let mut status = client.start_scrub(&pool).await.doing(asking.clone())?;
        let progress = Progress::count("placement groups", u64::from(status.groups));
        while status.running {
            progress.set(u64::from(status.groups_done), u64::from(status.groups));
            tokio::time::sleep(INTERVAL).await;
            status = client.scrub_status(&pool).await.doing(asking.clone())?;
        }
        Ok(status)
    })?;
    if args.json {
        output::json(&status);
    } else {
        output::line(text(&status));
    }
    let left = status.damaged - status.repaired + status.inconsistent;
    match status.failure {
        Some(why) => Err(Failure::new(doing, why)),
        None if left > 0 => {
            let why = format!(
                "{left} shards or objects were found damaged and not repaired; the node's log names the objects"
            );
            Err(Failure::new(doing, why))
        }
        None => Ok(()),
    }
}

fn text(status: &ScrubStatus) -> String {
    format!(
        "{} objects, {} bytes read: {} shards damaged, {} of them repaired; {} objects inconsistent",
        status.objects, status.bytes, status.damaged, status.repaired, status.inconsistent
    )
}
