//! Executes the plan of the report round by round, and collects the results.

use std::time::Duration;

use super::plan::{self, ENGINES, IDLE_SECONDS, PlanStep, SHRINK_SECONDS, Subjects};
use super::processes::Threads;
use super::progress::ProgressLine;
use super::rig::EvaluationRig;
use super::sample::{Ceiling, CeilingKind, Idle, Measurements, Sample};
use super::settings::EvaluationSettings;
use super::workload::{AccessMode, Case, IN_FLIGHT, TestedSystem};
use crate::{Result, ceiling};

/// Number of failed steps after which a system is no longer measured.
const FAILURES_MOST: usize = 3;

/// A run of the report, which measures all systems in several rounds.
pub struct Campaign<'a> {
    settings: &'a EvaluationSettings,
    rig: &'a EvaluationRig,
    subjects: Subjects,
    /// The values measured so far.
    pub found: Measurements,
    failures: Vec<TestedSystem>,
}

impl<'a> Campaign<'a> {
    /// Creates a campaign that measures the systems of `rig`. `problems` lists the systems that
    /// could not be started.
    #[must_use]
    pub fn new(
        settings: &'a EvaluationSettings,
        rig: &'a EvaluationRig,
        problems: Vec<String>,
    ) -> Campaign<'a> {
        let rados_start_cpu_seconds = rig.ceph.as_ref().map(|ceph| ceph.client_start_cpu_seconds);
        let found = Measurements { problems, rados_start_cpu_seconds, ..Measurements::default() };
        Campaign { settings, rig, subjects: rig.subjects(), found, failures: Vec::new() }
    }

    /// Runs one round. A failed step is reported, and the round continues.
    pub fn round(&mut self, round: u32, progress: &mut ProgressLine) {
        // Earlier failures may have removed systems, so this round may take less time than planned.
        progress.plan_rest(plan::seconds(self.settings, &self.subjects, round));
        for step in plan::round(self.settings, &self.subjects, round) {
            progress.show(&format!("round {round} of {}: {}", self.settings.rounds, step.label()));
            if let Err(why) = self.step(round, &step) {
                self.found.problems.push(format!("round {round}, {}: {why}", step.label()));
                self.count_failure(&step);
            }
            progress.add(step.seconds(self.settings));
        }
    }

    /// Counts a failed step of a system, and stops measuring the system after [`FAILURES_MOST`]
    /// failures. An ablation, or a number of requests in flight in the comparison of network
    /// stacks, is no longer measured after its first failure.
    fn count_failure(&mut self, step: &PlanStep) {
        let config = match step {
            PlanStep::Modes { config, .. } => *config,
            PlanStep::CephLargeSet => TestedSystem::Ceph,
            PlanStep::Run(Case { ablation: Some(option), .. } | Case { control_of: Some(option), .. }) => {
                return self.subjects.ablations.retain(|a| a.option != *option);
            }
            PlanStep::Run(Case { config, .. }) if ENGINES.contains(config) => {
                return self.subjects.engines.retain(|c| c != config);
            }
            PlanStep::Run(Case { link: Some(_), config, .. }) => {
                return self.subjects.linked.retain(|c| c != config);
            }
            PlanStep::Run(Case { network: Some(_), in_flight, .. }) => {
                return self.subjects.in_flight_sweep.retain(|n| n != in_flight);
            }
            PlanStep::Drive { .. } | PlanStep::Run(_) | PlanStep::Machine | PlanStep::Idle => return,
        };
        self.failures.push(config);
        let count = self.failures.iter().filter(|c| **c == config).count();
        if count == FAILURES_MOST {
            self.subjects.configs.retain(|c| *c != config);
            self.found
                .problems
                .push(format!("{} is no longer measured, because {count} steps failed", config.label()));
        }
    }

    fn step(&mut self, round: u32, step: &PlanStep) -> Result<()> {
        match step {
            PlanStep::Drive { size } => self.drive(round, *size),
            PlanStep::Modes { config: TestedSystem::Ceph, size } => self.ceph_modes(round, *size),
            PlanStep::Modes { config, size } => AccessMode::ALL
                .into_iter()
                .try_for_each(|mode| self.run(round, Case::new(*config, mode, *size))),
            PlanStep::Run(case) => self.run(round, case.clone()),
            PlanStep::CephLargeSet => self.ceph_large_set(round),
            PlanStep::Machine => self.machine(round),
            PlanStep::Idle => self.idle(round),
        }
    }

    fn run(&mut self, round: u32, case: Case) -> Result<()> {
        let result = self.rig.bench(self.settings, &case, self.settings.seconds_of(&case))?;
        self.found.samples.push(Sample::of_bench(round, case, &result)?);
        Ok(())
    }

    /// Measures all access modes on Ceph. The reads use the objects that the writes have just
    /// created. Removes the objects at the end, even if a run failed.
    fn ceph_modes(&mut self, round: u32, size: u64) -> Result<()> {
        let rig = self.rig;
        let ceph = rig.ceph.as_ref().ok_or("Ceph is not running")?;
        let outcome = AccessMode::ALL.into_iter().try_for_each(|mode| -> Result<()> {
            let case = Case::new(TestedSystem::Ceph, mode, size);
            self.found.samples.push(ceph.bench(round, &case, self.settings.seconds_of(&case))?);
            Ok(())
        });
        ceph.clean()?;
        outcome
    }

    fn ceph_large_set(&mut self, round: u32) -> Result<()> {
        let rig = self.rig;
        let ceph = rig.ceph.as_ref().ok_or("Ceph is not running")?;
        ceph.limit_memory(true)?;
        pause(SHRINK_SECONDS);
        let case = Case::large_set(TestedSystem::Ceph);
        let outcome = ceph.bench(round, &case, self.settings.seconds_of(&case));
        ceph.limit_memory(false)?;
        ceph.settle()?;
        self.found.samples.push(outcome?);
        Ok(())
    }

    fn drive(&mut self, round: u32, size: u64) -> Result<()> {
        let (fio, bs, seconds) = (&self.rig.fio, size.to_string(), self.settings.fio_seconds());
        let writes = fio.write_mb_per_s(&bs, 1, seconds)?.max(fio.write_mb_per_s(&bs, IN_FLIGHT, seconds)?);
        let reads = fio.read_mb_per_s(&bs, 1, seconds)?.max(fio.read_mb_per_s(&bs, IN_FLIGHT, seconds)?);
        self.ceiling(round, CeilingKind::DriveWrite, size, writes);
        self.ceiling(round, CeilingKind::DriveRead, size, reads);
        if size == 4096 {
            let random = fio.randread_iops(IN_FLIGHT, seconds)? * size as f64 / 1e6;
            self.ceiling(round, CeilingKind::DriveRandread, size, random);
        }
        Ok(())
    }

    fn machine(&mut self, round: u32) -> Result<()> {
        let loopback = ceiling::loopback(1)?;
        self.ceiling(round, CeilingKind::Loopback, 0, loopback.mb_per_s);
        self.ceiling(round, CeilingKind::LoopbackReceiver, 0, loopback.mb_per_cpu_s);
        self.ceiling(round, CeilingKind::Memcpy, 0, ceiling::memcpy_mb_per_s());
        Ok(())
    }

    fn ceiling(&mut self, round: u32, kind: CeilingKind, size: u64, mb_per_s: f64) {
        self.found.ceilings.push(Ceiling { round, kind, size, mb_per_s });
    }

    fn idle(&mut self, round: u32) -> Result<()> {
        pause(IDLE_SECONDS.0);
        let processes = self.rig.processes()?;
        let before: Vec<Threads> = processes.iter().map(|(.., pid)| Threads::of(*pid)).collect();
        let started = std::time::Instant::now();
        pause(IDLE_SECONDS.1);
        for ((config, process, pid), before) in processes.into_iter().zip(before) {
            let used = Threads::of(pid).cpu_seconds_since(&before);
            let cpu_percent = 100.0 * used / started.elapsed().as_secs_f64();
            self.found.idle.push(Idle { round, config, process, cpu_percent });
        }
        Ok(())
    }
}

fn pause(seconds: u32) {
    std::thread::sleep(Duration::from_secs(u64::from(seconds)));
}
