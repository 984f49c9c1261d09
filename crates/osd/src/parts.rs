//! Checks and removes parts of striped objects.

use std::rc::Rc;

use wire::{Error, Manifest, Mutation, ObjectName, PartId};

use crate::fail::StepResult;
use crate::gather::Gathered;
use crate::mutate::Change;
use crate::osd::Osd;
use crate::patience::info_of;
use crate::pool::ObjectLocation;
use crate::task::spawn;

impl Osd {
    /// Checks that all parts of a new manifest exist and have the right size. If the client was
    /// disconnected for a long time, the collector may have removed its parts.
    pub(crate) async fn check_parts(&self, name: &ObjectName, ops: &[Mutation]) -> StepResult<()> {
        for op in ops {
            let Mutation::SetManifest(Manifest { upload, part_size, size }) = *op else { continue };
            for (index, start) in (0..).zip((0..size).step_by(part_size as usize)) {
                let place = self.place(name, Some(&PartId { upload, index }))?;
                let found = info_of(&place, self.config.store_patience).await?;
                if found.is_none_or(|info| info.size != part_size.min(size - start)) {
                    let what = format!(
                        "part {index} of the upload is missing or has the wrong size; upload the object again"
                    );
                    return Err(Error::BadRequest(what).into());
                }
            }
        }
        Ok(())
    }

    /// Removes the parts of a manifest in the background. No head object may refer to this manifest
    /// any more. If a part cannot be removed, the collector removes it later.
    pub(crate) fn drop_parts(self: &Rc<Osd>, name: ObjectName, manifest: Manifest) {
        let osd = Rc::clone(self);
        spawn(async move {
            for index in 0..manifest.parts() {
                let Ok(index) = u32::try_from(index) else { return };
                let part = PartId { upload: manifest.upload, index };
                let Ok(place) = osd.place(&name, Some(&part)) else { return };
                if let Err(e) = osd.remove_object(&place, &name.to_string()).await {
                    tracing::warn!(%name, index, error = %e, "an unused part was not removed; the collector removes it later");
                }
            }
        });
    }

    /// Removes an object without a request of a client. Also succeeds if the object does not exist.
    pub(crate) async fn remove_object(&self, place: &ObjectLocation, name: &str) -> wire::Result<()> {
        let ops = [wire::Mutation::Remove];
        let patience = self.config.store_patience;
        let change = Change { osd: self, place, name, conditions: &[], ops: &ops, origin: None, patience };
        match change.run(false, async || Ok(Gathered::None)).await {
            Ok(_) | Err(Error::NoSuchObject(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }
}
