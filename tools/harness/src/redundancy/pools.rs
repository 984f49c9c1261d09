//! Part `pools`: measures the cost of redundancy. The same writes and reads run on pools without
//! redundancy, with two copies, and with 4+2 fragments, in both placements. Reads of the pool with
//! 4+2 fragments also run while a target is out whose fragments cannot be rebuilt, because the node
//! has no spare target.

use std::path::Path;

use super::scheme::Scheme;
use super::settings::RedundancySettings;
use super::watch::{WatchedState, wait_until, wait_until_whole};
use crate::Result;
use crate::ceiling::FioFile;
use crate::evaluation::order::turns;
use crate::evaluation::stats::Rounds;
use crate::evaluation::workload::AccessMode;
use crate::node::{BenchSpec, Node, NodePlacement};
use crate::report::{Table, say};
use crate::rounds::book::{Book, cell};
use crate::rounds::quiet;

/// Number of targets of the node: one more than an object with 4+2 fragments needs.
pub const TARGETS: u32 = 7;
/// The measured placements of the osd.
const PLACEMENTS: [NodePlacement; 2] = [NodePlacement::Dpu, NodePlacement::Host];
/// Object sizes: in the syntax of the command line, in bytes, and in the syntax of fio.
const SIZES: [(&str, u64, &str); 2] = [("4MiB", 4 << 20, "4m"), ("1MiB", 1 << 20, "1m")];
/// The measured operations.
const MODES: [AccessMode; 2] = [AccessMode::Write, AccessMode::Read];

/// One kind of run, which is repeated in each round.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PoolCase {
    placement: NodePlacement,
    scheme: Scheme,
    size: (&'static str, u64, &'static str),
    mode: AccessMode,
    degraded: bool,
}

impl PoolCase {
    fn name(&self) -> String {
        let degraded = if self.degraded { ", one target out" } else { "" };
        format!("{}{degraded}, {}", self.name_without_placement(), self.placement.name())
    }

    fn name_without_placement(&self) -> String {
        format!("{} {} {}", self.scheme.as_str(), self.size.0, self.mode.name())
    }

    fn drive_name(&self) -> String {
        format!("fio {} {}", self.size.0, self.mode.name())
    }
}

/// Returns all cases of a placement. If `degraded` is true, they run with one target out.
fn cases(placement: NodePlacement, degraded: bool) -> Vec<PoolCase> {
    let mut cases = Vec::new();
    for scheme in Scheme::ALL {
        for (size, mode) in SIZES.into_iter().flat_map(|size| MODES.map(|mode| (size, mode))) {
            if !degraded || (scheme == Scheme::Ec4Plus2 && mode == AccessMode::Read) {
                cases.push(PoolCase { placement, scheme, size, mode, degraded });
            }
        }
    }
    cases
}

/// Measures all pools, and prints the results.
///
/// # Errors
/// If the node or fio fails.
pub fn measure(settings: &RedundancySettings, dir: &Path) -> Result<Book> {
    say(format!(
        "\npools: {TARGETS} targets, 16 requests in flight, {} round(s), {} s per run",
        settings.run.rounds, settings.run.seconds
    ));
    let fio = FioFile::create(dir, settings.fio_mib())?;
    let node = Node::new(&dir.join("pools"))?;
    node.up_quietly(NodePlacement::Dpu, TARGETS, settings.target_size())?;
    Scheme::create_pools(&node)?;
    for scheme in Scheme::ALL {
        for (name, bytes, _) in SIZES {
            populate(&node, scheme.pool_name(), name, settings.set_bytes() / bytes)?;
        }
    }
    let mut book = Book::default();
    for round in 1..=settings.run.rounds {
        say(format!("  round {round} of {}", settings.run.rounds));
        quiet::look(&mut book, round)?;
        ceilings(&fio, settings, round, &mut book)?;
        for placement in turns(&PLACEMENTS, round as usize) {
            node.down()?;
            node.up_quietly(placement, TARGETS, settings.target_size())?;
            wait_until_whole(&node)?;
            one_placement(&node, placement, settings, round, &mut book)?;
        }
    }
    PLACEMENTS.into_iter().for_each(|placement| print(&book, placement));
    Ok(book)
}

/// Creates the objects that a run reads or overwrites.
///
/// # Errors
/// If the node fails.
pub fn populate(node: &Node, pool: &str, size: &str, objects: u64) -> Result<()> {
    let workload = BenchSpec { mode: "read", object_size: size, in_flight: 8, seconds: 1 };
    node.bench_with(pool, workload, &["--objects", &objects.to_string()]).map(drop)
}

fn ceilings(fio: &FioFile, settings: &RedundancySettings, round: u32, book: &mut Book) -> Result<()> {
    let seconds = settings.run.seconds.min(2);
    for (name, _, bs) in SIZES {
        let (mut write, mut read) = (0.0_f64, 0.0_f64);
        for depth in [1, 16] {
            write = write.max(fio.write_mb_per_s(bs, depth, seconds)?);
            read = read.max(fio.read_mb_per_s(bs, depth, seconds)?);
        }
        book.note(&format!("fio {name} write"), "mb_per_s", round, write);
        book.note(&format!("fio {name} read"), "mb_per_s", round, read);
    }
    Ok(())
}

fn one_placement(
    node: &Node,
    placement: NodePlacement,
    settings: &RedundancySettings,
    round: u32,
    book: &mut Book,
) -> Result<()> {
    for case in turns(&cases(placement, false), round as usize) {
        run(node, case, settings, round, book)?;
    }
    // The node rebuilds the fragments of the first target on the remaining targets. Then no spare
    // target is left for the fragments of the second target.
    let last = (TARGETS - 2..TARGETS).map(|id| id.to_string()).collect::<Vec<_>>();
    node.run_quietly(&["target", "out", &last[0]])?;
    wait_until_whole(node)?;
    node.run_quietly(&["target", "out", &last[1]])?;
    wait_until(node, std::time::Duration::from_secs(60), "degraded", WatchedState::is_degraded_and_idle)?;
    for case in turns(&cases(placement, true), round as usize) {
        run(node, case, settings, round, book)?;
    }
    for id in last.iter().rev() {
        node.run_quietly(&["target", "in", id])?;
        wait_until_whole(node)?;
    }
    Ok(())
}

fn run(
    node: &Node,
    case: PoolCase,
    settings: &RedundancySettings,
    round: u32,
    book: &mut Book,
) -> Result<()> {
    let workload = BenchSpec {
        mode: case.mode.name(),
        object_size: case.size.0,
        in_flight: 16,
        seconds: settings.run.seconds,
    };
    let objects = (settings.set_bytes() / case.size.1).to_string();
    let found = node.bench_with(case.scheme.pool_name(), workload, &["--objects", &objects])?;
    let name = case.name();
    let mb = case.size.1 as f64 / 1e6;
    book.note(&name, "mb_per_s", round, found.mb_per_s);
    book.note(&name, "drive_mb_per_s", round, found.mb_per_s * case.on_drive());
    book.note_known(&name, "host_cpu_us_per_mb", round, found.host_cpu_us_per_op.map(|us| us / mb));
    book.note_known(&name, "all_cpu_us_per_mb", round, found.node_cpu_us_per_op.map(|us| us / mb));
    book.note(&name, "latency_us_p99", round, found.latency_us.p99);
    if found.errors > 0 {
        book.problem(format!("{name}: {} operations failed", found.errors));
    }
    Ok(())
}

impl PoolCase {
    /// Number of bytes that are written to or read from the drive per byte of an object.
    fn on_drive(&self) -> f64 {
        match self.mode {
            AccessMode::Write | AccessMode::Randwrite => self.scheme.drive_bytes_per_byte(),
            AccessMode::Read | AccessMode::Randread => 1.0,
        }
    }
}

fn print(book: &Book, placement: NodePlacement) {
    let head = [
        &format!("{}, 16 in flight", placement.name()),
        "MB/s of objects",
        "ratio to single",
        "MB/s of the drive / fio",
        "host CPU, µs/MB",
        "all CPU, µs/MB",
    ];
    let mut table = Table::new(&head);
    for case in [cases(placement, false), cases(placement, true)].concat() {
        let name = case.name();
        let single = PoolCase { scheme: Scheme::Single, degraded: false, ..case }.name();
        let degraded = if case.degraded { ", one target out" } else { "" };
        let drive = crate::evaluation::stats::ratio(
            &book.rounds(&name, "drive_mb_per_s"),
            &book.rounds(&case.drive_name(), "mb_per_s"),
        );
        let figure = |figure: &str| -> Rounds { book.rounds(&name, figure) };
        table.row(&[
            format!("{}{degraded}", case.name_without_placement()),
            cell(&figure("mb_per_s")),
            cell(&book.ratio("mb_per_s", &name, &single)),
            cell(&drive),
            cell(&figure("host_cpu_us_per_mb")),
            cell(&figure("all_cpu_us_per_mb")),
        ]);
    }
    for (size, _, _) in SIZES {
        for mode in MODES {
            let name = format!("fio {size} {}", mode.name());
            table.row(&[format!("{name}, O_DIRECT"), cell(&book.rounds(&name, "mb_per_s"))]);
        }
    }
    say("");
    table.print();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_unique_name() {
        let all = PLACEMENTS.map(|p| [cases(p, false), cases(p, true)].concat()).concat();
        let names: std::collections::BTreeSet<String> = all.iter().map(PoolCase::name).collect();
        assert_eq!((names.len(), all.len()), (28, 28));
        assert!(names.contains("ec:4+2 4MiB read, one target out, dpu"));
    }

    #[test]
    fn writes_count_all_copies_and_parity_as_drive_bytes() {
        let all = cases(NodePlacement::Dpu, false);
        let of =
            |scheme, mode| all.iter().find(|c| (c.scheme, c.mode) == (scheme, mode)).map(PoolCase::on_drive);
        assert_eq!(of(Scheme::Ec4Plus2, AccessMode::Write), Some(1.5));
        assert_eq!(of(Scheme::Mirror2, AccessMode::Write), Some(2.0));
        assert_eq!(of(Scheme::Mirror2, AccessMode::Read), Some(1.0));
    }
}
