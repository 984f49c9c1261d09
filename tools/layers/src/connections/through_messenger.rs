//! The messenger as server and client. The server's event loop is built like that of an osd: a task
//! per connection starts a task per request.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use base::block::Payload;
use base::thread::{self, ThreadClass};
use base::{BoxFuture, task};
use bytes::Bytes;
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use messenger::{
    ConnectOptions, Connection, ConnectionEvent, Ends, Incoming, Message, NetworkStack, TcpStack,
};
use node::failure::{Doing, Failure, Result};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use super::{ConnectionSample, ConnectionShape, ConnectionsArgs, DOING, WARM_UP, histogram, usage};

/// A client's connection, with the times at which its requests in flight were sent.
struct LoadedConnection {
    ends: Ends,
    sent: VecDeque<Instant>,
}

/// Measures requests over the messenger.
pub fn measure(shape: ConnectionShape, args: &ConnectionsArgs) -> Result<ConnectionSample> {
    let (stop, stopped) = oneshot::channel::<()>();
    let (started, start) = mpsc::channel();
    let payload = Payload::compute(0, vec![7; args.reply_bytes as usize].into());
    let body = move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
        LocalSet::new().block_on(&runtime, async move {
            let mut listener = TcpStack::default().listen("127.0.0.1:0").await.doing(DOING)?;
            let _ = started.send(listener.endpoint());
            let accepting = task::spawn_local(ThreadClass::Osd, async move {
                while let Ok((connection, incoming)) = listener.accept().await {
                    task::spawn_local(ThreadClass::Osd, answer(connection, incoming, payload.clone()));
                }
            });
            // An error means that the sender was dropped, which is the signal to stop.
            let _ = stopped.await;
            accepting.abort();
            Ok(())
        })
    };
    let server = thread::spawn(ThreadClass::Osd, "0", body).doing(DOING)?;
    let endpoint = start.recv().doing("starting the server")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    let sample = runtime.block_on(load(shape, args, &endpoint));
    drop(runtime);
    drop(stop);
    server.join().unwrap_or_else(|_| Err(Failure::new(DOING, "the server panicked; this is a bug")))?;
    sample
}

async fn answer(connection: Arc<dyn Connection>, mut incoming: Box<dyn Incoming>, payload: Payload) {
    loop {
        match incoming.next().await {
            ConnectionEvent::Message(request) => {
                let (connection, payload) = (Arc::clone(&connection), payload.clone());
                task::spawn_local(ThreadClass::Osd, async move {
                    let reply =
                        Message { header: request.header.slice(..16.min(request.header.len())), payload };
                    // The client may have gone; ignore the error.
                    let _ = connection.send(reply).await;
                });
            }
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            ConnectionEvent::Lost(_) => return,
        }
    }
}

async fn load(shape: ConnectionShape, args: &ConnectionsArgs, endpoint: &str) -> Result<ConnectionSample> {
    let stack = TcpStack::default();
    let request = Bytes::from(vec![5; args.request_bytes as usize]);
    let mut connections = Vec::new();
    for _ in 0..shape.connections {
        let ends = stack.connect(endpoint, ConnectOptions::default()).await.doing(DOING)?;
        connections.push(LoadedConnection { ends, sent: VecDeque::new() });
    }
    run(&mut connections, shape, &request, WARM_UP).await?;
    let (before, began) = (usage()?, Instant::now());
    let latency = run(&mut connections, shape, &request, args.seconds).await?;
    let (elapsed, used) = (began.elapsed(), usage()?.since(&before));
    for connection in connections {
        connection.ends.0.close().await;
    }
    Ok(ConnectionSample::new(latency, elapsed, &used))
}

/// Keeps requests in flight on all connections for the given time.
async fn run(
    connections: &mut Vec<LoadedConnection>,
    shape: ConnectionShape,
    request: &Bytes,
    time: Duration,
) -> Result<Histogram<u64>> {
    let end = Instant::now() + time;
    let tasks = connections.drain(..).map(|mut connection| {
        let request = request.clone();
        let work: BoxFuture<'static, Result<_>> = Box::pin(async move {
            let latency = connection.run(shape.in_flight, &request, end).await?;
            Ok((connection, latency))
        });
        let task = task::spawn(ThreadClass::Client, work);
        async move { task.await.doing(DOING)? }
    });
    let mut all = histogram()?;
    for (connection, latency) in try_join_all(tasks).await? {
        connections.push(connection);
        all.add(latency).doing(DOING)?;
    }
    Ok(all)
}

impl LoadedConnection {
    async fn run(&mut self, in_flight: u32, request: &Bytes, end: Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        for _ in 0..in_flight {
            self.send(request).await?;
        }
        while !self.sent.is_empty() {
            match self.ends.1.next().await {
                ConnectionEvent::Message(_) => {
                    let since =
                        self.sent.pop_front().ok_or_else(|| Failure::new(DOING, "a reply too many"))?;
                    let now = Instant::now();
                    latency.saturating_record((now - since).as_nanos() as u64);
                    if now < end {
                        self.send(request).await?;
                    }
                }
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                ConnectionEvent::Lost(why) => return Err(Failure::new(DOING, why)),
            }
        }
        Ok(latency)
    }

    async fn send(&mut self, request: &Bytes) -> Result<()> {
        self.sent.push_back(Instant::now());
        let request = Message { header: request.clone(), ..Message::default() };
        self.ends.0.send(request).await.doing("sending a request")
    }
}
