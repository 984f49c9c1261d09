//! The creation of a node by its first `up`: a node is created completely or not at all.
//!
//! Before the first `up` writes anything else, it records its plan in `run/making.json`. When the
//! targets are complete, the first `up` writes the configuration. It removes the record just before
//! it starts the role that serves clients. An `up` that finds the record therefore knows that no
//! client has ever stored anything in this node. This `up` removes the target files that the record
//! names, the configuration if it is unchanged, and the record of the processes. Then it creates
//! the node anew.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use store::{BlockStore, StoreError};
use uuid::Uuid;

use super::config::Config;
use super::dir::{DirError, NodeDir, remove_file, replace_file};
use super::targets::{self, TargetError};

/// The record of the files that a first `up` creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// Text of the configuration file.
    config: String,
    /// The target files that the first `up` creates. Target files that existed before are not
    /// listed.
    files: Vec<NewTargetFile>,
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
    /// The node's directory cannot be written.
    #[error(transparent)]
    Dir(#[from] DirError),
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
    /// Creates the targets and then the configuration file of a node whose plan has been
    /// [checked](super::plan).
    ///
    /// # Errors
    /// If a part cannot be created. Call [`undo`] to remove the parts that were created.
    pub fn make(dir: &NodeDir, config: &Config, text: &str, format: bool) -> Result<(), MakingError> {
        let is_new = |path: &&PathBuf| !dir.path().join(path).exists();
        if targets::has_run(dir)
            && let Some(path) = config.targets.iter().find(is_new)
        {
            return Err(TargetError::Missing { path: dir.path().join(path) }.into());
        }
        let new_file = |path: &PathBuf| NewTargetFile { path: path.clone(), uuid: base::entropy::uuid() };
        let making = Making {
            config: text.to_owned(),
            files: config.targets.iter().filter(is_new).map(new_file).collect(),
        };
        replace_file(&dir.making(), making.text())?;
        for (n, target) in config.targets.iter().enumerate() {
            let label = format!("creating target {} of {}", n + 1, config.targets.len());
            let path = dir.path().join(target);
            match making.files.iter().find(|file| file.path == *target) {
                Some(file) => targets::make_file(&path, config, Some(file.uuid), &label)?,
                None => targets::make_on_device(&path, format, &label)?,
            }
        }
        Ok(replace_file(&dir.config(), text)?)
    }

    /// Reverts [`finish`]: writes the record again, so that the next `up` creates the node anew.
    /// Call it only for a node that has served no client.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn resume(&self, dir: &NodeDir) -> Result<(), DirError> {
        replace_file(&dir.making(), self.text())
    }

    fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }

    /// Reads the record of the node in `dir`; `None` if the creation has ended.
    fn load(dir: &NodeDir) -> Result<Option<Making>, MakingError> {
        let path = dir.making();
        let unknown = |why: String| MakingError::Unknown { path: path.clone(), why };
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| unknown(e.to_string())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(unknown(e.to_string())),
        }
    }
}

/// Removes the files of an interrupted first `up`, and returns `true`. If the directory has no
/// record of a first `up`, does nothing and returns `false`. No process may use the targets.
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
    // Keep a configuration that a user has changed meanwhile.
    if std::fs::read_to_string(dir.config()).is_ok_and(|text| text == making.config) {
        remove_file(&dir.config())?;
    }
    remove_file(&dir.state())?;
    remove_file(&dir.making())?;
    Ok(true)
}

/// Ends the creation of the node in `dir`: from now on clients may store data. Returns the record
/// if this was the node's first start.
///
/// # Errors
/// If the operating system reports an error.
pub fn finish(dir: &NodeDir) -> Result<Option<Making>, MakingError> {
    let making = Making::load(dir)?;
    remove_file(&dir.making())?;
    Ok(making)
}
