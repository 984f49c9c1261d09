//! [`AuditFile`]: stores the audit log in files.
//!
//! `log/audit.jsonl` has one JSON object per line. A thread of its own writes it, so a slow drive never
//! delays a request. When the file has reached `log.audit_size`, it becomes `audit.jsonl.1`, and older
//! ones `.2` to `.4`; the oldest is removed. If events arrive faster than they can be written, the
//! thread writes how many were lost.
//!
//! Users cannot flood the log: per tenant and minute, it keeps [`PER_MINUTE`] events of the kinds that
//! every user can cause, and as many changes by administrators. Then it writes how many it has left out.
//! It always keeps changes by users of the tenant `main`, to which the administrators of the node belong.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use base::BoxFuture;
use base::collections::HashMap;
use base::thread::{self, ThreadClass};
use osd::{AuditEvent, AuditKind, AuditSink};
use tokio::sync::oneshot;

use super::node_keys::MAIN_TENANT;

/// Path of the log, relative to the node's directory.
pub const AUDIT_LOG: &str = "log/audit.jsonl";
/// Number of older files that are kept.
const OLDER: u32 = 4;
/// Maximum number of events that wait to be written.
const BACKLOG: usize = 4096;
/// Maximum number of changes, and of other events, per tenant and minute.
const PER_MINUTE: u32 = 600;
/// Maximum length of a text in an event, in bytes. Requests contain names of any length.
const TEXT_MAX: usize = 512;
/// Maximum size of the part of the log that is read for [`AuditSink::recent`], in bytes.
const RECENT_BYTES: u64 = 1 << 20;

enum AuditWork {
    Record(Box<AuditEvent>),
    Recent(usize, oneshot::Sender<Vec<String>>),
}

/// Stores the audit log in files.
#[derive(Debug)]
pub struct AuditFile {
    work: SyncSender<AuditWork>,
    lost: std::sync::Arc<AtomicU64>,
    flood: Mutex<FloodGuard>,
}

/// Counts the events of each tenant in the current minute.
#[derive(Debug, Default)]
struct FloodGuard {
    minute: u64,
    /// Number of events by tenant: changes (true), and others.
    counts: HashMap<(String, bool), u32>,
    left_out: u64,
}

impl FloodGuard {
    /// Returns whether the log keeps an event, and the number of events that were left out in an earlier
    /// minute, if they were not reported yet.
    fn admit(&mut self, event: &AuditEvent) -> (bool, u64) {
        let minute = event.at_ms / 60_000;
        let mut unreported = 0;
        if minute != self.minute {
            unreported = std::mem::take(&mut self.left_out);
            (self.minute, self.counts) = (minute, HashMap::default());
        }
        let is_change = matches!(event.event, AuditKind::Changed | AuditKind::SessionKilled);
        let tenant = event.user.as_deref().and_then(|user| user.split('/').next()).unwrap_or_default();
        if is_change && tenant == MAIN_TENANT {
            return (true, unreported);
        }
        let count = self.counts.entry((tenant.to_owned(), is_change)).or_default();
        *count += 1;
        let is_kept = *count <= PER_MINUTE;
        self.left_out += u64::from(!is_kept);
        (is_kept, unreported)
    }
}

/// Cuts a text that is too long.
fn cut(text: &mut String) {
    if text.len() > TEXT_MAX {
        let end = (0..=TEXT_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

impl AuditFile {
    /// Starts the thread that writes the log at `path`, whose directory is created if it is missing. A file that has more than `max` bytes is
    /// replaced by a new one.
    ///
    /// # Errors
    /// If the file cannot be opened, or the system cannot start a thread.
    pub fn start(path: &Path, max: u64) -> io::Result<AuditFile> {
        // A role that was started by hand may run in a directory without logs.
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut writer = AuditWriter { path: path.to_owned(), file: open(path)?, max };
        let (work, waiting) = sync_channel(BACKLOG);
        let lost = std::sync::Arc::<AtomicU64>::default();
        let not_written = std::sync::Arc::clone(&lost);
        thread::spawn(ThreadClass::Admin, "audit", move || writer.run(&waiting, &not_written))?;
        Ok(AuditFile { work, lost, flood: Mutex::default() })
    }
}

impl AuditSink for AuditFile {
    fn record(&self, mut event: AuditEvent) {
        // No code panics while it holds the mutex.
        let (is_kept, left_out) = self.flood.lock().unwrap_or_else(PoisonError::into_inner).admit(&event);
        self.lost.fetch_add(left_out, Ordering::Relaxed);
        if !is_kept {
            return;
        }
        cut(&mut event.what);
        event.why.as_mut().into_iter().for_each(cut);
        if self.work.try_send(AuditWork::Record(Box::new(event))).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn recent(&self, limit: usize) -> BoxFuture<'static, Vec<String>> {
        let (answer, answered) = oneshot::channel();
        let asked = self.work.try_send(AuditWork::Recent(limit, answer));
        Box::pin(async move {
            match asked {
                Ok(()) => answered.await.unwrap_or_default(),
                Err(_) => Vec::new(),
            }
        })
    }
}

struct AuditWriter {
    path: PathBuf,
    file: File,
    max: u64,
}

impl AuditWriter {
    /// Writes events until the sink is dropped.
    fn run(&mut self, waiting: &Receiver<AuditWork>, lost: &AtomicU64) {
        while let Ok(work) = waiting.recv() {
            let done = match work {
                AuditWork::Record(event) => self.write(&event, lost.swap(0, Ordering::Relaxed)),
                AuditWork::Recent(limit, answer) => self.recent(limit).map(|lines| drop(answer.send(lines))),
            };
            if let Err(error) = done {
                tracing::error!(path = %self.path.display(), %error, "the audit log cannot be written");
            }
        }
    }

    fn write(&mut self, event: &AuditEvent, lost: u64) -> io::Result<()> {
        if self.file.metadata()?.len() > self.max {
            self.rotate()?;
        }
        let mut lines = serde_json::to_vec(event)?;
        lines.push(b'\n');
        if lost > 0 {
            writeln!(lines, "{{\"at_ms\":{},\"event\":\"lost\",\"what\":\"{lost} events\"}}", event.at_ms)?;
        }
        self.file.write_all(&lines)
    }

    fn rotate(&mut self) -> io::Result<()> {
        let older = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..OLDER).rev() {
            match std::fs::rename(older(number), older(number + 1)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        std::fs::rename(&self.path, older(1))?;
        self.file = open(&self.path)?;
        Ok(())
    }

    fn recent(&self, limit: usize) -> io::Result<Vec<String>> {
        let mut file = File::open(&self.path)?;
        let start = file.metadata()?.len().saturating_sub(RECENT_BYTES);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(RECENT_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        // The first line may be incomplete.
        let lines: Vec<&str> = text.lines().skip(usize::from(start > 0)).collect();
        Ok(lines[lines.len().saturating_sub(limit)..].iter().map(|line| (*line).to_owned()).collect())
    }
}

/// Opens a log. Only its owner can read it.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use identity::KeyHash;

    use super::*;

    fn event(number: u64) -> AuditEvent {
        AuditEvent {
            at_ms: number,
            event: AuditKind::Refused,
            user: Some("films/cutter".into()),
            key: KeyHash::from([1; 32]),
            peer: None,
            what: "\"quoted\"\n".into(),
            why: None,
        }
    }

    #[tokio::test]
    async fn events_are_json_lines_in_files_of_bounded_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let log = AuditFile::start(&path, 1000).unwrap();
        for number in 0..100 {
            log.record(event(number));
        }
        let lines = log.recent(2).await;
        let times: Vec<u64> = lines
            .iter()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["at_ms"].as_u64().unwrap())
            .collect();
        assert_eq!(times, [98, 99]);
        let files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap()).collect();
        assert_eq!(files.len(), 5, "{files:?}");
        assert!(files.iter().all(|file| file.metadata().unwrap().len() < 1300));
        drop(log);
        let again = AuditFile::start(&path, 1000).unwrap();
        again.record(event(100));
        assert_eq!(again.recent(2).await.len(), 2, "a restart continues the file");
    }

    #[tokio::test]
    async fn a_tenant_cannot_flood_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = AuditFile::start(&dir.path().join("audit.jsonl"), 1 << 20).unwrap();
        let of = |user: &str, kind: AuditKind, at_ms: u64| AuditEvent {
            user: Some(user.into()),
            event: kind,
            what: "w".repeat(10_000),
            ..event(at_ms)
        };
        let kept = async || {
            let lines = log.recent(10_000).await;
            let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
            assert!(lines.iter().all(|line| line.len() < 2 * TEXT_MAX));
            (count("films/"), count("rival/"), count("\"lost\""))
        };
        for _ in 0..2 * PER_MINUTE {
            log.record(of("films/cutter", AuditKind::Refused, 1));
            if log.work.try_send(AuditWork::Recent(0, oneshot::channel().0)).is_err() {
                std::thread::yield_now();
            }
        }
        log.record(of("films/admin", AuditKind::Changed, 2));
        log.record(of("rival/owner", AuditKind::Refused, 2));
        assert_eq!(kept().await, (PER_MINUTE as usize + 1, 1, 0));
        log.record(of("films/cutter", AuditKind::Refused, 60_001));
        assert_eq!(kept().await, (PER_MINUTE as usize + 2, 1, 1), "the next minute begins");
        // Changes have a limit of their own, but not those of the node's administrators.
        let mut guard = FloodGuard::default();
        let mut admitted =
            |user: &str, kind| (0..2 * PER_MINUTE).filter(|_| guard.admit(&of(user, kind, 3)).0).count();
        assert_eq!(admitted("films/admin", AuditKind::Changed), PER_MINUTE as usize);
        assert_eq!(admitted("films/admin", AuditKind::Refused), PER_MINUTE as usize);
        assert_eq!(admitted("main/admin", AuditKind::Changed), 2 * PER_MINUTE as usize);
    }
}
