//! `make bench-scale`: measures whether the cost of operations depends on the number of objects.
//! `OUTBOARD_SCALE_OBJECTS` (1000,100000,1000000) lists the numbers of objects.
//! `OUTBOARD_BENCH_ROUNDS` (5) and `OUTBOARD_BENCH_SECONDS` (10) set the duration, and `QUICK=1`
//! shortens the run. `OUTBOARD_BENCH_DIR` is a directory on the drive to measure, and
//! `OUTBOARD_REPORT_DIR` (`report`) is the directory for the results.

#![forbid(unsafe_code)]

use outboard_harness::Result;
use outboard_harness::scale::{self, ScaleSettings};

fn main() -> Result<()> {
    let settings = ScaleSettings::from_env()?;
    std::fs::create_dir_all(&settings.run.work)?;
    let measured = scale::measure(&settings);
    std::fs::remove_dir_all(&settings.run.work)?;
    let book = measured?;
    book.print_bars();
    book.write("scale", &settings.run)
}
