//! The debug socket of a role: arms faults and tunes the channel while the role runs.
//!
//! The debug socket is a UNIX socket in the node's directory, and only the directory's owner can
//! reach it. Each connection carries one request and one answer, each as one line of JSON.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::fault::{Fault, Faults};
use base::thread::ThreadClass;
use serde::{Deserialize, Serialize};

use super::config::ChannelSection;
use super::units::{ByteSize, OutOfRange, multiple, within};

/// Maximum length of a request, in bytes.
const MAX_REQUEST: u64 = 16 << 10;
/// Maximum time for one read or write of the socket.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause after a failed attempt to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A request to a role.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DebugRequest {
    /// Returns the armed faults and the tuning.
    Show,
    /// Arms a fault, in the text form of [`Fault`].
    Arm(String),
    /// Disarms all faults.
    Clear,
    /// Changes how the osd uses the channel.
    Tune(ChannelTuning),
}

/// A role's answer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DebugAnswer {
    /// Reason why the request was refused; `None` if it was executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The armed faults.
    #[serde(default)]
    pub faults: Vec<ArmedFault>,
    /// Current tuning of the channel, if the role is an osd that uses a channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<ChannelTuning>,
    /// Tuning of the channel in the configuration, if the role is an osd that uses a channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<ChannelTuning>,
}

impl std::fmt::Display for ArmedFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (fired {})", self.fault, self.fired)
    }
}

/// An armed fault.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ArmedFault {
    /// Text form of the fault.
    pub fault: String,
    /// How often the fault has fired.
    pub fired: u64,
}

/// Settings by which the osd uses the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelTuning {
    /// Whether the segments of a request are received, moved and written concurrently.
    pub pipeline: bool,
    /// Number of host-memory windows that stay registered for DMA. With 0, each request registers
    /// its own window.
    pub region_cache: usize,
    /// Maximum length of a DMA transfer; the engine's own limit also applies.
    pub max_transfer: ByteSize,
    /// Number of DMA queues in use. With 1, short requests wait for long requests.
    pub dma_queues: usize,
    /// How long the osd's side polls for completions before it sleeps, in microseconds.
    pub poll_us: u64,
}

impl ChannelTuning {
    /// Checks that the values are valid. The same limits apply to the configuration.
    ///
    /// # Errors
    /// The error names the first value that is not allowed.
    pub fn check(&self) -> Result<(), OutOfRange> {
        within("channel.region_cache", self.region_cache as u64, ChannelSection::REGION_CACHE)?;
        within("channel.max_transfer", self.max_transfer.0, ChannelSection::MAX_TRANSFER)?;
        multiple("channel.max_transfer", self.max_transfer, ChannelSection::MAX_TRANSFER_UNIT)?;
        within("channel.queues", self.dma_queues as u64, ChannelSection::QUEUES)?;
        within("channel.poll_us", self.poll_us, ChannelSection::POLL_US)
    }
}

/// Reason why a role cannot be tuned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TuneError {
    /// The role does not use a channel.
    #[error("this role has nothing to tune; only the osd of a node with placement dpu has a channel to tune")]
    NothingToTune,
    /// A value is not allowed.
    #[error("{0}; `docs/configuration.md` lists the valid values")]
    OutOfRange(#[from] OutOfRange),
}

/// A function that applies a tuning.
pub type Tune = Box<dyn Fn(ChannelTuning) + Send>;

/// The settings of a role that can change while the role runs.
#[derive(Clone, Default)]
pub struct Controls {
    faults: Faults,
    tuned: Arc<Mutex<Option<Tunable>>>,
}

/// A channel that can be tuned.
struct Tunable {
    configured: ChannelTuning,
    current: ChannelTuning,
    /// One function for each shard.
    tune: Vec<Tune>,
}

impl std::fmt::Debug for Controls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controls").field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl Controls {
    /// Returns the role's faults.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Makes a shard of the role tunable from now on. The channel has the tuning `configured`, and
    /// `tune` applies another tuning to the shard's part of the channel.
    pub fn tune_with(&self, configured: ChannelTuning, tune: Tune) {
        let mut tuned = self.tuned.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Tunable { configured, current: configured, tune: Vec::new() };
        let tunable = tuned.get_or_insert(fresh);
        if tunable.current != configured {
            tune(tunable.current);
        }
        tunable.tune.push(tune);
    }

    fn answer(&self, request: DebugRequest) -> DebugAnswer {
        let error = match request {
            DebugRequest::Show => None,
            DebugRequest::Arm(text) => {
                let armed = text.parse::<Fault>().and_then(|fault| self.faults.arm(fault));
                armed.err().map(|e| e.to_string())
            }
            DebugRequest::Clear => {
                self.faults.clear();
                None
            }
            DebugRequest::Tune(tuning) => self.tune(tuning).err().map(|e| e.to_string()),
        };
        let armed = self.faults.armed().into_iter();
        let faults = armed.map(|a| ArmedFault { fault: a.fault, fired: a.fired }).collect();
        let tuned = self.tuned.lock().unwrap_or_else(PoisonError::into_inner);
        let (tuning, configured) = tuned.as_ref().map(|t| (t.current, t.configured)).unzip();
        DebugAnswer { error, faults, tuning, configured }
    }

    fn tune(&self, wanted: ChannelTuning) -> Result<(), TuneError> {
        let mut tuned = self.tuned.lock().unwrap_or_else(PoisonError::into_inner);
        let tunable = tuned.as_mut().ok_or(TuneError::NothingToTune)?;
        wanted.check()?;
        tracing::warn!(?wanted, "the tuning of the channel has changed");
        tunable.tune.iter().for_each(|tune| tune(wanted));
        tunable.current = wanted;
        Ok(())
    }

    /// Serves the socket at `path` on a separate thread.
    ///
    /// # Errors
    /// If the socket cannot be created at the path.
    pub fn serve(&self, path: &Path) -> std::io::Result<()> {
        let listener = bind_private(path)?;
        let controls = self.clone();
        base::thread::spawn(ThreadClass::Admin, "debug", move || {
            for stream in listener.incoming() {
                match stream {
                    Ok(stream) => {
                        if let Err(e) = controls.respond(&stream) {
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

    fn respond(&self, stream: &UnixStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_REQUEST)).read_line(&mut line)?;
        let answer = match serde_json::from_str(&line) {
            Ok(request) => self.answer(request),
            Err(e) => DebugAnswer {
                error: Some(format!("the request is not valid: {e}")),
                ..DebugAnswer::default()
            },
        };
        let mut stream = stream;
        stream.write_all((serde_json::to_string(&answer)? + "\n").as_bytes())
    }
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

/// Sends `request` to the role whose debug socket is at `path`. Returns the role's answer.
///
/// # Errors
/// If no role answers, or if the answer is invalid. A refused request is not an error here; the
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
        let controls = Controls::default();
        controls.serve(&path).unwrap();
        let armed = ask(&path, &DebugRequest::Arm("dma.transfer=fail,count=1".into())).unwrap();
        assert_eq!((armed.error, armed.faults.len()), (None, 1));
        assert!(controls.faults().any());
        let refused = ask(&path, &DebugRequest::Arm("x".into())).unwrap();
        assert!(refused.error.unwrap().contains("SITE=ACTION"));
        let tuning = ChannelTuning {
            pipeline: true,
            region_cache: 1,
            max_transfer: ByteSize(4096),
            dma_queues: 1,
            poll_us: 0,
        };
        assert!(ask(&path, &DebugRequest::Tune(tuning)).unwrap().error.unwrap().contains("nothing to tune"));
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
            Controls::default().serve(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert!(ask(&path, &DebugRequest::Show).unwrap().faults.is_empty());
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary files remain");
        }
        std::fs::create_dir(dir.path().join("debug.new")).unwrap();
        std::fs::write(dir.path().join("debug.new/others"), "").unwrap();
        let refused = Controls::default().serve(&path).unwrap_err();
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::AlreadyExists,
            "the directory could belong to another program"
        );
    }

    #[test]
    fn valid_channel_tunings_are_applied_and_values_out_of_range_are_refused() {
        let controls = Controls::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let saw = Arc::clone(&seen);
        let tuning = ChannelTuning {
            pipeline: true,
            region_cache: 64,
            max_transfer: ByteSize(2 << 20),
            dma_queues: 5,
            poll_us: 0,
        };
        controls.tune_with(tuning, Box::new(move |t| saw.lock().unwrap().push(t)));
        let wanted = ChannelTuning { region_cache: 0, ..tuning };
        let answer = controls.answer(DebugRequest::Tune(wanted));
        assert_eq!((answer.tuning, answer.configured), (Some(wanted), Some(tuning)));
        assert_eq!(*seen.lock().unwrap(), [wanted]);
        for impossible in [
            ChannelTuning { region_cache: usize::MAX, ..tuning },
            ChannelTuning { max_transfer: ByteSize(0), ..tuning },
            ChannelTuning { max_transfer: ByteSize(4 << 20), ..tuning },
            ChannelTuning { max_transfer: ByteSize(5000), ..tuning },
            ChannelTuning { dma_queues: 0, ..tuning },
            ChannelTuning { poll_us: u64::MAX, ..tuning },
        ] {
            assert!(matches!(controls.tune(impossible), Err(TuneError::OutOfRange(_))), "{impossible:?}");
            let answer = controls.answer(DebugRequest::Tune(impossible));
            assert!(answer.error.is_some() && answer.tuning == Some(wanted), "{answer:?}");
        }
        assert_eq!(seen.lock().unwrap().len(), 1, "a refused tuning is not applied");
    }
}
