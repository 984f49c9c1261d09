//! The holder.
#![forbid(unsafe_code)]

mod device;
mod error;
mod framing;
mod protocol;
mod socket;
mod socket_file;
pub use error::*;
pub use framing::{Cutter, Framing, FramingError, RawMessage, Violation};
