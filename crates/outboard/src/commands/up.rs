//! `outboard up`: creates a node on first use, and runs it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use wire::Placement;

use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::announce::{Announcement, MAX_ANNOUNCEMENT, Ready};
use node::config::{Config, GatewaySection};
use node::config_file;
use node::dir::{DEBUG_SOCKET, DirLock, HOLDER_SOCKET, NodeDir, STORE_SOCKET};
use node::durable::replace_file;
use node::failure::{Doing, Failure, Result};
use node::keeper::RoleSpec;
use node::making::{self, Making};
use node::node_keys::NodeKeys;
use node::plan::{Chosen, Plan, nth_port};
use node::port::{self, PortClaim};
use node::role::{self, StopSignals};
use node::roster::{self, Roster, Settled};
use node::state::{MountedTarget, NodeState, Process, ProcessState, Role};
use node::supervise::{SuperviseError, Supervisor};
use node::units::ByteSize;
use node::{logging, metrics};

/// Time between two checks whether a role of an earlier supervisor has ended.
const PREDECESSOR_POLL: Duration = Duration::from_millis(20);
/// Path of the running program. It stays valid if the program's file is replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Start a node: create it on first use, then run and supervise its processes
///
/// The first start creates the node's directory with its configuration (`outboard.toml`) and its
/// targets. The node restarts its processes (roles) when they die. The command prints the address
/// for clients as soon as clients can connect. It then runs until Ctrl-C or `outboard down`. With
/// --detach, it returns instead, and the node runs in the background.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard up\n  \
    outboard up --dir /srv/node1 --targets 2 --target-size 32GiB --detach\n  \
    outboard up --placement host --listen 0.0.0.0:7400")]
pub struct UpArgs {
    /// Where the node handles requests: on the DPU (emulated by a process), or on the host, which
    /// is the baseline for comparisons [default: the configured placement; dpu for a new node]
    #[arg(long, value_name = "PLACEMENT", value_parser = crate::args::placement())]
    pub placement: Option<Placement>,
    /// Number of targets to create at the first start; it cannot be changed later [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub targets: Option<u16>,
    /// Size of each new target [default: the configured size; 8GiB for a new node]
    #[arg(long, value_name = "SIZE")]
    pub target_size: Option<ByteSize>,
    /// Address at which the node serves clients [default: the configured address; for a new node
    /// port 7400 of 127.0.0.1, or the next free port]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Return as soon as clients can connect, and leave the node running in the background
    #[arg(long)]
    pub detach: bool,
    /// Create the targets of a new node on configured devices that contain none; this destroys all
    /// data on these devices
    #[arg(long)]
    pub format: bool,
    /// Pid of the process that was called with --detach, and that started this process to run the
    /// node
    #[arg(long, value_name = "PID", hide = true, conflicts_with = "detach")]
    pub background: Option<u32>,
}

/// Starts the node.
pub fn run(args: UpArgs, node: &NodeArgs) -> Result<()> {
    if let Some(caller) = args.background {
        // A separate process session protects the node from signals of the caller's terminal.
        rustix::process::setsid().doing("detaching from the terminal")?;
        // If the caller is interrupted before clients can connect, the node must stop too. `serve`
        // removes this dependency when clients can connect.
        role::end_with(caller)?;
    }
    let root = locate::root(node);
    let doing = format!("starting the node in {}", root.display());
    if !NodeDir::is_begun(&root) {
        // Check the plan first, so that a node that cannot be created leaves no directory behind.
        Plan::new(&root, &chosen(&args), env).doing(&doing)?;
    }
    let dir = NodeDir::create(&root).doing(&doing)?;
    let lock = match args.background {
        None => dir.lock(),
        Some(_) => dir.take_lock(),
    }
    .doing(&doing)?;
    wait_for_predecessors(&dir, &doing)?;
    let claim = match args.background {
        None => prepare(&dir, &args, &doing)?,
        Some(_) => None,
    };
    let config = configure(&dir, &args, &doing)?;
    if args.detach {
        return detach(&dir, &args, lock, claim.as_ref(), &doing);
    }
    // The claim keeps other nodes from choosing the port of this node while its osd restarts.
    let claim = claim.or_else(|| PortClaim::of(&config.listen, config.osd.shards()));
    let result = serve(&dir, &config, args.background.is_some());
    if result.is_err()
        && let Err(e) = making::undo(&dir)
    {
        tracing::error!("cannot remove the files of the node that was not created completely: {e}");
    }
    drop((lock, claim));
    if let (Err(why), Some(_)) = (&result, args.background) {
        Announcement::Failed(why.clone()).send();
    }
    result.map_err(|why| Failure::new(doing, why))
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Creates the node, or adds a missing port to an existing node and checks its targets. Returns a
/// claim on the node's port if this call chose the port.
fn prepare(dir: &NodeDir, args: &UpArgs, doing: &str) -> Result<Option<PortClaim>> {
    if making::undo(dir).doing(doing)? {
        output::note(
            "the first start was interrupted; its files have been removed, and the node is created from the beginning",
        );
    }
    if !dir.config().exists() {
        let plan = Plan::new(dir.path(), &chosen(args), env).doing(doing)?;
        make(dir, &plan.config, Some(&plan.text), args.format, doing)?;
        return Ok(plan.claim);
    }
    let claim = settle_port(dir, args, doing)?;
    let config = configure(dir, args, doing)?;
    if making::has_never_run(dir, &config).doing(doing)? {
        make(dir, &config, None, args.format, doing)?;
    } else {
        // Nodes of earlier versions have no keys.
        NodeKeys::settle(dir.path()).doing(doing)?;
        let settled = roster::settle(dir, &config.targets).doing(doing)?;
        settled.notes.into_iter().for_each(output::note);
    }
    Ok(claim)
}

/// Creates the parts of a new node. `text` is the text of its configuration file, if the file does
/// not exist.
fn make(dir: &NodeDir, config: &Config, text: Option<&str>, format: bool, doing: &str) -> Result<()> {
    let Err(e) = Making::make(dir, config, text, format) else { return Ok(()) };
    let left = making::undo(dir).err().map_or(String::new(), |left| format!("; {left}"));
    Err(Failure::new(doing, format!("{e}{left}")))
}

/// Chooses a port for a node whose configuration names none. The node's directory records the
/// choice, so later starts use the same port.
fn settle_port(dir: &NodeDir, args: &UpArgs, doing: &str) -> Result<Option<PortClaim>> {
    let text = std::fs::read_to_string(dir.config()).doing(doing)?;
    if args.listen.is_some() || config_file::is_set("listen", &text, env) {
        return Ok(None);
    }
    let config = config_file::of_text(&text, &dir.config(), env).doing(doing)?;
    let (default, shards) = (config.listen, config.osd.shards());
    let (address, claim) = port::choose(shards)
        .map_err(|e| Failure::new(doing, format!("no port is free: {e}; choose an address with --listen")))?;
    let chosen = address.to_string();
    let text = config_file::remember(&text, "listen", &toml::Value::String(chosen.clone()));
    replace_file(&dir.config(), &text).doing(doing)?;
    if chosen != default {
        output::note(format!("{default} is in use; from now on the node listens at {chosen}"));
    }
    Ok(Some(claim))
}

/// Combines the configuration file, the environment and the flags into the effective configuration.
fn configure(dir: &NodeDir, args: &UpArgs, doing: &str) -> Result<Config> {
    let path = dir.config();
    let mut config = config_file::load(Some(&path), env).doing(doing)?;
    let count = config.targets.len();
    if count == 0 {
        let why = format!(
            "{} names no targets; add them, for example targets = [\"targets/0.img\"]",
            path.display()
        );
        return Err(Failure::new(doing, why));
    }
    if let Some(wanted) = args.targets.filter(|n| usize::from(*n) != count) {
        let why =
            format!("the node has {count} targets, not {wanted}, and their number is fixed; omit --targets");
        return Err(Failure::usage(doing, why));
    }
    config.placement = args.placement.unwrap_or(config.placement);
    config.target_size = args.target_size.unwrap_or(config.target_size);
    config.listen = args.listen.clone().unwrap_or(config.listen);
    Ok(config)
}

/// Waits until the roles of an earlier supervisor that was killed have ended. These roles are
/// stopping, and they own their targets until they have ended.
fn wait_for_predecessors(dir: &NodeDir, doing: &str) -> Result<()> {
    let Some(state) = NodeState::load(dir) else { return Ok(()) };
    let config = config_file::load(dir.config().exists().then_some(&*dir.config()), env).doing(doing)?;
    let deadline = Instant::now() + config.supervise.stop_timeout.0;
    for process in state.processes.iter().filter(|p| p.role != Role::Supervisor) {
        while process.is_alive() {
            if Instant::now() > deadline {
                let (role, pid) = (process.role.as_str(), process.pid);
                let why = format!("the {role} process of an earlier start (pid {pid}) does not end; kill it");
                return Err(Failure::new(doing, why));
            }
            std::thread::sleep(PREDECESSOR_POLL);
        }
    }
    Ok(())
}

/// Collects the properties of a new node that the flags specify.
fn chosen(args: &UpArgs) -> Chosen {
    let mut values = Vec::new();
    let mut add = |key, value: Option<String>| values.extend(value.map(|value| (key, value)));
    add("placement", args.placement.map(|p| p.as_str().to_owned()));
    add("target_size", args.target_size.map(|s| s.to_string()));
    add("listen", args.listen.clone());
    Chosen { targets: args.targets, values, format: args.format }
}

/// Starts the node in a background process, waits until clients can connect, and prints the
/// endpoint.
fn detach(dir: &NodeDir, args: &UpArgs, lock: DirLock, claim: Option<&PortClaim>, doing: &str) -> Result<()> {
    if let Some(claim) = claim {
        claim.hand_down().doing(doing)?;
    }
    let log = dir.log(Role::Supervisor.as_str());
    let config = config_file::load(Some(&dir.config()), env).doing(doing)?;
    let mut command = Command::new(THIS_PROGRAM);
    command.arg0("outboard").arg("up").arg("--dir").arg(dir.path());
    command.args(["--background", &std::process::id().to_string()]);
    if let Some(placement) = args.placement {
        command.args(["--placement", placement.as_str()]);
    }
    if let Some(listen) = &args.listen {
        command.args(["--listen", listen]);
    }
    command.current_dir(dir.path()).stdin(lock.hand_down()).stdout(Stdio::piped());
    command.stderr(logging::open_file(&log, config.log.max_size).doing(doing)?);
    let mut child = command.spawn().doing(doing)?;
    // The child process now holds the only open file of the lock. If the child dies, the lock is
    // released.
    drop(command);
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out.take(MAX_ANNOUNCEMENT)).read_line(&mut line).doing(doing)?;
    }
    match serde_json::from_str(&line) {
        Ok(Announcement::Ready(ready)) => print_endpoint(&ready.endpoint.unwrap_or_default()),
        Ok(Announcement::Failed(why)) => Err(Failure::new(doing, why)),
        // Any other first line, or none, means that the supervisor ended before it could announce a
        // result.
        Ok(_) | Err(_) => {
            let why = format!(
                "the node's supervisor ended before clients could connect; the last lines of its log {} are:\n{}",
                log.display(),
                logging::tail(&log, 5)
            );
            Err(Failure::new(doing, why))
        }
    }
}

fn print_endpoint(endpoint: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{endpoint}").doing("printing the node's endpoint")
}

/// Starts the roles of the node and supervises them until a signal asks the node to stop.
fn serve(dir: &NodeDir, config: &Config, background: bool) -> std::result::Result<(), String> {
    logging::start(&config.log)?;
    rustix::thread::set_name(c"admin-up").map_err(|e| e.to_string())?;
    role::raise_descriptor_limit();
    let metrics = metrics::serve(&config.metrics.listen).map_err(|e| {
        format!("cannot serve metrics at {}: {e}; change metrics.listen", config.metrics.listen)
    })?;
    let mut supervisor = Process::new(Role::Supervisor);
    supervisor.set_pid(std::process::id());
    (supervisor.state, supervisor.metrics) = (ProcessState::Running, Some(metrics));
    let Settled { roster, is_recorded, has_file, .. } =
        roster::settle(dir, &config.targets).map_err(|e| e.to_string())?;
    if has_file && !is_recorded {
        roster.save(dir).map_err(|e| e.to_string())?;
    }
    let known = roster.targets().iter();
    let state = NodeState {
        placement: config.placement,
        endpoint: None,
        control: None,
        engine: None,
        emulated: false,
        targets: known.map(|t| MountedTarget { path: t.path().to_owned(), uuid: t.uuid() }).collect(),
        processes: vec![supervisor],
    };
    let mut roles = roles(dir, config, &roster)?;
    let serving = roles.pop().ok_or("the node has no roles")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let signals = StopSignals::catch().map_err(|e| e.to_string())?;
        let mut supervisor = Supervisor::new(dir.clone(), state, config.supervise, signals);
        supervisor.start(roles).await.map_err(|e| e.to_string())?;
        // When the last role runs, clients may store data. From then on the node must not be
        // removed.
        let making = making::finish(dir).map_err(|e| e.to_string())?;
        if let Err(e) = supervisor.start(vec![serving]).await {
            if let (Some(making), SuperviseError::RoleFailed { is_announced: true, .. }) = (making, &e) {
                making.resume(dir).map_err(|e| e.to_string())?;
            }
            return Err(e.to_string());
        }
        supervisor.start(front_roles(dir, config)?).await.map_err(|e| e.to_string())?;
        // The osd has accepted the targets, so a roster that was derived from them is correct.
        if let Err(e) = roster.record(dir, supervisor.node(), supervisor.numbered()) {
            tracing::error!("cannot record the node's roster: {e}");
        }
        if background {
            role::outlive_caller().map_err(|e| e.to_string())?;
        }
        say_ready(supervisor.state(), dir, background);
        supervisor.run().await.map_err(|e| e.to_string())
    })
}

fn say_ready(state: &NodeState, dir: &NodeDir, background: bool) {
    let endpoint = state.endpoint.clone().unwrap_or_default();
    if background {
        Announcement::Ready(Ready { endpoint: Some(endpoint), ..Ready::default() }).send();
        return;
    }
    // If standard output or standard error is closed, the node still runs.
    let _ = print_endpoint(&endpoint);
    let (placement, path) = (state.placement.as_str(), dir.path().display());
    let _ = writeln!(
        std::io::stderr(),
        "outboard: the node in {path} is up (placement {placement}); stop it with Ctrl-C or `outboard down --dir {path}`"
    );
}

/// Returns the roles that serve front ends. They start after the others.
fn front_roles(dir: &NodeDir, config: &Config) -> std::result::Result<Vec<RoleSpec>, String> {
    if !config.gateway.enabled {
        return Ok(Vec::new());
    }
    let spec = |role: Role, args: &[&str], port: u16| -> std::result::Result<RoleSpec, String> {
        let common = [role.as_str(), "--config", config_file::FILE];
        Ok(RoleSpec {
            role,
            program: PathBuf::from(THIS_PROGRAM),
            args: common.iter().chain(args).map(OsString::from).collect(),
            listen: None,
            metrics: nth_port(&config.metrics.listen, port).map_err(|e| format!("metrics.listen: {e}"))?,
            known_targets: Vec::new(),
            dir: dir.clone(),
            log: dir.log(role.as_str()),
            log_max: config.log.max_size,
        })
    };
    let holder = spec(Role::Holder, &["--socket", HOLDER_SOCKET], 3)?;
    let GatewaySection { name, credentials, .. } = &config.gateway;
    let gateway = ["--credentials", credentials, "--name", name, "--holder", HOLDER_SOCKET];
    Ok(vec![holder, spec(Role::Gateway, &gateway, 4)?])
}

/// Returns the roles of a node in the order in which they start.
fn roles(dir: &NodeDir, config: &Config, roster: &Roster) -> std::result::Result<Vec<RoleSpec>, String> {
    let targets = |args: &mut Vec<OsString>| {
        for target in &config.targets {
            args.extend(["--target".into(), target.clone().into_os_string()]);
        }
    };
    let spec = |role: Role, args: Vec<OsString>, port: u16| -> std::result::Result<RoleSpec, String> {
        let known_targets = match role {
            Role::Store | Role::Node => roster.targets().to_vec(),
            Role::Supervisor | Role::Osd | Role::Holder | Role::Gateway => Vec::new(),
        };
        Ok(RoleSpec {
            role,
            program: PathBuf::from(THIS_PROGRAM),
            args,
            listen: matches!(role, Role::Osd | Role::Node).then(|| config.listen.clone()),
            metrics: nth_port(&config.metrics.listen, port).map_err(|e| format!("metrics.listen: {e}"))?,
            known_targets,
            dir: dir.clone(),
            log: dir.log(role.as_str()),
            log_max: config.log.max_size,
        })
    };
    let common = |command: &str| -> Vec<OsString> {
        vec![command.into(), "--config".into(), config_file::FILE.into()]
    };
    match config.placement {
        Placement::Dpu => {
            let (mut store, mut osd) = (common("store"), common("osd"));
            store.extend(["--socket", STORE_SOCKET, "--debug-socket", DEBUG_SOCKET].map(OsString::from));
            targets(&mut store);
            osd.extend(["--store-socket", STORE_SOCKET].map(OsString::from));
            Ok(vec![spec(Role::Store, store, 1)?, spec(Role::Osd, osd, 2)?])
        }
        Placement::Host => {
            let mut node = common("osd");
            targets(&mut node);
            Ok(vec![spec(Role::Node, node, 1)?])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> UpArgs {
        UpArgs {
            placement: Some(Placement::Host),
            targets: Some(2),
            target_size: Some(ByteSize(64 << 20)),
            listen: None,
            detach: false,
            format: false,
            background: None,
        }
    }

    #[test]
    fn flags_of_the_first_start_are_stored_in_the_configuration() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let args = UpArgs { target_size: Some(ByteSize(16 << 20)), ..args() };
        let claim = prepare(&dir, &args, "testing").unwrap();
        assert!(claim.is_some(), "a port was chosen");
        let config = configure(&dir, &args, "testing").unwrap();
        assert_eq!((config.placement, config.target_size.0), (Placement::Host, 16 << 20));
        assert_eq!(config.targets, [PathBuf::from("targets/0.img"), PathBuf::from("targets/1.img")]);
        assert!(!config.listen.ends_with(":0"), "{}", config.listen);
        let later =
            UpArgs { targets: None, placement: Some(Placement::Dpu), target_size: None, ..args.clone() };
        let config = configure(&dir, &later, "testing").unwrap();
        assert_eq!((config.placement, config.target_size.0), (Placement::Dpu, 16 << 20));
        let error = configure(&dir, &UpArgs { targets: Some(3), ..args }, "testing").unwrap_err();
        assert!(error.to_string().contains("fixed"), "{error}");
    }

    #[test]
    fn undoing_an_interrupted_creation_keeps_targets_with_other_uuids() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let args = UpArgs { target_size: Some(ByteSize(16 << 20)), ..args() };
        drop(prepare(&dir, &args, "testing").unwrap());
        let [first, second] = [0, 1].map(|n| dir.path().join(format!("targets/{n}.img")));
        // Replace the second target by a target that the interrupted start has not created.
        std::fs::remove_file(&second).unwrap();
        let size = Some(16 << 20);
        let options = store::MkfsOptions { size, ..Default::default() };
        store::BlockStore::mkfs(&second, &options, |_, _| {}).unwrap();
        assert!(making::undo(&dir).unwrap());
        assert!(!first.exists() && second.exists() && !dir.config().exists());
        assert!(!making::undo(&dir).unwrap(), "a second undo finds nothing");
        drop(prepare(&dir, &args, "testing").unwrap());
        making::finish(&dir).unwrap();
        assert!(!making::undo(&dir).unwrap() && first.exists() && dir.config().exists());
    }

    /// Links the files `names` of the node in `from` into a new directory.
    fn with_files(from: &NodeDir, names: &[&str]) -> (tempfile::TempDir, NodeDir) {
        let root = tempfile::tempdir_in(from.path().parent().unwrap()).unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        for name in names {
            std::fs::hard_link(from.path().join(name), dir.path().join(name)).unwrap();
        }
        (root, dir)
    }

    fn uuids(dir: &NodeDir) -> Vec<uuid::Uuid> {
        let paths = [0, 1].map(|n| dir.path().join(format!("targets/{n}.img")));
        paths.iter().map(|path| store::BlockStore::uuid_at(path).unwrap()).collect()
    }

    #[test]
    fn each_state_that_an_interrupted_first_up_leaves_becomes_a_complete_node() {
        let root = tempfile::tempdir().unwrap();
        let made = NodeDir::create(&root.path().join("made")).unwrap();
        let args = UpArgs { target_size: Some(ByteSize(16 << 20)), ..args() };
        drop(prepare(&made, &args, "testing").unwrap());
        std::fs::write(made.path().join("targets/1.img.unfinished"), "half").unwrap();
        let steps = [
            &["making.json"][..],
            &["making.json", "targets/0.img"],
            &["making.json", "targets/0.img", "targets/1.img.unfinished"],
            &["making.json", "targets/0.img", "targets/1.img"],
            &["making.json", "targets/0.img", "targets/1.img", "node.json"],
            &["making.json", "targets/0.img", "targets/1.img", "node.json", "outboard.toml"],
            // The next `up` was interrupted while it removed the files.
            &["making.json", "targets/1.img", "node.json", "outboard.toml"],
            &["making.json", "node.json"],
            &[],
        ];
        for files in steps {
            let (_root, dir) = with_files(&made, files);
            drop(prepare(&dir, &args, "testing").unwrap());
            let roster = Roster::load(&dir).unwrap().unwrap();
            let known: Vec<_> = roster.targets().iter().map(|target| target.uuid()).collect();
            assert_eq!(known, uuids(&dir), "{files:?}");
            assert!(known.iter().all(|uuid| !uuids(&made).contains(uuid)), "{files:?}: all targets are new");
            assert!(dir.config().exists() && making::finish(&dir).unwrap().is_some(), "{files:?}");
            assert!(!dir.path().join("targets/1.img.unfinished").exists(), "{files:?}");
        }
        // The record has been removed: the node is complete.
        let complete = ["targets/0.img", "targets/1.img", "node.json", "outboard.toml"];
        let (_root, dir) = with_files(&made, &complete);
        drop(prepare(&dir, &args, "testing").unwrap());
        assert_eq!(uuids(&dir), uuids(&made));
        assert!(making::finish(&dir).unwrap().is_none());
    }

    #[test]
    fn a_node_whose_configuration_is_lost_gets_no_new_targets() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        std::fs::write(dir.state(), "not understood").unwrap();
        let error = prepare(&dir, &args(), "testing").unwrap_err().to_string();
        assert!(error.contains("is missing"), "{error}");
        assert!(!dir.config().exists() && !dir.path().join("targets/0.img").exists());
    }
}
