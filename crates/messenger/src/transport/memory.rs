//! Byte streams within one process: the fault-free base of the simulated network.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use base::BoxFuture;
use base::collections::HashMap;
use tokio::io::{DuplexStream, duplex, split};
use tokio::sync::mpsc;

use super::{Acceptor, ConnectClaim, Transport, Wire};

/// Capacity of one direction of a stream, in bytes.
const CAPACITY_BYTES: usize = 64 << 10;

/// Maximum number of streams that wait to be accepted.
const BACKLOG: usize = 128;

type Endpoints = Arc<Mutex<HashMap<String, mpsc::Sender<Wire>>>>;

/// A network within this process. Its clones are the same network. Any string is an address; `*`
/// chooses a free address.
#[derive(Clone, Default)]
pub struct MemoryNetwork {
    endpoints: Endpoints,
}

struct MemoryAcceptor {
    endpoint: String,
    wires: mpsc::Receiver<Wire>,
}

impl Transport for MemoryNetwork {
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            let endpoint =
                if address == "*" { format!("memory-{}", endpoints.len()) } else { address.into() };
            if endpoints.get(&endpoint).is_some_and(|taken| !taken.is_closed()) {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            let (sender, wires) = mpsc::channel(BACKLOG);
            endpoints.insert(endpoint.clone(), sender);
            Ok(Box::new(MemoryAcceptor { endpoint, wires }) as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(&'a self, endpoint: &'a str, _: &'a ConnectClaim) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let listener =
                self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).get(endpoint).cloned();
            let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
            let listener = listener.ok_or_else(refused)?;
            let (ours, theirs) = duplex(CAPACITY_BYTES);
            listener.send(wire(theirs, "client")).await.map_err(|_| refused())?;
            Ok(wire(ours, endpoint))
        })
    }
}

impl Acceptor for MemoryAcceptor {
    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async { self.wires.recv().await.ok_or_else(|| io::ErrorKind::BrokenPipe.into()) })
    }
}

/// Creates a [`Wire`] over one end of a stream in memory.
pub(super) fn wire(stream: DuplexStream, address: &str) -> Wire {
    let (reader, writer) = split(stream);
    Wire::stream(Box::new(reader), Box::new(writer), address.to_owned())
}
