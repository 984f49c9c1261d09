//! TCP whose streams a test can break and freeze.

use std::io;
use std::sync::Arc;

use base::BoxFuture;
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::transport::{Acceptor, ConnectTicket, Road, TicketOffice, Transport, Wire};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex, split};
use tokio::sync::watch;

/// TCP through a pump, which breaks or freezes all dialled streams on request.
#[derive(Clone)]
pub(crate) struct PumpedTcp {
    /// Number of requests to break all streams.
    cuts: watch::Sender<u64>,
    frozen: watch::Sender<bool>,
}

impl PumpedTcp {
    pub(crate) fn new() -> PumpedTcp {
        PumpedTcp { cuts: watch::Sender::new(0), frozen: watch::Sender::new(false) }
    }

    /// While `frozen` is set, no bytes move.
    pub(crate) fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    /// Breaks all streams. Returns their number.
    pub(crate) fn cut(&self) -> usize {
        let live = self.cuts.receiver_count();
        self.cuts.send_modify(|n| *n += 1);
        live
    }
}

impl Transport for PumpedTcp {
    fn bind<'a>(
        &'a self,
        address: &'a str,
        tickets: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move { Tcp::default().bind(address, tickets).await })
    }

    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        ticket: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let wire = Tcp::default().dial(endpoint, ticket).await?;
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
