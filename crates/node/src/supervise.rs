//! The supervisor: starts a node's roles one after the other (the store before the osd), restarts
//! roles that die, records the state of all processes, and stops the roles in reverse order.
//!
//! The supervisor sleeps until a role announces an event, a timer expires or a signal arrives, so
//! it uses almost no CPU time while the node is idle.

use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::config::SuperviseSection;
use super::dir::{DirError, NodeDir};
use super::keeper::{Goal, Keeper, RoleEvent, RoleSpec};
use super::role::StopSignals;
use super::state::{NodeState, Process, ProcessState, Role};

/// Reason why a node did not start or could not continue.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    /// A role died before it was ready for the first time.
    #[error("the {} role does not start: {reason} (its log: {})", role.as_str(), log.display())]
    RoleFailed {
        /// The role.
        role: Role,
        /// Reason of the failure.
        reason: String,
        /// Whether the role announced the failure itself, before it served any client.
        is_announced: bool,
        /// The role's log, which has more details.
        log: std::path::PathBuf,
    },
    /// The state of the node's processes cannot be recorded.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// A signal stopped the supervisor before the node was up.
    #[error("stopped by a signal before the node was up")]
    Interrupted,
}

struct KeptRole {
    role: Role,
    goal: watch::Sender<Goal>,
}

/// Supervisor of the roles of a node.
pub struct Supervisor {
    dir: NodeDir,
    state: NodeState,
    /// UUID of the node, which the role that serves clients announces.
    node: Option<Uuid>,
    /// UUIDs of the node's targets in the order of their numbers, which this role announces, too.
    numbered: Vec<Uuid>,
    kept: Vec<KeptRole>,
    events: mpsc::Receiver<(Role, RoleEvent)>,
    report: mpsc::Sender<(Role, RoleEvent)>,
    policy: SuperviseSection,
    signals: StopSignals,
}

impl Supervisor {
    /// Creates a supervisor that has started no role yet. `state` is the last known state of the
    /// node.
    pub fn new(dir: NodeDir, state: NodeState, policy: SuperviseSection, signals: StopSignals) -> Supervisor {
        let (report, events) = mpsc::channel(16);
        Supervisor {
            dir,
            state,
            node: None,
            numbered: Vec::new(),
            kept: Vec::new(),
            events,
            report,
            policy,
            signals,
        }
    }

    /// Returns the state of the node's processes.
    pub fn state(&self) -> &NodeState {
        &self.state
    }

    /// Returns the UUID of the node; `None` until the role that serves clients is ready.
    pub fn node(&self) -> Option<Uuid> {
        self.node
    }

    /// Returns the UUIDs of the node's targets in the order of their numbers; none until the role that
    /// serves clients is ready.
    pub fn numbered(&self) -> &[Uuid] {
        &self.numbered
    }

    /// Starts `roles` one after the other. Each role must be ready before the next one starts. If a
    /// role fails, the supervisor stops this role and all roles that it started before.
    ///
    /// # Errors
    /// If a role fails, or if a signal asks the supervisor to stop.
    pub async fn start(&mut self, roles: Vec<RoleSpec>) -> Result<(), SuperviseError> {
        for spec in roles {
            if let Err(e) = self.start_one(spec).await {
                self.stop().await?;
                return Err(e);
            }
        }
        Ok(())
    }

    async fn start_one(&mut self, spec: RoleSpec) -> Result<(), SuperviseError> {
        let (role, log) = (spec.role, spec.log.clone());
        let (goal, wanted) = watch::channel(Goal::Run);
        let keeper = Keeper::new(spec, self.policy, self.report.clone(), wanted);
        self.kept.push(KeptRole { role, goal });
        self.state.processes.push(Process::new(role));
        tokio::spawn(keeper.run());
        loop {
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = self.signals.next() => return Err(SuperviseError::Interrupted),
            };
            let Some((from, event)) = event else { return Err(SuperviseError::Interrupted) };
            self.note(from, &event)?;
            match event {
                RoleEvent::Ready(_) if from == role => return Ok(()),
                RoleEvent::Died { reason, is_announced, .. } if from == role => {
                    return Err(SuperviseError::RoleFailed { role, reason, is_announced, log });
                }
                _ => {}
            }
        }
    }

    /// Keeps the roles alive until a signal asks the supervisor to stop, then stops the roles.
    ///
    /// # Errors
    /// If the final state cannot be recorded. Earlier failures to record the state are only logged.
    pub async fn run(mut self) -> Result<(), SuperviseError> {
        loop {
            tokio::select! {
                event = self.events.recv() => {
                    let Some((role, event)) = event else { break };
                    if let Err(e) = self.note(role, &event) {
                        tracing::error!("{e}");
                    }
                }
                () = self.signals.next() => break,
            }
        }
        self.stop().await
    }

    /// Stops the roles, the last started first. A signal during the stop kills the role that is
    /// stopping. All roles are stopped even if the state cannot be recorded.
    async fn stop(&mut self) -> Result<(), SuperviseError> {
        tracing::info!("stopping");
        while let Some(kept) = self.kept.pop() {
            let _ = kept.goal.send(Goal::Stop);
            loop {
                tokio::select! {
                    event = self.events.recv() => {
                        let Some((role, event)) = event else { break };
                        if let Err(e) = self.note(role, &event) {
                            tracing::error!("{e}");
                        }
                        if role == kept.role && event == RoleEvent::Stopped {
                            break;
                        }
                    }
                    () = self.signals.next() => { let _ = kept.goal.send(Goal::Kill); }
                }
            }
        }
        if let Some(supervisor) = self.state.processes.iter_mut().find(|p| p.role == Role::Supervisor) {
            supervisor.state = ProcessState::Stopped;
        }
        self.state.save(&self.dir)?;
        tracing::info!("stopped");
        Ok(())
    }

    /// Records an event of a role.
    fn note(&mut self, role: Role, event: &RoleEvent) -> Result<(), DirError> {
        let Some(process) = self.state.processes.iter_mut().find(|p| p.role == role) else { return Ok(()) };
        match event {
            RoleEvent::Started { pid } => {
                process.restarts += u64::from(process.pid != 0);
                process.set_pid(*pid);
                process.state = ProcessState::Starting;
                tracing::info!(role = role.as_str(), pid, "started");
            }
            RoleEvent::Ready(ready) => {
                process.state = ProcessState::Running;
                process.metrics.clone_from(&ready.metrics);
                self.node = ready.node.or(self.node);
                if !ready.numbered.is_empty() {
                    self.numbered.clone_from(&ready.numbered);
                }
                if ready.endpoint.is_some() {
                    self.state.endpoint.clone_from(&ready.endpoint);
                    self.state.control.clone_from(&ready.control);
                    self.state.engine.clone_from(&ready.engine);
                    self.state.emulated = ready.emulated;
                }
                if !ready.targets.is_empty() {
                    self.state.targets.clone_from(&ready.targets);
                }
                tracing::info!(role = role.as_str(), "ready");
            }
            RoleEvent::Hung { reason } => {
                process.state = ProcessState::Hung;
                process.hangs += 1;
                process.last_exit = Some(reason.clone());
                tracing::error!(role = role.as_str(), pid = process.pid, "{reason}; killing the process");
            }
            RoleEvent::Died { reason, pause, .. } => {
                process.state = ProcessState::Waiting;
                process.last_exit = Some(reason.clone());
                tracing::error!(
                    role = role.as_str(),
                    pause_ms = pause.as_millis() as u64,
                    "the role has died: {reason}"
                );
            }
            RoleEvent::Stopped => process.state = ProcessState::Stopped,
        }
        let (up, restarts, hangs) = (process.state == ProcessState::Running, process.restarts, process.hangs);
        metrics::gauge!("outboard_supervisor_role_up", "role" => role.as_str()).set(f64::from(u8::from(up)));
        metrics::counter!("outboard_supervisor_restarts", "role" => role.as_str()).absolute(restarts);
        metrics::counter!("outboard_supervisor_hangs", "role" => role.as_str()).absolute(hangs);
        self.state.save(&self.dir)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;
    use wire::Placement;

    use super::*;
    use crate::config_file;

    /// Creates a role whose process is a shell script. The script gets the role's arguments in
    /// `$1`, `$2` and so on.
    fn scripted(role: Role, dir: &NodeDir, script: &str) -> RoleSpec {
        RoleSpec {
            role,
            program: "sh".into(),
            args: ["-c", script, role.as_str()].map(Into::into).to_vec(),
            listen: Some("127.0.0.1:0".into()),
            metrics: "m:0".into(),
            known_targets: vec![],
            dir: dir.clone(),
            log: dir.log(role.as_str()),
            log_max: crate::units::ByteSize(1 << 20),
        }
    }

    fn supervisor(dir: &NodeDir, policy: impl FnOnce(&mut SuperviseSection)) -> Supervisor {
        let mut config = config_file::load(None, |_| None).unwrap();
        policy(&mut config.supervise);
        let state = NodeState {
            placement: Placement::Dpu,
            endpoint: None,
            control: None,
            engine: None,
            emulated: false,
            targets: vec![],
            processes: vec![],
        };
        Supervisor::new(dir.clone(), state, config.supervise, StopSignals::catch().unwrap())
    }

    const READY: &str = r#"echo "$*" >> args; echo '{"ready":{"endpoint":"127.0.0.1:77","metrics":"m:1"}}';"#;

    async fn until(s: &mut Supervisor, what: impl Fn(&NodeState) -> bool) {
        while !what(&s.state) {
            let (role, event) =
                tokio::time::timeout(Duration::from_secs(10), s.events.recv()).await.unwrap().unwrap();
            s.note(role, &event).unwrap();
        }
    }

    #[tokio::test]
    async fn a_killed_role_is_restarted_at_its_old_address_and_the_restart_is_counted() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |_| {});
        let script = format!("{READY} exec sleep 1000");
        s.start(vec![scripted(Role::Osd, &dir, &script)]).await.unwrap();
        let first = s.state.process(Role::Osd).unwrap().pid;
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(first as i32).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        until(&mut s, |state| {
            let p = state.process(Role::Osd).unwrap();
            p.restarts == 1 && p.state == ProcessState::Running
        })
        .await;
        let process = NodeState::load(&dir).unwrap().process(Role::Osd).unwrap().clone();
        assert_ne!(process.pid, first);
        assert_eq!(process.last_exit.as_deref(), Some("killed by signal 9"));
        let args = std::fs::read_to_string(dir.path().join("args")).unwrap();
        assert!(args.lines().nth(1).unwrap().contains("--metrics m:1 --listen 127.0.0.1:77"), "{args}");
        s.stop().await.unwrap();
        assert!(!process.is_alive());
    }

    #[tokio::test]
    async fn a_restarted_role_receives_the_target_uuids_that_its_first_process_announced() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| p.backoff_min = "1ms".parse().unwrap());
        let uuid = "0a2bdc3d-0f08-4b99-bf2c-5b493b452076";
        let ready = format!(r#"{{"ready":{{"targets":[{{"path":"targets/0.img","uuid":"{uuid}"}}]}}}}"#);
        // The first process becomes ready and then dies. The second process dies before it is
        // ready.
        let script = format!(
            r#"echo "$*" >> args; case $(wc -l < args) in 1) echo '{ready}'; exit 3;; 2) exit 4;; esac
               echo '{ready}'; exec sleep 1000"#
        );
        s.start(vec![scripted(Role::Store, &dir, &script)]).await.unwrap();
        until(&mut s, |state| {
            let p = state.process(Role::Store).unwrap();
            p.restarts == 2 && p.state == ProcessState::Running
        })
        .await;
        s.stop().await.unwrap();
        let args = std::fs::read_to_string(dir.path().join("args")).unwrap();
        let known = format!("--known-target targets/0.img={uuid}");
        let known: Vec<bool> = args.lines().map(|line| line.contains(&known)).collect();
        assert_eq!(known, [false, true, true], "{args}");
    }

    #[tokio::test]
    async fn a_role_that_fails_to_restart_on_its_old_metrics_port_chooses_a_new_port() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| p.backoff_min = "1ms".parse().unwrap());
        let script = format!(
            r#"echo "$*" >> starts; case $(wc -l < starts) in 1) {READY} exit 3;; 2) exit 4;; esac
               {READY} exec sleep 1000"#
        );
        s.start(vec![scripted(Role::Osd, &dir, &script)]).await.unwrap();
        until(&mut s, |state| {
            let p = state.process(Role::Osd).unwrap();
            p.restarts == 2 && p.state == ProcessState::Running
        })
        .await;
        s.stop().await.unwrap();
        let log = std::fs::read_to_string(dir.path().join("starts")).unwrap();
        let ports = log.lines().map(|l| l.contains("--metrics m:1")).collect::<Vec<_>>();
        assert_eq!(ports, [false, true, false], "{log}");
        assert!(
            log.lines().nth(2).unwrap().contains("--listen 127.0.0.1:77"),
            "clients know this address: {log}"
        );
    }

    #[tokio::test]
    async fn if_one_role_cannot_start_the_supervisor_fails_and_stops_the_other_roles() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |_| {});
        let store = scripted(Role::Store, &dir, &format!("{READY} exec sleep 1000"));
        let osd = scripted(Role::Osd, &dir, r#"echo '{"failed":"no such moon"}'; exit 1"#);
        let error = s.start(vec![store, osd]).await.unwrap_err();
        assert!(
            matches!(&error, SuperviseError::RoleFailed { role: Role::Osd, reason, .. } if reason == "no such moon")
        );
        assert_eq!(s.state.process(Role::Store).unwrap().state, ProcessState::Stopped);
        assert!(!s.state.process(Role::Store).unwrap().is_alive());
    }

    #[tokio::test]
    async fn the_delay_between_restarts_grows_and_a_role_that_ignores_sigterm_is_killed() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| {
            p.backoff_min = "1ms".parse().unwrap();
            p.backoff_max = "4ms".parse().unwrap();
            p.stop_timeout = "100ms".parse().unwrap();
        });
        // The role dies four times, then ignores SIGTERM.
        let script = format!(
            "{READY} [ $(wc -l < args) -gt 4 ] || exit 3; trap '' TERM; while :; do sleep 0.05; done"
        );
        s.start(vec![scripted(Role::Node, &dir, &script)]).await.unwrap();
        let mut pauses = Vec::new();
        while pauses.len() < 4 {
            let (role, event) = s.events.recv().await.unwrap();
            s.note(role, &event).unwrap();
            if let RoleEvent::Died { pause, reason, .. } = event {
                assert_eq!(reason, "ended with status 3");
                pauses.push(pause.as_millis());
            }
        }
        assert_eq!(pauses, [1, 2, 4, 4]);
        until(&mut s, |state| state.process(Role::Node).unwrap().restarts == 4).await;
        until(&mut s, |state| state.process(Role::Node).unwrap().state == ProcessState::Running).await;
        let last = s.state.process(Role::Node).unwrap().clone();
        s.stop().await.unwrap();
        assert!(!last.is_alive());
    }

    #[tokio::test]
    async fn a_starting_role_is_killed_only_if_it_reports_no_progress() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| p.ready_timeout = "3s".parse().unwrap());
        // The recovery takes three times as long as `ready_timeout`.
        let recover = r#"for i in 1 2 3 4 5 6 7 8 9; do echo '"progress"'; sleep 1; done;"#;
        s.start(vec![scripted(Role::Store, &dir, &format!("{recover} {READY} exec sleep 1000"))])
            .await
            .unwrap();
        assert_eq!(s.state.process(Role::Store).unwrap().restarts, 0);
        // Heartbeats do not count as progress.
        let beat = r#"echo '"progress"'; while :; do echo '{"heartbeat":"osd-0"}'; sleep 0.2; done"#;
        let error = s.start(vec![scripted(Role::Osd, &dir, beat)]).await.unwrap_err();
        assert!(error.to_string().contains("not ready after 3s"), "{error}");
    }

    #[tokio::test]
    async fn restart_pauses_grow_if_a_role_hangs_soon_after_each_start() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| {
            p.backoff_min = "1ms".parse().unwrap();
            p.steady_after = "1ms".parse().unwrap();
            p.hung_after = "20s".parse().unwrap();
        });
        let script = format!(r#"{READY} sleep 0.1; echo '{{"hung":"a test"}}'; exec sleep 1000"#);
        s.start(vec![scripted(Role::Store, &dir, &script)]).await.unwrap();
        let mut pauses = Vec::new();
        while pauses.len() < 4 {
            let (role, event) = s.events.recv().await.unwrap();
            s.note(role, &event).unwrap();
            if let RoleEvent::Died { pause, reason, .. } = event {
                assert_eq!(reason, "hung: a test");
                pauses.push(pause.as_millis());
            }
        }
        assert_eq!(pauses, [1, 2, 4, 8]);
        assert_eq!(s.state.process(Role::Store).unwrap().hangs, 4);
        s.stop().await.unwrap();
    }

    #[tokio::test]
    async fn roles_are_stopped_in_reverse_order_even_if_the_state_cannot_be_recorded() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |_| {});
        let script = |name: &str| {
            // The role is ready only when it handles the signal.
            format!("trap 'echo {name} >> ended; exit' TERM; {READY} while :; do sleep 0.05; done")
        };
        let roles = [(Role::Store, "store"), (Role::Osd, "osd")];
        s.start(roles.map(|(role, name)| scripted(role, &dir, &script(name))).to_vec()).await.unwrap();
        std::os::unix::fs::symlink("/dev/full", dir.path().join("run/state.new")).unwrap();
        s.stop().await.unwrap();
        assert!(
            !dir.path().join("run/state.new").exists(),
            "the failed attempt to record the state removes state.new"
        );
        assert_eq!(std::fs::read_to_string(dir.path().join("ended")).unwrap(), "osd\nstore\n");
    }

    #[tokio::test]
    async fn a_role_that_announces_nothing_is_killed_after_ready_timeout() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let mut s = supervisor(&dir, |p| p.ready_timeout = "100ms".parse().unwrap());
        let error = s.start(vec![scripted(Role::Store, &dir, "exec sleep 1000")]).await.unwrap_err();
        assert!(error.to_string().contains("not ready after 100ms"), "{error}");
    }
}
