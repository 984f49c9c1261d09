//! A minimal loop of libfabric's `fi_read` as a reference for the messenger. Both sides poll all
//! the time, or both sides sleep while they are idle.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::process::ProcessUsage;
use fabric::{
    Access, Completion, CompletionQueue, Domain, Endpoint, EndpointAddress, EndpointQueues, EventQueue,
    Fabric, FabricEvent, FabricListener, Info, Library, MemoryRegion, ProviderQuery, RemoteRegion, Waitable,
};
use hdrhistogram::Histogram;

use super::RpcArgs;
use super::figures::RpcSample;
use super::peer::{PeerJob, PeerProcess, sum};
use crate::output;
use node::failure::{Doing, Failure, Result};

const DOING: &str = "measuring bare fi_reads";
const PATIENCE: Duration = Duration::from_secs(20);

/// One side of the connection.
struct FabricSide {
    events: EventQueue,
    completions: CompletionQueue,
    domain: Domain,
    spins: bool,
}

impl FabricSide {
    fn open(info: Info, spins: bool) -> fabric::Result<FabricSide> {
        let fabric = Fabric::open(&info)?;
        let domain = Domain::open(&fabric, info)?;
        let completions = CompletionQueue::open(&domain, 256)?;
        Ok(FabricSide { events: EventQueue::open(&fabric)?, completions, domain, spins })
    }

    fn queues(&self) -> EndpointQueues<'_> {
        EndpointQueues::new(&self.events, &self.completions)
    }

    /// Takes the available completions. If there are none and this side does not spin, waits for
    /// the next event.
    fn poll(&self, completions: &mut Vec<Completion>) -> Result<()> {
        self.completions.poll(completions).doing(DOING)?;
        if completions.is_empty() && !self.spins {
            let queues: [&dyn Waitable; 2] = [&self.completions, &self.events];
            fabric::wait(self.domain.fabric(), &queues, &[], Some(PATIENCE)).doing(DOING)?;
        }
        Ok(())
    }

    fn event(&self) -> Result<FabricEvent> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(event) = self.events.read().doing(DOING)? {
                return Ok(event);
            }
            self.completions.poll(&mut Vec::new()).doing(DOING)?;
        }
        Err(Failure::new(DOING, "no event of the connection arrived within 20 s"))
    }
}

fn info(provider: &str, target: EndpointAddress) -> Result<Info> {
    let query = ProviderQuery { provider: Some(provider.to_owned()), target, shared_receive: false };
    let mut infos = Library::load().and_then(|library| library.query(&query)).doing(DOING)?;
    Ok(infos.swap_remove(0))
}

/// Exposes memory to the peer: registers memory, accepts a connection, and polls until the peer
/// closes the connection.
pub fn expose(provider: &str, address: &str, size: usize, spins: bool) -> Result<()> {
    let address: SocketAddr = address.parse().doing(DOING)?;
    let side = FabricSide::open(info(provider, EndpointAddress::Listen(address))?, spins).doing(DOING)?;
    let listener = FabricListener::open(side.domain.info(), &side.events).doing(DOING)?;
    let arena = Arena::anonymous(size).doing(DOING)?;
    // Write all pages, because the kernel maps unwritten pages to a single page of zeros.
    let filled = arena.copy_in(0, &vec![7; size]);
    debug_assert!(filled, "the arena has this length");
    let region = MemoryRegion::register(&side.domain, &arena, Access::Remote).doing(DOING)?;
    let remote = serde_json::to_string(&region.remote()).doing(DOING)?;
    output::line(format!("{} {remote}", listener.address()));
    let FabricEvent::ConnectionRequest(request) = side.event()? else {
        return Err(Failure::new(DOING, "another event arrived instead of a connection request"));
    };
    let endpoint = Endpoint::answer(request, side.queues(), 1).doing(DOING)?;
    endpoint.establish(&[]).doing(DOING)?;
    let mut completions = Vec::new();
    loop {
        side.poll(&mut completions)?;
        completions.clear();
        if let Some(FabricEvent::Closed { .. }) = side.events.read().doing(DOING)? {
            return Ok(());
        }
    }
}

/// Measures `fi_read` of memory that a second process exposes.
pub fn reads(args: &RpcArgs, spins: bool) -> Result<RpcSample> {
    let Some(provider) = args.provider() else {
        return Err(Failure::new(DOING, "the stack is not libfabric"));
    };
    let (size, depth) = (args.size.0 as usize, args.in_flight as usize);
    let address = SocketAddr::new(args.address, 0).to_string();
    let job = PeerJob::BareMemory { provider: provider.to_owned(), address, size: args.size.0, spins };
    let mut peer = PeerProcess::start(&job)?;
    let line = peer.line()?;
    let (address, remote) =
        line.split_once(' ').ok_or_else(|| Failure::new(DOING, "the second process printed no address"))?;
    let remote: RemoteRegion = serde_json::from_str(remote).doing(DOING)?;
    let info = info(provider, EndpointAddress::Connect(address.parse().doing(DOING)?))?;
    let side = FabricSide::open(info.duplicate().doing(DOING)?, spins).doing(DOING)?;
    let endpoint = Endpoint::connecting(&info, side.queues(), 1).doing(DOING)?;
    endpoint.establish(&[]).doing(DOING)?;
    let FabricEvent::Connected { .. } = side.event()? else {
        return Err(Failure::new(DOING, "the connection was not established"));
    };
    let arena = Arena::anonymous(size * depth).doing(DOING)?;
    let local = MemoryRegion::register(&side.domain, &arena, Access::Local).doing(DOING)?;
    let mut latency: Histogram<u64> = Histogram::new_with_bounds(1, 600_000_000_000, 3).doing(DOING)?;
    let own = || ProcessUsage::read(std::process::id()).doing(DOING);
    let (before, peer_before, began) = (own()?.total, peer.usage()?, Instant::now());
    let end = began + args.duration();
    let mut since = vec![began; depth];
    let post = |slot: usize| {
        let (into, from) = (local.slice(slot * size, size), remote.slice(0, size));
        endpoint.read(into.doing(DOING)?, from.doing(DOING)?, slot as u64).doing(DOING)
    };
    for slot in 0..depth {
        post(slot)?;
    }
    let mut under_way = depth;
    let mut completions: Vec<Completion> = Vec::new();
    while under_way > 0 {
        side.poll(&mut completions)?;
        for completion in completions.drain(..) {
            completion.result.doing(DOING)?;
            let (slot, now) = (completion.token as usize, Instant::now());
            latency.saturating_record((now - since[slot]).as_nanos() as u64);
            under_way -= 1;
            if now < end {
                since[slot] = now;
                post(slot)?;
                under_way += 1;
            }
        }
    }
    let elapsed = began.elapsed();
    let usage = sum(own()?.total.since(&before), peer.usage()?.since(&peer_before));
    Ok(RpcSample::of_reference(latency, elapsed, usage))
}
