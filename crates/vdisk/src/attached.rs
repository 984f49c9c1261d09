//! [`AttachedDisk`]: a disk with its exclusive owner, which executes the requests of front ends.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use base::BoxFuture;
use base::clock::WallClock;
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
use crate::error::disk_error;
use crate::gate::Gate;
use crate::header::{DiskHeader, DiskOwner};
use crate::layers::LayerStack;
use crate::{Error, Result};

/// First pause before a request is repeated. It doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Number of attempts to become the owner while others change the record of the disk.
const ATTEMPTS: usize = 16;

/// Opens the exclusive session of a disk ([`client::Options::exclusive`]).
pub type OpenSession = Arc<dyn Fn() -> BoxFuture<'static, client::Result<Client>> + Send + Sync>;

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
    /// Held while the disk gets a new session.
    recovering: tokio::sync::Mutex<()>,
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
    stack: LayerStack,
    states: ChunkStates,
}

impl AttachedDisk {
    /// Attaches a disk: becomes its owner, and fences all earlier owners.
    ///
    /// # Errors
    /// [`Error::NoSuchDisk`], and [`Error::Attached`] if another gateway has it and `takes_over` is not set.
    pub async fn attach(pool: &str, name: &str, options: AttachOptions) -> Result<AttachedDisk> {
        let Owned { client, owner, disks, header } = become_owner(pool, name, &options, None).await?;
        let identity =
            DiskIdentity { serial: header.serial.clone(), nguid: header.nguid, chunk: header.chunk };
        let view = View {
            epoch: header.epoch,
            owner,
            client,
            disks,
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
            recovering: tokio::sync::Mutex::default(),
            end: Mutex::default(),
        })))
    }

    /// Detaches the disk, after the requests in progress.
    ///
    /// # Errors
    /// Those of the storage. The disk is detached here in any case, but may still have this owner on
    /// record.
    pub async fn detach(&self) -> Result<()> {
        let disk = &self.0;
        let _closed = disk.gate.close().await;
        disk.finish(DiskError::Detached("it was detached".into()));
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
    /// [`Error::Exists`], [`Error::Client`] if the disk was taken over meanwhile.
    pub async fn snapshot(&self, snapshot: &str) -> Result<()> {
        crate::names::check_name("snapshot", snapshot)?;
        let disk = &self.0;
        let disks = disk.view().disks.clone();
        let layer = disks.directory.allocate(1).await?;
        let mut loaded = self.load_own(&disks).await?;
        let _closed = disk.gate.close().await;
        for _ in 0..ATTEMPTS {
            let (mut header, version) = loaded;
            header.add_snapshot(snapshot, layer, disk.options.clock.now_ms())?;
            match disks.store(&header, version).await {
                Err(Error::Conflict(_)) => loaded = self.load_own(&disks).await?,
                stored => {
                    stored?;
                    let mut view = disk.view_mut();
                    view.stack = LayerStack::of_disk(&header);
                    view.states.new_layer();
                    return Ok(());
                }
            }
        }
        Err(Error::Conflict(disk.name.clone()))
    }

    /// Changes the size of the disk.
    ///
    /// # Errors
    /// [`Error::Argument`] if the size is invalid, or smaller than now and `shrinks` is not set.
    pub async fn resize(&self, size: u64, shrinks: bool) -> Result<()> {
        check_size(size)?;
        let disk = &self.0;
        let disks = disk.view().disks.clone();
        let _closed = disk.gate.close().await;
        for _ in 0..ATTEMPTS {
            let (mut header, version) = self.load_own(&disks).await?;
            let kept = header.chunks().min(size / header.chunk);
            set_size(&mut header, size, shrinks)?;
            match disks.store(&header, version).await {
                Err(Error::Conflict(_)) => {}
                stored => {
                    stored?;
                    {
                        let mut view = disk.view_mut();
                        view.stack = LayerStack::of_disk(&header);
                        view.states.resize(header.chunks(), kept);
                    }
                    disk.size.send_replace(size);
                    return disks.trim(&header).await;
                }
            }
        }
        Err(Error::Conflict(disk.name.clone()))
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

    /// Loads the record of the disk, which must still have this owner.
    async fn load_own(&self, disks: &Disks) -> Result<(DiskHeader, u64)> {
        let own = self.0.view().owner.clone();
        let (header, version) = disks.load(&self.0.name).await?;
        match &header.owner {
            Some(owner) if owner.name == *own.as_bytes() => Ok((header, version)),
            Some(owner) => Err(Error::Attached { disk: header.name.clone(), owner: owner.gateway.clone() }),
            None => Err(Error::InUse(format!("the disk \"{}\" is not attached", header.name))),
        }
    }
}

/// A disk that has become owned.
struct Owned {
    client: Client,
    owner: OwnerName,
    disks: Disks,
    header: DiskHeader,
}

/// Opens a session and makes it the owner of a disk. Fences all earlier owners. With `before`, does so only
/// if this is the owner on record.
async fn become_owner(
    pool: &str,
    name: &str,
    options: &AttachOptions,
    before: Option<&OwnerName>,
) -> Result<Owned> {
    let client = (options.open_session)().await?;
    let owned = own(&client, pool, name, options, before).await;
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
    before: Option<&OwnerName>,
) -> Result<(OwnerName, Disks, DiskHeader)> {
    client.require(&[client::engine::Capability::Fence])?;
    let disks = Disks::open(client, pool, options.clock.clone())?;
    let own = client.owner()?;
    for _ in 0..ATTEMPTS {
        let (mut header, version) = disks.load(name).await?;
        if let Some(owner) = &header.owner {
            let is_ours = match before {
                Some(before) => owner.name == *before.as_bytes(),
                None => owner.gateway == options.gateway || options.takes_over,
            };
            if !is_ours {
                return Err(Error::Attached { disk: name.to_owned(), owner: owner.gateway.clone() });
            }
        } else if before.is_some() {
            return Err(Error::InUse(format!("the disk \"{name}\" was detached")));
        }
        let earlier = header.owner.take().map(|owner| owner.name);
        // Until all of them are fenced, they stay on record: this owner may end before it has fenced them.
        header.unfenced.extend(earlier);
        header.epoch += 1;
        let since_ms = options.clock.now_ms();
        header.owner =
            Some(DiskOwner { name: own.as_bytes().clone(), gateway: options.gateway.clone(), since_ms });
        let version = match disks.store(&header, version).await {
            Err(Error::Conflict(_)) => continue,
            stored => stored?,
        };
        for earlier in &header.unfenced {
            fence(client, &OwnerName::from_bytes(earlier.clone())?).await?;
        }
        if !header.unfenced.is_empty() {
            header.unfenced.clear();
            match disks.store(&header, version).await {
                // The record is clean after the next attachment.
                Err(Error::Conflict(_)) => {}
                stored => drop(stored?),
            }
        }
        disks.trim(&header).await?;
        return Ok((own, disks, header));
    }
    Err(Error::Conflict(name.to_owned()))
}

/// Fences an earlier owner. A session that the node does not know has ended with the node's state.
async fn fence(client: &Client, earlier: &OwnerName) -> Result<()> {
    let mut pause = PAUSE;
    loop {
        match client.fence(earlier).await {
            Ok(()) => return Ok(()),
            Err(client::Error::TimedOut(e)) => tracing::warn!(%e, "an earlier owner is not fenced yet"),
            Err(e) if e.is_transient() => tracing::warn!(%e, "an earlier owner is not fenced yet"),
            Err(e) => return Err(e.into()),
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
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

    fn object(&self, name: &str) -> disk::Result<ObjectName> {
        let failed = |e: client::Error| DiskError::Failed(e.to_string());
        let view = self.view();
        Ok(view.disks.pool.object(name).map_err(failed)?.name().clone())
    }

    /// Repeats a request until it has succeeded or failed for good. While the node is unavailable, it waits.
    async fn until_done<T, F: Future<Output = client::Result<T>>>(
        &self,
        attempt: impl Fn(Client) -> F,
    ) -> disk::Result<T, client::Error> {
        let mut pause = PAUSE;
        loop {
            let (client, epoch) = {
                let view = self.view();
                (view.client.clone(), view.epoch)
            };
            let e = match attempt(client).await {
                Ok(done) => return Ok(done),
                Err(e @ (client::Error::Fenced(_) | client::Error::Closed)) => {
                    if !self.recover(epoch, &e).await {
                        return Err(e);
                    }
                    continue;
                }
                // To repeat a change of an exclusive owner does no harm: until it has ended, the guest
                // cannot rely on the order of other changes of the same blocks.
                Err(e @ (client::Error::TimedOut(_) | client::Error::OutcomeUnknown(_))) => e,
                Err(e) if e.is_transient() => e,
                Err(e) => return Err(e),
            };
            tracing::debug!(disk = self.name, error = %e, "a request waits for the node");
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Opens another session for the disk, after that of the attachment `epoch` was refused. Returns false
    /// if the disk is not attached any more.
    async fn recover(&self, epoch: u64, e: &client::Error) -> bool {
        let _one_at_a_time = self.recovering.lock().await;
        let mut pause = PAUSE;
        while self.check_attached().is_ok() {
            let before = {
                let view = self.view();
                if view.epoch != epoch {
                    return true;
                }
                view.owner.clone()
            };
            tracing::warn!(disk = self.name, error = %e, "the session of a disk has ended; opening another one");
            match become_owner(&self.pool, &self.name, &self.options, Some(&before)).await {
                Ok(Owned { client, owner, disks, header }) => {
                    let mut view = self.view_mut();
                    view.epoch = header.epoch;
                    (view.client, view.owner, view.disks) = (client, owner, disks);
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
        let (state, top, older) = {
            let view = self.view();
            let state = view.states.get(index);
            let needs_older = state != ChunkState::Top && state != ChunkState::Nowhere;
            let older = if needs_older { view.stack.older(index) } else { Vec::new() };
            (state, view.stack.top(index), older)
        };
        if state == ChunkState::Nowhere {
            return zeros(memory, at, len);
        }
        let name = self.object(&top)?;
        let sink = memory
            .map(|memory| Arc::new(PieceSink { memory: Arc::clone(memory), at, failed: Mutex::default() }));
        let request = ReadRequest {
            name,
            part: None,
            offset: within,
            len,
            if_version: None,
            sink: sink.clone().map_or(Sink::Bytes, |sink| Sink::Memory(sink)),
            fallbacks: older,
        };
        let read = |client: Client| {
            let request = request.clone();
            async move { client.read(request).await }
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
                return Err(DiskError::Damaged(format!("the object {top} is striped")));
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
        let (name, ops) = {
            let view = self.view();
            (view.disks.pool.object(&view.stack.top(index))?.name().clone(), ops(&view))
        };
        let request = ChangeRequest { name, part: None, conditions, ops, payload };
        let mutate = |client: Client| {
            let request = request.clone();
            async move { client.mutate(request).await }
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
        let ask = |client: Client| {
            let (pool, name) = (self.pool.clone(), name.to_owned());
            async move {
                let pool = client.pool(&pool)?.namespace(crate::NAMESPACE)?;
                pool.object(&name)?.extents(piece.within, piece.len).await
            }
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
        Box::pin(self.clone().do_write(offset, data))
    }

    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, disk::Result<()>> {
        let disk = self.clone();
        Box::pin(async move {
            check_range(offset, memory.len(), *disk.0.size.borrow())?;
            let mut data = vec![0; memory.len() as usize];
            memory.copy_out(0, &mut data)?;
            disk.do_write(offset, vec![data.into()]).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<()>> {
        Box::pin(self.clone().do_clear(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, _: bool) -> BoxFuture<'static, disk::Result<()>> {
        Box::pin(self.clone().do_clear(offset, len))
    }

    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, disk::Result<Vec<DiskExtent>>> {
        Box::pin(self.clone().do_extents(offset, len))
    }
}
