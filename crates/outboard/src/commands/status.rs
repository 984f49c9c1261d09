//! `outboard status`: shows the state of a node, as reported by its supervisor and its osd.

use std::io::Write;
use std::time::Duration;

use base::fault::Armed;
use clap::Args;

use crate::args::NodeArgs;
use crate::commands::locate;
use node::debug_socket::{self, DebugRequest};
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::report::NodeReport;
use node::roster::{self, Roster};
use node::state::NodeState;
use wire::{AdminReply, AdminRequest, Placement, Role};

/// Maximum time to connect to the osd, and maximum time to wait for its answer. After this time the
/// osd counts as down.
const PATIENCE: Duration = Duration::from_secs(3);

/// Show a node: its network, processes, targets and pools
///
/// The command also works while processes of the node (roles) or the whole node are down, and shows
/// which of them are down. The exit status says only whether the command could determine the state.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard status\n  \
    outboard status --dir /srv/node1 --json | jq '.processes[] | {role, pid, restarts}'\n  \
    outboard status --endpoint 10.0.0.7:7400")]
pub struct StatusArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Prints the node's state.
pub fn run(args: StatusArgs, node: &NodeArgs) -> Result<()> {
    let doing = "determining the node's state";
    let dir = match node.endpoint {
        Some(_) => None,
        None => Some(NodeDir::open(&locate::root(node)).doing(doing)?),
    };
    let mut report = match (&dir, &node.endpoint) {
        (Some(dir), _) => {
            let up = dir.owner().doing(doing)?.is_some();
            let mut report = NodeReport::of_state(dir.path(), up, NodeState::load(dir));
            report.add_roster(Roster::load(dir), roster::is_recorded(dir) || dir.has_logs());
            report
        }
        (None, endpoint) => NodeReport::of_endpoint(endpoint.as_deref().unwrap_or_default()),
    };
    if let Some(endpoint) = report.endpoint.clone() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(doing)?;
        match runtime.block_on(ask(&endpoint, node)) {
            Ok((answer, faults)) => {
                report.add_answer(answer);
                faults.into_iter().for_each(|fault| report.add_fault(Role::Node, fault));
            }
            Err(e) if e.is_refusal() => return Err(e),
            Err(e) => report.problems.push(format!("the osd does not answer: {}", e.why())),
        }
    }
    if let Some(dir) = dir.filter(|_| report.has_store()) {
        match debug_socket::ask(&dir.debug_socket(), &DebugRequest::Show) {
            Ok(answer) => answer.faults.into_iter().for_each(|fault| report.add_fault(Role::Store, fault)),
            Err(e) => {
                report.problems.push(format!("cannot find out whether faults are armed in the store: {e}"))
            }
        }
    }
    let text = if args.json {
        serde_json::to_string_pretty(&report).doing(doing)? + "\n"
    } else {
        report.to_string()
    };
    std::io::stdout().write_all(text.as_bytes()).doing("printing the node's state")
}

/// Asks the osd for its status. In host placement, also for the armed faults, which the status omits.
async fn ask(endpoint: &str, node: &NodeArgs) -> Result<(client::NodeStatus, Vec<Armed>)> {
    let doing = "asking the osd for its status";
    let options =
        client::Options { connect_timeout: PATIENCE, request_timeout: PATIENCE, ..super::options() };
    let options = locate::connecting(node, options)?;
    let answer = async {
        let client = client::Client::connect(endpoint, options).await?;
        let asked = async {
            let status = client.status().await?;
            let faults = match status.placement {
                Placement::Host => client.administer(AdminRequest::ListFaults).await?,
                Placement::Dpu => return Ok((status, Vec::new())),
            };
            Ok((status, if let AdminReply::Faults { armed, .. } = faults { armed } else { Vec::new() }))
        };
        let answer: client::Result<_> = asked.await;
        client.close().await;
        answer
    };
    match tokio::time::timeout(2 * PATIENCE, answer).await {
        Ok(result) => result.doing(doing),
        Err(_) => Err(Failure::new(doing, format!("no answer within {} s", 2 * PATIENCE.as_secs()))),
    }
}
