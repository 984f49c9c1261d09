//! `outboard disk`: manages virtual disks, and copies them from and to files.
//!
//! A gateway executes most of the operations ([`orders`]). This process itself executes `import` and
//! `export`, over the data path.

#[cfg(test)]
mod copy_test;
mod export;
mod import;
pub mod names;
mod orders;
mod partial_file;
mod shown;
mod source_file;
pub mod transfer;

use clap::Subcommand;
use wire::FrontEnd;

use self::names::{DiskOrSnapshot, DiskPath, SnapshotPath};
use crate::args::NodeArgs;
use node::failure::Result;
use node::units::ByteSize;

/// The operations on virtual disks.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  \
    outboard disk create vms/web --size 100GiB\n  \
    outboard disk import vms/base debian.raw\n  \
    outboard disk snapshot vms/base@gold\n  \
    outboard disk clone vms/base@gold vms/web2\n  \
    outboard disk attach vms/web --as vhost-user:/run/web.sock\n  \
    outboard disk ls vms\n\n\
    Create, snapshot and the other changes print nothing without --json. With --json, they print an object \
    with \"disk\" (POOL/DISK) and, where they apply, \"snapshot\", \"parent\" and \"size\" (bytes).")]
pub enum DisksCommand {
    /// Create a disk, which reads as zeros
    #[command(after_help = "Examples:\n  \
        outboard disk create vms/web --size 1TiB\n  \
        outboard disk create vms/db --size 100GiB --chunk 1MiB --json")]
    Create {
        /// Disk to create, written POOL/DISK: letters, digits, '.', '_' and '-'
        disk: DiskPath,
        /// Size of the disk, a multiple of 512 bytes, at most 64TiB
        #[arg(long, value_name = "SIZE")]
        size: ByteSize,
        /// Size of a chunk, the unit in which snapshots and clones copy: a power of two from 1MiB to 16MiB
        /// [default: 4MiB]
        #[arg(long, value_name = "SIZE")]
        chunk: Option<ByteSize>,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// List the disks of a pool
    #[command(after_help = "Examples:\n  \
        outboard disk ls vms\n  \
        outboard disk ls vms --json\n\n\
        With --json, prints an array of the objects that `disk stat --json` prints.")]
    Ls {
        /// Name of the pool
        pool: String,
        /// Print a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Show a disk's size, snapshots, and where it is attached
    #[command(after_help = "Examples:\n  \
        outboard disk stat vms/web\n  \
        outboard disk stat vms/web --json\n\n\
        With --json, prints \"name\", \"size\" and \"chunk\" (bytes), \"created_ms\" (since 1970), \"serial\", \
        \"nguid\", \"snapshots\" (oldest first, each with \"name\", \"size\", \"created_ms\" and \"removing\"), \
        \"parent\" (DISK@SNAPSHOT or null), \"flattening\", \"gateway\" (or null) and \"attached_ms\" (or null).")]
    Stat {
        /// Disk to show, written POOL/DISK
        disk: DiskPath,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a disk or a snapshot
    ///
    /// The name is free at once; the gateway frees the space in the background. A disk that is attached, or
    /// that has clones, is not removed.
    #[command(after_help = "Examples:\n  \
        outboard disk rm vms/web\n  \
        outboard disk rm vms/web --snapshots\n  \
        outboard disk rm vms/web@monday")]
    Rm {
        /// Disk or snapshot to remove, written POOL/DISK or POOL/DISK@SNAPSHOT
        #[arg(value_name = "DISK[@SNAPSHOT]")]
        target: DiskOrSnapshot,
        /// Remove the disk even if it has snapshots; this removes the snapshots, too
        #[arg(long)]
        snapshots: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Change the size of a disk, which may be attached
    #[command(after_help = "Examples:\n  \
        outboard disk resize vms/web 200GiB\n  \
        outboard disk resize vms/web 50GiB --shrink")]
    Resize {
        /// Disk to change, written POOL/DISK
        disk: DiskPath,
        /// New size, a multiple of 512 bytes, at most 64TiB
        size: ByteSize,
        /// Allow a smaller size; the data after the new end is lost
        #[arg(long)]
        shrink: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Take a snapshot of a disk, which may be attached
    ///
    /// The snapshot contains each write that completed before the command started, and no write that
    /// starts after the command has ended.
    #[command(after_help = "Example:\n  outboard disk snapshot vms/web@monday")]
    Snapshot {
        /// Snapshot to take, written POOL/DISK@SNAPSHOT
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotPath,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Create a disk with the content of a snapshot, without a copy of the data
    #[command(after_help = "Example:\n  outboard disk clone vms/base@gold vms/web2")]
    Clone {
        /// Snapshot with the content, written POOL/DISK@SNAPSHOT
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotPath,
        /// Disk to create, written POOL/DISK, in the pool of the snapshot
        #[arg(value_name = "NEW")]
        clone: DiskPath,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Make a clone independent of its snapshot; the gateway does the work in the background
    #[command(after_help = "Example:\n  outboard disk flatten vms/web2")]
    Flatten {
        /// Clone to flatten, written POOL/DISK
        disk: DiskPath,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show the space of a disk with its snapshots, without copies and parity
    #[command(after_help = "Examples:\n  \
        outboard disk usage vms/web\n  \
        outboard disk usage vms/web --json\n\n\
        With --json, prints \"disk\", \"size\" and \"allocated\" (bytes).")]
    Usage {
        /// Disk to examine, written POOL/DISK
        disk: DiskPath,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Attach a disk to a gateway, which begins to serve a front end; prints its address
    #[command(after_help = "Examples:\n  \
        outboard disk attach vms/web --as vhost-user:/run/web.sock\n  \
        outboard disk attach vms/web --as nbd:127.0.0.1:10809 --gateway gw1\n  \
        outboard disk attach vms/web --as nbd:/run/web.nbd --read-only --json\n\n\
        With --json, prints \"disk\" and \"front_end\".")]
    Attach {
        /// Disk to attach, written POOL/DISK
        disk: DiskPath,
        /// Front end to serve: vhost-user:PATH, nbd:HOST:PORT or nbd:PATH; PATH is absolute, and on the
        /// machine of the gateway
        #[arg(long = "as", value_name = "FRONT-END")]
        front_end: FrontEnd,
        /// Gateway that serves the disk [default: the only gateway]
        #[arg(long, value_name = "NAME")]
        gateway: Option<String>,
        /// Take the disk over if it is attached elsewhere; requests there fail from then on
        #[arg(long)]
        force: bool,
        /// Let the front end only read
        #[arg(long)]
        read_only: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Detach a disk from its gateway, after the requests in progress
    #[command(after_help = "Example:\n  outboard disk detach vms/web")]
    Detach {
        /// Disk to detach, written POOL/DISK
        disk: DiskPath,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    Import(import::ImportArgs),
    Export(export::ExportArgs),
}

/// Runs the command.
pub fn run(command: DisksCommand, node: &NodeArgs) -> Result<()> {
    match command {
        DisksCommand::Import(args) => import::run(args, node),
        DisksCommand::Export(args) => export::run(args, node),
        command => orders::run(command, node),
    }
}
