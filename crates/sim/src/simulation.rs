//! Runs one simulation.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::time::Duration;

use base::task::spawn_local;
use base::thread::ThreadClass;
use client::engine::{ReadRequest, SharedConnections, Sink};
use client::{Client, Options};
use messenger::transport::sim::SimNetwork;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};
use wire::{ObjectName, PoolName, Redundancy};
use xxhash_rust::xxh3::xxh3_64;

use crate::coverage::{CounterRecorder, Coverage};
use crate::history::{
    CheckOptions, ClientId, History, ListCall, Outcome, QueryCall, RangeRead, Request, Rule, TargetSpace,
    Violation,
};
use crate::identities::SimUser;
use crate::node::{ENDPOINT, SimNode, stack};
use crate::plan::{
    BURST_INTERVAL, BURST_LENGTH, PlannedFault, PlannedPool, RandomStream, SimulationPlan, rng,
};
use crate::role::SimRole;
use crate::trace::EventTrace;
use crate::workload::{ClientWorkload, SharedWorkload, WorkloadOptions};

mod faults;
mod guest;
mod last_checks;
mod operator;
mod owners;

/// Time after the end of all faults within which the node must serve all requests again.
const HEALING: Duration = Duration::from_secs(30);
/// How much longer clients pause between two calls while the node recovers from the faults. This
/// saves real time.
const HEALING_PAUSE: u32 = 6;
/// Time for which clients continue to work after [`HEALING`].
const AFTER: Duration = Duration::from_secs(5);
/// Time within which all clients finish after the end of the workload.
const ENDING: Duration = Duration::from_secs(900);
/// Time after the end of all faults after which the operator takes lost targets out of use.
const REACTION: Duration = Duration::from_secs(5);
/// Time after which a plan with a drive that acknowledges flushes falsely injects no faults.
const LYING_MAX: Duration = Duration::from_secs(120);
/// Time after which the operator looks for lost targets while faults occur.
const ATTENTION: Duration = Duration::from_secs(40);
/// Time for which the node has no power in faults that are not faults of the power itself.
const POWER_OFF: Duration = Duration::from_millis(100);
/// Time limit of the requests of most clients.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of the requests of the other clients. Some faults last longer.
const SHORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Namespace of the objects that fill targets. The clients' listings skip it.
const FILLER: &str = "filler";
/// Maximum number of bytes that one read asks for.
const READ_MAX: u64 = 32 << 20;

/// Result of a simulation.
#[derive(Debug, Clone)]
pub struct Report {
    /// Hash of everything that happened.
    pub hash: u64,
    /// Number of events in the trace.
    pub events: u64,
    /// Number of calls of clients.
    pub calls: usize,
    /// Simulated time.
    pub simulated: Duration,
    /// Effects of faults, and reactions of the code under test.
    pub coverage: Coverage,
    /// The promises that the node has broken.
    pub violations: Vec<Violation>,
    /// Messages of panics of the code under test.
    pub panics: Vec<String>,
    /// The most recent events.
    pub recent: Vec<String>,
}

impl Report {
    /// Whether the node has broken a promise, or code has panicked.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failure_kind().is_some()
    }

    /// Describes the kind of the failure in a way that does not depend on its time; `None` if the
    /// simulation has not failed.
    #[must_use]
    pub fn failure_kind(&self) -> Option<String> {
        let panic = self.panics.first().map(|panic| format!("panic: {panic}"));
        panic.or_else(|| self.violations.first().map(|violation| format!("{:?}", violation.rule)))
    }
}

thread_local! {
    /// Messages of panics on this thread during a simulation; `None` outside of simulations.
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Makes panics of simulations count as failures. The runtime catches the panics of tasks, but in
/// the product a panic ends the process, unless the code under test expects it.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if base::thread::is_catching() {
                return;
            }
            let counted = PANICS.with_borrow_mut(|panics| match panics {
                Some(panics) => {
                    panics.push(panic.to_string());
                    true
                }
                None => false,
            });
            if !counted {
                before(panic);
            }
        }));
    });
}

/// Runs the simulation of a plan on this thread.
///
/// # Panics
/// If the thread runs a tokio runtime, or if the code under test panics.
#[must_use]
pub fn run(plan: &SimulationPlan, is_printed: bool) -> Report {
    count_panics();
    PANICS.set(Some(Vec::new()));
    let _seeded = base::entropy::seed_this_thread(rng(plan.seed, RandomStream::Entropy).random());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O always starts");
    let recorder = CounterRecorder::default();
    let recording = metrics::set_default_local_recorder(&recorder);
    let mut report = LocalSet::new().block_on(&runtime, async {
        let trace = EventTrace::new(is_printed);
        let simulation = Simulation::new(plan.clone(), trace);
        simulation.run().await
    });
    drop(recording);
    recorder.add_to(&mut report.coverage);
    report.panics = PANICS.take().unwrap_or_default();
    report
}

/// Name of a client's host.
fn client_host(number: usize) -> String {
    format!("client-{number}")
}

/// A client, and the processes that it has been so far.
struct ClientSlot {
    /// The running process, and its id in the history.
    running: Option<(SimRole, ClientId)>,
    /// Number of faults that keep the client down.
    held: u32,
}

struct Simulation {
    plan: SimulationPlan,
    trace: EventTrace,
    node: Rc<SimNode>,
    network: SimNetwork,
    workload: SharedWorkload,
    history: RefCell<History>,
    clients: RefCell<Vec<ClientSlot>>,
    clients_started: Cell<u32>,
    operators_started: Cell<u32>,
    /// Pools that operators have created in addition to the planned pools and not removed yet.
    extra_pools: RefCell<BTreeMap<String, Redundancy>>,
    coverage: RefCell<Coverage>,
    /// Held while an operator replaces a target.
    replacing: Mutex<()>,
    /// Broken promises that the history does not show.
    violations: RefCell<Vec<Violation>>,
    /// Whether the node recovers from the faults, so that clients make fewer calls.
    is_healing: Cell<bool>,
    is_over: Cell<bool>,
}

impl Simulation {
    fn new(plan: SimulationPlan, trace: EventTrace) -> Rc<Simulation> {
        let network = SimNetwork::new(rng(plan.seed, RandomStream::Network).random(), plan.network);
        let node = SimNode::new(&plan, &trace, network.clone());
        let mut history = History::new();
        let mut pools = Vec::new();
        for pool in &plan.pools {
            history.add_pool(&pool.name, pool.redundancy.targets() > 1);
            pools.push(PoolName::new(&pool.name).expect("the name is valid"));
        }
        let options = match plan.has_hot_objects() {
            true => WorkloadOptions::hot(pools),
            false => WorkloadOptions::new(pools),
        };
        let options =
            WorkloadOptions { lists_in_order: plan.lists_in_order(), write_max: plan.write_max, ..options };
        Rc::new(Simulation {
            plan,
            trace,
            node,
            network,
            workload: SharedWorkload::new(options),
            history: RefCell::new(history),
            clients: RefCell::default(),
            clients_started: Cell::new(0),
            operators_started: Cell::new(0),
            extra_pools: RefCell::default(),
            coverage: RefCell::default(),
            replacing: Mutex::default(),
            violations: RefCell::default(),
            is_healing: Cell::new(false),
            is_over: Cell::new(false),
        })
    }

    fn now(&self) -> Duration {
        self.trace.elapsed()
    }

    /// Records an event in the trace and in the history.
    fn note(&self, text: &str) {
        self.trace.event(format_args!("{text}"));
        self.history.borrow_mut().note(self.now(), text);
    }

    async fn run(self: Rc<Simulation>) -> Report {
        self.node.run();
        self.create_pools().await;
        for number in 0..self.plan.clients {
            let running = Some(self.start_client(number));
            self.clients.borrow_mut().push(ClientSlot { running, held: 0 });
        }
        let guest = spawn_local(ThreadClass::Admin, Rc::clone(&self).guest());
        let inject = |fault: &PlannedFault| {
            let (this, fault) = (Rc::clone(&self), fault.clone());
            spawn_local(ThreadClass::Admin, async move { this.inject(fault).await })
        };
        let mut injected: Vec<_> = self.plan.faults.iter().map(inject).collect();
        let all = async {
            for fault in &mut injected {
                fault.await.expect("a fault is injected without a panic");
            }
        };
        if !self.plan.has_lying_drive() {
            let (this, id) = (Rc::clone(&self), self.new_operator());
            // Some faults end only after the operator has given up lost drives.
            let operator = spawn_local(ThreadClass::Admin, async move {
                while this.plan.lossy_drives() > 0 && !this.plan.reports_losses() {
                    sleep(ATTENTION).await;
                    this.give_up_lost(id).await;
                }
            });
            all.await;
            operator.abort();
            self.history.borrow_mut().kill(id, self.now());
        } else if timeout(LYING_MAX, all).await.is_err() {
            // The node cannot start any more, and the operators cannot finish.
            injected.iter().for_each(|fault| fault.abort());
        }
        self.is_healing.set(true);
        self.node.heal();
        self.network.calm();
        self.network.heal_all();
        // The last data that a fault delays arrives this much later.
        sleep(self.plan.network.stall.max(self.plan.dma.stall_max)).await;
        self.trace.event(format_args!("all faults are over"));
        let now = self.now();
        self.history.borrow_mut().healed(now);
        let lossy = self.plan.lossy_drives();
        let is_tolerated = |pool: &&PlannedPool| pool.redundancy.tolerates() >= lossy;
        for pool in self.plan.pools.iter().filter(|_| !self.plan.has_lying_drive()).filter(is_tolerated) {
            self.history.borrow_mut().within_tolerance(&pool.name, now);
        }
        let this = Rc::clone(&self);
        let id = self.new_operator();
        let operator = spawn_local(ThreadClass::Admin, async move {
            sleep(REACTION).await;
            this.give_up_lost(id).await;
            sleep(REACTION).await;
            // Pools without redundancy also need new drives.
            let is_redundant = |pool: &&PlannedPool| pool.redundancy.tolerates() > 0;
            for pool in this.plan.pools.iter().filter(is_redundant).filter(|_| this.plan.loses_too_many()) {
                this.history.borrow_mut().within_tolerance(&pool.name, this.now());
            }
        });
        sleep(HEALING).await;
        self.is_healing.set(false);
        sleep(AFTER).await;
        operator.abort();
        self.history.borrow_mut().kill(id, self.now());
        self.is_over.set(true);
        guest.abort();
        let clients: Vec<_> = self.clients.borrow().iter().filter_map(|slot| slot.running.clone()).collect();
        let ending = async {
            for (client, _) in &clients {
                client.ended().await;
            }
            self.last_commands().await;
            self.check_at_end().await;
        };
        let is_stuck = timeout(ENDING, ending).await.is_err();
        let hash = self.trace.hash() ^ self.node.trace() ^ self.network.trace().rotate_left(7);
        // The roles refer to the simulation, so they must end before it.
        clients.iter().for_each(|(client, _)| client.kill());
        self.node.roles().for_each(|role| self.node.kill(role));
        self.check_drives();
        if self.plan.has_lying_drive() {
            self.history.borrow_mut().kill_all(self.now());
        }
        let history = self.history.borrow();
        let index = self.plan.index_size();
        let space = TargetSpace { data: self.plan.drive_size - self.plan.log_size() - index, index };
        let mut violations = history.check(&CheckOptions { space: Some(space), ..CheckOptions::default() });
        violations.append(&mut self.violations.borrow_mut());
        let mut coverage = self.coverage.take();
        history.count_outcomes(&mut coverage);
        self.node.count_effects(&mut coverage);
        for (name, count) in self.network.counts().all() {
            coverage.add(format!("network: {name}"), count);
        }
        if is_stuck && !self.plan.has_lying_drive() {
            let text = format!(
                "the clients cannot finish within {} s after the end of the workload",
                ENDING.as_secs()
            );
            violations.push(Violation { rule: Rule::Answered, object: None, calls: Vec::new(), text });
        }
        Report {
            hash,
            events: self.trace.count(),
            calls: history.len(),
            simulated: self.now(),
            coverage,
            violations,
            panics: Vec::new(),
            recent: self.trace.recent(),
        }
    }

    async fn connect(&self, host: &str) -> Client {
        let options = Options { request_timeout: REQUEST_TIMEOUT, ..Options::default() };
        self.connect_with(host, None, options).await
    }

    async fn connect_with(
        &self,
        host: &str,
        connections: Option<&SharedConnections>,
        options: Options,
    ) -> Client {
        loop {
            // The simulation of other clients than the guest's ends only after they have connected.
            if let Some(client) = self.connect_as(SimUser::Admin, (host, connections), options.clone()).await
            {
                return client;
            }
        }
    }

    /// Returns connections of the administrator from a host, for several sessions.
    fn shared_connections(&self, host: &str) -> SharedConnections {
        let trust = self.node.identities().of_client(SimUser::Admin);
        SharedConnections::over(Arc::new(stack(&self.plan, &self.network, host, trust)))
    }

    /// Connects as a user, over connections of its own unless others are given. Returns `None` if the
    /// simulation is over.
    async fn connect_as(
        &self,
        user: SimUser,
        (host, connections): (&str, Option<&SharedConnections>),
        options: Options,
    ) -> Option<Client> {
        let (control, clock) = (Some(self.node.control(user)), self.node.client_clock());
        let trust = self.node.identities().of_client(user);
        let options = Options { control, clock, trust: trust.clone(), ..options };
        let stack = Arc::new(stack(&self.plan, &self.network, host, trust));
        loop {
            let connected = match connections {
                Some(shared) => Client::connect_sharing(shared, ENDPOINT, options.clone()).await,
                None => Client::connect_over(Arc::clone(&stack) as _, ENDPOINT, options.clone()).await,
            };
            match connected {
                Ok(client) => return Some(client),
                Err(e) => self.trace.event(format_args!("{host} cannot connect: {e}")),
            }
            if user == SimUser::Guest && self.is_over.get() {
                return None;
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    async fn create_pools(&self) {
        let client = self.connect("operator").await;
        for pool in &self.plan.pools {
            loop {
                match client.create_pool_with(&pool.name, pool.pg_count, pool.redundancy).await {
                    Ok(()) | Err(client::Error::Node(wire::Error::PoolExists(_))) => break,
                    Err(e) => self.trace.event(format_args!("the operator cannot create a pool: {e}")),
                }
            }
        }
        client.close().await;
    }

    fn new_client(&self) -> ClientId {
        self.clients_started.set(self.clients_started.get() + 1);
        ClientId(self.clients_started.get())
    }

    fn start_client(self: &Rc<Simulation>, number: usize) -> (SimRole, ClientId) {
        let (this, id) = (Rc::clone(self), self.new_client());
        let mut root = rng(self.plan.seed, RandomStream::Client(id.0));
        // A client with little patience learns the outcome of fewer changes.
        let patience = if root.random_bool(0.7) { REQUEST_TIMEOUT } else { SHORT_TIMEOUT };
        let role = SimRole::start(async move {
            let options = Options { request_timeout: patience, ..Options::default() };
            let host = client_host(number);
            let connections = this.plan.shares_connections.then(|| this.shared_connections(&host));
            let client = this.connect_with(&host, connections.as_ref(), options.clone()).await;
            let lanes: Vec<_> = (0..this.plan.lanes)
                .map(|lane| {
                    let (this, client) = (Rc::clone(&this), client.clone());
                    let own = connections.clone().map(|shared| (shared, host.clone(), options.clone()));
                    let workload = this.workload.client(id.0 * 100 + lane);
                    let rng = StdRng::from_rng(&mut root);
                    spawn_local(ThreadClass::Client, async move {
                        let Some((shared, host, options)) = own else {
                            return this.lane(&client, (id, patience), workload, rng).await;
                        };
                        let client = this.connect_with(&host, Some(&shared), options).await;
                        this.lane(&client, (id, patience), workload, rng).await;
                        client.close().await;
                    })
                })
                .collect();
            for lane in lanes {
                lane.await.expect("a client makes its calls without a panic");
            }
            client.close().await;
        });
        (role, id)
    }

    /// Makes calls one after another until the simulation is over.
    async fn lane(
        &self,
        client: &Client,
        id: (ClientId, Duration),
        mut workload: ClientWorkload,
        mut rng: StdRng,
    ) {
        while !self.is_over.get() {
            let request = workload.next(&mut rng, |len| self.history.borrow_mut().new_fill(len));
            let outcome = self.call(client, id, request.clone()).await;
            workload.learn(&request, &outcome);
            sleep(self.pause(&mut rng)).await;
        }
    }

    /// Returns the time until a client's next call.
    fn pause(&self, rng: &mut StdRng) -> Duration {
        let factor = if self.is_healing.get() { HEALING_PAUSE } else { 1 };
        if !self.plan.has_hot_objects() {
            return rng.random_range(Duration::ZERO..2 * self.plan.think * factor);
        }
        let interval = (BURST_INTERVAL * factor).as_nanos();
        let into_burst = Duration::from_nanos((self.now().as_nanos() % interval) as u64);
        BURST_INTERVAL * factor - into_burst + rng.random_range(Duration::ZERO..BURST_LENGTH)
    }

    /// Makes a call and records it. `id` is the number of the client, `patience` the time limit of its
    /// requests.
    async fn call(&self, client: &Client, (id, patience): (ClientId, Duration), request: Request) -> Outcome {
        let deadline = self.now() + patience;
        let text = match request.object() {
            Some(object) => format!("{object}: {request}"),
            None => request.to_string(),
        };
        let call = self.history.borrow_mut().start(id, self.now(), Some(deadline), request.clone());
        self.trace.event(format_args!("client {} call {}: {text}", id.0, call.0));
        let outcome = execute(client, &request, patience).await;
        let now = self.now();
        self.trace.event(format_args!("client {} call {} ends: {}", id.0, call.0, brief(&outcome)));
        self.history.borrow_mut().end(call, now, outcome.clone());
        outcome
    }

    fn count(&self, effect: &str) {
        self.coverage.borrow_mut().add(effect, 1);
    }

    /// Records a broken promise that the history does not show.
    fn violation(&self, rule: Rule, text: String) {
        self.trace.event(format_args!("violation: {text}"));
        if !self.plan.has_lying_drive() {
            let violation = Violation { rule, object: None, calls: Vec::new(), text };
            self.violations.borrow_mut().push(violation);
        }
    }
}

/// Executes a request. A listing consists of several requests of the client, which together have the
/// time limit `patience`.
async fn execute(client: &Client, request: &Request, patience: Duration) -> Outcome {
    match request {
        Request::Change(change) => Outcome::of_change(&client.mutate(change.to_request()).await),
        Request::Read(RangeRead { object, offset, len, if_version }) => {
            let request = ReadRequest {
                name: object.clone(),
                part: None,
                offset: *offset,
                len: (*len).min(READ_MAX),
                if_version: *if_version,
                sink: Sink::Bytes,
                fallbacks: Vec::new(),
            };
            Outcome::of_read(&client.read(request).await)
        }
        Request::Query(QueryCall { object, conditions, ops }) => {
            let request =
                wire::Query { name: object.to_wire(), conditions: conditions.clone(), ops: ops.clone() };
            Outcome::of_query(&client.query(request).await)
        }
        Request::List(list) => {
            let found = tokio::time::timeout(patience, names(client, list)).await;
            Outcome::of_listing(&found.unwrap_or(Err(client::Error::TimedOut(patience.into()))))
        }
        Request::Admin(_) => Outcome::Done,
    }
}

/// Lists objects, and returns their namespaces and names.
async fn names(client: &Client, list: &ListCall) -> client::Result<Vec<(String, String)>> {
    let pool = client.pool(&list.pool)?;
    let listing = match &list.namespace {
        None => pool.list_all_namespaces(&list.prefix),
        Some(namespace) => pool.namespace(namespace)?.list(&list.prefix),
    };
    let listing = if list.is_ordered { listing.ordered() } else { listing };
    let found = listing.page_size(7).collect().await?;
    let parts = |name: &ObjectName| (name.namespace().to_owned(), name.object().to_owned());
    Ok(found.iter().filter(|name| name.namespace() != FILLER).map(parts).collect())
}

/// Describes an outcome for the trace. The description contains all data as a hash.
fn brief(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Changed(mutated) => format!("{mutated:?}"),
        Outcome::Refused(refusal) => format!("refused, {}", refusal.text),
        Outcome::Unknown(why) => format!("unknown, {why}"),
        other => {
            let text = format!("{other:?}");
            match text.len() {
                ..400 => text,
                len => format!("answered, {len} characters, {:016x}", xxh3_64(text.as_bytes())),
            }
        }
    }
}
