//! Plans a first `up` and checks its preconditions. This module changes no files.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use store::{BlockStore, MkfsOptions, StoreError};

use super::config::Config;
use super::config_file::{self, ConfigError};
use super::cpus::ThreadCount;
use super::port::{self, PortClaim};
use super::units::ByteSize;

/// Space that a node needs besides its targets, in bytes: logs, state, and the file system's
/// metadata.
const BESIDE_TARGETS: u64 = 16 << 20;

/// The checked plan of a node that can be created.
#[derive(Debug)]
pub struct Plan {
    /// Configuration of the node.
    pub config: Config,
    /// Text of the node's configuration file.
    pub text: String,
    /// Claim on the node's port, if this plan chose the port.
    pub claim: Option<PortClaim>,
}

/// Reason why a node cannot be created as requested.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// `--targets` contradicts `OUTBOARD_TARGETS`.
    #[error("OUTBOARD_TARGETS names {named} targets, but --targets requests {asked}; leave --targets out")]
    TargetCount {
        /// Number of targets that the environment variable names.
        named: usize,
        /// Number of targets that the flag requests.
        asked: usize,
    },
    /// The node cannot listen at an address.
    #[error("cannot listen at {listen} ({what}): {why}; choose another address with {remedy}")]
    Listen {
        /// The address.
        listen: String,
        /// Purpose of the address: `clients` or `metrics`.
        what: &'static str,
        /// Reason.
        why: String,
        /// How to change the address.
        remedy: &'static str,
    },
    /// A target cannot be created or used.
    #[error("target {}: {why}", path.display())]
    Target {
        /// Path of the target's file or device.
        path: PathBuf,
        /// The reason, and what to do.
        why: String,
    },
    /// The file system has too little space for the targets.
    #[error(
        "the targets need {} at {}, where only {} are free; choose a smaller --target-size, fewer --targets, or another --dir",
        ByteSize(*needed), path.display(), ByteSize(*free)
    )]
    Space {
        /// A path on the file system.
        path: PathBuf,
        /// Number of bytes that the targets need on the file system.
        needed: u64,
        /// Number of free bytes on the file system.
        free: u64,
    },
}

/// The properties of a new node that the flags of `up` specify.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// Number of targets, if the flag was given.
    pub targets: Option<u16>,
    /// Configuration keys with the values from flags.
    pub values: Vec<(&'static str, String)>,
    /// Whether devices may be formatted as targets.
    pub format: bool,
}

impl Plan {
    /// Plans the node in `root`, which need not exist.
    ///
    /// # Errors
    /// If the node cannot be created, or could not start.
    pub fn new(
        root: &Path,
        chosen: &Chosen,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Plan, PlanError> {
        let from_env = config_file::load(None, &env)?;
        let names: Vec<String> = match &from_env.targets[..] {
            [] => (0..chosen.targets.unwrap_or(1)).map(|n| format!("targets/{n}.img")).collect(),
            named => named.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
        };
        if let Some(asked) = chosen.targets.map(usize::from).filter(|n| *n != names.len()) {
            return Err(PlanError::TargetCount { named: names.len(), asked });
        }
        let text_of = |value: &String| toml::Value::String(value.clone());
        let mut values = vec![("targets", toml::Value::Array(names.iter().map(text_of).collect()))];
        values.extend(chosen.values.iter().map(|(key, value)| (*key, text_of(value))));
        let mut claim = None;
        if !values.iter().any(|(key, _)| *key == "listen") {
            let listen = match config_file::is_set("listen", "", &env) {
                true => from_env.listen,
                false => {
                    let (address, claimed) = port::choose(from_env.osd.shards())
                        .map_err(|e| not_listening("127.0.0.1", "clients", &e, "--listen"))?;
                    claim = Some(claimed);
                    address.to_string()
                }
            };
            values.push(("listen", toml::Value::String(listen)));
        }
        let text = config_file::generate(&values);
        // Flags override the environment, and the environment overrides the file.
        let over = |name: &str| {
            let flag =
                chosen.values.iter().find(|(key, _)| config_file::env_of(key).as_deref() == Some(name));
            flag.map(|(_, value)| value.clone()).or_else(|| env(name))
        };
        let config = config_file::of_text(&text, &root.join(config_file::FILE), over)?;
        let plan = Plan { config, text, claim };
        plan.check_addresses()?;
        plan.check_targets(root, chosen.format)?;
        Ok(plan)
    }

    /// Listens at all addresses at the same time, to check that no two of them conflict.
    fn check_addresses(&self) -> Result<(), PlanError> {
        let listen = &self.config.listen;
        let check = |address: &str, what, remedy| {
            port::check(address).map_err(|e| not_listening(address, what, &e, remedy))
        };
        let mut listening = vec![check(listen, "clients", "--listen")?];
        // With "auto", the osd has no more shards than ports are free.
        let osd = &self.config.osd;
        let shards = if osd.shards == ThreadCount::Auto { 1 } else { osd.shards() };
        for shard in 1..shards {
            // A name in place of an IP address is checked when the osd starts.
            if let Ok(address) = nth_port(listen, shard) {
                listening.push(check(
                    &address,
                    "clients of a further shard",
                    "--listen, or fewer osd.shards",
                )?);
            }
        }
        let metrics = &self.config.metrics.listen;
        for process in 0..=2 {
            let address = nth_port(metrics, process).map_err(|why| PlanError::Listen {
                listen: metrics.clone(),
                what: "metrics",
                why,
                remedy: "metrics.listen",
            })?;
            listening.push(check(&address, "metrics", "metrics.listen")?);
        }
        Ok(())
    }

    fn check_targets(&self, root: &Path, format: bool) -> Result<(), PlanError> {
        let mut to_make = Vec::new();
        for target in &self.config.targets {
            let path = root.join(target);
            let refused = |why: String| PlanError::Target { path: path.clone(), why };
            match std::fs::metadata(&path) {
                Ok(there) => match BlockStore::uuid_at(&path) {
                    Ok(_) => {}
                    Err(StoreError::NotATarget(_)) if there.file_type().is_block_device() && format => {
                        BlockStore::check_device(&path, &MkfsOptions::default())
                            .map_err(|e| refused(e.to_string()))?;
                    }
                    Err(e) => return Err(refused(e.to_string())),
                },
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    BlockStore::check_size(self.config.target_size.0, &MkfsOptions::default())
                        .map_err(|e| refused(format!("{e}; choose another --target-size")))?;
                    // Directories inside the node's directory are created together with it.
                    if !path.starts_with(root) {
                        let why = |e| {
                            format!(
                                "its directory cannot be written ({e}); create the directory, or choose another one"
                            )
                        };
                        writable_parent(&path).map_err(|e| refused(why(e)))?;
                    }
                    to_make.push(path);
                }
                Err(e) => return Err(refused(format!("it cannot be inspected: {e}; check the path"))),
            }
        }
        check_space(&to_make, self.config.target_size.0)
    }
}

fn not_listening(listen: &str, what: &'static str, e: &std::io::Error, remedy: &'static str) -> PlanError {
    PlanError::Listen { listen: listen.to_owned(), what, why: e.to_string(), remedy }
}

/// Checks that files of `size` bytes can be written at these paths.
///
/// # Errors
/// [`PlanError::Space`] if a file system has too little free space.
pub fn check_space(files: &[PathBuf], size: u64) -> Result<(), PlanError> {
    let mut needed: BTreeMap<u64, (PathBuf, u64)> = BTreeMap::new();
    for file in files {
        let there = file.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("."));
        let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
        let Ok(metadata) = std::fs::metadata(there) else { continue };
        let (_, bytes) = needed.entry(metadata.dev()).or_insert((there.to_owned(), BESIDE_TARGETS));
        *bytes = bytes.saturating_add(size);
    }
    for (path, needed) in needed.into_values() {
        // If a file system does not report its free space, only writing shows whether the space
        // suffices.
        let Ok(fs) = rustix::fs::statvfs(&path) else { continue };
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        if needed > free {
            return Err(PlanError::Space { path, needed, free });
        }
    }
    Ok(())
}

/// Returns the address `base` with its port increased by `n`. Port 0 stays 0.
///
/// # Errors
/// If `base` is not an address, or if fewer than `n` ports follow it.
pub fn nth_port(base: &str, n: u16) -> Result<String, String> {
    let mut address: SocketAddr = base
        .parse()
        .map_err(|e| format!("{base:?} is not an address ({e}); write it like 127.0.0.1:9400"))?;
    if address.port() != 0 {
        let port = address.port().checked_add(n);
        address.set_port(port.ok_or("the port is too high, because the roles use the ports after it")?);
    }
    Ok(address.to_string())
}

/// Checks that the directory in which a file is to be created is writable.
///
/// # Errors
/// If the operating system reports an error.
fn writable_parent(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(rustix::fs::access(parent, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_gets_the_next_metrics_port() {
        assert_eq!(nth_port("127.0.0.1:0", 2).unwrap(), "127.0.0.1:0");
        assert_eq!(nth_port("[::1]:9400", 2).unwrap(), "[::1]:9402");
        assert!(nth_port("localhost", 1).is_err());
        assert!(nth_port("127.0.0.1:65535", 1).is_err());
    }

    #[test]
    fn a_port_in_use_is_refused_only_for_a_fixed_number_of_shards() {
        let (first, _claim) = port::choose(2).unwrap();
        let second = SocketAddr::new(first.ip(), first.port() + 1);
        let _listener = std::net::TcpListener::bind(second).unwrap();
        let values = vec![("listen", first.to_string())];
        let chosen = Chosen { targets: None, values, format: false };
        let dir = tempfile::tempdir().unwrap();
        let plan = |shards: &'static str| {
            let env = |name: &str| match name {
                "OUTBOARD_OSD_SHARDS" => Some(shards.to_owned()),
                // More than one CPU.
                "OUTBOARD_OSD_CPUS" => Some("0-3".to_owned()),
                "OUTBOARD_TARGET_SIZE" => Some("32MiB".to_owned()),
                _ => None,
            };
            Plan::new(dir.path(), &chosen, env)
        };
        assert!(plan("auto").is_ok());
        let refused = plan("2").err().unwrap().to_string();
        assert!(refused.contains(&second.to_string()) && refused.contains("osd.shards"), "{refused}");
    }

    #[test]
    fn a_metrics_port_that_equals_the_clients_port_is_refused() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // With this base, the metrics port of the last role equals the clients' port.
        let base = std::net::SocketAddr::new(free.ip(), free.port() - 2).to_string();
        let metrics = [("OUTBOARD_METRICS_LISTEN", &*base)];
        let error = plan(&with("listen", &free.to_string()), &metrics).unwrap_err().to_string();
        assert!(error.contains("(metrics)") && error.contains("metrics.listen"), "{error}");
    }

    fn plan(chosen: &Chosen, env: &[(&str, &str)]) -> Result<Plan, PlanError> {
        let root = tempfile::tempdir().unwrap();
        let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let planned = Plan::new(&root.path().join("node"), chosen, env);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing is written");
        planned
    }

    fn with(key: &'static str, value: &str) -> Chosen {
        let size = ("target_size", "32MiB".to_owned());
        let mut values = vec![size, (key, value.to_owned())];
        values.dedup_by(|later, first| {
            later.0 == first.0 && {
                first.1.clone_from(&later.1);
                true
            }
        });
        Chosen { targets: Some(2), values, format: false }
    }

    #[test]
    fn a_planned_configuration_file_contains_the_flags_and_the_chosen_port() {
        let made = plan(&with("placement", "host"), &[("OUTBOARD_PLACEMENT", "dpu")]).unwrap();
        assert_eq!(made.config.placement, wire::Placement::Host, "flags override the environment");
        assert_eq!(made.config.targets, ["targets/0.img", "targets/1.img"].map(PathBuf::from));
        assert!(made.claim.is_some() && !made.config.listen.ends_with(":0"), "{}", made.config.listen);
        assert!(made.text.contains(&format!("listen = \"{}\"", made.config.listen)), "{}", made.text);
        let made = plan(&with("listen", "127.0.0.1:0"), &[]).unwrap();
        assert!(made.claim.is_none() && made.config.listen == "127.0.0.1:0");
        let made = plan(&with("placement", "host"), &[("OUTBOARD_LISTEN", "127.0.0.1:0")]).unwrap();
        assert!(made.text.contains("\nlisten = \"127.0.0.1:0\""), "{}", made.text);
    }

    #[test]
    fn configurations_that_cannot_work_are_refused_and_the_error_states_a_remedy() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = taken.local_addr().unwrap().to_string();
        let elsewhere = [("OUTBOARD_TARGETS", "/nonexistent/0.img:/nonexistent/1.img")];
        let metrics = [("OUTBOARD_METRICS_LISTEN", &*taken)];
        let three = [("OUTBOARD_TARGETS", "a:b:c")];
        type Env<'a> = &'a [(&'a str, &'a str)];
        let cases: [(Chosen, Env<'_>, &str); 9] = [
            (with("listen", &taken), &[], &taken),
            (with("listen", "nonsense"), &[], "--listen"),
            (with("target_size", "9999GiB"), &[], "are free"),
            (with("target_size", "1MiB"), &[], "--target-size"),
            (with("placement", "dpu"), &elsewhere, "its directory cannot be written"),
            (with("placement", "dpu"), &metrics, "metrics.listen"),
            (with("placement", "dpu"), &three, "leave --targets out"),
            (with("placement", "dpu"), &[("OUTBOARD_LOG", "=,=")], "log.level"),
            (with("placement", "dpu"), &[("OUTBOARD_TARGETS", "/dev/null:/dev/zero")], "/dev/null"),
        ];
        for (chosen, env, said) in cases {
            let error = plan(&chosen, env).unwrap_err().to_string();
            assert!(error.contains(said), "{chosen:?} {env:?}: {error}");
        }
    }
}
