//! Objects with an exclusive owner. From time to time, a successor takes over while the owner still
//! writes, and perhaps is cut off from the node. Once the successor has fenced the owner, no write of
//! the owner may take effect.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use base::task::spawn_local;
use base::thread::ThreadClass;
use client::engine::OwnerName;
use client::{Client, Options};
use messenger::transport::sim::CutKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;

use super::{FILLER, SHORT_TIMEOUT, Simulation};
use crate::history::Rule;
use crate::identities::SimUser;
use crate::node::HOST;
use crate::plan::PlannedFault;

/// Number of objects. They lie in several placement groups, and so on several shards.
const OBJECTS: u64 = 3;
/// Number of writes of an owner that are in progress at a time, on each object.
const WRITES: u64 = 2;
/// Maximum time for which an owner owns the objects.
const TERM_MAX: Duration = Duration::from_secs(8);
/// Maximum time for which an owner is cut off.
const CUT_MAX: Duration = Duration::from_secs(20);
/// Pause between two checks, and before a request is repeated.
const PAUSE: Duration = Duration::from_millis(300);

/// An exclusive owner of the objects.
struct ObjectOwner {
    client: Client,
    name: OwnerName,
    host: String,
    /// Number of the owner. It is the upper half of each value that the owner writes.
    number: u64,
    written: Cell<u64>,
}

impl Simulation {
    /// Lets owners take over from one another until the time of the fault is over.
    pub(super) async fn change_owners(self: &Rc<Simulation>, planned: &PlannedFault) {
        let mut detail = StdRng::seed_from_u64(planned.detail);
        let until = self.now() + planned.lasts;
        let mut before: Option<Rc<ObjectOwner>> = None;
        for number in 1.. {
            let Some(owner) = self.new_owner(number).await else { return };
            // A node that has lost its newest map ends all sessions.
            let lossy_starts = self.node.lossy_starts();
            let is_sure = || self.node.lossy_starts() == lossy_starts;
            let mut values = None;
            if let Some(before) = before.take() {
                if !self.fence(&owner, &before).await {
                    return;
                }
                self.count("owners: fenced owners");
                values = self.values(&owner).await;
                sleep(detail.random_range(Duration::ZERO..PAUSE * 4)).await;
                let now = self.values(&owner).await;
                let is_other = |(old, new): (&u64, &u64)| *new != 0 && old != new;
                if let (Some(values), Some(now)) = (&values, &now)
                    && values.iter().zip(now).any(is_other)
                {
                    let text =
                        format!("the objects changed from {values:?} to {now:?} before owner {number} wrote");
                    self.violation(Rule::Fence, text);
                }
            }
            let writers: Vec<_> = (0..OBJECTS * WRITES)
                .map(|lane| {
                    spawn_local(ThreadClass::Client, Rc::clone(self).write_as(Rc::clone(&owner), lane))
                })
                .collect();
            let term = self.now() + detail.random_range(PAUSE..TERM_MAX);
            while self.now() < term {
                sleep(PAUSE).await;
                let Some(found) = self.values(&owner).await else { continue };
                // An object may still have the value that it had before the owner's first write, and a
                // drive that an operator has replaced takes its objects with it.
                let is_late = |(object, value): (usize, &u64)| {
                    *value != 0
                        && value >> 32 != number
                        && values.as_ref().is_some_and(|old| old.get(object) != Some(value))
                };
                if let Some((object, value)) = found.iter().enumerate().find(|(o, v)| is_late((*o, v))) {
                    let text = format!(
                        "object {object} has value {value:x} of a fenced owner; the owner is {number}"
                    );
                    self.violation(Rule::Fence, text);
                }
                values = Some(found);
            }
            if writers.iter().all(|writer| writer.is_finished()) && is_sure() && !self.is_over.get() {
                self.violation(Rule::Fence, format!("owner {number} was refused before it was fenced"));
            }
            if self.now() >= until || self.is_over.get() {
                writers.iter().for_each(|writer| writer.abort());
                return;
            }
            if detail.random_bool(0.6) {
                self.network.cut(HOST, &owner.host, CutKind::Silent);
                let (this, host) = (Rc::clone(self), owner.host.clone());
                let lasts = detail.random_range(Duration::ZERO..CUT_MAX);
                drop(spawn_local(ThreadClass::Admin, async move {
                    sleep(lasts).await;
                    this.network.heal(HOST, &host);
                }));
            }
            before = Some(owner);
        }
    }

    /// Connects the owner with this number. Returns `None` if the simulation is over.
    async fn new_owner(&self, number: u64) -> Option<Rc<ObjectOwner>> {
        let host = format!("owner-{number}");
        while !self.is_over.get() {
            let options = Options { request_timeout: SHORT_TIMEOUT, exclusive: true, ..Options::default() };
            let client = self.connect_as(SimUser::Admin, (&host, None), options).await?;
            if let Ok(name) = client.owner() {
                return Some(Rc::new(ObjectOwner { client, name, host, number, written: Cell::new(0) }));
            }
        }
        None
    }

    /// Repeats the fencing of an owner until it has succeeded. Returns false if the simulation is over.
    async fn fence(&self, owner: &ObjectOwner, before: &ObjectOwner) -> bool {
        while !self.is_over.get() {
            match owner.client.fence(&before.name).await {
                Ok(()) => return true,
                Err(e) => self.trace.event(format_args!("owner {} cannot fence yet: {e}", owner.number)),
            }
            if matches!(owner.client.owner(), Err(client::Error::Fenced(_))) {
                return false;
            }
            sleep(PAUSE).await;
        }
        false
    }

    /// Writes one value after the other to an object, until the owner is fenced.
    async fn write_as(self: Rc<Simulation>, owner: Rc<ObjectOwner>, lane: u64) {
        while !self.is_over.get() {
            owner.written.set(owner.written.get() + 1);
            let value = owner.number << 32 | owner.written.get();
            match self.put_owned(&owner.client, lane % OBJECTS, value).await {
                Ok(()) => self.count("owners: writes"),
                Err(client::Error::Fenced(_)) => return self.count("owners: writes of fenced owners"),
                Err(e) if matches!(owner.client.owner(), Err(client::Error::Fenced(_))) => {
                    self.trace.event(format_args!("the last write of owner {} ends: {e}", owner.number));
                    return self.count("owners: writes of fenced owners");
                }
                Err(_) => {}
            }
            sleep(PAUSE / 10).await;
        }
    }

    async fn put_owned(&self, client: &Client, object: u64, value: u64) -> client::Result<()> {
        let pool = client.pool(&self.plan.pools[0].name)?.namespace(FILLER)?;
        pool.object(&format!("owned-{object}"))?.put(value.to_be_bytes().to_vec()).await.map(drop)
    }

    /// Reads all objects; an object that does not exist has the value 0. Returns `None` if one cannot
    /// be read now.
    async fn values(&self, owner: &ObjectOwner) -> Option<Vec<u64>> {
        let pool = owner.client.pool(&self.plan.pools[0].name).ok()?.namespace(FILLER).ok()?;
        let mut values = Vec::new();
        for object in 0..OBJECTS {
            values.push(match pool.object(&format!("owned-{object}")).ok()?.get().await {
                Ok(bytes) => u64::from_be_bytes(bytes.as_ref().try_into().ok()?),
                Err(e) if e.is_not_found() => 0,
                Err(_) => return None,
            });
        }
        Some(values)
    }
}
