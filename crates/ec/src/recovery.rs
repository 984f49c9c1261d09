//! [`Recovery`]: reconstructs lost fragments.

use base::block::BLOCK_SIZE;

use crate::code::{check_count, check_distinct, check_lengths};
use crate::kernel::Transform;
use crate::matrix::Matrix;
use crate::stripes::{CheckedUnit, SourceCheck, code_units};
use crate::{Code, EcError, Result};

/// A prepared reconstruction, which computes lost fragments from `k` other fragments. Created by
/// [`Code::recovery`]. Creation inverts a matrix, so callers keep a `Recovery` while the same
/// fragments are lost.
#[derive(Debug)]
pub struct Recovery {
    sources: Vec<usize>,
    wanted: usize,
    transform: Box<dyn Transform>,
}

impl Code {
    /// Prepares the reconstruction of the fragments `wanted`, data or parity, from the fragments
    /// `present`. The reconstruction reads the first `k` of `present`, so list the fragments that
    /// are cheapest to read first.
    ///
    /// # Errors
    /// [`EcError::TooFew`] if fewer than `k` fragments are present, [`EcError::NoSuch`] if a
    /// fragment does not exist, and [`EcError::Twice`] if a fragment is listed twice.
    pub fn recovery(&self, present: &[usize], wanted: &[usize]) -> Result<Recovery> {
        let geometry = self.geometry();
        for list in [present, wanted] {
            check_distinct(list.iter().copied(), geometry.fragments(), "fragment", geometry)?;
        }
        let needed = geometry.k();
        let sources = present.get(..needed).ok_or(EcError::TooFew { present: present.len(), needed })?;
        let known = self.rows(sources);
        // Any k rows of a unit matrix on top of a Cauchy matrix are independent, and the sources
        // are distinct.
        let inverse = known.inverted().expect("any k distinct rows of the generator are independent");
        let transform = self.kernel().prepare(&self.rows(wanted).times(&inverse));
        Ok(Recovery { sources: sources.to_vec(), wanted: wanted.len(), transform })
    }

    /// The matrix that computes these fragments from the data. The row of a data fragment comes
    /// from the unit matrix, and the row of a parity fragment comes from the parity matrix.
    fn rows(&self, fragments: &[usize]) -> Matrix {
        let k = self.geometry().k();
        Matrix::from_fn(fragments.len(), k, |row, column| match fragments[row].checked_sub(k) {
            Some(parity) => self.matrix().row(parity)[column],
            None => u8::from(fragments[row] == column),
        })
    }
}

impl Recovery {
    /// The `k` fragments that the reconstruction reads.
    #[must_use]
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// Computes the wanted fragments. `sources` contains the fragments in the order of
    /// [`sources`](Self::sources). `out` receives the wanted fragments in the order in which they
    /// were named.
    ///
    /// # Errors
    /// [`EcError::Count`] if there are too few or too many slices, and [`EcError::Length`] if the
    /// slices differ in length.
    pub fn run(&self, sources: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        check_count("sources", sources.len(), self.sources.len())?;
        check_count("fragments to compute", out.len(), self.wanted)?;
        let len = sources[0].len();
        check_lengths("sources", sources.iter().map(|s| s.len()), len)?;
        check_lengths("fragments to compute", out.iter().map(|o| o.len()), len)?;
        self.transform.apply(sources, out);
        Ok(())
    }

    /// Like [`run`](Self::run), and verifies the sources. Each block is compared with its checksum
    /// after it was used, so damage of a source before that time is detected. The CRC-32C of each
    /// block of the fragment `out[i]` is appended to `checksums[i]`.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), [`EcError::Unit`] unless the slices consist of whole blocks,
    /// [`EcError::Count`] if there are too few or too many checksums, and [`EcError::Damaged`] if a
    /// block does not match its checksum. In the last case, the content of `out` and `checksums` is
    /// unspecified.
    pub fn run_checked(
        &self,
        sources: &[CheckedUnit<'_>],
        out: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        check_count("sources", sources.len(), self.sources.len())?;
        check_count("fragments to compute", out.len(), self.wanted)?;
        check_count("checksums", checksums.len(), self.wanted)?;
        let len = sources[0].bytes.len();
        if !len.is_multiple_of(BLOCK_SIZE) {
            return Err(EcError::Unit { unit: len, multiple: BLOCK_SIZE, max: usize::MAX });
        }
        check_lengths("sources", sources.iter().map(|s| s.bytes.len()), len)?;
        check_lengths("fragments to compute", out.iter().map(|o| o.len()), len)?;
        code_units(&*self.transform, sources, SourceCheck::Sources, out, checksums)
    }
}
