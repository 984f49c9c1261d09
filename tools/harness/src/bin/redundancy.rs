//! `make bench-redundancy`: measures pools with redundancy on a whole node.
//! `outboard-redundancy [pools] [blocks] [rebuild] [coding]` measures the named parts, by default all.
//! `coding:sweep` selects only the experiment `sweep` of the part `coding`. `OUTBOARD_BENCH_ROUNDS`
//! (5) and `OUTBOARD_BENCH_SECONDS` (3) set the duration, and `QUICK=1` shortens the run.
//! `OUTBOARD_BENCH_DIR` is a directory on the drive to measure, and `OUTBOARD_REPORT_DIR`
//! (`report`) is the directory for the results.

#![forbid(unsafe_code)]

use std::path::Path;

use outboard_harness::Result;
use outboard_harness::redundancy::coding::{self, hog};
use outboard_harness::redundancy::settings::RedundancySettings;
use outboard_harness::redundancy::{blocks, pools, rebuild};
use outboard_harness::rounds::book::Book;

type Measure = fn(&RedundancySettings, &Path) -> Result<Book>;

const PARTS: [(&str, Measure); 4] = [
    ("pools", pools::measure),
    ("blocks", blocks::measure),
    ("rebuild", rebuild::measure),
    ("coding", coding::measure),
];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // To keep the host busy, a part starts this program again with the command `hog`.
    if let [command, cpu] = &args[..]
        && command == "hog"
    {
        return hog::run(cpu);
    }
    let asked: Vec<&str> = args.iter().map(String::as_str).collect();
    let asked = if asked.is_empty() { PARTS.map(|(name, _)| name).to_vec() } else { asked };
    asked.iter().try_for_each(|part| find(part).map(drop))?;
    let settings = RedundancySettings::from_env();
    std::fs::create_dir_all(&settings.run.work)?;
    let outcome = asked.into_iter().try_for_each(|part| one(part, &settings));
    std::fs::remove_dir_all(&settings.run.work)?;
    outcome
}

/// Returns the name of a part, its function, and the one experiment that was requested, if any.
fn find(part: &str) -> Result<(&str, Measure, Option<String>)> {
    let (name, only) =
        part.split_once(':').map_or((part, None), |(name, only)| (name, Some(only.to_owned())));
    let measure = PARTS.iter().find(|(known, _)| *known == name).map(|(_, measure)| *measure);
    let known = PARTS.map(|(name, _)| name).join(", ");
    Ok((name, measure.ok_or_else(|| format!("the part {part} does not exist; choose from {known}"))?, only))
}

/// Measures one part in its own directory, which is removed afterwards.
fn one(part: &str, settings: &RedundancySettings) -> Result<()> {
    let (name, measure, only) = find(part)?;
    let settings = RedundancySettings { only, ..settings.clone() };
    let dir = settings.run.work.join(name);
    std::fs::create_dir_all(&dir)?;
    let book = measure(&settings, &dir)?;
    std::fs::remove_dir_all(&dir)?;
    book.print_bars();
    book.write(&part.replace(':', "-"), &settings.run)
}
