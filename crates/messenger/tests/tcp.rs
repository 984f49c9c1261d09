//! The conformance suite over TCP.

use std::sync::Arc;
use std::time::Duration;

use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::{SessionConfig, TcpStack};

fn rig() -> Rig {
    let config = SessionConfig {
        heartbeat: Duration::from_millis(50),
        grace: Duration::from_millis(1000),
        ..SessionConfig::default()
    };
    let stack = Arc::new(TcpStack::new(config));
    Rig { stack, address: "127.0.0.1:0".into(), cut: Box::new(|| 0), seed: 1 }
}

macro_rules! conformance {
    ($($check:ident),* $(,)?) => { $(
        #[tokio::test]
        async fn $check() {
            let rig = rig();
            let check = conformance::$check(&rig);
            tokio::time::timeout(Duration::from_secs(30), check).await.expect("the check hangs");
        }
    )* };
}

conformance!(
    messages_keep_their_order,
    sizes_over_the_limits,
    unread_messages_hold_the_sender_back,
    bulk_both_ways,
    many_transfers_at_once,
    offers_are_guarded,
    slow_source_times_out,
);
