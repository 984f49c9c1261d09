//! Runs one simulation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::thread::ThreadClass;
use client::{Client, Options};
use messenger::ConnectionConfig;
use messenger::transport::sim::SimNetwork;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use store::sim::{DriveFault, DrivePart, FaultKind as DriveFaultKind};
use tokio::task::LocalSet;

use crate::node::{ENDPOINT, Node};
use crate::plan::{FaultKind, NodeRole, Plan, PlannedFault, Stream, Victim, rng};
use crate::role::Role;
use crate::trace::Trace;

/// Time after the end of all faults within which the node must serve all requests again.
const HEALING: Duration = Duration::from_secs(30);

/// Result of a simulation.
#[derive(Debug, Clone)]
pub struct Report {
    /// Hash of the trace.
    pub hash: u64,
    /// Number of events in the trace.
    pub events: u64,
    /// Number of calls of clients.
    pub calls: u64,
    /// Simulated time.
    pub simulated: Duration,
    /// The most recent events.
    pub recent: Vec<String>,
}

/// Runs the simulation of a plan on this thread.
///
/// # Panics
/// If the thread runs a tokio runtime.
#[must_use]
pub fn run(plan: &Plan, is_printed: bool) -> Report {
    let _seeded = base::entropy::seed_this_thread(rng(plan.seed, Stream::Entropy).random());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O always starts");
    LocalSet::new().block_on(&runtime, async {
        let trace = Trace::new(is_printed);
        let simulation = Simulation::new(plan.clone(), trace);
        simulation.run().await
    })
}

/// Name of a client's host.
fn client_host(number: usize) -> String {
    format!("client-{number}")
}

struct Simulation {
    plan: Plan,
    trace: Trace,
    node: Rc<Node>,
    network: SimNetwork,
    clients: RefCell<Vec<Role>>,
    calls: Cell<u64>,
    is_over: Cell<bool>,
}

impl Simulation {
    fn new(plan: Plan, trace: Trace) -> Rc<Simulation> {
        let network = SimNetwork::new(rng(plan.seed, Stream::Network).random(), plan.network);
        let node = Node::new(&plan, &trace, network.clone());
        Rc::new(Simulation {
            plan,
            trace,
            node,
            network,
            clients: RefCell::default(),
            calls: Cell::new(0),
            is_over: Cell::new(false),
        })
    }

    async fn run(self: Rc<Simulation>) -> Report {
        self.node.run();
        self.create_pools().await;
        for number in 0..self.plan.clients {
            let role = self.start_client(number);
            self.clients.borrow_mut().push(role);
        }
        let faults = self.plan.faults.iter().cloned();
        let injected: Vec<_> = faults
            .map(|fault| {
                let this = Rc::clone(&self);
                base::task::spawn_local(ThreadClass::Admin, async move { this.inject(fault).await })
            })
            .collect();
        for fault in injected {
            fault.await.expect("a fault is injected without a panic");
        }
        self.node.heal();
        self.network.calm();
        self.network.heal_all();
        self.trace.event(format_args!("all faults are over"));
        tokio::time::sleep(HEALING).await;
        self.is_over.set(true);
        let clients = self.clients.borrow().clone();
        for client in clients {
            client.ended().await;
        }
        Report {
            hash: self.trace.hash() ^ self.node.trace() ^ self.network.trace().rotate_left(7),
            events: self.trace.count(),
            calls: self.calls.get(),
            simulated: self.trace.elapsed(),
            recent: self.trace.recent(),
        }
    }

    async fn connect(&self, host: &str) -> Client {
        let stack = Arc::new(self.network.host(host).stack(ConnectionConfig::default()));
        loop {
            match Client::connect_over(Arc::clone(&stack) as _, ENDPOINT, Options::default()).await {
                Ok(client) => return client,
                Err(e) => self.trace.event(format_args!("a client cannot connect: {e}")),
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn create_pools(&self) {
        let client = self.connect("operator").await;
        for pool in &self.plan.pools {
            let created = client.create_pool_with(&pool.name, pool.pg_count, pool.redundancy).await;
            created.expect("a new node can create pools");
        }
        client.close().await;
    }

    fn start_client(self: &Rc<Simulation>, number: usize) -> Role {
        let this = Rc::clone(self);
        let mut rng = rng(self.plan.seed, Stream::Client(number));
        Role::start(async move {
            let client = this.connect(&client_host(number)).await;
            while !this.is_over.get() {
                this.step(&client, number, &mut rng).await;
            }
            client.close().await;
        })
    }

    async fn step(&self, client: &Client, number: usize, rng: &mut StdRng) {
        let pool = &self.plan.pools[rng.random_range(0..self.plan.pools.len())].name;
        let name = format!("object{}", rng.random_range(0..20));
        let object = client.pool(pool).and_then(|pool| pool.object(&name)).expect("the names are valid");
        self.calls.set(self.calls.get() + 1);
        let size =
            if rng.random_bool(0.9) { rng.random_range(0..20_000) } else { rng.random_range(0..3 << 20) };
        match rng.random_range(0..3) {
            0 => {
                let done = object.put(vec![number as u8; size]).await;
                self.trace
                    .event(format_args!("client {number} puts {size} bytes to {pool}/{name}: {done:?}"));
            }
            1 => {
                let done = object.append(vec![number as u8; size.min(100)]).await;
                self.trace.event(format_args!("client {number} appends to {pool}/{name}: {done:?}"));
            }
            _ => {
                let done = object.get().await.map(|data| data.len());
                self.trace.event(format_args!("client {number} gets {pool}/{name}: {done:?}"));
            }
        }
        tokio::time::sleep(rng.random_range(Duration::ZERO..Duration::from_millis(200))).await;
    }

    /// Waits for the time of a fault, injects it and ends it.
    async fn inject(self: Rc<Simulation>, planned: PlannedFault) {
        tokio::time::sleep(planned.at).await;
        self.trace.event(format_args!("fault: {planned}"));
        match planned.victim {
            Victim::Node => {
                self.node.cut_power();
                tokio::time::sleep(planned.lasts).await;
                self.node.roles().for_each(|role| self.node.release(role));
            }
            Victim::Role(role) => self.trouble_role(&planned, role).await,
            Victim::Client(number) => {
                let killed = self.clients.borrow()[number].clone();
                self.network.sever(&client_host(number));
                killed.kill();
                tokio::time::sleep(planned.lasts).await;
                let role = self.start_client(number);
                self.clients.borrow_mut()[number] = role;
            }
            Victim::Drive(target) => self.trouble_drive(&planned, target).await,
        }
        self.trace.event(format_args!("end of fault: {planned}"));
    }

    async fn trouble_role(&self, planned: &PlannedFault, role: NodeRole) {
        match planned.kind {
            FaultKind::Pause => {
                let Some(role) = self.node.role(role) else { return };
                role.pause();
                tokio::time::sleep(planned.lasts).await;
                role.resume();
            }
            FaultKind::ClockStep => {
                // Up to 18 hours in either direction.
                self.node.step_clock(role, i64::from(planned.detail as i32 % 65_536));
            }
            _ => {
                self.node.kill(role);
                tokio::time::sleep(planned.lasts).await;
                self.node.release(role);
            }
        }
    }

    async fn trouble_drive(&self, planned: &PlannedFault, target: usize) {
        let drive = self.node.drive(target);
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let until = Some(Instant::now() + planned.lasts);
        // Half of the faults hit one request, and the others hit many.
        let (count, probability) = match detail.random_bool(0.5) {
            true => (Some(1), 1.0),
            false => (None, detail.random_range(0.05..1.0)),
        };
        let fault = |kind| DriveFault { count, probability, until, ..DriveFault::always(kind) };
        match planned.kind {
            FaultKind::RemoveDrive => {
                drive.remove();
                tokio::time::sleep(planned.lasts).await;
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
                tokio::time::sleep(planned.lasts).await;
                drive.remove();
                tokio::time::sleep(Duration::from_millis(100)).await;
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
                let stall = detail.random_range(Duration::from_millis(5)..Duration::from_secs(60));
                drive.inject(fault(DriveFaultKind::Stall(stall)));
            }
            FaultKind::FlipInRead => drive.inject(fault(DriveFaultKind::FlipInRead)),
            FaultKind::FlipInWrite => drive.inject(fault(DriveFaultKind::FlipInWrite)),
            kind => unreachable!("{} does not concern a drive", kind.name()),
        }
        tokio::time::sleep_until(until.expect("the end is set")).await;
    }
}
