//! Hot objects: objects that many tasks change at the same time.
//!
//! Each *lane* of a hot object is an omap entry and a block of data that only one task changes. A
//! change of a lane has the condition that the entry has the value that the task expects, and no
//! value is used twice. A change that took effect twice, or that took effect although it was refused,
//! therefore contradicts a later answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::{Error, NodeError, Object};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::calls::CheckedPool;
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::record::RoundRecord;
use crate::writer::WriterContext;

/// Number of hot objects.
const OBJECTS: u64 = 2;
/// Number of lanes of a hot object.
const LANES: u64 = 8;
/// Size of the block of a lane, in bytes.
const BLOCK: u64 = 4096;
/// Average pause of a lane between two calls.
const PAUSE: Duration = Duration::from_millis(10);

/// A possible state of a lane: the value of its entry and the number in its block. Both are 0 at the
/// beginning.
type LaneState = (u64, u64);

/// A change of a lane: the expected value, the new value, and whether it also writes the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LaneChange {
    expected: u64,
    value: u64,
    writes: bool,
}

impl LaneChange {
    fn apply(&self, (value, block): LaneState) -> Option<LaneState> {
        (value == self.expected).then_some((self.value, if self.writes { self.value } else { block }))
    }
}

/// The states of a lane that explain all answers so far.
#[derive(Debug)]
struct LaneLedger {
    possible: BTreeSet<LaneState>,
    /// Changes of unknown outcome, which may take effect at any later time.
    open: Vec<LaneChange>,
    last: u64,
}

impl LaneLedger {
    fn new() -> LaneLedger {
        LaneLedger { possible: [(0, 0)].into(), open: Vec::new(), last: 0 }
    }

    /// All states that the lane may have now.
    fn reachable(&self) -> BTreeSet<LaneState> {
        let mut all = self.possible.clone();
        loop {
            let next =
                all.iter().flat_map(|state| self.open.iter().filter_map(|change| change.apply(*state)));
            let next: BTreeSet<LaneState> = next.filter(|state| !all.contains(state)).collect();
            if next.is_empty() {
                return all;
            }
            all.extend(next);
        }
    }

    /// Returns the next change, which expects one of the possible values.
    fn next(&mut self, writes: bool) -> LaneChange {
        self.last += 1;
        let expected = self.possible.first().map_or(0, |(value, _)| *value);
        LaneChange { expected, value: self.last, writes }
    }

    fn keep(&mut self, states: BTreeSet<LaneState>, what: &str) -> Result<(), BrokenReport> {
        if states.is_empty() {
            let text = format!("{what}; possible were {:?}, with {:?} open", self.possible, self.open);
            return Err(BrokenReport { promise: BrokenPromise::WrongAnswer, text });
        }
        // A change that expects another value can no longer take effect, because values do not return.
        self.possible = states;
        let reachable: BTreeSet<u64> = self.reachable().into_iter().map(|(value, _)| value).collect();
        self.open.retain(|change| reachable.contains(&change.expected));
        Ok(())
    }

    fn acknowledged(&mut self, change: LaneChange) -> Result<(), BrokenReport> {
        let after = self.reachable().into_iter().filter_map(|state| change.apply(state)).collect();
        self.keep(after, &format!("{change:?} was acknowledged"))
    }

    fn refused(&mut self, change: LaneChange) -> Result<(), BrokenReport> {
        let after = self.reachable().into_iter().filter(|(value, _)| *value != change.expected).collect();
        self.keep(after, &format!("{change:?} was refused"))
    }

    fn read_value(&mut self, value: u64) -> Result<(), BrokenReport> {
        let after = self.reachable().into_iter().filter(|state| state.0 == value).collect();
        self.keep(after, &format!("the entry was read as {value}"))
    }

    fn read_block(&mut self, block: u64) -> Result<(), BrokenReport> {
        let after = self.reachable().into_iter().filter(|state| state.1 == block).collect();
        self.keep(after, &format!("the block was read as {block}"))
    }
}

/// A lane, which one task changes.
#[derive(Debug)]
pub struct HotLane {
    object: Object,
    number: u64,
    ledger: LaneLedger,
    record: Arc<RoundRecord>,
}

impl HotLane {
    fn key(&self) -> Bytes {
        format!("lane{}", self.number).into()
    }

    fn what(&self, what: &str) -> String {
        format!("{what} of lane {} of {}", self.number, name_of(&self.object))
    }

    fn judge(&self, result: Result<(), BrokenReport>) {
        let place = self.what("answer");
        let named =
            result.map_err(|report| BrokenReport { text: format!("{place}: {}", report.text), ..report });
        self.record.check(None, named);
    }

    fn failed(&self, what: &str, began: Instant, error: &Error) {
        self.record.check(None, self.record.failure(&self.what(what), began, error));
    }

    async fn change(&mut self, writes: bool) {
        let change = self.ledger.next(writes);
        let text = |value: u64| (value > 0).then(|| Bytes::from(value.to_string()));
        let mut compound = self.object.compound().if_omap(self.key(), text(change.expected));
        if writes {
            compound = compound.write(self.number * BLOCK, block_of(change.value));
        }
        let compound = compound.omap_set(vec![(self.key(), text(change.value).unwrap_or_default())]);
        let began = Instant::now();
        match compound.commit().await {
            Ok(_) => {
                self.record.success("changed");
                let judged = self.ledger.acknowledged(change);
                self.judge(judged);
            }
            Err(Error::Node(NodeError::ConditionFailed { .. })) => {
                self.record.success("refused");
                let judged = self.ledger.refused(change);
                self.judge(judged);
            }
            Err(error) => {
                if error.may_have_taken_effect() {
                    self.ledger.open.push(change);
                }
                self.failed("change", began, &error);
            }
        }
    }

    /// Reads the block or the entry, and checks it. Returns false if it cannot be read.
    async fn read(&mut self, reads_block: bool) -> bool {
        let began = Instant::now();
        let judged = match reads_block {
            true => match self.object.get_range(self.number * BLOCK, BLOCK).await {
                Ok(data) => number_in(&data).and_then(|number| self.ledger.read_block(number)),
                Err(Error::Node(NodeError::Changed { .. })) => return false,
                Err(error) => {
                    self.failed("read", began, &error);
                    return false;
                }
            },
            false => match self.object.omap_get(vec![self.key()]).await {
                Ok(found) => {
                    let value = found.first().map(|(_, value)| String::from_utf8_lossy(value).parse());
                    match value.unwrap_or(Ok(0)) {
                        Ok(value) => self.ledger.read_value(value),
                        Err(_) => Err(mixed("an entry is not a number".into())),
                    }
                }
                Err(error) => {
                    self.failed("lookup", began, &error);
                    return false;
                }
            },
        };
        self.record.success("read hot");
        self.judge(judged);
        true
    }

    async fn run(mut self, context: WriterContext, mut random: SmallRng) -> HotLane {
        while !self.record.is_over() {
            {
                let _open = context.gate.read().await;
                // A change that expects one of several values would often be refused.
                let is_certain = self.ledger.possible.len() == 1;
                match random.random_range(0..6) {
                    n if n < 2 || !is_certain => {
                        self.read(n == 0).await;
                    }
                    n => self.change(n < 4).await,
                }
            }
            tokio::time::sleep(PAUSE.mul_f64(random.random_range(0.0..2.0))).await;
        }
        self
    }
}

/// Content of a block: its number, repeated.
fn block_of(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat((BLOCK / 8) as usize)
}

fn mixed(text: String) -> BrokenReport {
    BrokenReport { promise: BrokenPromise::MixedContent, text }
}

fn number_in(block: &[u8]) -> Result<u64, BrokenReport> {
    let first = block.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let first = first.filter(|number| block == block_of(*number));
    first.ok_or_else(|| mixed(format!("a block of {} bytes has parts of several changes", block.len())))
}

/// Creates the hot objects, before the first fault.
///
/// # Errors
/// If a call fails.
pub async fn create(pool: &CheckedPool) -> client::Result<()> {
    for number in 0..OBJECTS {
        let object = pool.pool().object(&name(number))?;
        object.put(vec![0; (LANES * BLOCK) as usize]).await?;
    }
    Ok(())
}

fn name(number: u64) -> String {
    format!("hot/{number}")
}

/// Changes the hot objects until the round ends. Returns their lanes.
///
/// # Errors
/// If a task fails.
pub async fn change_all(
    pool: CheckedPool,
    context: WriterContext,
    seed: u64,
) -> Result<Vec<HotLane>, String> {
    let mut running = Vec::new();
    for number in 0..OBJECTS * LANES {
        let object = pool.pool().object(&name(number % OBJECTS)).map_err(|error| error.to_string())?;
        let record = Arc::clone(&context.record);
        let lane = HotLane { object, number: number / OBJECTS, ledger: LaneLedger::new(), record };
        let random = SmallRng::seed_from_u64(seed.wrapping_mul(37).wrapping_add(number));
        running.push(tokio::spawn(lane.run(context.clone(), random)));
    }
    let mut lanes = Vec::new();
    for lane in running {
        lanes.push(lane.await.map_err(|error| error.to_string())?);
    }
    Ok(lanes)
}

/// Checks the last state of each lane. Repeats failed reads, until a failure breaks a promise.
///
/// # Errors
/// If an object has no valid name.
pub async fn check(lanes: &mut [HotLane], pool: &CheckedPool) -> client::Result<()> {
    for lane in lanes {
        lane.object = pool.pool().object(&name_of(&lane.object))?;
        for reads_block in [false, true] {
            while !lane.record.is_violated() && !lane.read(reads_block).await {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    Ok(())
}

fn name_of(object: &Object) -> String {
    object.name().object().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certain_change_that_is_refused_or_lost_breaks_a_promise() {
        let mut lane = LaneLedger::new();
        let first = lane.next(true);
        lane.acknowledged(first).unwrap();
        assert_eq!(lane.reachable(), [(1, 1)].into());
        lane.read_block(0).unwrap_err();
        lane.read_value(0).unwrap_err();
        let second = lane.next(false);
        lane.refused(second).unwrap_err();
        lane.acknowledged(second).unwrap();
        lane.read_block(1).unwrap();
        assert_eq!(lane.reachable(), [(2, 1)].into());
    }

    #[test]
    fn a_change_of_unknown_outcome_may_take_effect_until_another_value_was_seen() {
        let mut lane = LaneLedger::new();
        let lost = lane.next(true);
        lane.open.push(lost);
        assert_eq!(lane.reachable(), [(0, 0), (1, 1)].into());
        lane.read_value(0).unwrap();
        assert_eq!(lane.reachable().len(), 2, "it may still take effect");
        let next = lane.next(false);
        assert_eq!(next.expected, 0);
        lane.acknowledged(next).unwrap();
        assert_eq!((lane.reachable(), lane.open.len()), ([(2, 0)].into(), 0));

        let mut lane = LaneLedger::new();
        let late = lane.next(true);
        lane.open.push(late);
        let next = lane.next(false);
        lane.refused(next).unwrap();
        assert_eq!(lane.reachable(), [(1, 1)].into(), "only the earlier change explains the refusal");
    }

    #[test]
    fn a_block_with_parts_of_two_changes_is_mixed() {
        let mut block = block_of(7);
        assert_eq!(number_in(&block).unwrap(), 7);
        block[4000] = 1;
        assert_eq!(number_in(&block).unwrap_err().promise, BrokenPromise::MixedContent);
        number_in(&[]).unwrap_err();
    }
}
