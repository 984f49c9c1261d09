//! The debug socket of the store's process: arms faults while the process runs. The process of the osd
//! needs no socket, because an operator reaches its [`Controls`](crate::debug::Controls) over the control
//! plane.
//!
//! The debug socket is a UNIX socket in the node's directory, and only the directory's owner can
//! reach it. Each connection carries one request and one answer, each as one line of JSON.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use base::fault::{Armed, Fault, Faults};
use base::thread::ThreadClass;
use serde::{Deserialize, Serialize};

/// Maximum length of a request, in bytes.
const MAX_REQUEST: u64 = 16 << 10;
/// Maximum time for one read or write of the socket.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause after a failed attempt to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A request to the store's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DebugRequest {
    /// Returns the armed faults.
    Show,
    /// Arms a fault, in the text form of [`Fault`].
    Arm(String),
    /// Disarms all faults.
    Clear,
}

/// The answer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DebugAnswer {
    /// Reason why the request was refused; `None` if it was executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The armed faults.
    #[serde(default)]
    pub faults: Vec<Armed>,
}

/// Serves the socket at `path` on a separate thread.
///
/// # Errors
/// If the socket cannot be created at the path.
pub fn serve(path: &Path, faults: Faults) -> std::io::Result<()> {
    let listener = bind_private(path)?;
    base::thread::spawn(ThreadClass::Admin, "debug", move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => {
                    if let Err(e) = respond(&faults, &stream) {
                        tracing::debug!("debug request failed: {e}");
                    }
                }
                Err(e) => {
                    // The cause, such as a lack of descriptors, may last for a while.
                    tracing::warn!("cannot accept a connection at the debug socket: {e}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    })?;
    Ok(())
}

fn respond(faults: &Faults, stream: &UnixStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST)).read_line(&mut line)?;
    let error = match serde_json::from_str(&line) {
        Ok(request) => execute(faults, request).err(),
        Err(e) => Some(format!("the request is not valid: {e}")),
    };
    let answer = DebugAnswer { error, faults: faults.armed() };
    let mut stream = stream;
    stream.write_all((serde_json::to_string(&answer)? + "\n").as_bytes())
}

fn execute(faults: &Faults, request: DebugRequest) -> Result<(), String> {
    match request {
        DebugRequest::Show => {}
        DebugRequest::Arm(text) => {
            let fault = text.parse::<Fault>().map_err(|e| e.to_string())?;
            faults.arm(fault).map_err(|e| e.to_string())?;
        }
        DebugRequest::Clear => drop(faults.clear()),
    }
    Ok(())
}

/// Listens at `path` and replaces an existing file. At every moment only the owner can connect: the
/// socket is created in a directory that only the owner can enter, and is moved to `path` after its
/// mode is set.
fn bind_private(path: &Path) -> std::io::Result<UnixListener> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let private = Path::new(&name);
    let socket = private.join("s");
    // A process that was killed inside this function leaves the socket and the directory behind. If
    // they cannot be removed, the creation of the directory fails.
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_dir(private);
    std::fs::DirBuilder::new().mode(0o700).create(private)?;
    let listen = || {
        let listener = UnixListener::bind(&socket)?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&socket, path)?;
        Ok(listener)
    };
    let listener = listen();
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_dir(private);
    listener
}

/// Sends `request` to the process whose debug socket is at `path`. Returns its answer.
///
/// # Errors
/// If no process answers, or if the answer is invalid. A refused request is not an error here; the
/// answer reports it.
pub fn ask(path: &Path, request: &DebugRequest) -> std::io::Result<DebugAnswer> {
    // `path` may be too long for the address of a UNIX socket. The path through the directory's
    // descriptor is short.
    let (dir, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let dir = std::fs::File::open(if dir.as_os_str().is_empty() { Path::new(".") } else { dir })?;
    let short = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
    let mut stream = UnixStream::connect(short)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all((serde_json::to_string(request)? + "\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_can_be_armed_shown_and_cleared_and_bad_requests_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("debug");
        let faults = Faults::default();
        serve(&path, faults.clone()).unwrap();
        let armed = ask(&path, &DebugRequest::Arm("dma.transfer=fail,count=1".into())).unwrap();
        assert_eq!((armed.error, armed.faults.len()), (None, 1));
        assert!(faults.any());
        let refused = ask(&path, &DebugRequest::Arm("x".into())).unwrap();
        assert!(refused.error.unwrap().contains("SITE=ACTION"));
        assert!(ask(&path, &DebugRequest::Clear).unwrap().faults.is_empty());
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"what?\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("is not valid"), "{answer}");
    }

    #[test]
    fn the_debug_socket_replaces_an_old_socket_and_only_its_owner_can_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("debug");
        for _ in 0..2 {
            let _left_over = UnixListener::bind(&path);
            // A process that was killed inside `bind_private` leaves this directory and socket
            // behind.
            std::fs::create_dir(dir.path().join("debug.new")).unwrap();
            let _left_over = UnixListener::bind(dir.path().join("debug.new/s"));
            serve(&path, Faults::default()).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert!(ask(&path, &DebugRequest::Show).unwrap().faults.is_empty());
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary files remain");
        }
        std::fs::create_dir(dir.path().join("debug.new")).unwrap();
        std::fs::write(dir.path().join("debug.new/others"), "").unwrap();
        let refused = serve(&path, Faults::default()).unwrap_err();
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::AlreadyExists,
            "the directory could belong to another program"
        );
    }
}
