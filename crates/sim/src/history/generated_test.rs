//! Tests with generated histories: valid ones, which the check must accept, and histories with one
//! wrong answer or effect, which it must reject.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use client::engine::model::{self, ModelledObject};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use wire::{Condition, Mutated, Mutation, ObjectName, QueryAnswer, QueryOp, StatAnswer};

use super::check::{bulk_rules, static_error};
use super::search::PreparedChange;
use super::*;
use crate::workload::{ClientWorkload, SharedWorkload, WorkloadOptions};

/// An object that works as specified.
#[derive(Debug, Clone, Default)]
struct TrueObject {
    state: Option<ModelledObject<Seen>>,
}

/// A node that works as specified, and the clients that use it.
struct World {
    rng: StdRng,
    history: History,
    objects: BTreeMap<ObjectName, TrueObject>,
    version: u64,
    now: u64,
    workload: SharedWorkload,
    clients: Vec<(ClientId, ClientWorkload)>,
    clients_made: u32,
    unknown_percent: u32,
}

/// An event of the future, at its time.
enum Event {
    Next(usize),
    Effect(Pending),
    End(usize, Pending, Outcome),
}

/// A call in progress.
#[derive(Clone)]
struct Pending {
    call: CallId,
    client: usize,
    request: Request,
    fate: Fate,
    /// Time between the effect and the end.
    rest: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    /// The client does not learn the outcome.
    Unknown,
}

fn time(at: u64) -> Duration {
    Duration::from_micros(at)
}

fn failed() -> Outcome {
    refused(RefusalKind::Failed)
}

fn refused(kind: RefusalKind) -> Outcome {
    Outcome::Refused(RefusedCall { kind, text: format!("{kind:?}") })
}

impl World {
    fn new(seed: u64, clients: usize, objects: (u32, u32), unknown_percent: u32) -> World {
        let mut history = History::new();
        history.add_pool("p", seed.is_multiple_of(2));
        let options = WorkloadOptions {
            hot: objects.0,
            cold: objects.1,
            ..WorkloadOptions::new(vec!["p".parse().unwrap()])
        };
        let workload = SharedWorkload::new(options);
        let mut world = World {
            rng: StdRng::seed_from_u64(seed),
            history,
            objects: BTreeMap::new(),
            version: 0,
            now: 0,
            workload,
            clients: Vec::new(),
            clients_made: 0,
            unknown_percent,
        };
        for _ in 0..clients {
            let client = world.new_client();
            world.clients.push(client);
        }
        world
    }

    fn new_client(&mut self) -> (ClientId, ClientWorkload) {
        self.clients_made += 1;
        (ClientId(self.clients_made), self.workload.client(self.clients_made))
    }

    fn state(&self, object: &ObjectName) -> Option<&ModelledObject<Seen>> {
        self.objects.get(object).and_then(|object| object.state.as_ref())
    }

    /// Executes a request as the node does.
    fn execute(&mut self, request: &Request) -> Outcome {
        match request {
            Request::Change(change) => {
                if let Some(kind) = static_error(change) {
                    return refused(kind);
                }
                let rules = bulk_rules(change, self.history.pools["p"].redundant);
                let rule = rules[self.rng.random_range(0..rules.len())];
                let object = self.objects.entry(change.object.clone()).or_default();
                match PreparedChange::new(change, rules).apply_under(rule, &object.state) {
                    Err(kind) => refused(kind),
                    Ok(effect) => {
                        self.version += self.rng.random_range(1..4);
                        let (size, appended_at) = (effect.size(), effect.appended_at);
                        object.state = effect.object;
                        if let Some(state) = &mut object.state {
                            state.version = self.version;
                        }
                        Outcome::Changed(Mutated { version: self.version, size, appended_at })
                    }
                }
            }
            Request::Read(read) => match self.state(&read.object) {
                None => refused(RefusalKind::NoSuchObject),
                Some(state) => match read.if_version.filter(|wanted| *wanted != state.version) {
                    Some(wanted) => refused(RefusalKind::Changed { wanted, found: state.version }),
                    None => Outcome::Read(ReadAnswer {
                        version: Some(state.version),
                        object_size: Some(state.size()),
                        data: state.data.read(read.offset, read.len),
                    }),
                },
            },
            Request::Query(query) => {
                let state = self.state(&query.object);
                if let Err(e) = model::check_conditions(&query.object, state, &query.conditions) {
                    return refused(RefusalKind::of(&e));
                }
                match state {
                    None => refused(RefusalKind::NoSuchObject),
                    Some(state) => Outcome::Queried(
                        query.ops.iter().map(|op| model::answer(state, op).unwrap()).collect(),
                    ),
                }
            }
            Request::List(list) => {
                let exists =
                    |(name, object): &(&ObjectName, &TrueObject)| object.state.is_some() && list.covers(name);
                let listed = self.objects.iter().filter(exists);
                let pair = |name: &ObjectName| (name.namespace().to_owned(), name.object().to_owned());
                Outcome::Listed(listed.map(|(name, _)| pair(name)).collect())
            }
            Request::Admin(_) => Outcome::Done,
        }
    }

    /// Runs `calls` random concurrent calls.
    fn run(&mut self, calls: usize) {
        let mut events: BTreeMap<(u64, u64), Event> = BTreeMap::new();
        let mut number = 0;
        let mut left = calls;
        let mut add = |events: &mut BTreeMap<(u64, u64), Event>, at: u64, event: Event| {
            number += 1;
            events.insert((at, number), event);
        };
        for client in 0..self.clients.len() {
            add(&mut events, self.now + 1, Event::Next(client));
        }
        while let Some(((at, _), event)) = events.pop_first() {
            self.now = at;
            match event {
                Event::Next(_) if left == 0 => {}
                Event::Next(client) => {
                    left -= 1;
                    let (history, rng) = (&mut self.history, &mut self.rng);
                    let request = self.clients[client].1.next(rng, |len| history.new_fill(len));
                    let id = self.clients[client].0;
                    let call = history.start(id, time(at), None, request.clone());
                    let (before, rest) = (rng.random_range(1..1000), rng.random_range(1..1000));
                    let roll = rng.random_range(0..100);
                    let pending = Pending { call, client, request, fate: Fate::Answered, rest };
                    if roll < self.unknown_percent {
                        let pending = Pending { fate: Fate::Unknown, ..pending };
                        // The change takes effect before or after its end, or never.
                        match rng.random_range(0..3) {
                            0 => add(
                                &mut events,
                                at + rng.random_range(1..1000),
                                Event::Effect(pending.clone()),
                            ),
                            1 => add(
                                &mut events,
                                at + rng.random_range(1..20_000),
                                Event::Effect(pending.clone()),
                            ),
                            _ => {}
                        }
                        add(
                            &mut events,
                            at + 1000,
                            Event::End(client, pending, Outcome::Unknown("lost".into())),
                        );
                    } else if roll < self.unknown_percent + 3 {
                        add(&mut events, at + before + rest, Event::End(client, pending, failed()));
                    } else {
                        add(&mut events, at + before, Event::Effect(pending));
                    }
                }
                Event::Effect(pending) => {
                    let is_change = matches!(pending.request, Request::Change(_));
                    if pending.fate == Fate::Answered || is_change {
                        let outcome = self.execute(&pending.request);
                        if pending.fate == Fate::Answered {
                            let end = at + pending.rest;
                            add(&mut events, end, Event::End(pending.client, pending, outcome));
                        }
                    }
                }
                Event::End(client, pending, outcome) => {
                    let is_change = matches!(pending.request, Request::Change(_));
                    let is_unknown = pending.fate == Fate::Unknown;
                    if is_unknown && self.rng.random_range(0..4) == 0 {
                        self.history.kill(self.clients[client].0, time(at));
                        self.clients[client] = self.new_client();
                    } else {
                        let outcome = if is_unknown && !is_change { failed() } else { outcome };
                        self.clients[client].1.learn(&pending.request, &outcome);
                        self.history.end(pending.call, time(at), outcome);
                    }
                    add(&mut events, at + self.rng.random_range(1..300), Event::Next(client));
                }
            }
        }
    }

    /// Records a call with a given outcome, while no other call is in progress.
    fn record(&mut self, request: impl Into<Request>, outcome: Outcome) -> CallId {
        self.now += 10;
        let call = self.history.start(ClientId(0), time(self.now), None, request);
        self.now += 10;
        self.history.end(call, time(self.now), outcome);
        call
    }

    /// Executes and records a call.
    fn call(&mut self, request: impl Into<Request>) -> Outcome {
        let request = request.into();
        let outcome = self.execute(&request);
        self.record(request, outcome.clone());
        outcome
    }

    fn change(&mut self, change: ChangeCall) -> Mutated {
        match self.call(change) {
            Outcome::Changed(mutated) => mutated,
            other => panic!("the change was refused: {other:?}"),
        }
    }

    /// Reads everything.
    fn read_all(&mut self) {
        for object in self.history.objects() {
            self.call(describe(&object));
            self.call(RangeRead::whole(object));
        }
        self.call(list());
    }

    fn fill(&mut self) -> Fill {
        let len = self.rng.random_range(8..20_000);
        self.history.new_fill(len)
    }

    /// Returns the answer to a read of a whole object.
    fn answer(&self, object: &ObjectName) -> ReadAnswer {
        let state = self.state(object).expect("the object exists");
        ReadAnswer { version: Some(state.version), object_size: Some(state.size()), data: state.data.clone() }
    }
}

fn list() -> ListCall {
    ListCall { pool: "p".into(), namespace: None, prefix: String::new(), is_ordered: false }
}

fn describe(object: &ObjectName) -> QueryCall {
    let omap = QueryOp::OmapRange { from: Bytes::new(), to: None, limit: 1000 };
    QueryCall { object: object.clone(), conditions: vec![], ops: vec![QueryOp::Stat, QueryOp::Xattrs, omap] }
}

fn show(violations: &[Violation]) -> String {
    violations.iter().map(|violation| format!("{violation}\n")).collect()
}

#[test]
fn valid_histories_are_accepted() {
    let mut unknown = 0;
    for seed in 0..600 {
        let mut world = World::new(seed, 2 + (seed % 7) as usize, (2, 4), (seed % 4) as u32 * 8);
        world.run(150);
        world.read_all();
        let is_unknown = |call: &&RecordedCall| matches!(call.end, None | Some((_, Outcome::Unknown(_))));
        unknown += world.history.calls.iter().filter(is_unknown).count();
        let violations = world.history.check(&CheckOptions::default());
        assert!(violations.is_empty(), "seed {seed}: {}", show(&violations));
    }
    assert!(unknown > 2000, "only {unknown} calls have an unknown outcome");
}

/// A single wrong answer or effect.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The effect of an acknowledged change is lost.
    LostChange,
    /// The effect of an acknowledged change is lost, but its version is not.
    LostData,
    /// An acknowledged append takes effect twice.
    DoubleAppend,
    /// An append of unknown outcome takes effect twice.
    DoubleUnknownAppend,
    /// A read returns an old version.
    StaleRead,
    /// A read returns old data, and no version.
    StaleBytes,
    /// A change of unknown outcome is read, and vanishes later.
    VanishedRead,
    /// A read returns data of a fill that was never written.
    PhantomFill,
    /// A read returns data that no fill contains.
    DamagedByte,
    /// A read returns data of another object.
    MisdirectedRead,
    /// A read returns a part of the old and a part of the new data.
    TornRead,
    /// A read ends too early.
    ShortRead,
    /// A hole does not read as zeros.
    DirtyHole,
    /// A later change has a lower version.
    ReorderedVersions,
    /// Two changes have the same version.
    SameVersion,
    /// A version is used again after a removal.
    ReusedVersion,
    /// The answer to a change contains a wrong size.
    WrongSize,
    /// The answer to an append contains a wrong offset.
    WrongAppendedAt,
    /// A listing omits an object.
    ListingOmission,
    /// A listing contains a name that no call has created.
    ListingPhantom,
    /// A listing contains a removed object.
    ListingRemoved,
    /// A listing contains a name twice.
    ListingTwice,
    /// A listing contains a name of another namespace.
    ListingForeign,
    /// A removed object exists again.
    Resurrected,
    /// `Create` fails with `Exists` although the object does not exist.
    FalseExists,
    /// A read fails with `NoSuchObject` although the object exists.
    FalseMissing,
    /// A change is executed although a condition does not hold.
    IgnoredCondition,
    /// `ConditionFailed` contains a wrong index.
    WrongCondition,
    /// A change that failed has an effect.
    EffectOfRefused,
    /// A part of a compound takes effect.
    PartialCompound,
    /// A query omits an omap entry.
    MissingOmapEntry,
    /// A query returns an old xattr.
    StaleXattr,
    /// `put` removes the xattrs.
    LostXattrs,
    /// A query returns a wrong size.
    WrongStat,
    /// A change of a killed client takes effect long after all timeouts.
    TooLate,
    /// A read is refused because the object changed, but it did not.
    FalseChanged,
    /// An error has the wrong kind.
    WrongError,
    /// A read of damaged data fails, although redundancy protects the data.
    LostRedundantData,
}

const FAULTS: &[Fault] = &[
    Fault::LostChange,
    Fault::LostData,
    Fault::DoubleAppend,
    Fault::DoubleUnknownAppend,
    Fault::StaleRead,
    Fault::StaleBytes,
    Fault::VanishedRead,
    Fault::PhantomFill,
    Fault::DamagedByte,
    Fault::MisdirectedRead,
    Fault::TornRead,
    Fault::ShortRead,
    Fault::DirtyHole,
    Fault::ReorderedVersions,
    Fault::SameVersion,
    Fault::ReusedVersion,
    Fault::WrongSize,
    Fault::WrongAppendedAt,
    Fault::ListingOmission,
    Fault::ListingPhantom,
    Fault::ListingRemoved,
    Fault::ListingTwice,
    Fault::ListingForeign,
    Fault::Resurrected,
    Fault::FalseExists,
    Fault::FalseMissing,
    Fault::IgnoredCondition,
    Fault::WrongCondition,
    Fault::EffectOfRefused,
    Fault::PartialCompound,
    Fault::MissingOmapEntry,
    Fault::StaleXattr,
    Fault::LostXattrs,
    Fault::WrongStat,
    Fault::TooLate,
    Fault::FalseChanged,
    Fault::WrongError,
    Fault::LostRedundantData,
];

impl World {
    /// Returns a hot object, which has data and perhaps changes of unknown outcome.
    fn used_object(&mut self) -> ObjectName {
        let object: ObjectName = "p/hot-0".parse().unwrap();
        let fill = self.fill();
        self.change(ChangeCall::new(object.clone()).write_full(fill));
        object
    }

    /// Returns an object without changes of unknown outcome.
    fn fresh_object(&mut self) -> ObjectName {
        let object: ObjectName = format!("p/fresh-{}", self.now).parse().unwrap();
        for _ in 0..self.rng.random_range(1..5) {
            let (fill, at) = (self.fill(), self.rng.random_range(0..50_000));
            let value = Bytes::from(format!("v{}", fill.id));
            let change = ChangeCall::new(object.clone()).write(at, fill);
            self.change(change.op(Mutation::SetXattr("x".into(), value.clone())));
            self.change(ChangeCall::new(object.clone()).op(Mutation::OmapSet(vec![(value.clone(), value)])));
        }
        object
    }

    /// Records a change of unknown outcome, and executes it `times` times.
    fn unknown(&mut self, change: ChangeCall, times: usize) {
        let request = Request::from(change);
        for _ in 0..times {
            self.execute(&request);
        }
        self.record(request, Outcome::Unknown("lost".into()));
    }

    /// Makes the node or an answer wrong once.
    fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::LostChange | Fault::LostData => {
                let object = self.used_object();
                let before = self.objects[&object].clone();
                let (fill, at) = (self.fill(), self.rng.random_range(0..30_000));
                let change = ChangeCall::new(object.clone());
                let change = if at < 15_000 { change.write(at, fill) } else { change.append(fill) };
                let mutated = self.change(change);
                self.objects.insert(object.clone(), before);
                if matches!(fault, Fault::LostData) {
                    let state = self.objects.get_mut(&object).unwrap().state.as_mut().unwrap();
                    state.version = mutated.version;
                }
            }
            Fault::DoubleAppend => {
                let object = self.used_object();
                let change = ChangeCall::new(object).append(self.fill());
                self.change(change.clone());
                self.execute(&change.into());
            }
            Fault::DoubleUnknownAppend => {
                let object = self.used_object();
                let change = ChangeCall::new(object).append(self.fill());
                self.unknown(change, 2);
            }
            Fault::StaleRead => {
                let object = self.used_object();
                let old = self.answer(&object);
                let change = ChangeCall::new(object.clone()).append(self.fill());
                self.change(change);
                self.record(RangeRead::whole(object), Outcome::Read(old));
            }
            Fault::StaleBytes => {
                let object = self.fresh_object();
                let old = ReadAnswer { version: None, object_size: None, ..self.answer(&object) };
                let change = ChangeCall::new(object.clone()).append(self.fill());
                self.change(change);
                self.record(RangeRead::whole(object), Outcome::Read(old));
            }
            Fault::VanishedRead => {
                let object = self.used_object();
                let before = self.objects[&object].clone();
                let change = ChangeCall::new(object.clone()).append(self.fill());
                self.unknown(change, 1);
                self.call(RangeRead::whole(object.clone()));
                self.objects.insert(object, before);
            }
            Fault::PhantomFill | Fault::DamagedByte | Fault::MisdirectedRead | Fault::ShortRead => {
                let object = self.used_object();
                let other = self.fresh_object();
                let (right, foreign) = (self.answer(&object), self.answer(&other));
                let at = self.rng.random_range(0..=right.data.len() - 8);
                let mut data = right.data.read(0, at);
                match fault {
                    Fault::PhantomFill => data.push(8, DataOrigin::Fill { id: 1 << 30, at }),
                    Fault::MisdirectedRead => {
                        let (_, piece) = foreign.data.runs().last().unwrap().clone();
                        data.push(8, piece);
                    }
                    Fault::DamagedByte => {
                        let bytes = bytes_of_seen(&right.data.read(at, 1));
                        data.push(1, DataOrigin::Raw(Bytes::from(vec![bytes[0] ^ 0x10])));
                    }
                    _ => {}
                }
                if !matches!(fault, Fault::ShortRead) {
                    let len = data.len().min(right.data.len());
                    right.data.copy_range(len..right.data.len(), &mut data);
                }
                self.record(RangeRead::whole(object), Outcome::Read(ReadAnswer { data, ..right }));
            }
            Fault::TornRead => {
                let object = self.used_object();
                let old = self.answer(&object).data;
                let len = self.rng.random_range(16..10_000);
                let new = self.history.new_fill(len);
                self.change(ChangeCall::new(object.clone()).write_full(new));
                let right = self.answer(&object);
                let mut data = right.data.read(0, self.rng.random_range(0..len));
                let from = data.len().min(old.len());
                old.copy_range(from..old.len(), &mut data);
                if data.len() < len {
                    data.push(len - data.len(), DataOrigin::Zeros);
                }
                let data = data.read(0, len);
                self.record(RangeRead::whole(object), Outcome::Read(ReadAnswer { data, ..right }));
            }
            Fault::DirtyHole => {
                let object = self.fresh_object();
                let size = self.answer(&object).data.len();
                let change = ChangeCall::new(object.clone()).write(size + 5000, self.fill());
                self.change(change);
                let right = self.answer(&object);
                let mut data = right.data.read(0, size + 100);
                data.push(16, DataOrigin::Fill { id: 1, at: 0 });
                right.data.copy_range(size + 116..right.data.len(), &mut data);
                self.record(RangeRead::whole(object), Outcome::Read(ReadAnswer { data, ..right }));
            }
            Fault::ReorderedVersions | Fault::SameVersion => {
                let object = self.used_object();
                let change = ChangeCall::new(object).append(self.fill());
                let mut mutated = self.change(change.clone());
                let again = change.append(self.history.new_fill(10));
                let Outcome::Changed(second) = self.execute(&again.clone().into()) else { panic!() };
                mutated.version -= u64::from(matches!(fault, Fault::ReorderedVersions));
                self.record(again, Outcome::Changed(Mutated { version: mutated.version, ..second }));
            }
            Fault::ReusedVersion => {
                let object = self.used_object();
                let removed = self.change(ChangeCall::new(object.clone()).op(Mutation::Remove));
                let change = ChangeCall::new(object.clone()).append(self.fill());
                let Outcome::Changed(mutated) = self.execute(&change.clone().into()) else { panic!() };
                let version = self.rng.random_range(1..=removed.version);
                self.record(change, Outcome::Changed(Mutated { version, ..mutated }));
            }
            Fault::WrongSize | Fault::WrongAppendedAt => {
                let object = self.fresh_object();
                let change = ChangeCall::new(object).append(self.fill());
                let Outcome::Changed(mut mutated) = self.execute(&change.clone().into()) else { panic!() };
                match fault {
                    Fault::WrongSize => mutated.size += 1,
                    _ => mutated.appended_at -= 1,
                }
                self.record(change, Outcome::Changed(mutated));
            }
            Fault::ListingOmission | Fault::ListingTwice => {
                let object = self.fresh_object();
                let Outcome::Listed(mut names) = self.execute(&list().into()) else { panic!() };
                let at = names.iter().position(|(_, name)| name == object.object()).unwrap();
                match fault {
                    Fault::ListingTwice => names.push(names[at].clone()),
                    _ => drop(names.remove(at)),
                }
                self.record(list(), Outcome::Listed(names));
            }
            Fault::ListingPhantom | Fault::ListingForeign => {
                let Outcome::Listed(mut names) = self.execute(&list().into()) else { panic!() };
                let mut list = list();
                if matches!(fault, Fault::ListingForeign) {
                    self.fresh_object();
                    list.namespace = Some("ns".into());
                    names.retain(|(namespace, _)| namespace == "ns");
                    let object = format!("fresh-{}", self.now);
                    names.push((String::new(), object));
                } else {
                    names.push(("ns".into(), "never".into()));
                }
                self.record(list, Outcome::Listed(names));
            }
            Fault::ListingRemoved => {
                let object = self.fresh_object();
                let Outcome::Listed(names) = self.execute(&list().into()) else { panic!() };
                self.change(ChangeCall::new(object).op(Mutation::Remove));
                self.record(list(), Outcome::Listed(names));
            }
            Fault::Resurrected => {
                let object = self.used_object();
                let before = self.objects[&object].clone();
                self.change(ChangeCall::new(object.clone()).op(Mutation::Remove));
                self.objects.insert(object, before);
            }
            Fault::FalseExists => {
                let object: ObjectName = format!("p/never-{}", self.now).parse().unwrap();
                self.record(ChangeCall::new(object).op(Mutation::Create), refused(RefusalKind::Exists));
            }
            Fault::FalseMissing => {
                let object = self.fresh_object();
                self.record(RangeRead::whole(object), refused(RefusalKind::NoSuchObject));
            }
            Fault::IgnoredCondition => {
                let object = self.fresh_object();
                let change = ChangeCall::new(object).append(self.fill());
                let Outcome::Changed(mutated) = self.execute(&change.clone().into()) else { panic!() };
                let condition = match self.rng.random_range(0..4) {
                    0 => Condition::Absent,
                    1 => Condition::Version(mutated.version),
                    2 => Condition::Xattr("x".into(), None),
                    _ => Condition::Bytes(0, Bytes::from(vec![0x5A; 9])),
                };
                self.record(change.when(Condition::Exists).when(condition), Outcome::Changed(mutated));
            }
            Fault::WrongCondition => {
                let object = self.fresh_object();
                let change = ChangeCall::new(object.clone()).append(self.fill());
                let change = change.when(Condition::Exists).when(Condition::Absent).when(Condition::Exists);
                let index = [0, 2][self.rng.random_range(0..2)];
                self.record(change, refused(RefusalKind::ConditionFailed(index)));
            }
            Fault::EffectOfRefused => {
                let object = self.used_object();
                let change = ChangeCall::new(object).append(self.fill());
                self.execute(&change.clone().into());
                self.record(change, failed());
            }
            Fault::PartialCompound => {
                let object = self.used_object();
                let (first, second) = (self.fill(), self.fill());
                let outcome = self.execute(&ChangeCall::new(object.clone()).append(first).into());
                let whole = ChangeCall::new(object).append(first).append(second);
                match self.rng.random_range(0..2) {
                    0 => self.record(whole, outcome),
                    _ => self.record(whole, Outcome::Unknown("lost".into())),
                };
            }
            Fault::MissingOmapEntry | Fault::WrongStat => {
                let object = self.fresh_object();
                let Outcome::Queried(mut answers) = self.execute(&describe(&object).into()) else { panic!() };
                match &mut answers[if matches!(fault, Fault::WrongStat) { 0 } else { 2 }] {
                    QueryAnswer::Stat(StatAnswer { size, .. }) => *size += 1,
                    QueryAnswer::Omap { entries, .. } => drop(entries.pop().unwrap()),
                    other => panic!("{other:?}"),
                }
                self.record(describe(&object), Outcome::Queried(answers));
            }
            Fault::StaleXattr => {
                let object = self.fresh_object();
                let query = QueryCall { ops: vec![QueryOp::Xattr("x".into())], ..describe(&object) };
                let old = self.execute(&query.clone().into());
                self.change(ChangeCall::new(object).op(Mutation::SetXattr("x".into(), "new".into())));
                self.record(query, old);
            }
            Fault::LostXattrs => {
                let object = self.fresh_object();
                let change = ChangeCall::new(object.clone()).write_full(self.fill());
                self.change(change);
                self.objects.get_mut(&object).unwrap().state.as_mut().unwrap().xattrs.clear();
            }
            Fault::TooLate => {
                let object = self.used_object();
                let change = ChangeCall::new(object.clone()).append(self.fill());
                let start = time(self.now);
                self.history.start(ClientId(1_000_000), start, Some(start), change.clone());
                self.history.kill(ClientId(1_000_000), start);
                self.history.healed(start);
                self.now += 3_600_000_000;
                self.call(RangeRead::whole(object));
                self.execute(&change.into());
            }
            Fault::FalseChanged => {
                let object = self.fresh_object();
                let found = self.answer(&object).version.unwrap();
                let (read, wanted) = match self.rng.random_range(0..3) {
                    // Too short to be interrupted by a change.
                    0 => (RangeRead { len: 4096, ..RangeRead::whole(object) }, found - 1),
                    // Long, but nothing changed.
                    1 => (RangeRead::whole(object), found - 1),
                    _ => (RangeRead { if_version: Some(found), ..RangeRead::whole(object) }, found),
                };
                let found = if read.if_version.is_some() { found + 1 } else { found };
                self.record(read, refused(RefusalKind::Changed { wanted, found }));
            }
            Fault::WrongError => {
                let object: ObjectName = format!("p/never-{}", self.now).parse().unwrap();
                let kind = [
                    RefusalKind::BadRequest,
                    RefusalKind::Limit,
                    RefusalKind::NoSpace,
                    RefusalKind::NoSuchPool,
                ][self.rng.random_range(0..4)];
                self.record(ChangeCall::new(object).op(Mutation::Remove), refused(kind));
            }
            Fault::LostRedundantData => {
                let object = self.used_object();
                self.record(RangeRead::whole(object), refused(RefusalKind::Damaged));
            }
        }
    }
}

fn bytes_of_seen(seen: &Seen) -> Vec<u8> {
    let piece = |(len, piece): &(u64, DataOrigin)| match piece {
        DataOrigin::Zeros => vec![0; *len as usize],
        DataOrigin::Fill { id, at } => fill::bytes_of(*id, *at..at + len).to_vec(),
        DataOrigin::Raw(bytes) => bytes.to_vec(),
    };
    seen.runs().iter().flat_map(piece).collect()
}

#[test]
fn each_fault_is_detected() {
    for (index, fault) in FAULTS.iter().enumerate() {
        let mut gave_up = 0;
        for seed in 0..200 {
            let seed = seed + 1000 * index as u64;
            let make = |is_faulty: bool| {
                let mut world = World::new(seed, 4, (2, 3), 10);
                world.run(60);
                if is_faulty {
                    world.inject(*fault);
                }
                world.read_all();
                if seed.is_multiple_of(2) && !matches!(fault, Fault::TooLate) {
                    world.run(40);
                    world.read_all();
                }
                world.history.check(&CheckOptions::default())
            };
            let violations = make(true);
            assert!(!violations.is_empty(), "{fault:?} is not detected in seed {seed}");
            gave_up += usize::from(violations.iter().any(|violation| violation.rule == Rule::SearchEnds));
            if seed.is_multiple_of(20) {
                assert!(make(false).is_empty(), "without the fault, seed {seed} is valid");
            }
        }
        assert_eq!(gave_up, 0, "{fault:?}: some searches took too many steps");
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the test shows the time of the check")]
fn the_check_of_two_thousand_calls_is_fast() {
    let mut world = World::new(1, 8, (4, 36), 10);
    world.run(2000);
    world.read_all();
    let mut times = Vec::new();
    let mut violations = Vec::new();
    for _ in 0..5 {
        let start = std::time::Instant::now();
        violations = world.history.check(&CheckOptions::default());
        times.push(start.elapsed());
    }
    println!("{} calls on 40 objects: {:?}", world.history.len(), times.iter().min().unwrap());
    assert!(violations.is_empty(), "{}", show(&violations));
}

#[test]
fn many_unknown_changes_of_one_object_are_explained() {
    for seed in 0..10 {
        let mut world = World::new(seed, 8, (1, 0), 10);
        world.run(300);
        world.read_all();
        let violations = world.history.check(&CheckOptions::default());
        assert!(violations.is_empty(), "seed {seed}: {}", show(&violations));
    }
}
