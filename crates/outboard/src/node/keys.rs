//! The one list of what can be configured.
//!
//! The file that the first `up` writes, the check for unknown keys, the names of environment variables and
//! `docs/configuration.md` all follow from it.

use toml::{Table, Value};

/// One thing that can be configured.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Section of the file, empty for the top.
    pub section: &'static str,
    /// Name within the section.
    pub name: &'static str,
    /// Its value if nothing else is said, as TOML.
    pub default: &'static str,
    /// What it means: unit, range, consequence.
    pub about: &'static str,
}

const fn key(section: &'static str, name: &'static str, default: &'static str, about: &'static str) -> Key {
    Key { section, name, default, about }
}

/// Everything that can be configured.
pub const KEYS: &[Key] = &[
    key(
        "",
        "placement",
        "\"dpu\"",
        "Where requests are handled: \"dpu\" (osd and store are two processes joined by the host-DPU channel) or \"host\" (one process, the baseline).",
    ),
    key(
        "",
        "listen",
        "\"127.0.0.1:7400\"",
        "Address that clients connect to. The first `up` writes it into the file: port 7400, or the next one that is free. Port 0 takes a free port at every start; `outboard status` says which.",
    ),
    key(
        "",
        "targets",
        "[]",
        "Files or raw block devices, one per target; relative to the node's directory. The set is fixed once the node has started.",
    ),
    key(
        "",
        "target_size",
        "\"8GiB\"",
        "Size of target files that `up` makes. Existing ones and devices keep theirs. Written in full, so it takes that much space at once.",
    ),
    key(
        "store",
        "cpus",
        "\"auto\"",
        "CPUs of a store whose osd stands for a DPU: \"auto\" (those that the emulated DPU does not have), \"any\", or a list.",
    ),
    key("store", "index_cache", "\"32MiB\"", "Memory for index pages, per target."),
    key("store", "metadata_cache", "\"64MiB\"", "Memory for decoded metadata, per target."),
    key(
        "store",
        "buffers",
        "\"32MiB\"",
        "Memory for reads and writes whose own memory cannot go to the drive directly, per target.",
    ),
    key(
        "channel",
        "window",
        "\"64MiB\"",
        "Host memory that a session's payload passes through: 8MiB to 4GiB, a multiple of 4KiB.",
    ),
    key("channel", "requests", "256", "Most requests to the store that are unanswered at a time: 1 to 1024."),
    key(
        "channel",
        "engine",
        "\"shm\"",
        "What moves payload between osd and store: \"shm\" (emulated, on one machine), or \"ofi:PROVIDER\", one-sided transfers by libfabric: \"ofi:verbs\" where there is RDMA, \"ofi:tcp\" anywhere.",
    ),
    key(
        "channel",
        "ofi_listen",
        "\"127.0.0.1:0\"",
        "Address at which the store can be reached by the engine ofi, in a trusted network. Its IP address chooses the device.",
    ),
    key(
        "channel",
        "profile",
        "\"memcpy\"",
        "How fast the emulated engine is: \"memcpy\", or \"bf3-paper\" (as DoCeph measured a BlueField-3: payload takes 2.4 ms and 0.38 ms per MB, one chain at a time).",
    ),
    key(
        "channel",
        "max_transfer",
        "\"2MiB\"",
        "Longest DMA transfer: 4KiB to 2MiB, a multiple of 4KiB. The engine's own limit holds in any case.",
    ),
    key(
        "channel",
        "queues",
        "5",
        "Queues of the DMA engine that are used: 1 to 64, at most what it has. One is for short requests; with 1 they wait for long ones.",
    ),
    key(
        "channel",
        "region_cache",
        "64",
        "Parts of host memory (16MiB each) that stay open to DMA. 0 opens one anew for every request, as a DPU without such a cache would.",
    ),
    key(
        "channel",
        "poll_us",
        "50",
        "How long the DPU's side looks for completions after one has come, in microseconds, before it sleeps: 0 to 10000. It stops by itself where that does not pay.",
    ),
    key(
        "channel",
        "host_poll_us",
        "0",
        "The same for the store's side, whose CPU time is the host's: 0 to 10000.",
    ),
    key(
        "channel",
        "overdue",
        "\"2s\"",
        "A DMA transfer that takes longer counts as failed: its request goes on by the socket.",
    ),
    key(
        "channel",
        "cool_down",
        "\"5s\"",
        "How long DMA is left alone after it has failed; then a small transfer decides whether it is used again.",
    ),
    key(
        "channel",
        "verify_every",
        "64",
        "The store compares the payload of one in so many requests with its checksums when it has come by DMA; 0 for none. After a failure it looks at the next 256 in any case.",
    ),
    key(
        "osd",
        "cpus",
        "\"auto\"",
        "CPUs of an osd that stands for a DPU: \"auto\" (an emulated DPU has the last quarter of the machine's, at least one), \"any\", or a list such as \"2,4-7\".",
    ),
    key(
        "osd",
        "staging",
        "\"128MiB\"",
        "Memory for payload between client and store; requests wait when it is used up. At least 8MiB, a multiple of 4MiB.",
    ),
    key(
        "osd",
        "store_patience",
        "\"30s\"",
        "How long requests wait for a store that is restarting, or for a target that they need and that does not answer, before clients are told to retry.",
    ),
    key("osd", "transfer_timeout", "\"30s\"", "How long one transfer from or to a client may take."),
    key(
        "osd",
        "target_timeout",
        "\"10s\"",
        "How long a target may take to answer where others have the object, too; after that they go on without it, if enough of them answer: 100ms to 10m.",
    ),
    key(
        "osd",
        "rebuild_rate",
        "\"0B\"",
        "Most bytes a second that rebuilds and scrubs move; 0 for no limit. `outboard target rate` changes it while the node runs.",
    ),
    key(
        "osd",
        "rebuild_share",
        "25",
        "Part of the time that rebuilds and scrubs take while clients are served, in percent: 1 to 100.",
    ),
    key(
        "osd",
        "missed_objects_per_pg",
        "65536",
        "Objects of a placement group that are noted by name when they change while a target is away: 1 to 16777216. Beyond that the target gets everything anew when it comes back.",
    ),
    key(
        "osd",
        "session_expiry",
        "\"24h\"",
        "Clients that changed nothing for that long, while the node ran, lose the record of what they did; a retry that comes later is refused.",
    ),
    key(
        "osd",
        "orphan_grace",
        "\"1h\"",
        "Parts of an unfinished upload are removed when they are that old and their uploader has gone.",
    ),
    key("osd", "collect_interval", "\"10m\"", "Pause between two searches for such parts."),
    key(
        "osd",
        "requests_per_connection",
        "256",
        "Most requests of one client worked on at a time: 1 to 4096.",
    ),
    key(
        "osd",
        "sessions",
        "4096",
        "Most clients known at a time: 1 to 65536; fewer if the limit on open files is low. One more takes the place of the longest-silent client at an address with more than its fair share.",
    ),
    key(
        "osd",
        "handshakes",
        "256",
        "Most connections at a time whose clients have not introduced themselves yet, which they may take 5 s for: 1 to 65536; fewer if the limit on open files is low. One more takes the place of the oldest one at an address with more than its fair share.",
    ),
    key(
        "coding",
        "mode",
        "\"async\"",
        "Where the parity of large writes is computed: \"latency-sensitive\" (the host's processor), \"async\" (the DPU), \"hybrid:A:B\" (of A + B pieces A by the host), \"hybrid:auto\" (both, by what they turn out to cost). While the host is busy, the DPU in any case. `outboard ec mode` changes it while the node runs.",
    ),
    key(
        "coding",
        "offload",
        "\"dpu\"",
        "What of the DPU computes: its cores (\"dpu\"), or \"accelerator\": as a BlueField-3's, which works on host memory; emulated, and as slow as that was found to be.",
    ),
    key("coding", "dpu_threads", "1", "Threads of the DPU's cores that compute parity: 1 to 64."),
    key("coding", "host_threads", "1", "Threads of the host's processor that do: 1 to 64."),
    key("coding", "queue", "1024", "Most pieces of work that wait: 1 to 65536."),
    key("coding", "cool_down", "\"2s\"", "How long a place that failed is left alone: 10ms to 1h."),
    key(
        "network",
        "stacks",
        "\"auto\"",
        "How clients can connect beside TCP, which always works: \"auto\" (RDMA, if the machine has it), \"tcp\" (not at all), or a list such as \"ofi:verbs\" or \"ofi:verbs@192.0.2.1:7701\", the best first; \"ofi:tcp\" is the same over TCP.",
    ),
    key(
        "network",
        "receive_queue",
        "\"shared\"",
        "Whose receive buffers are, over RDMA: \"shared\" by the connections of a tenant, or \"per-connection\" for devices that cannot share them.",
    ),
    key(
        "network",
        "poll_us",
        "20",
        "How long the osd looks for messages after one has come over RDMA, in microseconds, before it sleeps: 0 to 10000. It stops by itself where that does not pay.",
    ),
    key(
        "log",
        "level",
        "\"info\"",
        "What is logged: error, warn, info, debug, trace, or a filter such as \"info,osd=debug\".",
    ),
    key("log", "format", "\"text\"", "\"text\" or \"json\" (one object per line)."),
    key(
        "log",
        "max_size",
        "\"16MiB\"",
        "A role's log file larger than this is renamed to *.log.1 when the role starts, replacing the one before.",
    ),
    key(
        "metrics",
        "listen",
        "\"127.0.0.1:0\"",
        "Address of each process's Prometheus page. With a port other than 0, the supervisor takes it and the roles the ones that follow: store (or node) +1, osd +2.",
    ),
    key("supervise", "backoff_min", "\"100ms\"", "Pause before a dead role is restarted; doubles each time."),
    key("supervise", "backoff_max", "\"5s\"", "Longest pause before a restart."),
    key(
        "supervise",
        "steady_after",
        "\"10s\"",
        "A role that was ready for this long starts again at backoff_min.",
    ),
    key(
        "supervise",
        "ready_timeout",
        "\"120s\"",
        "A role that is not ready and has shown no progress for this long is killed and counts as dead. The recovery of a large log is progress while its drive answers.",
    ),
    key(
        "supervise",
        "stop_timeout",
        "\"30s\"",
        "A role that has not stopped after this is killed; nothing acknowledged is lost.",
    ),
    key(
        "supervise",
        "hung_after",
        "\"30s\"",
        "A role whose event loop gives no heartbeat for this long hangs, and so does one whose target has had calls wait this long for a checkpoint that makes no progress: it is killed and started again. 600ms to 1h; 0s switches the watchdog off. Time in which the supervisor does not run either, as on a paused machine, does not count.",
    ),
    key(
        "debug",
        "faults",
        "[]",
        "What goes wrong on purpose, e.g. [\"dma.transfer=fail,probability=0.001\"]; see `outboard debug fault --help`. In the environment separated by colons.",
    ),
];

impl Key {
    /// `section.name`, or `name` at the top.
    pub fn path(&self) -> String {
        if self.section.is_empty() { self.name.to_owned() } else { format!("{}.{}", self.section, self.name) }
    }

    /// The environment variable that overrides the file. The log level is asked for often enough to have a short one.
    pub fn env(&self) -> String {
        if self.path() == "log.level" {
            return "OUTBOARD_LOG".to_owned();
        }
        format!("OUTBOARD_{}", self.path().replace('.', "_").to_uppercase())
    }

    /// Its default.
    pub fn default_value(&self) -> Value {
        let table: Table = format!("v = {}", self.default).parse().expect("the defaults in KEYS are TOML");
        table["v"].clone()
    }

    /// A value as text (from the environment) of the kind that the key has.
    pub fn parse(&self, text: &str) -> Value {
        match self.default_value() {
            Value::Array(_) => Value::Array(text.split(':').map(|t| Value::String(t.to_owned())).collect()),
            Value::Integer(_) => text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
            _ => Value::String(text.to_owned()),
        }
    }
}
