//! The plan: the steps of a round, their order and their duration.

use super::order::turns;
use super::settings::EvaluationSettings;
use super::workload::{
    ABLATIONS, Ablation, AccessMode, Case, EmulatedLink, IN_FLIGHT_SWEEP, MIB, Network, TestedSystem,
};

/// A step of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanStep {
    /// Measures the drive with fio, for one size.
    Drive {
        /// Bytes per operation.
        size: u64,
    },
    /// Measures all modes of a system for one size.
    Modes {
        /// The system.
        config: TestedSystem,
        /// Bytes per object.
        size: u64,
    },
    /// Measures one case on a node.
    Run(Case),
    /// Measures Ceph on the large set, with reduced caches.
    CephLargeSet,
    /// Measures loopback TCP and memory.
    Machine,
    /// Measures all systems while they are idle.
    Idle,
}

/// Pause before the measurement of idle systems, and duration of this measurement, in seconds.
pub const IDLE_SECONDS: (u32, u32) = (3, 10);

/// Time for Ceph's caches to shrink after their limit was reduced, in seconds.
pub const SHRINK_SECONDS: u32 = 6;

/// Approximate time, in s, to remove Ceph's objects and to wait until the OSD is quiet.
const CLEAN_SECONDS: f64 = 2.5;

/// The systems that are measured over links between network namespaces.
pub const LINKED: [TestedSystem; 2] = [TestedSystem::Host, TestedSystem::DpuMemcpy];

/// Nodes with other engines than the main series. They are measured with writes only.
pub const ENGINES: [TestedSystem; 3] =
    [TestedSystem::DpuBf3, TestedSystem::DpuBf3Serial, TestedSystem::DpuOfi];

/// The system for ablations. Its DMA is as slow as on a real DPU.
const ABLATED: TestedSystem = TestedSystem::DpuBf3;

/// The systems and options to measure.
#[derive(Debug, Clone)]
pub struct Subjects {
    /// The systems of the main series.
    pub configs: Vec<TestedSystem>,
    /// The nodes with other engines ([`ENGINES`]).
    pub engines: Vec<TestedSystem>,
    /// The systems that run in a network namespace of their own.
    pub linked: Vec<TestedSystem>,
    /// Parts of the design that can be switched off.
    pub ablations: Vec<Ablation>,
    /// Numbers of requests in flight for the comparison of network stacks; empty if there is only
    /// one stack.
    pub in_flight_sweep: Vec<u32>,
}

impl Subjects {
    /// Returns all systems and options that a report can have.
    #[must_use]
    pub fn all() -> Subjects {
        let configs = vec![TestedSystem::Host, TestedSystem::DpuMemcpy, TestedSystem::Ceph];
        Subjects {
            configs,
            engines: ENGINES.to_vec(),
            linked: LINKED.to_vec(),
            ablations: ABLATIONS.to_vec(),
            in_flight_sweep: IN_FLIGHT_SWEEP.to_vec(),
        }
    }
}

/// Estimates the duration of round `first` and all later rounds, in s.
#[must_use]
pub fn seconds(settings: &EvaluationSettings, subjects: &Subjects, first: u32) -> f64 {
    steps(settings, subjects, first).map(|s| s.seconds(settings)).sum()
}

/// Counts the runs in all rounds.
#[must_use]
pub fn runs(settings: &EvaluationSettings, subjects: &Subjects) -> usize {
    steps(settings, subjects, 1).map(|s| s.runs()).sum()
}

fn steps(settings: &EvaluationSettings, subjects: &Subjects, first: u32) -> impl Iterator<Item = PlanStep> {
    (first..=settings.rounds).flat_map(|r| round(settings, subjects, r))
}

/// Estimates the setup time, in s. The setup writes all blocks of the files, creates Ceph, and
/// writes the large set. The estimate also includes objects that runs of reads create in the first
/// round.
#[must_use]
pub fn setup_seconds(settings: &EvaluationSettings, subjects: &Subjects) -> f64 {
    let ceph = subjects.configs.contains(&TestedSystem::Ceph);
    let nodes =
        (subjects.configs.iter().chain(&subjects.engines).filter(|c| **c != TestedSystem::Ceph)).count();
    let nodes = nodes as f64;
    let files = settings.all_targets_gib() as f64 + if ceph { settings.ceph_gib().0 as f64 } else { 0.0 };
    // Assumes 10,000 objects per second on each of two nodes, one after the other, and 4,000 on
    // Ceph.
    let large = settings.large_set().map_or(0.0, |objects| {
        let objects = objects as f64;
        2.0 * objects / 10_000.0 + if ceph { objects / 4000.0 } else { 0.0 }
    });
    let usual = nodes * settings.sizes().len() as f64 * 1.5;
    files + if ceph { 25.0 } else { 0.0 } + large + usual
}

/// Returns the steps of the round with the number `round`, counted from 1. The order of systems is
/// balanced over the rounds (`order`), so that no system always uses the drive right after the same
/// other system.
#[must_use]
pub fn round(settings: &EvaluationSettings, subjects: &Subjects, round: u32) -> Vec<PlanStep> {
    let configs = &subjects.configs;
    let turn = round.saturating_sub(1) as usize;
    let mut steps = Vec::new();
    for (i, size) in settings.sizes().into_iter().enumerate() {
        steps.push(PlanStep::Drive { size });
        steps.extend(turns(configs, turn + i).into_iter().map(|config| PlanStep::Modes { config, size }));
    }
    let among = |wanted: &[TestedSystem]| -> Vec<TestedSystem> {
        let there: Vec<TestedSystem> = wanted.iter().copied().filter(|c| configs.contains(c)).collect();
        turns(&there, turn)
    };
    if !settings.quick {
        let alone = among(&[TestedSystem::Host, TestedSystem::DpuMemcpy]).into_iter();
        steps.extend(alone.map(|c| PlanStep::Run(Case::new(c, AccessMode::Write, MIB).one_at_a_time())));
        steps.extend(
            among(&[TestedSystem::Host, TestedSystem::DpuMemcpy, TestedSystem::Ceph]).into_iter().map(|c| {
                match c {
                    TestedSystem::Ceph => PlanStep::CephLargeSet,
                    node => PlanStep::Run(Case::large_set(node)),
                }
            }),
        );
        for (i, ablation) in subjects.ablations.iter().enumerate() {
            let ablated = Case::without(ABLATED, ablation);
            steps.extend(turns(&[ablated.control(), ablated], turn + i).into_iter().map(PlanStep::Run));
        }
        steps.extend(networks(subjects, turn).into_iter().map(PlanStep::Run));
        steps.extend(engines(settings, subjects, turn).into_iter().map(PlanStep::Run));
        steps.extend(links(subjects, turn).into_iter().map(PlanStep::Run));
    }
    steps.extend([PlanStep::Machine, PlanStep::Idle]);
    steps
}

/// Returns the runs that compare network stacks. To save time, they run in every other round,
/// beginning with the first. Both stacks run in direct succession, in alternating order.
fn networks(subjects: &Subjects, turn: usize) -> Vec<Case> {
    let has_node = subjects.configs.contains(&TestedSystem::DpuMemcpy);
    if turn % 2 == 1 || !has_node {
        return Vec::new();
    }
    let pair = |in_flight: u32| Network::ALL.map(|network| Case::over(network, in_flight));
    let depths = subjects.in_flight_sweep.iter().enumerate();
    depths.flat_map(|(i, in_flight)| turns(&pair(*in_flight), turn / 2 + i)).collect()
}

/// Returns the writes of the nodes with other engines, in every other round.
fn engines(settings: &EvaluationSettings, subjects: &Subjects, turn: usize) -> Vec<Case> {
    if turn % 2 == 1 {
        return Vec::new();
    }
    let at_size = |(i, size): (usize, u64)| {
        let configs = turns(&subjects.engines, turn / 2 + i).into_iter();
        configs.map(move |config| Case::new(config, AccessMode::Write, size))
    };
    settings.sizes().into_iter().enumerate().flat_map(at_size).collect()
}

/// Returns the runs over links between network namespaces, in every other round.
fn links(subjects: &Subjects, turn: usize) -> Vec<Case> {
    if turn % 2 == 1 {
        return Vec::new();
    }
    let of = |link: EmulatedLink| {
        turns(&subjects.linked, turn / 2).into_iter().map(move |config| Case::across(config, link))
    };
    turns(&EmulatedLink::ALL, turn / 2).into_iter().flat_map(of).collect()
}

impl PlanStep {
    /// Estimates the duration in s, from measurements on a machine with two CPUs and other load.
    #[must_use]
    pub fn seconds(&self, settings: &EvaluationSettings) -> f64 {
        let of = |case: &Case| f64::from(settings.seconds_of(case)) + 0.6;
        let of_ceph = |case: &Case| f64::from(settings.seconds_of(case)) + 1.1;
        match self {
            PlanStep::Drive { .. } => self.runs() as f64 * (f64::from(settings.fio_seconds()) + 0.6),
            PlanStep::Modes { config: TestedSystem::Ceph, size } => {
                // A run of sequential reads ends early, when all objects have been read.
                let early = |mode| if mode == AccessMode::Read { 1.0 } else { 0.0 };
                let run = |mode| of_ceph(&Case::new(TestedSystem::Ceph, mode, *size)) - early(mode);
                AccessMode::ALL.map(run).iter().sum::<f64>() + CLEAN_SECONDS
            }
            PlanStep::Modes { config, size } => {
                AccessMode::ALL.map(|mode| of(&Case::new(*config, mode, *size))).iter().sum()
            }
            PlanStep::Run(case) => of(case),
            PlanStep::CephLargeSet => {
                of_ceph(&Case::large_set(TestedSystem::Ceph)) + f64::from(SHRINK_SECONDS) + 1.5
            }
            PlanStep::Machine => 2.0,
            PlanStep::Idle => f64::from(IDLE_SECONDS.0 + IDLE_SECONDS.1),
        }
    }

    /// Number of runs in this step.
    #[must_use]
    pub fn runs(&self) -> usize {
        match self {
            PlanStep::Drive { size: 4096 } => 5,
            PlanStep::Drive { .. } => 4,
            PlanStep::Modes { .. } => AccessMode::ALL.len(),
            PlanStep::Run(_) | PlanStep::CephLargeSet | PlanStep::Idle => 1,
            PlanStep::Machine => 2,
        }
    }

    /// Returns the label for the progress line.
    #[must_use]
    pub fn label(&self) -> String {
        let label = super::workload::size_label;
        match self {
            PlanStep::Drive { size } => format!("fio, {}", label(*size)),
            PlanStep::Modes { config, size } => format!("{}, {}", config.label(), label(*size)),
            PlanStep::Run(case) => {
                let options = match (&case.ablation, &case.control_of, case.network, case.link) {
                    (Some(options), ..) => format!(" {options}"),
                    (_, Some(options), ..) => format!(" as the control of {options}"),
                    (_, _, Some(network), _) => {
                        format!(" over {}, {} in flight", network.name(), case.in_flight)
                    }
                    (.., Some(link)) => format!(" over a link, {}", link.label()),
                    (None, None, None, None) => String::new(),
                };
                format!("{}, {} {}{options}", case.config.label(), label(case.size), case.mode.name())
            }
            PlanStep::CephLargeSet => "Ceph, large set".to_owned(),
            PlanStep::Machine => "loopback and memory".to_owned(),
            PlanStep::Idle => "all systems idle".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::evaluation::workload::Set;

    #[test]
    fn every_system_runs_first_at_every_size_in_some_round() {
        let subjects = Subjects::all();
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        let first = |round_number: u32, size: u64| {
            let steps = round(&settings, &subjects, round_number);
            let at_size = steps.into_iter().find_map(|s| match s {
                PlanStep::Modes { config, size: found } if found == size => Some(config),
                _ => None,
            });
            at_size.unwrap()
        };
        for size in settings.sizes() {
            assert_eq!((1..=6).map(|r| first(r, size)).collect::<BTreeSet<_>>().len(), 3, "{size}");
        }
    }

    #[test]
    fn every_system_directly_follows_every_other_system_equally_often_in_each_comparison() {
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        // For each round, the systems of the steps for which `of` returns a system, in order.
        let orders = |rounds: u32, of: &dyn Fn(PlanStep) -> Option<TestedSystem>| -> Vec<Vec<TestedSystem>> {
            let of_round = |r| round(&settings, &Subjects::all(), r).into_iter().filter_map(of).collect();
            (1..=rounds).map(of_round).collect()
        };
        let check = |orders: Vec<Vec<TestedSystem>>, pairs: usize, times: usize| {
            let mut found: Vec<_> = orders.iter().flat_map(|o| o.windows(2).map(|w| (w[0], w[1]))).collect();
            found.sort_unstable();
            assert!(found.chunk_by(|a, b| a == b).all(|same| same.len() == times), "{found:?}");
            assert_eq!(found.len(), pairs * times);
        };
        for size in settings.sizes() {
            let at_size = move |step| match step {
                PlanStep::Modes { config, size: found } if found == size => Some(config),
                _ => None,
            };
            check(orders(6, &at_size), 6, 2);
        }
        let alone = |step| match step {
            PlanStep::Run(case) if case.in_flight == 1 && case.network.is_none() => Some(case.config),
            _ => None,
        };
        check(orders(4, &alone), 2, 2);
        let large = |step| match step {
            PlanStep::Run(case) if case.set == Set::Large => Some(case.config),
            PlanStep::CephLargeSet => Some(TestedSystem::Ceph),
            _ => None,
        };
        check(orders(6, &large), 6, 2);
    }

    #[test]
    fn each_ablation_runs_directly_before_or_after_its_control_in_alternating_order() {
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        let mut ablated_first = Vec::new();
        for number in 1..=2 {
            let steps = round(&settings, &Subjects::all(), number);
            let runs: Vec<Case> = steps
                .into_iter()
                .filter_map(|s| if let PlanStep::Run(case) = s { Some(case) } else { None })
                .filter(|c| c.ablation.is_some() || c.control_of.is_some())
                .collect();
            assert_eq!(runs.len(), 2 * Subjects::all().ablations.len());
            for pair in runs.chunks(2) {
                let [first, second] = [&pair[0], &pair[1]];
                assert!(first.control() == *second || second.control() == *first, "{pair:?}");
                ablated_first.push(first.ablation.is_some());
            }
        }
        let (one, two) = ablated_first.split_at(ablated_first.len() / 2);
        assert!(one.iter().zip(two).all(|(a, b)| a != b), "{ablated_first:?}");
    }

    /// Returns the runs of a round that compare network stacks.
    fn sweep(subjects: &Subjects, number: u32, quick: bool) -> Vec<Case> {
        let settings = EvaluationSettings { quick, ..EvaluationSettings::from_env() };
        let runs = round(&settings, subjects, number).into_iter();
        let cases = runs.filter_map(|s| if let PlanStep::Run(case) = s { Some(case) } else { None });
        cases.filter(|c| c.network.is_some()).collect()
    }

    #[test]
    fn both_network_stacks_run_directly_in_succession_at_every_depth_in_alternating_order() {
        let mut firsts = Vec::new();
        for number in [1, 3, 5, 7] {
            let runs = sweep(&Subjects::all(), number, false);
            let depths: Vec<u32> = runs.chunks(2).map(|pair| pair[0].in_flight).collect();
            assert_eq!(depths, IN_FLIGHT_SWEEP);
            for pair in runs.chunks(2) {
                assert_eq!(pair[0].in_flight, pair[1].in_flight);
                assert_ne!(pair[0].network, pair[1].network);
            }
            firsts.push(runs.chunks(2).map(|pair| pair[0].network).collect::<Vec<_>>());
        }
        for two in firsts.windows(2) {
            assert!(two[0].iter().zip(&two[1]).all(|(a, b)| a != b), "{firsts:?}");
        }
    }

    #[test]
    fn network_stacks_are_compared_only_in_every_other_round_of_a_full_run() {
        let all = Subjects::all();
        let lengths: Vec<usize> = (1..=4).map(|number| sweep(&all, number, false).len()).collect();
        assert_eq!(lengths, [2 * IN_FLIGHT_SWEEP.len(), 0, 2 * IN_FLIGHT_SWEEP.len(), 0]);
        assert!(sweep(&all, 1, true).is_empty());
        assert!(sweep(&Subjects { in_flight_sweep: Vec::new(), ..all.clone() }, 1, false).is_empty());
        assert!(sweep(&Subjects { configs: vec![TestedSystem::Host], ..all }, 1, false).is_empty());
    }

    #[test]
    fn the_planned_time_is_below_fifty_minutes_or_five_for_a_quick_run() {
        let minutes = |quick, rounds, seconds| {
            let settings = EvaluationSettings { quick, rounds, seconds, ..EvaluationSettings::from_env() };
            let all = Subjects::all();
            (setup_seconds(&settings, &all) + super::seconds(&settings, &all, 1)) / 60.0
        };
        assert!(minutes(false, 7, 3) < 50.0, "{}", minutes(false, 7, 3));
        assert!(minutes(true, 1, 5) < 5.0, "{}", minutes(true, 1, 5));
    }

    #[test]
    fn every_round_has_the_same_number_of_steps() {
        let configs = vec![TestedSystem::Host, TestedSystem::Ceph];
        let subjects = Subjects { configs, engines: Vec::new(), linked: Vec::new(), ..Subjects::all() };
        let settings = EvaluationSettings { quick: false, ..EvaluationSettings::from_env() };
        let lengths: BTreeSet<usize> = (1..=7).map(|r| round(&settings, &subjects, r).len()).collect();
        assert_eq!(lengths.len(), 1);
    }
}
