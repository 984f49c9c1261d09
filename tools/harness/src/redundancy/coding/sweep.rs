//! Compares `hybrid:auto` with every fixed ratio between host and DPU, on an idle host, under
//! several loads.
//!
//! First, all ratios run in alternating order. Then, for each load, the best ratio and
//! `hybrid:auto` run in new pairs. The new runs are necessary, because the best of many results is
//! partly due to chance: a second run with the same ratio usually gives a lower result.

use super::rig::{CodingRig, Pattern};
use super::{note_idle, write_in};
use crate::Result;
use crate::evaluation::order::turns;
use crate::evaluation::page::svg::{Grouped, Series, grouped_file};
use crate::evaluation::stats::estimate;
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::quiet;

const AUTO: &str = "hybrid:auto";
/// Modes with fixed ratios of host to DPU, and the mode under test, each with its colour.
const MODES: [(&str, &str); 9] = [
    ("hybrid:1:0", "host"),
    ("hybrid:7:1", "p8"),
    ("hybrid:3:1", "p2"),
    ("hybrid:2:1", "p4"),
    ("hybrid:1:1", "paper-a"),
    ("hybrid:1:2", "p5"),
    ("hybrid:1:3", "p7"),
    ("hybrid:0:1", "p6"),
    (AUTO, "p1"),
];
/// Number of pairs per round of the sweep. Single runs vary too much for the threshold, so the
/// comparison needs more runs.
const PAIRS: u32 = 4;
const MIB: u64 = 1 << 20;
/// Loads that were not used to tune the scheduler: few and many concurrent writes of one size, and
/// writes together with reads of 16 MiB that reconstruct data because a target is out of use.
const PATTERNS: [Pattern; 6] = [
    Pattern::writes("1 MiB x 16", &[("1MiB", MIB, 16)]),
    Pattern::writes("4 MiB x 4", &[("4MiB", 4 * MIB, 4)]),
    Pattern::writes("4 MiB x 16", &[("4MiB", 4 * MIB, 16)]),
    Pattern::writes("16 MiB x 1", &[("16MiB", 16 * MIB, 1)]),
    Pattern::writes("16 MiB x 4", &[("16MiB", 16 * MIB, 4)]),
    Pattern::writes("4 MiB x 4, reads x 2", &[("4MiB", 4 * MIB, 4)]).with_degraded_reads(2),
];

/// Measures all modes, and prints and draws the results.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    // The first writes create the objects, which later writes replace.
    for pattern in &PATTERNS {
        write_in(rig, AUTO, pattern, 1)?;
    }
    for round in 1..=settings.run.rounds {
        say(format!("  sweep, round {round} of {}", settings.run.rounds));
        quiet::look(book, round)?;
        for pattern in turns(&PATTERNS, round as usize) {
            for (mode, _) in turns(&MODES, round as usize) {
                let run = write_in(rig, mode, &pattern, settings.run.seconds)?;
                note_idle(book, &swept(&pattern, mode), mode, round, &run);
            }
        }
    }
    let best = PATTERNS.map(|pattern| best_fixed(book, &pattern));
    let pairs = PAIRS * settings.run.rounds;
    for round in 1..=pairs {
        say(format!("  pairs of hybrid:auto and the best ratios, round {round} of {pairs}"));
        for (pattern, best) in PATTERNS.iter().zip(best) {
            for mode in turns(&[AUTO, best], round as usize) {
                let run = write_in(rig, mode, pattern, settings.run.seconds)?;
                note_idle(book, &paired(pattern, mode), mode, round, &run);
            }
        }
    }
    print(book, &best);
    for (pattern, best) in PATTERNS.iter().zip(best) {
        let ratio = book.ratio("mb_per_s", &paired(pattern, AUTO), &paired(pattern, best));
        book.judge(
            &format!("{}: hybrid:auto / the best ratio, {best}", pattern.name),
            &ratio,
            BookBound::AtLeast(0.97),
        );
    }
    settings.run.save("sweep.svg", &draw(book))
}

fn swept(pattern: &Pattern, mode: &str) -> String {
    format!("sweep, {}, {mode}", pattern.name)
}

fn paired(pattern: &Pattern, mode: &str) -> String {
    format!("pairs, {}, {mode}", pattern.name)
}

/// Returns the fixed ratio with the highest median throughput.
fn best_fixed(book: &Book, pattern: &Pattern) -> &'static str {
    let median = |mode: &str| {
        let rounds = book.rounds(&swept(pattern, mode), "mb_per_s");
        estimate(rounds.into_values()).map_or(0.0, |e| e.median)
    };
    let fixed = MODES.iter().map(|(mode, _)| *mode).filter(|mode| *mode != AUTO);
    fixed.max_by(|a, b| median(a).total_cmp(&median(b))).unwrap_or(MODES[0].0)
}

fn print(book: &Book, best: &[&str]) {
    let names = PATTERNS.map(|p| p.name);
    let mut table = Table::new(&[&["host : DPU, MB/s of objects"][..], &names].concat());
    for (mode, _) in MODES {
        let rates = PATTERNS.map(|p| cell(&book.rounds(&swept(&p, mode), "mb_per_s")));
        table.row(&[&[mode.to_owned()][..], &rates].concat());
    }
    say("");
    table.print();
    let mut table = Table::new(&[
        "runs in pairs",
        "best fixed ratio",
        "MB/s with the best ratio",
        "MB/s with hybrid:auto",
        "hybrid:auto / best ratio",
        "coded by the host, %",
        "scheduled tasks",
        "MB/s of reads / with the best ratio",
    ]);
    for (pattern, best) in PATTERNS.iter().zip(best) {
        let (auto, fixed) = (paired(pattern, AUTO), paired(pattern, best));
        table.row(&[
            pattern.name.to_owned(),
            (*best).to_owned(),
            cell(&book.rounds(&fixed, "mb_per_s")),
            cell(&book.rounds(&auto, "mb_per_s")),
            cell(&book.ratio("mb_per_s", &auto, &fixed)),
            cell(&book.rounds(&auto, "coded_by_host_percent")),
            cell(&book.rounds(&auto, "coding_tasks")),
            cell(&book.ratio("read_mb_per_s", &auto, &fixed)),
        ]);
    }
    say("");
    table.print();
}

fn draw(book: &Book) -> String {
    let of = |mode: &str, pattern: &Pattern| {
        estimate(book.rounds(&swept(pattern, mode), "mb_per_s").into_values())
    };
    let series = MODES.iter().map(|(mode, class)| Series {
        name: (*mode).to_owned(),
        class,
        values: PATTERNS.iter().map(|pattern| of(mode, pattern)).collect(),
    });
    grouped_file(&[Grouped {
        title: "Writes to ec:4+2 on an idle host, by ratio of coding tasks on host and DPU".to_owned(),
        axis: "MB/s of objects".to_owned(),
        groups: PATTERNS.iter().map(|p| p.name.to_owned()).collect(),
        series: series.collect(),
    }])
}
