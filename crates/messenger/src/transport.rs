//! What a session stands on: a reliable stream of bytes both ways that may break at any byte.
//!
//! [`tcp`] is the real one; [`memory`] stays within a process, and [`faulty`] breaks what is below it. A transport carries no meaning; a session outlives several.

pub mod faulty;
pub mod memory;
pub mod tcp;

use std::io;

use base::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

/// One connected stream of bytes, in its two directions.
pub struct Wire {
    /// What comes in.
    pub reader: Box<dyn AsyncRead + Send + Unpin>,
    /// What goes out. Vectored writes should be real ones.
    pub writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// The peer's address, for people.
    pub address: String,
}

/// A way to make [`Wire`]s.
pub trait Transport: Send + Sync + 'static {
    /// Starts to take connections at `address`.
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>>;

    /// Connects to an endpoint as [`Acceptor::endpoint`] gives it.
    fn dial<'a>(&'a self, endpoint: &'a str) -> BoxFuture<'a, io::Result<Wire>>;
}

/// Where connections arrive.
pub trait Acceptor: Send {
    /// The address bound to.
    fn endpoint(&self) -> String;

    /// The next connection. Cancel safe.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>>;
}
