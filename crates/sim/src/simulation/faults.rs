//! Injects the faults of a plan.

use std::rc::Rc;
use std::time::Duration;

use base::clock::Instant;
use base::fault::{Action, Fault, Site};
use bytes::Bytes;
use channel::sim::{DeviceFailure, EngineFaults};
use client::Options;
use client::engine::{ChangeRequest, Source};
use messenger::transport::sim::CutKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use store::sim::{DriveFault, DriveFaultKind, DrivePart};
use tokio::time::sleep;
use wire::{Mutation, ObjectName, OpBytes, PoolName};

use super::{FILLER, POWER_OFF, Simulation, brief, client_host};
use crate::coverage::BITS_AT_LOG_ENDS;
use crate::history::{Outcome, RefusalKind, Rule};
use crate::node::HOST;
use crate::plan::{FaultKind, NodeRole, PlannedFault, Victim, WitnessTrouble};
use crate::witness::WriteTrouble;

/// Time limit of one request that fills targets.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a client fills the targets.
const FILL_MAX: Duration = Duration::from_secs(20);
/// Sizes of the objects that fill targets, in bytes: the first size until no more object fits, then
/// the next size.
const FILL_SIZES: [usize; 3] = [4 << 20, 256 << 10, 4 << 10];
/// Longest delay of a write of the witness.
const WITNESS_LATE_MAX: Duration = Duration::from_secs(8);
/// Size of each of the two values with which one request fills an index, in bytes.
const FILL_VALUE: usize = 100 << 10;

impl Simulation {
    /// Waits for the time of a fault, injects it and ends it.
    pub(super) async fn inject(self: Rc<Simulation>, planned: PlannedFault) {
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
            // The clients make their calls according to the plan.
            Victim::Clients => {}
            // Each start of the osd has the number of shards of the plan.
            Victim::Shards => {}
            Victim::Owner => self.change_owners(&planned).await,
            Victim::Memory => {
                // Half of the faults are so frequent that they hit data that is sent again, too.
                let mut detail = StdRng::seed_from_u64(planned.detail);
                let most = if detail.random_bool(0.5) { 0.02 } else { 0.3 };
                self.node.memory_flips().set(detail.random_range(0.001..most));
                sleep(planned.lasts).await;
                self.node.memory_flips().set(0.0);
            }
            Victim::Witness => self.trouble_witness(&planned).await,
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

    async fn trouble_witness(&self, planned: &PlannedFault) {
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let witness = self.node.witness();
        let trouble = WitnessTrouble::of(planned.detail);
        if matches!(trouble, WitnessTrouble::Fails | WitnessTrouble::Late) {
            let longest = detail.random_range(Duration::from_millis(10)..WITNESS_LATE_MAX);
            let late_max = (trouble == WitnessTrouble::Late).then_some(longest);
            let probability = if detail.random_bool(0.5) { 1.0 } else { detail.random_range(0.05..1.0) };
            witness.trouble(Some(WriteTrouble { rng: detail, probability, late_max }));
            sleep(planned.lasts).await;
            witness.trouble(None);
            // The last write that the fault hits ends this much later.
            return sleep(late_max.unwrap_or_default()).await;
        }
        self.node.kill(NodeRole::Osd);
        match trouble {
            WitnessTrouble::Older => {
                let has_changed = witness.go_back(detail.random());
                self.trace.event(format_args!("an older copy replaces the witness: {has_changed}"));
            }
            _ => witness.lose(),
        }
        sleep(planned.lasts).await;
        self.node.release(NodeRole::Osd);
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
                self.node.engines().iter().for_each(|engine| engine.fail_device(failure));
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
                self.node.engines().iter().for_each(|engine| engine.set_faults(faults));
                sleep(planned.lasts).await;
                let usual = self.node.dma();
                self.node.engines().iter().for_each(|engine| engine.set_faults(usual));
                // The last transfer that the fault hits ends this much later.
                sleep(faults.stall_max).await;
            }
        }
    }

    /// Fills the targets of a pool, and removes the objects again after a while.
    async fn fill(&self, planned: &PlannedFault, number: usize) {
        let pool = PoolName::new(&self.plan.pools[number].name).expect("the name is valid");
        let options = Options { request_timeout: FILL_TIMEOUT, ..Options::default() };
        let client = self.connect_with("filler", None, options).await;
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
        // An object of a pool whose data may be lost may never be removed.
        let attempts = match (self.plan.has_lying_drive(), self.plan.sacrifices(&self.plan.pools[number])) {
            (true, _) => 1,
            (false, true) => 40,
            (false, false) => usize::MAX,
        };
        for name in created.into_iter().rev() {
            for _ in 0..attempts {
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
                sleep(Duration::from_millis(500)).await;
            }
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

    /// Declares that all pools that the plan sacrifices may lose changes.
    pub(super) fn sacrifice_pools(&self) {
        for pool in self.plan.pools.iter().filter(|pool| self.plan.sacrifices(pool)) {
            self.history.borrow_mut().may_lose_changes(&pool.name, self.now());
        }
    }

    async fn trouble_drive(&self, planned: &PlannedFault, target: usize) {
        let drives = self.plan.troubled_drives();
        if planned.kind == FaultKind::LyingFlush {
            for pool in &self.plan.pools {
                let now = self.now();
                self.history.borrow_mut().beyond_tolerance(&pool.name, now, None);
                self.history.borrow_mut().may_lose_changes(&pool.name, now);
            }
        }
        if planned.kind.is_lossy() && !self.plan.reports_losses() {
            self.sacrifice_pools();
        }
        for pool in self.plan.pools.iter().filter(|pool| pool.redundancy.tolerates() < drives) {
            let now = self.now();
            self.history.borrow_mut().beyond_tolerance(&pool.name, now, None);
        }
        if self.plan.may_slow_targets() {
            for pool in &self.plan.pools {
                self.history.borrow_mut().maybe_unreadable(&pool.name, self.now());
            }
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
                let lost = self.node.uuid(target);
                self.node.lose(target);
                drive.remove();
                sleep(planned.lasts).await;
                let _one_at_a_time = self.replacing.lock().await;
                // Another fault may have lost the same drive.
                if self.node.uuid(target) == lost {
                    self.replace_target(target).await;
                }
            }
            FaultKind::RemoveDrive | FaultKind::RemoveInTurn => {
                drive.remove();
                sleep(planned.lasts).await;
                if !self.node.is_lost(target) {
                    drive.reinsert();
                }
            }
            FaultKind::LoseDrive | FaultKind::LoseTooMany => {
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
            FaultKind::DamageLogEnd => {
                let role = self.node.owner();
                self.node.kill(role);
                let flipped = drive.flip_bit_at_log_end(detail.random_range(0..4));
                self.trace.event(format_args!("drive {target}: a bit of the log is flipped at {flipped:?}"));
                if flipped.is_some() {
                    self.count(BITS_AT_LOG_ENDS);
                }
                sleep(planned.lasts).await;
                self.node.release(role);
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
