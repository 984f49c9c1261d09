//! Fault injection: which failures are injected, where and how often.
//!
//! Fault injection is part of ordinary builds, and off until the configuration or a debug command
//! arms a fault. Armed faults are visible: in the log when they are armed and each time they fire,
//! in `outboard status`, and in the metric `outboard_faults_fired`. A fault is written as
//! `SITE=ACTION`, with options after commas:
//!
//! ```text
//! dma.transfer=fail,after=3,count=1        the fourth transfer fails, once
//! dma.transfer=stall,late=300ms,probability=0.01
//! ```

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// Maximum number of faults that can be armed at a time.
pub const ARMED_MAX: usize = 64;
/// Maximum length of the text form of a fault, in bytes.
const TEXT_MAX: usize = 256;
/// Default delay of a stalled operation.
const LATE: Duration = Duration::from_millis(500);

/// Defines the sites in one table: the name of each site, its possible actions, and the condition
/// under which the code reaches the site (`""` if there is no special condition).
macro_rules! sites {
    ($($(#[$doc:meta])* $site:ident: $name:literal, $actions:expr, $condition:literal;)*) => {
        /// A place in the code where a fault can be injected.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Site {
            $($(#[$doc])* $site,)*
        }

        impl Site {
            /// All sites.
            pub const ALL: &[Site] = &[$(Site::$site),*];

            fn properties(self) -> (&'static str, &'static [&'static str], &'static str) {
                match self {
                    $(Site::$site => ($name, &$actions, $condition),)*
                }
            }
        }
    };
}

sites! {
    /// One transfer of the DMA engine.
    DmaTransfer: "dma.transfer", ["fail", "stall", "corrupt"], "";
    /// The doorbell that the engine rings on the host.
    DmaDoorbell: "dma.doorbell", ["drop"], "";
    /// The device of a DMA engine that reaches its peer over a network. Checked once per iteration
    /// of the loop of the engine's thread.
    DmaDevice: "dma.device", ["fail"], "engine ofi only";
    /// The doorbell that the store rings on the DPU.
    StoreDoorbell: "store.doorbell", ["drop"], "";
    /// The device through which the store's process offers memory over a network. Checked once per
    /// iteration of the loop of the device's thread.
    StoreDevice: "store.device", ["fail"], "engine ofi only";
    /// A call that the store's process receives.
    StoreCall: "store.call", ["kill"], "";
    /// A reply that the osd's process receives.
    OsdReply: "osd.reply", ["kill"], "";
    /// One completion of a path over libfabric: a packet has arrived, or an operation has ended.
    MessengerPath: "messenger.path", ["fail", "stall", "drop"], "connections over libfabric only";
    /// One erasure-coding task, on any processor or device.
    EcOffload: "ec.offload", ["fail", "stall"], "";
    /// A write to a target's drive, or a flush.
    DriveWrite: "drive.write", ["fail"], "";
}

/// Effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The operation fails and reports the error.
    Fail,
    /// The operation succeeds, but only after this delay.
    Stall(Duration),
    /// One byte of the operation's result is wrong.
    Corrupt,
    /// The operation is silently skipped.
    Drop,
    /// The process is killed.
    Kill,
}

impl Site {
    /// Returns the site's name in the text form of a fault.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.properties().0
    }

    /// Returns the names of the actions that are possible at the site.
    #[must_use]
    pub fn actions(self) -> &'static [&'static str] {
        self.properties().1
    }

    /// Returns the condition under which the code reaches the site, for display; `None` if there is
    /// no special condition.
    #[must_use]
    pub fn condition(self) -> Option<&'static str> {
        Some(self.properties().2).filter(|condition| !condition.is_empty())
    }

    /// Lists all sites with their actions, each as `SITE=ACTION|ACTION`, separated by commas.
    fn list() -> String {
        let site = |site: &Site| format!("{}={}", site.name(), site.actions().join("|"));
        Site::ALL.iter().map(site).collect::<Vec<_>>().join(", ")
    }
}

impl Action {
    /// Returns the action's name in the text form of a fault.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Action::Fail => "fail",
            Action::Stall(_) => "stall",
            Action::Corrupt => "corrupt",
            Action::Drop => "drop",
            Action::Kill => "kill",
        }
    }
}

/// A fault that can be armed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// The site.
    pub site: Site,
    /// The action.
    pub action: Action,
    /// Number of times that the code reaches the site before the fault can fire.
    pub after: u64,
    /// Maximum number of times that the fault fires; `None` for no limit.
    pub count: Option<u64>,
    /// Probability that the fault fires when the code reaches the site, 0 to 1.
    pub probability: f64,
    /// Seed of the random numbers that decide whether the fault fires.
    pub seed: u64,
}

/// The probability is never NaN.
impl Eq for Fault {}

/// Error: [`ARMED_MAX`] faults are armed already.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{ARMED_MAX} faults are armed already; disarm them with `outboard debug clear`")]
pub struct TooManyFaults;

/// Why a text is not a fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}; a fault is SITE=ACTION[,after=N][,count=N][,probability=P][,late=TIMEms][,seed=N], with {sites}",
    sites = Site::list()
)]
pub struct FaultError {
    what: String,
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Fault, FaultError> {
        let error = |what: String| FaultError { what };
        if text.len() > TEXT_MAX {
            return Err(error(format!(
                "the text has {} bytes, but at most {TEXT_MAX} are allowed",
                text.len()
            )));
        }
        let mut parts = text.split(',').map(str::trim);
        let (site, action) = parts
            .next()
            .and_then(|first| first.split_once('='))
            .ok_or_else(|| error(format!("{text:?} is not a fault")))?;
        let site = *Site::ALL
            .iter()
            .find(|known| known.name() == site)
            .ok_or_else(|| error(format!("there is no fault site {site:?}")))?;
        if !site.actions().contains(&action) {
            return Err(error(format!("the action {action:?} is not possible at {}", site.name())));
        }
        let action = match action {
            "fail" => Action::Fail,
            "stall" => Action::Stall(LATE),
            "corrupt" => Action::Corrupt,
            "drop" => Action::Drop,
            _ => Action::Kill,
        };
        let mut fault = Fault { site, action, after: 0, count: None, probability: 1.0, seed: 0 };
        for part in parts {
            fault
                .option(part)
                .ok_or_else(|| error(format!("the option {part:?} is not valid in {text:?}")))?;
        }
        Ok(fault)
    }
}

impl Fault {
    fn option(&mut self, text: &str) -> Option<()> {
        let (key, value) = text.split_once('=')?;
        match key {
            "after" => self.after = value.parse().ok()?,
            "count" => self.count = Some(value.parse().ok()?),
            "seed" => self.seed = value.parse().ok()?,
            "probability" => {
                self.probability = value.parse().ok().filter(|p| (0.0..=1.0).contains(p))?;
            }
            "late" => {
                let Action::Stall(late) = &mut self.action else { return None };
                *late = Duration::from_millis(value.strip_suffix("ms")?.parse().ok()?);
            }
            _ => return None,
        }
        Some(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.site.name(), self.action.name())?;
        if let Action::Stall(late) = self.action {
            write!(f, ",late={}ms", late.as_millis())?;
        }
        if self.after > 0 {
            write!(f, ",after={}", self.after)?;
        }
        if let Some(count) = self.count {
            write!(f, ",count={count}")?;
        }
        if self.probability < 1.0 {
            write!(f, ",probability={}", self.probability)?;
        }
        if self.seed > 0 {
            write!(f, ",seed={}", self.seed)?;
        }
        Ok(())
    }
}

/// Report of an armed fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Armed {
    /// Text form of the [`Fault`].
    pub fault: String,
    /// Number of times that the fault has fired.
    pub fired: u64,
}

impl fmt::Display for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (fired {})", self.fault, self.fired)
    }
}

struct FaultSlot {
    fault: Fault,
    occasions: u64,
    fired: u64,
    dice: SmallRng,
}

#[derive(Default)]
struct Shared {
    any: AtomicBool,
    slots: Mutex<Vec<FaultSlot>>,
}

/// The armed faults of a process or a test. Clones share the same faults. While no fault is armed,
/// a check costs one atomic load.
#[derive(Clone, Default)]
pub struct Faults(Arc<Shared>);

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faults").field(&self.armed()).finish()
    }
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, Vec<FaultSlot>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a fault.
    ///
    /// # Errors
    /// If too many faults are armed.
    pub fn arm(&self, fault: Fault) -> Result<(), TooManyFaults> {
        let mut slots = self.lock();
        if slots.len() >= ARMED_MAX {
            return Err(TooManyFaults);
        }
        tracing::warn!("FAULT ARMED: {fault}");
        slots.push(FaultSlot { fault, occasions: 0, fired: 0, dice: SmallRng::seed_from_u64(fault.seed) });
        self.0.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Disarms all faults. Returns the faults that were armed.
    pub fn clear(&self) -> Vec<Armed> {
        let mut slots = self.lock();
        self.0.any.store(false, Ordering::Release);
        slots.drain(..).map(|slot| slot.report()).collect()
    }

    /// Returns true if any fault is armed.
    #[must_use]
    pub fn any(&self) -> bool {
        self.0.any.load(Ordering::Acquire)
    }

    /// Returns the armed faults.
    #[must_use]
    pub fn armed(&self) -> Vec<Armed> {
        self.lock().iter().map(FaultSlot::report).collect()
    }

    /// Returns the number of times that the armed faults of a site have fired.
    #[must_use]
    pub fn fired(&self, site: Site) -> u64 {
        self.lock().iter().filter(|s| s.fault.site == site).map(|s| s.fired).sum()
    }

    /// Records that the code has reached a site. Returns the action to inject if an armed fault
    /// fires. Does not return if the action is [`Action::Kill`].
    #[must_use]
    pub fn hit(&self, site: Site) -> Option<Action> {
        if !self.any() {
            return None;
        }
        let mut slots = self.lock();
        let mut at_site: Vec<&mut FaultSlot> = slots.iter_mut().filter(|s| s.fault.site == site).collect();
        // Every fault counts this occasion, but at most one fires.
        at_site.iter_mut().for_each(|slot| slot.occasions += 1);
        let slot = at_site.into_iter().find_map(FaultSlot::fires);
        drop(slots);
        let fault = slot?;
        let action = fault.action;
        tracing::warn!("FAULT FIRED: {fault}");
        metrics::counter!("outboard_faults_fired", "site" => site.name(), "action" => action.name())
            .increment(1);
        if action == Action::Kill {
            kill();
        }
        Some(action)
    }
}

impl FaultSlot {
    fn report(&self) -> Armed {
        Armed { fault: self.fault.to_string(), fired: self.fired }
    }

    fn fires(&mut self) -> Option<Fault> {
        let spent = self.fault.count.is_some_and(|count| self.fired >= count);
        if spent || self.occasions <= self.fault.after || !self.dice.random_bool(self.fault.probability) {
            return None;
        }
        self.fired += 1;
        Some(self.fault)
    }
}

/// Kills the process as a crash would: no destructor runs, and nothing is flushed.
fn kill() -> ! {
    // The signal cannot be refused; the call of abort only satisfies the return type.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parsed_fault_has_its_original_text_and_invalid_text_is_refused() {
        for text in [
            "dma.transfer=fail",
            "dma.transfer=stall,late=20ms,after=3",
            "dma.doorbell=drop,count=1",
            "store.call=kill,probability=0.5",
            "ec.offload=stall,late=20ms",
            "dma.transfer=fail,probability=0.5,seed=7",
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "dma.transfer",
            "dma.transfer=drop",
            "nowhere=fail",
            "dma.transfer=fail,late=5ms",
            "dma.transfer=fail,probability=2",
            "dma.transfer=fail,x=1",
        ] {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
        let refused = format!("dma.transfer=fail{}", ",count=1".repeat(1000)).parse::<Fault>().unwrap_err();
        assert!(refused.to_string().len() < 2000, "the error does not repeat a long text: {refused}");
    }

    #[test]
    fn a_process_has_at_most_64_armed_faults() {
        let faults = Faults::default();
        let fault: Fault = "dma.transfer=fail".parse().unwrap();
        (0..ARMED_MAX).for_each(|_| faults.arm(fault).unwrap());
        assert_eq!(faults.arm(fault), Err(TooManyFaults));
        assert_eq!(faults.clear().len(), ARMED_MAX);
        faults.arm(fault).unwrap();
    }

    #[test]
    fn every_action_of_every_site_can_be_armed_and_errors_list_all_sites() {
        let listed = "nowhere".parse::<Fault>().unwrap_err().to_string();
        for site in Site::ALL {
            for action in site.actions() {
                let fault: Fault = format!("{}={action}", site.name()).parse().unwrap();
                assert_eq!((fault.site, fault.action.name()), (*site, *action));
            }
            assert!(listed.contains(&format!("{}={}", site.name(), site.actions().join("|"))), "{listed}");
        }
    }

    #[test]
    fn a_fault_skips_the_first_hits_and_fires_at_most_count_times() {
        let faults = Faults::default();
        assert_eq!(faults.hit(Site::DmaTransfer), None);
        faults.arm("dma.transfer=fail,after=2,count=2".parse().unwrap()).unwrap();
        let hits: Vec<bool> = (0..6).map(|_| faults.hit(Site::DmaTransfer).is_some()).collect();
        assert_eq!(hits, [false, false, true, true, false, false]);
        assert_eq!(faults.hit(Site::DmaDoorbell), None);
        assert_eq!(faults.fired(Site::DmaTransfer), 2);
        faults.clear();
        assert!(!faults.any() && faults.armed().is_empty());
    }

    #[test]
    fn every_fault_of_a_site_counts_each_hit() {
        let faults = Faults::default();
        faults.arm("dma.transfer=fail,count=2".parse().unwrap()).unwrap();
        faults.arm("dma.transfer=corrupt,after=2,count=1".parse().unwrap()).unwrap();
        let hits: Vec<Option<Action>> = (0..4).map(|_| faults.hit(Site::DmaTransfer)).collect();
        assert!(hits[..2].iter().all(|hit| *hit == Some(Action::Fail)), "{hits:?}");
        assert_eq!(hits[2], Some(Action::Corrupt));
        assert_eq!(hits[3], None);
    }

    #[test]
    fn faults_with_the_same_seed_fire_at_the_same_hits() {
        let run = |seed| {
            let faults = Faults::default();
            faults.arm(format!("dma.transfer=fail,probability=0.3,seed={seed}").parse().unwrap()).unwrap();
            (0..200).map(|_| faults.hit(Site::DmaTransfer).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert!((30..90).contains(&run(3).iter().filter(|hit| **hit).count()));
    }
}
