//! What the map says of targets, and what targets contribute to the map.

use std::rc::Rc;

use super::NodeMap;
use crate::target::Target;

impl NodeMap {
    /// Whether the map lists a target.
    pub(crate) fn has(&self, target: &Target) -> bool {
        self.record(&target.uuid).is_some()
    }

    /// Records which targets have failed or have no space for the map.
    pub(crate) fn note_lost(&mut self, targets: &[Rc<Target>]) {
        for record in &mut self.targets {
            if let Some(target) = targets.iter().find(|target| target.uuid == record.uuid) {
                record.lost = target.failure().is_some() || target.lacks_map();
            }
        }
    }

    /// Tells each target whether the map lists it as out of use.
    pub(crate) fn tell(&self, targets: &[Rc<Target>]) {
        for target in targets {
            let Some(record) = self.record(&target.uuid) else { continue };
            if target.is_out() != record.out {
                target.set_out(record.out);
            }
        }
    }
}
