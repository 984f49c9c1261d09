//! The experiment of the paper by Ryu et al. inside a node: objects are coded into 128 data and 32
//! parity fragments and stored on 160 targets, one object at a time. As in the paper, the time
//! includes the writes to the drive. Unlike in the paper, it also includes the network, and the
//! targets share one drive.

use super::places::{PATTERNS, PLACES, name, print, write_everywhere, writing};
use super::rig::{CodingNode, CodingRig};
use crate::Result;
use crate::evaluation::page::svg::grouped_file;
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};
use crate::rounds::book::{Book, cell};

/// The node, whose targets have 20 GiB together.
pub fn node(settings: &RedundancySettings) -> CodingNode {
    let target_size = if settings.run.quick { "64MiB" } else { "128MiB" };
    CodingNode { name: "wide", redundancy: "ec:128+32", targets: 160, target_size }
}

/// The ratios of the accelerator's time to the host's time in the paper, by size.
const PAPER: [(&str, &str); 2] = [("8 MiB", "13.3"), ("128 MiB", "10.5")];

/// Measures all coding places, and prints and draws the results.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    write_everywhere(settings, rig, book)?;
    print(book, rig.redundancy());
    let [(host, ..), others @ ..] = PLACES;
    let mut table =
        Table::new(&["time of a write / with parity from the host", others[0].0, others[1].0, "paper"]);
    for pattern in &PATTERNS {
        let of = |place: &str| name(rig.redundancy(), pattern, place);
        let ratio = |place: &str| cell(&book.ratio("latency_us_p50", &of(place), &of(host)));
        let paper = PAPER.iter().find(|(size, _)| *size == pattern.name).map_or("", |(_, ratio)| ratio);
        table.row(&[pattern.name.to_owned(), ratio(others[0].0), ratio(others[1].0), paper.to_owned()]);
    }
    say("");
    table.print();
    settings.run.save("wide.svg", &grouped_file(&[writing(book, rig.redundancy())]))
}
