//! [`Geometry`]: the numbers of data and parity fragments of a code.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{EcError, Result};

/// Maximum number of fragments of a code. The matrix needs a distinct element of the field GF(2^8)
/// for each fragment, and the field has 256 elements.
pub const MAX_FRAGMENTS: usize = 255;

/// Shape of a code: `k` data fragments and `m` parity fragments. Any `k` fragments restore the
/// data. The text form of a geometry is, for example, `4+2`.
///
/// Fragments are numbered from 0: data fragments first, then parity fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct Geometry {
    k: u8,
    m: u8,
}

/// A geometry in its serialized form, before validation.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Geometry")]
struct Unchecked {
    k: u8,
    m: u8,
}

impl Geometry {
    /// Creates a geometry of `k` data and `m` parity fragments.
    ///
    /// # Errors
    /// [`EcError::Geometry`] unless `k` and `m` are at least 1 and their sum is at most
    /// [`MAX_FRAGMENTS`].
    pub fn new(k: usize, m: usize) -> Result<Geometry> {
        let refused = EcError::Geometry { k, m };
        match (u8::try_from(k), u8::try_from(m)) {
            (Ok(k8), Ok(m8)) if k >= 1 && m >= 1 && k + m <= MAX_FRAGMENTS => Ok(Geometry { k: k8, m: m8 }),
            _ => Err(refused),
        }
    }

    /// Number of data fragments.
    #[must_use]
    pub const fn k(self) -> usize {
        self.k as usize
    }

    /// Number of parity fragments, which is also the maximum number of fragments that may be lost.
    #[must_use]
    pub const fn m(self) -> usize {
        self.m as usize
    }

    /// Total number of fragments.
    #[must_use]
    pub const fn fragments(self) -> usize {
        self.k() + self.m()
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.k, self.m)
    }
}

impl FromStr for Geometry {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Geometry> {
        let syntax = || EcError::Syntax { text: text.to_owned() };
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse::<usize>().ok()).flatten().ok_or_else(syntax)
        };
        let (k, m) = text.split_once('+').ok_or_else(syntax)?;
        Geometry::new(number(k)?, number(m)?)
    }
}

impl TryFrom<Unchecked> for Geometry {
    type Error = EcError;

    fn try_from(Unchecked { k, m }: Unchecked) -> Result<Geometry> {
        Geometry::new(usize::from(k), usize::from(m))
    }
}

impl From<Geometry> for Unchecked {
    fn from(Geometry { k, m }: Geometry) -> Unchecked {
        Unchecked { k, m }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_geometry_is_parsed_only_from_the_form_k_plus_m() {
        for (text, k, m) in [("1+1", 1, 1), ("4+2", 4, 2), ("128+32", 128, 32), ("254+1", 254, 1)] {
            let geometry: Geometry = text.parse().unwrap();
            assert_eq!((geometry.k(), geometry.m(), geometry.fragments()), (k, m, k + m));
            assert_eq!(geometry.to_string(), text);
        }
        for text in ["", "4", "4+", "+2", "4+2+1", "4 + 2", "-4+2", "4++2", "k+m", "99999999999999999999+1"] {
            assert_eq!(text.parse::<Geometry>(), Err(EcError::Syntax { text: text.into() }));
        }
    }

    #[test]
    fn impossible_numbers_of_fragments_are_refused() {
        for (k, m) in
            [(0, 1), (1, 0), (0, 0), (255, 1), (1, 255), (128, 128), (usize::MAX, usize::MAX), (256, 0)]
        {
            assert_eq!(Geometry::new(k, m), Err(EcError::Geometry { k, m }));
        }
    }
}
