//! Tests that no change takes effect twice and no acknowledged change is lost, even if stores,
//! connections or the osd fail in between.

use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use osd::OsdConfig;
use wire::limits::REQUEST_WINDOW;
use wire::{Error, RequestHead};

use crate::common::{Loss, Node, data};
use crate::raw::{Raw, append, head};

#[tokio::test]
async fn a_change_takes_effect_exactly_once_although_its_store_restarts() {
    let node = Node::start();
    let object = node.object().await;
    let mut model = Vec::new();
    for (i, len) in [5, 100, 300_000, 4096].into_iter().enumerate() {
        for loss in [Loss::Before, Loss::After, Loss::Flush] {
            let bytes = data(len, i as u64);
            let fired = node.fired();
            node.arm(loss);
            let appended = object.append(bytes.clone()).await.unwrap();
            assert_eq!(node.fired(), fired + 1, "the fault fired");
            node.disarm();
            assert_eq!(appended.appended_at, model.len() as u64);
            model.extend_from_slice(&bytes);
            assert!(object.get().await.unwrap() == model, "{len} bytes, lost {loss:?} commit");
        }
    }
    for loss in [Loss::Before, Loss::After, Loss::Flush] {
        let (bytes, fired) = (data(5 << 20, 9), node.fired());
        node.arm(loss);
        object.put(bytes.clone()).await.unwrap();
        assert_eq!(node.fired(), fired + 1, "the fault fired");
        node.disarm();
        assert!(object.get().await.unwrap() == bytes, "staged data, lost {loss:?} commit");
    }
}

#[tokio::test]
async fn a_change_queued_before_its_store_was_lost_is_acknowledged_once_durable() {
    let node = Node::start();
    let object = node.object().await;
    object.append(data(10, 1)).await.unwrap();
    node.arm(Loss::After);
    node.hold(true);
    let mut append = Box::pin(object.append(data(10, 2)));
    tokio::select! {
        done = &mut append => panic!("acknowledged before it was durable: {done:?}"),
        () = node.waited(1) => {}
    }
    assert_eq!(node.fired(), 1, "the fault fired");
    node.disarm();
    node.hold(false);
    assert_eq!(append.await.unwrap().appended_at, 10);
    assert_eq!(object.get().await.unwrap().len(), 20);
}

#[tokio::test]
async fn a_read_during_which_its_store_restarts_does_not_mix_two_versions() {
    let node = Node::start();
    let object = node.object().await;
    let (old, new) = (data(8192, 1), data(12_288, 2));
    object.put(old.clone()).await.unwrap();
    node.stores.iter().for_each(|s| s.arm_late_reads(1));
    node.hold(true);
    let overwritten = async {
        node.waited(1).await;
        // The read has been submitted to the store, so that later changes can reach the store, too.
        let put = async { object.put(new.clone()).await.unwrap() };
        let lost = async {
            node.waited(2).await;
            node.stores.iter().for_each(|s| s.end_session());
            node.hold(false);
        };
        tokio::join!(put, lost);
    };
    let (read, ()) = tokio::join!(object.get(), overwritten);
    let read = read.unwrap();
    assert!(read == old || read == new, "{} bytes of two versions", read.len());
}

#[tokio::test]
async fn a_read_is_repeated_after_its_store_was_unreachable() {
    let node = Node::start();
    let object = node.object().await;
    object.put(data(100_000, 1)).await.unwrap();
    node.stores.iter().for_each(|s| s.arm_read());
    assert!(object.get().await.unwrap() == data(100_000, 1));
    assert_eq!(node.fired(), 1, "the fault fired");
}

#[tokio::test]
async fn concurrent_appends_take_effect_once_each_while_the_store_fails_repeatedly() {
    let node = Node::start();
    let object = node.object().await;
    let appends = (0..200u64).map(|i| {
        let object = object.clone();
        async move { object.append(i.to_le_bytes().to_vec()).await.unwrap() }
    });
    // Each fault is armed once the previous fault has fired, as long as appends remain.
    let faults = async {
        for i in 0..20 {
            let fired = node.fired();
            node.arm(if i % 2 == 0 { Loss::Before } else { Loss::After });
            while node.fired() == fired {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
        }
    };
    let mut faults = std::pin::pin!(faults);
    let mut appends = futures::future::join_all(appends);
    let appended = tokio::select! {
        biased;
        () = &mut faults => appends.await,
        appended = &mut appends => appended,
    };
    node.disarm();
    assert!(node.fired() > 2, "{} faults fired", node.fired());
    let all = object.get().await.unwrap();
    assert_eq!(all.len(), 200 * 8);
    for (i, done) in appended.iter().enumerate() {
        let at = done.appended_at as usize;
        assert_eq!(all[at..at + 8], (i as u64).to_le_bytes());
    }
}

#[tokio::test]
async fn appends_take_effect_once_each_across_restarts_of_the_osd() {
    let mut node = Node::start();
    let object = Arc::new(node.object().await);
    let appends: Vec<_> = (0..8u64)
        .map(|task| {
            let object = Arc::clone(&object);
            tokio::spawn(async move {
                for i in 0..50 {
                    object.append((task << 32 | i).to_le_bytes().to_vec()).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        })
        .collect();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(30)).await;
        node = tokio::task::spawn_blocking(move || {
            node.restart();
            node
        })
        .await
        .unwrap();
    }
    for task in appends {
        task.await.unwrap();
    }
    let all = object.get().await.unwrap();
    let mut seen: Vec<u64> = all.chunks(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
    let in_order = |task: u64| seen.iter().filter(|v| *v >> 32 == task).is_sorted();
    assert!((0..8).all(in_order), "the appends of one task stay in order");
    seen.sort_unstable();
    let expected: Vec<u64> = (0..8u64).flat_map(|task| (0..50).map(move |i| task << 32 | i)).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn a_retry_gets_its_first_result_even_after_a_restart_of_the_osd() {
    let mut node = Node::start();
    let object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let first = raw.changed(head(1), append("object", "once")).await.unwrap();
    let again = RequestHead { retry: true, ..head(1) };
    assert_eq!(raw.changed(again, append("object", "once")).await.unwrap(), first);
    // The first attempt of this request was lost on the way, so the retry is executed.
    let lost = RequestHead { retry: true, ..head(2) };
    let second = raw.changed(lost, append("object", "twice")).await.unwrap();

    node.restart();
    let mut raw = Raw::connect(&node.endpoint, Some(raw.session)).await;
    assert_eq!(raw.changed(again, append("object", "once")).await.unwrap(), first);
    assert_eq!(raw.changed(lost, append("object", "twice")).await.unwrap(), second);
    assert_eq!(object.get().await.unwrap(), "oncetwice");
    let third = raw.changed(head(3), append("object", "!")).await.unwrap();
    assert!(third.version > second.version, "versions grow across restarts");
}

#[tokio::test]
async fn a_retry_whose_result_was_removed_is_refused_as_expired() {
    let node = Node::start();
    let object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    for seq in 1..=200 {
        let head = RequestHead { acked_through: seq - 1, ..head(seq) };
        raw.changed(head, append("object", "x")).await.unwrap();
    }
    let old = RequestHead { retry: true, ..head(1) };
    assert_eq!(raw.changed(old, append("object", "x")).await, Err(Error::RequestExpired));
    let last = RequestHead { retry: true, ..head(200) };
    assert!(raw.changed(last, append("object", "x")).await.is_ok(), "the newest result is kept");
    // A client that never acknowledges results does not keep the node from removing them.
    for seq in 201..=201 + REQUEST_WINDOW + 100 {
        raw.changed(head(seq), append("object", "x")).await.unwrap();
    }
    let old = RequestHead { retry: true, ..head(201) };
    assert_eq!(raw.changed(old, append("object", "x")).await, Err(Error::RequestExpired));
    assert_eq!(object.stat().await.unwrap().size, 200 + 1 + REQUEST_WINDOW + 100);
}

#[tokio::test]
async fn retries_of_an_expired_session_are_refused_even_after_a_restart() {
    let quick = Duration::from_millis(50);
    let config = OsdConfig { session_expiry: quick, collect_interval: quick, ..OsdConfig::default() };
    let mut node = Node::start_with(config);
    let object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    raw.changed(head(1), append("object", "x")).await.unwrap();
    let session = raw.session;
    raw.connection.close().await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    let again = RequestHead { retry: true, ..head(1) };
    let mut raw = Raw::connect(&node.endpoint, Some(session)).await;
    assert_eq!(raw.changed(again, append("object", "x")).await, Err(Error::RequestExpired));
    node.restart();
    let mut raw = Raw::connect(&node.endpoint, Some(session)).await;
    assert_eq!(raw.changed(again, append("object", "x")).await, Err(Error::RequestExpired));
    assert_eq!(object.get().await.unwrap(), "x");
}

/// A request must not fail because it cannot offer memory on a connection that was just lost.
#[tokio::test]
async fn requests_issued_on_a_lost_connection_are_sent_on_the_next_connection() {
    let mut node = Node::start();
    let object = node.object().await;
    object.put("x").await.unwrap();
    let asking = object.clone();
    // The task wakes itself after each poll. It therefore also runs between the loss of the
    // connection and the next run of the client's own task.
    let begun = tokio::spawn(std::future::poll_fn(move |context| {
        let begun = std::pin::pin!(asking.get()).poll(context);
        context.waker().wake_by_ref();
        match begun {
            Poll::Ready(Err(e)) => Poll::<client::Error>::Ready(e),
            Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
        }
    }));
    node.restart();
    assert_eq!(object.get().await.unwrap(), "x");
    assert!(!begun.is_finished(), "{}", begun.await.unwrap());
    begun.abort();
}

#[tokio::test]
async fn requests_on_a_connection_whose_session_was_resumed_elsewhere_are_refused() {
    let node = Node::start();
    let _object = node.object().await;
    let mut old = Raw::connect(&node.endpoint, None).await;
    let mut new = Raw::connect(&node.endpoint, Some(old.session)).await;
    assert!(matches!(old.changed(head(1), append("object", "late")).await, Err(Error::NoSession(_))));
    assert!(new.changed(head(1), append("object", "now")).await.is_ok());
}
