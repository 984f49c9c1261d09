//! Finds the node that a command should talk to.

use std::path::PathBuf;

use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::state::NodeState;

use crate::args::NodeArgs;

/// The default directory of a node.
pub const DEFAULT_DIR: &str = "outboard-node";

/// Returns the node's directory: `--dir`, `OUTBOARD_DIR`, or the default.
pub fn root(args: &NodeArgs) -> PathBuf {
    args.dir.clone().unwrap_or_else(|| DEFAULT_DIR.into())
}

/// Returns the address for clients: `--endpoint`, `OUTBOARD_ENDPOINT`, or the address of the node
/// in its directory.
///
/// # Errors
/// There is no node, or it is not up.
pub fn endpoint(args: &NodeArgs) -> Result<String> {
    if let Some(endpoint) = &args.endpoint {
        return Ok(endpoint.clone());
    }
    let doing = "looking for the node";
    let dir = NodeDir::open(&root(args)).doing(doing)?;
    let down = || {
        let path = dir.path().display();
        Failure::new(
            doing,
            format!("the node in {path} is down; start it with `outboard up --detach --dir {path}`"),
        )
    };
    if dir.owner().doing(doing)?.is_none() {
        return Err(down());
    }
    NodeState::load(&dir).and_then(|state| state.endpoint).ok_or_else(down)
}
