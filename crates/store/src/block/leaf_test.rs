//! Tests of leaves that move between onodes and keys of their own.

use std::sync::Arc;

use super::drive::Drive;
use super::fsck::check;
use super::leaf::INLINE_LEAF;
use super::log::{GROUP_SECTORS, Record, Scan, encode_group, scan};
use super::records::{Onode, key};
use super::recovery::{Recovered, RecoveryMode, TargetSizes, mkfs, recover};
use super::sim::{RecordedDrive, SimStore};
use super::superblock::{SECTOR, Superblock};
use crate::conformance::{cid, oid, one, pattern, write};
use crate::{Op, StoreCalls, Transaction};

const KIB: usize = 1 << 10;

fn run<T>(future: impl Future<Output = T>) -> T {
    futures::executor::block_on(future)
}

fn new_drive() -> Arc<RecordedDrive> {
    let drive = RecordedDrive::new(vec![0; 16 << 20]);
    let shared: Arc<dyn Drive> = drive.clone();
    let sizes = TargetSizes { uuid: None, log_bytes: Some(1 << 20), index_bytes: Some(4 << 20) };
    mkfs(&shared, &sizes, &mut |_, _| {}).unwrap();
    drive
}

/// Returns the content of an object in collection `c`.
fn content(store: &SimStore, name: &str) -> bytes::Bytes {
    let read = run(store.read(&cid("c"), &oid(name), 0, 1 << 20, None)).unwrap();
    read.verify().unwrap();
    read.contiguous()
}

/// Unmounts the target and checks it. Returns the number of onodes that contain a leaf, and the number
/// of leaves with keys of their own.
fn leaves(store: SimStore, drive: &Arc<RecordedDrive>) -> (usize, usize) {
    run(store.umount()).unwrap();
    drop(store);
    let shared: Arc<dyn Drive> = drive.clone();
    let report = check(&shared, false, &|_, _, _| None, &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let recovered = recover(&shared, 1 << 20, RecoveryMode::Check).unwrap();
    let (mut inline, mut own) = (0, 0);
    let count_inline = |_, value: bytes::Bytes| {
        let leaf = Onode::decode(&value)?.leaf;
        assert!(leaf.len() <= INLINE_LEAF);
        inline += usize::from(!leaf.is_empty());
        Ok(())
    };
    recovered.entries(key::ONODE, count_inline).unwrap();
    let count_own = |_, _| {
        own += 1;
        Ok(())
    };
    recovered.entries(key::LEAF, count_own).unwrap();
    (inline, own)
}

#[test]
fn a_leaf_leaves_the_onode_when_it_grows_and_returns_when_it_shrinks() {
    let drive = new_drive();
    let c = cid("c");
    let store = SimStore::mount(&drive, 1).unwrap();
    let small = one(&c, Op::CreateCollection).with(write(&oid("o"), 0, pattern(1, 100 * KIB)));
    run(store.queue_transaction(small)).unwrap();
    assert_eq!(leaves(store, &drive), (1, 0));

    let store = SimStore::mount(&drive, 2).unwrap();
    run(store.queue_transaction(one(&c, write(&oid("o"), 0, pattern(2, 400 * KIB))))).unwrap();
    assert_eq!(content(&store, "o"), pattern(2, 400 * KIB));
    assert_eq!(leaves(store, &drive), (0, 1));

    let store = SimStore::mount(&drive, 3).unwrap();
    let shorter = Op::Truncate { oid: oid("o"), size: 60 * KIB as u64 };
    run(store.queue_transaction(one(&c, shorter))).unwrap();
    assert_eq!(content(&store, "o"), pattern(2, 400 * KIB).slice(..60 * KIB));
    assert_eq!(leaves(store, &drive), (1, 0));

    let store = SimStore::mount(&drive, 4).unwrap();
    run(store.queue_transaction(one(&c, Op::Truncate { oid: oid("o"), size: 0 }))).unwrap();
    assert_eq!(leaves(store, &drive), (0, 0));
}

/// In one transaction, an object takes the name of another object, or gets a clone of its blocks.
#[test]
fn objects_keep_their_leaves_when_a_transaction_changes_their_names() {
    let c = cid("c");
    let rename =
        |from: &str, to: &str| Op::MoveRename { src: oid(from), dst_collection: cid("c"), dst: oid(to) };
    let (old, new) = (pattern(1, 20 * KIB), pattern(2, 30 * KIB));
    let remove = Op::Remove { oid: oid("o") };
    let changes: [(&str, Transaction, &bytes::Bytes); 4] = [
        ("replace", one(&c, remove.clone()).with(rename("n", "o")), &new),
        (
            "write and replace",
            one(&c, write(&oid("n"), 0, old.clone())).with(remove).with(rename("n", "o")),
            &old,
        ),
        ("clone", one(&c, Op::Clone { src: oid("n"), dst: oid("o") }), &new),
        ("rename and write", one(&c, rename("n", "m")).with(write(&oid("m"), 0, new.clone())), &old),
    ];
    // The object `o` is older than `n`, or newer.
    for first in ["o", "n"] {
        for (what, change, expected) in &changes {
            let drive = new_drive();
            let store = SimStore::mount(&drive, 1).unwrap();
            run(store.queue_transaction(one(&c, Op::CreateCollection))).unwrap();
            for name in [first, if first == "o" { "n" } else { "o" }] {
                let data = if name == "o" { &old } else { &new };
                run(store.queue_transaction(one(&c, write(&oid(name), 0, data.clone())))).unwrap();
            }
            run(store.queue_transaction(change.clone())).unwrap();
            let found = content(&store, "o");
            assert!(found.slice(..expected.len()) == *expected, "{what}, {first} first");
            let (inline, own) = leaves(store, &drive);
            assert!(inline > 0 && own == 0, "{what}, {first} first: {inline} and {own} leaves");
        }
    }
}

/// Moves all leaves out of the onodes, as an earlier version of the format has stored them.
fn make_earlier(drive: &Arc<RecordedDrive>) {
    let shared: Arc<dyn Drive> = drive.clone();
    let mut recovered = recover(&shared, 1 << 20, RecoveryMode::Check).unwrap();
    let mut moved = super::changes::Changes::new();
    let move_out = |name, value: bytes::Bytes| {
        let onode = Onode::decode(&value)?;
        let leaf = (!onode.leaf.is_empty()).then(|| onode.leaf.clone());
        moved.insert(key::leaf(onode.nid, 0), leaf);
        moved.insert(name, Some(Onode { leaf: bytes::Bytes::new(), ..onode }.encode()));
        Ok(())
    };
    recovered.entries(key::ONODE, move_out).unwrap();
    recovered.changes.extend(moved);
    recovered.checkpoint(&**drive, true).unwrap();
}

#[test]
fn objects_of_an_earlier_format_are_read_and_changed() {
    let drive = new_drive();
    let c = cid("c");
    let store = SimStore::mount(&drive, 1).unwrap();
    let data = pattern(1, 40 * KIB);
    let mut fill = one(&c, Op::CreateCollection);
    fill.ops.extend(["read", "write", "clone", "remove"].map(|name| write(&oid(name), 0, data.clone())));
    run(store.queue_transaction(fill)).unwrap();
    assert_eq!(leaves(store, &drive), (4, 0));
    make_earlier(&drive);

    let store = SimStore::mount(&drive, 2).unwrap();
    assert_eq!(content(&store, "read"), data);
    run(store.queue_transaction(one(&c, write(&oid("write"), 4 * KIB as u64, pattern(3, 4 * KIB))))).unwrap();
    let changed = [&data[..4 * KIB], &pattern(3, 4 * KIB), &data[8 * KIB..]].concat();
    assert_eq!(content(&store, "write"), changed);
    let clone = Op::Clone { src: oid("clone"), dst: oid("twin") };
    run(store.queue_transaction(one(&c, clone).with(Op::Remove { oid: oid("remove") }))).unwrap();
    assert_eq!((content(&store, "clone"), content(&store, "twin")), (data.clone(), data));
    // Only the object that was not changed has a leaf with a key of its own.
    assert_eq!(leaves(store, &drive), (3, 1));
}

/// Mounts a new target and writes an object of 1 MiB. Returns the content of the object.
fn with_large_object(drive: &Arc<RecordedDrive>) -> (SimStore, Vec<u8>) {
    let store = SimStore::mount(drive, 1).unwrap();
    let data = pattern(1, 1 << 20);
    let fill = one(&cid("c"), Op::CreateCollection).with(write(&oid("o"), 0, data.clone()));
    run(store.queue_transaction(fill)).unwrap();
    (store, data.to_vec())
}

/// Returns the superblock of a target and the content of its log after the last checkpoint.
fn log_of(drive: &Arc<RecordedDrive>) -> (Superblock, Scan) {
    let copy = RecordedDrive::new(drive.image());
    let shared: Arc<dyn Drive> = copy.clone();
    let Recovered { superblock, meta, .. } = recover(&shared, 1 << 20, RecoveryMode::Check).unwrap();
    let found = scan(&*copy, &superblock, meta.log_generation, meta.log_start, false).unwrap();
    (superblock, found)
}

/// The log has only the changed blocks of a leaf, and recovery finds the same content.
#[test]
fn the_log_has_patches_of_large_leaves() {
    let drive = new_drive();
    let c = cid("c");
    let (store, mut expected) = with_large_object(&drive);
    let mut change = |transaction: Transaction, at: usize, data: &[u8]| {
        expected[at..at + data.len()].copy_from_slice(data);
        run(store.queue_transaction(transaction)).unwrap();
        let record = log_of(&drive).1.groups.pop().unwrap().records.pop().unwrap();
        let is_whole = record.puts.iter().any(|(key, _)| key[0] == key::LEAF);
        let lengths: Vec<usize> = record.patches.iter().map(|(_, patch)| patch.len()).collect();
        (is_whole, lengths)
    };
    let block = |n: usize| pattern(n as u64, 4 * KIB);
    let write_block = |n: usize| write(&oid("o"), (n * 4 * KIB) as u64, block(n));
    // One block, and blocks that continue one another.
    assert_eq!(change(one(&c, write_block(9)), 9 * 4 * KIB, &block(9)), (false, vec![12]));
    let both = [block(20), block(21)].concat();
    let (is_whole, lengths) = change(one(&c, write_block(20)).with(write_block(21)), 20 * 4 * KIB, &both);
    assert!(!is_whole && lengths == [16], "{lengths:?}");
    // A clone of the old block keeps it, as an undo object does.
    let keep = Op::CloneRange {
        src: oid("o"),
        dst: oid("kept"),
        src_offset: 30 * 4 * KIB as u64,
        len: 4 * KIB as u64,
        dst_offset: 0,
    };
    let old = pattern(1, 1 << 20).slice(30 * 4 * KIB..31 * 4 * KIB);
    let kept = one(&c, keep).with(write_block(30));
    assert_eq!(change(kept, 30 * 4 * KIB, &block(30)), (false, vec![12]));
    // A hole, and a clone of the whole object, need the whole leaf.
    let zero = Op::Zero { oid: oid("o"), offset: 40 * 4 * KIB as u64, len: 4 * KIB as u64 };
    let zeroed = one(&c, write_block(41)).with(zero);
    assert!(change(zeroed.clone(), 40 * 4 * KIB, &[vec![0; 4 * KIB], block(41).to_vec()].concat()).0);
    let cloned = one(&c, write_block(50)).with(Op::Clone { src: oid("o"), dst: oid("twin") });
    assert!(change(cloned, 50 * 4 * KIB, &block(50)).0);
    assert_eq!(change(one(&c, write_block(60)), 60 * 4 * KIB, &block(60)), (false, vec![12]));

    // The process dies, and recovery applies the patches.
    drop(store);
    let store = SimStore::mount(&drive, 2).unwrap();
    assert!(content(&store, "o") == expected);
    assert_eq!(content(&store, "kept"), old);
    leaves(store, &drive);
}

/// The log has patches that cannot be applied. A repair removes their leaves.
#[test]
fn patches_that_cannot_be_applied_are_refused() {
    for (nid, patch, expected) in [
        (700, &b""[..], "leaf 0 of the object with number 700"),
        (1, b"abc", "leaf 0 of the object with number 1"),
    ] {
        let drive = new_drive();
        let shared: Arc<dyn Drive> = drive.clone();
        drop(with_large_object(&drive));
        let (sb, found) = log_of(&drive);
        let patch = (key::leaf(nid, 0), bytes::Bytes::from(patch));
        let record = Record { patches: vec![patch], next_nid: 800, ..Record::default() };
        let end = found.groups.last().unwrap().end;
        // The group states that it was flushed, because its data is not checked then.
        let group = encode_group(found.generation, end, end + GROUP_SECTORS, &[record.encode()]);
        let slot = end % sb.log_sectors();
        drive.write_at(sb.log.offset + slot * SECTOR as u64, &group).unwrap();
        let refused = recover(&shared, 1 << 20, RecoveryMode::Check).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
        let repaired = recover(&shared, 1 << 20, RecoveryMode::Repair).unwrap();
        assert!(repaired.damage.iter().any(|damage| damage.contains(expected)), "{:?}", repaired.damage);
        assert_eq!(repaired.changes.get(&key::leaf(nid, 0)), Some(&None));
    }
}

/// A target of format 3 whose process has died: its log has no patches.
#[test]
fn the_log_of_an_earlier_format_is_replayed() {
    let drive = new_drive();
    let c = cid("c");
    let (store, mut expected) = with_large_object(&drive);
    drop(store);
    let (mut sb, found) = log_of(&drive);
    // Writes the log again as version 3 has written it, and the superblock with version 3.
    let mut at = found.groups.first().unwrap().end;
    for group in found.groups.iter().skip(1) {
        let records: Vec<Vec<u8>> = group.records.iter().map(Record::encode_earlier).collect();
        let bytes = encode_group(found.generation, at, at, &records);
        drive.write_at(sb.log.offset + at % sb.log_sectors() * SECTOR as u64, &bytes).unwrap();
        at = group.end;
    }
    for copy in 0..2 {
        sb.generation += 1;
        drive.write_at(copy * 4096, &sb.encode_as(3)).unwrap();
    }
    assert!(Superblock::read(&*drive).unwrap().needs_both);
    let store = SimStore::mount(&drive, 2).unwrap();
    assert!(content(&store, "o") == expected);
    expected[..4 * KIB].copy_from_slice(&pattern(5, 4 * KIB));
    run(store.queue_transaction(one(&c, write(&oid("o"), 0, pattern(5, 4 * KIB))))).unwrap();
    drop(store);
    assert!(!Superblock::read(&*drive).unwrap().needs_both);
    let store = SimStore::mount(&drive, 3).unwrap();
    assert!(content(&store, "o") == expected);
}
