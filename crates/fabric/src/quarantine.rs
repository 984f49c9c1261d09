//! Quarantine of memory: memory that peers could access stays mapped until no peer can be writing
//! to it.
//!
//! After a region is closed, the provider refuses new accesses. With software providers, an access
//! in progress continues until its endpoint is closed.

/// The memory of closed regions, each with the endpoints whose peers may still be writing to it.
pub(crate) struct MemoryQuarantine<M> {
    endpoints: Vec<u64>,
    held: Vec<(Vec<u64>, M)>,
}

impl<M> Default for MemoryQuarantine<M> {
    fn default() -> Self {
        MemoryQuarantine { endpoints: Vec::new(), held: Vec::new() }
    }
}

impl<M> MemoryQuarantine<M> {
    /// Records that `endpoint` was opened.
    pub(crate) fn opened(&mut self, endpoint: u64) {
        self.endpoints.push(endpoint);
    }

    /// Records that `endpoint` was closed. Returns the memory that no peer can be writing to any
    /// more.
    pub(crate) fn closed(&mut self, endpoint: u64) -> Vec<M> {
        self.endpoints.retain(|open| *open != endpoint);
        for (writers, _) in &mut self.held {
            writers.retain(|writer| *writer != endpoint);
        }
        self.held.extract_if(.., |(writers, _)| writers.is_empty()).map(|(_, memory)| memory).collect()
    }

    /// All memory in quarantine.
    pub(crate) fn held(&self) -> impl Iterator<Item = &M> {
        self.held.iter().map(|(_, memory)| memory)
    }

    /// Puts the memory of a closed region into quarantine. If no endpoint is open, no peer can be
    /// writing to the memory, and the function returns it.
    pub(crate) fn hold(&mut self, memory: M) -> Option<M> {
        if self.endpoints.is_empty() {
            return Some(memory);
        }
        self.held.push((self.endpoints.clone(), memory));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_held_until_endpoints_opened_before_its_region_closed_are_closed() {
        let mut quarantine = MemoryQuarantine::default();
        assert_eq!(quarantine.hold('a'), Some('a'));
        quarantine.opened(1);
        quarantine.opened(2);
        assert_eq!(quarantine.hold('b'), None);
        quarantine.opened(3);
        assert_eq!(quarantine.closed(1), []);
        assert_eq!(quarantine.hold('c'), None);
        assert_eq!(quarantine.closed(2), ['b']);
        assert_eq!(quarantine.closed(3), ['c']);
        assert_eq!(quarantine.hold('d'), Some('d'));
    }
}
