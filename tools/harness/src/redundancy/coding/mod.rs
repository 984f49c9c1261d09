//! Part `coding`: measures where the parity of large writes is computed, and how the coding place
//! affects the writes and the host's other work.
//!
//! The host's roles run on one CPU. In some experiments, a program that uses all available time of
//! this CPU (`hog`) runs there too. The DPU's roles run on another CPU, and so do the clients if
//! there is no third CPU. `sweep` compares `hybrid:auto` with fixed ratios. `latency` compares
//! `latency-sensitive` with coding on the host alone. `busy` measures the slowdown of the hog, and
//! `timeline` shows the scheduler's behaviour. `places` repeats figure 2 of the paper by Ryu et
//! al., *Evaluation of Erasure Coding and Opportunistic Offloading Algorithms using DPU in
//! Distributed Storage Systems*.

pub mod busy;
pub mod cpus;
pub mod hog;
pub mod latency;
pub mod places;
pub mod rig;
pub mod sweep;
pub mod timeline;
pub mod wide;

use std::path::Path;

use rig::{CodingNode, CodingRig, Pattern, WriteRun};

use super::settings::RedundancySettings;
use crate::Result;
use crate::report::say;
use crate::rounds::book::Book;

type Experiment = fn(&RedundancySettings, &mut CodingRig, &mut Book) -> Result<()>;

/// All experiments on the usual node, with their names. The argument `coding:NAME` runs only one
/// experiment.
const EXPERIMENTS: [(&str, Experiment); 5] = [
    ("sweep", sweep::measure),
    ("latency", latency::measure),
    ("busy", busy::measure),
    ("timeline", timeline::measure),
    ("places", places::measure),
];
/// The experiments on a node of their own.
const WIDE: [(&str, Experiment); 1] = [("wide", wide::measure)];

/// Modes that send all coding tasks to the DPU, so that a busy host makes no difference.
const ALL_TO_DPU: [&str; 2] = ["async", "hybrid:0:1"];
/// Maximum percentage of coding tasks that the scheduler may send to the DPU because it considers
/// the host busy. It applies to runs without other load on the host.
const BUSY_ALLOWED: f64 = 5.0;

/// Runs the requested experiments, and prints the results.
///
/// # Errors
/// If the node fails, or the requested experiment does not exist.
pub fn measure(settings: &RedundancySettings, dir: &Path) -> Result<Book> {
    let usual = (CodingNode::usual(settings), &EXPERIMENTS[..]);
    let nodes = [usual, (wide::node(settings), &WIDE[..])];
    if let Some(only) = &settings.only
        && !nodes.iter().any(|(_, all)| all.iter().any(|(name, _)| name == only))
    {
        let names: Vec<&str> = nodes.iter().flat_map(|(_, all)| all.iter().map(|(name, _)| *name)).collect();
        return Err(format!(
            "the part `coding` has no experiment with this name; choose from {}",
            names.join(", ")
        )
        .into());
    }
    let mut book = Book::default();
    for (shape, all) in nodes {
        let wanted = |name: &str| settings.only.as_deref().is_none_or(|only| only == name);
        let chosen: Vec<Experiment> = all.iter().filter(|(n, _)| wanted(n)).map(|(_, e)| *e).collect();
        if !chosen.is_empty() {
            run(settings, dir, shape, &chosen, &mut book)?;
        }
    }
    Ok(book)
}

/// Runs experiments on one node, which is removed at the end.
fn run(
    settings: &RedundancySettings,
    dir: &Path,
    shape: CodingNode,
    experiments: &[Experiment],
    book: &mut Book,
) -> Result<()> {
    let mut rig = CodingRig::up(dir, shape, &settings.offload, settings)?;
    say(format!(
        "\ncoding: {} on {} targets, host on CPU {}, DPU on CPU {}, clients on {:?}; offload {}; {} round(s), {} s per run",
        shape.redundancy,
        shape.targets,
        rig.cpus.host,
        rig.cpus.dpu,
        rig.cpus.clients,
        settings.offload,
        settings.run.rounds,
        settings.run.seconds
    ));
    for experiment in experiments {
        experiment(settings, &mut rig, book)?;
    }
    drop(rig);
    std::fs::remove_dir_all(dir.join(shape.name))?;
    Ok(())
}

/// Records the results of a run of writes as the case `what`.
fn note(book: &mut Book, what: &str, round: u32, run: &WriteRun) {
    book.note(what, "mb_per_s", round, run.mb_per_s);
    book.note(what, "read_mb_per_s", round, run.read_mb_per_s);
    book.note(what, "coding_tasks", round, (run.host_tasks + run.offload_tasks) as f64);
    book.note(what, "latency_us_p50", round, run.p50_us);
    book.note(what, "latency_us_p99", round, run.p99_us);
    book.note(what, "coded_by_host_percent", round, run.host_percent());
    book.note(what, "sent_away_as_busy_percent", round, run.busy_percent());
    book.note(what, "coding_cpu_percent", round, run.coding_cpu_percent);
    book.note(what, "store_cpu_percent", round, run.store_cpu_percent);
    book.note(what, "failed", round, run.errors as f64);
    book.note(what, "refused_pieces", round, run.refused as f64);
    if run.errors > 0 {
        book.problem(format!("{what}, round {round}: {} operations failed", run.errors));
    }
}

/// Records a run of writes on a host without other load. If the scheduler nevertheless considered
/// the host busy for more than [`BUSY_ALLOWED`] percent of the coding tasks, the mode did not
/// decide where parity was computed, so the run is invalid.
fn note_idle(book: &mut Book, what: &str, mode: &str, round: u32, run: &WriteRun) {
    if run.busy_percent() <= BUSY_ALLOWED || ALL_TO_DPU.contains(&mode) {
        return note(book, what, round, run);
    }
    note(book, &format!("{what}, void"), round, run);
    book.void("the scheduler considered the host busy, although only the node ran there");
}

/// Sets the coding mode, and runs writes.
fn write_in(rig: &CodingRig, mode: &str, pattern: &Pattern, seconds: u32) -> Result<WriteRun> {
    rig.set_mode(mode)?;
    rig.write(rig::POOL, pattern, seconds)
}
