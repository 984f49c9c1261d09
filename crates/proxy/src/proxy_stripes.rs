//! [`ProxyStripes`]: calls that write to several targets of a store process.

use std::sync::Arc;

use base::BoxFuture;
use store::StoreError;
use store::stripes::{Coded, HostReading, StripeError, StripeStores, StripeWrite};

use crate::calls::{answer_of, deadline, retrying, start, unexpected};
use crate::messages::{CallAnswer, StoreCall};
use crate::shared::AttachmentHandle;
use crate::store_channel::AnswerUse;

/// Maximum number of bytes in a call. The checksums of this many bytes fit into a ring entry.
const MAX_BYTES: usize = 8 << 20;

/// All targets of a store process, for calls that write to several of them. If the store restarts,
/// unanswered writes fail with [`StoreError::Disconnected`].
pub struct ProxyStripes {
    handle: Arc<AttachmentHandle>,
}

impl ProxyStripes {
    pub(crate) fn new(handle: Arc<AttachmentHandle>) -> ProxyStripes {
        ProxyStripes { handle }
    }
}

impl StripeStores for ProxyStripes {
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

    fn host_reading(&self) -> BoxFuture<'static, store::Result<HostReading>> {
        let ask = |handle: &AttachmentHandle| {
            start(handle, 0, |store_channel, target, to| {
                store_channel.call(target, StoreCall::HostReading, AnswerUse::Plain, to)
            })
        };
        let (handle, first) = (Arc::clone(&self.handle), ask(&self.handle));
        Box::pin(async move {
            let again = || ask(&handle);
            match retrying(&handle, deadline(&handle), first, again).await?.answer {
                CallAnswer::HostReading(reading) => Ok(reading),
                _ => Err(unexpected()),
            }
        })
    }
}
