//! [`CapabilityHolder`]: the capability of a session, and how the client gets a new one.
//!
//! The client presents its capability to each shard when it opens the session there. If a shard refuses
//! it, the link gets a new one from the control plane and tries again. A background task replaces the
//! capability before it expires, so that no request has to wait for this.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base::clock::WallClock;
use bytes::Bytes;
use capability::{CAPABILITY_BYTES_MAX, Claims};
use control::ControlError;
use wire::{AdminReply, AdminRequest};

use crate::options::ControlWay;
use crate::{Error, Options, Result};

/// Part of the lifetime of a capability that is left when the client replaces it: a quarter.
const RENEW_BEFORE: u32 = 4;
/// Pause before another attempt to replace a capability.
pub(super) const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// The capability of a session.
pub(super) struct CapabilityHolder {
    plane: ControlWay,
    clock: WallClock,
    /// File in which the capability is kept for other processes.
    file: Option<std::path::PathBuf>,
    /// Whether the user has given the capability, so that the client must not replace it.
    is_given: bool,
    current: Mutex<Bytes>,
    /// Held by the task that gets a new capability.
    renewing: tokio::sync::Mutex<()>,
}

impl CapabilityHolder {
    pub(super) fn new(options: &Options, plane: ControlWay) -> CapabilityHolder {
        let file = options.capability_file.clone();
        let (current, is_given) = match &options.capability {
            Some(given) => (given.clone(), true),
            None => (file.as_deref().and_then(read).unwrap_or_default(), false),
        };
        let (current, renewing) = (Mutex::new(current), tokio::sync::Mutex::default());
        let clock = options.clock.clone();
        CapabilityHolder { plane, clock, file, is_given, current, renewing }
    }

    /// Returns whether the user has given the capability, so that the client must not replace it.
    pub(super) fn is_given(&self) -> bool {
        self.is_given
    }

    /// Returns the capability; empty if the client has none yet.
    pub(super) fn current(&self) -> Bytes {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gets a new capability from the control plane at `control`, unless another task has replaced
    /// `old` already.
    ///
    /// # Errors
    /// If the control plane does not issue one.
    pub(super) async fn replace(&self, old: &Bytes, control: Option<&str>) -> Result<()> {
        let _one_at_a_time = self.renewing.lock().await;
        if self.current() != *old {
            return Ok(());
        }
        let request = AdminRequest::IssueCapability { grants: None, key: None, lifetime_s: 0 };
        let issued = match self.plane.0.administer(control, request, false).await {
            Ok(AdminReply::Capability(issued)) => issued,
            Ok(other) => return Err(Error::Protocol(format!("expected a capability, got {other:?}"))),
            Err(ControlError::Refused(e)) => return Err(Error::Node(e)),
            Err(e) => return Err(Error::Control(e)),
        };
        if let Some(file) = &self.file
            && let Err(e) = write(file, &issued)
        {
            tracing::debug!(file = %file.display(), error = %e, "the capability cannot be kept for the next command");
        }
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = issued;
        Ok(())
    }

    /// Returns the time after which the client replaces the capability.
    pub(super) fn renew_after(&self) -> Duration {
        if self.is_given {
            return Duration::MAX;
        }
        // The claims are not verified: only the node can do this, and the client trusts its own file.
        let Some(claims) = Claims::unverified(&self.current()) else { return RETRY_PAUSE };
        // This clock may differ from the node's. Then the node refuses the capability earlier or later,
        // and a link replaces it.
        let now = Duration::from_millis(self.clock.now_ms());
        let lifetime = Duration::from_secs(claims.expires.saturating_sub(claims.issued));
        let left = Duration::from_secs(claims.expires).saturating_sub(now).min(lifetime);
        left.saturating_sub(lifetime / RENEW_BEFORE)
    }
}

/// Reads a capability; `None` if the file does not contain one. Other content is not sent to the node.
fn read(file: &Path) -> Option<Bytes> {
    let length = std::fs::metadata(file).ok()?.len();
    (length <= CAPABILITY_BYTES_MAX as u64).then_some(())?;
    std::fs::read(file).ok().filter(|bytes| Claims::unverified(bytes).is_some()).map(Bytes::from)
}

/// Replaces the file. Only its owner can read it.
fn write(file: &Path, capability: &[u8]) -> std::io::Result<()> {
    let new = file.with_extension(format!("{}.new", std::process::id()));
    // In a shared directory, another user could have created the file or a link with this name.
    let _ = std::fs::remove_file(&new);
    let mut options = std::fs::OpenOptions::new();
    let written = options.write(true).create_new(true).mode(0o600).open(&new);
    let written = written.and_then(|mut file| file.write_all(capability));
    written.and_then(|()| std::fs::rename(&new, file)).inspect_err(|_| drop(std::fs::remove_file(&new)))
}
