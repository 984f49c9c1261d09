//! Faults of processes.

use std::time::Duration;

use rand::Rng;
use rustix::process::Signal;

use super::{InjectResult, Injector, not_possible};
use crate::thrashed_node::{ProcessRecord, state_of, wait};

impl Injector {
    /// Returns the running process of a random role, except the supervisor and `other`.
    fn random_role(&mut self, other: Option<&str>) -> InjectResult<ProcessRecord> {
        let roles: Vec<ProcessRecord> = self.node.processes().into_iter().collect();
        let roles: Vec<_> = roles
            .into_iter()
            .filter(|process| process.role != "supervisor" && other != Some(process.role.as_str()))
            .collect();
        if roles.is_empty() {
            return not_possible("no role runs");
        }
        Ok(roles[self.random.random_range(0..roles.len())].clone())
    }

    pub(super) fn kill_role(&mut self, other: Option<&str>) -> InjectResult<String> {
        let process = self.random_role(other)?;
        match self.node.kill(&process) {
            Ok(()) => Ok(format!("the {} ({}) is dead", process.role, process.pid)),
            Err(why) => not_possible(why),
        }
    }

    /// Kills the role that owns the targets.
    pub(super) fn kill_owner(&self) -> InjectResult {
        let role = self.owner();
        let Some(process) = self.node.process(role) else { return not_possible(format!("no {role} runs")) };
        self.node.kill(&process).or_else(not_possible)
    }

    fn owner(&self) -> &'static str {
        match self.config.placement {
            client::Placement::Dpu => "store",
            client::Placement::Host => "node",
        }
    }

    pub(super) fn kill_supervisor(&mut self) -> InjectResult<String> {
        let Some(process) = self.node.process("supervisor") else {
            return not_possible("no supervisor runs");
        };
        self.node.kill(&process).or_else(not_possible)?;
        let ended = wait(Duration::from_secs(45), || self.node.processes().is_empty());
        if !ended {
            self.record.note("kill-supervisor: roles have survived their supervisor for 45 s");
            self.kill_all()?;
        }
        self.start()
    }

    pub(super) fn stop_process(&mut self, left: Duration) -> InjectResult<String> {
        let processes = self.node.processes();
        if processes.is_empty() {
            return not_possible("no process runs");
        }
        // The supervisor does little, so it is stopped less often than the roles.
        let process = match self.random.random_range(0..5) {
            0 => processes[0].clone(),
            _ => self.random_role(None)?,
        };
        // Short and long stops are equally likely, from 0.1 to 60 s.
        let seconds = 0.1 * 600_f64.powf(self.random.random_range(0.0..1.0));
        let time = Duration::from_secs_f64(seconds).min(left.max(Duration::from_secs(2)));
        let kills = self.random.random_range(0..4) == 0;
        let ProcessRecord { role, pid, .. } = &process;
        self.node.signal(&process, Signal::STOP).or_else(not_possible)?;
        if !wait(Duration::from_secs(5), || state_of(*pid) == Some('T')) {
            let _ = self.node.signal(&process, Signal::CONT);
            return not_possible(format!("the {role} ({pid}) does not stop"));
        }
        self.record.note(format!("stop: the {role} ({pid}) is stopped for {:.1} s", time.as_secs_f64()));
        self.sleep(time / 2);
        if kills && let Ok(what) = self.kill_role(Some(role)) {
            self.record.note(format!("stop: meanwhile {what}"));
        }
        self.sleep(time / 2);
        let outcome = match self.node.signal(&process, Signal::CONT) {
            Ok(()) => "continues",
            Err(_) => "was killed by its supervisor",
        };
        Ok(format!("the {role} ({pid}) {outcome} after {:.1} s", time.as_secs_f64()))
    }
}
