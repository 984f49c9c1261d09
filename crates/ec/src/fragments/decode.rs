//! Restores a file from its fragments, and reconstructs lost fragments.

use std::io::{self, Read, Seek, SeekFrom, Write};

use base::block::crc32c;

use super::encode::write_record;
use super::header::{self, FragmentHeader};
use super::{CRC, FileLayout, FragmentError};
use crate::code::check_distinct;
use crate::{Code, Kernel, Recovery};

/// State of a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FragmentState {
    /// All records are readable and have correct checksums.
    Intact,
    /// Some records are unreadable or have a wrong checksum.
    Damaged {
        /// Number of affected stripes.
        stripes: u64,
    },
    /// The fragment is absent or has no valid header.
    Missing,
}

/// The available fragments of a file.
#[derive(Debug)]
pub struct FragmentSet<R> {
    layout: FileLayout,
    code: Code,
    /// For each fragment, its input; `None` if the fragment is missing.
    fragments: Vec<Option<R>>,
    /// For each fragment, the index of its input in the list of inputs; `None` if the fragment is
    /// missing.
    positions: Vec<Option<usize>>,
    /// For each fragment: true if a record was unreadable or had a wrong checksum.
    failed: Vec<bool>,
    /// The last reconstruction, with the lists of present and of lost fragments for which it was
    /// prepared.
    recovery: Option<(Vec<usize>, Vec<usize>, Recovery)>,
    buffers: Vec<Vec<u8>>,
}

impl<R: Read + Seek> FragmentSet<R> {
    /// Reads the headers, and ignores inputs without a valid header. [`position`](Self::position)
    /// shows which inputs are used. `kernel` computes lost fragments.
    ///
    /// # Errors
    /// [`FragmentError::NoFragments`] if no input is a fragment, [`FragmentError::Mixed`] if the
    /// inputs belong to different encodings, and [`FragmentError::Twice`] if two inputs are the
    /// same fragment.
    pub fn open(inputs: Vec<R>, kernel: &'static dyn Kernel) -> Result<FragmentSet<R>, FragmentError> {
        let given = inputs.len();
        let mut set: Option<(usize, FragmentSet<R>)> = None;
        for (position, mut input) in inputs.into_iter().enumerate() {
            let Some(FragmentHeader { layout, index }) = read_header(&mut input) else { continue };
            let (first, set) = set.get_or_insert_with(|| {
                (position, FragmentSet::new(layout, Code::new(layout.geometry, kernel)))
            });
            if set.layout != layout {
                return Err(FragmentError::Mixed { first: *first, second: position });
            }
            if let Some(first) = set.positions[index] {
                return Err(FragmentError::Twice { index, first, second: position });
            }
            set.positions[index] = Some(position);
            set.fragments[index] = Some(input);
        }
        set.map(|(_, set)| set).ok_or(FragmentError::NoFragments { given })
    }

    fn new(layout: FileLayout, code: Code) -> FragmentSet<R> {
        let count = layout.geometry.fragments();
        let none = || (0..count).map(|_| None).collect();
        FragmentSet {
            layout,
            code,
            fragments: none(),
            positions: vec![None; count],
            failed: vec![false; count],
            recovery: None,
            buffers: vec![vec![]; count],
        }
    }

    /// Layout of the file.
    #[must_use]
    pub fn layout(&self) -> FileLayout {
        self.layout
    }

    /// Index of the input that is fragment `index`; `None` if there is none.
    #[must_use]
    pub fn position(&self, index: usize) -> Option<usize> {
        self.positions.get(index).copied().flatten()
    }

    /// Returns the indices of the fragments that are absent or that were found damaged so far.
    #[must_use]
    pub fn lost(&self) -> Vec<usize> {
        let lost = |index: &usize| self.failed[*index] || self.fragments[*index].is_none();
        (0..self.fragments.len()).filter(lost).collect()
    }

    /// Reads all fragments completely and returns the state of each fragment. Calls `progress` for
    /// each stripe with the number of file bytes in the stripe.
    pub fn check(&mut self, mut progress: impl FnMut(u64)) -> Vec<FragmentState> {
        let present = |fragment: &Option<R>| match fragment {
            Some(_) => FragmentState::Intact,
            None => FragmentState::Missing,
        };
        let mut states: Vec<FragmentState> = self.fragments.iter().map(present).collect();
        for stripe in 0..self.layout.stripes() {
            for (index, state) in states.iter_mut().enumerate() {
                match state {
                    FragmentState::Missing => {}
                    _ if self.read(index, stripe) => {}
                    FragmentState::Damaged { stripes } => *stripes += 1,
                    FragmentState::Intact => *state = FragmentState::Damaged { stripes: 1 },
                }
            }
            progress(self.layout.filled(stripe) as u64);
        }
        states
    }

    /// Restores the file and writes it to `output`. Reads only as many fragments as needed: the
    /// data fragments, and parity fragments for stripes in which data is lost.
    ///
    /// # Errors
    /// [`FragmentError::TooFew`] if too many units of a stripe are lost, and
    /// [`FragmentError::Write`] if the output cannot be written.
    pub fn decode(&mut self, output: &mut impl Write) -> Result<(), FragmentError> {
        let k = self.layout.geometry.k();
        let wanted: Vec<usize> = (0..k).collect();
        for stripe in 0..self.layout.stripes() {
            self.restore(stripe, &wanted)?;
            let mut left = self.layout.filled(stripe);
            for unit in &self.buffers[..k] {
                let part = left.min(self.layout.unit_of(stripe));
                output.write_all(&unit[..part]).map_err(FragmentError::Write)?;
                left -= part;
            }
        }
        output.flush().map_err(FragmentError::Write)
    }

    /// Writes fragments again, byte for byte as they were. `fragments` contains the index of each
    /// fragment and an empty writer for it. Calls `progress` for each finished stripe with the
    /// number of file bytes in the stripe.
    ///
    /// # Errors
    /// [`FragmentError::TooFew`] if too many units of a stripe are lost,
    /// [`FragmentError::WriteFragment`] if a fragment cannot be written, and
    /// [`FragmentError::Code`] if a fragment does not exist or is named twice.
    pub fn rebuild<W: Write + Seek>(
        &mut self,
        fragments: &mut [(usize, W)],
        mut progress: impl FnMut(u64),
    ) -> Result<(), FragmentError> {
        let geometry = self.layout.geometry;
        check_distinct(
            fragments.iter().map(|(index, _)| *index),
            geometry.fragments(),
            "fragment",
            geometry,
        )?;
        each(fragments, |_, fragment| fragment.write_all(&[0; header::LEN]))?;
        let wanted: Vec<usize> = fragments.iter().map(|(index, _)| *index).collect();
        for stripe in 0..self.layout.stripes() {
            self.restore(stripe, &wanted)?;
            let unit = self.layout.unit_of(stripe);
            each(fragments, |index, fragment| write_record(fragment, &self.buffers[index][..unit]))?;
            progress(self.layout.filled(stripe) as u64);
        }
        each(fragments, |index, fragment| {
            fragment.seek(SeekFrom::Start(0))?;
            fragment.write_all(&FragmentHeader { layout: self.layout, index }.to_bytes())?;
            fragment.flush()
        })
    }

    /// Loads or reconstructs one stripe's units of the fragments `wanted`, into the buffers of
    /// these fragments.
    fn restore(&mut self, stripe: u64, wanted: &[usize]) -> Result<(), FragmentError> {
        let (k, fragments) = (self.layout.geometry.k(), self.layout.geometry.fragments());
        let mut present: Vec<usize> =
            wanted.iter().copied().filter(|index| self.read(*index, stripe)).collect();
        let lost: Vec<usize> = wanted.iter().copied().filter(|index| !present.contains(index)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        for index in (0..fragments).filter(|index| !wanted.contains(index)) {
            if present.len() < k && self.read(index, stripe) {
                present.push(index);
            }
        }
        if present.len() < k {
            return Err(FragmentError::TooFew { stripe, intact: present.len(), needed: k, fragments });
        }
        self.recover(present, lost, self.layout.unit_of(stripe))
    }

    /// Reconstructs the units of the fragments `lost` from the fragments `present`.
    fn recover(&mut self, present: Vec<usize>, lost: Vec<usize>, unit: usize) -> Result<(), FragmentError> {
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

    /// Reads a fragment's unit of a stripe into the fragment's buffer. Returns true if the unit is
    /// present and intact.
    fn read(&mut self, index: usize, stripe: u64) -> bool {
        let Some(fragment) = &mut self.fragments[index] else { return false };
        let unit = self.layout.unit_of(stripe);
        let buffer = &mut self.buffers[index];
        buffer.resize(unit + CRC, 0);
        let at = self.layout.record_at(stripe);
        let read = fragment.seek(SeekFrom::Start(at)).and_then(|_| fragment.read_exact(buffer));
        let (data, crc) = buffer.split_at(unit);
        let intact = read.is_ok() && crc32c(data).to_le_bytes() == *crc;
        self.failed[index] |= !intact;
        intact
    }
}

fn read_header(input: &mut (impl Read + Seek)) -> Option<FragmentHeader> {
    let mut bytes = [0; header::LEN];
    input.seek(SeekFrom::Start(0)).and_then(|_| input.read_exact(&mut bytes)).ok()?;
    FragmentHeader::from_bytes(&bytes).ok()
}

fn each<W>(
    fragments: &mut [(usize, W)],
    mut write: impl FnMut(usize, &mut W) -> io::Result<()>,
) -> Result<(), FragmentError> {
    for (index, fragment) in fragments {
        write(*index, fragment).map_err(|error| FragmentError::WriteFragment { index: *index, error })?;
    }
    Ok(())
}
