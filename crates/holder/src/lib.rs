//! The holder.
#![forbid(unsafe_code)]

mod error;
mod framing;
mod protocol;
mod socket;
pub use error::*;
pub use framing::{Cutter, Framing, FramingError, RawMessage, Violation};
