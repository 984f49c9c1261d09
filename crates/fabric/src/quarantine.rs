//! Quarantine of memory: memory that peers could reach stays mapped until no peer can be writing to
//! it.
//!
//! Closing a region refuses later accesses. With software providers, an access in progress
//! continues until its endpoint is closed.

/// Memories whose regions were closed, each with the endpoints that may still be writing to it.
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
    /// An endpoint is opened.
    pub(crate) fn opened(&mut self, endpoint: u64) {
        self.endpoints.push(endpoint);
    }

    /// An endpoint was closed. Gives the memories that nobody can be writing to now.
    pub(crate) fn closed(&mut self, endpoint: u64) -> Vec<M> {
        self.endpoints.retain(|open| *open != endpoint);
        for (writers, _) in &mut self.held {
            writers.retain(|writer| *writer != endpoint);
        }
        self.held.extract_if(.., |(writers, _)| writers.is_empty()).map(|(_, memory)| memory).collect()
    }

    /// The memories that are held.
    pub(crate) fn held(&self) -> impl Iterator<Item = &M> {
        self.held.iter().map(|(_, memory)| memory)
    }

    /// A region was closed. Gives its memory back if nobody can be writing to it.
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
    fn memory_waits_for_the_endpoints_of_its_time() {
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
