//! Part `rebuild`: measures how fast an idle node rebuilds a lost target, compared with fio, which
//! reads and writes in the same proportion. It also measures how much a rebuild with default
//! settings slows clients down.
//!
//! `outboard target out` simulates the loss of a target. The node reads four other targets to
//! reconstruct a fragment. It writes the fragment to the only target that has no fragment of the
//! same object. So for each rebuilt byte, the node reads four bytes and writes one byte. The
//! results call these five bytes *moved*, and the kernel counts them for the node's processes.
//! After the rebuild, the lost target is added again as an empty target for the next run.

use std::path::Path;
use std::time::{Duration, Instant};

use super::pools::{TARGETS, populate};
use super::settings::RedundancySettings;
use super::watch::{UsageSnapshot, WatchedState, wait_until, wait_until_whole};
use crate::Result;
use crate::ceiling::FioFile;
use crate::evaluation::stats::{Rounds, paired};
use crate::node::{BenchSpec, Node, NodePlacement};
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::quiet;

/// Number of objects that clients overwrite and read. The node stores more objects.
const CLIENTS_OBJECTS: &str = "128";
/// Size of a fragment: the bytes of one object on one target.
const FRAGMENT: f64 = 1048576.0;
/// Percentage of reads in the load of fio, because a rebuild reads four of five bytes.
const READ_PERCENT: u32 = 80;
const POOL: &str = "ec";
const IDLE: &str = "rebuild, idle clients";
const FIO: &str = "fio 1 MiB, 80 % reads";
const MODES: [&str; 2] = ["write", "read"];
const PATIENCE: Duration = Duration::from_secs(20);

/// The node, the file of fio, and the target that is taken out next.
struct RebuildRig {
    node: Node,
    fio: FioFile,
    next: u32,
}

/// Measures rebuilds, and prints the results.
///
/// # Errors
/// If the node or fio fails.
pub fn measure(settings: &RedundancySettings, dir: &Path) -> Result<Book> {
    let (rounds, seconds) = (settings.run.rounds, settings.run.seconds);
    say(format!("\nrebuild: ec:4+2 on {TARGETS} targets, {rounds} round(s), {seconds} s per run"));
    let node = Node::new(&dir.join("rebuild"))?;
    node.up_quietly(NodePlacement::Dpu, TARGETS, settings.target_size())?;
    node.run_quietly(&["pool", "create", POOL, "--redundancy", "ec:4+2"])?;
    populate(&node, POOL, "4MiB", settings.rebuild_objects())?;
    let mut rig = RebuildRig { node, fio: FioFile::create(dir, settings.fio_mib())?, next: 0 };
    // At first, all seven targets store fragments. After this rebuild, one target is empty. It
    // receives the fragments of the next lost target.
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

    /// Waits until all fragments are rebuilt, adds the target again, and selects the next target.
    fn restore(&mut self) -> Result<()> {
        wait_until_whole(&self.node)?;
        self.node.run_quietly(&["target", "in", &self.next.to_string()])?;
        self.next = (self.next + 1) % TARGETS;
        // The node then removes the stale fragments from the target.
        std::thread::sleep(Duration::from_secs(1));
        wait_until_whole(&self.node)
    }

    /// Measures a rebuild without requests of clients.
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
            None => book.problem(format!("round {round}: the rebuild ended too early to be measured")),
        }
        self.restore()
    }

    /// Waits until a rebuild is in progress. Returns the number of fragments that are rebuilt so
    /// far, and the resource use of the processes.
    fn sighting(&self) -> Result<(u64, UsageSnapshot)> {
        let begun = |s: &WatchedState| s.rebuilt_fragments().is_some();
        let state = wait_until(&self.node, PATIENCE, "rebuilding", begun)?;
        Ok((state.rebuilt_fragments().unwrap_or(0), UsageSnapshot::of(&self.node)?))
    }

    /// Measures clients without and with a rebuild. The order alternates from round to round.
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
                "round {round}: the rebuild ended before the concurrent {mode}s, which are not counted"
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

/// Records the work of a rebuild between two observations, which are numbers of rebuilt fragments
/// and resource use.
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

/// Returns the loss of the clients' throughput during a rebuild, in % of their throughput without a
/// rebuild.
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
    say(
        "\n  rebuilt: bytes of rebuilt fragments. For each of these bytes, the node reads four bytes and writes one.",
    );
    table.print();
    let mut table =
        Table::new(&["clients", "without rebuild, MB/s", "during rebuild, MB/s", "loss, %", "rebuilt, MB/s"]);
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
        book.judge(
            &format!("loss of the throughput of 4 MiB {mode}s during a rebuild, %"),
            &lost,
            BookBound::AtMost(30.0),
        );
    }
}
