//! A node, its users and their tenants.

use std::sync::Arc;

use identity::{Identity, KeyHash, Trust, UserDirectory, UserName};

/// The users, each with the number and the name of its tenant. The tenant of `double` has the name of
/// a tenant that was removed.
const USERS: [(&str, u32, &str); 4] =
    [("attacker", 1, "films"), ("bystander", 2, "songs"), ("crowd", 3, "books"), ("double", 4, "films")];

/// The identity of a user or of the node.
fn identity_of(name: &str) -> Identity {
    Identity::from_seed([name.as_bytes()[0]; 32])
}

/// The node, and its users.
pub(super) struct Users;

impl Users {
    /// The trust of the node.
    pub(super) fn node() -> Trust {
        Trust::server(&identity_of("node"), Arc::new(Users))
    }

    /// The trust of a user.
    pub(super) fn trust(name: &str) -> Trust {
        Trust::client(&identity_of(name), identity_of("node").key())
    }

    /// Number of the user's tenant.
    pub(super) fn tenant_of(name: &str) -> u32 {
        USERS.iter().find(|(user, ..)| *user == name).expect("a user").1
    }
}

impl UserDirectory for Users {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let (user, tenant_id, tenant) = *USERS.iter().find(|(user, ..)| identity_of(user).key() == *key)?;
        Some(UserName { id: tenant_id, tenant_id, tenant: tenant.to_owned(), user: user.to_owned() })
    }
}
