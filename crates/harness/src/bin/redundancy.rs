//! `make bench-redundancy`: what redundancy costs on a whole node. `outboard-redundancy [pools] [rebuild]` measures some parts, all
//! by default. `OUTBOARD_BENCH_ROUNDS` (5) and `OUTBOARD_BENCH_SECONDS` (3) say how long, `OUTBOARD_BENCH_DIR` on which drive,
//! `OUTBOARD_REPORT_DIR` (`report`) where the figures go.

#![forbid(unsafe_code)]

use std::path::Path;

use outboard_harness::Result;
use outboard_harness::redundancy::book::Book;
use outboard_harness::redundancy::settings::Settings;
use outboard_harness::redundancy::{pools, rebuild};

type Measure = fn(&Settings, &Path) -> Result<Book>;

const PARTS: [(&str, Measure); 2] = [("pools", pools::measure), ("rebuild", rebuild::measure)];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let parts = chosen(&args)?;
    let settings = Settings::from_env();
    std::fs::create_dir_all(&settings.work)?;
    let outcome = parts.into_iter().try_for_each(|(name, measure)| one(name, measure, &settings));
    std::fs::remove_dir_all(&settings.work)?;
    outcome
}

fn chosen(args: &[String]) -> Result<Vec<(&'static str, Measure)>> {
    if let Some(unknown) = args.iter().find(|arg| PARTS.iter().all(|(name, _)| name != arg)) {
        let names: Vec<&str> = PARTS.iter().map(|(name, _)| *name).collect();
        return Err(format!("{unknown}: there is no such part; there are {}", names.join(", ")).into());
    }
    Ok(PARTS.into_iter().filter(|(name, _)| args.is_empty() || args.iter().any(|a| a == name)).collect())
}

/// Measures a part in a directory of its own, which is removed with what is in it.
fn one(name: &str, measure: Measure, settings: &Settings) -> Result<()> {
    let dir = settings.work.join(name);
    std::fs::create_dir_all(&dir)?;
    let book = measure(settings, &dir)?;
    std::fs::remove_dir_all(&dir)?;
    book.print_bars();
    book.write(name, settings)
}
