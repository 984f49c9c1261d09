//! A simulated network of named hosts, with faults from a seed.
//!
//! The network carries byte streams between the hosts of one process, and packets with one-sided
//! transfers ([`super::packets`]). It delays, stalls, damages and breaks them at random, and cuts
//! hosts off on request.
//!
//! ```
//! use std::time::Duration;
//! use outboard_messenger::transport::sim::{CutKind, SimFaults, SimNetwork};
//! use outboard_messenger::{ConnectOptions, ConnectionConfig, NetworkStack};
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> outboard_messenger::Result<()> {
//! let network = SimNetwork::new(7, SimFaults::NONE);
//! let osd = network.host("osd").stack(ConnectionConfig::default());
//! let client = network.host("client").stack(ConnectionConfig::default());
//! let mut listener = osd.listen("osd:7700").await?;
//! let (client, server) =
//!     tokio::join!(client.connect("osd:7700", ConnectOptions::default()), listener.accept());
//! network.cut("client", "osd", CutKind::Silent);
//! tokio::time::sleep(Duration::from_secs(1)).await;
//! network.heal_all();
//! # (client?, server?);
//! # Ok(())
//! # }
//! ```
//!
//! **Time.** The network keeps a queue of future events. One task of the runtime, which belongs to
//! no role, executes the events at their times. Timers of the runtime have a resolution of 1 ms, so
//! an event may be late by this time.
//!
//! **Repeatability.** On one current-thread runtime with a paused clock, nothing depends on the
//! machine. The same seed then leads to the same sequence of events, whose hash is
//! [`SimNetwork::trace`].
//!
//! **Processes.** [`SimNetwork::host`] stands for the process that runs on the host. After
//! [`SimNetwork::sever`], the process is dead: its calls and its destructors have no effect on the
//! network. The next call of [`SimNetwork::host`] stands for the next process on the host.

mod endpoint;
mod faults;
mod host;
mod link;
mod network;
mod state;
mod stream;

pub(crate) use endpoint::{SimEndpoint, SimRegion};
pub use faults::{SimCounts, SimFaults, SimRoute};
pub use host::{SimHost, SimPackets, SimStreams};
pub use network::SimNetwork;

/// How a cut affects the data between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutKind {
    /// No data arrives, and no side is told, as if a cable were pulled. A healed stream continues.
    Silent,
    /// All transports between the hosts break, and attempts to connect are refused.
    Reset,
}
