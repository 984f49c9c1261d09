//! Repeats steps of requests while the store is unreachable, up to a time limit.

use std::time::Duration;

use tokio::time::Instant;
use wire::Error;

use crate::fail::{Fail, StepResult};
use crate::object::ObjectInfo;
use crate::pool::ObjectLocation;
use crate::turnstile::Turn;

/// First pause before a step is repeated after the store became unreachable. Later pauses are
/// [`longer`].
pub(crate) const PAUSE: Duration = Duration::from_millis(5);

/// Doubles a pause, up to half a second.
pub(crate) fn longer(pause: Duration) -> Duration {
    (pause * 2).min(Duration::from_millis(500))
}

/// Repeats an attempt while the store is unreachable, for at most `patience`.
pub(crate) async fn patiently<T>(
    place: &ObjectLocation,
    patience: Duration,
    attempt: impl AsyncFn() -> StepResult<T>,
) -> StepResult<T> {
    let until = Instant::now() + patience;
    let mut pause = PAUSE;
    loop {
        let incarnation = place.pg.backing.incarnation();
        match attempt().await {
            Err(Fail::Lost(why)) if place.pg.has_lost_target() => {
                return Err(Fail::Refused(Error::TargetFailed(why)));
            }
            Err(Fail::Lost(why)) if Instant::now() < until => {
                tracing::debug!(why, "the store is unreachable; repeating the step");
                place.pg.backing.lost(incarnation);
                tokio::time::sleep(pause).await;
                pause = longer(pause);
            }
            Err(Fail::Withdrawn) => {}
            outcome => return outcome,
        }
    }
}

/// Calls `look` during a turn on the object, while no transaction on the object is pending. Repeats
/// the call while the store is unreachable, for at most `patience`.
pub(crate) async fn in_turn<T>(
    place: &ObjectLocation,
    patience: Duration,
    look: impl AsyncFn(&Turn<'_>, u64) -> StepResult<T>,
) -> StepResult<T> {
    patiently(place, patience, async || once_in_turn(place, &look).await).await
}

/// Calls `look` during a turn on the object, while no transaction on the object is pending.
async fn once_in_turn<T>(
    place: &ObjectLocation,
    look: impl AsyncFn(&Turn<'_>, u64) -> StepResult<T>,
) -> StepResult<T> {
    let object = place.pg.object(&place.oid);
    let ticket = object.turnstile.ticket();
    let (turn, incarnation) = place.pg.enter(&ticket, async || place.pg.settle().await).await?;
    turn.settled().await;
    let found = look(&turn, incarnation).await;
    // What was read is valid only in the same incarnation. This includes errors.
    place.pg.backing.still(incarnation)?;
    found
}

/// Returns the durable record of an object; `None` if the object does not exist.
pub(crate) async fn info_of(place: &ObjectLocation, patience: Duration) -> StepResult<Option<ObjectInfo>> {
    in_turn(place, patience, async |turn, incarnation| place.pg.info(&place.oid, turn, incarnation).await)
        .await
}
