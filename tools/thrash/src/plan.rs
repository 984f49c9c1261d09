//! The plan of a run: kinds of faults, and the configuration of each round.

use std::fmt;
use std::str::FromStr;

use client::{Placement, Redundancy};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThrashFault {
    /// SIGKILL of one role.
    Kill,
    /// SIGKILL of the supervisor, and a new start of the node.
    KillSupervisor,
    /// SIGKILL of all processes, and a new start of the node.
    KillAll,
    /// SIGSTOP of a process for 0.1 to 60 s.
    Stop,
    /// `outboard down` and `outboard up`.
    Restart,
    /// The file of a target disappears, and the role that owns the target is killed.
    LoseDrive,
    /// A write of a target fails, and the file of the target disappears.
    FailDrive,
    /// The node is started without the file of a target.
    StartWithoutDrive,
    /// The file of a target is lost for ever, and an operator replaces the target.
    ReplaceDrive,
    /// The file of a target of a pool with redundancy is replaced by an older copy.
    StaleImage,
    /// The file of a target of a pool without redundancy is replaced by an older copy.
    StaleSingle,
    /// Bits of the file of a target flip while the node is down.
    Damage,
    /// A write of a target fails.
    WriteError,
    /// DMA transfers fail.
    Dma,
    /// Another client fills the targets.
    Fill,
    /// All connections are reset, and new connections are refused.
    Cut,
    /// No data passes between clients and node.
    Hold,
    /// Data between clients and node is late.
    Delay,
    /// A client ends without closing its session.
    KillClient,
}

impl ThrashFault {
    /// All kinds. Each has its name, its weight in the random choice, and its description.
    const TABLE: [(ThrashFault, &str, u32, &str); 19] = [
        (ThrashFault::Kill, "kill", 5, "SIGKILL of the store, osd or node"),
        (ThrashFault::KillSupervisor, "kill-supervisor", 1, "SIGKILL of the supervisor; `outboard up`"),
        (ThrashFault::KillAll, "kill-all", 2, "SIGKILL of all processes; `outboard up`"),
        (ThrashFault::Stop, "stop", 4, "SIGSTOP of a process for 0.1 to 60 s; other roles may be killed"),
        (ThrashFault::Restart, "restart", 2, "`outboard down`; `outboard up`"),
        (ThrashFault::LoseDrive, "lose-drive", 3, "a target's file disappears, and its role is killed"),
        (ThrashFault::FailDrive, "fail-drive", 2, "a target's file disappears, and a write of it fails"),
        (ThrashFault::StartWithoutDrive, "start-without-drive", 1, "the node starts without a target's file"),
        (ThrashFault::ReplaceDrive, "replace-drive", 1, "a target's file is lost; `outboard target replace`"),
        (ThrashFault::StaleImage, "stale-image", 1, "an older copy replaces a target's file"),
        (ThrashFault::StaleSingle, "stale-single", 1, "the same in a pool without redundancy"),
        (ThrashFault::Damage, "damage", 1, "bits of a target's newest blocks flip while the node is down"),
        (ThrashFault::WriteError, "write-error", 2, "a write of a target fails once"),
        (ThrashFault::Dma, "dma", 1, "DMA transfers fail, stall, or lose doorbells (placement dpu)"),
        (ThrashFault::Fill, "fill", 2, "another client fills the targets, then removes its objects"),
        (ThrashFault::Cut, "cut", 3, "connections are reset and refused"),
        (ThrashFault::Hold, "hold", 2, "connections stay open, but pass no data"),
        (ThrashFault::Delay, "delay", 1, "connections pass data late"),
        (ThrashFault::KillClient, "kill-client", 2, "a client process vanishes in the middle of its calls"),
    ];

    /// Returns all kinds.
    pub fn all() -> Vec<ThrashFault> {
        ThrashFault::TABLE.iter().map(|row| row.0).collect()
    }

    fn row(self) -> &'static (ThrashFault, &'static str, u32, &'static str) {
        ThrashFault::TABLE.iter().find(|row| row.0 == self).unwrap_or(&ThrashFault::TABLE[0])
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns whether the fault concerns clients and network, and not the node.
    pub fn is_outside(self) -> bool {
        matches!(self, ThrashFault::Cut | ThrashFault::Hold | ThrashFault::Delay | ThrashFault::KillClient)
    }

    /// Returns whether the fault can be injected into nodes with this configuration.
    pub fn applies_to(self, config: &RoundConfig) -> bool {
        match self {
            ThrashFault::ReplaceDrive | ThrashFault::StaleImage => config.redundancy.tolerates() > 0,
            ThrashFault::StaleSingle => config.redundancy.tolerates() == 0,
            ThrashFault::Dma => config.placement == Placement::Dpu,
            _ => true,
        }
    }

    /// Chooses a kind from a list with the weights of the kinds.
    pub fn choose(kinds: &[ThrashFault], random: &mut SmallRng) -> Option<ThrashFault> {
        let total: u32 = kinds.iter().map(|kind| kind.row().2).sum();
        if total == 0 {
            return None;
        }
        let mut chosen = random.random_range(0..total);
        kinds.iter().copied().find(|kind| {
            let weight = kind.row().2;
            let is_chosen = chosen < weight;
            chosen = chosen.saturating_sub(weight);
            is_chosen
        })
    }

    /// Returns the list of all kinds for the help text.
    pub fn help() -> String {
        let lines = ThrashFault::TABLE.iter().map(|(_, name, _, what)| format!("  {name:20} {what}\n"));
        format!("Kinds of faults:\n{}", lines.collect::<String>())
    }
}

impl fmt::Display for ThrashFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ThrashFault {
    type Err = String;

    fn from_str(name: &str) -> Result<ThrashFault, String> {
        let row = ThrashFault::TABLE.iter().find(|row| row.1 == name);
        row.map(|row| row.0).ok_or_else(|| format!("no kind of fault has this name; {}", ThrashFault::help()))
    }
}

/// The configuration of a round.
#[derive(Debug, Clone)]
pub struct RoundConfig {
    /// Seed of the round.
    pub seed: u64,
    /// Redundancy scheme of the pool.
    pub redundancy: Redundancy,
    /// Placement of the osd.
    pub placement: Placement,
    /// Number of targets.
    pub targets: usize,
    /// Size of a target, in the syntax of the command line.
    pub target_size: String,
    /// Kinds of faults.
    pub kinds: Vec<ThrashFault>,
    /// How long faults are injected, in seconds.
    pub fault_seconds: u64,
    /// Number of writers.
    pub writers: usize,
}

impl RoundConfig {
    /// Returns the number of targets of a round's node: as many as the pool needs, or one more, but
    /// at least two. The seed of the round determines the choice.
    pub fn targets_for(redundancy: Redundancy, seed: u64) -> usize {
        let spare = SmallRng::seed_from_u64(seed).random_range(0..=1);
        (redundancy.targets() + spare).max(2)
    }
}

impl fmt::Display for RoundConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RoundConfig { redundancy, placement, targets, seed, .. } = self;
        write!(f, "{redundancy}, placement {placement}, {targets} targets, seed {seed}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_row_and_can_be_chosen() {
        let mut random = SmallRng::seed_from_u64(1);
        let chosen: std::collections::BTreeSet<_> =
            (0..2000).filter_map(|_| ThrashFault::choose(&ThrashFault::all(), &mut random)).collect();
        assert_eq!(chosen.len(), ThrashFault::all().len());
        for kind in ThrashFault::all() {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("kil".parse::<ThrashFault>().unwrap_err().contains("kill-supervisor"));
        assert_eq!(ThrashFault::choose(&[], &mut random), None);
    }

    #[test]
    fn a_node_has_at_most_one_target_more_than_the_pool_needs() {
        let counts = |redundancy: &str| -> std::collections::BTreeSet<usize> {
            let redundancy = redundancy.parse().unwrap();
            (0..100).map(|seed| RoundConfig::targets_for(redundancy, seed)).collect()
        };
        assert_eq!(counts("single"), [2].into());
        assert_eq!(counts("mirror:2"), [2, 3].into());
        assert_eq!(counts("ec:4+2"), [6, 7].into());
    }
}
