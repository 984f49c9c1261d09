//! Queries to providers, and the providers' answers.

use std::fmt;
use std::net::SocketAddr;

/// The address for which providers are queried, and how an endpoint uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EndpointAddress {
    /// No address: the query lists all providers.
    #[default]
    Any,
    /// Listening at this local address. Port 0 chooses a free port.
    Listen(SocketAddr),
    /// Connected to this address.
    Connect(SocketAddr),
}

/// A query for providers. Every query requests connected endpoints with messages and remote memory
/// access. Every query also requests an order: a message or read takes effect after the writes that
/// were posted before it.
#[derive(Debug, Clone, Default)]
pub struct ProviderQuery {
    /// The provider's name, such as `verbs` or `tcp`. `None` queries all providers.
    pub provider: Option<String>,
    /// The address at which the endpoint listens or to which it connects.
    pub target: EndpointAddress,
    /// Whether endpoints take receive buffers from a [shared queue](crate::ReceiveQueue).
    pub shared_receive: bool,
}

impl fmt::Display for ProviderQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.provider {
            Some(provider) => write!(f, "through provider {provider}")?,
            None => write!(f, "through any provider")?,
        }
        match self.target {
            EndpointAddress::Any => Ok(()),
            EndpointAddress::Listen(address) => write!(f, " at {address}"),
            EndpointAddress::Connect(address) => write!(f, " to {address}"),
        }
    }
}

/// The providers whose behaviour differs in ways that this crate must handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProviderKind {
    /// RDMA through the kernel's verbs interface.
    Verbs,
    /// TCP sockets.
    Tcp,
    /// Any other provider.
    Other,
}

impl ProviderKind {
    /// Returns the kind of the provider with this name.
    pub(crate) fn of_name(name: &str) -> ProviderKind {
        match name {
            "verbs" => ProviderKind::Verbs,
            "tcp" => ProviderKind::Tcp,
            _ => ProviderKind::Other,
        }
    }
}

/// A provider's requirements for registered memory. The crate meets the requirements itself, so
/// this type is only informative.
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
