//! The operators of a simulated node: commands during the faults, and what an operator does about
//! lost targets.

use std::time::Duration;

use bytes::Bytes;
use client::Client;
use client::engine::{ChangeRequest, Source};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;
use wire::{
    CodingMode, Mutation, NodeStatus, ObjectName, OpBytes, PoolLoss, PoolName, Redundancy, TargetState,
};

use super::{POWER_OFF, REQUEST_TIMEOUT, Simulation, brief};
use crate::history::{ClientId, Outcome, RefusalKind, Request, Rule};
use crate::plan::{PlannedFault, PlannedPool};

/// Number of times that an operator tries to remove a pool while faults occur.
const REMOVALS: u32 = 5;
/// Number of times that an operator tries to replace a target while faults occur.
const REPLACEMENTS: u32 = 10;
/// Number of the first operator. Lower numbers are clients.
const FIRST_OPERATOR: u32 = 1 << 31;
/// Redundancy schemes of the pools that operators create.
const SCHEMES: [&str; 4] = ["single", "mirror:2", "ec:2+1", "ec:2+2"];

impl Simulation {
    pub(super) fn new_operator(&self) -> ClientId {
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
    pub(super) async fn command(&self, planned: &PlannedFault) {
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
    pub(super) async fn last_commands(&self) {
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
    pub(super) async fn take_out_for(&self, lasts: Duration, target: usize) {
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
    pub(super) async fn replace_target(&self, target: usize) {
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
                drop(self.forget(&client, id, target, old as u32).await);
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

    /// Accepts the loss of a target. Returns false if no placement group waits for the target.
    async fn forget(
        &self,
        client: &Client,
        operator: ClientId,
        target: usize,
        index: u32,
    ) -> client::Result<bool> {
        self.sacrifice_pools();
        let began = self.now();
        let forget = async {
            match client.forget_target(index, true).await {
                Err(client::Error::Node(wire::Error::CommandRefused(_))) => Ok(false),
                forgotten => {
                    self.loses_with_slow_target(forgotten.as_deref().ok(), began);
                    forgotten.map(|_| {
                        self.count("operator: target forgotten");
                        true
                    })
                }
            }
        };
        self.administer(operator, &format!("forget target {target}"), forget).await
    }

    /// Whether a placement group of a pool with redundancy waits for a target.
    async fn is_awaited(&self, client: &Client, index: u32) -> bool {
        let tolerates = |loss: &PoolLoss| {
            self.plan.pools.iter().any(|pool| pool.name == loss.pool && pool.redundancy.tolerates() > 0)
        };
        let loss = client.forget_target(index, false).await;
        loss.is_ok_and(|loss| loss.iter().any(|loss| loss.waiting > 0 && tolerates(loss)))
    }

    /// Declares that pools may lose changes because the loss of a target was accepted at the time `now`,
    /// although they tolerate this loss: another target may have been slow, or busy with a checkpoint of a
    /// full index, so that a group continued without it. `loss` is what the node has reported, if its
    /// answer was received.
    fn loses_with_slow_target(&self, loss: Option<&[PoolLoss]>, now: Duration) {
        let waits = |pool: &&PlannedPool| {
            loss.is_none_or(|loss| loss.iter().any(|loss| loss.pool == pool.name && loss.waiting > 0))
        };
        let may_be_slow = self.plan.may_slow_targets() || self.plan.fills_targets();
        for pool in self.plan.pools.iter().filter(waits).filter(|_| may_be_slow) {
            self.history.borrow_mut().may_lose_changes(&pool.name, now);
        }
    }

    /// Gives up each target whose drive is lost or damaged and that the node does not use. A group may
    /// wait for another target once the loss of one is accepted.
    pub(super) async fn give_up_lost(&self, operator: ClientId) {
        let client = self.connect("operator").await;
        let mut rounds = 0;
        while rounds <= self.plan.targets {
            let status = self.administer(operator, "show the status", client.status()).await;
            if let Ok(status) = status {
                match self.give_up_failed(&client, operator, &status).await {
                    Some(0) => break,
                    Some(_) => rounds += 1,
                    None => {}
                }
            }
            sleep(Duration::from_secs(1)).await;
        }
        client.close().await;
    }

    /// Gives up each target that the node does not use according to `status`, and whose drive is lost
    /// or damaged: accepts its loss, and takes it out of use. After the end of all faults,
    /// also accepts the loss of what such a target has lost although the node uses it, if a group waits for
    /// that. Returns the number of targets whose loss was awaited; `None` if commands have failed, or if the
    /// node has not noticed yet that too many drives are lost.
    pub(super) async fn give_up_failed(
        &self,
        client: &Client,
        operator: ClientId,
        status: &NodeStatus,
    ) -> Option<usize> {
        let (mut awaited, mut is_done) = (0, true);
        for target in (0..self.plan.targets).filter(|&target| self.plan.is_lossy(target)) {
            let uuid = self.node.uuid(target);
            let Some(index) = status.targets.iter().position(|status| status.uuid == uuid) else { continue };
            let known = &status.targets[index];
            let is_used = known.state == TargetState::Up;
            if is_used {
                is_done &= !self.plan.loses_too_many();
                let is_awaited = self.is_healing.get() && self.is_awaited(client, index as u32).await;
                if !is_awaited {
                    continue;
                }
            }
            match self.forget(client, operator, target, index as u32).await {
                Ok(is_awaited) => awaited += usize::from(is_awaited),
                Err(_) => is_done = false,
            }
            if !known.out && !is_used {
                let command = client.set_target_out(index as u32, true);
                let outcome = self.administer(operator, &format!("take target {target} out"), command).await;
                is_done &= outcome.is_ok();
            }
        }
        is_done.then_some(awaited)
    }
}
