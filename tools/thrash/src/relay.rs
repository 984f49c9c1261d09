//! [`Relay`]: a TCP proxy between clients and a node, which can cut, hold and delay connections.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a relay does with its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayMode {
    /// Forwards all data.
    Pass,
    /// Resets all connections, and refuses new ones.
    Cut,
    /// Keeps connections open, and forwards no data.
    Hold,
    /// Forwards each piece of data after a delay.
    Delay(Duration),
}

/// A TCP proxy. Its task ends with its runtime.
#[derive(Debug, Clone)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<RelayShared>,
}

#[derive(Debug)]
struct RelayShared {
    mode: watch::Sender<RelayMode>,
    /// Address of the node; it changes when the node is started again.
    upstream: Mutex<Option<String>>,
    /// Number of connections and pieces of data that a mode other than `Pass` has affected.
    affected: AtomicU64,
}

impl Relay {
    /// Opens a relay on a free port. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// If no port can be opened.
    pub async fn open() -> std::io::Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(RelayShared {
            mode: watch::Sender::new(RelayMode::Pass),
            upstream: Mutex::new(None),
            affected: AtomicU64::new(0),
        });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Relay { address, shared })
    }

    /// Returns the address for clients.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Sets the address of the node.
    pub fn set_upstream(&self, endpoint: &str) {
        *self.shared.upstream.lock().expect("no holder panics") = Some(endpoint.to_owned());
    }

    /// Sets the mode of all connections.
    pub fn set_mode(&self, mode: RelayMode) {
        self.shared.mode.send_replace(mode);
    }

    /// Returns the number of connections and pieces of data that a mode other than
    /// [`RelayMode::Pass`] has affected.
    pub fn affected(&self) -> u64 {
        self.shared.affected.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, shared: Arc<RelayShared>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(serve(client, Arc::clone(&shared)));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Closes a connection with a reset, as a failing network path does.
fn reset(stream: &TcpStream) {
    // If the option cannot be set, the connection ends with a FIN, which is a fault too.
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

async fn serve(client: TcpStream, shared: Arc<RelayShared>) {
    let mut mode = shared.mode.subscribe();
    reset(&client);
    if *mode.borrow() == RelayMode::Cut {
        shared.affected.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let upstream = shared.upstream.lock().expect("no holder panics").clone();
    let Some(upstream) = upstream else { return };
    let Ok(node) = TcpStream::connect(&upstream).await else { return };
    reset(&node);
    let _ = client.set_nodelay(true);
    let _ = node.set_nodelay(true);
    let (client_read, client_write) = client.into_split();
    let (node_read, node_write) = node.into_split();
    tokio::select! {
        () = forward(client_read, node_write, &shared) => {}
        () = forward(node_read, client_write, &shared) => {}
        _ = mode.wait_for(|mode| *mode == RelayMode::Cut) => {
            shared.affected.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Forwards data in one direction until one side closes the connection.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &RelayShared) {
    let mut mode = shared.mode.subscribe();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(len @ 1..) = from.read(&mut buffer).await else { return };
        let now = *mode.borrow_and_update();
        match now {
            RelayMode::Pass | RelayMode::Cut => {}
            RelayMode::Hold => {
                shared.affected.fetch_add(1, Ordering::Relaxed);
                if mode.wait_for(|mode| *mode != RelayMode::Hold).await.is_err() {
                    return;
                }
            }
            RelayMode::Delay(delay) => {
                shared.affected.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(delay).await;
            }
        }
        if to.write_all(&buffer[..len]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends back each byte that it receives.
    async fn echo(listener: TcpListener) {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    }

    #[test]
    fn a_relay_forwards_holds_and_cuts_connections() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let upstream = listener.local_addr().unwrap().to_string();
            tokio::spawn(echo(listener));
            let relay = Relay::open().await.unwrap();
            relay.set_upstream(&upstream);
            let mut stream = TcpStream::connect(relay.address()).await.unwrap();
            let mut byte = [1];
            stream.write_all(&byte).await.unwrap();
            stream.read_exact(&mut byte).await.unwrap();
            assert_eq!(relay.affected(), 0);

            relay.set_mode(RelayMode::Hold);
            stream.write_all(&byte).await.unwrap();
            let early = tokio::time::timeout(Duration::from_millis(50), stream.read_exact(&mut byte)).await;
            assert!(early.is_err(), "no data passes");
            assert_eq!(relay.affected(), 1);
            relay.set_mode(RelayMode::Pass);
            stream.read_exact(&mut byte).await.unwrap();

            relay.set_mode(RelayMode::Cut);
            assert!(stream.read_exact(&mut byte).await.is_err());
            let mut refused = TcpStream::connect(relay.address()).await.unwrap();
            assert!(matches!(refused.read(&mut byte).await, Ok(0) | Err(_)));
            assert!(relay.affected() >= 3);
        });
    }
}
