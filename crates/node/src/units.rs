//! Sizes and durations as people write them: `8GiB`, `500ms`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A number of bytes. Accepts `4096`, `4KiB`, `2MiB`, `8GiB`, `1TiB` and the decimal `KB`, `MB`,
/// `GB`, `TB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ByteSize(pub u64);

/// An amount of memory. Accepts a size, such as `512MiB`, or a percentage of the machine's memory,
/// such as `12%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum MemoryAmount {
    /// A size.
    Bytes(ByteSize),
    /// A percentage of the machine's memory: 1 to 100.
    Percent(u64),
}

impl MemoryAmount {
    /// Returns the amount in bytes on a machine with `machine` bytes of memory. The amount of a
    /// percentage is at least the start and at most the end of `range`.
    #[must_use]
    pub fn bytes(self, machine: u64, range: &RangeInclusive<u64>) -> u64 {
        match self {
            MemoryAmount::Bytes(size) => size.0,
            MemoryAmount::Percent(percent) => (machine / 100 * percent).clamp(*range.start(), *range.end()),
        }
    }
}

/// A duration. Accepts `100ms`, `5s`, `2m`, `24h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Period(pub Duration);

/// Error for text that is not a size or a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {what}; write it like {example}")]
pub struct UnitError {
    text: String,
    what: &'static str,
    example: &'static str,
}

/// Error for a configuration value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutOfRange {
    /// The value is too small or too large.
    #[error("{key} is {value}, but must be {least} to {most}")]
    Outside {
        /// The configuration key.
        key: &'static str,
        /// The value.
        value: u64,
        /// Minimum allowed value.
        least: u64,
        /// Maximum allowed value.
        most: u64,
    },
    /// The size is not a multiple of the unit.
    #[error("{key} is {value}, but must be a multiple of {unit}")]
    Uneven {
        /// The configuration key.
        key: &'static str,
        /// The size.
        value: ByteSize,
        /// The unit.
        unit: ByteSize,
    },
}

/// Refuses a value of `key` outside of `range`.
pub fn within(key: &'static str, value: u64, range: RangeInclusive<u64>) -> Result<(), OutOfRange> {
    let (least, most) = range.into_inner();
    let ok = (least..=most).contains(&value);
    if ok { Ok(()) } else { Err(OutOfRange::Outside { key, value, least, most }) }
}

/// Refuses a value of `key` that is not a multiple of `unit`.
pub fn multiple(key: &'static str, value: ByteSize, unit: ByteSize) -> Result<(), OutOfRange> {
    let ok = value.0.is_multiple_of(unit.0);
    if ok { Ok(()) } else { Err(OutOfRange::Uneven { key, value, unit }) }
}

const SIZES: [(&str, u64); 10] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
    ("", 1),
];

/// Units of time, in milliseconds.
const PERIODS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];

fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.trim().bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.trim().split_at(digits);
    let unit = unit.trim();
    let (_, scale) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    number.parse::<u64>().ok()?.checked_mul(*scale)
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<ByteSize, UnitError> {
        let error = || UnitError { text: text.to_owned(), what: "size", example: "4096, 2MiB or 8GiB" };
        scaled(text, &SIZES).map(ByteSize).ok_or_else(error)
    }
}

impl FromStr for Period {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Period, UnitError> {
        let error =
            || UnitError { text: text.to_owned(), what: "length of time", example: "100ms, 5s, 2m or 24h" };
        scaled(text, &PERIODS).map(|ms| Period(Duration::from_millis(ms))).ok_or_else(error)
    }
}

impl FromStr for MemoryAmount {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<MemoryAmount, UnitError> {
        let error =
            || UnitError { text: text.to_owned(), what: "amount of memory", example: "512MiB, 8GiB or 12%" };
        match text.trim().strip_suffix('%') {
            Some(percent) => percent
                .trim_end()
                .parse()
                .ok()
                .filter(|percent| (1..=100).contains(percent))
                .map(MemoryAmount::Percent)
                .ok_or_else(error),
            None => scaled(text, &SIZES).map(|bytes| MemoryAmount::Bytes(ByteSize(bytes))).ok_or_else(error),
        }
    }
}

impl TryFrom<String> for MemoryAmount {
    type Error = UnitError;

    fn try_from(text: String) -> Result<MemoryAmount, UnitError> {
        text.parse()
    }
}

impl fmt::Display for MemoryAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryAmount::Bytes(size) => size.fmt(f),
            MemoryAmount::Percent(percent) => f.pad(&format!("{percent}%")),
        }
    }
}

impl From<MemoryAmount> for String {
    fn from(amount: MemoryAmount) -> String {
        amount.to_string()
    }
}

impl TryFrom<String> for ByteSize {
    type Error = UnitError;

    fn try_from(text: String) -> Result<ByteSize, UnitError> {
        text.parse()
    }
}

impl TryFrom<String> for Period {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Period, UnitError> {
        text.parse()
    }
}

/// Formats `value` in the largest of the units that divides it.
fn exact(value: u64, units: &[(&str, u64)]) -> String {
    let (name, scale) = units
        .iter()
        .filter(|(_, scale)| value != 0 && value.is_multiple_of(*scale))
        .max_by_key(|(_, scale)| *scale)
        .unwrap_or(&units[0]);
    format!("{}{name}", value / scale)
}

impl fmt::Display for ByteSize {
    /// Formats the exact value in binary units. With a precision (`{:.1}`), the value is rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(precision) = f.precision() else {
            return f.pad(&exact(self.0, &[("B", 1), SIZES[0], SIZES[1], SIZES[2], SIZES[3]]));
        };
        let (name, scale) = SIZES[..4].iter().rev().find(|(_, scale)| self.0 >= *scale).unwrap_or(&("B", 1));
        let precision = if *scale == 1 { 0 } else { precision };
        write!(f, "{:.precision$} {name}", self.0 as f64 / *scale as f64)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&exact(self.0.as_millis().min(u128::from(u64::MAX)) as u64, &PERIODS))
    }
}

impl From<ByteSize> for String {
    fn from(size: ByteSize) -> String {
        size.to_string()
    }
}

impl From<Period> for String {
    fn from(period: Period) -> String {
        period.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_periods_roundtrip_as_text() {
        for text in ["1B", "4KiB", "4097B", "2MiB", "8GiB", "3TiB"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
        for text in ["100ms", "5s", "2m", "24h", "0ms"] {
            assert_eq!(text.parse::<Period>().unwrap().to_string(), text);
        }
        assert_eq!("1 GB".parse::<ByteSize>().unwrap().0, 1_000_000_000);
        assert_eq!("4096".parse::<ByteSize>().unwrap().0, 4096);
        assert_eq!(format!("{:.1}", ByteSize(1536)), "1.5 KiB");
    }

    #[test]
    fn amounts_of_memory_are_sizes_or_percentages() {
        for (text, bytes) in [("512MiB", 512 << 20), ("12%", 12_000), ("100%", 100_000)] {
            let amount: MemoryAmount = text.parse().unwrap();
            assert_eq!((amount.to_string().as_str(), amount.bytes(100_000, &(0..=u64::MAX))), (text, bytes));
        }
        // Only percentages adapt to the valid values.
        for (text, bytes) in [("1%", 2000), ("3%", 3000), ("5%", 4000), ("1000B", 1000), ("5000B", 5000)] {
            assert_eq!(text.parse::<MemoryAmount>().unwrap().bytes(100_000, &(2000..=4000)), bytes, "{text}");
        }
        for text in ["", "%", "0%", "101%", "-1%", "1.5%", "half"] {
            assert!(text.parse::<MemoryAmount>().is_err(), "{text}");
        }
    }

    #[test]
    fn invalid_and_overflowing_sizes_and_periods_are_refused() {
        for text in ["", "GiB", "-1", "1.5GiB", "8 gallons", "99999999999TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert!("5 weeks".parse::<Period>().is_err());
        assert!("5".parse::<Period>().is_err(), "a time without a unit is ambiguous");
    }
}
