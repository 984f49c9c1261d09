//! `outboard disk export`: writes the content of a disk or a snapshot to a file.

use std::cell::{Cell, OnceCell};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::clock::WallClock;
use bytes::Bytes;
use clap::Args;
use client::Client;
use disk::{Disk, DiskExtent};
use futures::future::try_join_all;
use futures::stream::{self, Stream, StreamExt, TryStreamExt};
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use vdisk::{AttachedDisk, Disks, OpenSession, SnapshotReader};

use super::names::{DiskOrSnapshot, SnapshotPath};
use super::partial_file::{ExportedContent, PartialFile};
use super::source_file::cuts;
use super::transfer::{self, WorkEnd, resumable};
use crate::args::NodeArgs;
use crate::commands::cp::local;
use crate::commands::session;
use crate::output;

/// Time between two records of the progress.
const RECORDED_EVERY: Duration = Duration::from_secs(5);

/// Write the content of a disk or a snapshot to a file
///
/// The file is sparse: parts of the disk without data become holes. It gets its final name only when it is
/// complete. Until then, the data is in FILE.part, and FILE.part.json records the progress. --resume continues
/// an interrupted export of the same content, and starts again if the disk has changed meanwhile. A device, a
/// pipe or standard output receives all bytes in order, including zeros.
///
/// A snapshot can be exported at any time. A disk must not be attached: this process attaches it, and detaches
/// it at the end. To export a disk in use, take a snapshot first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard disk export vms/web@monday web.raw\n  \
    outboard disk export vms/web@monday web.raw --resume\n  \
    outboard disk export vms/web - | zstd > web.raw.zst\n\n\
    With --json, prints \"disk\" (POOL/DISK or POOL/DISK@SNAPSHOT), and in bytes: \"size\", \"data\" that was \
    copied, and \"resumed\", the offset at which the export continued.")]
pub struct ExportArgs {
    /// Disk or snapshot to read, written POOL/DISK or POOL/DISK@SNAPSHOT
    #[arg(value_name = "DISK[@SNAPSHOT]")]
    pub source: DiskOrSnapshot,
    /// Output file; '-' stands for standard output
    pub file: PathBuf,
    /// Continue an interrupted export to this file
    #[arg(long)]
    pub resume: bool,
    /// Take the disk over if it is attached elsewhere; requests there fail from then on
    #[arg(long)]
    pub force: bool,
    /// Print a JSON object on standard output
    #[arg(long)]
    pub json: bool,
}

/// The result of an export, as `--json` shows it.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ExportedDisk {
    disk: String,
    size: u64,
    data: u64,
    resumed: u64,
}

/// What is exported.
enum ExportSource {
    /// A disk that this process has attached.
    Disk(AttachedDisk),
    /// A snapshot.
    Snapshot(Box<SnapshotReader>),
}

/// Runs the command.
pub fn run(args: ExportArgs, node: &NodeArgs) -> Result<()> {
    let doing = format!("exporting {} to {}", args.source, args.file.display());
    let is_stream = args.file == Path::new("-") || local::is_special(&args.file);
    if is_stream && args.resume {
        return Err(Failure::usage(doing, "a device or pipe cannot be continued; leave --resume out"));
    }
    if args.file == Path::new("-") && args.json {
        return Err(Failure::usage(doing, "standard output is for the data; leave --json out"));
    }
    let json = args.json;
    let exported = session::run_as_owner(node, transfer::options(), async move |client, sessions| {
        export(&client, sessions, &args, is_stream, doing).await
    })?;
    output::json_if(json, &exported.or_exit());
    Ok(())
}

async fn export(
    client: &Client,
    sessions: OpenSession,
    args: &ExportArgs,
    is_stream: bool,
    doing: String,
) -> Result<WorkEnd<ExportedDisk>> {
    let disks = Disks::open(client, &args.source.of.pool, WallClock::default()).doing(&doing)?;
    let header = disks.stat(&args.source.of.disk).await.doing(&doing)?;
    // The content that an interrupted export would have recorded.
    let mut content = ExportedContent {
        source: args.source.to_string(),
        nguid: hex(header.nguid),
        epoch: header.epoch,
        size: header.size,
    };
    let source = match &args.source.snapshot {
        Some(snapshot) => {
            let path = SnapshotPath { of: args.source.of.clone(), snapshot: snapshot.clone() };
            let reader = SnapshotReader::open(client, &disks, &(&path).into()).await.doing(&doing)?;
            (content.nguid, content.epoch) = (hex(reader.nguid()), reader.snapshot().layer);
            content.size = reader.snapshot().size;
            ExportSource::Snapshot(Box::new(reader))
        }
        None => {
            let attached = transfer::attach(&args.source.of, "export", args.force, sessions).await;
            ExportSource::Disk(attached.map_err(|e| refused(e, args, &doing))?)
        }
    };
    let attached = source.attached().cloned();
    // Opened when the disk is attached: a refused export must not leave a file.
    let file = OnceCell::new();
    let work = DiskExport {
        source,
        size: content.size,
        chunk: header.chunk,
        doing: doing.clone(),
        progress: ProgressMeter::bytes(&args.source.to_string(), content.size),
        done: Cell::new(0),
        data: Cell::new(0),
    };
    let ended = transfer::until_signal(attached.as_ref(), async {
        if attached.as_ref().is_some_and(|disk| disk.epoch() != content.epoch + 1) {
            return Err(Failure::new(&*doing, "another program has used the disk meanwhile; try again"));
        }
        let resumed = if is_stream {
            work.run_stream(&args.file).await?;
            0
        } else {
            let opened = PartialFile::open(&args.file).doing(&doing)?;
            let file = file.get_or_init(|| opened);
            let resumed = work.prepare(file, &content, args.resume).doing(&doing)?;
            work.run_file(file, &content).await.map_err(|failure| resumable(&doing, failure))?;
            resumed
        };
        work.check_source(&content).await?;
        Ok(resumed)
    });
    let ended = ended.await;
    match (ended, file.into_inner()) {
        (Ok(WorkEnd::Done(resumed)), file) => {
            file.map_or(Ok(()), |file| file.finish(content.size)).doing(&doing)?;
            let (disk, size, data) = (content.source, content.size, work.data.get());
            Ok(WorkEnd::Done(ExportedDisk { disk, size, data, resumed }))
        }
        (Ok(WorkEnd::Interrupted), Some(file)) => {
            work.record(&file, &content).await;
            output::note(resumable(&doing, "interrupted"));
            Ok(WorkEnd::Interrupted)
        }
        (Ok(WorkEnd::Interrupted), None) => Ok(WorkEnd::Interrupted),
        (Err(failure), Some(file)) => {
            work.record(&file, &content).await;
            Err(failure)
        }
        (Err(failure), None) => Err(failure),
    }
}

/// Returns the failure to attach a disk.
fn refused(e: vdisk::Error, args: &ExportArgs, doing: &str) -> Failure {
    let vdisk::Error::Attached { owner, .. } = &e else { return Failure::new(doing, e) };
    let of = &args.source.of;
    let why = format!(
        "the disk is attached to {owner}; take a snapshot with `outboard disk snapshot {of}@NAME`, and export the \
         snapshot; if {owner} has ended without detaching the disk, take the disk over with --force"
    );
    Failure::new(doing, why)
}

fn hex(bytes: [u8; 16]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl ExportSource {
    fn attached(&self) -> Option<&AttachedDisk> {
        match self {
            ExportSource::Disk(disk) => Some(disk),
            ExportSource::Snapshot(_) => None,
        }
    }

    async fn read(&self, offset: u64, len: u64) -> disk::Result<Vec<Bytes>> {
        match self {
            ExportSource::Disk(disk) => disk.read(offset, len).await,
            ExportSource::Snapshot(reader) => reader.read(offset, len).await,
        }
    }

    async fn extents(&self, offset: u64, len: u64) -> disk::Result<Vec<DiskExtent>> {
        match self {
            ExportSource::Disk(disk) => disk.extents(offset, len).await,
            ExportSource::Snapshot(reader) => reader.extents(offset, len).await,
        }
    }
}

/// A part of the disk, and its data.
struct ExportUnit {
    offset: u64,
    len: u64,
    /// Ranges with data, by their offsets in the disk. All other bytes are zero.
    data: Vec<(u64, Vec<Bytes>)>,
}

/// An export in progress.
struct DiskExport {
    source: ExportSource,
    size: u64,
    chunk: u64,
    doing: String,
    progress: ProgressMeter,
    /// Offset up to which the output is complete.
    done: Cell<u64>,
    /// Number of bytes of data that were copied.
    data: Cell<u64>,
}

impl DiskExport {
    /// Prepares the file. Returns the offset at which the export begins.
    fn prepare(&self, file: &PartialFile, content: &ExportedContent, resume: bool) -> std::io::Result<u64> {
        let found = if resume { file.resumed(content)? } else { None };
        match found {
            Some(done) => {
                self.done.set(done);
                self.progress.add(done);
            }
            None => file.restart(content.size)?,
        }
        Ok(self.done.get())
    }

    /// Reads the rest of the disk, in the order of the offsets.
    fn units(&self) -> impl Stream<Item = Result<ExportUnit>> {
        let reads = cuts(self.done.get(), self.size, self.chunk).map(|(offset, len)| self.read(offset, len));
        stream::iter(reads).buffered(transfer::in_flight(self.chunk))
    }

    async fn read(&self, offset: u64, len: u64) -> Result<ExportUnit> {
        let reading = "reading the disk";
        let mut ranges = Vec::new();
        let mut at = offset;
        for extent in self.source.extents(offset, len).await.doing(reading)? {
            if extent.has_data {
                ranges.push((at, extent.len));
            }
            at += extent.len;
        }
        assert_eq!(at, offset + len, "the extents cover the range, which lies within a chunk");
        let read = async |(at, len)| Ok((at, self.source.read(at, len).await.doing(reading)?));
        let data = try_join_all(ranges.into_iter().map(read)).await?;
        Ok(ExportUnit { offset, len, data })
    }

    fn completed(&self, unit: &ExportUnit, data: u64) {
        assert_eq!(unit.offset, self.done.get(), "units complete in order");
        self.done.set(unit.offset + unit.len);
        self.data.set(self.data.get() + data);
        self.progress.add(unit.len);
    }

    async fn run_file(&self, file: &PartialFile, content: &ExportedContent) -> Result<()> {
        let writing = "writing the file";
        let content = self.recorded(content);
        // From now on the record has the number of this attachment.
        file.checkpoint(&content, self.done.get()).await.doing(writing)?;
        let mut units = std::pin::pin!(self.units());
        let mut recorded = Instant::now();
        while let Some(mut unit) = units.try_next().await? {
            let mut sum = 0;
            for (at, data) in std::mem::take(&mut unit.data) {
                sum += data.iter().map(|piece| piece.len() as u64).sum::<u64>();
                file.write(at, data).await.doing(writing)?;
            }
            self.completed(&unit, sum);
            if recorded.elapsed() >= RECORDED_EVERY {
                self.check_source(&content).await?;
                file.checkpoint(&content, self.done.get()).await.doing(writing)?;
                recorded = Instant::now();
            }
        }
        Ok(())
    }

    /// Records the progress after a failure, if that is possible and the data is valid.
    async fn record(&self, file: &PartialFile, content: &ExportedContent) {
        // The next export starts from the last record otherwise.
        if self.done.get() > 0 && self.check_source(content).await.is_ok() {
            let _ = file.checkpoint(&self.recorded(content), self.done.get()).await;
        }
    }

    /// Returns what the record of this export says about the content.
    fn recorded(&self, content: &ExportedContent) -> ExportedContent {
        let epoch = self.source.attached().map_or(content.epoch, AttachedDisk::epoch);
        ExportedContent { epoch, ..content.clone() }
    }

    /// Checks that what was read is the content of the disk or snapshot.
    async fn check_source(&self, content: &ExportedContent) -> Result<()> {
        match &self.source {
            ExportSource::Snapshot(reader) => reader.check().await.doing(&*self.doing),
            ExportSource::Disk(disk) => match *disk.size().borrow() {
                size if size == content.size => Ok(()),
                _ => Err(Failure::new(&*self.doing, "the size of the disk has changed; export it again")),
            },
        }
    }

    async fn run_stream(&self, path: &Path) -> Result<()> {
        let writing = format!("writing to {}", path.display());
        let mut out: Box<dyn AsyncWrite + Unpin> = match path == Path::new("-") {
            true => Box::new(tokio::io::stdout()),
            false => Box::new(tokio::fs::OpenOptions::new().write(true).open(path).await.doing(&writing)?),
        };
        let mut units = std::pin::pin!(self.units());
        while let Some(mut unit) = units.try_next().await? {
            let (mut at, mut sum) = (unit.offset, 0);
            for (offset, data) in std::mem::take(&mut unit.data) {
                zeros(&mut out, offset - at).await.doing(&writing)?;
                at = offset;
                for piece in data {
                    out.write_all(&piece).await.doing(&writing)?;
                    at += piece.len() as u64;
                    sum += piece.len() as u64;
                }
            }
            zeros(&mut out, unit.offset + unit.len - at).await.doing(&writing)?;
            self.completed(&unit, sum);
        }
        out.flush().await.doing(writing)
    }
}

/// Writes `len` zeros.
async fn zeros(out: &mut (impl AsyncWrite + Unpin), mut len: u64) -> std::io::Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    while len > 0 {
        let some = len.min(ZEROS.len() as u64);
        out.write_all(&ZEROS[..some as usize]).await?;
        len -= some;
    }
    Ok(())
}
