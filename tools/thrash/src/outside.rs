//! Faults of the network and of clients, which a thread of their own injects.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;

use crate::plan::ThrashFault;
use crate::record::RoundRecord;
use crate::relay::{Relay, RelayMode};
use crate::writer::WriterGroup;

/// Injects faults of the network and of clients until the end of the time for faults. Leaves the
/// network intact.
pub fn run(
    kinds: &[ThrashFault],
    seconds: u64,
    relay: &Relay,
    groups: &mut [WriterGroup],
    record: &Arc<RoundRecord>,
    mut random: SmallRng,
) {
    let end = Duration::from_secs(seconds);
    let sleep = |time: Duration| {
        let until = (record.now() + time).min(end);
        while record.now() < until && !record.is_over() {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    while record.now() < end && !record.is_over() {
        sleep(Duration::from_secs_f64(random.random_range(2.0..10.0)));
        let (Some(kind), seconds) = (ThrashFault::choose(kinds, &mut random), random.random_range(0.0..1.0))
        else {
            return;
        };
        // Short faults are as likely as long ones, from 0.1 to 20 s.
        let time = Duration::from_secs_f64(0.1 * 200_f64.powf(seconds));
        let (delay, group) =
            (Duration::from_millis(random.random_range(5..400)), random.random_range(0..groups.len()));
        if record.now() >= end {
            return;
        }
        if kind == ThrashFault::KillClient {
            if groups[group].replace() {
                record.note(format!("{kind}: a client of several writers was killed"));
                record.fired(kind.name());
            }
            continue;
        }
        let mode = match kind {
            ThrashFault::Cut => RelayMode::Cut,
            ThrashFault::Hold => RelayMode::Hold,
            _ => RelayMode::Delay(delay),
        };
        let before = relay.affected();
        record.note(format!("{kind}: {mode:?} for {:.1} s", time.as_secs_f64()));
        relay.set_mode(mode);
        sleep(time);
        relay.set_mode(RelayMode::Pass);
        let affected = relay.affected() - before;
        record.note(format!("{kind}: ends, {affected} connections or pieces of data were affected"));
        if affected > 0 {
            record.fired(kind.name());
        }
    }
}
