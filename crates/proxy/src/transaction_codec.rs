//! The encoding of transactions.
//!
//! The codec does not use serde. It takes byte strings from the received buffer as slices, so that
//! the host does not copy the transaction's data again. Payload is separate from the other bytes
//! (*control*) and has fixed positions in a data section. DMA can therefore read payload from its
//! buffers, and the host can use payload where it arrives.

use base::block::Payload;
use bytes::{Buf, Bytes};
use store::{CollectionId, ObjectId, Op, Result, StageId, StoreError, Transaction, WriteSource};

/// The encodings of the transactions of one call. Members of a mirror execute equal transactions, and
/// so do the members of other arrays whose data a change does not concern. Equal transactions share
/// one encoding. Equal payload at the same place of two transactions that follow one another is sent
/// once.
#[derive(Debug, Default)]
pub(crate) struct EncodedTransactions {
    /// The encodings without the payload, one after the other.
    pub(crate) control: Vec<u8>,
    /// Length of each encoding in `control`, in bytes.
    pub(crate) lengths: Vec<u32>,
    /// Pieces of payload, each with its offset in the data section, in bytes.
    pub(crate) data: Vec<(usize, Bytes)>,
    /// Length of the data section, in bytes.
    pub(crate) data_len: usize,
    /// Length of the longest data section that a transaction would have alone, in bytes.
    pub(crate) longest_data: usize,
    /// Stages that the transactions name, by their numbers on the osd's side.
    pub(crate) stages: Vec<StageId>,
    /// The payload of the transaction that was added last, and its offsets in the data section.
    last_payload: Vec<(usize, Bytes)>,
}

/// Usual length of an encoded transaction, in bytes.
const USUAL: usize = 512;
/// Maximum number of ops in a transaction.
const MAX_OPS: usize = 1 << 16;

const TOUCH: u8 = 1;
const CREATE_EXCLUSIVE: u8 = 2;
const WRITE_INLINE: u8 = 3;
const WRITE_STAGED: u8 = 4;
const ZERO: u8 = 5;
const TRUNCATE: u8 = 6;
const REMOVE: u8 = 7;
const SET_XATTRS: u8 = 8;
const REMOVE_XATTR: u8 = 9;
const REMOVE_XATTRS: u8 = 10;
const OMAP_SET: u8 = 11;
const OMAP_REMOVE: u8 = 12;
const OMAP_REMOVE_RANGE: u8 = 13;
const OMAP_CLEAR: u8 = 14;
const OMAP_SET_HEADER: u8 = 15;
const CLONE: u8 = 16;
const CLONE_RANGE: u8 = 17;
const MOVE_RENAME: u8 = 18;
const CREATE_COLLECTION: u8 = 19;
const REMOVE_COLLECTION: u8 = 20;
const SPLIT_COLLECTION: u8 = 21;
const GUARD_XATTR: u8 = 22;
const GUARD_OMAP: u8 = 23;

impl EncodedTransactions {
    /// Creates a list without transactions, with memory for `count` of them.
    pub(crate) fn with_capacity(count: usize) -> EncodedTransactions {
        let (control, lengths) = (Vec::with_capacity(count * USUAL), Vec::with_capacity(count));
        EncodedTransactions { control, lengths, ..EncodedTransactions::default() }
    }

    /// Adds a transaction, and returns the number of its encoding. Each payload starts at a multiple
    /// of `align` in the data section. `stage_id` translates the osd's number of a stage into the
    /// host's number.
    ///
    /// # Errors
    /// Fails if `stage_id` fails, if this version cannot express an op, or if there are too many
    /// ops. The caller must then discard the encodings.
    pub(crate) fn add(
        &mut self,
        transaction: &Transaction,
        align: usize,
        mut stage_id: impl FnMut(StageId) -> Result<u64>,
    ) -> Result<usize> {
        check_ops(transaction.ops.len())?;
        let start = self.control.len();
        let mut out = TransactionEncoder { encoded: self, payload: Vec::new(), align };
        out.bytes(transaction.collection.as_bytes());
        out.u8(transaction.uses_reserve.into());
        out.u32(transaction.ops.len() as u32);
        for op in &transaction.ops {
            out.op(op, &mut stage_id)?;
        }
        self.last_payload = out.payload;
        let alone = |len: usize, (_, piece): &(usize, Bytes)| len.next_multiple_of(align) + piece.len();
        self.longest_data = self.longest_data.max(self.last_payload.iter().fold(0, alone));
        let (mut before, own) = self.control.split_at(start);
        for (number, len) in self.lengths.iter().enumerate() {
            let (encoding, rest) = before.split_at(*len as usize);
            if encoding == own {
                self.control.truncate(start);
                return Ok(number);
            }
            before = rest;
        }
        self.lengths.push(own.len() as u32);
        Ok(self.lengths.len() - 1)
    }
}

fn check_ops(count: usize) -> Result<()> {
    if count <= MAX_OPS {
        return Ok(());
    }
    let what = format!("a transaction has {count} ops, but the limit is {MAX_OPS}; split it");
    Err(StoreError::InvalidArgument(what))
}

struct TransactionEncoder<'a> {
    encoded: &'a mut EncodedTransactions,
    /// The payload of the transaction so far.
    payload: Vec<(usize, Bytes)>,
    align: usize,
}

impl TransactionEncoder<'_> {
    fn u8(&mut self, v: u8) {
        self.encoded.control.push(v);
    }

    fn u32(&mut self, v: u32) {
        self.encoded.control.extend_from_slice(&v.to_le_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.encoded.control.extend_from_slice(&v.to_le_bytes());
    }

    fn bytes(&mut self, v: &[u8]) {
        self.u32(v.len() as u32);
        self.encoded.control.extend_from_slice(v);
    }

    fn optional_bytes(&mut self, v: Option<&Bytes>) {
        self.u8(v.is_some().into());
        v.into_iter().for_each(|v| self.bytes(v));
    }

    fn head(&mut self, tag: u8, oid: &ObjectId) {
        self.u8(tag);
        self.bytes(oid.as_bytes());
    }

    fn pairs(&mut self, pairs: &[(Bytes, Bytes)]) {
        self.u32(pairs.len() as u32);
        for (key, value) in pairs {
            self.bytes(key);
            self.bytes(value);
        }
    }

    fn payload(&mut self, payload: &Payload) {
        let at = self.place(payload.data());
        self.u64(at as u64);
        self.u64(payload.len() as u64);
        self.u32(payload.block_offset() as u32);
        self.u32(payload.checksums().len() as u32);
        for checksum in payload.checksums() {
            self.u32(*checksum);
        }
    }

    /// Returns the offset of a piece of payload in the data section. Adds the piece, unless the
    /// transaction before has the same bytes of memory at this place.
    fn place(&mut self, piece: &Bytes) -> usize {
        let is_same = |(_, other): &&(usize, Bytes)| {
            std::ptr::eq(other.as_ptr(), piece.as_ptr()) && other.len() == piece.len()
        };
        let at = match self.encoded.last_payload.get(self.payload.len()).filter(is_same) {
            Some((at, _)) => *at,
            None => {
                let at = self.encoded.data_len.next_multiple_of(self.align);
                self.encoded.data_len = at + piece.len();
                self.encoded.data.push((at, piece.clone()));
                at
            }
        };
        self.payload.push((at, piece.clone()));
        at
    }

    fn op(&mut self, op: &Op, stage_id: &mut impl FnMut(StageId) -> Result<u64>) -> Result<()> {
        match op {
            Op::Touch { oid } => self.head(TOUCH, oid),
            Op::CreateExclusive { oid } => self.head(CREATE_EXCLUSIVE, oid),
            Op::Write { oid, offset, source: WriteSource::Inline(payload) } => {
                self.head(WRITE_INLINE, oid);
                self.u64(*offset);
                self.payload(payload);
            }
            Op::Write { oid, offset, source: WriteSource::Staged { stage, offset: from, len } } => {
                self.head(WRITE_STAGED, oid);
                for v in [*offset, stage_id(*stage)?, *from, *len] {
                    self.u64(v);
                }
                self.encoded.stages.push(*stage);
            }
            Op::Zero { oid, offset, len } => {
                self.head(ZERO, oid);
                self.u64(*offset);
                self.u64(*len);
            }
            Op::Truncate { oid, size } => {
                self.head(TRUNCATE, oid);
                self.u64(*size);
            }
            Op::Remove { oid } => self.head(REMOVE, oid),
            Op::Clone { src, dst } => {
                self.head(CLONE, src);
                self.bytes(dst.as_bytes());
            }
            Op::CloneRange { src, dst, src_offset, len, dst_offset } => {
                self.head(CLONE_RANGE, src);
                self.bytes(dst.as_bytes());
                for v in [*src_offset, *len, *dst_offset] {
                    self.u64(v);
                }
            }
            other => self.metadata_op(other)?,
        }
        Ok(())
    }

    fn metadata_op(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::SetXattrs { oid, xattrs } => {
                self.head(SET_XATTRS, oid);
                self.pairs(xattrs);
            }
            Op::RemoveXattr { oid, name } => {
                self.head(REMOVE_XATTR, oid);
                self.bytes(name);
            }
            Op::RemoveXattrs { oid } => self.head(REMOVE_XATTRS, oid),
            Op::OmapSet { oid, entries } => {
                self.head(OMAP_SET, oid);
                self.pairs(entries);
            }
            Op::OmapRemove { oid, keys } => {
                self.head(OMAP_REMOVE, oid);
                self.u32(keys.len() as u32);
                keys.iter().for_each(|key| self.bytes(key));
            }
            Op::OmapRemoveRange { oid, from, to } => {
                self.head(OMAP_REMOVE_RANGE, oid);
                self.bytes(from);
                self.bytes(to);
            }
            Op::OmapClear { oid } => self.head(OMAP_CLEAR, oid),
            Op::OmapSetHeader { oid, header } => {
                self.head(OMAP_SET_HEADER, oid);
                self.bytes(header);
            }
            Op::GuardXattr { oid, name, value } => {
                self.head(GUARD_XATTR, oid);
                self.bytes(name);
                self.optional_bytes(value.as_ref());
            }
            Op::GuardOmap { oid, key, value } => {
                self.head(GUARD_OMAP, oid);
                self.bytes(key);
                self.optional_bytes(value.as_ref());
            }
            Op::MoveRename { src, dst_collection, dst } => {
                self.head(MOVE_RENAME, src);
                self.bytes(dst_collection.as_bytes());
                self.bytes(dst.as_bytes());
            }
            Op::CreateCollection => self.u8(CREATE_COLLECTION),
            Op::RemoveCollection => self.u8(REMOVE_COLLECTION),
            Op::SplitCollection { at, dst } => {
                self.head(SPLIT_COLLECTION, at);
                self.bytes(dst.as_bytes());
            }
            other => {
                return Err(StoreError::InvalidArgument(format!(
                    "this version of the channel cannot encode the op {other:?}"
                )));
            }
        }
        Ok(())
    }
}

/// Decodes a transaction whose data section is `data`, without copying.
///
/// # Errors
/// [`StoreError::InvalidArgument`] if `control` does not have the form that [`EncodedTransactions::add`] produces.
pub(crate) fn decode(control: Bytes, data: &Bytes) -> Result<Transaction> {
    let mut input = TransactionDecoder { control, data };
    let collection = CollectionId::new(input.bytes()?)?;
    let uses_reserve = match input.u8()? {
        0 => false,
        1 => true,
        other => {
            return Err(StoreError::InvalidArgument(format!(
                "the flag for the use of the reserve is {other}, not 0 or 1"
            )));
        }
    };
    let count = input.count(1)?;
    check_ops(count)?;
    let mut ops = Vec::with_capacity(count);
    for _ in 0..count {
        ops.push(input.op()?);
    }
    if input.control.has_remaining() {
        return Err(truncated());
    }
    Ok(Transaction { collection, ops, uses_reserve })
}

fn truncated() -> StoreError {
    StoreError::InvalidArgument("a transaction's encoding is truncated or too long".into())
}

struct TransactionDecoder<'a> {
    control: Bytes,
    data: &'a Bytes,
}

impl TransactionDecoder<'_> {
    fn u8(&mut self) -> Result<u8> {
        self.control.try_get_u8().map_err(|_| truncated())
    }

    fn u32(&mut self) -> Result<u32> {
        self.control.try_get_u32_le().map_err(|_| truncated())
    }

    fn u64(&mut self) -> Result<u64> {
        self.control.try_get_u64_le().map_err(|_| truncated())
    }

    fn bytes(&mut self) -> Result<Bytes> {
        let len = self.u32()? as usize;
        if len > self.control.len() {
            return Err(truncated());
        }
        Ok(self.control.split_to(len))
    }

    fn optional_bytes(&mut self) -> Result<Option<Bytes>> {
        match self.u8()? {
            0 => Ok(None),
            1 => self.bytes().map(Some),
            other => {
                let what = format!("the flag for the presence of a value is {other}, not 0 or 1");
                Err(StoreError::InvalidArgument(what))
            }
        }
    }

    /// Reads the number of items in a list. Each item must occupy at least `least` bytes of the
    /// remaining input.
    fn count(&mut self, least: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        if count > self.control.len() / least { Err(truncated()) } else { Ok(count) }
    }

    fn oid(&mut self) -> Result<ObjectId> {
        ObjectId::new(self.bytes()?)
    }

    fn pairs(&mut self) -> Result<Vec<(Bytes, Bytes)>> {
        let count = self.count(8)?;
        (0..count).map(|_| Ok((self.bytes()?, self.bytes()?))).collect()
    }

    fn payload(&mut self) -> Result<Payload> {
        let (at, len, block_offset) = (self.u64()?, self.u64()?, self.u32()?);
        let count = self.count(4)?;
        let checksums = (0..count).map(|_| self.u32()).collect::<Result<Vec<u32>>>()?;
        let end = at.checked_add(len).filter(|&end| end <= self.data.len() as u64).ok_or_else(truncated)?;
        Payload::from_parts(u64::from(block_offset), self.data.slice(at as usize..end as usize), checksums)
            .map_err(|e| StoreError::InvalidArgument(e.to_string()))
    }

    fn op(&mut self) -> Result<Op> {
        let tag = self.u8()?;
        Ok(match tag {
            CREATE_COLLECTION => Op::CreateCollection,
            REMOVE_COLLECTION => Op::RemoveCollection,
            _ => {
                let oid = self.oid()?;
                self.object_op(tag, oid)?
            }
        })
    }

    fn object_op(&mut self, tag: u8, oid: ObjectId) -> Result<Op> {
        Ok(match tag {
            TOUCH => Op::Touch { oid },
            CREATE_EXCLUSIVE => Op::CreateExclusive { oid },
            WRITE_INLINE => {
                let offset = self.u64()?;
                Op::Write { oid, offset, source: WriteSource::Inline(self.payload()?) }
            }
            WRITE_STAGED => {
                let offset = self.u64()?;
                let stage = StageId(self.u64()?);
                Op::Write {
                    oid,
                    offset,
                    source: WriteSource::Staged { stage, offset: self.u64()?, len: self.u64()? },
                }
            }
            ZERO => Op::Zero { oid, offset: self.u64()?, len: self.u64()? },
            TRUNCATE => Op::Truncate { oid, size: self.u64()? },
            REMOVE => Op::Remove { oid },
            CLONE => Op::Clone { src: oid, dst: self.oid()? },
            CLONE_RANGE => Op::CloneRange {
                src: oid,
                dst: self.oid()?,
                src_offset: self.u64()?,
                len: self.u64()?,
                dst_offset: self.u64()?,
            },
            _ => self.metadata_op(tag, oid)?,
        })
    }

    fn metadata_op(&mut self, tag: u8, oid: ObjectId) -> Result<Op> {
        Ok(match tag {
            SET_XATTRS => Op::SetXattrs { oid, xattrs: self.pairs()? },
            REMOVE_XATTR => Op::RemoveXattr { oid, name: self.bytes()? },
            REMOVE_XATTRS => Op::RemoveXattrs { oid },
            OMAP_SET => Op::OmapSet { oid, entries: self.pairs()? },
            OMAP_REMOVE => {
                let count = self.count(4)?;
                let keys = (0..count).map(|_| self.bytes()).collect::<Result<Vec<Bytes>>>()?;
                Op::OmapRemove { oid, keys }
            }
            OMAP_REMOVE_RANGE => Op::OmapRemoveRange { oid, from: self.bytes()?, to: self.bytes()? },
            OMAP_CLEAR => Op::OmapClear { oid },
            OMAP_SET_HEADER => Op::OmapSetHeader { oid, header: self.bytes()? },
            GUARD_XATTR => Op::GuardXattr { oid, name: self.bytes()?, value: self.optional_bytes()? },
            GUARD_OMAP => Op::GuardOmap { oid, key: self.bytes()?, value: self.optional_bytes()? },
            MOVE_RENAME => Op::MoveRename {
                src: oid,
                dst_collection: CollectionId::new(self.bytes()?)?,
                dst: self.oid()?,
            },
            SPLIT_COLLECTION => Op::SplitCollection { at: oid, dst: CollectionId::new(self.bytes()?)? },
            unknown => return Err(StoreError::InvalidArgument(format!("unknown op {unknown}"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn every_op() -> Transaction {
        let id = |s: &'static str| ObjectId::new(s).unwrap();
        let cid = |s: &'static str| CollectionId::new(s).unwrap();
        let b = Bytes::from_static;
        let payload = |offset, len| WriteSource::Inline(Payload::compute(offset, Bytes::from(vec![7; len])));
        let pairs = vec![(b(b"k"), b(b"v")), (b(b""), b(b""))];
        Transaction::new(cid("c"))
            .with(Op::Touch { oid: id("a") })
            .with(Op::CreateExclusive { oid: id("a") })
            .with(Op::Write { oid: id("a"), offset: 100, source: payload(100, 9000) })
            .with(Op::Write { oid: id("a"), offset: 0, source: payload(0, 0) })
            .with(Op::Write { oid: id("b"), offset: 4096, source: payload(4096, 1) })
            .with(Op::Write {
                oid: id("a"),
                offset: 8192,
                source: WriteSource::Staged { stage: StageId(3), offset: 4096, len: 1 },
            })
            .with(Op::Zero { oid: id("a"), offset: 1, len: 2 })
            .with(Op::Truncate { oid: id("a"), size: 5 })
            .with(Op::Remove { oid: id("a") })
            .with(Op::SetXattrs { oid: id("a"), xattrs: pairs.clone() })
            .with(Op::RemoveXattr { oid: id("a"), name: b(b"n") })
            .with(Op::RemoveXattrs { oid: id("a") })
            .with(Op::OmapSet { oid: id("a"), entries: pairs })
            .with(Op::OmapRemove { oid: id("a"), keys: vec![b(b"x"), b(b"y")] })
            .with(Op::OmapRemoveRange { oid: id("a"), from: b(b"x"), to: b(b"y") })
            .with(Op::OmapClear { oid: id("a") })
            .with(Op::OmapSetHeader { oid: id("a"), header: b(b"h") })
            .with(Op::GuardXattr { oid: id("a"), name: b(b"n"), value: None })
            .with(Op::GuardOmap { oid: id("a"), key: b(b"k"), value: Some(b(b"")) })
            .with(Op::Clone { src: id("a"), dst: id("b") })
            .with(Op::CloneRange { src: id("a"), dst: id("b"), src_offset: 1, len: 2, dst_offset: 3 })
            .with(Op::MoveRename { src: id("a"), dst_collection: cid("d"), dst: id("b") })
            .with(Op::CreateCollection)
            .with(Op::RemoveCollection)
            .with(Op::SplitCollection { at: id("m"), dst: cid("d") })
            .from_reserve()
    }

    fn encode(
        transaction: &Transaction,
        align: usize,
        stage_id: impl FnMut(StageId) -> Result<u64>,
    ) -> Result<EncodedTransactions> {
        let mut encoded = EncodedTransactions::default();
        assert_eq!(encoded.add(transaction, align, stage_id)?, 0);
        assert_eq!(encoded.lengths, [encoded.control.len() as u32]);
        Ok(encoded)
    }

    fn data_section(encoded: &EncodedTransactions) -> Bytes {
        let mut data = vec![0; encoded.data_len];
        for (at, bytes) in &encoded.data {
            data[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        Bytes::from(data)
    }

    #[test]
    fn every_op_is_decoded_as_it_was_encoded() {
        for align in [1, 4096] {
            let encoded = encode(&every_op(), align, |s| Ok(s.0)).unwrap();
            assert!(encoded.data.iter().all(|(at, _)| at.is_multiple_of(align)));
            assert_eq!(encoded.stages, [StageId(3)]);
            let data = data_section(&encoded);
            assert_eq!(decode(Bytes::from(encoded.control), &data).unwrap(), every_op());
        }
    }

    #[test]
    fn equal_transactions_and_payload_are_sent_once() {
        let first = every_op();
        let longer = first.clone().with(Op::Touch { oid: ObjectId::new("x").unwrap() });
        let parts = [first.clone(), first.clone(), longer.clone(), first.clone()];
        for align in [1, 4096] {
            let mut encoded = EncodedTransactions::default();
            let numbers = parts.each_ref().map(|part| encoded.add(part, align, |s| Ok(s.0)).unwrap());
            assert_eq!((numbers, encoded.lengths.len(), encoded.data.len()), ([0, 0, 1, 0], 2, 3));
            let data = data_section(&encoded);
            let mut control = Bytes::from(encoded.control);
            let one = |len: &u32| decode(control.split_to(*len as usize), &data).unwrap();
            let decoded: Vec<Transaction> = encoded.lengths.iter().map(one).collect();
            assert_eq!(decoded, [first.clone(), longer.clone()]);
        }
    }

    #[test]
    fn a_reserve_flag_other_than_0_or_1_is_refused() {
        let ordinary = Transaction { uses_reserve: false, ..every_op() };
        let encoded = encode(&ordinary, 1, |s| Ok(s.0)).unwrap();
        let data = data_section(&encoded);
        let mut control = encoded.control;
        assert_eq!(decode(Bytes::from(control.clone()), &data).unwrap(), ordinary);
        control[5] = 2;
        decode(Bytes::from(control), &data).unwrap_err();
    }

    #[test]
    fn too_many_ops_are_refused_by_encoder_and_decoder() {
        let touch = Op::Touch { oid: ObjectId::new("a").unwrap() };
        let of = |count| Transaction { ops: vec![touch.clone(); count], ..every_op() };
        let most = encode(&of(MAX_OPS), 1, |s| Ok(s.0)).unwrap();
        assert_eq!(decode(Bytes::from(most.control.clone()), &Bytes::new()).unwrap().ops.len(), MAX_OPS);
        let refused = encode(&of(MAX_OPS + 1), 1, |s| Ok(s.0)).unwrap_err();
        assert!(refused.to_string().contains("split it"), "{refused}");
        let mut more = most.control;
        // The number of ops follows the collection's name (1 byte after 4 bytes of length) and the
        // flag for the reserve.
        more[6..10].copy_from_slice(&(MAX_OPS as u32 + 1).to_le_bytes());
        let refused = decode(Bytes::from(more), &Bytes::new()).unwrap_err();
        assert!(refused.to_string().contains("split it"), "{refused}");
    }

    proptest! {
        #[test]
        fn decoding_damaged_transactions_never_panics(at: usize, value: u8, cut: usize) {
            let encoded = encode(&every_op(), 1, |s| Ok(s.0)).unwrap();
            let data = data_section(&encoded);
            let mut control = encoded.control;
            let at = at % control.len();
            control[at] = value;
            control.truncate(cut % (2 * control.len()));
            let _ = decode(Bytes::from(control), &data);
        }

        #[test]
        fn decoding_arbitrary_bytes_never_panics(control in proptest::collection::vec(any::<u8>(), 0..300), data in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(Bytes::from(control), &Bytes::from(data));
        }
    }
}
