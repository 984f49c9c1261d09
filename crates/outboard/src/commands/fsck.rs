//! `outboard fsck`: checks the targets of a stopped node, and repairs some kinds of damage.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::config_file;
use node::dir::{DirLock, NodeDir};
use node::failure::{Doing, Failure, Result};
use node::targets::{self, FsckReport};
use node::units::ByteSize;

/// Check a stopped node's targets: every object, extent, reference count and checksum
///
/// The check also compares each object's recorded size with the size of its data. If the sizes
/// differ, start the node and use "outboard scrub --repair". The command fails (exit status 1) if
/// problems remain. Without --repair, it changes nothing.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard fsck\n  \
    outboard fsck /srv/node1 --repair\n  \
    outboard fsck /dev/nvme1n1 --json")]
pub struct FsckArgs {
    /// Directory of a node, or path of one target [default: the directory that --dir names]
    #[arg(value_name = "DIR|TARGET")]
    pub path: Option<PathBuf>,
    /// Repair the records of free space, the reference counts, and a log whose end is damaged
    #[arg(long)]
    pub repair: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The results of the check for all targets.
#[derive(Serialize)]
struct FsckOutcome {
    clean: bool,
    targets: Vec<Checked>,
}

/// The result for one target. It contains a `report`, or an `error` if the target could not be
/// checked.
#[derive(Serialize)]
struct Checked {
    path: PathBuf,
    clean: bool,
    error: Option<String>,
    report: Option<FsckReport>,
}

/// Checks the targets.
pub fn run(args: FsckArgs, node: &NodeArgs) -> Result<()> {
    let path = args.path.clone().unwrap_or_else(|| locate::root(node));
    let doing = format!("checking {}", path.display());
    let (_lock, targets) = targets(&path, &doing)?;
    let count = targets.len();
    let check = |(n, path)| check(path, args.repair, &format!("checking target {} of {count}", n + 1));
    let targets: Vec<Checked> = targets.into_iter().enumerate().map(check).collect();
    let outcome = FsckOutcome { clean: targets.iter().all(|t| t.clean), targets };
    if args.json {
        output::json(&outcome);
    } else {
        outcome.targets.iter().for_each(|target| output::raw(describe(target)));
    }
    if outcome.clean {
        return Ok(());
    }
    if outcome.targets.iter().all(|t| t.report.is_none()) {
        return Err(Failure::new(
            doing,
            "no target could be checked; the messages above say why; make sure that the path is correct",
        ));
    }
    let advice = if args.repair {
        "follow the advice beside each object; restore objects with checksum mismatches from copies, or remove them"
    } else {
        "use --repair to repair the damage that can be repaired"
    };
    Err(Failure::new(doing, format!("problems remain; {advice}")))
}

/// Finds the targets at `path`. If `path` is a node's directory, returns all targets of the node
/// and a lock that keeps the node from starting. Otherwise returns `path` itself as the only
/// target.
fn targets(path: &Path, doing: &str) -> Result<(Option<DirLock>, Vec<PathBuf>)> {
    if !path.is_dir() {
        return Ok((None, vec![path.to_owned()]));
    }
    let dir = NodeDir::open(path).doing(doing)?;
    let lock = dir.lock().doing(doing)?;
    let config =
        config_file::load(Some(&dir.path().join(config_file::FILE)), |name| std::env::var(name).ok())
            .doing(doing)?;
    Ok((Some(lock), config.targets.iter().map(|target| dir.path().join(target)).collect()))
}

fn check(path: PathBuf, repair: bool, label: &str) -> Checked {
    match targets::check(&path, repair, label) {
        Ok(report) => Checked { path, clean: report.is_clean(), error: None, report: Some(report) },
        Err(e) => Checked { path, clean: false, error: Some(e.to_string()), report: None },
    }
}

fn describe(target: &Checked) -> String {
    let mut text = format!("{}: ", target.path.display());
    // Writing to a string cannot fail.
    let _ = match (&target.report, &target.error) {
        (Some(report), _) => summary(&mut text, target.clean, report),
        (None, error) => writeln!(text, "not checked: {}", error.as_deref().unwrap_or("unknown")),
    };
    text
}

fn summary(text: &mut String, clean: bool, report: &FsckReport) -> std::fmt::Result {
    let state = match (clean, report.problem_count) {
        (true, 0) => "clean".to_owned(),
        (true, count) => format!("{count} problems, all repaired"),
        (false, count) => format!("{count} problems, {} repaired", report.repaired_count),
    };
    let unmounted = if report.was_clean { "" } else { "; the target was not unmounted cleanly (harmless)" };
    let (objects, checked) = (report.objects, ByteSize(report.bytes_checked));
    writeln!(text, "{state}; {objects} objects, {checked:.1} of data compared{unmounted}")?;
    if !report.complete {
        writeln!(text, "  the check is incomplete: parts of the target could not be read")?;
    }
    for problem in &report.problems {
        let repaired = if problem.repaired { " (repaired)" } else { "" };
        writeln!(text, "  {}: {}{repaired}", problem.what, problem.detail)?;
    }
    let unlisted = report.problem_count.saturating_sub(report.problems.len() as u64);
    if unlisted > 0 { writeln!(text, "  and {unlisted} more") } else { Ok(()) }
}
