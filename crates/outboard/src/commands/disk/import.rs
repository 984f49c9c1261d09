//! `outboard disk import`: writes the content of a file to a disk.

use std::cell::Cell;
use std::ops::Range;
use std::path::PathBuf;

use base::clock::WallClock;
use bytes::Bytes;
use clap::Args;
use client::Client;
use disk::Disk;
use futures::TryStreamExt;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;
use node::units::ByteSize;
use serde::Serialize;
use vdisk::{AttachedDisk, CHUNK_DEFAULT, CreateOptions, DiskHeader, Disks, OpenSession};

use super::names::DiskPath;
use super::source_file::{ImportUnit, SourceFile};
use super::transfer::{self, WorkEnd, resumable};
use crate::args::NodeArgs;
use crate::commands::session;
use crate::output;

/// Size of the blocks that are compared, in bytes.
const COMPARED: usize = 4096;
/// Shorter runs without changes between changes are written, too, to save requests, in bytes.
const GAP_MIN: usize = 64 << 10;

/// Write the content of a file to a disk
///
/// Creates the disk if it does not exist. The new disk has the size of the file, rounded up to 512 bytes, or
/// --size. Afterwards, the disk has the content of the file, followed by zeros. Holes and blocks of zeros take
/// no space.
///
/// This process attaches the disk, and detaches it at the end. After a failure or Ctrl-C, the disk has a part
/// of the content. --resume then continues: it reads the disk, and writes only blocks that differ from the
/// file. It needs no record of the earlier import, so it is right also if the file or the disk have changed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard disk import vms/base debian.raw\n  \
    outboard disk import vms/base debian.raw --resume\n  \
    outboard disk import vms/db /dev/vg0/db --chunk 1MiB --json\n  \
    zstdcat debian.raw.zst | outboard disk import vms/base - --size 20GiB\n\n\
    With --json, prints \"disk\" (POOL/DISK), \"created\", and in bytes: \"size\" of the disk, \"written\" data, \
    \"zeros\" of the disk that were not written, and \"unchanged\" data that --resume did not write.")]
pub struct ImportArgs {
    /// Disk to write, written POOL/DISK
    pub disk: DiskPath,
    /// File or block device to read; '-' stands for standard input
    pub file: PathBuf,
    /// Size of a chunk of a new disk, a power of two from 1MiB to 16MiB [default: 4MiB]
    #[arg(long, value_name = "SIZE")]
    pub chunk: Option<ByteSize>,
    /// Size of a new disk [default: the size of the file]; necessary for a stream
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteSize>,
    /// Continue an earlier import: write only what differs from the file
    #[arg(long)]
    pub resume: bool,
    /// Replace the content of a disk that exists
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Take the disk over if it is attached elsewhere; requests there fail from then on
    #[arg(long)]
    pub force: bool,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// The result of an import, as `--json` shows it.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ImportedDisk {
    disk: String,
    created: bool,
    size: u64,
    written: u64,
    zeros: u64,
    unchanged: u64,
}

/// What an import assumes about the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImportMode {
    /// The disk reads as zeros.
    Fill,
    /// The disk may have any content, which is replaced.
    Replace,
    /// The disk may have a part of the content.
    Compare,
}

/// What to do with a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunKind {
    /// The disk has the bytes already.
    Same,
    /// Make the disk read as zeros.
    Clear,
    /// Write the bytes.
    Write,
}

/// Runs the command.
pub fn run(args: ImportArgs, node: &NodeArgs) -> Result<()> {
    let source = SourceFile::open(&args.file)?;
    let json = args.json;
    let imported = session::run_as_owner(node, transfer::options(), async move |client, sessions| {
        import(&client, sessions, &args, source).await
    })?;
    output::json_if(json, &imported.or_exit());
    Ok(())
}

async fn import(
    client: &Client,
    sessions: OpenSession,
    args: &ImportArgs,
    source: SourceFile,
) -> Result<WorkEnd<ImportedDisk>> {
    let doing = format!("importing {} to disk {}", args.file.display(), args.disk);
    let disks = Disks::open(client, &args.disk.pool, WallClock::default()).doing(&doing)?;
    let (header, created) = find_or_create(&disks, args, source.needed(), &doing).await?;
    let mode = mode(&header, args).map_err(|why| Failure::new(&*doing, why))?;
    let disk = transfer::attach(&args.disk, "import", args.force, sessions).await.doing(&doing)?;
    let is_changed = disk.epoch() != header.epoch + 1 || *disk.size().borrow() != header.size;
    let work = DiskImport {
        disk: disk.clone(),
        mode,
        doing: doing.clone(),
        progress: ProgressMeter::bytes(&args.disk.to_string(), header.size),
        written: Cell::new(0),
        zeros: Cell::new(0),
        unchanged: Cell::new(0),
    };
    let ended = transfer::until_signal(Some(&disk), async {
        if is_changed {
            return Err(Failure::new(&*doing, "another program has used the disk meanwhile; try again"));
        }
        work.run(source, &header).await
    });
    let ended = ended.await?;
    drop(work.progress);
    match ended {
        WorkEnd::Done(()) => Ok(WorkEnd::Done(ImportedDisk {
            disk: args.disk.to_string(),
            created,
            size: header.size,
            written: work.written.get(),
            zeros: work.zeros.get(),
            unchanged: work.unchanged.get(),
        })),
        WorkEnd::Interrupted => {
            output::note(resumable(&doing, "interrupted"));
            Ok(WorkEnd::Interrupted)
        }
    }
}

/// Finds the disk, and checks that the content fits. Creates the disk if it does not exist.
async fn find_or_create(
    disks: &Disks,
    args: &ImportArgs,
    needed: Option<u64>,
    doing: &str,
) -> Result<(DiskHeader, bool)> {
    let wanted = args.size.map(|size| size.0);
    let (header, created) = match disks.stat(&args.disk.disk).await {
        Err(vdisk::Error::NoSuchDisk(_)) => {
            let Some(size) = wanted.or(needed) else {
                let why = "the size of a stream is unknown; state the size of the new disk with --size";
                return Err(Failure::usage(doing, why));
            };
            if needed.is_some_and(|needed| needed > size) {
                let why = format!("the file needs {} bytes; choose a larger --size", needed.unwrap_or(0));
                return Err(Failure::usage(doing, why));
            }
            let chunk = args.chunk.map_or(CHUNK_DEFAULT, |chunk| chunk.0);
            let options = CreateOptions { size, chunk };
            (disks.create(&args.disk.disk, options).await.doing(doing)?, true)
        }
        found => (found.doing(doing)?, false),
    };
    let (size, chunk) = (header.size, header.chunk);
    let why = if needed.is_some_and(|needed| needed > size) {
        let needed = ByteSize(needed.unwrap_or(0));
        format!("the file needs {needed}, and the disk has {}; resize it first", ByteSize(size))
    } else if wanted.is_some_and(|wanted| wanted != size) {
        format!("the disk exists and has {}; resize it first, or leave --size out", ByteSize(size))
    } else if args.chunk.is_some_and(|wanted| wanted.0 != chunk) {
        format!("the disk exists and has chunks of {}; leave --chunk out", ByteSize(chunk))
    } else {
        return Ok((header, created));
    };
    Err(Failure::new(doing, why))
}

/// Chooses how the import treats the content of the disk.
///
/// # Errors
/// If the disk may have data, and the user has not said what to do with it.
fn mode(header: &DiskHeader, args: &ImportArgs) -> Result<ImportMode, String> {
    // A disk that was never attached has no data, unless it is a clone.
    match header.epoch == 0 && header.parent.is_none() {
        true => Ok(ImportMode::Fill),
        false if args.resume => Ok(ImportMode::Compare),
        false if args.overwrite => Ok(ImportMode::Replace),
        false => {
            Err("the disk exists and may have data; continue an earlier import with --resume, or replace \
                      its content with --overwrite"
                .into())
        }
    }
}

/// An import in progress.
struct DiskImport {
    disk: AttachedDisk,
    mode: ImportMode,
    doing: String,
    progress: ProgressMeter,
    written: Cell<u64>,
    zeros: Cell<u64>,
    unchanged: Cell<u64>,
}

impl DiskImport {
    async fn run(&self, source: SourceFile, header: &DiskHeader) -> Result<()> {
        let units = source.units(header.size, header.chunk);
        let copied = units
            .map_ok(|unit| self.copy(unit))
            .try_buffer_unordered(transfer::in_flight(header.chunk))
            .try_collect::<()>();
        copied.await.map_err(|failure| resumable(&self.doing, failure))
    }

    /// Gives a part of the disk the content of a unit.
    async fn copy(&self, unit: ImportUnit) -> Result<()> {
        let ImportUnit { offset, len, content } = unit;
        let data = content.load(offset, len).await.doing("reading the file")?;
        let written = "writing to the disk";
        match data {
            None => self.clear_unit(offset, len).await.doing(written)?,
            Some(data) => self.write_unit(offset, data).await.doing(written)?,
        }
        self.progress.add(len);
        Ok(())
    }

    async fn clear_unit(&self, offset: u64, len: u64) -> disk::Result<()> {
        let has_data = match self.mode {
            ImportMode::Fill => false,
            ImportMode::Replace => true,
            ImportMode::Compare => self.disk.extents(offset, len).await?.iter().any(|extent| extent.has_data),
        };
        if has_data {
            self.disk.discard(offset, len).await?;
        }
        add(&self.zeros, len);
        Ok(())
    }

    async fn write_unit(&self, offset: u64, data: Bytes) -> disk::Result<()> {
        let before = match self.mode {
            ImportMode::Compare => Some(self.disk.read(offset, data.len() as u64).await?.concat()),
            ImportMode::Fill | ImportMode::Replace => None,
        };
        let is_cleared = self.mode == ImportMode::Replace;
        let kind_of = |range: Range<usize>| match &before {
            Some(before) if before[range.clone()] == data[range.clone()] => RunKind::Same,
            _ if !is_zero(&data[range]) => RunKind::Write,
            Some(_) => RunKind::Clear,
            None if is_cleared => RunKind::Clear,
            None => RunKind::Same,
        };
        for (range, kind) in runs(data.len(), kind_of) {
            let (at, len) = (offset + range.start as u64, range.len() as u64);
            match kind {
                RunKind::Write => {
                    self.disk.write(at, vec![data.slice(range)]).await?;
                    add(&self.written, len);
                }
                RunKind::Clear => {
                    self.disk.discard(at, len).await?;
                    add(&self.zeros, len);
                }
                RunKind::Same if is_zero(&data[range]) => add(&self.zeros, len),
                RunKind::Same => add(&self.unchanged, len),
            }
        }
        Ok(())
    }
}

fn add(sum: &Cell<u64>, amount: u64) {
    sum.set(sum.get() + amount);
}

fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; COMPARED] = [0; COMPARED];
    bytes.chunks(COMPARED).all(|block| block == &ZEROS[..block.len()])
}

/// Divides `len` bytes into runs of the same kind, and joins writes with a short gap between them.
fn runs(len: usize, kind_of: impl Fn(Range<usize>) -> RunKind) -> Vec<(Range<usize>, RunKind)> {
    let mut runs: Vec<(Range<usize>, RunKind)> = Vec::new();
    for start in (0..len).step_by(COMPARED) {
        let block = start..(start + COMPARED).min(len);
        let kind = kind_of(block.clone());
        match runs.last_mut() {
            Some((last, of)) if *of == kind => last.end = block.end,
            _ => runs.push((block, kind)),
        }
        if kind == RunKind::Write {
            join_last_writes(&mut runs);
        }
    }
    runs
}

/// Joins the last run, a write, with the write before it, if the gap between them is short.
fn join_last_writes(runs: &mut Vec<(Range<usize>, RunKind)>) {
    let is_write = |run: &(Range<usize>, RunKind)| run.1 == RunKind::Write;
    let Some((last, earlier)) = runs.split_last() else { return };
    let Some(before) = earlier.iter().rposition(is_write) else { return };
    if last.0.start - earlier[before].0.end < GAP_MIN {
        let end = last.0.end;
        runs.truncate(before + 1);
        runs[before].0.end = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the runs of blocks whose kinds are the letters of a text: Same, Clear or Write.
    fn of(text: &str) -> String {
        let kind_of = |range: Range<usize>| match text.as_bytes()[range.start / COMPARED] {
            b's' => RunKind::Same,
            b'c' => RunKind::Clear,
            _ => RunKind::Write,
        };
        let letter = |kind| match kind {
            RunKind::Same => 's',
            RunKind::Clear => 'c',
            RunKind::Write => 'w',
        };
        let all = runs(text.len() * COMPARED - 512, kind_of);
        assert_eq!(all.iter().map(|(range, _)| range.len()).sum::<usize>(), text.len() * COMPARED - 512);
        all.into_iter()
            .map(|(range, kind)| format!("{}{}", range.len().div_ceil(COMPARED), letter(kind)))
            .collect()
    }

    #[test]
    fn writes_with_a_short_gap_between_them_are_joined() {
        assert_eq!(of("wwsww"), "5w");
        assert_eq!(of("wscwsc"), "4w1s1c");
        assert_eq!(of("sswccc"), "2s1w3c");
        let long = "s".repeat(GAP_MIN / COMPARED);
        assert_eq!(of(&format!("w{long}w")), "1w16s1w");
        assert_eq!(of(&format!("w{}w", &long[1..])), "17w");
        assert_eq!(of("ss"), "2s");
    }

    #[test]
    fn zeros_are_recognized_also_at_the_end_of_a_short_block() {
        let mut bytes = vec![0; 3 * COMPARED + 512];
        assert!(is_zero(&bytes) && is_zero(&[]));
        *bytes.last_mut().unwrap() = 1;
        assert!(!is_zero(&bytes));
    }
}
