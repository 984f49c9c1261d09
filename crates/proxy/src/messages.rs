//! The control data of requests and replies in the channel's entries, encoded with postcard.

use base::process::OwnUsage;
use bytes::{Buf, Bytes};
use channel::ofi::OfiOffer;
use serde::{Deserialize, Serialize};
use store::stripes::{HostReading, Parity, ParityDevice};
use store::{CollectionId, MetadataQuery, ObjectId, QueryReply, Space, StoreError};

/// The number of a request that the host does not answer.
pub(crate) const NO_REPLY: u64 = 0;

/// The location of a request's payload, or the destination of a read's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PayloadPlace {
    /// In the entry itself, after the control data.
    Inline,
    /// In host memory.
    Range {
        /// Bytes from the start of host memory.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
    },
}

/// The source of the fragments that contain no data units: parity, or the copies of a mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ParityFrom {
    /// The payload contains these fragments, after the data fragments.
    Payload,
    /// These fragments are copies of the first fragment.
    Copies,
    /// This device computes these fragments. If the payload is in a range, the fragments are stored
    /// in that range, after the data fragments.
    By(ParityDevice),
}

impl From<&Parity> for ParityFrom {
    fn from(parity: &Parity) -> ParityFrom {
        match parity {
            Parity::Here(_) => ParityFrom::Payload,
            Parity::Copies => ParityFrom::Copies,
            Parity::By(coder) => ParityFrom::By(*coder),
        }
    }
}

/// A write of one piece to each of several fragments. The payload contains the pieces one after the
/// other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stripes {
    /// For each fragment, the target's index and the stage's number on the host; `None` if the
    /// fragment is not written.
    pub(crate) parts: Vec<Option<(u16, u64)>>,
    /// Number of data fragments.
    pub(crate) data: u16,
    /// Length of each fragment's piece, in bytes.
    pub(crate) len: u64,
    /// Offset of the piece in each stage, in bytes.
    pub(crate) offset: u64,
    pub(crate) parity: ParityFrom,
    /// Checksums of the payload's blocks.
    pub(crate) checksums: Bytes,
}

impl Stripes {
    /// Number of fragments in the payload.
    pub(crate) fn sent(&self) -> usize {
        if self.parity == ParityFrom::Payload { self.parts.len() } else { self.data.into() }
    }
}

/// Maximum number of transactions in one request.
pub(crate) const MAX_PARTS: usize = 16;

/// The transaction of one target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransactionPart {
    /// Index of the target.
    pub(crate) target: u16,
    /// The transaction's number on its target, minus 1.
    pub(crate) after: u64,
    /// Number of the encoded transaction. Several targets may execute the same transaction.
    pub(crate) encoding: u16,
}

/// Transactions of different targets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransactionParts {
    pub(crate) parts: Vec<TransactionPart>,
    /// Length of each encoded transaction, in bytes.
    pub(crate) lengths: Vec<u32>,
    /// CRC-32C of the encoded transactions if they are in a range. An entry's control data has its
    /// own checksum.
    pub(crate) control_crc: u32,
}

/// One request to a store, as encoded in the channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoreCall {
    Stage {
        len: u64,
    },
    StageWrite {
        stage: u64,
        offset: u64,
        block_offset: u16,
        checksums: Bytes,
        place: PayloadPlace,
    },
    StageRelease {
        stage: u64,
    },
    /// One transaction on each of several targets; the header's target and number are ignored.
    /// Normally the encoded transactions follow the call, and `place` locates their data. If nothing
    /// follows the call, the encoded transactions are at the start of the range, and their data
    /// starts on the next page.
    Transactions {
        transactions: TransactionParts,
        place: PayloadPlace,
    },
    Read {
        cid: CollectionId,
        oid: ObjectId,
        offset: u64,
        len: u64,
        place: PayloadPlace,
    },
    Query {
        cid: CollectionId,
        query: MetadataQuery,
    },
    Collections,
    Space,
    Umount,
    /// A call to the channel itself.
    Channel(ChannelCall),
    /// Writes to stages of several targets; the header's target is ignored. The host may send the
    /// answer [`CallAnswer::Coded`] before the final answer.
    StageStripes {
        stripes: Stripes,
        place: PayloadPlace,
    },
    /// Asks for the load of the host's processor, and with `with_store` also for the time that the
    /// store itself has used. The header's target is ignored.
    HostReading {
        with_store: bool,
    },
    /// Asks how much the store's process uses of its machine. The header's target is ignored.
    Usage,
}

impl StoreCall {
    /// Whether the call is a query of an object. It has a number in the order of the target's
    /// transactions, so that later transactions do not overtake it.
    pub(crate) fn is_object_query(&self) -> bool {
        matches!(self, StoreCall::Query { query, .. } if query.oid().is_some())
    }
}

/// A call to the channel itself. It always uses the control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ChannelCall {
    /// Opens `len` bytes at `offset` in host memory to DMA. Before this call, a device cannot use
    /// the range.
    Export { offset: u64, len: u64 },
    /// Writes this frame's payload to `offset` in host memory, in place of a DMA transfer. The host
    /// does not answer.
    Put { offset: u64 },
    /// Asks for `len` bytes at `offset` in host memory, in place of a DMA transfer.
    Get { offset: u64, len: u64 },
    /// Asks how many bytes the store has taken from the inbound ring and put into the outbox.
    Positions,
    /// Closes the rings after a failure of DMA. The osd has taken `taken` bytes from the outbox.
    /// The host sends the replies behind this position, and all later replies, over the control
    /// socket.
    Close { taken: u64 },
    /// Asks for a new offer of host memory, because the last offer is void. The rings must be
    /// closed.
    Offer,
    /// If the host's doorbell was rung: copies `len` bytes from the start of the inbound ring to
    /// the start of the outbox, then rings the osd's doorbell. The rings must be closed.
    Probe { len: u32 },
    /// Opens the rings again. Both rings start empty.
    Open,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CallAnswer {
    Done,
    Stage(u64),
    /// The data of a read. It is at the start of the range that the request named, or after the
    /// reply's control data.
    Read {
        offset: u64,
        len: u64,
        checksums: Bytes,
        object_size: u64,
    },
    Query(QueryReply),
    Collections(Vec<CollectionId>),
    Space(Space),
    /// The outcome of each transaction of the call. `None` if the outcome is in another answer to
    /// the call: an earlier answer, or a later one because the target is slower than the others.
    Transactions(Vec<Option<Result<(), StoreError>>>),
    /// The payload arrived damaged. The host has not executed the call.
    Damaged,
    /// Bytes taken from the inbound ring and bytes put into the outbox, since the rings were
    /// opened.
    Positions {
        taken: u64,
        head: u64,
    },
    /// An offer of host memory for the engine to attach to.
    Offer(OfiOffer),
    /// Bytes that the host's doorbell has announced since the rings were closed.
    Probed {
        rung: u64,
    },
    HostReading(HostReading),
    Usage(OwnUsage),
    /// Parity was computed, in this many nanoseconds if the time is known. The final answer
    /// follows.
    Coded(Option<u64>),
    /// No parity was computed, for this reason, and nothing was written.
    NotCoded(String),
    /// The write of the fragment with this number failed, with this error.
    PartFailed(u16, StoreError),
}

/// Control data of a reply.
pub(crate) type CallOutcome = Result<CallAnswer, StoreError>;

/// Encodes control data.
pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    // Serializing plain data into memory cannot fail.
    postcard::to_stdvec(value).expect("plain data can be serialized")
}

/// Decodes control data. Also returns the bytes that follow it.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), StoreError> {
    postcard::take_from_bytes(bytes)
        .map_err(|e| StoreError::InvalidArgument(format!("message cannot be decoded: {e}")))
}

/// Packs checksums into bytes, four bytes each.
pub(crate) fn pack_checksums(checksums: &[u32]) -> Bytes {
    checksums.iter().flat_map(|c| c.to_le_bytes()).collect()
}

/// Unpacks checksums from bytes.
pub(crate) fn unpack_checksums(mut packed: &[u8]) -> Result<Vec<u32>, StoreError> {
    if !packed.len().is_multiple_of(4) {
        return Err(StoreError::InvalidArgument(format!(
            "{} bytes of checksums are not a multiple of 4",
            packed.len()
        )));
    }
    let mut checksums = Vec::with_capacity(packed.len() / 4);
    while packed.has_remaining() {
        checksums.push(packed.get_u32_le());
    }
    Ok(checksums)
}

/// Shortens the texts of an error so that the error fits into any reply.
pub(crate) fn shorten(error: StoreError) -> StoreError {
    use StoreError as E;
    let cut = |mut text: String| {
        if text.len() > 120 {
            let end = (0..=120).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
            text.truncate(end);
            text.push('…');
        }
        text
    };
    match error {
        E::NoSuchCollection(s) => E::NoSuchCollection(cut(s)),
        E::NoSuchObject(s) => E::NoSuchObject(cut(s)),
        E::NoSuchXattr(s) => E::NoSuchXattr(cut(s)),
        E::Exists(s) => E::Exists(cut(s)),
        E::NotEmpty(s) => E::NotEmpty(cut(s)),
        E::GuardFailed(s) => E::GuardFailed(cut(s)),
        E::InvalidArgument(s) => E::InvalidArgument(cut(s)),
        E::TooLarge { what, size, limit } => E::TooLarge { what: cut(what), size, limit },
        E::BadPayload(s) => E::BadPayload(cut(s)),
        E::Corrupt { what, detail } => E::Corrupt { what: cut(what), detail: cut(detail) },
        E::Poisoned(s) => E::Poisoned(cut(s)),
        E::InUse(s) => E::InUse(cut(s)),
        E::NotATarget(s) => E::NotATarget(cut(s)),
        E::Disconnected(s) => E::Disconnected(cut(s)),
        E::Io(s) => E::Io(cut(s)),
        E::Absent(s) => E::Absent(cut(s)),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode::<StoreCall>(&bytes);
            let _ = decode::<CallOutcome>(&bytes);
            let _ = unpack_checksums(&bytes);
        }
    }

    #[test]
    fn an_error_with_a_long_text_is_shortened_but_keeps_its_type() {
        let error = shorten(StoreError::NoSuchObject("ü".repeat(4000)));
        assert!(matches!(&error, StoreError::NoSuchObject(s) if s.len() < 130));
        let encoded = encode(&CallOutcome::Err(error.clone()));
        assert_eq!(decode::<CallOutcome>(&encoded).unwrap().0, Err(error));
    }
}
