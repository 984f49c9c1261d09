//! The contender `Osd`: clients that read objects of an osd, whose store is in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use client::{Client, Object};
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use messenger::TcpStack;
use node::failure::{Doing, Result};
use osd::{OsdConfig, OsdServer, ShardResources};
use store::{MemStore, ObjectStore};
use tokio::task::LocalSet;
use uuid::Uuid;

use super::{ConnectionSample, ConnectionShape, ConnectionsArgs, DOING, WARM_UP, histogram, usage};
use crate::in_process;

/// Measures one shape with a new osd. The calling thread runs the clients.
pub(super) fn measure(shape: ConnectionShape, args: &ConnectionsArgs) -> Result<ConnectionSample> {
    let staging = BufferPool::new(Arena::anonymous(16 << 20).doing(DOING)?, 0, 2 << 20);
    let store: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    let targets = vec![(Uuid::from_u128(1), store)];
    let resources = vec![ShardResources { config: OsdConfig::default(), targets, staging }];
    let osd = OsdServer::start(resources, Arc::new(TcpStack::default()), "127.0.0.1:0");
    let osd = osd.doing("starting an osd")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    let sample = LocalSet::new().block_on(&runtime, load(shape, args, &osd));
    osd.stop();
    sample
}

async fn load(shape: ConnectionShape, args: &ConnectionsArgs, osd: &OsdServer) -> Result<ConnectionSample> {
    let mut clients = Vec::new();
    let mut objects = Vec::new();
    for number in 0..shape.connections {
        let client = Client::connect(osd.endpoint(), in_process::options(osd)).await.doing(DOING)?;
        if number == 0 {
            client.create_pool("bench").await.doing(DOING)?;
        }
        let pool = client.pool("bench").doing(DOING)?;
        for request in 0..shape.in_flight {
            let object = pool.object(&format!("{number}-{request}")).doing(DOING)?;
            object.put(Bytes::from(vec![0x5a; args.reply_bytes as usize])).await.doing(DOING)?;
            objects.push(object);
        }
        clients.push(client);
    }
    run(&objects, args, WARM_UP).await?;
    let (before, began) = (usage()?, Instant::now());
    let latency = run(&objects, args, args.seconds).await?;
    let (elapsed, used) = (began.elapsed(), usage()?.since(&before));
    for client in clients {
        client.close().await;
    }
    Ok(ConnectionSample::new(latency, elapsed, &used))
}

/// Reads each object again and again for the given time.
async fn run(objects: &[Object], args: &ConnectionsArgs, time: Duration) -> Result<Histogram<u64>> {
    let end = Instant::now() + time;
    let readers = objects.iter().map(async |object| {
        let mut latency = histogram()?;
        let mut began = Instant::now();
        while began < end {
            object.get_range(0, args.reply_bytes.into()).await.doing(DOING)?;
            let now = Instant::now();
            latency.saturating_record((now - began).as_nanos() as u64);
            began = now;
        }
        Ok::<_, node::failure::Failure>(latency)
    });
    let mut all = histogram()?;
    for latency in try_join_all(readers).await? {
        all.add(latency).doing(DOING)?;
    }
    Ok(all)
}
