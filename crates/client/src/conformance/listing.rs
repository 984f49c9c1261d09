//! Cases about listings.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::join_all;

use super::{node_error, object};
use crate::{Client, Listing, NodeError, ObjectName, Pool};

/// Number of names per request, so that each listing has several pages.
const PAGE: u32 = 7;

pub(super) async fn run(client: &Client, pool_name: &str, listing: &Pool, cursors: &Pool, churn: &Pool) {
    a_listing_names_every_object_exactly_once(client, pool_name, listing).await;
    a_cursor_continues_a_listing_after_its_page(cursors).await;
    objects_that_exist_throughout_are_listed_exactly_once(churn).await;
    namespaces_that_start_with_each_other_are_kept_apart(client, pool_name).await;
    an_ordered_listing_returns_all_names_in_order(client, pool_name, listing).await;
    the_last_name_continues_an_ordered_listing_at_any_time(cursors).await;
    objects_that_exist_throughout_are_listed_in_order(churn).await;
    an_invalid_cursor_is_refused(cursors).await;
    a_listing_that_has_begun_starts_again_at_its_new_cursor(cursors).await;
}

/// Creates objects with these names.
async fn make(pool: &Pool, names: &BTreeSet<String>) {
    join_all(names.iter().map(|name| async move { object(pool, name).put(name.clone()).await.unwrap() }))
        .await;
}

/// Returns the names, and checks that they are unique.
fn unique(listed: Vec<ObjectName>) -> BTreeSet<String> {
    let names: BTreeSet<_> = listed.iter().map(|name| name.object().to_owned()).collect();
    assert_eq!(names.len(), listed.len(), "a name was listed twice: {listed:?}");
    names
}

async fn all(listing: Listing) -> BTreeSet<String> {
    unique(listing.collect().await.unwrap())
}

async fn a_listing_names_every_object_exactly_once(client: &Client, pool_name: &str, pool: &Pool) {
    let made: BTreeSet<String> = (0..60).map(|i| format!("{}/{i}", ["a", "b", "ü"][i % 3])).collect();
    make(pool, &made).await;
    for page in [1, PAGE, 59, 60, 1000] {
        assert_eq!(all(pool.list("").page_size(page)).await, made, "{page} names per page");
        assert_eq!(all(pool.list("ü/").page_size(page)).await.len(), 20);
        assert!(all(pool.list("c").page_size(page)).await.is_empty());
    }
    let everywhere = client.pool(pool_name).unwrap().list_all_namespaces("b/").page_size(PAGE);
    let everywhere = everywhere.collect().await.unwrap();
    assert_eq!(everywhere.iter().filter(|name| name.namespace() == "listing").count(), 20);
    let first = pool.list("").next().await.unwrap().unwrap();
    object(pool, first.object()).remove().await.unwrap();
    assert_eq!(all(pool.list("")).await.len(), made.len() - 1);
}

async fn a_cursor_continues_a_listing_after_its_page(pool: &Pool) {
    let made: BTreeSet<String> = (0..40).map(|i| format!("{i}")).collect();
    make(pool, &made).await;
    let mut listing = pool.list("").page_size(PAGE);
    assert!(listing.cursor().is_empty());
    let mut page = vec![listing.next().await.unwrap().unwrap()];
    let cursor = listing.cursor().clone();
    assert!(!cursor.is_empty(), "{PAGE} names per page need several pages");
    let end = loop {
        match listing.next().await.unwrap() {
            Some(name) if *listing.cursor() == cursor => page.push(name),
            other => break other,
        }
    };
    assert!(end.is_some() && page.len() <= PAGE as usize);
    let page = unique(page);
    let rest = || async { all(pool.list("").page_size(PAGE).from_cursor(cursor.clone())).await };
    assert_eq!(rest().await, made.difference(&page).cloned().collect());
    // A cursor stays valid when all objects of its page are removed.
    for name in &page {
        object(pool, name).remove().await.unwrap();
    }
    assert_eq!(rest().await, made.difference(&page).cloned().collect());
}

async fn objects_that_exist_throughout_are_listed_exactly_once(pool: &Pool) {
    let stable: BTreeSet<String> = (0..40).map(|i| format!("stable-{i}")).collect();
    make(pool, &stable).await;
    let mut listing = pool.list("").page_size(3);
    let (mut listed, mut step) = (Vec::new(), 0);
    object(pool, "passing-0").create().await.unwrap();
    while let Some(name) = listing.next().await.unwrap() {
        listed.push(name);
        object(pool, &format!("passing-{step}")).remove().await.unwrap();
        step += 1;
        object(pool, &format!("passing-{step}")).create().await.unwrap();
        assert!(step < 10_000, "the listing does not end");
    }
    listed.retain(|name| name.object().starts_with("stable"));
    assert_eq!(unique(listed), stable);
}

/// Returns the namespaces and names of a listing, in its order.
async fn in_order(listing: Listing) -> Vec<(String, String)> {
    let names = listing.collect().await.unwrap();
    names.iter().map(|name| (name.namespace().to_owned(), name.object().to_owned())).collect()
}

async fn namespaces_that_start_with_each_other_are_kept_apart(client: &Client, pool_name: &str) {
    let pool = client.pool(pool_name).unwrap();
    let namespaces = ["near", "near-", "near0", "nearer"];
    let names = ["\u{1}", "-", "0", "a", "ab", "er"];
    let mut made = Vec::new();
    for namespace in namespaces {
        make(&pool.namespace(namespace).unwrap(), &names.iter().map(|&name| name.to_owned()).collect()).await;
        made.extend(names.iter().map(|&name| (namespace.to_owned(), name.to_owned())));
    }
    for page in [1, 2, PAGE, 1000] {
        for namespace in namespaces {
            let namespace_pool = pool.namespace(namespace).unwrap();
            let expected: Vec<_> = made.iter().filter(|(ns, _)| ns == namespace).cloned().collect();
            assert_eq!(in_order(namespace_pool.list("").ordered().page_size(page)).await, expected);
            assert_eq!(all(namespace_pool.list("").page_size(page)).await.len(), names.len());
            let listed = in_order(namespace_pool.list("a").ordered().page_size(page)).await;
            assert_eq!(
                listed,
                [(namespace.to_owned(), "a".to_owned()), (namespace.to_owned(), "ab".to_owned())]
            );
        }
        let mut listed = in_order(pool.list_all_namespaces("").ordered().page_size(page)).await;
        assert!(listed.is_sorted(), "{listed:?}");
        listed.retain(|(namespace, _)| namespace.starts_with("near"));
        assert_eq!(listed, made, "{page} names per page");
        let mut listed = in_order(pool.list_all_namespaces("e").ordered().page_size(page)).await;
        listed.retain(|(namespace, _)| namespace.starts_with("near"));
        assert_eq!(listed, namespaces.map(|namespace| (namespace.to_owned(), "er".to_owned())));
    }
    let empty = pool.namespace("nea").unwrap();
    assert!(all(empty.list("")).await.is_empty() && all(empty.list("").ordered()).await.is_empty());
}

async fn an_ordered_listing_returns_all_names_in_order(client: &Client, pool_name: &str, pool: &Pool) {
    for prefix in ["", "a/", "ü/", "ü/1", "c", "\u{10ffff}"] {
        let unordered = all(pool.list(prefix)).await;
        for page in [1, PAGE, 59, 1000] {
            let listed = in_order(pool.list(prefix).ordered().page_size(page)).await;
            let objects: Vec<String> = listed.into_iter().map(|(_, object)| object).collect();
            assert!(objects.iter().eq(&unordered), "prefix {prefix:?}, {page} names per page: {objects:?}");
        }
    }
    let everywhere = client.pool(pool_name).unwrap();
    let listed = in_order(everywhere.list_all_namespaces("b/").ordered().page_size(PAGE)).await;
    assert!(listed.is_sorted() && listed.iter().any(|(namespace, _)| namespace == "listing"), "{listed:?}");
}

async fn the_last_name_continues_an_ordered_listing_at_any_time(pool: &Pool) {
    let made = all(pool.list("")).await;
    let middle = made.iter().nth(made.len() / 2).unwrap().clone();
    let mut listing = pool.list("").ordered().page_size(PAGE);
    assert!(listing.cursor().is_empty());
    while listing.next().await.unwrap().unwrap().object() != middle {}
    let cursor = listing.cursor().clone();
    // Neither the object of the cursor nor the objects around it need to exist.
    for name in [&middle, made.first().unwrap()] {
        object(pool, name).remove().await.unwrap();
    }
    object(pool, "!before").create().await.unwrap();
    let next = format!("{middle}+");
    object(pool, &next).create().await.unwrap();
    let mut expected: Vec<String> = made.iter().filter(|name| **name > middle).cloned().collect();
    expected.insert(0, next);
    for page in [1, PAGE, 1000] {
        let rest = in_order(pool.list("").ordered().page_size(page).from_cursor(cursor.clone())).await;
        let rest: Vec<String> = rest.into_iter().map(|(_, object)| object).collect();
        assert_eq!(rest, expected, "{page} names per page");
    }
    // At the end, the cursor is the last name.
    let mut listing = pool.list("").ordered().from_cursor(cursor);
    while listing.next().await.unwrap().is_some() {}
    let cursor = listing.cursor().clone();
    assert!(all(pool.list("").ordered().from_cursor(cursor.clone())).await.is_empty());
    object(pool, "~last").create().await.unwrap();
    assert_eq!(all(pool.list("").ordered().from_cursor(cursor)).await, ["~last".to_owned()].into());
}

async fn objects_that_exist_throughout_are_listed_in_order(pool: &Pool) {
    let stable: BTreeSet<String> = (0..40).map(|i| format!("stable-{i}")).collect();
    let mut listing = pool.list("").ordered().page_size(2);
    let (mut listed, mut step) = (Vec::new(), 0_u32);
    while let Some(name) = listing.next().await.unwrap() {
        listed.push(name.object().to_owned());
        object(pool, &format!("stable-{step}-passing")).create().await.unwrap();
        step += 1;
        if let Some(before) = step.checked_sub(5) {
            object(pool, &format!("stable-{before}-passing")).remove().await.unwrap();
        }
        assert!(step < 10_000, "the listing does not end");
    }
    assert!(listed.is_sorted(), "{listed:?}");
    listed.retain(|name| name.starts_with("stable-") && !name.ends_with("passing"));
    assert!(listed.iter().eq(&stable), "{listed:?}");
}

async fn an_invalid_cursor_is_refused(pool: &Pool) {
    let long = "x".repeat(2000);
    for cursor in ["name", "a\0", "\0", "a b\0name", "\0a\0b", &*format!("\0{long}")] {
        let mut listing = pool.list("").ordered().from_cursor(Bytes::copy_from_slice(cursor.as_bytes()));
        let refused = node_error(listing.next().await);
        assert!(matches!(refused, NodeError::BadRequest(_)), "{cursor:?}: {refused}");
    }
    let mut listing = pool.list("").from_cursor(Bytes::from_static(b"\xff\xff\xff\xff\xff"));
    let refused = node_error(listing.next().await);
    assert!(matches!(refused, NodeError::BadRequest(_)), "{refused}");
}

async fn a_listing_that_has_begun_starts_again_at_its_new_cursor(pool: &Pool) {
    let made = all(pool.list("")).await;
    for mut listing in [pool.list("").page_size(PAGE), pool.list("").page_size(PAGE).ordered()] {
        for _ in 0..PAGE {
            listing.next().await.unwrap().unwrap();
        }
        let cursor = listing.cursor().clone();
        listing.next().await.unwrap().unwrap();
        let mut listing = listing.from_cursor(cursor);
        let mut rest = 0;
        while listing.next().await.unwrap().is_some() {
            rest += 1;
        }
        assert_eq!(rest, made.len() - PAGE as usize);
        assert_eq!(all(listing.from_cursor(Bytes::new())).await, made);
    }
    // At its end, a listing without order has an empty cursor.
    let mut listing = pool.list("");
    while listing.next().await.unwrap().is_some() {}
    assert_eq!(all(listing.ordered()).await, made);
}
