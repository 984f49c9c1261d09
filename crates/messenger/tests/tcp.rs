//! The conformance suite over TCP. The bytes of its transports pass through a pump that can break
//! and freeze them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::transport::{Acceptor, ConnectClaim, Road, Transport, Wire};
use outboard_messenger::{ConnectionConfig, StreamStack};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex, split};
use tokio::sync::watch;

/// TCP through a pump, which breaks or freezes all dialled streams on request.
#[derive(Clone)]
struct PumpedTcp {
    /// Number of requests to break all streams.
    cuts: watch::Sender<u64>,
    frozen: watch::Sender<bool>,
}

impl PumpedTcp {
    /// Breaks all streams. Returns their number.
    fn cut(&self) -> usize {
        let live = self.cuts.receiver_count();
        self.cuts.send_modify(|n| *n += 1);
        live
    }
}

impl Transport for PumpedTcp {
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move { Tcp::default().bind(address).await })
    }

    fn dial<'a>(&'a self, endpoint: &'a str, claim: &'a ConnectClaim) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let wire = Tcp::default().dial(endpoint, claim).await?;
            let Road::Stream(far_reader, far_writer) = wire.road else { panic!("TCP is a stream") };
            let (ours, theirs) = duplex(64 << 10);
            let ((reader, writer), (near_reader, near_writer)) = (split(ours), split(theirs));
            let (mut cuts, frozen) = (self.cuts.subscribe(), self.frozen.clone());
            tokio::spawn(async move {
                let there = pump(near_reader, far_writer, frozen.subscribe());
                let back = pump(far_reader, near_writer, frozen.subscribe());
                tokio::select! {
                    _ = cuts.changed() => {}
                    // An error in one direction ends both directions, as in a broken connection.
                    _ = async { tokio::try_join!(there, back) } => {}
                }
            });
            Ok(Wire::stream(Box::new(reader), Box::new(writer), wire.address))
        })
    }
}

/// Moves the bytes of one direction of a stream.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut frozen: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buf = vec![0; 64 << 10];
    loop {
        let len = from.read(&mut buf).await?;
        if len == 0 {
            return to.shutdown().await;
        }
        frozen.wait_for(|frozen| !*frozen).await.map_err(io::Error::other)?;
        to.write_all(&buf[..len]).await?;
    }
}

fn rig() -> Rig {
    let grace = Duration::from_millis(900);
    let config =
        ConnectionConfig { heartbeat: Duration::from_millis(150), grace, ..ConnectionConfig::default() };
    let network = PumpedTcp { cuts: watch::Sender::new(0), frozen: watch::Sender::new(false) };
    let (cut, freeze) = (network.clone(), network.clone());
    Rig {
        stack: Arc::new(StreamStack::over(network, config)),
        address: "127.0.0.1:0".into(),
        cut: Box::new(move || cut.cut()),
        freeze: Box::new(move |frozen| {
            freeze.frozen.send_replace(frozen);
        }),
        grace,
        patience: Rig::PATIENCE,
        slow: false,
        seed: conformance::seed(),
    }
}

macro_rules! over_tcp {
    ($check:ident) => {
        #[tokio::test]
        async fn $check() {
            let rig = rig();
            let check = conformance::$check(&rig);
            tokio::time::timeout(Duration::from_secs(50), check).await.expect("the check hangs");
        }
    };
}

outboard_messenger::for_each_conformance_check!(over_tcp);
