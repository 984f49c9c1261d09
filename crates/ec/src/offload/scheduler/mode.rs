//! The modes, how they are written, and the fixed division of work between the places.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Place;

/// Largest part of a ratio.
const MAX_PART: u32 = 1000;

/// Where work goes while the host's processor is not busy: the administrator's choice (Algorithm 1, `status`). Written
/// `latency-sensitive`, `async`, `hybrid:α:β` or `hybrid:auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Mode {
    /// To the host: the shortest time for one piece of work.
    LatencySensitive,
    /// To the offload: the host is left to its other work.
    Async,
    /// To both, in a fixed ratio.
    Hybrid(Ratio),
    /// To both, in a ratio that follows the load and what the places turn out to cost.
    Auto,
}

/// α:β: of every α + β tasks, α go to the host and β to the offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ratio {
    alpha: u32,
    beta: u32,
}

/// Why a mode cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// There is no such mode.
    #[error("there is no coding mode {0:?}: say latency-sensitive, async, hybrid:ALPHA:BETA or hybrid:auto")]
    Unknown(String),
    /// A ratio of nothing to nothing, or beyond what can be interleaved.
    #[error("{0}:{1} divides no work: ALPHA and BETA are 0 to {MAX_PART}, and not both 0")]
    Ratio(u32, u32),
}

impl Ratio {
    /// α tasks on the host to β on the offload, each 0 to 1000.
    ///
    /// # Errors
    /// If both are 0, or one is too large.
    pub fn new(alpha: u32, beta: u32) -> Result<Ratio, ModeError> {
        let possible = (1..=MAX_PART).contains(&alpha.max(beta));
        if possible { Ok(Ratio { alpha, beta }) } else { Err(ModeError::Ratio(alpha, beta)) }
    }

    /// The host's part.
    #[must_use]
    pub fn alpha(self) -> u32 {
        self.alpha
    }

    /// The offload's part.
    #[must_use]
    pub fn beta(self) -> u32 {
        self.beta
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::LatencySensitive => f.write_str("latency-sensitive"),
            Mode::Async => f.write_str("async"),
            Mode::Hybrid(Ratio { alpha, beta }) => write!(f, "hybrid:{alpha}:{beta}"),
            Mode::Auto => f.write_str("hybrid:auto"),
        }
    }
}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Mode, ModeError> {
        let unknown = || ModeError::Unknown(text.to_owned());
        match text {
            "latency-sensitive" => Ok(Mode::LatencySensitive),
            "async" => Ok(Mode::Async),
            "hybrid:auto" => Ok(Mode::Auto),
            _ => {
                let parts = text.strip_prefix("hybrid:").and_then(|parts| parts.split_once(':'));
                let (alpha, beta) = parts.ok_or_else(unknown)?;
                let part = |text: &str| text.parse::<u32>().map_err(|_| unknown());
                Ok(Mode::Hybrid(Ratio::new(part(alpha)?, part(beta)?)?))
            }
        }
    }
}

impl TryFrom<String> for Mode {
    type Error = ModeError;

    fn try_from(text: String) -> Result<Mode, ModeError> {
        text.parse()
    }
}

impl From<Mode> for String {
    fn from(mode: Mode) -> String {
        mode.to_string()
    }
}

/// Whose turn it is under a fixed ratio.
///
/// The paper takes α tasks off the queue for the host and then β for the DPU. Here the turns are interleaved as evenly as
/// whole tasks can be (Bresenham's line): of any α + β tasks in a row the same number goes to each place, but no place
/// gets its share as one burst while the other has nothing to do.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// What the offload is owed, in 1/(α + β) of a task.
    owed: u32,
}

impl Turns {
    /// Whose turn is next.
    pub(super) fn next(&self, ratio: Ratio) -> Place {
        if self.owed + ratio.beta >= ratio.alpha + ratio.beta { Place::Offload } else { Place::Host }
    }

    /// That turn was taken.
    pub(super) fn taken(&mut self, ratio: Ratio) {
        self.owed = (self.owed + ratio.beta) % (ratio.alpha + ratio.beta);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IntoDeserializer;
    use serde::de::value::Error;

    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written_and_nonsense_is_refused() {
        for text in ["latency-sensitive", "async", "hybrid:3:1", "hybrid:0:1", "hybrid:auto"] {
            assert_eq!(text.parse::<Mode>().unwrap().to_string(), text);
            let read = Mode::deserialize(IntoDeserializer::<Error>::into_deserializer(text.to_owned()));
            assert_eq!(read.unwrap(), text.parse().unwrap());
        }
        for text in ["", "hybrid", "hybrid:3", "hybrid:a:b", "hybrid:1:2:3", "Async", "hybrid:-1:2"] {
            assert_eq!(text.parse::<Mode>(), Err(ModeError::Unknown(text.to_owned())));
        }
        assert_eq!("hybrid:0:0".parse::<Mode>(), Err(ModeError::Ratio(0, 0)));
        assert!("hybrid:4294967295:4294967295".parse::<Mode>().is_err());
    }

    fn turns(ratio: Ratio, count: u32) -> Vec<Place> {
        let mut turns = Turns::default();
        let mut turn = |_| {
            let place = turns.next(ratio);
            turns.taken(ratio);
            place
        };
        (0..count).map(&mut turn).collect()
    }

    #[test]
    fn turns_are_interleaved() {
        let text = |alpha, beta| -> String {
            let ratio = Ratio::new(alpha, beta).unwrap();
            let letter = |place| if place == Place::Host { 'h' } else { 'o' };
            turns(ratio, alpha + beta).into_iter().map(letter).collect()
        };
        assert_eq!(text(3, 1), "hhho");
        assert_eq!(text(3, 2), "hhoho");
        assert_eq!(text(1, 3), "hooo");
        assert_eq!(text(0, 2), "oo");
        assert_eq!(text(2, 0), "hh");
    }

    proptest! {
        /// At no time has the offload more or less than its share by a whole task.
        #[test]
        fn nobody_is_a_task_ahead(alpha in 0u32..=40, beta in 0u32..=40) {
            prop_assume!(alpha + beta > 0);
            let mut offloaded = 0;
            for (so_far, place) in (1u32..).zip(turns(Ratio::new(alpha, beta).unwrap(), 3 * (alpha + beta))) {
                offloaded += u32::from(place == Place::Offload);
                let (due, done) = (so_far * beta, offloaded * (alpha + beta));
                prop_assert!(due.abs_diff(done) < alpha + beta, "{offloaded} of {so_far}");
            }
        }
    }
}
