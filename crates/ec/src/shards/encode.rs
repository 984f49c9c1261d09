//! Cutting a file into shards.

use std::io::{self, Read, Seek, SeekFrom, Write};

use base::block::crc32c;

use super::header::{self, Header, is_unit};
use super::{Layout, ShardError, UNIT_MAX, UNIT_MULTIPLE, unit_for};
use crate::code::check_count;
use crate::{Code, EcError};

/// Reads `input` to its end, of whatever length, and writes one shard to each of `shards`, which must be empty. `unit` is the
/// stripe unit in bytes, `id` must be random.
///
/// # Errors
/// [`EcError::Unit`] and [`EcError::Count`] as [`ShardError::Code`]; [`ShardError::Read`] and [`ShardError::WriteShard`]: what
/// has been written then are no valid shards.
pub fn encode<W: Write + Seek>(
    code: &Code,
    unit: usize,
    id: [u8; 16],
    input: &mut impl Read,
    shards: &mut [W],
) -> Result<Layout, ShardError> {
    let geometry = code.geometry();
    if !is_unit(unit) {
        Err(EcError::Unit { unit, multiple: UNIT_MULTIPLE, max: UNIT_MAX })?;
    }
    check_count("shards", shards.len(), geometry.shards())?;
    let mut data = vec![0; unit * geometry.k()];
    let mut parity = vec![0; unit * geometry.m()];
    let mut layout = Layout { geometry, unit, len: 0, id };
    each(shards, |_, shard| shard.write_all(&[0; header::LEN]))?;
    loop {
        let filled = fill(input, &mut data).map_err(ShardError::Read)?;
        if filled > 0 {
            let unit = unit_for(filled, geometry.k());
            let (data, parity) = (&mut data[..unit * geometry.k()], &mut parity[..unit * geometry.m()]);
            data[filled..].fill(0);
            write_stripe(code, unit, data, parity, shards)?;
            layout.len += filled as u64;
        }
        if filled < data.len() {
            break;
        }
    }
    each(shards, |index, shard| {
        shard.seek(SeekFrom::Start(0))?;
        shard.write_all(&Header { layout, index }.to_bytes())?;
        shard.flush()
    })?;
    Ok(layout)
}

fn write_stripe<W: Write>(
    code: &Code,
    unit: usize,
    data: &[u8],
    parity: &mut [u8],
    shards: &mut [W],
) -> Result<(), ShardError> {
    let sources: Vec<&[u8]> = data.chunks_exact(unit).collect();
    let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(unit).collect();
    code.encode(&sources, &mut outputs)?;
    let units: Vec<&[u8]> = sources.into_iter().chain(outputs.into_iter().map(|out| &*out)).collect();
    each(shards, |index, shard| write_record(shard, units[index]))
}

/// Writes a unit and its checksum.
pub(super) fn write_record(shard: &mut impl Write, unit: &[u8]) -> io::Result<()> {
    shard.write_all(unit)?;
    shard.write_all(&crc32c(unit).to_le_bytes())
}

fn each<W>(
    shards: &mut [W],
    mut write: impl FnMut(usize, &mut W) -> io::Result<()>,
) -> Result<(), ShardError> {
    for (index, shard) in shards.iter_mut().enumerate() {
        write(index, shard).map_err(|error| ShardError::WriteShard { index, error })?;
    }
    Ok(())
}

/// Reads until `buffer` is full or the input ends; how many bytes that were.
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
