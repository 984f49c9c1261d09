//! Splits a file into fragments.

use std::io::{self, Read, Seek, SeekFrom, Write};

use base::block::crc32c;

use super::header::{self, FragmentHeader, is_unit};
use super::{FileLayout, FragmentError, UNIT_MAX, UNIT_MULTIPLE, unit_for};
use crate::code::check_count;
use crate::{Code, EcError};

/// Reads `input` to its end, and writes one fragment to each of `fragments`, which must be empty.
/// `unit` is the stripe unit in bytes. `id` must be random.
///
/// # Errors
/// [`FragmentError::Code`] if the unit or the number of fragments is not possible,
/// [`FragmentError::Read`] if the input cannot be read, and [`FragmentError::WriteFragment`] if a
/// fragment cannot be written. After an error, the outputs are not valid fragments.
pub fn encode<W: Write + Seek>(
    code: &Code,
    unit: usize,
    id: [u8; 16],
    input: &mut impl Read,
    fragments: &mut [W],
) -> Result<FileLayout, FragmentError> {
    let geometry = code.geometry();
    if !is_unit(unit) {
        Err(EcError::Unit { unit, multiple: UNIT_MULTIPLE, max: UNIT_MAX })?;
    }
    check_count("fragments", fragments.len(), geometry.fragments())?;
    let mut data = vec![0; unit * geometry.k()];
    let mut parity = vec![0; unit * geometry.m()];
    let mut layout = FileLayout { geometry, unit, len: 0, id };
    each(fragments, |_, fragment| fragment.write_all(&[0; header::LEN]))?;
    loop {
        let filled = fill(input, &mut data).map_err(FragmentError::Read)?;
        if filled > 0 {
            let unit = unit_for(filled, geometry.k());
            let (data, parity) = (&mut data[..unit * geometry.k()], &mut parity[..unit * geometry.m()]);
            data[filled..].fill(0);
            write_stripe(code, unit, data, parity, fragments)?;
            layout.len += filled as u64;
        }
        if filled < data.len() {
            break;
        }
    }
    each(fragments, |index, fragment| {
        fragment.seek(SeekFrom::Start(0))?;
        fragment.write_all(&FragmentHeader { layout, index }.to_bytes())?;
        fragment.flush()
    })?;
    Ok(layout)
}

fn write_stripe<W: Write>(
    code: &Code,
    unit: usize,
    data: &[u8],
    parity: &mut [u8],
    fragments: &mut [W],
) -> Result<(), FragmentError> {
    let sources: Vec<&[u8]> = data.chunks_exact(unit).collect();
    let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(unit).collect();
    code.encode(&sources, &mut outputs)?;
    let units: Vec<&[u8]> = sources.into_iter().chain(outputs.into_iter().map(|out| &*out)).collect();
    each(fragments, |index, fragment| write_record(fragment, units[index]))
}

/// Writes a unit and its checksum.
pub(super) fn write_record(fragment: &mut impl Write, unit: &[u8]) -> io::Result<()> {
    fragment.write_all(unit)?;
    fragment.write_all(&crc32c(unit).to_le_bytes())
}

fn each<W>(
    fragments: &mut [W],
    mut write: impl FnMut(usize, &mut W) -> io::Result<()>,
) -> Result<(), FragmentError> {
    for (index, fragment) in fragments.iter_mut().enumerate() {
        write(index, fragment).map_err(|error| FragmentError::WriteFragment { index, error })?;
    }
    Ok(())
}

/// Reads until `buffer` is full or the input ends. Returns the number of bytes read.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}
