//! Tests of messages that consist of parts, shared receive buffers, omitted completions, and
//! separately registered memory.

use std::sync::Arc;

use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use fabric::{
    Access, Endpoint, EndpointAddress, EndpointQueues, ExposedMemory, FabricError, FabricEvent, GatherBytes,
    MemoryRegion, Operation, PeerBuffer, PostError, ReceiveQueue,
};

use crate::pair::{Pair, Side, Who, info_with, library};

const SLOT: usize = 8192;

/// A server whose connections share one receive queue, and clients that omit completions.
struct Shared {
    pair: Pair,
    queue: ReceiveQueue,
    buffers: MemoryRegion,
}

impl Shared {
    fn new() -> Shared {
        let pair = Pair::with_shared_receives(true);
        let queue = ReceiveQueue::open(pair.server.domain.info(), &pair.server.completions, 77).unwrap();
        let buffers = pair.server.region(8 * SLOT, Access::Messages);
        Shared { pair, queue, buffers }
    }

    fn connect(&mut self, token: u64) -> (Endpoint, Endpoint) {
        let pair = &mut self.pair;
        let client = Endpoint::connecting(&pair.to_server, sparse(&pair.client), token).unwrap();
        client.establish(b"").unwrap();
        let request = pair.request();
        let queues = EndpointQueues { receives: Some(&self.queue), ..sparse(&pair.server) };
        let server = Endpoint::answer(request, queues, token + 100).unwrap();
        server.establish(b"").unwrap();
        for who in [Who::Server, Who::Client] {
            assert!(matches!(pair.event(who), FabricEvent::Connected { .. }));
        }
        (server, client)
    }

    fn text(&self, slot: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        assert!(self.buffers.arena().unwrap().copy_out(slot as usize * SLOT, &mut out));
        out
    }
}

fn sparse(side: &Side) -> EndpointQueues<'_> {
    EndpointQueues { sparse: true, ..side.queues() }
}

/// A part with the content `text`. It names its region if the provider requires registered memory.
fn part(pair: &Pair, region: &MemoryRegion, pool: &BufferPool, text: &[u8]) -> GatherBytes {
    let mut buf = pool.try_alloc(text.len()).unwrap().unwrap();
    buf.copy_from_slice(text);
    let region = pair.to_server.mr_mode().local.then(|| region.clone());
    GatherBytes { bytes: buf.freeze(), region }
}

#[test]
fn endpoints_can_share_receive_buffers_and_omit_completions() {
    let mut shared = Shared::new();
    let (_first_server, first) = shared.connect(1);
    let (_second_server, second) = shared.connect(2);
    let arena = Arena::anonymous(256 << 10).unwrap();
    let pool = BufferPool::new(Arc::clone(&arena), 0, 64 << 10);
    let region = MemoryRegion::register(&shared.pair.client.domain, &arena, Access::Outgoing).unwrap();
    for slot in 0..6 {
        shared.queue.receive(shared.buffers.slice(slot * SLOT, SLOT).unwrap(), slot as u64).unwrap();
    }
    let send = |pair: &Pair, endpoint: &Endpoint, texts: [&str; 2], notify| {
        let mut parts = texts.map(|text| part(pair, &region, &pool, text.as_bytes())).to_vec();
        endpoint.send_parts(&mut parts, 5, notify).unwrap();
    };
    let free = pool.free_bytes().0;
    for (from, name) in [(&first, "one "), (&second, "two "), (&first, "three ")] {
        send(&shared.pair, from, [name, "message"], false);
        let received = shared.pair.completion(Who::Server);
        assert_eq!((received.operation, received.endpoint), (Operation::Receive, 77));
        let expected = format!("{name}message");
        assert_eq!(shared.text(received.token, received.len), expected.as_bytes());
    }
    shared.pair.drive_until_idle();
    assert!(shared.pair.completed.is_empty(), "no completion was requested");
    assert!(pool.free_bytes().0 < free, "the endpoints still hold the parts");
    for endpoint in [&first, &second] {
        send(&shared.pair, endpoint, ["the", "last"], true);
        let sent = shared.pair.until("a completion", |pair| {
            let at = pair.completed.iter().position(|(who, _)| *who == Who::Client)?;
            Some(pair.completed.remove(at).1)
        });
        assert_eq!((sent.operation, sent.token, sent.len), (Operation::Send, 5, 7));
    }
    assert_eq!(pool.free_bytes().0, free, "the completion also releases the parts of earlier messages");
    let remote = shared.pair.server.region(4096, Access::Remote);
    let local = shared.pair.client.region(4096, Access::Local);
    first.read(local.slice(0, 100).unwrap(), remote.remote().slice(0, 100).unwrap(), 9).unwrap();
    let read = shared.pair.completion(Who::Client);
    assert_eq!((read.operation, read.token, read.result.is_ok()), (Operation::Read, 9, true));
}

#[test]
fn invalid_messages_are_refused_before_they_are_posted() {
    let mut shared = Shared::new();
    let (server, client) = shared.connect(1);
    let plain = |text: &'static [u8]| GatherBytes { bytes: Bytes::from_static(text), region: None };
    let refused = |result: Result<(), PostError>| match result {
        Err(PostError::Failed(e)) => e,
        other => panic!("{other:?}"),
    };
    let mut many = vec![plain(b"x"); shared.pair.to_server.send_parts_max() + 1];
    assert!(matches!(refused(client.send_parts(&mut many, 0, true)), FabricError::TooManyParts { .. }));
    assert!(matches!(refused(client.send_parts(&mut Vec::new(), 0, true)), FabricError::TooManyParts { .. }));
    let elsewhere = GatherBytes { region: Some(shared.buffers.clone()), ..plain(b"x") };
    assert!(matches!(
        refused(client.send_parts(&mut vec![elsewhere.clone()], 0, true)),
        FabricError::OtherDomain
    ));
    assert!(matches!(
        refused(server.send_parts(&mut vec![elsewhere], 0, true)),
        FabricError::OutOfRange { .. }
    ));
    if shared.pair.to_server.mr_mode().local {
        let unregistered = refused(client.send_parts(&mut vec![plain(b"x")], 0, true));
        assert!(matches!(unregistered, FabricError::Unregistered { len: 1 }));
    }
    let bytes = ExposedMemory::Bytes(Bytes::from_static(b"constant"));
    let writable = MemoryRegion::expose(&shared.pair.client.domain, bytes, Access::RemoteWrite);
    assert!(matches!(writable, Err(FabricError::Immutable)));
    let anywhere = info_with(library(), EndpointAddress::Any, true).unwrap();
    assert_eq!(anywhere.provider(), shared.pair.to_server.provider());
}

/// A client exposes one buffer for reading and one for writing, and the server accesses both. After
/// the client closes a region, the memory stays in use until the connection ends. If the client has
/// settled the region, the memory is released at once.
#[test]
fn exposed_memory_is_held_until_no_peer_can_be_using_it() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let pool = BufferPool::new(Arena::anonymous(256 << 10).unwrap(), 0, 64 << 10);
    let free = pool.free_bytes().0;
    let mut source = pool.try_alloc(5000).unwrap().unwrap();
    source.fill(7);
    let sink = PeerBuffer::new(pool.try_alloc(5000).unwrap().unwrap());
    let source = ExposedMemory::Bytes(source.freeze());
    let source = MemoryRegion::expose(&pair.client.domain, source, Access::RemoteRead).unwrap();
    let room = ExposedMemory::Buffer(sink.clone());
    let room = MemoryRegion::expose(&pair.client.domain, room, Access::RemoteWrite).unwrap();
    let local = pair.server.region(8192, Access::Local);
    server.read(local.slice(0, 5000).unwrap(), source.remote().slice(0, 5000).unwrap(), 1).unwrap();
    assert!(pair.completion(Who::Server).result.is_ok());
    server.write(local.slice(0, 5000).unwrap(), room.remote().slice(0, 5000).unwrap(), 2).unwrap();
    assert!(pair.completion(Who::Server).result.is_ok());
    // When a read after the write completes, the written data is in place. The read may use another
    // region.
    server.read(local.slice(0, 5000).unwrap(), source.remote().slice(0, 5000).unwrap(), 3).unwrap();
    assert!(pair.completion(Who::Server).result.is_ok());
    // SAFETY: the server's only write has completed, and the read after it has, too.
    unsafe { room.settle() };
    drop(room);
    let sink = sink.into_inner().expect("a settled region releases its memory at once");
    assert!(sink.iter().all(|byte| *byte == 7));
    drop(sink);
    assert_eq!(pair.client.domain.quarantined_bytes(), 0);
    drop(source);
    assert_eq!(pair.client.domain.quarantined_bytes(), 5000, "the server may still be reading");
    assert!(pool.free_bytes().0 < free);
    drop(client);
    assert_eq!((pair.client.domain.quarantined_bytes(), pool.free_bytes().0), (0, free));
}
