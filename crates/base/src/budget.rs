//! Who may hold how much of what there is little of: places in a handshake, sessions, descriptors.
//!
//! A [`Budget`] divides a fixed number of places between peer addresses. As long as there is room, an address may hold any
//! number of places. When all are taken, an address that holds less than its fair share (the limit divided by the number of
//! addresses) always gets a place: that of the longest-silent holder at an address above its fair share. So whoever opens
//! many connections can lose them to others, and cannot keep others out. An address at or above its share gets only a
//! place of its own that has been silent for a while.
//!
//! State without I/O or clock: the caller passes the time, closes the holder that [`admit`](Budget::admit) names, and
//! serializes the calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Descriptors kept for other files than connections: of the store, the log, the admin ports, DMA engines.
const DESCRIPTORS_KEPT: usize = 128;

/// Fewest connections that are planned for, however low the limit on descriptors is.
const DESCRIPTORS_MIN: usize = 16;

/// A peer's address, as far as budgets tell peers apart: an IPv4 address, or the /64 of an IPv6 address, within which a
/// machine chooses its addresses freely.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// A peer without an address of its own: a UNIX socket, or a simulated network.
    #[default]
    Local,
    /// An IPv4 address.
    V4([u8; 4]),
    /// The first 64 bits of an IPv6 address.
    V6([u8; 8]),
}

impl From<IpAddr> for Peer {
    fn from(ip: IpAddr) -> Peer {
        match ip.to_canonical() {
            IpAddr::V4(ip) => Peer::V4(ip.octets()),
            IpAddr::V6(ip) => {
                let [a, b, c, d, e, f, g, h, ..] = ip.octets();
                Peer::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

/// All places are taken, and the asking address holds its fair share of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {limit} places are taken, and this address holds its fair share of {share}")]
pub struct Full {
    /// Places there are.
    pub limit: usize,
    /// Places that each address has a right to now.
    pub share: usize,
}

/// How much a holder misses its place. The order is that of reclaiming.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// The peer has gone; the place only remembers it.
    Absent,
    Present,
}

/// What places of one address are ordered by: the first is reclaimed first.
type Turn<I> = (Standing, Instant, I);

/// A fixed number of places, divided fairly between peer addresses. Holders have ids of type `I`.
#[derive(Debug)]
pub struct Budget<I> {
    limit: usize,
    patience: Duration,
    holders: HashMap<I, (Peer, Standing, Instant)>,
    /// The same by address. No address is there without a place.
    peers: BTreeMap<Peer, BTreeSet<Turn<I>>>,
}

impl<I: Copy + Ord + Hash> Budget<I> {
    /// A budget of `limit` places, at least one. An address that holds its fair share gets another place only instead of one
    /// of its own, and only of a holder that has gone or been silent for `patience`.
    #[must_use]
    pub fn new(limit: usize, patience: Duration) -> Budget<I> {
        Budget { limit: limit.max(1), patience, holders: HashMap::new(), peers: BTreeMap::new() }
    }

    /// Places there are.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Places taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.holders.len()
    }

    /// Places that an address has a right to, with `peer` among those that ask.
    fn share(&self, peer: Peer) -> usize {
        let peers = self.peers.len() + usize::from(!self.peers.contains_key(&peer));
        (self.limit / peers).max(1)
    }

    /// Gives `id` at `peer` a place. Returns the holder that has lost its place for that: the caller must close it, and need
    /// not [remove](Budget::remove) it. An id that has a place keeps it and counts as heard.
    ///
    /// # Errors
    /// If every place is taken and the address has its fair share.
    pub fn admit(&mut self, id: I, peer: Peer, now: Instant) -> Result<Option<I>, Full> {
        if self.holders.contains_key(&id) {
            self.heard(id, now);
            return Ok(None);
        }
        let victim = if self.holders.len() < self.limit {
            None
        } else {
            let share = self.share(peer);
            let victim = match self.peers.get(&peer) {
                Some(own) if own.len() >= share => self.expendable(own, now),
                // If no address is above its share, there are more addresses than places.
                _ => self.longest_silent(|places| places > share).or_else(|| self.longest_silent(|_| true)),
            };
            Some(victim.ok_or(Full { limit: self.limit, share })?)
        };
        if let Some(victim) = victim {
            self.remove(victim);
        }
        self.insert(id, peer, Standing::Present, now);
        assert!(self.holders.len() <= self.limit, "a budget gives no place twice");
        Ok(victim)
    }

    /// Takes a place away because there is less than was thought: from the longest-silent holder at an address that holds
    /// more than the average. If all addresses hold the same, only one that has gone or been silent for the budget's
    /// patience loses its place.
    pub fn shed(&mut self, now: Instant) -> Option<I> {
        let average = self.holders.len() / self.peers.len().max(1);
        let victim = self
            .longest_silent(|places| places > average)
            .or_else(|| self.peers.values().find_map(|places| self.expendable(places, now)))?;
        self.remove(victim);
        Some(victim)
    }

    /// The holder was heard: its turn to lose its place is later.
    pub fn heard(&mut self, id: I, now: Instant) {
        self.change(id, Standing::Present, now);
    }

    /// The holder has gone, and may come back: it loses its place before those that are there.
    pub fn left(&mut self, id: I, now: Instant) {
        self.change(id, Standing::Absent, now);
    }

    /// Gives a place back. Ids without one are passed over.
    pub fn remove(&mut self, id: I) {
        let Some((peer, standing, heard)) = self.holders.remove(&id) else { return };
        let places = self.peers.get_mut(&peer).expect("an address is known while it holds a place");
        assert!(places.remove(&(standing, heard, id)), "a place is known by its holder and by its address");
        if places.is_empty() {
            self.peers.remove(&peer);
        }
    }

    fn change(&mut self, id: I, standing: Standing, now: Instant) {
        let Some(&(peer, ..)) = self.holders.get(&id) else { return };
        self.remove(id);
        self.insert(id, peer, standing, now);
    }

    fn insert(&mut self, id: I, peer: Peer, standing: Standing, now: Instant) {
        self.holders.insert(id, (peer, standing, now));
        self.peers.entry(peer).or_default().insert((standing, now, id));
    }

    /// The holder whose turn it is among the addresses that hold so many places.
    fn longest_silent(&self, holds: impl Fn(usize) -> bool) -> Option<I> {
        let first = self.peers.values().filter(|places| holds(places.len())).filter_map(BTreeSet::first);
        first.min().map(|(.., id)| *id)
    }

    /// The first of these places, if it may be taken for another one at the same address.
    fn expendable(&self, places: &BTreeSet<Turn<I>>, now: Instant) -> Option<I> {
        let (standing, heard, id) = places.first()?;
        let has_waited = now.saturating_duration_since(*heard) >= self.patience;
        (*standing == Standing::Absent || has_waited).then_some(*id)
    }
}

/// How many connections this process can have open at a time: its soft limit on descriptors, less those open now, less a
/// reserve for other files. To be asked when everything else is open.
#[must_use]
pub fn spare_descriptors() -> usize {
    let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let soft = soft.and_then(|soft| usize::try_from(soft).ok()).unwrap_or(usize::MAX);
    // Without /proc the reserve has to do for these, too.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    soft.saturating_sub(open + DESCRIPTORS_KEPT).max(DESCRIPTORS_MIN)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Peer = Peer::V4([192, 0, 2, 1]);
    const B: Peer = Peer::V4([192, 0, 2, 2]);
    const C: Peer = Peer::V4([192, 0, 2, 3]);
    const NEVER: Duration = Duration::MAX;

    /// Times for one test.
    struct Clock(Instant);

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.0 + Duration::from_secs(seconds)
        }
    }

    /// Ids 0.. of `A`, heard in that order, one second apart.
    fn full(limit: u64, patience: Duration) -> (Budget<u64>, Clock) {
        let (mut budget, clock) = (Budget::new(limit as usize, patience), Clock(Instant::now()));
        for id in 0..limit {
            assert_eq!(budget.admit(id, A, clock.at(id)), Ok(None), "one address may hold everything");
        }
        (budget, clock)
    }

    #[test]
    fn addresses_are_told_apart_by_ipv4_address_or_ipv6_network() {
        let peer = |text: &str| Peer::from(text.parse::<IpAddr>().unwrap());
        assert_ne!(peer("127.0.0.1"), peer("127.0.0.2"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_eq!(peer("2001:db8::1"), peer("2001:db8:0:0:ffff::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
    }

    #[test]
    fn newcomer_gets_place_of_longest_silent_until_shares_are_fair() {
        let (mut budget, clock) = full(4, NEVER);
        budget.heard(0, clock.at(10));
        assert_eq!(budget.admit(10, B, clock.at(11)), Ok(Some(1)));
        assert_eq!(budget.admit(11, B, clock.at(12)), Ok(Some(2)));
        assert_eq!(budget.admit(12, B, clock.at(13)), Err(Full { limit: 4, share: 2 }));
        // A third address finds two that have more than a third.
        assert_eq!(budget.admit(20, C, clock.at(14)), Ok(Some(3)));
        assert_eq!(budget.admit(21, C, clock.at(14)), Err(Full { limit: 4, share: 1 }));
        // The address with less than before is below its share again when one has gone.
        budget.remove(20);
        assert_eq!(budget.admit(4, A, clock.at(15)), Ok(None));
        assert_eq!(budget.taken(), 4);
    }

    #[test]
    fn holders_that_have_gone_lose_their_places_before_those_that_are_there() {
        let (mut budget, clock) = full(4, NEVER);
        budget.left(3, clock.at(10));
        budget.left(2, clock.at(11));
        budget.heard(2, clock.at(12));
        assert_eq!(budget.admit(10, B, clock.at(20)), Ok(Some(3)));
        assert_eq!(budget.admit(11, B, clock.at(20)), Ok(Some(0)));
        budget.left(11, clock.at(21));
        assert_eq!(budget.admit(12, B, clock.at(22)), Ok(Some(11)), "gone: its own address may take it");
    }

    #[test]
    fn own_places_are_reclaimed_after_patience_only() {
        let (mut budget, clock) = full(3, Duration::from_secs(10));
        assert_eq!(budget.admit(10, A, clock.at(9)), Err(Full { limit: 3, share: 3 }));
        assert_eq!(budget.admit(10, A, clock.at(10)), Ok(Some(0)));
        let (mut at_once, clock) = full(3, Duration::ZERO);
        assert_eq!(at_once.admit(10, A, clock.at(3)), Ok(Some(0)));
    }

    #[test]
    fn more_addresses_than_places_replace_the_longest_silent() {
        let (mut budget, clock) = (Budget::new(2, NEVER), Clock(Instant::now()));
        for (id, expected) in [(0, None), (1, None), (2, Some(0)), (3, Some(1))] {
            let peer = Peer::V6([id as u8; 8]);
            assert_eq!(budget.admit(id, peer, clock.at(id)), Ok(expected));
        }
    }

    #[test]
    fn shedding_takes_from_who_holds_most_and_spares_the_active() {
        let (mut budget, clock) = full(3, Duration::from_secs(10));
        budget.remove(2);
        budget.admit(10, B, clock.at(0)).unwrap();
        assert_eq!(budget.shed(clock.at(5)), Some(0), "A holds more, though B has been silent longer");
        assert_eq!(budget.shed(clock.at(5)), None, "both hold one, and neither for long");
        assert_eq!(budget.shed(clock.at(11)), Some(1));
        assert_eq!(budget.shed(clock.at(11)), Some(10));
        assert_eq!(budget.shed(clock.at(11)), None);
    }

    #[test]
    fn spare_descriptors_leave_a_reserve() {
        let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap();
        let spare = spare_descriptors();
        assert!(spare >= DESCRIPTORS_MIN);
        assert!(spare == DESCRIPTORS_MIN || spare + DESCRIPTORS_KEPT < soft as usize, "{spare} of {soft}");
    }

    proptest! {
        #[test]
        fn an_address_below_its_fair_share_is_never_refused(
            limit in 1usize..8,
            steps in proptest::collection::vec((0u8..4, 0u8..5, 0u64..30), 1..200),
        ) {
            let clock = Clock(Instant::now());
            let mut budget = Budget::new(limit, Duration::from_secs(3));
            let mut model: BTreeMap<u64, Peer> = BTreeMap::new();
            for (second, (step, address, id)) in (0..).zip(steps) {
                let (peer, now) = (Peer::V4([address; 4]), clock.at(second));
                match step {
                    0 => { budget.remove(id); model.remove(&id); }
                    1 => budget.heard(id, now),
                    2 => budget.left(id, now),
                    _ => {
                        let held = |p: Peer| model.values().filter(|q| **q == p).count();
                        let addresses: BTreeSet<Peer> = model.values().copied().chain([peer]).collect();
                        let share = (limit / addresses.len()).max(1);
                        let is_known = model.contains_key(&id);
                        match budget.admit(id, peer, now) {
                            Err(_) => prop_assert!(held(peer) >= share && model.len() == limit),
                            Ok(None) => prop_assert!(is_known || model.len() < limit),
                            Ok(Some(victim)) => {
                                let loser = model[&victim];
                                prop_assert!(loser == peer || held(loser) > share || addresses.len() > limit);
                                model.remove(&victim);
                            }
                        }
                        if budget.holders.contains_key(&id) {
                            model.entry(id).or_insert(peer);
                        }
                    }
                }
                prop_assert_eq!(budget.taken(), model.len());
                prop_assert_eq!(budget.peers.values().map(BTreeSet::len).sum::<usize>(), model.len());
            }
        }
    }
}
