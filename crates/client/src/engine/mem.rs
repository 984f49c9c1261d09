//! The reference model: an engine that keeps everything in memory.
//!
//! [`Model`] implements `docs/semantics.md` in the simplest way: a change clones the object,
//! applies its operations one after the other, and replaces the object if all of them succeed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use base::BoxFuture;
use base::clock::WallClock;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use wire::{
    AdminReply, AdminRequest, Error as E, List, Listed, Manifest, Mutate, Mutated, Mutation, ObjectName,
    ObjectReply, ObjectRequest, OpBytes, PartId, PoolInfo, PoolName, Query, QueryAnswer, QueryOp, Redundancy,
    Reply, RequestHead, SessionId, UploadId, limits, placement,
};

use super::model::{self, BulkRule, Content, ModelledObject, ObjectChange, missing};
use super::sparse_bytes::SparseBytes;
use super::{
    Administration, BoxCall, Call, Capabilities, Capability, ChangeRequest, Engine, EngineLimits, Fencing,
    NO_DESCRIPTORS, OwnerName, ReadReply, ReadRequest, Refused, Sink, Source,
};
use crate::{Error, Result};

/// An engine that keeps everything in memory: the reference model for tests.
///
/// The engine serves one request at a time and never fails. Its content is not durable. Only an
/// engine with a file ([`MemEngine::open`]) writes its content to the file, when the engine is
/// closed or dropped.
#[derive(Debug)]
pub struct MemEngine {
    memory: Arc<MemContent>,
    /// Name of this engine as an exclusive owner.
    owner: u64,
    closed: AtomicBool,
}

/// What engines with the same content share.
#[derive(Debug, Default)]
struct MemContent {
    model: Mutex<Model>,
    file: Option<Mutex<File>>,
    /// Name of the next engine with this content.
    owners: AtomicU64,
    /// The engines that were fenced.
    fenced: Mutex<BTreeSet<u64>>,
}

impl Default for MemEngine {
    fn default() -> MemEngine {
        MemEngine::new()
    }
}

impl MemEngine {
    /// Creates an engine without pools.
    #[must_use]
    pub fn new() -> MemEngine {
        MemEngine::over(Arc::default())
    }

    /// Creates another engine with the same content. Each of the engines can fence the others.
    #[must_use]
    pub fn sibling(&self) -> MemEngine {
        MemEngine::over(Arc::clone(&self.memory))
    }

    fn over(memory: Arc<MemContent>) -> MemEngine {
        let owner = memory.owners.fetch_add(1, Ordering::Relaxed);
        MemEngine { memory, owner, closed: AtomicBool::new(false) }
    }

    /// Opens an engine with the content of a file. Creates the file if it does not exist. Waits
    /// while another engine has the file open.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened, or does not contain the content of a memory
    /// engine.
    pub fn open(path: impl AsRef<Path>) -> Result<MemEngine> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        file.lock()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let model = if bytes.is_empty() {
            Model::default()
        } else {
            postcard::from_bytes(&bytes).map_err(|e| {
                std::io::Error::other(format!(
                    "the file does not contain the content of a memory engine: {e}"
                ))
            })?
        };
        let (model, file) = (Mutex::new(model), Some(Mutex::new(file)));
        // Objects may contain names of earlier owners, so an owner must not get the name of one of them.
        let owners = AtomicU64::new(WallClock::default().now_ms() << 20);
        Ok(MemEngine::over(Arc::new(MemContent { model, file, owners, ..MemContent::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Model> {
        // A change that panics leaves the object unchanged.
        self.memory.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fenced(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.memory.fenced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the model for a call.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the engine was fenced, [`Error::Closed`] if it is closed.
    fn lock_open(&self) -> Result<MutexGuard<'_, Model>> {
        let model = self.lock();
        if self.fenced().contains(&self.owner) {
            let (session, why) = (SessionId(self.owner.into()), "another engine has fenced it".into());
            return Err(Error::Fenced(E::SessionRefused { session, why }));
        }
        if self.closed.load(Ordering::Relaxed) { Err(Error::Closed) } else { Ok(model) }
    }

    /// Refuses all later calls.
    fn refuse_calls(&self) {
        // With the lock, no call is in progress.
        let _model = self.lock();
        self.closed.store(true, Ordering::Relaxed);
    }

    fn save(&self) -> std::io::Result<()> {
        let Some(file) = &self.memory.file else { return Ok(()) };
        let bytes = postcard::to_stdvec(&*self.lock()).map_err(std::io::Error::other)?;
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        file.rewind()?;
        file.set_len(0)?;
        file.write_all(&bytes)
    }

    fn save_or_warn(&self) {
        if let Err(e) = self.save() {
            tracing::warn!(error = %e, "the content of the memory engine could not be written to its file");
        }
    }
}

impl Drop for MemEngine {
    fn drop(&mut self) {
        self.save_or_warn();
    }
}

impl Engine for MemEngine {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn mutate(&self, request: ChangeRequest, _: Instant) -> BoxCall<'_, Mutated> {
        Box::new(ModelChange { engine: self, request, done: None })
    }

    fn read(&self, request: ReadRequest, _: Instant) -> BoxCall<'_, ReadReply> {
        Box::new(Ask { engine: self, request, answer: Model::read })
    }

    fn query(&self, request: Query, _: Instant) -> BoxCall<'_, Vec<QueryAnswer>> {
        Box::new(Ask { engine: self, request, answer: Model::query })
    }

    fn list(&self, request: List, _: Instant) -> BoxCall<'_, Listed> {
        Box::new(Ask { engine: self, request, answer: Model::list })
    }

    fn next_upload(&self) -> Result<UploadId> {
        let mut model = self.lock_open()?;
        model.uploads += 1;
        Ok(UploadId { session: SessionId(1), number: model.uploads })
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits::PROTOCOL
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::NONE
            .with(Capability::Fence)
            .with(Capability::SameGroup)
            .with(Capability::Inherit)
            .with(Capability::Extents)
    }

    fn fencing(&self) -> Option<&dyn Fencing> {
        Some(self)
    }

    fn administration(&self) -> Option<&dyn Administration> {
        Some(self)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.refuse_calls();
        self.save_or_warn();
        Box::pin(async {})
    }
}

impl Fencing for MemEngine {
    fn owner(&self) -> Result<OwnerName> {
        drop(self.lock_open()?);
        OwnerName::from_bytes(self.owner.to_be_bytes().to_vec())
    }

    fn fence(&self, owner: &OwnerName, _: Instant) -> BoxCall<'_, ()> {
        let Ok(number) = <[u8; 8]>::try_from(&owner.as_bytes()[..]) else {
            return Box::new(Refused(|| Error::Argument("this is no name of an engine in memory".into())));
        };
        Box::new(FenceCall { engine: self, fenced: u64::from_be_bytes(number) })
    }
}

impl Administration for MemEngine {
    fn administer(&self, request: AdminRequest, _: Instant) -> BoxCall<'_, AdminReply> {
        Box::new(Ask { engine: self, request, answer: Model::administer })
    }
}

/// A change that takes effect once. Attempts after the change took effect return the same result.
struct ModelChange<'a> {
    engine: &'a MemEngine,
    request: ChangeRequest,
    done: Option<Mutated>,
}

impl Call<Mutated> for ModelChange<'_> {
    fn attempt(&mut self) -> BoxFuture<'_, Result<Mutated>> {
        Box::pin(async {
            drop(self.engine.lock_open()?);
            if let Some(done) = self.done {
                return Ok(done);
            }
            let payload = match &self.request.payload {
                Some(Source::Descriptor(_)) => return Err(Error::Unsupported(NO_DESCRIPTORS.into())),
                Some(source) => source.load().await?,
                None => Bytes::new(),
            };
            let wire = self.request.clone().take_wire()?;
            check_size(ObjectRequest::Mutate(wire.clone()))?;
            let key = ModelKey::new(&self.request.name, self.request.part);
            let mutated = self.engine.lock_open()?.mutate(&self.request.name, key, &wire, &payload)?;
            self.done = Some(mutated);
            Ok(mutated)
        })
    }
}

/// A call other than a change: a read, query, listing or administrative request.
struct Ask<'a, R, T> {
    engine: &'a MemEngine,
    request: R,
    answer: fn(&mut Model, &R) -> Result<T>,
}

impl<R: Send, T: Send> Call<T> for Ask<'_, R, T> {
    fn attempt(&mut self) -> BoxFuture<'_, Result<T>> {
        let answer = self.engine.lock_open().and_then(|mut model| (self.answer)(&mut model, &self.request));
        Box::pin(async { answer })
    }
}

/// A call that fences another engine.
struct FenceCall<'a> {
    engine: &'a MemEngine,
    fenced: u64,
}

impl Call<()> for FenceCall<'_> {
    fn attempt(&mut self) -> BoxFuture<'_, Result<()>> {
        let answer = match self.engine.lock_open() {
            Err(e) => Err(e),
            Ok(_) if self.fenced == self.engine.owner => {
                Err(E::BadRequest("an engine cannot fence itself; close it instead".into()).into())
            }
            Ok(_) => {
                self.engine.fenced().insert(self.fenced);
                Ok(())
            }
        };
        Box::pin(async { answer })
    }
}

/// Content of a [`MemEngine`], with methods that implement `docs/semantics.md`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Model {
    pools: BTreeMap<String, ModelPool>,
    pools_made: u32,
    /// Version of the last change.
    version: u64,
    /// Number of the last upload.
    uploads: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct ModelPool {
    info: PoolInfo,
    objects: BTreeMap<ModelKey, ModelledObject<SparseBytes>>,
}

/// Name of a stored object within its pool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct ModelKey {
    namespace: String,
    object: String,
    part: Option<PartId>,
}

impl ModelKey {
    fn new(name: &ObjectName, part: Option<PartId>) -> ModelKey {
        ModelKey { namespace: name.namespace().to_owned(), object: name.object().to_owned(), part }
    }
}

impl ModelPool {
    /// Checks that all parts exist to which an op of the change of object `head` refers.
    fn check_parts(&self, head: &ModelKey, op: &Mutation) -> Result<()> {
        let Mutation::SetManifest(Manifest { upload, part_size, size }) = *op else { return Ok(()) };
        for (index, start) in (0..).zip((0..size).step_by(part_size as usize)) {
            let part = ModelKey { part: Some(PartId { upload, index }), ..head.clone() };
            let found = self.objects.get(&part);
            if found.is_none_or(|part| part.data.size() != part_size.min(size - start)) {
                let what = format!("part {index} of the upload is missing or has the wrong size");
                return Err(E::BadRequest(what).into());
            }
        }
        Ok(())
    }
}

impl ModelPool {
    /// Returns the first of several objects that exists, with its index.
    fn first_of(
        &self,
        name: &ObjectName,
        others: &[Bytes],
    ) -> Result<Option<(usize, &ModelledObject<SparseBytes>)>> {
        let others = others.iter().map(|other| name.sibling(other)).collect::<Result<Vec<_>, E>>()?;
        let objects = others.iter().map(|other| self.objects.get(&ModelKey::new(other, None)));
        Ok((0..).zip(objects).find_map(|(index, object)| Some((index, object?))))
    }
}

impl Model {
    fn pool(&mut self, name: &str) -> Result<&mut ModelPool> {
        self.pools.get_mut(name).ok_or_else(|| E::NoSuchPool(name.to_owned()).into())
    }

    fn mutate(
        &mut self,
        name: &ObjectName,
        key: ModelKey,
        change: &Mutate,
        payload: &Bytes,
    ) -> Result<Mutated> {
        let version = self.version + 1;
        let pool = self.pool(name.pool())?;
        let (conditions, ops) = (&change.conditions[..], &change.ops[..]);
        ops.iter().try_for_each(|op| model::check_payload(op, payload.len() as u64))?;
        ops.iter().try_for_each(|op| pool.check_parts(&key, op))?;
        let piece = |op: &Mutation| {
            op.source().map(|source| match source {
                OpBytes::Embedded(bytes) => bytes.clone(),
                OpBytes::Payload => payload.clone(),
            })
        };
        let pieces: Vec<Option<Bytes>> = ops.iter().map(piece).collect();
        let inherited = match change.inherits_from() {
            Some(names) => pool.first_of(name, names)?.map(|(_, found)| found),
            None => None,
        };
        if !pool.objects.contains_key(&key) && inherited.is_some_and(|from| from.manifest.is_some()) {
            return Err(model::striped(name, "copying"));
        }
        let change =
            ObjectChange { name, conditions, ops, pieces: &pieces, bulk_rule: BulkRule::Parts, inherited };
        let effect = change.apply(pool.objects.get(&key))?;
        let (size, appended_at) = (effect.size(), effect.appended_at);
        let old = match effect.object {
            Some(mut object) => {
                object.version = version;
                object.modified_ms = now_ms();
                pool.objects.insert(key.clone(), object)
            }
            None => pool.objects.remove(&key),
        };
        // Remove the parts that the head object no longer refers to.
        let named = pool.objects.get(&key).and_then(|object| object.manifest);
        if let Some(old) = old.and_then(|object| object.manifest).filter(|old| Some(*old) != named) {
            let (namespace, object) = (&key.namespace, &key.object);
            pool.objects.retain(|key, _| {
                (&key.namespace, &key.object) != (namespace, object)
                    || key.part.is_none_or(|part| part.upload != old.upload)
            });
        }
        self.version = version;
        Ok(Mutated { version, size, appended_at })
    }

    fn read(&mut self, request: &ReadRequest) -> Result<ReadReply> {
        if let Sink::Descriptor(_) = &request.sink {
            return Err(Error::Unsupported(NO_DESCRIPTORS.into()));
        }
        let name = &request.name;
        let pool = self.pool(name.pool())?;
        let fallback = pool.first_of(name, &request.fallbacks)?.map(|(index, object)| (index + 1, object));
        let named = pool.objects.get(&ModelKey::new(name, request.part)).map(|object| (0, object));
        let (found, object) = named.or(fallback).ok_or_else(|| missing(name))?;
        if let Some(wanted) = request.if_version.filter(|wanted| *wanted != object.version) {
            return Err(E::Changed { wanted, found: object.version }.into());
        }
        if let Some(manifest) = object.manifest {
            return Ok(ReadReply::Striped { version: object.version, manifest });
        }
        let size = object.data.size();
        let (start, end) = (request.offset.min(size), request.offset.saturating_add(request.len).min(size));
        let data = Bytes::copy_from_slice(&object.data.as_slice()[start as usize..end as usize]);
        let (len, mut chunks) = (data.len() as u64, Vec::new());
        match &request.sink {
            _ if data.is_empty() => {}
            Sink::Bytes => chunks.push(data),
            Sink::Memory(memory) => memory.put(0, data),
            Sink::Descriptor(_) => {}
        }
        Ok(ReadReply::Data { found, version: object.version, object_size: size, len, chunks })
    }

    fn query(&mut self, query: &Query) -> Result<Vec<QueryAnswer>> {
        query.check()?;
        check_size(ObjectRequest::Query(query.clone()))?;
        let name = query.name.check()?;
        let object = self.pool(name.pool())?.objects.get(&ModelKey::new(&name, None));
        model::check_conditions(&name, object, &query.conditions)?;
        let object = object.ok_or_else(|| missing(&name))?;
        if object.manifest.is_some() && query.ops.iter().any(QueryOp::needs_extents) {
            return Err(E::Striped { name: name.to_string(), what: "querying extents".into() }.into());
        }
        let answers = query.ops.iter().map(|op| model::answer(object, op)).collect::<Result<Vec<_>>>()?;
        let reply = Reply { strand: 0, seq: 0, result: Ok(ObjectReply::Queried(answers.clone()).into()) };
        check_header("size of the reply", wire::encode_reply(&reply).len())?;
        Ok(answers)
    }

    fn list(&mut self, list: &List) -> Result<Listed> {
        let name = PoolName::from_wire(&list.pool).map_err(E::from)?;
        let namespace = list.checked_namespace()?;
        let pool = self.pool(name.as_str())?;
        let pg_count = pool.info.pg_count;
        list.group.map_or(Ok(()), |group| placement::check_group(group, pg_count))?;
        let after: Option<ModelKey> = match &list.cursor[..] {
            [] => None,
            _ if list.group.is_some() => list.after()?.map(|name| ModelKey::new(&name, None)),
            cursor => {
                let wrong =
                    |_| E::BadRequest("the cursor does not come from a listing of this engine".into());
                Some(postcard::from_bytes(cursor).map_err(wrong)?)
            }
        };
        let group_of =
            |key: &ModelKey| placement::group(placement::hash(&key.namespace, &key.object, None), pg_count);
        let wanted = |key: &&ModelKey| {
            key.part.is_none()
                && namespace.is_none_or(|namespace| namespace == key.namespace)
                && list.group.is_none_or(|group| group == group_of(key))
                && key.object.as_bytes().starts_with(&list.prefix)
                && after.as_ref().is_none_or(|after| *key > after)
        };
        let limit = list.limit.clamp(1, limits::MAX_PAGE) as usize;
        let mut keys = pool.objects.keys().filter(wanted);
        let page: Vec<&ModelKey> = keys.by_ref().take(limit).collect();
        let cursor = match (page.last(), keys.next()) {
            (Some(last), Some(_)) if list.group.is_some() => {
                ObjectName::new(name, &*last.namespace, &*last.object)?.to_cursor()
            }
            (Some(last), Some(_)) => {
                postcard::to_stdvec(last).map_err(|e| E::BadRequest(e.to_string()))?.into()
            }
            _ => Bytes::new(),
        };
        let names = page.into_iter().map(|key| (key.namespace.clone(), key.object.clone())).collect();
        Ok(Listed { names, cursor, groups: pg_count, skipped: None })
    }

    fn administer(&mut self, request: &AdminRequest) -> Result<AdminReply> {
        match request {
            AdminRequest::PoolCreate { name, pg_count, redundancy, tenant: None } => {
                self.create_pool(name, *pg_count, *redundancy)?;
                Ok(AdminReply::Done)
            }
            AdminRequest::PoolList { tenant: None } => {
                Ok(AdminReply::Pools(self.pools.values().map(|pool| pool.info.clone()).collect()))
            }
            AdminRequest::PoolRemove { name, force, tenant: None } => {
                let name = PoolName::from_wire(name).map_err(E::from)?.to_string();
                if !self.pool(&name)?.objects.is_empty() && !force {
                    return Err(E::PoolNotEmpty(name).into());
                }
                self.pools.remove(&name);
                Ok(AdminReply::Done)
            }
            other => Err(Error::Unsupported(format!(
                "the memory engine manages only pools and cannot execute {other:?}; send it to a node"
            ))),
        }
    }

    fn create_pool(&mut self, name: &[u8], pg_count: u32, redundancy: Redundancy) -> Result<()> {
        let name = PoolName::from_wire(name).map_err(E::from)?.to_string();
        redundancy.check()?;
        let pg_count = placement::pg_count(pg_count)?;
        if self.pools.contains_key(&name) {
            return Err(E::PoolExists(name).into());
        }
        if self.pools.len() >= limits::MAX_POOLS {
            let (what, limit) = ("pools".into(), limits::MAX_POOLS as u64);
            return Err(E::Busy { what, limit, advice: "remove a pool, or use namespaces".into() }.into());
        }
        self.pools_made += 1;
        let id = self.pools_made;
        let info = PoolInfo { id, name: name.clone(), pg_count, redundancy, made_ms: now_ms() };
        self.pools.insert(name, ModelPool { info, objects: BTreeMap::new() });
        Ok(())
    }
}

/// Checks the size of a request without its payload.
fn check_size(request: ObjectRequest) -> Result<()> {
    let head = RequestHead { strand: 0, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
    check_header("request without its data", wire::encode_request(&head, &request.into()).len())
}

fn check_header(what: &str, size: usize) -> Result<()> {
    let (size, limit) = (size as u64, limits::MAX_HEADER as u64);
    if size > limit { Err(E::TooLarge { what: what.into(), size, limit }.into()) } else { Ok(()) }
}

#[expect(clippy::disallowed_methods, reason = "users compare the time of a change with other clocks")]
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
