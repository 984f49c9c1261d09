//! Compares an engine with the reference model under random operations.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use wire::{Mutated, Redundancy};

use super::bytes;
use crate::engine::{Capability, MemEngine};
use crate::{Client, Compound, Error, Object, Options, Pool};

/// Number of random compounds.
const STEPS: u64 = 300;
/// Maximum size of an operation's data that may be embedded in the request, in bytes.
const SMALL: usize = 20_000;

/// Commits the same random compounds to the engine and to the model. Compares results, errors and
/// objects.
pub(super) async fn random_operations_agree_with_the_model(client: &Client, pool: &Pool, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let model = Client::over(Arc::new(MemEngine::new()), Options::default());
    model.create_pool_with("model", 0, Redundancy::Single).await.unwrap();
    let mut model = Tracked::new(&model, model.pool("model").unwrap());
    let mut real = Tracked::new(client, pool.clone());
    let mut committed = 0;
    for step in 0..STEPS {
        let name = format!("object-{}", rng.random_range(0..4));
        let plan = Plan::random(&mut rng, step);
        let (found, wanted) = (real.commit(&name, &plan).await, model.commit(&name, &plan).await);
        assert_eq!(found, wanted, "seed {seed}, step {step}, {name}: {plan:?}");
        committed += u64::from(found.is_ok());
        let (found, wanted) = (real.look(&name).await, model.look(&name).await);
        assert!(found == wanted, "seed {seed}, step {step}, {name}: {plan:?}");
    }
    assert!(committed > STEPS / 3, "only {committed} of {STEPS} compounds were committed");
}

/// A pool whose only user knows the versions of all objects. The versions of two engines differ.
struct Tracked {
    pool: Pool,
    /// Version of the last change of each object, including its removal.
    versions: BTreeMap<String, u64>,
    /// Whether the engine knows the extents of objects.
    has_extents: bool,
}

impl Tracked {
    fn new(client: &Client, pool: Pool) -> Tracked {
        let has_extents = client.engine().capabilities().has(Capability::Extents);
        Tracked { pool, versions: BTreeMap::new(), has_extents }
    }

    fn version(&self, name: &str) -> u64 {
        self.versions.get(name).copied().unwrap_or(0)
    }

    /// Commits a compound, and checks that its version is higher than all earlier versions of the
    /// object. Returns the object's new size and the offset of an append.
    async fn commit(&mut self, name: &str, plan: &Plan) -> Result<(u64, u64), String> {
        let last = self.version(name);
        let done = plan.commit(&self.pool.object(name).unwrap(), last).await?;
        assert!(done.version > last, "{name} has version {} after {last}", done.version);
        self.versions.insert(name.to_owned(), done.version);
        Ok((done.size, done.appended_at))
    }

    /// Returns the state of an object, and checks that its version is that of its last change.
    async fn look(&self, name: &str) -> Result<Look, String> {
        let object = self.pool.object(name).unwrap();
        let described = object.describe().await.map_err(|e| kind(&e))?;
        assert_eq!(described.stat.version, self.version(name), "{name}");
        let data = object.get().await.map_err(|e| kind(&e))?;
        if self.has_extents {
            super::extents::check_holes(&object, &data).await;
        }
        let page = object.omap_range("", None, 100).await.map_err(|e| kind(&e))?;
        assert!(!page.more, "all entries must fit into one page");
        Ok(Look { data, size: described.stat.size, xattrs: described.xattrs, omap: page.entries })
    }
}

/// All visible properties of an object, except its version.
#[derive(Debug, PartialEq)]
struct Look {
    data: Bytes,
    size: u64,
    xattrs: Vec<(Bytes, Bytes)>,
    omap: Vec<(Bytes, Bytes)>,
}

/// Returns the kind of an error: the name of its variant.
fn kind(e: &Error) -> String {
    let text = match e {
        Error::Node(e) => format!("{e:?}"),
        other => format!("{other:?}"),
    };
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

#[derive(Debug, Clone)]
enum PlannedOp {
    Touch,
    Create,
    Remove,
    Write(u64, usize),
    WriteFull(usize),
    Append(usize),
    Truncate(u64),
    Zero(u64, u64),
    SetXattr(u8),
    RemoveXattr(u8),
    OmapSet(u8),
    OmapRemoveRange(u8, u8),
    OmapClear,
}

#[derive(Debug, Clone, Copy)]
enum PlannedCondition {
    Exists,
    Absent,
    /// The object has a certain version.
    Version {
        /// Whether this is the version of the last change. Otherwise the version is one that the
        /// object does not have yet, so the condition fails.
        is_last: bool,
    },
    Xattr(u8, Option<u8>),
    Omap(u8, Option<u8>),
    Bytes(u64),
}

/// A random compound.
#[derive(Debug)]
struct Plan {
    conditions: Vec<PlannedCondition>,
    ops: Vec<PlannedOp>,
    salt: u64,
}

/// Returns a random size or offset of at most `most`. Many are near block boundaries or near the
/// maximum size of inline data.
fn size(rng: &mut StdRng, most: usize) -> usize {
    let base = [0, 1, 4096, 8192, 16_384, 65_536, 150_000][rng.random_range(0..7)];
    let jitter = if rng.random_bool(0.5) { 0 } else { rng.random_range(0..5000) };
    (base + jitter).min(most)
}

impl Plan {
    fn random(rng: &mut StdRng, salt: u64) -> Plan {
        let conditions = if rng.random_bool(0.25) { rng.random_range(1..3) } else { 0 };
        let conditions = (0..conditions).map(|_| PlannedCondition::random(rng)).collect();
        let count = if rng.random_bool(0.6) { 1 } else { rng.random_range(2..5) };
        // Only one operation may have more data than a request can embed.
        let large = rng.random_range(0..count);
        let ops = (0..count).map(|i| PlannedOp::random(rng, if i == large { 200_000 } else { SMALL }));
        Plan { conditions, ops: ops.collect(), salt }
    }

    /// Commits the compound. `last` is the version of the object's last change.
    async fn commit(&self, object: &Object, last: u64) -> Result<Mutated, String> {
        let compound = self.conditions.iter().fold(object.compound(), |c, condition| condition.add(c, last));
        let compound = self.ops.iter().fold(compound, |compound, op| op.add(compound, self.salt));
        compound.commit().await.map_err(|e| kind(&e))
    }
}

impl PlannedCondition {
    fn random(rng: &mut StdRng) -> PlannedCondition {
        let value = if rng.random_bool(0.5) { None } else { Some(rng.random_range(0..3)) };
        match rng.random_range(0..6) {
            0 => PlannedCondition::Exists,
            1 => PlannedCondition::Absent,
            5 => PlannedCondition::Version { is_last: rng.random_bool(0.7) },
            2 => PlannedCondition::Xattr(rng.random_range(0..3), value),
            3 => PlannedCondition::Omap(rng.random_range(0..3), value),
            _ => PlannedCondition::Bytes(size(rng, 100_000) as u64),
        }
    }

    fn add(self, compound: Compound, last: u64) -> Compound {
        let value = |value: Option<u8>| value.map(|value| Bytes::from(vec![value]));
        match self {
            PlannedCondition::Exists => compound.if_exists(),
            PlannedCondition::Absent => compound.if_absent(),
            PlannedCondition::Version { is_last } => compound.if_version(last + u64::from(!is_last)),
            PlannedCondition::Xattr(name, wanted) => compound.if_xattr(vec![name], value(wanted)),
            PlannedCondition::Omap(key, wanted) => compound.if_omap(vec![key], value(wanted)),
            PlannedCondition::Bytes(offset) => compound.if_bytes(offset, vec![0]),
        }
    }
}

impl PlannedOp {
    fn random(rng: &mut StdRng, most: usize) -> PlannedOp {
        let (offset, small) = (size(rng, 200_000) as u64, rng.random_range(0..3));
        match rng.random_range(0..16) {
            0 => PlannedOp::Touch,
            1 => PlannedOp::Create,
            2 => PlannedOp::Remove,
            3..=5 => PlannedOp::Write(offset, size(rng, most)),
            6 => PlannedOp::WriteFull(size(rng, most)),
            7 => PlannedOp::Append(size(rng, most)),
            8 => PlannedOp::Truncate(offset),
            9 | 10 => PlannedOp::Zero(offset, size(rng, 200_000) as u64),
            11 => PlannedOp::SetXattr(small),
            12 => PlannedOp::RemoveXattr(small),
            13 => PlannedOp::OmapSet(small),
            14 => PlannedOp::OmapRemoveRange(small, rng.random_range(0..4)),
            _ => PlannedOp::OmapClear,
        }
    }

    fn add(&self, compound: Compound, salt: u64) -> Compound {
        let value = vec![(salt % 3) as u8];
        match *self {
            PlannedOp::Touch => compound.touch(),
            PlannedOp::Create => compound.create(),
            PlannedOp::Remove => compound.remove(),
            PlannedOp::Write(offset, len) => compound.write(offset, bytes(len, salt)),
            PlannedOp::WriteFull(len) => compound.write_full(bytes(len, salt)),
            PlannedOp::Append(len) => compound.append(bytes(len, salt)),
            PlannedOp::Truncate(size) => compound.truncate(size),
            PlannedOp::Zero(offset, len) => compound.zero(offset, len),
            PlannedOp::SetXattr(name) => compound.set_xattr(vec![name], value),
            PlannedOp::RemoveXattr(name) => compound.remove_xattr(vec![name]),
            PlannedOp::OmapSet(key) => compound.omap_set(vec![(vec![key].into(), value.into())]),
            PlannedOp::OmapRemoveRange(from, to) => compound.omap_remove_range(vec![from], vec![to]),
            PlannedOp::OmapClear => compound.omap_clear(),
        }
    }
}
