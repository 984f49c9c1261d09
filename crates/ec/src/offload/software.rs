//! Coding threads of a processor. Each thread executes one task at a time. The DPU's threads are
//! `ec-0`, `ec-1` …, the host's threads are `ech-0`, `ech-1` ….

use std::io;

use base::fault::Faults;
use base::thread::ThreadClass;

use super::worker::{Worker, WorkerSettings};

/// The processor that the threads belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// The DPU's cores.
    Dpu,
    /// The host's processor.
    Host,
}

/// Settings of coding threads.
#[derive(Debug, Clone)]
pub struct SoftwareOptions {
    /// The processor that the threads belong to.
    pub processor: Processor,
    /// Number of threads. With 0 threads, the submitting thread computes the tasks.
    pub threads: usize,
    /// Maximum number of waiting tasks, at least 1.
    pub queue: usize,
    /// Faults to inject.
    pub faults: Faults,
}

impl SoftwareOptions {
    /// Returns the settings for one thread of this processor, with default limits.
    #[must_use]
    pub fn new(processor: Processor) -> SoftwareOptions {
        SoftwareOptions { processor, threads: 1, queue: 1024, faults: Faults::default() }
    }
}

/// Starts the coding threads of a processor.
///
/// # Errors
/// If the system cannot create the threads.
pub fn start(options: SoftwareOptions) -> io::Result<Worker> {
    Worker::start(settings(options))
}

/// Creates a worker that has no threads, for a simulation.
#[must_use]
pub fn inline(processor: Processor, faults: Faults) -> Worker {
    Worker::inline(settings(SoftwareOptions { threads: 0, faults, ..SoftwareOptions::new(processor) }))
}

fn settings(options: SoftwareOptions) -> WorkerSettings {
    let SoftwareOptions { processor, threads, queue, faults } = options;
    let (name, class) = match processor {
        Processor::Dpu => ("software", ThreadClass::Coding),
        Processor::Host => ("host", ThreadClass::HostCoding),
    };
    WorkerSettings { name, class, threads, queue, device: None, faults }
}
