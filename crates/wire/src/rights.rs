//! Rights: [`Verbs`] on the objects of a [`Scope`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_OBJECT_NAME;
use crate::name::{check_length, check_namespace};
use crate::{NameError, PoolName};

/// What a right permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Reading data and metadata of objects.
    Read,
    /// Creating, changing and removing objects.
    Write,
    /// Listing the names of objects.
    List,
    /// Administering a pool. On all pools of a tenant: administering the tenant's pools and users.
    Admin,
}

impl Verb {
    /// All verbs, in the order of their text form.
    pub const ALL: [Verb; 4] = [Verb::Read, Verb::Write, Verb::List, Verb::Admin];

    /// Returns the text form.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Read => "read",
            Verb::Write => "write",
            Verb::List => "list",
            Verb::Admin => "admin",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reason why a right is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RightsError {
    /// A verb is unknown.
    #[error("\"{0}\" is not a right; the rights are read, write, list and admin, separated by commas")]
    Verb(String),
    /// There is no verb.
    #[error("no right is named; the rights are read, write, list and admin, separated by commas")]
    None,
    /// A scope is not valid.
    #[error("{0}; a scope is POOL, POOL/PREFIX, POOL:NAMESPACE, POOL:NAMESPACE/PREFIX, or * for all pools")]
    Scope(#[from] NameError),
    /// The right to administer applies to whole pools.
    #[error("the right admin applies to a whole pool, not to {0}; name the pool, or * for all pools")]
    AdminWithin(String),
}

/// A set of [`Verb`]s. Its text form is a list with commas: `read,list`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Verbs(u8);

impl Verbs {
    /// The empty set.
    pub const NONE: Verbs = Verbs(0);
    /// All verbs.
    pub const ALL: Verbs = Verbs((1 << Verb::ALL.len()) - 1);

    /// Returns the set of one verb.
    #[must_use]
    pub const fn of(verb: Verb) -> Verbs {
        Verbs(1 << verb as u8)
    }

    /// Returns whether the set contains a verb.
    #[must_use]
    pub const fn contains(self, verb: Verb) -> bool {
        self.0 & Verbs::of(verb).0 != 0
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the verbs of both sets.
    #[must_use]
    pub const fn with(self, other: Verbs) -> Verbs {
        Verbs(self.0 | other.0)
    }

    /// Returns the verbs that are in both sets.
    #[must_use]
    pub const fn and(self, other: Verbs) -> Verbs {
        Verbs(self.0 & other.0)
    }

    /// Returns the verbs of this set that are not in the other one.
    #[must_use]
    pub const fn without(self, other: Verbs) -> Verbs {
        Verbs(self.0 & !other.0)
    }
}

impl From<Verbs> for u8 {
    fn from(verbs: Verbs) -> u8 {
        verbs.0
    }
}

impl TryFrom<u8> for Verbs {
    type Error = RightsError;

    fn try_from(bits: u8) -> Result<Verbs, RightsError> {
        if bits & !Verbs::ALL.0 == 0 { Ok(Verbs(bits)) } else { Err(RightsError::Verb(format!("{bits:#x}"))) }
    }
}

impl fmt::Display for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verbs = Verb::ALL.into_iter().filter(|verb| self.contains(*verb));
        for (index, verb) in verbs.enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{verb}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Verbs {
    type Err = RightsError;

    fn from_str(text: &str) -> Result<Verbs, RightsError> {
        if text.is_empty() {
            return Err(RightsError::None);
        }
        text.split(',').try_fold(Verbs::NONE, |verbs, word| {
            let verb = Verb::ALL.into_iter().find(|verb| verb.as_str() == word);
            let verb = verb.ok_or_else(|| RightsError::Verb(word.to_owned()))?;
            Ok(verbs.with(Verbs::of(verb)))
        })
    }
}

/// The objects within a pool to which a right applies: those of a namespace whose names begin with a
/// prefix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Within {
    /// The namespace; empty for the default namespace.
    pub namespace: String,
    /// The prefix of the objects' names; empty for all names.
    pub prefix: String,
}

/// The objects to which a right applies. Its text form is `*`, `POOL`, `POOL/PREFIX`,
/// `POOL:NAMESPACE` or `POOL:NAMESPACE/PREFIX`.
///
/// ```
/// let scope: wire::Scope = "films:raw/2024-".parse()?;
/// assert_eq!(scope.pool().unwrap().as_str(), "films");
/// assert_eq!(scope.within().unwrap().prefix, "2024-");
/// assert_eq!(scope.to_string(), "films:raw/2024-");
/// # Ok::<(), wire::RightsError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    pool: Option<PoolName>,
    within: Option<Within>,
}

impl Scope {
    /// All pools of a tenant.
    pub const ALL: Scope = Scope { pool: None, within: None };

    /// Returns the scope of a whole pool, or of a part of it.
    #[must_use]
    pub fn of(pool: PoolName, within: Option<Within>) -> Scope {
        Scope { pool: Some(pool), within }
    }

    /// Returns the pool; `None` for all pools of the tenant.
    #[must_use]
    pub fn pool(&self) -> Option<&PoolName> {
        self.pool.as_ref()
    }

    /// Returns the part of the pool; `None` for the whole pool, with all namespaces.
    #[must_use]
    pub fn within(&self) -> Option<&Within> {
        self.within.as_ref()
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(pool) = &self.pool else { return f.write_str("*") };
        write!(f, "{pool}")?;
        let Some(Within { namespace, prefix }) = &self.within else { return Ok(()) };
        if !namespace.is_empty() {
            write!(f, ":{namespace}")?;
        }
        if namespace.is_empty() || !prefix.is_empty() {
            write!(f, "/{prefix}")?;
        }
        Ok(())
    }
}

impl FromStr for Scope {
    type Err = RightsError;

    fn from_str(text: &str) -> Result<Scope, RightsError> {
        if text == "*" {
            return Ok(Scope::ALL);
        }
        let (head, prefix) = text.split_once('/').map_or((text, None), |(head, prefix)| (head, Some(prefix)));
        let (pool, namespace) =
            head.split_once(':').map_or((head, None), |(pool, namespace)| (pool, Some(namespace)));
        if namespace == Some("") {
            return Err(NameError::Empty("namespace".into()).into());
        }
        let (pool, namespace_name) = (PoolName::new(pool)?, namespace.unwrap_or(""));
        check_namespace(namespace_name)?;
        check_length("prefix", prefix.unwrap_or(""), MAX_OBJECT_NAME)?;
        let within = (namespace.is_some() || prefix.is_some()).then(|| Within {
            namespace: namespace_name.to_owned(),
            prefix: prefix.unwrap_or("").to_owned(),
        });
        Ok(Scope { pool: Some(pool), within })
    }
}

/// The verbs that a user may apply to the objects of a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessGrant {
    /// The objects.
    pub scope: Scope,
    /// The verbs.
    pub verbs: Verbs,
}

impl AccessGrant {
    /// Checks that the verbs apply to the scope.
    ///
    /// # Errors
    /// If the set of verbs is empty, or contains [`Verb::Admin`] and the scope is a part of a pool.
    pub fn check(&self) -> Result<(), RightsError> {
        if self.verbs.is_empty() {
            return Err(RightsError::None);
        }
        if self.verbs.contains(Verb::Admin) && self.scope.within.is_some() {
            return Err(RightsError::AdminWithin(self.scope.to_string()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_have_one_text_form() {
        for text in ["*", "p", "p/", "p/a/b", "p:n", "p:n/x"] {
            assert_eq!(text.parse::<Scope>().unwrap().to_string(), text);
        }
        assert_eq!("p:n/".parse::<Scope>().unwrap(), "p:n".parse().unwrap());
        for text in ["", "/a", "p:", "p:/a", "*/a", "p q", "p:n!/a", &format!("p/{}", "x".repeat(5000))] {
            assert!(text.parse::<Scope>().is_err(), "{text}");
        }
        let (all, part) = ("p".parse::<Scope>().unwrap(), "p/".parse::<Scope>().unwrap());
        assert!(all.within().is_none(), "a whole pool includes all namespaces");
        assert_eq!(part.within().unwrap().namespace, "");
    }

    #[test]
    fn verbs_have_a_text_form_and_unknown_ones_are_refused() {
        assert_eq!("list,read".parse::<Verbs>().unwrap().to_string(), "read,list");
        assert_eq!(Verbs::ALL.to_string(), "read,write,list,admin");
        for text in ["", "read,", "Read", "all"] {
            assert!(text.parse::<Verbs>().is_err(), "{text}");
        }
        assert!(Verbs::try_from(0x10).is_err());
        let grant = |scope: &str, verbs: &str| {
            AccessGrant { scope: scope.parse().unwrap(), verbs: verbs.parse().unwrap() }.check()
        };
        assert!(matches!(grant("p/", "admin"), Err(RightsError::AdminWithin(_))));
        assert_eq!((grant("p", "admin"), grant("*", "admin"), grant("p/", "read")), (Ok(()), Ok(()), Ok(())));
    }
}
