//! The task that drives a port: it takes completions from the completion queue and hands them to
//! the links.

use std::sync::{Arc, Weak};
use std::task::Poll;

use base::mem::ArenaBuf;
use base::spinner::Spinner;
use fabric::{Completion, CompletionQueue, Operation, Waitable};
use tokio::io::unix::AsyncFd;

use super::OfiEndpoint;
use super::descriptor::{Descriptor, is_readable};
use super::endpoint_of;
use super::faults::hold_back;
use super::port::{Port, SHARED_QUEUE};
use crate::transport::packets::Link;
use crate::transport::packets::packet::PacketHeader;

/// Number of times that the poller yields after it found completions. Meanwhile, a message can pass
/// through the connection's task and its user's task, and the connection's task can send the
/// answer.
const HOPS: usize = 4;

impl Port<Link> {
    /// Starts the poller of this port on the current runtime. The poller ends when the last link
    /// has ended.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let asleep = Descriptor::register(self.completions.clone())?;
        crate::spawn(drive(Arc::downgrade(self), asleep));
        Ok(())
    }

    /// Ends all links of the port.
    fn fail_all(&self, why: &str) {
        for link in self.links() {
            link.fail(why);
        }
    }

    /// Marks the port as failed, and ends all its links.
    pub(super) fn fail(&self, why: &str) {
        self.stop();
        self.fail_all(why);
        self.is_less_used();
    }

    /// Takes completions from the queue. Returns `false` if the queue was empty or failed.
    fn take_completions(&self, completions: &mut Vec<Completion>) -> bool {
        if let Err(e) = self.completions.poll(completions) {
            tracing::warn!(error = %e, "a completion queue of libfabric has failed; its links end");
            self.fail("the completion queue has failed");
            return false;
        }
        !completions.is_empty()
    }

    /// Handles completions that were taken from the queue.
    fn handle_completions(&self, completions: &mut Vec<Completion>) {
        for completion in completions.drain(..) {
            match completion.operation {
                Operation::Receive => self.on_receive(completion),
                Operation::Send | Operation::Write | Operation::Read => {
                    if let Some(link) = self.link(completion.endpoint).filter(|link| !loses(link)) {
                        link.on_completion(completion);
                    }
                }
            }
        }
        if self.domain.is_spoiled() {
            self.fail_all("the protection domain must be reopened, because a read was interrupted");
            self.is_less_used();
        }
    }

    fn on_receive(&self, completion: Completion) {
        let own = (completion.endpoint != SHARED_QUEUE).then(|| self.link(completion.endpoint)).flatten();
        let buf = match &own {
            Some(link) => endpoint_of(link).and_then(|endpoint| endpoint.take_posted(completion.token)),
            None => self.take_posted(completion.token),
        };
        let Some(buf) = buf else { return };
        if let Err(e) = completion.result {
            match own {
                Some(link) => link.fail(&e.to_string()),
                // The end of a connection may make one receive fail. The other receives stay in the
                // queue.
                None => tracing::debug!(error = %e, "a shared receive has failed"),
            }
            return;
        }
        let len = completion.len.min(buf.len());
        let header = PacketHeader::decode(&buf[..len]);
        let sender = header.and_then(|header| {
            let known = self.link_of_packets(header.token)?;
            // With a receive queue per connection, the link is known without the token. The token
            // must still be correct.
            own.as_ref().is_none_or(|own| Arc::ptr_eq(own, &known)).then_some((known, header))
        });
        let Some((link, header)) = sender else {
            match own {
                Some(link) => link.fail("the peer sent a packet without the token of this connection"),
                None => {
                    metrics::counter!("outboard_messenger_stray_packets").increment(1);
                    // Without a link, no peer has credit.
                    if let Some(link) = self.any_link() {
                        repost(&link, buf);
                    }
                }
            }
            return;
        };
        if loses(&link) {
            return repost(&link, buf);
        }
        link.take_packet(header, buf, len);
    }

    /// Sends the owed credits to peers, unless another packet has carried the credits meanwhile.
    fn return_credits(&self) {
        for link in self.take_due().iter().filter_map(Weak::upgrade) {
            link.grant();
        }
    }
}

/// Whether an injected fault makes the link lose everything.
fn loses(link: &Link) -> bool {
    endpoint_of(link).is_some_and(OfiEndpoint::loses_everything)
}

/// Posts the buffer of a stray packet (with an unknown token) or of a lost packet again, because a
/// peer still has credit for the buffer.
fn repost(link: &Link, buf: ArenaBuf) {
    if let Err(why) = link.endpoint.post_receive(buf) {
        tracing::warn!(why, "cannot post a receive buffer again");
    }
}

/// Yields to the other tasks of this thread. Unlike `tokio::task::yield_now`, this function does
/// not make the runtime ask the system for events at every call.
async fn let_others_run() {
    let mut has_yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The registration of the queue's descriptor with the runtime. It is removed while polling finds
/// completions, because each packet would wake a runtime that is already awake.
type Asleep = AsyncFd<Descriptor<CompletionQueue>>;

/// The poller: takes completions until the queue is empty, and continues to poll for a short time
/// if polling has found completions lately. Then the poller sleeps until the runtime reports that
/// the queue's descriptor is readable.
async fn drive(port: Weak<Port<Link>>, asleep: Asleep) {
    if let Err(e) = drive_until_over(&port, asleep).await {
        tracing::warn!(error = %e, "cannot wait for a completion queue");
    }
    if let Some(port) = port.upgrade() {
        port.stop();
        port.fail_all("the port is closed");
    }
}

async fn drive_until_over(weak: &Weak<Port<Link>>, asleep: Asleep) -> std::io::Result<()> {
    let mut spinner = Spinner::default();
    let mut completions = Vec::new();
    let mut all_have_run = false;
    let mut asleep = Some(asleep);
    loop {
        let Some(mut port) = weak.upgrade() else { return Ok(()) };
        port.common.control.thaw().await;
        let worked = port.take_completions(&mut completions);
        let stall = port.inject_faults(&mut completions);
        if !stall.is_zero() {
            let faults = port.common.config.faults.clone();
            drop(port);
            hold_back(&faults, stall).await;
            port = match weak.upgrade() {
                Some(port) => port,
                None => return Ok(()),
            };
        }
        port.handle_completions(&mut completions);
        if worked {
            if spinner.worked() {
                asleep = None;
            }
            all_have_run = false;
            // Let other tasks handle the packets. Their answers also grant credits.
            drop(port);
            for _ in 0..HOPS {
                let_others_run().await;
            }
            continue;
        }
        port.return_credits();
        if !all_have_run && spinner.look_again(port.common.config.spin) {
            drop(port);
            let_others_run().await;
            continue;
        }
        // Let all other tasks run, and poll once more before sleeping: a sleep and a wake-up cost
        // more than one poll.
        if !std::mem::replace(&mut all_have_run, true) {
            drop(port);
            tokio::task::yield_now().await;
            continue;
        }
        all_have_run = false;
        let fd = match &asleep {
            Some(fd) => fd,
            None => asleep.insert(Descriptor::register(port.completions.clone())?),
        };
        let may_sleep =
            port.domain.fabric().may_sleep(&[&port.completions]).map_err(std::io::Error::other)?;
        if !may_sleep || is_readable(port.completions.wait_fd()) {
            drop(port);
            let_others_run().await;
            continue;
        }
        // The last link has ended or the port has failed at most once, so this branch does not starve
        // the other.
        tokio::select! {
            biased;
            () = port.changed() => {
                if port.is_unused() || !port.is_good() {
                    return Ok(());
                }
            }
            readable = fd.readable() => readable?.clear_ready(),
        }
    }
}
