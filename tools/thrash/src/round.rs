//! A round: one node with one pool, its writers, its faults, and the checks at its end.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::runtime::Handle;
use tokio::sync::{RwLock, oneshot};

use crate::calls::{CheckedPool, POOL};
use crate::filler::Filler;
use crate::hot::{self, HotLane};
use crate::injector::{InjectError, Injector, InjectorParts};
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::outside;
use crate::plan::{RoundConfig, ThrashFault};
use crate::record::{HEAL_TIME, RoundRecord, history_of, locked};
use crate::relay::Relay;
use crate::thrashed_node::ThrashedNode;
use crate::writer::{self, WriterContext, WriterGroup};

/// Time limits of the calls of the groups of writers.
const TIMEOUTS: [Duration; 3] = [Duration::from_secs(8), Duration::from_secs(30), Duration::from_secs(120)];
/// Time limit of a call of the checks at the end.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the checks wait for a node that does not serve, before the round ends.
const SERVICE_PATIENCE: Duration = Duration::from_secs(120);

/// A thread that runs the tasks of a round: relays, readers and the client of the checks.
struct RoundRuntime {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl RoundRuntime {
    fn start() -> std::io::Result<RoundRuntime> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        });
        Ok(RoundRuntime { handle, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for RoundRuntime {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The result of a round.
#[derive(Debug)]
pub struct RoundSummary {
    /// The record of the round.
    pub record: Arc<RoundRecord>,
    /// Time from the end of the last fault until all calls succeeded.
    pub time_to_heal: Option<Duration>,
}

impl RoundSummary {
    /// Returns the summary in one paragraph.
    pub fn text(&self) -> String {
        let record = &self.record;
        let list = |counts: std::collections::BTreeMap<String, u64>| match counts.is_empty() {
            true => "none".to_owned(),
            false => {
                let items: Vec<String> =
                    counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
                items.join(", ")
            }
        };
        let healed =
            self.time_to_heal.map_or("never".to_owned(), |time| format!("after {:.1} s", time.as_secs_f64()));
        format!(
            "  faults: {}\n  calls: {}\n  {} objects; longest time without a success {:.1} s; healed {healed}; {:.0} s in all",
            list(record.faults()),
            list(record.outcomes()),
            record.ledgers().len(),
            record.longest_pause().as_secs_f64(),
            record.now().as_secs_f64(),
        )
    }

    /// Returns the report of all violations: what was broken, the history of the object of the first
    /// one, and the events. Further violations are often consequences.
    pub fn violations(&self) -> String {
        let mut text = String::new();
        let violations = self.record.violations();
        for (n, violation) in violations.iter().take(3).enumerate() {
            let _ = writeln!(text, "VIOLATION at {:.3} s: {}", violation.at.as_secs_f64(), violation.report);
            if let (0, Some(ledger)) = (n, &violation.ledger) {
                text += &history_of(&locked(ledger));
            }
        }
        let _ = writeln!(text, "{} violations in all", violations.len());
        let _ = write!(text, "events:\n{}", self.record.events());
        text
    }
}

/// Runs a round in an empty directory. `stop` ends the round early.
///
/// # Errors
/// If the tool itself fails, for example because the node does not start before the first fault.
pub fn run(
    program: &Path,
    dir: &Path,
    config: &RoundConfig,
    verbose: bool,
    stop: &AtomicBool,
) -> Result<RoundSummary, String> {
    let text = |error: std::io::Error| error.to_string();
    let seed = |stream: u64| config.seed.wrapping_mul(0x9e37_79b9).wrapping_add(stream);
    let runtime = RoundRuntime::start().map_err(text)?;
    let node = ThrashedNode::new(program, &dir.join("node"), config.clone());
    let endpoint = node.up()?;
    node.run(&["pool", "create", POOL, "--redundancy", &config.redundancy.to_string(), "--pg-count", "8"])?;
    let [relay, plain_relay] = runtime
        .handle
        .block_on(async { Ok::<_, std::io::Error>([Relay::open().await?, Relay::open().await?]) })
        .map_err(text)?;
    [&relay, &plain_relay].into_iter().for_each(|relay| relay.set_upstream(&endpoint));
    let record = Arc::new(RoundRecord::new(verbose));
    let gate = Arc::new(RwLock::new(()));
    let trust = node.trust()?;
    let context = WriterContext {
        endpoint: relay.address(),
        trust: trust.clone(),
        record: Arc::clone(&record),
        gate: Arc::clone(&gate),
    };
    let connect = |endpoint: String| {
        runtime
            .handle
            .block_on(async { writer::connect(&endpoint, &trust, CHECK_TIMEOUT, &record).await })
            .ok_or_else(|| "cannot connect to the node".to_owned())
    };
    let checks = connect(plain_relay.address())?;
    let reader = connect(relay.address())?;
    let mut groups: Vec<WriterGroup> = TIMEOUTS
        .iter()
        .enumerate()
        .map(|(n, timeout)| {
            let writers = (n..config.writers).step_by(TIMEOUTS.len());
            WriterGroup::start(context.clone(), writers, *timeout, seed(10 + n as u64))
        })
        .collect();
    let hot_pool = connect(relay.address())?;
    let created = runtime.handle.block_on(hot::create(&hot_pool));
    created.map_err(|error| format!("cannot create the hot objects: {error}"))?;
    let lanes = runtime.handle.spawn(hot::change_all(hot_pool, context.clone(), seed(4)));
    let readers = runtime.handle.spawn(writer::read_all(reader, context, seed(3)));

    let mut injector = Injector::new(
        node,
        config.clone(),
        InjectorParts {
            record: Arc::clone(&record),
            relays: vec![relay.clone(), plain_relay],
            runtime: runtime.handle.clone(),
            gate,
            pool: checks.clone(),
            random: SmallRng::seed_from_u64(seed(1)),
        },
    );
    let applicable = config.kinds.iter().copied().filter(|kind| kind.applies_to(config));
    let (outside_kinds, node_kinds): (Vec<ThrashFault>, Vec<ThrashFault>) =
        applicable.partition(|kind| kind.is_outside());
    std::thread::scope(|scope| {
        let random = SmallRng::seed_from_u64(seed(2));
        let (groups, record) = (&mut groups, &record);
        let (relay, outside_kinds) = (&relay, &outside_kinds);
        let outside = scope
            .spawn(move || outside::run(outside_kinds, config.fault_seconds, relay, groups, record, random));
        let inside = scope.spawn(|| injector.run(&node_kinds));
        while !(inside.is_finished() && outside.is_finished()) {
            if stop.load(Ordering::Relaxed) {
                record.end();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let mut summary = RoundSummary { record: Arc::clone(&record), time_to_heal: None };
    if !record.is_over() {
        if let Err(InjectError::Broken(report)) = injector.heal() {
            record.violated(None, report);
        }
        let healed = record.heal();
        summary.time_to_heal = await_service(&runtime.handle, &checks, &mut injector.filler, &record, healed);
    }
    // Writers that have been running since the faults must succeed for a while.
    if !record.is_over() && config.fault_seconds >= 60 {
        std::thread::sleep(HEAL_TIME + Duration::from_secs(5));
    }
    record.end();
    groups.iter_mut().for_each(|group| group.finish(Duration::from_secs(10)));
    let _ = runtime.handle.block_on(async { tokio::time::timeout(CHECK_TIMEOUT, readers).await });
    let lanes = runtime.handle.block_on(async { tokio::time::timeout(2 * CHECK_TIMEOUT, lanes).await });
    let mut lanes = match lanes {
        Ok(lanes) => lanes.map_err(|error| error.to_string())??,
        Err(_) => {
            let text = "calls on the hot objects were not answered in time".to_owned();
            record.violated(None, BrokenReport { promise: BrokenPromise::Unavailable, text });
            Vec::new()
        }
    };
    if !record.is_violated()
        && !stop.load(Ordering::Relaxed)
        && let Err(error) = last_checks(&runtime.handle, &checks, &record, &mut injector, &mut lanes)
    {
        match error {
            InjectError::Broken(report) => record.violated(None, report),
            InjectError::NotPossible(why) => return Err(why),
        }
    }
    if record.is_violated() {
        let state = injector.node.run(&["status"]).unwrap_or_else(|why| why);
        let report = format!("{config}\n{}\n{}\n{state}", summary.text(), summary.violations());
        let mut all = String::new();
        for ledger in record.ledgers() {
            all += &history_of(&locked(&ledger));
        }
        let _ = std::fs::write(dir.join("violations.txt"), report);
        let _ = std::fs::write(dir.join("history.txt"), all);
    }
    Ok(summary)
}

/// Waits until reads, writes and removals of several objects succeed. Returns the time since the end
/// of the last fault. Records a violation if the time is more than 30 s.
fn await_service(
    runtime: &Handle,
    pool: &CheckedPool,
    filler: &mut Filler,
    record: &Arc<RoundRecord>,
    healed: Instant,
) -> Option<Duration> {
    let mut last = String::new();
    let mut attempts = 0;
    while healed.elapsed() < SERVICE_PATIENCE && !record.is_violated() {
        attempts += 1;
        let attempt = runtime.block_on(async {
            let probed = probe(pool, attempts, record.is_full(), filler);
            tokio::time::timeout(Duration::from_secs(5), probed).await
        });
        match attempt {
            Ok(Ok(())) => {
                let time = healed.elapsed();
                record.note(format!("all calls succeed {:.1} s after the last fault", time.as_secs_f64()));
                if time > HEAL_TIME {
                    let text = format!(
                        "calls failed until {:.1} s after the last fault: {last}",
                        time.as_secs_f64()
                    );
                    record.violated(None, BrokenReport { promise: BrokenPromise::Unavailable, text });
                }
                return Some(time);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = "a call was not answered within 5 s".to_owned(),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    if record.is_violated() {
        return None;
    }
    let text = format!("calls still fail {} s after the last fault: {last}", SERVICE_PATIENCE.as_secs());
    record.violated(None, BrokenReport { promise: BrokenPromise::Unavailable, text });
    None
}

/// Writes, reads and removes as many objects as it takes to reach most placement groups. If targets
/// are full, also reads and removes objects that filled them.
async fn probe(pool: &CheckedPool, attempt: u32, is_full: bool, filler: &mut Filler) -> Result<(), String> {
    let mut all = tokio::task::JoinSet::new();
    for n in 0..24 {
        let pool = pool.clone();
        all.spawn(async move {
            let object = pool.pool().object(&format!("probe/{attempt}-{n}"))?;
            match object.put("probe").await {
                Ok(_) => {}
                Err(client::Error::Node(client::NodeError::NoSpace { .. })) if is_full => return Ok(1),
                Err(error) => return Err(error),
            }
            object.get().await?;
            object.remove().await.map(|_| 0)
        });
    }
    let mut without_space = 0;
    for result in all.join_all().await {
        without_space += result.map_err(|error: client::Error| error.to_string())?;
    }
    let is_needed = without_space > 0 || is_full && filler.has_stored();
    if is_needed { filler.read_and_remove_some().await } else { Ok(()) }
}

/// Checks all objects, the listing, the redundancy and the targets.
fn last_checks(
    runtime: &Handle,
    pool: &CheckedPool,
    record: &Arc<RoundRecord>,
    injector: &mut Injector,
    lanes: &mut [HotLane],
) -> Result<(), InjectError> {
    check_objects(runtime, pool, record);
    runtime.block_on(hot::check(lanes, pool)).map_err(|error| InjectError::NotPossible(error.to_string()))?;
    injector.empty_at_last()?;
    injector.await_whole()?;
    record.note("the redundancy is complete");
    injector.scrub()?;
    check_objects(runtime, pool, record);
    check_listing(runtime, pool, record);
    if !record.is_violated() && !injector.was_damaged {
        injector.fsck()?;
    }
    Ok(())
}

/// Reads all objects. Repeats failed reads that began less than 30 s after the last fault.
fn check_objects(runtime: &Handle, pool: &CheckedPool, record: &Arc<RoundRecord>) {
    runtime.block_on(async {
        for ledger in record.ledgers() {
            while !record.is_violated() && !pool.check(&ledger).await {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    });
    record.note("all objects were checked");
}

/// Checks that the listing contains all objects that exist, and no others.
fn check_listing(runtime: &Handle, pool: &CheckedPool, record: &Arc<RoundRecord>) {
    let names = runtime.block_on(async {
        let mut names = BTreeSet::new();
        let mut listing = pool.pool().list("w");
        while let Some(name) = listing.next().await? {
            names.insert(name.object().to_owned());
        }
        Ok::<_, client::Error>(names)
    });
    let names = match names {
        Ok(names) => names,
        Err(error) => {
            let text = format!("the listing failed: {error}");
            return record.violated(None, BrokenReport { promise: BrokenPromise::Unavailable, text });
        }
    };
    for ledger in record.ledgers() {
        let (name, exists) = {
            let ledger = locked(&ledger);
            (ledger.name().to_owned(), ledger.exists())
        };
        if exists.is_some_and(|exists| exists != names.contains(&name)) {
            let text = format!("{name}: exists: {exists:?}, in the listing: {}", names.contains(&name));
            let report = BrokenReport { promise: BrokenPromise::WrongAnswer, text };
            record.violated(Some(&ledger), report);
        }
    }
}
