//! Tests of the witness: a node starts without some of its targets, and does not use outdated ones.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::BoxFuture;
use client::Options;
use osd::{OsdConfig, OsdServer, ShardResources, StartError, WitnessAt, WitnessStorage};

use crate::common::data;
use crate::redundancy::{Rig, config, redundancy, wait_until_whole};

/// A witness in memory.
#[derive(Default)]
pub(super) struct Memory {
    content: Mutex<Option<Vec<u8>>>,
    fails: Mutex<bool>,
    writes: AtomicU64,
}

impl Memory {
    /// Returns the number of writes so far.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// Loses the content.
    pub(super) fn forget(&self) {
        self.set_content(None);
    }

    pub(super) fn content(&self) -> Option<Vec<u8>> {
        self.content.lock().unwrap().clone()
    }

    pub(super) fn set_content(&self, content: Option<Vec<u8>>) {
        *self.content.lock().unwrap() = content;
    }
}

impl WitnessStorage for Memory {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().unwrap().clone())
    }

    fn replace(&self, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        if *self.fails.lock().unwrap() {
            return Box::pin(std::future::ready(Err(io::Error::other("no space"))));
        }
        *self.content.lock().unwrap() = Some(content);
        self.writes.fetch_add(1, Ordering::SeqCst);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Creates a node with a witness, exactly the targets that the pool needs, and some objects.
pub(super) async fn rig(scheme: &str) -> (Rig, Arc<Memory>) {
    rig_of(scheme, config()).await
}

async fn rig_of(scheme: &str, config: OsdConfig) -> (Rig, Arc<Memory>) {
    let memory = Arc::new(Memory::default());
    let config = config_with(&memory, config);
    let mut rig = Rig::of(scheme, 4, redundancy(scheme).targets(), config).await;
    rig.fill(&[1, 5000, 70_001, 300_000]).await;
    (rig, memory)
}

/// Returns a configuration with this witness.
pub(super) fn config_with(memory: &Arc<Memory>, config: OsdConfig) -> OsdConfig {
    OsdConfig { witness: Some(WitnessAt(Arc::clone(memory) as _)), ..config }
}

/// Starts the node again while only the targets `there` are present.
pub(super) async fn restart_with(rig: &mut Rig, there: &[usize]) {
    if let Some(osd) = rig.node.osd.take() {
        osd.stop();
    }
    for (number, store) in rig.node.stores.iter().enumerate() {
        store.set_down(!there.contains(&number));
    }
    rig.node.restart();
    rig.client = rig.node.client_with(Options::default()).await;
    rig.pool = rig.client.pool("pool").unwrap();
}

/// Replaces one of the objects.
pub(super) async fn change(rig: &mut Rig, salt: u64) {
    let bytes = data(70_001, salt);
    rig.pool.object("o70001").unwrap().put(bytes.clone()).await.unwrap();
    rig.objects[2].1 = bytes;
}

async fn refusal(rig: &Rig) -> String {
    rig.pool.object("o5000").unwrap().get().await.unwrap_err().to_string()
}

#[tokio::test]
async fn a_node_starts_with_any_targets_that_suffice() {
    for (scheme, most) in [("mirror:2", 1), ("mirror:3", 2), ("ec:2+1", 1), ("ec:4+2", 2)] {
        let (mut rig, _witness) = rig(scheme).await;
        let targets = rig.node.stores.len();
        for first in 0..targets {
            let lost: Vec<usize> = (first..first + most).map(|target| target % targets).collect();
            let there: Vec<usize> = (0..targets).filter(|target| !lost.contains(target)).collect();
            restart_with(&mut rig, &there).await;
            rig.check(&format!("{scheme} with only {there:?}")).await;
            change(&mut rig, first as u64).await;
            // The map can be changed, too.
            rig.client.create_pool_with("other", 1, redundancy("single")).await.unwrap();
            rig.client.remove_pool("other", true).await.unwrap();
            // A second start knows that these targets have the newest data.
            restart_with(&mut rig, &there).await;
            rig.check(&format!("{scheme} again with only {there:?}")).await;
            rig.bring_back(&lost).await;
            rig.check(&format!("{scheme} after {lost:?} returned")).await;
        }
    }
}

#[tokio::test]
async fn an_outdated_target_does_not_serve_alone() {
    for scheme in ["mirror:2", "mirror:3"] {
        // Without upkeep, the map does not change.
        let config = OsdConfig { upkeep_interval: Duration::from_secs(3600), ..config() };
        let (mut rig, _witness) = rig_of(scheme, config).await;
        let others: Vec<usize> = (1..rig.node.stores.len()).collect();
        restart_with(&mut rig, &[0]).await;
        change(&mut rig, 1).await;
        restart_with(&mut rig, &others).await;
        let newest = rig.node.targets()[0].0;
        let error = refusal(&rig).await;
        assert!(
            error.contains("lack acknowledged changes") && error.contains(&newest.to_string()),
            "{error}"
        );
        restart_with(&mut rig, &(0..=others.len()).collect::<Vec<_>>()).await;
        rig.check(&format!("{scheme} after the newest target returned")).await;
    }
}

#[tokio::test]
async fn a_node_does_not_start_with_an_outdated_map() {
    let (mut rig, _witness) = rig("mirror:2").await;
    restart_with(&mut rig, &[0]).await;
    rig.client.create_pool_with("new", 1, redundancy("single")).await.unwrap();
    let stack = crate::common::stack(messenger::UseAs::Server);
    rig.node.osd.take().unwrap().stop();
    rig.set_down(&[0], true);
    rig.set_down(&[1], false);
    let config = rig.node.config.clone();
    let start = || {
        let (targets, staging, stack) = (rig.node.targets(), rig.node.staging.clone(), Arc::clone(&stack));
        OsdServer::start(
            vec![ShardResources { config: config.clone(), targets, staging }],
            stack,
            "127.0.0.1:0",
        )
    };
    let refused = start().unwrap_err();
    let newest = rig.node.targets()[0].0.to_string();
    assert!(matches!(&refused, StartError::OutdatedMap { missing, .. } if *missing == newest), "{refused}");
    rig.set_down(&[0], false);
    rig.set_down(&[1], true);
    start().unwrap().stop();
}

/// Each target has a map that lists the other target as lost. Only one of the maps is the newest.
#[tokio::test]
async fn a_map_that_lists_a_target_as_lost_does_not_exclude_a_newer_map_on_it() {
    let (mut rig, witness) = rig("mirror:2").await;
    restart_with(&mut rig, &[0]).await;
    rig.client.create_pool_with("old", 1, redundancy("single")).await.unwrap();
    rig.set_down(&[0], true);
    rig.set_down(&[1], false);
    rig.client.set_target_out(1, false).await.unwrap();
    rig.client.remove_pool("old", true).await.unwrap();
    rig.node.osd.take().unwrap().stop();
    let content = witness.content();
    witness.forget();
    rig.set_down(&[0], false);
    refuses_to_start_with_target_0(&rig, "after a newer map on the lost target");
    witness.set_content(content);
    rig.set_down(&[0], true);
    restart_with(&mut rig, &[1]).await;
    let pools = rig.client.pools().await.unwrap();
    let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["pool"]);
}

/// A witness that is missing, damaged, of another node or an old copy counts as lost.
#[tokio::test]
async fn without_a_witness_a_mirror_waits_for_all_copies() {
    for case in ["missing", "damaged", "foreign", "old"] {
        let (mut rig, witness) = rig("mirror:2").await;
        let old = witness.load().unwrap().unwrap();
        // The counter grows, and the targets store it.
        restart_with(&mut rig, &[1]).await;
        rig.bring_back(&[0]).await;
        restart_with(&mut rig, &[0, 1]).await;
        let foreign = self::rig("mirror:2").await.1.load().unwrap();
        let content = match case {
            "missing" => None,
            "damaged" => witness.load().unwrap().map(|mut content| {
                content[20] ^= 1;
                content
            }),
            "foreign" => foreign,
            _ => Some(old),
        };
        // The osd writes the witness when it stops.
        rig.node.osd.take().unwrap().stop();
        *witness.content.lock().unwrap() = content;
        refuses_to_start_with_target_0(&rig, case);
        // With all targets, the node makes a new witness.
        restart_with(&mut rig, &[0, 1]).await;
        rig.check(case).await;
        wait_until_whole(&rig.client).await;
        restart_with(&mut rig, &[0]).await;
        rig.check(&format!("{case}, with a new witness")).await;
    }
}

/// Checks that the node does not start with target 0 alone, because target 1 may have a newer map.
fn refuses_to_start_with_target_0(rig: &Rig, case: &str) {
    rig.set_down(&[1], true);
    let stack = crate::common::stack(messenger::UseAs::Server);
    let (targets, staging) = (rig.node.targets(), rig.node.staging.clone());
    let started = OsdServer::start(
        vec![ShardResources { config: rig.node.config.clone(), targets, staging }],
        stack,
        "127.0.0.1:0",
    );
    assert!(matches!(&started, Err(StartError::UncertainMap { .. })), "{case}: {started:?}");
}

#[tokio::test]
async fn no_change_is_acknowledged_while_the_witness_cannot_be_stored() {
    let (mut rig, witness) = rig("mirror:2").await;
    *witness.fails.lock().unwrap() = true;
    rig.set_down(&[1], true);
    let object = rig.pool.object("o70001").unwrap();
    let put = tokio::spawn(async move { object.put(data(70_001, 9)).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!put.is_finished(), "the fault fired: the change waits for the witness");
    *witness.fails.lock().unwrap() = false;
    put.await.unwrap().unwrap();
    rig.objects[2].1 = data(70_001, 9);
    rig.check("after the witness works again").await;
}
