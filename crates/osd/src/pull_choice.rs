//! [`PullChoices`]: whether the payload of a write is pulled from its client as a whole, or as a
//! pipeline of segments.
//!
//! A pipeline overlaps the network, DMA and the drive within a request. In exchange, each segment costs
//! messages between osd and store, and their CPU time. Which way is faster depends on the engine, the
//! drive, the processors, and on the other requests in progress, which overlap with each other anyway.
//! So the choice follows measurements: for each class of writes, most *epochs* of [`EPOCH`] writes use
//! the better way, and some use the other way. The cost of an epoch is the mean time per byte, divided
//! by the number of requests in progress. In a steady load, this is the inverse of the throughput
//! (Little's law). The cost of the other way is compared with that of the epoch before it. The class
//! changes its way if the other way has been better by [`GAIN`] on average.

use std::cell::RefCell;
use std::time::Duration;

use base::clock::Instant;
use base::collections::HashMap;
use metrics::{Counter, counter};

/// Minimum length of a write for which there is a choice, in bytes. Shorter writes are pulled as a
/// whole.
const LEAST: u64 = 512 << 10;
/// Number of writes of an epoch.
const EPOCH: u32 = 64;
/// The other way is used in one of this many epochs, after the first few.
const RARELY: u32 = 16;
/// Number of comparisons before the class may change its way. Until then, every other epoch uses the
/// other way.
const COMPARISONS: u32 = 3;
/// A way must be better by this part to replace the other one.
const GAIN: f64 = 0.05;
/// Weight of the latest comparison.
const WEIGHT: f64 = 0.3;

/// How payload is pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PullWay {
    /// Into one buffer, which the transaction carries.
    Whole,
    /// In several segments, each of which is staged when it has arrived.
    Pipeline,
}

/// Writes that are likely to behave alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PullClass {
    /// Binary logarithm of the length, rounded up.
    size: u32,
    /// Binary logarithm of the number of requests in progress, rounded down, at most 4.
    load: u32,
    /// Whether the pool has redundancy.
    is_redundant: bool,
}

impl PullClass {
    /// The way that is used before there are measurements. A pipeline helps a single large request
    /// most.
    fn first_way(self) -> PullWay {
        if self.size > 21 && self.load < 2 { PullWay::Pipeline } else { PullWay::Whole }
    }
}

/// A write whose way was chosen. [`PullChoices::done`] measures it.
pub(crate) struct ChosenPull {
    class: PullClass,
    epoch: u32,
    way: PullWay,
    started: Instant,
    /// Length in bytes times the number of requests in progress.
    share: f64,
}

impl ChosenPull {
    pub(crate) fn way(&self) -> PullWay {
        self.way
    }
}

/// The measurements of one class.
struct ClassChoice {
    better: PullWay,
    /// Number and way of the current epoch.
    epoch: u32,
    way: PullWay,
    /// Writes of the epoch that have ended, and the sum of their costs.
    ended: u32,
    cost: f64,
    /// Cost of the last epoch that used the better way.
    last_better: Option<f64>,
    /// Mean cost of the other way divided by the cost of the better way, over `comparisons`.
    ratio: f64,
    comparisons: u32,
}

/// The choices of a shard.
pub(crate) struct PullChoices {
    classes: RefCell<HashMap<PullClass, ClassChoice>>,
    chosen: [Counter; 2],
}

impl PullWay {
    fn other(self) -> PullWay {
        match self {
            PullWay::Whole => PullWay::Pipeline,
            PullWay::Pipeline => PullWay::Whole,
        }
    }

    fn name(self) -> &'static str {
        match self {
            PullWay::Whole => "whole",
            PullWay::Pipeline => "pipeline",
        }
    }
}

impl ClassChoice {
    fn new(better: PullWay) -> ClassChoice {
        ClassChoice {
            better,
            epoch: 0,
            way: better,
            ended: 0,
            cost: 0.0,
            last_better: None,
            ratio: 1.0,
            comparisons: 0,
        }
    }

    fn ended(&mut self, cost: f64) {
        self.ended += 1;
        self.cost += cost;
        if self.ended < EPOCH {
            return;
        }
        let mean = self.cost / f64::from(self.ended);
        match self.last_better {
            Some(better) if self.way != self.better => self.compared(mean / better),
            _ => self.last_better = Some(mean),
        }
        (self.ended, self.cost) = (0, 0.0);
        self.epoch = self.epoch.wrapping_add(1);
        let explores = if self.comparisons < COMPARISONS { 2 } else { RARELY };
        self.way = if self.epoch.is_multiple_of(explores) { self.better.other() } else { self.better };
        // A comparison needs an epoch of the better way before it.
        if self.last_better.is_none() {
            self.way = self.better;
        }
    }

    /// Records the cost of the other way, relative to that of the better way.
    fn compared(&mut self, ratio: f64) {
        // The ratio of a class that is seldom used may be extreme.
        let ratio = ratio.clamp(0.2, 5.0);
        self.ratio = if self.comparisons == 0 { ratio } else { self.ratio * (1.0 - WEIGHT) + ratio * WEIGHT };
        self.comparisons = self.comparisons.saturating_add(1);
        if self.comparisons >= COMPARISONS && self.ratio < 1.0 - GAIN {
            self.better = self.better.other();
            self.ratio = 1.0 / self.ratio;
            self.last_better = None;
        }
    }
}

impl PullChoices {
    /// Creates the choices of shard number `shard`.
    pub(crate) fn new(shard: u16) -> PullChoices {
        let chosen = [PullWay::Whole, PullWay::Pipeline].map(
            |way| counter!("outboard_osd_pulls_total", "way" => way.name(), "shard" => shard.to_string()),
        );
        PullChoices { classes: RefCell::default(), chosen }
    }

    /// Chooses the way of a write of `len` bytes that begins while `in_progress` requests are in
    /// progress, including this one. Data is staged from multiples of `alignment` on, so a pipeline has
    /// at least twice this length. `largest` is the length of the largest buffer, in bytes; a longer
    /// write is always pulled in segments. Returns `None` if there is no choice.
    pub(crate) fn choose(
        &self,
        len: u64,
        alignment: u64,
        largest: u64,
        in_progress: u32,
        is_redundant: bool,
    ) -> Option<ChosenPull> {
        if !(LEAST.max(2 * alignment)..=largest).contains(&len) {
            return None;
        }
        let in_progress = in_progress.max(1);
        let size = len.next_power_of_two().ilog2();
        let class = PullClass { size, load: in_progress.ilog2().min(4), is_redundant };
        let mut classes = self.classes.borrow_mut();
        let choice = classes.entry(class).or_insert_with(|| ClassChoice::new(class.first_way()));
        let (epoch, way) = (choice.epoch, choice.way);
        self.chosen[way as usize].increment(1);
        let share = len as f64 * f64::from(in_progress);
        Some(ChosenPull { class, epoch, way, started: Instant::now(), share })
    }

    /// Records that a write has succeeded.
    pub(crate) fn done(&self, pull: &ChosenPull) {
        self.took(pull, pull.started.elapsed());
    }

    fn took(&self, pull: &ChosenPull, took: Duration) {
        if let Some(choice) = self.classes.borrow_mut().get_mut(&pull.class)
            && choice.epoch == pull.epoch
        {
            choice.ended(took.as_secs_f64() / pull.share);
        }
    }
}

#[cfg(test)]
mod tests {
    use base::block::BLOCK;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Performs `count` writes, each of which takes the time that `time` returns for its way. Returns
    /// how many of them used a pipeline.
    fn run(choices: &PullChoices, count: u32, time: impl Fn(PullWay) -> Duration) -> u32 {
        let mut pipelines = 0;
        for _ in 0..count {
            let pull = choices.choose(4 * MIB, BLOCK, 4 * MIB, 16, false).unwrap();
            pipelines += u32::from(pull.way() == PullWay::Pipeline);
            choices.took(&pull, time(pull.way()));
        }
        pipelines
    }

    fn ms(whole: u64, pipeline: u64) -> impl Fn(PullWay) -> Duration {
        move |way| Duration::from_millis(if way == PullWay::Whole { whole } else { pipeline })
    }

    #[test]
    fn the_faster_way_is_used_and_the_other_one_is_still_measured() {
        let choices = PullChoices::new(0);
        run(&choices, 10 * EPOCH, ms(20, 10));
        let pipelines = run(&choices, 16 * EPOCH, ms(20, 10));
        assert_eq!(pipelines, 15 * EPOCH, "one of 16 epochs measures the other way");
        // The load has changed.
        run(&choices, 10 * RARELY * EPOCH, ms(10, 20));
        assert_eq!(run(&choices, 16 * EPOCH, ms(10, 20)), EPOCH);
    }

    #[test]
    fn a_small_gain_changes_nothing() {
        let choices = PullChoices::new(0);
        run(&choices, 100 * EPOCH, ms(100, 97));
        assert_eq!(run(&choices, 16 * EPOCH, ms(100, 97)), EPOCH);
    }

    #[test]
    fn the_first_way_of_a_single_large_write_is_a_pipeline() {
        let choices = PullChoices::new(0);
        let way = |len, in_progress| choices.choose(len, BLOCK, 4 * MIB, in_progress, true).unwrap().way();
        assert_eq!((way(4 * MIB, 1), way(4 * MIB, 4)), (PullWay::Pipeline, PullWay::Whole));
        assert_eq!((way(MIB, 1), way(2 * MIB + 4096, 1)), (PullWay::Whole, PullWay::Pipeline));
    }

    #[test]
    fn there_is_no_choice_for_short_writes_and_for_those_that_fit_into_no_buffer() {
        let choices = PullChoices::new(0);
        assert!(choices.choose(LEAST - 1, BLOCK, 4 * MIB, 1, false).is_none());
        assert!(choices.choose(4 * MIB + 1, BLOCK, 4 * MIB, 1, false).is_none());
        assert!(choices.choose(2 * MIB, BLOCK, MIB, 1, false).is_none());
        assert!(choices.choose(2 * MIB - 1, MIB, 4 * MIB, 1, true).is_none(), "it may have no whole stripe");
        assert!(choices.choose(2 * MIB, MIB, 4 * MIB, 1, true).is_some());
    }

    #[test]
    fn writes_of_an_earlier_epoch_do_not_count() {
        let choices = PullChoices::new(0);
        let late = choices.choose(4 * MIB, BLOCK, 4 * MIB, 16, false).unwrap();
        run(&choices, EPOCH, ms(10, 10));
        choices.took(&late, Duration::from_secs(3600));
        assert_eq!(choices.classes.borrow()[&late.class].ended, 0);
    }
}
