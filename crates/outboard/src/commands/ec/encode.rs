//! `outboard ec encode`: encodes files into data fragments and parity fragments.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::path::{Path, PathBuf};

use clap::Args;
use ec::{Code, Geometry, KernelChoice, fragments};
use serde::Serialize;

use super::files;
use crate::commands::cp::local::NewFile;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;
use node::units::ByteSize;

/// Encode files into fragments; any K fragments suffice to restore a file
///
/// The fragments of FILE are FILE.000.fragment, FILE.001.fragment and so on: first K data
/// fragments, then M parity fragments. The fragments get their final names when all of them are
/// complete and durable. Keep the fragments on different drives.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard ec encode --k 4 --m 2 backup.tar\n  \
    outboard ec encode --k 10 --m 4 --unit 1MiB --out /mnt/fragments *.tar")]
pub struct EncodeArgs {
    /// Number of data fragments
    #[arg(long)]
    k: usize,
    /// Number of parity fragments, which is also the number of fragments that may be lost
    #[arg(long)]
    m: usize,
    /// Unit: contiguous bytes of a fragment within one stripe, a multiple of 64 up to 4MiB
    #[arg(long, default_value = "64KiB", value_name = "S")]
    unit: ByteSize,
    /// Kernel for the computation: auto, gfni, isal or portable
    #[arg(long, default_value_t)]
    kernel: KernelChoice,
    /// Directory for the fragments [default: the directory of each file]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace existing fragments
    #[arg(long)]
    force: bool,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
    /// Files to encode
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// The result of encoding one file.
#[derive(Serialize)]
struct EncodedFile {
    file: PathBuf,
    bytes: u64,
    k: usize,
    m: usize,
    unit: usize,
    id: uuid::Uuid,
    kernel: &'static str,
    fragments: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: EncodeArgs) -> Result<()> {
    let doing = "preparing the code";
    let geometry = Geometry::new(args.k, args.m).map_err(|e| Failure::usage(doing, e))?;
    let code = Code::new(geometry, args.kernel.load().doing(doing)?);
    let encode = |path: &PathBuf| {
        let encoded = encode(&code, &args, path)?;
        if !args.json {
            let (bytes, count) = (encoded.bytes, encoded.fragments.len());
            let (first, last) = (&encoded.fragments[0], &encoded.fragments[count - 1]);
            let path = path.display();
            output::line(format!(
                "{path}: {bytes} bytes in {count} fragments ({geometry}), {} to {}",
                first.display(),
                last.display()
            ));
        }
        Ok(encoded)
    };
    let encoded = args.files.iter().map(encode).collect::<Result<Vec<_>>>()?;
    if args.json {
        output::json(&encoded);
    }
    Ok(())
}

fn encode(code: &Code, args: &EncodeArgs, path: &Path) -> Result<EncodedFile> {
    let doing = format!("encoding {}", path.display());
    let metadata = fs::metadata(path).doing(&doing)?;
    let (false, Some(name)) = (metadata.is_dir(), path.file_name()) else {
        return Err(Failure::usage(doing, "it is a directory; pack it into a file with `tar`"));
    };
    let prefix = args.out.as_deref().unwrap_or(files::parent(path)).join(name);
    let geometry = code.geometry();
    let paths: Vec<PathBuf> =
        (0..geometry.fragments()).map(|index| files::fragment_path(&prefix, index)).collect();
    files::refuse_existing(&doing, paths.iter().map(PathBuf::as_path), args.force)?;
    let label = name.to_string_lossy();
    let known = metadata.is_file();
    let progress =
        if known { ProgressMeter::bytes(&label, metadata.len()) } else { ProgressMeter::stream(&label) };
    let mut input = CountedFile { file: File::open(path).doing(&doing)?, progress: &progress };
    let mut new =
        paths.iter().map(|path| NewFile::create(path)).collect::<io::Result<Vec<_>>>().doing(&doing)?;
    let mut writers: Vec<_> = new.iter_mut().map(|file| BufWriter::new(file.file())).collect();
    let id = uuid::Uuid::new_v4();
    let unit = usize::try_from(args.unit.0).unwrap_or(usize::MAX);
    let layout = fragments::encode(code, unit, id.into_bytes(), &mut input, &mut writers).doing(&doing)?;
    drop(writers);
    files::finish(new, files::parent(&prefix)).doing(&doing)?;
    Ok(EncodedFile {
        file: path.to_owned(),
        bytes: layout.len,
        k: geometry.k(),
        m: geometry.m(),
        unit,
        id,
        kernel: code.kernel().name(),
        fragments: paths,
    })
}

/// An input file that reports the number of read bytes to a progress meter.
struct CountedFile<'a> {
    file: File,
    progress: &'a ProgressMeter,
}

impl Read for CountedFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.progress.add(count as u64);
        Ok(count)
    }
}
