//! What requests and replies say: the control data of the channel's entries, encoded with postcard.

use bytes::{Buf, Bytes};
use channel::ofi::OfiOffer;
use serde::{Deserialize, Serialize};
use store::stripes::{HostReading, Parity, ParityDevice};
use store::{CollectionId, MetadataQuery, ObjectId, QueryReply, Space, StoreError};

/// Number of a request that is not answered.
pub(crate) const NO_REPLY: u64 = 0;

/// Where the payload of a request is, or is to be put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PayloadPlace {
    /// In the entry itself, behind the control data.
    Inline,
    /// In host memory.
    Range {
        /// Bytes from the start of host memory.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
    },
}

/// Where the fragments that are not data come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ParityFrom {
    /// They are in the payload, behind the data.
    Payload,
    /// The first fragment.
    Copies,
    /// They are computed, into the range behind the data if there is one.
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

/// A piece of each of several fragments. The payload is one fragment after the other, each in one piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stripes {
    /// By fragment: the target, and its stage.
    pub(crate) parts: Vec<Option<(u16, u64)>>,
    /// Number of data fragments.
    pub(crate) data: u16,
    /// Length of each, in bytes.
    pub(crate) len: u64,
    /// Where in each stage, in bytes.
    pub(crate) offset: u64,
    pub(crate) parity: ParityFrom,
    /// Of the blocks of the payload.
    pub(crate) checksums: Bytes,
}

impl Stripes {
    /// Number of fragments in the payload.
    pub(crate) fn sent(&self) -> usize {
        if self.parity == ParityFrom::Payload { self.parts.len() } else { self.data.into() }
    }
}

/// One request to a store, as it goes over the channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoreCall {
    Stage {
        len: u64,
    },
    StageWrite {
        stage: u64,
        offset: u64,
        phase: u16,
        checksums: Bytes,
        place: PayloadPlace,
    },
    StageRelease {
        stage: u64,
    },
    /// The encoded transaction follows the call, and the place is that of its data; or, if nothing follows, it is at the start of
    /// the range with its length `control_len`, and its data on the next page.
    Transaction {
        control_len: u32,
        /// CRC-32C of the encoded transaction, where it is in a range; an entry's control data has its own.
        control_crc: u32,
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
    /// Of several targets, whatever target the header names. The answer [`Answer::Coded`] may come before the last one.
    StageStripes {
        stripes: Stripes,
        place: PayloadPlace,
    },
    /// How busy the host is, whatever target the header names.
    HostReading,
}

/// What the osd asks of the channel, always by the control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ChannelCall {
    /// Opens a range of the data region to DMA: what a device needs before it can be given the range.
    Export { offset: u64, len: u64 },
    /// Writes the payload of this frame to that place of the data region, in the place of DMA. Not answered.
    Put { offset: u64 },
    /// Asks for the bytes of a range of the data region.
    Get { offset: u64, len: u64 },
    /// How far the store has come with the rings.
    Positions,
    /// DMA has failed: the rings are closed. The osd has taken that many bytes out of the outbox; replies behind that
    /// come by the socket.
    Close { taken: u64 },
    /// Asks for host memory to be offered anew, as the last offer is void. The rings must be closed.
    Offer,
    /// Copies that many bytes from the start of the inbound ring to the start of the outbox, and rings the osd, if the
    /// host's doorbell was rung. The rings must be closed.
    Probe { len: u32 },
    /// Opens the rings again, both empty.
    Open,
}

/// What a call returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CallAnswer {
    Done,
    Stage(u64),
    /// The data is in the range that the request named, from its start, or behind the control data of the reply.
    Read {
        offset: u64,
        len: u64,
        checksums: Bytes,
        object_size: u64,
    },
    Query(QueryReply),
    Collections(Vec<CollectionId>),
    Space(Space),
    /// The payload arrived damaged; nothing was done with it.
    Damaged,
    /// Bytes taken out of the inbound ring, and put into the outbox, since the rings were opened.
    Positions {
        taken: u64,
        head: u64,
    },
    /// Host memory, to be attached to.
    Offer(OfiOffer),
    /// Bytes that the host's doorbell has announced since the rings were closed.
    Probed {
        rung: u64,
    },
    HostReading(HostReading),
    /// Parity has been computed, in that many nanoseconds if that is known; the answer is still to come.
    Coded(Option<u64>),
    /// No parity was computed, and nothing written.
    NotCoded(String),
    /// The store of this fragment failed.
    PartFailed(u16, StoreError),
}

/// Control data of a reply.
pub(crate) type CallOutcome = Result<CallAnswer, StoreError>;

/// Encodes control data.
pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    // Serializing plain data into memory cannot fail.
    postcard::to_stdvec(value).expect("plain data")
}

/// Decodes control data; returns what follows it, too.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), StoreError> {
    postcard::take_from_bytes(bytes)
        .map_err(|e| StoreError::InvalidArgument(format!("message cannot be decoded: {e}")))
}

/// Checksums as bytes, four each.
pub(crate) fn pack_checksums(checksums: &[u32]) -> Bytes {
    checksums.iter().flat_map(|c| c.to_le_bytes()).collect()
}

/// The other way round.
pub(crate) fn unpack_checksums(mut packed: &[u8]) -> Result<Vec<u32>, StoreError> {
    if !packed.len().is_multiple_of(4) {
        return Err(StoreError::InvalidArgument(format!("{} bytes of checksums", packed.len())));
    }
    let mut checksums = Vec::with_capacity(packed.len() / 4);
    while packed.has_remaining() {
        checksums.push(packed.get_u32_le());
    }
    Ok(checksums)
}

/// The same error with its texts cut to a length that any reply has room for.
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
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode::<StoreCall>(&bytes);
            let _ = decode::<CallOutcome>(&bytes);
            let _ = unpack_checksums(&bytes);
        }
    }

    #[test]
    fn long_errors_are_cut_and_keep_their_type() {
        let error = shorten(StoreError::NoSuchObject("ü".repeat(4000)));
        assert!(matches!(&error, StoreError::NoSuchObject(s) if s.len() < 130));
        let encoded = encode(&CallOutcome::Err(error.clone()));
        assert_eq!(decode::<CallOutcome>(&encoded).unwrap().0, Err(error));
    }
}
