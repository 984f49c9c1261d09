//! Attacks of the storage host on what the DPU has stored on the targets: the node's map, with the
//! tenants, users and rights, and the node's age. Each attack is mounted on all targets or on one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use identity::{Caller, ProofKey};
use osd::{OsdConfig, OsdServer, StartError};
use store::{CollectionId, ObjectId, Op, StoreCalls, Transaction};
use wire::{AccountRequest, AdminReply, AdminRequest, Verbs};

use crate::common::{Node, stack};
use crate::redundancy::config;
use crate::tcp_only::start::{read_map, write_map};
use crate::tcp_only::witness::{Memory, config_with};

const USER: &str = "main/guest";

async fn order(node: &Node, request: AccountRequest) -> AdminReply {
    let administrator = node.osd.as_ref().unwrap().administrator();
    administrator.administer(Caller::process(), AdminRequest::Accounts(request), false).await.unwrap()
}

/// Returns a node whose user has a right that was revoked, and the map of each target from before.
async fn node_after_a_revocation() -> (Node, Arc<Memory>, Vec<Bytes>) {
    let memory = Arc::new(Memory::default());
    let mut node = Node::start_with(config_with(&memory, config()));
    let user = || USER.parse::<wire::AccountName>().unwrap();
    order(&node, AccountRequest::CreateUser { user: user(), key: [7; 32], is_node_admin: false }).await;
    let grant = wire::AccessGrant { scope: wire::Scope::ALL, verbs: Verbs::ALL };
    order(&node, AccountRequest::Grant { user: user(), grant }).await;
    let mut before = Vec::new();
    for store in &node.stores {
        before.push(read_map(&**store).await);
    }
    order(&node, AccountRequest::Revoke { user: user(), scope: None, verbs: Verbs::ALL }).await;
    node.osd.take().unwrap().stop();
    (node, memory, before)
}

async fn verbs_of_user(node: &Node) -> Vec<Verbs> {
    match order(node, AccountRequest::ListUsers { tenant: None }).await {
        AdminReply::Users(users) => users[0].grants.iter().map(|grant| grant.verbs).collect(),
        other => panic!("{other:?}"),
    }
}

fn try_start(node: &Node) -> Result<OsdServer, StartError> {
    OsdServer::start(node.resources(), stack(messenger::UseAs::Server), &node.endpoint)
}

/// Overwrites the maps of all targets, and checks that this has changed them.
async fn replace_maps(node: &Node, map: impl Fn(usize, Bytes) -> Bytes) {
    for (number, store) in node.stores.iter().enumerate() {
        let found = read_map(&**store).await;
        let new = map(number, found.clone());
        assert_ne!(found, new, "the attack changes the map");
        write_map(&**store, new).await;
    }
}

#[tokio::test]
async fn a_revocation_is_not_rolled_back_by_older_maps_on_all_targets() {
    let (mut node, _witness, before) = node_after_a_revocation().await;
    let newest: Vec<Bytes> = {
        let mut maps = Vec::new();
        for store in &node.stores {
            maps.push(read_map(&**store).await);
        }
        maps
    };
    replace_maps(&node, |number, _| before[number].clone()).await;
    let refused = try_start(&node).unwrap_err();
    assert!(matches!(refused, StartError::OldCopies { .. }), "{refused}");
    replace_maps(&node, |number, _| newest[number].clone()).await;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, []);
}

#[tokio::test]
async fn an_older_map_on_one_target_is_replaced_by_the_newest() {
    let (mut node, _witness, before) = node_after_a_revocation().await;
    write_map(&*node.stores[0], before[0].clone()).await;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, []);
    assert_ne!(read_map(&*node.stores[0]).await, before[0]);
}

#[tokio::test]
async fn an_altered_map_is_refused_wherever_it_was_altered() {
    let (mut node, _witness, _) = node_after_a_revocation().await;
    let good = read_map(&*node.stores[0]).await;
    for at in [1, 33, good.len() / 2, good.len() - 1] {
        replace_maps(&node, |_, map| {
            let mut map = map.to_vec();
            map[at] ^= 1;
            map.into()
        })
        .await;
        let refused = try_start(&node).unwrap_err();
        assert!(matches!(refused, StartError::AlteredMap { .. }), "byte {at}: {refused}");
        replace_maps(&node, |_, _| good.clone()).await;
    }
    // One altered copy costs its target only.
    write_map(&*node.stores[0], [&good[..], b"x"].concat().into()).await;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, []);
}

#[tokio::test]
async fn a_map_of_an_earlier_version_is_accepted_only_before_the_first_sealed_one() {
    let (mut node, witness, _) = node_after_a_revocation().await;
    let good = read_map(&*node.stores[0]).await;
    // The forger makes a map without accounts and without seal, with a higher epoch.
    let content = &good[33..];
    let forged = |_: usize, _: Bytes| {
        // Format 4 ends before the accounts, and its pools have no tenant. This node has no pools.
        let accounts = content.windows(5).rposition(|bytes| bytes == b"\x04main").unwrap() - 2;
        Bytes::from([&[4][..], &[0xff, 0xff, 0xff, 0x0f], &content[1..accounts]].concat())
    };
    replace_maps(&node, forged).await;
    let refused = try_start(&node).unwrap_err();
    assert!(matches!(refused, StartError::AlteredMap { .. }), "{refused}");
    // Without the witness, it would have been accepted, as on a node of an earlier version.
    witness.forget();
    node.restart();
    node.osd.take().unwrap().stop();
    assert_eq!(read_map(&*node.stores[0]).await[0], 6, "the start has sealed the map");
}

/// Returns the epoch of an encoded map: the number after the format and the seal.
fn epoch(map: &Bytes) -> u64 {
    let digits = map[33..].iter().scan(true, |goes_on, byte| {
        let digit = goes_on.then_some(u64::from(byte & 0x7f));
        *goes_on = byte & 0x80 != 0;
        digit
    });
    digits.zip(0..).map(|(digit, place)| digit << (7 * place)).sum()
}

/// The host makes the first change after a start fail: it receives the map, and does not answer. Then the
/// osd ends, and the host puts back the map from before on all targets. Returns this map, and the one
/// that the host has kept.
async fn fail_change_of_map(node: &mut Node) -> (Bytes, Bytes) {
    // Without upkeep, the map does not change by itself.
    node.config.upkeep_interval = Duration::from_secs(3600);
    node.config.target_timeout = Duration::from_millis(200);
    node.restart();
    let base = read_map(&*node.stores[0]).await;
    node.hold(true);
    let grant = wire::AccessGrant { scope: wire::Scope::ALL, verbs: Verbs::ALL };
    let grant = AdminRequest::Accounts(AccountRequest::Grant { user: USER.parse().unwrap(), grant });
    let administrator = node.osd.as_ref().unwrap().administrator();
    let failed = administrator.administer(Caller::process(), grant, false).await;
    assert!(failed.is_err(), "{failed:?}");
    let kept = read_map(&*node.stores[0]).await;
    node.hold(false);
    assert_eq!(verbs_of_user(node).await, [], "a failed change has no effect");
    node.osd.take().unwrap().stop();
    for store in &node.stores {
        store.set_down(false);
        write_map(&**store, base.clone()).await;
    }
    assert_ne!(kept, base, "the host has received the map");
    (base, kept)
}

async fn refuses_maps(node: &Node, map: &Bytes) {
    replace_maps(node, |_, _| map.clone()).await;
    let refused = try_start(node).map(OsdServer::stop).unwrap_err();
    assert!(matches!(refused, StartError::OldCopies { .. }), "epoch {}: {refused}", epoch(map));
}

#[tokio::test]
async fn maps_that_the_host_has_kept_from_failed_changes_do_not_replace_a_later_map() {
    let (mut node, _witness, _) = node_after_a_revocation().await;
    // The kept map has the epoch that follows. After a start without a target, the epoch is far higher.
    let (first, near) = fail_change_of_map(&mut node).await;
    assert_eq!(epoch(&near), epoch(&first) + 1);
    node.stores[1].set_down(true);
    let (base, far) = fail_change_of_map(&mut node).await;
    assert!(epoch(&far) > epoch(&base) + (1 << 32));

    node.restart();
    order(&node, AccountRequest::CreateTenant { name: "films".into() }).await;
    node.osd.take().unwrap().stop();
    let newest = read_map(&*node.stores[0]).await;
    for kept in [&near, &far, &first, &base] {
        refuses_maps(&node, kept).await;
    }
    replace_maps(&node, |_, _| newest.clone()).await;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, []);
}

#[tokio::test]
async fn a_start_with_the_last_saved_map_ends_the_use_of_a_kept_one() {
    let (mut node, _witness, _) = node_after_a_revocation().await;
    let (_, kept) = fail_change_of_map(&mut node).await;
    node.restart();
    node.osd.take().unwrap().stop();
    refuses_maps(&node, &kept).await;
}

/// If the osd has ended while it saved a map, the next start may find only this map.
#[tokio::test]
async fn a_start_uses_a_map_whose_save_was_interrupted() {
    let (mut node, _witness, _) = node_after_a_revocation().await;
    let (base, kept) = fail_change_of_map(&mut node).await;
    replace_maps(&node, |_, _| kept.clone()).await;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, [Verbs::ALL]);
    node.osd.take().unwrap().stop();
    refuses_maps(&node, &base).await;
}

#[tokio::test]
async fn a_forged_age_does_not_discard_the_witness() {
    let (mut node, witness, before) = node_after_a_revocation().await;
    let (cid, oid) = (CollectionId::new("N").unwrap(), ObjectId::new("runs").unwrap());
    let key = Bytes::from_static(b"age");
    for (number, store) in node.stores.iter().enumerate() {
        let found = store.omap_get(&cid, &oid, vec![key.clone()]).await.unwrap();
        let mut age = found[0].1[..25].to_vec();
        assert_eq!((age[0], found[0].1.len()), (3, 57), "the age has a seal");
        // The highest counter, in the format without a seal.
        age[0] = 2;
        age[17..].fill(0xff);
        let set = Op::OmapSet { oid: oid.clone(), entries: vec![(key.clone(), age.into())] };
        store.queue_transaction(Transaction::new(cid.clone()).with(set)).await.unwrap();
        write_map(&**store, before[number].clone()).await;
    }
    let kept = witness.content();
    let refused = try_start(&node).unwrap_err();
    assert!(matches!(refused, StartError::OldCopies { .. }), "the witness still counts: {refused}");
    assert_eq!(witness.content(), kept);
    node.osd = None;
}

#[tokio::test]
async fn a_lost_key_of_the_dpu_is_replaced_only_if_the_operator_accepts_it() {
    let (mut node, _witness, _) = node_after_a_revocation().await;
    let other = ProofKey::new(&[9; 32]);
    node.config = OsdConfig { dpu_key: other, ..node.config.clone() };
    let refused = try_start(&node).unwrap_err();
    assert!(refused.to_string().contains("OUTBOARD_OSD_ACCEPT_ALTERED_MAP"), "{refused}");
    node.config.accepts_altered_map = true;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, []);
    node.config.accepts_altered_map = false;
    node.restart();
    assert_eq!(verbs_of_user(&node).await, [], "the map has the new seal");
}
