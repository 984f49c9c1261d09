//! The task that supervises an attachment. It opens one store channel for each incarnation of the
//! store.

use std::sync::Arc;
use std::time::Duration;

use channel::{
    Bell, ChannelError, ChannelHello, ChannelWelcome, MemoryAccess, MemoryAnswer, MemoryRequest, Reach,
    Socket, TargetInfo, VERSION,
};
use tokio::net::{TcpStream, UnixStream};

use crate::options::StoreEndpoint;
use crate::proof::prove_to_store;
use crate::shared::Shared;
use crate::store_channel::{ChannelDriver, RingSide, StoreChannel, StoreChannelOptions};

const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Opens store channels until the attachment is closed.
pub(crate) async fn supervise(shared: Arc<Shared>) {
    // If the runtime is dropped, no further store channel is opened, so calls must not wait for
    // one.
    let _closing = CloseOnDrop(Arc::clone(&shared));
    let mut backoff = BACKOFF_MIN;
    let mut incarnation = 0;
    while !shared.closed() {
        match tokio::time::timeout(Duration::from_secs(5), open(&shared, incarnation + 1)).await {
            Ok(Ok((store_channel, driver, targets))) => {
                incarnation += 1;
                backoff = BACKOFF_MIN;
                shared.up(&store_channel, targets);
                shared.incarnation.send_replace(incarnation);
                let why = driver.run(shared.closing.notified(), |why| shared.away(why)).await;
                drop(store_channel);
                tracing::warn!(
                    "incarnation {incarnation} of the store at {:?} ended: {why}",
                    shared.endpoint
                );
                metrics::counter!("outboard_proxy_incarnations_ended").increment(1);
            }
            Ok(Err(e)) => shared.away(&e.to_string()),
            Err(_) => shared.away("the store does not answer"),
        }
        shared.expire();
        tokio::select! {
            biased;
            () = shared.closing.notified() => {}
            () = tokio::time::sleep(backoff) => {}
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn open(
    shared: &Arc<Shared>,
    incarnation: u64,
) -> Result<(Arc<StoreChannel>, ChannelDriver, Vec<TargetInfo>), ChannelError> {
    let socket = match &shared.endpoint {
        StoreEndpoint::Unix(path) => Socket::Unix(UnixStream::connect(path).await?),
        StoreEndpoint::Tcp(address) => {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            prove_to_store(&mut stream, &shared.options.trust).await?;
            Socket::tcp(stream)?
        }
        #[cfg(feature = "sim")]
        StoreEndpoint::Sim(wire) => wire.connect().await?,
    };
    let memory = memory_request(shared, &socket);
    let wanted = memory.is_some();
    let hello = ChannelHello {
        version_min: VERSION,
        version_max: VERSION,
        nonce: base::entropy::random(),
        memory,
        outstanding: shared.options.outstanding as u32,
        seat: shared.options.seat,
    };
    let (welcome, access, control) = channel::join(socket, &hello).await?;
    check_targets(shared, &welcome)?;
    let why_no_dma = match &welcome.memory {
        MemoryAnswer::None(why) if wanted => Some(
            why.clone()
                .unwrap_or_else(|| "the store provides no host memory and states no reason".to_owned()),
        ),
        _ => None,
    };
    if let Some(why) = &why_no_dma {
        tracing::warn!("the control socket carries all payload in this incarnation, which is slow: {why}");
    }
    shared.lock().why_no_dma = why_no_dma;
    let attached = match access.filter(|_| wanted) {
        Some(access) => Some(attach(shared, access).await?),
        None => None,
    };
    let (ring, bell, failure) = attached.map_or((None, None, None), |a| (Some(a.ring), a.bell, a.failure));
    let targets = welcome.targets;
    let options = StoreChannelOptions {
        largest_range: shared.options.largest_request,
        overdue: shared.options.overdue,
        verify_every: shared.options.verify_every,
        faults: shared.options.faults.clone(),
        region_cache: shared.tuning().region_cache,
        poll: shared.tuning().poll,
    };
    // The host memory is new, so DMA may work even if it failed with the old memory.
    shared.health.renewed();
    let health = Arc::clone(&shared.health);
    let layout = shared.memory.layout();
    let store_channel = StoreChannel::new(incarnation, targets.len(), layout, ring, health, &options);
    if let Some(failure) = failure {
        store_channel.begin_without_dma(&failure);
    }
    let driver = ChannelDriver::new(Arc::clone(&store_channel), control, bell);
    tracing::info!(
        "incarnation {incarnation} of the store at {:?} began with attachment {} for {}",
        shared.endpoint,
        welcome.attachment,
        shared.options.seat
    );
    Ok((store_channel, driver, targets))
}

/// The host memory to request from the store; `None` if the attachment must use the control socket
/// alone.
fn memory_request(shared: &Shared, socket: &Socket) -> Option<MemoryRequest> {
    let reach = shared.engine.reach();
    let reaches = socket.carrier().carries_memory() || reach != Reach::Descriptors;
    let layout = shared.memory.layout();
    (reaches && !shared.options.socket_only).then_some(MemoryRequest { layout, reach })
}

/// The rings of an attachment with host memory.
struct HostRings {
    ring: RingSide,
    bell: Option<Box<dyn Bell>>,
    /// Why the engine cannot reach the memory at present.
    failure: Option<String>,
}

/// Attaches the engine to host memory. If the network currently prevents this, a later probe may
/// still succeed, so the function returns the rings together with the failure. It returns an error
/// for an invalid offer.
async fn attach(shared: &Arc<Shared>, access: MemoryAccess) -> Result<HostRings, ChannelError> {
    let (memory, engine) = (shared.memory.clone(), Arc::clone(&shared.engine));
    let outstanding = shared.options.outstanding.min(engine.queue_depth());
    let (local, queues) = (shared.local.id(), shared.tuning().queues);
    let mut ring = RingSide::new(memory, Arc::clone(&engine), local, outstanding, queues);
    match engine.attach(access, shared.memory.layout().len()).await {
        Ok((peer, bell)) => {
            ring.join(peer)?;
            Ok(HostRings { ring, bell: Some(bell), failure: None })
        }
        Err(e @ (ChannelError::Refused(_) | ChannelError::Fabric(_))) if engine.attaches_anew() => {
            let failure = format!("host memory cannot be reached: {e}");
            Ok(HostRings { ring, bell: None, failure: Some(failure) })
        }
        Err(e) => Err(e),
    }
}

fn check_targets(shared: &Shared, welcome: &ChannelWelcome) -> Result<(), ChannelError> {
    match &shared.lock().targets {
        Some(known) if *known != welcome.targets => {
            shared.superseded.send_replace(true);
            Err(ChannelError::Refused("the store returned with other targets; restart the osd".into()))
        }
        _ if welcome.targets.is_empty() => Err(ChannelError::Refused("the store has no targets".into())),
        _ => Ok(()),
    }
}
