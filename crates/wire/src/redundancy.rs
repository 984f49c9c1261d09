//! Redundancy schemes of pools.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Maximum default of the stripe unit, in bytes ([`default_stripe_unit`]).
pub const DEFAULT_STRIPE_UNIT: u32 = 64 << 10;
/// Maximum length of a stripe of an erasure-coded pool, in bytes of data without parity.
pub const MAX_STRIPE: u64 = 2 << 20;
/// Maximum number of copies of a mirrored pool.
pub const MAX_COPIES: u8 = 8;

/// Returns the default stripe unit of an erasure code with `k` data fragments, in bytes: 64 KiB, or the
/// highest power of two with which a stripe is not longer than [`MAX_STRIPE`].
#[must_use]
pub fn default_stripe_unit(k: u8) -> u32 {
    let longest = MAX_STRIPE as u32 / u32::from(k.max(1));
    DEFAULT_STRIPE_UNIT.min(1 << longest.ilog2())
}

/// Redundancy scheme of a pool. Each fragment of an object is on a different target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Redundancy {
    /// One copy.
    #[default]
    Single,
    /// Several copies.
    Mirror {
        /// Number of copies, at least 2.
        copies: u8,
    },
    /// A Reed–Solomon code, which tolerates the loss of any `m` targets.
    ErasureCode {
        /// Number of data fragments.
        k: u8,
        /// Number of parity fragments.
        m: u8,
        /// Length of a unit, in bytes; a multiple of 4096.
        stripe_unit: u32,
    },
}

impl Redundancy {
    /// Returns the number of targets of each placement group.
    #[must_use]
    pub fn targets(&self) -> usize {
        match *self {
            Redundancy::Single => 1,
            Redundancy::Mirror { copies } => copies.into(),
            Redundancy::ErasureCode { k, m, .. } => usize::from(k) + usize::from(m),
        }
    }

    /// Returns the number of targets that may be lost without loss of data.
    #[must_use]
    pub fn tolerates(&self) -> usize {
        match *self {
            Redundancy::Single => 0,
            Redundancy::Mirror { copies } => usize::from(copies) - 1,
            Redundancy::ErasureCode { m, .. } => m.into(),
        }
    }

    /// Returns the ratio of bytes on drives to bytes of data, for large objects.
    #[must_use]
    pub fn overhead(&self) -> f64 {
        self.targets() as f64 / (self.targets() - self.tolerates()) as f64
    }

    /// Returns the same scheme with a stripe unit of `bytes` bytes. Only an erasure code has a
    /// stripe unit.
    ///
    /// # Errors
    /// If the scheme has no stripe unit.
    pub fn with_stripe_unit(self, bytes: u32) -> Result<Redundancy> {
        match self {
            Redundancy::ErasureCode { k, m, .. } => Ok(Redundancy::ErasureCode { k, m, stripe_unit: bytes }),
            other => Err(refused(format!("{other} has no stripe unit; only ec:K+M has one"))),
        }
    }

    /// Checks a redundancy scheme that a client or a user chose.
    ///
    /// # Errors
    /// If a value is out of range; the error states the valid values.
    pub fn check(&self) -> Result<()> {
        match *self {
            Redundancy::Single => Ok(()),
            Redundancy::Mirror { copies } if (2..=MAX_COPIES).contains(&copies) => Ok(()),
            Redundancy::Mirror { copies } => {
                Err(refused(format!("{copies} copies are not possible; choose 2 to {MAX_COPIES}")))
            }
            Redundancy::ErasureCode { k, m, .. } if k < 2 || m < 1 || u16::from(k) + u16::from(m) > 255 => {
                Err(refused(format!(
                    "ec:{k}+{m} is not possible; K must be at least 2, M at least 1, and K+M at most 255"
                )))
            }
            Redundancy::ErasureCode { k, stripe_unit, .. } => {
                let unit = u64::from(stripe_unit);
                if unit > 0 && unit.is_multiple_of(4096) && unit * u64::from(k) <= MAX_STRIPE {
                    return Ok(());
                }
                Err(refused(format!(
                    "a stripe unit of {unit} bytes is not possible; with {k} data fragments, choose from the multiples of 4096 up to {}",
                    MAX_STRIPE / u64::from(k) / 4096 * 4096
                )))
            }
        }
    }
}

fn refused(detail: String) -> Error {
    Error::OutOfRange { what: "redundancy".into(), detail }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Redundancy::Single => f.pad("single"),
            Redundancy::Mirror { copies } => f.pad(&format!("mirror:{copies}")),
            Redundancy::ErasureCode { k, m, .. } => f.pad(&format!("ec:{k}+{m}")),
        }
    }
}

impl FromStr for Redundancy {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Redundancy, String> {
        let parsed = match text.split_once(':') {
            None if text == "single" => Some(Redundancy::Single),
            Some(("mirror", copies)) => copies.parse().ok().map(|copies| Redundancy::Mirror { copies }),
            Some(("ec", code)) => code.split_once('+').and_then(|(k, m)| {
                let (k, m) = (k.parse().ok()?, m.parse().ok()?);
                Some(Redundancy::ErasureCode { k, m, stripe_unit: default_stripe_unit(k) })
            }),
            _ => None,
        };
        let unknown = || {
            format!(
                "{text:?} is not a redundancy scheme; use \"single\", \"mirror:N\" or \"ec:K+M\", e.g. \"ec:4+2\""
            )
        };
        parsed.ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redundancy_schemes_roundtrip_as_text_and_invalid_text_is_refused() {
        for text in ["single", "mirror:2", "ec:4+2"] {
            let redundancy: Redundancy = text.parse().unwrap();
            assert_eq!(redundancy.to_string(), text);
            redundancy.check().unwrap();
        }
        for text in ["", "mirror", "mirror:", "ec:4", "ec:4+", "ec:4-2", "raid5", "mirror:300", "single:1"] {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
    }

    #[test]
    fn redundancy_schemes_with_values_out_of_range_are_refused() {
        for text in ["mirror:1", "mirror:9", "ec:1+1", "ec:4+0", "ec:200+56"] {
            let redundancy: Redundancy = text.parse().unwrap();
            assert!(redundancy.check().is_err(), "{text}");
        }
        let ec: Redundancy = "ec:4+2".parse().unwrap();
        assert!(ec.with_stripe_unit(4096).unwrap().check().is_ok());
        assert!(ec.with_stripe_unit(5000).unwrap().check().is_err());
        assert!(Redundancy::Single.with_stripe_unit(4096).is_err());
        assert_eq!(ec.overhead(), 1.5);
    }

    #[test]
    fn the_default_stripe_unit_of_a_wide_code_is_shorter() {
        for (k, unit) in [(2, 64), (32, 64), (33, 32), (40, 32), (64, 32), (128, 16), (254, 8)] {
            let wide: Redundancy = format!("ec:{k}+1").parse().unwrap();
            wide.check().unwrap();
            assert_eq!(wide, wide.with_stripe_unit(unit << 10).unwrap(), "{k}");
        }
        "ec:128+32".parse::<Redundancy>().unwrap().check().unwrap();
    }
}
