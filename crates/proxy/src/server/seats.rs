//! The seats of a server: which osd is attached, with which of its seats, and how much host memory
//! these seats use.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use channel::{ChannelError, SeatClaim};
use tokio::sync::Notify;

/// Limits for all held seats together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SeatLimits {
    /// Maximum total host memory, in bytes.
    pub(super) memory: usize,
    /// Maximum total number of unanswered requests on the rings.
    pub(super) outstanding: usize,
}

/// Why a seat is refused. The osd tries again after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum SeatRefusal {
    #[error("another osd is attached to this store; stop that osd first")]
    OtherOsd,
    #[error("this osd is attached with {attached} seats, not {claimed}; end its other attachments first")]
    OtherCount { attached: u16, claimed: u16 },
    #[error("seat {seat} is still attached; wait until its attachment has ended")]
    StillAttached { seat: u16 },
    #[error(
        "seat {seat} asks for {len} bytes of host memory and {requests} requests at a time; all seats together \
         would have {memory} bytes and {outstanding} requests, the limits are {} and {}",
        limits.memory, limits.outstanding
    )]
    TooMuch { seat: u16, len: usize, requests: usize, memory: usize, outstanding: usize, limits: SeatLimits },
}

impl From<SeatRefusal> for ChannelError {
    fn from(refusal: SeatRefusal) -> ChannelError {
        ChannelError::Refused(refusal.to_string())
    }
}

/// What one seat uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SeatUse {
    memory: usize,
    outstanding: usize,
}

/// The held seats, all of one run of an osd.
#[derive(Debug, Default)]
struct SeatTable {
    /// The osd that holds seats, or that held the last seat.
    osd: u128,
    /// Number of seats of this osd.
    seats: u16,
    held: BTreeMap<u16, SeatUse>,
}

/// Grants seats: to one run of an osd at a time, and each seat once at a time. The loops of a server
/// share it, and use it only when attachments begin and end.
pub(super) struct Seats {
    limits: SeatLimits,
    table: Mutex<SeatTable>,
    freed: Notify,
}

impl Seats {
    pub(super) fn new(limits: SeatLimits) -> Arc<Seats> {
        Arc::new(Seats { limits, table: Mutex::default(), freed: Notify::new() })
    }

    /// Grants the seat that `claim` names. The claim must be [valid](SeatClaim::check).
    ///
    /// # Errors
    /// Fails if another osd is attached, or if the seat is held.
    pub(super) fn claim(self: &Arc<Self>, claim: SeatClaim) -> Result<SeatHeld, SeatRefusal> {
        let SeatClaim { osd, seat, seats } = claim;
        assert!(seat < seats, "the handshake checks the claim");
        let table = &mut *self.table();
        if table.held.is_empty() {
            (table.osd, table.seats) = (osd, seats);
        }
        if table.osd != osd {
            return Err(SeatRefusal::OtherOsd);
        }
        if table.seats != seats {
            return Err(SeatRefusal::OtherCount { attached: table.seats, claimed: seats });
        }
        if table.held.contains_key(&seat) {
            return Err(SeatRefusal::StillAttached { seat });
        }
        table.held.insert(seat, SeatUse::default());
        Ok(SeatHeld { seats: Arc::clone(self), seat })
    }

    fn table(&self) -> MutexGuard<'_, SeatTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no seat is held. Only one task may wait.
    pub(super) async fn all_free(&self) {
        while !self.table().held.is_empty() {
            self.freed.notified().await;
        }
    }
}

/// A held seat. Dropping it frees the seat.
pub(super) struct SeatHeld {
    seats: Arc<Seats>,
    seat: u16,
}

impl SeatHeld {
    /// Reserves host memory of `len` bytes and a number of requests for this seat.
    ///
    /// # Errors
    /// Fails if all seats together would exceed a limit.
    pub(super) fn reserve(&self, len: usize, requests: usize) -> Result<(), SeatRefusal> {
        let limits = self.seats.limits;
        let held = &mut self.seats.table().held;
        held.insert(self.seat, SeatUse { memory: len, outstanding: requests });
        let memory = held.values().fold(0usize, |sum, used| sum.saturating_add(used.memory));
        let outstanding = held.values().fold(0usize, |sum, used| sum.saturating_add(used.outstanding));
        if memory <= limits.memory && outstanding <= limits.outstanding {
            return Ok(());
        }
        held.insert(self.seat, SeatUse::default());
        let seat = self.seat;
        Err(SeatRefusal::TooMuch { seat, len, requests, memory, outstanding, limits })
    }

    /// Ends the reservation of a seat that gets no host memory.
    pub(super) fn release_memory(&self) {
        self.seats.table().held.insert(self.seat, SeatUse::default());
    }
}

impl Drop for SeatHeld {
    fn drop(&mut self) {
        let held = self.seats.table().held.remove(&self.seat);
        assert!(held.is_some(), "a held seat is in the table");
        self.seats.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use channel::MAX_SEATS;
    use futures::FutureExt;
    use proptest::prelude::*;

    const LIMITS: SeatLimits = SeatLimits { memory: 1000, outstanding: 10 };

    fn claim(osd: u128, seat: u16, seats: u16) -> SeatClaim {
        SeatClaim { osd, seat, seats }
    }

    #[test]
    fn an_osd_holds_each_of_its_seats_once() {
        let seats = Seats::new(LIMITS);
        let held: Vec<SeatHeld> = (0..4).map(|seat| seats.claim(claim(1, seat, 4)).ok().unwrap()).collect();
        for seat in 0..4 {
            assert_eq!(seats.claim(claim(1, seat, 4)).err(), Some(SeatRefusal::StillAttached { seat }));
        }
        let mut held = held.into_iter();
        drop(held.next());
        assert!(seats.claim(claim(1, 0, 4)).is_ok(), "a free seat is granted again");
        assert!(seats.claim(claim(1, 1, 4)).is_err(), "the other seats are still held");
    }

    #[test]
    fn another_run_is_refused_until_the_last_seat_is_free() {
        let seats = Seats::new(LIMITS);
        let (one, two) = (seats.claim(claim(1, 0, 2)).ok(), seats.claim(claim(1, 1, 2)).ok());
        assert!(one.is_some() && two.is_some());
        assert_eq!(seats.claim(claim(2, 0, 2)).err(), Some(SeatRefusal::OtherOsd));
        drop(one);
        assert_eq!(seats.claim(claim(2, 0, 2)).err(), Some(SeatRefusal::OtherOsd));
        let other_count = SeatRefusal::OtherCount { attached: 2, claimed: 3 };
        assert_eq!(seats.claim(claim(1, 2, 3)).err(), Some(other_count));
        assert!(seats.all_free().now_or_never().is_none());
        drop(two);
        assert!(seats.all_free().now_or_never().is_some());
        let fresh = seats.claim(claim(2, 2, 3)).ok().unwrap();
        assert_eq!(seats.claim(claim(1, 0, 2)).err(), Some(SeatRefusal::OtherOsd));
        drop(fresh);
        assert!(seats.claim(claim(2, 0, 4)).is_ok(), "the count may change while no seat is held");
    }

    #[test]
    fn the_limits_apply_to_all_seats_together() {
        let seats = Seats::new(LIMITS);
        let [one, two] = [0, 1].map(|seat| seats.claim(claim(1, seat, 2)).ok().unwrap());
        one.reserve(600, 6).unwrap();
        two.reserve(400, 4).unwrap();
        for (len, requests) in [(401, 4), (400, 5), (usize::MAX, 1), (1, usize::MAX)] {
            let refused = two.reserve(len, requests).unwrap_err();
            assert!(matches!(refused, SeatRefusal::TooMuch { seat: 1, .. }), "{refused}");
        }
        let refused = two.reserve(500, 1).unwrap_err().to_string();
        assert!(refused.contains("would have 1100 bytes and 7 requests"), "{refused}");
        assert!(one.reserve(1000, 10).is_ok(), "a refused reservation reserves nothing");
        one.release_memory();
        two.reserve(1000, 10).unwrap();
        drop(two);
        one.reserve(1000, 10).unwrap();
    }

    #[derive(Debug, Clone)]
    enum Step {
        Claim(SeatClaim),
        Reserve { number: usize, len: usize, requests: usize },
        Free { number: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let any_claim = (0..2u128, 1..4u16).prop_flat_map(|(osd, seats)| {
            (0..seats).prop_map(move |seat| Step::Claim(claim(osd, seat, seats)))
        });
        let reserve = (0..4usize, 0..1200usize, 0..12usize);
        prop_oneof![
            3 => any_claim,
            2 => reserve.prop_map(|(number, len, requests)| Step::Reserve { number, len, requests }),
            2 => (0..4usize).prop_map(|number| Step::Free { number }),
        ]
    }

    proptest! {
        /// The model is the list of the held seats: their claims and their reservations.
        #[test]
        fn seats_agree_with_a_list_of_claims(steps in proptest::collection::vec(step(), 0..60)) {
            let seats = Seats::new(LIMITS);
            let mut model: Vec<(SeatClaim, SeatHeld, (usize, usize))> = Vec::new();
            for step in steps {
                match step {
                    Step::Claim(wanted) => {
                        let fits = model.iter().all(|(other, ..)| {
                            other.osd == wanted.osd && other.seats == wanted.seats && other.seat != wanted.seat
                        });
                        let granted = seats.claim(wanted);
                        prop_assert_eq!(granted.is_ok(), fits);
                        model.extend(granted.ok().map(|held| (wanted, held, (0, 0))));
                    }
                    Step::Reserve { number, len, requests } if number < model.len() => {
                        model[number].2 = (len, requests);
                        let (memory, outstanding) =
                            model.iter().fold((0, 0), |sum, (_, _, used)| (sum.0 + used.0, sum.1 + used.1));
                        let fits = memory <= LIMITS.memory && outstanding <= LIMITS.outstanding;
                        prop_assert_eq!(model[number].1.reserve(len, requests).is_ok(), fits);
                        if !fits {
                            model[number].2 = (0, 0);
                        }
                    }
                    Step::Free { number } if number < model.len() => drop(model.swap_remove(number)),
                    Step::Reserve { .. } | Step::Free { .. } => {}
                }
                prop_assert_eq!(seats.all_free().now_or_never().is_some(), model.is_empty());
            }
        }
    }

    #[test]
    fn the_largest_osd_can_hold_all_its_seats() {
        let seats = Seats::new(LIMITS);
        let held = (0..MAX_SEATS).map(|seat| seats.claim(claim(1, seat, MAX_SEATS)));
        assert_eq!(held.filter_map(Result::ok).collect::<Vec<_>>().len(), usize::from(MAX_SEATS));
    }
}
