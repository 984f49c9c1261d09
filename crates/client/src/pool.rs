//! A pool, or one namespace in a pool.

use std::sync::Arc;

use wire::{ObjectName, PoolName};

use crate::handle::ObjectHandle;
use crate::requests::Requests;
use crate::{Listing, Object, Result};

/// A handle of a pool, or of one namespace in a pool. Clones are cheap.
#[derive(Debug, Clone)]
pub struct Pool {
    requests: Arc<Requests>,
    name: PoolName,
    namespace: String,
}

impl Pool {
    pub(crate) fn new(requests: Arc<Requests>, name: PoolName, namespace: String) -> Pool {
        Pool { requests, name, namespace }
    }

    /// Returns a namespace of this pool. The empty name is the default namespace.
    ///
    /// # Errors
    /// [`Error::Name`](crate::Error::Name) if the name is invalid.
    pub fn namespace(&self, namespace: &str) -> Result<Pool> {
        // This call checks only the namespace: the pool's name was checked before, and the name `x`
        // is valid.
        ObjectName::new(self.name.clone(), namespace, "x")?;
        Ok(Pool { namespace: namespace.to_owned(), ..self.clone() })
    }

    /// Returns the pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns an object by its name, without sending a request.
    ///
    /// # Errors
    /// [`Error::Name`](crate::Error::Name) if the name is invalid.
    pub fn object(&self, name: &str) -> Result<Object> {
        let name = ObjectName::new(self.name.clone(), self.namespace.as_str(), name)?;
        Ok(Object::new(ObjectHandle { requests: Arc::clone(&self.requests), name }))
    }

    /// Lists those objects of this namespace whose names start with `prefix`, in arbitrary order
    /// unless [`Listing::ordered`] is called.
    #[must_use]
    pub fn list(&self, prefix: &str) -> Listing {
        Listing::new(Arc::clone(&self.requests), self.name.clone(), Some(self.namespace.clone()), prefix)
    }

    /// Lists all objects of the pool, in any namespace, whose names start with `prefix`, in
    /// arbitrary order unless [`Listing::ordered`] is called.
    #[must_use]
    pub fn list_all_namespaces(&self, prefix: &str) -> Listing {
        Listing::new(Arc::clone(&self.requests), self.name.clone(), None, prefix)
    }
}
