//! Repairs damaged fragments: reconstructs each fragment from the other members, and writes it to
//! its member.

use store::ObjectId;

use crate::copy::ReceivingMember;
use crate::group::Group;
use crate::interval::Interval;

impl Group {
    /// Reconstructs a fragment that could not be read, and writes it to its member.
    pub(crate) async fn repair(&self, oid: &ObjectId, position: usize) -> store::Result<()> {
        let interval = self.any_interval().await?;
        let locked = self.objects.alone(oid).await;
        let _open = self.gate.read().await;
        self.still(&interval)?;
        locked.forget();
        self.repair_locked(&interval, oid, position).await
    }

    async fn repair_locked(&self, interval: &Interval, oid: &ObjectId, position: usize) -> store::Result<()> {
        let Some(link) = self.live(interval, position, oid) else { return Ok(()) };
        self.copy_object(interval, &link, position, oid, ReceivingMember::Damaged).await?;
        metrics::counter!("outboard_osd_fragments_repaired_total").increment(1);
        tracing::info!(%oid, target_uuid = %link.target.uuid(), "a fragment was repaired");
        Ok(())
    }

    /// Repairs the damaged fragments of an object before it changes, because the change uses all
    /// fragments.
    pub(crate) async fn repair_before_change(&self, interval: &Interval, oid: &ObjectId) {
        for position in self.damaged.positions(oid) {
            if let Err(e) = self.repair_locked(interval, oid, position).await {
                tracing::warn!(%oid, position, error = %e, "cannot repair a damaged fragment before its object changes");
            }
            self.damaged.remove(oid, position);
        }
    }
}
