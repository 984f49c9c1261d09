//! The second process of a measurement. It executes a [`PeerJob`]: answers messages, offers memory
//! for bulk transfers, or runs a reference program's server.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::Payload;
use base::thread::{self, ThreadClass};
use identity::{Credentials, OnlyProcess, Trust};
use messenger::{
    BulkRegion, BulkSink, BulkSource, ConnectOptions, Connection, ConnectionEvent, Incoming, Message,
    StackOptions, UseAs,
};

use super::peer::{PeerJob, PeerStack};
use super::{RpcMode, bare, reference};
use crate::{copies, output};
use node::failure::{Doing, Failure, Result};

pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().doing("starting the async runtime")
}

/// Runs the job until standard input ends.
pub fn run(job: &str) -> Result<()> {
    let job: PeerJob = serde_json::from_str(job).doing("parsing the job of the second process")?;
    copies::record();
    let work = move || -> Result<()> {
        match job {
            PeerJob::Serve { stack, address, mode } => {
                runtime()?.block_on(spawned(serve(stack, address, mode)))
            }
            PeerJob::Offer { stack, endpoint, mode, size, .. } => {
                runtime()?.block_on(spawned(offer(stack, endpoint, mode, size as usize)))
            }
            PeerJob::BareEcho { address } => reference::serve(&address),
            PeerJob::BareMemory { provider, address, size, spins } => {
                bare::expose(&provider, &address, size as usize, spins)
            }
        }
    };
    let thread = thread::spawn(ThreadClass::Messenger, "peer", work).doing("starting a thread")?;
    let questions = std::thread::spawn(|| {
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            if line == "copied" {
                output::line(copies::copied_bytes(copies::MESSENGER));
            }
        }
        std::process::exit(0);
    });
    let result = thread.join().unwrap_or_else(|_| {
        Err(Failure::new("running the second process", "the thread panicked; this is a bug"))
    });
    drop(questions);
    result
}

async fn spawned(work: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    tokio::spawn(work).await.doing("running the second process")?
}

/// Opens the stack of this process, which accepts or dials the first process.
fn open(stack: &PeerStack, accepts: bool) -> Result<Arc<dyn messenger::NetworkStack>> {
    let doing = "parsing the job of the second process";
    let choice = stack.name.parse().doing(doing)?;
    let Credentials { identity, node, .. } = Credentials::load(&stack.credentials).doing(doing)?;
    let mut options = StackOptions { spin: Duration::from_micros(stack.spin_us), ..StackOptions::default() };
    options.connection.trust = match accepts {
        true => Trust::server(&identity, Arc::new(OnlyProcess(node))),
        false => Trust::client(&identity, node),
    };
    messenger::open(&choice, &options, UseAs::Server).doing("opening the network stack")
}

async fn serve(stack: PeerStack, address: String, mode: RpcMode) -> Result<()> {
    let stack = open(&stack, true)?;
    let mut listener = stack.listen(&address).await.doing(format!("listening at {address}"))?;
    output::line(listener.endpoint());
    loop {
        if let Ok((connection, incoming)) = listener.accept().await {
            tokio::spawn(answer(connection, incoming, mode));
        }
    }
}

async fn answer(connection: Arc<dyn Connection>, mut incoming: Box<dyn Incoming>, mode: RpcMode) {
    while let Some(message) = next(&mut *incoming).await {
        let answer = match mode {
            RpcMode::Echo => message,
            _ if message.header == "sign" => Message { header: message.header, ..Message::default() },
            _ => continue,
        };
        if connection.send(answer).await.is_err() {
            return;
        }
    }
}

async fn next(incoming: &mut dyn Incoming) -> Option<Message> {
    loop {
        match incoming.next().await {
            ConnectionEvent::Message(message) => return Some(message),
            ConnectionEvent::Lost(_) => return None,
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
        }
    }
}

/// Data in memory with known checksums.
struct PreparedData(Payload);

impl BulkSource for PreparedData {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn block_offset(&self) -> u64 {
        self.0.block_offset()
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, std::result::Result<Payload, String>> {
        let start = offset as usize;
        let data = self.0.data().slice(start..start + len);
        let pieces = start / 4096..(start + len).div_ceil(4096);
        let payload = Payload::from_parts(offset, data, self.0.checksums()[pieces].to_vec());
        Box::pin(std::future::ready(payload.map_err(|e| e.to_string())))
    }

    fn memory(&self) -> Option<Payload> {
        Some(self.0.clone())
    }
}

/// A sink that discards its data.
struct Void(u64);

impl BulkSink for Void {
    fn len(&self) -> u64 {
        self.0
    }

    fn write(&self, _offset: u64, _payload: Payload) -> bool {
        true
    }
}

/// Connects to the first process, and offers memory whenever the first process requests it.
async fn offer(stack: PeerStack, endpoint: String, mode: RpcMode, size: usize) -> Result<()> {
    let stack = open(&stack, false)?;
    let connecting = stack.connect(&endpoint, ConnectOptions::default()).await;
    let (connection, mut incoming) = connecting.doing(format!("connecting to {endpoint}"))?;
    let source: Arc<dyn BulkSource> = Arc::new(PreparedData(Payload::compute(0, vec![7; size].into())));
    let mut regions: std::collections::VecDeque<BulkRegion> = std::collections::VecDeque::new();
    while let Some(message) = next(&mut *incoming).await {
        let header = if message.header == "pushed" {
            if let Some(region) = regions.pop_front() {
                region.finish();
            }
            "done".into()
        } else {
            let region = match mode {
                RpcMode::BulkRead => connection.offer_source(Arc::clone(&source)),
                _ => connection.offer_sink(Arc::new(Void(size as u64)), 0),
            };
            let region = region.doing("offering memory")?;
            let header = serde_json::to_vec(&region.descriptor).doing("offering memory")?;
            regions.push_back(region);
            header.into()
        };
        connection
            .send(Message { header, ..Message::default() })
            .await
            .doing("answering the first process")?;
    }
    Ok(())
}
