//! Measures when it is worth to hand a coding task to another thread. Reconstructions and changes of
//! parity are computed from bytes that are in the osd's memory. The osd's thread can compute them in
//! place, or hand them to a coding thread.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use base::block::{BLOCK_SIZE, Payload};
use base::thread::cpu_time;
use bytes::Bytes;
use ec::offload::batch::CodingWork;
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::Worker;
use ec::{CheckedUnit, Code, EcError, Geometry, KernelChoice};
use serde::Serialize;

use super::{median, noise};
use node::failure::{Doing, Result};
use node::progress::ProgressMeter;

/// The code of the measured tasks.
const K: usize = 4;
const M: usize = 2;
/// Lengths of a fragment, in bytes.
const FRAGMENTS: [usize; 6] = [4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20];
/// Lengths of a change of one data fragment, in bytes.
const CHANGES: [usize; 3] = [4 << 10, 64 << 10, 256 << 10];
/// Amount of data from which tasks are taken, in bytes. It exceeds the processor's caches.
const IN_MEMORY: usize = 96 << 20;
/// Number of tasks of one measurement.
const TASKS: usize = 64;

/// The result for one kind and size of task. Times are microseconds per task.
#[derive(Debug, Serialize)]
pub struct Handover {
    pub task: &'static str,
    /// Bytes that the task reads.
    pub bytes: usize,
    /// Time in place. The osd's thread does nothing else during this time.
    pub in_place_us: f64,
    /// Time until the result of a coding thread arrives.
    pub handed_us: f64,
    /// CPU time of the osd's thread if a coding thread computes the task.
    pub handed_caller_cpu_us: f64,
    /// CPU time of both threads.
    pub handed_cpu_us: f64,
}

/// Computes one task from its data into these buffers.
type Compute = fn(&Code, &[Payload], &mut [Vec<u8>]) -> Result<(), EcError>;

/// A kind and size of task.
struct TaskKind {
    name: &'static str,
    /// Number of fragments that a task reads.
    sources: usize,
    /// Length of each fragment, in bytes.
    len: usize,
    /// Number of fragments that a task writes.
    outputs: usize,
    compute: Compute,
}

/// Measures tasks of all kinds and sizes.
pub fn measure(rounds: u32, progress: &ProgressMeter) -> Result<Vec<Handover>> {
    let doing = "measuring the change of threads";
    let code = Code::new(Geometry::new(K, M).doing(doing)?, KernelChoice::Auto.load().doing(doing)?);
    let data = Bytes::from(noise(IN_MEMORY));
    let worker = software::start(SoftwareOptions::new(Processor::Dpu)).doing(doing)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(doing)?;
    let (name, compute) = ("reconstruction of a fragment", reconstruct as Compute);
    let reconstructions = FRAGMENTS.map(|len| TaskKind { name, sources: K, len, outputs: 1, compute });
    let (name, compute) = ("change of the parity", change as Compute);
    let changes = CHANGES.map(|len| TaskKind { name, sources: 1, len, outputs: M, compute });
    let mut all = vec![];
    for kind in reconstructions.into_iter().chain(changes) {
        let bytes = kind.sources * kind.len;
        progress.message(format!("{}, {bytes} bytes", kind.name));
        let mut trial = HandoverTrial::new(&code, &data, kind);
        let mut times: [Vec<f64>; 4] = Default::default();
        for round in 0..rounds {
            // Each way is first in half of the rounds.
            let early = if round % 2 == 0 { Some(trial.in_place().doing(doing)?) } else { None };
            let handed = runtime.block_on(trial.handed(&worker)).doing(doing)?;
            let in_place = match early {
                Some(time) => time,
                None => trial.in_place().doing(doing)?,
            };
            let values = [in_place, handed.time, handed.caller_cpu, handed.cpu];
            for (list, value) in times.iter_mut().zip(values) {
                list.push(value.as_secs_f64() * 1e6 / TASKS as f64);
            }
        }
        let [in_place_us, handed_us, handed_caller_cpu_us, handed_cpu_us] = times.map(median);
        let task = trial.kind.name;
        all.push(Handover { task, bytes, in_place_us, handed_us, handed_caller_cpu_us, handed_cpu_us });
    }
    Ok(all)
}

/// The tasks of one measurement. Successive tasks use different data.
struct HandoverTrial<'a> {
    code: &'a Code,
    kind: TaskKind,
    inputs: VecDeque<Vec<Payload>>,
    outputs: Vec<Vec<u8>>,
}

/// Sums over all tasks of a measurement.
struct HandedTimes {
    time: Duration,
    caller_cpu: Duration,
    cpu: Duration,
}

impl<'a> HandoverTrial<'a> {
    fn new(code: &'a Code, data: &Bytes, kind: TaskKind) -> HandoverTrial<'a> {
        let fragments = data.len() / kind.len;
        let payload = |at: usize| Payload::compute(0, data.slice(at * kind.len..(at + 1) * kind.len));
        let payloads: Vec<Payload> = (0..fragments).map(payload).collect();
        let inputs = payloads.chunks_exact(kind.sources).map(<[Payload]>::to_vec).collect();
        // The value 1 makes this write the memory, so that no page fault occurs while measuring.
        let outputs = vec![vec![1; kind.len]; kind.outputs];
        HandoverTrial { code, kind, inputs, outputs }
    }

    /// The data of the next task.
    fn next(&mut self) -> Vec<Payload> {
        let input = self.inputs.pop_front().unwrap_or_default();
        self.inputs.push_back(input.clone());
        input
    }

    fn in_place(&mut self) -> Result<Duration, EcError> {
        let start = Instant::now();
        for _ in 0..TASKS {
            let input = self.next();
            (self.kind.compute)(self.code, &input, &mut self.outputs)?;
        }
        Ok(start.elapsed())
    }

    /// Hands one task at a time to a coding thread.
    async fn handed(&mut self, worker: &Worker) -> Result<HandedTimes> {
        let doing = "computing on a coding thread";
        let (start, cpu, worker_cpu) = (Instant::now(), cpu_time(), worker.stats().cpu_ns);
        for _ in 0..TASKS {
            let (code, input, compute) = (self.code.clone(), self.next(), self.kind.compute);
            let mut outputs = std::mem::take(&mut self.outputs);
            let bytes = (self.kind.sources * self.kind.len) as u64;
            let work = CodingWork { bytes, computed_fragments: self.kind.outputs as u32 };
            let task = move || compute(&code, &input, &mut outputs).map(|()| outputs);
            self.outputs = worker.submit(work, task).await.doing(doing)?.doing(doing)?;
        }
        let (time, caller_cpu) = (start.elapsed(), cpu_time() - cpu);
        let computing = Duration::from_nanos(worker.stats().cpu_ns - worker_cpu);
        Ok(HandedTimes { time, caller_cpu, cpu: caller_cpu + computing })
    }
}

fn reconstruct(code: &Code, fragments: &[Payload], out: &mut [Vec<u8>]) -> Result<(), EcError> {
    let sources: Vec<usize> = (1..=fragments.len()).collect();
    let units: Vec<CheckedUnit<'_>> = fragments.iter().map(CheckedUnit::from).collect();
    let mut out: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
    let mut checksums = vec![Vec::with_capacity(fragments[0].len() / BLOCK_SIZE); out.len()];
    code.recovery(&sources, &[0])?.run_checked(&units, &mut out, &mut checksums)
}

fn change(code: &Code, delta: &[Payload], out: &mut [Vec<u8>]) -> Result<(), EcError> {
    let mut rows: Vec<(usize, &mut [u8])> =
        out.iter_mut().enumerate().map(|(row, bytes)| (row, bytes.as_mut_slice())).collect();
    code.update(0, delta[0].data(), &mut rows)
}

/// The results as a table.
pub fn table(all: &[Handover]) -> String {
    let mut text = String::from(
        "task                               KiB  in place µs  handed over µs  osd's thread CPU µs  all CPU µs\n",
    );
    for row in all {
        let Handover { task, bytes, in_place_us, handed_us, handed_caller_cpu_us, handed_cpu_us } = row;
        let kib = bytes >> 10;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{task:<31} {kib:>6} {in_place_us:>12.1} {handed_us:>15.1} {handed_caller_cpu_us:>20.1} {handed_cpu_us:>11.1}"
        );
    }
    text
}
