//! Data that tells its origin: [`Fill`] generates it, and [`Seen`] recognises it.
//!
//! Each aligned word of 8 bytes encodes the number of the fill and the word's place in it. A
//! history therefore stores a few numbers instead of the data of writes and reads, and a report can
//! say which write damaged or misdirected bytes come from.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

/// Bytes per word.
const WORD: u64 = 8;
/// Value of 8 bits of each word before the permutation. Other data has these bits only by chance.
const MARK: u64 = 0xA5;
/// Number of bits of a word's place in its fill.
const PLACE_BITS: u32 = 24;
/// Maximum number of bytes of [`DataOrigin::Raw`] in one run.
const RAW_MAX: usize = 64;

/// Data of one write.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fill {
    /// Number of the fill. Each write of a simulation uses its own number.
    pub id: u32,
    /// Size in bytes, at most 128 MiB.
    pub len: u64,
}

impl fmt::Debug for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of fill {}", self.len, self.id)
    }
}

impl Fill {
    /// Returns the bytes of the fill.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        bytes_of(self.id, 0..self.len)
    }
}

/// Permutes the 64-bit numbers.
fn scramble(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// Inverts [`scramble`].
fn unscramble(mut x: u64) -> u64 {
    const INVERSE: u64 = inverse(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    x = x.wrapping_mul(INVERSE);
    x ^= x >> 32;
    x = x.wrapping_mul(INVERSE);
    x ^ (x >> 32)
}

/// Returns the inverse of an odd number modulo 2^64, by Newton's iteration.
const fn inverse(odd: u64) -> u64 {
    let (mut found, mut steps) = (odd, 0);
    while steps < 6 {
        found = found.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(found)));
        steps += 1;
    }
    found
}

fn word(id: u32, place: u64) -> [u8; WORD as usize] {
    scramble((u64::from(id) << 32) | (place << 8) | MARK).to_le_bytes()
}

/// Returns the fill and the place that a word encodes, if it is a word of a fill.
fn parse_word(bytes: [u8; WORD as usize]) -> Option<(u32, u64)> {
    let plain = unscramble(u64::from_le_bytes(bytes));
    (plain & 0xFF == MARK).then_some(((plain >> 32) as u32, (plain >> 8) & ((1 << PLACE_BITS) - 1)))
}

/// Returns one byte of a fill.
fn byte_of(id: u32, at: u64) -> u8 {
    word(id, at / WORD)[(at % WORD) as usize]
}

/// Returns a range of the bytes of a fill.
pub(crate) fn bytes_of(id: u32, range: Range<u64>) -> Bytes {
    let mut bytes = Vec::with_capacity((range.end - range.start + WORD) as usize);
    let skipped = (range.start % WORD) as usize;
    for place in range.start / WORD..range.end.div_ceil(WORD) {
        bytes.extend_from_slice(&word(id, place));
    }
    bytes.truncate(skipped + (range.end - range.start) as usize);
    Bytes::from(bytes).slice(skipped..)
}

/// Origin of a run of bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum DataOrigin {
    /// Zeros.
    Zeros,
    /// Bytes of fill `id`, from byte `at` on.
    Fill {
        /// Number of the fill.
        id: u32,
        /// Offset of the first byte in the fill.
        at: u64,
    },
    /// Bytes that no fill contains.
    Raw(Bytes),
}

impl fmt::Debug for DataOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataOrigin::Zeros => write!(f, "zeros"),
            DataOrigin::Fill { id, at } => write!(f, "fill {id} from its byte {at}"),
            DataOrigin::Raw(bytes) => write!(f, "bytes of no fill ({:02x?}…)", &bytes[..bytes.len().min(16)]),
        }
    }
}

impl DataOrigin {
    /// Returns the same piece without its first `len` bytes.
    #[must_use]
    pub(crate) fn skip(&self, len: u64) -> DataOrigin {
        match self {
            DataOrigin::Zeros => DataOrigin::Zeros,
            DataOrigin::Fill { id, at } => DataOrigin::Fill { id: *id, at: at + len },
            DataOrigin::Raw(bytes) => DataOrigin::Raw(bytes.slice((len as usize).min(bytes.len())..)),
        }
    }

    /// Returns byte `at` of the piece.
    fn byte(&self, at: u64) -> u8 {
        match self {
            DataOrigin::Zeros => 0,
            DataOrigin::Fill { id, at: from } => byte_of(*id, from + at),
            DataOrigin::Raw(bytes) => bytes[at as usize],
        }
    }

    /// Returns the number of equal bytes at the start of two pieces, at most `len`.
    pub(crate) fn common(&self, other: &DataOrigin, len: u64) -> u64 {
        match (self, other) {
            (DataOrigin::Zeros, DataOrigin::Zeros) => len,
            (DataOrigin::Fill { .. }, DataOrigin::Fill { .. }) if self == other => len,
            // Two different origins have only a few equal bytes by chance.
            _ => (0..len).take_while(|at| self.byte(*at) == other.byte(*at)).count() as u64,
        }
    }
}

/// Data that a read returned, as runs of known origin.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Seen {
    runs: Vec<(u64, DataOrigin)>,
    len: u64,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)?;
        let (mut at, mut separator) = (0, ": ");
        for (len, piece) in &self.runs {
            write!(f, "{separator}[{at}..{}] {piece:?}", at + len)?;
            (at, separator) = (at + len, ", ");
        }
        Ok(())
    }
}

impl Seen {
    /// Recognises the origin of bytes.
    #[must_use]
    pub fn recognise(bytes: &[u8]) -> Seen {
        Seen::recognise_chunks(std::iter::once(bytes))
    }

    /// Recognises the origin of bytes that arrived in several chunks.
    #[must_use]
    pub fn recognise_chunks<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Seen {
        let mut seen = Seen::default();
        for chunk in chunks {
            let mut at = 0;
            while at < chunk.len() {
                let (len, piece) = match seen.continued(&chunk[at..]) {
                    Some(continued) => continued,
                    None => recognise_run(&chunk[at..]),
                };
                seen.push(len as u64, piece);
                at += len;
            }
        }
        seen
    }

    /// Returns the run with which `bytes` continues the last run, if it does.
    fn continued(&self, bytes: &[u8]) -> Option<(usize, DataOrigin)> {
        let (len, DataOrigin::Fill { id, at }) = self.runs.last()? else { return None };
        let at = at + len;
        let len = fill_len(bytes, *id, at);
        (len > 0).then_some((len, DataOrigin::Fill { id: *id, at }))
    }

    /// Appends a run.
    pub fn push(&mut self, len: u64, piece: DataOrigin) {
        if len == 0 {
            return;
        }
        self.len += len;
        if let Some((last_len, last)) = self.runs.last_mut() {
            match (last, &piece) {
                (DataOrigin::Zeros, DataOrigin::Zeros) => return *last_len += len,
                (DataOrigin::Fill { id, at }, DataOrigin::Fill { id: next, at: from })
                    if id == next && *at + *last_len == *from =>
                {
                    return *last_len += len;
                }
                _ => {}
            }
        }
        self.runs.push((len, piece));
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the runs: length in bytes, and origin.
    #[must_use]
    pub fn runs(&self) -> &[(u64, DataOrigin)] {
        &self.runs
    }

    /// Returns the numbers of the fills.
    pub fn fills(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().filter_map(|(_, piece)| match piece {
            DataOrigin::Fill { id, .. } => Some(*id),
            DataOrigin::Zeros | DataOrigin::Raw(_) => None,
        })
    }

    /// Returns the offset of the first byte in which two sequences differ, and the origins of the
    /// rest of the run in both; `None` if they are equal.
    pub(crate) fn first_difference(
        &self,
        other: &Seen,
    ) -> Option<(u64, Option<DataOrigin>, Option<DataOrigin>)> {
        let (mut ours, mut theirs) = (Runs::new(&self.runs), Runs::new(&other.runs));
        let mut at = 0;
        loop {
            match (ours.peek(), theirs.peek()) {
                (None, None) => return None,
                (Some((a_len, a)), Some((b_len, b))) => {
                    let len = a_len.min(b_len);
                    let common = a.common(&b, len);
                    at += common;
                    if common < len {
                        return Some((at, Some(a.skip(common)), Some(b.skip(common))));
                    }
                    ours.advance(len);
                    theirs.advance(len);
                }
                (a, b) => return Some((at, a.map(|(_, piece)| piece), b.map(|(_, piece)| piece))),
            }
        }
    }
}

/// Iterates over parts of runs.
struct Runs<'a> {
    runs: &'a [(u64, DataOrigin)],
    /// Bytes of the first run that are already consumed.
    used: u64,
}

impl<'a> Runs<'a> {
    fn new(runs: &'a [(u64, DataOrigin)]) -> Runs<'a> {
        Runs { runs, used: 0 }
    }

    fn peek(&self) -> Option<(u64, DataOrigin)> {
        self.runs.first().map(|(len, piece)| (len - self.used, piece.skip(self.used)))
    }

    fn advance(&mut self, len: u64) {
        self.used += len;
        if self.runs.first().is_some_and(|(run, _)| *run == self.used) {
            (self.runs, self.used) = (&self.runs[1..], 0);
        }
    }
}

/// Returns the number of bytes at the start of `bytes` that equal the fill from `at` on.
fn fill_len(bytes: &[u8], id: u32, at: u64) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        let from = at + done as u64;
        let skipped = (from % WORD) as usize;
        if from / WORD >= 1 << PLACE_BITS {
            break;
        }
        let expected = &word(id, from / WORD)[skipped..];
        let rest = &bytes[done..];
        let len = expected.len().min(rest.len());
        let equal = expected[..len].iter().zip(rest).take_while(|(a, b)| a == b).count();
        done += equal;
        if equal < len {
            break;
        }
    }
    done
}

/// Recognises the run at the start of bytes, which are not empty.
fn recognise_run(bytes: &[u8]) -> (usize, DataOrigin) {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    if zeros >= WORD as usize || zeros == bytes.len() {
        return (zeros, DataOrigin::Zeros);
    }
    if let Some(found) = fill_at(bytes) {
        return found;
    }
    // The bytes up to the next zeros or the next fill have no known origin.
    let is_known =
        |at: usize| bytes[at..].starts_with(&[0; WORD as usize]) || fill_at(&bytes[at..]).is_some();
    let len = (1..bytes.len().min(RAW_MAX)).find(|at| is_known(*at)).unwrap_or(bytes.len().min(RAW_MAX));
    (len, DataOrigin::Raw(Bytes::copy_from_slice(&bytes[..len])))
}

/// Returns the run of a fill at the start of bytes, if there is a whole word soon enough to
/// recognise it.
fn fill_at(bytes: &[u8]) -> Option<(usize, DataOrigin)> {
    (0..WORD as usize).find_map(|shift| {
        let found = bytes.get(shift..)?.first_chunk::<{ WORD as usize }>()?;
        let (id, place) = parse_word(*found)?;
        let at = (place * WORD).checked_sub(shift as u64)?;
        let len = fill_len(bytes, id, at);
        (len >= shift + WORD as usize).then_some((len, DataOrigin::Fill { id, at }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrambling_can_be_inverted() {
        for x in [0, 1, 0xA5, u64::MAX, 0x0123_4567_89AB_CDEF] {
            assert_eq!(unscramble(scramble(x)), x);
        }
    }

    #[test]
    fn ranges_of_fills_are_recognised_at_any_offset() {
        let whole = Fill { id: 77, len: 5000 }.bytes();
        for (start, end) in [(0, 5000), (1, 20), (3, 4999), (8, 16), (4095, 4111), (13, 28)] {
            let cut = &whole[start..end];
            assert_eq!(bytes_of(77, start as u64..end as u64), cut);
            let seen = Seen::recognise(cut);
            assert_eq!(seen.runs(), [((end - start) as u64, DataOrigin::Fill { id: 77, at: start as u64 })]);
        }
    }

    #[test]
    fn mixed_data_is_split_into_runs() {
        let mut bytes = bytes_of(1, 5..105).to_vec();
        bytes.extend([0; 50]);
        bytes.extend(bytes_of(2, 3..103));
        bytes.extend([9; 20]);
        bytes.extend(bytes_of(3, 0..64));
        let expected = [
            (100, DataOrigin::Fill { id: 1, at: 5 }),
            (50, DataOrigin::Zeros),
            (100, DataOrigin::Fill { id: 2, at: 3 }),
            (20, DataOrigin::Raw(Bytes::from(vec![9; 20]))),
            (64, DataOrigin::Fill { id: 3, at: 0 }),
        ];
        assert_eq!(Seen::recognise(&bytes).runs(), expected);
        let chunks = Seen::recognise_chunks([&bytes[..77], &bytes[77..200], &bytes[200..]]);
        assert_eq!(chunks.first_difference(&Seen::recognise(&bytes)), None);
    }

    #[test]
    fn the_first_different_byte_is_found() {
        let seen = |pieces: &[(u64, DataOrigin)]| {
            let mut seen = Seen::default();
            pieces.iter().for_each(|(len, piece)| seen.push(*len, piece.clone()));
            seen
        };
        let fill = |id, at| DataOrigin::Fill { id, at };
        let a = seen(&[(10, fill(1, 0)), (10, fill(2, 0))]);
        assert_eq!(a.first_difference(&a), None);
        let raw = seen(&[(13, DataOrigin::Raw(bytes_of(1, 0..13)))]);
        assert_eq!(seen(&[(13, fill(1, 0))]).first_difference(&raw), None, "raw bytes are compared");
        let b = seen(&[(10, fill(1, 0)), (5, fill(2, 0)), (5, fill(4, 5))]);
        assert_eq!(a.first_difference(&b), Some((15, Some(fill(2, 5)), Some(fill(4, 5)))));
        let shorter = seen(&[(10, fill(1, 0))]);
        assert_eq!(a.first_difference(&shorter), Some((10, Some(fill(2, 0)), None)));
    }
}
