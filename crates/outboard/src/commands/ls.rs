//! `outboard ls`: lists the objects of a pool.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};

use super::session;
use crate::args::NodeArgs;
use crate::output;
use client::{Error, Listing, NodeError, SkippedGroups};
use node::failure::{Doing, Failure, Result};

/// List the objects of a pool
///
/// On a terminal, the objects are listed in the order of their names. In a pipe, they are listed in
/// no particular order, which needs less memory; --sort name orders them, too.
///
/// If placement groups are not available because targets have failed, the command lists all other
/// objects, reports the failure, and exits with status 1.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard ls photos\n  \
    outboard ls photos --prefix 2024/ --sort name | head\n  \
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
    /// Order of the objects; by default, name on a terminal, and none in a pipe
    #[arg(long, value_enum, value_name = "ORDER")]
    pub sort: Option<SortBy>,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Order of the listed objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// By namespace and name, compared by their bytes
    Name,
    /// No particular order
    None,
}

/// Runs the command.
pub fn run(args: LsArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let pool = session::pool(&client, &args.pool)?;
        let doing = format!("listing pool {}", args.pool);
        let list = || match args.all_namespaces {
            true => pool.list_all_namespaces(&args.prefix).skip_unavailable(),
            false => pool.list(&args.prefix).skip_unavailable(),
        };
        let (mut names, mut next) = begin(list, args.sort).await.doing(&doing)?;
        let mut page = Vec::new();
        let mut first = true;
        if args.json {
            output::raw("[");
        }
        while let Some(name) = next {
            page.push(shown(&name, &args, &mut first));
            next = names.next().await.doing(&doing)?;
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

/// Begins a listing in the order that the user or the kind of output asks for. Returns the listing
/// and its first name. If only the terminal asks for the order, and the pool has none, the listing
/// has no order.
async fn begin(
    list: impl Fn() -> Listing,
    sort: Option<SortBy>,
) -> client::Result<(Listing, Option<client::ObjectName>)> {
    let is_ordered = sort.map_or_else(|| std::io::stdout().is_terminal(), |sort| sort == SortBy::Name);
    let mut names = if is_ordered { list().ordered() } else { list() };
    match names.next().await {
        Err(Error::Node(NodeError::NotOrdered(pool))) if sort.is_none() => {
            output::note(format!(
                "the objects are not in order, because an earlier version of Outboard created pool {pool}; to list them in order, copy them to a new pool (docs/operations.md, \"Pools of earlier versions\")"
            ));
            let mut names = list();
            let first = names.next().await?;
            Ok((names, first))
        }
        first => Ok((names, first?)),
    }
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
