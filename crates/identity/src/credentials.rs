//! [`Credentials`]: the file from which a client reads its identity.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::secret_file::read_secret;
use crate::{Identity, IdentityError, KeyHash, Trust};

/// The identity of a user, and the key of the node to which the user connects.
///
/// The file is a TOML document that only its owner may read:
///
/// ```toml
/// user = "main/admin"
/// node-key = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
/// private-key = """
/// -----BEGIN PRIVATE KEY-----
/// …
/// -----END PRIVATE KEY-----
/// """
/// ```
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Name of the user, for display: `TENANT/USER`. The node knows the user by the key.
    pub user: String,
    /// The key of the node.
    pub node: KeyHash,
    /// The user's key.
    pub identity: Identity,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct CredentialsFile {
    user: String,
    node_key: String,
    private_key: String,
}

impl Credentials {
    /// Reads a credential file. It may also be a pipe.
    ///
    /// # Errors
    /// The errors of [`read_secret`]; [`IdentityError::File`] if the file does not exist or its
    /// content is invalid.
    pub fn load(path: &Path) -> Result<Credentials, IdentityError> {
        let fail = |reason: String| IdentityError::File { path: path.to_owned(), reason };
        let missing = || fail("the file does not exist; name another file with --credentials".into());
        let text = read_secret(path)?.ok_or_else(missing)?;
        // The text of a parser's error could contain parts of the key.
        let parsed = toml::from_str::<CredentialsFile>(&text);
        let content = parsed.map_err(|e| {
            let line = e.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            fail(format!("line {line} is not valid in a credential file; create the credentials again"))
        })?;
        let node = content.node_key.parse().map_err(|e: IdentityError| fail(e.to_string()))?;
        let identity = Identity::from_pem(&content.private_key).map_err(|e| fail(e.to_string()))?;
        Ok(Credentials { user: content.user, node, identity })
    }

    /// Returns the trust of a client that proves this identity and connects to this node.
    #[must_use]
    pub fn trust(&self) -> Trust {
        Trust::client(&self.identity, self.node)
    }

    /// Returns the content of a credential file. The caller must keep it secret.
    #[must_use]
    pub fn to_text(&self) -> String {
        let content = CredentialsFile {
            user: self.user.clone(),
            node_key: self.node.to_string(),
            private_key: self.identity.to_pem(),
        };
        let content = toml::to_string(&content).expect("strings can be encoded");
        format!("# Outboard credentials. This file contains a secret key.\n{content}")
    }

    /// Writes a new credential file, which only its owner may read. When the call returns, the
    /// content is durable; the directory is not.
    ///
    /// # Errors
    /// If the file exists or cannot be written.
    pub fn create(&self, path: &Path) -> Result<(), IdentityError> {
        write_secret(path, self.to_text().as_bytes())
    }
}

/// Writes a new file that only its owner may read.
fn write_secret(path: &Path, content: &[u8]) -> Result<(), IdentityError> {
    let fail = |e: std::io::Error| {
        let reason = match e.kind() {
            std::io::ErrorKind::AlreadyExists => "the file exists already; choose another name".to_owned(),
            _ => format!("cannot write the credentials: {e}"),
        };
        IdentityError::File { path: path.to_owned(), reason }
    };
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = opened.map_err(fail)?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn sample() -> Credentials {
        let node = Identity::generate().key();
        Credentials { user: "main/admin".into(), node, identity: Identity::generate() }
    }

    #[test]
    fn loaded_credentials_equal_the_saved_ones_and_only_the_owner_may_read_them() {
        let (dir, made) = (tempfile::tempdir().unwrap(), sample());
        let path = dir.path().join("credentials.toml");
        made.create(&path).unwrap();
        let read = Credentials::load(&path).unwrap();
        assert_eq!((read.user, read.node), (made.user.clone(), made.node));
        assert_eq!(read.identity.key(), made.identity.key());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        let again = made.create(&path).unwrap_err().to_string();
        assert!(again.contains("exists already"), "{again}");
        for mode in [0o640, 0o604, 0o620] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = Credentials::load(&path).unwrap_err();
            assert_eq!(error, IdentityError::Exposed { path: path.clone(), mode });
        }
    }

    #[test]
    fn an_invalid_credential_file_is_refused_without_showing_its_content() {
        let (dir, made) = (tempfile::tempdir().unwrap(), sample());
        let path = dir.path().join("credentials.toml");
        made.create(&path).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        let key = good.lines().find(|line| line.starts_with("MF")).unwrap().to_owned();
        let bad = [
            String::new(),
            good.replace("node-key", "node"),
            good.replace("user =", "user ="[..4].trim()),
            good.replace("BEGIN", "BEGINN"),
            format!("{good}\n{key}"),
            "x".repeat(20_000),
        ];
        for text in bad {
            std::fs::write(&path, &text).unwrap();
            let error = Credentials::load(&path).unwrap_err().to_string();
            assert!(!error.contains(&key[..24]), "{error}");
        }
        let missing = Credentials::load(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("--credentials"), "{missing}");
        assert!(Credentials::load(dir.path()).is_err());
    }
}
