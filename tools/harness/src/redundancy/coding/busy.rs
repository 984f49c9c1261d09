//! Measures how much CPU time coding takes from a program (the hog) that wants all of the host's
//! CPU.
//!
//! Writes run beside the hog in each mode, each run right before or after a run in mode `async`, in
//! which the host never computes parity. The hog's loss compared with `async` is the cost of
//! coding. Its loss compared with a run alone is the cost of the store, which grows with the
//! drive's throughput. So the two modes are compared at equal writes, by the loss per byte in
//! `async`. Writes to a pool without parity show the cost of the same writes without redundancy.
//! The result also has the CPU time of the host's coding threads, which is the time that coding
//! itself took from the hog.

use std::time::Duration;

use super::hog::{self, Hog};
use super::rig::{CodingRig, POOL, Pattern, SINGLE, WriteRun};
use super::{note, write_in};
use crate::Result;
use crate::evaluation::order::turns;
use crate::evaluation::stats::{Rounds, paired};
use crate::redundancy::book::{Book, BookBound, cell};
use crate::redundancy::quiet;
use crate::redundancy::settings::RedundancySettings;
use crate::report::{Table, say};

/// Nothing is coded by the host.
const REFERENCE: &str = "async";
/// Those that are held against it.
const JUDGED: [&str; 3] = ["latency-sensitive", "hybrid:auto", "hybrid:1:1"];
const ALONE: &str = "hog alone";
const WITHOUT_PARITY: &str = "single";
const PATTERN: Pattern = Pattern { name: "16 MiB x 4", loads: &[("16MiB", 16 << 20, 4)] };
/// A run begins and ends with what is no writing: a program is started, the node is asked.
const LEAD: f64 = 0.7;
const TAIL: f64 = 0.2;

/// Measures, and prints what was found.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    let seconds = settings.seconds.max(2);
    for pool in [POOL, SINGLE] {
        rig.write(pool, &PATTERN, 1)?;
    }
    for round in 1..=2 * settings.rounds {
        say(format!("  beside a hog, round {round} of {}", 2 * settings.rounds));
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

/// Takes a run of writes down, and how fast the hog was meanwhile.
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

/// The runs of `async` beside those of a mode.
fn reference(mode: &str) -> String {
    format!("beside a hog, {REFERENCE} next to {mode}")
}

/// What the hog has less than alone, in percent.
fn loss(book: &Book, what: &str) -> Rounds {
    paired(&book.rounds(what, "hog_speed"), &book.rounds(ALONE, "hog_speed"), |with, alone| {
        100.0 * (1.0 - with / alone)
    })
}

/// What it loses for 100 MB/s of objects, in percent.
fn loss_per_write(book: &Book, what: &str) -> Rounds {
    paired(&loss(book, what), &book.rounds(what, "mb_per_s"), |lost, rate| 100.0 * lost / rate)
}

/// What it has less than beside `async` at the same writes, in percent of what it has there.
fn to_coding(book: &Book, mode: &str) -> Rounds {
    let (with, rate) = (book.rounds(&name(mode), "hog_speed"), book.rounds(&name(mode), "mb_per_s"));
    let per_write = paired(&loss_per_write(book, &reference(mode)), &rate, |lost, rate| lost * rate / 100.0);
    let without =
        paired(&book.rounds(ALONE, "hog_speed"), &per_write, |alone, lost| alone * (1.0 - lost / 100.0));
    paired(&with, &without, |with, without| 100.0 * (1.0 - with / without))
}

fn print(book: &Book) {
    let mut table = Table::new(&[
        "writes beside a hog, 16 MiB x 4",
        "MB/s of objects",
        "hog's loss, %",
        "per 100 MB/s",
        "to coding, %",
        "CPU of the store, %",
        "CPU of coding there, %",
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
        book.judge(&format!("what a hog loses to coding in {mode}, %"), &lost, BookBound::AtMost(3.0));
        let cpu = book.rounds(&name(mode), "coding_cpu_percent");
        book.judge(
            &format!("host CPU that coding took beside a hog in {mode}, %"),
            &cpu,
            BookBound::AtMost(3.0),
        );
        for (round, count) in book.rounds(&name(mode), "failed") {
            *failed.entry(round).or_default() += count;
        }
    }
    book.judge("writes that failed beside a hog", &failed, BookBound::AtMost(0.0));
}
