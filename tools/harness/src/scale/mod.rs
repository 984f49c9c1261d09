//! Measures whether the cost of operations depends on the number of objects: writes, reads beside
//! writes, the restart of a killed store, and listings, on nodes with few and with many objects.
//! `outboard-scale` is the only caller.
//!
//! Each node has one target. Only one node runs at a time. In each round, the nodes run in turns, and
//! fio runs before each of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::ceiling::{DurableWrites, FioFile};
use crate::evaluation::stats::{Rounds, paired, ratio};
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement};
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::plot::{ChartLine, Panel, timeline};
use crate::rounds::quiet;
use crate::rounds::settings::RoundSettings;

const POOL: &str = "scale";
/// Number of operations in flight, and of fio's threads.
const IN_FLIGHT: u32 = 16;
const OBJECT_SIZE: &str = "4KiB";
const FIO: &str = "fio";
/// Shortest duration of the run in which the store is killed, in seconds.
const RESTART_SECONDS: u32 = 8;
/// Time of the measurement that must follow the kill, because it may contain the pause.
const AFTER_KILL: Duration = Duration::from_secs(2);

/// What is measured.
#[derive(Debug)]
pub struct ScaleSettings {
    /// The extent of the measurement.
    pub run: RoundSettings,
    /// `OUTBOARD_SCALE_OBJECTS`: numbers of objects, in ascending order. The others are compared with
    /// the first.
    pub objects: Vec<u64>,
}

impl ScaleSettings {
    /// Reads the settings from the environment.
    ///
    /// # Errors
    /// If the numbers of objects are not positive numbers in strictly ascending order.
    pub fn from_env() -> Result<ScaleSettings> {
        let run = RoundSettings::from_env("scale", 10);
        let default = if run.quick { "1000,10000" } else { "1000,100000,1000000" };
        let text = std::env::var("OUTBOARD_SCALE_OBJECTS").ok().filter(|text| !text.is_empty());
        Ok(ScaleSettings { run, objects: numbers_of_objects(text.as_deref().unwrap_or(default))? })
    }
}

/// Parses `OUTBOARD_SCALE_OBJECTS`.
fn numbers_of_objects(text: &str) -> Result<Vec<u64>> {
    let numbers: std::result::Result<Vec<u64>, _> = text.split(',').map(|n| n.trim().parse()).collect();
    match numbers {
        Ok(numbers) if numbers[0] > 0 && numbers.is_sorted_by(|one, next| one < next) => Ok(numbers),
        _ => Err(format!(
            "OUTBOARD_SCALE_OBJECTS is {text:?}; write positive numbers, each larger than the one before, such as 1000,100000"
        )
        .into()),
    }
}

/// A node with a fixed number of objects.
struct SizedNode {
    node: Node,
    objects: u64,
    /// Name of the node in tables.
    name: String,
    /// Size of its target, in the syntax of the command line.
    target_size: String,
}

/// A run of writes during which the store is killed.
struct RestartRun {
    writes: BenchResult,
    /// Duration of the run.
    seconds: u32,
    /// Time from the start of the measurement to the kill.
    killed_after: Duration,
}

/// The operations of each second of the last round.
#[derive(Default)]
struct WritesOverTime {
    /// Charts by the number of objects.
    panels: BTreeMap<u64, Panel>,
}

/// Measures all nodes, and prints the results.
///
/// # Errors
/// If a node or fio fails.
pub fn measure(settings: &ScaleSettings) -> Result<Book> {
    let (rounds, seconds) = (settings.run.rounds, settings.run.seconds);
    say(format!("{rounds} round(s), {seconds} s per run, {IN_FLIGHT} operations of {OBJECT_SIZE} in flight"));
    let nodes: Vec<SizedNode> = settings
        .objects
        .iter()
        .map(|objects| SizedNode::create(&settings.run.work, *objects))
        .collect::<Result<_>>()?;
    let fio = FioFile::create(&settings.run.work, if settings.run.quick { 512 } else { 4096 })?;
    let (mut book, mut last) = (Book::default(), WritesOverTime::default());
    for round in 1..=rounds {
        say(format!("round {round} of {rounds}"));
        quiet::look(&mut book, round)?;
        for turn in 0..nodes.len() {
            let node = &nodes[(turn + round as usize) % nodes.len()];
            let ceiling = fio.durable_writes(IN_FLIGHT, seconds)?;
            book.note(&format!("{FIO} beside {}", node.name), "writes_per_s", round, ceiling.iops);
            book.note(&format!("{FIO} beside {}", node.name), "longest_ms", round, ceiling.longest_ms);
            node.measure(seconds, round, &mut book, &ceiling, &mut last)?;
        }
    }
    print(&nodes, &book);
    judge(&nodes, &mut book);
    settings.run.save("timeline.svg", &last.draw())?;
    Ok(book)
}

impl SizedNode {
    /// Creates a node, and stores its objects.
    fn create(dir: &Path, objects: u64) -> Result<SizedNode> {
        let name = format!("{objects} objects");
        let node = Node::new(&dir.join(format!("objects-{objects}")))?;
        // Enough for the objects, their index entries and the log.
        let target_size = format!("{}MiB", (objects * 8 / 1024).max(2048));
        let node = SizedNode { node, objects, name, target_size };
        let began = Instant::now();
        node.up()?;
        node.node.run_quietly(&["pool", "create", POOL])?;
        node.bench("read", 1)?;
        say(format!("  {}: stored in {:.0} s", node.name, began.elapsed().as_secs_f64()));
        node.node.down()?;
        Ok(node)
    }

    fn up(&self) -> Result<()> {
        self.node.up_quietly(NodePlacement::Dpu, 1, &self.target_size)
    }

    fn bench(&self, mode: &str, seconds: u32) -> Result<BenchResult> {
        self.node.bench_with(POOL, load(mode, seconds), &["--objects", &self.objects.to_string()])
    }

    fn measure(
        &self,
        seconds: u32,
        round: u32,
        book: &mut Book,
        ceiling: &DurableWrites,
        last: &mut WritesOverTime,
    ) -> Result<()> {
        self.up()?;
        let writes = self.bench("randwrite", seconds)?;
        let mean = writes.ops as f64 / f64::from(seconds);
        let worst = writes.per_second.iter().min().copied().unwrap_or(0) as f64;
        let note = |book: &mut Book, figure: &str, value: f64| book.note(&self.name, figure, round, value);
        note(book, "writes_per_s", writes.iops);
        note(book, "worst_second_of_mean", worst / mean);
        note(book, "longest_ms", writes.latency_us.max / 1e3);
        note(book, "pause_ms", writes.longest_pause_ms as f64);
        book.note_known(&self.name, "host_cpu_us", round, writes.host_cpu_us_per_op);
        for process in writes.processes.iter().filter(|process| process.role != "client") {
            let name = format!("{}_peak_mib", process.role);
            note(book, &name, process.peak_resident_bytes as f64 / f64::from(1 << 20));
        }
        let mixed = self.bench("randrw", seconds)?;
        if let Some(reads) = mixed.by_kind.get("read") {
            note(book, "reads_beside_per_s", reads.iops);
            note(book, "read_beside_longest_ms", reads.latency_us.max / 1e3);
        }
        let restart = self.restart(seconds)?;
        if restart.is_valid() {
            note(book, "restart_ms", restart.writes.longest_pause_ms as f64);
        } else {
            book.void("the measurement ended less than 2 s after the kill of the store");
        }
        note(book, "list_empty_ms", self.list("scale:empty")?.1 * 1e3);
        note(book, "list_empty_again_ms", self.list("scale:empty")?.1 * 1e3);
        let (names, took) = self.list(POOL)?;
        note(book, "names_per_s", names as f64 / took);
        let runs = [
            ("writes", &writes),
            ("reads and writes", &mixed),
            ("writes during a restart of the store", &restart.writes),
        ];
        for (what, run) in runs.iter().filter(|(_, run)| run.errors > 0) {
            book.problem(format!("{}: {} operations failed ({what})", self.name, run.errors));
        }
        last.add(self, &writes, ceiling);
        self.node.down()
    }

    /// Kills the store while clients write, in the middle of the measurement.
    fn restart(&self, seconds: u32) -> Result<RestartRun> {
        let seconds = seconds.max(RESTART_SECONDS);
        let (started, start) = mpsc::channel();
        let kill = move || -> Result<Duration> {
            let start: Instant = start.recv().map_err(|_| "outboard bench announced no start")?;
            let moment = start + Duration::from_secs(u64::from(seconds)) / 2;
            std::thread::sleep(moment.saturating_duration_since(Instant::now()));
            let killed = self.node.kill_now("store")?;
            self.node.await_restart("store", &killed)?;
            Ok(killed.at - start)
        };
        std::thread::scope(|scope| {
            let killed = scope.spawn(move || kill().map_err(|e| e.to_string()));
            let started = move || {
                // The receiver lives until it has received the start.
                let _ = started.send(Instant::now());
            };
            let objects = self.objects.to_string();
            let more = ["--objects", &objects];
            let writes = self.node.bench_announced(POOL, load("randwrite", seconds), &more, started);
            let killed_after = killed.join().map_err(|_| "the thread that kills the store panicked")?;
            Ok(RestartRun { writes: writes?, seconds, killed_after: killed_after? })
        })
    }

    /// Lists a pool or a namespace. Returns the number of names and the duration in seconds.
    fn list(&self, place: &str) -> Result<(usize, f64)> {
        let began = Instant::now();
        let output = self.node.command(&["ls", place]).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("outboard ls {place} failed: {}", output.status).into());
        }
        Ok((output.stdout.iter().filter(|byte| **byte == b'\n').count(), began.elapsed().as_secs_f64()))
    }
}

fn load(mode: &str, seconds: u32) -> BenchSpec<'_> {
    BenchSpec { mode, object_size: OBJECT_SIZE, in_flight: IN_FLIGHT, seconds }
}

impl RestartRun {
    /// Returns whether the measurement continued for [`AFTER_KILL`] after the kill.
    fn is_valid(&self) -> bool {
        self.killed_after + AFTER_KILL <= Duration::from_secs(u64::from(self.seconds))
    }
}

impl WritesOverTime {
    /// Replaces the chart of a node.
    fn add(&mut self, node: &SizedNode, writes: &BenchResult, ceiling: &DurableWrites) {
        let points = |values: Vec<f64>| (0..).map(f64::from).zip(values).collect();
        let of_node = writes.per_second.iter().map(|count| *count as f64).collect();
        let panel = Panel {
            title: format!("{}: durable 4 KiB writes per second", node.name),
            lines: vec![
                ChartLine { name: "node", class: "dpu", points: points(of_node) },
                ChartLine {
                    name: "fio, 16 threads",
                    class: "host",
                    points: points(ceiling.per_second.clone()),
                },
            ],
        };
        self.panels.insert(node.objects, panel);
    }

    fn draw(self) -> String {
        timeline(&Vec::from_iter(self.panels.into_values()), &[])
    }
}

fn print(nodes: &[SizedNode], book: &Book) {
    let figures = [
        ("writes/s", "writes_per_s"),
        ("worst second / mean", "worst_second_of_mean"),
        ("longest write, ms", "longest_ms"),
        ("longest pause, ms", "pause_ms"),
        ("host CPU, us/write", "host_cpu_us"),
        ("store, peak MiB", "store_peak_mib"),
        ("osd, peak MiB", "osd_peak_mib"),
        ("reads/s beside writes", "reads_beside_per_s"),
        ("longest read beside, ms", "read_beside_longest_ms"),
        ("pause after a kill, ms", "restart_ms"),
        ("ls of nothing, ms", "list_empty_ms"),
        ("ls of nothing again, ms", "list_empty_again_ms"),
        ("names listed/s", "names_per_s"),
    ];
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let mut table = Table::new(&[&["median (interval)"], &names[..]].concat());
    for (text, figure) in figures {
        let cells = nodes.iter().map(|node| cell(&book.rounds(&node.name, figure)));
        table.row(&std::iter::once(text.to_owned()).chain(cells).collect::<Vec<_>>());
    }
    for (text, figure) in [("fio: writes/s", "writes_per_s"), ("fio: longest, ms", "longest_ms")] {
        let cells =
            nodes.iter().map(|node| cell(&book.rounds(&format!("{FIO} beside {}", node.name), figure)));
        table.row(&std::iter::once(text.to_owned()).chain(cells).collect::<Vec<_>>());
    }
    say("");
    table.print();
}

/// Compares the nodes with the smallest one, with fio in the same round, and with fixed limits.
fn judge(nodes: &[SizedNode], book: &mut Book) {
    use BookBound::{AtLeast, AtMost};
    let Some((small, others)) = nodes.split_first() else { return };
    for node in others {
        let name = &node.name;
        for (figure, text, bound) in [
            ("writes_per_s", "writes", AtLeast(0.8)),
            ("reads_beside_per_s", "reads beside writes", AtLeast(0.8)),
            ("host_cpu_us", "host CPU", AtMost(1.5)),
        ] {
            let value = book.ratio(figure, name, &small.name);
            book.judge(&format!("{text}: {name} / {}", small.name), &value, bound);
        }
        let fio = book.rounds(&format!("{FIO} beside {name}"), "longest_ms");
        for (figure, text) in [("longest_ms", "longest write"), ("read_beside_longest_ms", "longest read")] {
            let allowed = |longest: f64, fio: f64| longest / (2.0 * fio).max(200.0);
            let value: Rounds = paired(&book.rounds(name, figure), &fio, allowed);
            book.judge(&format!("{name}: {text} / max(200 ms, 2 x fio)"), &value, AtMost(1.0));
        }
        let value = book.rounds(name, "worst_second_of_mean");
        book.judge(&format!("{name}: worst second / mean"), &value, AtLeast(0.5));
        let value = book.rounds(name, "restart_ms");
        book.judge(&format!("{name}: pause after a kill, ms"), &value, AtMost(2000.0));
        let value = book.rounds(name, "list_empty_ms");
        book.judge(&format!("{name}: ls of an empty namespace, ms"), &value, AtMost(20.0));
        let value = book.rounds(name, "names_per_s");
        book.judge(&format!("{name}: names listed per second"), &value, AtLeast(200_000.0));
    }
    let fio = book.rounds(&format!("{FIO} beside {}", small.name), "writes_per_s");
    let value = ratio(&book.rounds(&small.name, "writes_per_s"), &fio);
    book.judge(&format!("writes: {} / fio, 16 threads", small.name), &value, AtLeast(0.5));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_objects_are_positive_and_strictly_ascending() {
        assert_eq!(numbers_of_objects("1000, 20000").unwrap(), [1000, 20_000]);
        for text in ["1000,1000", "2000,1000", "0,1000", "1000,", "many", ""] {
            let error = numbers_of_objects(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}; write positive numbers")), "{error}");
        }
    }

    #[test]
    fn a_kill_needs_two_seconds_of_the_measurement() {
        let writes: BenchResult = serde_json::from_str(
            r#"{"ops":1,"errors":0,"mb_per_s":1,"iops":1,"latency_us":{"mean":1,"p50":1,"p99":1},
            "host_cpu_us_per_op":0,"node_cpu_us_per_op":0}"#,
        )
        .unwrap();
        for (ms, is_valid) in [(4000, true), (6000, true), (6001, false), (60_000, false)] {
            let killed_after = Duration::from_millis(ms);
            let run = RestartRun { writes: writes.clone(), seconds: 8, killed_after };
            assert_eq!(run.is_valid(), is_valid, "{ms} ms");
        }
    }

    #[test]
    fn charts_are_in_the_order_of_the_numbers_of_objects() {
        let mut last = WritesOverTime::default();
        for objects in [100_000, 1_000_000, 1000] {
            let panel = Panel { title: format!("{objects} objects"), lines: Vec::new() };
            last.panels.insert(objects, panel);
        }
        let drawn = last.draw();
        let at = |title: &str| drawn.find(title).unwrap_or_else(|| panic!("no {title} in {drawn}"));
        assert!(
            at(">1000 objects") < at(">100000 objects") && at(">100000 objects") < at(">1000000 objects")
        );
    }
}
