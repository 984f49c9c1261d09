//! The places that can encode a file: this machine's processor, and the cores and the accelerator
//! of a DPU, which threads of this machine emulate.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;
use ec::offload::accelerator::{self, AcceleratorOptions};
use ec::offload::batch::CodingWork;
use ec::offload::batch::EngineRate;
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::{Worker, WorkerStats};
use ec::{Code, EcError};
use futures::executor::block_on;
use futures::future::try_join_all;

use node::failure::{Doing, Result};

/// Maximum number of parity buffers, which successive files use in turn.
const ROOMS_MAX: usize = 64;

/// A place that can encode data.
pub trait Encoder {
    /// Returns the place's name in the output.
    fn name(&self) -> &'static str;

    /// Encodes `count` files concurrently; each file is one stripe of whole blocks. Returns the
    /// seconds from the arrival of the data until all parity is complete.
    fn encode(&mut self, code: &Code, files: &mut Files, count: usize) -> Result<f64>;
}

/// Files of one size, and buffers for their parity. Successive runs use different files and
/// buffers, so that no cache holds them.
pub struct Files {
    data: Bytes,
    len: usize,
    next: usize,
    rooms: VecDeque<ParityBuffers>,
}

impl Files {
    /// Cuts `data`, which has at least `len` bytes, into files of `len` bytes.
    pub fn new(code: &Code, data: &Bytes, len: usize) -> Files {
        let parity = len / code.geometry().k() * code.geometry().m();
        let rooms = (data.len() / parity.max(1)).clamp(1, ROOMS_MAX);
        let rooms = (0..rooms).map(|_| ParityBuffers::new(code, len)).collect();
        Files { data: data.clone(), len, next: 0, rooms }
    }

    /// Returns the length of one file in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    fn take(&mut self, code: &Code) -> (Bytes, ParityBuffers) {
        let at = self.next * self.len;
        self.next = (self.next + 1) % (self.data.len() / self.len).max(1);
        let room = self.rooms.pop_front().unwrap_or_else(|| ParityBuffers::new(code, self.len));
        (self.data.slice(at..at + self.len), room)
    }

    fn give_back(&mut self, room: ParityBuffers) {
        self.rooms.push_back(room);
    }
}

/// Buffers for the parity of one file.
struct ParityBuffers {
    parity: Vec<Vec<u8>>,
    checksums: Vec<Vec<u32>>,
}

impl ParityBuffers {
    fn new(code: &Code, len: usize) -> ParityBuffers {
        let (unit, m) = (len / code.geometry().k(), code.geometry().m());
        // The value 1 makes this write the memory, so that no page fault occurs while encoding.
        ParityBuffers { parity: vec![vec![1; unit]; m], checksums: vec![vec![]; m] }
    }

    /// Computes the parity of `data` and its checksums, like the write path.
    fn encode(&mut self, code: &Code, data: &[u8]) -> Result<(), EcError> {
        self.checksums.iter_mut().for_each(Vec::clear);
        let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
        code.encode_stripes(data.len() / code.geometry().k(), data, &mut parity, &mut self.checksums)
    }
}

/// This machine's processor. It encodes on the caller's thread.
pub struct HostEncoder;

impl HostEncoder {
    /// Measures the encoding rate of this machine's processor, in bytes of data per second.
    pub fn rate(code: &Code, files: &mut Files) -> Result<f64> {
        let mut result = Ok(());
        let rate = accelerator::host_rate(files.len() as u64, || {
            let (data, mut room) = files.take(code);
            if let Err(e) = room.encode(code, &data) {
                result = Err(e);
            }
            files.give_back(room);
        });
        result.doing("measuring erasure coding").map(|()| rate)
    }
}

impl Encoder for HostEncoder {
    fn name(&self) -> &'static str {
        "host"
    }

    fn encode(&mut self, code: &Code, files: &mut Files, count: usize) -> Result<f64> {
        let mut taken: Vec<(Bytes, ParityBuffers)> = (0..count).map(|_| files.take(code)).collect();
        let start = Instant::now();
        for (data, room) in &mut taken {
            room.encode(code, data).doing("encoding on the host")?;
        }
        let seconds = start.elapsed().as_secs_f64();
        taken.into_iter().for_each(|(_, room)| files.give_back(room));
        Ok(seconds)
    }
}

/// An emulated part of a DPU, to which each file is submitted as a job.
pub struct Offloaded {
    name: &'static str,
    worker: Worker,
}

impl Offloaded {
    /// Starts the emulated cores of the DPU: one thread, as fast as a core of this machine.
    pub fn cores() -> Result<Offloaded> {
        let worker =
            software::start(SoftwareOptions::new(Processor::Dpu)).doing("starting a coding thread")?;
        Ok(Offloaded { name: "dpu (emulated)", worker })
    }

    /// Starts the DPU's emulated accelerator. `host_rate` is the rate of a host core in bytes per
    /// second. The ratio of the accelerator's speed to the core's speed is the one that Ryu et al.
    /// measured.
    pub fn accelerator(host_rate: f64) -> Result<Offloaded> {
        let options = AcceleratorOptions::new(EngineRate::paper(host_rate));
        let worker = accelerator::start(options).doing("starting the emulated accelerator")?;
        Ok(Offloaded { name: worker.name(), worker })
    }

    /// Returns the statistics of the work that was submitted to this place.
    pub fn stats(&self) -> WorkerStats {
        self.worker.stats()
    }
}

impl Encoder for Offloaded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn encode(&mut self, code: &Code, files: &mut Files, count: usize) -> Result<f64> {
        let doing = "encoding on the DPU";
        let work = CodingWork { bytes: files.len() as u64, computed_fragments: code.geometry().m() as u32 };
        let taken: Vec<(Bytes, ParityBuffers)> = (0..count).map(|_| files.take(code)).collect();
        let start = Instant::now();
        let done = taken.into_iter().map(|(data, mut room)| {
            let code = code.clone();
            self.worker.submit(work, move || room.encode(&code, &data).map(|()| room))
        });
        // All files are submitted before this waits for the first result.
        let done = block_on(try_join_all(done.collect::<Vec<_>>())).doing(doing)?;
        let seconds = start.elapsed().as_secs_f64();
        for room in done {
            files.give_back(room.doing(doing)?);
        }
        Ok(seconds)
    }
}

#[cfg(test)]
mod tests {
    use base::block::crc32c;
    use ec::{Geometry, KernelChoice};

    use super::*;

    #[test]
    fn all_places_compute_the_same_parity_and_checksums() {
        let code = Code::new(Geometry::new(4, 2).unwrap(), KernelChoice::Auto.load().unwrap());
        let data = Bytes::from(super::super::noise(192 << 10));
        let encoded = |place: &mut dyn Encoder| {
            // The first call fills three buffers. Only these buffers stay, and the second call uses
            // them again for the same three files.
            let mut files = Files::new(&code, &data, 64 << 10);
            assert!(place.encode(&code, &mut files, 3).unwrap() > 0.0);
            files.rooms.drain(..files.rooms.len() - 3);
            assert!(place.encode(&code, &mut files, 3).unwrap() > 0.0);
            files.rooms.into_iter().map(|room| (room.parity, room.checksums)).collect::<Vec<_>>()
        };
        assert!(HostEncoder::rate(&code, &mut Files::new(&code, &data, 64 << 10)).unwrap() > 0.0);
        let expected = encoded(&mut HostEncoder);
        assert_eq!(expected.len(), 3);
        assert!(expected[0].0 != expected[1].0, "different files have different parity");
        assert_eq!(expected[0].1[1][0], crc32c(&expected[0].0[1][..4096]));
        for mut place in [Offloaded::cores().unwrap(), Offloaded::accelerator(1e12).unwrap()] {
            assert!(encoded(&mut place) == expected, "{}", place.name());
            assert_eq!(place.stats().tasks, 6);
        }
    }
}
