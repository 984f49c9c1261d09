//! Attacks on sessions and capabilities by clients that have keys of their own. Each attack costs at
//! most the attacker's own connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use base::clock::WallClock;
use bytes::Bytes;
use wire::{
    Data, Error, Manifest, Mutate, Mutation, ObjectReply, ObjectRequest, OpBytes, PartId, QueryAnswer,
    ReplyBody, RequestBody, SessionId, UploadId,
};

use crate::rights::{Line, World, name, opening, query, read, write};

/// Opens a session as the caller of a column of the tables in SECURITY.md.
async fn open(world: &World, column: &str) -> (Line, Bytes, SessionId) {
    let trust = world.caller(column);
    let capability = world.capability(&trust, 0).await.expect("a capability");
    let mut line = world.connect(trust).await.unwrap();
    let session = opened(line.ask(opening(None, capability.clone())).await);
    (line, capability, session)
}

fn opened(answer: Result<ReplyBody, Error>) -> SessionId {
    match answer {
        Ok(ReplyBody::Opened { session, .. }) => session,
        other => panic!("{other:?}"),
    }
}

/// Checks that the owner's session works.
async fn is_well(owner: &mut Line) {
    owner.ask(write("a/x", vec![])).await.expect("the owner's session is not affected");
    owner.ask(read("a/x", None)).await.expect("the owner's session is not affected");
}

const THIEVES: [&str; 5] = ["another user", "another tenant", "read-only", "prefix-only", "node admin"];

#[tokio::test]
async fn a_session_of_another_user_is_not_opened() {
    let world = World::start().await;
    let (mut owner, capability, session) = open(&world, "owner").await;
    is_well(&mut owner).await;
    for column in THIEVES {
        let (mut thief, own, _) = open(&world, column).await;
        let refused = thief.ask(opening(Some(session), own)).await;
        assert!(matches!(refused, Err(Error::SessionRefused { .. })), "{column}: {refused:?}");
        let refused = thief.ask(opening(Some(session), capability.clone())).await;
        assert!(matches!(refused, Err(Error::CapabilityRefused { .. })), "{column}: {refused:?}");
        is_well(&mut owner).await;
    }
    let mut again = world.connect(world.caller("owner")).await.unwrap();
    assert_eq!(opened(again.ask(opening(Some(session), capability)).await), session, "the id was right");
}

#[tokio::test]
async fn a_session_is_not_opened_with_the_id_in_a_manifest() {
    let world = World::start().await;
    let (mut owner, capability, session) = open(&world, "owner").await;
    let upload = UploadId { session, number: 1 };
    let change = |part, op| -> RequestBody {
        let name = name("a/striped");
        ObjectRequest::Mutate(Mutate { name, part, conditions: vec![], ops: vec![op], data: Data::None })
            .into()
    };
    let part = Mutation::WriteFull(OpBytes::Embedded(vec![7; 4096].into()));
    owner.ask(change(Some(PartId { upload, index: 0 }), part)).await.unwrap();
    let manifest = Manifest { upload, part_size: 4096, size: 4096 };
    owner.ask(change(None, Mutation::SetManifest(manifest))).await.unwrap();
    for column in ["read-only", "prefix-only"] {
        let (mut thief, own, _) = open(&world, column).await;
        let answers = match thief.ask(query("a/striped")).await {
            Ok(ReplyBody::Object(ObjectReply::Queried(answers))) => answers,
            other => panic!("{other:?}"),
        };
        let [QueryAnswer::Stat(stat)] = &answers[..] else { panic!("{answers:?}") };
        let found = stat.manifest.expect("the object is striped").upload.session;
        assert_eq!(found, session, "the manifest shows the id of the session");
        // The id itself, and ids with another proof, another number and another generation.
        for id in [0, 1, 1 << 47, 1 << 48, 1 << 80].map(|bit| SessionId(found.0 ^ bit)) {
            let refused = thief.ask(opening(Some(id), own.clone())).await;
            assert!(matches!(refused, Err(Error::SessionRefused { .. })), "{column}, {id:?}: {refused:?}");
        }
        is_well(&mut owner).await;
    }
    let mut again = world.connect(world.caller("owner")).await.unwrap();
    assert_eq!(opened(again.ask(opening(Some(session), capability)).await), session, "the id was right");
}

/// A clock that a test can set wrong.
#[derive(Clone, Default)]
struct Skew(Arc<AtomicI64>);

impl Skew {
    fn set(&self, seconds: i64) {
        self.0.store(seconds, Ordering::SeqCst);
    }

    fn clock(&self) -> WallClock {
        let own = Arc::clone(&self.0);
        WallClock::new(move || {
            let seconds = own.load(Ordering::SeqCst);
            let by = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { SystemTime::now() - by } else { SystemTime::now() + by }
        })
    }
}

#[tokio::test]
async fn a_capability_that_is_altered_stolen_or_out_of_time_opens_nothing() {
    let skew = Skew::default();
    let world = World::start_with(skew.clock()).await;
    let (mut owner, capability, _) = open(&world, "owner").await;
    let (mut thief, own, _) = open(&world, "another user").await;
    let mut altered: Vec<(String, Bytes)> = (0..own.len())
        .step_by(5)
        .map(|at| {
            let mut bytes = own.to_vec();
            bytes[at] ^= 1 << (at % 8);
            (format!("byte {at}"), bytes.into())
        })
        .collect();
    altered.push(("shorter".into(), own.slice(1..)));
    altered.push(("longer".into(), [&own[..], b"x"].concat().into()));
    altered.push(("another key's".into(), capability.clone()));
    for (what, forged) in altered {
        for request in [opening(None, forged.clone()), RequestBody::Renew { capability: forged }] {
            let refused = thief.ask(request).await;
            assert!(matches!(refused, Err(Error::CapabilityRefused { .. })), "{what}: {refused:?}");
            let refused = thief.ask(read("a/x", None)).await;
            assert!(refused.is_err(), "{what} gave a right");
        }
    }
    is_well(&mut owner).await;
    // The clock of the node is wrong, or the user presents the capability at another time.
    for (what, seconds) in [("too late", 2 * 3600), ("too early", -2 * 3600)] {
        skew.set(seconds);
        let mut line = world.connect(world.caller("owner")).await.unwrap();
        let refused = line.ask(opening(None, capability.clone())).await;
        assert!(matches!(refused, Err(Error::CapabilityRefused { .. })), "{what}: {refused:?}");
        is_well(&mut owner).await;
        skew.set(0);
        opened(line.ask(opening(None, capability.clone())).await);
    }
}
