//! `outboard-bench --compare`: compares an old binary with a new one.
//!
//! Within a minute, the speed of a machine changes by more than the difference between two builds
//! of a program. So the nodes of both binaries run side by side and are measured one at a time. In
//! every round, each case runs on both binaries in direct succession, and the binary that runs
//! first alternates. The client of each binary drives the node of the same binary, because the two
//! binaries may use different versions of the protocols.
//!
//! The result of a case in a round is the ratio new/old of its two runs. `verdict` judges the
//! median of the ratios.

mod cases;
mod outcome;
mod rig;
mod settings;
mod verdict;

pub use outcome::Comparison;
pub use settings::CompareSettings;

use std::time::Duration;

use crate::Result;
use crate::evaluation::order::turns;
use rig::CompareRig;

/// Pause after each run, so that its last writes to the drive do not fall into the next run.
const SETTLE: Duration = Duration::from_millis(200);

/// One of the two `outboard` binaries that a run compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The binary that the new binary is compared with.
    Old,
    /// The binary that is judged.
    New,
}

/// Measures both binaries. Calls `say` with messages about the progress.
///
/// # Errors
/// If a node does not start, or an operation fails.
pub fn run(settings: &CompareSettings, say: &dyn Fn(&str)) -> Result<Comparison> {
    let rig = CompareRig::up(settings, say)?;
    let cases = rig.cases();
    let mut outcome = Comparison::new(settings, &rig, &cases);
    say("warming up: running every case once without counting its results");
    for case in &cases {
        for side in [Side::Old, Side::New] {
            rig.measure(side, case, 1).map_err(|why| failed(side, case, why.as_ref()))?;
        }
    }
    for round in 0..settings.rounds {
        say(&format!("round {} of {}", round + 1, settings.rounds));
        for (place, case) in cases.iter().enumerate() {
            for side in turns(&[Side::Old, Side::New], round as usize + place) {
                let sample = rig.measure(side, case, settings.seconds);
                let sample = sample.map_err(|why| failed(side, case, why.as_ref()))?;
                outcome.add(place, side, &sample);
                std::thread::sleep(SETTLE);
            }
        }
    }
    Ok(outcome)
}

fn failed(side: Side, case: &cases::CompareCase, why: &dyn std::error::Error) -> String {
    format!("the {} binary failed in the case \"{}\": {why}", side.name(), case.name())
}

impl Side {
    /// `old` or `new`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Side::Old => "old",
            Side::New => "new",
        }
    }
}
