//! An opened network device, from which endpoints are created.

use std::time::Duration;

use base::mem::Arena;
use fabric::{
    Access, Completion, CompletionQueue, Domain, EndpointAddress, EventQueue, Fabric, FabricEvent, Info,
    Library, MemoryRegion, ProviderQuery, Waitable,
};

use crate::Result;

/// Maximum number of events that one poll takes.
const EVENTS: usize = 64;

/// The device's libfabric objects, and scratch memory for the reads that confirm writes. Over iWARP,
/// the peer can write to the scratch memory. No code uses its content.
pub(super) struct EngineDomain {
    pub(super) completions: CompletionQueue,
    pub(super) events: EventQueue,
    pub(super) scratch: MemoryRegion,
    pub(super) domain: Domain,
}

impl EngineDomain {
    /// Opens the device that `info` names, for `depth` concurrent operations.
    pub(super) fn open(info: Info, depth: usize) -> Result<EngineDomain> {
        let fabric = Fabric::open(&info)?;
        let domain = Domain::open(&fabric, info)?;
        let completions = CompletionQueue::open(&domain, depth)?;
        let scratch = MemoryRegion::register(&domain, &Arena::anonymous(4096)?, Access::ReadSink)?;
        Ok(EngineDomain { events: EventQueue::open(&fabric)?, completions, scratch, domain })
    }

    /// Whether endpoints for `info` can be created from this device.
    pub(super) fn suits(&self, info: &Info) -> bool {
        let own = self.domain.info();
        own.provider() == info.provider()
            && own.fabric_name() == info.fabric_name()
            && own.domain_name() == info.domain_name()
    }

    /// Takes events and completions, but possibly not all of them. Some providers move data only
    /// while they are polled.
    pub(super) fn poll(
        &self,
        events: &mut Vec<FabricEvent>,
        completions: &mut Vec<Completion>,
    ) -> Result<()> {
        self.completions.poll(completions)?;
        for _ in 0..EVENTS {
            let Some(event) = self.events.read()? else { break };
            events.push(event);
        }
        Ok(())
    }

    /// Sleeps until an event may have occurred, one of `others` is readable, or `timeout` has
    /// passed.
    pub(super) fn wait(&self, others: &[std::os::fd::BorrowedFd<'_>], timeout: Option<Duration>) {
        let queues: [&dyn Waitable; 2] = [&self.events, &self.completions];
        if let Err(e) = fabric::wait(self.domain.fabric(), &queues, others, timeout) {
            tracing::error!("cannot wait for network events: {e}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The provider's best match for `target`.
pub(super) fn query(library: Library, provider: &str, target: EndpointAddress) -> Result<Info> {
    let query = ProviderQuery { provider: Some(provider.to_owned()), target, shared_receive: false };
    Ok(library.query(&query)?.swap_remove(0))
}
