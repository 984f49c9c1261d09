//! Medians of rounds, with confidence intervals.
//!
//! A machine's speed drifts during measurements. So two systems are compared round by round, by
//! runs about a minute apart, and the report shows the median of the ratios. The interval comes
//! from order statistics: the k-th values from both ends of `n` sorted values enclose the true
//! median with a probability that follows from the binomial distribution, for every distribution of
//! the values.

use std::collections::BTreeMap;

use serde::Serialize;

/// One value per round.
pub type Rounds = BTreeMap<u32, f64>;

/// The median of the values of several rounds, with its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The median.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Number of rounds.
    pub n: usize,
    /// Probability that the interval contains the true median. With fewer than six rounds it is
    /// below 0.95, and the interval is the whole range of values.
    pub confidence: f64,
}

impl Estimate {
    /// Creates an estimate without an interval, for a published value.
    #[must_use]
    pub fn exact(value: f64) -> Estimate {
        Estimate { median: value, low: value, high: value, n: 1, confidence: 0.0 }
    }
}

/// Returns the median of `values` and its confidence interval. Ignores values that are not finite.
/// Returns `None` if no value remains.
#[must_use]
pub fn estimate(values: impl IntoIterator<Item = f64>) -> Option<Estimate> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    if n == 0 {
        return None;
    }
    let mut k = 0;
    while 2 * (k + 1) < n && coverage(n, k + 1) >= 0.95 {
        k += 1;
    }
    let median = f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]);
    Some(Estimate { median, low: sorted[k], high: sorted[n - 1 - k], n, confidence: coverage(n, k) })
}

/// Returns the probability that the true median lies between the values at the ranks `k` from both
/// ends of `n` sorted values: 1 - 2 P(Binomial(n, 1/2) <= k).
fn coverage(n: usize, k: usize) -> f64 {
    let (mut term, mut below) = (0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX)), 0.0);
    for i in 0..=k.min(n) {
        below += term;
        term *= (n - i) as f64 / (i + 1) as f64;
    }
    (1.0 - 2.0 * below).max(0.0)
}

/// Combines the values of rounds that both series have.
#[must_use]
pub fn paired(a: &Rounds, b: &Rounds, combine: impl Fn(f64, f64) -> f64) -> Rounds {
    a.iter().filter_map(|(round, x)| Some((*round, combine(*x, *b.get(round)?)))).collect()
}

/// Computes `a / b` round by round. Omits rounds in which `b` is zero.
#[must_use]
pub fn ratio(a: &Rounds, b: &Rounds) -> Rounds {
    paired(a, b, |x, y| x / y).into_iter().filter(|(_, r)| r.is_finite()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(values: &[f64]) -> Rounds {
        (1..).zip(values.iter().copied()).collect()
    }

    #[test]
    fn the_median_of_an_even_number_of_rounds_is_the_mean_of_the_middle_two() {
        let e = estimate([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((e.median, e.low, e.high, e.n), (2.5, 1.0, 4.0, 4));
    }

    #[test]
    fn values_that_are_not_finite_give_no_estimate() {
        assert_eq!(estimate([]), None);
        assert_eq!(estimate([f64::NAN, f64::INFINITY]), None);
    }

    #[test]
    fn coverage_equals_the_published_values_of_the_sign_test() {
        // The expected values come from published tables of the order-statistic interval of a
        // median.
        for (n, k, expected) in
            [(6, 0, 0.96875), (7, 0, 0.984_375), (9, 1, 0.960_937_5), (15, 3, 0.964_843_75), (1, 0, 0.0)]
        {
            assert!((coverage(n, k) - expected).abs() < 1e-9, "{n} {k}: {}", coverage(n, k));
        }
    }

    #[test]
    fn the_interval_spans_all_of_seven_values_but_omits_the_extremes_of_nine() {
        let seven = estimate((1..=7).map(f64::from)).unwrap();
        assert_eq!((seven.median, seven.low, seven.high), (4.0, 1.0, 7.0));
        assert!(seven.confidence >= 0.95);
        let nine = estimate((1..=9).map(f64::from)).unwrap();
        assert_eq!((nine.median, nine.low, nine.high), (5.0, 2.0, 8.0));
        assert!(nine.confidence >= 0.95);
    }

    #[test]
    fn three_rounds_give_a_confidence_below_95_percent() {
        assert!(estimate([1.0, 2.0, 3.0]).unwrap().confidence < 0.95);
        assert_eq!(estimate([5.0]).unwrap().confidence, 0.0);
    }

    #[test]
    fn ratios_pair_values_of_the_same_round() {
        let (mut a, b) = (rounds(&[10.0, 20.0, 30.0]), rounds(&[5.0, 0.0, 3.0]));
        a.remove(&1);
        // Round 1 is missing in one series, and round 2 would divide by zero.
        assert_eq!(ratio(&a, &b), BTreeMap::from([(3, 10.0)]));
    }

    #[test]
    fn a_drift_common_to_both_series_cancels_out() {
        let slow_later: Vec<f64> = (1..=7).map(|i| 100.0 / f64::from(i)).collect();
        let half: Vec<f64> = slow_later.iter().map(|v| v / 2.0).collect();
        let e = estimate(ratio(&rounds(&half), &rounds(&slow_later)).into_values()).unwrap();
        assert!((e.low - 0.5).abs() < 1e-12 && (e.high - 0.5).abs() < 1e-12);
    }
}
