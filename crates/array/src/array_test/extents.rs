//! Tests the extents of objects in an array, also while members are missing or damaged.

use std::ops::Range;

use base::block::BLOCK;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Number of blocks in a unit of the groups in these tests.
const UNIT_BLOCKS: u64 = 16;
/// Maximum number of blocks of an object.
const BLOCKS: u64 = 6 * UNIT_BLOCKS + 3;

/// An object of whole blocks: for each block its content, `None` for a hole.
type ModelBlocks = Vec<Option<u8>>;

struct TestGroup {
    stores: Vec<Arc<MemStore>>,
    targets: Vec<Rc<TestTarget>>,
    array: Array,
    cid: CollectionId,
    oid: ObjectId,
}

impl TestGroup {
    async fn create(redundancy: &str) -> TestGroup {
        let count = redundancy.parse::<wire::Redundancy>().unwrap().targets();
        let stores: Vec<_> = (0..count).map(|_| Arc::new(MemStore::new())).collect();
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, targets) = group_over(&cid, redundancy, shared.collect()).await;
        TestGroup { stores, targets, array: Array::new(group), cid, oid: ObjectId::new(&b"o"[..]).unwrap() }
    }

    async fn apply(&self, op: Op) {
        self.array.queue_transaction(Transaction::new(self.cid.clone()).with(op)).await.unwrap();
    }

    fn write(&self, block: u64, content: &[u8]) -> Op {
        let bytes: Vec<u8> = content.iter().flat_map(|byte| [*byte; BLOCK as usize]).collect();
        let source = WriteSource::Inline(Payload::compute(0, bytes.into()));
        Op::Write { oid: self.oid.clone(), offset: block * BLOCK, source }
    }

    /// Returns all extents in a range.
    async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Range<u64>>> {
        let (mut all, mut at) = (Vec::new(), offset);
        while at < offset + len {
            let found = self.array.extents(&self.cid, &self.oid, at, offset + len - at).await?;
            found.check(at, offset + len - at).unwrap();
            all.extend(found.ranges);
            at = found.end;
        }
        Ok(all)
    }

    /// Changes the object and its model at random.
    async fn change(&self, rng: &mut StdRng, model: &mut ModelBlocks) {
        let first = rng.random_range(0..BLOCKS) as usize;
        let end = (first + rng.random_range(1..2 * UNIT_BLOCKS) as usize).min(BLOCKS as usize);
        let (offset, len) = (first as u64 * BLOCK, (end - first) as u64 * BLOCK);
        let oid = self.oid.clone();
        match rng.random_range(0..6) {
            0..3 => {
                model.resize(model.len().max(end), None);
                let content: Vec<u8> = (first..end).map(|_| rng.random_range(0..4)).collect();
                model[first..end].iter_mut().zip(&content).for_each(|(block, new)| *block = Some(*new));
                self.apply(self.write(first as u64, &content)).await;
            }
            3..5 => {
                model.resize(model.len().max(end), None);
                model[first..end].fill(None);
                self.apply(Op::Zero { oid, offset, len }).await;
            }
            _ => {
                model.resize(end, None);
                self.apply(Op::Truncate { oid, size: offset + len }).await;
            }
        }
    }
}

/// Returns the blocks of extents.
fn blocks(extents: &[Range<u64>]) -> Vec<u64> {
    extents.iter().flat_map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK)).collect()
}

fn mapped(model: &ModelBlocks) -> Vec<u64> {
    (0..).zip(model).filter_map(|(number, block)| block.map(|_| number)).collect()
}

#[tokio::test]
async fn extents_show_all_data_and_while_no_member_is_missing_nothing_else() {
    for redundancy in ["mirror:2", "ec:2+1", "ec:3+2"] {
        let test = async {
            let seed = conformance::seed();
            let mut rng = StdRng::seed_from_u64(seed);
            let group = TestGroup::create(redundancy).await;
            let mut model = Vec::new();
            group.apply(Op::Touch { oid: group.oid.clone() }).await;
            for round in 0..40 {
                group.change(&mut rng, &mut model).await;
                let whole = model.len() as u64 * BLOCK;
                let found = group.extents(0, whole).await.unwrap();
                assert_eq!(blocks(&found), mapped(&model), "{redundancy}, round {round}");
                let stat = group.array.stat(&group.cid, &group.oid).await.unwrap();
                let allocated = mapped(&model).len() as u64 * BLOCK;
                assert_eq!((stat.size, stat.allocated), (whole, allocated), "{redundancy}, round {round}");
                let offset = rng.random_range(0..whole);
                let part = group.extents(offset, rng.random_range(0..whole)).await.unwrap();
                let part: Vec<u64> =
                    blocks(&part).into_iter().filter(|block| *block > offset / BLOCK).collect();
                assert!(part.iter().all(|block| model[*block as usize].is_some()));
            }
            let lost = group.targets[rng.random_range(0..group.targets.len())].clone();
            lost.use_it(false);
            for round in 0..20 {
                let found = blocks(&group.extents(0, model.len() as u64 * BLOCK).await.unwrap());
                for (number, block) in (0..).zip(&model) {
                    let is_zero = block.is_none_or(|byte| byte == 0);
                    assert!(found.contains(&number) || is_zero, "{redundancy}, round {round}: {number}");
                    if redundancy == "mirror:2" {
                        assert_eq!(found.contains(&number), block.is_some(), "round {round}: {number}");
                    }
                }
                group.change(&mut rng, &mut model).await;
            }
        };
        LocalSet::new().run_until(test).await;
    }
}

#[tokio::test]
async fn a_hole_in_all_fragments_is_a_hole_while_a_member_is_missing() {
    let test = async {
        for lost in 0..3 {
            let group = TestGroup::create("ec:2+1").await;
            group.apply(group.write(5 * UNIT_BLOCKS + 3, &[1])).await;
            group.apply(group.write(1, &[2, 3])).await;
            group.targets[lost].use_it(false);
            let found = blocks(&group.extents(0, 6 * UNIT_BLOCKS * BLOCK).await.unwrap());
            // Without a data fragment, its blocks in the same rows may have data.
            let expected = match lost {
                0 => vec![1, 2, 4 * UNIT_BLOCKS + 3, 5 * UNIT_BLOCKS + 3],
                1 => vec![1, 2, UNIT_BLOCKS + 1, UNIT_BLOCKS + 2, 5 * UNIT_BLOCKS + 3],
                _ => vec![1, 2, 5 * UNIT_BLOCKS + 3],
            };
            assert_eq!(found, expected, "member {lost} is missing");
        }
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn a_damaged_fragment_does_not_hide_data() {
    for (redundancy, needed) in [("mirror:2", 1), ("ec:2+1", 2)] {
        let test = async {
            let group = TestGroup::create(redundancy).await;
            group.apply(group.write(0, &[7; 40])).await;
            let damage = Op::Truncate { oid: group.oid.clone(), size: 0 };
            let damage = Transaction::new(group.cid.clone()).with(damage);
            group.stores[0].queue_transaction(damage.clone()).await.unwrap();
            let found = blocks(&group.extents(0, 40 * BLOCK).await.unwrap());
            assert_eq!(found, (0..40).collect::<Vec<u64>>(), "{redundancy}");
            for store in &group.stores[needed - 1..] {
                store.queue_transaction(damage.clone()).await.unwrap();
            }
            let refused = group.extents(0, 40 * BLOCK).await;
            assert!(refused.is_err(), "{redundancy}: {refused:?}");
        };
        LocalSet::new().run_until(test).await;
    }
}

#[tokio::test]
async fn extents_show_queued_changes_and_no_later_ones() {
    for redundancy in ["mirror:2", "ec:2+1"] {
        let test = async {
            let group = TestGroup::create(redundancy).await;
            let queue = |op| group.array.queue_transaction(Transaction::new(group.cid.clone()).with(op));
            let ask = || group.array.extents(&group.cid, &group.oid, 0, 40 * BLOCK);
            let first = queue(group.write(0, &[1; 40]));
            let full = ask();
            let oid = group.oid.clone();
            let second = queue(Op::Zero { oid, offset: BLOCK, len: 38 * BLOCK });
            let holed = ask();
            assert_eq!(blocks(&full.await.unwrap().ranges), (0..40).collect::<Vec<u64>>(), "{redundancy}");
            assert_eq!(blocks(&holed.await.unwrap().ranges), [0, 39], "{redundancy}");
            first.await.unwrap();
            second.await.unwrap();
        };
        LocalSet::new().run_until(test).await;
    }
}
