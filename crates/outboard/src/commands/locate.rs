//! Finds the node to which a command connects.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use capability::Claims;
use client::Options;
use identity::Credentials;
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::node_keys;
use node::state::NodeState;

use crate::args::NodeArgs;

/// The default directory of a node.
pub const DEFAULT_DIR: &str = "outboard-node";

/// Returns the node's directory: the value of `--dir` or `OUTBOARD_DIR`, or else [`DEFAULT_DIR`].
pub fn root(args: &NodeArgs) -> PathBuf {
    args.dir.clone().unwrap_or_else(|| DEFAULT_DIR.into())
}

/// Adds to `options` how the command connects to the node: with which identity, over which network,
/// and from which address.
///
/// # Errors
/// If there are no credentials, or if they cannot be used.
pub fn connecting(args: &NodeArgs, options: Options) -> Result<Options> {
    let file = credentials_file(args)?;
    let trust = Credentials::load(&file).doing("reading the credentials")?.trust();
    // The next command with these credentials need not get a capability again. Credentials that
    // come through a pipe (`/dev/stdin`, `/dev/fd/63`) have no place for it.
    let is_kept = file.is_file() && !file.starts_with("/dev") && !file.starts_with("/proc");
    let capability_file = is_kept.then(|| capability_file(&file));
    let capability = args.capability.as_deref().map(read_capability).transpose()?;
    Ok(Options {
        trust,
        capability,
        capability_file,
        stack: args.network.clone(),
        source: args.bind,
        ..options
    })
}

/// Returns the file in which the commands with the credential file `credentials` keep their capability:
/// another one for each credential file, and never the credential file itself.
fn capability_file(credentials: &Path) -> PathBuf {
    let mut name = credentials.as_os_str().to_owned();
    name.push(".capability");
    name.into()
}

/// Reads a capability.
///
/// # Errors
/// If the file cannot be read, or contains no capability. The command must not send other files to the
/// node: `file` may contain a private key.
pub fn read_capability(file: &Path) -> Result<Bytes> {
    let doing = format!("reading the capability {}", file.display());
    let bytes = std::fs::read(file).doing(doing.clone())?;
    match Claims::unverified(&bytes) {
        Some(_) => Ok(bytes.into()),
        None => {
            Err(Failure::new(doing, "the file contains no capability; issue one with `outboard token issue`"))
        }
    }
}

/// Returns the file with the identity with which the command connects to the node: the credentials of
/// `--credentials` or `OUTBOARD_CREDENTIALS`, or else those in the node's directory.
pub fn credentials_file(args: &NodeArgs) -> Result<PathBuf> {
    match &args.credentials {
        Some(path) => Ok(path.clone()),
        None => {
            let path = node_keys::credentials_path(&root(args));
            if !path.exists() {
                let why = format!(
                    "{} does not exist; name a credential file with --credentials or OUTBOARD_CREDENTIALS, or the \
                     directory of a node on this machine with --dir",
                    path.display()
                );
                return Err(Failure::new("reading the credentials", why));
            }
            Ok(path)
        }
    }
}

/// Returns the node's address for clients: the value of `--endpoint` or `OUTBOARD_ENDPOINT`, or
/// else the address that the node has recorded in its directory.
///
/// # Errors
/// The directory contains no node, or the node is not running.
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

/// Returns the address of the node's control plane, if the node has recorded it in its directory.
pub fn control(args: &NodeArgs) -> Option<String> {
    if args.endpoint.is_some() {
        return None;
    }
    NodeState::load(&NodeDir::open(&root(args)).ok()?)?.control
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_never_kept_in_a_credential_file() {
        let names = ["a.toml", "a.cred", "a", "a.capability"];
        let kept: Vec<PathBuf> = names.map(|name| capability_file(Path::new(name))).into();
        assert_eq!(kept[0], Path::new("a.toml.capability"));
        for (name, kept) in names.iter().zip(&kept) {
            assert_ne!(Path::new(name), kept);
        }
        assert_eq!(kept.iter().collect::<std::collections::BTreeSet<_>>().len(), kept.len());
    }
}
