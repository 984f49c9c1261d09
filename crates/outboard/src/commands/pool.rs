//! `outboard pool`: creates, lists and removes pools.

use clap::Subcommand;

use super::session;
use crate::cli::NodeArgs;
use crate::failure::{Doing, Failure, Result};
use crate::output;

/// What to do with pools.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard pool create photos\n  \
    outboard pool ls\n  \
    outboard pool rm photos")]
pub enum PoolCommand {
    /// Create a pool
    #[command(after_help = "Example:\n  outboard pool create photos")]
    Create {
        /// Letters, digits, '.', '_' and '-'; starts with a letter or digit
        name: String,
        /// Number of placement groups, a power of two [default: the node's]
        #[arg(long, value_name = "N")]
        pg_count: Option<u32>,
    },
    /// List the pools
    #[command(after_help = "Examples:\n  outboard pool ls\n  outboard pool ls --json")]
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a pool
    #[command(after_help = "Examples:\n  outboard pool rm photos\n  outboard pool rm --force photos")]
    Rm {
        /// The pool
        name: String,
        /// Remove its objects too
        #[arg(long)]
        force: bool,
    },
}

/// Runs the command.
pub fn run(command: PoolCommand, node: &NodeArgs) -> Result<()> {
    session::run(node, super::options(), async |client| match command {
        PoolCommand::Create { name, pg_count } => {
            let doing = format!("creating pool {name}");
            client.create_pool_with(&name, pg_count.unwrap_or(0)).await.map_err(|e| match e {
                client::Error::Name(e) => Failure::usage(doing, e),
                e => Failure::new(doing, e),
            })
        }
        PoolCommand::Rm { name, force } => {
            client.remove_pool(&name, force).await.doing(format!("removing pool {name}"))
        }
        PoolCommand::Ls { json } => {
            let pools = client.pools().await.doing("listing the pools")?;
            if json {
                output::json(&pools);
            } else {
                pools.iter().for_each(|p| output::line(&p.name));
            }
            Ok(())
        }
    })
}
