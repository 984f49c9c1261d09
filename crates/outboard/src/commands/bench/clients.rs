//! The clients of a measurement. The first client prepares the objects, and starts and ends the
//! measurement. Each further client has its own connection and thread.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::thread::{self, ThreadClass};
use client::{Client, Options};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::accounting::{LocalSupervisor, UsageReading};
use super::breakdown::OsdMeasurement;
use super::load::{ClientLoad, LoadResult, SharedLoad};
use super::report::{BenchReport, MeasuredCounts};
use super::{BenchArgs, EXIT_INTERRUPTED, Workload, session};
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// A message of a further client.
enum ClientNote {
    /// The client is connected, and waits for the start.
    Ready,
    /// The client's load has ended, or the client has failed.
    Ended(Box<Result<LoadResult>>),
}

/// The clients except the first one.
pub struct FurtherClients {
    count: u32,
    start: watch::Sender<Option<Instant>>,
    notes: mpsc::UnboundedReceiver<ClientNote>,
}

impl FurtherClients {
    /// Starts the threads of the clients. The clients end when the returned value is dropped. Until
    /// then, the usage of their threads can be read.
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
            let (mut started, noted, in_flight) = (started.clone(), noted.clone(), args.in_flight_of(number));
            thread::spawn(ThreadClass::Client, &number.to_string(), move || {
                // Ignore errors of sending: without a receiver, the first client has failed.
                let mut noted = Some(noted);
                let to_main = &mut noted;
                let body = async move |client: Client| {
                    let load = ClientLoad::new(&client, &shared, number)?;
                    let _ = to_main.as_ref().map(|main| main.send(ClientNote::Ready));
                    let result = run_once_started(load, &mut started, in_flight).await?;
                    // The sender is dropped before the wait, so that the first client notices if
                    // another client panics.
                    let _ = to_main.take().map(|main| main.send(ClientNote::Ended(Box::new(Ok(result)))));
                    until_dropped(started).await;
                    Ok(())
                };
                let result = session::run_here(&node, options, body);
                if let (Err(error), Some(main)) = (result, noted) {
                    let _ = main.send(ClientNote::Ended(Box::new(Err(error))));
                }
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
    started: &mut watch::Receiver<Option<Instant>>,
    in_flight: u32,
) -> Result<LoadResult> {
    let start = started.wait_for(Option::is_some).await.ok().and_then(|start| *start);
    match start {
        Some(start) => Ok(load.run(start, in_flight).await),
        // The first client has failed, and reports why.
        None => LoadResult::new(),
    }
}

/// Waits until the [`FurtherClients`] are dropped.
async fn until_dropped(mut started: watch::Receiver<Option<Instant>>) {
    while started.changed().await.is_ok() {}
}

/// Prepares the objects, measures, and computes the results. From the start of the measurement on,
/// SIGINT ends it early.
///
/// # Errors
/// If the objects cannot be prepared, a client fails, or no operation succeeds.
pub async fn measure(
    client: &Client,
    args: &BenchArgs,
    supervisor: LocalSupervisor,
    shared: &Arc<SharedLoad>,
    mut others: FurtherClients,
) -> Result<BenchReport> {
    let load = ClientLoad::new(client, shared, 0)?;
    if args.workload != Workload::Write || args.block_size.is_some() {
        load.prepare().await?;
    }
    others.ready().await?;
    // Ignore an error: without the osd's answer, only the breakdown by phase is missing.
    let osd_before = client.status().await.ok();
    let before = UsageReading::take(client, supervisor).await;
    let interrupts = signal(SignalKind::interrupt()).doing("preparing for Ctrl-C")?;
    let start = Instant::now();
    others.start.send_replace(Some(start));
    if args.announce {
        output::note("the measurement has started");
    }
    let work = async {
        let mut sum = load.run(start, args.in_flight_of(0)).await;
        others.add_to(&mut sum).await?;
        let used = UsageReading::take(client, supervisor).await.since(&before);
        drop(others);
        Ok::<_, Failure>((sum, used, client.status().await.ok()))
    };
    let (load, used, osd_after) = tokio::select! {
        done = work => done?,
        never = show_time(args.seconds) => match never {},
        never = obey_interrupts(interrupts, shared) => match never {},
    };
    let ended = load.ended.unwrap_or_else(Instant::now);
    let seconds = ended.duration_since(start).as_secs_f64();
    let (measured, interrupted) = (shared.measured(start), shared.is_stopped_early(start));
    let placement = osd_before.as_ref().map(|status| status.placement);
    let window = osd_before.zip(osd_after).and_then(|(b, a)| OsdMeasurement::between(&b, &a, args.workload));
    if let Some(why) = &load.first_error {
        output::note(format!("{} operations failed; the first one: {why}", load.errors));
    }
    if load.reads.ops() + load.writes.ops() == 0 {
        let why = match load.errors {
            0 => "the measurement ended before an operation completed; choose a longer one",
            _ => "no operation succeeded; the message above states the first error",
        };
        return Err(Failure::new("measuring", why));
    }
    let counts = MeasuredCounts { seconds, measured, interrupted, load, used, window };
    BenchReport::new(args, placement, counts)
}

/// Ends the measurement at the first SIGINT, and the process at the second one; never returns.
async fn obey_interrupts(mut interrupts: Signal, shared: &SharedLoad) -> std::convert::Infallible {
    interrupts.recv().await;
    shared.stop();
    interrupts.recv().await;
    std::process::exit(EXIT_INTERRUPTED)
}

/// Shows the elapsed time; never returns.
pub async fn show_time(seconds: u32) -> std::convert::Infallible {
    let progress = ProgressMeter::seconds("measuring", u64::from(seconds));
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        progress.add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The usage of a thread that has ended does not count for its class.
    #[tokio::test]
    async fn a_client_that_has_ended_its_load_keeps_its_thread_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Some(format!("mem:{}", dir.path().join("objects").display()));
        let node = NodeArgs {
            dir: None,
            endpoint,
            network: Default::default(),
            bind: None,
            credentials: None,
            capability: None,
        };
        let args = BenchArgs { in_flight: 2, clients: 2, ..BenchArgs::of(Workload::Write) };
        let shared = Arc::new(SharedLoad::new(&args).unwrap());
        let (mut others, threads) =
            FurtherClients::start(&args, &node, &Options::default(), &shared).unwrap();
        others.ready().await.unwrap();
        others.start.send_replace(Some(Instant::now()));
        let mut sum = LoadResult::new().unwrap();
        others.add_to(&mut sum).await.unwrap();
        // A thread that does not wait ends within this time.
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(sum.ended.is_some() && !threads[0].is_finished());
        drop(others);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
