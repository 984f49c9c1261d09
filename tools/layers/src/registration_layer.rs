//! Measures how long it takes to register memory with a network device, by length.

use std::net::SocketAddr;
use std::time::Instant;

use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use clap::Args;
use fabric::{
    Access, Domain, EndpointAddress, ExposedMemory, Fabric, Library, MemoryRegion, PeerBuffer, ProviderQuery,
};
use node::failure::{Doing, Failure, Result};
use node::units::ByteSize;
use serde::Serialize;

use crate::output;

const DOING: &str = "measuring the registration of memory";
/// Total number of bytes that are registered and copied for one length in one round.
const BYTES: usize = 64 << 20;
/// Minimum and maximum number of registrations of one length in one round.
const COUNTS: (usize, usize) = (4, 256);
/// Length of the arena from which buffers are taken, in bytes. It exceeds the processor's caches.
const ARENA: usize = 128 << 20;

/// Measure the registration of memory with a network device
///
/// A client registers the memory of each large transfer, so that the node can read or write it
/// without the client's processor. Each line shows, for one length: the time to register and release
/// memory that the node reads (a put) and memory that the node writes (a get), and for comparison the
/// time to copy as many bytes. The buffers have been used before, so the times contain no page faults.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard-layers registration verbs@192.0.2.1\n  \
    outboard-layers registration tcp@127.0.0.1 --sizes 64KiB,1MiB --json")]
pub struct RegistrationArgs {
    /// Provider, and an address of this machine
    #[arg(value_name = "PROVIDER@ADDRESS")]
    fabric: String,
    /// Lengths
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB",
        value_name = "S,…"
    )]
    sizes: Vec<ByteSize>,
    /// Number of rounds; the output shows medians
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The results. The JSON form is stable: fields are never removed, but new fields may be added.
#[derive(Debug, Serialize)]
struct RegistrationReport {
    provider: String,
    device: String,
    rounds: u32,
    rows: Vec<RegistrationRow>,
}

/// The result for one length. Times are microseconds, medians over rounds.
#[derive(Debug, Serialize)]
struct RegistrationRow {
    bytes: u64,
    /// Registers and releases memory that a peer can read.
    put_us: f64,
    /// Registers and releases memory that a peer can write.
    get_us: f64,
    copy_us: f64,
}

/// Runs the command.
pub fn run(args: &RegistrationArgs) -> Result<()> {
    let usage = |why: &str| Failure::usage(DOING, why.to_owned());
    let (provider, address) =
        args.fabric.split_once('@').ok_or_else(|| usage("name the device as PROVIDER@ADDRESS"))?;
    let address = address.parse().map_err(|_| usage("the part after @ must be an IP address"))?;
    if args.sizes.iter().any(|size| !(1..=ARENA as u64).contains(&size.0)) {
        return Err(usage("each of --sizes must be from 1 byte to 128MiB"));
    }
    let target = EndpointAddress::Listen(SocketAddr::new(address, 0));
    let query = ProviderQuery { provider: Some(provider.to_owned()), target, shared_receive: false };
    let info = Library::load().and_then(|library| library.query(&query)).doing(DOING)?.swap_remove(0);
    let device = info.domain_name();
    let domain = Fabric::open(&info).and_then(|fabric| Domain::open(&fabric, info)).doing(DOING)?;
    let memory = TrialMemory::new()?;
    let rows = args.sizes.iter().map(|size| measure(&domain, &memory, size.0 as usize, args.rounds));
    let rows = rows.collect::<Result<_>>()?;
    let report = RegistrationReport { provider: provider.to_owned(), device, rounds: args.rounds, rows };
    if args.json {
        output::json(&report);
    } else {
        output::line(format!(
            "provider {provider}, device {}; µs, medians of {} rounds\n",
            report.device, args.rounds
        ));
        output::line("       bytes    put µs    get µs   copy µs");
        for row in &report.rows {
            let RegistrationRow { bytes, put_us, get_us, copy_us } = row;
            output::line(format!("{bytes:>12} {put_us:>9.1} {get_us:>9.1} {copy_us:>9.1}"));
        }
    }
    Ok(())
}

/// Memory whose pages are all present.
struct TrialMemory {
    /// Memory of a user.
    own: Bytes,
    /// Memory from which a client takes buffers for a node's data.
    pool: BufferPool,
}

impl TrialMemory {
    fn new() -> Result<TrialMemory> {
        let arena = Arena::shared("layers", ARENA).doing(DOING)?;
        let pool = BufferPool::new(arena, 0, ARENA);
        let mut all =
            pool.try_alloc(ARENA).doing(DOING)?.ok_or_else(|| Failure::usage(DOING, "no memory"))?;
        all.fill(1);
        drop(all);
        Ok(TrialMemory { own: vec![1; ARENA].into(), pool })
    }
}

fn measure(domain: &Domain, memory: &TrialMemory, len: usize, rounds: u32) -> Result<RegistrationRow> {
    let count = (BYTES / len).clamp(COUNTS.0, COUNTS.1);
    let starts = || (0..count).map(|number| number % (ARENA / len) * len);
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut copied = vec![1; len];
    for _ in 0..rounds {
        let mut note = |column: usize, begun: Instant| {
            times[column].push(begun.elapsed().as_secs_f64() * 1e6 / count as f64);
        };
        let begun = Instant::now();
        for at in starts() {
            let bytes = ExposedMemory::Bytes(memory.own.slice(at..at + len));
            drop(MemoryRegion::expose(domain, bytes, Access::RemoteRead).doing(DOING)?);
        }
        note(0, begun);
        let taken = (0..count).map_while(|_| memory.pool.try_alloc(len).ok().flatten());
        let buffers: Vec<PeerBuffer> = taken.map(PeerBuffer::new).collect();
        if buffers.is_empty() {
            return Err(Failure::usage(DOING, "no memory"));
        }
        let begun = Instant::now();
        for buffer in buffers.iter().cycle().take(count) {
            let room = ExposedMemory::Buffer(buffer.clone());
            drop(MemoryRegion::expose(domain, room, Access::RemoteWrite).doing(DOING)?);
        }
        note(1, begun);
        let begun = Instant::now();
        for at in starts() {
            copied.copy_from_slice(std::hint::black_box(&memory.own[at..at + len]));
        }
        note(2, begun);
    }
    std::hint::black_box(&copied);
    let [put_us, get_us, copy_us] = times.map(median);
    Ok(RegistrationRow { bytes: len as u64, put_us, get_us, copy_us })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
