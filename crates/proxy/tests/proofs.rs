//! Attacks on the proof of both ends of a control connection over TCP.

mod common;

use std::sync::Arc;
use std::time::Duration;

use channel::{ChannelHello, SeatClaim, Socket, VERSION};
use common::{options, target};
use identity::{Identity, KeyHash, Trust, UserDirectory, UserName};
use outboard_proxy::{Attachment, AttachmentOptions, Server, ServerOptions, StoreEndpoint, StoreListener};
use store::MemStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Accepts one osd.
struct OnlyOsd(KeyHash);

impl UserDirectory for OnlyOsd {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        (*key == self.0).then(|| UserName { id: 0, tenant_id: 0, tenant: "main".into(), user: "osd".into() })
    }
}

struct World {
    osd: Identity,
    store: Identity,
    endpoint: String,
    _server: Server,
}

impl World {
    fn start() -> World {
        let (osd, store) = (Identity::generate(), Identity::generate());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let trust = Trust::server(&store, Arc::new(OnlyOsd(osd.key())));
        let server = ServerOptions { trust, ..ServerOptions::default() };
        let targets = vec![target(Arc::new(MemStore::new()))];
        let server = Server::serve(StoreListener::Tcp(listener), targets, server).unwrap();
        World { osd, store, endpoint, _server: server }
    }

    /// Attaches as an osd with this trust. Returns the reason if that is refused.
    async fn attach(&self, trust: Trust) -> Result<Attachment, String> {
        let wait_for_store = Duration::from_millis(500);
        let options = AttachmentOptions { trust, socket_only: true, wait_for_store, ..options() };
        let attached = Attachment::connect(StoreEndpoint::Tcp(self.endpoint.clone()), options).await;
        attached.map_err(|e| e.to_string())
    }
}

#[tokio::test]
async fn osd_and_store_accept_only_each_other() {
    let world = World::start();
    let stranger = Identity::generate();
    let refused = world.attach(Trust::client(&stranger, world.store.key())).await.err().unwrap();
    assert!(refused.contains("does not accept the osd's key") && refused.contains("keys/osd"), "{refused}");
    let refused = world.attach(Trust::client(&world.osd, stranger.key())).await.err().unwrap();
    assert!(refused.contains(&world.store.key().to_string()), "{refused}");
    world.attach(Trust::client(&world.osd, world.store.key())).await.unwrap();
}

#[tokio::test]
async fn a_peer_without_proof_gets_no_welcome() {
    let world = World::start();
    let hello = ChannelHello {
        version_min: VERSION,
        version_max: VERSION,
        nonce: 7,
        memory: None,
        outstanding: 16,
        seat: SeatClaim { osd: 1, seat: 0, seats: 1 },
    };
    let socket = Socket::tcp(TcpStream::connect(&world.endpoint).await.unwrap()).unwrap();
    let joined = tokio::time::timeout(Duration::from_secs(20), channel::join(socket, &hello)).await;
    assert!(joined.expect("the store closes the connection").is_err());
    world.attach(Trust::client(&world.osd, world.store.key())).await.unwrap();
}

/// Passes bytes between an osd and the store, and changes one byte of the first records of the osd.
async fn altered(world: &World, at: usize) -> Result<Attachment, String> {
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = relay.local_addr().unwrap().to_string();
    let to = world.endpoint.clone();
    let relaying = async move {
        loop {
            let (mut near, _) = relay.accept().await.unwrap();
            let mut far = TcpStream::connect(&to).await.unwrap();
            let (mut passed, mut up, mut down) = (0, [0; 4096], [0; 4096]);
            loop {
                tokio::select! {
                    read = near.read(&mut up) => {
                        let Ok(len @ 1..) = read else { break };
                        if (passed..passed + len).contains(&at) {
                            up[at - passed] ^= 1;
                        }
                        passed += len;
                        if far.write_all(&up[..len]).await.is_err() { break }
                    }
                    read = far.read(&mut down) => {
                        let Ok(len @ 1..) = read else { break };
                        if near.write_all(&down[..len]).await.is_err() { break }
                    }
                }
            }
        }
    };
    let through = World { osd: world.osd.clone(), store: world.store.clone(), endpoint, ..World::start() };
    let trust = Trust::client(&world.osd, world.store.key());
    tokio::select! {
        attached = through.attach(trust) => attached,
        () = relaying => unreachable!("the relay never ends"),
    }
}

#[tokio::test]
async fn an_altered_proof_is_refused() {
    let world = World::start();
    assert!(altered(&world, usize::MAX).await.is_ok(), "the relay alone does no harm");
    // The ClientHello begins after the length and the headers of the record and the message, with the
    // version and the random numbers. The second flight of the osd follows it.
    for at in [12, 20, 300, 400] {
        assert!(altered(&world, at).await.is_err(), "byte {at}");
    }
    world.attach(Trust::client(&world.osd, world.store.key())).await.unwrap();
}
