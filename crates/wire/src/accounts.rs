//! Tenants and users, as operators name and see them.

use std::fmt;
use std::str::FromStr;

use crate::limits::MAX_ACCOUNT_NAME;
use crate::name::check_account_label;
use crate::{AccessGrant, NameError, Scope, Verbs};

/// Checks the name of a tenant or of a user: 1 to 32 letters, digits, `.`, `_` or `-`, starting with a
/// letter or digit.
///
/// # Errors
/// If the name is invalid.
pub fn check_account(name: &str) -> Result<(), NameError> {
    check_account_label(name, MAX_ACCOUNT_NAME)
}

/// Name of a user, with its tenant. Its text form is `TENANT/USER`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccountName {
    tenant: String,
    user: String,
}

impl AccountName {
    /// Creates a name from its parts.
    ///
    /// # Errors
    /// If a part is invalid.
    pub fn new(tenant: impl Into<String>, user: impl Into<String>) -> Result<AccountName, NameError> {
        let (tenant, user) = (tenant.into(), user.into());
        check_account(&tenant)?;
        check_account(&user)?;
        Ok(AccountName { tenant, user })
    }

    /// Returns the tenant's name.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Returns the user's name within the tenant.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }
}

impl fmt::Display for AccountName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.user)
    }
}

impl FromStr for AccountName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<AccountName, NameError> {
        let (tenant, user) = text.split_once('/').ok_or_else(|| NameError::NoUser(text.to_owned()))?;
        AccountName::new(tenant, user)
    }
}

/// A request about tenants and users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccountRequest {
    /// Creates a tenant.
    CreateTenant {
        /// Name of the tenant.
        name: String,
    },
    /// Lists the tenants that the caller may see.
    ListTenants,
    /// Removes a tenant that has neither users nor pools.
    RemoveTenant {
        /// Name of the tenant.
        name: String,
    },
    /// Creates a user without grants.
    CreateUser {
        /// Name of the user.
        user: AccountName,
        /// Hash of the user's key.
        key: [u8; 32],
        /// Whether the user administers the node.
        is_node_admin: bool,
    },
    /// Lists the users of a tenant.
    ListUsers {
        /// Name of the tenant; `None` for the users of all tenants that the caller administers.
        tenant: Option<String>,
    },
    /// Removes a user. The user's sessions end.
    RemoveUser {
        /// Name of the user.
        user: AccountName,
    },
    /// Gives a user rights.
    Grant {
        /// Name of the user.
        user: AccountName,
        /// The rights.
        grant: AccessGrant,
    },
    /// Takes rights from a user.
    Revoke {
        /// Name of the user.
        user: AccountName,
        /// The scope of the grant; `None` for all grants.
        scope: Option<Scope>,
        /// The verbs.
        verbs: Verbs,
    },
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantInfo {
    /// Name of the tenant.
    pub name: String,
    /// Time of creation, in milliseconds since 1970.
    pub made_ms: u64,
    /// Number of the tenant's pools.
    pub pools: u32,
    /// Number of the tenant's users. The node's own administrator is not counted.
    pub users: u32,
}

/// A user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserInfo {
    /// Name of the user.
    pub user: AccountName,
    /// Hash of the user's key.
    pub key: [u8; 32],
    /// Whether the user administers the node.
    pub is_node_admin: bool,
    /// Time of creation, in milliseconds since 1970; 0 for the node's own administrator.
    pub made_ms: u64,
    /// What the user may do.
    pub grants: Vec<AccessGrant>,
}
