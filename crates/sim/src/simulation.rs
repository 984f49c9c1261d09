//! Runs one simulation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::time::Duration;

use base::clock::Instant;
use base::task::spawn_local;
use base::thread::ThreadClass;
use channel::sim::{DeviceFailure, EngineFaults};
use client::engine::{ReadRequest, Sink};
use client::{Client, Options};
use messenger::transport::sim::{CutKind, SimNetwork};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use store::sim::{DriveFault, DriveFaultKind, DrivePart};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};
use wire::{ObjectName, PoolName};
use xxhash_rust::xxh3::xxh3_64;

use crate::history::{
    CheckOptions, ClientId, History, ListCall, Outcome, QueryCall, RangeRead, Request, Rule, Violation,
};
use crate::node::{ENDPOINT, HOST, SimNode, stack};
use crate::plan::{FaultKind, NodeRole, PlannedFault, RandomStream, SimulationPlan, Victim, rng};
use crate::role::SimRole;
use crate::trace::EventTrace;
use crate::workload::{ClientWorkload, SharedWorkload, WorkloadOptions};

/// Time after the end of all faults within which the node must serve all requests again.
const HEALING: Duration = Duration::from_secs(30);
/// Time for which clients continue to work after [`HEALING`].
const AFTER: Duration = Duration::from_secs(5);
/// Time within which all clients finish after the end of the workload.
const ENDING: Duration = Duration::from_secs(180);
/// Time after the end of all faults after which the operator takes lost targets out of use.
const REACTION: Duration = Duration::from_secs(5);
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
    let mut report = LocalSet::new().block_on(&runtime, async {
        let trace = EventTrace::new(is_printed);
        let simulation = Simulation::new(plan.clone(), trace);
        simulation.run().await
    });
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
        let injected: Vec<_> = self.plan.faults.iter().map(inject).collect();
        for fault in injected {
            fault.await.expect("a fault is injected without a panic");
        }
        self.node.heal();
        self.network.calm();
        self.network.heal_all();
        // The last data that a fault delays arrives this much later.
        sleep(self.plan.network.stall).await;
        self.trace.event(format_args!("all faults are over"));
        let now = self.now();
        self.history.borrow_mut().healed(now);
        let this = Rc::clone(&self);
        let operator = spawn_local(ThreadClass::Admin, async move {
            sleep(REACTION).await;
            this.take_out_lost().await;
        });
        sleep(HEALING + AFTER).await;
        operator.abort();
        self.is_over.set(true);
        let clients: Vec<_> = self.clients.borrow().iter().filter_map(|slot| slot.running.clone()).collect();
        let ending = async {
            for (client, _) in &clients {
                client.ended().await;
            }
            self.read_all().await;
        };
        let is_stuck = timeout(ENDING, ending).await.is_err();
        let hash = self.trace.hash() ^ self.node.trace() ^ self.network.trace().rotate_left(7);
        // The roles refer to the simulation, so they must end before it.
        clients.iter().for_each(|(client, _)| client.kill());
        self.node.roles().for_each(|role| self.node.kill(role));
        let history = self.history.borrow();
        let mut violations = history.check(&CheckOptions { may_be_full: true, ..CheckOptions::default() });
        if is_stuck {
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
            violations,
            panics: Vec::new(),
            recent: self.trace.recent(),
        }
    }

    async fn connect(&self, host: &str) -> Client {
        let stack = Arc::new(stack(&self.plan, &self.network, host));
        loop {
            match Client::connect_over(Arc::clone(&stack) as _, ENDPOINT, Options::default()).await {
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

    /// Reads all objects, as a new client.
    async fn read_all(self: &Rc<Simulation>) {
        let id = self.new_client();
        let client = self.connect("reader").await;
        let objects = self.history.borrow().objects();
        for object in objects {
            self.call(&client, id, RangeRead::whole(object).into()).await;
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
        let role = SimRole::start(async move {
            let client = this.connect(&client_host(number)).await;
            let lanes: Vec<_> = (0..this.plan.lanes)
                .map(|lane| {
                    let (this, client) = (Rc::clone(&this), client.clone());
                    let workload = this.workload.client(id.0 * 100 + lane);
                    let rng = StdRng::from_rng(&mut root);
                    spawn_local(
                        ThreadClass::Client,
                        async move { this.lane(&client, id, workload, rng).await },
                    )
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
    async fn lane(&self, client: &Client, id: ClientId, mut workload: ClientWorkload, mut rng: StdRng) {
        while !self.is_over.get() {
            let request = workload.next(&mut rng, |len| self.history.borrow_mut().new_fill(len));
            let outcome = self.call(client, id, request.clone()).await;
            workload.learn(&request, &outcome);
            sleep(rng.random_range(Duration::ZERO..2 * self.plan.think)).await;
        }
    }

    /// Makes a call and records it.
    async fn call(&self, client: &Client, id: ClientId, request: Request) -> Outcome {
        let deadline = self.now() + Options::default().request_timeout;
        let text = match request.object() {
            Some(object) => format!("{object}: {request}"),
            None => request.to_string(),
        };
        let call = self.history.borrow_mut().start(id, self.now(), Some(deadline), request.clone());
        self.trace.event(format_args!("client {} call {}: {text}", id.0, call.0));
        let outcome = execute(client, &request).await;
        let now = self.now();
        self.trace.event(format_args!("client {} call {} ends: {}", id.0, call.0, brief(&outcome)));
        self.history.borrow_mut().end(call, now, outcome.clone());
        outcome
    }

    /// Waits for the time of a fault, injects it and ends it.
    async fn inject(self: Rc<Simulation>, planned: PlannedFault) {
        sleep(planned.at).await;
        self.note(&format!("fault: {planned}"));
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
            Victim::Operator => self.command(planned.detail).await,
            Victim::Client(number) if planned.kind == FaultKind::Cut => self.cut_off(&planned, number).await,
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
                let calm = EngineFaults::default();
                self.node.engine().iter().for_each(|engine| engine.set_faults(calm));
                // The last transfer that the fault hits ends this much later.
                sleep(faults.stall_max).await;
            }
        }
    }

    /// Gives a command of an operator, and records it.
    async fn command(&self, detail: u64) {
        let mut detail = StdRng::seed_from_u64(detail);
        let client = self.connect("operator").await;
        let pool = &self.plan.pools[detail.random_range(0..self.plan.pools.len())].name;
        let (text, outcome) = match detail.random_range(0..4) {
            0 => ("status", Outcome::of_command(&client.status().await)),
            1 => ("scrub", Outcome::of_command(&client.start_scrub(pool, detail.random_bool(0.3)).await)),
            2 => {
                let rate = [0, 100 << 10, 10 << 20][detail.random_range(0..3)];
                ("rebuild rate", Outcome::of_command(&client.set_rebuild_rate(rate).await))
            }
            _ => ("collect orphans", Outcome::of_command(&client.collect_orphans(Duration::ZERO).await)),
        };
        self.trace.event(format_args!("the operator's command {text} ends: {}", brief(&outcome)));
        client.close().await;
    }

    /// Takes each target out of use whose drive is lost or damaged and that the node does not use.
    async fn take_out_lost(&self) {
        let client = self.connect("operator").await;
        loop {
            let Ok(status) = client.status().await else { continue };
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
                let outcome = client.set_target_out(index as u32, true).await;
                self.trace.event(format_args!("the operator takes target {target} out: {outcome:?}"));
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

/// Executes a request.
async fn execute(client: &Client, request: &Request) -> Outcome {
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
        Request::List(list) => Outcome::of_listing(&names(client, list).await),
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
    Ok(found.iter().map(parts).collect())
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
