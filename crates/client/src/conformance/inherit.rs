//! Cases about objects that begin as copies of others. They concern engines with
//! [`Capability::Inherit`](crate::engine::Capability::Inherit).

use bytes::Bytes;

use super::{bytes, node_error, object};
use crate::engine::{Capability, ReadReply, ReadRequest, Sink};
use crate::{Client, NodeError, Pool};

/// Runs the cases in two namespaces, the first of which is a system namespace.
pub(super) async fn run(client: &Client, pool: &Pool, other: &Pool) {
    let needed = [Capability::SameGroup, Capability::Inherit];
    if client.engine().capabilities().missing(&needed).is_some() {
        return;
    }
    a_new_object_begins_as_a_copy_of_the_first_that_exists(client, pool).await;
    a_copy_of_nothing_makes_no_object(pool).await;
    an_object_that_exists_inherits_nothing(client, pool).await;
    a_copy_is_independent_of_its_source(client, pool).await;
    impossible_copies_are_refused(client, pool, other).await;
}

fn names(names: &[&str]) -> Vec<Bytes> {
    names.iter().map(|name| Bytes::copy_from_slice(name.as_bytes())).collect()
}

/// Reads the first of several objects that exists. Returns its index and its content.
async fn read_first(client: &Client, pool: &Pool, of: &[&str]) -> Result<(usize, Bytes), crate::Error> {
    let request = ReadRequest {
        name: object(pool, of[0]).name().clone(),
        part: None,
        offset: 0,
        len: 1 << 20,
        if_version: None,
        sink: Sink::Bytes,
        fallbacks: names(&of[1..]),
    };
    match client.read(request).await? {
        ReadReply::Data { found, chunks, .. } => Ok((found, chunks.concat().into())),
        ReadReply::Striped { .. } => panic!("the object is not striped"),
    }
}

async fn a_new_object_begins_as_a_copy_of_the_first_that_exists(client: &Client, pool: &Pool) {
    let (old, older) = (bytes(230_000, 1), bytes(70_000, 2));
    let [top, middle, base] = ["3/a", "2/a", "1/a"];
    let absent = node_error(read_first(client, pool, &[top, middle, base]).await);
    assert!(matches!(absent, NodeError::NoSuchObject(_)), "{absent}");
    let without = object(pool, top).compound().inherit(names(&[middle, base])).truncate(5000).commit().await;
    assert_eq!(without.unwrap().size, 5000, "none of the objects exists");
    object(pool, top).remove().await.unwrap();

    object(pool, base).put(older.clone()).await.unwrap();
    object(pool, base).set_xattr("x", "base").await.unwrap();
    object(pool, base).omap_set(vec![("k".into(), "v".into())]).await.unwrap();
    assert_eq!(read_first(client, pool, &[top, middle, base]).await.unwrap(), (2, older.clone()));
    object(pool, middle).put(old.clone()).await.unwrap();
    assert_eq!(read_first(client, pool, &[top, middle, base]).await.unwrap(), (1, old.clone()));

    // A part of a block, in the middle of the copy.
    let written = object(pool, top).compound().inherit(names(&["4/a", middle, base])).write(9000, "new");
    let written = written.commit().await.unwrap();
    let expected = [&old[..9000], b"new", &old[9003..]].concat();
    assert_eq!(written.size, expected.len() as u64);
    assert!(written.version > object(pool, middle).stat().await.unwrap().version);
    assert!(object(pool, top).get().await.unwrap() == expected);
    assert_eq!(read_first(client, pool, &[top, middle, base]).await.unwrap(), (0, expected.into()));

    // The copy has the xattrs and the omap. It may be the only effect.
    object(pool, "5/a").compound().inherit(names(&[base])).commit().await.unwrap();
    assert_eq!(object(pool, "5/a").get().await.unwrap(), older);
    assert_eq!(object(pool, "5/a").xattr("x").await.unwrap().unwrap(), "base");
    assert_eq!(object(pool, "5/a").omap_get(names(&["k"])).await.unwrap().len(), 1);
}

/// The engine may assume that the objects are new, because the ones before were.
async fn a_copy_of_nothing_makes_no_object(pool: &Pool) {
    for n in 0..8 {
        let made = object(pool, &format!("1/n{n}")).compound().inherit(vec![format!("0/n{n}").into()]);
        made.truncate(10).commit().await.unwrap();
    }
    for n in 0..8 {
        let (unseen, none) = (object(pool, &format!("2/n{n}")), vec![Bytes::from(format!("0/n{n}"))]);
        unseen.compound().inherit(none.clone()).commit().await.unwrap();
        let absent = unseen.stat().await.unwrap_err();
        assert!(absent.is_not_found(), "{absent}");
        let removed = unseen.compound().inherit(none).remove().commit().await;
        assert!(removed.unwrap_err().is_not_found());
        unseen.compound().if_absent().create().commit().await.unwrap();
    }
}

async fn an_object_that_exists_inherits_nothing(client: &Client, pool: &Pool) {
    object(pool, "1/b").put("source").await.unwrap();
    object(pool, "2/b").put("").await.unwrap();
    let written = object(pool, "2/b").compound().inherit(names(&["1/b"])).write(2, "x").commit().await;
    assert_eq!(written.unwrap().size, 3);
    assert_eq!(object(pool, "2/b").get().await.unwrap(), "\0\0x");
    let exists = object(pool, "3/b").compound().if_absent().inherit(names(&["1/b"])).create().commit().await;
    assert!(matches!(node_error(exists), NodeError::Exists(_)));
    let absent = node_error(object(pool, "3/b").get().await);
    assert!(matches!(absent, NodeError::NoSuchObject(_)), "a refused change copies nothing");
    assert_eq!(read_first(client, pool, &["3/b", "2/b"]).await.unwrap().1, "\0\0x");
    // Removed again by the same change.
    object(pool, "3/b").compound().inherit(names(&["1/b"])).remove().commit().await.unwrap();
    assert!(object(pool, "3/b").get().await.unwrap_err().is_not_found());
}

async fn a_copy_is_independent_of_its_source(client: &Client, pool: &Pool) {
    let data = bytes(200_000, 3);
    object(pool, "1/c").put(data.clone()).await.unwrap();
    for (copy, cut) in [("2/c", 0), ("3/c", 100_000), ("4/c", 240_000)] {
        object(pool, copy).compound().inherit(names(&["1/c"])).truncate(cut).commit().await.unwrap();
    }
    object(pool, "5/c").compound().inherit(names(&["1/c"])).zero(4096, 8192).commit().await.unwrap();
    object(pool, "1/c").write(0, "changed").await.unwrap();
    object(pool, "5/c").write(190_000, "also").await.unwrap();
    object(pool, "1/c").remove().await.unwrap();
    assert_eq!(object(pool, "2/c").get().await.unwrap(), "");
    assert_eq!(object(pool, "3/c").get().await.unwrap(), data.slice(..100_000));
    let longer = [&data[..], &[0; 40_000]].concat();
    assert!(object(pool, "4/c").get().await.unwrap() == longer);
    let zeroed = [&data[..4096], &[0; 8192], &data[12288..190_000], b"also", &data[190_004..]].concat();
    assert_eq!(read_first(client, pool, &["1/c", "5/c"]).await.unwrap(), (1, zeroed.into()));
}

async fn impossible_copies_are_refused(client: &Client, pool: &Pool, other: &Pool) {
    let bad = |e: NodeError| assert!(matches!(e, NodeError::BadRequest(_)), "{e}");
    object(pool, "1/d").put("source").await.unwrap();
    let inherit = |place: &Pool, of: &str| object(place, "2/d").compound().inherit(names(&[of])).touch();
    bad(node_error(inherit(pool, "1/e").commit().await));
    bad(node_error(inherit(other, "1/d").commit().await));
    bad(node_error(read_first(client, other, &["2/d", "1/d"]).await));
    let late = object(pool, "2/d").compound().touch().inherit(names(&["1/d"])).commit().await;
    bad(node_error(late));
    let named = node_error(inherit(pool, "").commit().await);
    assert!(matches!(named, NodeError::BadName(_)), "{named}");
    object(pool, "3/d").put(bytes(600_000, 4)).await.unwrap();
    let striped = node_error(inherit(pool, "3/d").commit().await);
    assert!(matches!(striped, NodeError::Striped { .. }), "{striped}");
    assert!(object(pool, "2/d").get().await.unwrap_err().is_not_found());
}
