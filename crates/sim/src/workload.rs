//! Random requests of clients.
//!
//! A [`SharedWorkload`] describes the objects that the clients share, and a [`ClientWorkload`] chooses the
//! next request of one client. The choice depends only on the generator of random numbers and on
//! what the client has learnt from earlier answers. The caller executes the requests.

use std::collections::BTreeMap;

use bytes::Bytes;
use rand::Rng;
use wire::{Condition, Mutation, ObjectName, PoolName, QueryAnswer, QueryOp};

use crate::history::{ChangeCall, Fill, ListCall, Outcome, QueryCall, RangeRead, Request};

/// Prefix of the names of hot objects.
const HOT: &str = "hot-";
/// Prefix of the names of cold objects.
const COLD: &str = "cold/";
/// Maximum end of a range that a request changes, in bytes.
const END_MAX: u64 = 12 << 20;
/// Maximum size of the data of an op that is not the largest of its request, in bytes.
const EMBEDDED_MAX: u64 = 16 << 10;

/// Parameters of a workload. A weight is the relative frequency of a choice.
#[derive(Debug, Clone)]
pub struct WorkloadOptions {
    /// Pools of the objects.
    pub pools: Vec<PoolName>,
    /// Number of objects per pool that all clients use often.
    pub hot: u32,
    /// Number of objects per pool that clients use rarely.
    pub cold: u32,
    /// Share of the requests on hot objects, in percent.
    pub hot_percent: u32,
    /// Weight of changes.
    pub changes: u32,
    /// Weight of reads.
    pub reads: u32,
    /// Weight of queries.
    pub queries: u32,
    /// Weight of listings.
    pub listings: u32,
    /// Whether listings are in the order of names.
    pub lists_in_order: bool,
    /// Maximum size of the data of one write, in bytes.
    pub write_max: u64,
    /// Whether the calls of all clients meet on few objects ([`WorkloadOptions::hot`]).
    pub has_bursts: bool,
}

impl WorkloadOptions {
    /// Returns parameters for a general test.
    #[must_use]
    pub fn new(pools: Vec<PoolName>) -> WorkloadOptions {
        WorkloadOptions {
            pools,
            hot: 4,
            cold: 36,
            hot_percent: 50,
            changes: 55,
            reads: 30,
            queries: 13,
            listings: 2,
            lists_in_order: false,
            write_max: 9 << 20,
            has_bursts: false,
        }
    }

    /// Returns parameters for clients whose calls meet on few objects. Changes depend on earlier
    /// changes: many have conditions or append, and omap entries change from one value to the next.
    #[must_use]
    pub fn hot(pools: Vec<PoolName>) -> WorkloadOptions {
        let (hot, cold, hot_percent, listings) = (2, 4, 95, 1);
        WorkloadOptions { hot, cold, hot_percent, listings, has_bursts: true, ..WorkloadOptions::new(pools) }
    }
}

/// The objects and request types of a workload.
#[derive(Debug, Clone)]
pub struct SharedWorkload {
    options: WorkloadOptions,
}

/// What a client knows about an object.
#[derive(Debug, Clone, Default)]
struct LastSeen {
    version: u64,
    size: u64,
    /// Omap entries; `None` for an entry that does not exist.
    omap: BTreeMap<Bytes, Option<Bytes>>,
}

/// Chooses the requests of one client.
#[derive(Debug, Clone)]
pub struct ClientWorkload {
    workload: SharedWorkload,
    /// Number of the client, for unique values.
    client: u32,
    /// Number of values chosen so far.
    values: u64,
    known: BTreeMap<ObjectName, LastSeen>,
}

impl SharedWorkload {
    /// Creates a workload.
    ///
    /// # Panics
    /// If there is no pool, no object, or no request type.
    #[must_use]
    pub fn new(options: WorkloadOptions) -> SharedWorkload {
        assert!(!options.pools.is_empty() && options.hot + options.cold > 0, "there are no objects");
        let weights = options.changes + options.reads + options.queries + options.listings;
        assert!(weights > 0, "there are no requests");
        SharedWorkload { options }
    }

    /// Returns the workload of a client. Each client has its own number.
    #[must_use]
    pub fn client(&self, client: u32) -> ClientWorkload {
        ClientWorkload { workload: self.clone(), client, values: 0, known: BTreeMap::new() }
    }

    /// Returns the name of a hot or cold object. Some objects are in a namespace.
    fn name(&self, rng: &mut impl Rng) -> ObjectName {
        let WorkloadOptions { pools, hot, cold, hot_percent, .. } = &self.options;
        let pool = pools[rng.random_range(0..pools.len())].clone();
        let is_hot = *cold == 0 || (*hot > 0 && rng.random_range(0..100) < *hot_percent);
        let number = rng.random_range(0..if is_hot { *hot } else { *cold });
        let namespace = if number % 4 == 3 { "ns" } else { "" };
        let prefix = if is_hot { HOT } else { COLD };
        ObjectName::new(pool, namespace, format!("{prefix}{number}")).expect("the name is valid")
    }
}

/// Returns the size of one write: mostly small, sometimes large enough for bulk transfer or
/// staging, often not aligned.
fn write_size(rng: &mut impl Rng, max: u64) -> u64 {
    let size: u64 = match rng.random_range(0..100) {
        0..5 => 0,
        5..40 => rng.random_range(1..=4096),
        40..55 => 4096 * rng.random_range(1..=16),
        55..80 => rng.random_range(4096..=64 << 10),
        80..92 => rng.random_range(64 << 10..=1 << 20),
        92..97 => rng.random_range(2 << 20..=4 << 20),
        _ => rng.random_range(4 << 20..=9 << 20),
    };
    size.min(max)
}

/// Returns an offset near the data of an object.
fn offset(rng: &mut impl Rng, size: u64) -> u64 {
    let end = size + size / 2 + 8192;
    match rng.random_range(0..4) {
        0 => 0,
        1 => size.min(END_MAX),
        2 => 4096 * (rng.random_range(0..=end.min(END_MAX)) / 4096),
        _ => rng.random_range(0..=end.min(END_MAX)),
    }
}

impl ClientWorkload {
    /// Chooses the next request. `new_fill` returns data of a size that no other call writes.
    pub fn next<R: Rng>(&mut self, rng: &mut R, mut new_fill: impl FnMut(u64) -> Fill) -> Request {
        let WorkloadOptions { changes, reads, queries, listings, .. } = self.workload.options;
        let choice = rng.random_range(0..changes + reads + queries + listings);
        let object = self.workload.name(rng);
        if choice < changes {
            self.change(rng, object, &mut new_fill).into()
        } else if choice < changes + reads {
            self.read(rng, object).into()
        } else if choice < changes + reads + queries {
            self.query(rng, object).into()
        } else {
            let namespace = match rng.random_range(0..4) {
                0 => Some("ns".to_owned()),
                1 => Some(String::new()),
                _ => None,
            };
            let prefix = ["", HOT, COLD, "cold/1"][rng.random_range(0..4)].to_owned();
            let is_ordered = self.workload.options.lists_in_order;
            ListCall { pool: object.pool().to_owned(), namespace, prefix, is_ordered }.into()
        }
    }

    /// Learns the version, the size and the omap of an object from an answer.
    pub fn learn(&mut self, request: &Request, outcome: &Outcome) {
        let Some(object) = request.object() else { return };
        let known = self.known.entry(object.clone()).or_default();
        match (request, outcome) {
            (Request::Change(change), Outcome::Changed(mutated)) => {
                (known.version, known.size) = (mutated.version, mutated.size);
                for op in change.to_request().ops {
                    match op {
                        Mutation::OmapSet(entries) => {
                            known.omap.extend(entries.into_iter().map(|(key, value)| (key, Some(value))));
                        }
                        Mutation::OmapRemove(keys) => {
                            known.omap.extend(keys.into_iter().map(|key| (key, None)));
                        }
                        Mutation::OmapRemoveRange(..) | Mutation::OmapClear | Mutation::Remove => {
                            known.omap.clear();
                        }
                        _ => {}
                    }
                }
            }
            (_, Outcome::Read(answer)) => {
                if let (Some(version), Some(size)) = (answer.version, answer.object_size) {
                    (known.version, known.size) = (version, size);
                }
            }
            (Request::Query(query), Outcome::Queried(answers)) => {
                for (op, answer) in query.ops.iter().zip(answers) {
                    match (op, answer) {
                        (_, QueryAnswer::Stat(stat)) => {
                            (known.version, known.size) = (stat.version, stat.size);
                        }
                        (QueryOp::OmapGet(keys), QueryAnswer::Omap { entries, .. }) => {
                            known.omap.extend(keys.iter().map(|key| (key.clone(), None)));
                            let found = entries.iter().cloned();
                            known.omap.extend(found.map(|(key, value)| (key, Some(value))));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }

    fn known(&self, object: &ObjectName) -> LastSeen {
        self.known.get(object).cloned().unwrap_or_default()
    }

    /// Returns a value that no other call writes.
    fn value(&mut self, rng: &mut impl Rng) -> Bytes {
        self.values += 1;
        let mut value = format!("c{}-{}-", self.client, self.values);
        let len =
            if rng.random_range(0..20) == 0 { rng.random_range(0..4000) } else { rng.random_range(0..40) };
        value.extend(std::iter::repeat_n('v', len));
        value.into()
    }

    fn key(rng: &mut impl Rng) -> Bytes {
        format!("k{:02}", rng.random_range(0..24)).into()
    }

    fn condition(&mut self, rng: &mut impl Rng, object: &ObjectName) -> Condition {
        let known = self.known(object);
        if self.workload.options.has_bursts && !known.omap.is_empty() && rng.random_bool(0.6) {
            let number = rng.random_range(0..known.omap.len());
            let entry = known.omap.into_iter().nth(number);
            return entry.map(|(key, value)| Condition::Omap(key, value)).unwrap_or(Condition::Exists);
        }
        match rng.random_range(0..10) {
            0..2 => Condition::Exists,
            2 => Condition::Absent,
            3..8 => Condition::Version(known.version),
            8 => Condition::Xattr(Self::key(rng), None),
            _ => Condition::Omap(Self::key(rng), None),
        }
    }

    fn change(
        &mut self,
        rng: &mut impl Rng,
        object: ObjectName,
        new_fill: &mut impl FnMut(u64) -> Fill,
    ) -> ChangeCall {
        let mut size = self.known(&object).size;
        let mut change = ChangeCall::new(object.clone());
        let has_bursts = self.workload.options.has_bursts;
        if has_bursts && rng.random_range(0..100) < 30 {
            return self.step(rng, change, new_fill);
        }
        if rng.random_range(0..100) < if has_bursts { 40 } else { 20 } {
            for _ in 0..rng.random_range(1..=3) {
                let condition = self.condition(rng, &object);
                change = change.when(condition);
            }
        }
        let ops = if rng.random_range(0..100) < 70 { 1 } else { rng.random_range(2..=6) };
        for index in 0..ops {
            let max = if index == 0 { self.workload.options.write_max } else { EMBEDDED_MAX };
            let mut fill = |rng: &mut _, max: u64| new_fill(write_size(rng, max));
            change = match rng.random_range(0..100) {
                0..22 => {
                    let at = offset(rng, size);
                    let fill = fill(rng, max.min(END_MAX - at));
                    size = size.max(at + fill.len);
                    change.write(at, fill)
                }
                22..40 => {
                    let fill = fill(rng, max);
                    size = fill.len;
                    change.write_full(fill)
                }
                40..60 => {
                    let fill = fill(rng, max.min(wire::limits::MAX_APPEND));
                    size += fill.len;
                    change.append(fill)
                }
                60..66 => {
                    size = offset(rng, size);
                    change.op(Mutation::Truncate(size))
                }
                66..72 => {
                    let (offset, len) = (offset(rng, size), write_size(rng, 1 << 20));
                    change.op(Mutation::Zero { offset, len })
                }
                72..78 => {
                    size = 0;
                    change.op(Mutation::Remove)
                }
                78..80 => change.op(Mutation::Create),
                80..82 => change.op(Mutation::Touch),
                82..87 => {
                    let value = self.value(rng);
                    change.op(Mutation::SetXattr(Self::key(rng), value))
                }
                87..89 => change.op(Mutation::RemoveXattr(Self::key(rng))),
                89..95 => {
                    let entries = (0..rng.random_range(1..=8)).map(|_| (Self::key(rng), self.value(rng)));
                    change.op(Mutation::OmapSet(entries.collect()))
                }
                95..97 => {
                    let keys = (0..rng.random_range(1..=4)).map(|_| Self::key(rng)).collect();
                    change.op(Mutation::OmapRemove(keys))
                }
                97..99 => change.op(Mutation::OmapRemoveRange(Self::key(rng), Self::key(rng))),
                _ => change.op(Mutation::OmapClear),
            };
        }
        change
    }

    /// Returns a change of an omap entry from its last known value to the next one. Sometimes the
    /// change also appends, so that it depends on the size of the object.
    fn step<R: Rng>(
        &mut self,
        rng: &mut R,
        change: ChangeCall,
        new_fill: &mut impl FnMut(u64) -> Fill,
    ) -> ChangeCall {
        let key = Self::hot_key(rng);
        let known = self.known(change.object()).omap.remove(&key);
        let change = match known {
            Some(value) => change.when(Condition::Omap(key.clone(), value)),
            None => change,
        };
        let change = change.op(Mutation::OmapSet(vec![(key, self.value(rng))]));
        match rng.random_bool(0.5) {
            true => change.append(new_fill(rng.random_range(1..=6000))),
            false => change,
        }
    }

    /// Returns one of a few keys.
    fn hot_key(rng: &mut impl Rng) -> Bytes {
        format!("k{:02}", rng.random_range(0..3)).into()
    }

    fn read(&mut self, rng: &mut impl Rng, object: ObjectName) -> RangeRead {
        let LastSeen { version, size, .. } = self.known(&object);
        let if_version = (version > 0 && rng.random_range(0..100) < 10).then_some(version);
        match rng.random_range(0..10) {
            0..4 => RangeRead { if_version, ..RangeRead::whole(object) },
            _ => {
                let (offset, len) = (offset(rng, size), write_size(rng, 9 << 20));
                RangeRead { object, offset, len, if_version }
            }
        }
    }

    fn query(&mut self, rng: &mut impl Rng, object: ObjectName) -> QueryCall {
        let conditions = match rng.random_range(0..100) {
            0..10 => vec![self.condition(rng, &object)],
            _ => Vec::new(),
        };
        let mut ops = vec![QueryOp::Stat];
        for _ in 0..rng.random_range(0..3) {
            ops.push(match rng.random_range(0..4) {
                0 => QueryOp::Xattr(Self::key(rng)),
                1 => QueryOp::Xattrs,
                2 => QueryOp::OmapGet((0..rng.random_range(1..=4)).map(|_| Self::key(rng)).collect()),
                _ => {
                    let (a, b) = (Self::key(rng), Self::key(rng));
                    let to = if rng.random_range(0..2) == 0 { None } else { Some(a.clone().max(b.clone())) };
                    QueryOp::OmapRange { from: a.min(b), to, limit: rng.random_range(1..=30) }
                }
            });
        }
        QueryCall { object, conditions, ops }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use crate::history::History;

    fn requests(seed: u64, count: usize) -> Vec<Request> {
        let mut rng = StdRng::seed_from_u64(seed);
        let options = WorkloadOptions::new(vec!["p".parse().unwrap(), "q".parse().unwrap()]);
        let mut client = SharedWorkload::new(options).client(0);
        let mut history = History::new();
        (0..count).map(|_| client.next(&mut rng, |len| history.new_fill(len))).collect()
    }

    #[test]
    fn a_seed_determines_the_requests() {
        let text = |seed| requests(seed, 200).iter().map(Request::to_string).collect::<Vec<_>>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }

    #[test]
    fn the_requests_cover_all_sizes_and_ops() {
        let requests = requests(1, 5000);
        let changes = requests.iter().filter_map(|request| match request {
            Request::Change(change) => Some(change),
            _ => None,
        });
        let fills: Vec<Fill> = changes.clone().flat_map(ChangeCall::fills).collect();
        for range in [
            0..1,
            1..4096,
            4096..(64 << 10),
            (64 << 10)..(2 << 20),
            (2 << 20)..(4 << 20),
            (4 << 20)..(9 << 20),
        ] {
            assert!(fills.iter().filter(|fill| range.contains(&fill.len)).count() > 20, "{range:?}");
        }
        let ops = changes.clone().flat_map(|change| change.to_request().ops);
        let kinds: BTreeSet<String> =
            ops.map(|op| format!("{op:?}").chars().take_while(|c| c.is_alphanumeric()).collect()).collect();
        assert_eq!(kinds.len(), 14, "{kinds:?}");
        let conditional = changes.clone().filter(|change| !change.to_request().conditions.is_empty());
        assert!(conditional.count() > 300);
        assert!(requests.iter().any(|request| matches!(request, Request::List(_))));
        // Nearly all requests are within the limits.
        let is_large =
            |change: &&ChangeCall| change.to_request().payload.is_some_and(|payload| payload.len() > 9 << 20);
        assert_eq!(changes.filter(is_large).count(), 0);
    }

    #[test]
    fn a_client_uses_the_versions_that_it_has_seen() {
        let mut rng = StdRng::seed_from_u64(1);
        let options = WorkloadOptions { hot: 1, cold: 0, ..WorkloadOptions::new(vec!["p".parse().unwrap()]) };
        let mut client = SharedWorkload::new(options).client(0);
        let mut history = History::new();
        let answer = Outcome::Changed(wire::Mutated { version: 42, size: 100, appended_at: 0 });
        let requests: Vec<Request> = (0..300)
            .map(|_| {
                let request = client.next(&mut rng, |len| history.new_fill(len));
                client.learn(&request, &answer);
                request
            })
            .collect();
        let uses = |request: &&Request| request.to_string().contains("if [Version(42)");
        assert!(requests.iter().filter(uses).count() > 5);
    }
}
