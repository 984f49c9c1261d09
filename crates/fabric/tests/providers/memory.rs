//! Tests of permitted and forbidden accesses to remote memory.

use base::mem::Arena;
use fabric::{Access, Endpoint, FabricError, FabricEvent, MemoryRegion, Operation, PostError, RemoteRegion};

use crate::pair::{Pair, Who, provider};

const LEN: usize = 4 << 20;

fn fill(region: &MemoryRegion, seed: u8) -> Vec<u8> {
    let bytes: Vec<u8> =
        (0..region.len()).map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 12) as u8).collect();
    assert!(region.arena().unwrap().copy_in(0, &bytes));
    bytes
}

fn content(arena: &Arena) -> Vec<u8> {
    let mut out = vec![0; arena.len()];
    assert!(arena.copy_out(0, &mut out));
    out
}

#[test]
fn each_side_reads_and_writes_the_memory_of_the_other_side() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let ours = pair.server.region(LEN, Access::Remote);
    let theirs = pair.client.region(LEN, Access::Remote);
    for (who, endpoint, local, peer) in
        [(Who::Client, &client, &theirs, &ours), (Who::Server, &server, &ours, &theirs)]
    {
        let written = fill(local, 3);
        fill(peer, 9);
        let remote = peer.remote();
        endpoint.write(local.slice(0, LEN).unwrap(), remote.slice(0, LEN).unwrap(), 1).unwrap();
        // A read after the write returns the written data.
        assert_eq!(pair.completion(who).operation, Operation::Write);
        assert!(local.arena().unwrap().copy_in(0, &vec![0; LEN]));
        endpoint.read(local.slice(0, LEN).unwrap(), remote.slice(0, LEN).unwrap(), 2).unwrap();
        let read = pair.completion(who);
        assert!(read.result.is_ok() && read.operation == Operation::Read && read.len == LEN);
        assert!(content(local.arena().unwrap()) == written && content(peer.arena().unwrap()) == written);
    }
}

#[test]
fn a_message_arrives_after_the_writes_posted_before_it() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let ours = pair.server.region(LEN, Access::Remote);
    let bells = pair.server.region(4096, Access::Local);
    let theirs = pair.client.region(LEN, Access::Local);
    for round in 0..20 {
        let written = fill(&theirs, round);
        server.receive(bells.slice(0, 16).unwrap(), 100).unwrap();
        for at in (0..LEN).step_by(LEN / 4) {
            let (from, to) = (theirs.slice(at, LEN / 4), ours.remote().slice(at, LEN / 4));
            client.write(from.unwrap(), to.unwrap(), 1).unwrap();
        }
        client.inject(b"!").unwrap();
        assert_eq!(pair.completion(Who::Server).token, 100);
        assert!(content(ours.arena().unwrap()) == written, "round {round}");
        for _ in 0..4 {
            assert!(pair.completion(Who::Client).result.is_ok());
        }
    }
}

/// `verbs` (libfabric 1.17) relies on this order. If operations complete in another order, `verbs`
/// uses memory that it has freed.
#[test]
#[ignore = "needs an RDMA device: OUTBOARD_TEST_FABRIC=verbs@ADDRESS"]
fn operations_over_verbs_complete_in_the_order_of_posting() {
    const READS: usize = 4;
    assert_eq!(provider().0, "verbs", "OUTBOARD_TEST_FABRIC must name an RDMA device");
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let ours = pair.server.region(LEN, Access::Remote);
    let bells = pair.server.region(4096, Access::Local);
    let theirs = pair.client.region(LEN, Access::ReadSink);
    let word = pair.client.region(4096, Access::Messages);
    for _ in 0..5 {
        for part in 0..READS {
            server.receive(bells.slice(16 * part, 16).unwrap(), 100).unwrap();
            let (at, len) = (part * LEN / READS, LEN / READS);
            let (to, from) = (theirs.slice(at, len), ours.remote().slice(at, len));
            client.read(to.unwrap(), from.unwrap(), part as u64).unwrap();
            client.send(word.slice(0, 16).unwrap(), part as u64).unwrap();
        }
        for part in 0..READS {
            for operation in [Operation::Read, Operation::Send] {
                let ended = pair.completion(Who::Client);
                assert_eq!((ended.operation, ended.token), (operation, part as u64));
            }
            assert_eq!(pair.completion(Who::Server).token, 100);
        }
    }
}

/// Accesses `remote` over one of two connections. The access must be refused, and the other
/// connection must still work.
fn must_be_refused(remote: RemoteRegion, read: bool, pair: &mut Pair, good: &MemoryRegion) {
    let (server, client) = pair.connect();
    let (other_server, other_client) = pair.connect();
    let local = pair.client.region(4096, Access::Local);
    fill(&local, 5);
    let before = content(good.arena().unwrap());
    let (slice, to) = (local.slice(0, 4096).unwrap(), remote.slice(0, 4096).unwrap());
    let post = if read { Endpoint::read } else { Endpoint::write };
    post(&client, slice, to, 66).unwrap();
    let ended = pair.until("an end of the connection", |pair| {
        let failed = pair.completed.iter().any(|(who, c)| *who == Who::Client && c.result.is_err());
        let closed = pair.happened.iter().any(|(who, e)| {
            *who == Who::Client && matches!(e, FabricEvent::Closed { .. } | FabricEvent::Failed { .. })
        });
        (failed || closed).then_some((failed, closed))
    });
    eprintln!("refused: completion with error {}, connection closed {}", ended.0, ended.1);
    drop((client, server));
    pair.completed.clear();
    pair.happened.clear();
    assert!(content(good.arena().unwrap()) == before);
    other_client.write(slice, good.remote().slice(0, 4096).unwrap(), 67).unwrap();
    let done = pair.completion(Who::Client);
    assert!(done.result.is_ok() && done.token == 67, "{done:?}");
    drop((other_client, other_server));
    pair.happened.clear();
}

#[test]
fn remote_accesses_with_wrong_keys_or_ranges_are_refused() {
    let mut pair = Pair::new();
    let good = pair.server.region(LEN, Access::Remote);
    let local_only = pair.server.region(4096, Access::Local);
    let gone = pair.server.region(4096, Access::Remote).remote();
    let right = good.remote();
    let beyond = RemoteRegion { base: right.base + LEN as u64 - 2048, ..right };
    let before = RemoteRegion { base: right.base.wrapping_sub(2048), ..right };
    let wrong_key = RemoteRegion { key: right.key ^ 1, ..right };
    for remote in [wrong_key, beyond, gone, local_only.remote(), before] {
        for read in [false, true] {
            if remote == local_only.remote() && pair.to_server.exposes_local_memory() {
                continue;
            }
            must_be_refused(remote, read, &mut pair, &good);
        }
    }
}

#[test]
fn accesses_that_a_region_is_not_registered_for_are_refused() {
    let mut pair = Pair::new();
    let good = pair.server.region(LEN, Access::Remote);
    let [readable, writable, messages, outgoing] =
        [Access::RemoteRead, Access::RemoteWrite, Access::Messages, Access::Outgoing]
            .map(|access| pair.server.region(4096, access));
    let mut refused = vec![(&readable, false), (&messages, false), (&outgoing, false)];
    // The driver siw sends any registered memory, even if it is not registered for reading.
    if !pair.to_server.exposes_local_memory() {
        refused.extend([(&writable, true), (&messages, true), (&outgoing, true)]);
    }
    for (region, read) in refused {
        must_be_refused(region.remote(), read, &mut pair, &good);
        assert!(content(region.arena().unwrap()).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_closed_region_is_inaccessible_over_an_open_connection() {
    let mut pair = Pair::new();
    let (_server, client) = pair.connect();
    let region = pair.server.region(4096, Access::Remote);
    let arena = std::sync::Arc::clone(region.arena().unwrap());
    let local = pair.client.region(4096, Access::Local);
    fill(&local, 1);
    let remote = region.remote();
    drop(region);
    client.write(local.slice(0, 4096).unwrap(), remote.slice(0, 4096).unwrap(), 1).unwrap();
    pair.until("an end", |pair| {
        let failed = pair.completed.iter().any(|(who, c)| *who == Who::Client && c.result.is_err());
        let closed = pair.happened.iter().any(|(_, e)| matches!(e, FabricEvent::Closed { .. }));
        (failed || closed).then_some(())
    });
    assert!(content(&arena).iter().all(|byte| *byte == 0));
}

#[test]
fn after_an_interrupted_read_a_tcp_domain_must_be_reopened() {
    let mut pair = Pair::new();
    let (_server, client) = pair.connect();
    let ours = pair.server.region(LEN, Access::Remote);
    let theirs = pair.client.region(LEN, Access::Local);
    client.read(theirs.slice(0, LEN).unwrap(), ours.remote().slice(0, LEN).unwrap(), 1).unwrap();
    assert!(pair.completion(Who::Client).result.is_ok() && !pair.client.domain.is_spoiled());
    client.read(theirs.slice(0, LEN).unwrap(), ours.remote().slice(0, LEN).unwrap(), 1).unwrap();
    drop(client);
    assert_eq!(pair.client.domain.is_spoiled(), pair.to_server.provider() == "tcp");
    assert!(!pair.server.domain.is_spoiled());
}

#[test]
fn operations_with_wrong_ranges_are_refused_before_they_are_posted() {
    let mut pair = Pair::new();
    let (_server, client) = pair.connect();
    let local = pair.client.region(8192, Access::Local);
    let remote = RemoteRegion { key: 1, base: 0, len: 4096 };
    assert!(matches!(remote.slice(1, 4096), Err(FabricError::OutOfRange { .. })));
    assert!(matches!(local.slice(1, local.len()), Err(FabricError::OutOfRange { .. })));
    let post = client.write(local.slice(0, 100).unwrap(), remote.slice(0, 99).unwrap(), 1);
    assert!(matches!(post, Err(PostError::Failed(FabricError::OutOfRange { .. }))));
}
