//! [`Routes`]: the endpoint of each shard of the osd, and the shard to which each request belongs.

use std::collections::BTreeMap;

use bytes::Bytes;
use wire::limits::{MAX_PG_COUNT, MAX_POOLS, MAX_SHARDS};
use wire::{List, ObjectRequest, PartId, ReadFirst, RequestBody, placement};

use crate::{Error, Result};

/// What the client has learned about the osd's shards. The osd's answers `Opened` name the shards'
/// ports. Its refusals `WrongShard` state the number of placement groups of a pool.
pub(crate) struct Routes {
    /// The endpoint that the user gave.
    entry: String,
    /// The shard that answers at `entry`. `None` if this is unknown, because the osd was restarted
    /// with other ports.
    entry_shard: Option<u16>,
    /// Port of each shard, by the shard's number.
    ports: Vec<u16>,
    /// Number of placement groups of pools, by the pool's name; at most [`MAX_POOLS`] entries.
    groups: BTreeMap<Bytes, u32>,
}

impl Routes {
    /// Creates the routes of an osd of which `shard` has answered at the endpoint `entry`.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the list of ports is invalid.
    pub(crate) fn new(entry: &str, shard: u16, ports: Vec<u16>) -> Result<Routes> {
        check(shard, &ports)?;
        Ok(Routes { entry: entry.to_owned(), entry_shard: Some(shard), ports, groups: BTreeMap::new() })
    }

    /// Returns the number of shards.
    pub(crate) fn shards(&self) -> u16 {
        self.ports.len() as u16
    }

    /// Returns the endpoint of a shard; `None` if the osd does not have the shard.
    pub(crate) fn endpoint(&self, shard: u16) -> Option<String> {
        let port = self.ports.get(usize::from(shard))?;
        if self.entry_shard == Some(shard) {
            return Some(self.entry.clone());
        }
        let (host, _) = self.entry.rsplit_once(':').unwrap_or((&self.entry, ""));
        Some(format!("{host}:{port}"))
    }

    /// Learns from the answer `Opened` at an endpoint. Returns whether shards have other endpoints
    /// now.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the list of ports is invalid.
    pub(crate) fn opened(&mut self, endpoint: &str, shard: u16, ports: &[u16]) -> Result<bool> {
        check(shard, ports)?;
        let port_of = |ports: &[u16], shard: u16| ports.get(usize::from(shard)).copied();
        let entry_shard = match self.entry_shard {
            _ if endpoint == self.entry => Some(shard),
            Some(before) if port_of(ports, before) == port_of(&self.ports, before) => Some(before),
            _ => None,
        };
        let has_changed = entry_shard != self.entry_shard || self.ports != ports;
        self.entry_shard = entry_shard;
        self.ports = ports.to_vec();
        Ok(has_changed)
    }

    /// Learns from the refusal `WrongShard { groups, shards }` of a request that was sent to
    /// `shard`.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the refusal contradicts itself or the answers `Opened`.
    pub(crate) fn wrong_shard(
        &mut self,
        body: &RequestBody,
        shard: u16,
        groups: u32,
        shards: u16,
    ) -> Result<()> {
        let refusal = || format!("shard {shard} refuses a request as one of {shards} shards");
        if shards != self.shards() {
            return Err(Error::Protocol(format!("{}, but the node has {}", refusal(), self.shards())));
        }
        if !groups.is_power_of_two() || groups > MAX_PG_COUNT {
            return Err(Error::Protocol(format!("{}, but names {groups} placement groups", refusal())));
        }
        if let RequestBody::Object(request) = body
            && let Some(pool) = pool_of(request)
        {
            if self.groups.len() >= MAX_POOLS && !self.groups.contains_key(pool) {
                // Most of the entries belong to pools that were removed. The numbers of the other
                // pools are learned again at the cost of one refusal per pool.
                self.groups.clear();
            }
            self.groups.insert(pool.clone(), groups);
        }
        if self.shard_of(body) == Some(shard) {
            return Err(Error::Protocol(format!("{}, but the request belongs to this shard", refusal())));
        }
        Ok(())
    }

    /// Returns the shard to which a request belongs; `None` if the number of placement groups of
    /// the request's pool is unknown.
    pub(crate) fn shard_of(&self, body: &RequestBody) -> Option<u16> {
        let RequestBody::Object(request) = body else { return Some(0) };
        let (name, part) = match request {
            ObjectRequest::Mutate(mutate) => (&mutate.name, mutate.part.as_ref()),
            ObjectRequest::Read(read) | ObjectRequest::ReadFirst(ReadFirst { read, .. }) => {
                (&read.name, read.part.as_ref())
            }
            ObjectRequest::Query(query) => (&query.name, None),
            ObjectRequest::List(List { group: Some(group), .. }) => {
                return Some(placement::shard(*group, self.shards()));
            }
            _ => return Some(0),
        };
        let namespace = std::str::from_utf8(&name.namespace).ok()?;
        let object = std::str::from_utf8(&name.object).ok()?;
        self.shard_of_object(&name.pool, namespace, object, part)
    }

    /// Returns the shard that serves an object, or a part of a striped object; `None` if the pool's
    /// number of placement groups is unknown.
    pub(crate) fn shard_of_object(
        &self,
        pool: &[u8],
        namespace: &str,
        object: &str,
        part: Option<&PartId>,
    ) -> Option<u16> {
        if self.shards() == 1 {
            return Some(0);
        }
        let groups = *self.groups.get(pool)?;
        let group = placement::group(placement::hash(namespace, object, part), groups);
        Some(placement::shard(group, self.shards()))
    }
}

/// Returns the pool of a request about one object.
fn pool_of(request: &ObjectRequest) -> Option<&Bytes> {
    match request {
        ObjectRequest::Mutate(mutate) => Some(&mutate.name.pool),
        ObjectRequest::Read(read) | ObjectRequest::ReadFirst(ReadFirst { read, .. }) => Some(&read.name.pool),
        ObjectRequest::Query(query) => Some(&query.name.pool),
        _ => None,
    }
}

/// Checks the answer `Opened` of a shard.
fn check(shard: u16, ports: &[u16]) -> Result<()> {
    if ports.len() > usize::from(MAX_SHARDS) || usize::from(shard) >= ports.len() {
        return Err(Error::Protocol(format!("shard {shard} of {} shards has answered", ports.len())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use wire::{Query, WireName};

    use super::*;

    fn query(pool: &str, object: &str) -> RequestBody {
        let (pool, object) =
            (Bytes::copy_from_slice(pool.as_bytes()), Bytes::copy_from_slice(object.as_bytes()));
        let name = WireName { pool, namespace: Bytes::new(), object };
        RequestBody::Object(ObjectRequest::Query(Query { name, conditions: vec![], ops: vec![] }))
    }

    fn list(group: Option<u32>) -> RequestBody {
        let (pool, cursor) = (Bytes::from_static(b"pool"), Bytes::new());
        let prefix = Bytes::new();
        let list = List { pool, namespace: None, prefix, group, cursor, limit: 1, skip_unavailable: false };
        RequestBody::Object(ObjectRequest::List(list))
    }

    fn routes(shards: u16) -> Routes {
        Routes::new("node:7000", 0, (7000..7000 + shards).collect()).unwrap()
    }

    /// Returns the shard to which an object of a pool with 16 placement groups belongs.
    fn home(object: &str, shards: u16) -> u16 {
        placement::shard(placement::group(placement::hash("", object, None), 16), shards)
    }

    #[test]
    fn only_the_port_differs_between_the_endpoints_of_shards() {
        for (entry, other) in [
            ("node:7000", "node:7001"),
            ("[::1]:7000", "[::1]:7001"),
            ("ofi:verbs@192.0.2.1:7000", "ofi:verbs@192.0.2.1:7001"),
        ] {
            let routes = Routes::new(entry, 0, vec![9, 7001]).unwrap();
            assert_eq!(routes.endpoint(0).as_deref(), Some(entry), "the user's port, not the listed one");
            assert_eq!(routes.endpoint(1).as_deref(), Some(other));
            assert_eq!(routes.endpoint(2), None);
        }
    }

    #[test]
    fn the_users_endpoint_may_be_the_port_of_any_shard_and_may_change_its_shard() {
        let mut routes = Routes::new("node:7001", 1, vec![7000, 7001, 7002]).unwrap();
        let endpoints =
            |routes: &Routes| (0..4).map_while(|shard| routes.endpoint(shard)).collect::<Vec<_>>();
        assert_eq!(endpoints(&routes), ["node:7000", "node:7001", "node:7002"]);
        assert!(!routes.opened("node:7000", 0, &[7000, 7001, 7002]).unwrap());
        // The restarted osd has one shard, at the user's endpoint.
        assert!(routes.opened("node:7001", 0, &[7001]).unwrap());
        assert_eq!(endpoints(&routes), ["node:7001"]);
        // Another shard answers that the ports of all shards have changed.
        assert!(routes.opened("node:7001", 0, &[7001, 7100]).unwrap());
        assert_eq!(endpoints(&routes), ["node:7001", "node:7100"]);
        assert!(routes.opened("node:7100", 0, &[7100, 7200]).unwrap());
        assert_eq!(endpoints(&routes), ["node:7100", "node:7200"]);
    }

    #[test]
    fn invalid_lists_of_shards_are_refused() {
        for (shard, ports) in [(0, 0), (1, 1), (0, usize::from(MAX_SHARDS) + 1)] {
            let ports = vec![1; ports];
            assert!(matches!(Routes::new("node:1", shard, ports.clone()), Err(Error::Protocol(_))));
            assert!(matches!(routes(1).opened("node:1", shard, &ports), Err(Error::Protocol(_))));
        }
    }

    #[test]
    fn requests_without_a_group_belong_to_the_first_shard() {
        for shards in [1, 3] {
            let routes = routes(shards);
            assert_eq!(routes.shard_of(&list(None)), Some(0));
            assert_eq!(routes.shard_of(&list(Some(5))), Some(5 % shards));
        }
    }

    #[test]
    fn a_refusal_teaches_the_shard_of_each_object_of_the_pool() {
        let mut routes = routes(3);
        assert_eq!(routes.shard_of(&query("pool", "a")), None);
        let wrong = (home("a", 3) + 1) % 3;
        routes.wrong_shard(&query("pool", "a"), wrong, 16, 3).unwrap();
        for object in ["a", "b", "c", "d"] {
            assert_eq!(routes.shard_of(&query("pool", object)), Some(home(object, 3)));
        }
        assert_eq!(routes.shard_of(&query("other", "a")), None);
        // The numbers of groups stay known when the osd restarts with another number of shards.
        routes.opened("node:7000", 0, &[7000, 7001]).unwrap();
        assert_eq!(routes.shard_of(&query("pool", "a")), Some(home("a", 2)));
    }

    #[test]
    fn with_one_shard_every_route_is_known() {
        assert_eq!(routes(1).shard_of(&query("pool", "a")), Some(0));
        assert!(matches!(routes(1).wrong_shard(&query("pool", "a"), 0, 16, 1), Err(Error::Protocol(_))));
    }

    #[test]
    fn refusals_that_contradict_the_node_are_protocol_errors() {
        let (right, body) = (home("a", 3), query("pool", "a"));
        let wrong = (right + 1) % 3;
        for (body, shard, groups, shards) in [
            (&body, right, 16, 3),
            (&body, wrong, 15, 3),
            (&body, wrong, 0, 3),
            (&body, wrong, 2 * MAX_PG_COUNT, 3),
            (&body, wrong, 16, 4),
            (&list(None), 0, 16, 3),
            (&list(Some(4)), 1, 16, 3),
        ] {
            let refused = routes(3).wrong_shard(body, shard, groups, shards);
            assert!(matches!(refused, Err(Error::Protocol(_))), "{body:?} {shard} {groups} {shards}");
        }
    }

    #[test]
    fn the_number_of_known_pools_is_bounded() {
        let mut routes = routes(3);
        for pool in 0..=MAX_POOLS {
            let pool = format!("pool{pool}");
            routes.wrong_shard(&query(&pool, "a"), (home("a", 3) + 1) % 3, 16, 3).unwrap();
            assert!(routes.groups.len() <= MAX_POOLS);
            assert!(routes.shard_of(&query(&pool, "a")).is_some());
        }
    }
}
