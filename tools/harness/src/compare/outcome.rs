//! The result of a comparison.

use serde::Serialize;

use super::Side;
use super::cases::{CompareCase, CompareSample, Figure};
use super::rig::CompareRig;
use super::settings::CompareSettings;
use super::verdict::{COST_MOST, RATE_LEAST, Verdict};
use crate::evaluation::stats::{Estimate, estimate};
use crate::report::{Table, median, say};

/// The results of all rounds.
#[derive(Debug)]
pub struct Comparison {
    old: Program,
    new: Program,
    seconds: u32,
    cases: Vec<Measured>,
}

#[derive(Debug, Clone, Serialize)]
struct Program {
    path: String,
    version: String,
}

/// A case with the samples of both binaries, one per round.
#[derive(Debug)]
struct Measured {
    case: CompareCase,
    old: Vec<CompareSample>,
    new: Vec<CompareSample>,
}

/// A figure of a case with its verdict.
#[derive(Debug, Clone, Serialize)]
pub struct Judged {
    /// Name of the case: the node and its load.
    pub case: String,
    /// The figure of the case.
    pub figure: Figure,
    /// Values of the old binary, by round.
    pub old: Vec<f64>,
    /// Values of the new binary, by round.
    pub new: Vec<f64>,
    /// Median of the rounds' ratios new/old, with its confidence interval.
    pub ratio: Estimate,
    /// The verdict on the ratio.
    pub verdict: Verdict,
}

#[derive(Serialize)]
struct CompareReport<'a> {
    old: &'a Program,
    new: &'a Program,
    seconds: u32,
    rate_least: f64,
    cost_most: f64,
    failed: usize,
    figures: &'a [Judged],
}

impl Comparison {
    pub(super) fn new(settings: &CompareSettings, rig: &CompareRig, cases: &[CompareCase]) -> Comparison {
        let program = |path: Option<&std::path::PathBuf>, side| Program {
            path: path.map_or_else(|| "built beside outboard-bench".to_owned(), |p| p.display().to_string()),
            version: rig.version(side).to_owned(),
        };
        Comparison {
            old: program(Some(&settings.old), Side::Old),
            new: program(settings.new.as_ref(), Side::New),
            seconds: settings.seconds,
            cases: cases
                .iter()
                .map(|case| Measured { case: *case, old: Vec::new(), new: Vec::new() })
                .collect(),
        }
    }

    pub(super) fn add(&mut self, place: usize, side: Side, sample: &CompareSample) {
        let measured = &mut self.cases[place];
        match side {
            Side::Old => measured.old.push(*sample),
            Side::New => measured.new.push(*sample),
        }
    }

    /// Judges every figure of every case. Omits a figure that was zero in all runs, because it has
    /// no ratio.
    #[must_use]
    pub fn judge(&self) -> Vec<Judged> {
        self.cases.iter().flat_map(Measured::judge).collect()
    }

    /// Prints tables, or one JSON object if `json` is true. Returns the number of figures that
    /// failed.
    ///
    /// # Errors
    /// If the figures cannot be written as JSON.
    pub fn print(&self, json: bool) -> crate::Result<usize> {
        let figures = self.judge();
        let failed = figures.iter().filter(|judged| judged.verdict == Verdict::Failed).count();
        if json {
            let (old, new, seconds) = (&self.old, &self.new, self.seconds);
            let limits = (RATE_LEAST, COST_MOST);
            let (rate_least, cost_most) = limits;
            let figures = &figures[..];
            let report = CompareReport { old, new, seconds, rate_least, cost_most, failed, figures };
            say(serde_json::to_string(&report)?);
            return Ok(failed);
        }
        say(format!(
            "old: {} ({})\nnew: {} ({})",
            self.old.path, self.old.version, self.new.path, self.new.version
        ));
        let mut table = Table::new(&["figure", "", "old", "new", "new/old", "interval", "verdict"]);
        for judged in &figures {
            table.row(&judged.cells());
        }
        table.print();
        say(explanation(&figures, self.seconds));
        say(match failed {
            0 => "no figure failed".to_owned(),
            n => format!("{n} of {} figures FAILED", figures.len()),
        });
        Ok(failed)
    }
}

fn explanation(figures: &[Judged], seconds: u32) -> String {
    let rounds = figures.iter().map(|judged| judged.ratio.n).max().unwrap_or(0);
    let confidence = figures.iter().map(|judged| judged.ratio.confidence).fold(1.0, f64::min);
    let percent = confidence * 100.0;
    let rule = format!(
        "{rounds} rounds of {seconds} s. The ratio is the median of the ratios of all rounds. The interval, which follows\n\
         from order statistics, covers the true median with a probability of {percent:.1} %. A figure fails if its\n\
         whole interval lies below {RATE_LEAST} (op/s) or above {COST_MOST} (CPU)."
    );
    match figures.iter().any(|judged| judged.verdict == Verdict::Unproven) {
        true => {
            format!("{rule}\nThis probability is less than 95 %, so nothing is judged. Run 6 rounds or more.")
        }
        false => rule,
    }
}

impl Measured {
    fn judge(&self) -> Vec<Judged> {
        let judged = |figure: Figure| {
            let values =
                |samples: &[CompareSample]| samples.iter().map(|s| figure.of(s)).collect::<Vec<f64>>();
            let (old, new) = (values(&self.old), values(&self.new));
            let ratio = estimate(new.iter().zip(&old).map(|(new, old)| new / old))?;
            let verdict = Verdict::of(figure, &ratio);
            Some(Judged { case: self.case.name(), figure, old, new, ratio, verdict })
        };
        Figure::ALL.into_iter().filter_map(judged).collect()
    }
}

impl Judged {
    fn cells(&self) -> [String; 7] {
        let digits = |value: f64| match value {
            value if value < 1.0 => format!("{value:.3}"),
            value if value < 100.0 => format!("{value:.1}"),
            value => format!("{value:.0}"),
        };
        [
            self.case.clone(),
            self.figure.label().to_owned(),
            digits(median(self.old.clone())),
            digits(median(self.new.clone())),
            format!("{:.3}", self.ratio.median),
            format!("{:.3}..{:.3}", self.ratio.low, self.ratio.high),
            self.verdict.label().to_owned(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::cases::{CompareLoad, NodeKind};

    fn measured(rounds: u32, new_over_old: f64) -> Measured {
        // The machine gets slower from round to round, equally for both binaries.
        let sample = |round: u32, factor: f64| {
            let rate = 1000.0 / f64::from(round);
            CompareSample { ops_per_s: rate * factor, node_cpu_us: 50.0, host_cpu_us: 0.0 }
        };
        Measured {
            case: CompareCase { node: NodeKind::Dpu, load: CompareLoad::Put },
            old: (1..=rounds).map(|round| sample(round, 1.0)).collect(),
            new: (1..=rounds).map(|round| sample(round, new_over_old)).collect(),
        }
    }

    #[test]
    fn a_slower_binary_fails_even_if_the_machine_slows_down() {
        let judged = measured(11, 0.9).judge();
        assert_eq!((judged[0].figure, judged[0].verdict), (Figure::Throughput, Verdict::Failed));
        assert!((judged[0].ratio.high - 0.9).abs() < 1e-9, "{:?}", judged[0].ratio);
        assert_eq!(judged[1].verdict, Verdict::Passed, "both binaries use the same CPU time");
    }

    #[test]
    fn a_slowdown_of_the_machine_does_not_fail_a_figure() {
        assert_eq!(measured(11, 1.0).judge()[0].verdict, Verdict::Passed);
    }

    #[test]
    fn a_figure_that_is_zero_with_both_binaries_has_no_ratio() {
        let figures: Vec<Figure> = measured(11, 1.0).judge().iter().map(|judged| judged.figure).collect();
        assert_eq!(figures, [Figure::Throughput, Figure::NodeCpu]);
    }

    #[test]
    fn too_few_rounds_are_reported_as_not_judged() {
        let text = explanation(&measured(3, 0.1).judge(), 1);
        assert!(text.contains("75.0 %") && text.contains("nothing is judged"), "{text}");
        let text = explanation(&measured(11, 0.1).judge(), 1);
        assert!(text.contains("98.8 %") && !text.contains("nothing is judged"), "{text}");
    }
}
