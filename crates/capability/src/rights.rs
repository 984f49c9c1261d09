//! [`Rights`]: a verified capability, in the form that answers questions quickly.

use wire::{Verb, Verbs};

use crate::{ClaimedGrant, Claims};

/// The objects that a request concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource<'a> {
    /// A whole pool.
    Pool,
    /// One object.
    Object {
        /// The namespace; empty for the default namespace.
        namespace: &'a str,
        /// The object's name within the namespace.
        name: &'a str,
    },
    /// The objects of a namespace whose names begin with a prefix.
    Names {
        /// The namespace; empty for the default namespace.
        namespace: &'a str,
        /// The prefix.
        prefix: &'a [u8],
    },
}

/// What the client of a session may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    claims: Claims,
    /// The verbs that apply to all pools of the tenant.
    everywhere: Verbs,
}

impl Rights {
    /// Compiles the claims of a verified capability.
    #[must_use]
    pub fn new(claims: Claims) -> Rights {
        let whole = claims.grants.iter().filter(|grant| grant.pool.is_none() && grant.within.is_none());
        let everywhere = whole.fold(Verbs::NONE, |verbs, grant| verbs.with(grant.verbs));
        Rights { claims, everywhere }
    }

    /// Returns the claims.
    #[must_use]
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Returns whether the client may apply `verb` to `place` in the pool with this number. Without a
    /// number, the question is about each pool of the tenant, whether it exists or not.
    #[must_use]
    pub fn permits(&self, verb: Verb, pool: Option<u32>, place: Resource<'_>) -> bool {
        self.everywhere.contains(verb)
            || self.claims.grants.iter().any(|grant| {
                grant.verbs.contains(verb) && pool.is_some() && grant.pool == pool && is_covered(grant, place)
            })
    }
}

/// Whether `place` lies within the part of the pool to which the grant applies.
fn is_covered(grant: &ClaimedGrant, place: Resource<'_>) -> bool {
    let Some(within) = &grant.within else { return true };
    match place {
        Resource::Pool => false,
        Resource::Object { namespace, name } => {
            within.namespace == namespace && name.starts_with(&within.prefix)
        }
        Resource::Names { namespace, prefix } => {
            within.namespace == namespace && prefix.starts_with(within.prefix.as_bytes())
        }
    }
}

#[cfg(test)]
mod tests {
    use identity::KeyHash;
    use uuid::Uuid;
    use wire::{Scope, Within};

    use super::*;

    fn rights(grants: &[(&str, &str)]) -> Rights {
        let grant = |(scope, verbs): &(&str, &str)| {
            let scope: Scope = scope.parse().unwrap();
            let pool = scope.pool().map(|pool| pool.as_str()[1..].parse().unwrap());
            let within: Option<Within> = scope.within().cloned();
            ClaimedGrant { pool, within, verbs: verbs.parse().unwrap() }
        };
        let grants = grants.iter().map(grant).collect();
        Rights::new(Claims {
            node: Uuid::nil(),
            name: "t/u".into(),
            tenant: 1,
            user: 2,
            revision: 3,
            key: KeyHash::from([4; 32]),
            issued: 5,
            expires: 6,
            id: [7; 16],
            grants,
            qos_class: 0,
            memory: vec![],
        })
    }

    fn object(name: &str) -> Resource<'_> {
        Resource::Object { namespace: "", name }
    }

    fn names(prefix: &str) -> Resource<'_> {
        Resource::Names { namespace: "", prefix: prefix.as_bytes() }
    }

    #[test]
    fn rights_end_where_their_grants_end() {
        let rights = rights(&[("p1", "read"), ("p2/a/", "read,list"), ("p3:n", "write"), ("p4:n/x", "read")]);
        let may = |verb, pool, place| rights.permits(verb, Some(pool), place);
        assert!(may(Verb::Read, 1, object("x")) && may(Verb::Read, 1, Resource::Pool));
        assert!(!may(Verb::Write, 1, object("x")) && !may(Verb::List, 1, names("")));
        assert!(may(Verb::Read, 2, object("a/x")) && may(Verb::List, 2, names("a/")));
        assert!(may(Verb::List, 2, names("a/x")) && !may(Verb::List, 2, names("a")));
        assert!(!may(Verb::Read, 2, object("a")) && !may(Verb::Read, 2, object("b/a/")));
        assert!(!may(Verb::List, 2, Resource::Pool) && !may(Verb::List, 2, names("")));
        let elsewhere = Resource::Object { namespace: "m", name: "a/x" };
        assert!(!may(Verb::Read, 2, elsewhere) && may(Verb::Read, 1, elsewhere));
        let in_n = Resource::Object { namespace: "n", name: "x1" };
        assert!(may(Verb::Write, 3, in_n) && !may(Verb::Write, 3, object("x1")));
        assert!(may(Verb::Read, 4, in_n) && !may(Verb::Read, 4, object("x1")));
        assert!(!may(Verb::Read, 5, object("x")), "a pool without grant");
        assert!(!rights.permits(Verb::Read, None, object("x")), "a missing pool");
    }

    #[test]
    fn a_grant_on_all_pools_covers_missing_ones_and_only_its_verbs() {
        let rights = rights(&[("*", "read,list"), ("p1", "admin")]);
        assert!(rights.permits(Verb::Read, None, object("x")));
        assert!(rights.permits(Verb::List, Some(9), Resource::Pool));
        assert!(!rights.permits(Verb::Write, Some(9), object("x")));
        assert!(rights.permits(Verb::Admin, Some(1), Resource::Pool));
        assert!(!rights.permits(Verb::Admin, Some(2), Resource::Pool));
        assert!(!rights.permits(Verb::Admin, None, Resource::Pool));
    }
}
