//! The coding mode: the policy that decides where parity is computed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum value of each part of a ratio α:β.
const MAX_PART: u32 = 1000;

/// The administrator's choice of where coding tasks run while the host's processor is not busy. The
/// text forms of a mode are `latency-sensitive`, `async`, `hybrid:α:β` and `hybrid:auto`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CodingMode {
    /// Tasks run on the host's processor, which needs the least time per task.
    #[default]
    LatencySensitive,
    /// Tasks run on the offload (the DPU or its accelerator), which leaves the host's processor to
    /// other work.
    Async,
    /// Tasks run on the host and on the offload, in a fixed ratio.
    Hybrid(CodingRatio),
    /// Tasks run on the host and on the offload. The scheduler adapts the ratio to the load and to
    /// the measured time per task.
    Auto,
}

/// The ratio α:β. Of every α + β tasks, α run on the host and β on the offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodingRatio {
    alpha: u32,
    beta: u32,
}

/// Reason why a coding mode cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodingModeError {
    /// The text names no coding mode.
    #[error(
        "coding mode {0:?} does not exist; use latency-sensitive, async, hybrid:ALPHA:BETA or hybrid:auto"
    )]
    Unknown(String),
    /// Both parts of the ratio are 0, or a part is too large.
    #[error("ratio {0}:{1} is not valid: ALPHA and BETA must be from 0 to {MAX_PART}, and not both 0")]
    Ratio(u32, u32),
}

impl CodingRatio {
    /// Creates a ratio of α tasks on the host to β tasks on the offload, each from 0 to 1000.
    ///
    /// # Errors
    /// If both parts are 0, or if a part exceeds 1000.
    pub fn new(alpha: u32, beta: u32) -> Result<CodingRatio, CodingModeError> {
        let possible = (1..=MAX_PART).contains(&alpha.max(beta));
        if possible { Ok(CodingRatio { alpha, beta }) } else { Err(CodingModeError::Ratio(alpha, beta)) }
    }

    /// Returns α, the host's part of the ratio.
    #[must_use]
    pub fn alpha(self) -> u32 {
        self.alpha
    }

    /// Returns β, the offload's part of the ratio.
    #[must_use]
    pub fn beta(self) -> u32 {
        self.beta
    }
}

impl fmt::Display for CodingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodingMode::LatencySensitive => f.write_str("latency-sensitive"),
            CodingMode::Async => f.write_str("async"),
            CodingMode::Hybrid(CodingRatio { alpha, beta }) => write!(f, "hybrid:{alpha}:{beta}"),
            CodingMode::Auto => f.write_str("hybrid:auto"),
        }
    }
}

impl FromStr for CodingMode {
    type Err = CodingModeError;

    fn from_str(text: &str) -> Result<CodingMode, CodingModeError> {
        let unknown = || CodingModeError::Unknown(text.to_owned());
        match text {
            "latency-sensitive" => Ok(CodingMode::LatencySensitive),
            "async" => Ok(CodingMode::Async),
            "hybrid:auto" => Ok(CodingMode::Auto),
            _ => {
                let parts = text.strip_prefix("hybrid:").and_then(|parts| parts.split_once(':'));
                let (alpha, beta) = parts.ok_or_else(unknown)?;
                let part = |text: &str| text.parse::<u32>().map_err(|_| unknown());
                Ok(CodingMode::Hybrid(CodingRatio::new(part(alpha)?, part(beta)?)?))
            }
        }
    }
}

impl TryFrom<String> for CodingMode {
    type Error = CodingModeError;

    fn try_from(text: String) -> Result<CodingMode, CodingModeError> {
        text.parse()
    }
}

impl From<CodingMode> for String {
    fn from(mode: CodingMode) -> String {
        mode.to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer;
    use serde::de::value::Error;

    use super::*;

    #[test]
    fn coding_modes_roundtrip_as_text_and_invalid_text_is_refused() {
        for text in ["latency-sensitive", "async", "hybrid:3:1", "hybrid:0:1", "hybrid:auto"] {
            assert_eq!(text.parse::<CodingMode>().unwrap().to_string(), text);
            let read = CodingMode::deserialize(IntoDeserializer::<Error>::into_deserializer(text.to_owned()));
            assert_eq!(read.unwrap(), text.parse().unwrap());
        }
        for text in ["", "hybrid", "hybrid:3", "hybrid:a:b", "hybrid:1:2:3", "Async", "hybrid:-1:2"] {
            assert_eq!(text.parse::<CodingMode>(), Err(CodingModeError::Unknown(text.to_owned())));
        }
        assert_eq!("hybrid:0:0".parse::<CodingMode>(), Err(CodingModeError::Ratio(0, 0)));
        assert!("hybrid:4294967295:4294967295".parse::<CodingMode>().is_err());
    }
}
