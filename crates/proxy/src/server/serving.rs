//! Serves the attachments of one event loop.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::task::spawn_local;
use base::thread::ThreadClass;
use base::watch;
use channel::{
    Carrier, ChannelError, ChannelHello, ChannelWelcome, HostMemory, MemoryAccess, MemoryAnswer, Reach,
    Socket, TargetInfo, VERSION,
};
use store::stripes::Engines;
use tokio::sync::mpsc::UnboundedReceiver;

use super::hellos::{HelloPlace, Hellos};
use super::host_attachment::{HostAttachment, Reached, Rings};
use super::listener::AsyncListener;
use super::loops::{Loops, OnLoop, Peer, Placed};
use super::offers::OfiHostSource;
use super::seats::{SeatHeld, Seats};
use super::{Counts, ServedTarget, ServerOptions};
use crate::proof::prove_to_osd;

/// How long a peer may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// What the loops of a server share.
#[derive(Clone)]
pub(super) struct ServingContext {
    pub(super) targets: watch::Receiver<Arc<[ServedTarget]>>,
    pub(super) engines: Arc<Engines>,
    pub(super) options: ServerOptions,
    pub(super) counts: Arc<Counts>,
    pub(super) seats: Arc<Seats>,
    pub(super) offers: Arc<OfiHostSource>,
    pub(super) serves: mpsc::Sender<Infallible>,
    pub(super) stopped: watch::Receiver<bool>,
}

/// The seat of an attachment, which the server's status counts. Dropping it frees the seat.
struct AttachedSeat {
    held: SeatHeld,
    counts: Arc<Counts>,
    _serves: mpsc::Sender<Infallible>,
}

impl AttachedSeat {
    fn new(held: SeatHeld, counts: &Arc<Counts>, serves: mpsc::Sender<Infallible>) -> AttachedSeat {
        counts.seats.fetch_add(1, Ordering::Relaxed);
        AttachedSeat { held, counts: Arc::clone(counts), _serves: serves }
    }
}

impl Drop for AttachedSeat {
    fn drop(&mut self) {
        self.counts.seats.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ServingContext {
    /// Accepts osds until the server is stopped and the attachments of all loops have ended.
    pub(super) async fn accept(self, listener: AsyncListener, loops: Loops) {
        let hellos = Hellos::new();
        let seats = Arc::clone(&self.seats);
        let mut stopped = self.stopped.clone();
        loop {
            let socket = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => break,
                socket = listener.accept() => socket,
            };
            match socket {
                Ok((socket, peer)) => {
                    let Some(place) = hellos.admit(peer) else { continue };
                    match loops.place(socket, place) {
                        Ok(Placed::Here(socket, place, on_loop)) => self.open(socket, place, on_loop),
                        Ok(Placed::Sent) => {}
                        Err(e) => tracing::warn!("a connection of an osd is dropped: {e}"),
                    }
                    // A dropped peer frees its descriptor before the next peer takes another.
                    tokio::task::yield_now().await;
                }
                Err(e) => {
                    tracing::error!("cannot accept a connection of an osd: {e}");
                    hellos.shed();
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop((self, listener));
        seats.all_free().await;
    }

    /// Serves the peers that the first loop passes to this loop, until the server is stopped.
    pub(super) async fn serve_peers(self, mut peers: UnboundedReceiver<Peer>) {
        let mut stopped = self.stopped.clone();
        loop {
            let peer = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => return,
                peer = peers.recv() => peer,
            };
            let Some(Peer { socket, place, on_loop }) = peer else { return };
            match socket.attach() {
                Ok(socket) => self.open(socket, place, on_loop),
                Err(e) => tracing::warn!("a connection of an osd is dropped: {e}"),
            }
        }
    }

    /// Performs the handshake and serves the peer, in its own task, so that a silent peer does not
    /// delay others.
    fn open(&self, socket: Socket, place: HelloPlace, on_loop: OnLoop) {
        let mut offered = self.targets.clone();
        let mut stopped = self.stopped.clone();
        let targets = Arc::clone(&offered.borrow_and_update());
        let (options, counts) = (self.options.clone(), Arc::clone(&self.counts));
        let engines = Arc::clone(&self.engines);
        let (seats, offers) = (Arc::clone(&self.seats), Arc::clone(&self.offers));
        let serves = self.serves.clone();
        spawn_local(ThreadClass::Channel, async move {
            let decide = |hello: &ChannelHello, carrier: &Carrier| {
                let seat = AttachedSeat::new(seats.claim(hello.seat)?, &counts, serves);
                let number = counts.attachments.fetch_add(1, Ordering::Relaxed) + 1;
                let name = format!("attachment {number} ({})", hello.seat);
                let (welcome, access, rings) =
                    decide(hello, carrier, &targets, &options, &offers, &seat.held, number)?;
                Ok((welcome, access, (name, seat, rings)))
            };
            let trust = &options.trust;
            let opening = async {
                let mut socket = socket;
                if let Socket::Tcp(stream) = &mut socket {
                    prove_to_osd(stream, trust).await?;
                }
                channel::accept(socket, decide).await
            };
            let opened = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => return,
                () = place.lost() => return tracing::debug!("a peer that has sent no hello has lost its slot"),
                opened = tokio::time::timeout(HELLO_TIMEOUT, opening) => opened,
            };
            let ((name, seat, rings), control) = match opened {
                Ok(Ok((_, admitted, control))) => (admitted, control),
                Ok(Err(e)) => return tracing::warn!("no attachment was opened: {e}"),
                Err(_) => return tracing::warn!("no attachment was opened: the peer sent no hello in time"),
            };
            drop(place);
            let attachment = HostAttachment::new(targets, engines, rings, control, counts, &options);
            let stop = async {
                tokio::select! {
                    biased;
                    _ = stopped.wait_for(|stop| *stop) => {}
                    Ok(()) = offered.changed() => {
                        tracing::info!("{name} ends because a target was remounted");
                    }
                }
            };
            attachment.run(&name, stop, || drop((on_loop, seat))).await;
        });
    }
}

/// Decides how to serve an osd. If possible, the server provides the host memory that the osd asks
/// for, and reserves it for the `seat`. Otherwise it states the reason, and the control socket carries
/// all data, which is slower. A request above the server's limits is refused.
fn decide(
    hello: &ChannelHello,
    carrier: &Carrier,
    targets: &[ServedTarget],
    options: &ServerOptions,
    offers: &Arc<OfiHostSource>,
    seat: &SeatHeld,
    attachment: u64,
) -> channel::Result<(ChannelWelcome, Option<MemoryAccess>, Option<Rings>)> {
    let targets_info = targets.iter().map(|target| TargetInfo { uuid: target.uuid }).collect();
    let memory = MemoryAnswer::None(None);
    let welcome =
        ChannelWelcome { version: VERSION, nonce: hello.nonce, attachment, memory, targets: targets_info };
    let Some(request) = &hello.memory else { return Ok((welcome, None, None)) };
    request.layout.check()?;
    seat.reserve(request.layout.len(), hello.outstanding as usize)?;
    let without_memory = |welcome: ChannelWelcome, why: String| {
        tracing::warn!("attachment {attachment} has no host memory: {why}");
        seat.release_memory();
        Ok((ChannelWelcome { memory: MemoryAnswer::None(Some(why)), ..welcome }, None, None))
    };
    let memory = HostMemory::new(request.layout)?;
    let opened = match &request.reach {
        Reach::Descriptors if carrier.carries_memory() => Reached::by_descriptors(&memory, carrier),
        Reach::Descriptors => {
            let why = "file descriptors cannot be sent over TCP; use a UNIX socket, or the engine ofi";
            return without_memory(welcome, why.to_owned());
        }
        Reach::Ofi { provider } => Reached::by_offer(offers, provider, &memory),
    };
    let (reached, answer, access) = match opened {
        Ok(opened) => opened,
        Err(ChannelError::Refused(why)) => return without_memory(welcome, why),
        Err(e) => return without_memory(welcome, e.to_string()),
    };
    for target in targets {
        target.store.register_memory(&memory.arena);
    }
    let rings = Rings::new(memory, reached, hello.outstanding as usize, options.faults.clone());
    Ok((ChannelWelcome { memory: answer, ..welcome }, access, Some(rings)))
}
