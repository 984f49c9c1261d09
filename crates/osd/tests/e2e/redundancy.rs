//! Tests of pools with redundancy: loss and return of targets.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use client::{Client, Pool, Redundancy};
use osd::{OsdConfig, TargetRetry};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};

use crate::common::{Node, data, seed};

/// Small units, so that small objects have several stripes.
pub(crate) const UNIT: u32 = 8 << 10;

/// Returns a configuration with which a failed target stays unused until the operator requests its
/// use.
pub(crate) fn config() -> OsdConfig {
    let (failing_pause, hopeful_for) = (Duration::from_secs(3600), Duration::ZERO);
    let target_retry = TargetRetry {
        failing_pause,
        failing_pause_max: failing_pause,
        hopeful_for,
        ..TargetRetry::default()
    };
    OsdConfig { upkeep_interval: Duration::from_millis(5), target_retry, ..OsdConfig::default() }
}

/// Parses a redundancy scheme and sets a small stripe unit.
pub(crate) fn redundancy(text: &str) -> Redundancy {
    let redundancy: Redundancy = text.parse().unwrap();
    redundancy.with_stripe_unit(UNIT).unwrap_or(redundancy)
}

/// A node with exactly the targets that a pool needs, and objects of various sizes in the pool.
pub(crate) struct Rig {
    pub(crate) node: Node,
    pub(crate) client: Client,
    pub(crate) pool: Pool,
    pub(crate) objects: Vec<(String, Bytes)>,
}

impl Rig {
    pub(crate) async fn new(text: &str, groups: u32) -> Rig {
        Rig::of(text, groups, redundancy(text).targets(), config()).await
    }

    /// Creates a node with this number of targets and this configuration.
    pub(crate) async fn of(text: &str, groups: u32, targets: usize, config: OsdConfig) -> Rig {
        let redundancy = redundancy(text);
        let mut node = Node::of(targets, config);
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", groups, redundancy).await.unwrap();
        let pool = client.pool("pool").unwrap();
        Rig { node, client, pool, objects: Vec::new() }
    }

    pub(crate) async fn fill(&mut self, sizes: &[usize]) {
        for &len in sizes {
            let (name, bytes) = (format!("o{len}"), data(len, len as u64));
            self.pool.object(&name).unwrap().put(bytes.clone()).await.unwrap();
            self.objects.push((name, bytes));
        }
    }

    pub(crate) async fn check(&self, what: &str) {
        for (name, bytes) in &self.objects {
            let read = self.pool.object(name).unwrap().get().await;
            let read = read.unwrap_or_else(|e| panic!("{name}, {what}: {e}"));
            assert!(read == *bytes, "{name} has other content, {what}");
        }
    }

    pub(crate) fn set_down(&self, targets: &[usize], down: bool) {
        targets.iter().for_each(|&target| self.node.stores[target].set_down(down));
    }

    /// Brings failed targets back, and waits until they are in sync.
    pub(crate) async fn bring_back(&self, targets: &[usize]) {
        self.set_down(targets, false);
        for &target in targets {
            self.client.set_target_out(target as u32, false).await.unwrap();
        }
        wait_until_whole(&self.client).await;
    }
}

/// Scrubs the pool `pool`, and waits until the scrub has ended.
pub(crate) async fn scrub(client: &Client, repair: bool) -> client::ScrubStatus {
    client.start_scrub("pool", repair).await.unwrap();
    loop {
        let status = client.scrub_status("pool").await.unwrap();
        if !status.running {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until all placement groups have all their members in sync.
pub(crate) async fn wait_until_whole(client: &Client) {
    wait_until_whole_but(client, 0).await;
}

/// Waits until all placement groups are in sync, except for `missing` targets that are lost.
pub(crate) async fn wait_until_whole_but(client: &Client, missing: usize) {
    let whole = async {
        loop {
            let status = client.status().await.unwrap();
            let degraded = status.health.iter().map(|h| h.degraded).sum::<u32>();
            let unavailable = status.health.iter().map(|h| h.unavailable).sum::<u32>();
            let behind = status.targets.iter().filter(|t| t.behind).count();
            if unavailable == 0 && behind <= missing && (degraded == 0 || missing > 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(60), whole).await.is_err() {
        panic!("placement groups are still degraded: {:#?}", client.status().await);
    }
}

const SIZES: [usize; 9] = [0, 1, 4096, 5000, 8192, 65_536, 70_001, 300_000, 5_000_001];

/// Returns all subsets of `0..n` with 1 to `most` elements.
fn subsets(n: usize, most: usize) -> Vec<Vec<usize>> {
    let members = |bits: u32| (0..n).filter(|i| bits & (1 << i) != 0).collect();
    (1u32..1 << n).filter(|bits| bits.count_ones() as usize <= most).map(members).collect()
}

/// Returns the number of fragment reads of each store so far.
fn reads(rig: &Rig) -> Vec<u64> {
    rig.node.stores.iter().map(|store| store.reads.load(Ordering::SeqCst)).collect()
}

#[tokio::test]
async fn a_degraded_read_of_a_full_stripe_reads_exactly_k_fragments() {
    let mut rig = Rig::new("ec:4+2", 1).await;
    rig.fill(&[4 * UNIT as usize]).await;
    for lost in 0..6 {
        rig.set_down(&[lost], true);
        rig.check(&format!("target {lost} fails")).await;
        let before = reads(&rig);
        rig.check(&format!("without target {lost}")).await;
        let read: Vec<u64> = reads(&rig).iter().zip(before).map(|(now, before)| now - before).collect();
        assert_eq!(read.iter().sum::<u64>(), 4, "fragment reads without target {lost}: {read:?}");
        assert!(read.iter().all(|&count| count <= 1) && read[lost] == 0, "{read:?}");
        rig.bring_back(&[lost]).await;
    }
    assert!(rig.node.fired() >= 6, "targets were lost");
}

#[tokio::test]
async fn reads_of_a_mirrored_object_are_spread_over_its_copies() {
    let mut rig = Rig::new("mirror:3", 1).await;
    rig.fill(&[20_000]).await;
    let before = reads(&rig);
    for _ in 0..12 {
        rig.check("with all copies").await;
    }
    let read: Vec<u64> = reads(&rig).iter().zip(before).map(|(now, before)| now - before).collect();
    assert_eq!(read, [4, 4, 4]);
    rig.set_down(&[1], true);
    for _ in 0..4 {
        rig.check("without one copy").await;
    }
    assert!(rig.node.fired() >= 1, "the lost target was called");
}

/// Tests that are long and do not depend on the network.
mod tcp_only {
    use super::*;

    async fn every_pattern(redundancy: &str, k: usize, m: usize) {
        let mut rig = Rig::new(redundancy, 1).await;
        rig.fill(&SIZES).await;
        rig.check("all targets are present").await;
        let patterns = subsets(k + m, m);
        for lost in &patterns {
            rig.set_down(lost, true);
            rig.check(&format!("without {lost:?}")).await;
            rig.bring_back(lost).await;
        }
        rig.check("all targets are back").await;
        assert!(rig.node.fired() as usize >= patterns.len(), "targets were lost");
    }

    #[tokio::test]
    async fn ec_2_1_survives_every_loss_of_one_target() {
        every_pattern("ec:2+1", 2, 1).await;
    }

    #[tokio::test]
    async fn ec_4_2_survives_every_loss_of_up_to_two_targets() {
        every_pattern("ec:4+2", 4, 2).await;
    }

    #[tokio::test]
    async fn ec_6_3_survives_every_loss_of_up_to_three_targets() {
        every_pattern("ec:6+3", 6, 3).await;
    }

    #[tokio::test]
    async fn a_mirror_of_three_survives_every_loss_of_up_to_two_targets() {
        every_pattern("mirror:3", 1, 2).await;
    }

    #[tokio::test]
    async fn ec_10_4_survives_a_thousand_random_losses_of_targets() {
        let mut rng = StdRng::seed_from_u64(seed());
        let mut rig = Rig::new("ec:10+4", 1).await;
        rig.fill(&[5000, 300_000]).await;
        for _ in 0..1000 {
            let count = rng.random_range(1..=4);
            let lost = (0..14).choose_multiple(&mut rng, count);
            rig.set_down(&lost, true);
            rig.check(&format!("without {lost:?}")).await;
            rig.bring_back(&lost).await;
        }
    }

    #[tokio::test]
    async fn requests_fail_if_one_target_more_than_tolerated_is_lost() {
        for (redundancy, lost) in [("ec:4+2", &[0usize, 2, 4][..]), ("mirror:2", &[0, 1])] {
            let mut rig = Rig::new(redundancy, 2).await;
            // An empty object is left out, because the osd can read it without any data of a
            // target.
            rig.fill(&SIZES[1..]).await;
            rig.set_down(lost, true);
            for number in 0..8 {
                // The puts come first, because they make the osd notice the loss. Before that, the
                // osd could read small objects from the remaining targets.
                let put =
                    rig.pool.object(&format!("new{number}")).unwrap().put(Bytes::from_static(b"x")).await;
                let e = put.unwrap_err().to_string();
                assert!(e.contains("are needed"), "{redundancy}: {e}");
            }
            for (name, bytes) in &rig.objects {
                match rig.pool.object(name).unwrap().get().await {
                    Ok(read) => panic!("{name}: {} bytes of {} without {lost:?}", read.len(), bytes.len()),
                    Err(e) => assert!(e.to_string().contains("are needed"), "{name}: {e}"),
                }
            }
            rig.bring_back(lost).await;
            rig.check("all targets are back").await;
        }
    }

    #[tokio::test]
    async fn objects_written_during_a_rebuild_are_also_on_the_rebuilt_target() {
        let redundancy = redundancy("ec:2+1");
        // The rebuild is so slow that a few hundred objects can be written during it.
        let mut node = Node::of(4, OsdConfig { rebuild_rate: 2 << 20, ..config() });
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", 1, redundancy).await.unwrap();
        let pool = client.pool("pool").unwrap();
        let content = |number: usize| data(1000 + 37 * number, number as u64);
        for number in 0..100 {
            pool.object(&format!("o{number}")).unwrap().put(content(number)).await.unwrap();
        }
        // One of the four targets is a spare.
        client.set_target_out(0, true).await.unwrap();
        let rebuilt = client.status().await.unwrap().rebuild.objects;
        for number in 100..300 {
            pool.object(&format!("o{number}")).unwrap().put(content(number)).await.unwrap();
            pool.object(&format!("o{}", number - 100)).unwrap().write(0, content(number)).await.unwrap();
        }
        let whole = async {
            while client.status().await.unwrap().health.iter().any(|h| h.degraded + h.unavailable > 0) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), whole).await.unwrap();
        let after = client.status().await.unwrap().rebuild.objects;
        for lost in 1..4 {
            node.stores[lost].set_down(true);
            for number in 200..300 {
                let read = pool.object(&format!("o{number}")).unwrap().get().await.unwrap();
                assert!(
                    read == content(number),
                    "object {number} without {lost}, rebuilt {rebuilt} to {after}"
                );
            }
            node.stores[lost].set_down(false);
            client.set_target_out(lost as u32, false).await.unwrap();
            let caught_up = async {
                while client.status().await.unwrap().health.iter().any(|h| h.degraded + h.unavailable > 0) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), caught_up).await.unwrap();
        }
        client.start_scrub("pool", false).await.unwrap();
        let mut scrub = client.scrub_status("pool").await.unwrap();
        while scrub.running {
            tokio::time::sleep(Duration::from_millis(5)).await;
            scrub = client.scrub_status("pool").await.unwrap();
        }
        assert_eq!((scrub.objects, scrub.damaged, scrub.inconsistent), (300, 0, 0));
    }
}
