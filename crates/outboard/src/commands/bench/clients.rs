//! The clients of a measurement. The first client prepares the objects, and starts and ends the
//! measurement. Each further client has its own connection and thread.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::thread::{self, ThreadClass};
use client::{Client, Options};
use tokio::sync::{mpsc, watch};

use super::accounting::Processes;
use super::breakdown::OsdMeasurement;
use super::load::{ClientLoad, LoadResult, SharedLoad};
use super::report::{BenchReport, MeasuredCounts};
use super::{BenchArgs, Workload, session};
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// A message of a further client.
enum ClientNote {
    /// The client is connected, and waits for the start.
    Ready,
    /// The client has ended.
    Ended(Box<Result<LoadResult>>),
}

/// The clients except the first one.
pub struct FurtherClients {
    count: u32,
    start: watch::Sender<Option<Instant>>,
    notes: mpsc::UnboundedReceiver<ClientNote>,
}

impl FurtherClients {
    /// Starts the threads of the clients. The clients end after the measurement, or when the returned
    /// value is dropped.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        args: &BenchArgs,
        node: &NodeArgs,
        options: &Options,
        shared: &Arc<SharedLoad>,
    ) -> Result<(FurtherClients, Vec<JoinHandle<()>>)> {
        let (start, started) = watch::channel(None);
        let (noted, notes) = mpsc::unbounded_channel();
        let spawn = |number: u32| {
            let (node, options, shared) = (node.clone(), options.clone(), Arc::clone(shared));
            let (started, noted, in_flight) = (started.clone(), noted.clone(), args.in_flight_of(number));
            thread::spawn(ThreadClass::Client, &number.to_string(), move || {
                let to_main = noted.clone();
                let body = async move |client: Client| {
                    let load = ClientLoad::new(&client, &shared, number)?;
                    // The receiver lives as long as the start is awaited.
                    let _ = to_main.send(ClientNote::Ready);
                    run_once_started(load, started, in_flight).await
                };
                let result = session::run_here(&node, options, body);
                // The first client has failed if there is no receiver.
                let _ = noted.send(ClientNote::Ended(Box::new(result)));
            })
            .doing("starting a client")
        };
        let threads = (1..args.clients).map(spawn).collect::<Result<_>>()?;
        Ok((FurtherClients { count: args.clients - 1, start, notes }, threads))
    }

    /// Waits until all clients are connected.
    async fn ready(&mut self) -> Result<()> {
        for _ in 0..self.count {
            match self.notes.recv().await {
                Some(ClientNote::Ready) => {}
                Some(ClientNote::Ended(result)) => return Err(result.err().unwrap_or_else(ended)),
                None => return Err(ended()),
            }
        }
        Ok(())
    }

    /// Adds the results of all clients to `sum`.
    async fn add_to(&mut self, sum: &mut LoadResult) -> Result<()> {
        for _ in 0..self.count {
            match self.notes.recv().await {
                Some(ClientNote::Ended(result)) => sum.add((*result)?)?,
                Some(ClientNote::Ready) | None => return Err(ended()),
            }
        }
        Ok(())
    }
}

fn ended() -> Failure {
    Failure::new("measuring", "a client ended before the measurement; this is a bug")
}

async fn run_once_started(
    load: ClientLoad,
    mut started: watch::Receiver<Option<Instant>>,
    in_flight: u32,
) -> Result<LoadResult> {
    let start = started.wait_for(Option::is_some).await.ok().and_then(|start| *start);
    match start {
        Some(start) => Ok(load.run(start, in_flight).await),
        // The first client has failed, and reports why.
        None => LoadResult::new(),
    }
}

/// Prepares the objects, measures, and computes the results.
///
/// # Errors
/// If the objects cannot be prepared, a client fails, or no operation succeeds.
pub async fn measure(
    client: &Client,
    args: &BenchArgs,
    processes: &Processes,
    shared: &Arc<SharedLoad>,
    mut others: FurtherClients,
) -> Result<BenchReport> {
    let load = ClientLoad::new(client, shared, 0)?;
    if args.workload != Workload::Write {
        load.prepare().await?;
    }
    others.ready().await?;
    // Ignore an error: without the osd's answer, only the breakdown by phase is missing.
    let osd_before = client.status().await.ok();
    let before = processes.read();
    let start = Instant::now();
    others.start.send_replace(Some(start));
    let work = async {
        let mut sum = load.run(start, args.in_flight_of(0)).await;
        others.add_to(&mut sum).await?;
        Ok(sum)
    };
    let load = tokio::select! {
        load = work => load?,
        never = show_time(args.seconds) => match never {},
    };
    let ended = load.ended.unwrap_or_else(Instant::now);
    let seconds = ended.duration_since(start).as_secs_f64();
    let used = processes.read().since(&before);
    let osd_after = client.status().await.ok();
    let window = osd_before.zip(osd_after).and_then(|(b, a)| OsdMeasurement::between(&b, &a, args.workload));
    if let Some(why) = &load.first_error {
        output::note(format!("{} operations failed; the first one: {why}", load.errors));
    }
    if load.reads.ops() + load.writes.ops() == 0 {
        return Err(Failure::new(
            "measuring",
            "no operation succeeded; the message above states the first error",
        ));
    }
    BenchReport::new(args, processes.placement(), MeasuredCounts { seconds, load, used, window })
}

/// Shows the elapsed time; never returns.
async fn show_time(seconds: u32) -> std::convert::Infallible {
    let progress = ProgressMeter::seconds("measuring", u64::from(seconds));
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        progress.add(1);
    }
}
