//! The commands, one file per command.

pub mod bench;
pub mod cp;
pub mod debug;
pub mod disk;
pub mod doctor;
pub mod down;
pub mod ec;
pub mod fsck;
pub mod gateway;
pub mod get;
mod locate;
pub mod ls;
pub mod osd;
pub mod pool;
pub mod put;
pub mod rm;
pub mod scrub;
mod session;
pub mod sessions;
pub mod stat;
pub mod status;
pub mod store;
pub mod target;
pub mod tenant;
pub mod token;
pub mod up;
pub mod user;

/// Returns the client options that all commands use. With the default timeouts, a command continues
/// across the restart of any role of the node.
fn options() -> client::Options {
    client::Options::default()
}
