//! Compares the latency of writes in mode `latency-sensitive` on an idle host with the latency in
//! mode `hybrid:1:0`, which computes all parity on the host.

use super::rig::{CodingRig, Pattern};
use super::{note_idle, write_in};
use crate::Result;
use crate::evaluation::order::turns;
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::quiet;

const MODES: [&str; 2] = ["latency-sensitive", "hybrid:1:0"];
const MIB: u64 = 1 << 20;
const PATTERNS: [Pattern; 3] = [
    Pattern::writes("8 MiB x 1", &[("8MiB", 8 * MIB, 1)]),
    Pattern::writes("16 MiB x 1", &[("16MiB", 16 * MIB, 1)]),
    Pattern::writes("16 MiB x 4", &[("16MiB", 16 * MIB, 4)]),
];

/// Measures the latency of writes in both modes of [`MODES`], and prints the results.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    for round in 1..=2 * settings.run.rounds {
        say(format!("  latency, round {round} of {}", 2 * settings.run.rounds));
        quiet::look(book, round)?;
        for pattern in &PATTERNS {
            for mode in turns(&MODES, round as usize) {
                let run = write_in(rig, mode, pattern, settings.run.seconds)?;
                note_idle(book, &name(pattern, mode), mode, round, &run);
            }
        }
    }
    let mut table =
        Table::new(&["latency, ms", "p50", "p99", "p50, host only", "p99, host only", "p99 / host only"]);
    for pattern in &PATTERNS {
        let [sensitive, alone] = MODES.map(|mode| name(pattern, mode));
        let ms = |what: &str, figure: &str| {
            cell(&book.rounds(what, figure).into_iter().map(|(round, us)| (round, us / 1e3)).collect())
        };
        let ratio = book.ratio("latency_us_p99", &sensitive, &alone);
        table.row(&[
            pattern.name.to_owned(),
            ms(&sensitive, "latency_us_p50"),
            ms(&sensitive, "latency_us_p99"),
            ms(&alone, "latency_us_p50"),
            ms(&alone, "latency_us_p99"),
            cell(&ratio),
        ]);
        let title = format!("{}: p99 of latency-sensitive / coding by the host only", pattern.name);
        book.judge(&title, &ratio, BookBound::AtMost(1.1));
    }
    say("");
    table.print();
    Ok(())
}

fn name(pattern: &Pattern, mode: &str) -> String {
    format!("latency, {}, {mode}", pattern.name)
}
