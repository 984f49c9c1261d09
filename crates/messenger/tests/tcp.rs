//! The conformance suite over TCP. The bytes of its transports pass through a pump that can break
//! and freeze them.

#[path = "support/pumped.rs"]
mod pumped;

use std::sync::Arc;
use std::time::Duration;

use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::{ConnectionConfig, StreamStack};
use pumped::PumpedTcp;

fn rig() -> Rig {
    let grace = Duration::from_millis(900);
    let config =
        ConnectionConfig { heartbeat: Duration::from_millis(150), grace, ..ConnectionConfig::default() };
    let network = PumpedTcp::new();
    let (cut, freeze) = (network.clone(), network.clone());
    Rig {
        stack: Arc::new(StreamStack::over(network, config)),
        address: "127.0.0.1:0".into(),
        cut: Box::new(move || cut.cut()),
        freeze: Box::new(move |frozen| freeze.freeze(frozen)),
        grace,
        patience: Rig::PATIENCE,
        slow: false,
        seed: conformance::seed(),
    }
}

macro_rules! over_tcp {
    ($check:ident) => {
        #[tokio::test]
        async fn $check() {
            let rig = rig();
            let check = conformance::$check(&rig);
            tokio::time::timeout(Duration::from_secs(50), check).await.expect("the check hangs");
        }
    };
}

outboard_messenger::for_each_conformance_check!(over_tcp);
