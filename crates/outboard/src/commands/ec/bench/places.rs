//! Where a file can be encoded: on this processor, and in the two places of the DPU, both emulated by threads of this machine.

use std::sync::Arc;
use std::time::Instant;

use ec::offload::accelerator::{self, AcceleratorOptions, Pace};
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::{Work, Worker, WorkerStats};
use ec::{Code, EcError};
use futures::executor::block_on;
use futures::future::try_join_all;

use crate::failure::{Doing, Result};

/// Where data can be encoded.
pub trait Place {
    /// What it is called in the table.
    fn name(&self) -> &'static str;

    /// Encodes as many `files` at a time, all of this data: one stripe of whole blocks for each shard. The seconds from when the
    /// data is there until all parity is.
    fn encode(&mut self, code: &Code, data: &Arc<Vec<u8>>, files: usize) -> Result<f64>;
}

/// Room for what comes of a file.
#[derive(Default)]
struct Room {
    parity: Vec<Vec<u8>>,
    checksums: Vec<Vec<u32>>,
}

impl Room {
    /// Makes it as large as it has to be; memory is touched the first time only.
    fn fit(&mut self, code: &Code, data: &[u8]) {
        let unit = data.len() / code.geometry().k();
        self.parity.resize(code.geometry().m(), vec![]);
        self.parity.iter_mut().for_each(|parity| parity.resize(unit, 1));
        self.checksums.resize(code.geometry().m(), vec![]);
    }

    /// As the write path does it.
    fn encode(&mut self, code: &Code, data: &[u8]) -> Result<(), EcError> {
        self.checksums.iter_mut().for_each(Vec::clear);
        let mut parity: Vec<&mut [u8]> = self.parity.iter_mut().map(Vec::as_mut_slice).collect();
        code.encode_stripes(data.len() / code.geometry().k(), data, &mut parity, &mut self.checksums)
    }
}

/// This processor, on the caller's thread.
#[derive(Default)]
pub struct Host(Room);

impl Host {
    /// At how many bytes of data per second it encodes.
    pub fn rate(&mut self, code: &Code, data: &[u8]) -> Result<f64> {
        self.0.fit(code, data);
        let mut result = self.0.encode(code, data);
        let rate = accelerator::host_rate(data.len() as u64, || {
            result = result.clone().and_then(|()| self.0.encode(code, data));
        });
        result.doing("measuring").map(|()| rate)
    }
}

impl Place for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn encode(&mut self, code: &Code, data: &Arc<Vec<u8>>, files: usize) -> Result<f64> {
        self.0.fit(code, data);
        let start = Instant::now();
        for _ in 0..files {
            self.0.encode(code, data).doing("encoding on the host")?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A place of the DPU: each file is a piece of work, which is handed over and waited for.
pub struct Offloaded {
    name: &'static str,
    worker: Worker,
    rooms: Vec<Room>,
}

impl Offloaded {
    /// The DPU's cores: one thread, as fast as a core of this machine.
    pub fn cores() -> Result<Offloaded> {
        let worker =
            software::start(SoftwareOptions::new(Processor::Dpu)).doing("starting a coding thread")?;
        Ok(Offloaded { name: "dpu (emulated)", worker, rooms: vec![] })
    }

    /// The DPU's coding engine, as slow as the paper found it beside a core that encodes at `host_rate`.
    pub fn accelerator(host_rate: f64) -> Result<Offloaded> {
        let options = AcceleratorOptions::new(Pace::paper(host_rate));
        let worker = accelerator::start(options).doing("starting the emulated accelerator")?;
        Ok(Offloaded { name: worker.name(), worker, rooms: vec![] })
    }

    /// What it has done.
    pub fn stats(&self) -> WorkerStats {
        self.worker.stats()
    }
}

impl Place for Offloaded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn encode(&mut self, code: &Code, data: &Arc<Vec<u8>>, files: usize) -> Result<f64> {
        let doing = "encoding on the DPU";
        let mut rooms = std::mem::take(&mut self.rooms);
        rooms.resize_with(files, Room::default);
        rooms.iter_mut().for_each(|room| room.fit(code, data));
        let work = Work { bytes: data.len() as u64, computed_shards: code.geometry().m() as u32 };
        let start = Instant::now();
        let done = rooms.into_iter().map(|mut room| {
            let (code, data) = (code.clone(), Arc::clone(data));
            self.worker.submit(work, move || room.encode(&code, &data).map(|()| room))
        });
        // All have been handed over when the first is waited for.
        let done = block_on(try_join_all(done.collect::<Vec<_>>())).doing(doing)?;
        let seconds = start.elapsed().as_secs_f64();
        self.rooms = done.into_iter().collect::<Result<_, _>>().doing(doing)?;
        Ok(seconds)
    }
}

#[cfg(test)]
mod tests {
    use base::block::crc32c;
    use ec::{Geometry, KernelChoice};

    use super::*;

    #[test]
    fn all_places_compute_the_same() {
        let code = Code::new(Geometry::new(4, 2).unwrap(), KernelChoice::Auto.load().unwrap());
        let data = Arc::new(super::super::noise(64 << 10));
        let mut host = Host::default();
        assert!(host.rate(&code, &data).unwrap() > 0.0);
        host.encode(&code, &data, 1).unwrap();
        for mut place in [Offloaded::cores().unwrap(), Offloaded::accelerator(1e12).unwrap()] {
            assert!(place.encode(&code, &data, 3).unwrap() > 0.0);
            assert_eq!(place.stats().tasks, 3);
            assert_eq!(place.rooms.len(), 3);
            for room in &place.rooms {
                assert!(room.parity == host.0.parity, "{}", place.name());
                assert_eq!(room.checksums, host.0.checksums);
            }
        }
        assert_eq!(host.0.checksums[1][0], crc32c(&host.0.parity[1][..4096]));
    }
}
