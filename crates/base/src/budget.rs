//! [`Budget`]: divides a limited number of slots (for handshakes, connections or descriptors)
//! fairly between peer addresses.
//!
//! While slots are free, a [`Budget`] assigns any number of slots to an address. When all slots are
//! taken, a newcomer can only take the slot of another holder. The budget has a timeout
//! (`patience`) after which a disconnected or silent holder may lose its slot. Two cases exist:
//!
//! 1. The newcomer's address already holds its fair share (the limit divided by the number of
//!    addresses). The first existing holder in this list loses its slot: a disconnected holder at
//!    the same address; any holder that has been disconnected for the timeout; a holder at the same
//!    address that has been silent for the timeout. If there is no holder of these three kinds, the
//!    budget refuses the newcomer.
//!
//! 2. The newcomer's address holds less than its fair share. The first existing holder in this list
//!    loses its slot: any holder that has been disconnected for the timeout; a disconnected holder
//!    at an address above its share; the longest-silent holder at an address above its share. In
//!    this case, the budget never refuses the newcomer.
//!
//! So an address that opens many connections loses some of their slots to other addresses, and
//! cannot keep other addresses out.
//!
//! A budget does no I/O and reads no clock. The caller passes the time, closes the holder that
//! [`admit`](Budget::admit) names, and serializes the calls.
//!
//! While slots are free, a call takes constant time. The first call that reclaims a slot sorts the
//! holders. The budget keeps the sorted order until more than half of the sorted holders have left.
//! Meanwhile a call takes time logarithmic in the number of slots. A call that reclaims a slot also
//! visits one list for each distinct number of slots that an address holds: at most `sqrt(2 *
//! limit)` lists.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::net::IpAddr;
use std::time::Duration;

use crate::clock::Instant;
use crate::collections::HashMap;

/// Number of file descriptors reserved for other files than connections: the files of the store,
/// the log, the admin ports and the DMA engines.
const DESCRIPTORS_KEPT: usize = 128;

/// Minimum result of [`spare_descriptors`], even if the limit on descriptors is lower.
const DESCRIPTORS_MIN: usize = 16;

/// A peer's address at the precision that budgets use: an IPv4 address, or the /64 prefix of an
/// IPv6 address. A machine can choose its addresses freely within a /64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerAddress {
    /// A peer without an address of its own: a UNIX socket, or a simulated network.
    #[default]
    Local,
    /// An IPv4 address.
    V4([u8; 4]),
    /// The first 64 bits of an IPv6 address.
    V6([u8; 8]),
}

impl From<IpAddr> for PeerAddress {
    fn from(ip: IpAddr) -> PeerAddress {
        match ip.to_canonical() {
            IpAddr::V4(ip) => PeerAddress::V4(ip.octets()),
            IpAddr::V6(ip) => {
                let [a, b, c, d, e, f, g, h, ..] = ip.octets();
                PeerAddress::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

/// Error: all slots are taken, and the newcomer's address holds its fair share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {limit} slots are taken, and this address holds its fair share of {share} slots")]
pub struct Full {
    /// Total number of slots.
    pub limit: usize,
    /// Fair share of each address at this time, in slots.
    pub share: usize,
}

/// Connection state of a holder's peer. Holders with absent peers lose their slots first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum HolderPresence {
    /// The peer has disconnected, but may reconnect and use its slot again.
    Absent,
    Present,
}

/// Sort key of the holders of one address. The slot of the first holder is reclaimed first.
type ReclaimRank<I> = (HolderPresence, Instant, I);

/// A fixed number of slots, divided fairly between peer addresses. Each taken slot has a holder,
/// with an id of type `I`. `P` is the address, or what else the slots are divided between.
#[derive(Debug)]
pub struct Budget<I, P = PeerAddress> {
    limit: usize,
    patience: Duration,
    holders: HashMap<I, SlotHolder<P>>,
    /// Reclaim order of the holders; `None` while no slot needs to be reclaimed.
    order: Option<ReclaimOrder<I, P>>,
}

/// The holder of a slot.
#[derive(Debug, Clone, Copy)]
struct SlotHolder<P> {
    peer: P,
    standing: HolderPresence,
    /// Time of the holder's last sign of life or, if the holder is absent, of its disconnect.
    since: Instant,
}

impl<P> SlotHolder<P> {
    fn turn<I>(&self, id: I) -> ReclaimRank<I> {
        (self.standing, self.since, id)
    }
}

impl<I: Copy + Ord + Hash, P: Copy + Ord> Budget<I, P> {
    /// Creates a budget of `limit` slots, at least one. `patience` is the time for which a holder
    /// must be disconnected or silent before a newcomer whose address has its fair share can take
    /// the holder's slot.
    #[must_use]
    pub fn new(limit: usize, patience: Duration) -> Budget<I, P> {
        Budget { limit: limit.max(1), patience, holders: HashMap::default(), order: None }
    }

    /// Returns the total number of slots.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of slots taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.holders.len()
    }

    /// Assigns a slot to the holder `id` at the address `peer`. Returns the holder that lost its
    /// slot to `id`, if any. The caller must close that holder, and need not
    /// [remove](Budget::remove) it. If `id` already has a slot, it keeps the slot, and the call
    /// counts as a sign of life.
    ///
    /// # Errors
    /// If every slot is taken, the address has its fair share, and no holder may lose its slot to
    /// the newcomer.
    pub fn admit(&mut self, id: I, peer: P, now: Instant) -> Result<Option<I>, Full> {
        if self.holders.contains_key(&id) {
            self.heard(id, now);
            return Ok(None);
        }
        let victim = if self.holders.len() < self.limit { None } else { Some(self.victim_of(peer, now)?) };
        if let Some(victim) = victim {
            self.remove(victim);
        }
        self.put(id, SlotHolder { peer, standing: HolderPresence::Present, since: now });
        assert!(self.holders.len() <= self.limit, "a budget never has more holders than slots");
        Ok(victim)
    }

    /// Returns the holder that loses its slot to a newcomer at the address `peer`.
    fn victim_of(&mut self, peer: P, now: Instant) -> Result<I, Full> {
        let (limit, patience) = (self.limit, self.patience);
        let order = self.order();
        let share = (limit / order.peers_with(peer)).max(1);
        let victim = match order.first_at(peer, share) {
            Some((HolderPresence::Absent, _, id)) => Some(id),
            Some(own) => order.long_gone(now, patience).or_else(|| expendable(&own, now, patience)),
            // If no address is above its share, there are more addresses than slots. In this case,
            // the longest-silent holder of all addresses loses its slot.
            None => order
                .long_gone(now, patience)
                .or_else(|| order.longest_silent(share + 1).map(|(.., id)| id))
                .or_else(|| order.longest_silent(1).map(|(.., id)| id)),
        };
        victim.ok_or(Full { limit, share })
    }

    /// Reclaims one slot, because the process cannot open as many connections as the limit allows.
    /// Returns the holder that lost its slot, if any. The holder is the longest-silent one at an
    /// address that holds more slots than the average. If all addresses hold the same number of
    /// slots, a holder loses its slot only if it is disconnected, or has been silent for the time
    /// `patience`.
    pub fn shed(&mut self, now: Instant) -> Option<I> {
        let (taken, patience) = (self.holders.len(), self.patience);
        let order = self.order();
        let average = taken / order.peers.len().max(1);
        let above = order.longest_silent(average + 1).map(|(.., id)| id);
        let victim =
            above.or_else(|| order.longest_silent(1).and_then(|first| expendable(&first, now, patience)))?;
        self.remove(victim);
        Some(victim)
    }

    /// Records a sign of life of the holder, which delays the loss of its slot.
    pub fn heard(&mut self, id: I, now: Instant) {
        self.change(id, HolderPresence::Present, now);
    }

    /// Records that the holder has disconnected. It may reconnect, but loses its slot before
    /// connected holders lose theirs.
    pub fn left(&mut self, id: I, now: Instant) {
        self.change(id, HolderPresence::Absent, now);
    }

    /// Frees the slot of `id`. Does nothing if `id` has no slot.
    pub fn remove(&mut self, id: I) {
        self.take(id);
        if self.order.as_ref().is_some_and(|order| self.holders.len() < order.begun_with / 2) {
            self.order = None;
        }
    }

    fn change(&mut self, id: I, standing: HolderPresence, now: Instant) {
        if let Some(holder) = self.take(id) {
            self.put(id, SlotHolder { standing, since: now, ..holder });
        }
    }

    fn take(&mut self, id: I) -> Option<SlotHolder<P>> {
        let holder = self.holders.remove(&id)?;
        if let Some(order) = &mut self.order {
            order.remove(id, &holder);
        }
        Some(holder)
    }

    fn put(&mut self, id: I, holder: SlotHolder<P>) {
        if let Some(order) = &mut self.order {
            order.insert(id, &holder);
        }
        self.holders.insert(id, holder);
    }

    fn order(&mut self) -> &ReclaimOrder<I, P> {
        self.order.get_or_insert_with(|| ReclaimOrder::of(&self.holders))
    }
}

/// The holders in reclaim order.
#[derive(Debug)]
struct ReclaimOrder<I, P> {
    /// Number of holders when the order was built.
    begun_with: usize,
    /// The holders by address. Every listed address has at least one slot.
    peers: BTreeMap<P, BTreeSet<ReclaimRank<I>>>,
    /// The first holder of every address, grouped by the number of slots that the address holds.
    firsts: BTreeMap<usize, BTreeSet<(ReclaimRank<I>, P)>>,
    /// The disconnected holders, ordered by the time of the disconnect.
    gone: BTreeSet<(Instant, I)>,
}

impl<I: Copy + Ord, P: Copy + Ord> ReclaimOrder<I, P> {
    fn of(holders: &HashMap<I, SlotHolder<P>>) -> ReclaimOrder<I, P> {
        let mut order = ReclaimOrder {
            begun_with: holders.len(),
            peers: BTreeMap::new(),
            firsts: BTreeMap::new(),
            gone: BTreeSet::new(),
        };
        holders.iter().for_each(|(id, holder)| order.insert(*id, holder));
        order
    }

    fn insert(&mut self, id: I, holder: &SlotHolder<P>) {
        if holder.standing == HolderPresence::Absent {
            self.gone.insert((holder.since, id));
        }
        self.change_places(holder.peer, |places| {
            places.insert(holder.turn(id));
        });
    }

    fn remove(&mut self, id: I, holder: &SlotHolder<P>) {
        if holder.standing == HolderPresence::Absent {
            self.gone.remove(&(holder.since, id));
        }
        self.change_places(holder.peer, |places| {
            assert!(places.remove(&holder.turn(id)), "every holder is listed at its address");
        });
    }

    /// Changes the holders of an address, and updates the address's entry in `firsts`.
    fn change_places(&mut self, peer: P, change: impl FnOnce(&mut BTreeSet<ReclaimRank<I>>)) {
        let places = self.peers.entry(peer).or_default();
        if let Some(first) = places.first()
            && let Some(firsts) = self.firsts.get_mut(&places.len())
        {
            firsts.remove(&(*first, peer));
            if firsts.is_empty() {
                self.firsts.remove(&places.len());
            }
        }
        change(places);
        match places.first() {
            Some(first) => {
                self.firsts.entry(places.len()).or_default().insert((*first, peer));
            }
            None => {
                self.peers.remove(&peer);
            }
        }
    }

    /// Number of addresses that hold slots, including `peer`.
    fn peers_with(&self, peer: P) -> usize {
        self.peers.len() + usize::from(!self.peers.contains_key(&peer))
    }

    /// Returns the first holder at an address, if the address holds at least `least` slots.
    fn first_at(&self, peer: P, least: usize) -> Option<ReclaimRank<I>> {
        self.peers.get(&peer).filter(|own| own.len() >= least).and_then(BTreeSet::first).copied()
    }

    /// Returns the first holder in reclaim order among the addresses with at least `least` slots.
    fn longest_silent(&self, least: usize) -> Option<ReclaimRank<I>> {
        let firsts = self.firsts.range(least..).filter_map(|(_, firsts)| firsts.first());
        firsts.map(|(turn, _)| *turn).min()
    }

    /// Returns the holder that has been disconnected for the longest time, if this time is at least
    /// `patience`.
    fn long_gone(&self, now: Instant, patience: Duration) -> Option<I> {
        let (since, id) = self.gone.first()?;
        (now.saturating_duration_since(*since) >= patience).then_some(*id)
    }
}

/// Returns the holder's id if a newcomer at the same address may take the holder's slot.
fn expendable<I: Copy>(
    (standing, since, id): &ReclaimRank<I>,
    now: Instant,
    patience: Duration,
) -> Option<I> {
    let has_waited = now.saturating_duration_since(*since) >= patience;
    (*standing == HolderPresence::Absent || has_waited).then_some(*id)
}

/// Returns how many more connections this process can open: its soft limit on descriptors, minus
/// the open descriptors, minus a reserve for other files. Call it after all other files have been
/// opened.
#[must_use]
pub fn spare_descriptors() -> usize {
    let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let soft = soft.and_then(|soft| usize::try_from(soft).ok()).unwrap_or(usize::MAX);
    // Without /proc, the reserve must cover the open descriptors, too.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    soft.saturating_sub(open + DESCRIPTORS_KEPT).max(DESCRIPTORS_MIN)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: PeerAddress = PeerAddress::V4([192, 0, 2, 1]);
    const B: PeerAddress = PeerAddress::V4([192, 0, 2, 2]);
    const C: PeerAddress = PeerAddress::V4([192, 0, 2, 3]);
    const NEVER: Duration = Duration::MAX;

    /// Converts seconds since the start of a test to times.
    struct Clock(Instant);

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.0 + Duration::from_secs(seconds)
        }
    }

    /// Creates a budget and fills all its slots with holders at address `A`. The holder with id n
    /// shows its last sign of life at second n.
    fn full(limit: u64, patience: Duration) -> (Budget<u64>, Clock) {
        let (mut budget, clock) = (Budget::new(limit as usize, patience), Clock(Instant::now()));
        for id in 0..limit {
            assert_eq!(budget.admit(id, A, clock.at(id)), Ok(None), "one address may hold all slots");
        }
        (budget, clock)
    }

    #[test]
    fn peer_addresses_differ_by_ipv4_address_or_ipv6_network() {
        let peer = |text: &str| PeerAddress::from(text.parse::<IpAddr>().unwrap());
        assert_ne!(peer("127.0.0.1"), peer("127.0.0.2"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_eq!(peer("2001:db8::1"), peer("2001:db8:0:0:ffff::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
    }

    #[test]
    fn a_newcomer_takes_the_slot_of_the_longest_silent_holder_until_shares_are_fair() {
        let (mut budget, clock) = full(4, NEVER);
        budget.heard(0, clock.at(10));
        assert_eq!(budget.admit(10, B, clock.at(11)), Ok(Some(1)));
        assert_eq!(budget.admit(11, B, clock.at(12)), Ok(Some(2)));
        assert_eq!(budget.admit(12, B, clock.at(13)), Err(Full { limit: 4, share: 2 }));
        // Address A and address B both hold more than a third of the slots, so the newcomer at a
        // third address replaces a holder.
        assert_eq!(budget.admit(20, C, clock.at(14)), Ok(Some(3)));
        assert_eq!(budget.admit(21, C, clock.at(14)), Err(Full { limit: 4, share: 1 }));
        // After the removal of the holder at the third address, a slot is free.
        budget.remove(20);
        assert_eq!(budget.admit(4, A, clock.at(15)), Ok(None));
        assert_eq!(budget.taken(), 4);
    }

    #[test]
    fn disconnected_holders_lose_their_slots_before_connected_holders() {
        let (mut budget, clock) = full(4, NEVER);
        budget.left(3, clock.at(10));
        budget.left(2, clock.at(11));
        budget.heard(2, clock.at(12));
        assert_eq!(budget.admit(10, B, clock.at(20)), Ok(Some(3)));
        assert_eq!(budget.admit(11, B, clock.at(20)), Ok(Some(0)));
        budget.left(11, clock.at(21));
        assert_eq!(
            budget.admit(12, B, clock.at(22)),
            Ok(Some(11)),
            "holder 11 is disconnected, so a newcomer at the same address may take its slot"
        );
    }

    #[test]
    fn a_holder_disconnected_for_the_timeout_loses_its_slot_first() {
        let patience = Duration::from_secs(10);
        let (mut budget, clock) = full(3, patience);
        budget.remove(2);
        budget.admit(10, B, clock.at(3)).unwrap();
        budget.left(10, clock.at(4));
        // Holder 10 has been disconnected for less than the timeout, and its address is not above
        // its share.
        assert_eq!(budget.admit(11, A, clock.at(9)), Err(Full { limit: 3, share: 1 }));
        assert_eq!(
            budget.admit(11, C, clock.at(9)),
            Ok(Some(0)),
            "holder 0 is connected, but its address is above its share"
        );
        assert_eq!(
            budget.admit(12, A, clock.at(14)),
            Ok(Some(10)),
            "a newcomer at any address may replace a holder that has been disconnected for the timeout"
        );
        budget.left(11, clock.at(15));
        budget.heard(11, clock.at(16));
        assert_eq!(
            budget.admit(13, B, clock.at(30)),
            Ok(Some(1)),
            "holder 11 has reconnected, so it keeps its slot"
        );
    }

    #[test]
    fn a_newcomer_replaces_a_connected_holder_of_its_own_address_only_after_the_timeout() {
        let (mut budget, clock) = full(3, Duration::from_secs(10));
        assert_eq!(budget.admit(10, A, clock.at(9)), Err(Full { limit: 3, share: 3 }));
        assert_eq!(budget.admit(10, A, clock.at(10)), Ok(Some(0)));
        let (mut at_once, clock) = full(3, Duration::ZERO);
        assert_eq!(at_once.admit(10, A, clock.at(3)), Ok(Some(0)));
    }

    #[test]
    fn with_more_addresses_than_slots_the_longest_silent_holder_is_replaced() {
        let (mut budget, clock) = (Budget::new(2, NEVER), Clock(Instant::now()));
        for (id, expected) in [(0, None), (1, None), (2, Some(0)), (3, Some(1))] {
            let peer = PeerAddress::V6([id as u8; 8]);
            assert_eq!(budget.admit(id, peer, clock.at(id)), Ok(expected));
        }
    }

    #[test]
    fn shed_reclaims_a_slot_of_the_address_with_most_slots_and_spares_active_holders() {
        let (mut budget, clock) = full(3, Duration::from_secs(10));
        budget.remove(2);
        budget.admit(10, B, clock.at(0)).unwrap();
        assert_eq!(
            budget.shed(clock.at(5)),
            Some(0),
            "A holds more slots, although B has been silent for longer"
        );
        assert_eq!(
            budget.shed(clock.at(5)),
            None,
            "both addresses hold one slot, and neither has been silent for the timeout"
        );
        assert_eq!(budget.shed(clock.at(11)), Some(10), "holder 10 has been silent for the longest time");
        assert_eq!(budget.shed(clock.at(11)), Some(1));
        assert_eq!(budget.shed(clock.at(11)), None);
    }

    #[test]
    fn the_reclaim_order_exists_only_while_slots_are_reclaimed() {
        let (mut budget, clock) = full(8, NEVER);
        assert!(budget.order.is_none(), "slots were free");
        budget.admit(10, B, clock.at(10)).unwrap();
        for id in 1..4 {
            budget.remove(id);
        }
        assert!(budget.order.is_some());
        budget.remove(4);
        budget.remove(5);
        assert_eq!(
            (budget.taken(), budget.order.is_none()),
            (3, true),
            "more than half of the holders have left"
        );
    }

    #[test]
    fn spare_descriptors_exclude_a_reserve_for_other_files() {
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
            // For each holder: its address, and the second of its disconnect.
            let mut model: BTreeMap<u64, (PeerAddress, Option<u64>)> = BTreeMap::new();
            for (second, (step, address, id)) in (0..).zip(steps) {
                let (peer, now) = (PeerAddress::V4([address; 4]), clock.at(second));
                match step {
                    0 => { budget.remove(id); model.remove(&id); }
                    1 => { budget.heard(id, now); model.entry(id).and_modify(|(_, gone)| *gone = None); }
                    2 => { budget.left(id, now); model.entry(id).and_modify(|(_, gone)| *gone = Some(second)); }
                    _ => {
                        let held = |p: PeerAddress| model.values().filter(|(q, _)| *q == p).count();
                        let addresses: BTreeSet<PeerAddress> = model.values().map(|(q, _)| *q).chain([peer]).collect();
                        let share = (limit / addresses.len()).max(1);
                        let is_known = model.contains_key(&id);
                        let is_long_gone = |gone: Option<u64>| gone.is_some_and(|since| second - since >= 3);
                        let has_long_gone = model.values().any(|(_, gone)| is_long_gone(*gone));
                        match budget.admit(id, peer, now) {
                            Err(_) => {
                                prop_assert!(held(peer) >= share && model.len() == limit && !has_long_gone);
                            }
                            Ok(None) => prop_assert!(is_known || model.len() < limit),
                            Ok(Some(victim)) => {
                                let (loser, gone) = model[&victim];
                                prop_assert!(
                                    loser == peer
                                        || held(loser) > share
                                        || addresses.len() > limit
                                        || is_long_gone(gone)
                                );
                                prop_assert!(gone.is_some() || !has_long_gone, "a connected holder lost its slot");
                                model.remove(&victim);
                            }
                        }
                        if budget.holders.contains_key(&id) {
                            model.entry(id).or_insert((peer, None)).1 = None;
                        }
                    }
                }
                prop_assert_eq!(budget.taken(), model.len());
                if let Some(order) = &budget.order {
                    let anew = ReclaimOrder::of(&budget.holders);
                    prop_assert_eq!(&order.peers, &anew.peers);
                    prop_assert_eq!(&order.firsts, &anew.firsts);
                    prop_assert_eq!(&order.gone, &anew.gone);
                }
            }
        }
    }
}
