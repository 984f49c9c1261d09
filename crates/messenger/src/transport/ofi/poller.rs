//! The task that drives a port: it takes completions from the completion queue and hands them to
//! the links.

use std::sync::{Arc, Weak};
use std::task::Poll;

use base::mem::ArenaBuf;
use base::spinner::Spinner;
use bytes::Bytes;
use fabric::{Completion, CompletionQueue, Operation, Waitable};
use tokio::io::unix::AsyncFd;

use super::descriptor::{Descriptor, is_readable};
use super::link::Link;
use super::packet::{HEADER_BYTES, PacketHeader};
use super::port::{Port, SHARED_QUEUE};

/// Tasks that a message goes through, one after the other, until it is answered: the session's, its user's, the session's.
const HOPS: usize = 4;

impl Port<Link> {
    /// Runs the port in the background of this runtime until its last link is gone.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let asleep = Descriptor::register(self.completions.clone())?;
        crate::spawn(drive(Arc::downgrade(self), asleep));
        Ok(())
    }

    /// Ends all links, because the domain cannot be used any more.
    fn fail_all(&self, why: &str) {
        for link in self.links() {
            link.fail(why);
        }
    }

    /// Marks the port as failed.
    pub(super) fn fail(&self, why: &str) {
        self.stop();
        self.fail_all(why);
        self.is_less_used();
    }

    /// Takes completions from the queue. Returns `false` if there were none.
    fn poll(&self, completions: &mut Vec<Completion>) -> bool {
        if let Err(e) = self.completions.poll(completions) {
            tracing::warn!(error = %e, "a completion queue has failed");
            self.fail("its completion queue has failed");
            return false;
        }
        let worked = !completions.is_empty();
        for completion in completions.drain(..) {
            match completion.operation {
                Operation::Receive => self.on_receive(completion),
                Operation::Send | Operation::Write | Operation::Read => {
                    if let Some(link) = self.link(completion.endpoint) {
                        link.on_completion(completion);
                    }
                }
            }
        }
        if self.domain.is_spoiled() {
            self.fail_all("the domain is opened anew after a transfer was broken off");
            self.is_less_used();
        }
        worked
    }

    fn on_receive(&self, completion: Completion) {
        let own = (completion.endpoint != SHARED_QUEUE).then(|| self.link(completion.endpoint)).flatten();
        let buf = match &own {
            Some(link) => link.take_posted(completion.token),
            None => self.take_posted(completion.token),
        };
        let Some(mut buf) = buf else { return };
        if let Err(e) = completion.result {
            match own {
                Some(link) => link.fail(&e.to_string()),
                // A connection that ends takes its receives along; the queue's own stay.
                None => tracing::debug!(error = %e, "a shared receive has failed"),
            }
            return;
        }
        buf.truncate(completion.len);
        let header = PacketHeader::decode(&buf);
        let sender = header.and_then(|header| {
            let known = self.link_of_packets(header.token)?;
            // With queues of its own a link is known without the token, which must still be right.
            own.as_ref().is_none_or(|own| Arc::ptr_eq(own, &known)).then_some((known, header))
        });
        let Some((link, header)) = sender else {
            match own {
                Some(link) => link.fail("a packet came that is not of this connection"),
                None => {
                    metrics::counter!("outboard_messenger_stray_packets").increment(1);
                    drop(buf);
                    self.repost_stray();
                }
            }
            return;
        };
        self.take_packet(&link, header, buf);
    }

    /// Posts a buffer for one that a stray packet took: somebody was promised it.
    fn repost_stray(&self) {
        // Without a link nobody was.
        let Some(link) = self.any_link() else { return };
        if let Some(fresh) = self.common.buffers.take()
            && let Err(why) = link.post_receive(fresh)
        {
            tracing::warn!(why, "a receive buffer is lost");
        }
    }

    /// Hands a packet to its link, in its buffer, and posts another one in its place. When there is none left, the packet is
    /// copied instead: so senders never wait for readers that keep what they got.
    fn take_packet(&self, link: &Arc<Link>, header: PacketHeader, buf: ArenaBuf) {
        let fresh = self.common.buffers.take();
        let content = match &fresh {
            Some(_) => buf.freeze().slice(HEADER_BYTES..),
            None => {
                metrics::counter!("outboard_messenger_copied_packets").increment(1);
                Bytes::copy_from_slice(&buf[HEADER_BYTES..])
            }
        };
        let wanted = link.on_packet(header, content);
        // One takes the place of the packet's own.
        let wanted = if wanted > 1 && !self.may_grow(wanted) { 1 } else { wanted };
        let more = std::iter::from_fn(|| self.common.buffers.take());
        for buf in fresh.into_iter().chain(more).take(wanted as usize) {
            if let Err(why) = link.post_receive(buf) {
                link.fail(&why);
                return;
            }
            link.on_posted();
        }
    }

    /// Grants credits to peers to which no packet was sent meanwhile.
    fn return_credits(&self) {
        for link in self.take_due().iter().filter_map(Weak::upgrade) {
            link.grant();
        }
    }
}

/// Yields to the other tasks of this thread. Unlike `tokio::task::yield_now`, this does not make
/// the runtime ask the system for events each time.
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

/// The queue's descriptor in the runtime's loop. While spinning pays it is not there: each packet would wake a loop that is awake.
type Asleep = AsyncFd<Descriptor<CompletionQueue>>;

/// The poller: takes completions while there are any, polls on for a while if this pays, and then
/// sleeps on the queue's descriptor in the thread's event loop.
async fn drive(port: Weak<Port<Link>>, asleep: Asleep) {
    if let Err(e) = drive_until_over(&port, asleep).await {
        tracing::warn!(error = %e, "a completion queue cannot be waited for");
    }
    if let Some(port) = port.upgrade() {
        port.stop();
        port.fail_all("its port is closed");
    }
}

async fn drive_until_over(port: &Weak<Port<Link>>, asleep: Asleep) -> std::io::Result<()> {
    let mut spinner = Spinner::default();
    let mut completions = Vec::new();
    let mut all_have_run = false;
    let mut asleep = Some(asleep);
    loop {
        let Some(port) = port.upgrade() else { return Ok(()) };
        port.common.control.thaw().await;
        if port.poll(&mut completions) {
            if spinner.worked() {
                asleep = None;
            }
            all_have_run = false;
            // What came is handled now, and answers take the credits along.
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
        // Sleeping and waking costs more than looking once more when nobody else has anything to do.
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
        tokio::select! {
            readable = fd.readable() => readable?.clear_ready(),
            () = port.changed() => {
                if port.is_unused() || !port.is_good() {
                    return Ok(());
                }
            }
        }
    }
}
