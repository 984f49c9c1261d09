//! [`NbdServer`]: serves one disk to NBD clients.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::thread::ThreadClass;
use disk::Disk;
use futures::stream::{FuturesUnordered, StreamExt};
use nbd::{Export, NbdLimits};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// Maximum number of connections to one disk.
const CONNECTIONS_MAX: usize = 16;
/// Pause after a failed attempt to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one disk to NBD clients. Dropping it ends all connections.
#[derive(Debug)]
pub(crate) struct NbdServer {
    address: String,
    /// The file of a UNIX socket.
    socket: Option<PathBuf>,
    accepting: JoinHandle<()>,
}

enum NbdListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl NbdServer {
    /// Begins to serve a disk as the export `name`, which is also the default export.
    pub(crate) async fn start(
        address: &str,
        name: &str,
        disk: Arc<dyn Disk>,
        is_read_only: bool,
    ) -> io::Result<NbdServer> {
        let is_path = address.starts_with('/');
        let (listener, address) = if is_path {
            remove_stale(Path::new(address))?;
            (NbdListener::Unix(UnixListener::bind(address)?), address.to_owned())
        } else {
            let listener = TcpListener::bind(address).await?;
            let address = listener.local_addr()?.to_string();
            (NbdListener::Tcp(listener), address)
        };
        let export = Export { disk, is_read_only, description: format!("disk {name}") };
        let exports = BTreeMap::from([(String::new(), export.clone()), (name.to_owned(), export)]);
        let socket = is_path.then(|| PathBuf::from(&address));
        let accepting = base::task::spawn(ThreadClass::Client, accept(listener, Arc::new(exports)));
        Ok(NbdServer { address, socket, accepting })
    }

    /// Returns the address of the server.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.accepting.abort();
        if let Some(socket) = &self.socket {
            drop(std::fs::remove_file(socket));
        }
    }
}

/// Removes a socket file at which no process listens any more.
fn remove_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(io::Error::other(format!("{} exists and is no socket", path.display())))
        }
        Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => Err(io::Error::other(format!("another process listens at {}", path.display()))),
            Err(_) => std::fs::remove_file(path),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Accepts and serves connections until the task is aborted.
async fn accept(listener: NbdListener, exports: Arc<BTreeMap<String, Export>>) {
    let mut connections: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => accepted,
            Some(()) = connections.next() => continue,
        };
        let exports = Arc::clone(&exports);
        match accepted {
            Ok(Accepted::Tcp(stream)) => connections.push(Box::pin(serve(stream, exports))),
            Ok(Accepted::Unix(stream)) => connections.push(Box::pin(serve(stream, exports))),
            Err(e) => {
                tracing::warn!(error = %e, "cannot accept an NBD connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl NbdListener {
    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            NbdListener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Without this option, small messages wait for acknowledgements.
                stream.set_nodelay(true)?;
                Ok(Accepted::Tcp(stream))
            }
            NbdListener::Unix(listener) => Ok(Accepted::Unix(listener.accept().await?.0)),
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite, exports: Arc<BTreeMap<String, Export>>) {
    if let Err(e) = nbd::serve_connection(stream, &*exports, &NbdLimits::default()).await {
        tracing::debug!(error = %e, "an NBD connection has ended");
    }
}
