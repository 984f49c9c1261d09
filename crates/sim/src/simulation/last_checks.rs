//! The last steps of a simulation, after the end of all faults and of the workload. They show that
//! the drives hold what clients have read, and that the redundancy is complete again.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use client::Client;
use rand::Rng;
use rand::seq::SliceRandom;
use tokio::time::sleep;
use wire::{
    Mutation, NodeStatus, PoolHealth, QueryAnswer, QueryOp, Redundancy, ScrubStatus, Space, TargetState,
};

use super::{POWER_OFF, REACTION, REQUEST_TIMEOUT, Simulation};
use crate::history::{
    ChangeCall, ClientId, ListCall, Outcome, QueryCall, RangeRead, RefusalKind, RefusedCall, Request, Rule,
};
use crate::plan::{PlannedPool, RandomStream, rng};

/// Time within which the node restores the redundancy of all pools after the end of all faults.
const REBUILD: Duration = Duration::from_secs(300);
/// Interval of the operator's questions.
const PAUSE: Duration = Duration::from_secs(2);
/// Size of the last write to each object, in bytes.
const LAST_WRITE: u64 = 5000;
/// Maximum number of entries that a query asks for.
const ENTRIES: u32 = 1000;

impl Simulation {
    /// Changes each object, and reads everything: perhaps after a power failure, and perhaps without
    /// as many drives as the pools can lose.
    pub(super) async fn check_at_end(self: &Rc<Simulation>) {
        let mut choice = rng(self.plan.seed, RandomStream::LastChecks);
        let writer = self.change_everything().await;
        let mut is_redundant = self.redundancy_returns().await;
        if is_redundant {
            self.scrub_everything().await;
        }
        if choice.random_bool(0.5) {
            self.note("last checks: the node loses power");
            self.node.cut_power();
            sleep(POWER_OFF).await;
            self.node.roles().for_each(|role| self.node.release(role));
            // A group may wait for the operator's word that a missing target is lost.
            sleep(REACTION).await;
            self.give_up_lost(self.new_operator()).await;
            // A drive may have failed for ever, because a bit on it has flipped.
            is_redundant = is_redundant && self.redundancy_returns().await;
        }
        let mut drives: Vec<usize> = (0..self.plan.targets).filter(|&n| !self.plan.is_lossy(n)).collect();
        let loses_too_many = self.plan.loses_too_many();
        let spare = match loses_too_many {
            true => self.redundant_pools().map(|pool| pool.redundancy.tolerates()).min().unwrap_or(0),
            false => self.plan.tolerance().saturating_sub(self.plan.lossy_drives()),
        };
        let sacrifices = !loses_too_many && self.plan.pools.iter().any(|pool| self.plan.sacrifices(pool));
        let removes = is_redundant && spare > 0 && !sacrifices && (loses_too_many || choice.random_bool(0.5));
        let removed = if removes { spare } else { 0 };
        drives.shuffle(&mut choice);
        let earlier = if loses_too_many { Some(self.read_everything().await) } else { None };
        for &target in &drives[..removed] {
            self.note(&format!("last checks: drive {target} is removed"));
            self.node.drive(target).remove();
        }
        let reader = self.read_everything().await;
        if let Some(earlier) = earlier {
            self.check_copies(writer, earlier, reader);
            self.count(if removed > 0 {
                "copies compared: without drives"
            } else {
                "copies compared: with all drives"
            });
        }
        drives[..removed].iter().for_each(|&target| self.node.drive(target).reinsert());
    }

    fn redundant_pools(&self) -> impl Iterator<Item = &PlannedPool> {
        self.plan.pools.iter().filter(|pool| pool.redundancy.tolerates() > 0)
    }

    /// Checks, after the loss of too many drives, that pools with redundancy have kept the changes of the
    /// client `writer`, and that the objects are the same for the client `earlier` as for the client
    /// `later`, who reads with fewer drives.
    fn check_copies(&self, writer: ClientId, earlier: ClientId, later: ClientId) {
        let history = self.history.borrow();
        let is_redundant = |request: &Request| {
            let pool = request.object().map(|object| object.pool());
            self.redundant_pools().any(|redundant| Some(&redundant.name[..]) == pool)
        };
        let calls = |client| history.ended_calls(client).filter(|(request, _)| is_redundant(request));
        let mut versions = BTreeMap::new();
        for (request, outcome) in calls(writer) {
            if let Outcome::Changed(mutated) = outcome {
                versions.insert(request.object(), mutated.version);
            }
        }
        let call = |request: &Request| (request.object().cloned(), request.to_string());
        let answers: BTreeMap<_, &Outcome> =
            calls(later).map(|(request, outcome)| (call(request), outcome)).collect();
        for (request, outcome) in calls(earlier) {
            let Some(other) = answers.get(&call(request)).copied() else { continue };
            let is_same = match (outcome, other) {
                (Outcome::Refused(one), Outcome::Refused(other)) => one.kind == other.kind,
                (one, other) => one == other,
            };
            if !is_same {
                let text = format!(
                    "{request} is answered differently with fewer drives: {outcome:?}, and then {other:?}"
                );
                self.violation(Rule::Redundancy, text);
            }
            let expected = versions.get(&request.object()).copied();
            let found = match outcome {
                Outcome::Read(answer) => answer.version,
                Outcome::Queried(answers) => answers.iter().find_map(|answer| match answer {
                    QueryAnswer::Stat(stat) => Some(stat.version),
                    _ => None,
                }),
                _ => None,
            };
            if expected.is_some() && found != expected {
                let text =
                    format!("{request} does not show the last change, of version {expected:?}: {outcome:?}");
                self.violation(Rule::Linearizable, text);
            }
        }
    }

    /// Reads all objects and their metadata, and lists them, as a new client.
    async fn read_everything(self: &Rc<Simulation>) -> ClientId {
        let (client, id) = self.last_client("reader").await;
        let objects = self.history.borrow().objects();
        for object in objects {
            let range = QueryOp::OmapRange { from: Bytes::new(), to: None, limit: ENTRIES };
            let ops = vec![QueryOp::Stat, QueryOp::Xattrs, range];
            let query = QueryCall { object: object.clone(), conditions: Vec::new(), ops };
            self.last_call(&client, id, query.into()).await;
            self.last_call(&client, id, RangeRead::whole(object).into()).await;
        }
        for pool in &self.plan.pools {
            let (pool, is_ordered) = (pool.name.clone(), self.plan.lists_in_order());
            let list = ListCall { pool, namespace: None, prefix: String::new(), is_ordered };
            self.last_call(&client, id, list.into()).await;
        }
        client.close().await;
        id
    }

    /// Writes to all objects, as a new client.
    async fn change_everything(self: &Rc<Simulation>) -> ClientId {
        let (client, id) = self.last_client("writer").await;
        let objects = self.history.borrow().objects();
        for object in objects {
            let fill = self.history.borrow_mut().new_fill(LAST_WRITE);
            self.last_call(&client, id, ChangeCall::new(object).write(3000, fill).into()).await;
        }
        client.close().await;
        id
    }

    async fn last_client(self: &Rc<Simulation>, host: &str) -> (Client, ClientId) {
        (self.connect(host).await, self.new_client())
    }

    async fn last_call(&self, client: &Client, id: ClientId, request: Request) {
        self.call(client, (id, REQUEST_TIMEOUT), request).await;
    }

    /// Waits until no placement group is degraded. Returns whether this has happened. Meanwhile, the
    /// operator takes lost targets out of use, because the node may notice only now that a drive is
    /// lost.
    async fn redundancy_returns(self: &Rc<Simulation>) -> bool {
        if self.plan.has_lying_drive() {
            return false;
        }
        let needed = self.plan.pools.iter().map(|pool| pool.redundancy.targets()).max().unwrap_or(0);
        let (client, operator, began) = (self.connect("operator").await, self.new_operator(), self.now());
        drop(client.set_rebuild_rate(0).await);
        let (mut shown, mut is_full) = (String::new(), false);
        let mut may_be_unreadable = self.plan.may_slow_targets();
        while self.now() - began < REBUILD {
            if may_be_unreadable && self.now() - began > REBUILD / 2 {
                may_be_unreadable = false;
                self.remove_unreadable().await;
            }
            if let Ok(status) = client.status().await {
                if status
                    .health
                    .iter()
                    .all(|pool| is_single(&status, pool) || pool.degraded + pool.unavailable == 0)
                {
                    client.close().await;
                    self.history.borrow_mut().readable(self.now());
                    return true;
                }
                // A drive is lost, and the pools need all targets.
                if self.plan.targets - self.gone(&status) < needed {
                    break;
                }
                self.give_up_failed(&client, operator, &status).await;
                is_full = status.targets.iter().flat_map(|target| &target.space).any(is_nearly_full);
                shown = format!("{:?}, {:?}, {:?}", status.health, status.rebuild, status.targets);
            }
            sleep(PAUSE).await;
        }
        client.close().await;
        if !is_full && self.now() - began >= REBUILD {
            let text = format!("the redundancy is not restored after {} s: {shown}", REBUILD.as_secs());
            self.violation(Rule::Redundancy, text);
        }
        false
    }

    /// Removes the objects that cannot be read, as an operator does who has no copy of them. A group may
    /// have changed an object without slow targets before a fault damaged the object on another target.
    /// Then the group lacks members until the object is replaced or removed.
    async fn remove_unreadable(self: &Rc<Simulation>) {
        let (client, id) = self.last_client("remover").await;
        let objects = self.history.borrow().objects();
        for object in objects {
            let read = RangeRead::whole(object.clone()).into();
            let outcome = self.call(&client, (id, REQUEST_TIMEOUT), read).await;
            if let Outcome::Refused(RefusedCall { kind: RefusalKind::Damaged, .. }) = outcome {
                self.count("operator: unreadable object removed");
                self.last_call(&client, id, ChangeCall::new(object).op(Mutation::Remove).into()).await;
            }
        }
        client.close().await;
    }

    /// Number of targets that are not used, because a fault has destroyed data of their drives.
    fn gone(&self, status: &NodeStatus) -> usize {
        let is_used = |uuid| {
            let target = status.targets.iter().find(|target| target.uuid == uuid);
            target.is_some_and(|target| target.state == TargetState::Up && !target.out)
        };
        let lossy = (0..self.plan.targets).filter(|&target| self.plan.is_lossy(target));
        lossy.filter(|&target| !is_used(self.node.uuid(target))).count()
    }

    /// Scrubs all pools twice. The second scrub must find nothing, unless a drive is damaged and has too
    /// little space for a repair. Neither may the first one, unless a fault has damaged a drive.
    async fn scrub_everything(self: &Rc<Simulation>) {
        let client = self.connect("operator").await;
        // The loss of too many drives damages no other drive.
        let lossy = if self.plan.loses_too_many() { 0 } else { self.plan.lossy_drives() };
        let is_whole = |pool: &&PlannedPool| {
            let tolerates = pool.redundancy.tolerates();
            tolerates >= lossy && (tolerates > 0 || !self.plan.loses_too_many())
        };
        for pool in self.plan.pools.iter().filter(is_whole) {
            for round in 0..2 {
                let found = self.scrub(&client, &pool.name).await;
                let finds_damage = found.as_ref().is_none_or(|found| {
                    found.damaged + found.inconsistent + found.wrong_size > 0 || found.failure.is_some()
                });
                // A repair needs space.
                let is_unrepaired = found.as_ref().is_some_and(|found| {
                    let others = found.inconsistent + found.wrong_size;
                    found.damaged > found.repaired && others == 0 && found.failure.is_none()
                });
                let may_be_damaged =
                    lossy > 0 && (round == 0 || is_unrepaired && self.is_nearly_full(&client).await);
                if finds_damage && !may_be_damaged {
                    let text = format!("scrub {round} of pool {} finds damage: {found:?}", pool.name);
                    self.violation(Rule::Structure, text);
                }
            }
        }
        client.close().await;
    }

    async fn is_nearly_full(&self, client: &Client) -> bool {
        let status = client.status().await;
        status.is_ok_and(|status| status.targets.iter().flat_map(|target| &target.space).any(is_nearly_full))
    }

    /// Scrubs a pool. Returns `None` if the scrub does not end.
    async fn scrub(&self, client: &Client, pool: &str) -> Option<ScrubStatus> {
        let began = self.now();
        let mut has_started = false;
        while self.now() - began < REBUILD {
            let status = match has_started {
                true => client.scrub_status(pool).await,
                // Another operator's scrub may still be running.
                false => client.start_scrub(pool, true).await,
            };
            match status {
                Ok(status) if has_started && !status.running => return Some(status),
                Ok(_) => has_started = true,
                Err(_) => {}
            }
            sleep(PAUSE).await;
        }
        None
    }

    /// Checks the structure of all targets whose drives are not lost or damaged, in a part of the
    /// simulations. No role may run.
    pub(super) fn check_drives(&self) {
        if !self.plan.seed.is_multiple_of(4) {
            return;
        }
        for target in (0..self.plan.targets).filter(|&target| !self.plan.is_lossy(target)) {
            if self.node.is_lost(target) || self.plan.has_lying_drive() {
                continue;
            }
            match self.node.drive(target).fsck(&osd::inspect_object) {
                Ok(report) if report.is_clean() => {}
                Ok(report) => {
                    let text = format!("target {target} is damaged: {:?}", report.problems);
                    self.violation(Rule::Structure, text);
                }
                Err(e) => self.violation(Rule::Structure, format!("target {target} cannot be checked: {e}")),
            }
        }
    }
}

/// Whether a rebuild may not find enough space.
fn is_nearly_full(space: &Space) -> bool {
    space.free < space.total / 4 || space.index_free < space.index_total / 2
}

/// Whether a pool has no redundancy.
fn is_single(status: &NodeStatus, health: &PoolHealth) -> bool {
    let pool = status.pools.iter().find(|pool| pool.name == health.pool);
    pool.is_some_and(|pool| pool.redundancy == Redundancy::Single)
}
