//! `outboard token`: issues capabilities with fewer rights than the user has, and shows capabilities.

use std::path::{Path, PathBuf};

use capability::Claims;
use clap::Subcommand;
use identity::KeyHash;
use node::failure::{Doing, Failure, Result};
use node::units::Period;
use serde::Serialize;
use wire::{AccessGrant, AdminReply, AdminRequest, Scope, Verbs};

use super::tenant::unexpected;
use super::{locate, session};
use crate::args::NodeArgs;
use crate::output;

/// The operations on capabilities.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard token issue --pool raw/2024- --rights read --valid 10m --out raw.capability\n  \
    outboard --capability raw.capability get raw/2024-01 film\n  \
    outboard token show raw.capability")]
pub enum TokenCommand {
    /// Issue a capability: a signed statement of what its holder may do
    ///
    /// A capability is no secret: only who proves its key can use it. It ends when it expires, or when
    /// the rights of its issuer change.
    #[command(after_help = "Examples:\n  \
        outboard token issue --pool raw/2024- --rights read --valid 10m --out raw.capability\n  \
        outboard token issue --pool raw --rights read --key 9f86… --out for-another-user.capability")]
    Issue {
        /// The objects: POOL, POOL/PREFIX, POOL:NAMESPACE, POOL:NAMESPACE/PREFIX, or '*' for all pools
        /// [default: all your rights]
        #[arg(long, value_name = "SCOPE", requires = "rights")]
        pool: Option<Scope>,
        /// The rights, separated by commas: read, write, list, admin
        #[arg(long, value_name = "RIGHTS", requires = "pool")]
        rights: Option<Verbs>,
        /// Time for which the capability is valid, at most 1h [default: 1h]
        #[arg(long, value_name = "TIME")]
        valid: Option<Period>,
        /// Hash of the holder's key, as `outboard whoami` shows it [default: your key]
        #[arg(long, value_name = "HASH")]
        key: Option<KeyHash>,
        /// File to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Print what the capability permits, as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show what a capability permits; its signature is not checked
    #[command(after_help = "Examples:\n  outboard token show raw.capability --json")]
    Show {
        /// File of the capability
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A capability, as `--json` shows it.
#[derive(Serialize)]
struct ShownCapability {
    id: String,
    node: String,
    user: String,
    key: String,
    issued_s: u64,
    expires_s: u64,
    grants: Vec<ShownClaim>,
}

/// A grant of a capability. Pools are named by their numbers.
#[derive(Serialize)]
struct ShownClaim {
    pool: Option<u32>,
    namespace: Option<String>,
    prefix: Option<String>,
    rights: String,
}

/// Runs the command.
pub fn run(command: TokenCommand, node: &NodeArgs) -> Result<()> {
    match command {
        TokenCommand::Issue { pool, rights, valid, key, out, json } => {
            let doing = "issuing a capability";
            let grants = pool.zip(rights).map(|(scope, verbs)| vec![AccessGrant { scope, verbs }]);
            let lifetime_s = valid.map_or(Ok(0), whole_seconds)?;
            check_output(&out)?;
            let key = key.map(|key| *key.as_bytes());
            let request = AdminRequest::IssueCapability { grants, key, lifetime_s };
            let issued = session::administer(node, async move |client| {
                match client.administer(request).await.doing(doing)? {
                    AdminReply::Capability(issued) => Ok(issued),
                    _ => Err(Failure::new(doing, unexpected())),
                }
            })?;
            std::fs::write(&out, &issued).doing(format!("writing {}", out.display()))?;
            if let Some(claims) = Claims::unverified(&issued).filter(|_| json) {
                show(&claims, true);
            }
            Ok(())
        }
        TokenCommand::Show { file, json } => {
            let bytes = locate::read_capability(&file)?;
            if let Some(claims) = Claims::unverified(&bytes) {
                show(&claims, json);
            }
            Ok(())
        }
    }
}

/// Returns a period in seconds, rounded up. The control plane takes 0 for the longest period.
fn whole_seconds(valid: Period) -> Result<u32> {
    match valid.0.as_millis().div_ceil(1000) {
        0 => Err(Failure::usage("issuing a capability", "--valid is 0; choose a time up to 1h")),
        seconds => Ok(u32::try_from(seconds).unwrap_or(u32::MAX)),
    }
}

/// Checks that writing a capability to `out` destroys no other file, for example credentials.
fn check_output(out: &Path) -> Result<()> {
    if out.is_file() && locate::read_capability(out).is_err() {
        let why = "the file exists and contains no capability; choose another file with --out";
        return Err(Failure::new(format!("writing {}", out.display()), why));
    }
    Ok(())
}

fn show(claims: &Claims, json: bool) {
    let claim = |grant: &capability::ClaimedGrant| ShownClaim {
        pool: grant.pool,
        namespace: grant.within.as_ref().map(|within| within.namespace.clone()),
        prefix: grant.within.as_ref().map(|within| within.prefix.clone()),
        rights: grant.verbs.to_string(),
    };
    let shown = ShownCapability {
        id: claims.id.iter().map(|byte| format!("{byte:02x}")).collect(),
        node: claims.node.to_string(),
        user: claims.name.clone(),
        key: claims.key.to_string(),
        issued_s: claims.issued,
        expires_s: claims.expires,
        grants: claims.grants.iter().map(claim).collect(),
    };
    if json {
        return output::json(&shown);
    }
    output::line(format!("user {}", output::name(&shown.user)));
    output::line(format!("key {}", shown.key));
    output::line(format!("node {}", shown.node));
    output::line(format!("valid from {} to {} (seconds since 1970)", shown.issued_s, shown.expires_s));
    for ShownClaim { pool, namespace, prefix, rights } in shown.grants {
        let pool = pool.map_or("all pools".to_owned(), |pool| format!("pool number {pool}"));
        let within = match (namespace, prefix) {
            (Some(namespace), Some(prefix)) => {
                format!(", namespace \"{}\", prefix \"{}\"", output::name(&namespace), output::name(&prefix))
            }
            _ => String::new(),
        };
        output::line(format!("{rights} on {pool}{within}"));
    }
}
