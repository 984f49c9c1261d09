use std::cell::Cell;
use std::collections::BTreeSet;

use futures::FutureExt;
use proptest::prelude::*;
use wire::{PartId, SessionId, UploadId};

use super::*;

/// The objects of a group in memory, which counts the calls that list them.
struct MemGroup {
    ids: BTreeSet<ObjectId>,
    calls: Cell<usize>,
}

impl MemGroup {
    fn new(layout: IdLayout, names: &[(String, String)], parts: &[(String, String)]) -> MemGroup {
        let upload = UploadId { session: SessionId(7), number: 3 };
        let part = PartId { upload, index: 1 };
        let id = |(namespace, name): &(String, String), part: Option<&PartId>| {
            layout.id(placement::hash(namespace, name, part), namespace, name, part)
        };
        let objects = names.iter().map(|name| id(name, None));
        let ids = objects.chain(parts.iter().map(|name| id(name, Some(&part))));
        MemGroup { ids: ids.chain([ids::meta_object()]).collect(), calls: Cell::new(0) }
    }

    fn page(&self, from: Option<ObjectId>, limit: usize) -> (Vec<ObjectId>, bool) {
        self.calls.set(self.calls.get() + 1);
        let from = from.unwrap_or_else(ids::meta_object);
        let mut ids = self.ids.range(from..);
        (ids.by_ref().take(limit).cloned().collect(), ids.next().is_some())
    }

    /// Lists one page of matching objects.
    fn scan(&self, filter: ListFilter<'_>, from: Option<ObjectId>, budget: ListBudget) -> GroupScan {
        let fetch = async |from: Option<ObjectId>, limit| Ok(self.page(from, limit));
        let scan = scan(filter, from, budget, fetch).now_or_never().unwrap().unwrap();
        assert!(scan.names.len() <= budget.names, "{} names", scan.names.len());
        scan
    }

    /// Lists all matching objects in pages with this budget. Returns the names and the number of pages.
    fn list(&self, filter: ListFilter<'_>, budget: ListBudget) -> (Vec<(String, String)>, usize) {
        let (mut names, mut from, mut pages) = (Vec::new(), None, 0);
        loop {
            let scan = self.scan(filter, from, budget);
            names.extend(scan.names);
            pages += 1;
            match scan.stop {
                Some(stop) => from = Some(stop.next),
                None => return (names, pages),
            }
        }
    }
}

fn request(namespace: Option<&str>, prefix: &str) -> List {
    List {
        pool: Bytes::from_static(b"pool"),
        namespace: namespace.map(|namespace| Bytes::copy_from_slice(namespace.as_bytes())),
        prefix: Bytes::copy_from_slice(prefix.as_bytes()),
        group: Some(0),
        cursor: Bytes::new(),
        limit: 1,
        skip_unavailable: false,
    }
}

fn filter(layout: IdLayout, list: &List) -> ListFilter<'_> {
    ListFilter::new(layout, list.checked_namespace().unwrap(), &list.prefix)
}

fn budget(names: usize) -> ListBudget {
    ListBudget { names, bytes: PAGE_BYTES, work: WORK_MAX }
}

/// Namespaces and names, some of which start with others.
fn named() -> impl Strategy<Value = Vec<(String, String)>> {
    proptest::collection::vec(("|a|a-|ab|b", "[\x01abü]{1,4}"), 0..60)
}

proptest! {
    #[test]
    fn a_listing_equals_the_filter_of_all_objects(
        names in named(), parts in named(), namespace in proptest::option::of("|a|a-|ab|b|c"),
        prefix in "[\x01abü]{0,2}", most in 1usize..9, bytes in 1usize..40, work in 1usize..200,
    ) {
        let list = request(namespace.as_deref(), &prefix);
        let matches = |(ns, name): &&(String, String)| {
            namespace.as_ref().is_none_or(|namespace| namespace == ns) && name.starts_with(&prefix)
        };
        let expected: BTreeSet<_> = names.iter().filter(matches).cloned().collect();
        for layout in [IdLayout::Hashed, IdLayout::ByName] {
            let group = MemGroup::new(layout, &names, &parts);
            let filter = filter(layout, &list);
            let (mut listed, _) = group.list(filter, ListBudget { names: most, bytes, work });
            if layout == IdLayout::Hashed {
                listed.sort();
            }
            prop_assert!(listed.iter().eq(&expected), "{layout:?}: {listed:?}, not {expected:?}");
        }
    }

    #[test]
    fn a_listing_continues_after_the_name_that_was_examined_last(
        names in named(), namespace in proptest::option::of("|a|a-|ab"), prefix in "[ab]{0,2}", most in 1usize..5,
    ) {
        let list = request(namespace.as_deref(), &prefix);
        let group = MemGroup::new(IdLayout::ByName, &names, &names);
        let filter = filter(IdLayout::ByName, &list);
        let (expected, _) = group.list(filter, budget(1000));
        let (mut listed, mut from) = (Vec::new(), None);
        loop {
            let scan = group.scan(filter, from, budget(most));
            listed.extend(scan.names);
            let Some(stop) = scan.stop else { break };
            let cursor = group_cursor(&PoolName::new("pool").unwrap(), &stop).unwrap();
            from = Start::after(IdLayout::ByName, &List { cursor, ..list.clone() }).unwrap();
        }
        prop_assert_eq!(listed, expected);
    }
}

#[test]
fn the_calls_of_a_listing_depend_only_on_what_it_returns() {
    for count in [100, 10_000] {
        let name = |n: usize| (["a", "c"][n % 2].to_owned(), format!("{n:06}"));
        let group = MemGroup::new(IdLayout::ByName, &(0..count).map(name).collect::<Vec<_>>(), &[]);
        let calls = |namespace, prefix: &str, names: usize| {
            let list = request(namespace, prefix);
            let filter = filter(IdLayout::ByName, &list);
            group.calls.set(0);
            assert_eq!(group.list(filter, budget(1000)).0.len(), names, "{namespace:?}, {prefix}");
            group.calls.get()
        };
        assert_eq!(calls(Some("b"), "", 0), 1);
        assert_eq!(calls(Some("a"), "9", 0), 1);
        assert_eq!(calls(Some("d"), "", 0), 1);
        assert_eq!(calls(Some("a"), "00001", 5), 1);
        // Two calls for each of the two namespaces at most: to its start, and to the prefix.
        assert!(calls(None, "00001", 10) <= 4);
        assert!(calls(None, "9", 0) <= 4);
    }
}

#[test]
fn a_request_examines_a_bounded_number_of_hashed_ids() {
    let names: Vec<_> = (0..30_000).map(|n| (String::new(), format!("{n}"))).collect();
    let group = MemGroup::new(IdLayout::Hashed, &names, &[]);
    let list = request(Some("other"), "");
    let filter = filter(IdLayout::Hashed, &list);
    let (listed, pages) = group.list(filter, budget(1000));
    assert!(listed.is_empty() && (30_000 / WORK_MAX..=5).contains(&pages), "{pages} pages");
}

#[test]
fn a_request_seeks_to_a_bounded_number_of_namespaces() {
    // Each namespace has more names than the first call after a seek returns.
    let names =
        |n: usize| (0..2 * STEP_AFTER_SEEK).map(move |name| (format!("{n:04}"), format!("{name:02}")));
    let names: Vec<_> = (0..1000).flat_map(names).collect();
    let group = MemGroup::new(IdLayout::ByName, &names, &[]);
    let list = request(None, "a");
    let filter = filter(IdLayout::ByName, &list);
    let (listed, pages) = group.list(filter, budget(1000));
    assert!(listed.is_empty() && pages > 1, "{pages} pages");
    assert!(group.calls.get() <= pages * (WORK_MAX / CALL_WORK), "{} calls", group.calls.get());
}

#[test]
fn a_listing_by_prefix_reads_small_namespaces_in_long_calls() {
    const IDS: usize = 30_000;
    for names_each in [1, 2, 20] {
        let name = |n: usize| (format!("{:06}", n / names_each), format!("b{}", n % names_each));
        let names: Vec<_> = (0..IDS).map(name).collect();
        let group = MemGroup::new(IdLayout::ByName, &names, &[]);
        for prefix in ["a", "b1", "c"] {
            let list = request(None, prefix);
            let (listed, pages) = group.list(filter(IdLayout::ByName, &list), budget(IDS));
            let expected = names.iter().filter(|(_, name)| name.starts_with(prefix)).count();
            assert_eq!(listed.len(), expected, "{prefix}");
            // The first calls are short, and the last call of a page is not used completely.
            let (calls, calls_max) = (group.calls.take(), IDS / STEP_MAX + 4 + pages);
            assert!(calls <= calls_max, "{names_each} names, {prefix}: {calls} calls, {pages} pages");
        }
    }
}
