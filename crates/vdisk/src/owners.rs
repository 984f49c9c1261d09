//! The owners and workers of a disk, and how they are fenced.
//!
//! Two kinds of processes change a disk. Its *owner* executes the requests of front ends. Its *worker* does
//! the upkeep: it moves chunks between layers and removes old data. There is at most one of each. Both use an
//! exclusive session. A process that takes one of these roles first writes itself into the record of the
//! disk, then fences its predecessor, and only then changes chunks. So no late change of a predecessor takes
//! effect.

use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use bytes::Bytes;
use client::Client;
use client::engine::OwnerName;
use tokio::time::sleep;

use crate::disks::Disks;
use crate::header::DiskHeader;
use crate::{Error, Result};

/// First pause before a request is repeated. It doubles up to [`PAUSE_MAX`].
pub(crate) const PAUSE: Duration = Duration::from_millis(20);
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Number of attempts to change the record of a disk that others change, too.
pub(crate) const ATTEMPTS: usize = 16;

/// Opens an exclusive session ([`client::Options::exclusive`]).
pub type OpenSession = Arc<dyn Fn() -> BoxFuture<'static, client::Result<Client>> + Send + Sync>;

/// Takes a role. `take` writes the session of `client` into the record of the disk, and adds its
/// predecessors to [`DiskHeader::unfenced`]. Returns the record after they are fenced.
pub(crate) async fn take_role(
    client: &Client,
    disks: &Disks,
    name: &str,
    mut take: impl FnMut(&mut DiskHeader) -> Result<()>,
) -> Result<DiskHeader> {
    for _ in 0..ATTEMPTS {
        let (mut header, version) = disks.load(name).await?;
        take(&mut header)?;
        let version = match disks.store(&header, version).await {
            Err(Error::Conflict(_)) => continue,
            stored => stored?,
        };
        if !header.unfenced.is_empty() {
            // Until all of them are fenced, they stay on record: this process may end before.
            fence_all(client, &header.unfenced).await?;
            header.unfenced.clear();
            match disks.store(&header, version).await {
                // To fence them again later does no harm.
                Err(Error::Conflict(_)) => {}
                stored => drop(stored?),
            }
        }
        return Ok(header);
    }
    Err(Error::Conflict(name.to_owned()))
}

/// Fences sessions. While the node is unavailable, it waits.
pub(crate) async fn fence_all(client: &Client, names: &[Bytes]) -> Result<()> {
    for name in names {
        let name = OwnerName::from_bytes(name.clone())?;
        let mut pause = PAUSE;
        loop {
            match client.fence(&name).await {
                Ok(()) => break,
                Err(e) if is_unavailable(&e) => tracing::warn!(%e, "an earlier owner is not fenced yet"),
                Err(e) => return Err(e.into()),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
    Ok(())
}

/// Returns whether a request of an open session must be repeated, because the node was unavailable or the
/// outcome is unknown.
///
/// To repeat a change of an exclusive owner does no harm: until it has ended, the guest cannot rely on the
/// order of other changes of the same blocks.
pub(crate) fn is_unavailable(e: &client::Error) -> bool {
    !is_over(e) && (e.is_transient() || e.may_have_taken_effect())
}

/// Returns whether the session has ended.
pub(crate) fn is_over(e: &client::Error) -> bool {
    matches!(e, client::Error::Fenced(_) | client::Error::Closed)
}
