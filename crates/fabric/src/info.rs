//! What to ask providers for, and what they say.

use std::fmt;
use std::net::SocketAddr;

/// Where an endpoint is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EndpointAddress {
    /// Anywhere: for listing what there is.
    #[default]
    Any,
    /// Listening at this address of this machine; port 0 for a free one.
    Listen(SocketAddr),
    /// Connected to this address.
    Connect(SocketAddr),
}

/// What to ask providers for. Connected endpoints with messages and remote memory access, ordered so that messages and
/// reads that were posted after writes take place after them, are always asked for.
#[derive(Debug, Clone, Default)]
pub struct ProviderQuery {
    /// The provider's name, e.g. `verbs` or `tcp`; `None` for all.
    pub provider: Option<String>,
    /// Where.
    pub target: EndpointAddress,
    /// Whether endpoints take received messages from a [shared queue](crate::ReceiveQueue).
    pub shared_receive: bool,
}

impl fmt::Display for ProviderQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.provider {
            Some(provider) => write!(f, "by provider {provider}")?,
            None => write!(f, "by any provider")?,
        }
        match self.target {
            EndpointAddress::Any => Ok(()),
            EndpointAddress::Listen(address) => write!(f, " at {address}"),
            EndpointAddress::Connect(address) => write!(f, " to {address}"),
        }
    }
}

/// What a provider demands of registered memory. This crate does it; the modes are there to be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MrMode {
    /// Local buffers must be registered, too.
    pub local: bool,
    /// Remote memory is addressed by the peer's virtual addresses, not by offsets.
    pub virtual_address: bool,
    /// Memory must have physical pages when it is registered.
    pub allocated: bool,
    /// The provider chooses the keys.
    pub provider_key: bool,
}

impl fmt::Display for MrMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.local, "local"),
            (self.virtual_address, "virtual-address"),
            (self.allocated, "allocated"),
            (self.provider_key, "provider-key"),
        ];
        let set: Vec<&str> = names.into_iter().filter_map(|(set, name)| set.then_some(name)).collect();
        f.write_str(if set.is_empty() { "none" } else { "" })?;
        f.write_str(&set.join("+"))
    }
}
