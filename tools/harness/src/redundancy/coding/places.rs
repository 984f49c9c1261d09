//! Repeats figure 2 of the paper by Ryu et al.: the time for coding in each coding place, by size
//! of the data. One experiment encodes whole files into 128 data and 32 parity fragments, like the
//! paper (`outboard-layers ec`). The other experiment measures the writes of a client to ec:4+2,
//! one at a time.

use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::rig::{CodingRig, Pattern};
use super::{note_idle, write_in};
use crate::Result;
use crate::evaluation::page::svg::{Grouped, Series, grouped_file};
use crate::evaluation::stats::{Estimate, estimate};
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};
use crate::rounds::book::{Book, cell};
use crate::rounds::quiet;

/// The coding places. Each has its name, the value of `coding.offload` (the part of the DPU that
/// codes), the coding mode that uses the place, and its class in the style sheet.
pub(super) const PLACES: [(&str, &str, &str, &str); 3] = [
    ("host", "dpu", "latency-sensitive", "host"),
    ("DPU, cores", "dpu", "async", "memcpy"),
    ("DPU, accelerator (emulated)", "accelerator", "async", "bf3"),
];
/// The names of the same places in the output of `outboard-layers ec`.
const FILE_PLACES: [&str; 3] = ["host", "dpu (emulated)", "accelerator (emulated)"];
const MIB: u64 = 1 << 20;
pub(super) const PATTERNS: [Pattern; 5] = [
    Pattern::writes("8 MiB", &[("8MiB", 8 * MIB, 1)]),
    Pattern::writes("16 MiB", &[("16MiB", 16 * MIB, 1)]),
    Pattern::writes("32 MiB", &[("32MiB", 32 * MIB, 1)]),
    Pattern::writes("64 MiB", &[("64MiB", 64 * MIB, 1)]),
    Pattern::writes("128 MiB", &[("128MiB", 128 * MIB, 1)]),
];

/// The parts of `outboard-layers ec --json` that are drawn.
#[derive(Debug, Default, Deserialize)]
struct LayersOutput {
    experiment: ExperimentOutput,
}

#[derive(Debug, Default, Deserialize)]
struct ExperimentOutput {
    rows: Vec<PlaceRow>,
}

/// The result of encoding a file of one size in one place.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct PlaceRow {
    place: String,
    file_bytes: u64,
    seconds: f64,
    /// The time for this place and size in the paper by Ryu et al., divided by the paper's time for
    /// the host.
    #[serde(default)]
    paper_ratio_to_host: Option<f64>,
}

/// Measures all places, and prints and draws the results.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    write_everywhere(settings, rig, book)?;
    let files = rig.files(settings.run.rounds)?;
    for row in &files {
        let what = format!("file of {} MiB, {}", row.file_bytes / MIB, row.place);
        book.note(&what, "milliseconds", 1, row.seconds * 1e3);
    }
    print(book, rig.redundancy());
    settings.run.save("figure2.svg", &draw(book, rig.redundancy(), &files))
}

/// Writes objects of all sizes with each coding place.
pub(super) fn write_everywhere(
    settings: &RedundancySettings,
    rig: &mut CodingRig,
    book: &mut Book,
) -> Result<()> {
    for round in 1..=settings.run.rounds {
        say(format!("  figure 2, round {round} of {}", settings.run.rounds));
        quiet::look(book, round)?;
        for (place, offload, mode, _) in PLACES {
            rig.restart(offload)?;
            // The first writes after a start pay for the first use of memory and of the index.
            write_in(rig, mode, &PATTERNS[0], 1)?;
            for pattern in &PATTERNS {
                let run = write_in(rig, mode, pattern, settings.run.seconds.min(2))?;
                note_idle(book, &name(rig.redundancy(), pattern, place), mode, round, &run);
            }
        }
    }
    rig.restart(&settings.offload)
}

impl CodingRig {
    /// Encodes files like Ryu et al., with `outboard-layers ec` and without the node.
    fn files(&self, rounds: u32) -> Result<Vec<PlaceRow>> {
        let rounds = rounds.to_string();
        let layers = std::env::current_exe()?.with_file_name("outboard-layers");
        let output = Command::new(layers)
            .args(["ec", "--k", "128", "--m", "32", "--rounds", &rounds, "--json"])
            .stderr(Stdio::inherit())
            .output()
            .map_err(|e| format!("cannot run outboard-layers: {e}; build it with: make layers"))?;
        if !output.status.success() {
            return Err(format!("outboard-layers ec failed: {}", output.status).into());
        }
        let report: LayersOutput = serde_json::from_slice(&output.stdout)?;
        Ok(report.experiment.rows)
    }
}

/// Name of the case in the results.
pub(super) fn name(redundancy: &str, pattern: &Pattern, place: &str) -> String {
    format!("write of {} to {redundancy}, coded by {place}", pattern.name)
}

fn ms_per_mib(book: &Book, redundancy: &str, pattern: &Pattern, place: &str) -> Option<Estimate> {
    let mib = (pattern.loads[0].1 / MIB) as f64;
    let rounds = book.rounds(&name(redundancy, pattern, place), "latency_us_p50");
    estimate(rounds.into_values().map(|us| us / 1e3 / mib))
}

/// Prints the median latency for each size and place.
pub(super) fn print(book: &Book, redundancy: &str) {
    let head = PLACES.map(|(place, ..)| place);
    let mut table = Table::new(&[&["p50 of one write at a time, ms"][..], &head].concat());
    for pattern in &PATTERNS {
        let ms = PLACES.map(|(place, ..)| {
            let rounds = book.rounds(&name(redundancy, pattern, place), "latency_us_p50");
            cell(&rounds.into_iter().map(|(round, us)| (round, us / 1e3)).collect())
        });
        table.row(&[&[pattern.name.to_owned()][..], &ms].concat());
    }
    say("");
    table.print();
}

fn draw(book: &Book, redundancy: &str, files: &[PlaceRow]) -> String {
    let groups: Vec<String> = PATTERNS.iter().map(|p| p.name.to_owned()).collect();
    let sizes: Vec<u64> = PATTERNS.iter().map(|p| p.loads[0].1).collect();
    let per_mib = |place: &str, size: u64| {
        let row = files.iter().find(|r| r.place == place && r.file_bytes == size)?;
        Some(Estimate::exact(row.seconds * 1e3 / (size / MIB) as f64))
    };
    let mut encoding: Vec<Series> = PLACES
        .into_iter()
        .zip(FILE_PLACES)
        .map(|((place, _, _, class), of_files)| Series {
            name: place.to_owned(),
            class,
            values: sizes.iter().map(|size| per_mib(of_files, *size)).collect(),
        })
        .collect();
    let paper = |size: &u64| {
        let ratio = files.iter().filter(|r| r.file_bytes == *size).find_map(|r| r.paper_ratio_to_host)?;
        Some(Estimate::exact(per_mib("host", *size)?.median * ratio))
    };
    encoding.push(Series {
        name: "accelerator, with the ratio to the host from Ryu et al.".to_owned(),
        class: "paper-a",
        values: sizes.iter().map(paper).collect(),
    });
    grouped_file(&[
        Grouped {
            title: "Encoding a file, 128+32, one core".to_owned(),
            axis: "ms per MiB".to_owned(),
            groups,
            series: encoding,
        },
        writing(book, redundancy),
    ])
}

/// The latency of writes in each place, per MiB.
pub(super) fn writing(book: &Book, redundancy: &str) -> Grouped {
    let series = PLACES.iter().map(|(place, _, _, class)| Series {
        name: (*place).to_owned(),
        class,
        values: PATTERNS.iter().map(|pattern| ms_per_mib(book, redundancy, pattern, place)).collect(),
    });
    Grouped {
        title: format!("Writing an object to {redundancy}, one at a time"),
        axis: "ms per MiB, median".to_owned(),
        groups: PATTERNS.iter().map(|p| p.name.to_owned()).collect(),
        series: series.collect(),
    }
}
