//! Compares the effects of random ops on a few objects with a model, while stores fail now and
//! then.

use std::collections::{BTreeMap, BTreeSet};

use client::{Client, Error, NodeError, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{Loss, Node, data, seed};
use crate::redundancy::{config, redundancy, wait_until_whole, wait_until_whole_but};

#[derive(Default, Clone)]
struct Model {
    data: Vec<u8>,
    xattrs: BTreeMap<u8, u8>,
    version: u64,
}

impl Model {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if self.data.len() < offset + bytes.len() && !bytes.is_empty() {
            self.data.resize(offset + bytes.len(), 0);
        }
        if !bytes.is_empty() {
            self.data[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// Returns a random length or offset, often near a block boundary or the limit of inline data.
fn size(rng: &mut StdRng, most: usize) -> usize {
    let base = [0, 1, 4096, 8192, 65_536, 200_000][rng.random_range(0..6)];
    let jitter = rng.random_range(0..3000);
    let size: usize = if rng.random_bool(0.5) { base } else { base + jitter };
    size.min(most)
}

#[tokio::test]
async fn random_ops_agree_with_the_model() {
    random_ops("single", 2, 1500).await;
}

/// Removes targets of a pool with redundancy, and brings these targets back with outdated data.
struct Drives<'a> {
    node: &'a Node,
    client: &'a Client,
    tolerates: usize,
    down: BTreeSet<usize>,
    losses: usize,
}

impl Drives<'_> {
    async fn shuffle(&mut self, rng: &mut StdRng) {
        if self.tolerates == 0 || !rng.random_bool(0.03) {
            return;
        }
        let drive = rng.random_range(0..self.node.stores.len());
        if self.down.remove(&drive) {
            self.bring_back(drive).await;
            if rng.random_bool(0.5) {
                wait_until_whole_but(self.client, self.down.len()).await;
            }
        } else if self.down.len() < self.tolerates {
            // No further target may be lost while another target still lacks changes.
            wait_until_whole_but(self.client, self.down.len()).await;
            self.node.stores[drive].set_down(true);
            self.down.insert(drive);
            self.losses += 1;
        }
    }

    async fn bring_back(&self, drive: usize) {
        self.node.stores[drive].set_down(false);
        self.client.set_target_out(drive as u32, false).await.unwrap();
    }
}

async fn random_ops(text: &str, targets: usize, steps: u64) {
    let mut rng = StdRng::seed_from_u64(seed());
    let redundancy = redundancy(text);
    let mut node = Node::of(targets, config());
    node.restart();
    let options = Options { read_size: 64 << 10, ..Options::default() };
    let client: Client = node.client_with(options).await;
    client.create_pool_with("pool", 4, redundancy).await.unwrap();
    let (tolerates, down) = (redundancy.tolerates(), BTreeSet::new());
    let mut drives = Drives { node: &node, client: &client, tolerates, down, losses: 0 };
    let pool = client.pool("pool").unwrap();
    let mut models: Vec<Option<Model>> = vec![None; 5];
    let mut last_versions = [0; 5];
    for step in 0..10 * steps {
        // The run continues until enough faults have fired.
        let lost = node.fired() > 20 && (drives.losses > 5 || drives.tolerates == 0);
        if step >= steps && lost {
            break;
        }
        drives.shuffle(&mut rng).await;
        let index = rng.random_range(0..models.len());
        let object = pool.object(&format!("object-{index}")).unwrap();
        let old = models[index].clone();
        let mut new = old.clone().unwrap_or_default();
        if rng.random_bool(0.1) {
            // Each store fails either before or after it has executed the next transaction.
            for store in &node.stores {
                store.arm(if rng.random_bool(0.5) { Loss::Before } else { Loss::After });
            }
        }
        let offset = size(&mut rng, 300_000);
        let bytes = data(size(&mut rng, 300_000), step);
        let changed = match rng.random_range(0..11) {
            0 => {
                new.data = bytes.to_vec();
                object.put(bytes).await
            }
            1 | 2 => {
                new.write(offset, &bytes);
                object.write(offset as u64, bytes).await
            }
            3 if new.data.len() < 1 << 20 => {
                new.write(new.data.len(), &bytes);
                object.append(bytes).await
            }
            4 => {
                new.data.resize(offset, 0);
                object.truncate(offset as u64).await
            }
            5 => {
                new.write(offset, &vec![0; bytes.len()]);
                object.zero(offset as u64, bytes.len() as u64).await
            }
            6 => {
                let (name, value) = (rng.random_range(0..4), rng.random());
                new.xattrs.insert(name, value);
                object.set_xattr(vec![name], vec![value]).await
            }
            7 => {
                let small = data(100, step);
                new.write(offset, &small);
                new.write(new.data.len(), &small);
                new.data.truncate(offset + 50);
                let change = object.compound().write(offset as u64, small.clone()).append(small);
                change.truncate(offset as u64 + 50).commit().await
            }
            8 => {
                let right = rng.random_bool(0.5);
                let version = new.version + u64::from(!right);
                let change = object.compound().if_version(version).append(bytes.clone()).commit().await;
                if !right || old.is_none() {
                    assert!(change.unwrap_err().is_conflict(), "step {step}");
                    continue;
                }
                new.write(new.data.len(), &bytes);
                change
            }
            9 => {
                let removed = object.remove().await;
                match old {
                    None => assert!(removed.unwrap_err().is_not_found(), "step {step}"),
                    Some(_) => {
                        last_versions[index] = removed.unwrap().version;
                        models[index] = None;
                    }
                }
                continue;
            }
            _ => {
                match (object.describe().await, &old) {
                    (Ok(found), Some(model)) => {
                        assert_eq!(found.stat.version, model.version, "step {step}");
                        let xattrs = model.xattrs.iter().map(|(n, v)| (vec![*n].into(), vec![*v].into()));
                        assert_eq!(found.xattrs, xattrs.collect::<Vec<_>>(), "step {step}");
                        assert!(object.get().await.unwrap() == model.data, "step {step}");
                    }
                    (Err(Error::Node(NodeError::NoSuchObject(_))), None) => {}
                    (found, _) => panic!("step {step}: {found:?}"),
                }
                continue;
            }
        };
        let changed = changed.unwrap_or_else(|e| panic!("step {step}: {e}"));
        assert_eq!(changed.size, new.data.len() as u64, "step {step}");
        assert!(changed.version > last_versions[index], "step {step}: versions grow");
        new.version = changed.version;
        last_versions[index] = changed.version;
        models[index] = Some(new);
    }
    node.disarm();
    assert!(node.fired() > 20, "{} faults fired", node.fired());
    assert!(drives.losses > 5 || drives.tolerates == 0, "{} targets were lost", drives.losses);
    for drive in std::mem::take(&mut drives.down) {
        drives.bring_back(drive).await;
    }
    wait_until_whole(&client).await;
    for (index, model) in models.iter().enumerate() {
        let object = pool.object(&format!("object-{index}")).unwrap();
        match model {
            Some(model) => assert!(object.get().await.unwrap() == model.data, "object {index}"),
            None => assert!(object.get().await.unwrap_err().is_not_found()),
        }
    }
}

/// Tests that are long and do not depend on the network.
mod tcp_only {
    use super::*;

    #[tokio::test]
    async fn random_ops_on_a_mirror_agree_with_the_model() {
        random_ops("mirror:2", 3, 1500).await;
    }

    #[tokio::test]
    async fn random_ops_on_an_erasure_code_agree_with_the_model() {
        random_ops("ec:4+2", 7, 1500).await;
    }
}
