//! [`Controls`]: arms faults and tunes the channel in the process of the osd, while it runs. The control
//! plane offers the controls to administrators of the node.

use std::sync::{Arc, Mutex, PoisonError};

use base::fault::{ARMED_MAX, Armed, Fault, Faults, Site, TooManyFaults};
use osd::DebugControls;
use wire::{ChannelTuning, Error, Placement, Role, TuningChange};

use super::config::ChannelSection;

/// Returns the role whose process reaches a fault site; `None` if the site does not exist with this
/// placement.
pub fn role_of(site: Site, placement: Placement) -> Option<Role> {
    match (site, placement) {
        (Site::StoreDoorbell | Site::StoreDevice | Site::StoreCall | Site::DriveWrite, Placement::Dpu) => {
            Some(Role::Store)
        }
        (
            Site::DmaTransfer
            | Site::DmaDoorbell
            | Site::DmaDevice
            | Site::OsdReply
            | Site::MessengerPath
            | Site::EcOffload,
            Placement::Dpu,
        ) => Some(Role::Osd),
        (Site::DriveWrite | Site::MessengerPath | Site::EcOffload, Placement::Host) => Some(Role::Node),
        (
            Site::StoreDoorbell
            | Site::StoreDevice
            | Site::StoreCall
            | Site::DmaTransfer
            | Site::DmaDoorbell
            | Site::DmaDevice
            | Site::OsdReply,
            Placement::Host,
        ) => None,
    }
}

/// A function that applies a tuning.
pub type Tune = Box<dyn Fn(ChannelTuning) + Send>;

/// What can change in the osd's process while it runs. Clones control the same process.
#[derive(Clone)]
pub struct Controls {
    placement: Placement,
    faults: Faults,
    tuned: Arc<Mutex<Option<Tunable>>>,
}

/// A channel that can be tuned.
struct Tunable {
    configured: ChannelTuning,
    current: ChannelTuning,
    /// One function for each shard.
    tune: Vec<Tune>,
}

impl std::fmt::Debug for Controls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controls").field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl Controls {
    /// Creates the controls of the process that serves clients of a node with this placement.
    pub fn new(placement: Placement, faults: Faults) -> Controls {
        Controls { placement, faults, tuned: Arc::default() }
    }

    /// Returns the faults of the process.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Makes a shard of the osd tunable from now on. The channel has the tuning `configured`, and
    /// `tune` applies another tuning to the shard's part of the channel.
    pub fn tune_with(&self, configured: ChannelTuning, tune: Tune) {
        let mut tuned = self.tuned.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Tunable { configured, current: configured, tune: Vec::new() };
        let tunable = tuned.get_or_insert(fresh);
        if tunable.current != configured {
            tune(tunable.current);
        }
        tunable.tune.push(tune);
    }
}

impl DebugControls for Controls {
    fn role(&self) -> Role {
        match self.placement {
            Placement::Dpu => Role::Osd,
            Placement::Host => Role::Node,
        }
    }

    fn arm(&self, fault: Fault) -> wire::Result<()> {
        let site = fault.site.name();
        match role_of(fault.site, self.placement) {
            Some(role) if role == self.role() => {}
            Some(_) => {
                return Err(Error::CommandRefused(format!(
                    "the fault site {site} is in the process of the store, which has no control plane; on the \
                     machine of the store, run \"outboard debug fault {fault} --dir DIR\" with the directory of \
                     the node, and without --endpoint"
                )));
            }
            None => {
                return Err(Error::CommandRefused(format!(
                    "the fault site {site} exists only with placement dpu; start a node with this placement"
                )));
            }
        }
        self.faults.arm(fault).map_err(|TooManyFaults| Error::Busy {
            what: "armed faults".into(),
            limit: ARMED_MAX as u64,
            advice: "disarm them with \"outboard debug clear\"".into(),
        })
    }

    fn armed(&self) -> Vec<Armed> {
        self.faults.armed()
    }

    fn clear(&self) -> Vec<Armed> {
        self.faults.clear()
    }

    fn tune(&self, change: TuningChange) -> wire::Result<ChannelTuning> {
        let mut tuned = self.tuned.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing =
            || Error::CommandRefused("the osd uses no channel; start a node with placement dpu".into());
        let tunable = tuned.as_mut().ok_or_else(nothing)?;
        let wanted = change.applied_to(tunable.configured);
        ChannelSection::check_tuning(&wanted)
            .map_err(|e| Error::OutOfRange { what: "the tuning".into(), detail: e.to_string() })?;
        tracing::warn!(?wanted, "the tuning of the channel has changed");
        tunable.tune.iter().for_each(|tune| tune(wanted));
        tunable.current = wanted;
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_arms_only_faults_of_its_own_sites() {
        for site in Site::ALL {
            let fault: Fault = format!("{}={}", site.name(), site.actions()[0]).parse().unwrap();
            for placement in Placement::ALL {
                let controls = Controls::new(placement, Faults::default());
                let armed = controls.arm(fault);
                match role_of(*site, placement) {
                    Some(Role::Store) => {
                        let refused = armed.unwrap_err().to_string();
                        let run = format!("outboard debug fault {fault} --dir DIR");
                        assert!(refused.contains(&run), "{refused}");
                    }
                    Some(role) => assert_eq!((armed, role), (Ok(()), controls.role())),
                    None => assert!(armed.unwrap_err().to_string().contains("placement dpu")),
                }
                assert_eq!(controls.faults().any(), role_of(*site, placement) == Some(controls.role()));
            }
        }
    }

    #[test]
    fn a_process_refuses_more_faults_than_it_can_arm() {
        let controls = Controls::new(Placement::Dpu, Faults::default());
        let fault: Fault = "dma.transfer=fail".parse().unwrap();
        (0..ARMED_MAX).for_each(|_| controls.arm(fault).unwrap());
        let refused = controls.arm(fault).unwrap_err();
        assert!(matches!(&refused, Error::Busy { limit: 64, .. }), "{refused}");
        assert_eq!(controls.clear().len(), ARMED_MAX);
    }

    #[test]
    fn valid_channel_tunings_are_applied_and_values_out_of_range_are_refused() {
        let controls = Controls::new(Placement::Dpu, Faults::default());
        let nothing = controls.tune(TuningChange::default()).unwrap_err();
        assert!(matches!(nothing, Error::CommandRefused(_)), "{nothing}");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let saw = Arc::clone(&seen);
        let configured = ChannelTuning {
            pipeline: true,
            region_cache: 64,
            max_transfer: 2 << 20,
            dma_queues: 5,
            poll_us: 0,
        };
        controls.tune_with(configured, Box::new(move |t| saw.lock().unwrap().push(t)));
        let unchanged = TuningChange::default();
        let wanted = ChannelTuning { region_cache: 0, ..configured };
        assert_eq!(controls.tune(TuningChange { region_cache: Some(0), ..unchanged }), Ok(wanted));
        for impossible in [
            TuningChange { region_cache: Some(u64::MAX), ..unchanged },
            TuningChange { max_transfer: Some(0), ..unchanged },
            TuningChange { max_transfer: Some(4 << 20), ..unchanged },
            TuningChange { max_transfer: Some(5000), ..unchanged },
            TuningChange { dma_queues: Some(0), ..unchanged },
            TuningChange { poll_us: Some(u64::MAX), ..unchanged },
        ] {
            let refused = controls.tune(impossible);
            assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{impossible:?}: {refused:?}");
        }
        assert_eq!(controls.tune(unchanged), Ok(configured), "each change begins with the configured tuning");
        assert_eq!(*seen.lock().unwrap(), [wanted, configured], "a refused tuning is not applied");
    }
}
