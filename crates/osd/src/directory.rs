//! [`Directory`]: which users the node knows, by their keys.

use std::sync::{Arc, PoisonError, RwLock};

use base::collections::HashMap;
use identity::{KeyHash, UserDirectory, UserName};

use crate::accounts::Accounts;

/// The users in the node's map, by their keys. The osd keeps it up to date. Cloning is cheap, and all
/// clones have the same users. Any thread may use it.
#[derive(Debug, Clone, Default)]
pub struct Directory(Arc<RwLock<HashMap<KeyHash, UserName>>>);

impl Directory {
    /// Replaces the users.
    pub(crate) fn publish(&self, accounts: &Accounts) {
        let entry = |user: &crate::accounts::UserRecord| {
            let tenant = accounts.tenant_name(user.tenant).to_owned();
            (user.key, UserName { id: user.id, tenant_id: user.tenant, tenant, user: user.name.clone() })
        };
        let users = accounts.users().iter().map(entry).collect();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = users;
    }
}

impl UserDirectory for Directory {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }
}
