//! The creation of a node by its first `up`: a node is created completely or not at all.
//!
//! The first `up` changes the node's directory in this order. Each step is durable before the next
//! step begins ([`durable`](super::durable)):
//!
//! 1. `up` creates the directory and its subdirectories ([`NodeDir::create`]).
//! 2. `up` writes its plan to the record `making.json`.
//! 3. `up` creates the node's keys ([`node_keys`](super::node_keys)).
//! 4. `up` creates the target files, each under a temporary name and then under its own name.
//! 5. `up` writes the [roster](super::roster).
//! 6. `up` writes the configuration, unless the operator has written it.
//! 7. `up` starts the roles that serve no clients, and then removes the record.
//! 8. `up` starts the role that serves clients.
//!
//! An `up` that finds the record therefore knows that no client has ever stored anything in this
//! node. This `up` removes the keys and the target files that the record names, the configuration if it is
//! unchanged, the roster, and the record of the processes. It removes the record last, and then
//! creates the node anew. After an interruption, the next `up` finds one of these states:
//!
//! | interrupted | state | the next `up` |
//! |---|---|---|
//! | before step 2 is complete | directories, or only the operator's configuration | begins with step 1 |
//! | from step 2 to step 7 | the record exists | removes the files, then begins with step 1 |
//! | after the record was removed | roster, configuration and all targets exist | starts the node |
//!
//! If the operator has written or changed the configuration, the record remains after the files
//! have been removed, and names no files. It shows the next `up` that the node has never run.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use store::{BlockStore, StoreError};
use uuid::Uuid;

use super::config::Config;
use super::config_file;
use super::dir::{DirError, NodeDir};
use super::durable::{remove_file, replace_file};
use super::node_keys::{NodeKeys, NodeKeysError};
use super::plan::{self, PlanError};
use super::roster::{self, KnownTarget, Roster, RosterError};
use super::targets::{self, TargetError};

/// The record of the files that a first `up` creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// Text of the configuration file; `None` if the operator has written the file.
    config: Option<String>,
    /// The target files that the first `up` creates. Target files that existed before are not
    /// listed.
    files: Vec<NewTargetFile>,
    /// Whether the first `up` creates the node's keys.
    #[serde(default)]
    keys: bool,
}

/// A target file that the first `up` creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NewTargetFile {
    /// Path relative to the node's directory.
    path: PathBuf,
    /// UUID of the target in the file. It distinguishes the file from a file that another program
    /// has created at this path.
    uuid: Uuid,
}

/// Reason why the creation of a node failed.
#[derive(Debug, thiserror::Error)]
pub enum MakingError {
    /// A target cannot be created, or cannot be removed again.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// There is too little space for the targets.
    #[error(transparent)]
    Space(#[from] PlanError),
    /// The node has been created before, and its targets do not match.
    #[error(transparent)]
    Roster(#[from] RosterError),
    /// The node's directory cannot be written.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The node's keys cannot be created.
    #[error(transparent)]
    Keys(#[from] NodeKeysError),
    /// The record cannot be read, or is invalid.
    #[error(
        "the record {} of an interrupted `outboard up` cannot be read: {why}; if the node has never run, remove its directory",
        path.display()
    )]
    Unknown {
        /// Path of the record.
        path: PathBuf,
        /// Reason.
        why: String,
    },
}

impl Making {
    /// Creates the targets, the roster, and the configuration file with the text `text`. `text` is
    /// `None` if the operator has written the file. If records show that the node has run and only
    /// its configuration is lost, creates no targets.
    ///
    /// # Errors
    /// If a part cannot be created. Call [`undo`] to remove the parts that were created.
    pub fn make(dir: &NodeDir, config: &Config, text: Option<&str>, format: bool) -> Result<(), MakingError> {
        let is_new = |path: &&PathBuf| !dir.path().join(path).exists();
        if roster::is_recorded(dir) {
            if let Some(path) = config.targets.iter().find(is_new) {
                return Err(RosterError::Missing { path: dir.path().join(path) }.into());
            }
            roster::settle(dir, &config.targets)?;
            return Ok(text.map_or(Ok(()), |text| replace_file(&dir.config(), text))?);
        }
        // Check everything before the first change.
        let new: Vec<PathBuf> =
            config.targets.iter().filter(is_new).map(|path| dir.path().join(path)).collect();
        plan::check_space(&new, config.target_size.0)?;
        for path in config.targets.iter().map(|path| dir.path().join(path)).filter(|path| path.exists()) {
            if !targets::is_to_be_formatted(&path, format)? {
                uuid_at(path)?;
            }
        }
        let new_file = |path: &PathBuf| NewTargetFile { path: path.clone(), uuid: base::entropy::uuid() };
        let making = Making {
            config: text.map(str::to_owned),
            files: config.targets.iter().filter(is_new).map(new_file).collect(),
            keys: !NodeKeys::exist(dir.path()),
        };
        making.save(dir)?;
        NodeKeys::settle(dir.path())?;
        let mut known = Vec::new();
        for (n, target) in config.targets.iter().enumerate() {
            let label = format!("creating target {} of {}", n + 1, config.targets.len());
            let path = dir.path().join(target);
            match making.files.iter().find(|file| file.path == *target) {
                Some(file) => targets::make_file(&path, config, Some(file.uuid), &label)?,
                None => targets::make_on_device(&path, format, &label)?,
            }
            known.push(KnownTarget::new(target.clone(), uuid_at(path)?));
        }
        Roster::new(known).save(dir)?;
        if let Some(text) = text {
            replace_file(&dir.config(), text)?;
        }
        Ok(())
    }

    /// Reverts [`finish`]: writes the record again, so that the next `up` creates the node anew.
    /// Call it only for a node that has served no client.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn resume(&self, dir: &NodeDir) -> Result<(), DirError> {
        self.save(dir)
    }

    fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let text = serde_json::to_string_pretty(self).expect("plain data has a JSON form");
        replace_file(&dir.making(), &text)
    }

    /// Reads the record of the node in `dir`, also at the path that older versions use; `None` if
    /// the creation has ended.
    fn load(dir: &NodeDir) -> Result<Option<Making>, MakingError> {
        for path in [dir.making(), dir.old_making()] {
            let unknown = |why: String| MakingError::Unknown { path: path.clone(), why };
            match std::fs::read(&path) {
                Ok(text) => {
                    return serde_json::from_slice(&text).map(Some).map_err(|e| unknown(e.to_string()));
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(unknown(e.to_string())),
            }
        }
        Ok(None)
    }

    /// Removes the record at both paths.
    fn remove(dir: &NodeDir) -> Result<(), DirError> {
        remove_file(&dir.old_making())?;
        remove_file(&dir.making())
    }
}

/// Returns whether the node in `dir`, whose operator has written the configuration `config`, has
/// never run, so that `up` may create its targets. A node has run if a record names its targets, if
/// a first `up` has written the configuration, if a role has a log, or if only some of its targets
/// are missing. A record of an interrupted first `up` shows that the node has never run.
///
/// # Errors
/// If the record or the configuration cannot be read.
pub fn has_never_run(dir: &NodeDir, config: &Config) -> Result<bool, MakingError> {
    if roster::is_recorded(dir) {
        return Ok(false);
    }
    if Making::load(dir)?.is_some() {
        return Ok(true);
    }
    let path = dir.config();
    let text =
        std::fs::read_to_string(&path).map_err(|e| MakingError::Unknown { path, why: e.to_string() })?;
    let paths = || config.targets.iter().map(|path| dir.path().join(path));
    let some_are_missing =
        paths().any(|path| !path.exists()) && paths().any(|path| BlockStore::uuid_at(&path).is_ok());
    Ok(!config_file::is_generated(&text) && !dir.has_logs() && !some_are_missing)
}

fn uuid_at(path: PathBuf) -> Result<Uuid, TargetError> {
    BlockStore::uuid_at(&path).map_err(|source| TargetError::Store { path, source })
}

/// Removes the files of an interrupted first `up`, and returns `true`. If the directory has no
/// files of a first `up`, does nothing and returns `false`. No process may use the targets.
///
/// # Errors
/// If a file cannot be removed.
pub fn undo(dir: &NodeDir) -> Result<bool, MakingError> {
    let Some(making) = Making::load(dir)? else { return Ok(false) };
    for file in &making.files {
        let path = dir.path().join(&file.path);
        remove_file(&targets::unfinished(&path))?;
        match BlockStore::uuid_at(&path) {
            Ok(uuid) if uuid == file.uuid => remove_file(&path)?,
            // The file does not exist, or another program created it.
            Ok(_) | Err(StoreError::NotATarget(_)) => {}
            Err(_) if !path.exists() => {}
            Err(source) => return Err(TargetError::Store { path, source }.into()),
        }
    }
    // Keep a configuration that the operator has written or changed.
    let text = std::fs::read_to_string(dir.config()).ok();
    let has_own_config = text.is_some() && text == making.config;
    if has_own_config {
        remove_file(&dir.config())?;
    }
    remove_file(&dir.roster())?;
    remove_file(&dir.state())?;
    if making.keys {
        NodeKeys::remove(dir.path())?;
    }
    let nothing = Making { config: None, files: Vec::new(), keys: false };
    if dir.config().exists() {
        // Keep the record, because it shows that the node has never run.
        nothing.save(dir)?;
        remove_file(&dir.old_making())?;
    } else {
        Making::remove(dir)?;
    }
    Ok(has_own_config || !making.files.is_empty())
}

/// Ends the creation of the node in `dir`: from now on clients may store data. Returns the record
/// if this was the node's first start.
///
/// # Errors
/// If the operating system reports an error.
pub fn finish(dir: &NodeDir) -> Result<Option<Making>, MakingError> {
    let making = Making::load(dir)?;
    Making::remove(dir)?;
    Ok(making)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::durable::steps;

    fn config(text: &str) -> Config {
        config_file::of_text(text, Path::new("outboard.toml"), |_| None).unwrap()
    }

    const TEXT: &str = "targets = [\"targets/0.img\", \"targets/1.img\"]\ntarget_size = \"16MiB\"\n";

    #[test]
    fn a_power_cut_during_the_first_up_leaves_a_record_or_a_complete_node_or_no_node() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        let root = base.join("new/node");
        let steps = steps::record(|| {
            let dir = NodeDir::create(&root).unwrap();
            Making::make(&dir, &config(TEXT), Some(TEXT), false).unwrap();
            finish(&dir).unwrap();
        });
        let targets = ["targets/0.img", "targets/1.img"];
        let parts = |state: &BTreeSet<PathBuf>| {
            let has = |path: &&&str| state.contains(&root.join(path));
            ["node.json", "outboard.toml"].iter().chain(&targets).filter(has).count()
        };
        let states = steps::states(&steps, &[&base]);
        for state in &states {
            let has_record = state.contains(&root.join("making.json"));
            let files = |name: &str| state.iter().filter(|path| path.ends_with(name)).count();
            let unfinished = files("0.img.unfinished") + files("1.img.unfinished");
            assert!(has_record || (matches!(parts(state), 0 | 4) && unfinished == 0), "{state:?}\n{steps:?}");
        }
        let last = &states[states.len() - 1];
        assert_eq!(parts(last), 4, "the complete node is durable: {last:?}");
        assert!(!last.contains(&root.join("making.json")));
    }

    #[test]
    fn a_power_cut_during_the_removal_leaves_the_record_until_the_other_files_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let dir = NodeDir::create(&root).unwrap();
        Making::make(&dir, &config(TEXT), Some(TEXT), false).unwrap();
        let files = ["targets/0.img", "targets/1.img", "node.json", "outboard.toml", "making.json"];
        let mut initial: Vec<PathBuf> = files.iter().map(|file| root.join(file)).collect();
        initial.extend([root.clone(), root.join("targets")]);
        let initial: Vec<&Path> = initial.iter().map(|path| &**path).collect();
        let steps = steps::record(|| assert!(undo(&dir).unwrap()));
        let states = steps::states(&steps, &initial);
        for state in &states {
            let left = files.iter().filter(|file| state.contains(&root.join(file))).count();
            assert!(left == 0 || state.contains(&root.join("making.json")), "{state:?}\n{steps:?}");
        }
        let left = std::fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect::<BTreeSet<_>>();
        assert_eq!(left, ["log", "run", "targets"].map(Into::into).into());
    }

    #[test]
    fn a_record_of_an_older_version_is_recognised_at_its_old_path() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        Making::make(&dir, &config(TEXT), Some(TEXT), false).unwrap();
        std::fs::remove_file(dir.roster()).unwrap();
        std::fs::rename(dir.making(), dir.old_making()).unwrap();
        assert!(NodeDir::is_begun(root.path()));
        assert!(undo(&dir).unwrap());
        assert!(!dir.config().exists() && !dir.old_making().exists());
        assert!(!dir.path().join("targets/0.img").exists());
    }

    #[test]
    fn only_a_node_that_shows_no_trace_of_a_run_has_never_run() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let config = config(TEXT);
        std::fs::write(dir.config(), TEXT).unwrap();
        assert!(has_never_run(&dir, &config).unwrap());
        // A role has been started.
        std::fs::write(dir.log("store"), "").unwrap();
        assert!(!has_never_run(&dir, &config).unwrap());
        std::fs::remove_file(dir.log("store")).unwrap();
        // A first `up` has written the configuration.
        let generated =
            config_file::generate(&[("targets", toml::Value::Array(vec!["targets/0.img".into()]))]);
        std::fs::write(dir.config(), generated).unwrap();
        assert!(!has_never_run(&dir, &config).unwrap());
        std::fs::write(dir.config(), TEXT).unwrap();
        // The first `up` was interrupted. Afterwards the record still shows that nothing has run.
        Making::make(&dir, &config, None, false).unwrap();
        std::fs::write(dir.log("store"), "").unwrap();
        assert!(undo(&dir).unwrap() && !dir.roster().exists());
        assert!(!undo(&dir).unwrap(), "a second undo finds nothing");
        assert!(has_never_run(&dir, &config).unwrap());
        Making::make(&dir, &config, None, false).unwrap();
        finish(&dir).unwrap();
        assert!(!has_never_run(&dir, &config).unwrap());
        // Without the roster, the existing target shows that the node was created.
        std::fs::remove_file(dir.roster()).unwrap();
        std::fs::remove_file(dir.log("store")).unwrap();
        std::fs::remove_file(dir.path().join("targets/1.img")).unwrap();
        assert!(!has_never_run(&dir, &config).unwrap());
    }
}
