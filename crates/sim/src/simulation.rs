//! Runs one simulation.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::time::Duration;

use base::clock::Instant;
use base::fault::{Action, Fault, Site};
use base::task::spawn_local;
use base::thread::ThreadClass;
use bytes::Bytes;
use channel::sim::{DeviceFailure, EngineFaults};
use client::engine::{ChangeRequest, ReadRequest, Sink, Source};
use client::{Client, Options};
use messenger::transport::sim::{CutKind, SimNetwork};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use store::sim::{DriveFault, DriveFaultKind, DrivePart};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};
use wire::{CodingMode, Mutation, ObjectName, OpBytes, PoolName, Redundancy};
use xxhash_rust::xxh3::xxh3_64;

use crate::coverage::{CounterRecorder, Coverage};
use crate::history::{
    CheckOptions, ClientId, History, ListCall, Outcome, QueryCall, RangeRead, RefusalKind, Request, Rule,
    TargetSpace, Violation,
};
use crate::node::{ENDPOINT, HOST, SimNode, stack};
use crate::plan::{
    FaultKind, NodeRole, PlannedFault, PlannedPool, RandomStream, SimulationPlan, Victim, rng,
};
use crate::role::SimRole;
use crate::trace::EventTrace;
use crate::workload::{ClientWorkload, SharedWorkload, WorkloadOptions};

mod last_checks;

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
/// Time for which the node has no power after a drive has acknowledged flushes falsely.
const POWER_OFF: Duration = Duration::from_millis(100);
/// Time limit of the requests of most clients.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of the requests of the other clients. Some faults last longer.
const SHORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of one request that fills targets.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a client fills the targets.
const FILL_MAX: Duration = Duration::from_secs(20);
/// Sizes of the objects that fill targets, in bytes: the first size until no more object fits, then
/// the next size.
const FILL_SIZES: [usize; 3] = [4 << 20, 256 << 10, 4 << 10];
/// Size of each of the two values with which one request fills an index, in bytes.
const FILL_VALUE: usize = 100 << 10;
/// Namespace of the objects that fill targets. The clients' listings skip it.
const FILLER: &str = "filler";
/// Number of times that an operator tries to remove a pool while faults occur.
const REMOVALS: u32 = 5;
/// Number of times that an operator tries to replace a target while faults occur.
const REPLACEMENTS: u32 = 10;
/// Number of the first operator. Lower numbers are clients.
const FIRST_OPERATOR: u32 = 1 << 31;
/// Redundancy schemes of the pools that operators create.
const SCHEMES: [&str; 4] = ["single", "mirror:2", "ec:2+1", "ec:2+2"];
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
/// the product a panic ends the process.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
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
        let options = WorkloadOptions { write_max: plan.write_max, ..WorkloadOptions::new(pools) };
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
                while this.plan.lossy_drives() > 0 {
                    sleep(ATTENTION).await;
                    this.take_out_lost(id).await;
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
            this.take_out_lost(id).await;
        });
        sleep(HEALING).await;
        self.is_healing.set(false);
        sleep(AFTER).await;
        operator.abort();
        self.history.borrow_mut().kill(id, self.now());
        self.is_over.set(true);
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
        self.connect_with(host, options).await
    }

    async fn connect_with(&self, host: &str, options: Options) -> Client {
        let stack = Arc::new(stack(&self.plan, &self.network, host));
        loop {
            match Client::connect_over(Arc::clone(&stack) as _, ENDPOINT, options.clone()).await {
                Ok(client) => return client,
                Err(e) => self.trace.event(format_args!("{host} cannot connect: {e}")),
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
            let client = this.connect_with(&client_host(number), options).await;
            let lanes: Vec<_> = (0..this.plan.lanes)
                .map(|lane| {
                    let (this, client) = (Rc::clone(&this), client.clone());
                    let workload = this.workload.client(id.0 * 100 + lane);
                    let rng = StdRng::from_rng(&mut root);
                    spawn_local(ThreadClass::Client, async move {
                        this.lane(&client, (id, patience), workload, rng).await
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
            let pause = 2 * self.plan.think * if self.is_healing.get() { HEALING_PAUSE } else { 1 };
            sleep(rng.random_range(Duration::ZERO..pause)).await;
        }
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

    /// Waits for the time of a fault, injects it and ends it.
    async fn inject(self: Rc<Simulation>, planned: PlannedFault) {
        sleep(planned.at).await;
        self.note(&format!("fault: {planned}"));
        self.count(&format!("fault: {}", planned.kind.name()));
        match planned.victim {
            Victim::Node => {
                self.node.cut_power();
                sleep(planned.lasts).await;
                self.node.roles().for_each(|role| self.node.release(role));
            }
            Victim::Role(role) => self.trouble_role(&planned, role).await,
            Victim::Network => match planned.kind {
                FaultKind::LinksDown => {
                    self.network.links_down(true);
                    sleep(planned.lasts).await;
                    self.network.links_down(false);
                }
                _ => drop(self.network.break_all()),
            },
            Victim::Channel => self.trouble_channel(&planned).await,
            Victim::Coding => self.trouble_coding(&planned).await,
            Victim::Operator => self.command(&planned).await,
            Victim::Pool(number) => self.fill(&planned, number).await,
            Victim::Client(number) if planned.kind == FaultKind::Cut => self.cut_off(&planned, number).await,
            Victim::Client(number) if planned.kind == FaultKind::PauseClient => {
                self.pause_client(&planned, number).await;
            }
            Victim::Client(number) => {
                self.kill_client(number);
                sleep(planned.lasts).await;
                self.release_client(number);
            }
            Victim::Drive(target) => self.trouble_drive(&planned, target).await,
        }
        self.note(&format!("end of fault: {planned}"));
    }

    /// Cuts a client off from the node, in one or both directions.
    async fn cut_off(&self, planned: &PlannedFault, number: usize) {
        let (client, mut detail) = (client_host(number), StdRng::seed_from_u64(planned.detail));
        let kind = if detail.random_bool(0.7) { CutKind::Silent } else { CutKind::Reset };
        match detail.random_range(0..3) {
            0 => self.network.cut_one_way(HOST, &client, kind),
            1 => self.network.cut_one_way(&client, HOST, kind),
            _ => self.network.cut(HOST, &client, kind),
        }
        sleep(planned.lasts).await;
        self.network.heal(HOST, &client);
    }

    async fn pause_client(&self, planned: &PlannedFault, number: usize) {
        let running = self.clients.borrow()[number].running.clone();
        let Some((role, id)) = running else { return };
        role.pause();
        sleep(planned.lasts).await;
        if !role.has_ended() {
            self.history.borrow_mut().resume(id, self.now());
            role.resume();
        }
    }

    /// Kills a client. A new client starts after [`release_client`](Self::release_client).
    fn kill_client(&self, number: usize) {
        let slot = &mut self.clients.borrow_mut()[number];
        slot.held += 1;
        if let Some((role, id)) = slot.running.take() {
            self.network.sever(&client_host(number));
            role.kill();
            self.history.borrow_mut().kill(id, self.now());
        }
    }

    /// Ends one [`kill_client`](Self::kill_client).
    fn release_client(self: &Rc<Simulation>, number: usize) {
        let slot = &mut self.clients.borrow_mut()[number];
        slot.held -= 1;
        if slot.held == 0 {
            slot.running = Some(self.start_client(number));
        }
    }

    async fn trouble_coding(&self, planned: &PlannedFault) {
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let action = match detail.random_bool(0.5) {
            true => Action::Fail,
            false => Action::Stall(Duration::from_millis(detail.random_range(1..5000))),
        };
        let faults = self.node.coding_faults();
        let fault = Fault {
            site: Site::EcOffload,
            action,
            after: 0,
            count: None,
            probability: detail.random_range(0.05..1.0),
            seed: detail.random(),
        };
        faults.arm(fault).expect("no other fault is armed");
        sleep(planned.lasts).await;
        faults.clear();
    }

    async fn trouble_channel(&self, planned: &PlannedFault) {
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let wire = self.node.wire();
        match planned.kind {
            FaultKind::Control => match detail.random_range(0..3) {
                0 => wire.cut(),
                1 => {
                    wire.hold(true);
                    sleep(planned.lasts).await;
                    wire.hold(false);
                }
                _ => {
                    wire.refuse(true);
                    wire.cut();
                    sleep(planned.lasts).await;
                    wire.refuse(false);
                }
            },
            FaultKind::DmaFailure => {
                let failure =
                    if detail.random_bool(0.5) { DeviceFailure::Fails } else { DeviceFailure::Hangs };
                self.node.engine().iter().for_each(|engine| engine.fail_device(failure));
            }
            _ => {
                let mut rate = |most: f64| match detail.random_bool(0.5) {
                    true => 0.0,
                    false => detail.random_range(0.0..most),
                };
                let faults = EngineFaults {
                    fail: rate(0.2),
                    stall: rate(0.2),
                    corrupt: rate(0.1),
                    drop_doorbell: rate(0.2),
                    stall_max: Duration::from_millis(detail.random_range(1..20_000)),
                    ..EngineFaults::default()
                };
                self.node.engine().iter().for_each(|engine| engine.set_faults(faults));
                sleep(planned.lasts).await;
                let usual = self.node.dma();
                self.node.engine().iter().for_each(|engine| engine.set_faults(usual));
                // The last transfer that the fault hits ends this much later.
                sleep(faults.stall_max).await;
            }
        }
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

    fn new_operator(&self) -> ClientId {
        self.operators_started.set(self.operators_started.get() + 1);
        ClientId(FIRST_OPERATOR + self.operators_started.get())
    }

    /// Executes a command of an operator and records it.
    async fn administer<T>(
        &self,
        operator: ClientId,
        text: &str,
        command: impl Future<Output = client::Result<T>>,
    ) -> client::Result<T> {
        let deadline = self.now() + REQUEST_TIMEOUT;
        let request = Request::Admin(text.to_owned());
        let call = self.history.borrow_mut().start(operator, self.now(), Some(deadline), request);
        let result = command.await;
        let outcome = Outcome::of_command(&result);
        self.trace.event(format_args!("the operator's command to {text} ends: {}", brief(&outcome)));
        self.history.borrow_mut().end(call, self.now(), outcome);
        result
    }

    /// Gives a command of an operator.
    async fn command(&self, planned: &PlannedFault) {
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let (client, id) = (self.connect("operator").await, self.new_operator());
        let pool = &self.plan.pools[detail.random_range(0..self.plan.pools.len())].name;
        match detail.random_range(0..10) {
            0 => drop(self.administer(id, "show the status", client.status()).await),
            1 => drop(self.administer(id, "list the pools", client.pools()).await),
            2 => drop(self.administer(id, "show a scrub", client.scrub_status(pool)).await),
            3 => {
                let scrub = client.start_scrub(pool, detail.random_bool(0.3));
                drop(self.administer(id, "scrub", scrub).await);
            }
            4 => {
                let rate = [0, 100 << 10, 10 << 20][detail.random_range(0..3)];
                drop(self.administer(id, "set the rebuild rate", client.set_rebuild_rate(rate)).await);
            }
            5 => {
                let grace = [Duration::ZERO, Duration::from_secs(5)][detail.random_range(0..2)];
                drop(self.administer(id, "collect orphans", client.collect_orphans(grace)).await);
            }
            6 => {
                let modes = [CodingMode::LatencySensitive, CodingMode::Async, CodingMode::Auto];
                let mode = modes[detail.random_range(0..modes.len())];
                drop(self.administer(id, "set the coding mode", client.set_coding_mode(mode)).await);
            }
            _ => self.use_extra_pool(&client, id, planned, &mut detail).await,
        }
        client.close().await;
    }

    /// Creates a pool, uses it for a while and removes it. A pool of the same name that is created
    /// later must be empty.
    async fn use_extra_pool(
        &self,
        client: &Client,
        operator: ClientId,
        planned: &PlannedFault,
        detail: &mut StdRng,
    ) {
        let name = format!("extra-{:x}", planned.detail);
        let schemes = SCHEMES.iter().map(|scheme| scheme.parse().expect("the scheme is valid"));
        let schemes: Vec<Redundancy> =
            schemes.filter(|s: &Redundancy| s.targets() <= self.plan.targets).collect();
        for _ in 0..2 {
            let scheme = schemes[detail.random_range(0..schemes.len())];
            self.extra_pools.borrow_mut().insert(name.clone(), scheme);
            let create = client.create_pool_with(&name, 1 << detail.random_range(0..=3), scheme);
            let created = self.administer(operator, &format!("create pool {name} ({scheme})"), create).await;
            if created.is_ok() {
                self.count("operator: pool created");
                self.use_pool(client, &name).await;
            }
            sleep(planned.lasts).await;
            let mut tries = 0;
            while !self.remove_extra_pool(client, operator, &name).await {
                tries += 1;
                if tries == REMOVALS {
                    return;
                }
                sleep(Duration::from_secs(1)).await;
            }
        }
    }

    /// Checks that a new pool contains no objects, and creates some.
    async fn use_pool(&self, client: &Client, name: &str) {
        let pool = PoolName::new(name).expect("the name is valid");
        for number in 0..3 {
            let object =
                ObjectName::new(pool.clone(), "", format!("object-{number}")).expect("the name is valid");
            let change = ChangeRequest {
                name: object,
                part: None,
                conditions: Vec::new(),
                ops: vec![Mutation::Create, Mutation::WriteFull(OpBytes::Payload)],
                payload: Some(Source::Bytes(Bytes::from(vec![1; 10_000 << (2 * number)]))),
            };
            let outcome = Outcome::of_change(&client.mutate(change).await);
            self.trace
                .event(format_args!("the operator creates an object of pool {name}: {}", brief(&outcome)));
            if let Outcome::Refused(refusal) = &outcome
                && refusal.kind == RefusalKind::Exists
            {
                self.violation(Rule::Linearizable, format!("new pool {name} contains an object"));
            }
        }
    }

    /// Removes a pool that an operator has created. Returns whether the pool is gone.
    async fn remove_extra_pool(&self, client: &Client, operator: ClientId, name: &str) -> bool {
        let removed =
            self.administer(operator, &format!("remove pool {name}"), client.remove_pool(name, true)).await;
        let is_gone =
            removed.as_ref().is_ok_and(|()| true) || removed.as_ref().is_err_and(client::Error::is_not_found);
        if is_gone {
            self.count("operator: pool removed");
            self.extra_pools.borrow_mut().remove(name);
        }
        is_gone
    }

    /// Gives some commands after the node has recovered. All of them must succeed.
    async fn last_commands(&self) {
        let (client, id) = (self.connect("operator").await, self.new_operator());
        drop(self.administer(id, "list the pools", client.pools()).await);
        let extra = self.extra_pools.borrow().clone();
        for (name, scheme) in extra {
            let is_beyond = self.plan.has_lying_drive() || scheme.tolerates() < self.plan.lossy_drives();
            if !self.remove_extra_pool(&client, id, &name).await && !is_beyond {
                self.violation(Rule::Answered, format!("pool {name} cannot be removed"));
            }
        }
        client.close().await;
    }

    /// Takes a target out of use for a while.
    async fn take_out_for(&self, lasts: Duration, target: usize) {
        let (client, id, uuid) =
            (self.connect("operator").await, self.new_operator(), self.node.uuid(target));
        let index = loop {
            if let Ok(status) = self.administer(id, "show the status", client.status()).await {
                break status.targets.iter().position(|status| status.uuid == uuid);
            }
        };
        let Some(index) = index else { return };
        let out = client.set_target_out(index as u32, true);
        if self.administer(id, &format!("take target {target} out"), out).await.is_ok() {
            self.count("operator: target out");
        }
        sleep(lasts).await;
        while !self.node.is_lost(target) {
            let back = client.set_target_out(index as u32, false);
            if self.administer(id, &format!("take target {target} back"), back).await.is_ok() {
                self.count("operator: target in");
                break;
            }
            sleep(Duration::from_secs(1)).await;
        }
        client.close().await;
    }

    /// Replaces a target whose drive is lost by a new target, and restarts the node.
    async fn replace_target(&self, target: usize) {
        let (client, id, new) = (self.connect("operator").await, self.new_operator(), self.node.new_drive());
        let mut tries = 0;
        loop {
            if let Ok(status) = self.administer(id, "show the status", client.status()).await {
                let index = |uuid| status.targets.iter().position(|status| status.uuid == uuid);
                if index(new.0).is_some() {
                    break;
                }
                let Some(old) = index(self.node.uuid(target)) else { return };
                let replace = client.replace_target(old as u32, new.0);
                if self.administer(id, &format!("replace target {target}"), replace).await.is_ok() {
                    break;
                }
            }
            tries += 1;
            if tries == REPLACEMENTS {
                return self.note(&format!("target {target} cannot be replaced"));
            }
            sleep(Duration::from_secs(1)).await;
        }
        client.close().await;
        self.count("operator: target replaced");
        self.node.roles().for_each(|role| self.node.kill(role));
        self.node.replace(target, new);
        sleep(POWER_OFF).await;
        self.node.roles().for_each(|role| self.node.release(role));
    }

    /// Fills the targets of a pool, and removes the objects again after a while.
    async fn fill(&self, planned: &PlannedFault, number: usize) {
        let pool = PoolName::new(&self.plan.pools[number].name).expect("the name is valid");
        let options = Options { request_timeout: FILL_TIMEOUT, ..Options::default() };
        let client = self.connect_with("filler", options).await;
        self.history.borrow_mut().fill_targets(self.now());
        let mut created = Vec::new();
        let until = Instant::now() + FILL_MAX;
        let value = Bytes::from(vec![7; FILL_SIZES[0]]);
        let steps = match planned.kind {
            FaultKind::FillIndex => vec![None],
            _ => FILL_SIZES.iter().copied().map(Some).collect(),
        };
        for size in steps {
            // Objects of other placement groups may still fit, so one refusal is not enough.
            let (mut refusals, mut failures) = (0, 0);
            while refusals < 3 && failures < 3 && Instant::now() < until {
                let name = format!("{:x}-{}", planned.detail, created.len());
                let name = ObjectName::new(pool.clone(), FILLER, name).expect("the name is valid");
                created.push(name.clone());
                let (op, payload) = match size {
                    Some(size) => {
                        (Mutation::WriteFull(OpBytes::Payload), Some(Source::Bytes(value.slice(..size))))
                    }
                    None => {
                        let key = |key: &'static str| (Bytes::from(key), value.slice(..FILL_VALUE));
                        (Mutation::OmapSet(vec![key("a"), key("b")]), None)
                    }
                };
                let change =
                    ChangeRequest { name, part: None, conditions: Vec::new(), ops: vec![op], payload };
                match Outcome::of_change(&client.mutate(change).await) {
                    Outcome::Changed(_) => refusals = 0,
                    Outcome::Refused(refusal) if refusal.kind == RefusalKind::NoSpace => refusals += 1,
                    outcome => {
                        failures += 1;
                        self.trace.event(format_args!("the filler cannot write: {}", brief(&outcome)));
                    }
                }
            }
            if refusals == 3 {
                self.count("targets: filled");
            }
        }
        self.note(&format!("pool {pool} contains {} objects that fill its targets", created.len()));
        sleep(planned.lasts).await;
        for name in created.into_iter().rev() {
            loop {
                let (ops, conditions) = (vec![Mutation::Remove], Vec::new());
                let change = ChangeRequest { name: name.clone(), part: None, conditions, ops, payload: None };
                match Outcome::of_change(&client.mutate(change).await) {
                    Outcome::Changed(_) => break,
                    Outcome::Refused(refusal) if refusal.kind == RefusalKind::NoSuchObject => break,
                    Outcome::Refused(refusal) if refusal.kind == RefusalKind::NoSpace => {
                        self.violation(Rule::Reserve, format!("{name} cannot be removed: {}", refusal.text));
                        break;
                    }
                    outcome => {
                        self.trace.event(format_args!("the filler cannot remove {name}: {}", brief(&outcome)))
                    }
                }
                if self.plan.has_lying_drive() {
                    break;
                }
                sleep(Duration::from_millis(500)).await;
            }
        }
        client.close().await;
    }

    /// Takes each target out of use whose drive is lost or damaged and that the node does not use.
    async fn take_out_lost(&self, operator: ClientId) {
        let client = self.connect("operator").await;
        loop {
            let Ok(status) = self.administer(operator, "status", client.status()).await else { continue };
            let lost = (0..self.plan.targets).filter(|&target| self.plan.is_lossy(target));
            let mut is_done = true;
            for target in lost {
                let uuid = self.node.uuid(target);
                let Some(index) = status.targets.iter().position(|status| status.uuid == uuid) else {
                    continue;
                };
                let known = &status.targets[index];
                if known.state == client::TargetState::Up || known.out {
                    continue;
                }
                let command = client.set_target_out(index as u32, true);
                let outcome = self.administer(operator, &format!("take target {target} out"), command).await;
                is_done &= outcome.is_ok();
            }
            if is_done {
                break;
            }
            sleep(Duration::from_secs(1)).await;
        }
        client.close().await;
    }

    async fn trouble_role(&self, planned: &PlannedFault, role: NodeRole) {
        match planned.kind {
            FaultKind::Pause => {
                let Some(role) = self.node.role(role) else { return };
                role.pause();
                sleep(planned.lasts).await;
                role.resume();
            }
            FaultKind::ClockStep => {
                // Up to 18 hours in either direction.
                self.node.step_clock(role, i64::from(planned.detail as i32 % 65_536));
            }
            _ => {
                self.node.kill(role);
                sleep(planned.lasts).await;
                self.node.release(role);
            }
        }
    }

    async fn trouble_drive(&self, planned: &PlannedFault, target: usize) {
        let drives = self.plan.troubled_drives();
        if planned.kind == FaultKind::LyingFlush {
            for pool in &self.plan.pools {
                let now = self.now();
                self.history.borrow_mut().beyond_tolerance(&pool.name, now, None);
                self.history.borrow_mut().may_lose_changes(&pool.name);
            }
        }
        for pool in self.plan.pools.iter().filter(|pool| pool.redundancy.tolerates() < drives) {
            let now = self.now();
            self.history.borrow_mut().beyond_tolerance(&pool.name, now, None);
        }
        let drive = self.node.drive(target);
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let until = Instant::now() + planned.lasts;
        // Half of the faults hit one request, and the others hit many.
        let (count, probability) = match detail.random_bool(0.5) {
            true => (Some(1), 1.0),
            false => (None, detail.random_range(0.05..1.0)),
        };
        let fault = |kind| DriveFault { count, probability, until: Some(until), ..DriveFault::always(kind) };
        match planned.kind {
            FaultKind::LyingFlush => {
                drive.inject(DriveFault { count: None, ..fault(DriveFaultKind::LyingFlush) });
                tokio::time::sleep_until(until).await;
                if detail.random_bool(0.7) {
                    self.node.cut_power();
                    sleep(POWER_OFF).await;
                    self.node.roles().for_each(|role| self.node.release(role));
                }
            }
            FaultKind::TargetOut => self.take_out_for(planned.lasts, target).await,
            FaultKind::ReplaceDrive => {
                self.node.lose(target);
                drive.remove();
                sleep(planned.lasts).await;
                self.replace_target(target).await;
            }
            FaultKind::RemoveDrive => {
                drive.remove();
                sleep(planned.lasts).await;
                if !self.node.is_lost(target) {
                    drive.reinsert();
                }
            }
            FaultKind::LoseDrive => {
                self.node.lose(target);
                drive.remove();
            }
            FaultKind::StaleDrive => {
                let image = drive.image();
                sleep(planned.lasts).await;
                drive.remove();
                sleep(Duration::from_millis(100)).await;
                drive.restore(&image);
                drive.reinsert();
            }
            FaultKind::FlipAtRest => {
                let parts = [DrivePart::Data, DrivePart::Data, DrivePart::Index, DrivePart::Log];
                let part = parts[detail.random_range(0..parts.len())];
                let flipped = drive.flip_bit_in(part);
                self.trace.event(format_args!("drive {target}: a bit of {part:?} is flipped at {flipped:?}"));
            }
            FaultKind::ReadError => drive.inject(fault(DriveFaultKind::ReadError)),
            FaultKind::WriteError => drive.inject(fault(DriveFaultKind::WriteError)),
            FaultKind::FlushError => drive.inject(fault(DriveFaultKind::FlushError)),
            FaultKind::DriveStall => {
                let stall = detail.random_range(Duration::from_millis(5)..Duration::from_secs(40));
                drive.inject(fault(DriveFaultKind::Stall(stall)));
                // The last request that the fault hits ends this much later.
                sleep(stall).await;
            }
            FaultKind::FlipInRead => drive.inject(fault(DriveFaultKind::FlipInRead)),
            FaultKind::FlipInWrite => drive.inject(fault(DriveFaultKind::FlipInWrite)),
            kind => unreachable!("{} does not concern a drive", kind.name()),
        }
        tokio::time::sleep_until(until).await;
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
            Outcome::of_listing(&found.unwrap_or(Err(client::Error::TimedOut(patience))))
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
