//! The identities in a simulation: the node, its administrator, and a guest, whose rights change.

use identity::{Caller, Identity, KeyHash, NODE_ADMIN, Trust, UserDirectory, UserName};
use osd::Directory;
use std::sync::Arc;
use wire::AccountName;

/// The identities in a simulation. They are the same in all simulations.
#[derive(Debug, Clone)]
pub struct SimIdentities {
    node: Identity,
    admin: Identity,
    guest: Identity,
    users: Directory,
}

/// Who makes the calls of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimUser {
    /// The administrator of the node, with all rights in the tenant `main`.
    Admin,
    /// A user whose rights operators grant and revoke.
    Guest,
}

impl Default for SimIdentities {
    fn default() -> SimIdentities {
        let identity = |number: u8| Identity::from_seed([number; 32]);
        let users = Directory::default();
        SimIdentities { node: identity(1), admin: identity(2), guest: identity(3), users }
    }
}

impl SimIdentities {
    /// Returns the users in the node's map.
    #[must_use]
    pub fn users(&self) -> Directory {
        self.users.clone()
    }

    /// Returns the trust of the osd.
    #[must_use]
    pub fn of_osd(&self) -> Trust {
        let known = KnownUsers { admin: self.admin.key(), users: self.users() };
        Trust::server(&self.node, Arc::new(known)).without_resumption()
    }

    /// Returns the trust of a client.
    #[must_use]
    pub fn of_client(&self, user: SimUser) -> Trust {
        Trust::client(self.identity(user), self.node.key()).without_resumption()
    }

    fn identity(&self, user: SimUser) -> &Identity {
        match user {
            SimUser::Admin => &self.admin,
            SimUser::Guest => &self.guest,
        }
    }

    /// Returns the bytes of a user's key hash.
    #[must_use]
    pub fn key(&self, user: SimUser) -> [u8; 32] {
        *self.identity(user).key().as_bytes()
    }

    /// Returns a user as the control plane sees it; `None` if the node does not know the user.
    #[must_use]
    pub fn caller(&self, user: SimUser) -> Option<Caller> {
        let key = self.identity(user).key();
        let known = KnownUsers { admin: self.admin.key(), users: self.users() };
        known.find(&key).map(|user| Caller { key, user })
    }
}

/// Returns the name of the guest.
#[must_use]
pub fn guest_name() -> AccountName {
    AccountName::new("main", "guest").expect("a valid name")
}

struct KnownUsers {
    admin: KeyHash,
    users: Directory,
}

impl UserDirectory for KnownUsers {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let admin = || UserName { id: NODE_ADMIN, tenant_id: 0, tenant: "main".into(), user: "admin".into() };
        if *key == self.admin { Some(admin()) } else { self.users.find(key) }
    }
}
