//! The model of an object: its expected data and metadata, and the effect of a change.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use client::{Compound, Object};

use crate::content;

/// Origin of a part of the expected data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentContent {
    /// A hole, or zeros that were written.
    Zeros,
    /// Data of a change, from the byte `at` of the change's data.
    Stamped {
        /// The change.
        change: u64,
        /// Position in the data of the change.
        at: u64,
    },
}

/// A part of the expected data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedSegment {
    /// Length of the part, in bytes; not 0.
    pub len: u64,
    /// Content of the part.
    pub content: SegmentContent,
}

/// The expected state of an existing object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpectedObject {
    /// The data. Adjacent segments that continue each other are joined.
    segments: Vec<ExpectedSegment>,
    /// The xattrs.
    pub xattrs: BTreeMap<String, String>,
    /// The omap.
    pub omap: BTreeMap<String, String>,
}

/// A step of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeStep {
    /// Replaces all data by `len` new bytes.
    Replace { len: u64 },
    /// Writes `len` new bytes at an offset.
    Write { offset: u64, len: u64 },
    /// Appends `len` new bytes.
    Append { len: u64 },
    /// Sets the size.
    Truncate { size: u64 },
    /// Sets a range to zero.
    Zero { offset: u64, len: u64 },
    /// Sets an xattr.
    SetXattr { name: String, value: String },
    /// Removes an xattr.
    RemoveXattr { name: String },
    /// Sets omap entries.
    SetOmap { entries: Vec<(String, String)> },
    /// Removes omap entries.
    RemoveOmap { keys: Vec<String> },
    /// Removes the object.
    Remove,
}

/// A condition of a change: the value of an omap entry, or `None` if the entry must not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OmapGuard {
    /// The key.
    pub key: String,
    /// The required value.
    pub value: Option<String>,
}

/// A change of one object, with an id that is unique in its round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StampedChange {
    /// Number of the change.
    pub id: u64,
    /// Condition of the change.
    pub guard: Option<OmapGuard>,
    /// The steps, in the order of their execution.
    pub steps: Vec<ChangeStep>,
}

/// Why a node must refuse a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedRefusal {
    /// The condition does not hold.
    GuardFailed,
    /// The change removes an object that does not exist.
    NoSuchObject,
}

/// The effect of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedEffect {
    /// The object after the change; `None` if the change removed it.
    pub object: Option<ExpectedObject>,
    /// Offset of the last append; 0 if the change has none.
    pub appended_at: u64,
}

impl ExpectedObject {
    /// Returns the size of the data, in bytes.
    pub fn size(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    /// Returns the data of the object with the number `object`.
    pub fn data(&self, object: u64) -> Vec<u8> {
        let mut data = vec![0; self.size() as usize];
        let mut rest = data.as_mut_slice();
        for segment in &self.segments {
            let (part, others) = rest.split_at_mut(segment.len as usize);
            if let SegmentContent::Stamped { change, at } = segment.content {
                content::stamp_into(object, change, at, part);
            }
            rest = others;
        }
        data
    }

    /// Returns whether `data` is the object's data.
    pub fn has_data(&self, object: u64, data: &[u8]) -> bool {
        self.size() == data.len() as u64 && self.data(object) == data
    }

    /// Sets a range to `content`, and extends the object if necessary.
    fn set(&mut self, offset: u64, len: u64, content: SegmentContent) {
        if len == 0 {
            return;
        }
        let size = self.size();
        if size < offset {
            self.segments.push(ExpectedSegment { len: offset - size, content: SegmentContent::Zeros });
        }
        let from = self.split(offset);
        let to = self.split((offset + len).min(self.size()));
        self.segments.splice(from..to, [ExpectedSegment { len, content }]);
        self.join();
    }

    fn truncate(&mut self, to: u64) {
        let size = self.size();
        if to > size {
            self.set(size, to - size, SegmentContent::Zeros);
        } else {
            let end = self.split(to);
            self.segments.truncate(end);
        }
    }

    /// Divides the segment that contains `offset`, and returns the index of the segment that begins
    /// at `offset`.
    fn split(&mut self, offset: u64) -> usize {
        let mut at = 0;
        for index in 0..self.segments.len() {
            if at == offset {
                return index;
            }
            let ExpectedSegment { len, content } = self.segments[index];
            if offset < at + len {
                let first = offset - at;
                let rest = match content {
                    SegmentContent::Zeros => SegmentContent::Zeros,
                    SegmentContent::Stamped { change, at } => {
                        SegmentContent::Stamped { change, at: at + first }
                    }
                };
                self.segments[index].len = first;
                self.segments.insert(index + 1, ExpectedSegment { len: len - first, content: rest });
                return index + 1;
            }
            at += len;
        }
        self.segments.len()
    }

    fn join(&mut self) {
        self.segments.dedup_by(|next, last| {
            let continues = match (last.content, next.content) {
                (SegmentContent::Zeros, SegmentContent::Zeros) => true,
                (
                    SegmentContent::Stamped { change, at },
                    SegmentContent::Stamped { change: next_change, at: next_at },
                ) => change == next_change && at + last.len == next_at,
                _ => false,
            };
            if continues {
                last.len += next.len;
            }
            continues
        });
    }
}

impl fmt::Display for ExpectedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.size())?;
        let mut offset = 0;
        for ExpectedSegment { len, content } in &self.segments {
            match content {
                SegmentContent::Zeros => write!(f, "; {offset}+{len}: zeros")?,
                SegmentContent::Stamped { change, at } => {
                    write!(f, "; {offset}+{len}: change {change} from its byte {at}")?;
                }
            }
            offset += len;
        }
        write!(f, "; xattrs {:?}; omap {:?}", self.xattrs, self.omap)
    }
}

impl StampedChange {
    /// Returns the effect of the change on an object; `None` is an object that does not exist.
    ///
    /// # Errors
    /// The reason why the node must refuse the change.
    pub fn apply(&self, object: Option<&ExpectedObject>) -> Result<ExpectedEffect, ExpectedRefusal> {
        if let Some(OmapGuard { key, value }) = &self.guard
            && object.and_then(|object| object.omap.get(key)) != value.as_ref()
        {
            return Err(ExpectedRefusal::GuardFailed);
        }
        let mut object = object.cloned();
        let mut appended_at = 0;
        let mut used = 0;
        for step in &self.steps {
            if *step == ChangeStep::Remove {
                object.take().ok_or(ExpectedRefusal::NoSuchObject)?;
                continue;
            }
            let state = object.get_or_insert_default();
            let stamp = SegmentContent::Stamped { change: self.id, at: used };
            match step {
                ChangeStep::Replace { len } => {
                    state.segments.clear();
                    state.set(0, *len, stamp);
                }
                ChangeStep::Write { offset, len } => state.set(*offset, *len, stamp),
                ChangeStep::Append { len } => {
                    appended_at = state.size();
                    state.set(appended_at, *len, stamp);
                }
                ChangeStep::Truncate { size } => state.truncate(*size),
                ChangeStep::Zero { offset, len } => state.set(*offset, *len, SegmentContent::Zeros),
                ChangeStep::SetXattr { name, value } => {
                    state.xattrs.insert(name.clone(), value.clone());
                }
                ChangeStep::RemoveXattr { name } => {
                    state.xattrs.remove(name);
                }
                ChangeStep::SetOmap { entries } => state.omap.extend(entries.iter().cloned()),
                ChangeStep::RemoveOmap { keys } => state.omap.retain(|key, _| !keys.contains(key)),
                ChangeStep::Remove => {}
            }
            used += step.data_len();
        }
        Ok(ExpectedEffect { object, appended_at })
    }

    /// Adds the steps to a compound of `object`, whose number is `number`.
    pub fn compound(&self, object: &Object, number: u64) -> Compound {
        let mut compound = object.compound();
        if let Some(OmapGuard { key, value }) = &self.guard {
            compound = compound.if_omap(key.clone(), value.clone().map(Bytes::from));
        }
        let mut used = 0;
        for step in &self.steps {
            let data = || content::stamped(number, self.id, used, step.data_len());
            let text = |text: &String| Bytes::from(text.clone());
            compound = match step {
                ChangeStep::Replace { .. } => compound.write_full(data()),
                ChangeStep::Write { offset, .. } => compound.write(*offset, data()),
                ChangeStep::Append { .. } => compound.append(data()),
                ChangeStep::Truncate { size } => compound.truncate(*size),
                ChangeStep::Zero { offset, len } => compound.zero(*offset, *len),
                ChangeStep::SetXattr { name, value } => compound.set_xattr(text(name), text(value)),
                ChangeStep::RemoveXattr { name } => compound.remove_xattr(text(name)),
                ChangeStep::SetOmap { entries } => {
                    compound.omap_set(entries.iter().map(|(key, value)| (text(key), text(value))).collect())
                }
                ChangeStep::RemoveOmap { keys } => compound.omap_remove(keys.iter().map(text).collect()),
                ChangeStep::Remove => compound.remove(),
            };
            used += step.data_len();
        }
        compound
    }
}

impl ChangeStep {
    /// Returns the number of new bytes that the step writes.
    fn data_len(&self) -> u64 {
        match self {
            ChangeStep::Replace { len } | ChangeStep::Write { len, .. } | ChangeStep::Append { len } => *len,
            _ => 0,
        }
    }
}

impl fmt::Display for StampedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "change {}:", self.id)?;
        for (n, step) in self.steps.iter().enumerate() {
            write!(f, "{} {step:?}", if n > 0 { "," } else { "" })?;
        }
        match &self.guard {
            Some(OmapGuard { key, value }) => write!(f, " if omap {key} is {value:?}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(id: u64, steps: Vec<ChangeStep>) -> StampedChange {
        StampedChange { id, guard: None, steps }
    }

    /// Applies the steps to plain bytes.
    fn apply_to_bytes(data: &mut Vec<u8>, change: &StampedChange) {
        let mut used = 0;
        for step in &change.steps {
            let new = content::stamped(1, change.id, used, step.data_len());
            let mut set = |offset: usize, bytes: &[u8]| {
                data.resize(data.len().max(offset + bytes.len()), 0);
                data[offset..offset + bytes.len()].copy_from_slice(bytes);
            };
            match *step {
                ChangeStep::Replace { .. } => *data = new.to_vec(),
                ChangeStep::Write { offset, .. } => set(offset as usize, &new),
                ChangeStep::Append { .. } => data.extend(&new),
                ChangeStep::Truncate { size } => data.resize(size as usize, 0),
                ChangeStep::Zero { offset, len } => set(offset as usize, &vec![0; len as usize]),
                _ => {}
            }
            used += step.data_len();
        }
    }

    #[test]
    fn random_changes_have_the_same_effect_on_the_model_and_on_bytes() {
        use rand::{Rng, SeedableRng};
        let mut random = rand::rngs::SmallRng::seed_from_u64(1);
        for _ in 0..50 {
            let mut bytes = Vec::new();
            let mut object = None;
            for id in 1..30 {
                let (offset, len) = (random.random_range(0..3000), random.random_range(1..1000));
                let step = |kind| match kind {
                    0 => ChangeStep::Replace { len },
                    1 | 2 => ChangeStep::Write { offset, len },
                    3 | 4 => ChangeStep::Append { len },
                    5 => ChangeStep::Truncate { size: offset },
                    _ => ChangeStep::Zero { offset, len },
                };
                let change =
                    change(id, vec![step(random.random_range(0..7)), step(random.random_range(0..7))]);
                apply_to_bytes(&mut bytes, &change);
                object = change.apply(object.as_ref()).unwrap().object;
                let object = object.as_ref().unwrap();
                assert!(object.has_data(1, &bytes), "after {change}: {object}");
            }
        }
    }

    #[test]
    fn a_guard_refuses_a_change_of_another_state() {
        let count = |value: &str| ChangeStep::SetOmap { entries: vec![("count".into(), value.into())] };
        let guard =
            |value: Option<&str>| Some(OmapGuard { key: "count".into(), value: value.map(str::to_owned) });
        let first = StampedChange { id: 1, guard: guard(None), steps: vec![count("1")] };
        let second = StampedChange { id: 2, guard: guard(Some("1")), steps: vec![count("2")] };
        let object = first.apply(None).unwrap().object;
        assert_eq!(first.apply(object.as_ref()), Err(ExpectedRefusal::GuardFailed));
        assert_eq!(second.apply(None), Err(ExpectedRefusal::GuardFailed));
        assert_eq!(second.apply(object.as_ref()).unwrap().object.unwrap().omap["count"], "2");
    }

    #[test]
    fn a_removal_takes_the_metadata_with_it() {
        let set = ChangeStep::SetXattr { name: "a".into(), value: "1".into() };
        let object = change(1, vec![set, ChangeStep::Append { len: 10 }]).apply(None).unwrap().object;
        let again = change(2, vec![ChangeStep::Remove, ChangeStep::Append { len: 5 }]);
        let object = again.apply(object.as_ref()).unwrap().object.unwrap();
        assert_eq!((object.size(), object.xattrs.len()), (5, 0));
        assert_eq!(change(3, vec![ChangeStep::Remove]).apply(None), Err(ExpectedRefusal::NoSuchObject));
    }
}
