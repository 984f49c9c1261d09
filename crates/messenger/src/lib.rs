//! Messages and bulk transfers between two processes, over interchangeable network stacks.
//!
//! A [`NetworkStack`] creates [`Connection`]s. A connection carries ordered messages in both
//! directions. Each message arrives exactly once, even if the transport below breaks and is
//! replaced. A connection also moves *bulk* data: one side offers memory by sending a
//! [`BulkDescriptor`](wire::BulkDescriptor) in a message. The **receiver of the descriptor** drives
//! the transfer: it pulls data from the memory or pushes data into it. Clients offer memory and the
//! server drives the transfers, so the server controls the flow of bulk data. Heartbeats are sent
//! before queued bulk data.
//!
//! The messenger does not know objects. Only its users interpret the header of a message.
//!
//! ```
//! use outboard_messenger::{ConnectOptions, ConnectionEvent, Message, NetworkStack, TcpStack};
//! # use base::block::Payload;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> outboard_messenger::Result<()> {
//! let stack = TcpStack::default();
//! let mut listener = stack.listen("127.0.0.1:0").await?;
//! let endpoint = listener.endpoint();
//! let (client, server) = tokio::join!(stack.connect(&endpoint, ConnectOptions::default()), listener.accept());
//! let ((client, _replies), (_server, mut requests)) = (client?, server?);
//! client.send(Message { header: "hello".into(), payload: Payload::compute(0, "data".into()) }).await?;
//! match requests.next().await {
//!     ConnectionEvent::Message(message) => assert_eq!(message.payload.data(), "data"),
//!     other => panic!("{other:?}"),
//! }
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! The layers, from the bottom up: [`transport`] moves bytes between machines (TCP, libfabric, or a
//! simulation with faults). [`frame`] encodes frames by pure functions. `connection` keeps a
//! connection's message order, credits, offers and unacknowledged frames. `stack` creates
//! connections by a handshake. `docs/protocol.md` describes the format of frames.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod admissions;
mod api;
mod choice;
mod config;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod connection;
mod dialer;
pub mod frame;
mod handshake;
mod home;
mod metrics;
mod paths;
mod records;
mod stack;
pub mod transport;

pub use admissions::{Admissions, Shortage};
pub use api::{
    BulkRegion, BulkSink, BulkSource, ConnectOptions, Connection, ConnectionEvent, Ends, Incoming, Limits,
    Listener, Message, MessengerError, NetworkStack, PeerInfo, Pulled, Result,
};
pub use choice::{NoSuchStack, PathName, StackChoice, StackOptions, UseAs, open};
pub use config::ConnectionConfig;
pub use paths::Path;
pub use records::{PlainRecords, RecordLayer};
pub use stack::{SimStack, StreamStack, TcpStack};
pub use transport::ofi::ReceiveQueueKind;

/// Starts a task of the messenger in the current role. The role's thread may also do other work.
/// The CPU time of the task is therefore recorded separately, as time of the messenger.
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
    base::task::spawn(base::thread::ThreadClass::Messenger, task)
}
