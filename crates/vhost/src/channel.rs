//! The channel by which the back end sends requests to the front end.

use std::io;
use std::os::fd::AsFd;

use rustix::net::SendFlags;

use crate::message;

/// Asks the front end to read the configuration space again. Does not wait.
///
/// # Errors
/// If the front end has closed the channel, or does not read it.
pub(crate) fn send_config_change(channel: impl AsFd) -> io::Result<()> {
    let message = message::config_change();
    let sent = rustix::net::send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    match sent == message.len() {
        true => Ok(()),
        false => Err(io::Error::other("the channel accepted a part of a message")),
    }
}
