//! `outboard rm`: removes objects.

use clap::Args;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};

/// Remove objects
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard rm photos/beach.jpg\n  \
    outboard rm --force photos/a photos/b")]
pub struct RmArgs {
    /// Objects to remove, written POOL[:NAMESPACE]/OBJECT
    #[arg(required = true, value_name = "OBJECT")]
    pub objects: Vec<String>,
    /// Do not fail if an object does not exist
    #[arg(long, short)]
    pub force: bool,
}

/// Runs the command.
pub fn run(args: RmArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let mut failed = 0;
        let count = args.objects.len();
        for name in &args.objects {
            let object = session::object(&client, name)?;
            match object.remove().await {
                Err(e) if args.force && e.is_not_found() => {}
                removed if count == 1 => return removed.map(|_| ()).doing(format!("removing {name}")),
                Ok(_) => {}
                Err(e) => {
                    output::note(format!("removing {name}: {e}"));
                    failed += 1;
                }
            }
        }
        match failed {
            0 => Ok(()),
            n => Err(Failure::new(
                "removing objects",
                format!("{n} of {count} objects were not removed; the messages above say why"),
            )),
        }
    })
}
