//! Part `blocks`: measures small changes within objects, as block devices, indexes and file systems
//! make them. Blocks of 4 KiB are written at random and in ascending order, in many objects and in
//! one object. Entries of one omap are changed, each on condition of its old value, also while the
//! store and the osd are killed.

use std::path::Path;
use std::time::Duration;

use super::scheme::Scheme;
use super::settings::RedundancySettings;
use crate::Result;
use crate::ceiling::FioFile;
use crate::evaluation::order::turns;
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement};
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::quiet;

/// Number of targets of the node: as many as an object with 4+2 fragments needs.
const TARGETS: u32 = 6;
/// Number of operations in flight.
const IN_FLIGHT: u32 = 16;
const FIO: &str = "fio 4 KiB, 16 threads, fdatasync";
const KILLS: &str = "omap, one object, roles killed";
/// Duration of a run in which roles are killed, in seconds.
const KILL_SECONDS: u32 = 10;

/// How blocks are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockPattern {
    Random,
    Sequential,
    /// 70 % of the operations are reads.
    Mixed,
}

/// One kind of run, which is repeated in each round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockCase {
    /// Operations on blocks of 4 KiB in one object, or in many.
    Blocks { scheme: Scheme, access: BlockPattern, one_object: bool },
    /// Conditional changes of the entries of one omap.
    Omap(Scheme),
}

impl BlockPattern {
    const ALL: [BlockPattern; 3] = [BlockPattern::Random, BlockPattern::Sequential, BlockPattern::Mixed];

    fn name(self) -> &'static str {
        match self {
            BlockPattern::Random => "random writes",
            BlockPattern::Sequential => "sequential writes",
            BlockPattern::Mixed => "70/30 mix",
        }
    }
}

impl BlockCase {
    fn all() -> Vec<BlockCase> {
        let mut all = Vec::new();
        for scheme in Scheme::ALL {
            for access in BlockPattern::ALL {
                all.extend([false, true].map(|one_object| BlockCase::Blocks { scheme, access, one_object }));
            }
            all.push(BlockCase::Omap(scheme));
        }
        all
    }

    fn name(self) -> String {
        match self {
            BlockCase::Blocks { scheme, access, one_object } => {
                let where_ = if one_object { "one object" } else { "64 objects" };
                format!("{} {}, {where_}", scheme.as_str(), access.name())
            }
            BlockCase::Omap(scheme) => format!("{} omap, one object", scheme.as_str()),
        }
    }

    /// The random writes to many objects of the same pool, with which the case is compared.
    fn spread(self) -> String {
        let (scheme, access) = match self {
            BlockCase::Blocks { scheme, access: BlockPattern::Mixed, .. } => (scheme, BlockPattern::Mixed),
            BlockCase::Blocks { scheme, .. } | BlockCase::Omap(scheme) => (scheme, BlockPattern::Random),
        };
        BlockCase::Blocks { scheme, access, one_object: false }.name()
    }

    fn run(self, node: &Node, seconds: u32) -> Result<BenchResult> {
        let spec = |mode, object_size| BenchSpec { mode, object_size, in_flight: IN_FLIGHT, seconds };
        match self {
            BlockCase::Blocks { scheme, access, one_object } => {
                let (mode, more): (&str, &[&str]) = match access {
                    BlockPattern::Random => ("randwrite", &[]),
                    BlockPattern::Sequential => ("write", &[]),
                    BlockPattern::Mixed => ("randrw", &["--reads", "70"]),
                };
                let objects = if one_object { "1" } else { "64" };
                let more = [more, &["--block-size", "4KiB", "--objects", objects]].concat();
                node.bench_with(scheme.pool_name(), spec(mode, "4MiB"), &more)
            }
            BlockCase::Omap(scheme) => {
                node.bench_with(scheme.pool_name(), spec("omap", "100B"), &["--objects", "1"])
            }
        }
    }
}

/// Measures small changes on all pools, and prints the results.
///
/// # Errors
/// If the node or fio fails, or if a change of an omap took effect twice or not at all.
pub fn measure(settings: &RedundancySettings, dir: &Path) -> Result<Book> {
    let (rounds, seconds) = (settings.run.rounds, settings.run.seconds);
    say(format!(
        "\nblocks: {TARGETS} targets, {IN_FLIGHT} requests in flight, {rounds} round(s), {seconds} s per run"
    ));
    let fio = FioFile::create(dir, settings.fio_mib())?;
    let node = Node::new(&dir.join("blocks"))?;
    node.up_quietly(NodePlacement::Dpu, TARGETS, settings.target_size())?;
    Scheme::create_pools(&node)?;
    let mut book = Book::default();
    for round in 1..=rounds {
        say(format!("  round {round} of {rounds}"));
        quiet::look(&mut book, round)?;
        let writes = fio.durable_writes(IN_FLIGHT, seconds.min(2))?;
        book.note(FIO, "per_s", round, writes.iops);
        for case in turns(&BlockCase::all(), round as usize) {
            note(&mut book, &case.name(), round, &case.run(&node, seconds)?);
        }
    }
    let seconds = if settings.run.quick { seconds.max(5) } else { KILL_SECONDS };
    for scheme in Scheme::ALL {
        let name = format!("{} {KILLS}", scheme.as_str());
        note(&mut book, &name, 1, &omap_under_kills(&node, scheme, seconds)?);
    }
    print(&book);
    judge(&mut book);
    Ok(book)
}

fn note(book: &mut Book, name: &str, round: u32, found: &BenchResult) {
    book.note(name, "per_s", round, found.iops);
    book.note_known(name, "host_cpu_us", round, found.host_cpu_us_per_op);
    book.note_known(name, "all_cpu_us", round, found.node_cpu_us_per_op);
    book.note(name, "latency_us_p99", round, found.latency_us.p99);
    if found.errors > 0 {
        book.problem(format!("{name}: {} operations failed", found.errors));
    }
}

/// Changes entries of an omap while the store and the osd are killed. The run fails unless each change
/// took effect exactly once.
fn omap_under_kills(node: &Node, scheme: Scheme, seconds: u32) -> Result<BenchResult> {
    let spec = BenchSpec { mode: "omap", object_size: "100B", in_flight: IN_FLIGHT, seconds };
    let mut killed = Ok(());
    let found = node.bench_announced(scheme.pool_name(), spec, &["--objects", "1"], || {
        killed = ["store", "osd"].into_iter().try_for_each(|role| {
            std::thread::sleep(Duration::from_secs(1));
            // The error itself cannot be sent to another thread, but its text can.
            node.kill(role).map(drop).map_err(|e| e.to_string())
        });
    })?;
    killed?;
    Ok(found)
}

fn print(book: &Book) {
    let head = [
        "4 KiB, dpu, 16 in flight",
        "operations/s",
        "ratio to random, 64 objects",
        "ratio to single",
        "host CPU, µs",
        "ratio to single",
        "all CPU, µs",
        "p99, µs",
    ];
    let mut table = Table::new(&head);
    for case in BlockCase::all() {
        let single = match case {
            BlockCase::Blocks { access, one_object, .. } => {
                BlockCase::Blocks { scheme: Scheme::Single, access, one_object }
            }
            BlockCase::Omap(_) => BlockCase::Omap(Scheme::Single),
        };
        let (name, single) = (case.name(), single.name());
        let figure = |figure: &str| cell(&book.rounds(&name, figure));
        table.row(&[
            name.clone(),
            figure("per_s"),
            cell(&book.ratio("per_s", &name, &case.spread())),
            cell(&book.ratio("per_s", &name, &single)),
            figure("host_cpu_us"),
            cell(&book.ratio("host_cpu_us", &name, &single)),
            figure("all_cpu_us"),
            figure("latency_us_p99"),
        ]);
    }
    table.row(&[FIO.to_owned(), cell(&book.rounds(FIO, "per_s"))]);
    say("");
    table.print();
}

fn judge(book: &mut Book) {
    let random =
        |scheme| BlockCase::Blocks { scheme, access: BlockPattern::Random, one_object: false }.name();
    for (scheme, least) in [(Scheme::Mirror2, 0.5), (Scheme::Ec4Plus2, 0.28)] {
        let ratio = book.ratio("per_s", &random(scheme), &random(Scheme::Single));
        book.judge(&format!("{} / single", random(scheme)), &ratio, BookBound::AtLeast(least));
    }
    let cpu = book.ratio("host_cpu_us", &random(Scheme::Ec4Plus2), &random(Scheme::Single));
    let name = format!("host CPU of {} / single", random(Scheme::Ec4Plus2));
    book.judge(&name, &cpu, BookBound::AtMost(4.0));
    for case in BlockCase::all().into_iter().filter(|case| case.name() != case.spread()) {
        match case {
            BlockCase::Blocks { access, .. } => {
                let least = if access == BlockPattern::Mixed { 0.9 } else { 0.8 };
                let ratio = book.ratio("per_s", &case.name(), &case.spread());
                let name = format!("{} / {}", case.name(), case.spread());
                book.judge(&name, &ratio, BookBound::AtLeast(least));
            }
            BlockCase::Omap(Scheme::Single) => {
                let changes = book.rounds(&case.name(), "per_s");
                book.judge(&format!("{}, changes/s", case.name()), &changes, BookBound::AtLeast(8000.0));
            }
            BlockCase::Omap(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_unique_name_and_is_compared_with_a_case_of_its_pool() {
        let all = BlockCase::all();
        let names: std::collections::BTreeSet<String> = all.iter().map(|case| case.name()).collect();
        assert_eq!((names.len(), all.len()), (21, 21));
        assert!(all.iter().all(|case| names.contains(&case.spread())));
        assert!(names.contains("ec:4+2 70/30 mix, one object"));
    }
}
