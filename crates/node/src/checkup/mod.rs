//! The checks of `outboard doctor`.

mod rdma;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use base::mem::{Arena, ArenaBuf, HUGE_PAGE};
use rustix::fs::{Mode, OFlags};
use rustix::process::Resource;
use serde::Serialize;

use crate::config::OsdSection;
use crate::cpus::ChannelSide;
use crate::dir::NodeDir;
use crate::roster::{self, Roster, RosterError};
use crate::units::ByteSize;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// No problem.
    Good,
    /// A node can run, but at a higher cost or with less safety.
    Costs,
    /// A node cannot run.
    Prevents,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub what: &'static str,
    /// Severity.
    pub grade: Grade,
    /// What the check found.
    pub found: String,
    /// Why the check matters.
    pub why: &'static str,
    /// What to do about it, if anything.
    pub remedy: Option<String>,
}

/// Oldest Linux version with which Outboard is tested. It has all io_uring features that Outboard
/// uses.
const OLDEST_KERNEL: (u32, u32) = (5, 15);
/// Minimum limit of locked memory, in bytes. The store locks memory for registered buffers.
const MEMLOCK_WANTED: u64 = 256 << 20;
/// Number of 2 MiB huge pages that an osd and a store need for shared memory with the default
/// sizes, including emulated DPU memory.
const HUGE_PAGES_WANTED: u64 = 130;
/// Number of file descriptors that a node with many clients needs.
const FILES_WANTED: u64 = 4096;

/// Runs all checks. `dir` is the node's existing or future directory. `targets` are the configured
/// targets, relative to `dir`. `osd` configures the osd.
pub fn all(dir: &Path, targets: &[PathBuf], osd: &OsdSection) -> Vec<Finding> {
    let mut findings = vec![kernel(), io_uring(), memlock(), huge_pages(), open_files(), clock()];
    findings.push(shards(osd));
    findings.extend(roster(dir));
    findings.extend(file_system(dir));
    findings.extend(places(dir, targets).iter().map(|place| direct_io(place)));
    findings.extend(rdma::all());
    findings.push(emulation());
    findings
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (major, minor) = OLDEST_KERNEL;
    let old = version < OLDEST_KERNEL;
    Finding {
        what: "kernel",
        grade: if old { Grade::Costs } else { Grade::Good },
        found: format!("Linux {release}"),
        why: "Outboard accesses drives with io_uring, which older kernels support only partly",
        remedy: old.then(|| format!("install Linux {major}.{minor} or newer")),
    }
}

/// Sets up io_uring in the same way as a target does.
fn io_uring() -> Finding {
    let result = io_uring::IoUring::new(8);
    let switch = read("/proc/sys/kernel/io_uring_disabled").filter(|v| v != "0");
    Finding {
        what: "io_uring",
        grade: if result.is_ok() { Grade::Good } else { Grade::Prevents },
        found: result.as_ref().map_or_else(|e| format!("not available: {e}"), |_| "available".to_owned()),
        why: "Outboard reads and writes targets with io_uring",
        remedy: result.is_err().then(|| match switch {
            Some(_) => "allow io_uring: sysctl kernel.io_uring_disabled=0".to_owned(),
            None => {
                "allow the io_uring system calls (container runtimes block them in their seccomp profile)"
                    .to_owned()
            }
        }),
    }
}

fn limit(resource: Resource) -> u64 {
    rustix::process::getrlimit(resource).current.unwrap_or(u64::MAX)
}

fn memlock() -> Finding {
    let have = limit(Resource::Memlock);
    let privileged = read("/proc/self/status")
        .and_then(|s| s.lines().find_map(|l| l.strip_prefix("CapEff:").map(|v| v.trim().to_owned())))
        .and_then(|mask| u64::from_str_radix(&mask, 16).ok())
        // CAP_IPC_LOCK, capabilities(7).
        .is_some_and(|mask| mask & (1 << 14) != 0);
    let enough = privileged || have >= MEMLOCK_WANTED;
    let size = if have == u64::MAX { "unlimited".to_owned() } else { ByteSize(have).to_string() };
    let found =
        if privileged { format!("{size}, which does not apply to this user (CAP_IPC_LOCK)") } else { size };
    Finding {
        what: "memory lock limit",
        grade: if enough { Grade::Good } else { Grade::Costs },
        found,
        why: "a write of 2 MiB costs about 10 µs of CPU time with registered buffers, and about 110 µs with other buffers",
        remedy: (!enough).then(|| {
            let wanted = ByteSize(MEMLOCK_WANTED);
            format!(
                "raise the limit to {wanted}: `ulimit -l {}`, LimitMEMLOCK= in a systemd unit, or limits.conf",
                MEMLOCK_WANTED >> 10
            )
        }),
    }
}

/// Tries both sources of huge pages: reserved pages, and transparent huge pages in ordinary memory.
fn huge_pages() -> Finding {
    let free = read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.and_then(|n| n.parse().ok()).unwrap_or(0);
    let gathers = Arena::anonymous(HUGE_PAGE).is_ok_and(|arena| arena.gather() == HUGE_PAGE);
    let shared = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let denied = shared.is_some_and(|modes| modes.contains("[deny]"));
    let good = free >= HUGE_PAGES_WANTED || (gathers && !denied);
    let others = match (gathers, denied) {
        (true, false) => "ordinary memory can be collapsed into huge pages",
        (true, true) => "the kernel denies huge pages for shared memory",
        (false, _) => "ordinary memory cannot be collapsed into huge pages (this needs Linux 6.1 or newer)",
    };
    Finding {
        what: "huge pages",
        grade: if good { Grade::Good } else { Grade::Costs },
        found: format!("{free} reserved pages of 2 MiB are free; {others}"),
        why: "without huge pages, direct I/O costs about 25 µs more CPU time per MiB",
        remedy: (!good).then(|| {
            format!(
                "reserve huge pages: `sysctl vm.nr_hugepages={HUGE_PAGES_WANTED}`, or hugepages={HUGE_PAGES_WANTED} at boot"
            )
        }),
    }
}

/// Checks the hard limit, because every role raises its soft limit to the hard limit at its start.
fn open_files() -> Finding {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let enough = limit.maximum.is_none_or(|most| most >= FILES_WANTED);
    Finding {
        what: "open files",
        grade: if enough { Grade::Good } else { Grade::Costs },
        found: format!(
            "{} per process; a node raises this limit to the hard limit, {}",
            shown(limit.current),
            shown(limit.maximum)
        ),
        why: "the connection of each client uses a file descriptor of the osd",
        remedy: (!enough).then(|| {
            format!("raise the hard limit to {FILES_WANTED}: `ulimit -Hn {FILES_WANTED}`, or LimitNOFILE= in a systemd unit")
        }),
    }
}

/// Compares the number of shards with the CPUs of the osd.
fn shards(osd: &OsdSection) -> Finding {
    let shards = osd.shards.shards(osd.cpus).map_or(1, usize::from);
    let cpus = osd.cpus.count(ChannelSide::Dpu).unwrap_or(1);
    let is_too_many = shards > cpus;
    let (shard_noun, cpu_noun) =
        (if shards == 1 { "shard" } else { "shards" }, if cpus == 1 { "CPU" } else { "CPUs" });
    Finding {
        what: "shards",
        grade: if is_too_many { Grade::Costs } else { Grade::Good },
        found: format!("{shards} {shard_noun} on {cpus} {cpu_noun}"),
        why: "a shard of the osd is one thread; shards that share a CPU only add switches between threads",
        remedy: is_too_many.then(|| {
            format!(
                "set osd.shards to \"auto\" or to at most {cpus}, or give the osd more CPUs with osd.cpus"
            )
        }),
    }
}

fn clock() -> Finding {
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    // Programs read these clock sources without a system call.
    let quick = matches!(
        source.as_deref(),
        Some("tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page")
    );
    Finding {
        what: "clock source",
        grade: if quick { Grade::Good } else { Grade::Costs },
        found: source.unwrap_or_else(|| "unknown".to_owned()),
        why: "the clock is read several times per request; a slow source costs about 1 µs each time",
        remedy: (!quick).then(|| "boot with clocksource=tsc if the machine's TSC is stable".to_owned()),
    }
}

/// Returns the directory, or its nearest ancestor that exists.
fn existing(dir: &Path) -> &Path {
    let there = dir.ancestors().find(|p| p.is_dir()).unwrap_or(Path::new("."));
    if there.as_os_str().is_empty() { Path::new(".") } else { there }
}

/// Returns the block devices among the targets, and the directories of the targets that are or will
/// be files.
fn places(dir: &Path, targets: &[PathBuf]) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = Vec::new();
    for target in targets {
        let target = dir.join(target);
        let place = if is_block_device(&target) { target } else { existing(&target).to_owned() };
        if !places.contains(&place) {
            places.push(place);
        }
    }
    if places.is_empty() {
        places.push(existing(dir).to_owned());
    }
    places
}

fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// Checks the free space at the node's existing or future directory.
fn file_system(dir: &Path) -> Option<Finding> {
    let there = existing(dir);
    if let Ok(fs) = rustix::fs::statvfs(there) {
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        let tight = free < 1 << 30;
        return Some(Finding {
            what: "free space",
            grade: if tight { Grade::Costs } else { Grade::Good },
            found: format!("{:.1} at {}", ByteSize(free), there.display()),
            why: "the file of a target is written completely when it is created",
            remedy: tight.then(|| "free some space, or choose another directory with --dir".to_owned()),
        });
    }
    None
}

/// Checks the roster of an existing node.
fn roster(dir: &Path) -> Option<Finding> {
    let dir = NodeDir::open(dir).ok()?;
    let (grade, found, remedy) = match Roster::load(&dir) {
        Ok(Some(roster)) => (Grade::Good, format!("names {} targets", roster.targets().len()), None),
        // The operator has written the configuration of a node that has never run.
        Ok(None) if !roster::is_recorded(&dir) && !dir.has_logs() => return None,
        Ok(None) => {
            let remedy = "start the node while all targets are present, which writes the file; or restore it from a backup";
            (Grade::Costs, format!("{} is missing", dir.roster().display()), Some(remedy.to_owned()))
        }
        Err(RosterError::Damaged { path, why }) => {
            let remedy = "restore the file from a backup, or, if all targets are present, remove it";
            (Grade::Prevents, format!("{} cannot be read: {why}", path.display()), Some(remedy.to_owned()))
        }
        Err(e) => {
            let remedy = "use the version of Outboard that wrote the file";
            (Grade::Prevents, e.to_string(), Some(remedy.to_owned()))
        }
    };
    let why = "node.json names the targets of the node, so that no other drive is used in their place";
    Some(Finding { what: "node roster", grade, found, why, remedy })
}

fn direct_io(there: &Path) -> Finding {
    let result = if is_block_device(there) { try_direct_read(there) } else { try_direct_io(there) };
    let kind = fs::metadata(there).map_or(0, |m| m.dev());
    Finding {
        what: "direct I/O",
        grade: if result.is_ok() { Grade::Good } else { Grade::Prevents },
        found: match &result {
            Ok(()) => format!("works at {}", there.display()),
            Err(e) => format!("fails at {} (device {kind}): {e}", there.display()),
        },
        why: "targets are written with O_DIRECT, which bypasses the page cache, in blocks of 4 KiB",
        remedy: result.is_err().then(|| {
            "put the targets on block devices or on a file system with direct I/O (ext4, xfs, btrfs), writable by this user"
                .to_owned()
        }),
    }
}

/// Reads the first block of a device.
fn try_direct_read(device: &Path) -> Result<(), String> {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(device, flags, Mode::empty()).map_err(|e| e.to_string())?;
    let mut buf = one_block()?;
    let read = rustix::io::pread(&file, &mut *buf, 0).map_err(|e| e.to_string())?;
    if read == buf.len() {
        Ok(())
    } else {
        Err(format!("a read of {} bytes returned {read} bytes", buf.len()))
    }
}

fn one_block() -> Result<ArenaBuf, String> {
    let arena = Arena::anonymous(base::block::BLOCK_SIZE).map_err(|e| e.to_string())?;
    let pool = base::pool::BufferPool::new(arena, 0, base::block::BLOCK_SIZE);
    let buf = pool.try_alloc(base::block::BLOCK_SIZE).map_err(|e| e.to_string())?;
    buf.ok_or_else(|| "cannot allocate a buffer".to_owned())
}

fn try_direct_io(there: &Path) -> Result<(), String> {
    let path = there.join(format!(".outboard-doctor-{}", std::process::id()));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let result = (|| {
        let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| e.to_string())?;
        let buf = one_block()?;
        let written = rustix::io::pwrite(&file, &buf, 0).map_err(|e| e.to_string())?;
        if written == buf.len() {
            Ok(())
        } else {
            Err(format!("a write of {} bytes wrote only {written} bytes", buf.len()))
        }
    })();
    let _ = fs::remove_file(&path);
    result
}

fn emulation() -> Finding {
    Finding {
        what: "DPU",
        grade: Grade::Good,
        found: "placement dpu is emulated on this machine: the osd process acts as the DPU, its dma-* threads act as the DMA engine"
            .to_owned(),
        why: "metrics of CPU time count the emulated hardware separately",
        remedy: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_direct_io_gets_the_grade_prevents() {
        let finding = direct_io(Path::new("/proc"));
        assert_eq!(finding.grade, Grade::Prevents, "{finding:?}");
        assert!(finding.remedy.is_some());
    }

    #[test]
    fn direct_io_is_checked_in_the_directories_of_the_targets() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path().to_owned();
        assert_eq!(places(&here.join("node"), &[]), vec![here.clone()]);
        let targets = ["a/0.img", "a/1.img", "/proc/x"].map(PathBuf::from);
        assert_eq!(places(&here, &targets), [here, PathBuf::from("/proc")]);
    }

    #[test]
    fn every_problem_has_a_remedy_and_the_checks_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let config = crate::config_file::load(None, |_| None).unwrap();
        for finding in all(&dir.path().join("not/there/yet"), &[], &config.osd) {
            assert!(finding.grade == Grade::Good || finding.remedy.is_some(), "{finding:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
