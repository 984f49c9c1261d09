//! `outboard pool`: creates, lists and removes pools.

use clap::Subcommand;
use client::Redundancy;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::units::ByteSize;

/// The operations on pools.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard pool create photos\n  \
    outboard pool create films --redundancy ec:4+2\n  \
    outboard pool ls\n  \
    outboard pool rm photos")]
pub enum PoolCommand {
    /// Create a pool
    #[command(after_help = "Examples:\n  \
        outboard pool create photos\n  \
        outboard pool create photos --redundancy mirror:2\n  \
        outboard pool create films --redundancy ec:4+2 --stripe-unit 128KiB")]
    Create {
        /// Name of the pool: letters, digits, '.', '_' and '-'; starts with a letter or digit
        name: String,
        /// Number of placement groups, a power of two [default: 32]
        #[arg(long, value_name = "N")]
        pg_count: Option<u32>,
        /// Redundancy scheme: single (one copy), mirror:N (N copies), or ec:K+M (K data and M
        /// parity fragments, of which any M may be lost)
        #[arg(long, value_name = "KIND", default_value = "single")]
        redundancy: Redundancy,
        /// For ec:K+M: number of contiguous bytes that a stripe stores on each target, a multiple
        /// of 4KiB [default: 64KiB; less for more than 32 data fragments]
        #[arg(long, value_name = "SIZE")]
        stripe_unit: Option<ByteSize>,
        /// Tenant of the pool [default: your tenant]
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
    },
    /// List the pools
    #[command(after_help = "Examples:\n  outboard pool ls\n  outboard pool ls --json")]
    Ls {
        /// Tenant whose pools to list [default: your tenant, and only pools to which you have a right]
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a pool
    #[command(after_help = "Examples:\n  outboard pool rm photos\n  outboard pool rm --force photos")]
    Rm {
        /// Name of the pool
        name: String,
        /// Remove the pool even if it contains objects; this removes the objects, too
        #[arg(long)]
        force: bool,
        /// Tenant of the pool [default: your tenant]
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
    },
}

/// Runs the command.
pub fn run(command: PoolCommand, node: &NodeArgs) -> Result<()> {
    session::administer(node, async |client| match command {
        PoolCommand::Create { name, pg_count, redundancy, stripe_unit, tenant } => {
            let client = client.in_tenant(tenant);
            let doing = format!("creating pool {name}");
            let redundancy =
                striped(redundancy, stripe_unit).map_err(|e| Failure::usage(doing.clone(), e))?;
            let created = client.create_pool_with(&name, pg_count.unwrap_or(0), redundancy).await;
            created.map_err(|e| match e {
                client::Error::Name(e) => Failure::usage(doing, e),
                e => Failure::new(doing, e),
            })
        }
        PoolCommand::Rm { name, force, tenant } => {
            client.in_tenant(tenant).remove_pool(&name, force).await.doing(format!("removing pool {name}"))
        }
        PoolCommand::Ls { tenant, json } => {
            let pools = client.in_tenant(tenant).pools().await.doing("listing the pools")?;
            if json {
                output::json(&pools);
            } else {
                pools.iter().for_each(|p| output::line(&p.name));
            }
            Ok(())
        }
    })
}

/// Adds the size of a stripe's unit to the redundancy scheme, if the user has chosen a size.
fn striped(redundancy: Redundancy, unit: Option<ByteSize>) -> client::Result<Redundancy, client::NodeError> {
    let Some(ByteSize(bytes)) = unit else { return Ok(redundancy) };
    redundancy.with_stripe_unit(u32::try_from(bytes).unwrap_or(u32::MAX))
}
