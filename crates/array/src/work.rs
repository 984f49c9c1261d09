//! [`ObjectEdit`]: the changes that a transaction makes to one object.

use bytes::Bytes;
use store::{ObjectId, Op, StoreError, WriteSource};

use crate::group::Group;
use crate::interval::Interval;
use crate::member_link::MemberLink;
use crate::objects::ObjectPlace;
use crate::overlay::Overlay;
use crate::read::WholeObject;
use crate::record::{SIZE_XATTR, Undo};
use crate::rows::Split;

/// An object of which another one becomes a copy.
pub(crate) struct CopySource {
    oid: ObjectId,
    /// Size in bytes; `None` if the object does not exist.
    size: Option<u64>,
    live: Vec<Option<MemberLink>>,
}

/// The changes that a transaction makes to one object.
pub(crate) struct ObjectEdit {
    pub(crate) oid: ObjectId,
    /// Place in the queue of the object. `None` if only the omap of the object changes.
    pub(crate) place: Option<ObjectPlace>,
    /// Size of the object before the transaction, if the object existed.
    pub(crate) was: Option<u64>,
    /// Whether another object of the transaction begins as a copy of this one, which does not change.
    pub(crate) is_source: bool,
    /// The object of which this one begins as a copy, and its size in bytes.
    copied: Option<(ObjectId, u64)>,
    pub(crate) exists: bool,
    pub(crate) exclusive: bool,
    /// True if the old object is renamed to the undo object.
    pub(crate) moved: bool,
    pub(crate) overlay: Overlay,
    /// Guards, which the members check before they change the object.
    guards: Vec<Op>,
    /// Ops on xattrs and omap.
    pub(crate) meta: Vec<Op>,
    pub(crate) xattrs: bool,
    pub(crate) omap_keys: Vec<Bytes>,
    pub(crate) omap_ranges: Vec<(Bytes, Option<Bytes>)>,
    /// Ops for each fragment, computed after all ops of the transaction were applied.
    pub(crate) split: Split,
    pub(crate) live: Vec<Option<MemberLink>>,
}

impl ObjectEdit {
    pub(crate) fn new(
        group: &Group,
        interval: &Interval,
        oid: &ObjectId,
        place: Option<ObjectPlace>,
        was: Option<u64>,
        is_source: bool,
    ) -> ObjectEdit {
        ObjectEdit {
            oid: oid.clone(),
            exists: was.is_some() || place.is_none(),
            place,
            was,
            is_source,
            copied: None,
            exclusive: false,
            moved: false,
            overlay: Overlay::new(was.unwrap_or(0)),
            guards: Vec::new(),
            meta: Vec::new(),
            xattrs: false,
            omap_keys: Vec::new(),
            omap_ranges: Vec::new(),
            split: Split::default(),
            live: group.live_links(interval, oid),
        }
    }

    /// Makes the object a copy of another one, with the data that `source` has.
    ///
    /// # Errors
    /// [`StoreError::NoSuchObject`] if the source does not exist, and [`StoreError::InvalidArgument`] if
    /// the object itself exists or has changed.
    pub(crate) fn copy(&mut self, source: &CopySource, op: &Op) -> store::Result<()> {
        let is_first = self.meta.is_empty() && self.overlay.is_unchanged() && self.copied.is_none();
        if self.was.is_some() || self.place.is_none() || !is_first {
            return Err(impossible(op));
        }
        let size = source.size.ok_or_else(|| StoreError::NoSuchObject(source.oid.to_string()))?;
        self.copied = Some((source.oid.clone(), size));
        self.overlay = Overlay::new(size);
        // A member that lacks the source cannot copy it. A rebuild copies the new object to this member.
        for (own, of_source) in self.live.iter_mut().zip(&source.live) {
            if of_source.is_none() {
                *own = None;
            }
        }
        self.exists = true;
        Ok(())
    }

    /// Returns whether the transaction may change the data, the xattrs or the existence of the object.
    pub(crate) fn is_changed(&self) -> bool {
        self.place.is_some() && !self.is_source
    }

    /// Returns what another object of the transaction can copy from this one.
    pub(crate) fn as_source(&self) -> CopySource {
        CopySource { oid: self.oid.clone(), size: self.was, live: self.live.clone() }
    }

    /// Returns the object that has the data from which the change starts, with its size in bytes.
    pub(crate) fn old_data(&self) -> WholeObject<'_> {
        match &self.copied {
            Some((oid, size)) => WholeObject { oid, size: *size },
            None => WholeObject { oid: &self.oid, size: self.was.unwrap_or(0) },
        }
    }

    /// Adds an op to the changes of the object.
    pub(crate) fn apply(&mut self, group: &Group, interval: &Interval, op: &Op) -> store::Result<()> {
        match op {
            Op::GuardXattr { .. } | Op::GuardOmap { .. } => return self.guard(op),
            // The members copy the source as it was before the transaction.
            op if self.is_source => return Err(impossible(op)),
            Op::CreateExclusive { .. } if self.exists => {
                return Err(StoreError::Exists(self.oid.to_string()));
            }
            Op::CreateExclusive { .. } => self.exclusive = !self.moved,
            Op::Remove { .. } => return self.remove(),
            Op::Touch { .. } => {}
            Op::Write { offset, source: WriteSource::Inline(payload), .. } => {
                self.overlay.write(*offset, payload.clone())?;
            }
            Op::Write { offset, source: WriteSource::Staged { stage, offset: at, len }, .. } => {
                let what = (*stage, *at, *len);
                group.write_staged(interval, &self.live, &mut self.overlay, *offset, what)?;
            }
            Op::Zero { offset, len, .. } => self.overlay.zero(*offset, *len)?,
            Op::Truncate { size, .. } => self.overlay.truncate(*size)?,
            other => self.apply_to_metadata(other)?,
        }
        self.exists = true;
        Ok(())
    }

    /// Adds a guard. The members check all guards first, so a guard must not follow another op on
    /// the object.
    fn guard(&mut self, op: &Op) -> store::Result<()> {
        let is_first = self.meta.is_empty()
            && self.overlay.is_unchanged()
            && !self.moved
            && self.exists == self.was.is_some();
        if !is_first {
            return Err(impossible(op));
        }
        self.guards.push(op.clone());
        Ok(())
    }

    /// The guards that each member checks before it changes the object.
    pub(crate) fn guards(&self) -> &[Op] {
        &self.guards
    }

    fn apply_to_metadata(&mut self, op: &Op) -> store::Result<()> {
        match op {
            Op::SetXattrs { .. } | Op::RemoveXattr { .. } => self.xattrs = true,
            Op::OmapSet { entries, .. } => {
                self.omap_keys.extend(entries.iter().map(|(key, _)| key.clone()));
            }
            Op::OmapRemove { keys, .. } => self.omap_keys.extend(keys.iter().cloned()),
            Op::OmapRemoveRange { from, to, .. } => {
                self.omap_ranges.push((from.clone(), Some(to.clone())));
            }
            Op::OmapClear { .. } => self.omap_ranges.push((Bytes::new(), None)),
            other => return Err(impossible(other)),
        }
        self.meta.push(op.clone());
        Ok(())
    }

    fn remove(&mut self) -> store::Result<()> {
        if !self.exists {
            return Err(StoreError::NoSuchObject(self.oid.to_string()));
        }
        self.moved |= self.was.is_some();
        self.exists = false;
        self.exclusive = false;
        self.copied = None;
        self.overlay = Overlay::new(0);
        self.meta.clear();
        Ok(())
    }

    /// Returns how the member at a position undoes the changes.
    pub(crate) fn undo(&self, group: &Group, position: usize) -> Undo {
        match self.was {
            _ if self.place.is_none() => Undo::Unchanged,
            _ if self.moved => Undo::Return,
            None => Undo::Remove,
            Some(_) if self.overlay.is_unchanged() => Undo::Unchanged,
            Some(size) => Undo::Restore {
                size: group.layout.fragment_size(position, size),
                saved: self.split.overwritten[position].clone(),
            },
        }
    }

    /// Appends the ops that write the new content of the object on the member at a position.
    pub(crate) fn content_ops(&self, position: usize, ops: &mut Vec<Op>) {
        let oid = &self.oid;
        let is_new = self.place.is_some() && (self.was.is_none() || self.moved);
        if self.exclusive {
            ops.push(Op::CreateExclusive { oid: oid.clone() });
        } else if is_new && self.copied.is_none() {
            ops.push(Op::Touch { oid: oid.clone() });
        }
        if let Some((src, _)) = &self.copied {
            ops.push(Op::Clone { src: src.clone(), dst: oid.clone() });
        }
        ops.extend(self.split.ops[position].iter().cloned());
        if self.place.is_some() && (is_new || self.overlay.size != self.overlay.before) {
            let size = Bytes::copy_from_slice(&self.overlay.size.to_be_bytes());
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs: vec![(SIZE_XATTR, size)] });
        }
        ops.extend(self.meta.iter().cloned());
    }
}

/// Returns the object that an op changes.
pub(crate) fn object_of(op: &Op) -> Option<&ObjectId> {
    match op {
        Op::Touch { oid }
        | Op::CreateExclusive { oid }
        | Op::Write { oid, .. }
        | Op::Zero { oid, .. }
        | Op::Truncate { oid, .. }
        | Op::Remove { oid }
        | Op::SetXattrs { oid, .. }
        | Op::RemoveXattr { oid, .. }
        | Op::OmapSet { oid, .. }
        | Op::OmapRemove { oid, .. }
        | Op::OmapRemoveRange { oid, .. }
        | Op::OmapClear { oid }
        | Op::GuardXattr { oid, .. }
        | Op::GuardOmap { oid, .. }
        | Op::Clone { dst: oid, .. } => Some(oid),
        _ => None,
    }
}

/// Returns the object that an op copies.
pub(crate) fn source_of(op: &Op) -> Option<&ObjectId> {
    match op {
        Op::Clone { src, .. } => Some(src),
        _ => None,
    }
}

/// Returns true if an op changes only omap entries. Several transactions may concurrently apply ops
/// of this kind to a metadata object of the array's owner.
pub(crate) fn is_omap_only(op: &Op) -> bool {
    matches!(op, Op::OmapSet { .. } | Op::OmapRemove { .. } | Op::OmapRemoveRange { .. })
}

pub(crate) fn impossible(op: &Op) -> StoreError {
    StoreError::InvalidArgument(format!("{op:?}: this is not supported in a pool with redundancy"))
}
