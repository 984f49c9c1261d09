//! Runs the conformance suite on the engines that need no node.

use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use client::engine::{
    BoxCall, Capabilities, ChangeRequest, Engine, EngineLimits, FaultRates, FaultyEngine, MemEngine,
    ReadReply, ReadRequest,
};
use client::{Client, Options, conformance};
use tokio::time::Instant;
use wire::{List, Listed, Mutated, Query, QueryAnswer, UploadId};

async fn with_pool(engine: Arc<dyn Engine>) -> Arc<dyn Engine> {
    Client::over(Arc::clone(&engine), Options::default()).create_pool("pool").await.unwrap();
    engine
}

#[expect(clippy::print_stdout, reason = "the test harness shows the seed when the test fails")]
fn seed() -> u64 {
    let seed = std::env::var("OUTBOARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("OUTBOARD_SEED={seed}");
    seed
}

#[tokio::test]
async fn the_memory_engine_passes_the_conformance_suite() {
    conformance::run(with_pool(Arc::new(MemEngine::new())).await, "pool", seed()).await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_transient_faults_passes_the_conformance_suite() {
    let (inner, seed) = (with_pool(Arc::new(MemEngine::new())).await, seed());
    let delay_max = Duration::from_millis(50);
    let rates = FaultRates { refuse: 0.1, lose_answer: 0.1, delay: 0.1, delay_max, ..FaultRates::default() };
    let faulty = Arc::new(FaultyEngine::new(inner, rates, seed));
    conformance::run(Arc::clone(&faulty) as Arc<dyn Engine>, "pool", seed).await;
    let counts = faulty.counts();
    assert!(counts.refused > 20 && counts.answers_lost > 20 && counts.delayed > 20, "{counts:?}");
}

#[tokio::test]
async fn a_change_of_unknown_outcome_may_have_taken_effect() {
    let inner = with_pool(Arc::new(MemEngine::new())).await;
    let rates = FaultRates { unknown: 1.0, ..FaultRates::default() };
    let faulty = Arc::new(FaultyEngine::new(Arc::clone(&inner), rates, 1));
    let client = Client::over(Arc::clone(&faulty) as Arc<dyn Engine>, Options::default());
    let object = client.pool("pool").unwrap().object("x").unwrap();
    assert!(object.put("data").await.unwrap_err().may_have_taken_effect());
    assert_eq!(object.get().await.unwrap(), "data");
    assert_eq!(faulty.counts().unknown, 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_fails_with_a_timeout_at_its_deadline() {
    let inner = with_pool(Arc::new(MemEngine::new())).await;
    let rates = FaultRates { refuse: 1.0, ..FaultRates::default() };
    let faulty = Arc::new(FaultyEngine::new(inner, rates, 1));
    let options = Options { request_timeout: Duration::from_secs(10), ..Options::default() };
    let client = Client::over(Arc::clone(&faulty) as Arc<dyn Engine>, options);
    let began = Instant::now();
    let error = client.pool("pool").unwrap().object("x").unwrap().get().await.unwrap_err();
    assert!(matches!(error, client::Error::TimedOut(_)), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    assert!(faulty.counts().refused > 10, "{:?}", faulty.counts());
}

#[tokio::test]
async fn a_memory_engine_with_a_file_keeps_its_content_across_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("content");
    {
        let engine = with_pool(Arc::new(MemEngine::open(&path).unwrap())).await;
        let client = Client::over(engine, Options::default());
        client.pool("pool").unwrap().object("x").unwrap().put("data").await.unwrap();
    }
    let client = Client::over(Arc::new(MemEngine::open(&path).unwrap()), Options::default());
    assert_eq!(client.pool("pool").unwrap().object("x").unwrap().get().await.unwrap(), "data");
    drop(client);
    std::fs::write(&path, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff").unwrap();
    let error = MemEngine::open(&path).unwrap_err().to_string();
    assert!(error.contains("memory engine"), "{error}");
}

/// An engine without administration, like an engine on the storage of another system.
#[derive(Debug)]
struct Unadministered(MemEngine);

impl Engine for Unadministered {
    fn name(&self) -> &'static str {
        "unadministered"
    }

    fn mutate(&self, request: ChangeRequest, deadline: Instant) -> BoxCall<'_, Mutated> {
        self.0.mutate(request, deadline)
    }

    fn read(&self, request: ReadRequest, deadline: Instant) -> BoxCall<'_, ReadReply> {
        self.0.read(request, deadline)
    }

    fn query(&self, request: Query, deadline: Instant) -> BoxCall<'_, Vec<QueryAnswer>> {
        self.0.query(request, deadline)
    }

    fn list(&self, request: List, deadline: Instant) -> BoxCall<'_, Listed> {
        self.0.list(request, deadline)
    }

    fn next_upload(&self) -> client::Result<UploadId> {
        self.0.next_upload()
    }

    fn limits(&self) -> EngineLimits {
        self.0.limits()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.0.close()
    }
}

#[tokio::test]
async fn a_client_refuses_administrative_requests_if_its_engine_has_no_administration() {
    let client = Client::over(Arc::new(Unadministered(MemEngine::new())), Options::default());
    let error = client.create_pool("pool").await.unwrap_err();
    assert!(matches!(&error, client::Error::Unsupported(why) if why.contains("unadministered")), "{error}");
    let object = client.pool("pool").unwrap().object("x").unwrap();
    assert!(object.get().await.unwrap_err().is_not_found(), "other requests reach the engine");
}
