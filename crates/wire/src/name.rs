//! Names: `POOL[:NAMESPACE]/OBJECT`.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::limits::{MAX_NAMESPACE, MAX_OBJECT_NAME, MAX_POOL_NAME};
use crate::{Error, placement};

/// Reason why a name is invalid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// A part of the name is empty.
    #[error("{0} is empty; write POOL[:NAMESPACE]/OBJECT")]
    Empty(String),
    /// A part of the name is too long.
    #[error("{what} has {len} bytes, but the maximum is {limit}; choose a shorter name")]
    TooLong {
        /// The part: pool, namespace or object name.
        what: String,
        /// Actual length, in bytes.
        len: usize,
        /// Maximum length, in bytes.
        limit: usize,
    },
    /// A part of the name is not UTF-8.
    #[error("{0} is not UTF-8; encode the name, or keep the raw name in an xattr")]
    NotUtf8(String),
    /// A part of the name contains a forbidden character.
    #[error(
        "{what} contains {found}; names of pools, namespaces, tenants and users consist of letters, digits, '.', '_' and '-' and start with a letter or digit, the names of system namespaces start with '_', and object names contain no NUL"
    )]
    BadCharacter {
        /// The part: pool, namespace or object name.
        what: String,
        /// The character, escaped.
        found: String,
    },
    /// The name of a user has no `/` between tenant and user.
    #[error("\"{0}\" has no '/'; write TENANT/USER")]
    NoUser(String),
    /// The name has no `/` between pool and object.
    #[error("\"{0}\" has no '/'; write POOL[:NAMESPACE]/OBJECT")]
    NoObject(String),
}

/// A pool's name: 1 to 64 letters, digits, `.`, `_` or `-`, starting with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolName(String);

impl PoolName {
    /// Creates a pool name from text.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn new(name: impl Into<String>) -> Result<PoolName, NameError> {
        let name = name.into();
        if name.is_empty() {
            return Err(NameError::Empty("pool name".into()));
        }
        check_label("pool name", &name, MAX_POOL_NAME)?;
        Ok(PoolName(name))
    }

    /// Creates a pool name from bytes that arrived over the wire.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn from_wire(name: &[u8]) -> Result<PoolName, NameError> {
        PoolName::new(utf8("pool name", name)?)
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PoolName {
    type Err = NameError;
    fn from_str(s: &str) -> Result<PoolName, NameError> {
        PoolName::new(s)
    }
}

/// A valid full name of an object: pool, namespace and object name.
///
/// ```
/// let name: wire::ObjectName = "photos:2024/summer/beach.jpg".parse()?;
/// assert_eq!((name.pool(), name.namespace(), name.object()), ("photos", "2024", "summer/beach.jpg"));
/// assert_eq!(name.to_string(), "photos:2024/summer/beach.jpg");
/// # Ok::<(), wire::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    pool: PoolName,
    namespace: String,
    object: String,
}

impl ObjectName {
    /// Creates a name from its parts. The empty namespace is the pool's default namespace.
    ///
    /// # Errors
    /// If a part is invalid.
    pub fn new(
        pool: PoolName,
        namespace: impl Into<String>,
        object: impl Into<String>,
    ) -> Result<ObjectName, NameError> {
        let (namespace, object) = (namespace.into(), object.into());
        check_namespace(&namespace)?;
        if object.is_empty() {
            return Err(NameError::Empty("object name".into()));
        }
        check_length("object name", &object, MAX_OBJECT_NAME)?;
        if object.contains('\0') {
            return Err(NameError::BadCharacter { what: "object name".into(), found: "\\0".into() });
        }
        Ok(ObjectName { pool, namespace, object })
    }

    /// Returns the pool's name.
    #[must_use]
    pub fn pool(&self) -> &str {
        self.pool.as_str()
    }

    /// Returns the namespace; empty for the default namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the object's name within its namespace.
    #[must_use]
    pub fn object(&self) -> &str {
        &self.object
    }

    /// Returns the name of another object with the same placement key, from the object's name as it
    /// arrived over the wire.
    ///
    /// # Errors
    /// [`Error::BadName`] if it is invalid, and [`Error::BadRequest`] if the placement keys differ.
    pub fn sibling(&self, object: &[u8]) -> Result<ObjectName, Error> {
        let sibling = ObjectName::new(self.pool.clone(), &*self.namespace, utf8("object name", object)?)?;
        let key = |name: &ObjectName| placement::key(name.namespace(), name.object()).to_owned();
        if key(&sibling) != key(self) {
            let why = format!(
                "\"{sibling}\" and \"{self}\" have different placement keys; in a namespace that starts with '_', \
                 the key is the part of the name after the last '/', and elsewhere the whole name"
            );
            return Err(Error::BadRequest(why));
        }
        Ok(sibling)
    }

    /// Returns the cursor with which the ordered listing of a group continues after this name:
    /// `namespace 00 object`.
    #[must_use]
    pub fn to_cursor(&self) -> Bytes {
        [self.namespace.as_bytes(), self.object.as_bytes()].join(&0).into()
    }

    /// Decodes the name from a cursor of the ordered listing of a group.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the cursor contains no valid name.
    pub fn from_cursor(pool: PoolName, cursor: &[u8]) -> Result<ObjectName, Error> {
        let bad = |why: &dyn fmt::Display| {
            Error::BadRequest(format!("the cursor does not come from an ordered listing: {why}"))
        };
        let split = cursor.iter().position(|byte| *byte == 0).map(|at| (&cursor[..at], &cursor[at + 1..]));
        let (namespace, object) = split.ok_or_else(|| bad(&"it contains no namespace"))?;
        let name = WireName {
            pool: Bytes::copy_from_slice(pool.as_str().as_bytes()),
            namespace: Bytes::copy_from_slice(namespace),
            object: Bytes::copy_from_slice(object),
        };
        name.check().map_err(|e| bad(&e))
    }

    /// Returns the name in the form that requests carry.
    #[must_use]
    pub fn to_wire(&self) -> WireName {
        WireName {
            pool: Bytes::copy_from_slice(self.pool().as_bytes()),
            namespace: Bytes::copy_from_slice(self.namespace.as_bytes()),
            object: Bytes::copy_from_slice(self.object.as_bytes()),
        }
    }
}

/// Checks a namespace that arrived over the wire.
///
/// # Errors
/// If the namespace is invalid.
pub(crate) fn namespace_from_wire(namespace: &[u8]) -> Result<&str, NameError> {
    let namespace = utf8("namespace", namespace)?;
    check_namespace(namespace)?;
    Ok(namespace)
}

/// Checks a namespace. The empty namespace is the default.
///
/// # Errors
/// If the namespace is invalid.
pub(crate) fn check_account_label(name: &str, limit: usize) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty("name of the tenant or user".into()));
    }
    check_label("name of the tenant or user", name, limit)
}

pub(crate) fn check_namespace(namespace: &str) -> Result<(), NameError> {
    check_length("namespace", namespace, MAX_NAMESPACE)?;
    // Without its first character, the name of a system namespace is a valid namespace.
    check_label("namespace", namespace.strip_prefix('_').unwrap_or(namespace), MAX_NAMESPACE)
}

/// Returns whether a namespace is a system namespace: Outboard itself stores objects there, for example
/// the chunks of disks. Its name starts with `_`. Its objects are placed by their [placement
/// keys](crate::placement::key).
#[must_use]
pub fn is_system_namespace(namespace: &str) -> bool {
    namespace.starts_with('_')
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pool())?;
        if !self.namespace.is_empty() {
            write!(f, ":{}", self.namespace)?;
        }
        write!(f, "/{}", self.object)
    }
}

impl FromStr for ObjectName {
    type Err = NameError;
    fn from_str(s: &str) -> Result<ObjectName, NameError> {
        let (place, object) = s.split_once('/').ok_or_else(|| NameError::NoObject(s.into()))?;
        let (pool, namespace) = match place.split_once(':') {
            Some((_, "")) => return Err(NameError::Empty("namespace".into())),
            Some((pool, namespace)) => (pool, namespace),
            None => (place, ""),
        };
        ObjectName::new(PoolName::new(pool)?, namespace, object)
    }
}

/// An object's name as it arrived over the wire. It may be invalid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireName {
    /// Name of the pool.
    pub pool: Bytes,
    /// Namespace; empty for the default namespace.
    pub namespace: Bytes,
    /// Name of the object.
    pub object: Bytes,
}

impl WireName {
    /// Checks the name, and converts it to an [`ObjectName`].
    ///
    /// # Errors
    /// If a part is invalid.
    pub fn check(&self) -> Result<ObjectName, NameError> {
        let pool = PoolName::from_wire(&self.pool)?;
        ObjectName::new(pool, utf8("namespace", &self.namespace)?, utf8("object name", &self.object)?)
    }
}

fn utf8<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a str, NameError> {
    std::str::from_utf8(bytes).map_err(|_| NameError::NotUtf8(what.into()))
}

pub(crate) fn check_length(what: &str, s: &str, limit: usize) -> Result<(), NameError> {
    if s.len() > limit {
        return Err(NameError::TooLong { what: what.into(), len: s.len(), limit });
    }
    Ok(())
}

fn check_label(what: &str, s: &str, limit: usize) -> Result<(), NameError> {
    check_length(what, s, limit)?;
    let bad = s.char_indices().find(|&(i, c)| {
        let inner = c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        !inner || (i == 0 && !c.is_ascii_alphanumeric())
    });
    match bad {
        Some((_, c)) => {
            Err(NameError::BadCharacter { what: what.into(), found: c.escape_default().to_string() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_invalid_object_name_is_refused_with_the_reason() {
        let err = |s: &str| s.parse::<ObjectName>().unwrap_err();
        assert!(matches!(err("pool"), NameError::NoObject(_)));
        assert!(matches!(err("pool/"), NameError::Empty(_)));
        assert!(matches!(err("/x"), NameError::Empty(_)));
        assert!(matches!(err("p:/x"), NameError::Empty(_)));
        assert!(matches!(err(".p/x"), NameError::BadCharacter { .. }));
        assert!(matches!(err("p:a b/x"), NameError::BadCharacter { .. }));
        assert!(matches!(err("p/a\0b"), NameError::BadCharacter { .. }));
        assert!(matches!(err(&format!("p/{}", "é".repeat(513))), NameError::TooLong { len: 1026, .. }));
        assert!(format!("p/{}", "é".repeat(512)).parse::<ObjectName>().is_ok());
        assert!(matches!(err("p:__x/y"), NameError::BadCharacter { .. }));
        assert_eq!("p:_x/y".parse::<ObjectName>().unwrap().namespace(), "_x");
        let mut wire = "p/x".parse::<ObjectName>().unwrap().to_wire();
        wire.object = Bytes::from_static(&[0xff]);
        assert!(matches!(wire.check(), Err(NameError::NotUtf8(_))));
    }

    proptest! {
        #[test]
        fn object_names_roundtrip_as_text_and_in_wire_form(s in "[a-z0-9][a-z0-9._-]{0,8}(:[a-z0-9][a-z0-9._-]{0,8})?/[^\0]{1,40}") {
            let name: ObjectName = s.parse().unwrap();
            prop_assert_eq!(&name.to_string(), &s);
            prop_assert_eq!(name.to_wire().check().unwrap(), name);
        }

        #[test]
        fn a_cursor_decodes_to_its_name_and_sorts_like_it(
            a in ("[a-z]{0,2}", "[\\x01a]{1,3}"), b in ("[a-z]{0,2}", "[\\x01a]{1,3}")
        ) {
            let pool = || PoolName::new("p").unwrap();
            let name = |(ns, object): &(String, String)| ObjectName::new(pool(), ns, object).unwrap();
            let (a, b) = (name(&a), name(&b));
            prop_assert_eq!(ObjectName::from_cursor(pool(), &a.to_cursor()).unwrap(), a.clone());
            prop_assert_eq!(a.to_cursor().cmp(&b.to_cursor()), a.cmp(&b));
        }

        #[test]
        fn decoding_arbitrary_cursors_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = ObjectName::from_cursor(PoolName::new("p").unwrap(), &bytes);
        }

        #[test]
        fn parsing_a_name_never_panics(s in ".*") {
            let _ = s.parse::<ObjectName>();
        }
    }
}
