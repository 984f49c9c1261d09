//! Putting a file together from its shards, and making lost shards anew.

use std::io::{self, Read, Seek, SeekFrom, Write};

use base::block::crc32c;

use super::encode::write_record;
use super::header::{self, Header};
use super::{CRC, Layout, ShardError};
use crate::code::check_distinct;
use crate::{Code, Kernel, Recovery};

/// How a shard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardState {
    /// All of it can be read.
    Intact,
    /// Some of it cannot be read, or has another checksum than when it was written.
    Damaged {
        /// In so many stripes.
        stripes: u64,
    },
    /// It is not there, or has no valid header.
    Missing,
}

/// The shards of a file, those that there are.
#[derive(Debug)]
pub struct ShardSet<R> {
    layout: Layout,
    code: Code,
    /// By shard.
    shards: Vec<Option<R>>,
    /// Position of each among what was given.
    positions: Vec<Option<usize>>,
    /// Those that could not be read somewhere, by shard.
    failed: Vec<bool>,
    /// The last one made, for the shards that were present and wanted.
    recovery: Option<(Vec<usize>, Vec<usize>, Recovery)>,
    buffers: Vec<Vec<u8>>,
}

impl<R: Read + Seek> ShardSet<R> {
    /// Reads the headers. Inputs that have no valid one are left out: [`position`](Self::position) tells. `kernel` computes what
    /// is lost.
    ///
    /// # Errors
    /// [`ShardError::NoShards`], [`ShardError::Mixed`], [`ShardError::Twice`].
    pub fn open(inputs: Vec<R>, kernel: &'static dyn Kernel) -> Result<ShardSet<R>, ShardError> {
        let given = inputs.len();
        let mut set: Option<(usize, ShardSet<R>)> = None;
        for (position, mut input) in inputs.into_iter().enumerate() {
            let Some(Header { layout, index }) = read_header(&mut input) else { continue };
            let (first, set) = set
                .get_or_insert_with(|| (position, ShardSet::new(layout, Code::new(layout.geometry, kernel))));
            if set.layout != layout {
                return Err(ShardError::Mixed { first: *first, second: position });
            }
            if let Some(first) = set.positions[index] {
                return Err(ShardError::Twice { index, first, second: position });
            }
            set.positions[index] = Some(position);
            set.shards[index] = Some(input);
        }
        set.map(|(_, set)| set).ok_or(ShardError::NoShards { given })
    }

    fn new(layout: Layout, code: Code) -> ShardSet<R> {
        let count = layout.geometry.shards();
        let none = || (0..count).map(|_| None).collect();
        ShardSet {
            layout,
            code,
            shards: none(),
            positions: vec![None; count],
            failed: vec![false; count],
            recovery: None,
            buffers: vec![vec![]; count],
        }
    }

    /// How the file was cut.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Which of the inputs, from 0, is shard `index`; `None` if none is.
    #[must_use]
    pub fn position(&self, index: usize) -> Option<usize> {
        self.positions.get(index).copied().flatten()
    }

    /// Shards that are not there, and those that turned out to be damaged in what has been read so far.
    #[must_use]
    pub fn lost(&self) -> Vec<usize> {
        let lost = |index: &usize| self.failed[*index] || self.shards[*index].is_none();
        (0..self.shards.len()).filter(lost).collect()
    }

    /// Reads everything and tells how each shard is. `progress` gets the number of file bytes in each stripe that was checked.
    pub fn check(&mut self, mut progress: impl FnMut(u64)) -> Vec<ShardState> {
        let present = |shard: &Option<R>| match shard {
            Some(_) => ShardState::Intact,
            None => ShardState::Missing,
        };
        let mut states: Vec<ShardState> = self.shards.iter().map(present).collect();
        for stripe in 0..self.layout.stripes() {
            for (index, state) in states.iter_mut().enumerate() {
                match state {
                    ShardState::Missing => {}
                    _ if self.read(index, stripe) => {}
                    ShardState::Damaged { stripes } => *stripes += 1,
                    ShardState::Intact => *state = ShardState::Damaged { stripes: 1 },
                }
            }
            progress(self.layout.filled(stripe) as u64);
        }
        states
    }

    /// Writes the file. Only as many shards are read as are needed: the data shards, and parity where those fail.
    ///
    /// # Errors
    /// [`ShardError::TooFew`]; [`ShardError::Write`].
    pub fn decode(&mut self, output: &mut impl Write) -> Result<(), ShardError> {
        let k = self.layout.geometry.k();
        let wanted: Vec<usize> = (0..k).collect();
        for stripe in 0..self.layout.stripes() {
            self.restore(stripe, &wanted)?;
            let mut left = self.layout.filled(stripe);
            for unit in &self.buffers[..k] {
                let part = left.min(self.layout.unit_of(stripe));
                output.write_all(&unit[..part]).map_err(ShardError::Write)?;
                left -= part;
            }
        }
        output.flush().map_err(ShardError::Write)
    }

    /// Writes shards anew, byte for byte as they were, each to its empty writer. `progress` gets the number of file bytes in
    /// each stripe that was done.
    ///
    /// # Errors
    /// [`ShardError::TooFew`]; [`ShardError::WriteShard`]; [`ShardError::Code`] if there is no such shard or it is named twice.
    pub fn rebuild<W: Write + Seek>(
        &mut self,
        shards: &mut [(usize, W)],
        mut progress: impl FnMut(u64),
    ) -> Result<(), ShardError> {
        let geometry = self.layout.geometry;
        check_distinct(shards.iter().map(|(index, _)| *index), geometry.shards(), "shard", geometry)?;
        each(shards, |_, shard| shard.write_all(&[0; header::LEN]))?;
        let wanted: Vec<usize> = shards.iter().map(|(index, _)| *index).collect();
        for stripe in 0..self.layout.stripes() {
            self.restore(stripe, &wanted)?;
            let unit = self.layout.unit_of(stripe);
            each(shards, |index, shard| write_record(shard, &self.buffers[index][..unit]))?;
            progress(self.layout.filled(stripe) as u64);
        }
        each(shards, |index, shard| {
            shard.seek(SeekFrom::Start(0))?;
            shard.write_all(&Header { layout: self.layout, index }.to_bytes())?;
            shard.flush()
        })
    }

    /// Has the units of the shards `wanted` in their buffers.
    fn restore(&mut self, stripe: u64, wanted: &[usize]) -> Result<(), ShardError> {
        let (k, shards) = (self.layout.geometry.k(), self.layout.geometry.shards());
        let mut present: Vec<usize> =
            wanted.iter().copied().filter(|index| self.read(*index, stripe)).collect();
        let lost: Vec<usize> = wanted.iter().copied().filter(|index| !present.contains(index)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        for index in (0..shards).filter(|index| !wanted.contains(index)) {
            if present.len() < k && self.read(index, stripe) {
                present.push(index);
            }
        }
        if present.len() < k {
            return Err(ShardError::TooFew { stripe, intact: present.len(), needed: k, shards });
        }
        self.recover(present, lost, self.layout.unit_of(stripe))
    }

    /// Computes the units of the shards `lost` from those `present`.
    fn recover(&mut self, present: Vec<usize>, lost: Vec<usize>, unit: usize) -> Result<(), ShardError> {
        let recovery = match self.recovery.take() {
            Some((p, l, recovery)) if p == present && l == lost => recovery,
            _ => self.code.recovery(&present, &lost)?,
        };
        let mut out: Vec<Vec<u8>> =
            lost.iter().map(|index| std::mem::take(&mut self.buffers[*index])).collect();
        out.iter_mut().for_each(|out| out.resize(unit + CRC, 0));
        let sources: Vec<&[u8]> =
            recovery.sources().iter().map(|index| &self.buffers[*index][..unit]).collect();
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(|out| &mut out[..unit]).collect();
        let done = recovery.run(&sources, &mut slices);
        for (index, out) in lost.iter().zip(out) {
            self.buffers[*index] = out;
        }
        self.recovery = Some((present, lost, recovery));
        Ok(done?)
    }

    /// Reads a shard's unit into its buffer; whether it is there and intact.
    fn read(&mut self, index: usize, stripe: u64) -> bool {
        let Some(shard) = &mut self.shards[index] else { return false };
        let unit = self.layout.unit_of(stripe);
        let buffer = &mut self.buffers[index];
        buffer.resize(unit + CRC, 0);
        let at = self.layout.record_at(stripe);
        let read = shard.seek(SeekFrom::Start(at)).and_then(|_| shard.read_exact(buffer));
        let (data, crc) = buffer.split_at(unit);
        let intact = read.is_ok() && crc32c(data).to_le_bytes() == *crc;
        self.failed[index] |= !intact;
        intact
    }
}

fn read_header(input: &mut (impl Read + Seek)) -> Option<Header> {
    let mut bytes = [0; header::LEN];
    input.seek(SeekFrom::Start(0)).and_then(|_| input.read_exact(&mut bytes)).ok()?;
    Header::from_bytes(&bytes).ok()
}

fn each<W>(
    shards: &mut [(usize, W)],
    mut write: impl FnMut(usize, &mut W) -> io::Result<()>,
) -> Result<(), ShardError> {
    for (index, shard) in shards {
        write(*index, shard).map_err(|error| ShardError::WriteShard { index: *index, error })?;
    }
    Ok(())
}
