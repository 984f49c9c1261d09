//! A test of the check with the real requests and answers of an engine.

use std::time::Duration;

use base::clock::Instant;
use client::engine::{BoxCall, Engine, MemEngine, ReadRequest, Sink};
use futures::executor::block_on;
use rand::SeedableRng;
use rand::rngs::StdRng;
use wire::{AdminRequest, Redundancy};

use super::*;
use crate::workload::{SharedWorkload, WorkloadOptions};

fn attempt<T>(mut call: BoxCall<'_, T>) -> client::Result<T> {
    block_on(call.attempt())
}

/// Sends a request to an engine.
fn execute(engine: &MemEngine, request: &Request) -> Outcome {
    let deadline = Instant::now();
    match request {
        Request::Change(change) => Outcome::of_change(&attempt(engine.mutate(change.to_request(), deadline))),
        Request::Read(RangeRead { object, offset, len, if_version }) => {
            let (name, sink) = (object.clone(), Sink::Bytes);
            let read = ReadRequest {
                name,
                part: None,
                offset: *offset,
                len: *len,
                if_version: *if_version,
                sink,
                fallbacks: vec![],
            };
            Outcome::of_read(&attempt(engine.read(read, deadline)))
        }
        Request::Query(QueryCall { object, conditions, ops }) => {
            let query =
                wire::Query { name: object.to_wire(), conditions: conditions.clone(), ops: ops.clone() };
            Outcome::of_query(&attempt(engine.query(query, deadline)))
        }
        Request::List(list) => {
            let mut names = Vec::new();
            let mut cursor = bytes::Bytes::new();
            loop {
                let page = wire::List {
                    pool: list.pool.clone().into(),
                    namespace: list.namespace.clone().map(Into::into),
                    prefix: list.prefix.clone().into(),
                    group: None,
                    cursor: cursor.clone(),
                    limit: 3,
                    skip_unavailable: false,
                };
                match attempt(engine.list(page, deadline)) {
                    Ok(page) => {
                        names.extend(page.names);
                        cursor = page.cursor;
                    }
                    Err(e) => return Outcome::of_listing(&Err(e)),
                }
                if cursor.is_empty() {
                    return Outcome::of_listing(&Ok(names));
                }
            }
        }
        Request::Admin(_) => Outcome::Done,
    }
}

#[test]
fn the_answers_of_the_memory_engine_are_accepted() {
    let engine = MemEngine::new();
    let administration = engine.administration().unwrap();
    let pool = AdminRequest::PoolCreate {
        name: "p".into(),
        pg_count: 0,
        redundancy: Redundancy::Single,
        tenant: None,
    };
    attempt(administration.administer(pool, Instant::now())).unwrap();
    let mut history = History::new();
    history.add_pool("p", false);
    let options = WorkloadOptions { hot: 2, cold: 8, ..WorkloadOptions::new(vec!["p".parse().unwrap()]) };
    let workload = SharedWorkload::new(options);
    let mut clients = [workload.client(0), workload.client(1)];
    let mut rng = StdRng::seed_from_u64(5);
    let mut answered = 0;
    for number in 0..600u64 {
        let at = |half| Duration::from_millis(2 * number + half);
        let client = (number % 2) as u32;
        let request = clients[client as usize].next(&mut rng, |len| history.new_fill(len));
        let call = history.start(ClientId(client), at(0), None, request.clone());
        let outcome = execute(&engine, &request);
        answered += usize::from(!matches!(outcome, Outcome::Refused(_)));
        clients[client as usize].learn(&request, &outcome);
        history.end(call, at(1), outcome);
    }
    assert!(answered > 300, "only {answered} calls were answered");
    let violations = history.check(&CheckOptions::default());
    assert!(violations.is_empty(), "{}", violations[0]);
}
