//! [`DebugControls`]: faults and switches of the osd's process, for tests and measurements.

use std::sync::Arc;

use base::fault::{Armed, Fault};
use wire::{ChannelTuning, Error, Result, Role, TuningChange};

/// The faults of the osd's process, and the switches of its mechanisms. Any thread may call it.
pub trait DebugControls: Send + Sync {
    /// Returns the role of the process.
    fn role(&self) -> Role;

    /// Arms a fault.
    ///
    /// # Errors
    /// [`Error::CommandRefused`] if this process does not reach the site of the fault, and
    /// [`Error::Busy`] if too many faults are armed.
    fn arm(&self, fault: Fault) -> Result<()>;

    /// Returns the armed faults.
    fn armed(&self) -> Vec<Armed>;

    /// Disarms all faults. Returns the faults that were armed.
    fn clear(&self) -> Vec<Armed>;

    /// Sets how the osd uses the channel to its store. Returns the new tuning.
    ///
    /// # Errors
    /// [`Error::CommandRefused`] if the osd uses no channel, and [`Error::OutOfRange`] if a value is not
    /// valid.
    fn tune(&self, change: TuningChange) -> Result<ChannelTuning>;
}

/// The controls of the process. The default has none.
#[derive(Clone, Default)]
pub struct DebugAt(pub Option<Arc<dyn DebugControls>>);

impl std::fmt::Debug for DebugAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DebugAt")
    }
}

impl DebugAt {
    pub(crate) fn controls(&self) -> Result<&dyn DebugControls> {
        let none =
            || Error::CommandRefused("its process has no faults to arm; use a node of `outboard up`".into());
        self.0.as_deref().ok_or_else(none)
    }
}
