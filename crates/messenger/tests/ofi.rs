//! The conformance suite over libfabric: over its provider `tcp` on the loopback unless the environment says otherwise, e.g.
//! `OUTBOARD_TEST_FABRIC=verbs@192.0.2.1` with an address of a network device that has RDMA. With receive buffers that connections
//! share, and with such of their own.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

use std::sync::Arc;
use std::time::Duration;

use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::ofi::{Ofi, OfiConfig, ReceiveQueueKind};
use outboard_messenger::{SessionConfig, StreamStack};

/// The provider, and where to listen.
fn provider() -> (String, String) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("PROVIDER@ADDRESS");
    (provider.to_owned(), format!("{address}:0"))
}

/// `None`, said loudly, where there is no libfabric. In CI that is a failure.
fn rig(receive_queue: ReceiveQueueKind) -> Option<Rig> {
    let (provider, address) = provider();
    let slow = provider != "tcp";
    let grace = Duration::from_millis(if slow { 3000 } else { 300 });
    let config = SessionConfig { heartbeat: grace / 6, grace, ..SessionConfig::default() };
    let ofi = match Ofi::new(OfiConfig { receive_queue, ..OfiConfig::new(&provider) }) {
        Ok(ofi) => ofi,
        Err(e) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{e}"),
        Err(e) => {
            eprintln!("SKIPPED: {e}");
            return None;
        }
    };
    let (cut, freeze) = (ofi.control(), ofi.control());
    Some(Rig {
        stack: Arc::new(StreamStack::over(ofi, config)),
        address,
        cut: Box::new(move || cut.cut()),
        freeze: Box::new(move |frozen| freeze.freeze(frozen)),
        grace,
        seed: conformance::seed(),
    })
}

macro_rules! with_queue {
    ($queue:expr, $check:ident) => {
        #[tokio::test]
        async fn $check() {
            let Some(rig) = super::rig($queue) else { return };
            let check = super::conformance::$check(&rig);
            tokio::time::timeout(std::time::Duration::from_secs(100), check).await.expect("the check hangs");
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
