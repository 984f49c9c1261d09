//! Tests of decisions about single groups.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::decision::{Decision, GroupEvidence, MemberState, MemberVerdict, Undecided, WitnessEntry};
use super::record::{ChangeId, GroupRecord, MemberRecord, Standing};
use super::terms::LOSS_STEP;

fn uuid(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

/// A record of members with the UUIDs 1, 2, …, of which these are in sync.
fn record(term: u64, members: u128, in_sync: &[u128]) -> GroupRecord {
    let standing = |n| if in_sync.contains(&n) { Standing::InSync } else { Standing::Blank };
    let members = (1..=members).map(|n| MemberRecord { target: uuid(n), standing: standing(n) });
    GroupRecord { term, members: members.collect(), undone: BTreeSet::new() }
}

fn state(target: u128, record: GroupRecord) -> MemberState {
    let (settled, changes) = (ChangeId::default(), BTreeSet::new());
    MemberState { target: uuid(target), record, proposal: None, settled, changes }
}

fn decide(
    needed: usize,
    states: &[MemberState],
    witness: Option<WitnessEntry>,
    lost: &[u128],
) -> Result<Decision, Undecided> {
    with(needed, states, witness, (&[], lost), |evidence| evidence.decide())
}

/// Calls `f` with evidence about a group. The targets `missing` are missing, and the operator has accepted
/// the loss of the targets `lost`.
fn with<T>(
    needed: usize,
    states: &[MemberState],
    witness: Option<WitnessEntry>,
    (missing, lost): (&[u128], &[u128]),
    f: impl FnOnce(&GroupEvidence<'_>) -> T,
) -> T {
    let (refused, is_lost) = (BTreeSet::new(), |target: &Uuid| lost.contains(&target.as_u128()));
    let missing: Vec<Uuid> = missing.iter().map(|n| uuid(*n)).collect();
    let (witness, refused, is_lost, missing) = (witness.as_ref(), &refused, &is_lost, &missing[..]);
    f(&GroupEvidence { needed, states, witness, refused, is_lost, missing })
}

fn entry(term: u64, in_sync: &[u128]) -> Option<WitnessEntry> {
    Some(WitnessEntry { term, in_sync: in_sync.iter().map(|n| uuid(*n)).collect() })
}

/// Makes a member of a record stale: it was in sync last in a term.
fn stale(mut record: GroupRecord, member: usize, term: u64) -> GroupRecord {
    let settled = ChangeId::default();
    record.members[member - 1].standing = Standing::Stale { term, settled };
    record
}

fn continuing(decision: &Decision) -> Vec<bool> {
    decision.verdicts.iter().map(|v| matches!(v, MemberVerdict::Continues { .. })).collect()
}

#[test]
fn an_older_record_counts_once_the_loss_of_all_newer_members_is_accepted() {
    // Member 1 has continued alone. Member 2 is being rebuilt, and member 3 has been missing.
    let states = [state(2, record(5, 3, &[1])), state(3, record(3, 3, &[1, 2, 3]))];
    let witness = || Some(WitnessEntry { term: 5, in_sync: [uuid(1)].into() });
    let waits = decide(1, &states, witness(), &[]);
    assert_eq!(waits, Err(Undecided::TooFew { there: 0, missing: vec![uuid(1)] }));
    let decision = decide(1, &states, witness(), &[1]).unwrap();
    assert!(decision.on_word && decision.record.term == 3);
    assert_eq!(continuing(&decision), [false, false, true]);
    // Without the witness, the word is needed as well.
    assert!(decide(1, &states, None, &[]).is_err());
    assert!(decide(1, &states, None, &[1]).unwrap().on_word);
}

#[test]
fn a_mirror_continues_with_a_member_that_was_being_rebuilt_once_the_loss_of_the_newest_is_accepted() {
    let settled = ChangeId::default();
    let stale = |term, n: usize, stale: &[(usize, u64)]| {
        let mut record = record(term, n as u128, &[1]);
        for &(n, term) in stale {
            record.members[n - 1].standing = Standing::Stale { term, settled };
        }
        record
    };
    let witness = || Some(WitnessEntry { term: 5, in_sync: [uuid(1)].into() });
    // The rebuild of member 2 has begun, so it has the record that calls it stale.
    let states = [state(2, stale(5, 2, &[(2, 4)]))];
    assert!(decide(1, &states, witness(), &[]).is_err());
    let decision = decide(1, &states, witness(), &[1]).unwrap();
    assert!(decision.on_word && decision.record == states[0].record);
    assert_eq!(continuing(&decision), [false, true]);
    // Fragments of an erasure code do not fit together.
    assert!(decide(2, &states, witness(), &[1]).is_err());
    // Member 3 was in sync more recently than member 2, and then less recently.
    for (last, expected) in [(4, [false, false, true]), (3, [false, true, false]), (2, [false, true, false])]
    {
        let states = [state(2, stale(5, 3, &[(2, 3), (3, last)])), state(3, record(last, 3, &[1, 3]))];
        let decision = decide(1, &states, witness(), &[1]).unwrap();
        assert_eq!(continuing(&decision), expected, "{last}");
    }
    // Two members that were being rebuilt have different content, so only one of them continues.
    let both = stale(5, 3, &[(2, 3), (3, 4)]);
    let decision = decide(1, &[state(2, both.clone()), state(3, both)], witness(), &[1]).unwrap();
    assert_eq!(continuing(&decision), [false, false, true]);
}

#[test]
fn an_erasure_code_continues_with_stale_members_once_the_loss_of_the_others_is_accepted() {
    // Members 1 to 4 have continued without members 5 and 6. Then member 1 is lost.
    let settled = ChangeId { term: 3, number: 9 };
    let mut newest = record(5, 6, &[1, 2, 3, 4]);
    for at in [4, 5] {
        newest.members[at].standing = Standing::Stale { term: 3, settled };
    }
    let old =
        |n, last: ChangeId| MemberState { settled: last, ..state(n, record(3, 6, &[1, 2, 3, 4, 5, 6])) };
    let salvage = |states: &[MemberState], lost: &[u128]| {
        let (refused, is_lost) = (BTreeSet::new(), |target: &Uuid| lost.contains(&target.as_u128()));
        let entry = WitnessEntry { term: 5, in_sync: [1, 2, 3, 4].map(uuid).into() };
        let witness = Some(&entry);
        let is_missing = |uuid: &Uuid| !states.iter().any(|state| state.target == *uuid);
        let missing: Vec<Uuid> = (1..=6).map(uuid).filter(is_missing).collect();
        let (refused, is_lost, missing) = (&refused, &is_lost, &missing[..]);
        let evidence = GroupEvidence { needed: 4, states, witness, refused, is_lost, missing };
        assert!(evidence.decide().is_err());
        evidence.salvage().map(|salvage| (salvage.in_sync, salvage.stale, salvage.others))
    };
    let mut states: Vec<MemberState> = [2, 3, 4].map(|n| state(n, newest.clone())).into();
    states.extend([old(5, settled), old(6, settled)]);
    assert_eq!(salvage(&states, &[]), None);
    assert_eq!(salvage(&states, &[1]), Some((vec![1, 2, 3], vec![4, 5], vec![])));
    // Member 6 has gone back, and member 5 suffices.
    states[4] = old(6, ChangeId { term: 3, number: 8 });
    assert_eq!(salvage(&states, &[1]), Some((vec![1, 2, 3], vec![4], vec![])));
    // Member 5 is missing, so all objects of member 6 must be compared.
    let without_5 = [&states[..3], &states[4..]].concat();
    assert_eq!(salvage(&without_5, &[1, 5]), Some((vec![1, 2, 3], vec![], vec![(5, uuid(6))])));
    assert_eq!(salvage(&without_5, &[1]), None, "member 5 is not lost");
    assert_eq!(salvage(&states[..3], &[1]), None);
    assert_eq!(salvage(&states[1..], &[1]), None, "member 2 is missing, but not lost");
    assert_eq!(salvage(&states[1..], &[1, 2]), Some((vec![2, 3], vec![4], vec![(5, uuid(6))])));
    assert_eq!(salvage(&states[1..4], &[1, 2]), None, "three members are too few");
    // Member 4 has gone back, and the operator must accept the loss of its changes, too.
    let settled = ChangeId { term: 5, number: 12 };
    states[4] = old(6, settled);
    states[..2].iter_mut().for_each(|state| state.settled = settled);
    assert_eq!(salvage(&states, &[1]), None);
    assert_eq!(salvage(&states, &[1, 4]), Some((vec![1, 2], vec![4, 5], vec![])));
    // A stale member that is missing is awaited.
    assert_eq!(salvage(&states[..4], &[1, 4]), None);
    // No member shows which objects have changed.
    assert_eq!(salvage(&states[3..], &[1, 2, 3, 4]), None);
}

#[test]
fn a_member_that_went_back_continues_once_the_loss_of_its_changes_is_accepted() {
    let witness = || Some(WitnessEntry { term: 5, in_sync: [uuid(1)].into() });
    let states = [state(1, record(4, 2, &[1, 2])), state(2, record(4, 2, &[1, 2]))];
    let refused = decide(1, &states, witness(), &[]);
    assert_eq!(refused, Err(Undecided::Outdated { ahead: vec![uuid(1)] }));
    let decision = decide(1, &states, witness(), &[1]).unwrap();
    assert!(decision.on_word);
    assert_eq!(continuing(&decision), [true, true]);
}

#[test]
fn the_loss_of_too_few_targets_changes_nothing() {
    let all = [1, 2, 3];
    let states = [state(3, record(3, 3, &all))];
    let witness = || Some(WitnessEntry { term: 5, in_sync: [uuid(1), uuid(2)].into() });
    assert!(matches!(decide(1, &states, witness(), &[1]), Err(Undecided::Outdated { .. })));
    assert!(decide(1, &states, witness(), &[1, 2]).unwrap().on_word);
    // Two members are needed, and only one is left.
    let refused = decide(2, &states, None, &[1, 2]);
    assert!(matches!(refused, Err(Undecided::NoData { .. })), "{refused:?}");
}

#[test]
fn a_group_gives_up_its_objects_only_if_all_missing_targets_are_lost_and_too_few_members_have_objects() {
    let all = [1, 2, 3];
    let gives_up =
        |states: &[MemberState], witness: Option<WitnessEntry>, missing: &[u128], lost: &[u128]| {
            let (refused, is_lost) = (BTreeSet::new(), |target: &Uuid| lost.contains(&target.as_u128()));
            let missing: Vec<Uuid> = missing.iter().map(|n| uuid(*n)).collect();
            let (witness, refused, is_lost, missing) = (witness.as_ref(), &refused, &is_lost, &missing[..]);
            let evidence = GroupEvidence { needed: 2, states, witness, refused, is_lost, missing };
            assert!(evidence.decide().is_err());
            evidence.is_lost_for_good()
        };
    let witness = |in_sync: &[u128]| {
        Some(WitnessEntry { term: 3, in_sync: in_sync.iter().map(|n| uuid(*n)).collect() })
    };
    // One of two fragments is left.
    let one = [state(1, record(3, 3, &all))];
    assert!(gives_up(&one, witness(&all), &[2, 3], &[2, 3]));
    assert!(gives_up(&one, None, &[2, 3], &[2, 3]));
    assert!(!gives_up(&one, witness(&all), &[2, 3], &[2]), "target 3 may return");
    assert!(!gives_up(&one, witness(&all), &[2, 3, 4], &[2, 3]), "target 4 may have objects");
    assert!(!gives_up(&one, witness(&all), &[2, 3], &[]));
    // A former member has a fragment, too.
    let mut before = record(2, 3, &all);
    before.members[1].target = uuid(4);
    let former = [state(1, record(3, 3, &all)), state(4, before)];
    assert!(!gives_up(&former, witness(&all), &[2, 3], &[2, 3]));
    // A member that was being rebuilt has none.
    let blank = [state(2, record(3, 3, &[1, 3])), state(4, record(3, 3, &[1, 3]))];
    assert!(gives_up(&blank, witness(&[1, 3]), &[1, 3], &[1, 3]));
    assert!(!gives_up(&blank, witness(&[1, 3]), &[1, 3], &[1]));
    // No target has anything.
    assert!(gives_up(&[], witness(&[1, 3]), &[1, 3], &[1, 3]));
    assert!(!gives_up(&[], witness(&[1, 3]), &[1, 2, 3], &[1, 3]));
    assert!(gives_up(&[], None, &[1, 3], &[1, 3]));
    assert!(!gives_up(&[], None, &[1, 3], &[1]));
    assert!(!gives_up(&[], None, &[], &[]), "the operator has accepted nothing");
    // The group has given up its objects before, according to the witness.
    let given_up = [state(2, record(3, 3, &[]))];
    assert!(gives_up(&given_up, witness(&[]), &[1, 3], &[]));
    let old = [&given_up[..], &[state(1, record(2, 3, &[1])), state(3, record(1, 3, &[3]))]].concat();
    assert!(gives_up(&old, witness(&[]), &[], &[]), "two members have old objects that do not fit");
    assert!(!gives_up(&given_up, None, &[1, 3], &[]), "a later record may be in force");
}

#[test]
fn a_proposal_on_the_operators_word_does_not_show_that_the_witnessed_record_was_not_in_force() {
    // Member 1 went back and continued on the operator's word, until a crash. Member 2 is missing, and
    // member 3 was being rebuilt.
    let old = stale(record(3, 3, &[1, 2]), 3, 2);
    let proposal = |term| MemberState { proposal: Some(record(term, 3, &[1])), ..state(1, old.clone()) };
    let decide = |term, lost: &[u128]| {
        let states = [proposal(term), state(3, record(5, 3, &[1, 2]))];
        with(1, &states, entry(5, &[1, 2]), (&[2], lost), |evidence| evidence.decide())
    };
    assert!(decide(3 + LOSS_STEP, &[]).is_err());
    assert!(decide(3 + LOSS_STEP, &[1, 2]).unwrap().on_word);
    // An ordinary proposal follows only if the witnessed record was not in force.
    assert!(!decide(6, &[]).unwrap().on_word);
}

#[test]
fn a_mirror_waits_for_former_members_unless_their_loss_is_accepted() {
    // Member 4 was in sync until the operator took it out of use. Then member 1 was lost, and member 3 is
    // being rebuilt.
    let states = [state(3, stale(record(5, 3, &[1]), 3, 3))];
    let decide = |states: &[MemberState], lost: &[u128]| {
        with(1, states, entry(5, &[1]), (&[1, 4], lost), |evidence| evidence.decide())
    };
    assert_eq!(decide(&states, &[1]), Err(Undecided::NoData { missing: vec![uuid(4)] }));
    assert!(decide(&states, &[1, 4]).unwrap().on_word);
    // No target has the witnessed record.
    let states = [state(3, record(3, 3, &[3]))];
    assert_eq!(decide(&states, &[1]), Err(Undecided::NoData { missing: vec![uuid(4)] }));
    assert!(decide(&states, &[1, 4]).unwrap().on_word);
}

#[test]
fn a_member_without_objects_can_be_given_up_like_a_missing_one() {
    // Member 1 is lost, and member 4 was to be rebuilt. Member 3 has lost everything.
    let mut witnessed = record(5, 2, &[1]);
    witnessed.members[1].target = uuid(4);
    let mut old = record(2, 2, &[1, 2]);
    old.members[0].target = uuid(3);
    let states = [state(2, old), state(4, witnessed)];
    let decide = |lost: &[u128]| with(1, &states, entry(5, &[1]), (&[1], lost), |evidence| evidence.decide());
    assert_eq!(decide(&[1]), Err(Undecided::NoData { missing: vec![uuid(3)] }));
    assert!(decide(&[1, 3]).unwrap().on_word);
    // A member that was to be rebuilt has a record between these two.
    let mut between = record(3, 2, &[1]);
    between.members[1].target = uuid(5);
    let states = [&states[..], &[state(5, between)]].concat();
    let decide = |lost: &[u128]| with(1, &states, entry(5, &[1]), (&[1], lost), |evidence| evidence.decide());
    assert_eq!(decide(&[1]), Err(Undecided::NoData { missing: vec![uuid(3)] }));
    assert!(decide(&[1, 3]).unwrap().on_word);
}

#[test]
fn a_mirror_that_has_given_up_its_objects_continues_with_a_copy_that_returns() {
    // No other target is awaited.
    let states = [state(1, record(3, 2, &[1, 2])), state(2, record(5, 2, &[]))];
    let decision = with(1, &states, entry(5, &[]), (&[3], &[]), |evidence| evidence.decide()).unwrap();
    assert!(decision.on_word && continuing(&decision) == [true, false]);
}

#[test]
fn the_leader_of_a_salvage_is_the_member_that_was_in_sync_last() {
    // The rebuild of member 1 had begun, so it has the newest record. Member 2 was in sync later.
    let states = [state(1, stale(record(6, 4, &[3, 4]), 1, 2)), state(2, record(4, 4, &[2, 3, 4]))];
    let salvage = with(2, &states, entry(6, &[3, 4]), (&[3, 4], &[3, 4]), |evidence| evidence.salvage());
    let salvage = salvage.unwrap();
    assert!(salvage.has_leader);
    assert_eq!((salvage.record.term, salvage.in_sync, salvage.others), (4, vec![1], vec![(0, uuid(1))]));
}

#[test]
fn a_target_that_went_back_is_not_current_while_an_older_record_counts_on_the_operators_word() {
    let states = [state(1, record(3, 2, &[1, 2]))];
    let is_current = |term, lost: &[u128]| {
        with(1, &states, entry(term, &[1]), (&[2], lost), |evidence| evidence.is_current(&uuid(1)))
    };
    assert!(!is_current(5, &[1, 2]));
    assert!(is_current(2, &[]));
}
