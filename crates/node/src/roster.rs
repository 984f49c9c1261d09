//! The node's roster: its UUID and the targets that belong to it, in the file `node.json`.
//!
//! `node.json` is beside the configuration, and not in `run/`, because `run/` may be deleted while
//! the node is stopped. The first `up` writes the file before a client can store data
//! ([`making`](super::making)). Later `up` commands create no targets. They use only targets whose
//! UUIDs the file names, so an empty or foreign drive never replaces a drive that is not mounted.
//!
//! The UUID identifies a target, and the path is only the place where the target was last. If
//! targets have exchanged their paths, the node therefore recognises them, and `up` records the new
//! paths.
//!
//! Older versions of Outboard have no `node.json`. The first start with this version derives the
//! roster from the superblocks of the targets, and from `run/state.json` for targets that cannot
//! be read. The supervisor writes the file only after the osd has accepted the targets, because a
//! foreign target must not become part of the roster.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use store::{BlockStore, StoreError};
use uuid::Uuid;

use super::dir::{DirError, NodeDir, io_error};
use super::durable::replace_file;
use super::state::{MountedTarget, NodeState};

/// Format version of the file.
const FORMAT: u32 = 1;

/// Reason why the roster of a node, or its targets, cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum RosterError {
    /// The file cannot be read, or is invalid.
    #[error(
        "the node's roster {} cannot be read: {why}; restore the file from a backup, or, if all targets are present, remove it: the next `outboard up` rebuilds it from the targets",
        path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        why: String,
    },
    /// A later version of Outboard has written the file.
    #[error(
        "the node's roster {} has format {found}, but this program reads format {FORMAT}; use the version of Outboard that wrote the file",
        path.display()
    )]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Format version of the file.
        found: u32,
    },
    /// The configuration has more or fewer targets than the node.
    #[error(
        "the configuration names {configured} targets, but the node's roster {} names {recorded}; restore the list `targets` in outboard.toml, because the number of targets is fixed",
        path.display()
    )]
    Count {
        /// Path of the file.
        path: PathBuf,
        /// Number of targets in the file.
        recorded: usize,
        /// Number of targets in the configuration.
        configured: usize,
    },
    /// Two paths contain targets with the same UUID.
    #[error(
        "{} and {} contain the same target {uuid}; one of them is a copy: remove the copy, and restore the node's other target",
        paths[0].display(), paths[1].display()
    )]
    Twice {
        /// The paths.
        paths: [PathBuf; 2],
        /// UUID of the target.
        uuid: Uuid,
    },
    /// The node has run with a target that is missing.
    #[error(
        "target {} is missing, but the node has run with it; restore the file, mount its drive, or create a new node in another directory",
        path.display()
    )]
    Missing {
        /// Path of the target.
        path: PathBuf,
    },
    /// The target at a path does not belong to the node.
    #[error(
        "{} contains target {found}, which does not belong to this node; the node's target is {expected}: mount its drive, or correct the path in outboard.toml",
        path.display()
    )]
    Foreign {
        /// Path of the target.
        path: PathBuf,
        /// UUID of the target at the path.
        found: Uuid,
        /// UUID of the node's target.
        expected: Uuid,
    },
    /// The node was created, but no record names the target that belongs to this path.
    #[error(
        "target {} cannot be used ({why}), and its UUID is unknown, because {} is missing; restore the target or mount its drive, or restore node.json from a backup; if this node has never run, remove its directory",
        path.display(), file.display()
    )]
    Unrecorded {
        /// Path of the target.
        path: PathBuf,
        /// Why the target cannot be used.
        why: String,
        /// Path of the missing file.
        file: PathBuf,
    },
    /// The path of a target contains another target of the node.
    #[error(
        "{} contains target {found}, which is another target of this node; restart the node, which records where its targets are: outboard down && outboard up",
        path.display()
    )]
    Occupied {
        /// The path.
        path: PathBuf,
        /// UUID of the target at the path.
        found: Uuid,
    },
    /// A target is in use.
    #[error("target {}: {source}", path.display())]
    InUse {
        /// Path of the target.
        path: PathBuf,
        /// The store's error.
        source: StoreError,
    },
    /// The node's roster was not recorded yet.
    #[error(
        "the node's roster {} is missing; start the node, which writes the file: outboard up; if the node is running, stop it first: outboard down",
        path.display()
    )]
    NoFile {
        /// Path of the missing file.
        path: PathBuf,
    },
    /// The node has no target with this number.
    #[error("there is no target {number}; the node has targets 0 to {last}")]
    NoTarget {
        /// The number.
        number: u32,
        /// The highest number of a target.
        last: usize,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Dir(#[from] DirError),
}

/// A target of the node, in the text form `PATH=UUID`. Its UUID is known even if the target cannot
/// be mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownTarget {
    /// Path of the target's file or device, as in the configuration.
    path: PathBuf,
    /// UUID of the target.
    uuid: Uuid,
    /// Number of the target in commands, which the osd has announced; `None` before that. It stays the
    /// same if the target moves to another path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    /// Whether the operator has accepted the loss of the target, and the osd does not know it yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    forgotten: bool,
}

/// What the role that serves clients must know of the node's roster before it starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpectedNode {
    /// UUID of the node; `None` if the node has never run.
    pub node: Option<Uuid>,
    /// Targets of which the operator has accepted the loss.
    pub forgotten: Vec<Uuid>,
}

impl KnownTarget {
    /// Creates the record of a target.
    pub fn new(path: PathBuf, uuid: Uuid) -> KnownTarget {
        KnownTarget { path, uuid, number: None, forgotten: false }
    }

    /// Converts an announced target.
    pub fn of(target: &MountedTarget) -> KnownTarget {
        KnownTarget::new(target.path.clone(), target.uuid)
    }

    /// Returns the path of the target, as in the configuration.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the UUID of the target.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Returns `PATH=UUID` for a role's command line. The result preserves a path that is not
    /// UTF-8.
    pub fn to_argument(&self) -> OsString {
        let mut argument = self.path.clone().into_os_string();
        argument.push(format!("={}", self.uuid));
        argument
    }
}

impl FromStr for KnownTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<KnownTarget, String> {
        let parsed = text.rsplit_once('=').and_then(|(path, uuid)| Some((path.into(), uuid.parse().ok()?)));
        let (path, uuid) = parsed.ok_or_else(|| format!("{text:?} is not PATH=UUID"))?;
        Ok(KnownTarget::new(path, uuid))
    }
}

/// The content of `node.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// Format version of the file.
    format: u32,
    /// UUID of the node; `None` before the osd has started for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<Uuid>,
    /// The targets, in the order of the configuration.
    targets: Vec<KnownTarget>,
}

/// The roster of a node, and its relation to the targets that are present.
#[derive(Debug, PartialEq, Eq)]
pub struct Settled {
    /// The roster. Its paths are the configured paths.
    pub roster: Roster,
    /// Whether `node.json` contains exactly this roster.
    pub is_recorded: bool,
    /// Whether `node.json` exists. If not, the roster was derived from the targets.
    pub has_file: bool,
    /// Messages for the operator about targets that have moved or are not used.
    pub notes: Vec<String>,
}

impl Roster {
    /// Creates the roster of a node with these targets.
    pub fn new(targets: Vec<KnownTarget>) -> Roster {
        Roster { format: FORMAT, node: None, targets }
    }

    /// Returns the targets, in the order of the configuration.
    pub fn targets(&self) -> &[KnownTarget] {
        &self.targets
    }

    /// Reads the roster of the node in `dir`; `None` if the file does not exist.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or has another format.
    pub fn load(dir: &NodeDir) -> Result<Option<Roster>, RosterError> {
        #[derive(Deserialize)]
        struct FormatVersion {
            format: u32,
        }
        let path = dir.roster();
        let damaged = |why: String| RosterError::Damaged { path: path.clone(), why };
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(damaged(e.to_string())),
        };
        // A later format may have other fields, so read the version first.
        let version: FormatVersion = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
        if version.format != FORMAT {
            return Err(RosterError::Format { path, found: version.format });
        }
        serde_json::from_slice(&text).map(Some).map_err(|e| damaged(e.to_string()))
    }

    /// Writes the file atomically and durably.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let text = serde_json::to_string_pretty(self).expect("plain data has a JSON form") + "\n";
        replace_file(&dir.roster(), &text)
    }

    /// Reads the roster of the node in `dir`.
    ///
    /// # Errors
    /// If the file is missing, cannot be read, is damaged, or has another format.
    pub fn load_existing(dir: &NodeDir) -> Result<Roster, RosterError> {
        Roster::load(dir)?.ok_or_else(|| RosterError::NoFile { path: dir.roster() })
    }

    /// Returns the target with this number.
    ///
    /// # Errors
    /// [`RosterError::NoTarget`] if there is none.
    pub fn target(&self, number: u32) -> Result<&KnownTarget, RosterError> {
        self.position(number).map(|at| &self.targets[at])
    }

    /// Returns the path of target `number`, so that a new target can be created there.
    ///
    /// # Errors
    /// If there is no such target, or if its path contains another target of the node.
    pub fn place_of(&self, dir: &NodeDir, number: u32) -> Result<PathBuf, RosterError> {
        let target = self.target(number)?;
        let path = dir.path().join(target.path());
        match BlockStore::uuid_at(&path) {
            Ok(found) if found != target.uuid && self.targets.iter().any(|other| other.uuid == found) => {
                Err(RosterError::Occupied { path, found })
            }
            _ => Ok(path),
        }
    }

    /// Returns the position of the target with this number. Before the osd has announced the numbers,
    /// they are the positions.
    fn position(&self, number: u32) -> Result<usize, RosterError> {
        let is_numbered = self.targets.iter().any(|target| target.number.is_some());
        let found = match is_numbered {
            true => self.targets.iter().position(|target| target.number == Some(number)),
            false => Some(number as usize).filter(|at| *at < self.targets.len()),
        };
        let last = self.targets.len().saturating_sub(1);
        found.ok_or(RosterError::NoTarget { number, last })
    }

    /// Records that the target with the UUID `uuid` has taken the number and the path of a lost target.
    ///
    /// # Errors
    /// If there is no target with this number, or if the file is missing or cannot be read or written.
    pub fn replace_target(dir: &NodeDir, number: u32, uuid: Uuid) -> Result<(), RosterError> {
        let _lock = lock(dir)?;
        let mut roster = Roster::load_existing(dir)?;
        let at = roster.position(number)?;
        let target = &mut roster.targets[at];
        *target = KnownTarget { number: target.number, ..KnownTarget::new(target.path.clone(), uuid) };
        Ok(roster.save(dir)?)
    }

    /// Records that the operator accepts the loss of what only target `number` has. The osd learns it
    /// when it starts. Returns the target.
    ///
    /// # Errors
    /// If there is no such target, or if the file is missing or cannot be read or written.
    pub fn forget_target(dir: &NodeDir, number: u32) -> Result<KnownTarget, RosterError> {
        let _lock = lock(dir)?;
        let mut roster = Roster::load_existing(dir)?;
        let at = roster.position(number)?;
        roster.targets[at].forgotten = true;
        let target = roster.targets[at].clone();
        roster.save(dir)?;
        Ok(target)
    }

    /// Returns what the role that serves clients must know before it starts.
    pub fn expected(&self) -> ExpectedNode {
        ExpectedNode { node: self.node, forgotten: self.forgotten() }
    }

    /// Returns the targets of which the operator has accepted the loss, if the osd does not know it
    /// yet.
    pub fn forgotten(&self) -> Vec<Uuid> {
        self.targets.iter().filter(|target| target.forgotten).map(|target| target.uuid).collect()
    }

    /// Records that the osd knows that the operator has accepted the loss of these targets.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn osd_knows(dir: &NodeDir, forgotten: &[Uuid]) -> Result<(), RosterError> {
        let _lock = lock(dir)?;
        let Some(mut roster) = Roster::load(dir)? else { return Ok(()) };
        let known = roster.targets.iter_mut().filter(|target| forgotten.contains(&target.uuid));
        known.for_each(|target| target.forgotten = false);
        Ok(roster.save(dir)?)
    }

    /// Adds the UUID of the node and the numbers of the targets to the file, and creates the file if it
    /// does not exist. The osd has accepted the targets, and has announced `node` and `numbered`: the
    /// UUIDs of the targets in the order of their numbers.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn record(&self, dir: &NodeDir, node: Option<Uuid>, numbered: &[Uuid]) -> Result<(), RosterError> {
        let _lock = lock(dir)?;
        let recorded = Roster::load(dir)?;
        // `target replace` may have changed the file.
        let current = recorded.as_ref().unwrap_or(self);
        let mut roster = Roster { node: node.or(current.node), ..current.clone() };
        for target in &mut roster.targets {
            let number = numbered.iter().position(|uuid| *uuid == target.uuid).map(|at| at as u32);
            target.number = number.or(target.number);
        }
        if recorded.as_ref() == Some(&roster) {
            return Ok(());
        }
        Ok(roster.save(dir)?)
    }

    /// Determines which of the node's targets belongs to each of `paths`, where the targets `found`
    /// are. A target that was found belongs to its path. Of the other targets, each keeps its
    /// recorded path if possible. Both slices have as many items as the node has targets.
    fn assign(&self, paths: &[PathBuf], found: &[Option<Uuid>]) -> Vec<Uuid> {
        let mut left: Vec<&KnownTarget> =
            self.targets.iter().filter(|target| !found.contains(&Some(target.uuid))).collect();
        let own = |uuid: &Uuid| self.targets.iter().any(|target| target.uuid == *uuid);
        let mut assigned: Vec<Option<Uuid>> = found.iter().map(|found| found.filter(own)).collect();
        for (path, assigned) in paths.iter().zip(&mut assigned).filter(|(_, assigned)| assigned.is_none()) {
            if let Some(at) = left.iter().position(|target| target.path == *path) {
                *assigned = Some(left.remove(at).uuid);
            }
        }
        let mut left = left.into_iter().map(|target| target.uuid);
        // `left` suffices, because the paths found are different.
        assigned.into_iter().filter_map(|assigned| assigned.or_else(|| left.next())).collect()
    }
}

/// Takes the lock that protects the file against concurrent changes by the supervisor and by
/// commands. The lock ends when the returned value is dropped.
fn lock(dir: &NodeDir) -> Result<File, DirError> {
    let lock = || {
        let file = File::open(dir.path())?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    };
    lock().map_err(io_error("lock", dir.path()))
}

/// Returns whether a record shows that the node in `dir` has had targets: `node.json`, or the
/// `run/state.json` of an older version. An unreadable record counts.
pub fn is_recorded(dir: &NodeDir) -> bool {
    let in_state = || NodeState::load(dir).is_none_or(|state| !state.targets.is_empty());
    dir.roster().exists() || (dir.state().exists() && in_state())
}

/// Determines the roster of an existing node, whose configuration names the targets `paths`. No
/// process may use the targets. Changes no file.
///
/// # Errors
/// If the roster is damaged, unknown or contradicts the configuration, or if no target of the
/// node is present.
pub fn settle(dir: &NodeDir, paths: &[PathBuf]) -> Result<Settled, RosterError> {
    let recorded = Roster::load(dir)?;
    let seen = look(dir, paths)?;
    let Some(recorded) = recorded else { return adopt(dir, paths, &seen) };
    if recorded.targets.len() != paths.len() {
        let (recorded, configured) = (recorded.targets.len(), paths.len());
        return Err(RosterError::Count { path: dir.roster(), recorded, configured });
    }
    let found: Vec<Option<Uuid>> = seen.iter().map(|seen| seen.as_ref().ok().copied()).collect();
    let uuids = recorded.assign(paths, &found);
    let (mut notes, mut first) = (Vec::new(), None);
    for ((path, expected), seen) in paths.iter().zip(&uuids).zip(&seen) {
        let path = dir.path().join(path);
        let error = match seen {
            Ok(found) if found == expected => continue,
            Ok(found) => RosterError::Foreign { path, found: *found, expected: *expected },
            Err(_) if !path.exists() => RosterError::Missing { path },
            // The role that mounts the target reports why it cannot be used.
            Err(_) => continue,
        };
        notes.push(without(&error));
        first.get_or_insert(error);
    }
    if let Some(error) = first.filter(|_| notes.len() == paths.len()) {
        return Err(error);
    }
    let target = |(path, uuid): (PathBuf, Uuid)| {
        let known = recorded.targets.iter().find(|target| target.uuid == uuid);
        known.map_or(KnownTarget::new(path.clone(), uuid), |known| KnownTarget { path, ..known.clone() })
    };
    let targets = paths.iter().cloned().zip(uuids).map(target).collect();
    let roster = Roster { targets, ..recorded.clone() };
    Ok(Settled { is_recorded: roster == recorded, roster, has_file: true, notes })
}

/// Reads the UUIDs of the targets at `paths`.
fn look(dir: &NodeDir, paths: &[PathBuf]) -> Result<Vec<Result<Uuid, StoreError>>, RosterError> {
    let mut seen: Vec<Result<Uuid, StoreError>> = Vec::new();
    for path in paths {
        let full = dir.path().join(path);
        let found = match BlockStore::uuid_at(&full) {
            Err(source @ StoreError::InUse(_)) => return Err(RosterError::InUse { path: full, source }),
            found => found,
        };
        if let Ok(uuid) = &found
            && let Some(other) = seen.iter().position(|seen| seen.as_ref().ok() == Some(uuid))
        {
            let paths = [dir.path().join(&paths[other]), full];
            return Err(RosterError::Twice { paths, uuid: *uuid });
        }
        seen.push(found);
    }
    Ok(seen)
}

/// Derives the roster of a node without `node.json` from its targets, and from the
/// `run/state.json` of an older version for targets that cannot be read.
fn adopt(
    dir: &NodeDir,
    paths: &[PathBuf],
    seen: &[Result<Uuid, StoreError>],
) -> Result<Settled, RosterError> {
    let last = NodeState::load(dir).map(|state| state.targets).unwrap_or_default();
    let (mut targets, mut notes) = (Vec::new(), Vec::new());
    for (path, seen) in paths.iter().zip(seen) {
        let full = dir.path().join(path);
        let uuid = match (seen, last.iter().find(|target| target.path == *path)) {
            (Ok(uuid), _) => *uuid,
            (Err(_), Some(target)) => {
                if !full.exists() {
                    notes.push(without(&RosterError::Missing { path: full }));
                }
                target.uuid
            }
            (Err(e), None) => {
                let file = dir.roster();
                return Err(RosterError::Unrecorded { path: full, why: e.to_string(), file });
            }
        };
        targets.push(KnownTarget::new(path.clone(), uuid));
    }
    if notes.len() == paths.len() {
        return Err(RosterError::Missing { path: dir.path().join(&paths[0]) });
    }
    Ok(Settled { roster: Roster::new(targets), is_recorded: false, has_file: false, notes })
}

/// Returns the message that the node starts without a target for this reason.
fn without(error: &RosterError) -> String {
    format!("the node starts without a target: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(path: &str, uuid: u128) -> KnownTarget {
        KnownTarget::new(path.into(), Uuid::from_u128(uuid))
    }

    fn assigned(paths: &[&str], found: &[u128]) -> Vec<u128> {
        let roster = Roster::new(vec![target("a", 1), target("b", 2), target("c", 3)]);
        let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
        let found: Vec<_> = found.iter().map(|n| (*n > 0).then_some(Uuid::from_u128(*n))).collect();
        roster.assign(&paths, &found).iter().map(Uuid::as_u128).collect()
    }

    #[test]
    fn targets_are_assigned_by_their_uuids_and_absent_targets_by_their_paths() {
        assert_eq!(assigned(&["a", "b", "c"], &[1, 2, 3]), [1, 2, 3]);
        assert_eq!(assigned(&["a", "b", "c"], &[0, 2, 0]), [1, 2, 3]);
        assert_eq!(assigned(&["a", "b", "c"], &[3, 0, 1]), [3, 2, 1], "a and c were exchanged");
        assert_eq!(assigned(&["a", "b", "c"], &[1, 9, 3]), [1, 2, 3], "9 is foreign");
        assert_eq!(
            assigned(&["a", "b", "c"], &[2, 0, 3]),
            [2, 1, 3],
            "b moved to a, and its old path is empty"
        );
        assert_eq!(assigned(&["x", "b", "c"], &[1, 0, 0]), [1, 2, 3], "the configuration names a new path");
        assert_eq!(assigned(&["x", "y", "c"], &[0, 0, 9]), [1, 2, 3]);
    }

    #[test]
    fn a_target_keeps_its_number_when_it_moves_and_gives_it_to_its_replacement() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        let (a, b, c) = (Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3));
        // The osd numbers the targets differently, because they had other paths when the node was made.
        Roster::new(vec![target("a", 1), target("b", 2)]).record(&dir, None, &[b, a]).unwrap();
        let uuid_of = |number| Roster::load_existing(&dir).unwrap().target(number).map(KnownTarget::uuid);
        assert_eq!((uuid_of(0).unwrap(), uuid_of(1).unwrap()), (b, a));
        assert_eq!(Roster::forget_target(&dir, 0).unwrap().path(), Path::new("b"));
        Roster::replace_target(&dir, 0, c).unwrap();
        let roster = Roster::load_existing(&dir).unwrap();
        assert_eq!((roster.target(0).unwrap().path(), uuid_of(0).unwrap()), (Path::new("b"), c));
        assert!(roster.forgotten().is_empty());
        assert!(matches!(uuid_of(2), Err(RosterError::NoTarget { number: 2, last: 1 })));
    }

    #[test]
    fn a_saved_roster_can_be_loaded_and_a_damaged_one_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        assert_eq!(Roster::load(&dir).unwrap(), None);
        let roster = Roster::new(vec![target("targets/0.img", 1), target("/dev/b", 2)]);
        roster.record(&dir, None, &[]).unwrap();
        assert_eq!(Roster::load(&dir).unwrap().as_ref(), Some(&roster));
        Roster::replace_target(&dir, 1, Uuid::from_u128(3)).unwrap();
        roster.record(&dir, Some(Uuid::from_u128(7)), &[]).unwrap();
        roster.record(&dir, None, &[]).unwrap();
        assert_eq!(Roster::forget_target(&dir, 1).unwrap().uuid(), Uuid::from_u128(3));
        assert!(matches!(Roster::forget_target(&dir, 2), Err(RosterError::NoTarget { last: 1, .. })));
        let forgotten = Roster::load(&dir).unwrap().unwrap().forgotten();
        assert_eq!(forgotten, [Uuid::from_u128(3)]);
        roster.record(&dir, None, &[]).unwrap();
        assert_eq!(Roster::load(&dir).unwrap().unwrap().forgotten(), forgotten);
        Roster::osd_knows(&dir, &forgotten).unwrap();
        let loaded = Roster::load(&dir).unwrap().unwrap();
        assert_eq!(loaded.node, Some(Uuid::from_u128(7)));
        assert_eq!(loaded.targets, [target("targets/0.img", 1), target("/dev/b", 3)]);
        for (text, said) in
            [("", "from the targets"), ("{}", "from the targets"), ("{\"format\":2}", "format 2")]
        {
            std::fs::write(dir.roster(), text).unwrap();
            let error = Roster::load(&dir).unwrap_err().to_string();
            assert!(error.contains("node.json") && error.contains(said), "{text}: {error}");
            assert!(is_recorded(&dir), "a damaged roster shows that the node was created");
        }
    }
}
