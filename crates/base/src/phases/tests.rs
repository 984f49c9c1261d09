use std::time::Duration;

use proptest::prelude::*;

use super::union::MAX_SPANS;
use super::*;

/// Maximum time in the model, in ns.
const LONGEST: u64 = 300;

fn phase() -> impl Strategy<Value = Phase> {
    prop_oneof![Just(Phase::Host), Just(Phase::Dma), Just(Phase::DmaWait)]
}

fn clock_with(intervals: &[(Phase, u64, u64)]) -> (Clock, Instant) {
    let started = Instant::now();
    let clock = Clock::started_at(started);
    let at = |ns| started + Duration::from_nanos(ns);
    for (phase, from, to) in intervals {
        clock.record(*phase, at(*from), at(*to));
    }
    (clock, started)
}

/// Computes the breakdown by checking every nanosecond.
fn model(intervals: &[(Phase, u64, u64)], total_ns: u64) -> Breakdown {
    let mut sum = Breakdown { total_ns, ..Breakdown::default() };
    for ns in 0..total_ns {
        let during =
            |wanted: Phase| intervals.iter().any(|(p, from, to)| *p == wanted && (*from..*to).contains(&ns));
        let phase = [Phase::Dma, Phase::Host, Phase::DmaWait].into_iter().find(|p| during(*p));
        *match phase {
            Some(Phase::Dma) => &mut sum.dma_ns,
            Some(Phase::Host) => &mut sum.host_ns,
            Some(Phase::DmaWait) => &mut sum.dma_wait_ns,
            None => &mut sum.others_ns,
        } += 1;
    }
    sum
}

fn adds_up(b: &Breakdown) -> bool {
    b.host_ns + b.dma_ns + b.dma_wait_ns + b.others_ns == b.total_ns
}

proptest! {
    #[test]
    fn the_breakdown_equals_a_model_that_checks_every_nanosecond(
        intervals in proptest::collection::vec((phase(), 0..LONGEST, 0..LONGEST), 0..40),
        total in 0..LONGEST,
    ) {
        let (clock, started) = clock_with(&intervals);
        let found = clock.finish_at(started + Duration::from_nanos(total));
        prop_assert_eq!(found, model(&intervals, total));
        prop_assert!(adds_up(&found));
    }

    #[test]
    fn any_number_of_intervals_needs_bounded_memory_and_none_is_lost(
        intervals in proptest::collection::vec((phase(), 0..100_000u64, 1..50u64), 0..600),
    ) {
        let intervals: Vec<_> = intervals.into_iter().map(|(p, from, len)| (p, from, from + len)).collect();
        let (clock, started) = clock_with(&intervals);
        {
            let taken = clock.0.taken.lock().unwrap();
            for union in [&taken.host, &taken.dma, &taken.dma_wait] {
                prop_assert!(union.len() <= MAX_SPANS);
            }
        }
        let found = clock.finish_at(started + Duration::from_nanos(100_050));
        prop_assert!(adds_up(&found));
        let exact = |phase| {
            let mut all = Union::default();
            let of_phase = intervals.iter().filter(|(p, ..)| *p == phase);
            of_phase.for_each(|(_, start, end)| all.add(Span { start: *start, end: *end }));
            all
        };
        prop_assert!(found.dma_ns >= exact(Phase::Dma).covered());
        if exact(Phase::Dma).len() <= MAX_SPANS {
            prop_assert_eq!(found.dma_ns, exact(Phase::Dma).covered());
        }
    }
}

#[test]
fn time_before_or_after_the_request_does_not_count() {
    let arrived = Instant::now() + Duration::from_secs(10);
    let clock = Clock::started_at(arrived);
    let ms = Duration::from_millis;
    clock.record(Phase::Host, arrived - ms(5), arrived + ms(1));
    clock.record(Phase::DmaWait, arrived + ms(8), arrived + ms(20));
    clock.record(Phase::Dma, arrived + ms(3), arrived + ms(2));
    let found = clock.finish_at(arrived + ms(9));
    let ns = |ms: u64| ms * 1_000_000;
    assert_eq!((found.host_ns, found.dma_wait_ns, found.dma_ns), (ns(1), ns(1), 0));
    assert_eq!((found.others_ns, found.total_ns), (ns(7), ns(9)));
}

#[tokio::test]
async fn a_future_has_its_own_clock_while_it_is_polled() {
    fn is(clock: &Clock) -> bool {
        current().is_some_and(|found| Arc::ptr_eq(&found.0, &clock.0))
    }
    assert!(current().is_none());
    let (one, two) = (Clock::start(), Clock::start());
    let check = async |clock: &Clock| {
        for _ in 0..3 {
            assert!(is(clock));
            tokio::task::yield_now().await;
        }
        tokio::spawn(async { assert!(current().is_none(), "spawned tasks do not inherit the clock") })
            .await
            .unwrap();
        assert!(is(clock));
        drop(current().unwrap().begin(Phase::Host));
    };
    let watching = async {
        for _ in 0..3 {
            assert!(current().is_none());
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(one.scope(check(&one)), two.scope(check(&two)), watching);
    assert!(current().is_none());
    assert!(one.finish().host_ns > 0 && adds_up(&two.finish()));
}

#[test]
fn a_clock_can_be_used_from_another_thread() {
    let clock = Clock::start();
    let handle = clock.clone();
    let lasting = clock.begin(Phase::Dma);
    std::thread::spawn(move || {
        drop(lasting);
        let now = Instant::now();
        handle.record(Phase::Host, now, now + Duration::from_nanos(1));
    })
    .join()
    .unwrap();
    assert!(clock.finish().dma_ns > 0);
}
