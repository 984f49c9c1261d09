//! Several seats of one osd: attachments to one store process that exist at the same time.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use channel::{MemoryLayout, MemoryOptions, SeatClaim};
use common::load::{check, put};
use common::{
    Node, Path, attach, cid, make_collection, node_over, offering, oid, options, target, transaction,
};
use outboard_proxy::{Attachment, AttachmentOptions, ServerOptions, StoreEndpoint};
use store::{MemStore, ObjectStore, Op, StoreCalls};
use tokio::net::{TcpListener, TcpStream};

const SEATS: u16 = 4;

/// Options of a seat of the osd 1.
fn seat(seat: u16) -> AttachmentOptions {
    let memory = MemoryOptions {
        layout: MemoryLayout { ring_len: 128 << 10, data_len: 16 << 20 },
        ..options().memory
    };
    AttachmentOptions { memory, seat: SeatClaim { osd: 1, seat, seats: SEATS }, ..options() }
}

/// A seat that gives up soon.
fn hasty(claim: SeatClaim) -> AttachmentOptions {
    AttachmentOptions { wait_for_store: Duration::from_millis(200), seat: claim, ..seat(0) }
}

/// Why the store refuses these options.
async fn refusal(node: &Node, options: AttachmentOptions) -> String {
    Attachment::connect(node.endpoint.clone(), options).await.err().unwrap().to_string()
}

/// A node with one attachment per seat. The node's own attachment has seat 0.
async fn seated(path: Path, server: ServerOptions) -> (Node, Vec<Attachment>) {
    let node = node_over(path, vec![target(Arc::new(MemStore::new()))], seat(0), server).await;
    let mut attachments = vec![node.attachment.clone()];
    for number in 1..SEATS {
        attachments.push(attach(path, node.endpoint.clone(), seat(number)).await);
    }
    make_collection(&node.store).await;
    (node, attachments)
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Writes objects of seat `number` in `rounds` rounds, and reads them again. The first object of each
/// seat has the number `first`.
async fn work(attachment: &Attachment, first: usize, rounds: u64) {
    let store: Arc<dyn ObjectStore> = attachment.store(0);
    for round in 0..rounds {
        for (n, len) in [3, 5000, 70_000, (1 << 20) + 17].into_iter().enumerate() {
            let (object, seed) = (first + n, round * 1000 + first as u64);
            put(&store, object, seed, len).await;
            check(&store, object, seed, len).await;
        }
        // A query shows all earlier transactions of its seat, although it travels on another path.
        let created = Op::Truncate { oid: oid(first + 10), size: 100 + round };
        let queued = store.queue_transaction(transaction(created));
        let stat = store.stat(&cid(), &oid(first + 10)).await.unwrap();
        queued.await.unwrap();
        assert_eq!(stat.size, 100 + round);
    }
}

async fn all_work(attachments: &[Attachment], rounds: u64) {
    let tasks: Vec<_> = (0..)
        .zip(attachments.to_vec())
        .map(|(number, attachment)| {
            tokio::spawn(async move { work(&attachment, number * 100, rounds).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

async fn work_together(path: Path) {
    let (node, attachments) = seated(path, offering()).await;
    let status = node.server.status();
    assert_eq!((status.seats, status.attachments), (SEATS.into(), SEATS.into()));
    all_work(&attachments, 5).await;
    for attachment in &attachments {
        let status = attachment.status();
        assert_eq!((status.incarnations, status.last_failure), (1, None));
        let moved = attachment.engine().counters().bytes;
        assert_eq!(moved > 10 << 20, path.by_dma(), "{path:?}: {moved} bytes by DMA");
    }
    let status = node.server.status();
    assert_eq!((status.stages, status.violations, status.leftover_calls), (0, 0, 0));
    // Each seat reads the objects of all seats: they are in the same store.
    let store: Arc<dyn ObjectStore> = attachments[1].store(0);
    for number in 0..usize::from(SEATS) {
        check(&store, number * 100 + 2, 4000 + 100 * number as u64, 70_000).await;
    }
}

#[tokio::test]
async fn the_seats_of_an_osd_work_at_the_same_time() {
    for path in [Path::Dma, Path::Unix, Path::Tcp] {
        work_together(path).await;
    }
}

#[tokio::test]
async fn the_seats_of_an_osd_work_at_the_same_time_over_libfabric() {
    for path in [Path::Ofi, Path::OfiTcp] {
        work_together(path).await;
    }
}

#[tokio::test]
async fn a_held_seat_and_another_run_are_refused() {
    let (node, attachments) = seated(Path::Dma, offering()).await;
    let claim = SeatClaim { osd: 1, seat: 2, seats: SEATS };
    let refused = refusal(&node, hasty(claim)).await;
    assert!(refused.contains("seat 2 is still attached"), "{refused}");
    let refused = refusal(&node, hasty(SeatClaim { seats: SEATS + 1, ..claim })).await;
    assert!(refused.contains("attached with 4 seats, not 5"), "{refused}");
    let refused = refusal(&node, hasty(SeatClaim { osd: 2, ..claim })).await;
    assert!(refused.contains("another osd is attached to this store; stop that osd first"), "{refused}");
    let refused = refusal(&node, hasty(SeatClaim { seat: SEATS, ..claim })).await;
    assert!(refused.contains("seat 4 of 4 does not exist"), "{refused}");
    all_work(&attachments, 1).await;
    assert_eq!(node.server.status().seats, SEATS.into());
}

#[tokio::test]
async fn another_run_is_admitted_after_the_last_seat_has_gone() {
    let (node, attachments) = seated(Path::Dma, offering()).await;
    let other = SeatClaim { osd: 2, seat: 0, seats: 1 };
    for (left, attachment) in (0..usize::from(SEATS)).rev().zip(&attachments) {
        let refused = refusal(&node, hasty(other)).await;
        assert!(refused.contains("another osd"), "{refused}");
        attachment.close();
        until("the seat is not free", || node.server.status().seats == left).await;
    }
    let fresh = Attachment::connect(node.endpoint.clone(), hasty(other)).await.unwrap();
    work(&fresh, 1000, 1).await;
    let refused = refusal(&node, hasty(SeatClaim { osd: 1, seat: 0, seats: SEATS })).await;
    assert!(refused.contains("another osd"), "{refused}");
}

#[tokio::test]
async fn the_other_seats_continue_while_a_seat_is_closed_and_claimed_again() {
    let (node, mut attachments) = seated(Path::Dma, offering()).await;
    let others = attachments.split_off(1);
    let busy = tokio::spawn(async move {
        all_work(&others, 20).await;
        others
    });
    for round in 0..10 {
        attachments[0].close();
        // The old attachment may still be ending. The new one repeats its claim until then.
        attachments[0] = attach(Path::Dma, node.endpoint.clone(), seat(0)).await;
        work(&attachments[0], 5000 + round * 100, 1).await;
    }
    for attachment in busy.await.unwrap() {
        let status = attachment.status();
        assert_eq!((status.incarnations, status.last_failure), (1, None));
    }
    assert_eq!(node.server.status().seats, SEATS.into());
}

/// Forwards connections to the store at `to`, until the returned task is aborted. Each connection
/// ends with its task in the set.
async fn forward(
    to: StoreEndpoint,
) -> (StoreEndpoint, tokio::sync::mpsc::Receiver<tokio::task::AbortHandle>) {
    let StoreEndpoint::Tcp(to) = to else { panic!("the endpoint is not a TCP address") };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = StoreEndpoint::Tcp(listener.local_addr().unwrap().to_string());
    let (connected, connections) = tokio::sync::mpsc::channel(100);
    tokio::spawn(async move {
        loop {
            let (mut osd, _) = listener.accept().await.unwrap();
            let mut store = TcpStream::connect(&to).await.unwrap();
            let task = tokio::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut osd, &mut store).await;
            });
            if connected.send(task.abort_handle()).await.is_err() {
                return;
            }
        }
    });
    (endpoint, connections)
}

#[tokio::test]
async fn a_seat_whose_connection_is_lost_reconnects_while_the_others_stay() {
    for path in [Path::Tcp, Path::OfiTcp] {
        let (node, mut attachments) = seated(path, offering()).await;
        attachments[1].close();
        until("the seat is not free", || node.server.status().seats == usize::from(SEATS) - 1).await;
        let (endpoint, mut connections) = forward(node.endpoint.clone()).await;
        attachments[1] = attach(path, endpoint, seat(1)).await;
        for incarnation in 2..5 {
            // The last connection is in use. The store may have refused earlier ones.
            while let Ok(connection) = connections.try_recv() {
                connection.abort();
            }
            let attachment = &attachments[1];
            until("the seat has not reconnected", || attachment.status().incarnations == incarnation).await;
            all_work(&attachments, 1).await;
        }
        for (number, attachment) in attachments.iter().enumerate() {
            let incarnations = attachment.status().incarnations;
            assert_eq!(incarnations, if number == 1 { 4 } else { 1 }, "seat {number}");
            assert_eq!(attachment.status().by_dma, path.by_dma(), "seat {number}");
        }
        assert_eq!(node.server.status().seats, SEATS.into());
    }
}

#[tokio::test]
async fn a_replaced_store_ends_the_attachments_of_all_seats() {
    let (node, attachments) = seated(Path::Dma, offering()).await;
    all_work(&attachments, 1).await;
    let fresh: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    node.server.replace(target(Arc::clone(&fresh)).uuid, Arc::clone(&fresh), None);
    until("an attachment has not ended", || attachments.iter().all(|a| a.status().incarnations == 2)).await;
    make_collection(&node.store).await;
    all_work(&attachments, 1).await;
    assert!(
        attachments.iter().all(|a| a.status().incarnations == 2),
        "no seat has lost its attachment again"
    );
    check(&fresh, 300, 300, 3).await;
    let status = node.server.status();
    assert_eq!(
        (status.seats, status.attachments, status.violations),
        (SEATS.into(), 2 * u64::from(SEATS), 0)
    );
}

#[tokio::test]
async fn a_stopped_server_ends_the_attachments_of_all_seats() {
    let (node, attachments) = seated(Path::Dma, offering()).await;
    let Node { server, attachment: _attachment, .. } = node;
    let server = tokio::task::spawn_blocking(move || {
        server.stop();
        server
    });
    let status = server.await.unwrap().status();
    assert_eq!((status.seats, status.stages), (0, 0));
    until("an attachment has not ended", || attachments.iter().all(|a| !a.status().connected)).await;
}

#[tokio::test]
async fn the_memory_limit_applies_to_all_seats_together() {
    let layout = seat(0).memory.layout;
    let server = ServerOptions { max_memory: 2 * layout.len(), ..offering() };
    let node = node_over(Path::Dma, vec![target(Arc::new(MemStore::new()))], seat(0), server).await;
    let second = attach(Path::Dma, node.endpoint.clone(), seat(1)).await;
    let third = hasty(seat(2).seat);
    let refused = refusal(&node, third.clone()).await;
    let limit = 2 * layout.len();
    assert!(refused.contains(&format!("the limits are {limit} and")), "{refused}");
    // An attachment without host memory does not count.
    let by_socket = attach(Path::Unix, node.endpoint.clone(), seat(3)).await;
    assert_eq!(node.server.status().seats, 3);
    drop(second);
    let third = Attachment::connect(node.endpoint.clone(), third).await.unwrap();
    make_collection(&node.store).await;
    all_work(&[by_socket, third], 1).await;
}
