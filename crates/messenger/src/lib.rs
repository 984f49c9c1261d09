//! Messages and bulk transfers between two processes, over interchangeable network stacks.
//!
//! A [`NetworkStack`] makes [`Connection`]s. A connection carries ordered messages both ways, exactly once within its
//! session even when the transport below breaks and is made anew, and moves *bulk* data: one side offers memory as a
//! [`BulkDescriptor`] inside a message, and the **receiver of the descriptor** drives the transfer (pulls from it or
//! pushes into it), so flow control stays with the server and heartbeats never wait behind data.
//!
//! The messenger knows nothing of objects. What the header of a message means is its users' business.
//!
//! ```
//! use outboard_messenger::{ConnectOptions, ConnectionEvent, Message, NetworkStack, TcpStack};
//! # use base::block::Payload;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> outboard_messenger::Result<()> {
//! let stack = TcpStack::default();
//! let mut listener = stack.listen("127.0.0.1:0", 0).await?;
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
//! Inside, from the bottom up: [`transport`] brings bytes from here to there (TCP, libfabric, or a simulation with faults),
//! [`frame`] is what the bytes mean (pure functions), `session` keeps order, credits, offers and what must be sent
//! again, and `stack` makes sessions by handshake. `docs/protocol.md` draws the frames.

#![forbid(unsafe_code)]

mod admissions;
mod api;
mod choice;
mod config;
pub mod conformance;
pub mod frame;
mod handshake;
mod home;
mod metrics;
mod paths;
mod session;
mod stack;
pub mod transport;

pub use admissions::Admissions;
pub use api::{
    BulkRegion, BulkSink, BulkSource, ConnectOptions, Connection, ConnectionEvent, Ends, Incoming, Limits,
    Listener, Message, MessengerError, NetworkStack, PeerInfo, Pulled, Result,
};
pub use choice::{NoSuchStack, PathName, StackChoice, StackOptions, UseAs, open};
pub use config::{Entropy, SessionConfig};
pub use paths::Path;
pub use stack::{SimStack, StreamStack, TcpStack};
pub use transport::ofi::ReceiveQueueKind;

/// Starts a task of the messenger's. Its thread may do other work, too, so what it costs is booked.
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
    tokio::spawn(base::work::booked(base::thread::ThreadClass::Messenger, task))
}
