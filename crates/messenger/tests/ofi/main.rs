//! The conformance suite over libfabric, with shared receive buffers and with receive buffers per
//! connection. The default is the provider `tcp` on the loopback interface. The environment
//! variable `OUTBOARD_TEST_FABRIC=verbs@192.0.2.1` chooses another provider and address, here those
//! of an RDMA device.

#[path = "../support/begin.rs"]
mod begin;
mod hostile;
mod killed;
mod limits;
mod paths;
#[path = "../support/pumped.rs"]
mod pumped;
mod users;

use std::sync::Arc;
use std::time::Duration;

use identity::Trust;
use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::ofi::{Ofi, OfiConfig, OfiControl, ReceiveQueueKind};
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::{ConnectionConfig, Path, StreamStack};
use pumped::PumpedTcp;

/// The provider, and the address at which to listen.
fn provider() -> (String, String) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("PROVIDER@ADDRESS");
    (provider.to_owned(), format!("{address}:0"))
}

/// The heartbeat and the grace period. RDMA is tested in an emulated machine, which needs longer
/// times.
fn patience(provider: &str) -> (Duration, Duration) {
    let grace = Duration::from_millis(if provider == "tcp" { 900 } else { 3000 });
    (grace / 6, grace)
}

/// Loads libfabric.
///
/// # Panics
/// If libfabric cannot be used.
fn load(config: OfiConfig) -> Ofi {
    Ofi::new(config).unwrap_or_else(|e| panic!("libfabric cannot be used: {e}; run \"scripts/setup test\""))
}

/// The path of a stack whose connections move to libfabric at once, and return to it soon after a
/// failure.
fn required_path(provider: &str, ofi: Ofi) -> Path {
    Path::new(&format!("ofi:{provider}"), Arc::new(ofi), Duration::from_millis(50)).required(true)
}

fn rig(receive_queue: ReceiveQueueKind) -> Rig {
    patient_rig(receive_queue, 1)
}

/// Creates a rig whose grace period is the usual one multiplied by `times`.
fn patient_rig(receive_queue: ReceiveQueueKind, times: u32) -> Rig {
    rig_with(receive_queue, times, Trust::default())
}

fn rig_with(receive_queue: ReceiveQueueKind, times: u32, trust: Trust) -> Rig {
    controlled_rig(receive_queue, times, trust).0
}

/// Creates a rig, and returns the control of its libfabric transport too.
fn controlled_rig(receive_queue: ReceiveQueueKind, times: u32, trust: Trust) -> (Rig, Arc<OfiControl>) {
    let (provider, address) = provider();
    let (heartbeat, grace) = patience(&provider);
    let grace = grace * times;
    let config = ConnectionConfig { heartbeat, grace, trust, ..ConnectionConfig::default() };
    let ofi = load(OfiConfig { receive_queue, ..OfiConfig::new(&provider) });
    let (control, cut, freeze) = (ofi.control(), ofi.control(), ofi.control());
    let tcp = PumpedTcp::new();
    let (cut_tcp, freeze_tcp) = (tcp.clone(), tcp.clone());
    let rig = Rig {
        stack: Arc::new(StreamStack::over(tcp, config).with_path(required_path(&provider, ofi))),
        address,
        cut: Box::new(move || cut.cut() + cut_tcp.cut()),
        freeze: Box::new(move |frozen| {
            freeze.freeze(frozen);
            freeze_tcp.freeze(frozen);
        }),
        grace,
        patience: Rig::PATIENCE,
        slow: provider != "tcp",
        seed: conformance::seed(),
    };
    (rig, control)
}

macro_rules! with_queue {
    ($queue:expr, $check:ident) => {
        #[tokio::test]
        async fn $check() {
            let rig = super::rig($queue);
            let check = super::conformance::$check(&rig);
            // A thousand connections take long in an emulated machine.
            tokio::time::timeout(std::time::Duration::from_secs(400), check).await.expect("the check hangs");
        }
    };
}

mod shared {
    macro_rules! check {
        ($check:ident) => {
            with_queue!(super::ReceiveQueueKind::Shared, $check);
        };
    }
    outboard_messenger::for_each_conformance_check!(check);
}

mod per_connection {
    macro_rules! check {
        ($check:ident) => {
            with_queue!(super::ReceiveQueueKind::PerConnection, $check);
        };
    }
    outboard_messenger::for_each_conformance_check!(check);
}

/// If a source has its data in memory, a pull does not call the source. A sink receives pushed data
/// when its offer is finished.
#[tokio::test]
async fn bulk_data_in_memory_moves_by_one_sided_transfers() {
    use outboard_messenger::{ConnectOptions, ConnectionEvent, Message};
    let rig = rig(ReceiveQueueKind::Shared);
    let mut listener = rig.listen().await;
    let endpoint = listener.endpoint();
    let connecting = rig.stack.connect(&endpoint, ConnectOptions::default());
    let (client, server) = tokio::join!(connecting, listener.accept());
    let ((client, mut replies), (server, _requests)) = (client.expect("connects"), server.expect("accepts"));
    assert!(client.limits().one_sided && server.limits().one_sided);
    let (patience, pool) = (Duration::from_secs(30), conformance::pool());
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i >> 3) as u8).collect();
    let from = conformance::Buffer::in_memory(0, &data);
    let source = client.offer_source(Arc::clone(&from) as _).expect("offered");
    let dest = pool.alloc(data.len()).await.expect("a buffer");
    let pulled = server.bulk_read(&source.descriptor, 0, dest, patience).await.expect("pulled");
    assert!(
        pulled.buf[..] == data[..] && from.taken() == 0,
        "the pull read {} bytes through the source",
        from.taken()
    );
    source.finish();

    let room = conformance::Buffer::new(0, &vec![0; data.len()]);
    let sink = client.offer_sink(Arc::clone(&room) as _, 0).expect("offered");
    let payload = base::block::Payload::from_parts(0, pulled.buf.freeze(), pulled.checksums).expect("fits");
    server.bulk_write(&sink.descriptor, 0, payload, patience).await.expect("pushed");
    server.send(Message { header: "pushed".into(), ..Message::default() }).await.expect("sent");
    assert!(matches!(replies.next().await, ConnectionEvent::Message(_)));
    assert_eq!(room.filled(), 0, "the data did not arrive in frames");
    sink.finish();
    assert!(room.content() == data);
    // A server's offer is never exposed, so that no client can reach the server's memory.
    let own = server.offer_source(conformance::Buffer::in_memory(0, &data)).expect("offered");
    assert!(own.descriptor.remote.is_none());
}

/// The reader keeps all messages, so its packet buffers run out, and the messenger copies further
/// packets.
#[tokio::test]
async fn messages_arrive_although_a_reader_keeps_all_packet_buffers() {
    use outboard_messenger::{ConnectOptions, ConnectionEvent, Message, NetworkStack};
    const COUNT: usize = 4000;
    let (provider, address) = provider();
    let client = load(OfiConfig::new(&provider));
    // 2 MiB hold 128 packets of 16 KiB; the messages need about 1000.
    let server = load(OfiConfig { packet_memory_bytes: 2 << 20, ..OfiConfig::new(&provider) });
    let (heartbeat, grace) = patience(&provider);
    let config = ConnectionConfig { heartbeat, grace, ..ConnectionConfig::default() };
    let [client, server] = [client, server].map(|ofi| {
        StreamStack::over(Tcp::default(), config.clone()).with_path(required_path(&provider, ofi))
    });
    let mut listener = server.listen(&address).await.expect("listens");
    let endpoint = listener.endpoint();
    let (client, server) =
        tokio::join!(client.connect(&endpoint, ConnectOptions::default()), listener.accept());
    let ((client, _replies), (_server, mut requests)) = (client.expect("connects"), server.expect("accepts"));
    let payload = |at: usize| base::block::Payload::compute(0, vec![at as u8; 4096].into());
    let send = async {
        for at in 0..COUNT {
            let message = Message { payload: payload(at), ..Message::default() };
            client.send(message).await.expect("sent");
        }
    };
    let receive = async {
        let mut kept = Vec::new();
        while kept.len() < COUNT {
            match requests.next().await {
                ConnectionEvent::Message(message) => kept.push(message),
                // The connection moves from TCP to libfabric.
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed if kept.is_empty() => {}
                other => panic!("after {} messages: {other:?}", kept.len()),
            }
        }
        kept
    };
    let both = async { tokio::join!(send, receive).1 };
    let kept = tokio::time::timeout(Duration::from_secs(60), both).await.expect("the connection stalled");
    for (at, message) in kept.iter().enumerate() {
        assert!(message.payload.data().iter().all(|byte| *byte == at as u8), "message {at}");
    }
}
