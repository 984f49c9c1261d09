//! [`LocalStoreSet`]: the stores in this process.

use std::sync::Arc;

use base::BoxFuture;
use base::block::Payload;
use futures::future::join_all;
use uuid::Uuid;

use super::{
    Coded, Engines, FragmentBuf, FragmentBytes, HostReading, Parity, StoreSet, StoreStage, StripeError,
    StripeWrite, TargetTransaction,
};
use crate::{ObjectStore, StoreCalls, StoreError, StoreFuture, StoreRequest, ready};

/// Maximum total size of the fragments of one call, in bytes. The value is arbitrary.
const MAX_BYTES: usize = 64 << 20;

/// The stores in this process.
pub struct LocalStoreSet {
    stores: Vec<(Uuid, Arc<dyn ObjectStore>)>,
    engines: Arc<Engines>,
}

impl LocalStoreSet {
    /// Creates the set from the stores and their UUIDs.
    #[must_use]
    pub fn new(stores: Vec<(Uuid, Arc<dyn ObjectStore>)>, engines: Arc<Engines>) -> LocalStoreSet {
        LocalStoreSet { stores, engines }
    }

    fn start(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> Result<BoxFuture<'static, Result<(), StripeError>>, StripeError> {
        write.check()?;
        let parts = self.parts(&write)?;
        let (len, m) = (write.fragment_len(), write.parity_count());
        let buffers = match write.parity {
            Parity::By(_) => (0..m).map(|_| FragmentBuf::heap(len)).collect(),
            Parity::Here(_) | Parity::Copies => Vec::new(),
        };
        let data = write.data.into_iter().map(FragmentBytes::into_payload).collect::<Result<_, _>>()?;
        Ok(write_parts(&self.engines, parts, write.offset, data, write.parity, buffers, coded))
    }

    fn parts(&self, write: &StripeWrite) -> Result<Vec<Option<StoreStage>>, StripeError> {
        let find = |part: &Option<(Uuid, crate::StageId)>| {
            let Some((uuid, stage)) = part else { return Ok(None) };
            let found = self.stores.iter().find(|(known, _)| known == uuid);
            let (_, store) = found.ok_or(StoreError::NoSuchStage(stage.0))?;
            Ok(Some((Arc::clone(store), *stage)))
        };
        write.parts.iter().map(find).collect()
    }
}

impl StoreSet for LocalStoreSet {
    fn max_bytes(&self) -> usize {
        MAX_BYTES
    }

    fn stage_stripes(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>> {
        self.start(write, coded).unwrap_or_else(|e| Box::pin(std::future::ready(Err(e))))
    }

    fn queue_transactions(&self, transactions: Vec<TargetTransaction>) -> Vec<StoreFuture> {
        let queue = |TargetTransaction { uuid, incarnation, transaction }| match self
            .stores
            .iter()
            .find(|(known, _)| *known == uuid)
        {
            Some((_, store)) => store.submit(StoreRequest::Transact { transaction, incarnation }),
            None => ready(Err(StoreError::Absent(format!("target {uuid} has no store here")))),
        };
        transactions.into_iter().map(queue).collect()
    }

    fn host_reading(&self, with_store: bool) -> BoxFuture<'static, crate::Result<HostReading>> {
        Box::pin(std::future::ready(self.engines.host_reading(with_store)))
    }
}

/// Writes fragments to byte `offset` of their stages. Each payload in `data` is one data fragment.
/// If `parity` names a device, that device computes the parity into `buffers`.
pub fn write_parts(
    engines: &Engines,
    parts: Vec<Option<StoreStage>>,
    offset: u64,
    mut data: Vec<Payload>,
    parity: Parity,
    buffers: Vec<FragmentBuf>,
    coded: Option<Coded>,
) -> BoxFuture<'static, Result<(), StripeError>> {
    let coder = match parity {
        Parity::By(coder) if !buffers.is_empty() => coder,
        Parity::By(_) => return Box::pin(write_all(parts, offset, data)),
        Parity::Copies => {
            let fragment = data[0].clone();
            data.resize(parts.len(), fragment);
            return Box::pin(write_all(parts, offset, data));
        }
        Parity::Here(parity) => {
            let parity = parity.into_iter().map(FragmentBytes::into_payload).collect::<Result<Vec<_>, _>>();
            return Box::pin(async move {
                data.extend(parity?);
                write_all(parts, offset, data).await
            });
        }
    };
    let encoding = engines.encode(coder, data.clone(), buffers);
    Box::pin(async move {
        let (parity, took) = encoding.await?;
        if let Some(coded) = coded {
            // The caller may have dropped the receiver; ignore the error.
            let _ = coded.send(took);
        }
        data.extend(parity);
        write_all(parts, offset, data).await
    })
}

/// Writes all fragments. The error names the fragment that failed.
async fn write_all(
    parts: Vec<Option<StoreStage>>,
    offset: u64,
    fragments: Vec<Payload>,
) -> Result<(), StripeError> {
    let writes = parts.into_iter().zip(fragments).enumerate().filter_map(|(number, (part, fragment))| {
        let (store, stage) = part?;
        let writing = store.stage_write(stage, offset, fragment);
        Some(async move { writing.await.map_err(|e| StripeError::Part(number, e)) })
    });
    join_all(writes).await.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::clock::Instant;
    use base::fault::{Faults, Site};
    use bytes::Bytes;
    use ec::offload::accelerator::{self, AcceleratorOptions};
    use ec::offload::batch::EngineRate;

    use super::super::{EngineOptions, ParityDevice};
    use super::*;
    use crate::MemStore;
    use crate::conformance::{Striped, seed};

    async fn passes_the_conformance_suite(engines: Engines) {
        let engines = Arc::new(engines);
        let store = |uuid| (Uuid::from_u128(uuid), Arc::new(MemStore::new()) as Arc<dyn ObjectStore>);
        let stores: Vec<(Uuid, Arc<dyn ObjectStore>)> = (1..=6).map(store).collect();
        let stripes = Arc::new(LocalStoreSet::new(stores.clone(), Arc::clone(&engines)));
        Striped { stripes, stores }.run(seed()).await;
        let stats = engines.stats();
        assert!(stats.iter().all(|engine| engine.tasks > 0 && engine.failed == 0), "{stats:?}");
    }

    #[tokio::test]
    async fn local_stripes_pass_the_conformance_suite() {
        let accelerator = accelerator::start(AcceleratorOptions::new(EngineRate::paper(1e12))).unwrap();
        let engines = Engines::start(EngineOptions::default(), Some(accelerator)).unwrap();
        passes_the_conformance_suite(engines).await;
    }

    #[tokio::test(start_paused = true)]
    async fn local_stripes_without_threads_pass_the_conformance_suite() {
        passes_the_conformance_suite(Engines::inline(Faults::default(), true)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn faults_of_engines_without_threads_fail_and_delay_tasks_until_they_are_cleared() {
        let faults = Faults::default();
        let engines = Engines::inline(faults.clone(), true);
        for (engine, coder) in [ParityDevice::Host, ParityDevice::Accelerator].into_iter().enumerate() {
            let encode = async || {
                let data = Payload::compute(0, Bytes::from(vec![7; 4096]));
                let parity = FragmentBuf::heap(4096);
                let began = Instant::now();
                let encoded = engines.encode(coder, vec![data.clone(), data], vec![parity]).await;
                (encoded.is_ok(), began.elapsed() >= Duration::from_millis(200))
            };
            faults.arm("ec.offload=fail,count=1".parse().unwrap()).unwrap();
            faults.arm("ec.offload=stall,late=200ms".parse().unwrap()).unwrap();
            assert_eq!(encode().await, (false, false));
            assert_eq!(encode().await, (true, true));
            assert_eq!((faults.fired(Site::EcOffload), engines.stats()[engine].failed), (2, 1));
            faults.clear();
            assert_eq!(encode().await, (true, false));
        }
    }
}
