//! [`ListFilter`]: which objects of a placement group a listing wants, and where their ids lie.

use store::ObjectId;
use wire::limits::MAX_OBJECT_NAME;

use crate::ids::{self, IdLayout, StoredName};

/// Which objects of a placement group a listing wants.
///
/// With ids by name, the filter seeks: it knows the first id that may match, and behind an id that
/// does not match, the next one that may. With hashed ids, a listing examines every id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListFilter<'a> {
    layout: IdLayout,
    /// `None` means all namespaces.
    namespace: Option<&'a str>,
    prefix: &'a [u8],
}

/// What a listing does with an object id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum IdVerdict<'a> {
    /// The listing contains the object.
    Listed(StoredName<'a>),
    /// The listing does not contain the object.
    Skipped,
    /// Neither this id nor any id below the given one matches. The given id is greater than this one.
    Seek(ObjectId),
    /// Neither this id nor any greater id of the group matches.
    End,
}

impl<'a> ListFilter<'a> {
    /// Creates the filter of a pool with this layout of ids. `namespace` must be valid; `None` means
    /// all namespaces.
    pub(crate) fn new(layout: IdLayout, namespace: Option<&'a str>, prefix: &'a [u8]) -> ListFilter<'a> {
        ListFilter { layout, namespace, prefix }
    }

    /// Returns whether no object can match.
    pub(crate) fn matches_nothing(&self) -> bool {
        self.prefix.len() > MAX_OBJECT_NAME
    }

    /// Returns whether the filter examines every object, or lists every object that it examines.
    pub(crate) fn reads_everything(&self) -> bool {
        self.layout == IdLayout::Hashed || (self.namespace.is_none() && self.prefix.is_empty())
    }

    /// Returns how many ids one call to the store should return, at most `step`, if the listing takes
    /// no more than `names` further names. One more id shows whether the matching ids end.
    pub(crate) fn fetch_limit(&self, step: usize, names: usize) -> usize {
        match self.layout {
            IdLayout::Hashed => step,
            IdLayout::ByName => step.min(names + 1),
        }
    }

    /// Returns a lower bound of the ids that match; `None` if any id may match.
    pub(crate) fn first(&self) -> Option<ObjectId> {
        match (self.layout, self.namespace) {
            (IdLayout::Hashed, _) => None,
            (IdLayout::ByName, None) => Some(ids::first_object(None)),
            (IdLayout::ByName, Some(namespace)) => Some(ids::first_object(Some((namespace, self.prefix)))),
        }
    }

    /// Decides about an object id, which must not be below [`ListFilter::first`].
    pub(crate) fn examine<'i>(&self, id: &'i ObjectId) -> IdVerdict<'i> {
        let is_object = self.layout == IdLayout::Hashed || ids::is_object_by_name(id);
        if !is_object {
            return IdVerdict::End;
        }
        let Some(name) = ids::parse(id) else { return IdVerdict::Skipped };
        let is_wanted = self.namespace.is_none_or(|namespace| namespace == name.namespace)
            && name.object.as_bytes().starts_with(self.prefix);
        match (self.layout, self.namespace) {
            _ if is_wanted && name.part.is_none() => IdVerdict::Listed(name),
            (IdLayout::Hashed, _) => IdVerdict::Skipped,
            (IdLayout::ByName, Some(_)) => IdVerdict::End,
            (IdLayout::ByName, None) => {
                let next = match name.object.as_bytes() < self.prefix {
                    true => ids::first_object(Some((name.namespace, self.prefix))),
                    false => ids::first_of_later_namespaces(name.namespace),
                };
                assert!(*id < next, "a listing seeks forwards");
                IdVerdict::Seek(next)
            }
        }
    }
}
