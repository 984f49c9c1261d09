//! The claim to a seat, with which an attachment begins.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{ChannelError, Result};

/// Maximum number of seats of an osd.
pub const MAX_SEATS: u16 = 64;

/// An osd's claim to a seat: the right of one of its shards to one attachment to the store. All
/// shards of an osd claim seats with the same `osd` and the same `seats`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SeatClaim {
    /// Random id of one run of the osd. A restarted osd has another id.
    pub osd: u128,
    /// Number of the seat, counted from 0.
    pub seat: u16,
    /// Number of seats of the osd: 1 to [`MAX_SEATS`].
    pub seats: u16,
}

impl SeatClaim {
    /// The only seat of a new run of an osd.
    #[must_use]
    pub fn sole() -> SeatClaim {
        SeatClaim { osd: base::entropy::random(), seat: 0, seats: 1 }
    }

    /// Checks that the seat exists.
    ///
    /// # Errors
    /// [`ChannelError::NoSuchSeat`] if `seats` or `seat` is out of range.
    pub fn check(&self) -> Result<()> {
        let SeatClaim { seat, seats, .. } = *self;
        if seats <= MAX_SEATS && seat < seats {
            Ok(())
        } else {
            Err(ChannelError::NoSuchSeat { seat, seats })
        }
    }
}

impl fmt::Display for SeatClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seat {} of {}", self.seat, self.seats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_osd_has_1_to_64_seats_which_are_counted_from_0() {
        let check = |seat, seats| SeatClaim { osd: 1, seat, seats }.check();
        for (seat, seats) in [(0, 1), (1, 2), (0, MAX_SEATS), (MAX_SEATS - 1, MAX_SEATS)] {
            check(seat, seats).unwrap();
        }
        for (seat, seats) in [(0, 0), (1, 1), (u16::MAX, MAX_SEATS), (0, MAX_SEATS + 1), (0, u16::MAX)] {
            let refused = check(seat, seats).unwrap_err();
            assert!(matches!(refused, ChannelError::NoSuchSeat { .. }), "{refused}");
        }
    }

    #[test]
    fn each_run_of_an_osd_has_its_own_id() {
        let (one, other) = (SeatClaim::sole(), SeatClaim::sole());
        assert_ne!(one.osd, other.osd);
        one.check().unwrap();
    }
}
