//! [`ProxyStoreSet`]: calls that concern several targets of a store process.

use std::sync::Arc;

use base::BoxFuture;
use base::process::OwnUsage;
use store::stripes::{Coded, HostReading, StoreSet, StripeError, StripeWrite, TargetTransaction};
use store::{StoreError, StoreFuture, StoreReply, ready};
use tokio::sync::oneshot;

use crate::calls::{answer_of, deadline, done, retrying, start, submit, unexpected};
use crate::messages::{CallAnswer, MAX_PARTS, StoreCall};
use crate::shared::AttachmentHandle;
use crate::store_channel::{AnswerUse, SubmittedTransaction};

/// Maximum number of bytes in a call. The checksums of this many bytes fit into a ring entry.
const MAX_BYTES: usize = 8 << 20;

/// All targets of a store process, for calls that concern several of them. If the store restarts,
/// unanswered writes and transactions fail with [`StoreError::Disconnected`].
pub struct ProxyStoreSet {
    handle: Arc<AttachmentHandle>,
}

impl ProxyStoreSet {
    pub(crate) fn new(handle: Arc<AttachmentHandle>) -> ProxyStoreSet {
        ProxyStoreSet { handle }
    }

    /// The index of the target of each transaction; `None` if the store process has no such target.
    fn target_indices(&self, transactions: &[TargetTransaction]) -> Vec<Option<u16>> {
        let state = self.handle.shared.lock();
        let targets = state.targets.as_deref().unwrap_or_default();
        let index = |one: &TargetTransaction| {
            let index = targets.iter().position(|target| target.uuid == one.uuid);
            index.and_then(|index| u16::try_from(index).ok())
        };
        transactions.iter().map(index).collect()
    }

    /// Asks how much the store's process uses of its machine.
    ///
    /// # Errors
    /// If the store does not answer in time.
    pub fn usage(&self) -> BoxFuture<'static, store::Result<OwnUsage>> {
        let answer = self.ask_host(StoreCall::Usage);
        Box::pin(async move {
            match answer.await? {
                CallAnswer::Usage(usage) => Ok(usage),
                _ => Err(unexpected()),
            }
        })
    }

    /// Makes a repeatable call that concerns no target.
    fn ask_host(&self, call: StoreCall) -> BoxFuture<'static, store::Result<CallAnswer>> {
        let ask = move |handle: &AttachmentHandle| {
            let call = call.clone();
            start(handle, 0, |store_channel, target, to| {
                store_channel.call(target, call, AnswerUse::Plain, to)
            })
        };
        let (handle, first) = (Arc::clone(&self.handle), ask(&self.handle));
        Box::pin(async move {
            let again = || ask(&handle);
            Ok(retrying(&handle, deadline(&handle), first, again).await?.answer)
        })
    }
}

impl StoreSet for ProxyStoreSet {
    fn max_bytes(&self) -> usize {
        let options = &self.handle.shared.options;
        let window = options.memory.layout.data_len as usize;
        let largest = MAX_BYTES.min(options.largest_request).min(window);
        1 << largest.max(1).ilog2()
    }

    fn stage_stripes(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>> {
        let targets = self.handle.shared.targets();
        let answers = start(&self.handle, 0, move |store_channel, _, answer_to| {
            store_channel.stage_stripes(&targets, write, answer_to, coded);
        });
        Box::pin(async move {
            match answer_of(answers).await.map_err(StoreError::from)?.answer {
                CallAnswer::Done => Ok(()),
                CallAnswer::NotCoded(why) => Err(StripeError::Coding(why)),
                CallAnswer::PartFailed(number, e) => Err(StripeError::Part(number.into(), e)),
                _ => Err(unexpected().into()),
            }
        })
    }

    fn queue_transactions(&self, transactions: Vec<TargetTransaction>) -> Vec<StoreFuture> {
        let mut requests: Vec<Vec<SubmittedTransaction>> = Vec::new();
        let targets = self.target_indices(&transactions);
        let mut replies = Vec::with_capacity(transactions.len());
        for (target, one) in targets.into_iter().zip(transactions) {
            let TargetTransaction { uuid, incarnation, transaction } = one;
            let absent = || StoreError::Absent(format!("the store process has no target {uuid}"));
            let target = match target.ok_or_else(absent).and_then(|at| transaction.validate().map(|()| at)) {
                Ok(target) => target,
                Err(e) => {
                    replies.push(ready(Err(e)));
                    continue;
                }
            };
            let (answer_to, answers) = oneshot::channel();
            let one = SubmittedTransaction { target, incarnation, transaction, answer_to: Some(answer_to) };
            // A request has at most one transaction for each target.
            let has_room = |request: &&mut Vec<SubmittedTransaction>| {
                request.len() < MAX_PARTS && request.iter().all(|other| other.target != target)
            };
            match requests.last_mut().filter(has_room) {
                Some(request) => request.push(one),
                None => requests.push(vec![one]),
            }
            replies.push(Box::pin(async move { done(answers).await.map(StoreReply::from) }));
        }
        for request in requests {
            submit(&self.handle, request);
        }
        replies
    }

    fn host_reading(&self, with_store: bool) -> BoxFuture<'static, store::Result<HostReading>> {
        let answer = self.ask_host(StoreCall::HostReading { with_store });
        Box::pin(async move {
            match answer.await? {
                CallAnswer::HostReading(reading) => Ok(reading),
                _ => Err(unexpected()),
            }
        })
    }
}
