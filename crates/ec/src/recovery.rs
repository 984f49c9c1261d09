//! Getting lost fragments back.

use crate::code::{check_count, check_distinct, check_lengths};
use crate::kernel::Transform;
use crate::matrix::Matrix;
use crate::{Code, EcError, Result};

/// How some fragments are computed from `k` others; made by [`Code::recovery`]. It is worth keeping as long as the same fragments are
/// lost: making it inverts a matrix.
#[derive(Debug)]
pub struct Recovery {
    sources: Vec<usize>,
    wanted: usize,
    transform: Box<dyn Transform>,
}

impl Code {
    /// Plans to compute the fragments `wanted`, data or parity, from those `present`. The first `k` of these are read: callers list
    /// first what is cheapest to read.
    ///
    /// # Errors
    /// [`EcError::TooFew`] if fewer than `k` are present; [`EcError::NoSuch`] and [`EcError::Twice`].
    pub fn recovery(&self, present: &[usize], wanted: &[usize]) -> Result<Recovery> {
        let geometry = self.geometry();
        for list in [present, wanted] {
            check_distinct(list.iter().copied(), geometry.fragments(), "fragment", geometry)?;
        }
        let needed = geometry.k();
        let sources = present.get(..needed).ok_or(EcError::TooFew { present: present.len(), needed })?;
        let known = self.rows(sources);
        // Rows of a unit matrix over a Cauchy matrix: any k of them are independent, and the sources are distinct.
        let inverse = known.inverted().expect("any k distinct rows of the generator are independent");
        let transform = self.kernel().prepare(&self.rows(wanted).times(&inverse));
        Ok(Recovery { sources: sources.to_vec(), wanted: wanted.len(), transform })
    }

    /// What makes these fragments of the data: rows of the unit matrix, and of the parity matrix below it.
    fn rows(&self, fragments: &[usize]) -> Matrix {
        let k = self.geometry().k();
        Matrix::from_fn(fragments.len(), k, |row, column| match fragments[row].checked_sub(k) {
            Some(parity) => self.matrix().row(parity)[column],
            None => u8::from(fragments[row] == column),
        })
    }
}

impl Recovery {
    /// The `k` fragments that are read.
    #[must_use]
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// Computes the wanted fragments, in the order in which they were named, of the [`sources`](Self::sources), in theirs.
    ///
    /// # Errors
    /// [`EcError::Count`] and [`EcError::Length`]: all slices must be of one length.
    pub fn run(&self, sources: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        check_count("sources", sources.len(), self.sources.len())?;
        check_count("fragments to compute", out.len(), self.wanted)?;
        let len = sources[0].len();
        check_lengths("sources", sources.iter().map(|s| s.len()), len)?;
        check_lengths("fragments to compute", out.iter().map(|o| o.len()), len)?;
        self.transform.apply(sources, out);
        Ok(())
    }
}
