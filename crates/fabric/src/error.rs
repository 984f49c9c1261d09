//! Errors of the fabric layer.

/// Result of a call of this crate.
pub type Result<T, E = FabricError> = std::result::Result<T, E>;

/// The error of a failed call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// This machine has no libfabric, or no usable version.
    #[error(
        "libfabric.so.1 cannot be loaded ({0}); install libfabric 1.14 or newer (Debian: libfabric1), or do without RDMA"
    )]
    NotLoaded(String),
    /// libfabric would use a registration cache, and it is too late to disable the cache.
    #[error(
        "libfabric's registration cache would leave memory open to peers after its use; start this process with FI_MR_CACHE_MAX_COUNT=0 in its environment"
    )]
    CachesRegistrations,
    /// No provider supports the query.
    #[error(
        "libfabric offers no connected endpoint with remote memory access {wanted}; `fi_info -t FI_EP_MSG` lists the providers of this machine"
    )]
    NoProvider {
        /// The requested provider and address.
        wanted: String,
    },
    /// A call of libfabric failed.
    #[error("{call} failed: {text} ({code}){advice}")]
    Call {
        /// The name of the libfabric function.
        call: &'static str,
        /// libfabric's error number, as a positive value.
        code: i32,
        /// The description of the error number.
        text: String,
        /// Advice that begins with `; `, or an empty string.
        advice: &'static str,
    },
    /// The provider uses addresses that are not IP addresses.
    #[error(
        "a provider with addresses of format {format} is not supported; choose one that uses IP addresses"
    )]
    AddressFormat {
        /// libfabric's number of the address format.
        format: u32,
    },
    /// The private data does not fit into a connection request or its answer.
    #[error("{len} bytes of private data do not fit (limit: {max} bytes); send the data as a message")]
    PrivateData {
        /// Length of the data, in bytes.
        len: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// The query that the endpoint is created from names no address to connect to.
    #[error("the query named no address to connect to; query for EndpointAddress::Connect")]
    NoDestination,
    /// An operation was posted before the endpoint was connected.
    #[error("the endpoint is not connected yet; wait for FabricEvent::Connected")]
    NotConnected,
    /// The memory is registered with a domain other than the endpoint's.
    #[error(
        "the memory is registered with a domain other than the endpoint's; register it with the endpoint's domain"
    )]
    OtherDomain,
    /// The memory has no region, but the provider requires one.
    #[error(
        "the provider sends only registered memory; register the {len} bytes, or copy them to registered memory"
    )]
    Unregistered {
        /// Length of the part, in bytes.
        len: usize,
    },
    /// The registration or the operation could change memory that is shared for reading.
    #[error("memory that is shared for reading cannot be used for writing; expose a Buffer instead")]
    Immutable,
    /// An operation or a peer would access memory that an allocator owns.
    #[error(
        "an allocator owns pages in the {len} bytes at offset {offset} of the arena; use a PeerBuffer, or register the arena with an OutsideAccess"
    )]
    Allocated {
        /// Start of the range, in bytes from the start of the arena.
        offset: usize,
        /// Length of the range, in bytes.
        len: usize,
    },
    /// The message has no parts, or more parts than the provider supports.
    #[error("a message has {parts} parts, but must have 1 to {max}; copy several parts into one")]
    TooManyParts {
        /// Number of parts.
        parts: usize,
        /// Maximum number of parts.
        max: usize,
    },
    /// The range is not inside its region.
    #[error("{len} bytes at offset {offset} are not inside the region of {region_len} bytes")]
    OutOfRange {
        /// Start of the range, in bytes from the region's start.
        offset: usize,
        /// Length of the range, in bytes.
        len: usize,
        /// Length of the region, in bytes.
        region_len: usize,
    },
    /// The transfer is longer than the provider supports.
    #[error("a transfer of {len} bytes is too long (limit: {max} bytes); split it into several transfers")]
    TooLong {
        /// Length of the transfer, in bytes.
        len: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
}

impl FabricError {
    /// Whether a local port or address is in use. A connection that failed so may succeed with
    /// another local port.
    pub fn is_address_in_use(&self) -> bool {
        matches!(self, FabricError::Call { code: libc::EADDRINUSE, .. })
    }
}

/// The reason why an operation was not posted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full. Read completions, then try again.
    #[error("the queue is full; read completions, then try again")]
    Full,
    /// The endpoint cannot perform the operation, now or later.
    #[error(transparent)]
    Failed(#[from] FabricError),
}
