//! The first process of a measurement of the messenger. It sends the messages or moves the bulk
//! data, and measures the time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use futures::stream::{FuturesUnordered, StreamExt};
use hdrhistogram::Histogram;
use identity::{Credentials, Identity, OnlyProcess, Trust};
use messenger::{
    ConnectOptions, ConnectionEvent, Ends, Incoming, Message, NetworkStack, StackOptions, UseAs,
};
use wire::BulkDescriptor;

use super::figures::{IdleCost, RpcSample};
use super::peer::{PeerJob, PeerProcess, PeerStack, resident_bytes, sum};
use super::serve::runtime;
use super::{RpcArgs, RpcMode, SPIN};
use crate::copies::{self, MESSENGER, copied_bytes};
use node::failure::{Doing, Failure, Result};

/// Time limit for steps that should be short.
const PATIENCE: Duration = Duration::from_secs(30);

/// Pause between opening idle connections and measuring their cost. During this pause, the
/// connections move to better transports and release the resources of their first transport.
const SETTLING: Duration = Duration::from_secs(1);

/// Runs one measurement of the messenger.
pub fn measure(args: &RpcArgs, spin: bool) -> Result<RpcSample> {
    copies::record();
    let args = args.clone();
    // Run as a task, because each wake-up of the future that a runtime blocks on costs an
    // additional system call.
    let doing = "measuring the messenger";
    runtime()?.block_on(async move { tokio::spawn(run(args, spin)).await.doing(doing)? })
}

async fn run(args: RpcArgs, spin: bool) -> Result<RpcSample> {
    let spin = if spin { SPIN } else { Duration::ZERO };
    let doing = "making identities for two processes";
    let (own, peer, dir) = (Identity::generate(), Identity::generate(), tempfile::tempdir().doing(doing)?);
    let credentials = dir.path().join("peer.toml");
    let peer_key = peer.key();
    let of_peer = Credentials { user: "peer".into(), node: own.key(), identity: peer };
    of_peer.create(&credentials).doing(doing)?;
    let mut options = StackOptions { spin, ..StackOptions::default() };
    let accepts = matches!(args.mode, RpcMode::BulkRead | RpcMode::BulkWrite);
    options.connection.trust = match accepts {
        true => Trust::server(&own, Arc::new(OnlyProcess(peer_key))),
        false => Trust::client(&own, peer_key),
    };
    let stack = messenger::open(&args.stack, &options, UseAs::Server).doing("opening the network stack")?;
    let of_peer = PeerStack { name: args.stack.to_string(), spin_us: spin.as_micros() as u64, credentials };
    let mut rig = match accepts {
        false => RpcRig::to_server(&args, of_peer, stack).await?,
        true => RpcRig::to_offerer(&args, of_peer, stack).await?,
    };
    // Run briefly without measuring, so that caches are warm and TCP windows and credits have
    // grown.
    rig.work(&args, Duration::from_millis(200)).await?;
    let resident_before = rig.resident();
    let idle_core = if args.idle > 0 { Some(rig.add_idle(&args).await?) } else { None };
    let own = || ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process");
    let (before, peer_before) = (own()?.total, rig.peer.usage()?);
    let copied_before = copied_bytes(MESSENGER) + rig.peer.copied_bytes()?;
    let began = Instant::now();
    let latency = rig.work(&args, args.duration()).await?;
    let elapsed = began.elapsed();
    let usage = sum(own()?.total.since(&before), rig.peer.usage()?.since(&peer_before));
    let copied = copied_bytes(MESSENGER) + rig.peer.copied_bytes()?;
    Ok(RpcSample {
        operations: latency.len(),
        elapsed,
        latency,
        mean_ns: None,
        usage: Some(usage),
        copied_bytes: Some(copied - copied_before),
        idle: idle_core.map(|core| {
            let (client, server) = rig.resident();
            let more = |now: u64, before: u64| now.saturating_sub(before);
            IdleCost { bytes: (more(client, resident_before.0), more(server, resident_before.1)), core }
        }),
    })
}

struct RpcRig {
    ends: Ends,
    peer: PeerProcess,
    stack: Arc<dyn NetworkStack>,
    endpoint: String,
    idle: Vec<Ends>,
    pool: BufferPool,
}

impl RpcRig {
    /// Starts a second process that answers messages, and connects to it.
    async fn to_server(args: &RpcArgs, of_peer: PeerStack, stack: Arc<dyn NetworkStack>) -> Result<RpcRig> {
        let address = format!("{}:0", bracketed(args));
        let mut peer = PeerProcess::start(&PeerJob::Serve { stack: of_peer, address, mode: args.mode })?;
        let endpoint = peer.line()?;
        let connecting = stack.connect(&endpoint, ConnectOptions::default()).await;
        let ends = connecting.doing(format!("connecting to {endpoint}"))?;
        RpcRig::new(args, ends, peer, stack, endpoint)
    }

    /// Starts a second process that offers memory, and accepts its connection.
    async fn to_offerer(args: &RpcArgs, of_peer: PeerStack, stack: Arc<dyn NetworkStack>) -> Result<RpcRig> {
        let address = format!("{}:0", bracketed(args));
        let mut listener = stack.listen(&address).await.doing(format!("listening at {address}"))?;
        let endpoint = listener.endpoint();
        let peer = PeerProcess::start(&PeerJob::Offer {
            stack: of_peer,
            endpoint: endpoint.clone(),
            mode: args.mode,
            size: args.size.0,
            in_flight: args.in_flight,
        })?;
        let accepted = tokio::time::timeout(PATIENCE, listener.accept())
            .await
            .doing("waiting for the connection of the second process")?;
        let ends = accepted.doing("accepting the connection of the second process")?;
        let rig = RpcRig::new(args, ends, peer, stack, endpoint)?;
        // Keep the listener open until this process ends.
        std::mem::forget(listener);
        Ok(rig)
    }

    fn new(
        args: &RpcArgs,
        ends: Ends,
        peer: PeerProcess,
        stack: Arc<dyn NetworkStack>,
        endpoint: String,
    ) -> Result<RpcRig> {
        let largest = (args.size.0 as usize).next_power_of_two().max(base::pool::MIN_BUFFER);
        let arena = Arena::anonymous(largest * (args.in_flight as usize + 1)).doing("reserving memory")?;
        let pool = BufferPool::new(arena, 0, largest);
        Ok(RpcRig { ends, peer, stack, endpoint, idle: Vec::new(), pool })
    }

    /// Returns the resident memory of this process and of the peer.
    fn resident(&self) -> (u64, u64) {
        (resident_bytes(std::process::id()), self.peer.resident_bytes())
    }

    /// Returns the CPU time of both processes so far, in seconds.
    fn cpu_seconds(&self) -> Result<f64> {
        let own = ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process")?;
        Ok(own.total.cpu_seconds() + self.peer.usage()?.cpu_seconds())
    }

    /// Opens the additional idle connections. Returns the CPU use of both processes while all
    /// connections are idle, as a share of one core.
    async fn add_idle(&mut self, args: &RpcArgs) -> Result<f64> {
        for _ in 0..args.idle {
            let ends = self.stack.connect(&self.endpoint, ConnectOptions::default()).await;
            self.idle.push(ends.doing("opening an idle connection")?);
        }
        tokio::time::sleep(SETTLING).await;
        let before = self.cpu_seconds()?;
        tokio::time::sleep(args.duration()).await;
        Ok((self.cpu_seconds()? - before) / args.duration().as_secs_f64())
    }

    async fn work(&mut self, args: &RpcArgs, duration: Duration) -> Result<Histogram<u64>> {
        let end = Instant::now() + duration;
        match args.mode {
            RpcMode::Echo => self.echo(args, end).await,
            RpcMode::OneWay => self.one_way(args, end).await,
            RpcMode::BulkRead => self.bulk_read(args, end).await,
            RpcMode::BulkWrite => self.bulk_write(args, end).await,
        }
    }

    async fn echo(&mut self, args: &RpcArgs, end: Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let payload = self.payload(args)?;
        let (connection, incoming) = (&self.ends.0, &mut self.ends.1);
        let message = || Message { header: "0123456789abcdef".into(), payload: payload.clone() };
        let mut sent = VecDeque::with_capacity(args.in_flight as usize);
        for _ in 0..args.in_flight {
            sent.push_back(Instant::now());
            connection.send(message()).await.doing("sending a message")?;
        }
        while let Some(since) = sent.pop_front() {
            next(&mut **incoming).await?;
            let now = Instant::now();
            latency.saturating_record((now - since).as_nanos() as u64);
            if now < end {
                sent.push_back(now);
                connection.send(message()).await.doing("sending a message")?;
            }
        }
        Ok(latency)
    }

    /// Sends messages in one direction, in batches. The server replies only to the last message of
    /// a batch, and at most four batches are without a reply.
    async fn one_way(&mut self, args: &RpcArgs, end: Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let payload = self.payload(args)?;
        let (connection, incoming) = (&self.ends.0, &mut self.ends.1);
        let batch = args.in_flight.max(8);
        let mut sent: VecDeque<Instant> = VecDeque::new();
        loop {
            while sent.len() < 4 && Instant::now() < end {
                sent.push_back(Instant::now());
                for i in 0..batch {
                    // The header "sign" of the last message of a batch requests a reply.
                    let header = if i + 1 == batch { "sign" } else { "none" };
                    let message = Message { header: header.into(), payload: payload.clone() };
                    connection.send(message).await.doing("sending a message")?;
                }
            }
            let Some(since) = sent.pop_front() else { return Ok(latency) };
            next(&mut **incoming).await?;
            latency
                .saturating_record_n(since.elapsed().as_nanos() as u64 / u64::from(batch), u64::from(batch));
        }
    }

    /// Creates the payload of all messages. It is in memory of the pool, so a network device can
    /// send it without a copy.
    fn payload(&self, args: &RpcArgs) -> Result<Payload> {
        let buf = self.pool.try_alloc(args.size.0 as usize).doing("reserving memory")?;
        let mut buf = buf.ok_or_else(|| Failure::new("reserving memory", "the pool is empty"))?;
        buf.fill(7);
        Ok(Payload::compute(0, buf.freeze()))
    }

    /// Pulls the memory that the peer offers, with several transfers in flight.
    async fn bulk_read(&mut self, args: &RpcArgs, end: Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let connection = Arc::clone(&self.ends.0);
        connection
            .send(Message { header: "offer".into(), ..Message::default() })
            .await
            .doing("requesting an offer")?;
        let offer = descriptor(&next(&mut *self.ends.1).await?)?;
        let one = || async {
            let since = Instant::now();
            let dest = self.pool.alloc(args.size.0 as usize).await.doing("reserving memory")?;
            connection.bulk_read(&offer, 0, dest, PATIENCE).await.doing("pulling data")?;
            Ok::<_, Failure>(since.elapsed())
        };
        let mut under_way: FuturesUnordered<_> = (0..args.in_flight).map(|_| one()).collect();
        while let Some(done) = under_way.next().await {
            latency.saturating_record(done?.as_nanos() as u64);
            if Instant::now() < end {
                under_way.push(one());
            }
        }
        Ok(latency)
    }

    /// Pushes data to memory that the peer offers. Each push uses a separate offer, like each read
    /// of a node's client.
    async fn bulk_write(&mut self, args: &RpcArgs, end: Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let connection = Arc::clone(&self.ends.0);
        let payload = self.payload(args)?;
        for _ in 0..args.in_flight {
            connection
                .send(Message { header: "offer".into(), ..Message::default() })
                .await
                .doing("requesting an offer")?;
        }
        let mut pushed: VecDeque<Instant> = VecDeque::new();
        let mut open = args.in_flight;
        while open > 0 {
            let message = next(&mut *self.ends.1).await?;
            if message.header == "done" {
                let since = pushed.pop_front();
                let since = since
                    .ok_or_else(|| Failure::new("measuring the messenger", "a reply came without a push"))?;
                latency.saturating_record(since.elapsed().as_nanos() as u64);
                open -= 1;
                if Instant::now() < end {
                    open += 1;
                    connection
                        .send(Message { header: "offer".into(), ..Message::default() })
                        .await
                        .doing("requesting an offer")?;
                }
                continue;
            }
            pushed.push_back(Instant::now());
            let sink = descriptor(&message)?;
            connection.bulk_write(&sink, 0, payload.clone(), PATIENCE).await.doing("pushing data")?;
            connection
                .send(Message { header: "pushed".into(), ..Message::default() })
                .await
                .doing("reporting a push")?;
        }
        Ok(latency)
    }
}

fn bracketed(args: &RpcArgs) -> String {
    if args.address.is_ipv6() { format!("[{}]", args.address) } else { args.address.to_string() }
}

fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 600_000_000_000, 3).doing("creating a histogram")
}

fn descriptor(message: &Message) -> Result<BulkDescriptor> {
    serde_json::from_slice(&message.header).doing("parsing an offer")
}

async fn next(incoming: &mut dyn Incoming) -> Result<Message> {
    loop {
        match tokio::time::timeout(PATIENCE, incoming.next())
            .await
            .doing("waiting for a message from the second process")?
        {
            ConnectionEvent::Message(message) => return Ok(message),
            ConnectionEvent::Lost(why) => {
                return Err(Failure::new("receiving a message from the second process", why));
            }
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
        }
    }
}
