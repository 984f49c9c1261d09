//! Part `rebuild`: measures how fast an idle node rebuilds a lost target, compared with fio and the
//! same reads and writes. It also measures how much a rebuild with default settings slows clients
//! down.
//!
//! `outboard target out` simulates the loss of a target. The node reconstructs the target's
//! fragments on the only target without a fragment of the same object, and reads four other targets
//! for this. So each rebuilt byte takes four bytes read and one byte written. *Moved* is the sum of
//! all five, as the kernel counts them for the node's processes. Afterwards the empty target
//! rejoins for the next run.

use std::path::Path;
use std::time::{Duration, Instant};

use super::book::{Book, BookBound, cell};
use super::pools::{TARGETS, populate};
use super::quiet;
use super::settings::RedundancySettings;
use super::watch::{UsageSnapshot, WatchedState, wait_until, wait_until_whole};
use crate::Result;
use crate::ceiling::FioFile;
use crate::evaluation::stats::{Rounds, paired};
use crate::node::{BenchSpec, Node, NodePlacement};
use crate::report::{Table, say};

/// Objects that clients overwrite and read, of those that the node is filled with.
const CLIENTS_OBJECTS: &str = "128";
/// Bytes of an object on one target.
const FRAGMENT: f64 = 1048576.0;
/// Of five bytes that a rebuild moves, four are read.
const READ_PERCENT: u32 = 80;
const POOL: &str = "ec";
const IDLE: &str = "rebuild, idle clients";
const FIO: &str = "fio 1 MiB, 80 % reads";
const MODES: [&str; 2] = ["write", "read"];
const PATIENCE: Duration = Duration::from_secs(20);

/// The node, and which target is lost next.
struct RebuildRig {
    node: Node,
    fio: FioFile,
    next: u32,
}

/// Measures, and prints what was found.
///
/// # Errors
/// If the node or fio fails.
pub fn measure(settings: &RedundancySettings, dir: &Path) -> Result<Book> {
    let (rounds, seconds) = (settings.rounds, settings.seconds);
    say(format!("\nrebuild: ec:4+2 on {TARGETS} targets, {rounds} round(s) of {seconds} s a run"));
    let node = Node::new(&dir.join("rebuild"))?;
    node.up_quietly(NodePlacement::Dpu, TARGETS, settings.target_size())?;
    node.run_quietly(&["pool", "create", POOL, "--redundancy", "ec:4+2"])?;
    populate(&node, POOL, "4MiB", settings.rebuild_objects())?;
    let mut rig = RebuildRig { node, fio: FioFile::create(dir, settings.fio_mib())?, next: 0 };
    // Objects lie on all seven; from the first loss on one of them is empty, and gets what the next one had.
    rig.lose()?;
    rig.restore()?;
    let mut book = Book::default();
    for round in 1..=rounds {
        say(format!("  round {round} of {rounds}"));
        quiet::look(&mut book, round)?;
        rig.ceiling(seconds, round, &mut book)?;
        rig.idle(round, &mut book)?;
        for mode in MODES {
            rig.clients(mode, seconds, round, &mut book)?;
        }
    }
    print(&book);
    judge(&mut book);
    Ok(book)
}

impl RebuildRig {
    fn ceiling(&self, seconds: u32, round: u32, book: &mut Book) -> Result<()> {
        let mut best = 0.0_f64;
        for depth in [4, 16] {
            best = best.max(self.fio.mixed_mb_per_s("1m", depth, READ_PERCENT, seconds.min(3))?);
        }
        book.note(FIO, "moved_mb_per_s", round, best);
        Ok(())
    }

    /// Takes the next target out.
    fn lose(&self) -> Result<()> {
        self.node.run_quietly(&["target", "out", &self.next.to_string()])
    }

    /// Waits until all is rebuilt, and takes the target in again.
    fn restore(&mut self) -> Result<()> {
        wait_until_whole(&self.node)?;
        self.node.run_quietly(&["target", "in", &self.next.to_string()])?;
        self.next = (self.next + 1) % TARGETS;
        // What it had is removed after that.
        std::thread::sleep(Duration::from_secs(1));
        wait_until_whole(&self.node)
    }

    /// A rebuild while nobody asks for anything.
    fn idle(&mut self, round: u32, book: &mut Book) -> Result<()> {
        let lost_at = Instant::now();
        self.lose()?;
        let began = self.sighting()?;
        let mut last = None;
        while let Some(fragments) = WatchedState::of(&self.node)?.rebuilt_fragments() {
            last = Some((fragments, UsageSnapshot::of(&self.node)?));
            std::thread::sleep(Duration::from_millis(200));
        }
        wait_until_whole(&self.node)?;
        book.note(IDLE, "seconds_until_whole", round, lost_at.elapsed().as_secs_f64());
        match last.filter(|(fragments, _)| *fragments >= began.0 + 100) {
            Some(ended) => note_rebuild(IDLE, &began, &ended, round, book),
            None => book.problem(format!("round {round}: the rebuild was over before it could be measured")),
        }
        self.restore()
    }

    /// Fragments rebuilt so far and what the processes have used by then; waits until there is a rebuild.
    fn sighting(&self) -> Result<(u64, UsageSnapshot)> {
        let begun = |s: &WatchedState| s.rebuilt_fragments().is_some();
        let state = wait_until(&self.node, PATIENCE, "rebuilding", begun)?;
        Ok((state.rebuilt_fragments().unwrap_or(0), UsageSnapshot::of(&self.node)?))
    }

    /// Clients without a rebuild and with one, each first in turn.
    fn clients(&mut self, mode: &str, seconds: u32, round: u32, book: &mut Book) -> Result<()> {
        if round % 2 == 1 {
            self.alone(mode, seconds, round, book)?;
            return self.beside(mode, seconds, round, book);
        }
        self.beside(mode, seconds, round, book)?;
        self.alone(mode, seconds, round, book)
    }

    fn alone(&self, mode: &str, seconds: u32, round: u32, book: &mut Book) -> Result<()> {
        let rate = self.bench(mode, seconds, round, book)?;
        book.note(&alone(mode), "mb_per_s", round, rate);
        Ok(())
    }

    fn beside(&mut self, mode: &str, seconds: u32, round: u32, book: &mut Book) -> Result<()> {
        self.lose()?;
        let began = self.sighting()?;
        let rate = self.bench(mode, seconds, round, book)?;
        let after = WatchedState::of(&self.node)?.rebuilt_fragments();
        match after {
            Some(fragments) => {
                let what = beside(mode);
                book.note(&what, "mb_per_s", round, rate);
                note_rebuild(&what, &began, &(fragments, UsageSnapshot::of(&self.node)?), round, book);
            }
            None => book.problem(format!(
                "round {round}: the rebuild was over before the {mode}s beside it were; they do not count"
            )),
        }
        self.restore()
    }

    fn bench(&self, mode: &str, seconds: u32, round: u32, book: &mut Book) -> Result<f64> {
        let workload = BenchSpec { mode, object_size: "4MiB", in_flight: 16, seconds };
        let found = self.node.bench_with(POOL, workload, &["--objects", CLIENTS_OBJECTS])?;
        if found.errors > 0 {
            book.problem(format!("round {round}: {} {mode}s failed", found.errors));
        }
        Ok(found.mb_per_s)
    }
}

fn alone(mode: &str) -> String {
    format!("4 MiB {mode}s, 16 in flight")
}

fn beside(mode: &str) -> String {
    format!("4 MiB {mode}s, 16 in flight, beside a rebuild")
}

/// Takes down what went on between two sightings of a rebuild.
fn note_rebuild(
    what: &str,
    from: &(u64, UsageSnapshot),
    to: &(u64, UsageSnapshot),
    round: u32,
    book: &mut Book,
) {
    let seconds = to.1.seconds_since(&from.1);
    let fragments = to.0.saturating_sub(from.0) as f64;
    let moved = to.1.drive_bytes_since(&from.1);
    book.note(what, "rebuilt_mb_per_s", round, fragments * FRAGMENT / seconds / 1e6);
    book.note(what, "moved_mb_per_s", round, moved.iter().sum::<u64>() as f64 / seconds / 1e6);
    for (figure, role) in [("osd_cores", "osd"), ("store_cores", "store")] {
        book.note(what, figure, round, to.1.cores_since(&from.1, role));
    }
}

/// What clients lose, in % of what they have alone.
fn loss(book: &Book, mode: &str) -> Rounds {
    let (with, without) = (book.rounds(&beside(mode), "mb_per_s"), book.rounds(&alone(mode), "mb_per_s"));
    paired(&with, &without, |with, without| 100.0 * (1.0 - with / without))
}

fn print(book: &Book) {
    let figure = |what: &str, figure: &str| cell(&book.rounds(what, figure));
    let mut table = Table::new(&[
        "idle clients",
        "rebuilt, MB/s",
        "read and written, MB/s",
        "osd, cores",
        "store, cores",
        "until whole, s",
    ]);
    let [osd, store, until] = ["osd_cores", "store_cores", "seconds_until_whole"].map(|f| figure(IDLE, f));
    let [rebuilt, moved] = ["rebuilt_mb_per_s", "moved_mb_per_s"].map(|f| figure(IDLE, f));
    table.row(&["rebuild of a lost target".to_owned(), rebuilt, moved, osd, store, until]);
    table.row(&[
        format!("{FIO}, the better of depth 4 and 16"),
        String::new(),
        figure(FIO, "moved_mb_per_s"),
    ]);
    say("\n  rebuilt: bytes of fragments made anew. For each, four are read and one is written.");
    table.print();
    let mut table = Table::new(&["clients", "alone, MB/s", "beside a rebuild", "loss, %", "rebuilt, MB/s"]);
    for mode in MODES {
        table.row(&[
            alone(mode),
            figure(&alone(mode), "mb_per_s"),
            figure(&beside(mode), "mb_per_s"),
            cell(&loss(book, mode)),
            figure(&beside(mode), "rebuilt_mb_per_s"),
        ]);
    }
    say("");
    table.print();
}

fn judge(book: &mut Book) {
    let against_fio = book.ratio("moved_mb_per_s", IDLE, FIO);
    book.judge(
        "rebuild of a lost target, bytes read and written / fio",
        &against_fio,
        BookBound::AtLeast(0.5),
    );
    for mode in MODES {
        let lost = loss(book, mode);
        book.judge(&format!("what 4 MiB {mode}s lose to a rebuild, %"), &lost, BookBound::AtMost(30.0));
    }
}
