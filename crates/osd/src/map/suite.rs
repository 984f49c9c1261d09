//! The conformance suite of [`MapStore`]. Each implementation runs it.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::BoxFuture;
use store::{MemStore, ObjectStore};
use uuid::Uuid;

use super::{MapStore, MemMapStore, NodeMap, TargetMapStore};
use crate::config::{OsdConfig, TargetRetry};
use crate::seal::Seal;
use crate::target::Target;
use crate::witness::{NodeWitness, WitnessAt, WitnessStorage};

/// A place that stores the map of one node.
trait Place {
    /// Opens the place, as a start of the node does.
    fn open(&self) -> Rc<dyn MapStore>;

    /// Makes saves fail, or succeed again.
    fn set_failing(&self, fails: bool);
}

impl Place for Rc<MemMapStore> {
    fn open(&self) -> Rc<dyn MapStore> {
        Rc::clone(self) as Rc<dyn MapStore>
    }

    fn set_failing(&self, fails: bool) {
        self.fails.set(fails.then_some(false));
    }
}

/// A node's targets and its witness, all in memory.
#[derive(Default)]
struct TargetsInMemory {
    stores: [Arc<MemStore>; 3],
    witness: Arc<MemWitness>,
}

struct MemWitness {
    content: Mutex<Option<Vec<u8>>>,
    /// Number of writes that succeed before all others fail.
    succeeds: AtomicU64,
}

impl Default for MemWitness {
    fn default() -> MemWitness {
        MemWitness { content: Mutex::default(), succeeds: AtomicU64::new(u64::MAX) }
    }
}

impl WitnessStorage for MemWitness {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().unwrap().clone())
    }

    fn replace(&self, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        let one_less = |left: u64| left.checked_sub(1);
        if self.succeeds.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_err() {
            return Box::pin(std::future::ready(Err(io::Error::other("injected"))));
        }
        *self.content.lock().unwrap() = Some(content);
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Place for TargetsInMemory {
    fn open(&self) -> Rc<dyn MapStore> {
        let target = |(number, store): (u128, &Arc<MemStore>)| {
            let store = Arc::clone(store) as Arc<dyn ObjectStore>;
            Rc::new(Target::new(Uuid::from_u128(number), store, TargetRetry::default()))
        };
        let targets: Vec<Rc<Target>> = (1..).zip(&self.stores).map(target).collect();
        let at = WitnessAt(Arc::clone(&self.witness) as Arc<dyn WitnessStorage>);
        let witness = NodeWitness::load(Some(at), Seal::default()).unwrap();
        Rc::new(TargetMapStore::new(&targets, Arc::new(witness), &OsdConfig::default()))
    }

    fn set_failing(&self, fails: bool) {
        // The witness notes the epoch of the map. The targets store the map, and then the witness fails.
        self.witness.succeeds.store(if fails { 1 } else { u64::MAX }, Ordering::SeqCst);
    }
}

/// Returns a changed map under the next epoch.
fn changed(map: &NodeMap) -> NodeMap {
    NodeMap { epoch: map.epoch + 1, next_pool_id: map.next_pool_id + 1, ..map.clone() }
}

async fn conforms(place: &dyn Place) {
    // A node is created once.
    let new = place.open().load().await.unwrap();
    assert_eq!(place.open().load().await.unwrap(), new);

    // The last saved map is the one that the next start loads.
    let store = place.open();
    let loaded = store.load().await.unwrap();
    let first = changed(&loaded);
    store.save(&first).await.unwrap();
    let second = changed(&first);
    store.save(&second).await.unwrap();
    assert!(store.targets_behind().is_empty(), "all targets have the map");
    let store = place.open();
    assert_eq!(store.load().await.unwrap(), second);

    // The next start loads the last saved map, or the map whose save has failed.
    let failed = changed(&second);
    place.set_failing(true);
    store.save(&failed).await.unwrap_err();
    place.set_failing(false);
    let store = place.open();
    let loaded = store.load().await.unwrap();
    let without_epoch = |map: &NodeMap| NodeMap { epoch: 0, ..map.clone() };
    assert!([&second, &failed].map(without_epoch).contains(&without_epoch(&loaded)), "{loaded:?}");
    assert!(loaded.epoch >= failed.epoch);
    assert_eq!(place.open().load().await.unwrap(), loaded);

    // Saving goes on after a failure.
    let third = NodeMap { next_pool_id: 100, ..changed(&loaded) };
    store.save(&third).await.unwrap();
    assert_eq!(place.open().load().await.unwrap(), third);
}

#[tokio::test]
async fn the_store_in_memory_conforms() {
    conforms(&Rc::new(MemMapStore::default())).await;
}

#[tokio::test]
async fn the_store_on_targets_conforms() {
    tokio::task::LocalSet::new().run_until(conforms(&TargetsInMemory::default())).await;
}
