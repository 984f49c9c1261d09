//! A set of time intervals, kept as disjoint ones.

/// Most intervals of a set; beyond, neighbours are joined.
pub(super) const MAX_SPANS: usize = 64;

/// From `start` up to and without `end`, in ns since the request came. Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Intervals, in order, none touching another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Union(Vec<Span>);

impl Union {
    /// Adds an interval. If that makes more than [`MAX_SPANS`], the two that are closest to each other become one: the set
    /// then covers more than what was added, by the smallest gap there is.
    pub(super) fn add_bounded(&mut self, span: Span) {
        self.add(span);
        if self.0.len() > MAX_SPANS {
            self.close_smallest_gap();
        }
    }

    /// Adds an interval, exactly.
    pub(super) fn add(&mut self, span: Span) {
        if span.start >= span.end {
            return;
        }
        let first = self.0.partition_point(|s| s.end < span.start);
        let behind = self.0.partition_point(|s| s.start <= span.end);
        if first == behind {
            return self.0.insert(first, span);
        }
        let joined =
            Span { start: span.start.min(self.0[first].start), end: span.end.max(self.0[behind - 1].end) };
        self.0[first] = joined;
        self.0.drain(first + 1..behind);
    }

    fn close_smallest_gap(&mut self) {
        let gap = |at: &usize| self.0[at + 1].start - self.0[*at].end;
        if let Some(at) = (0..self.0.len().saturating_sub(1)).min_by_key(gap) {
            self.0[at].end = self.0[at + 1].end;
            self.0.remove(at + 1);
        }
    }

    /// Adds what another set has before `limit`, exactly.
    pub(super) fn add_all(&mut self, other: &Union, limit: u64) {
        for span in &other.0 {
            self.add(Span { end: span.end.min(limit), ..*span });
        }
    }

    /// How much time the intervals cover, in ns.
    pub(super) fn covered(&self) -> u64 {
        self.0.iter().map(|s| s.end - s.start).sum()
    }

    /// Number of disjoint intervals.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
