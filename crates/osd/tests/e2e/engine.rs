//! Runs the conformance suite of the client's engine trait on a node, with and without faults
//! between the engine and its callers.

use std::sync::Arc;
use std::time::Duration;

use client::engine::{Engine, FaultRates, FaultyEngine};
use client::{Client, Options, conformance};

use crate::common::{Node, seed};
use crate::redundancy::{config, redundancy};

/// Creates a node with a pool of this redundancy scheme. Returns the node and an engine for it.
async fn engine_with_pool(scheme: &str, targets: usize) -> (Node, Arc<dyn Engine>) {
    let mut node = Node::of(targets, config());
    node.restart();
    let engine = node.engine().await;
    let client = Client::over(Arc::clone(&engine), Options::default());
    client.create_pool_with("pool", 4, redundancy(scheme)).await.unwrap();
    (node, engine)
}

#[tokio::test]
async fn the_native_engine_conforms_on_pools_without_redundancy() {
    let (_node, engine) = engine_with_pool("single", 2).await;
    conformance::run(engine, "pool", seed()).await;
}

#[tokio::test]
async fn the_native_engine_conforms_on_mirrored_pools() {
    let (_node, engine) = engine_with_pool("mirror:2", 2).await;
    conformance::run(engine, "pool", seed()).await;
}

#[tokio::test]
async fn the_native_engine_conforms_on_erasure_coded_pools() {
    let (_node, engine) = engine_with_pool("ec:2+1", 3).await;
    conformance::run(engine, "pool", seed()).await;
}

#[tokio::test]
async fn the_native_engine_conforms_when_answers_are_lost() {
    let (_node, inner) = engine_with_pool("single", 2).await;
    let delay_max = Duration::from_millis(20);
    let rates =
        FaultRates { refuse: 0.02, lose_answer: 0.05, delay: 0.02, delay_max, ..FaultRates::default() };
    let seed = seed();
    let faulty = Arc::new(FaultyEngine::new(inner, rates, seed));
    conformance::run(Arc::clone(&faulty) as Arc<dyn Engine>, "pool", seed).await;
    let counts = faulty.counts();
    assert!(counts.refused > 5 && counts.answers_lost > 20 && counts.delayed > 5, "{counts:?}");
}
