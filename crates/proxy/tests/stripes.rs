//! Checks that writes of stripes through the channel have the same results as direct writes, on
//! every payload path and during faults of DMA.

mod common;

use std::sync::Arc;
use std::time::Duration;

use base::fault::{Faults, Site};
use channel::{ShmEngine, ShmOptions};
use common::load::{fault, watched};
use common::{Node, Path, cid, node_over, offering, oid, options, payload, transaction};
use ec::offload::accelerator::{self, AcceleratorOptions};
use ec::offload::batch::EngineRate;
use ec::{Code, Geometry, KernelChoice};
use outboard_proxy::{AttachmentOptions, ServedTarget, ServerOptions};
use store::conformance::{Striped, seed};
use store::stripes::{EngineOptions, Engines, FragmentBytes, Parity, ParityDevice, StripeError, StripeWrite};
use store::{MemStore, ObjectStore, Op, StoreCalls, StoreError, WriteSource};
use uuid::Uuid;

/// An emulated accelerator that computes at the full speed of this machine.
fn accelerator(faults: &Faults) -> ec::offload::worker::Worker {
    let options = AcceleratorOptions::new(EngineRate::paper(1e12));
    accelerator::start(AcceleratorOptions { faults: faults.clone(), ..options }).unwrap()
}

async fn striped(path: Path, options: AttachmentOptions, faults: &Faults) -> (Node, Striped) {
    let target = |uuid| ServedTarget { uuid, store: Arc::new(MemStore::new()) };
    let engines = Engines::start(EngineOptions::default(), Some(accelerator(faults))).unwrap();
    let server = ServerOptions { engines: Some(Arc::new(engines)), ..offering() };
    let node = node_over(path, (1..=6).map(Uuid::from_u128).map(target).collect(), options, server).await;
    let store = |at: usize| node.attachment.store(at) as Arc<dyn ObjectStore>;
    let stores = (1..).map(Uuid::from_u128).zip((0..6).map(store)).collect();
    let striped = Striped { stripes: node.attachment.store_set(), stores };
    (node, striped)
}

#[tokio::test]
async fn stripe_writes_are_correct_by_dma_and_over_sockets() {
    for path in [Path::Dma, Path::Unix, Path::Tcp] {
        let (node, striped) = striped(path, options(), &Faults::default()).await;
        striped.run(seed()).await;
        assert_eq!(node.attachment.status().incarnations, 1, "{path:?}");
        assert_eq!(node.server.status().violations, 0, "{path:?}");
    }
}

#[tokio::test]
async fn stripe_writes_are_correct_over_libfabric() {
    let (node, striped) = striped(Path::Ofi, options(), &Faults::default()).await;
    striped.run(seed()).await;
    assert_eq!(node.attachment.status().incarnations, 1);
}

#[tokio::test]
async fn stripe_writes_are_correct_while_dma_fails() {
    let mut fired = 0;
    for kind in ["fail", "corrupt", "stall,late=30ms"] {
        let faults = Faults::default();
        let options =
            AttachmentOptions { cool_down: Duration::from_millis(20), verify_every: 1, ..watched(&faults) };
        let (node, striped) = striped(Path::Dma, options, &Faults::default()).await;
        striped.run(seed()).await;
        faults.arm(fault(&format!("dma.transfer={kind},probability=0.02,seed={}", seed()))).unwrap();
        for round in 0..3 {
            striped.run_again(seed().wrapping_add(round)).await;
        }
        fired += faults.fired(Site::DmaTransfer);
        assert_eq!(node.attachment.status().incarnations, 1, "{kind}");
    }
    assert!(fired > 0, "the faults fired");
}

/// An engine whose transfers damage data, and the faults that cause the damage. The attachment does
/// not know these faults.
fn damaging(options: AttachmentOptions) -> (AttachmentOptions, Faults) {
    let faults = Faults::default();
    let engine = ShmEngine::start(ShmOptions { faults: faults.clone(), ..ShmOptions::default() }).unwrap();
    (AttachmentOptions { engine: Some(engine), ..options }, faults)
}

#[tokio::test]
async fn stripe_writes_are_correct_with_default_options_while_transfers_damage_data() {
    let (options, faults) = damaging(AttachmentOptions { cool_down: Duration::from_millis(5), ..options() });
    let (node, striped) = striped(Path::Dma, options, &Faults::default()).await;
    striped.run(seed()).await;
    faults.arm(fault(&format!("dma.transfer=corrupt,probability=0.05,seed={}", seed()))).unwrap();
    for round in 0..3 {
        striped.run_again(seed().wrapping_add(round)).await;
    }
    assert!(faults.fired(Site::DmaTransfer) > 0, "the faults fired");
    assert_eq!(node.attachment.status().incarnations, 1);
}

/// Even if the store verifies no payload, it never computes parity of damaged data. The damage would
/// get correct checksums if a fragment was reconstructed from such parity.
#[tokio::test]
async fn parity_is_never_computed_from_data_that_a_transfer_damaged() {
    let code = Code::new(Geometry::new(2, 1).unwrap(), KernelChoice::Auto.load().unwrap());
    for device in [ParityDevice::Host, ParityDevice::Accelerator] {
        let unverified = AttachmentOptions { cool_down: Duration::ZERO, verify_every: 0, ..options() };
        let (options, faults) = damaging(unverified);
        let (node, striped) = striped(Path::Dma, options, &Faults::default()).await;
        let mut fired = 0;
        for round in 0..16 {
            let data: Vec<FragmentBytes> = (0..2).map(|n| payload(round * 2 + n, 256 << 10).into()).collect();
            let [first, second] = [0, 1].map(|n: usize| data[n].pieces[0].clone());
            let mut parity = vec![0; 256 << 10];
            code.encode(&[&first, &second], &mut [&mut parity]).unwrap();
            let mut parts = Vec::new();
            for (uuid, store) in &striped.stores[..3] {
                parts.push(Some((*uuid, store.stage(256 << 10).await.unwrap())));
            }
            // While the offload cools down, the data takes another path and no fault fires.
            fired += faults.fired(Site::DmaTransfer);
            faults.clear();
            faults.arm(fault("dma.transfer=corrupt,count=1")).unwrap();
            let write = StripeWrite { parts: parts.clone(), offset: 0, data, parity: Parity::By(device) };
            striped.stripes.stage_stripes(write, None).await.unwrap();
            for ((part, (_, store)), expected) in
                parts.iter().flatten().zip(&striped.stores).zip([&first[..], &second, &parity])
            {
                let source = WriteSource::Staged { stage: part.1, offset: 0, len: 256 << 10 };
                let write = transaction(Op::Write { oid: oid(1), offset: 0, source });
                if round == 0 {
                    common::make_collection(store).await;
                }
                store.queue_transaction(write).await.unwrap();
                let read = store.read(&cid(), &oid(1), 0, 256 << 10, None).await.unwrap();
                read.verify().unwrap();
                assert!(read.contiguous() == *expected, "{device:?}, round {round}");
            }
        }
        assert!(fired > 0, "the fault fired");
        assert_eq!(node.attachment.status().incarnations, 1);
    }
}

/// The osd's memory may be damaged before the data is sent.
#[tokio::test]
async fn stripes_that_were_damaged_before_they_were_sent_are_refused() {
    for path in [Path::Dma, Path::Ofi, Path::Unix] {
        let (node, striped) = striped(path, options(), &Faults::default()).await;
        let kinds = [
            (2, Parity::By(ParityDevice::Host)),
            (2, Parity::By(ParityDevice::Accelerator)),
            (2, Parity::Here(vec![payload(3, 64 << 10).into()])),
            (1, Parity::Copies),
        ];
        for (k, parity) in kinds {
            let mut data: Vec<FragmentBytes> = (0..k).map(|n| payload(n, 64 << 10).into()).collect();
            let mut bytes = data[0].pieces[0].to_vec();
            bytes[12_345] ^= 2;
            data[0].pieces[0] = bytes.into();
            let mut parts = Vec::new();
            for (uuid, store) in &striped.stores[..k as usize + 1] {
                parts.push(Some((*uuid, store.stage(64 << 10).await.unwrap())));
            }
            let what = format!("{parity:?}");
            let write = StripeWrite { parts, offset: 0, data, parity };
            let refused = striped.stripes.stage_stripes(write, None).await;
            let is_refused = matches!(refused, Err(StripeError::Store(StoreError::BadPayload(_))));
            assert!(is_refused, "{what:.40}: {refused:?}");
        }
        let status = node.attachment.status();
        assert_eq!((status.incarnations, status.offload.health.failures), (1, 0), "DMA damaged nothing");
    }
}

#[tokio::test]
async fn a_failed_or_missing_accelerator_is_reported_as_a_coding_error() {
    let faults = Faults::default();
    let (_node, striped) = striped(Path::Dma, options(), &faults).await;
    faults.arm(fault("ec.offload=fail,count=1")).unwrap();
    let piece = bytes::Bytes::from(vec![7; 8192]);
    let fragment: FragmentBytes = base::block::Payload::compute(0, piece).into();
    let (uuid, store) = &striped.stores[0];
    let stage = store.stage(8192).await.unwrap();
    let write = |coder| StripeWrite {
        parts: vec![Some((*uuid, stage)), None, None],
        offset: 0,
        data: vec![fragment.clone(), fragment.clone()],
        parity: Parity::By(coder),
    };
    let failed = striped.stripes.stage_stripes(write(ParityDevice::Accelerator), None).await;
    assert!(matches!(failed, Err(StripeError::Coding(_))), "{failed:?}");
    assert_eq!(faults.fired(Site::EcOffload), 1);
    striped.stripes.stage_stripes(write(ParityDevice::Accelerator), None).await.unwrap();
    striped.stripes.stage_stripes(write(ParityDevice::Host), None).await.unwrap();

    let target = ServedTarget { uuid: Uuid::from_u128(1), store: Arc::new(MemStore::new()) };
    let node = node_over(Path::Dma, vec![target], options(), ServerOptions::default()).await;
    let stage = node.store.stage(8192).await.unwrap();
    let write = StripeWrite {
        parts: vec![Some((Uuid::from_u128(1), stage)), None, None],
        ..write(ParityDevice::Accelerator)
    };
    let none = node.attachment.store_set();
    let none = store::stripes::StoreSet::stage_stripes(&*none, write, None).await;
    assert!(matches!(none, Err(StripeError::Coding(_))), "{none:?}");
}

#[tokio::test]
async fn the_host_reports_its_processor_load() {
    let (_node, striped) = striped(Path::Dma, options(), &Faults::default()).await;
    let host = striped.stripes.host_reading(true).await.unwrap();
    assert!(host.reading.all >= host.reading.busy && host.reading.busy > Duration::ZERO);
}
