//! `outboard session`: lists and ends sessions. `outboard audit` shows the audit log.

use clap::{Args, Subcommand};
use node::failure::{Doing, Failure, Result};
use serde::Serialize;
use wire::{AdminReply, AdminRequest, SessionId, SessionInfo};

use super::session;
use super::tenant::unexpected;
use crate::args::NodeArgs;
use crate::output;

/// The operations on sessions.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard session ls\n  \
    outboard session kill 800000000001000000017eea4c2ad3ec")]
pub enum SessionCommand {
    /// List the open sessions; an administrator of a tenant sees those of the tenant
    #[command(after_help = "Examples:\n  outboard session ls\n  outboard session ls --json")]
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// End a session
    ///
    /// Its connections close, and it cannot be resumed. The client may open another session: to keep a
    /// user out, revoke the rights or remove the user.
    #[command(after_help = "Example:\n  outboard session kill 800000000001000000017eea4c2ad3ec")]
    Kill {
        /// Id of the session
        id: SessionId,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Show the last entries of the audit log: changes by operators, opened sessions, and refusals
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  outboard audit\n  outboard audit --limit 1000 --json")]
pub struct AuditArgs {
    /// Maximum number of entries
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: u32,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// A session, as `--json` shows it.
#[derive(Serialize)]
struct ShownSession {
    id: String,
    user: String,
    peer: String,
    opened_ms: u64,
    connections: u32,
}

/// A session that was ended, as `--json` shows it.
#[derive(Serialize)]
struct KilledSession {
    session: String,
}

/// Runs `outboard session`.
pub fn run(command: SessionCommand, node: &NodeArgs) -> Result<()> {
    session::administer(node, async move |client| match command {
        SessionCommand::Ls { json } => {
            let doing = "listing the sessions";
            match client.administer(AdminRequest::ListSessions).await.doing(doing)? {
                AdminReply::Sessions(sessions) => print(sessions, json),
                _ => return Err(Failure::new(doing, unexpected())),
            }
            Ok(())
        }
        SessionCommand::Kill { id, json } => {
            let killed = client.administer(AdminRequest::KillSession(id)).await;
            killed.doing(format!("ending session {id}"))?;
            output::json_if(json, &KilledSession { session: id.to_string() });
            Ok(())
        }
    })
}

/// Runs `outboard audit`.
pub fn audit(args: AuditArgs, node: &NodeArgs) -> Result<()> {
    session::administer(node, async move |client| {
        let doing = "reading the audit log";
        match client.administer(AdminRequest::Audit { limit: args.limit }).await.doing(doing)? {
            AdminReply::Audit(entries) if args.json => {
                let entries: Vec<serde_json::Value> =
                    entries.iter().filter_map(|entry| serde_json::from_str(entry).ok()).collect();
                output::json(&entries);
            }
            AdminReply::Audit(entries) => {
                entries.iter().for_each(|entry| output::line(output::json_escaped(entry)));
            }
            _ => return Err(Failure::new(doing, unexpected())),
        }
        Ok(())
    })
}

fn print(sessions: Vec<SessionInfo>, json: bool) {
    if json {
        let shown = |session: SessionInfo| {
            let SessionInfo { id, user, peer, opened_ms, connections } = session;
            ShownSession { id: id.to_string(), user, peer, opened_ms, connections }
        };
        return output::json(&sessions.into_iter().map(shown).collect::<Vec<_>>());
    }
    let width = sessions.iter().map(|session| session.user.len()).max().unwrap_or(0).max(4);
    output::line(format!("{:32}  {:width$}  CONNECTIONS  PEER", "SESSION", "USER"));
    for SessionInfo { id, user, peer, connections, .. } in sessions {
        output::line(format!("{id}  {:width$}  {connections:>11}  {peer}", output::name(&user)));
    }
}
