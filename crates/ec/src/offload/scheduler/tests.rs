//! Tests the scheduler through its public interface.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use tokio::time::advance;
use wire::CodingSent;

use super::*;

const MB: u64 = 1_000_000;
const MS: Duration = Duration::from_millis(1);

fn scheduler(mode: &str, slots: usize, queue: usize) -> Scheduler {
    let capacity = Capacity { slots, lanes: 1 };
    let (mode, cool_down) = (mode.parse().unwrap(), 100 * MS);
    Scheduler::new(SchedulerConfig {
        mode,
        queue,
        host: capacity,
        offload: capacity,
        cool_down,
        ..SchedulerConfig::default()
    })
}

async fn place_of_next(scheduler: &Scheduler) -> CodingPlace {
    let slot = scheduler.admit(MB).await.unwrap();
    let place = slot.place();
    slot.done();
    place
}

async fn letters(scheduler: &Scheduler, count: usize) -> String {
    let mut text = String::new();
    for _ in 0..count {
        text.push(if place_of_next(scheduler).await == CodingPlace::Host { 'h' } else { 'o' });
    }
    text
}

/// Returns true if a future is not ready yet.
async fn waits<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx).is_pending())).await
}

#[tokio::test(start_paused = true)]
async fn a_task_of_one_place_never_waits() {
    let scheduler = scheduler("async", 2, 8);
    let at = |place| scheduler.admit_at(place, MB);
    let first = at(CodingPlace::Offload).unwrap();
    let second = scheduler.admit(MB).await.unwrap();
    assert_eq!((first.place(), second.place()), (CodingPlace::Offload, CodingPlace::Offload));
    assert!(at(CodingPlace::Offload).is_none(), "all slots of the place are taken");
    assert!(at(CodingPlace::Host).is_some(), "the other place is free");
    let mut third = pin!(scheduler.admit(MB));
    assert!(waits(&mut third).await);
    assert!(at(CodingPlace::Host).is_some(), "a task is waiting, but not for this place");
    drop(first);
    third.await.unwrap().done();
    second.failed("broken");
    assert!(at(CodingPlace::Offload).is_none(), "the place has failed");
    advance(200 * MS).await;
    let probe = at(CodingPlace::Offload).expect("such a task may be the probe");
    assert!(at(CodingPlace::Offload).is_none(), "the place is being probed");
    let known = scheduler.snapshot().offload.us_per_task;
    probe.done();
    assert!(at(CodingPlace::Offload).is_some());
    let after = scheduler.snapshot();
    assert_eq!((after.offload.sent.only, after.host.sent.only), (3, 2));
    assert_eq!(after.offload.us_per_task, known, "no time was learnt");
}

#[tokio::test(start_paused = true)]
async fn the_mode_chooses_the_coding_place_unless_the_host_is_busy() {
    let scheduler = scheduler("latency-sensitive", 4, 8);
    for (mode, calm) in [("latency-sensitive", "hhhh"), ("async", "oooo"), ("hybrid:3:1", "hhho")] {
        scheduler.set_mode(mode.parse().unwrap());
        assert_eq!(letters(&scheduler, 4).await, calm);
        scheduler.set_host_busy(true);
        assert_eq!(letters(&scheduler, 4).await, "oooo");
        scheduler.set_host_busy(false);
        assert_eq!(letters(&scheduler, 4).await, calm);
    }
    scheduler.set_mode(CodingMode::Auto);
    scheduler.set_host_busy(true);
    assert_eq!(letters(&scheduler, 4).await, "oooo");
    let snapshot = scheduler.snapshot();
    assert_eq!(snapshot.offload.sent, CodingSent { busy: 16, mode: 8 + 2, ..CodingSent::default() });
    assert_eq!((snapshot.host.sent.total(), snapshot.alpha, snapshot.beta), (14, 14, 26));
    assert!(snapshot.host_busy && snapshot.mode == CodingMode::Auto);
}

#[tokio::test(start_paused = true)]
async fn tasks_wait_in_fifo_order_and_a_full_queue_refuses_further_tasks() {
    let scheduler = scheduler("latency-sensitive", 1, 2);
    let slot = scheduler.admit(MB).await.unwrap();
    let mut first = pin!(scheduler.admit(2 * MB));
    let mut second = pin!(scheduler.admit(3 * MB));
    assert!(waits(&mut first).await && waits(&mut second).await);
    assert_eq!(scheduler.admit(MB).await.unwrap_err(), TaskRefused::QueueFull { waiting: 2 });
    let snapshot = scheduler.snapshot();
    assert_eq!((snapshot.queued, snapshot.queued_bytes, snapshot.refused), (2, 5 * MB, 1));
    assert_eq!((snapshot.host.in_service, snapshot.offload.in_service), (1, 0));
    slot.done();
    assert!(waits(&mut second).await);
    let slot = first.await.unwrap();
    assert!(waits(&mut second).await);
    drop(slot);
    assert_eq!(second.await.unwrap().place(), CodingPlace::Host);
    assert_eq!(scheduler.snapshot().queued, 0);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_leaves_neither_a_queued_task_nor_a_slot() {
    let scheduler = scheduler("latency-sensitive", 1, 8);
    let slot = scheduler.admit(MB).await.unwrap();
    {
        let mut waiting = Box::pin(scheduler.admit(MB));
        assert!(waits(&mut waiting).await);
        let mut granted = Box::pin(scheduler.admit(MB));
        assert!(waits(&mut granted).await);
        drop(waiting);
        assert_eq!(scheduler.snapshot().queued, 1);
        // The slot is granted, but the caller is dropped before it polls the future.
        slot.done();
        assert_eq!(scheduler.snapshot().host.in_service, 1);
    }
    assert_eq!((scheduler.snapshot().host.in_service, scheduler.snapshot().queued), (0, 0));
    assert_eq!(place_of_next(&scheduler).await, CodingPlace::Host);
}

#[tokio::test(start_paused = true)]
async fn a_change_of_mode_or_load_starts_waiting_tasks() {
    let scheduler = scheduler("latency-sensitive", 1, 8);
    let _host = scheduler.admit(MB).await.unwrap();
    let mut waiting = pin!(scheduler.admit(MB));
    assert!(waits(&mut waiting).await);
    scheduler.set_mode(CodingMode::Async);
    let offload = waiting.await.unwrap();
    assert_eq!(offload.place(), CodingPlace::Offload);
    drop(offload);
    scheduler.set_mode(CodingMode::LatencySensitive);
    let mut waiting = pin!(scheduler.admit(MB));
    assert!(waits(&mut waiting).await);
    scheduler.set_host_busy(true);
    assert_eq!(waiting.await.unwrap().place(), CodingPlace::Offload);
}

#[tokio::test(start_paused = true)]
async fn a_failed_coding_place_is_avoided_and_then_probed_by_one_task() {
    let scheduler = scheduler("async", 4, 8);
    let late = scheduler.admit(MB).await.unwrap();
    scheduler.admit(MB).await.unwrap().failed("the device is gone");
    late.failed("gone as well");
    scheduler.set_host_busy(true);
    assert_eq!(letters(&scheduler, 3).await, "hhh", "a failed DPU is not used, even though the host is busy");
    scheduler.set_host_busy(false);
    advance(101 * MS).await;
    let probe = scheduler.admit(MB).await.unwrap();
    assert_eq!(probe.place(), CodingPlace::Offload);
    assert_eq!(letters(&scheduler, 2).await, "hh", "one probe at a time");
    drop(probe);
    let probe = scheduler.admit(MB).await.unwrap();
    assert_eq!(probe.place(), CodingPlace::Offload, "the previous probe was dropped without a report");
    probe.failed("still gone");
    assert_eq!(letters(&scheduler, 2).await, "hh");
    advance(101 * MS).await;
    assert_eq!(letters(&scheduler, 3).await, "ooo");
    let snapshot = scheduler.snapshot();
    let health = snapshot.offload.health;
    assert_eq!((health.state, health.failures), (wire::OffloadState::Active, 1));
    assert_eq!((health.failed_probes, health.recoveries), (1, 1));
    assert_eq!(health.last_failure.as_deref(), Some("still gone"));
    assert_eq!(snapshot.host.sent, CodingSent { cool_down: 7, ..CodingSent::default() });
    assert_eq!(snapshot.offload.sent, CodingSent { mode: 4, probe: 3, ..CodingSent::default() });
}

#[tokio::test(start_paused = true)]
async fn tasks_run_on_the_host_while_both_coding_places_are_down() {
    let scheduler = scheduler("async", 4, 8);
    scheduler.admit(MB).await.unwrap().failed("no device");
    let slot = scheduler.admit(MB).await.unwrap();
    assert_eq!(slot.place(), CodingPlace::Host);
    slot.failed("no host either");
    assert_eq!(place_of_next(&scheduler).await, CodingPlace::Host);
    advance(101 * MS).await;
    scheduler.set_mode(CodingMode::LatencySensitive);
    assert_eq!(place_of_next(&scheduler).await, CodingPlace::Host);
    assert_eq!(scheduler.snapshot().host.health.recoveries, 1);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_shows_the_measured_cost_of_tasks() {
    let scheduler = scheduler("async", 1, 8);
    assert_eq!(scheduler.snapshot().offload.us_per_mb, None);
    let slot = scheduler.admit(4 * MB).await.unwrap();
    advance(20 * MS).await;
    slot.done();
    assert_eq!(scheduler.snapshot().offload.us_per_mb.map(f64::round), Some(5000.0));
}
