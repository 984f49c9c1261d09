//! `outboard ls`: lists the objects of a pool.

use clap::Args;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use client::SkippedGroups;
use node::failure::{Doing, Failure, Result};

/// List the objects of a pool, in no particular order
///
/// If placement groups are not available because targets have failed, the command lists all other
/// objects, reports the failure, and exits with status 1.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard ls photos\n  \
    outboard ls photos --prefix 2024/ | sort\n  \
    outboard ls backups:monday --json")]
pub struct LsArgs {
    /// Pool, or one namespace of a pool, written POOL[:NAMESPACE]
    pub pool: String,
    /// List only objects whose names start with this prefix
    #[arg(long, default_value = "", value_name = "P", hide_default_value = true)]
    pub prefix: String,
    /// List the objects of all namespaces, written NAMESPACE/OBJECT
    #[arg(long)]
    pub all_namespaces: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: LsArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let pool = session::pool(&client, &args.pool)?;
        let doing = format!("listing pool {}", args.pool);
        let mut names = match args.all_namespaces {
            true => pool.list_all_namespaces(&args.prefix),
            false => pool.list(&args.prefix),
        };
        names = names.skip_unavailable();
        let mut page = Vec::new();
        let mut first = true;
        if args.json {
            output::raw("[");
        }
        while let Some(name) = names.next().await.doing(&doing)? {
            page.push(shown(&name, &args, &mut first));
            if page.len() == 512 {
                output::raw(page.concat());
                page.clear();
            }
        }
        output::raw(page.concat());
        if args.json {
            output::raw("\n]\n");
        }
        match names.skipped() {
            None => Ok(()),
            Some(SkippedGroups { groups, reason }) => {
                let why = format!(
                    "the list is incomplete: it lacks the objects of {groups} placement groups that are not available: {reason}; `outboard status` shows the targets that have failed"
                );
                Err(Failure::new(doing, why))
            }
        }
    })
}

/// Formats the listing entry of one object. `first` is true for the first entry of a JSON array;
/// the function then sets it to false.
fn shown(name: &client::ObjectName, args: &LsArgs, first: &mut bool) -> String {
    let text = match (args.all_namespaces, name.namespace()) {
        (true, namespace) => format!("{namespace}/{}", name.object()),
        (false, _) => name.object().to_owned(),
    };
    if !args.json {
        return format!("{}\n", output::name(&text));
    }
    let separator = if std::mem::take(first) { "\n  " } else { ",\n  " };
    let text = serde_json::Value::String(text).to_string();
    format!("{separator}{}", output::json_escaped(&text))
}
