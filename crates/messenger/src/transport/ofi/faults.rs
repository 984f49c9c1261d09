//! Injected faults of paths over libfabric. They act between libfabric and the links: on the
//! completions that a port's poller takes, and on the operations that an endpoint posts.
//!
//! The site [`Site::MessengerPath`] is checked once per completion: when a packet has arrived, or
//! when an operation has ended.
//!
//! - *fail*: the completion reports an error, so its link ends, as with a broken queue pair.
//! - *stall*: all completions of the port are held back for a time. Meanwhile, the provider `tcp`
//!   moves no data.
//! - *drop*: the link loses the completion, and from then on all packets and transfers in both
//!   directions, until the link ends. No reliable transport loses a packet and delivers a later
//!   one. Connection events still arrive.

use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::fault::{Action, Faults, Site};
use fabric::{Completion, FabricError, Operation};

use super::endpoint_of;
use super::port::{Port, SHARED_QUEUE};
use crate::transport::packets::Link;
use crate::transport::packets::packet::PacketHeader;

/// Maximum time until a stall notices that the faults were disarmed.
const STALL_CHECK: Duration = Duration::from_millis(20);

/// EIO, the error number of an injected failure.
const EIO: i32 = 5;

impl Port<Link> {
    /// Injects faults into completions that are about to be handled. Returns the time for which
    /// the faults hold the completions back.
    pub(super) fn inject_faults(&self, completions: &mut [Completion]) -> Duration {
        let faults = &self.common.config.faults;
        let mut stall = Duration::ZERO;
        if !faults.any() {
            return stall;
        }
        for completion in completions {
            // Stray packets and completions of links that have ended have no effect in any case.
            let Some(link) = self.link_of(completion) else { continue };
            let Some(endpoint) = endpoint_of(&link).filter(|endpoint| !endpoint.loses_everything()) else {
                continue;
            };
            match faults.hit(Site::MessengerPath) {
                Some(Action::Stall(late)) => stall += late,
                Some(Action::Fail) => fail(&link, completion),
                Some(Action::Drop) => endpoint.lose_everything(),
                _ => {}
            }
        }
        stall
    }

    /// The link to which a completion belongs.
    fn link_of(&self, completion: &Completion) -> Option<Arc<Link>> {
        if completion.endpoint != SHARED_QUEUE {
            return self.link(completion.endpoint);
        }
        let len = completion.len;
        let header =
            self.peek_posted(completion.token, |buf| PacketHeader::decode(&buf[..len.min(buf.len())]));
        self.link_of_packets(header??.token)
    }
}

/// Makes the completion report an error.
fn fail(link: &Link, completion: &mut Completion) {
    let text = "a fault was injected".to_owned();
    let error = FabricError::Call { call: "the operation", code: EIO, text, advice: "" };
    if completion.operation == Operation::Receive {
        // A shared receive queue survives the end of a link, so its receives do not fail.
        link.fail(&error.to_string());
    } else {
        completion.result = Err(error);
    }
}

/// Waits until `stall` has passed, or until the faults are disarmed.
pub(super) async fn hold_back(faults: &Faults, stall: Duration) {
    let until = Instant::now() + stall;
    while faults.any() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(STALL_CHECK)).await;
    }
}
