//! Cases about concurrent requests on one object.

use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, DuplexStream};

use super::{PART, bytes, node_error, object};
use crate::engine::{ReadReply, ReadRequest, Sink};
use crate::{Client, Error, NodeError, Object, Pool, PutOptions};

pub(super) async fn run(client: &Client, pool: &Pool) {
    a_reader_during_a_put_sees_old_or_new_data_as_a_whole(pool).await;
    a_put_with_a_version_is_refused_after_a_change(pool).await;
    a_read_with_a_version_is_refused_after_a_change(client, pool).await;
    a_change_during_a_stream_is_detected(pool).await;
    long_appends_are_written_at_the_end(client, pool).await;
    concurrent_appends_never_overlap(client, pool).await;
    concurrent_conditional_changes_lose_no_update(pool).await;
}

async fn a_reader_during_a_put_sees_old_or_new_data_as_a_whole(pool: &Pool) {
    // Small data, bulk data, a striped object, and data that a node stages.
    for (len, is_striped) in [(3000, false), (200_000, false), (5 * PART, true), (3 << 20, false)] {
        let object = object(pool, &format!("put-{len}"));
        let contents: Vec<Bytes> = (0..8).map(|i| bytes(len + i * 1000, i as u64)).collect();
        let put = async |content: &Bytes| match is_striped {
            true => object.put(content.clone()).await.unwrap(),
            false => object.compound().write_full(content.clone()).commit().await.unwrap(),
        };
        put(&contents[0]).await;
        assert_eq!(object.stat().await.unwrap().manifest.is_some(), is_striped);
        let done = AtomicBool::new(false);
        let puts = async {
            for content in &contents[1..] {
                put(content).await;
                tokio::task::yield_now().await;
            }
            done.store(true, Ordering::Relaxed);
        };
        let gets = async || {
            let mut newest = 0;
            loop {
                let is_last = done.load(Ordering::Relaxed);
                match object.get().await {
                    Ok(data) => {
                        let found = contents.iter().position(|content| *content == data);
                        let found = found.expect("a read returned a mixture of two puts");
                        assert!(found >= newest, "a read returned older data than an earlier read");
                        newest = found;
                    }
                    Err(Error::Node(NodeError::Changed { .. })) if !is_last => {}
                    Err(e) => panic!("{e}"),
                }
                if is_last {
                    break;
                }
                tokio::task::yield_now().await;
            }
            assert_eq!(newest, contents.len() - 1);
        };
        tokio::join!(puts, gets(), gets());
        object.remove().await.unwrap();
    }
}

async fn a_put_with_a_version_is_refused_after_a_change(pool: &Pool) {
    let object = object(pool, "put-version");
    let old = object.put("old").await.unwrap().version;
    let new = object.put("new").await.unwrap().version;
    let options = |version| PutOptions { if_version: Some(version), ..PutOptions::default() };
    for data in [Bytes::from("small"), bytes(5 * PART, 7)] {
        let refused = object.put_with(data, options(old)).await.unwrap_err();
        assert!(refused.is_conflict() && !refused.may_have_taken_effect(), "{refused}");
        assert_eq!(object.get().await.unwrap(), "new");
    }
    object.put_with("newest", options(new)).await.unwrap();
    assert_eq!(object.get().await.unwrap(), "newest");
}

async fn a_read_with_a_version_is_refused_after_a_change(client: &Client, pool: &Pool) {
    let object = object(pool, "read-version");
    let old = object.put("old").await.unwrap().version;
    let read = async |version| {
        let (name, sink) = (object.name().clone(), Sink::Bytes);
        let read = ReadRequest {
            name,
            part: None,
            offset: 1,
            len: 10,
            if_version: Some(version),
            sink,
            fallbacks: vec![],
        };
        client.requests.read(read).await
    };
    let Ok(ReadReply::Data { version, object_size, len, chunks, .. }) = read(old).await else {
        panic!("the version is the object's version")
    };
    assert_eq!((version, object_size, len, chunks.concat()), (old, 3, 2, b"ld".to_vec()));
    let new = object.write(0, "newer").await.unwrap().version;
    match node_error(read(old).await) {
        NodeError::Changed { wanted, found } => assert_eq!((wanted, found), (old, new)),
        other => panic!("{other}"),
    }
}

async fn a_change_during_a_stream_is_detected(pool: &Pool) {
    let object = object(pool, "stream");
    let is_changed = |e: Error| assert!(matches!(e, Error::Node(NodeError::Changed { .. })), "{e}");
    // The first request of a read does not read the whole object.
    object.put(bytes(3 * PART + PART / 2, 8)).await.unwrap();
    let mut stream = object.read_stream(0, u64::MAX);
    stream.next().await.unwrap().unwrap();
    object.write(0, "x").await.unwrap();
    let error = loop {
        match stream.next().await {
            Ok(chunk) => drop(chunk.expect("the stream must not end after a change")),
            Err(e) => break e,
        }
    };
    is_changed(error);
    let (writer, reader) = tokio::io::duplex(64);
    let change = async |mut reader: DuplexStream| {
        reader.read_u8().await.unwrap();
        object.write(0, "y").await.unwrap();
        reader.read_to_end(&mut Vec::new()).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(object.get_to_writer(writer), change(reader));
    is_changed(outcome.unwrap_err());
}

async fn long_appends_are_written_at_the_end(client: &Client, pool: &Pool) {
    let object = object(pool, "long-appends");
    let most = client.engine().limits().append_bytes_max as usize;
    let mut expected = Vec::new();
    for (salt, len) in (0..).zip([most + 1, 10, most, most + 4097]) {
        let (at, data) = (expected.len() as u64, bytes(len, salt));
        let appended = object.append(data.clone()).await.unwrap();
        assert_eq!((appended.appended_at, appended.size), (at, at + len as u64));
        expected.extend_from_slice(&data);
    }
    assert!(object.get().await.unwrap() == expected);
    object.remove().await.unwrap();
}

async fn concurrent_appends_never_overlap(client: &Client, pool: &Pool) {
    let most = client.engine().limits().append_bytes_max as usize;
    let short = (0..24).map(|i| 1 + i * 997).collect::<Vec<_>>();
    for (name, lens) in [("appends", short), ("mixed-appends", vec![most + 1, 1, most + 2, 5000, 70_000])] {
        let object = object(pool, name);
        let appends = lens.iter().map(|&len| {
            let object = object.clone();
            async move { (object.append(bytes(len, len as u64)).await.unwrap().appended_at as usize, len) }
        });
        let mut places = join_all(appends).await;
        places.sort_unstable();
        let data = object.get().await.unwrap();
        let mut end = 0;
        for (at, len) in places {
            assert_eq!(at, end, "an append of {len} bytes");
            assert!(data[at..at + len] == bytes(len, len as u64), "an append of {len} bytes");
            end = at + len;
        }
        assert_eq!(data.len(), end);
        object.remove().await.unwrap();
    }
}

async fn concurrent_conditional_changes_lose_no_update(pool: &Pool) {
    let object = object(pool, "counter");
    object.put("0").await.unwrap();
    let count = |object: Object| async move {
        for _ in 0..8 {
            loop {
                let seen = object.stat().await.unwrap().version;
                let value = object.get().await.unwrap();
                let next: u64 = std::str::from_utf8(&value).unwrap().parse::<u64>().unwrap() + 1;
                let change = object.compound().if_version(seen).write_full(next.to_string());
                match change.commit().await {
                    Ok(_) => break,
                    Err(e) => assert!(e.is_conflict(), "{e}"),
                }
            }
        }
    };
    join_all((0..4).map(|_| count(object.clone()))).await;
    assert_eq!(object.get().await.unwrap(), "32");
}
