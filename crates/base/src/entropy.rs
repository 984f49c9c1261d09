//! Random numbers: from the system, or from a seed in a simulation.
//!
//! All random numbers of a node come from this module, so that a simulation can repeat them. A
//! thread that runs a simulation calls [`seed_this_thread`]. All other threads get numbers from the
//! system's generator, whose output is unpredictable.

use std::cell::RefCell;

use rand::distr::{Distribution, StandardUniform};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use uuid::Uuid;

thread_local! {
    static SEEDED: RefCell<Option<StdRng>> = const { RefCell::new(None) };
}

/// Returns a random value.
#[must_use]
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    SEEDED.with_borrow_mut(|seeded| match seeded {
        Some(generator) => generator.random(),
        #[expect(clippy::disallowed_methods, reason = "this is the only use of the system's generator")]
        None => rand::random(),
    })
}

/// Returns a random UUID (version 4).
#[must_use]
pub fn uuid() -> Uuid {
    uuid::Builder::from_random_bytes(random()).into_uuid()
}

/// Ends a thread's use of a seed when it is dropped.
#[derive(Debug)]
#[must_use = "the thread uses the seed until this value is dropped"]
pub struct SeededThread {
    before: Option<StdRng>,
    /// Binds the value to its thread.
    _local: std::marker::PhantomData<*const ()>,
}

/// Makes the random numbers of this thread a function of `seed`. Only simulations may call this
/// function, because the numbers are predictable.
pub fn seed_this_thread(seed: u64) -> SeededThread {
    let before = SEEDED.replace(Some(StdRng::seed_from_u64(seed)));
    SeededThread { before, _local: std::marker::PhantomData }
}

impl Drop for SeededThread {
    fn drop(&mut self) {
        SEEDED.set(self.before.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_the_numbers_of_its_thread_until_its_end() {
        let draw = || {
            let _seeded = seed_this_thread(7);
            [random::<u64>(), random()]
        };
        assert_eq!(draw(), draw());
        assert_ne!(random::<u128>(), random::<u128>());
        let _seeded = seed_this_thread(7);
        let elsewhere = std::thread::spawn(random::<u128>).join();
        assert_ne!(random::<u128>(), elsewhere.unwrap(), "a seed applies to one thread");
    }
}
