//! Requests, as a history stores them.

use std::fmt;

use bytes::Bytes;
use client::engine::{ChangeRequest, Source};
use wire::{Condition, Mutation, ObjectName, OpBytes, QueryOp};

use super::Fill;

/// A request of a call.
#[derive(Debug, Clone)]
pub enum Request {
    /// Changes one object.
    Change(ChangeCall),
    /// Reads a range of one object.
    Read(RangeRead),
    /// Queries the metadata of one object.
    Query(QueryCall),
    /// Lists objects, with as many pages as necessary.
    List(ListCall),
    /// An administrative command, or another command that must end. The text describes it.
    Admin(String),
}

macro_rules! into_request {
    ($($kind:ident $request:ident),*) => {$(
        impl From<$request> for Request {
            fn from(request: $request) -> Request {
                Request::$kind(request)
            }
        }
    )*};
}
into_request!(Change ChangeCall, Read RangeRead, Query QueryCall, List ListCall);

impl Request {
    /// Returns the object, if the request concerns one object.
    #[must_use]
    pub fn object(&self) -> Option<&ObjectName> {
        match self {
            Request::Change(change) => Some(&change.object),
            Request::Read(read) => Some(&read.object),
            Request::Query(query) => Some(&query.object),
            Request::List(_) | Request::Admin(_) => None,
        }
    }

    /// Returns the pool that the request concerns.
    #[must_use]
    pub fn pool(&self) -> Option<&str> {
        match self {
            Request::List(list) => Some(&list.pool),
            other => other.object().map(ObjectName::pool),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Change(change) => write!(f, "{change}"),
            Request::Read(RangeRead { offset, len, if_version, .. }) => {
                match len {
                    &u64::MAX => write!(f, "read from byte {offset} to the end")?,
                    len => write!(f, "read {len} bytes at {offset}")?,
                }
                if_version.map_or(Ok(()), |version| write!(f, " of version {version}"))
            }
            Request::Query(query) => {
                write!(f, "query {:?}", query.ops)?;
                write_conditions(f, &query.conditions)
            }
            Request::List(ListCall { pool, namespace, prefix, is_ordered }) => {
                write!(f, "list pool {pool}, namespace {namespace:?}, prefix {prefix:?}")?;
                if *is_ordered { write!(f, ", in order") } else { Ok(()) }
            }
            Request::Admin(text) => write!(f, "{text}"),
        }
    }
}

fn write_conditions(f: &mut fmt::Formatter<'_>, conditions: &[Condition]) -> fmt::Result {
    if conditions.is_empty() { Ok(()) } else { write!(f, " if {conditions:?}") }
}

/// A change of one object. The methods that add ops are in the order of their execution.
#[derive(Debug, Clone)]
pub struct ChangeCall {
    pub(crate) object: ObjectName,
    pub(crate) conditions: Vec<Condition>,
    /// The ops. Ops with data have an empty [`OpBytes::Embedded`] in place of the data.
    ops: Vec<Mutation>,
    /// Data of each op.
    fills: Vec<Option<Fill>>,
}

impl ChangeCall {
    /// Creates a change without ops.
    #[must_use]
    pub fn new(object: ObjectName) -> ChangeCall {
        ChangeCall { object, conditions: Vec::new(), ops: Vec::new(), fills: Vec::new() }
    }

    /// Returns the object.
    #[must_use]
    pub fn object(&self) -> &ObjectName {
        &self.object
    }

    /// Returns the data of all ops.
    pub fn fills(&self) -> impl Iterator<Item = Fill> {
        self.fills.iter().flatten().copied()
    }

    /// Adds a condition.
    #[must_use]
    pub fn when(mut self, condition: Condition) -> ChangeCall {
        self.conditions.push(condition);
        self
    }

    /// Adds an op without data.
    ///
    /// # Panics
    /// If the op has data.
    #[must_use]
    pub fn op(mut self, op: Mutation) -> ChangeCall {
        assert!(op.source().is_none(), "the data of an op is a fill");
        self.ops.push(op);
        self.fills.push(None);
        self
    }

    fn data_op(mut self, fill: Fill, op: impl FnOnce(OpBytes) -> Mutation) -> ChangeCall {
        self.ops.push(op(OpBytes::Embedded(Bytes::new())));
        self.fills.push(Some(fill));
        self
    }

    /// Writes data at an offset.
    #[must_use]
    pub fn write(self, offset: u64, fill: Fill) -> ChangeCall {
        self.data_op(fill, |source| Mutation::Write { offset, source })
    }

    /// Replaces all data.
    #[must_use]
    pub fn write_full(self, fill: Fill) -> ChangeCall {
        self.data_op(fill, Mutation::WriteFull)
    }

    /// Appends data.
    #[must_use]
    pub fn append(self, fill: Fill) -> ChangeCall {
        self.data_op(fill, Mutation::Append)
    }

    /// Returns whether the change only removes the object.
    pub(crate) fn only_removes(&self) -> bool {
        self.ops.iter().all(|op| *op == Mutation::Remove)
    }

    /// Returns whether the change removes the object, perhaps to create it again.
    pub(crate) fn has_removal(&self) -> bool {
        self.ops.contains(&Mutation::Remove)
    }

    /// Returns the index of the op whose data is the payload of the request: the op with the most
    /// data.
    pub(crate) fn payload(&self) -> Option<usize> {
        let with_data = self.fills.iter().enumerate().filter_map(|(index, fill)| Some((index, (*fill)?)));
        with_data.max_by_key(|(_, fill)| fill.len).map(|(index, _)| index)
    }

    /// Whether an op writes the payload at an offset above 0.
    pub(crate) fn writes_payload_at_offset(&self) -> bool {
        let op = self.payload().map(|index| &self.ops[index]);
        matches!(op, Some(Mutation::Write { offset, .. }) if *offset > 0)
    }

    /// Returns the ops. `embedded` returns the data of an op that is not the payload.
    pub(crate) fn ops_with(&self, embedded: impl Fn(Fill) -> Bytes) -> Vec<Mutation> {
        let payload = self.payload();
        let data = |(index, (op, fill)): (usize, (&Mutation, &Option<Fill>))| {
            let mut op = op.clone();
            if let (
                Some(fill),
                Mutation::Write { source, .. } | Mutation::WriteFull(source) | Mutation::Append(source),
            ) = (fill, &mut op)
            {
                *source = match payload == Some(index) {
                    true => OpBytes::Payload,
                    false => OpBytes::Embedded(embedded(*fill)),
                };
            }
            op
        };
        self.ops.iter().zip(&self.fills).enumerate().map(data).collect()
    }

    /// Returns the data of each op.
    pub(crate) fn pieces(&self) -> &[Option<Fill>] {
        &self.fills
    }

    /// Returns the change as a request to an engine.
    #[must_use]
    pub fn to_request(&self) -> ChangeRequest {
        let payload = self.payload().and_then(|index| self.fills[index]);
        ChangeRequest {
            name: self.object.clone(),
            part: None,
            conditions: self.conditions.clone(),
            ops: self.ops_with(|fill| fill.bytes()),
            payload: payload.map(|fill| Source::Bytes(fill.bytes())),
        }
    }
}

impl fmt::Display for ChangeCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (op, fill)) in self.ops.iter().zip(&self.fills).enumerate() {
            f.write_str(if index > 0 { "; " } else { "" })?;
            match (op, fill) {
                (Mutation::Write { offset, .. }, Some(fill)) => write!(f, "write {fill:?} at {offset}")?,
                (Mutation::WriteFull(_), Some(fill)) => write!(f, "put {fill:?}")?,
                (Mutation::Append(_), Some(fill)) => write!(f, "append {fill:?}")?,
                (op, _) => write!(f, "{op:?}")?,
            }
        }
        write_conditions(f, &self.conditions)
    }
}

/// A read of a range of one object.
#[derive(Debug, Clone)]
pub struct RangeRead {
    /// The object.
    pub object: ObjectName,
    /// Offset of the first byte.
    pub offset: u64,
    /// Maximum number of bytes.
    pub len: u64,
    /// Version that the object must have.
    pub if_version: Option<u64>,
}

impl RangeRead {
    /// Reads a whole object.
    #[must_use]
    pub fn whole(object: ObjectName) -> RangeRead {
        RangeRead { object, offset: 0, len: u64::MAX, if_version: None }
    }
}

/// Queries about one object.
#[derive(Debug, Clone)]
pub struct QueryCall {
    /// The object.
    pub object: ObjectName,
    /// Conditions that must all hold.
    pub conditions: Vec<Condition>,
    /// The queries.
    pub ops: Vec<QueryOp>,
}

/// A listing with all its pages.
#[derive(Debug, Clone)]
pub struct ListCall {
    /// The pool.
    pub pool: String,
    /// Lists only this namespace; `None` lists all namespaces.
    pub namespace: Option<String>,
    /// Lists only names with this prefix.
    pub prefix: String,
    /// Whether the names must be in the order of namespaces and names.
    pub is_ordered: bool,
}

impl ListCall {
    /// Returns whether the listing must contain an object if the object exists.
    #[must_use]
    pub fn covers(&self, object: &ObjectName) -> bool {
        object.pool() == self.pool
            && self.namespace.as_ref().is_none_or(|namespace| namespace == object.namespace())
            && object.object().starts_with(&self.prefix)
    }
}
