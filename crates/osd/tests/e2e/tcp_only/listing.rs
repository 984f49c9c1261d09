//! Tests of what listings return and cost, in pools of this version and of an earlier one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use client::{Error, Listing, NodeError, Pool};
use futures::future::try_join_all;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use store::{MetadataQuery, StoreRequest};

use crate::common::{Node, seed};
use crate::redundancy::redundancy;
use crate::tcp_only::earlier::node_of_earlier_version;

/// Namespaces, some of which start with others.
const NAMESPACES: [&str; 5] = ["", "a", "a-", "ab", "b"];

/// Counts the calls that list objects, on all targets of a node.
fn count_listings(node: &Node) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    for store in &node.stores {
        let count = Arc::clone(&count);
        store.refuse(Some(Box::new(move |request| {
            if let StoreRequest::Query { query: MetadataQuery::List { .. }, .. } = request {
                count.fetch_add(1, Ordering::SeqCst);
            }
            None
        })));
    }
    count
}

async fn create(pool: &Pool, names: &BTreeSet<(String, String)>) {
    let names =
        names.iter().map(async |(namespace, name)| pool.namespace(namespace)?.object(name)?.create().await);
    try_join_all(names).await.unwrap();
}

async fn listed(mut listing: Listing) -> Vec<(String, String)> {
    let mut names = Vec::new();
    while let Some(name) = listing.next().await.unwrap() {
        names.push((name.namespace().to_owned(), name.object().to_owned()));
    }
    names
}

#[tokio::test]
async fn the_calls_of_a_listing_do_not_depend_on_the_number_of_other_objects() {
    const GROUPS: u32 = 64;
    for scheme in ["single", "mirror:2"] {
        let mut node = Node::of(2, osd::OsdConfig::default());
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", GROUPS, redundancy(scheme)).await.unwrap();
        let pool = client.pool("pool").unwrap();
        let few: BTreeSet<_> = (0..10).map(|n| ("few".to_owned(), format!("{n}"))).collect();
        create(&pool, &few).await;
        for others in [0..10, 10..3000] {
            let others = others.flat_map(|n| ["a", "z"].map(|ns| (ns.to_owned(), format!("{n}"))));
            create(&pool, &others.collect()).await;
            let count = count_listings(&node);
            for namespace in ["empty", "few"] {
                let namespace = pool.namespace(namespace).unwrap();
                for listing in [namespace.list(""), namespace.list("").ordered()] {
                    count.store(0, Ordering::SeqCst);
                    listed(listing).await;
                    let calls = count.load(Ordering::SeqCst);
                    assert_eq!(calls, GROUPS as usize, "{scheme}, {}", namespace.name());
                }
            }
            // Each group has two other namespaces.
            count.store(0, Ordering::SeqCst);
            assert!(listed(pool.list_all_namespaces("none")).await.is_empty());
            let calls = count.load(Ordering::SeqCst);
            assert!(calls <= 6 * GROUPS as usize, "{calls} calls");
        }
    }
}

#[tokio::test]
async fn small_pages_of_a_pool_with_hashed_ids_list_one_group_at_a_time() {
    const GROUPS: usize = 64;
    let node = node_of_earlier_version(1, GROUPS as u32, redundancy("single")).await;
    let client = node.client().await;
    let pool = client.pool("pool").unwrap();
    let names: BTreeSet<_> = (0..320).map(|n| (String::new(), format!("{n}"))).collect();
    create(&pool, &names).await;
    let count = count_listings(&node);
    assert_eq!(listed(pool.list("").page_size(16)).await.len(), names.len());
    // Each page begins with the rest of the group in which the last page has ended.
    let (calls, calls_max) = (count.load(Ordering::SeqCst), GROUPS + names.len() / 16 + 1);
    assert!((GROUPS..=calls_max).contains(&calls), "{calls} calls");
}

#[tokio::test]
async fn listings_of_both_layouts_return_what_a_filter_of_all_objects_returns() {
    let mut random = StdRng::seed_from_u64(seed());
    let new = Node::start();
    new.pool_of(8).await;
    let earlier = node_of_earlier_version(2, 8, redundancy("single")).await;
    let mut name = |longest: usize| {
        let letter = |_| *['\u{1}', 'a', 'b', 'ü'].choose(&mut random).unwrap();
        (0..longest).map(letter).collect::<String>()
    };
    let name_of = |n: usize| NAMESPACES[n % NAMESPACES.len()].to_owned();
    let names: BTreeSet<_> = (0..400).map(|n| (name_of(n), name(1 + n % 5))).collect();
    let cases: Vec<_> = (0..60).map(|n| (name_of(n), name(n % 3))).collect();
    for (node, can_order) in [(&new, true), (&earlier, false)] {
        let client = node.client().await;
        let pool = client.pool("pool").unwrap();
        create(&pool, &names).await;
        for (n, (namespace, prefix)) in cases.iter().enumerate() {
            let (all_namespaces, page) = (n % 3 == 0, [1, 3, 17, 1000][n % 4]);
            let list = || match all_namespaces {
                true => pool.list_all_namespaces(prefix).page_size(page),
                false => pool.namespace(namespace).unwrap().list(prefix).page_size(page),
            };
            let matches = |(ns, name): &&(String, String)| {
                (all_namespaces || ns == namespace) && name.starts_with(prefix)
            };
            let expected: Vec<_> = names.iter().filter(matches).cloned().collect();
            let mut found = listed(list()).await;
            found.sort();
            assert_eq!(found, expected, "{namespace:?}, {prefix:?}, {page} names per page");
            if can_order {
                assert_eq!(listed(list().ordered()).await, expected, "{namespace:?}, {prefix:?}, {page}");
            } else {
                let refused = list().ordered().next().await.unwrap_err();
                assert!(matches!(refused, Error::Node(NodeError::NotOrdered(_))), "{refused}");
            }
        }
    }
}

/// Cursors of both kinds stay valid across a restart of the node.
#[tokio::test]
async fn cursors_stay_valid_when_the_node_restarts() {
    let mut node = Node::start();
    let (client, pool) = node.pool_of(4).await;
    let names: BTreeSet<_> = (0..300).map(|n| (String::new(), format!("{n:03}"))).collect();
    create(&pool, &names).await;
    let mut rest = Vec::new();
    for is_ordered in [false, true] {
        let list = |pool: &Pool| match is_ordered {
            true => pool.list("").page_size(10).ordered(),
            false => pool.list("").page_size(10),
        };
        let mut listing = list(&pool);
        for _ in 0..100 {
            listing.next().await.unwrap().unwrap();
        }
        let cursor = listing.cursor().clone();
        let expected = listed(list(&pool).from_cursor(cursor.clone())).await;
        assert!(expected.len() <= 200, "{}", expected.len());
        rest.push((is_ordered, cursor, expected));
    }
    drop(client);
    node.restart();
    let client = node.client().await;
    let pool = client.pool("pool").unwrap();
    for (is_ordered, cursor, expected) in rest {
        let listing = pool.list("").from_cursor(cursor);
        let listing = if is_ordered { listing.ordered() } else { listing };
        assert_eq!(listed(listing).await, expected, "ordered: {is_ordered}");
    }
}
