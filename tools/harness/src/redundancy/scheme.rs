//! The redundancy schemes that the parts compare.

use crate::Result;
use crate::node::Node;

/// A redundancy scheme. The node has a pool for each scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// No redundancy.
    Single,
    /// Two copies.
    Mirror2,
    /// Four data fragments and two parity fragments.
    Ec4Plus2,
}

impl Scheme {
    /// All schemes.
    pub const ALL: [Scheme; 3] = [Scheme::Single, Scheme::Mirror2, Scheme::Ec4Plus2];

    /// The scheme in the syntax of the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Scheme::Single => "single",
            Scheme::Mirror2 => "mirror:2",
            Scheme::Ec4Plus2 => "ec:4+2",
        }
    }

    /// Name of the pool with this scheme.
    #[must_use]
    pub fn pool_name(self) -> &'static str {
        match self {
            Scheme::Single => "single",
            Scheme::Mirror2 => "mirror",
            Scheme::Ec4Plus2 => "ec",
        }
    }

    /// Number of bytes that a write of one byte of an object writes to the drive.
    #[must_use]
    pub fn drive_bytes_per_byte(self) -> f64 {
        match self {
            Scheme::Single => 1.0,
            Scheme::Mirror2 => 2.0,
            Scheme::Ec4Plus2 => 1.5,
        }
    }

    /// Creates a pool for each scheme.
    ///
    /// # Errors
    /// If the node fails.
    pub fn create_pools(node: &Node) -> Result<()> {
        Scheme::ALL.into_iter().try_for_each(|scheme| {
            node.run_quietly(&["pool", "create", scheme.pool_name(), "--redundancy", scheme.as_str()])
        })
    }
}
