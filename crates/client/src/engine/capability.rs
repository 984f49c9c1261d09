//! What an engine offers beyond `docs/semantics.md`.

use std::fmt;

/// A named capability. A front end that needs one refuses to open on an engine without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// After a session was fenced, none of its requests takes effect any more.
    Fence,
    /// A placement key puts several objects into the same placement group.
    SameGroup,
    /// The first write of an absent object copies the object from the first of a list of older
    /// objects that exists, in the same step.
    Inherit,
}

impl Capability {
    /// All capabilities that have a name.
    pub const ALL: [Capability; 3] = [Capability::Fence, Capability::SameGroup, Capability::Inherit];

    /// The capability's name, as configuration and messages write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Capability::Fence => "fence",
            Capability::SameGroup => "same_group",
            Capability::Inherit => "inherit",
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

    /// The set with `capability` added.
    #[must_use]
    pub const fn with(self, capability: Capability) -> Capabilities {
        Capabilities(self.0 | 1 << capability as u32)
    }

    /// Whether the set contains `capability`.
    #[must_use]
    pub const fn has(self, capability: Capability) -> bool {
        self.0 & 1 << capability as u32 != 0
    }

    /// The first of `needed` that the set lacks.
    #[must_use]
    pub fn missing(self, needed: &[Capability]) -> Option<Capability> {
        needed.iter().copied().find(|capability| !self.has(*capability))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_added_and_names_what_it_lacks() {
        let set = Capabilities::NONE.with(Capability::Fence).with(Capability::Inherit);
        assert!(set.has(Capability::Fence) && set.has(Capability::Inherit));
        assert!(!set.has(Capability::SameGroup));
        assert_eq!(set.missing(&[Capability::Fence]), None);
        assert_eq!(set.missing(&Capability::ALL), Some(Capability::SameGroup));
        assert_eq!(Capabilities::NONE.missing(&[]), None);
    }

    #[test]
    fn every_capability_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = Capability::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Capability::ALL.len());
    }
}
