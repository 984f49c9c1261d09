//! Measures how much CPU time coding takes from the *hog*, a program that uses all available time
//! of the host's CPU.
//!
//! In each coding mode, writes run while the hog runs. During writes the hog is slower, because the
//! store uses the same CPU, and in some modes coding uses it too. To separate the two effects, each
//! run is paired with a run in mode `async`, directly before or after it. In `async` the host never
//! computes parity. The result for a mode is the loss of the hog's speed compared with `async`.
//!
//! The store's CPU time grows with the throughput of writes, and the throughput differs between
//! modes. So the hog's loss in `async`, compared with its speed without writes, is first scaled to
//! the throughput in the compared mode. Writes to a pool without parity show the cost of the same
//! writes without redundancy. The results also contain the CPU time of the host's coding threads,
//! which is the time that coding itself took from the hog.

use std::time::Duration;

use super::hog::{self, Hog};
use super::rig::{CodingRig, POOL, Pattern, SINGLE, WriteRun};
use super::{note, write_in};
use crate::Result;
use crate::evaluation::order::turns;
use crate::evaluation::stats::{Rounds, paired};
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};
use crate::rounds::book::{Book, BookBound, cell};
use crate::rounds::quiet;

/// The mode with which the other modes are compared. In this mode, the host computes no parity.
const REFERENCE: &str = "async";
/// The modes that are compared with [`REFERENCE`].
const JUDGED: [&str; 3] = ["latency-sensitive", "hybrid:auto", "hybrid:1:1"];
const ALONE: &str = "hog alone";
const WITHOUT_PARITY: &str = "single";
const PATTERN: Pattern = Pattern::writes("16 MiB x 4", &[("16MiB", 16 << 20, 4)]);
/// Time at the start of a run, in seconds, in which nothing is written, because the program starts.
const LEAD: f64 = 0.7;
/// Time at the end of a run, in seconds, in which nothing is written, because the node's status is
/// queried.
const TAIL: f64 = 0.2;

/// Measures all modes, and prints the results.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    let seconds = settings.run.seconds.max(2);
    for pool in [POOL, SINGLE] {
        rig.write(pool, &PATTERN, 1)?;
    }
    for round in 1..=2 * settings.run.rounds {
        say(format!("  writes concurrent with a hog, round {round} of {}", 2 * settings.run.rounds));
        quiet::look(book, round)?;
        let hog = Hog::start(rig.cpus.host)?;
        std::thread::sleep(Duration::from_secs(1));
        let from = hog::now();
        std::thread::sleep(Duration::from_secs(u64::from(seconds)));
        book.note(ALONE, "hog_speed", round, hog.speed(from, hog::now()));
        beside(&hog, book, &name(WITHOUT_PARITY), round, || rig.write(SINGLE, &PATTERN, seconds))?;
        for mode in turns(&JUDGED, round as usize) {
            for what in turns(&[mode, REFERENCE], round as usize) {
                let name = if what == mode { name(mode) } else { reference(mode) };
                beside(&hog, book, &name, round, || write_in(rig, what, &PATTERN, seconds))?;
            }
        }
    }
    print(book);
    judge(book);
    Ok(())
}

/// Runs writes. Records their results, and the hog's speed during the writes, as the case `name`.
fn beside(
    hog: &Hog,
    book: &mut Book,
    name: &str,
    round: u32,
    write: impl FnOnce() -> Result<WriteRun>,
) -> Result<()> {
    let from = hog::now();
    let run = write()?;
    let speed = hog.speed(from + LEAD, hog::now() - TAIL);
    note(book, name, round, &run);
    book.note(name, "hog_speed", round, speed);
    Ok(())
}

fn name(what: &str) -> String {
    format!("beside a hog, {what}")
}

/// Returns the name of the runs of `async` that are paired with the runs of `mode`.
fn reference(mode: &str) -> String {
    format!("beside a hog, {REFERENCE} next to {mode}")
}

/// Returns the loss of the hog's speed, in percent of its speed without writes.
fn loss(book: &Book, what: &str) -> Rounds {
    paired(&book.rounds(what, "hog_speed"), &book.rounds(ALONE, "hog_speed"), |with, alone| {
        100.0 * (1.0 - with / alone)
    })
}

/// Returns the loss of the hog's speed per 100 MB/s of written objects, in percent.
fn loss_per_write(book: &Book, what: &str) -> Rounds {
    paired(&loss(book, what), &book.rounds(what, "mb_per_s"), |lost, rate| 100.0 * lost / rate)
}

/// Returns the loss of the hog's speed due to coding: the difference between the speeds in `async`
/// and in `mode` at the same throughput of writes, in percent of the speed in `async`.
fn to_coding(book: &Book, mode: &str) -> Rounds {
    let (with, rate) = (book.rounds(&name(mode), "hog_speed"), book.rounds(&name(mode), "mb_per_s"));
    let per_write = paired(&loss_per_write(book, &reference(mode)), &rate, |lost, rate| lost * rate / 100.0);
    let without =
        paired(&book.rounds(ALONE, "hog_speed"), &per_write, |alone, lost| alone * (1.0 - lost / 100.0));
    paired(&with, &without, |with, without| 100.0 * (1.0 - with / without))
}

fn print(book: &Book) {
    let mut table = Table::new(&[
        "writes while a hog runs, 16 MiB x 4",
        "MB/s of objects",
        "hog's loss, %",
        "hog's loss per 100 MB/s, %",
        "hog's loss due to coding, %",
        "CPU of the store, %",
        "CPU of the host's coding threads, %",
        "coded by the host, %",
        "failed",
    ]);
    let pairs = JUDGED.iter().flat_map(|mode| {
        [(reference(mode), REFERENCE, Rounds::new()), (name(mode), *mode, to_coding(book, mode))]
    });
    for (name, what, to_coding) in
        std::iter::once((name(WITHOUT_PARITY), WITHOUT_PARITY, Rounds::new())).chain(pairs)
    {
        table.row(&[
            what.to_owned(),
            cell(&book.rounds(&name, "mb_per_s")),
            cell(&loss(book, &name)),
            cell(&loss_per_write(book, &name)),
            cell(&to_coding),
            cell(&book.rounds(&name, "store_cpu_percent")),
            cell(&book.rounds(&name, "coding_cpu_percent")),
            cell(&book.rounds(&name, "coded_by_host_percent")),
            cell(&book.rounds(&name, "failed")),
        ]);
    }
    say("");
    table.print();
}

fn judge(book: &mut Book) {
    let mut failed = Rounds::new();
    for mode in JUDGED {
        let lost = to_coding(book, mode);
        book.judge(
            &format!("loss of a hog's speed due to coding in {mode}, %"),
            &lost,
            BookBound::AtMost(3.0),
        );
        let cpu = book.rounds(&name(mode), "coding_cpu_percent");
        book.judge(
            &format!("host CPU used for coding while a hog ran in {mode}, %"),
            &cpu,
            BookBound::AtMost(3.0),
        );
        for (round, count) in book.rounds(&name(mode), "failed") {
            *failed.entry(round).or_default() += count;
        }
    }
    book.judge("failed writes while a hog ran", &failed, BookBound::AtMost(0.0));
}
