//! The choice of the requests whose payload the host verifies.

/// Decides for which requests the host verifies the payload's checksums.
#[derive(Debug)]
pub(super) struct Verify {
    every: u32,
    count: u32,
    suspects: u32,
}

impl Verify {
    /// Number of requests that are suspect after a failure.
    const SUSPECTS: u32 = 256;

    pub(super) fn new(every: u32) -> Verify {
        Verify { every, count: 0, suspects: 0 }
    }

    /// Marks the next requests as suspect after a failure.
    pub(super) fn suspect(&mut self) {
        self.suspects = Self::SUSPECTS;
    }

    /// Whether the host must verify the next request. Armed faults do not change the choice, so
    /// tests of faults show what happens in production.
    pub(super) fn next(&mut self) -> bool {
        self.count = self.count.wrapping_add(1);
        let suspect = self.suspects > 0;
        self.suspects = self.suspects.saturating_sub(1);
        suspect || self.every > 0 && self.count.is_multiple_of(self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_verifies_a_sample_of_requests_but_after_a_failure_every_request() {
        let mut verify = Verify::new(4);
        assert_eq!((0..8).filter(|_| verify.next()).count(), 2);
        verify.suspect();
        assert!((0..Verify::SUSPECTS).all(|_| verify.next()));
        assert_eq!((0..8).filter(|_| verify.next()).count(), 2);
        let mut none = Verify::new(0);
        assert!((0..100).all(|_| !none.next()));
        let mut all = Verify::new(1);
        assert!((0..100).all(|_| all.next()));
    }
}
