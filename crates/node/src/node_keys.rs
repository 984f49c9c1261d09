//! The node's own key, and the key of its administrator.
//!
//! ```text
//! DIR/keys/node.pem      the node's private key, which the osd proves to its clients
//! DIR/keys/dpu           the DPU's secret key, with which the osd recognises what it has handed out
//! DIR/keys/admin         hash of the administrator's key
//! DIR/keys/osd           hash of the node's key: the osd that the store accepts over TCP
//! DIR/keys/store.pem     the store's private key, which the store proves to its osd over TCP
//! DIR/keys/store         hash of the store's key, which the osd expects over TCP
//! DIR/credentials.toml   the administrator's credentials, which local commands use
//! ```
//!
//! These files are on the DPU's side. The storage host must not be able to read or change them. Only
//! the owner of the node can read the private keys. `credentials.toml` may be moved to the
//! administrator's machine. It is created only together with `keys/admin`: a node whose administrator
//! keeps the credentials elsewhere gets no new ones.
//!
//! If osd and store run on two machines, each has a directory of its own. Copy `keys/osd` to the store's
//! machine, and `keys/store` to the osd's.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use identity::{
    Credentials, Identity, IdentityError, KeyHash, NODE_ADMIN, ProofKey, Trust, UserDirectory, UserName,
    random_secret, read_secret,
};

use base::clock::WallClock;
use osd::{AuditEvent, AuditKind, AuditSink, Directory};

use super::dir::{DirError, io_error};
use super::durable::{create_directory, create_secret, replace_file};

/// Directory of the keys, relative to the node's directory.
const KEYS: &str = "keys";
/// File of the administrator's credentials, relative to the node's directory.
const CREDENTIALS: &str = "credentials.toml";
/// File with the hash of the osd's key.
const OSD: &str = "osd";
/// File with the hash of the store's key.
const STORE: &str = "store";
/// File with the store's private key.
const STORE_KEY: &str = "store.pem";
/// Name of the tenant that every node has.
pub const MAIN_TENANT: &str = "main";
/// Name of the user who administers the node.
const ADMIN: &str = "admin";

/// The reason why the node's keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodeKeysError {
    /// A file cannot be read or written.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// A file with a private key cannot be read, or other users have access to it.
    #[error(transparent)]
    Secret(IdentityError),
    /// The osd does not know which store to expect.
    #[error("{} does not exist; copy it from the directory of the store, which makes it when it starts", path.display())]
    NoStore {
        /// The file.
        path: PathBuf,
    },
    /// The node has lost the hash of its administrator's key, and the credentials are another user's.
    #[error("{} belongs to {user}, so it cannot tell the key of the administrator; restore {}/admin from a backup, or move the file away: `outboard up` then makes new credentials", path.display(), KEYS)]
    OtherUser {
        /// The file.
        path: PathBuf,
        /// The user.
        user: String,
    },
    /// A key is invalid.
    #[error("{}: {source}; restore the file from a backup, or {remedy}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: IdentityError,
        /// What to do if there is no backup.
        remedy: &'static str,
    },
    /// The secret key of the DPU is invalid.
    #[error("{} does not contain 64 hexadecimal digits; restore the file from a backup: without it, the node does not recognise its map (if there is no backup, see `keys/dpu` in docs/operations.md)", path.display())]
    DpuKey {
        /// The file.
        path: PathBuf,
    },
}

/// The node's own key, and the key of its administrator.
#[derive(Debug, Clone)]
pub struct NodeKeys {
    node: Identity,
    dpu: ProofKey,
    admin: KeyHash,
}

/// Returns the path of the administrator's credentials in the node's directory `root`.
pub fn credentials_path(root: &Path) -> PathBuf {
    root.join(CREDENTIALS)
}

impl NodeKeys {
    /// Reads the keys of the node in the directory `root`, and creates the missing ones durably.
    ///
    /// # Errors
    /// If a file cannot be read or written, or if it is invalid.
    pub fn settle(root: &Path) -> Result<NodeKeys, NodeKeysError> {
        let folder = root.join(KEYS);
        let (own, admin, credentials) =
            (folder.join("node.pem"), folder.join("admin"), credentials_path(root));
        create_directory(&folder)?;
        let node = match secret(&own)? {
            Some(text) => {
                let remedy = "remove this file only: `outboard up` then makes a new key and writes it into \
                              credentials.toml; replace the copies of credential files";
                Identity::from_pem(&text).map_err(|source| NodeKeysError::Key {
                    path: own,
                    source,
                    remedy,
                })?
            }
            None => {
                let made = Identity::generate();
                create_secret(&own, made.to_pem())?;
                made
            }
        };
        let dpu = dpu_key(&folder)?;
        let known = folder.join(OSD);
        if read(&known)?.as_deref().map(str::trim) != Some(&node.key().to_string()) {
            replace_file(&known, format!("{}\n", node.key()))?;
        }
        if let Some(text) = read(&admin)? {
            let remedy = "remove this file and credentials.toml: `outboard up` then makes new credentials of \
                          the administrator";
            let admin =
                text.trim().parse().map_err(|source| NodeKeysError::Key { path: admin, source, remedy })?;
            update(&credentials, node.key(), admin)?;
            return Ok(NodeKeys { node, dpu, admin });
        }
        // An earlier attempt may have created the credentials before it was interrupted.
        let loaded = if credentials.exists() { Some(Credentials::load(&credentials)) } else { None };
        let identity = match loaded {
            Some(Ok(found)) if found.user != format!("{MAIN_TENANT}/{ADMIN}") => {
                return Err(NodeKeysError::OtherUser { path: credentials, user: found.user });
            }
            Some(Ok(found)) => {
                update(&credentials, node.key(), found.identity.key())?;
                found.identity
            }
            Some(Err(e @ (IdentityError::Exposed { .. } | IdentityError::OtherOwner { .. }))) => {
                return Err(NodeKeysError::Secret(e));
            }
            Some(Err(source)) => {
                let remedy =
                    "remove this file: `outboard up` then makes new credentials of the administrator";
                return Err(NodeKeysError::Key { path: credentials, source, remedy });
            }
            None => {
                let user = format!("{MAIN_TENANT}/{ADMIN}");
                let made = Credentials { user, node: node.key(), identity: Identity::generate() };
                create_secret(&credentials, made.to_text())?;
                made.identity
            }
        };
        replace_file(&admin, format!("{}\n", identity.key()))?;
        Ok(NodeKeys { node, dpu, admin: identity.key() })
    }

    /// Returns whether the node in the directory `root` has any of its keys.
    #[must_use]
    pub fn exist(root: &Path) -> bool {
        let folder = root.join(KEYS);
        let keys = ["admin", "dpu", "node.pem", OSD, STORE, STORE_KEY].map(|name| folder.join(name));
        keys.into_iter().chain([credentials_path(root)]).any(|path| path.exists())
    }

    /// Removes the keys and the credentials, durably. Call it only for a node that has served no
    /// client.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn remove(root: &Path) -> Result<(), DirError> {
        let folder = root.join(KEYS);
        let keys = ["admin", "dpu", "node.pem", OSD, STORE, STORE_KEY].map(|name| folder.join(name));
        for path in keys.into_iter().chain([credentials_path(root)]) {
            super::durable::remove_file(&path)?;
        }
        match std::fs::remove_dir(&folder) {
            Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
                Err(io_error("remove", &folder)(e))
            }
            _ => Ok(()),
        }
    }

    /// Returns the trust of the osd towards a store that it reaches over TCP: the osd proves the node's
    /// key, and expects the key that `keys/store` in the directory `root` names.
    ///
    /// # Errors
    /// If the file is missing or invalid.
    pub fn channel_trust(&self, root: &Path) -> Result<Trust, NodeKeysError> {
        let path = root.join(KEYS).join(STORE);
        let Some(text) = read(&path)? else { return Err(NodeKeysError::NoStore { path }) };
        let remedy = "copy it from the directory of the store";
        let store = text.trim().parse().map_err(|source| NodeKeysError::Key { path, source, remedy })?;
        Ok(Trust::client(&self.node, store))
    }

    /// Returns the DPU's secret key.
    #[must_use]
    pub fn dpu_key(&self) -> &ProofKey {
        &self.dpu
    }

    /// Returns a number that changes with the administrator's key.
    #[must_use]
    pub fn admin_revision(&self) -> u64 {
        let hash = self.admin.as_bytes();
        u64::from_le_bytes(*hash.first_chunk().expect("a hash has 32 bytes"))
    }

    /// Returns the trust of the osd: it proves the node's key, and accepts the administrator and these
    /// users. It notes unknown keys in the audit log.
    #[must_use]
    pub fn trust(&self, users: Directory, audit: Arc<dyn AuditSink>) -> Trust {
        Trust::server(
            &self.node,
            Arc::new(Users { admin: self.admin, users, audit, noted: Mutex::default() }),
        )
    }
}

/// Returns the trust of a store with the directory `root` that listens at a TCP address: it proves its
/// own key, and accepts the osd whose key `keys/osd` names at that time. Creates the store's key if it is
/// missing.
///
/// # Errors
/// If a file cannot be read or written, or if the key is invalid.
pub fn store_trust(root: &Path) -> Result<Trust, NodeKeysError> {
    let folder = root.join(KEYS);
    create_directory(&folder)?;
    let own = folder.join(STORE_KEY);
    let store = match secret(&own)? {
        Some(text) => {
            let remedy =
                "remove it: the store then makes a new one; copy the new keys/store to the osd's directory";
            Identity::from_pem(&text).map_err(|source| NodeKeysError::Key { path: own, source, remedy })?
        }
        None => {
            let made = Identity::generate();
            create_secret(&own, made.to_pem())?;
            made
        }
    };
    let known = folder.join(STORE);
    if read(&known)?.as_deref().map(str::trim) != Some(&store.key().to_string()) {
        replace_file(&known, format!("{}\n", store.key()))?;
    }
    Ok(Trust::server(&store, Arc::new(AcceptedOsd(folder.join(OSD)))))
}

/// The osd that a store accepts: the one whose key a file names.
struct AcceptedOsd(PathBuf);

impl UserDirectory for AcceptedOsd {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let named = std::fs::read_to_string(&self.0).ok()?.trim().parse::<KeyHash>().ok()?;
        (named == *key).then(|| UserName {
            id: NODE_ADMIN,
            tenant_id: 0,
            tenant: MAIN_TENANT.into(),
            user: OSD.into(),
        })
    }
}

/// Writes the node's key into the administrator's credentials, if they are present and name another key:
/// `node.pem` was replaced since they were written.
fn update(credentials: &Path, node: KeyHash, admin: KeyHash) -> Result<(), DirError> {
    match Credentials::load(credentials) {
        Ok(stale) if stale.identity.key() == admin && stale.node != node => {
            create_secret(credentials, Credentials { node, ..stale }.to_text())
        }
        _ => Ok(()),
    }
}

/// Reads the DPU's secret key, or creates it.
fn dpu_key(folder: &Path) -> Result<ProofKey, NodeKeysError> {
    let path = folder.join("dpu");
    if let Some(text) = secret(&path)? {
        // The key has the same text form as the hash of a key.
        let secret = text.trim().parse::<KeyHash>().map_err(|_| NodeKeysError::DpuKey { path })?;
        return Ok(ProofKey::new(secret.as_bytes()));
    }
    let secret = random_secret();
    create_secret(&path, format!("{}\n", KeyHash::from(secret)))?;
    Ok(ProofKey::new(&secret))
}

/// The users of the node.
struct Users {
    admin: KeyHash,
    /// The users in the node's map.
    users: Directory,
    audit: Arc<dyn AuditSink>,
    /// The second of the last entries about unknown keys, and their number.
    noted: Mutex<(u64, u32)>,
}

/// Maximum number of entries about unknown keys per second. Strangers must not fill the audit log.
const STRANGERS_NOTED: u32 = 5;

impl Users {
    /// Whether the audit log may get another entry about an unknown key.
    fn may_note(&self) -> bool {
        let second = WallClock::default().now_ms() / 1000;
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.0 != second {
            *noted = (second, 0);
        }
        noted.1 += 1;
        noted.1 <= STRANGERS_NOTED
    }
}

impl UserDirectory for Users {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        if *key == self.admin {
            return Some(UserName {
                id: NODE_ADMIN,
                tenant_id: 0,
                tenant: MAIN_TENANT.into(),
                user: ADMIN.into(),
            });
        }
        let found = self.users.find(key);
        if found.is_none() && self.may_note() {
            self.audit.record(AuditEvent {
                at_ms: WallClock::default().now_ms(),
                event: AuditKind::Refused,
                user: None,
                key: *key,
                peer: None,
                what: "connect".into(),
                why: Some("the key is unknown or was revoked".into()),
            });
        }
        found
    }
}

/// Reads a file with a private key; `None` if it does not exist. Other users must have no access to
/// it.
fn secret(path: &Path) -> Result<Option<String>, NodeKeysError> {
    read_secret(path).map_err(NodeKeysError::Secret)
}

/// Reads a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>, DirError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error("read", path)(e)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct NoAudit;

    impl AuditSink for NoAudit {
        fn record(&self, _: AuditEvent) {}

        fn recent(&self, _: usize) -> base::BoxFuture<'static, Vec<String>> {
            Box::pin(std::future::ready(Vec::new()))
        }
    }

    #[test]
    fn keys_are_made_once_and_the_private_ones_are_secret() {
        let dir = tempfile::tempdir().unwrap();
        let made = NodeKeys::settle(dir.path()).unwrap();
        let again = NodeKeys::settle(dir.path()).unwrap();
        assert_eq!((again.node.key(), again.admin), (made.node.key(), made.admin));
        let credentials = Credentials::load(&credentials_path(dir.path())).unwrap();
        assert_eq!((credentials.node, credentials.identity.key()), (made.node.key(), made.admin));
        let trust = made.trust(Directory::default(), Arc::new(NoAudit));
        assert_eq!(trust.user_of(&made.admin).unwrap().tenant, MAIN_TENANT);
        assert_eq!(trust.user_of(&made.node.key()), None);
        for file in ["keys/node.pem", "keys/dpu", CREDENTIALS] {
            let mode = dir.path().join(file).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{file}");
        }
        NodeKeys::remove(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_remedy_for_a_damaged_key_keeps_the_key_of_the_dpu() {
        for (damaged, advice, removed) in [
            ("keys/node.pem", "remove this file only", &["keys/node.pem"][..]),
            ("keys/admin", "remove this file and credentials.toml", &["keys/admin", CREDENTIALS]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            NodeKeys::settle(dir.path()).unwrap();
            let dpu = std::fs::read(dir.path().join("keys/dpu")).unwrap();
            std::fs::write(dir.path().join(damaged), "xx").unwrap();
            let message = NodeKeys::settle(dir.path()).unwrap_err().to_string();
            assert!(message.contains(damaged) && message.contains(advice), "{message}");
            removed.iter().for_each(|file| std::fs::remove_file(dir.path().join(file)).unwrap());
            NodeKeys::settle(dir.path()).unwrap();
            assert_eq!(std::fs::read(dir.path().join("keys/dpu")).unwrap(), dpu, "{damaged}");
        }
        let dir = tempfile::tempdir().unwrap();
        NodeKeys::settle(dir.path()).unwrap();
        std::fs::write(dir.path().join("keys/dpu"), "xx").unwrap();
        let message = NodeKeys::settle(dir.path()).unwrap_err().to_string();
        assert!(message.contains("keys/dpu") && !message.contains("remove"), "{message}");
    }

    #[test]
    fn moved_credentials_are_not_replaced_and_interrupted_creation_continues() {
        let dir = tempfile::tempdir().unwrap();
        let made = NodeKeys::settle(dir.path()).unwrap();
        std::fs::remove_file(credentials_path(dir.path())).unwrap();
        assert_eq!(NodeKeys::settle(dir.path()).unwrap().admin, made.admin);
        assert!(!credentials_path(dir.path()).exists());
        // An interruption before the last step leaves the credentials without `keys/admin`.
        std::fs::remove_file(dir.path().join("keys/admin")).unwrap();
        let next = NodeKeys::settle(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join("keys/admin")).unwrap();
        assert_eq!(NodeKeys::settle(dir.path()).unwrap().admin, next.admin);
    }

    #[test]
    fn credentials_name_the_new_key_of_a_node_whose_key_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let made = NodeKeys::settle(dir.path()).unwrap();
        for lost in [&["keys/node.pem"][..], &["keys/node.pem", "keys/admin"]] {
            lost.iter().for_each(|file| std::fs::remove_file(dir.path().join(file)).unwrap());
            let next = NodeKeys::settle(dir.path()).unwrap();
            let credentials = Credentials::load(&credentials_path(dir.path())).unwrap();
            assert_eq!(credentials.node, next.node.key());
            assert_eq!((credentials.identity.key(), next.admin), (made.admin, made.admin));
        }
    }

    #[test]
    fn a_private_key_that_other_users_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        NodeKeys::settle(dir.path()).unwrap();
        store_trust(dir.path()).unwrap();
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        for file in ["keys/node.pem", "keys/dpu", "keys/store.pem"] {
            let path = dir.path().join(file);
            set_mode(&path, 0o640);
            let read = NodeKeys::settle(dir.path()).map(drop).and(store_trust(dir.path()).map(drop));
            let error = read.unwrap_err();
            assert!(
                matches!(&error, NodeKeysError::Secret(IdentityError::Exposed { path: at, mode: 0o640 }) if *at == path),
                "{error}"
            );
            assert!(error.to_string().contains(&format!("chmod 600 {}", path.display())), "{error}");
            set_mode(&path, 0o600);
        }
        // The credentials are read only if the hash of the administrator's key is lost.
        let credentials = credentials_path(dir.path());
        set_mode(&credentials, 0o644);
        NodeKeys::settle(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join("keys/admin")).unwrap();
        let error = NodeKeys::settle(dir.path()).unwrap_err();
        assert!(matches!(error, NodeKeysError::Secret(IdentityError::Exposed { .. })), "{error}");
        set_mode(&credentials, 0o600);
        NodeKeys::settle(dir.path()).unwrap();
    }

    #[test]
    fn a_private_key_is_secret_even_if_a_file_of_an_interrupted_write_is_not() {
        let dir = tempfile::tempdir().unwrap();
        create_directory(&dir.path().join(KEYS)).unwrap();
        // `store.new` is also the temporary file of `keys/store`, which all users may read.
        for left in ["keys/node.new", "keys/dpu.new", "keys/store.new", "credentials.new"] {
            let path = dir.path().join(left);
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        }
        NodeKeys::settle(dir.path()).unwrap();
        store_trust(dir.path()).unwrap();
        for file in ["keys/node.pem", "keys/dpu", "keys/store.pem", CREDENTIALS] {
            let mode = dir.path().join(file).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        // The next start reads the keys.
        NodeKeys::settle(dir.path()).unwrap();
        store_trust(dir.path()).unwrap();
    }

    #[test]
    fn a_damaged_key_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        NodeKeys::settle(dir.path()).unwrap();
        for file in ["keys/node.pem", "keys/dpu", "keys/admin"] {
            let path = dir.path().join(file);
            let good = std::fs::read(&path).unwrap();
            std::fs::write(&path, "x").unwrap();
            let error = NodeKeys::settle(dir.path()).unwrap_err().to_string();
            assert!(error.contains(file), "{error}");
            std::fs::write(&path, good).unwrap();
        }
        NodeKeys::settle(dir.path()).unwrap();
    }
}
