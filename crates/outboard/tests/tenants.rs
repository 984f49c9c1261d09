//! Tests of tenants, users and rights by the command line, on a running node.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Status with which a command exits if the node refuses it for a missing right.
const REFUSED: i32 = 3;

/// A node in a temporary directory. Dropping the value stops the node.
struct Node(tempfile::TempDir);

impl Node {
    fn up() -> Node {
        let node = Node(tempfile::tempdir().unwrap());
        node.admin(&["up", "--detach", "--targets", "1", "--target-size", "64MiB"]);
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn dir(&self) -> PathBuf {
        self.path("node")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        for variable in ["OUTBOARD_ENDPOINT", "OUTBOARD_CREDENTIALS", "OUTBOARD_CAPABILITY"] {
            command.env_remove(variable);
        }
        command.args(args).env("OUTBOARD_DIR", self.dir());
        command
    }

    /// Runs a command of the node's own administrator. Returns its standard output.
    fn admin(&self, args: &[&str]) -> String {
        succeeded(args, self.command(args).output().unwrap())
    }

    /// Runs a command of another user.
    fn output_of(&self, credentials: &Path, args: &[&str]) -> Output {
        let mut command = self.command(args);
        command.env_remove("OUTBOARD_DIR").env("OUTBOARD_CREDENTIALS", credentials);
        command.env("OUTBOARD_ENDPOINT", self.endpoint()).output().unwrap()
    }

    fn user(&self, credentials: &Path, args: &[&str]) -> String {
        succeeded(args, self.output_of(credentials, args))
    }

    /// Runs a command of another user, which the node must refuse. Returns the message.
    fn refused(&self, credentials: &Path, args: &[&str]) -> String {
        let output = self.output_of(credentials, args);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(REFUSED), "{args:?}: {message}");
        message
    }

    fn endpoint(&self) -> String {
        let status: Value = serde_json::from_str(&self.admin(&["status", "--json"])).unwrap();
        status["endpoint"].as_str().unwrap().to_owned()
    }

    fn create_user(&self, name: &str) -> PathBuf {
        let file = self.path(&format!("{}.toml", name.replace('/', "-")));
        self.admin(&["user", "create", name, "--credentials", file.to_str().unwrap()]);
        file
    }

    fn down(&self) {
        self.admin(&["down"]);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A test may have stopped the node.
        let _ = self.command(&["down"]).output();
    }
}

fn succeeded(args: &[&str], output: Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_private_key_comes_from_a_secret_file_or_through_a_pipe() {
    let node = Node::up();
    let endpoint = node.endpoint();
    let set_mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let fails = |args: &[&str], path: &Path| {
        let output = node.command(args).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
        assert!(message.contains(&format!("chmod 600 {}", path.display())), "{message}");
    };
    let credentials = node.dir().join("credentials.toml");
    set_mode(&credentials, 0o640);
    fails(&["whoami"], &credentials);

    let mut command = node.command(&["whoami"]);
    command.env_remove("OUTBOARD_DIR").env("OUTBOARD_CREDENTIALS", "/dev/stdin");
    command.env("OUTBOARD_ENDPOINT", &endpoint).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(&std::fs::read(&credentials).unwrap()).unwrap();
    assert!(succeeded(&["whoami"], child.wait_with_output().unwrap()).contains("main/admin"));
    assert!(!Path::new("/dev/stdin.capability").exists());

    set_mode(&credentials, 0o600);
    node.down();
    let key = node.dir().join("keys/node.pem").canonicalize().unwrap();
    set_mode(&key, 0o644);
    fails(&["up", "--detach"], &key);
    set_mode(&key, 0o600);
    node.admin(&["up", "--detach"]);
}

#[test]
fn a_user_works_within_the_granted_rights_until_they_are_revoked() {
    let node = Node::up();
    node.admin(&["tenant", "create", "films"]);
    node.admin(&["pool", "create", "raw", "--tenant", "films"]);
    let cutter = node.create_user("films/cutter");
    assert_eq!(cutter.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let file = node.path("film");
    std::fs::write(&file, "frames").unwrap();
    let put = ["put", "raw/2024-a", file.to_str().unwrap()];

    let message = node.refused(&cutter, &put);
    assert!(message.contains("films/cutter has no right to write raw/2024-a"), "{message}");
    assert!(message.contains("outboard grant films/cutter --pool raw/2024-a --rights write"), "{message}");
    node.admin(&["grant", "films/cutter", "--pool", "raw/2024-", "--rights", "read,write,list"]);
    node.user(&cutter, &put);
    assert_eq!(node.user(&cutter, &["get", "raw/2024-a", "-"]), "frames");
    assert_eq!(node.user(&cutter, &["ls", "raw", "--prefix", "2024-"]), "2024-a\n");
    node.refused(&cutter, &["ls", "raw"]);
    node.refused(&cutter, &["put", "raw/2023", file.to_str().unwrap()]);
    node.refused(&cutter, &["pool", "create", "mine"]);
    node.refused(&cutter, &["status"]);
    assert_eq!(node.user(&cutter, &["pool", "ls"]), "raw\n");
    let me: Value = serde_json::from_str(&node.user(&cutter, &["whoami", "--json"])).unwrap();
    assert_eq!((&me["name"], &me["node_admin"]), (&"films/cutter".into(), &false.into()));
    assert_eq!(me["grants"][0]["pool"], "raw/2024-");

    // The administrator of the node sees the pool by name, but not its objects.
    assert_eq!(node.admin(&["pool", "ls"]), "");
    assert_eq!(node.admin(&["pool", "ls", "--tenant", "films"]), "raw\n");
    let output = node.command(&["get", "raw/2024-a", "-"]).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());

    node.admin(&["revoke", "films/cutter", "--rights", "write"]);
    node.refused(&cutter, &put);
    assert_eq!(node.user(&cutter, &["get", "raw/2024-a", "-"]), "frames");
    node.admin(&["user", "rm", "films/cutter"]);
    let message = node.refused(&cutter, &["get", "raw/2024-a", "-"]);
    assert!(message.contains("unknown or was revoked"), "{message}");

    let audit = node.admin(&["audit", "--json"]);
    let entries: Vec<Value> = serde_json::from_str(&audit).unwrap();
    let has = |event: &str, what: &str| {
        entries.iter().any(|e| e["event"] == event && e["what"].as_str().unwrap().contains(what))
    };
    assert!(has("changed", "grant films/cutter read,write,list on raw/2024-"), "{audit}");
    assert!(has("changed", "remove user films/cutter") && has("refused", "connect"), "{audit}");
    let file = node.dir().join("log/audit.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("PRIVATE") && file.metadata().unwrap().permissions().mode() & 0o077 == 0);
}

#[test]
fn accounts_survive_a_restart_and_a_tenant_is_removed_when_it_is_empty() {
    let node = Node::up();
    node.admin(&["tenant", "create", "films"]);
    let boss = node.create_user("films/boss");
    node.admin(&["grant", "films/boss", "--pool", "*", "--rights", "read,write,list,admin"]);
    node.down();
    node.admin(&["up", "--detach"]);
    node.user(&boss, &["pool", "create", "mine"]);
    // An administrator of a tenant manages its users.
    let file = node.path("helper.toml");
    let mut create =
        node.command(&["user", "create", "films/helper", "--credentials", file.to_str().unwrap()]);
    create.env("OUTBOARD_CREDENTIALS", &boss);
    succeeded(&["user create"], create.output().unwrap());
    node.user(&boss, &["grant", "films/helper", "--pool", "mine", "--rights", "read"]);
    node.refused(&boss, &["user", "ls", "main"]);
    let listed: Value = serde_json::from_str(&node.user(&boss, &["user", "ls", "--json"])).unwrap();
    let names: Vec<&str> = listed.as_array().unwrap().iter().map(|u| u["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["films/boss", "films/helper"]);

    let output = node.command(&["tenant", "rm", "films"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("remove its"));
    node.user(&boss, &["pool", "rm", "mine"]);
    node.admin(&["user", "rm", "films/helper"]);
    node.admin(&["user", "rm", "films/boss"]);
    // The node may still be removing the pool. It goes on without the tenant.
    node.admin(&["tenant", "rm", "films"]);
    let tenants: Value = serde_json::from_str(&node.admin(&["tenant", "ls", "--json"])).unwrap();
    assert_eq!(tenants.as_array().unwrap().len(), 1);
}

#[test]
fn a_capability_narrows_the_rights_of_its_user_and_serves_only_its_holder() {
    let node = Node::up();
    node.admin(&["pool", "create", "raw"]);
    let file = node.path("film");
    std::fs::write(&file, "frames").unwrap();
    node.admin(&["put", "raw/a", file.to_str().unwrap()]);
    let token = node.path("narrow.capability");
    let token = token.to_str().unwrap();
    node.admin(&["token", "issue", "--pool", "raw/a", "--rights", "read", "--valid", "10m", "--out", token]);
    let shown: Value = serde_json::from_str(&node.admin(&["token", "show", token, "--json"])).unwrap();
    assert_eq!((&shown["user"], &shown["grants"][0]["rights"]), (&"main/admin".into(), &"read".into()));
    assert_eq!(node.admin(&["--capability", token, "get", "raw/a", "-"]), "frames");
    let output = node.command(&["--capability", token, "rm", "raw/a"]).output().unwrap();
    assert_eq!(output.status.code(), Some(REFUSED), "{}", String::from_utf8_lossy(&output.stderr));

    // Another user cannot use it, and a change of the file makes it worthless.
    let other = node.create_user("main/other");
    let message = node.refused(&other, &["--capability", token, "get", "raw/a", "-"]);
    assert!(message.contains("another key"), "{message}");
    let mut altered = std::fs::read(token).unwrap();
    // The last byte belongs to the signature.
    *altered.last_mut().unwrap() ^= 1;
    std::fs::write(token, altered).unwrap();
    let output = node.command(&["--capability", token, "get", "raw/a", "-"]).output().unwrap();
    assert_eq!(output.status.code(), Some(REFUSED), "{}", String::from_utf8_lossy(&output.stderr));

    // A user cannot issue more than the user has.
    let wide = ["token", "issue", "--pool", "raw", "--rights", "read", "--out", token];
    let message = node.refused(&other, &wide);
    assert!(message.contains("main/other has no right to read raw"), "{message}");
    // Nor does a user learn which pools exist.
    let missing = ["token", "issue", "--pool", "missing", "--rights", "read", "--out", token];
    let message = node.refused(&other, &missing);
    assert!(message.contains("main/other has no right to read missing"), "{message}");
}

#[test]
fn a_credential_file_is_neither_sent_nor_overwritten() {
    let node = Node::up();
    let other = node.create_user("main/other");
    let before = std::fs::read_to_string(&other).unwrap();
    // Also with the suffix of capabilities.
    let renamed = node.path("other.capability");
    std::fs::copy(&other, &renamed).unwrap();
    let renamed = renamed.to_str().unwrap();
    node.refused(renamed.as_ref(), &["ls", "p"]);
    assert_eq!(std::fs::read_to_string(renamed).unwrap(), before);
    let valid = ["token", "issue", "--valid", "500ms", "--out"];
    for (args, code, why) in [
        (vec!["--capability", renamed, "pool", "ls"], 1, "contains no capability"),
        ([&valid[..], &[renamed]].concat(), 1, "contains no capability"),
        (vec!["token", "issue", "--valid", "0s", "--out", "none"], 2, "--valid is 0"),
    ] {
        let output = node.command(&args).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && message.contains(why), "{args:?}: {message}");
    }
    assert_eq!(std::fs::read_to_string(renamed).unwrap(), before);
    // A period is rounded up to whole seconds.
    let token = node.path("short");
    let token = token.to_str().unwrap();
    for _ in 0..2 {
        node.admin(&[&valid[..], &[token]].concat());
    }
    let shown: Value = serde_json::from_str(&node.admin(&["token", "show", token, "--json"])).unwrap();
    let seconds = |key: &str| shown[key].as_u64().unwrap();
    assert_eq!(seconds("expires_s") - seconds("issued_s"), 1);
}

#[test]
fn sessions_can_be_listed_and_killed() {
    let node = Node::up();
    node.admin(&["pool", "create", "p"]);
    let mut reader = node.command(&["bench", "write", "--pool", "p", "--seconds", "30"]);
    let mut reader = reader.stdout(std::process::Stdio::null()).spawn().unwrap();
    let sessions =
        || -> Vec<Value> { serde_json::from_str(&node.admin(&["session", "ls", "--json"])).unwrap() };
    let began = Instant::now();
    // The commands of an operator open no session.
    while sessions().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", sessions());
    }
    let listed = sessions();
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0]["user"], "main/admin", "{listed:?}");
    let id = listed[0]["id"].as_str().unwrap();
    node.admin(&["session", "kill", id]);
    assert!(sessions().iter().all(|session| session["id"] != id));
    let output = node.command(&["session", "kill", id]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("session ls"));
    reader.kill().unwrap();
    reader.wait().unwrap();
}

#[test]
fn every_command_that_changes_accounts_prints_one_json_object_on_request() {
    let node = Node::up();
    let json = |args: &[&str]| -> Value {
        let printed = node.admin(&[args, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{args:?}: {e}: {printed}"))
    };
    let file = node.path("cutter.toml");
    let file = file.to_str().unwrap();
    assert_eq!(json(&["tenant", "create", "films"])["tenant"], "films");
    node.admin(&["pool", "create", "raw", "--tenant", "films"]);
    let made = json(&["user", "create", "films/cutter", "--credentials", file]);
    assert_eq!((&made["user"], &made["credentials"]), (&"films/cutter".into(), &file.into()));
    assert_eq!(made["key"].as_str().unwrap().len(), 64);
    let granted = json(&["grant", "films/cutter", "--pool", "raw/a", "--rights", "list,read"]);
    assert_eq!((&granted["pool"], &granted["rights"]), (&"raw/a".into(), &"read,list".into()));
    let revoked = json(&["revoke", "films/cutter", "--rights", "list"]);
    assert_eq!((&revoked["user"], &revoked["rights"]), (&"films/cutter".into(), &"list".into()));
    let token = node.path("token");
    let issued = json(&["token", "issue", "--valid", "1m", "--out", token.to_str().unwrap()]);
    assert_eq!((&issued["user"], issued["expires_s"].is_u64()), (&"main/admin".into(), true));
    assert_eq!(json(&["user", "rm", "films/cutter"])["user"], "films/cutter");
    node.admin(&["pool", "rm", "raw", "--tenant", "films"]);
    assert_eq!(json(&["tenant", "rm", "films"])["tenant"], "films");
    assert_eq!(node.admin(&["tenant", "create", "films"]), "", "without --json, a change prints nothing");
}

#[test]
fn a_node_with_another_key_is_no_refusal_and_an_absent_local_address_is_named() {
    let (node, other) = (Node::up(), Node::up());
    let endpoint = other.endpoint();
    for (args, why) in [
        (&["--endpoint", &*endpoint, "pool", "ls"][..], "it is another node, or an attacker"),
        (&["--endpoint", &*endpoint, "ls", "p"], "it is another node, or an attacker"),
        (&["--bind", "192.0.2.1", "pool", "ls"], "cannot connect from 192.0.2.1"),
    ] {
        let output = node.command(args).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && message.contains(why), "{args:?}: {message}");
    }
}

#[test]
fn status_warns_while_the_osd_accepts_an_altered_map() {
    let node = Node::up();
    for (accepts, warns) in [("true", true), ("false", false)] {
        node.down();
        let mut up = node.command(&["up", "--detach"]);
        let up = up.env("OUTBOARD_OSD_ACCEPT_ALTERED_MAP", accepts).output().unwrap();
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        let status = node.admin(&["status"]);
        assert_eq!(status.contains("the storage host may have altered"), warns, "{status}");
    }
}
