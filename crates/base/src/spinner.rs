//! [`Spinner`]: adaptive polling, which decides whether to poll before sleeping.

use std::time::Duration;

use crate::clock::Instant;

/// Number of polling periods in a row without work after which polling becomes rare. From then on,
/// the thread polls only before every [`RETRY`]th sleep.
const CREDIT_MAX: u32 = 8;
const RETRY: u32 = 32;

/// Decides whether a thread polls for a short time before it sleeps. The thread polls as long as
/// polling often finds work.
#[derive(Debug)]
pub struct Spinner {
    credit: u32,
    sleeps: u32,
    since: Option<Instant>,
}

impl Default for Spinner {
    fn default() -> Self {
        Spinner { credit: CREDIT_MAX, sleeps: 0, since: None }
    }
}

impl Spinner {
    /// Records that there was work. Returns true if polling found the work.
    pub fn worked(&mut self) -> bool {
        let found = self.since.take().is_some();
        if found {
            self.credit = CREDIT_MAX.min(self.credit + 2);
        }
        found
    }

    /// Records that there was no work. Returns true if the caller should poll again instead of
    /// sleeping. `spin` is the maximum time of polling before a sleep.
    pub fn look_again(&mut self, spin: Duration) -> bool {
        let Some(since) = self.since else {
            self.sleeps = self.sleeps.wrapping_add(1);
            let tried = !spin.is_zero() && (self.credit > 0 || self.sleeps.is_multiple_of(RETRY));
            self.since = tried.then(Instant::now);
            return tried;
        };
        if since.elapsed() < spin {
            std::hint::spin_loop();
            return true;
        }
        self.since = None;
        self.credit = self.credit.saturating_sub(1);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_that_never_finds_work_becomes_rare() {
        let mut spinner = Spinner::default();
        let spin = Duration::from_nanos(1);
        let mut tried = 0;
        for _ in 0..1000 {
            if spinner.look_again(spin) {
                tried += 1;
                while spinner.look_again(spin) {}
            }
        }
        assert!((CREDIT_MAX..60).contains(&tried), "{tried}");
        assert!(!Spinner::default().look_again(Duration::ZERO));
    }
}
