//! [`Union`]: a set of time intervals, stored as disjoint intervals.

/// Maximum number of intervals in a set. If there are more, the set joins neighbouring intervals.
pub(super) const MAX_SPANS: usize = 64;

/// The time from `start` up to but excluding `end`, in ns since the request's arrival. Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// A set of time intervals. The stored intervals are in order, and neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Union(Vec<Span>);

impl Union {
    /// Adds an interval. If the set then has more than [`MAX_SPANS`] intervals, it joins the two
    /// intervals with the smallest gap between them, and then covers that gap, too.
    pub(super) fn add_bounded(&mut self, span: Span) {
        self.add(span);
        if self.0.len() > MAX_SPANS {
            self.close_smallest_gap();
        }
    }

    /// Adds an interval, without covering any gap.
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

    /// Adds the part of another set before `limit`, without covering any gap.
    pub(super) fn add_all(&mut self, other: &Union, limit: u64) {
        for span in &other.0 {
            self.add(Span { end: span.end.min(limit), ..*span });
        }
    }

    /// Returns the total time that the intervals cover, in ns.
    pub(super) fn covered(&self) -> u64 {
        self.0.iter().map(|s| s.end - s.start).sum()
    }

    /// Number of disjoint intervals.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
