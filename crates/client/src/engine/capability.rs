//! Features of engines that go beyond the promises of `docs/semantics.md`.

use std::fmt;

/// A named feature that not every engine has. A front end that needs a capability refuses an engine
/// that lacks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// A session can be fenced. After the fencing, no request of the session takes effect.
    Fence,
    /// Objects with the same placement key are stored in the same placement group.
    SameGroup,
    /// The first write to an object that does not exist can begin with a copy of another object, in
    /// one atomic step. The caller gives a list of objects, and the first existing object of this
    /// list is copied.
    Inherit,
    /// Queries report the extents of an object: the ranges that have data.
    Extents,
}

impl Capability {
    /// All capabilities.
    pub const ALL: [Capability; 4] =
        [Capability::Fence, Capability::SameGroup, Capability::Inherit, Capability::Extents];

    /// Returns the name of the capability in configuration and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Capability::Fence => "fence",
            Capability::SameGroup => "same_group",
            Capability::Inherit => "inherit",
            Capability::Extents => "extents",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities(u32);

impl Capabilities {
    /// The empty set.
    pub const NONE: Capabilities = Capabilities(0);

    /// Returns the set with `capability` added.
    #[must_use]
    pub const fn with(self, capability: Capability) -> Capabilities {
        Capabilities(self.0 | 1 << capability as u32)
    }

    /// Returns whether the set contains `capability`.
    #[must_use]
    pub const fn has(self, capability: Capability) -> bool {
        self.0 & 1 << capability as u32 != 0
    }

    /// Returns the first capability of `needed` that the set lacks. Returns `None` if the set
    /// contains all of them.
    #[must_use]
    pub fn missing(self, needed: &[Capability]) -> Option<Capability> {
        needed.iter().copied().find(|capability| !self.has(*capability))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_set_contains_added_capabilities_and_names_a_missing_one() {
        let set = Capabilities::NONE.with(Capability::Fence).with(Capability::Inherit);
        assert!(set.has(Capability::Fence) && set.has(Capability::Inherit));
        assert!(!set.has(Capability::SameGroup));
        assert_eq!(set.missing(&[Capability::Fence]), None);
        assert_eq!(set.missing(&Capability::ALL), Some(Capability::SameGroup));
        assert_eq!(Capabilities::NONE.missing(&[]), None);
    }

    #[test]
    fn every_capability_has_a_unique_name() {
        let names: std::collections::BTreeSet<_> = Capability::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Capability::ALL.len());
    }
}
