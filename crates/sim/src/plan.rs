//! The plan of a simulation: the system to simulate and the faults to inject. A seed determines
//! both.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use channel::sim::EngineFaults;
use messenger::transport::sim::{SimFaults, SimRoute};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use wire::{CodingMode, CodingOffload, Placement, Redundancy};

/// In a plan with hot objects, all clients make calls at the same time, at this interval.
pub(crate) const BURST_INTERVAL: Duration = Duration::from_millis(400);
/// Time in which all calls of a burst begin.
pub(crate) const BURST_LENGTH: Duration = Duration::from_millis(4);

/// Size of the smallest drives, in bytes.
const SMALLEST_DRIVE: u64 = 32 << 20;

/// Declares the kinds of faults: the variant, its name, its weight, and its description. A kind of
/// weight 0 has a sequence of random numbers of its own, so that the other faults of a seed stay the
/// same.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident, $name:literal, $weight:literal;)+) => {
        /// A kind of fault. Each kind can be switched off by its name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum FaultKind {
            $($(#[doc = $doc])+ $kind,)+
        }

        impl FaultKind {
            /// All kinds.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$kind,)+];

            /// The kind's name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(FaultKind::$kind => $name,)+
                }
            }

            /// How often the kind occurs, relative to the other kinds.
            fn weight(self) -> u32 {
                match self {
                    $(FaultKind::$kind => $weight,)+
                }
            }
        }
    };
}

kinds! {
    /// A role is killed and started again.
    Kill, "kill", 10;
    /// A role is stopped for a while, and then continues.
    Pause, "pause", 6;
    /// The node loses power: all of its roles are killed, and its drives lose unflushed writes.
    PowerFailure, "power-failure", 5;
    /// A client is stopped for a while, and then continues.
    PauseClient, "pause-client", 3;
    /// A client is killed. A new client takes its place.
    KillClient, "kill-client", 3;
    /// A drive is removed for a while. Its content stays.
    RemoveDrive, "remove-drive", 4;
    /// Some reads of a drive fail.
    ReadError, "read-error", 3;
    /// Some writes of a drive fail.
    WriteError, "write-error", 3;
    /// Some flushes of a drive fail.
    FlushError, "flush-error", 3;
    /// Some requests of a drive take up to a minute longer.
    DriveStall, "drive-stall", 4;
    /// Some reads of a drive return a flipped bit.
    FlipInRead, "flip-in-read", 2;
    /// Some writes of a drive store a flipped bit. The damage is permanent.
    FlipInWrite, "flip-in-write", 1;
    /// A bit of a drive flips. The damage is permanent.
    FlipAtRest, "flip-at-rest", 2;
    /// A drive is removed and never returns.
    LoseDrive, "lose-drive", 1;
    /// A drive is removed and never returns. Later, the operator replaces its target.
    ReplaceDrive, "replace-drive", 2;
    /// A drive is replaced by an older copy of itself.
    StaleDrive, "stale-drive", 1;
    /// A drive acknowledges flushes that it does not execute, and then perhaps loses power. No pool
    /// tolerates this.
    LyingFlush, "lying-flush", 1;
    /// The operator takes a target out of use, and later back into use.
    TargetOut, "target-out", 3;
    /// Another client fills the targets of a pool with data, and later removes its objects.
    Fill, "fill", 2;
    /// Another client fills the indexes of a pool's targets, and later removes its objects.
    FillIndex, "fill-index", 1;
    /// The clock of a role steps.
    ClockStep, "clock-step", 2;
    /// The network between the node and a client is cut.
    Cut, "cut", 6;
    /// All transports of the network break.
    BreakTransports, "break-transports", 4;
    /// Links for packets and one-sided transfers break, and no new ones can be opened for a while.
    LinksDown, "links-down", 3;
    /// Transfers of the DMA engine fail, are late or damage data; doorbells get lost.
    DmaTrouble, "dma-trouble", 8;
    /// The DMA engine fails until it is reset.
    DmaFailure, "dma-failure", 3;
    /// The control connection between osd and store is cut, held or refused.
    Control, "control", 4;
    /// Tasks of erasure coding fail or are late.
    CodingTrouble, "coding-trouble", 0;
    /// Bits of data flip in the osd's memory, after the osd or its attachment has verified the data.
    FlipInMemory, "flip-in-memory", 0;
    /// Writes of the witness fail or are late for a while, or the witness is lost or replaced by an
    /// older copy of itself while no osd runs.
    Witness, "witness", 0;
    /// A drive is removed. Shortly before it returns, another drive is removed for a while: the second
    /// one has changes that the first one lacks.
    RemoveInTurn, "remove-in-turn", 0;
    /// More drives than the pools can lose are removed, one after another, and never return.
    LoseTooMany, "lose-too-many", 0;
    /// The process that owns the drives is killed, and a bit at the end of a drive's log flips before the
    /// process starts again. The damage is permanent.
    DamageLogEnd, "damage-log-end", 0;
    /// The calls of all clients meet on few objects, and the node loses power or a role is killed
    /// during these calls. This kind lasts for the whole simulation.
    HotObjects, "hot-objects", 0;
    /// Each start of the osd has another number of shards. This kind lasts for the whole simulation.
    Shards, "shards", 0;
    /// Objects have an exclusive owner, and successors fence it while it writes. This kind lasts for the
    /// whole simulation.
    Takeover, "takeover", 0;
    /// The operator starts a scrub, changes a setting, creates and removes a pool, or asks for the
    /// status.
    Command, "command", 8;
}

impl FaultKind {
    /// Whether a fault of this kind destroys data of one drive, so that it uses up the tolerance of
    /// the pools.
    pub(crate) fn is_lossy(self) -> bool {
        use FaultKind as K;
        matches!(
            self,
            K::FlipInWrite
                | K::FlipAtRest
                | K::DamageLogEnd
                | K::LoseDrive
                | K::LoseTooMany
                | K::ReplaceDrive
                | K::StaleDrive
        )
    }

    /// Whether a fault of this kind fills targets.
    fn fills_targets(self) -> bool {
        matches!(self, FaultKind::Fill | FaultKind::FillIndex)
    }

    /// Whether a fault of this kind concerns the connection between osd and store, which exists only
    /// with the placement `dpu`.
    fn concerns_channel(self) -> bool {
        matches!(self, FaultKind::DmaTrouble | FaultKind::DmaFailure | FaultKind::Control)
    }

    /// Whether a fault of this kind concerns one drive.
    fn concerns_drive(self) -> bool {
        use FaultKind as K;
        self.is_lossy()
            || matches!(
                self,
                K::RemoveDrive
                    | K::RemoveInTurn
                    | K::ReadError
                    | K::WriteError
                    | K::FlushError
                    | K::DriveStall
                    | K::FlipInRead
                    | K::LyingFlush
                    | K::TargetOut
            )
    }

    /// Whether the pools must be able to lose the drives of all faults of a plan that contains this
    /// kind: a fault of this kind destroys data, or declares that a drive's data is not needed.
    fn needs_tolerance(self) -> bool {
        self.is_lossy() || self == FaultKind::TargetOut
    }
}

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(name: &str) -> Result<FaultKind, String> {
        FaultKind::ALL.iter().find(|kind| kind.name() == name).copied().ok_or_else(|| {
            let names: Vec<_> = FaultKind::ALL.iter().map(|kind| kind.name()).collect();
            format!("{name:?} is not a kind of fault; the kinds are {}", names.join(", "))
        })
    }
}

/// A role of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRole {
    /// Handles requests. With the placement `host`, this role also owns the targets.
    Osd,
    /// Owns the targets, with the placement `dpu`.
    Store,
}

impl fmt::Display for NodeRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NodeRole::Osd => "osd",
            NodeRole::Store => "store",
        })
    }
}

/// The object of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The whole node.
    Node,
    /// A role of the node.
    Role(NodeRole),
    /// The client with this number.
    Client(usize),
    /// The drive of the target with this number.
    Drive(usize),
    /// The network.
    Network,
    /// The connection between osd and store.
    Channel,
    /// The engines that compute parity.
    Coding,
    /// The osd's memory.
    Memory,
    /// The osd's witness.
    Witness,
    /// All clients.
    Clients,
    /// The shards of the osd.
    Shards,
    /// The exclusive owner of objects.
    Owner,
    /// The pool with this number.
    Pool(usize),
    /// No object: the operator gives a command.
    Operator,
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Victim::Node => f.write_str("the node"),
            Victim::Role(role) => write!(f, "the {role}"),
            Victim::Client(number) => write!(f, "client {number}"),
            Victim::Drive(number) => write!(f, "drive {number}"),
            Victim::Network => f.write_str("the network"),
            Victim::Channel => f.write_str("the channel"),
            Victim::Coding => f.write_str("the coding engines"),
            Victim::Memory => f.write_str("the memory of the osd"),
            Victim::Witness => f.write_str("the witness"),
            Victim::Clients => f.write_str("all clients"),
            Victim::Shards => f.write_str("the shards of the osd"),
            Victim::Owner => f.write_str("the owner of objects"),
            Victim::Pool(number) => write!(f, "pool {number}"),
            Victim::Operator => f.write_str("the operator"),
        }
    }
}

/// What happens to the witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WitnessTrouble {
    /// Writes fail.
    Fails,
    /// Writes are late.
    Late,
    /// The witness is lost.
    Lost,
    /// An older copy replaces the witness.
    Older,
}

impl WitnessTrouble {
    const ALL: [WitnessTrouble; 4] =
        [WitnessTrouble::Fails, WitnessTrouble::Late, WitnessTrouble::Lost, WitnessTrouble::Older];

    /// Returns the trouble that the details of a fault choose.
    pub(crate) fn of(detail: u64) -> WitnessTrouble {
        WitnessTrouble::ALL[(detail % 4) as usize]
    }
}

/// A fault, its time, and how long it lasts.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedFault {
    /// Time of the fault since the start of the workload.
    pub at: Duration,
    /// Time after which the fault is over: the role is started again, the network is healed.
    pub lasts: Duration,
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The object of the fault.
    pub victim: Victim,
    /// A random number that decides the details of the fault.
    pub detail: u64,
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlannedFault { at, lasts, kind, victim, detail } = self;
        let (at, lasts, kind) = (at.as_secs_f64(), lasts.as_secs_f64(), kind.name());
        write!(f, "{kind} of {victim} at {at:.3} s for {lasts:.3} s ({detail:x})")
    }
}

/// A pool of the simulated node.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedPool {
    /// The pool's name.
    pub name: String,
    /// Its redundancy scheme.
    pub redundancy: Redundancy,
    /// Number of its placement groups.
    pub pg_count: u32,
}

/// What a caller demands of the plans of all seeds.
#[derive(Debug, Clone, Default)]
pub struct PlanOptions {
    /// Kinds of faults that do not occur.
    pub off: Vec<FaultKind>,
    /// Whether all plans have hot objects ([`FaultKind::HotObjects`]).
    pub hot: bool,
}

/// The plan of a simulation.
#[derive(Debug, Clone)]
pub struct SimulationPlan {
    /// The seed.
    pub seed: u64,
    /// Placement of the node.
    pub placement: Placement,
    /// Number of targets.
    pub targets: usize,
    /// Size of each drive, in bytes.
    pub drive_size: u64,
    /// The pools.
    pub pools: Vec<PlannedPool>,
    /// The part of the DPU that computes parity.
    pub offload: Option<CodingOffload>,
    /// Where parity is computed.
    pub coding: CodingMode,
    /// Whether connections use packets and one-sided transfers.
    pub packets: bool,
    /// Routes and random faults of the network.
    pub network: SimFaults,
    /// Random faults of the DMA engine.
    pub dma: EngineFaults,
    /// Maximum size of the data of one write, in bytes.
    pub write_max: u64,
    /// Number of calls that each client makes at a time.
    pub lanes: u32,
    /// Whether each of a client's calls at a time has a session of its own, on shared connections.
    pub shares_connections: bool,
    /// Average pause of a client between two calls.
    pub think: Duration,
    /// Number of clients.
    pub clients: usize,
    /// Time during which clients work and faults occur.
    pub workload: Duration,
    /// The faults, in the order of their times.
    pub faults: Vec<PlannedFault>,
}

impl fmt::Display for SimulationPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SimulationPlan { placement, targets, drive_size, clients, lanes, write_max, think, .. } = self;
        write!(
            f,
            "plan of seed {}: placement {placement}, {targets} targets of {} MiB",
            self.seed,
            drive_size >> 20
        )?;
        for pool in &self.pools {
            write!(f, ", pool {} ({}, {} groups)", pool.name, pool.redundancy, pool.pg_count)?;
        }
        let road = if self.packets { "packets" } else { "streams" };
        let sessions = if self.shares_connections { " in sessions on shared connections" } else { "" };
        writeln!(
            f,
            "; {clients} clients with {lanes} calls at a time{sessions} of up to {write_max} bytes, {} ms apart, over {road}",
            think.as_millis()
        )?;
        for (number, fault) in self.faults.iter().enumerate() {
            writeln!(f, "  fault {number}: {fault}")?;
        }
        Ok(())
    }
}

/// Purpose of a random number generator. Each purpose has its own sequence, so that removing a
/// fault from a plan changes no other decision.
#[derive(Debug, Clone, Copy)]
pub enum RandomStream {
    /// The plan itself.
    Plan,
    /// Random numbers of the code under test.
    Entropy,
    /// The network.
    Network,
    /// The drive with this number. The drives of the first targets have the lowest numbers, and the
    /// drives that replace them have the next numbers.
    Drive(usize),
    /// The client with this id.
    Client(u32),
    /// The DMA engine of the n-th osd.
    Dma(u64),
    /// The control connection between osd and store.
    Control,
    /// The configuration of the n-th osd.
    Config(u64),
    /// The last checks.
    LastChecks,
    /// The faults of the coding engines.
    Coding,
    /// The faults of the osd's memory.
    Memory,
    /// The choice of plans that sacrifice pools without redundancy.
    Sacrifice,
    /// The bits that flip in the osd's memory.
    MemoryFlips,
    /// The sampling of the data that the host verifies.
    Sampling,
    /// The faults of the witness.
    Witness,
    /// The drives that are removed in turn.
    InTurn,
    /// The drives that are one more than the pools can lose.
    TooMany,
    /// The damage at the end of a log.
    LogEnd,
    /// Whether sessions share connections.
    Sharing,
    /// The order of listings.
    Listings,
    /// The plans with hot objects.
    Hot,
    /// The plans in which the osd has several shards.
    Sharded,
    /// The number of shards of the n-th osd.
    Shards(u64),
    /// The guest whose rights change.
    Guest,
    /// The takeovers of owned objects.
    Takeover,
}

/// Returns the random number generator for `stream` in the simulation of `seed`.
#[must_use]
pub fn rng(seed: u64, stream: RandomStream) -> StdRng {
    let (kind, number) = match stream {
        RandomStream::Plan => (0, 0),
        RandomStream::Entropy => (1, 0),
        RandomStream::Network => (2, 0),
        RandomStream::Drive(n) => (3, n as u64),
        RandomStream::Client(n) => (4, u64::from(n)),
        RandomStream::Dma(n) => (5, n),
        RandomStream::Control => (6, 0),
        RandomStream::Config(n) => (7, n),
        RandomStream::LastChecks => (8, 0),
        RandomStream::Coding => (9, 0),
        RandomStream::Memory => (10, 0),
        RandomStream::MemoryFlips => (11, 0),
        RandomStream::Sampling => (12, 0),
        RandomStream::Sacrifice => (13, 0),
        RandomStream::Witness => (14, 0),
        RandomStream::InTurn => (15, 0),
        RandomStream::TooMany => (16, 0),
        RandomStream::LogEnd => (17, 0),
        RandomStream::Listings => (18, 0),
        RandomStream::Hot => (19, 0),
        RandomStream::Sharded => (20, 0),
        RandomStream::Shards(n) => (21, n),
        RandomStream::Guest => (22, 0),
        RandomStream::Sharing => (23, 0),
        RandomStream::Takeover => (24, 0),
    };
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&u64::to_le_bytes(kind));
    key[16..24].copy_from_slice(&u64::to_le_bytes(number));
    StdRng::from_seed(key)
}

impl SimulationPlan {
    /// Returns the plan for `seed`.
    #[must_use]
    pub fn new(seed: u64, options: &PlanOptions) -> SimulationPlan {
        let mut rng = rng(seed, RandomStream::Plan);
        let placement = if rng.random_bool(0.5) { Placement::Host } else { Placement::Dpu };
        let schemes: [&str; 6] = ["single", "mirror:2", "mirror:3", "ec:2+1", "ec:2+2", "ec:3+2"];
        let pools: Vec<PlannedPool> = (0..rng.random_range(1..=2))
            .map(|number| PlannedPool {
                name: format!("pool{number}"),
                redundancy: schemes[rng.random_range(0..schemes.len())].parse().expect("the scheme is valid"),
                pg_count: 1 << rng.random_range(0..=2),
            })
            .collect();
        let needed = pools.iter().map(|pool| pool.redundancy.targets()).max().unwrap_or(1);
        let targets = needed + rng.random_range(0..=1);
        let drive_size = SMALLEST_DRIVE << rng.random_range(0..=3);
        let write_max = [16 << 10, 128 << 10, 128 << 10, 1 << 20, 9 << 20][rng.random_range(0..5)];
        let lanes = rng.random_range(1..=3);
        let think = Duration::from_millis(rng.random_range(20..600) * u64::from(lanes));
        let clients = rng.random_range(1..=4);
        let offload = match placement {
            Placement::Dpu => {
                let offloads = [CodingOffload::Dpu, CodingOffload::Accelerator, CodingOffload::Both];
                offloads.get(rng.random_range(0..4)).copied()
            }
            Placement::Host => None,
        };
        let modes = [CodingMode::LatencySensitive, CodingMode::Async, CodingMode::Auto];
        let coding = modes[rng.random_range(0..modes.len())];
        let packets = rng.random_bool(0.5);
        let network = network(&mut rng);
        let dma = dma(&mut rng);
        let workload = Duration::from_secs(rng.random_range(10..=40));
        let mut plan = SimulationPlan {
            seed,
            placement,
            targets,
            drive_size,
            pools,
            offload,
            coding,
            packets,
            network,
            dma,
            write_max,
            lanes,
            shares_connections: self::rng(seed, RandomStream::Sharing).random_bool(0.3),
            think,
            clients,
            workload,
            faults: Vec::new(),
        };
        let count = rng.random_range(0..=14);
        let faults: Vec<_> = (0..count).map(|_| plan.fault(&mut rng)).collect();
        plan.faults = plan.within_tolerance(faults);
        plan.faults.extend(plan.coding_trouble());
        plan.faults.extend(plan.memory_flips());
        plan.faults.extend(plan.removals_in_turn());
        plan.faults.extend(plan.too_many_losses());
        plan.faults.extend(plan.damage_at_log_end());
        plan.faults.extend(plan.witness_trouble());
        plan.faults.extend(plan.hot_objects(options));
        plan.faults.extend(plan.many_shards());
        plan.faults.extend(plan.takeovers());
        plan.faults.retain(|planned| !options.off.contains(&planned.kind));
        if plan.has_hot_objects() {
            let mut rng = self::rng(seed, RandomStream::Hot);
            plan.lanes = rng.random_range(3..=7);
            plan.write_max = plan.write_max.min(64 << 10);
        }
        if plan.faults.iter().any(|planned| planned.kind.fills_targets()) {
            // Larger drives take long to fill.
            plan.drive_size = SMALLEST_DRIVE;
        }
        plan.faults.sort_by_key(|planned| planned.at);
        plan
    }

    /// Number of targets that the node can lose without losing data, except data of pools that the
    /// plan sacrifices.
    #[must_use]
    pub fn tolerance(&self) -> usize {
        let kept = self.pools.iter().filter(|pool| !self.sacrifices(pool));
        let of_pools = kept.map(|pool| pool.redundancy.tolerates()).min();
        of_pools.unwrap_or_else(|| self.targets.saturating_sub(1).min(1))
    }

    /// Whether faults may destroy data of a pool. This is possible for pools without redundancy, in
    /// some of the plans, and for all pools if too many drives are lost.
    #[must_use]
    pub fn sacrifices(&self, pool: &PlannedPool) -> bool {
        let mut rng = rng(self.seed, RandomStream::Sacrifice);
        pool.redundancy.tolerates() == 0 && rng.random_bool(0.4) || self.loses_too_many()
    }

    /// Whether the node must report all data that it loses, until the operator accepts the loss: no
    /// drive is lost or replaced, and only single bits of drives flip.
    #[must_use]
    pub fn reports_losses(&self) -> bool {
        use FaultKind as K;
        let is_reported = |kind| matches!(kind, K::FlipInWrite | K::FlipAtRest | K::DamageLogEnd);
        self.faults.iter().all(|fault| !fault.kind.is_lossy() || is_reported(fault.kind))
    }

    /// Whether all listings are in the order of names. Otherwise, no listing is.
    #[must_use]
    pub fn lists_in_order(&self) -> bool {
        // With this probability, listings are without order in the simulations of races that only a
        // seed shows (`tests/simulations.rs`).
        rng(self.seed, RandomStream::Listings).random_bool(0.3)
    }

    /// Whether more drives are lost than the pools tolerate.
    #[must_use]
    pub fn loses_too_many(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind == FaultKind::LoseTooMany)
    }

    /// Returns the plan with only those faults whose positions in `faults` are in `only`.
    #[must_use]
    pub fn only(&self, only: &[usize]) -> SimulationPlan {
        let chosen = self.faults.iter().enumerate().filter(|(number, _)| only.contains(number));
        SimulationPlan { faults: chosen.map(|(_, fault)| fault.clone()).collect(), ..self.clone() }
    }

    /// Whether a fault destroys data of a target's drive.
    #[must_use]
    pub fn is_lossy(&self, target: usize) -> bool {
        self.faults.iter().any(|fault| fault.victim == Victim::Drive(target) && fault.kind.is_lossy())
    }

    /// Number of drives that are hit by at least one fault.
    #[must_use]
    pub fn troubled_drives(&self) -> usize {
        (0..self.targets)
            .filter(|&number| self.faults.iter().any(|fault| fault.victim == Victim::Drive(number)))
            .count()
    }

    /// Whether the DMA engine or the osd's memory may damage data.
    #[must_use]
    pub fn may_damage_payload(&self) -> bool {
        let damages =
            |fault: &PlannedFault| matches!(fault.kind, FaultKind::DmaTrouble | FaultKind::FlipInMemory);
        self.dma.corrupt > 0.0 || self.faults.iter().any(damages)
    }

    /// The value of `channel.verify_every`. If payload may be damaged, the host verifies all payload:
    /// with a sample, the node would store damaged data.
    #[must_use]
    pub fn verify_every(&self) -> u32 {
        let mut rng = rng(self.seed, RandomStream::Sampling);
        if self.may_damage_payload() { 1 } else { [1, 1, 64, 0][rng.random_range(0..4)] }
    }

    /// Whether the connection between osd and store may make any target slow, so that the groups
    /// continue without it.
    #[must_use]
    pub fn may_slow_targets(&self) -> bool {
        let is_slow = self.dma.stall > 0.0 || self.dma.drop_doorbell > 0.0;
        let concerns_channel = |fault: &PlannedFault| fault.kind.concerns_channel();
        self.placement == Placement::Dpu && (is_slow || self.faults.iter().any(concerns_channel))
    }

    /// Whether a fault fills targets. A checkpoint of a full index can take seconds.
    #[must_use]
    pub fn fills_targets(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind.fills_targets())
    }

    /// Whether a drive acknowledges flushes that it does not execute.
    #[must_use]
    pub fn has_lying_drive(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind == FaultKind::LyingFlush)
    }

    /// Number of targets whose drives are lost or damaged.
    #[must_use]
    pub fn lossy_drives(&self) -> usize {
        (0..self.targets).filter(|&number| self.is_lossy(number)).count()
    }

    /// Size of the log of a target, in bytes.
    #[must_use]
    pub fn log_size(&self) -> u64 {
        self.drive_size / 16
    }

    /// Size of the index of a target, in bytes.
    #[must_use]
    pub fn index_size(&self) -> u64 {
        self.drive_size / 8
    }

    /// Omits faults so that the pools can lose no data. If a fault needs tolerance, the faults of
    /// drives must not hit more drives than the pools can lose. A drive that is
    /// unavailable for a while lacks data, too, until it is rebuilt.
    fn within_tolerance(&self, faults: Vec<PlannedFault>) -> Vec<PlannedFault> {
        let is_lossy = faults.iter().any(|planned| planned.kind.needs_tolerance()) && self.tolerance() > 0;
        let mut hit = Vec::new();
        let mut fits = |planned: &PlannedFault| {
            let Victim::Drive(number) = planned.victim else { return true };
            if planned.kind == FaultKind::LyingFlush {
                return true;
            }
            if !is_lossy {
                return !planned.kind.needs_tolerance();
            }
            if !hit.contains(&number) && hit.len() < self.tolerance() {
                hit.push(number);
            }
            hit.contains(&number)
        };
        faults.into_iter().filter(|planned| fits(planned)).collect()
    }

    /// Whether the calls of all clients meet on few objects.
    #[must_use]
    pub fn has_hot_objects(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind == FaultKind::HotObjects)
    }

    /// Hot objects, in a quarter of the plans. The node loses power or a role is killed shortly
    /// after the clients have begun their calls.
    fn hot_objects(&self, options: &PlanOptions) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Hot);
        let occur = rng.random_bool(0.25) || options.hot;
        if !occur || options.off.contains(&FaultKind::HotObjects) {
            return Vec::new();
        }
        let detail = rng.random();
        let (at, lasts, kind, victim) =
            (Duration::ZERO, self.workload, FaultKind::HotObjects, Victim::Clients);
        let mut faults = vec![PlannedFault { at, lasts, kind, victim, detail }];
        let bursts = (self.workload.as_millis() / BURST_INTERVAL.as_millis()) as u32;
        for _ in 0..rng.random_range(2..=6) {
            let (kind, victim) = match rng.random_range(0..4) {
                0..2 => (FaultKind::PowerFailure, Victim::Node),
                2 => (FaultKind::Kill, Victim::Role(NodeRole::Osd)),
                _ if self.placement == Placement::Host => (FaultKind::Kill, Victim::Role(NodeRole::Osd)),
                _ => (FaultKind::Kill, Victim::Role(NodeRole::Store)),
            };
            faults.push(PlannedFault {
                at: BURST_INTERVAL * rng.random_range(1..=bursts)
                    + rng.random_range(Duration::ZERO..BURST_LENGTH * 4),
                lasts: rng.random_range(Duration::from_millis(100)..Duration::from_secs(2)),
                kind,
                victim,
                detail: rng.random(),
            });
        }
        faults
    }

    /// Several shards, in half of the plans.
    fn many_shards(&self) -> Option<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Sharded);
        let (at, lasts, kind) = (Duration::ZERO, self.workload, FaultKind::Shards);
        let fault = PlannedFault { at, lasts, kind, victim: Victim::Shards, detail: rng.random() };
        rng.random_bool(0.5).then_some(fault)
    }

    /// Takeovers of owned objects, in a third of the plans.
    fn takeovers(&self) -> Option<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Takeover);
        let (at, lasts, kind) = (Duration::ZERO, self.workload, FaultKind::Takeover);
        let fault = PlannedFault { at, lasts, kind, victim: Victim::Owner, detail: rng.random() };
        rng.random_bool(0.33).then_some(fault)
    }

    /// Returns the number of shards of the osd that starts after `earlier` other osds.
    #[must_use]
    pub fn shards(&self, earlier: u64) -> u16 {
        let are_many = self.faults.iter().any(|fault| fault.kind == FaultKind::Shards);
        if are_many { rng(self.seed, RandomStream::Shards(earlier)).random_range(1..=4) } else { 1 }
    }

    /// A fault of the coding engines, in a third of the plans in which they are used.
    fn coding_trouble(&self) -> Option<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Coding);
        let is_used = self.pools.iter().any(|pool| matches!(pool.redundancy, Redundancy::ErasureCode { .. }));
        let occurs = is_used && rng.random_range(0..3) == 0;
        occurs.then(|| PlannedFault {
            at: rng.random_range(Duration::ZERO..self.workload),
            lasts: rng.random_range(Duration::from_secs(1)..Duration::from_secs(20)),
            kind: FaultKind::CodingTrouble,
            victim: Victim::Coding,
            detail: rng.random(),
        })
    }

    /// Faults of the osd's memory, in a third of the plans in which the host verifies what the osd
    /// sends.
    fn memory_flips(&self) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Memory);
        let occur = self.placement == Placement::Dpu && rng.random_range(0..3) == 0;
        let count = if occur { rng.random_range(1..=3) } else { 0 };
        let flips = (0..count).map(|_| PlannedFault {
            at: rng.random_range(Duration::ZERO..self.workload),
            lasts: rng.random_range(Duration::from_millis(100)..Duration::from_secs(10)),
            kind: FaultKind::FlipInMemory,
            victim: Victim::Memory,
            detail: rng.random(),
        });
        flips.collect()
    }

    /// Two drives that are removed in turn, in a third of the plans in which no fault needs tolerance:
    /// the drives may be one more than the pools can lose.
    fn removals_in_turn(&self) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::InTurn);
        let needs_drives =
            |fault: &PlannedFault| fault.kind.needs_tolerance() || fault.kind == FaultKind::LyingFlush;
        if self.targets < 2 || self.faults.iter().any(needs_drives) || rng.random_range(0..3) > 0 {
            return Vec::new();
        }
        let first = rng.random_range(0..self.targets);
        let second = (first + rng.random_range(1..self.targets)) % self.targets;
        let at = rng.random_range(Duration::ZERO..self.workload);
        let absent = rng.random_range(Duration::from_secs(1)..Duration::from_secs(15));
        let early = rng.random_range(Duration::from_millis(1)..Duration::from_secs(1));
        let removal = |target, at, lasts, detail| PlannedFault {
            at,
            lasts,
            kind: FaultKind::RemoveInTurn,
            victim: Victim::Drive(target),
            detail,
        };
        let lasts = rng.random_range(Duration::from_secs(1)..Duration::from_secs(15));
        vec![
            removal(first, at, absent, rng.random()),
            removal(second, at + absent - early, lasts, rng.random()),
        ]
    }

    /// One drive more than any pool can lose is removed for ever, in a fifth of the plans in which the
    /// other drives suffice to write to all pools, and in which no other fault destroys data.
    fn too_many_losses(&self) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::TooMany);
        let most = |of: fn(&Redundancy) -> usize| self.pools.iter().map(|pool| of(&pool.redundancy)).max();
        let count = most(|redundancy| redundancy.tolerates()).unwrap_or(0) + 1;
        let needed = most(|redundancy| redundancy.targets() - redundancy.tolerates()).unwrap_or(1);
        let destroys = |fault: &PlannedFault| fault.kind.is_lossy() || fault.kind == FaultKind::LyingFlush;
        let suffice = self.targets >= count + needed;
        if !suffice || self.faults.iter().any(destroys) || rng.random_range(0..5) > 0 {
            return Vec::new();
        }
        let mut drives: Vec<usize> = (0..self.targets).collect();
        drives.shuffle(&mut rng);
        let losses = drives[..count].iter().map(|&target| PlannedFault {
            at: rng.random_range(Duration::ZERO..self.workload),
            lasts: Duration::ZERO,
            kind: FaultKind::LoseTooMany,
            victim: Victim::Drive(target),
            detail: rng.random(),
        });
        losses.collect()
    }

    /// Damage at the end of a drive's log, if no other fault destroys data, and if the pools can also lose this
    /// drive: in all plans that sacrifice pools, because the node must report their losses, and in a third of
    /// the other plans.
    fn damage_at_log_end(&self) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::LogEnd);
        let destroys =
            |fault: &PlannedFault| fault.kind.needs_tolerance() || fault.kind == FaultKind::LyingFlush;
        let sacrifices = self.pools.iter().any(|pool| self.sacrifices(pool));
        let occurs = rng.random_range(0..3) == 0 || sacrifices;
        if self.tolerance() == 0 || self.faults.iter().any(destroys) || !occurs {
            return Vec::new();
        }
        let is_troubled = |target: usize| self.faults.iter().any(|f| f.victim == Victim::Drive(target));
        let target = rng.random_range(0..self.targets);
        if self.troubled_drives() + usize::from(!is_troubled(target)) > self.tolerance() {
            return Vec::new();
        }
        let damage = PlannedFault {
            at: rng.random_range(Duration::ZERO..self.workload),
            lasts: rng.random_range(Duration::from_millis(1)..Duration::from_secs(5)),
            kind: FaultKind::DamageLogEnd,
            victim: Victim::Drive(target),
            detail: rng.random(),
        };
        vec![damage]
    }

    /// Faults of the witness, in a third of the plans. If a fault destroys data of a drive, the
    /// witness is not lost, because groups would then wait for the operator's word. An older copy may
    /// seem to be the newest one if the available targets lack changes, too. So it replaces the witness
    /// only if the targets without faults always have all changes: they are not slow or full.
    fn witness_trouble(&self) -> Vec<PlannedFault> {
        let mut rng = rng(self.seed, RandomStream::Witness);
        let count = if rng.random_range(0..3) == 0 { rng.random_range(1..=3) } else { 0 };
        let destroys = |fault: &PlannedFault| fault.kind.is_lossy() || fault.kind == FaultKind::LyingFlush;
        let may_be_lost = !self.faults.iter().any(destroys);
        let may_lag = |fault: &PlannedFault| {
            let is_paused = fault.kind == FaultKind::Pause && fault.victim == Victim::Role(NodeRole::Store);
            is_paused || fault.kind.fills_targets() && self.troubled_drives() > 0
        };
        let has_all = !self.may_slow_targets() && !self.faults.iter().any(may_lag);
        let may_go_back = may_be_lost && has_all && self.troubled_drives() <= 1;
        let choices: &[u64] = match (may_be_lost, may_go_back) {
            (_, true) => &[0, 1, 2, 3],
            (true, false) => &[0, 1, 2],
            (false, false) => &[0, 1],
        };
        let fault = |_| PlannedFault {
            at: rng.random_range(Duration::ZERO..self.workload),
            lasts: match rng.random_range(0..10) {
                0..6 => rng.random_range(Duration::from_millis(1)..Duration::from_secs(1)),
                _ => rng.random_range(Duration::from_secs(1)..Duration::from_secs(15)),
            },
            kind: FaultKind::Witness,
            victim: Victim::Witness,
            detail: rng.random::<u64>() / 4 * 4 + choices[rng.random_range(0..choices.len())],
        };
        (0..count).map(fault).collect()
    }

    fn fault(&self, rng: &mut StdRng) -> PlannedFault {
        let kinds = || {
            FaultKind::ALL.iter().filter(|kind| self.placement == Placement::Dpu || !kind.concerns_channel())
        };
        let total: u32 = kinds().map(|kind| kind.weight()).sum();
        let mut choice = rng.random_range(0..total);
        let kind = *kinds()
            .find(|kind| match choice.checked_sub(kind.weight()) {
                Some(rest) => {
                    choice = rest;
                    false
                }
                None => true,
            })
            .expect("the choice is below the total weight");
        let role = match self.placement {
            Placement::Dpu if rng.random_bool(0.5) => NodeRole::Store,
            _ => NodeRole::Osd,
        };
        let victim = match kind {
            FaultKind::PowerFailure => Victim::Node,
            FaultKind::KillClient | FaultKind::PauseClient | FaultKind::Cut => {
                Victim::Client(rng.random_range(0..self.clients))
            }
            kind if kind.fills_targets() => Victim::Pool(rng.random_range(0..self.pools.len())),
            FaultKind::BreakTransports | FaultKind::LinksDown => Victim::Network,
            kind if kind.concerns_channel() => Victim::Channel,
            FaultKind::Command => Victim::Operator,
            kind if kind.concerns_drive() => Victim::Drive(rng.random_range(0..self.targets)),
            _ => Victim::Role(role),
        };
        let at = rng.random_range(Duration::ZERO..self.workload);
        // Most faults are short, and a few are longer than the time limits of the node.
        let lasts = match rng.random_range(0..10) {
            0..6 => rng.random_range(Duration::from_millis(1)..Duration::from_secs(1)),
            6..9 => rng.random_range(Duration::from_secs(1)..Duration::from_secs(8)),
            _ => rng.random_range(Duration::from_secs(8)..Duration::from_secs(40)),
        };
        PlannedFault { at, lasts, kind, victim, detail: rng.random() }
    }
}

/// Returns the routes and the random faults of a network. Half of the networks have no random
/// faults.
fn network(rng: &mut StdRng) -> SimFaults {
    let route = SimRoute {
        latency: Duration::from_micros(rng.random_range(20..2000)),
        jitter: Duration::from_micros(rng.random_range(0..2000)),
        bandwidth: rng.random_bool(0.3).then(|| rng.random_range(20 << 20..1 << 30)),
    };
    if rng.random_bool(0.5) {
        return SimFaults { route, ..SimFaults::NONE };
    }
    let one_in =
        |rng: &mut StdRng, most: u32| if rng.random_bool(0.5) { 0 } else { rng.random_range(20..most) };
    SimFaults {
        route,
        piece_max: 1 << rng.random_range(10..=16),
        break_after_bytes: if rng.random_bool(0.5) { 0 } else { rng.random_range(100 << 10..20 << 20) },
        stall_one_in: one_in(rng, 2000),
        stall: Duration::from_millis(rng.random_range(10..20_000)),
        flip_one_in: one_in(rng, 5000),
        refuse_one_in: one_in(rng, 40),
        ignore_one_in: one_in(rng, 40),
        lose_one_in: one_in(rng, 2000),
        refuse_memory_one_in: one_in(rng, 200),
        report_late_one_in: one_in(rng, 500),
    }
}

/// Returns the random faults of a DMA engine. A third of the engines have none. Many engines have
/// only late transfers of payload, because other faults soon end the use of DMA.
fn dma(rng: &mut StdRng) -> EngineFaults {
    if rng.random_range(0..3) == 0 {
        return EngineFaults::default();
    }
    let mut rate = |probability, most: f64| match rng.random_bool(probability) {
        true => rng.random_range(0.0..most),
        false => 0.0,
    };
    EngineFaults {
        stall: rate(0.8, 0.02),
        fail: rate(0.3, 0.005),
        corrupt: rate(0.3, 0.005),
        drop_doorbell: rate(0.3, 0.005),
        min_len: if rng.random_bool(0.6) { 16 << 10 } else { 0 },
        stall_max: Duration::from_millis(rng.random_range(100..15_000)),
        ..EngineFaults::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_plan_and_a_kind_of_fault_can_be_switched_off() {
        let all = PlanOptions::default();
        let no_kills = PlanOptions { off: vec![FaultKind::Kill], ..PlanOptions::default() };
        let text = |seed| format!("{:?}", SimulationPlan::new(seed, &all));
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        let mut seen = 0;
        for seed in 0..100 {
            let (all, less) = (SimulationPlan::new(seed, &all), SimulationPlan::new(seed, &no_kills));
            let kills = all.faults.iter().filter(|f| f.kind == FaultKind::Kill).count();
            assert_eq!(less.faults.len() + kills, all.faults.len(), "the other faults stay the same");
            seen += kills;
        }
        assert!(seen > 20);
        let hot = PlanOptions { hot: true, ..PlanOptions::default() };
        assert!((0..10).all(|seed| SimulationPlan::new(seed, &hot).has_hot_objects()));
        for kind in FaultKind::ALL {
            assert_eq!(kind.name().parse(), Ok(*kind));
        }
    }
}
