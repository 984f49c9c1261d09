//! Tests of the check: each kind of broken promise is found, and no allowed answer is a violation.

use super::*;
use crate::expected::ChangeStep;

const OBJECT: u64 = 7;

/// A ledger, together with the true state of a fault-free object.
struct Checked {
    ledger: ObjectLedger,
    object: Option<ExpectedObject>,
    version: u64,
    changes: u64,
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Checked {
    fn new() -> Checked {
        let ledger = ObjectLedger::new(OBJECT, "o".to_owned());
        Checked { ledger, object: None, version: 0, changes: 0 }
    }

    fn begin(&mut self, steps: Vec<ChangeStep>) -> StampedChange {
        self.changes += 1;
        let change = StampedChange { id: self.changes, guard: None, steps };
        self.ledger.begin(change.clone(), at(self.changes));
        change
    }

    /// Makes a change take effect, and returns its answer.
    fn apply(&mut self, change: &StampedChange) -> Mutated {
        let effect = change.apply(self.object.as_ref()).unwrap();
        self.version += 1;
        self.object = effect.object;
        let size = self.object.as_ref().map_or(0, ExpectedObject::size);
        Mutated { version: self.version, size, appended_at: effect.appended_at }
    }

    fn end(&mut self, answer: ChangeAnswer) -> Result<(), BrokenPromise> {
        self.ledger.end(at(self.changes), answer).map_err(|report| report.promise)
    }

    fn change(&mut self, steps: Vec<ChangeStep>) {
        let change = self.begin(steps);
        let done = self.apply(&change);
        self.end(ChangeAnswer::Acknowledged(done)).unwrap();
    }

    fn lose_answer(&mut self, steps: Vec<ChangeStep>) -> StampedChange {
        let change = self.begin(steps);
        self.end(ChangeAnswer::Unknown("timed out".to_owned())).unwrap();
        change
    }

    fn view(&self) -> ObjectView {
        match &self.object {
            None => ObjectView::Absent,
            Some(object) => ObjectView::Present {
                version: self.version,
                data: object.data(OBJECT),
                xattrs: object.xattrs.clone(),
                omap: object.omap.clone(),
            },
        }
    }

    fn observe(&mut self) -> Result<(), BrokenPromise> {
        let view = self.view();
        self.observe_view(&view)
    }

    fn observe_view(&mut self, view: &ObjectView) -> Result<(), BrokenPromise> {
        self.ledger.observe(at(100), at(101), view).map_err(|report| report.promise)
    }
}

fn append(len: u64) -> Vec<ChangeStep> {
    vec![ChangeStep::Append { len }]
}

fn replace(len: u64) -> Vec<ChangeStep> {
    vec![ChangeStep::Replace { len }]
}

fn count(value: u64) -> Vec<ChangeStep> {
    vec![
        ChangeStep::Append { len: 64 },
        ChangeStep::SetOmap { entries: vec![("count".to_owned(), value.to_string())] },
    ]
}

#[test]
fn correct_answers_are_accepted() {
    let mut checked = Checked::new();
    checked.observe().unwrap();
    checked.change(replace(1000));
    checked.observe().unwrap();
    checked.change(append(300));
    checked.change(vec![ChangeStep::Remove]);
    checked.observe().unwrap();
    checked.change(append(10));
    checked.observe().unwrap();
}

#[test]
fn a_lost_acknowledged_change_is_detected_by_a_read() {
    let mut checked = Checked::new();
    checked.change(replace(1000));
    let before = checked.view();
    checked.change(replace(1000));
    assert_eq!(checked.observe_view(&before), Err(BrokenPromise::LostChange));
}

#[test]
fn a_lost_creation_is_detected_by_a_read() {
    let mut checked = Checked::new();
    checked.change(replace(1000));
    assert_eq!(checked.observe_view(&ObjectView::Absent), Err(BrokenPromise::LostChange));
}

#[test]
fn a_lost_removal_is_detected_by_a_read() {
    let mut checked = Checked::new();
    checked.change(replace(1000));
    let before = checked.view();
    checked.change(vec![ChangeStep::Remove]);
    assert_eq!(checked.observe_view(&before), Err(BrokenPromise::LostChange));
}

#[test]
fn a_lost_acknowledged_append_is_detected_by_the_answer_to_the_next_append() {
    let mut checked = Checked::new();
    checked.change(append(1000));
    let (object, version) = (checked.object.clone(), checked.version);
    checked.change(append(500));
    (checked.object, checked.version) = (object, version + 5);
    let change = checked.begin(append(70));
    let done = checked.apply(&change);
    assert_eq!(checked.end(ChangeAnswer::Acknowledged(done)), Err(BrokenPromise::LostChange));
}

#[test]
fn a_version_that_goes_back_is_a_lost_change() {
    let mut checked = Checked::new();
    checked.change(replace(1000));
    checked.change(vec![ChangeStep::Zero { offset: 0, len: 10 }]);
    checked.change(vec![ChangeStep::Zero { offset: 0, len: 10 }]);
    checked.version -= 1;
    assert_eq!(checked.observe(), Err(BrokenPromise::LostChange));
}

#[test]
fn a_repeated_append_is_detected_by_a_read() {
    let mut checked = Checked::new();
    let change = checked.begin(append(1000));
    let done = checked.apply(&change);
    checked.end(ChangeAnswer::Acknowledged(done)).unwrap();
    checked.apply(&change);
    assert_eq!(checked.observe(), Err(BrokenPromise::RepeatedChange));
}

#[test]
fn a_repeated_append_of_unknown_outcome_is_detected() {
    let mut checked = Checked::new();
    checked.change(replace(100));
    let change = checked.lose_answer(append(640));
    checked.apply(&change);
    checked.observe().unwrap();
    checked.apply(&change);
    assert_eq!(checked.observe(), Err(BrokenPromise::RepeatedChange));
}

#[test]
fn a_repeated_append_is_detected_although_an_earlier_outcome_is_unknown() {
    let mut checked = Checked::new();
    checked.lose_answer(append(6400));
    let change = checked.begin(append(1000));
    let done = checked.apply(&change);
    checked.end(ChangeAnswer::Acknowledged(done)).unwrap();
    checked.apply(&change);
    assert_eq!(checked.observe(), Err(BrokenPromise::RepeatedChange));
}

#[test]
fn a_repeated_overwrite_is_detected_by_its_version() {
    let mut checked = Checked::new();
    checked.change(replace(1000));
    checked.version += 1;
    assert_eq!(checked.observe(), Err(BrokenPromise::RepeatedChange));
}

#[test]
fn data_of_another_object_is_mixed_content() {
    let mut checked = Checked::new();
    checked.change(replace(1024));
    let mut view = checked.view();
    let ObjectView::Present { data, .. } = &mut view else { unreachable!() };
    data[128..256].copy_from_slice(&content::stamped(OBJECT + 1, 1, 128, 128));
    assert_eq!(checked.observe_view(&view), Err(BrokenPromise::MixedContent));
}

#[test]
fn data_of_two_changes_is_mixed_content() {
    let mut checked = Checked::new();
    checked.change(replace(1024));
    let ObjectView::Present { data: old, .. } = checked.view() else { unreachable!() };
    checked.change(replace(1024));
    let mut view = checked.view();
    let ObjectView::Present { data, .. } = &mut view else { unreachable!() };
    data[..512].copy_from_slice(&old[..512]);
    assert_eq!(checked.observe_view(&view), Err(BrokenPromise::MixedContent));
}

#[test]
fn a_compound_that_took_effect_in_part_is_mixed_content() {
    let mut checked = Checked::new();
    checked.change(count(1));
    let change = checked.begin(count(2));
    let done = checked.apply(&change);
    checked.end(ChangeAnswer::Acknowledged(done)).unwrap();
    let object = checked.object.as_mut().unwrap();
    object.omap.insert("count".to_owned(), "1".to_owned());
    assert_eq!(checked.observe(), Err(BrokenPromise::MixedContent));
}

#[test]
fn both_outcomes_of_an_unanswered_change_are_allowed_until_one_is_seen() {
    let mut checked = Checked::new();
    checked.change(append(100));
    let before = checked.view();
    let change = checked.lose_answer(append(200));
    checked.observe().unwrap();
    // The change takes effect late.
    checked.apply(&change);
    checked.observe().unwrap();
    // From now on, its effect must stay.
    assert_eq!(checked.observe_view(&before), Err(BrokenPromise::LostChange));
}

#[test]
fn unanswered_changes_may_take_effect_after_acknowledged_changes_and_in_any_order() {
    let mut checked = Checked::new();
    let first = checked.lose_answer(append(100));
    let second = checked.lose_answer(append(200));
    checked.change(append(300));
    checked.apply(&second);
    checked.observe().unwrap();
    checked.apply(&first);
    checked.observe().unwrap();
}

#[test]
fn a_change_of_a_killed_client_has_an_unknown_outcome() {
    let mut checked = Checked::new();
    let change = checked.begin(append(100));
    checked.ledger.abandon();
    checked.observe().unwrap();
    checked.apply(&change);
    checked.observe().unwrap();
    assert_eq!(checked.ledger.exists(), Some(true));
}

#[test]
fn a_refusal_must_agree_with_the_state() {
    let mut checked = Checked::new();
    let refused = || ChangeAnswer::Refused(ExpectedRefusal::NoSuchObject, "no such object".to_owned());
    checked.begin(vec![ChangeStep::Remove]);
    checked.end(refused()).unwrap();
    checked.change(append(100));
    checked.begin(vec![ChangeStep::Remove]);
    assert_eq!(checked.end(refused()), Err(BrokenPromise::LostChange));
}

#[test]
fn a_concurrent_read_sees_the_state_before_or_after_the_change_in_progress() {
    let mut checked = Checked::new();
    checked.change(replace(1024));
    let ObjectView::Present { data: old, .. } = checked.view() else { unreachable!() };
    let reads = [checked.ledger.begin_read(), checked.ledger.begin_read(), checked.ledger.begin_read()];
    let change = checked.begin(replace(2048));
    let done = checked.apply(&change);
    let ObjectView::Present { data: new, .. } = checked.view() else { unreachable!() };
    let mut mixed = new.clone();
    mixed[..1024].copy_from_slice(&old);
    let ledger = &mut checked.ledger;
    ledger.end_read(reads[0], at(1), at(2), Some(Some(&old))).unwrap();
    ledger.end_read(reads[1], at(1), at(2), Some(Some(&new))).unwrap();
    let report = ledger.end_read(reads[2], at(1), at(2), Some(Some(&mixed))).unwrap_err();
    assert_eq!(report.promise, BrokenPromise::MixedContent);
    checked.end(ChangeAnswer::Acknowledged(done)).unwrap();
    let read = checked.ledger.begin_read();
    let report = checked.ledger.end_read(read, at(1), at(2), Some(Some(&old))).unwrap_err();
    assert_eq!(report.promise, BrokenPromise::LostChange, "{report}");
}

#[test]
fn an_object_with_many_unknown_outcomes_is_retired() {
    let mut checked = Checked::new();
    for n in 0..UNKNOWN_MAX {
        assert!(!checked.ledger.is_retired(), "after {n} unknown outcomes");
        checked.lose_answer(append(100));
    }
    assert!(checked.ledger.is_retired());
    assert_eq!(checked.ledger.exists(), None);
}
