//! Tests of single rules of the check.

use std::time::Duration;

use bytes::Bytes;
use wire::{Condition, Mutated, Mutation, ObjectName, QueryAnswer, QueryOp};

use super::*;

/// A history in the making. Each event happens one second after the one before.
#[derive(Clone)]
struct Story {
    history: History,
    now: u64,
}

impl Story {
    fn new() -> Story {
        let mut history = History::new();
        history.add_pool("p", true);
        history.add_pool("single", false);
        Story { history, now: 0 }
    }

    fn tick(&mut self) -> Duration {
        self.now += 1;
        Duration::from_secs(self.now)
    }

    fn start(&mut self, client: u32, request: impl Into<Request>) -> CallId {
        let now = self.tick();
        self.history.start(ClientId(client), now, Some(now + Duration::from_secs(60)), request)
    }

    fn end(&mut self, call: CallId, outcome: Outcome) {
        let now = self.tick();
        self.history.end(call, now, outcome);
    }

    fn call(&mut self, request: impl Into<Request>, outcome: Outcome) -> CallId {
        let call = self.start(0, request);
        self.end(call, outcome);
        call
    }

    fn fill(&mut self, len: u64) -> Fill {
        self.history.new_fill(len)
    }

    /// Puts data with a version, and returns the data.
    fn put(&mut self, len: u64, version: u64) -> Fill {
        let fill = self.fill(len);
        self.call(ChangeCall::new(object()).write_full(fill), changed(version, len));
        fill
    }

    fn rules(&self) -> Vec<Rule> {
        self.history.check(&CheckOptions::default()).iter().map(|violation| violation.rule).collect()
    }

    fn accept(&self) {
        let violations = self.history.check(&CheckOptions::default());
        assert!(violations.is_empty(), "{}", violations[0]);
    }

    fn reject(&self, rule: Rule) {
        assert_eq!(self.rules(), [rule]);
    }
}

fn object() -> ObjectName {
    "p/a".parse().unwrap()
}

fn changed(version: u64, size: u64) -> Outcome {
    Outcome::Changed(Mutated { version, size, appended_at: 0 })
}

fn unknown() -> Outcome {
    Outcome::Unknown("timed out".into())
}

fn refused(kind: RefusalKind) -> Outcome {
    Outcome::Refused(RefusedCall { kind, text: String::new() })
}

/// The answer to a read of fills that follow one another.
fn data(version: u64, fills: &[Fill]) -> Outcome {
    let mut data = Seen::default();
    fills.iter().for_each(|fill| data.push(fill.len, DataOrigin::Fill { id: fill.id, at: 0 }));
    Outcome::Read(ReadAnswer { version: Some(version), object_size: Some(data.len()), data })
}

fn read() -> RangeRead {
    RangeRead::whole(object())
}

fn listed(names: &[&str]) -> Outcome {
    Outcome::Listed(names.iter().map(|name| (String::new(), (*name).to_owned())).collect())
}

fn list() -> ListCall {
    ListCall { pool: "p".into(), namespace: None, prefix: String::new(), is_ordered: false }
}

#[test]
fn concurrent_changes_take_effect_in_either_order() {
    for is_swapped in [false, true] {
        let mut story = Story::new();
        let fills = [story.fill(10), story.fill(10)];
        let calls = fills.map(|fill| story.start(fill.id, ChangeCall::new(object()).append(fill)));
        let (first, last) = if is_swapped { (1, 0) } else { (0, 1) };
        story.end(
            calls[0],
            Outcome::Changed(Mutated { version: 1 + first, size: 10 + 10 * first, appended_at: 10 * first }),
        );
        story.end(
            calls[1],
            Outcome::Changed(Mutated { version: 1 + last, size: 10 + 10 * last, appended_at: 10 * last }),
        );
        story.call(read(), data(2, &[fills[first as usize], fills[last as usize]]));
        story.accept();
    }
}

#[test]
fn changes_after_one_another_keep_their_order() {
    let mut story = Story::new();
    story.put(10, 2);
    story.put(10, 1);
    story.reject(Rule::Linearizable);
}

#[test]
fn a_change_of_unknown_outcome_takes_effect_once_after_its_start_or_never() {
    for (reads, is_valid) in
        [(&[false, false][..], true), (&[false, true], true), (&[true, true], true), (&[true, false], false)]
    {
        for is_killed in [false, true] {
            let mut story = Story::new();
            let first = story.put(10, 1);
            let second = story.fill(10);
            let call = story.start(7, ChangeCall::new(object()).append(second));
            if is_killed {
                let now = story.tick();
                story.history.kill(ClientId(7), now);
            } else {
                story.end(call, unknown());
            }
            for is_seen in reads {
                let outcome = if *is_seen { data(2, &[first, second]) } else { data(1, &[first]) };
                story.call(read(), outcome);
            }
            assert_eq!(story.rules().is_empty(), is_valid, "{reads:?}");
        }
    }
    let mut early = Story::new();
    let first = early.put(10, 1);
    let second = early.fill(10);
    early.call(read(), data(2, &[first, second]));
    early.call(ChangeCall::new(object()).append(second), unknown());
    early.reject(Rule::Linearizable);
}

#[test]
fn a_change_without_a_trace_explains_a_later_state() {
    let mut story = Story::new();
    story.put(10, 1);
    story.call(ChangeCall::new(object()).op(Mutation::Remove), unknown());
    story.call(ChangeCall::new(object()).op(Mutation::Create), changed(5, 0));
    story.accept();
    // Between versions 1 and 2 is no room for the removal.
    let mut story = Story::new();
    story.put(10, 1);
    story.call(ChangeCall::new(object()).op(Mutation::Remove), unknown());
    story.call(ChangeCall::new(object()).op(Mutation::Create), changed(2, 0));
    story.reject(Rule::Linearizable);
}

#[test]
fn a_short_write_may_contain_the_bytes_that_it_replaces() {
    let mut story = Story::new();
    let old = story.put(100, 1);
    let origin = |fill: Fill| DataOrigin::Fill { id: fill.id, at: 0 };
    let twin = loop {
        let fill = story.fill(1);
        if origin(fill).common(&origin(old), 1) == 1 {
            break fill;
        }
    };
    story.call(ChangeCall::new(object()).write(0, twin), changed(2, 100));
    // A reader cannot tell the two apart.
    story.call(read(), data(2, &[old]));
    story.accept();
    let mut other = story.clone();
    let different = other.fill(8);
    other.call(ChangeCall::new(object()).write(0, different), changed(3, 100));
    other.call(read(), data(3, &[old]));
    other.reject(Rule::Linearizable);
}

#[test]
fn each_change_increases_the_version_even_without_an_effect() {
    for (version, is_valid) in [(1, false), (2, true)] {
        let mut story = Story::new();
        story.put(10, 1);
        story.call(ChangeCall::new(object()).op(Mutation::Touch), changed(version, 10));
        assert_eq!(story.rules().is_empty(), is_valid);
    }
    // An unseen change lets a condition on the version fail.
    let mut story = Story::new();
    let fill = story.put(10, 1);
    story.call(ChangeCall::new(object()).op(Mutation::Touch), unknown());
    let change = ChangeCall::new(object()).when(Condition::Version(1)).append(fill);
    story.call(change, refused(RefusalKind::ConditionFailed(0)));
    story.accept();
}

#[test]
fn a_refused_change_has_no_effect_and_constrains_nothing_if_it_failed() {
    let mut story = Story::new();
    let first = story.put(10, 1);
    let second = story.fill(10);
    story.call(ChangeCall::new(object()).append(second), refused(RefusalKind::Failed));
    story.call(read(), data(1, &[first]));
    story.accept();
    story.call(read(), data(2, &[first, second]));
    story.reject(Rule::Linearizable);
}

#[test]
fn errors_are_reported_in_the_specified_order() {
    let too_large = Mutation::Truncate(wire::limits::MAX_OBJECT_SIZE + 1);
    let name = |len: usize| Bytes::from(vec![b'n'; len]);
    let long_name = Mutation::RemoveXattr(name(wire::limits::MAX_XATTR_NAME + 1));
    // A limit comes before a condition, and a condition before an op.
    let limit = ChangeCall::new(object()).when(Condition::Exists).op(Mutation::Remove).op(long_name);
    let large = ChangeCall::new(object()).when(Condition::Exists).op(too_large);
    let condition =
        ChangeCall::new(object()).when(Condition::Absent).when(Condition::Exists).op(Mutation::Remove);
    let first_op = ChangeCall::new(object()).op(Mutation::Touch).op(Mutation::Create).op(Mutation::Remove);
    let kinds =
        [RefusalKind::Limit, RefusalKind::ConditionFailed(1), RefusalKind::NoSuchObject, RefusalKind::Exists];
    for (change, right) in [
        (limit, RefusalKind::Limit),
        (large, RefusalKind::Limit),
        (condition, RefusalKind::ConditionFailed(1)),
        (first_op, RefusalKind::Exists),
        (ChangeCall::new(object()).op(Mutation::Remove), RefusalKind::NoSuchObject),
    ] {
        for kind in kinds {
            let mut story = Story::new();
            story.call(change.clone(), refused(kind));
            assert_eq!(story.rules().is_empty(), kind == right, "{change}: {kind:?}");
        }
        let mut story = Story::new();
        story.call(change, changed(1, 0));
        assert!(!story.rules().is_empty());
    }
}

#[test]
fn ops_on_bulk_data_may_be_refused() {
    let is_valid = |pool: &str, len: u64, at: u64, outcome: Outcome| {
        let mut story = Story::new();
        let object: ObjectName = format!("{pool}/a").parse().unwrap();
        let (large, small) = (story.fill(len), story.fill(4096));
        story.call(ChangeCall::new(object).write_full(large).write(at, small), outcome);
        story.rules().is_empty()
    };
    let mut story = Story::new();
    let (large, small) = (story.fill(5 << 20), story.fill(4096));
    let size = 8192 + (5 << 20);
    story.call(ChangeCall::new(object()).write(8192, large).write(8197, small), changed(1, size));
    assert!(story.rules().is_empty(), "data before the first stripe boundary is not bulk data");
    let bad = || refused(RefusalKind::BadRequest);
    for pool in ["p", "single"] {
        // Small data is never refused. Data of more than 4 MiB always is.
        assert!(is_valid(pool, 1 << 20, 5, changed(1, 1 << 20)) && !is_valid(pool, 1 << 20, 5, bad()));
        assert!(is_valid(pool, 3 << 20, 5, changed(1, 3 << 20)) && is_valid(pool, 3 << 20, 5, bad()));
        assert!(!is_valid(pool, 5 << 20, 5, changed(1, 5 << 20)) && is_valid(pool, 5 << 20, 5, bad()));
        assert!(is_valid(pool, 5 << 20, 4096, changed(1, 5 << 20)));
    }
    assert!(is_valid("p", 5 << 20, 4096, bad()), "redundancy may refuse whole blocks");
    assert!(!is_valid("single", 5 << 20, 4096, bad()));
}

#[test]
fn only_a_long_read_during_a_change_fails_because_of_the_change() {
    for (len, has_change, is_valid) in [(u64::MAX, true, true), (4096, true, false), (u64::MAX, false, false)]
    {
        let mut story = Story::new();
        let fill = story.put(3 << 20, 1);
        let call = story.start(1, RangeRead { len, ..read() });
        if has_change {
            story.call(ChangeCall::new(object()).write_full(fill), changed(2, 3 << 20));
        }
        story.end(call, refused(RefusalKind::Changed { wanted: 1, found: 2 }));
        assert_eq!(story.rules().is_empty(), is_valid, "{len} {has_change}");
    }
}

#[test]
fn a_call_must_end_by_its_deadline() {
    let mut story = Story::new();
    story.start(0, Request::Admin("scrub pool p".into()));
    story.reject(Rule::Ends);
    let mut story = Story::new();
    let call = story.start(0, read());
    story.now += 62;
    story.end(call, refused(RefusalKind::Failed));
    story.accept();
    let mut story = Story::new();
    let call = story.start(0, read());
    story.now += 70;
    story.end(call, refused(RefusalKind::Failed));
    story.reject(Rule::Ends);
}

#[test]
fn calls_are_answered_after_the_faults_are_healed() {
    let story = |wait: u64, request: Request, outcome: Outcome| {
        let mut story = Story::new();
        let now = story.tick();
        story.history.healed(now);
        story.now += wait;
        story.call(request, outcome);
        story.rules()
    };
    let change = || ChangeCall::new(object()).op(Mutation::Touch).into();
    assert!(story(10, change(), unknown()).is_empty());
    assert_eq!(story(30, change(), unknown()), [Rule::Answered]);
    assert_eq!(story(30, read().into(), refused(RefusalKind::Failed)), [Rule::Answered]);
    assert_eq!(story(30, list().into(), refused(RefusalKind::Failed)), [Rule::Answered]);
    assert!(story(30, read().into(), refused(RefusalKind::NoSuchObject)).is_empty());
    let admin = || Request::Admin("target in 3".into());
    assert_eq!(story(30, admin(), refused(RefusalKind::Failed)), [Rule::Answered]);
    assert!(story(30, admin(), Outcome::Done).is_empty());
}

#[test]
fn an_object_may_be_unreadable_only_until_all_members_are_in_sync() {
    let mut story = Story::new();
    let first = story.put(10, 1);
    let now = story.tick();
    story.history.maybe_unreadable("p", now);
    story.call(read(), refused(RefusalKind::Damaged));
    story.call(read(), data(1, &[first]));
    story.accept();
    let now = story.tick();
    story.history.readable(now);
    story.tick();
    story.call(read(), refused(RefusalKind::Damaged));
    story.reject(Rule::ExpectedError);
}

#[test]
fn beyond_the_tolerance_errors_are_allowed_but_not_wrong_data() {
    let mut story = Story::new();
    let first = story.put(10, 1);
    story.history.beyond_tolerance("p", Duration::from_secs(3), None);
    story.history.healed(Duration::from_secs(3));
    story.now += 40;
    story.call(read(), refused(RefusalKind::Damaged));
    story.call(read(), refused(RefusalKind::Failed));
    story.call(read(), data(1, &[first]));
    story.accept();
    let other = story.fill(10);
    story.call(read(), data(1, &[other]));
    story.reject(Rule::Linearizable);
    let mut within = Story::new();
    within.put(10, 1);
    within.call(read(), refused(RefusalKind::Damaged));
    within.reject(Rule::ExpectedError);
}

#[test]
fn a_full_target_refuses_only_changes() {
    let mut story = Story::new();
    story.call(ChangeCall::new(object()).op(Mutation::Touch), refused(RefusalKind::NoSpace));
    story.reject(Rule::ExpectedError);
    let options = |size| {
        let space = Some(TargetSpace { data: size, index: size });
        CheckOptions { space, ..CheckOptions::default() }
    };
    assert_eq!(story.history.check(&options(1 << 20)).len(), 1, "one change cannot fill this target");
    assert!(story.history.check(&options(1000)).is_empty());
    let mut filled = story.history.clone();
    filled.fill_targets(Duration::ZERO);
    assert!(filled.check(&options(1 << 20)).is_empty());
    filled.healed(Duration::ZERO);
    let late = Duration::from_secs(100);
    let call = filled.start(ClientId(1), late, None, ChangeCall::new(object()).op(Mutation::Touch));
    filled.end(call, late, refused(RefusalKind::NoSpace));
    assert_eq!(filled.check(&options(1 << 20)).len(), 1, "the target is not full after the recovery");
    story.call(read(), refused(RefusalKind::NoSpace));
    assert_eq!(story.history.check(&options(1000)).len(), 1);
}

#[test]
fn a_drive_that_loses_changes_must_not_invent_data() {
    let mut story = Story::new();
    story.put(1000, 1);
    let mut lost = story.clone();
    story.history.may_lose_changes("p", Duration::from_secs(100));
    story.call(read(), refused(RefusalKind::NoSuchObject));
    story.accept();
    // The loss was shown before it was possible.
    lost.call(read(), refused(RefusalKind::NoSuchObject));
    lost.history.may_lose_changes("p", Duration::from_secs(100));
    lost.reject(Rule::Linearizable);
    let other = story.history.new_fill(1000);
    story.call(read(), data(1, &[other]));
    story.reject(Rule::DataOrigin);
}

#[test]
fn a_client_may_exceed_a_deadline_while_it_is_stopped() {
    let mut history = History::new();
    let at = Duration::from_secs;
    for is_resumed in [true, false] {
        let call = history.start(ClientId(0), at(0), Some(at(60)), read());
        if is_resumed {
            history.resume(ClientId(0), at(100));
        }
        history.end(call, at(101), refused(RefusalKind::Failed));
        let violations = history.check(&CheckOptions::default());
        assert_eq!(violations.iter().any(|v| v.rule == Rule::Ends), !is_resumed);
    }
}

#[test]
fn calls_on_a_removed_pool_are_not_checked() {
    let mut story = Story::new();
    story.put(10, 1);
    let now = story.tick();
    story.history.remove_pool("p", now);
    story.call(read(), refused(RefusalKind::NoSuchPool));
    story.call(list(), refused(RefusalKind::NoSuchPool));
    story.accept();
    let mut story = Story::new();
    story.call(read(), refused(RefusalKind::NoSuchPool));
    story.reject(Rule::ExpectedError);
}

#[test]
fn a_listing_contains_the_objects_that_exist_throughout() {
    let create = || ChangeCall::new(object()).op(Mutation::Create);
    for (names, during, after) in [(&["a"][..], true, true), (&[], true, false), (&["a", "a"], false, false)]
    {
        let mut story = Story::new();
        let call = story.start(1, list());
        story.call(create(), changed(1, 0));
        story.end(call, listed(names));
        assert_eq!(story.rules().is_empty(), during, "{names:?}");
        let mut story = Story::new();
        story.call(create(), changed(1, 0));
        story.call(list(), listed(names));
        assert_eq!(story.rules().is_empty(), after, "{names:?}");
    }
    let mut twice = Story::new();
    twice.call(create(), changed(1, 0));
    let call = twice.start(1, list());
    twice.call(ChangeCall::new(object()).op(Mutation::Remove), changed(2, 0));
    twice.call(create(), changed(3, 0));
    twice.end(call, listed(&["a", "a"]));
    twice.accept();
}

#[test]
fn an_ordered_listing_contains_names_in_order() {
    for (names, is_ordered, is_valid) in
        [(["a", "b"], true, true), (["b", "a"], false, true), (["b", "a"], true, false)]
    {
        let mut story = Story::new();
        for name in ["p/a", "p/b"] {
            story.call(ChangeCall::new(name.parse().unwrap()).op(Mutation::Create), changed(1, 0));
        }
        story.call(ListCall { is_ordered, ..list() }, listed(&names));
        let expected = if is_valid { &[][..] } else { &[Rule::Listing] };
        assert_eq!(story.rules(), expected, "{names:?}, in order: {is_ordered}");
    }
}

#[test]
fn a_page_of_an_omap_may_be_short_but_not_empty() {
    let entry = |key: &str| (Bytes::from(key.to_owned()), Bytes::from("v"));
    for (keys, more, is_valid) in [
        (&["a", "b"][..], true, true),
        (&["a", "b", "c"], false, true),
        (&["a", "b", "c"], true, true),
        (&["a", "b"], false, false),
        (&["a", "c"], true, false),
        (&[], true, false),
    ] {
        let mut story = Story::new();
        let entries = ["a", "b", "c"].map(entry).to_vec();
        story.call(ChangeCall::new(object()).op(Mutation::OmapSet(entries)), changed(1, 0));
        let range = QueryOp::OmapRange { from: Bytes::new(), to: None, limit: 3 };
        let query = QueryCall { object: object(), conditions: vec![Condition::Exists], ops: vec![range] };
        let entries = keys.iter().map(|key| entry(key)).collect();
        story.call(query, Outcome::Queried(vec![QueryAnswer::Omap { entries, more }]));
        assert_eq!(story.rules().is_empty(), is_valid, "{keys:?} {more}");
    }
}

#[test]
fn an_answer_must_be_of_the_kind_of_the_request() {
    let mut story = Story::new();
    story.call(read(), Outcome::Done);
    story.reject(Rule::ExpectedAnswer);
}

#[test]
fn the_report_names_the_calls_and_explains_the_bytes() {
    let mut story = Story::new();
    let first = story.put(8192, 3);
    story.history.note(Duration::from_secs(3), "target 2 fails");
    let second = story.put(8192, 7);
    let mut mixed = Seen::default();
    mixed.push(4096, DataOrigin::Fill { id: second.id, at: 0 });
    mixed.push(4096, DataOrigin::Fill { id: first.id, at: 4096 });
    let answer = ReadAnswer { version: Some(7), object_size: Some(8192), data: mixed };
    story.call(read(), Outcome::Read(answer));
    let violations = story.history.check(&CheckOptions::default());
    let report = violations[0].to_string();
    for part in [
        "object p/a",
        "put 8192 bytes of fill 2",
        "at byte 4096: expected fill 2 from its byte 4096, seen fill 1 from its byte 4096",
        "fill 1 is the data of call #0",
        "target 2 fails",
    ] {
        assert!(report.contains(part), "{part:?} is missing in: {report}");
    }
    assert!(violations[0].calls.contains(&CallId(2)));
}
