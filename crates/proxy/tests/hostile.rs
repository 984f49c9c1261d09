//! Tests of peers that violate the protocol. A violation fails one request of the peer or ends the
//! peer's attachment. The other side continues to work.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path as FsPath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::{Arena, OutsideAccess};
use bytes::Bytes;
use channel::ring::{CELL, footprint};
use channel::{
    Bell, ChannelEntry, ChannelHello, ChannelWelcome, ControlSocket, Doorbell, EntryHeader, EntryKind,
    HEADER_LEN, HostMemory, MemoryAccess, MemoryAnswer, MemoryFds, MemoryLayout, MemoryRequest, Reach,
    SeatClaim, Socket, TargetInfo, VERSION,
};
use common::{Node, Path, cid, make_collection, node, oid, options, pattern, transaction};
use outboard_proxy::{Attachment, AttachmentOptions, StoreEndpoint};
use rustix::fs::{MemfdFlags, SealFlags};
use store::{ObjectStore, Op, StoreCalls, StoreError, WriteSource};
use tokio::net::{UnixListener, UnixStream};

const LAYOUT: MemoryLayout = MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 };

fn hello() -> ChannelHello {
    let memory = Some(MemoryRequest { layout: LAYOUT, reach: Reach::Descriptors });
    let seat = SeatClaim::sole();
    ChannelHello { version_min: 1, version_max: VERSION, nonce: 5, memory, outstanding: 8, seat }
}

/// An osd that can write arbitrary bytes into host memory.
struct EvilOsd {
    control: ControlSocket,
    memory: Arc<Arena>,
    host_doorbell: OwnedFd,
    osd_doorbell: Doorbell,
    head: u64,
    taken: u64,
}

impl EvilOsd {
    async fn join(node: &Node) -> EvilOsd {
        EvilOsd::join_seat(node, SeatClaim::sole()).await
    }

    async fn join_seat(node: &Node, seat: SeatClaim) -> EvilOsd {
        let StoreEndpoint::Unix(path) = &node.endpoint else { panic!("the endpoint is not a UNIX socket") };
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let socket = Socket::Unix(UnixStream::connect(path).await.unwrap());
            // The server refuses this osd until the previous attachment has ended.
            let hello = ChannelHello { seat, ..hello() };
            if let Ok((_, Some(MemoryAccess::Descriptors(descriptors)), control)) =
                channel::join(socket, &hello).await
            {
                let MemoryFds { memory, host_doorbell, osd_doorbell } = descriptors;
                let memory = Arena::from_peer(memory, LAYOUT.len()).unwrap();
                let osd_doorbell = Doorbell::new(osd_doorbell).unwrap();
                return EvilOsd { control, memory, host_doorbell, osd_doorbell, head: 0, taken: 0 };
            }
            assert!(Instant::now() < deadline, "the server accepted no attachment in time");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn ring(&self, count: u64) {
        Doorbell::ring(self.host_doorbell.as_fd(), count).unwrap();
    }

    /// Puts an entry into the inbound ring and rings the doorbell. `change` can alter the entry's
    /// bytes first.
    fn send(&mut self, header: EntryHeader, control: &[u8], change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = EntryHeader { position: self.head, ..header }.seal(control);
        change(&mut bytes);
        LAYOUT.inbound().write(&self.memory, self.head, &[&bytes]);
        let cells = footprint(bytes.len()) as u64;
        self.head += cells;
        self.ring(cells);
    }

    async fn reply(&mut self) -> ChannelEntry {
        let wait = std::future::poll_fn(|cx| self.osd_doorbell.poll_wait(cx));
        let count = tokio::time::timeout(Duration::from_secs(5), wait).await.unwrap().unwrap();
        let frame = LAYOUT.outbox().read(&self.memory, self.taken, count as usize).unwrap();
        self.taken += footprint(frame.header.total_len()) as u64;
        frame
    }

    /// Waits for the store's notice that an entry is invalid.
    async fn is_told_of_damage(&mut self, what: &str) {
        let frame = std::future::poll_fn(|cx| self.control.poll_frame(cx));
        let told = tokio::time::timeout(Duration::from_secs(5), frame).await.expect(what).expect(what);
        assert_eq!((told.header.kind, told.header.id), (EntryKind::Reply, 0), "{what}");
    }

    /// Waits until the store closes the connection.
    async fn hung_up_on(mut self) {
        let frame = std::future::poll_fn(|cx| self.control.poll_frame(cx));
        let gone = tokio::time::timeout(Duration::from_secs(5), frame)
            .await
            .expect("the attachment did not end in time");
        assert!(gone.is_err());
    }
}

/// The descriptor of host memory.
fn share(memory: &HostMemory) -> OwnedFd {
    // SAFETY: these tests do not use the data region of the memory.
    let access = unsafe { OutsideAccess::new(&memory.arena) };
    access.share_fd().unwrap().unwrap()
}

fn request(id: u64) -> EntryHeader {
    EntryHeader { reply_max: 1024, ..EntryHeader::new(EntryKind::Request, 0, id) }
}

/// Control data of a `StageWrite` with its payload in this range. In postcard's encoding, the tag
/// comes before the fields.
fn stage_write_of_range(offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![1];
    for v in [1u64, 0, 0] {
        varint(&mut out, v); // stage, offset, block_offset
    }
    varint(&mut out, 0); // no checksums
    out.push(1); // a range
    varint(&mut out, offset);
    varint(&mut out, len);
    out
}

/// Control data of a request with these transactions in its entry: the target, the number minus 1 and
/// the encoding of each transaction, and the lengths of the encodings.
fn transactions(parts: &[(u64, u64, u64)], lengths: &[u64]) -> Vec<u8> {
    let mut out = vec![3];
    varint(&mut out, parts.len() as u64);
    for (target, after, encoding) in parts {
        [target, after, encoding].into_iter().for_each(|v| varint(&mut out, *v));
    }
    varint(&mut out, lengths.len() as u64);
    lengths.iter().for_each(|len| varint(&mut out, *len));
    out.extend([0, 0]); // no checksum, in the entry
    out
}

fn varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

/// Checks that the server still serves a correct osd.
async fn still_serves(node: &Node) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while node.server.status().seats > 0 {
        assert!(Instant::now() < deadline, "the attachment did not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let attachment = Attachment::connect(node.endpoint.clone(), options()).await.unwrap();
    let store: Arc<dyn ObjectStore> = attachment.store(0);
    // The collection may already exist.
    let _ = store.queue_transaction(transaction(Op::CreateCollection)).await;
    let source = WriteSource::Inline(Payload::compute(0, pattern(1, 100_000)));
    store.queue_transaction(transaction(Op::Write { oid: oid(1), offset: 0, source })).await.unwrap();
    assert_eq!(
        store.read(&cid(), &oid(1), 0, 100_000, None).await.unwrap().contiguous(),
        pattern(1, 100_000)
    );
}

/// A node whose own attachment is closed, so that a hostile osd can attach.
async fn vacant() -> Node {
    let node = node(Path::Dma).await;
    node.attachment.close();
    while node.server.status().seats > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    node
}

#[tokio::test]
async fn an_invalid_request_fails_without_ending_the_attachment() {
    let node = vacant().await;
    let mut evil = EvilOsd::join(&node).await;
    let data_end = LAYOUT.len() as u64;
    let ranges = [
        (0, 4096),               // a ring
        (data_end - 4096, 8192), // half outside
        (u64::MAX, 4096),
        (4096, u64::MAX),
        (data_end - 4096, 0),
    ];
    for (id, (offset, len)) in ranges.into_iter().enumerate() {
        evil.send(request(id as u64 + 1), &stage_write_of_range(offset, len), |_| ());
        let reply = evil.reply().await;
        assert_eq!(reply.header.id, id as u64 + 1);
        assert_eq!(reply.control[0], 1, "the reply is an error");
        assert!(String::from_utf8_lossy(&reply.control).contains("region"), "{:?}", reply.control);
    }
    // Send an unknown call, a truncated call, and no call.
    for control in [&[200u8, 1, 2][..], &[1], &[]] {
        evil.send(request(9), control, |_| ());
        assert!(String::from_utf8_lossy(&evil.reply().await.control).contains("decoded"));
    }
    assert_eq!(node.server.status().violations, 0, "the attachment never ended");
    drop(evil);
    still_serves(&node).await;
}

type Lie = fn(&mut EvilOsd);

#[tokio::test]
async fn an_impossible_doorbell_count_or_entry_ends_the_attachment() {
    let lies: [(&str, Lie); 4] = [
        ("a doorbell of half a cell", |evil| evil.ring(7)),
        ("a doorbell beyond the ring", |evil| evil.ring(1 << 40)),
        ("a target that does not exist", |evil| {
            evil.send(EntryHeader { target: 7, ..request(1) }, b"x", |_| ())
        }),
        ("a reply instead of a request", |evil| {
            evil.send(EntryHeader::new(EntryKind::Reply, 0, 1), b"x", |_| ())
        }),
    ];
    let node = vacant().await;
    for (n, (what, lie)) in lies.into_iter().enumerate() {
        let mut evil = EvilOsd::join(&node).await;
        lie(&mut evil);
        evil.hung_up_on().await;
        let violations = node.server.status().violations;
        assert_eq!(violations, n as u64 + 1, "{what}");
    }
    still_serves(&node).await;
}

#[tokio::test]
async fn an_invalid_ring_entry_ends_the_use_of_the_rings() {
    let lies: [(&str, Lie); 5] = [
        ("a doorbell without an entry", |evil| evil.ring(CELL as u64)),
        ("a wrong checksum", |evil| evil.send(request(1), b"x", |bytes| bytes[HEADER_LEN] ^= 1)),
        ("an absurd length", |evil| evil.send(request(1), b"x", |bytes| bytes[12..16].fill(0xff))),
        ("a length beyond what was announced", |evil| evil.send(request(1), b"x", |bytes| bytes[16] = 200)),
        ("an entry that is announced twice", |evil| {
            evil.send(request(1), b"x", |_| ());
            evil.ring(2 * CELL as u64);
        }),
    ];
    let node = vacant().await;
    for (what, lie) in lies {
        let mut evil = EvilOsd::join(&node).await;
        lie(&mut evil);
        evil.is_told_of_damage(what).await;
        // The host takes no further entry, not even a valid one.
        evil.send(request(2), b"x", |_| ());
        let frame = std::future::poll_fn(|cx| evil.control.poll_frame(cx));
        assert!(tokio::time::timeout(Duration::from_millis(50), frame).await.is_err(), "{what}");
        drop(evil);
        while node.server.status().seats > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    still_serves(&node).await;
}

#[tokio::test]
async fn more_requests_than_agreed_end_the_attachment() {
    let node = vacant().await;
    let mut evil = EvilOsd::join(&node).await;
    // These requests wait for a transaction that never arrives.
    for id in 1..=9 {
        evil.send(EntryHeader { after: 5, ..request(id) }, &[13], |_| ());
    }
    evil.hung_up_on().await;
    assert_eq!(node.server.status().violations, 1);
    still_serves(&node).await;
}

#[tokio::test]
async fn a_transaction_that_is_sent_twice_ends_the_attachment() {
    let node = vacant().await;
    for (n, after) in [5, u64::MAX].into_iter().enumerate() {
        let mut evil = EvilOsd::join(&node).await;
        for id in 1..=2 {
            // An empty transaction of target 0, in the entry.
            evil.send(request(id), &transactions(&[(0, after, 0)], &[0]), |_| ());
        }
        evil.hung_up_on().await;
        assert_eq!(node.server.status().violations, n as u64 + 1);
    }
    still_serves(&node).await;
}

#[tokio::test]
async fn transactions_without_target_end_the_attachment() {
    let node = vacant().await;
    let many: Vec<(u64, u64, u64)> = (0..17).map(|after| (0, after, 0)).collect();
    let one = [(0, 0, 0)];
    let lies: [(&[_], &[u64]); 4] =
        [(&[], &[0]), (&[(0, 0, 0), (1, 0, 0)], &[0]), (&many, &[0]), (&one, &[0; 17])];
    for (n, (parts, lengths)) in lies.into_iter().enumerate() {
        let mut evil = EvilOsd::join(&node).await;
        evil.send(request(1), &transactions(parts, lengths), |_| ());
        evil.hung_up_on().await;
        assert_eq!(node.server.status().violations, n as u64 + 1);
    }
    still_serves(&node).await;
}

#[tokio::test]
async fn invalid_transactions_fail_in_their_order() {
    let node = vacant().await;
    let mut evil = EvilOsd::join(&node).await;
    // Too long for the request, without encoding, with an empty encoding, and with more bytes
    // than the request has.
    let invalid: [(u64, &[u64]); 4] = [(0, &[9]), (1, &[0]), (0, &[0]), (0, &[u64::from(u32::MAX); 3])];
    for (after, (encoding, lengths)) in invalid.into_iter().enumerate() {
        let id = after as u64 + 1;
        evil.send(request(id), &transactions(&[(0, after as u64, encoding)], lengths), |_| ());
        let reply = evil.reply().await;
        assert_eq!(reply.header.id, id);
        // One outcome: an invalid argument.
        assert_eq!(reply.control[..5], [0, 6, 1, 1, 1], "{:?}", reply.control);
        assert!(String::from_utf8_lossy(&reply.control).contains("transaction"), "{:?}", reply.control);
    }
    assert_eq!(node.server.status().violations, 0, "the attachment never ended");
    drop(evil);
    still_serves(&node).await;
}

#[tokio::test]
async fn a_store_limits_the_bytes_of_calls_that_it_holds_back() {
    // Stage writes that wait for a transaction that never arrives.
    let stage_write = |_| vec![1, 1, 0, 0, 0, 0];
    // Transactions of which all but one are executed, and one waits for ever.
    let mostly_executed = |n: u64| {
        let parts = (0..15).map(|k| (0, n * 15 + k, 9)).chain([(0, 1 << 40 | n, 0)]);
        transactions(&parts.collect::<Vec<_>>(), &[0])
    };
    held_back(&stage_write).await;
    held_back(&mostly_executed).await;
}

/// Sends long calls, which the store must hold back, until the store ends the attachment. `control`
/// returns the control data of the call with a number, counted from 0.
async fn held_back(control: &dyn Fn(u64) -> Vec<u8>) {
    let node = vacant().await;
    let mut evil = EvilOsd::join(&node).await;
    let long = Bytes::from(vec![0; 16 << 20]);
    let mut sent = 0;
    let why = loop {
        let mut header = EntryHeader { after: 5, ..request(sent + 1) };
        header.data_len = long.len() as u32;
        evil.control.push(header, &control(sent), [long.clone()]);
        sent += 1;
        assert!(sent < 64, "the store holds back a GiB of calls");
        let flushed = std::future::poll_fn(|cx| evil.control.poll_flush(cx));
        match tokio::time::timeout(Duration::from_secs(10), flushed)
            .await
            .expect("the store neither takes data nor ends the attachment")
        {
            Ok(()) => {}
            Err(e) => break e,
        }
    };
    assert!(sent >= 16, "the attachment ended after only {sent} calls: {why}");
    assert_eq!(node.server.status().violations, 1);
    drop(evil);
    still_serves(&node).await;
}

#[tokio::test]
async fn garbage_on_the_socket_ends_the_connection() {
    let node = vacant().await;
    let StoreEndpoint::Unix(path) = &node.endpoint else { panic!("the endpoint is not a UNIX socket") };
    for garbage in
        [vec![0u8; 64], vec![0xff; 5000], EntryHeader::new(EntryKind::Hello, 0, 0).seal(&[0xff; 40])]
    {
        let mut stream = UnixStream::connect(path).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, &garbage).await.unwrap();
        let mut rest = Vec::new();
        // The connection may be closed or reset; ignore the result.
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest).await;
        assert!(rest.is_empty());
    }
    let old = ChannelHello { version_min: 90, version_max: 99, ..hello() };
    let layout = MemoryLayout { ring_len: 1 << 40, data_len: 4096 };
    let huge = MemoryRequest { layout, reach: Reach::Descriptors };
    let huge = ChannelHello { memory: Some(huge), ..hello() };
    let seat = |seat, seats| ChannelHello { seat: SeatClaim { osd: 7, seat, seats }, ..hello() };
    let (none, beyond, many) = (seat(0, 0), seat(3, 3), seat(0, 65));
    let lies = [
        (old, "version"),
        (huge, "not possible"),
        (none, "seat 0 of 0 does not exist"),
        (beyond, "seat 3 of 3 does not exist"),
        (many, "an osd has 1 to 64 seats"),
    ];
    for (hello, why) in lies {
        let refused = channel::join(Socket::Unix(UnixStream::connect(path).await.unwrap()), &hello).await;
        let refused = refused.err().unwrap().to_string();
        assert!(refused.contains(why), "{refused}");
    }
    still_serves(&node).await;
}

/// The store numbers stages consecutively, so a seat can guess the numbers of other seats' stages.
#[tokio::test]
async fn a_seat_cannot_use_a_stage_of_another_seat() {
    let node = vacant().await;
    let seat = |seat| SeatClaim { osd: 7, seat, seats: 2 };
    let mut owner = EvilOsd::join_seat(&node, seat(0)).await;
    let mut other = EvilOsd::join_seat(&node, seat(1)).await;
    // `Stage` of 4096 bytes. The answer is `Ok`, then the second variant, then the stage's number.
    owner.send(request(1), &[0, 0x80, 0x20], |_| ());
    let reply = owner.reply().await;
    assert_eq!(reply.control[..2], [0, 1]);
    let [stage] = reply.control[2..] else { panic!("the number is above 127: {:?}", reply.control) };
    // A `StageWrite` without data. It succeeds in the owner's attachment.
    let stage_write = [1, stage, 0, 0, 0, 0];
    owner.send(request(2), &stage_write, |_| ());
    assert_eq!(owner.reply().await.control[..], [0, 0]);
    // A transaction that creates the collection and writes the stage to an object.
    let mut ops = vec![1, 0, 0, 0, b'c', 0, 2, 0, 0, 0, 19, 4, 1, 0, 0, 0, b'o'];
    [0, u64::from(stage), 0, 4096].into_iter().for_each(|v| ops.extend(v.to_le_bytes()));
    let mut transaction = transactions(&[(0, 0, 0)], &[ops.len() as u64]);
    transaction.extend(ops);
    // `StageStripes` with one fragment of 4096 bytes, and without checksums.
    let stripes = [10, 1, 1, 0, stage, 1, 0x80, 0x20, 0, 1, 0, 0];
    let calls: [(&[u8], &[u8]); 3] =
        [(&stage_write, &[1]), (&transaction, &[0, 6, 1, 1, 1]), (&stripes, &[1])];
    for (id, (call, start)) in calls.into_iter().enumerate() {
        other.send(request(id as u64 + 1), call, |_| ());
        let reply = other.reply().await;
        assert_eq!(reply.control[..start.len()], *start, "{reply:?}");
        let error: StoreError = postcard::from_bytes(&reply.control[start.len()..]).unwrap();
        assert!(matches!(error, StoreError::NoSuchStage(n) if n == u64::from(stage)), "{error}");
    }
    // `StageRelease` is answered with `Done`, but does not release the stage of the other seat.
    other.send(request(9), &[2, stage], |_| ());
    assert_eq!(other.reply().await.control[..], [0, 0]);
    assert_eq!(node.server.status().stages, 1);
    let data = [7; 4096];
    let checksum = Payload::compute(0, Bytes::copy_from_slice(&data)).checksums()[0].to_le_bytes();
    let block = [&[1, stage, 0, 0, 4][..], &checksum, &[0]].concat();
    owner.send(EntryHeader { data_len: 4096, ..request(3) }, &block, |bytes| bytes.extend(data));
    assert_eq!(owner.reply().await.control[..], [0, 0]);
    owner.send(request(4), &transaction, |_| ());
    assert_eq!(owner.reply().await.control[..], [0, 6, 1, 1, 0], "the owner may write the stage");
    drop(owner);
    while node.server.status().stages > 0 || node.server.status().seats > 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((node.server.status().seats, node.server.status().violations), (1, 0));
    drop(other);
    still_serves(&node).await;
}

#[tokio::test]
async fn a_violation_ends_only_the_attachment_of_its_seat() {
    let node = vacant().await;
    let seat = |seat| SeatClaim { osd: 7, seat, seats: 2 };
    let mut good = EvilOsd::join_seat(&node, seat(0)).await;
    let bad = EvilOsd::join_seat(&node, seat(1)).await;
    bad.ring(7);
    bad.hung_up_on().await;
    assert_eq!((node.server.status().seats, node.server.status().violations), (1, 1));
    // The query `Space`.
    good.send(request(1), &[7], |_| ());
    assert_eq!(good.reply().await.control[..2], [0, 5]);
    drop(EvilOsd::join_seat(&node, seat(1)).await);
    drop(good);
    still_serves(&node).await;
}

#[tokio::test]
async fn the_oldest_peers_without_a_hello_lose_their_slots_to_new_peers() {
    let node = vacant().await;
    let StoreEndpoint::Unix(path) = &node.endpoint else { panic!("the endpoint is not a UNIX socket") };
    // The store has 32 slots beside those for all shards of an osd.
    let (mut silent, started) = (Vec::new(), Instant::now());
    for _ in 0..usize::from(channel::MAX_SEATS) + 40 {
        silent.push(UnixStream::connect(path).await.unwrap());
    }
    let mut byte = [0];
    silent[0].readable().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(4), "the connection has ended by its time limit");
    assert_eq!(silent[0].try_read(&mut byte).unwrap(), 0, "the server has closed the oldest connection");
    let last = silent.last().unwrap().try_read(&mut byte).map_err(|e| e.kind());
    assert_eq!(last, Err(std::io::ErrorKind::WouldBlock), "the newest connection is open");
    drop(EvilOsd::join(&node).await);
    still_serves(&node).await;
}

/// While a peer reads no replies, the store takes no more of the peer's requests, so that replies
/// do not accumulate. The store continues when the peer reads the replies.
#[tokio::test]
async fn a_peer_that_reads_no_replies_cannot_send_more_requests() {
    const QUESTIONS: u64 = 10_000;
    const LEN: u64 = 64 << 10;
    let node = vacant().await;
    let mut evil = EvilOsd::join(&node).await;
    // Control data of a `Get` of `LEN` bytes of the data region.
    let mut get = vec![9, 2];
    varint(&mut get, LAYOUT.data_offset() as u64);
    varint(&mut get, LEN);
    for id in 1..=QUESTIONS {
        evil.control.push(EntryHeader::new(EntryKind::Request, 0, id), &get, []);
    }
    // The sockets' buffers have room for only a part of the requests.
    let asked = std::future::poll_fn(|cx| evil.control.poll_flush(cx));
    let taken = tokio::time::timeout(Duration::from_millis(500), asked).await;
    assert!(
        taken.is_err(),
        "the store has taken all requests and holds {} MiB of replies",
        (QUESTIONS * LEN) >> 20
    );
    for id in 1..=QUESTIONS {
        let reply = std::future::poll_fn(|cx| {
            drop(evil.control.poll_flush(cx));
            evil.control.poll_frame(cx)
        });
        let reply = tokio::time::timeout(Duration::from_secs(5), reply)
            .await
            .expect("the store sent no further reply")
            .unwrap();
        assert_eq!((reply.header.id, reply.data.len() as u64), (id, LEN));
    }
    assert_eq!((evil.control.unsent(), node.server.status().violations), (0, 0));
    drop(evil);
    still_serves(&node).await;
}

/// A hostile store that welcomes one osd with this memory. Returns the control socket and the osd's
/// doorbell, for further violations.
async fn evil_store(listener: &UnixListener, memory: OwnedFd) -> (ControlSocket, OwnedFd) {
    evil_store_with(listener, memory, Doorbell::create().unwrap()).await
}

/// Like [`evil_store`], with this descriptor as the host's doorbell.
async fn evil_store_with(
    listener: &UnixListener,
    memory: OwnedFd,
    host_doorbell: OwnedFd,
) -> (ControlSocket, OwnedFd) {
    let socket = Socket::Unix(listener.accept().await.unwrap().0);
    let osd_doorbell = Doorbell::create().unwrap();
    let ours = osd_doorbell.try_clone().unwrap();
    let (_, (), control) = channel::accept(socket, |hello, _| {
        let targets = vec![TargetInfo { uuid: uuid::Uuid::from_u128(1) }];
        let answer = MemoryAnswer::Descriptors;
        let welcome =
            ChannelWelcome { version: VERSION, nonce: hello.nonce, attachment: 1, memory: answer, targets };
        Ok((welcome, Some(MemoryAccess::Descriptors(MemoryFds { memory, host_doorbell, osd_doorbell })), ()))
    })
    .await
    .unwrap();
    (control, ours)
}

#[tokio::test]
async fn memory_without_seals_or_of_another_length_is_refused() {
    let options = AttachmentOptions { wait_for_store: Duration::from_millis(400), ..options() };
    let len = options.memory.layout.len() as u64;
    let memfd = |len: u64, seals: SealFlags| {
        let fd = rustix::fs::memfd_create("evil", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let lies = [
        ("seals", len, SealFlags::empty()),
        ("seals", len, SealFlags::GROW),
        ("announced", len - 4096, sealed),
        ("announced", len + 4096, sealed),
    ];
    for (why, len, seals) in lies {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        let listener = UnixListener::bind(&at).unwrap();
        // Send the same invalid memory at each attempt to attach.
        let store = async {
            loop {
                drop(evil_store(&listener, memfd(len, seals)).await);
            }
        };
        let refused = tokio::select! {
            refused = Attachment::connect(StoreEndpoint::Unix(at), options.clone()) => refused.err().unwrap().to_string(),
            () = store => unreachable!("the hostile store never stops"),
        };
        assert!(refused.contains(why), "{refused}");
    }
}

/// A write to this doorbell would block for ever.
#[tokio::test]
async fn a_doorbell_that_is_a_full_pipe_is_refused() {
    let options = AttachmentOptions { wait_for_store: Duration::from_millis(400), ..options() };
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("s");
    let memory = HostMemory::new(options.memory.layout).unwrap();
    let fd = share(&memory);
    let (_out, pipe) = rustix::pipe::pipe().unwrap();
    rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&pipe, &[0; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::empty()).unwrap();
    let listener = UnixListener::bind(&at).unwrap();
    // Send the same invalid doorbell at each attempt to attach.
    let store = async {
        loop {
            drop(evil_store_with(&listener, fd.try_clone().unwrap(), pipe.try_clone().unwrap()).await);
        }
    };
    let refused = tokio::select! {
        refused = Attachment::connect(StoreEndpoint::Unix(at), options) => refused.err().unwrap().to_string(),
        () = store => unreachable!("the hostile store never stops"),
    };
    assert!(refused.contains("must be an eventfd"), "{refused}");
}

#[tokio::test]
async fn a_protocol_violation_by_the_store_fails_calls_as_disconnected() {
    type Lie = fn(&Arena, &OwnedFd, MemoryLayout);
    let lies: [Lie; 3] = [
        |_, bell, _| Doorbell::ring(bell.as_fd(), 1 << 40).unwrap(),
        |_, bell, _| Doorbell::ring(bell.as_fd(), CELL as u64).unwrap(),
        |memory, bell, layout| {
            // A reply to a request that was never sent.
            let bytes = EntryHeader::new(EntryKind::Reply, 0, 77).seal(b"x");
            layout.outbox().write(memory, 0, &[&bytes]);
            Doorbell::ring(bell.as_fd(), footprint(bytes.len()) as u64).unwrap();
        },
    ];
    let options = AttachmentOptions {
        wait_for_store: Duration::from_millis(400),
        // The hostile store does not report its ring positions either.
        overdue: Duration::from_millis(10),
        ..options()
    };
    for lie in lies {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        let memory = HostMemory::new(options.memory.layout).unwrap();
        let fd = share(&memory);
        let listener = UnixListener::bind(&at).unwrap();
        let (attachment, (_control, bell)) = tokio::join!(
            Attachment::connect(StoreEndpoint::Unix(at), options.clone()),
            evil_store(&listener, fd)
        );
        drop(listener);
        let attachment = attachment.unwrap();
        let call = attachment.store(0).queue_transaction(transaction(Op::Touch { oid: oid(1) }));
        lie(&memory.arena, &bell, options.memory.layout);
        let lost = call.await;
        assert!(matches!(lost, Err(store::StoreError::Disconnected(_))), "{lost:?}");
        let failure = attachment.status().last_failure.unwrap();
        assert!(failure.contains("protocol") || failure.contains("socket"), "{failure}");
    }
}

/// A store without host memory that sends the same answer to every request.
async fn false_answers(at: &FsPath, answer: &[u8], data: Bytes) {
    let listener = UnixListener::bind(at).unwrap();
    let socket = Socket::Unix(listener.accept().await.unwrap().0);
    let (_, (), mut control) = channel::accept(socket, |hello, _| {
        let targets = vec![TargetInfo { uuid: uuid::Uuid::from_u128(1) }];
        let memory = MemoryAnswer::None(None);
        let welcome = ChannelWelcome { version: VERSION, nonce: hello.nonce, attachment: 1, memory, targets };
        Ok((welcome, None, ()))
    })
    .await
    .unwrap();
    loop {
        let taken = std::future::poll_fn(|cx| {
            drop(control.poll_flush(cx));
            control.poll_frame(cx)
        });
        let Ok(frame) = taken.await else { return };
        control.push(EntryHeader::new(EntryKind::Reply, 0, frame.header.id), answer, vec![data.clone()]);
    }
}

#[tokio::test]
async fn an_answer_of_the_wrong_kind_is_never_treated_as_success() {
    let options =
        AttachmentOptions { wait_for_store: Duration::from_millis(400), socket_only: true, ..options() };
    // The answers: a new stage, the bytes of a query, damage although DMA carried nothing, and the
    // outcomes of two transactions.
    let answers: [(&[u8], bool); 4] =
        [(&[0, 1, 5], false), (&[0, 3, 1, 0], false), (&[0, 7], true), (&[0, 6, 2, 0, 0], true)];
    for (answer, ends_attachment) in answers {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        let evil = false_answers(&at, answer, Bytes::new());
        let osd = async {
            let attachment =
                Attachment::connect(StoreEndpoint::Unix(at.clone()), options.clone()).await.unwrap();
            let store = attachment.store(0);
            let mut calls = Vec::new();
            if let Ok(stage) = store.stage(4096).await {
                calls.push(store.stage_write(stage, 0, Payload::compute(0, pattern(1, 4096))));
                store.stage_release(stage);
            }
            let touch = || transaction(Op::Touch { oid: oid(1) });
            calls.push(store.queue_transaction(touch()));
            calls.push(store.queue_transaction_in(1, touch()));
            calls.push(store.umount());
            for (n, call) in calls.into_iter().enumerate() {
                let done = call.await;
                assert!(matches!(done, Err(store::StoreError::Disconnected(_))), "{n} {answer:?}: {done:?}");
            }
            let failure = attachment.status().last_failure.unwrap_or_default();
            assert_eq!(
                failure.contains("protocol") || failure.contains("socket"),
                ends_attachment,
                "{failure}"
            );
        };
        ends_beside(evil, osd).await;
    }
}

/// Waits for the end of `osd`, even if the hostile store ends earlier.
async fn ends_beside(store: impl Future<Output = ()>, osd: impl Future<Output = ()>) {
    tokio::select! {
        () = osd => {}
        () = async { store.await; std::future::pending().await } => {}
        () = tokio::time::sleep(Duration::from_secs(20)) => panic!("the calls of the osd did not end"),
    }
}

#[tokio::test]
async fn reads_with_false_answers_fail_as_disconnected() {
    let options =
        AttachmentOptions { wait_for_store: Duration::from_millis(400), socket_only: true, ..options() };
    // The store sends more data than announced, or a piece of data that was not requested.
    for (len, sent, ends_attachment) in [(10, 8192, true), (4096, 4096, false)] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        // The encoding of `Ok`, then of the third variant (`Read`), with no checksums.
        let mut answer = vec![0, 2];
        [0, len, 0, 1 << 20].into_iter().for_each(|n| varint(&mut answer, n));
        let evil = false_answers(&at, &answer, pattern(1, sent));
        let osd = async {
            let attachment =
                Attachment::connect(StoreEndpoint::Unix(at.clone()), options.clone()).await.unwrap();
            let store = attachment.store(0);
            let dest = attachment.pool().try_alloc(4096).unwrap();
            let short = store.read(&cid(), &oid(1), 0, 4096, dest).await;
            let long = store.read(&cid(), &oid(1), 0, 16_384, None).await;
            let why = |read: &store::Result<_>| matches!(read, Err(store::StoreError::Disconnected(_)));
            assert!(why(&long) && why(&short) == ends_attachment, "{short:?} {long:?}");
            let failure = attachment.status().last_failure.unwrap_or_default();
            assert_eq!(
                failure.contains("protocol") || failure.contains("socket"),
                ends_attachment,
                "{failure}"
            );
        };
        ends_beside(evil, osd).await;
    }
}

#[tokio::test]
async fn the_reader_detects_data_that_does_not_match_its_checksums() {
    // The store does not verify the payload.
    let options = AttachmentOptions { verify_every: 0, ..options() };
    let node = common::node_of(Path::Dma, Arc::new(store::MemStore::new()), options).await;
    make_collection(&node.store).await;
    let mut damaged = pattern(3, 8192).to_vec();
    let checksums = Payload::compute(0, Bytes::from(damaged.clone())).checksums().to_vec();
    damaged[5000] ^= 4;
    let payload = Payload::from_parts(0, Bytes::from(damaged), checksums).unwrap();
    let write = Op::Write { oid: oid(0), offset: 0, source: WriteSource::Inline(payload) };
    node.store.queue_transaction(transaction(write)).await.unwrap();
    let read = node.store.read(&cid(), &oid(0), 0, 8192, None).await.unwrap();
    assert_eq!(read.verify().unwrap_err().offset, 4096);
}
