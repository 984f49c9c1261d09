//! `outboard up`: makes a node on first use, and runs it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;

use crate::cli::NodeArgs;
use crate::failure::{Doing, Failure, Result};
use crate::node::announce::{Announcement, MAX_ANNOUNCEMENT, Ready};
use crate::node::config::{self, Config, Placement};
use crate::node::dir::{DirLock, NodeDir, STORE_SOCKET, replace_file};
use crate::node::keeper::RoleSpec;
use crate::node::role::{self, StopSignals};
use crate::node::state::{NodeState, Phase, Process, Role, Target};
use crate::node::supervise::Supervisor;
use crate::node::targets::KnownTarget;
use crate::node::units::ByteSize;
use crate::node::{locate, logging, metrics, targets};

/// How often a process that is not a child is looked at while it is waited for.
const PREDECESSOR_POLL: Duration = Duration::from_millis(20);
/// This program, even if its file was replaced since it started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Start a node: make it on first use, then run and supervise its processes
///
/// The first start makes the node's directory with its configuration (`outboard.toml`) and its targets. A role that dies
/// is started again. Prints the address that clients connect to once they can; then stays until Ctrl-C or
/// `outboard down`, or returns with --detach.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard up\n  \
    outboard up --dir /srv/node1 --targets 2 --target-size 32GiB --detach\n  \
    outboard up --placement host --listen 0.0.0.0:7400")]
pub struct UpArgs {
    /// Where requests are handled: on the DPU (emulated by a process), or on the host, the baseline
    /// [default: the configuration's; dpu at first]
    #[arg(long, value_name = "PLACEMENT")]
    pub placement: Option<Placement>,
    /// Number of targets to make at the first start; fixed from then on [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub targets: Option<u16>,
    /// Size of each target made [default: the configuration's; 8GiB at first]
    #[arg(long, value_name = "SIZE")]
    pub target_size: Option<ByteSize>,
    /// Address that clients connect to [default: the configuration's; a free port of 127.0.0.1 at first]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Return once clients can connect; the node runs on
    #[arg(long)]
    pub detach: bool,
    /// Make targets on configured devices that have none, destroying what is on them
    #[arg(long)]
    pub format: bool,
    /// The node of a caller with --detach
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub background: bool,
}

/// Starts the node.
pub fn run(args: UpArgs, node: &NodeArgs) -> Result<()> {
    if args.background {
        // A session of its own: what happens to the caller's terminal is not the node's business.
        rustix::process::setsid().doing("leaving the terminal")?;
    }
    let root = locate::root(node);
    let doing = format!("starting the node in {}", root.display());
    let dir = NodeDir::create(&root).doing(&doing)?;
    let lock = dir.lock().doing(&doing)?;
    let first = !dir.config().exists();
    let config = configure(&dir, &args, &doing)?;
    wait_for_predecessors(&dir, &config, &doing)?;
    if let Err(e) = targets::make_missing(&dir, &config, args.format) {
        if first && !config.targets.iter().any(|target| dir.path().join(target).exists()) {
            // Nothing was made: what was chosen for it (a size, say) must not bind the next attempt.
            let _ = std::fs::remove_file(dir.config());
        }
        return Err(Failure::new(doing, e));
    }
    if args.detach {
        drop(lock);
        return detach(&dir, &args, &doing);
    }
    let result = serve(dir, &config, args.background, lock);
    if let (Err(why), true) = (&result, args.background) {
        Announcement::Failed(why.clone()).send();
    }
    result.map_err(|why| Failure::new(doing, why))
}

/// The configuration that holds, written at the first start.
fn configure(dir: &NodeDir, args: &UpArgs, doing: &str) -> Result<Config> {
    let path = dir.config();
    if !path.exists() {
        let named = Config::load(None, |name| std::env::var(name).ok()).doing(doing)?.targets;
        replace_file(&path, &config::generate(&chosen(args, &named))).doing(doing)?;
    }
    let mut config = Config::load(Some(&path), |name| std::env::var(name).ok()).doing(doing)?;
    let count = config.targets.len();
    if count == 0 {
        let why =
            format!("{} names no targets; add them, like targets = [\"targets/0.img\"]", path.display());
        return Err(Failure::new(doing, why));
    }
    if let Some(wanted) = args.targets.filter(|n| usize::from(*n) != count) {
        let why = format!(
            "the node has {count} targets, not {wanted}, and their number is fixed; leave --targets out"
        );
        return Err(Failure::usage(doing, why));
    }
    config.placement = args.placement.unwrap_or(config.placement);
    config.target_size = args.target_size.unwrap_or(config.target_size);
    config.listen = args.listen.clone().unwrap_or(config.listen);
    Ok(config)
}

/// Waits for roles of a supervisor that was killed: they are stopping, and their targets are taken until then.
fn wait_for_predecessors(dir: &NodeDir, config: &Config, doing: &str) -> Result<()> {
    let Some(state) = NodeState::load(dir) else { return Ok(()) };
    let deadline = Instant::now() + config.supervise.stop_timeout.0;
    for process in state.processes.iter().filter(|p| p.role != Role::Supervisor) {
        while process.is_alive() {
            if Instant::now() > deadline {
                let (role, pid) = (process.role.as_str(), process.pid);
                let why = format!("the {role} of an earlier start (pid {pid}) does not end; kill it");
                return Err(Failure::new(doing, why));
            }
            std::thread::sleep(PREDECESSOR_POLL);
        }
    }
    Ok(())
}

/// What the first start puts into the configuration file: the flags, and the targets if the environment has `named` them,
/// so that later starts and `fsck` know them without it.
fn chosen(args: &UpArgs, named: &[PathBuf]) -> Vec<(&'static str, toml::Value)> {
    let made = (0..args.targets.unwrap_or(1)).map(|n| format!("targets/{n}.img"));
    let names: Vec<String> = match named {
        [] => made.collect(),
        named => named.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
    };
    let names = names.into_iter().map(toml::Value::String);
    let mut chosen = vec![("targets", toml::Value::Array(names.collect()))];
    let mut add = |key, value: Option<String>| chosen.extend(value.map(|v| (key, toml::Value::String(v))));
    add("placement", args.placement.map(|p| p.as_str().to_owned()));
    add("target_size", args.target_size.map(|s| s.to_string()));
    add("listen", args.listen.clone());
    chosen
}

/// Starts the node in a process of its own and waits until clients can connect.
fn detach(dir: &NodeDir, args: &UpArgs, doing: &str) -> Result<()> {
    let log = dir.log(Role::Supervisor.as_str());
    let config = Config::load(Some(&dir.config()), |name| std::env::var(name).ok()).doing(doing)?;
    let mut command = Command::new(THIS_PROGRAM);
    command.arg0("outboard").arg("up").arg("--dir").arg(dir.path()).arg("--background");
    if let Some(placement) = args.placement {
        command.args(["--placement", placement.as_str()]);
    }
    if let Some(listen) = &args.listen {
        command.args(["--listen", listen]);
    }
    command.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(logging::open_file(&log, config.log.max_size).doing(doing)?);
    let mut child = command.spawn().doing(doing)?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out.take(MAX_ANNOUNCEMENT)).read_line(&mut line).doing(doing)?;
    }
    match serde_json::from_str(&line) {
        Ok(Announcement::Ready(ready)) => print_endpoint(&ready.endpoint.unwrap_or_default()),
        Ok(Announcement::Failed(why)) => Err(Failure::new(doing, why)),
        // The first line of a supervisor is one of the two.
        Ok(Announcement::Heartbeat(_) | Announcement::Stopping) | Err(_) => {
            let why = format!(
                "its supervisor ended at once; its log {} ends:\n{}",
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

/// Runs the node until it is asked to stop.
fn serve(dir: NodeDir, config: &Config, background: bool, lock: DirLock) -> std::result::Result<(), String> {
    logging::start(&config.log)?;
    rustix::thread::set_name(c"admin-up").map_err(|e| e.to_string())?;
    role::raise_descriptor_limit();
    let metrics = metrics::serve(&config.metrics.listen).map_err(|e| {
        format!("cannot serve metrics at {}: {e}; change metrics.listen", config.metrics.listen)
    })?;
    let mut supervisor = Process::new(Role::Supervisor);
    supervisor.set_pid(std::process::id());
    (supervisor.phase, supervisor.metrics) = (Phase::Running, Some(metrics));
    let state = NodeState {
        placement: config.placement,
        endpoint: None,
        engine: None,
        emulated: false,
        // Those of the last run, until the roles say which they have mounted.
        targets: NodeState::load(&dir).map(|last| last.targets).unwrap_or_default(),
        processes: vec![supervisor],
    };
    let roles = roles(&dir, config, &state.targets)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let result = runtime.block_on(async {
        let signals = StopSignals::catch().map_err(|e| e.to_string())?;
        let mut supervisor = Supervisor::new(dir.clone(), state, config.supervise, signals);
        supervisor.start(roles).await.map_err(|e| e.to_string())?;
        say_ready(supervisor.state(), &dir, background);
        supervisor.run().await.map_err(|e| e.to_string())
    });
    drop(lock);
    result
}

fn say_ready(state: &NodeState, dir: &NodeDir, background: bool) {
    let endpoint = state.endpoint.clone().unwrap_or_default();
    if background {
        Announcement::Ready(Ready { endpoint: Some(endpoint), ..Ready::default() }).send();
        return;
    }
    // Nobody may be reading either; the node runs all the same.
    let _ = print_endpoint(&endpoint);
    let (placement, path) = (state.placement.as_str(), dir.path().display());
    let _ = writeln!(
        std::io::stderr(),
        "outboard: the node in {path} is up (placement {placement}); Ctrl-C or `outboard down --dir {path}` stops it"
    );
}

/// The roles of a node, in the order in which they start. `last_run` has the targets of the node's last run.
fn roles(dir: &NodeDir, config: &Config, last_run: &[Target]) -> std::result::Result<Vec<RoleSpec>, String> {
    let targets = |args: &mut Vec<OsString>| {
        for target in &config.targets {
            args.extend(["--target".into(), target.clone().into_os_string()]);
        }
    };
    let spec = |role: Role, args: Vec<OsString>, port: u16| -> std::result::Result<RoleSpec, String> {
        let known_targets = match role {
            Role::Store | Role::Node => last_run.iter().filter_map(KnownTarget::of).collect(),
            Role::Supervisor | Role::Osd => Vec::new(),
        };
        Ok(RoleSpec {
            role,
            program: PathBuf::from(THIS_PROGRAM),
            args,
            listen: (role != Role::Store).then(|| config.listen.clone()),
            metrics: nth_port(&config.metrics.listen, port)?,
            known_targets,
            dir: dir.path().to_owned(),
            log: dir.log(role.as_str()),
            log_max: config.log.max_size,
        })
    };
    let common =
        |command: &str| -> Vec<OsString> { vec![command.into(), "--config".into(), config::FILE.into()] };
    match config.placement {
        Placement::Dpu => {
            let (mut store, mut osd) = (common("store"), common("osd"));
            store.extend(["--socket", STORE_SOCKET].map(OsString::from));
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

/// The address `n` ports after `base`; port 0 stays.
fn nth_port(base: &str, n: u16) -> std::result::Result<String, String> {
    let mut address: SocketAddr = base
        .parse()
        .map_err(|e| format!("metrics.listen {base:?} is no address ({e}); write it like 127.0.0.1:9400"))?;
    if address.port() != 0 {
        let port = address
            .port()
            .checked_add(n)
            .ok_or("metrics.listen: the port is too high for the roles' ports after it")?;
        address.set_port(port);
    }
    Ok(address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_ports_follow_one_another() {
        assert_eq!(nth_port("127.0.0.1:0", 2).unwrap(), "127.0.0.1:0");
        assert_eq!(nth_port("[::1]:9400", 2).unwrap(), "[::1]:9402");
        assert!(nth_port("localhost", 1).is_err());
        assert!(nth_port("127.0.0.1:65535", 1).is_err());
    }

    #[test]
    fn the_first_starts_flags_are_in_the_file() {
        let args = UpArgs {
            placement: Some(Placement::Host),
            targets: Some(2),
            target_size: Some(ByteSize(64 << 20)),
            listen: None,
            detach: false,
            format: false,
            background: false,
        };
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let config = configure(&dir, &args, "testing").unwrap();
        assert_eq!((config.placement, config.target_size.0), (Placement::Host, 64 << 20));
        assert_eq!(config.targets, [PathBuf::from("targets/0.img"), PathBuf::from("targets/1.img")]);
        let later =
            UpArgs { targets: None, placement: Some(Placement::Dpu), target_size: None, ..args.clone() };
        let config = configure(&dir, &later, "testing").unwrap();
        assert_eq!((config.placement, config.target_size.0), (Placement::Dpu, 64 << 20));
        let error = configure(&dir, &UpArgs { targets: Some(3), ..args }, "testing").unwrap_err();
        assert!(error.to_string().contains("fixed"), "{error}");
    }
}
