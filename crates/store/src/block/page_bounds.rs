//! [`PageBounds`]: the free runs of the bitmap's pages, by length.

/// An upper bound of the length of the longest free run in each page of the bitmap, in blocks. A
/// search for a page takes logarithmic time.
#[derive(Debug)]
pub(super) struct PageBounds {
    pages: usize,
    /// A complete binary tree. The leaves are the bounds of the pages, and each inner node has the
    /// maximum of its two children. The root is node 1, and the children of node `n` are `2n` and
    /// `2n + 1`.
    tree: Vec<u16>,
}

impl PageBounds {
    /// Creates the bounds of pages, in the order of the pages.
    pub(super) fn new(bounds: impl ExactSizeIterator<Item = u64>) -> PageBounds {
        let pages = bounds.len();
        let leaves = pages.next_power_of_two();
        let mut tree = vec![0; 2 * leaves];
        tree[leaves..].iter_mut().zip(bounds).for_each(|(leaf, bound)| *leaf = narrow(bound));
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].max(tree[2 * node + 1]);
        }
        PageBounds { pages, tree }
    }

    fn leaves(&self) -> usize {
        self.tree.len() / 2
    }

    /// Returns the bound of a page, in blocks.
    pub(super) fn get(&self, page: usize) -> u64 {
        u64::from(self.tree[self.leaves() + page])
    }

    /// Sets the bound of a page, in blocks.
    pub(super) fn set(&mut self, page: usize, bound: u64) {
        let mut node = self.leaves() + page;
        self.tree[node] = narrow(bound);
        while node > 1 {
            node /= 2;
            let max = self.tree[2 * node].max(self.tree[2 * node + 1]);
            if std::mem::replace(&mut self.tree[node], max) == max {
                return;
            }
        }
    }

    /// Returns the first page, beginning with page `from`, whose bound is at least `want` blocks.
    /// After the last page, continues with page 0.
    pub(super) fn first(&self, from: usize, want: u64) -> Option<usize> {
        self.first_in(1, 0, self.leaves(), from, want).or_else(|| self.first_in(1, 0, self.leaves(), 0, want))
    }

    /// Searches the pages of `node`, which are `count` pages beginning with `start`, from page `from`
    /// on.
    fn first_in(&self, node: usize, start: usize, count: usize, from: usize, want: u64) -> Option<usize> {
        if start + count <= from || u64::from(self.tree[node]) < want || start >= self.pages {
            return None;
        }
        if count == 1 {
            return Some(start);
        }
        let half = count / 2;
        let left = self.first_in(2 * node, start, half, from, want);
        left.or_else(|| self.first_in(2 * node + 1, start + half, half, from, want))
    }

    /// Returns the page with the highest bound; `None` if no page has a free block.
    pub(super) fn best(&self) -> Option<usize> {
        self.first(0, u64::from(self.tree[1].max(1)))
    }
}

fn narrow(bound: u64) -> u16 {
    u16::try_from(bound).expect("a run is at most as long as a page")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_search_finds_the_same_page_as_a_scan(
            mut bounds in proptest::collection::vec(0u64..6, 1..40),
            changes in proptest::collection::vec((0usize..40, 0u64..6), 0..20),
            from in 0usize..40,
            want in 1u64..7,
        ) {
            let mut tree = PageBounds::new(bounds.clone().into_iter());
            for (page, bound) in changes {
                let page = page % bounds.len();
                tree.set(page, bound);
                bounds[page] = bound;
            }
            let from = from % bounds.len();
            let order = (from..bounds.len()).chain(0..from);
            prop_assert_eq!(tree.first(from, want), order.into_iter().find(|page| bounds[*page] >= want));
            let most = bounds.iter().copied().max().filter(|most| *most > 0);
            prop_assert_eq!(tree.best().map(|page| bounds[page]), most);
            prop_assert!((0..bounds.len()).all(|page| tree.get(page) == bounds[page]));
        }
    }
}
