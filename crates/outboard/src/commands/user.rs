//! `outboard user`: creates, lists and removes users. `outboard grant` and `outboard revoke` change what
//! they may do, and `outboard whoami` shows it.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use identity::{Credentials, Identity, KeyHash};
use node::failure::{Doing, Failure, Result};
use serde::Serialize;
use wire::{AccessGrant, AccountName, AccountRequest, AdminReply, AdminRequest, Scope, UserInfo, Verbs};

use super::tenant::unexpected;
use super::{locate, session};
use crate::args::NodeArgs;
use crate::output;

/// Name of the environment variable that names the caller's credentials.
const CREDENTIALS_VARIABLE: &str = "OUTBOARD_CREDENTIALS";

/// The operations on users.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard user create films/cutter --credentials cutter.toml\n  \
    outboard user ls films\n  \
    outboard user rm films/cutter")]
pub enum UserCommand {
    /// Create a user without rights, and write the user's credentials to the file --credentials
    ///
    /// The file contains the user's secret key and the node's public key. Only its owner may read it.
    /// Move it to the user's machine over a safe way. The command itself uses the credentials in the
    /// node's directory (--dir), or those that OUTBOARD_CREDENTIALS names.
    #[command(after_help = "Examples:\n  \
        outboard user create films/cutter --credentials cutter.toml\n  \
        outboard user create main/operator --node-admin --credentials operator.toml")]
    Create {
        /// Name of the user, written TENANT/USER
        name: AccountName,
        /// Make the user an administrator of the node: who manages tenants, targets and all pools, but
        /// reads no data without a grant
        #[arg(long)]
        node_admin: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// List the users, with what they may do
    #[command(after_help = "Examples:\n  outboard user ls\n  outboard user ls films --json")]
    Ls {
        /// Name of the tenant [default: all tenants that you administer]
        tenant: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a user; the user's sessions end at once
    #[command(after_help = "Example:\n  outboard user rm films/cutter")]
    Rm {
        /// Name of the user, written TENANT/USER
        name: AccountName,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Give a user rights to objects
///
/// The rights are: read (data and metadata), write (create, change and remove objects), list (names of
/// objects), and admin (on a whole pool: remove and scrub it; on all pools: also create pools, and
/// manage the tenant's users).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard grant films/cutter --pool raw --rights read,list\n  \
    outboard grant films/cutter --pool cuts/2024- --rights read,write,list\n  \
    outboard grant films/boss --pool '*' --rights read,write,list,admin")]
pub struct GrantArgs {
    /// Name of the user, written TENANT/USER
    pub name: AccountName,
    /// The objects: POOL, POOL/PREFIX, POOL:NAMESPACE, POOL:NAMESPACE/PREFIX, or '*' for all pools
    #[arg(long, value_name = "SCOPE")]
    pub pool: Scope,
    /// The rights, separated by commas: read, write, list, admin
    #[arg(long, value_name = "RIGHTS")]
    pub rights: Verbs,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// Take rights from a user; the user's sessions lose them at once
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard revoke films/cutter\n  \
    outboard revoke films/cutter --pool cuts/2024- --rights write")]
pub struct RevokeArgs {
    /// Name of the user, written TENANT/USER
    pub name: AccountName,
    /// The scope of a grant, as `outboard user ls` shows it [default: all grants]
    #[arg(long, value_name = "SCOPE")]
    pub pool: Option<Scope>,
    /// The rights, separated by commas [default: all]
    #[arg(long, value_name = "RIGHTS")]
    pub rights: Option<Verbs>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// Show who you are for the node, and what you may do
#[derive(Debug, Args)]
#[command(name = "whoami", after_help = "Examples:\n  outboard whoami\n  outboard whoami --json")]
pub struct WhoAmIArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A user, as `--json` shows it.
#[derive(Serialize)]
struct ShownUser {
    name: String,
    key: String,
    node_admin: bool,
    made_ms: Option<u64>,
    grants: Vec<ShownGrant>,
}

/// A grant, as `--json` shows it.
#[derive(Serialize)]
pub struct ShownGrant {
    pool: String,
    rights: String,
}

impl From<&AccessGrant> for ShownGrant {
    fn from(grant: &AccessGrant) -> ShownGrant {
        ShownGrant { pool: grant.scope.to_string(), rights: grant.verbs.to_string() }
    }
}

impl From<&UserInfo> for ShownUser {
    fn from(user: &UserInfo) -> ShownUser {
        ShownUser {
            name: user.user.to_string(),
            key: KeyHash::from(user.key).to_string(),
            node_admin: user.is_node_admin,
            made_ms: (user.made_ms > 0).then_some(user.made_ms),
            grants: user.grants.iter().map(ShownGrant::from).collect(),
        }
    }
}

/// A user who was created, removed, or whose rights have changed, as `--json` shows it.
#[derive(Default, Serialize)]
struct ChangedUser {
    user: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    credentials: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rights: Option<String>,
}

/// Runs `outboard user`.
pub fn run(command: UserCommand, node: &NodeArgs) -> Result<()> {
    match command {
        UserCommand::Create { name, node_admin, json } => create(name, node_admin, json, node),
        UserCommand::Rm { name, json } => {
            let doing = format!("removing user {name}");
            let changed = ChangedUser { user: name.to_string(), ..ChangedUser::default() };
            order(node, AccountRequest::RemoveUser { user: name }, doing)?;
            output::json_if(json, &changed);
            Ok(())
        }
        UserCommand::Ls { tenant, json } => session::administer(node, async move |client| {
            let doing = "listing the users";
            let request = AdminRequest::Accounts(AccountRequest::ListUsers { tenant });
            match client.administer(request).await.doing(doing)? {
                AdminReply::Users(users) => print(&users, json),
                _ => return Err(Failure::new(doing, unexpected())),
            }
            Ok(())
        }),
    }
}

/// Runs `outboard grant`.
pub fn grant(args: GrantArgs, node: &NodeArgs) -> Result<()> {
    let GrantArgs { name, pool: scope, rights: verbs, json } = args;
    let changed = ChangedUser {
        user: name.to_string(),
        pool: Some(scope.to_string()),
        rights: Some(verbs.to_string()),
        ..ChangedUser::default()
    };
    let doing = format!("granting rights to {name}");
    let grant = AccessGrant { scope, verbs };
    grant.check().map_err(|e| Failure::usage(doing.clone(), e))?;
    order(node, AccountRequest::Grant { user: name, grant }, doing)?;
    output::json_if(json, &changed);
    Ok(())
}

/// Runs `outboard revoke`.
pub fn revoke(args: RevokeArgs, node: &NodeArgs) -> Result<()> {
    let RevokeArgs { name, pool: scope, rights, json } = args;
    let doing = format!("revoking rights of {name}");
    let verbs = rights.unwrap_or(Verbs::ALL);
    let changed = ChangedUser {
        user: name.to_string(),
        pool: scope.as_ref().map(Scope::to_string),
        rights: Some(verbs.to_string()),
        ..ChangedUser::default()
    };
    order(node, AccountRequest::Revoke { user: name, scope, verbs }, doing)?;
    output::json_if(json, &changed);
    Ok(())
}

/// Runs `outboard whoami`.
pub fn who_am_i(args: WhoAmIArgs, node: &NodeArgs) -> Result<()> {
    session::administer(node, async move |client| {
        let doing = "asking the node who you are";
        match client.administer(AdminRequest::WhoAmI).await.doing(doing)? {
            AdminReply::Me(user) if args.json => output::json(&ShownUser::from(&*user)),
            AdminReply::Me(user) => print(&[*user], false),
            _ => return Err(Failure::new(doing, unexpected())),
        }
        Ok(())
    })
}

fn order(node: &NodeArgs, request: AccountRequest, doing: String) -> Result<()> {
    session::administer(node, async move |client| {
        client.administer(AdminRequest::Accounts(request)).await.map(drop).doing(doing)
    })
}

/// Creates a user. The option --credentials names the file for the new user's credentials, so the
/// caller's credentials are those of the environment or of the node's directory.
fn create(name: AccountName, is_node_admin: bool, json: bool, node: &NodeArgs) -> Result<()> {
    let doing = format!("creating user {name}");
    let own = std::env::var_os(CREDENTIALS_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let Some(file) = node.credentials.clone().filter(|file| own.as_ref() != Some(file)) else {
        let why = "name the file for the user's credentials with --credentials FILE";
        return Err(Failure::usage(doing, why));
    };
    if file.exists() {
        let why = format!("{} exists already; name another file with --credentials", file.display());
        return Err(Failure::new(doing, why));
    }
    let node = NodeArgs { credentials: own, ..node.clone() };
    let caller = Credentials::load(&locate::credentials_file(&node)?).doing("reading the credentials")?;
    let identity = Identity::generate();
    let made = Credentials { user: name.to_string(), node: caller.node, identity };
    let key = *made.identity.key().as_bytes();
    // The file comes first: a user whose key is lost would only be in the way.
    made.create(&file).doing(doing.clone())?;
    let changed = ChangedUser {
        user: name.to_string(),
        key: Some(made.identity.key().to_string()),
        credentials: Some(file.display().to_string()),
        ..ChangedUser::default()
    };
    let created = order(&node, AccountRequest::CreateUser { user: name, key, is_node_admin }, doing);
    created.inspect_err(|_| {
        // The failure of the command is the one that matters.
        let _ = std::fs::remove_file(&file);
    })?;
    output::json_if(json, &changed);
    Ok(())
}

fn print(users: &[UserInfo], json: bool) {
    if json {
        return output::json(&users.iter().map(ShownUser::from).collect::<Vec<_>>());
    }
    for user in users {
        let role = if user.is_node_admin { " (administers the node)" } else { "" };
        output::line(format!("{}{role}", user.user));
        output::line(format!("  key {}", KeyHash::from(user.key)));
        for AccessGrant { scope, verbs } in &user.grants {
            output::line(format!("  {verbs} on {}", output::name(&scope.to_string())));
        }
    }
}
