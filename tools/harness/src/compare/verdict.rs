//! Decides whether the new binary has a worse result than the old binary.

use serde::Serialize;

use super::cases::Figure;
use crate::evaluation::stats::Estimate;

/// A rate fails if the whole confidence interval of its ratio new/old lies below this limit.
pub const RATE_LEAST: f64 = 0.97;
/// A cost fails if the whole confidence interval of its ratio new/old lies above this limit.
pub const COST_MOST: f64 = 1.03;
/// Minimum probability with which an interval must cover the true median. With less, the verdict is
/// [`Verdict::Unproven`].
const CONFIDENCE_LEAST: f64 = 0.95;

/// The conclusion from the ratios of all rounds for one figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The new binary is worse by more than the tolerance.
    Failed,
    /// The rounds do not prove that the new binary is worse by more than the tolerance.
    Passed,
    /// The new binary is better, by more than the tolerance.
    Better,
    /// There were too few rounds for a confidence interval of 95 %.
    Unproven,
}

impl Verdict {
    /// Judges the median of the ratios new/old of a figure.
    #[must_use]
    pub fn of(figure: Figure, ratio: &Estimate) -> Verdict {
        if ratio.confidence < CONFIDENCE_LEAST {
            return Verdict::Unproven;
        }
        let (below, above) = (ratio.high < RATE_LEAST, ratio.low > COST_MOST);
        match (below, above, figure.is_rate()) {
            (true, _, true) | (_, true, false) => Verdict::Failed,
            (true, _, false) | (_, true, true) => Verdict::Better,
            (false, false, _) => Verdict::Passed,
        }
    }

    /// The verdict as tables show it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Verdict::Failed => "FAILED",
            Verdict::Passed => "ok",
            Verdict::Better => "better",
            Verdict::Unproven => "unproven",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::stats::estimate;

    /// Returns the estimate of eleven ratios around `centre`, 0.01 apart. Its interval extends by
    /// 0.04 to both sides.
    fn around(centre: f64) -> Estimate {
        estimate((-5..=5).map(|i| centre + f64::from(i) / 100.0)).unwrap()
    }

    fn verdicts(ratio: &Estimate) -> [Verdict; 3] {
        Figure::ALL.map(|figure| Verdict::of(figure, ratio))
    }

    #[test]
    fn eleven_rounds_are_enough_for_a_confidence_of_95_percent() {
        let ratio = around(1.0);
        assert!(ratio.confidence >= 0.95 && ratio.n == 11);
        assert!((ratio.low - 0.96).abs() < 1e-9 && (ratio.high - 1.04).abs() < 1e-9, "{ratio:?}");
    }

    #[test]
    fn a_figure_fails_only_if_the_whole_confidence_interval_exceeds_the_tolerance() {
        use Verdict::{Better, Failed, Passed};
        assert_eq!(verdicts(&around(1.0)), [Passed; 3]);
        // The upper end of the interval is 0.98 and then 0.96. The limit of 0.97 is between them.
        assert_eq!(verdicts(&around(0.94)), [Passed; 3]);
        assert_eq!(verdicts(&around(0.92)), [Failed, Better, Better]);
        // The lower end of the interval is 1.02 and then 1.04. The limit of 1.03 is between them.
        assert_eq!(verdicts(&around(1.06)), [Passed; 3]);
        assert_eq!(verdicts(&around(1.08)), [Better, Failed, Failed]);
    }

    #[test]
    fn a_ratio_equal_to_a_limit_passes() {
        let exactly = |ratio| estimate([ratio; 11]).unwrap();
        assert_eq!(verdicts(&exactly(RATE_LEAST)), [Verdict::Passed; 3]);
        assert_eq!(verdicts(&exactly(COST_MOST)), [Verdict::Passed; 3]);
    }

    #[test]
    fn five_rounds_prove_nothing_even_if_every_ratio_is_bad() {
        let five = estimate([0.5; 5]).unwrap();
        assert_eq!(verdicts(&five), [Verdict::Unproven; 3]);
        let six = estimate([0.5; 6]).unwrap();
        assert_eq!(verdicts(&six)[0], Verdict::Failed);
    }

    #[test]
    fn one_bad_round_of_eleven_does_not_fail_a_figure() {
        let mut ratios = vec![1.0; 10];
        ratios.push(0.1);
        assert_eq!(verdicts(&estimate(ratios).unwrap()), [Verdict::Passed; 3]);
    }
}
