//! `outboard ec decode`: restores a file from its fragments.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use ec::KernelChoice;
use ec::fragments::{FragmentError, FragmentSet, FragmentState};
use serde::Serialize;

use super::files;
use crate::commands::cp::local::{self, NewFile};
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// Restore a file from its fragments, and with --repair reconstruct lost fragments
///
/// Any K intact fragments suffice to restore the file. Each unit of a fragment is verified against
/// its checksum, and a damaged unit counts as lost. The file gets its final name when it is
/// complete and durable.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard ec decode backup.tar\n  \
    outboard ec decode --out restored.tar /mnt/*/backup.tar.*.fragment\n  \
    outboard ec decode --repair --out /dev/null backup.tar")]
pub struct DecodeArgs {
    /// Output file; '-' stands for standard output [default: the name of the fragments without
    /// .NNN.fragment]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Check all fragments, and recreate the missing and damaged fragments
    #[arg(long)]
    repair: bool,
    /// Kernel for the computation: auto, gfni, isal or portable
    #[arg(long, default_value_t)]
    kernel: KernelChoice,
    /// Replace existing files
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Files of the fragments, or the part of their names before .NNN.fragment
    #[arg(required = true, value_name = "FRAGMENT|PREFIX")]
    fragments: Vec<PathBuf>,
}

/// The result of one decoding.
#[derive(Serialize)]
struct Decoded {
    file: PathBuf,
    bytes: u64,
    k: usize,
    m: usize,
    /// Indexes of the fragments that were found to be missing or damaged. Damage in fragments that
    /// were not read is not included.
    lost: Vec<usize>,
    /// Paths of the recreated fragments.
    repaired: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: DecodeArgs) -> Result<()> {
    let given = expand(&args.fragments)?;
    let prefix = given.iter().find_map(|fragment| files::prefix(fragment));
    let Some(out) = args.out.as_ref().or(prefix.as_ref()).cloned() else {
        let why = format!(
            "{} is not named like a fragment (FILE.NNN.fragment); name the output file with --out",
            given[0].display()
        );
        return Err(Failure::usage("decoding", why));
    };
    if args.json && out == Path::new("-") {
        return Err(Failure::usage(
            "decoding",
            "the file and the JSON output cannot both go to standard output; name a file with --out",
        ));
    }
    let doing = format!("decoding {}", prefix.as_ref().unwrap_or(&out).display());
    if out != Path::new("-") && !local::is_special(&out) {
        files::refuse_existing(&doing, [out.as_path()], args.force)?;
    }
    let mut set = open(&given, args.kernel, &doing)?;
    let layout = set.layout();
    write_file(&mut set, &out, &doing)?;
    let (mut lost, mut repaired) = (set.lost(), vec![]);
    if args.repair {
        (lost, repaired) = repair(&mut set, &given, prefix.as_deref(), args.force)?;
    } else if !lost.is_empty() {
        output::note(format!(
            "fragments {} are missing or damaged; recreate them with --repair",
            list(&lost)
        ));
    }
    let (k, m) = (layout.geometry.k(), layout.geometry.m());
    if args.json {
        output::json(&Decoded { file: out, bytes: layout.len, k, m, lost, repaired });
    } else if out != Path::new("-") {
        output::line(format!("{}: restored {} bytes from fragments of {k}+{m}", out.display(), layout.len));
        repaired.iter().for_each(|path| output::line(format!("{}: recreated", path.display())));
    }
    Ok(())
}

/// Expands each argument to the paths of the fragments that it names.
fn expand(arguments: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = vec![];
    for argument in arguments {
        if files::prefix(argument).is_some() {
            all.push(argument.clone());
            continue;
        }
        let doing = format!("looking for fragments of {}", argument.display());
        let found = files::fragments_of(argument).doing(&doing)?;
        if !found.is_empty() {
            all.extend(found);
        } else if argument.is_file() {
            all.push(argument.clone());
        } else {
            let why = format!(
                "there is no file {}.NNN.fragment; name the files of the fragments instead",
                argument.display()
            );
            return Err(Failure::new(doing, why));
        }
    }
    Ok(all)
}

fn open(paths: &[PathBuf], kernel: KernelChoice, doing: &str) -> Result<FragmentSet<File>> {
    let (mut opened, mut inputs) = (vec![], vec![]);
    for path in paths {
        match File::open(path) {
            Ok(file) => {
                opened.push(path);
                inputs.push(file);
            }
            Err(e) => output::note(format!("{} counts as lost: {e}", path.display())),
        }
    }
    let set = FragmentSet::open(inputs, kernel.load().doing(doing)?).map_err(|e| match e {
        FragmentError::Mixed { first, second } => Failure::new(
            doing,
            format!(
                "{} and {} belong to different files, or to two encodings of the same file; name only fragments of one encoding",
                opened[first].display(),
                opened[second].display()
            ),
        ),
        FragmentError::Twice { index, first, second } => Failure::new(
            doing,
            format!(
                "{} and {} are both fragment {index}; name one of them",
                opened[first].display(),
                opened[second].display()
            ),
        ),
        e => Failure::new(doing, e),
    })?;
    let used: Vec<usize> = (0..set.layout().geometry.fragments()).filter_map(|n| set.position(n)).collect();
    for (_, path) in opened.iter().enumerate().filter(|(position, _)| !used.contains(position)) {
        output::note(format!("{} counts as lost: it has no valid header", path.display()));
    }
    Ok(set)
}

fn write_file(set: &mut FragmentSet<File>, out: &Path, doing: &str) -> Result<()> {
    let progress = ProgressMeter::bytes(&out.to_string_lossy(), set.layout().len);
    if out == Path::new("-") {
        return set.decode(&mut CountedWriter { out: io::stdout().lock(), progress: &progress }).doing(doing);
    }
    if local::is_special(out) {
        let file = OpenOptions::new().write(true).open(out).doing(doing)?;
        return set.decode(&mut CountedWriter { out: file, progress: &progress }).doing(doing);
    }
    let mut new = NewFile::create(out).doing(doing)?;
    set.decode(&mut CountedWriter { out: BufWriter::new(new.file()), progress: &progress }).doing(doing)?;
    files::finish(vec![new], files::parent(out)).doing(doing)
}

/// Recreates missing and damaged fragments. Returns their indexes and paths.
fn repair(
    set: &mut FragmentSet<File>,
    given: &[PathBuf],
    prefix: Option<&Path>,
    force: bool,
) -> Result<(Vec<usize>, Vec<PathBuf>)> {
    let doing = "repairing fragments";
    let Some(prefix) = prefix else {
        return Err(Failure::usage(
            doing,
            "no given file is named like a fragment; rename the files to FILE.NNN.fragment",
        ));
    };
    let progress = ProgressMeter::bytes("checking", set.layout().len);
    let states = set.check(|bytes| progress.add(bytes));
    drop(progress);
    let lost: Vec<usize> =
        (0..states.len()).filter(|index| states[*index] != FragmentState::Intact).collect();
    let path = |index: &usize| {
        let name = files::fragment_path(prefix, *index);
        // Use the given path of the fragment, if there is one. Fragments may lie in different
        // directories.
        given.iter().find(|fragment| fragment.file_name() == name.file_name()).cloned().unwrap_or(name)
    };
    let paths: Vec<PathBuf> = lost.iter().map(path).collect();
    let unnamed = paths.iter().filter(|path| !given.contains(path)).map(PathBuf::as_path);
    files::refuse_existing(doing, unnamed, force)?;
    let mut new =
        paths.iter().map(|path| NewFile::create(path)).collect::<io::Result<Vec<_>>>().doing(doing)?;
    let mut writers: Vec<_> =
        lost.iter().copied().zip(new.iter_mut().map(|file| BufWriter::new(file.file()))).collect();
    let progress = ProgressMeter::bytes("repairing", set.layout().len);
    set.rebuild(&mut writers, |bytes| progress.add(bytes)).doing(doing)?;
    drop(writers);
    for (file, path) in new.into_iter().zip(&paths) {
        files::finish(vec![file], files::parent(path)).doing(doing)?;
    }
    Ok((lost, paths))
}

/// Formats indexes as a list with commas.
fn list(fragments: &[usize]) -> String {
    fragments.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A writer that reports the number of written bytes to a progress meter.
struct CountedWriter<'a, W> {
    out: W,
    progress: &'a ProgressMeter,
}

impl<W: Write> Write for CountedWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.progress.add(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
