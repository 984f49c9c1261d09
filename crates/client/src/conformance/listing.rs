//! Cases about listings.

use std::collections::BTreeSet;

use futures::future::join_all;

use super::object;
use crate::{Client, Listing, ObjectName, Pool};

/// Number of names per request, so that each listing has several pages.
const PAGE: u32 = 7;

pub(super) async fn run(client: &Client, pool_name: &str, listing: &Pool, cursors: &Pool, churn: &Pool) {
    a_listing_names_every_object_exactly_once(client, pool_name, listing).await;
    a_cursor_continues_a_listing_after_its_page(cursors).await;
    objects_that_exist_throughout_are_listed_exactly_once(churn).await;
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
