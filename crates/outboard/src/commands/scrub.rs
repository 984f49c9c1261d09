//! `outboard scrub`: verifies all stored data of a pool.

use std::time::Duration;

use clap::Args;
use client::ScrubStatus;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// Time between two queries of the scrub's progress.
const INTERVAL: Duration = Duration::from_millis(200);

/// Read all data of a pool, verify checksums, redundancy and recorded sizes, and repair damage
///
/// The node reconstructs damaged fragments from the other fragments. The node scrubs in the
/// background and continues if this command is interrupted; a second call watches the first scrub.
/// Requests of clients have priority. Fails if damage remains.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard scrub photos\n  \
    outboard scrub photos --repair\n  \
    outboard scrub photos --json")]
pub struct ScrubArgs {
    /// Name of the pool
    pub pool: String,
    /// Extend each object whose data is shorter than its recorded size, where the missing bytes are
    /// certainly zeros. An older version left such objects after some compounds
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
    let status = session::run(node, super::options(), async move |client| {
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
        "restore them from copies, or remove them"
    } else {
        "repair what can be with --repair"
    };
    let why = match status.failure {
        Some(why) => why,
        None if left > 0 => {
            format!(
                "{left} fragments or objects were found damaged and not repaired; the node's log names the objects"
            )
        }
        None if wrong_size > 0 => {
            format!(
                "{wrong_size} objects have data of another size than recorded; the node's log names them, {advice}"
            )
        }
        None => return Ok(()),
    };
    Err(Failure::new(doing, why))
}

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
