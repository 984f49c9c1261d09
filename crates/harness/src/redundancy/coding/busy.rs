//! What a program that wants all of the host's CPU loses to coding.
//!
//! Writes go on beside it in each mode, and in `async`, in which nothing is ever coded by the host: what it has less than
//! there, coding took. What it has less than alone, the store took. Writes to a pool without parity say what writing as much would
//! take without redundancy. As what a drive does differs from run to run, and with it what the store takes, the CPU time of the host's
//! coding threads is given, too: that is what coding has taken from whoever wanted all of the CPU.

use std::time::Duration;

use super::hog::{self, Hog};
use super::rig::{POOL, Pattern, Rig, SINGLE};
use super::{note, write_in};
use crate::Result;
use crate::evaluation::order::turns;
use crate::evaluation::stats::{Rounds, paired};
use crate::redundancy::book::{Book, Bound, cell};
use crate::redundancy::quiet;
use crate::redundancy::settings::Settings;
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
pub fn measure(settings: &Settings, rig: &mut Rig, book: &mut Book) -> Result<()> {
    let seconds = settings.seconds.max(2);
    for pool in [POOL, SINGLE] {
        rig.write(pool, &PATTERN, 1)?;
    }
    let all = [&[REFERENCE, WITHOUT_PARITY][..], &JUDGED].concat();
    for round in 1..=settings.rounds {
        say(format!("  beside a hog, round {round} of {}", settings.rounds));
        quiet::look(book, round)?;
        let hog = Hog::start(rig.cpus.host)?;
        std::thread::sleep(Duration::from_secs(1));
        let from = hog::now();
        std::thread::sleep(Duration::from_secs(u64::from(seconds)));
        book.note(ALONE, "hog_speed", round, hog.speed(from, hog::now()));
        for what in turns(&all, round as usize) {
            let from = hog::now();
            let run = match what {
                WITHOUT_PARITY => rig.write(SINGLE, &PATTERN, seconds)?,
                mode => write_in(rig, mode, &PATTERN, seconds)?,
            };
            let speed = hog.speed(from + LEAD, hog::now() - TAIL);
            note(book, &name(what), round, &run);
            book.note(&name(what), "hog_speed", round, speed);
            let on_drive = if what == WITHOUT_PARITY { 1.0 } else { 1.5 };
            book.note(&name(what), "drive_mb_per_s", round, run.mb_per_s * on_drive);
        }
    }
    print(book, &all);
    judge(book);
    Ok(())
}

fn name(what: &str) -> String {
    format!("beside a hog, {what}")
}

/// What the hog has less than beside something else, in percent.
fn loss(book: &Book, what: &str, to: &str) -> Rounds {
    let (with, without) = (book.rounds(what, "hog_speed"), book.rounds(to, "hog_speed"));
    paired(&with, &without, |with, without| 100.0 * (1.0 - with / without))
}

fn print(book: &Book, all: &[&str]) {
    let mut table = Table::new(&[
        "writes beside a hog, 16 MiB x 4",
        "MB/s of objects",
        "MB/s of the drive",
        "hog's loss, %",
        "per GB/s of the drive",
        "to coding, %",
        "CPU of coding there, %",
        "coded by the host, %",
        "failed",
    ]);
    for what in all {
        let name = name(what);
        let lost = loss(book, &name, ALONE);
        let drive = book.rounds(&name, "drive_mb_per_s");
        let to_coding = if *what == WITHOUT_PARITY { Rounds::new() } else { to_coding(book, what) };
        table.row(&[
            (*what).to_owned(),
            cell(&book.rounds(&name, "mb_per_s")),
            cell(&drive),
            cell(&lost),
            cell(&paired(&lost, &drive, |lost, drive| 1000.0 * lost / drive)),
            cell(&to_coding),
            cell(&book.rounds(&name, "coding_cpu_percent")),
            cell(&book.rounds(&name, "coded_by_host_percent")),
            cell(&book.rounds(&name, "failed")),
        ]);
    }
    say("");
    table.print();
}

fn to_coding(book: &Book, mode: &str) -> Rounds {
    loss(book, &name(mode), &name(REFERENCE))
}

fn judge(book: &mut Book) {
    let mut failed = Rounds::new();
    for mode in JUDGED {
        let lost = to_coding(book, mode);
        book.judge(&format!("what a hog loses to coding in {mode}, %"), &lost, Bound::AtMost(3.0));
        let cpu = book.rounds(&name(mode), "coding_cpu_percent");
        book.judge(&format!("host CPU that coding took beside a hog in {mode}, %"), &cpu, Bound::AtMost(3.0));
        for (round, count) in book.rounds(&name(mode), "failed") {
            *failed.entry(round).or_default() += count;
        }
    }
    book.judge("writes that failed beside a hog", &failed, Bound::AtMost(0.0));
}
