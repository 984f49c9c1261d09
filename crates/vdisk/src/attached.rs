//! [`AttachedDisk`]: a disk with its exclusive owner, which executes the requests of front ends.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use base::BoxFuture;
use base::clock::WallClock;
use base::thread::ThreadClass;
use bytes::Bytes;
use client::Client;
use client::engine::{ChangeRequest, OwnerName, ReadReply, ReadRequest, Sink, SinkMemory, Source};
use disk::{Disk, DiskError, DiskExtent, DiskIdentity, Memory, check_range};
use futures::future::try_join_all;
use tokio::sync::watch;
use tokio::time::sleep;
use wire::{Condition, Mutation, ObjectName, OpBytes};

use crate::chunk_piece::ChunkPiece;
use crate::chunks::{ChunkState, ChunkStates};
use crate::disks::{Disks, check_size, set_size};
use crate::enduring::{Enduring, Orphans};
use crate::error::disk_error;
use crate::gate::Gate;
use crate::header::{DiskHeader, DiskOwner};
use crate::layers::LayerStack;
use crate::owners::{OpenSession, PAUSE, PAUSE_MAX, is_over, is_unavailable, take_role};
use crate::{Error, Result};

/// How a disk is attached.
#[derive(Clone)]
pub struct AttachOptions {
    /// The gateway, for operators and for the takeover: a gateway that starts again takes its own disks
    /// over.
    pub gateway: String,
    /// Whether to take the disk over from another gateway.
    pub takes_over: bool,
    /// Opens the session of the disk. Called again when the node has lost the session.
    pub open_session: OpenSession,
    /// Time of day.
    pub clock: WallClock,
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachOptions").field("gateway", &self.gateway).finish_non_exhaustive()
    }
}

/// An attached disk. Clones are the same attachment.
#[derive(Debug, Clone)]
pub struct AttachedDisk(Arc<AttachedState>);

#[derive(Debug)]
struct AttachedState {
    pool: String,
    name: String,
    options: AttachOptions,
    identity: DiskIdentity,
    size: watch::Sender<u64>,
    gate: Gate,
    /// What the requests use. A snapshot or a new session replaces parts of it.
    view: RwLock<View>,
    /// Held while the disk gets a new session. Contains the names of all sessions that may be the owner on
    /// record: the current one, and those of attempts that have failed.
    recovering: tokio::sync::Mutex<Vec<OwnerName>>,
    /// Requests in progress that their callers have dropped.
    orphans: Orphans,
    /// Why the disk is not attached any more.
    end: Mutex<Option<DiskError>>,
}

#[derive(Debug)]
struct View {
    /// Number of the attachment.
    epoch: u64,
    /// Name of the owner.
    owner: OwnerName,
    client: Client,
    disks: Disks,
    /// Size of the disk, in bytes.
    size: u64,
    stack: LayerStack,
    states: ChunkStates,
}

impl View {
    fn object(&self, name: &str) -> client::Result<ObjectName> {
        Ok(self.disks.pool.object(name)?.name().clone())
    }

    /// Takes over the layers and the size from the record of the disk. No request may be in progress if the
    /// top layer or the size differs.
    fn adopt(&mut self, header: &DiskHeader) {
        let stack = LayerStack::of_disk(header);
        if stack.top_layer().id != self.stack.top_layer().id {
            self.states.new_layer();
        }
        self.stack = stack;
        if header.size != self.size {
            let kept = self.size.div_ceil(header.chunk).min(header.size / header.chunk);
            self.states.resize(header.chunks(), kept);
            self.size = header.size;
        }
    }
}

impl AttachedDisk {
    /// Attaches a disk: becomes its owner, and fences all earlier owners.
    ///
    /// # Errors
    /// [`Error::NoSuchDisk`], and [`Error::Attached`] if another gateway has it and `takes_over` is not set.
    pub async fn attach(pool: &str, name: &str, options: AttachOptions) -> Result<AttachedDisk> {
        let owned = become_owner(pool, name, &options, None, &mut Vec::new()).await?;
        let Owned { client, owner, disks, header } = owned;
        let identity =
            DiskIdentity { serial: header.serial.clone(), nguid: header.nguid, chunk: header.chunk };
        let view = View {
            epoch: header.epoch,
            owner: owner.clone(),
            client,
            disks,
            size: header.size,
            stack: LayerStack::of_disk(&header),
            states: ChunkStates::new(header.chunks()),
        };
        Ok(AttachedDisk(Arc::new(AttachedState {
            pool: pool.to_owned(),
            name: name.to_owned(),
            options,
            identity,
            size: watch::Sender::new(header.size),
            gate: Gate::default(),
            view: RwLock::new(view),
            recovering: tokio::sync::Mutex::new(vec![owner]),
            orphans: Orphans::default(),
            end: Mutex::default(),
        })))
    }

    /// Detaches the disk, after the requests in progress. Requests that wait for the node fail.
    ///
    /// # Errors
    /// Those of the storage. The disk is detached here in any case, but may still have this owner on
    /// record.
    pub async fn detach(&self) -> Result<()> {
        let disk = &self.0;
        disk.finish(DiskError::Detached("it was detached".into()));
        let _closed = disk.gate.close().await;
        let (client, own, disks) = {
            let view = disk.view();
            (view.client.clone(), view.owner.clone(), view.disks.clone())
        };
        let release = |header: &mut DiskHeader| {
            if header.owner.as_ref().is_some_and(|owner| owner.name == *own.as_bytes()) {
                header.unfenced.extend(header.owner.take().map(|owner| owner.name));
            }
            Ok(())
        };
        let released = disks.change(&disk.name, release).await.map(drop);
        client.close().await;
        released
    }

    /// Takes a snapshot. Requests wait until it is durable.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Attached`] if the disk was taken over meanwhile.
    pub async fn snapshot(&self, snapshot: &str) -> Result<()> {
        crate::names::check_name("snapshot", snapshot)?;
        self.finish_trim().await?;
        let layer = self.0.in_session(async |disks| disks.directory.allocate(1).await).await?;
        let (snapshot, now_ms) = (snapshot.to_owned(), self.0.options.clock.now_ms());
        let add = move |header: &mut DiskHeader| match header.layers.iter().any(|one| one.id == layer) {
            true => Ok(()),
            false => header.add_snapshot(&snapshot, layer, now_ms),
        };
        self.change_record(add).await.map(drop)
    }

    /// Changes the size of the disk.
    ///
    /// # Errors
    /// [`Error::Argument`] if the size is invalid, or smaller than now and `shrinks` is not set.
    pub async fn resize(&self, size: u64, shrinks: bool) -> Result<()> {
        check_size(size)?;
        self.finish_trim().await?;
        self.change_record(move |header| set_size(header, size, shrinks)).await?;
        self.finish_trim().await
    }

    /// Removes the data after the end of a disk that was made smaller.
    async fn finish_trim(&self) -> Result<()> {
        let trim = async |disks: Disks| {
            let (header, _) = self.0.load_own(&disks).await?;
            disks.trim(&header).await
        };
        self.0.in_session(trim).await
    }

    /// Changes the record of the disk while no request is in progress. The change goes on if the caller
    /// drops it, because requests must not continue before its outcome is certain.
    async fn change_record(
        &self,
        change: impl Fn(&mut DiskHeader) -> Result<()> + Send + Sync + 'static,
    ) -> Result<DiskHeader> {
        let disk = Arc::clone(&self.0);
        let changing = base::task::spawn(ThreadClass::Client, async move {
            let _closed = disk.gate.close().await;
            let changed = disk.change_record(change).await;
            if let Ok(header) = &changed {
                disk.adopt(header);
            }
            changed
        });
        changing.await.unwrap_or_else(|_| Err(Error::Client(client::Error::Closed)))
    }

    /// Returns why the disk is not attached any more; `None` if it is.
    #[must_use]
    pub fn end(&self) -> Option<DiskError> {
        self.0.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of the attachment. Each attachment of the disk, and each change that makes it
    /// smaller, has a new number in [`DiskHeader::epoch`].
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.0.view().epoch
    }

    /// Returns the name of the disk.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// A disk that has become owned.
struct Owned {
    client: Client,
    owner: OwnerName,
    disks: Disks,
    header: DiskHeader,
}

/// Opens a session and makes it the owner of a disk. Fences all earlier owners. With `among`, does so only
/// if one of these is the owner on record. Adds the new owner to `tried`, because it may be on record even
/// if the call fails.
async fn become_owner(
    pool: &str,
    name: &str,
    options: &AttachOptions,
    among: Option<&[OwnerName]>,
    tried: &mut Vec<OwnerName>,
) -> Result<Owned> {
    let client = (options.open_session)().await?;
    let owned = own(&client, pool, name, options, among, tried).await;
    match owned {
        Ok((owner, disks, header)) => Ok(Owned { client, owner, disks, header }),
        Err(e) => {
            client.close().await;
            Err(e)
        }
    }
}

async fn own(
    client: &Client,
    pool: &str,
    name: &str,
    options: &AttachOptions,
    among: Option<&[OwnerName]>,
    tried: &mut Vec<OwnerName>,
) -> Result<(OwnerName, Disks, DiskHeader)> {
    client.require(&[client::engine::Capability::Fence])?;
    let disks = Disks::open(client, pool, options.clock.clone())?;
    let own = client.owner()?;
    tried.push(own.clone());
    let take = |header: &mut DiskHeader| {
        if let Some(owner) = &header.owner {
            let is_ours = match among {
                Some(among) => among.iter().any(|one| owner.name == *one.as_bytes()),
                None => owner.gateway == options.gateway || options.takes_over,
            };
            if !is_ours {
                return Err(Error::Attached { disk: name.to_owned(), owner: owner.gateway.clone() });
            }
        } else if among.is_some() {
            return Err(Error::InUse(format!("the disk \"{name}\" was detached")));
        }
        header.unfenced.extend(header.owner.take().map(|owner| owner.name));
        if header.trim_from.is_some() {
            // The worker may be removing data after the end of the disk.
            header.unfenced.extend(header.worker.take().map(|worker| worker.name));
        }
        header.epoch += 1;
        let (name, gateway) = (own.as_bytes().clone(), options.gateway.clone());
        header.owner = Some(DiskOwner { name, gateway, since_ms: options.clock.now_ms() });
        Ok(())
    };
    let mut header = take_role(client, &disks, name, take).await?;
    if header.trim_from.is_some() {
        disks.trim(&header).await?;
        header.trim_from = None;
    }
    Ok((own, disks, header))
}

impl AttachedState {
    fn view(&self) -> RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn view_mut(&self) -> RwLockWriteGuard<'_, View> {
        self.view.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the disk is not attached any more, and why.
    fn finish(&self, why: DiskError) {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }

    fn check_attached(&self) -> disk::Result<()> {
        match &*self.end.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }

    /// Cuts a range of the disk into pieces within chunks.
    fn pieces(&self, offset: u64, len: u64) -> disk::Result<Vec<ChunkPiece>> {
        ChunkPiece::cut(offset, len, *self.size.borrow(), self.identity.chunk)
    }

    /// Loads the record of the disk, which must still have this owner.
    async fn load_own(&self, disks: &Disks) -> Result<(DiskHeader, u64)> {
        let own = self.view().owner.clone();
        let (header, version) = disks.load(&self.name).await?;
        match &header.owner {
            Some(owner) if owner.name == *own.as_bytes() => Ok((header, version)),
            Some(owner) => {
                let e = Error::Attached { disk: header.name.clone(), owner: owner.gateway.clone() };
                // An owner of this gateway may be another session of this attachment.
                if owner.gateway != self.options.gateway {
                    self.finish(DiskError::Detached(e.to_string()));
                }
                Err(e)
            }
            None => Err(Error::InUse(format!("the disk \"{}\" is not attached", header.name))),
        }
    }

    /// Makes an attempt in the disk's session, and another one in each session that replaces it.
    async fn in_session<T>(&self, attempt: impl AsyncFn(Disks) -> Result<T>) -> Result<T> {
        loop {
            let (disks, epoch) = {
                let view = self.view();
                (view.disks.clone(), view.epoch)
            };
            match attempt(disks).await {
                Err(Error::Client(e)) if is_over(&e) => {
                    if !self.recover(epoch, &e).await {
                        return Err(e.into());
                    }
                }
                done => return done,
            }
        }
    }

    /// Changes the record of the disk. Returns when the outcome is certain; `change` must have no effect on a
    /// record that it has changed already.
    async fn change_record(&self, change: impl Fn(&mut DiskHeader) -> Result<()>) -> Result<DiskHeader> {
        let mut is_unsure = false;
        let mut pause = PAUSE;
        loop {
            let (disks, epoch) = {
                let view = self.view();
                (view.disks.clone(), view.epoch)
            };
            let changed = async {
                let (mut header, version) = self.load_own(&disks).await?;
                change(&mut header)?;
                disks.store(&header, version).await?;
                Ok(header)
            };
            match changed.await {
                Err(Error::Conflict(_)) => continue,
                Err(Error::Client(e)) if is_over(&e) => {
                    is_unsure = true;
                    if !self.recover(epoch, &e).await {
                        return Err(e.into());
                    }
                }
                Err(Error::Client(e)) if is_unavailable(&e) && self.check_attached().is_ok() => {
                    is_unsure = true;
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Err(e) if is_unsure => {
                    // Requests must not continue with layers that may be outdated.
                    self.finish(DiskError::Detached(format!("its record is uncertain: {e}")));
                    return Err(e);
                }
                done => return done,
            }
        }
    }

    /// Takes over the layers and the size from the record of the disk.
    fn adopt(&self, header: &DiskHeader) {
        self.view_mut().adopt(header);
        self.size.send_if_modified(|size| std::mem::replace(size, header.size) != header.size);
    }

    /// Repeats a request until it has succeeded or failed for good. While the node is unavailable, it waits.
    async fn until_done<T, F: Future<Output = client::Result<T>>>(
        &self,
        attempt: impl Fn(&View) -> client::Result<F>,
    ) -> disk::Result<T, client::Error> {
        let mut pause = PAUSE;
        loop {
            let (attempt, epoch) = {
                let view = self.view();
                (attempt(&view)?, view.epoch)
            };
            match attempt.await {
                Err(e) if is_over(&e) => {
                    if !self.recover(epoch, &e).await {
                        return Err(e);
                    }
                }
                Err(e) if is_unavailable(&e) => {
                    if self.check_attached().is_err() {
                        return Err(client::Error::Closed);
                    }
                    tracing::debug!(disk = self.name, error = %e, "a request waits for the node");
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                done => return done,
            }
        }
    }

    /// Opens another session for the disk, after that of the attachment `epoch` was refused. Returns false
    /// if the disk is not attached any more.
    async fn recover(&self, epoch: u64, e: &client::Error) -> bool {
        let mut tried = self.recovering.lock().await;
        let mut pause = PAUSE;
        while self.check_attached().is_ok() {
            if self.view().epoch != epoch {
                return true;
            }
            tracing::warn!(disk = self.name, error = %e, "the session of a disk has ended; opening another one");
            let among = tried.clone();
            match become_owner(&self.pool, &self.name, &self.options, Some(&among), &mut tried).await {
                Ok(Owned { client, owner, disks, header }) => {
                    *tried = vec![owner.clone()];
                    {
                        let mut view = self.view_mut();
                        view.epoch = header.epoch;
                        (view.client, view.owner, view.disks) = (client, owner, disks);
                    }
                    // They differ only if a change of the record is in progress, with a closed gate.
                    self.adopt(&header);
                    return true;
                }
                Err(e @ (Error::Attached { .. } | Error::InUse(_) | Error::NoSuchDisk(_))) => {
                    self.finish(DiskError::Detached(e.to_string()));
                }
                Err(e) => tracing::warn!(disk = self.name, error = %e, "cannot open another session yet"),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        false
    }

    /// Reads a piece into memory, or returns its bytes.
    async fn read_piece(
        &self,
        piece: ChunkPiece,
        memory: Option<&Arc<dyn Memory>>,
    ) -> disk::Result<Vec<Bytes>> {
        let ChunkPiece { index, within, at, len } = piece;
        if self.view().states.get(index) == ChunkState::Nowhere {
            return zeros(memory, at, len);
        }
        let sink = memory
            .map(|memory| Arc::new(PieceSink { memory: Arc::clone(memory), at, failed: Mutex::default() }));
        let read = |view: &View| {
            let needs_older = view.states.get(index) != ChunkState::Top;
            let request = ReadRequest {
                name: view.object(&view.stack.top(index))?,
                part: None,
                offset: within,
                len,
                if_version: None,
                sink: sink.clone().map_or(Sink::Bytes, |sink| Sink::Memory(sink)),
                fallbacks: if needs_older { view.stack.older(index) } else { Vec::new() },
            };
            let client = view.client.clone();
            Ok(async move { client.read(request).await })
        };
        let read = self.until_done(read).await;
        let found = match read {
            Ok(ReadReply::Data { found, len: read, mut chunks, .. }) => {
                if let Some(e) = sink.and_then(|sink| sink.failed()) {
                    return Err(e);
                }
                if read < len {
                    chunks.extend(zeros(memory, at + read, len - read)?);
                }
                let state = if found == 0 { ChunkState::Top } else { ChunkState::Older };
                self.view().states.learn(index, state);
                return Ok(chunks);
            }
            Ok(ReadReply::Striped { .. }) => {
                return Err(DiskError::Damaged(format!("the object of chunk {index} is striped")));
            }
            Err(e) => e,
        };
        if !matches!(found, client::Error::Node(wire::Error::NoSuchObject(_))) {
            return Err(disk_error(&found));
        }
        self.view().states.learn(index, ChunkState::Nowhere);
        zeros(memory, at, len)
    }

    /// Makes a change of a chunk.
    async fn change_chunk(
        &self,
        index: u64,
        conditions: Vec<Condition>,
        ops: impl Fn(&View) -> Vec<Mutation>,
        payload: Option<Source>,
    ) -> disk::Result<(), client::Error> {
        let mutate = |view: &View| {
            let name = view.object(&view.stack.top(index))?;
            let (conditions, payload) = (conditions.clone(), payload.clone());
            let request = ChangeRequest { name, part: None, conditions, ops: ops(view), payload };
            let client = view.client.clone();
            Ok(async move { client.mutate(request).await })
        };
        self.until_done(mutate).await.map(drop)
    }

    async fn write_piece(&self, piece: ChunkPiece, data: Source) -> disk::Result<()> {
        let write = Mutation::Write { offset: piece.within, source: OpBytes::Payload };
        let ops = |view: &View| match view.states.get(piece.index) {
            ChunkState::Top => vec![write.clone()],
            _ => {
                let mut ops = self.whole_chunk(view, piece.index);
                ops.push(write.clone());
                ops
            }
        };
        let written = self.change_chunk(piece.index, vec![], ops, Some(data)).await;
        written.map_err(|e| disk_error(&e))?;
        self.view().states.set(piece.index, ChunkState::Top);
        Ok(())
    }

    /// Returns the ops that create a chunk at full size, as a copy of the next older one if there is one.
    fn whole_chunk(&self, view: &View, index: u64) -> Vec<Mutation> {
        let mut ops = Vec::with_capacity(3);
        if view.stack.has_older(index) {
            ops.push(Mutation::Inherit(view.stack.older(index)));
        }
        ops.push(Mutation::Truncate(self.identity.chunk));
        ops
    }

    /// Makes a piece read as zeros, and gives back its space.
    async fn clear_piece(&self, piece: ChunkPiece) -> disk::Result<()> {
        let ChunkPiece { index, within, len, .. } = piece;
        let (state, has_older) = {
            let view = self.view();
            (view.states.get(index), view.stack.has_older(index))
        };
        if state == ChunkState::Nowhere {
            return Ok(());
        }
        let is_whole = len == self.identity.chunk;
        let cleared = match (is_whole, has_older) {
            (true, false) => self.change_chunk(index, vec![], |_| vec![Mutation::Remove], None).await,
            // The chunk must hide the older ones.
            (true, true) => {
                let empty = [Mutation::Truncate(0), Mutation::Truncate(self.identity.chunk)];
                self.change_chunk(index, vec![], |_| empty.to_vec(), None).await
            }
            (false, false) => {
                let zero = Mutation::Zero { offset: within, len };
                self.change_chunk(index, vec![Condition::Exists], |_| vec![zero.clone()], None).await
            }
            (false, true) => {
                let ops = |view: &View| {
                    let mut ops = self.whole_chunk(view, index);
                    ops.push(Mutation::Zero { offset: within, len });
                    ops
                };
                self.change_chunk(index, vec![], ops, None).await
            }
        };
        match cleared {
            Ok(()) if is_whole && !has_older => self.view().states.set(index, ChunkState::Unknown),
            Ok(()) if has_older => self.view().states.set(index, ChunkState::Top),
            Ok(()) => {}
            // The chunk does not exist, so it reads as zeros.
            Err(client::Error::Node(wire::Error::NoSuchObject(_) | wire::Error::ConditionFailed { .. })) => {}
            Err(e) => return Err(disk_error(&e)),
        }
        Ok(())
    }
}

/// Writes zeros to memory, or returns them.
pub(crate) fn zeros(memory: Option<&Arc<dyn Memory>>, at: u64, len: u64) -> disk::Result<Vec<Bytes>> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let steps = (0..len).step_by(ZEROS.len()).map(|from| (from, (len - from).min(ZEROS.len() as u64)));
    match memory {
        None => Ok(steps.map(|(_, len)| Bytes::from_static(&ZEROS[..len as usize])).collect()),
        Some(memory) => {
            for (from, len) in steps {
                memory.copy_in(at + from, &ZEROS[..len as usize])?;
            }
            Ok(Vec::new())
        }
    }
}

/// Stores the data of a piece in the memory of the caller.
#[derive(Debug)]
struct PieceSink {
    memory: Arc<dyn Memory>,
    at: u64,
    failed: Mutex<Option<DiskError>>,
}

impl PieceSink {
    fn failed(&self) -> Option<DiskError> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl SinkMemory for PieceSink {
    fn put(&self, offset: u64, data: Bytes) {
        if let Err(e) = self.memory.copy_in(self.at + offset, &data) {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }
}

/// Returns bytes `at..at + len` of pieces of memory, without a copy.
fn cut(data: &[Bytes], mut at: u64, mut len: u64) -> Source {
    let mut cut = Vec::with_capacity(1);
    for piece in data {
        let (skipped, size) = (at.min(piece.len() as u64), piece.len() as u64);
        let taken = len.min(size - skipped);
        if taken > 0 {
            cut.push(piece.slice(skipped as usize..(skipped + taken) as usize));
        }
        (at, len) = (at - skipped, len - taken);
    }
    match cut.len() {
        1 => Source::Bytes(cut.remove(0)),
        _ => Source::Segments(cut),
    }
}

impl AttachedDisk {
    /// Returns a future that goes on in a task of its own if it is dropped. Otherwise a dropped change could
    /// take effect after the gate has closed, or after later changes of another front end, and the states
    /// of chunks would miss it.
    fn enduring(
        &self,
        change: impl Future<Output = disk::Result<()>> + Send + 'static,
    ) -> BoxFuture<'static, disk::Result<()>> {
        Box::pin(Enduring::new(Box::pin(change), &self.0.orphans))
    }

    async fn do_read(
        self,
        offset: u64,
        len: u64,
        memory: Option<Arc<dyn Memory>>,
    ) -> disk::Result<Vec<Bytes>> {
        let disk = &self.0;
        let _inside = disk.gate.enter().await;
        disk.check_attached()?;
        let pieces = disk.pieces(offset, len)?;
        if let [piece] = pieces[..] {
            return disk.read_piece(piece, memory.as_ref()).await;
        }
        let reads: Vec<BoxFuture<'_, _>> = pieces
            .into_iter()
            .map(|piece| Box::pin(disk.read_piece(piece, memory.as_ref())) as BoxFuture<'_, _>)
            .collect();
        Ok(try_join_all(reads).await?.concat())
    }

    async fn do_write(self, offset: u64, data: Vec<Bytes>) -> disk::Result<()> {
        let disk = &self.0;
        let _inside = disk.gate.enter().await;
        disk.check_attached()?;
        let pieces = disk.pieces(offset, data.iter().map(|piece| piece.len() as u64).sum())?;
        if let [piece] = pieces[..] {
            return disk.write_piece(piece, cut(&data, 0, piece.len)).await;
        }
        let writes: Vec<BoxFuture<'_, _>> = pieces
            .into_iter()
            .map(|piece| {
                Box::pin(disk.write_piece(piece, cut(&data, piece.at, piece.len))) as BoxFuture<'_, _>
            })
            .collect();
        try_join_all(writes).await.map(drop)
    }

    async fn do_clear(self, offset: u64, len: u64) -> disk::Result<()> {
        let disk = &self.0;
        let _inside = disk.gate.enter().await;
        disk.check_attached()?;
        let pieces = disk.pieces(offset, len)?;
        let clears: Vec<BoxFuture<'_, _>> =
            pieces.into_iter().map(|piece| Box::pin(disk.clear_piece(piece)) as BoxFuture<'_, _>).collect();
        try_join_all(clears).await.map(drop)
    }

    async fn do_extents(self, offset: u64, len: u64) -> disk::Result<Vec<DiskExtent>> {
        let disk = &self.0;
        let _inside = disk.gate.enter().await;
        disk.check_attached()?;
        let mut all = Vec::new();
        for piece in disk.pieces(offset, len)? {
            disk.extents_of(piece, &mut all).await?;
        }
        Ok(all)
    }
}

impl AttachedState {
    /// Appends the extents of a piece.
    async fn extents_of(&self, piece: ChunkPiece, all: &mut Vec<DiskExtent>) -> disk::Result<()> {
        let index = piece.index;
        let names = {
            let view = self.view();
            match view.states.get(index) {
                ChunkState::Nowhere => Vec::new(),
                ChunkState::Top => vec![Bytes::from(view.stack.top(index))],
                ChunkState::Unknown | ChunkState::Older => {
                    let older = view.stack.older(index);
                    std::iter::once(Bytes::from(view.stack.top(index))).chain(older).collect()
                }
            }
        };
        let mut ranges = None;
        for name in &names {
            ranges = self.ranges_in(name, piece).await?;
            if ranges.is_some() {
                break;
            }
        }
        // The removal of an older snapshot may have moved the chunk to a newer layer meanwhile. In this
        // order, it cannot be missed.
        if ranges.is_none() && names.len() > 1 {
            for name in names.iter().rev() {
                ranges = self.ranges_in(name, piece).await?.or(ranges);
            }
        }
        piece.append_extents(ranges.unwrap_or_default(), all);
        Ok(())
    }

    /// Returns the ranges with data of one object of a chunk; `None` if there is no object.
    async fn ranges_in(&self, name: &Bytes, piece: ChunkPiece) -> disk::Result<Option<Vec<Range<u64>>>> {
        let name = std::str::from_utf8(name).expect("names of chunks are ASCII");
        let ask = |view: &View| {
            let object = view.disks.pool.object(name)?;
            Ok(async move { object.extents(piece.within, piece.len).await })
        };
        match self.until_done(ask).await {
            Ok(found) => Ok(Some(found)),
            Err(client::Error::Node(wire::Error::NoSuchObject(_))) => Ok(None),
            Err(e) => Err(disk_error(&e)),
        }
    }
}

impl Disk for AttachedDisk {
    fn identity(&self) -> &DiskIdentity {
        &self.0.identity
    }

    fn size(&self) -> watch::Receiver<u64> {
        self.0.size.subscribe()
    }

    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<Vec<Bytes>>> {
        Box::pin(self.clone().do_read(offset, len, None))
    }

    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, disk::Result<()>> {
        let read = self.clone().do_read(offset, memory.len(), Some(memory));
        Box::pin(async { read.await.map(drop) })
    }

    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, disk::Result<()>> {
        self.enduring(self.clone().do_write(offset, data))
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, disk::Result<()>> {
        let disk = self.clone();
        self.enduring(async move {
            check_range(offset, memory.len(), *disk.0.size.borrow())?;
            let mut data = vec![0; memory.len() as usize];
            memory.copy_out(0, &mut data)?;
            disk.do_write(offset, vec![data.into()]).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<()>> {
        self.enduring(self.clone().do_clear(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, _: bool) -> BoxFuture<'static, disk::Result<()>> {
        self.enduring(self.clone().do_clear(offset, len))
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<Vec<DiskExtent>>> {
        Box::pin(self.clone().do_extents(offset, len))
    }

    fn quiesce(&self) -> BoxFuture<'static, ()> {
        Box::pin(self.0.orphans.none())
    }
}
