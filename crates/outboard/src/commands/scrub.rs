//! `outboard scrub`: verifies all stored data of a pool.

use std::time::Duration;

use clap::Args;
use client::ScrubStatus;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// Time between two queries for the progress of the scrub.
const INTERVAL: Duration = Duration::from_millis(200);

/// Read all data of a pool, verify checksums, redundancy and recorded sizes, and repair damage
///
/// The node reconstructs damaged fragments from the other fragments. It scrubs in the background,
/// and continues if this command is interrupted. If a scrub of the pool is already running, this
/// command waits for that scrub. Requests of clients have priority. The command fails if damage
/// remains.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard scrub photos\n  \
    outboard scrub photos --repair\n  \
    outboard scrub photos --json")]
pub struct ScrubArgs {
    /// Name of the pool
    pub pool: String,
    /// Repair objects whose data is shorter than their recorded size: fill the end with zeros,
    /// where the missing bytes are certainly zeros. Some compound changes of older versions left
    /// objects in this state
    #[arg(long)]
    pub repair: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: ScrubArgs, node: &NodeArgs) -> Result<()> {
    let doing = format!("scrubbing pool {}", args.pool);
    let (pool, repair) = (args.pool.clone(), args.repair);
    let asking = doing.clone();
    let status = session::administer(node, async move |client| {
        let mut status = client.start_scrub(&pool, repair).await.doing(asking.clone())?;
        let progress = ProgressMeter::count("placement groups", u64::from(status.groups));
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
    let wrong_size = status.wrong_size - status.resized;
    let advice = if args.repair {
        "restore these objects from copies, or remove them"
    } else {
        "use --repair to repair the objects that can be repaired"
    };
    let why = match status.failure {
        Some(why) => why,
        None if left > 0 => {
            format!(
                "{left} damaged fragments or objects were found and not repaired; the node's log names the objects"
            )
        }
        None if wrong_size > 0 => {
            format!(
                "the data of {wrong_size} objects differs from the recorded size; the node's log names these objects; {advice}"
            )
        }
        None => return Ok(()),
    };
    Err(Failure::new(doing, why))
}

/// Describes the result of a scrub in one line.
fn text(status: &ScrubStatus) -> String {
    let found = format!(
        "{} objects, {} bytes read: {} fragments damaged, {} of them repaired; {} objects inconsistent",
        status.objects, status.bytes, status.damaged, status.repaired, status.inconsistent
    );
    match status.wrong_size {
        0 => found,
        wrong => format!("{found}; {wrong} objects of the wrong size, {} of them repaired", status.resized),
    }
}
