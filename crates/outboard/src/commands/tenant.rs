//! `outboard tenant`: creates, lists and removes tenants.

use clap::Subcommand;
use client::NodeError;
use node::failure::{Doing, Failure, Result};
use serde::Serialize;
use wire::{AccountRequest, AdminReply, AdminRequest, TenantInfo, check_account};

use super::session;
use crate::args::NodeArgs;
use crate::output;

/// The operations on tenants.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard tenant create films\n  \
    outboard tenant ls\n  \
    outboard tenant rm films")]
pub enum TenantCommand {
    /// Create a tenant; an administrator of the node may
    #[command(after_help = "Example:\n  outboard tenant create films")]
    Create {
        /// Name of the tenant: up to 32 letters, digits, '.', '_' and '-'
        name: String,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// List the tenants; without the right to administer the node, only the own tenant
    #[command(after_help = "Examples:\n  outboard tenant ls\n  outboard tenant ls --json")]
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a tenant that has neither users nor pools
    #[command(after_help = "Example:\n  outboard tenant rm films")]
    Rm {
        /// Name of the tenant
        name: String,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
}

/// A tenant, as `--json` shows it.
#[derive(Serialize)]
struct ShownTenant {
    name: String,
    made_ms: u64,
    pools: u32,
    users: u32,
}

/// A tenant that was created or removed, as `--json` shows it.
#[derive(Serialize)]
struct ChangedTenant {
    tenant: String,
}

/// Runs the command.
pub fn run(command: TenantCommand, node: &NodeArgs) -> Result<()> {
    session::administer(node, async |client| {
        let ask = async |request| client.administer(AdminRequest::Accounts(request)).await;
        match command {
            TenantCommand::Create { name, json } => {
                let doing = format!("creating tenant {name}");
                check_account(&name).map_err(|e| Failure::usage(doing.clone(), e))?;
                ask(AccountRequest::CreateTenant { name: name.clone() }).await.doing(doing)?;
                output::json_if(json, &ChangedTenant { tenant: name });
                Ok(())
            }
            TenantCommand::Rm { name, json } => {
                let doing = format!("removing tenant {name}");
                ask(AccountRequest::RemoveTenant { name: name.clone() }).await.doing(doing)?;
                output::json_if(json, &ChangedTenant { tenant: name });
                Ok(())
            }
            TenantCommand::Ls { json } => {
                let listed = ask(AccountRequest::ListTenants).await.doing("listing the tenants")?;
                let AdminReply::Tenants(tenants) = listed else {
                    return Err(Failure::new("listing the tenants", unexpected()));
                };
                print(tenants, json);
                Ok(())
            }
        }
    })
}

/// The error for an answer of another kind than the request.
pub fn unexpected() -> NodeError {
    NodeError::BadRequest("the node's answer does not match the request".into())
}

fn print(tenants: Vec<TenantInfo>, json: bool) {
    if json {
        let shown = |tenant: TenantInfo| {
            let TenantInfo { name, made_ms, pools, users } = tenant;
            ShownTenant { name, made_ms, pools, users }
        };
        return output::json(&tenants.into_iter().map(shown).collect::<Vec<_>>());
    }
    let width = tenants.iter().map(|tenant| tenant.name.len()).max().unwrap_or(0).max(6);
    output::line(format!("{:width$}  POOLS  USERS", "TENANT"));
    for TenantInfo { name, pools, users, .. } in tenants {
        output::line(format!("{name:width$}  {pools:>5}  {users:>5}"));
    }
}
