//! The port of the control plane. If the configuration leaves the port open, the osd uses the port of its
//! last start, so that a firewall and operators' programs need to learn it only once.

use std::io;
use std::path::Path;

use control::ControlListener;
use wire::limits::MAX_SHARDS;

use super::durable::{create_directory, replace_file};
use super::port::{further_ports, port_of};

/// Path of the file with the last port, relative to the node's directory. Roles run in this directory.
pub const LAST_PORT: &str = "run/control.port";

/// Binds the port of the last start at the host of `listen`, where the osd serves clients. `file`
/// remembers the port. If the port is in use, or there was no start yet, binds and remembers another one.
///
/// # Errors
/// If no port of the host can be used.
pub fn bind(listen: &str, file: &Path) -> io::Result<ControlListener> {
    let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
    // The osd may have more shards at its next start, and they need the ports after the first one.
    let first = port_of(listen).filter(|first| *first != 0);
    let is_for_shards =
        |port: u16| first.is_some_and(|first| port.checked_sub(first).is_some_and(|n| n < MAX_SHARDS));
    let bind = |port: u16| ControlListener::bind(&format!("{host}:{port}"));
    let last = last_port(file);
    if let Some(port) = last.filter(|port| !is_for_shards(*port)) {
        match bind(port) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                tracing::warn!(
                    "the last port of the control plane, {port}, is in use; choosing another port"
                );
            }
            bound => return bound,
        }
    }
    let listener = further_ports()
        .filter(|port| !is_for_shards(*port))
        .map(bind)
        .find(|bound| !matches!(bound, Err(e) if e.kind() == io::ErrorKind::AddrInUse))
        .unwrap_or_else(|| bind(0))?;
    if let Err(error) = remember(listener.address().port(), file) {
        tracing::warn!(%error, "the port of the control plane will be another one at the next start");
    }
    Ok(listener)
}

/// Reads the port of the last start.
fn last_port(file: &Path) -> Option<u16> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok().filter(|port| *port != 0)
}

fn remember(port: u16, file: &Path) -> Result<(), super::dir::DirError> {
    if let Some(dir) = file.parent() {
        create_directory(dir)?;
    }
    replace_file(file, format!("{port}\n"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::port::FURTHER_PORTS;

    /// Binds for an osd that listens at `listen`, and frees the port again.
    fn port(listen: &str, file: &Path) -> u16 {
        bind(listen, file).unwrap().address().port()
    }

    #[test]
    fn a_start_uses_the_port_of_the_last_start_until_it_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run/control.port");
        let first = port("127.0.0.1:0", &file);
        assert!(FURTHER_PORTS.contains(&first), "{first} may be in use by outgoing traffic");
        assert_eq!(port("127.0.0.1:0", &file), first);
        let taken = TcpListener::bind(("127.0.0.1", first)).unwrap();
        let second = port("127.0.0.1:0", &file);
        assert_ne!(second, first);
        drop(taken);
        assert_eq!(port("127.0.0.1:0", &file), second, "the new port is remembered");
    }

    #[test]
    fn a_damaged_memory_and_ports_of_shards_lead_to_another_port() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("port");
        for content in ["", "what?", "0", "65536", "-1", "1 2"] {
            std::fs::write(&file, content).unwrap();
            let chosen = port("127.0.0.1:0", &file);
            assert_eq!(last_port(&file), Some(chosen), "{content:?}");
        }
        let last = last_port(&file).unwrap();
        // The port would be that of the third shard.
        assert_ne!(port(&format!("127.0.0.1:{}", last - 2), &file), last);
    }
}
