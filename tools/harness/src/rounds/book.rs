//! Stores the measured values by name and round, compares them with thresholds, and prints them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::settings::RoundSettings;
use crate::Result;
use crate::evaluation::environment::Environment;
use crate::evaluation::stats::{Estimate, Rounds, estimate, ratio};
use crate::report::{Table, say};

/// All values that a part of the program has measured.
#[derive(Debug, Default, Serialize)]
pub struct Book {
    /// Values by measured case and by name of the value.
    series: BTreeMap<String, BTreeMap<String, Rounds>>,
    /// The comparisons with thresholds.
    bars: Vec<BookBar>,
    /// Descriptions of problems, such as failed operations.
    problems: Vec<String>,
    /// Number of invalid runs, by the reason why they are invalid.
    void: BTreeMap<String, u32>,
}

/// A value that is compared with a threshold.
#[derive(Debug, Serialize)]
pub struct BookBar {
    name: String,
    value: Option<Estimate>,
    bound: BookBound,
    met: Option<bool>,
}

/// A threshold.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BookBound {
    /// The smallest value that passes.
    AtLeast(f64),
    /// The largest value that passes.
    AtMost(f64),
}

/// The content of a part's file. Fields are never removed, but new fields may be added.
#[derive(Serialize)]
struct BookDocument<'a> {
    part: &'a str,
    environment: Environment,
    rounds: u32,
    seconds_per_run: u32,
    #[serde(flatten)]
    book: &'a Book,
}

impl Book {
    /// Records the value of `figure` of the case `what` in a round.
    pub fn note(&mut self, what: &str, figure: &str, round: u32, value: f64) {
        let figures = self.series.entry(what.to_owned()).or_default();
        figures.entry(figure.to_owned()).or_default().insert(round, value);
    }

    /// Records a value that may be unknown.
    pub fn note_known(&mut self, what: &str, figure: &str, round: u32, value: Option<f64>) {
        if let Some(value) = value {
            self.note(what, figure, round, value);
        }
    }

    /// Prints and records a problem.
    pub fn problem(&mut self, what: String) {
        say(format!("  problem: {what}"));
        self.problems.push(what);
    }

    /// Counts an invalid run, and its reason `why`.
    pub fn void(&mut self, why: &str) {
        *self.void.entry(why.to_owned()).or_default() += 1;
    }

    /// Returns the value of `figure` of the case `what` in each round that has it.
    #[must_use]
    pub fn rounds(&self, what: &str, figure: &str) -> Rounds {
        self.series.get(what).and_then(|figures| figures.get(figure)).cloned().unwrap_or_default()
    }

    /// Returns the ratio of the value `figure` of the case `of` to the same value of the case `to`,
    /// round by round.
    #[must_use]
    pub fn ratio(&self, figure: &str, of: &str, to: &str) -> Rounds {
        ratio(&self.rounds(of, figure), &self.rounds(to, figure))
    }

    /// Compares the median of a value with a threshold, and records the result as `name`.
    pub fn judge(&mut self, name: &str, value: &Rounds, bound: BookBound) {
        let value = estimate(value.values().copied());
        let met = value.map(|v| match bound {
            BookBound::AtLeast(least) => v.median >= least,
            BookBound::AtMost(most) => v.median <= most,
        });
        self.bars.push(BookBar { name: name.to_owned(), value, bound, met });
    }

    /// Prints the comparisons and the problems.
    pub fn print_bars(&self) {
        if !self.bars.is_empty() {
            let mut table = Table::new(&["value", "median", "interval", "threshold", "verdict"]);
            self.bars.iter().for_each(|bar| table.row(&bar.cells()));
            say("");
            table.print();
        }
        self.problems.iter().for_each(|what| say(format!("problem: {what}")));
        self.void.iter().for_each(|(why, runs)| say(format!("{runs} run(s) are invalid: {why}")));
    }

    /// Writes all values to `PART.json`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, part: &str, settings: &RoundSettings) -> Result<()> {
        let environment = Environment::here(Path::new(settings.work.parent().unwrap_or(Path::new("."))));
        let (rounds, seconds_per_run) = (settings.rounds, settings.seconds);
        let document = BookDocument { part, environment, rounds, seconds_per_run, book: self };
        settings.save(&format!("{part}.json"), &serde_json::to_string_pretty(&document)?)
    }
}

impl BookBar {
    fn cells(&self) -> [String; 5] {
        let threshold = match self.bound {
            BookBound::AtLeast(least) => format!(">= {least}"),
            BookBound::AtMost(most) => format!("<= {most}"),
        };
        let verdict = match self.met {
            Some(true) => "pass",
            Some(false) => "FAIL",
            None => "not measured",
        };
        let median = self.value.map_or_else(|| "-".to_owned(), |v| short(v.median));
        let spread = self.value.map_or_else(String::new, |v| format!("{}..{}", short(v.low), short(v.high)));
        [self.name.clone(), median, spread, threshold, verdict.to_owned()]
    }
}

/// Formats the median of the rounds and its confidence interval. Returns a dash if there are no
/// rounds.
#[must_use]
pub fn cell(rounds: &Rounds) -> String {
    match estimate(rounds.values().copied()) {
        None => "-".to_owned(),
        Some(e) if e.n == 1 => short(e.median),
        Some(e) => format!("{} ({}..{})", short(e.median), short(e.low), short(e.high)),
    }
}

/// Formats a number with about three significant digits.
#[must_use]
pub fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 99.5 => format!("{value:.0}"),
        size if size >= 9.95 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_shows_the_median_and_its_interval() {
        let rounds = |values: &[f64]| (1..).zip(values.iter().copied()).collect();
        assert_eq!(cell(&Rounds::new()), "-");
        assert_eq!(cell(&rounds(&[12.34])), "12.3");
        assert_eq!(cell(&rounds(&[1.0, 234.0, 0.5])), "1.00 (0.50..234)");
    }

    #[test]
    fn a_value_that_was_not_measured_is_not_judged() {
        let mut book = Book::default();
        book.note("a", "mb_per_s", 1, 4.0);
        book.note("b", "mb_per_s", 1, 2.0);
        book.judge("twice", &book.ratio("mb_per_s", "a", "b"), BookBound::AtLeast(2.0));
        book.judge("less", &book.ratio("mb_per_s", "a", "b"), BookBound::AtMost(1.0));
        book.judge("nothing", &book.ratio("mb_per_s", "a", "c"), BookBound::AtLeast(0.0));
        assert_eq!(book.bars.iter().map(|b| b.met).collect::<Vec<_>>(), [Some(true), Some(false), None]);
    }
}
