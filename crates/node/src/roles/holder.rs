//! The role that keeps the connections of front ends while the gateway restarts.

use std::path::Path;

use holder::{Holder, HolderConfig};

use crate::announce::Ready;
use crate::failure::{Doing, Result};
use crate::role::{self, RoleArgs, RoleProcess, StopSignals};
use crate::state::Role;

/// Runs the role until a signal stops it. The gateway connects to the UNIX socket `socket`.
///
/// # Errors
/// If the socket cannot be bound.
pub fn run(args: &RoleArgs, socket: &Path) -> Result<()> {
    role::run(Role::Holder, args, |process| serve(process, socket.to_owned()))
}

async fn serve(process: RoleProcess, socket: std::path::PathBuf) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let socket = std::path::absolute(socket).doing("finding the holder's control socket")?;
    let holder = Holder::bind(HolderConfig::new(&socket)).doing("binding the holder's control socket")?;
    role::ready(Ready { metrics: Some(process.metrics), ..Ready::default() });
    holder.run(signals.next()).await;
    role::stopping();
    Ok(())
}
