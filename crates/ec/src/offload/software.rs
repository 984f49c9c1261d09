//! Processors: threads that code in software, a piece of work each. Those of the DPU are `ec-0`, `ec-1` …, those of the host
//! `ech-0` ….

use std::io;

use base::fault::Faults;
use base::thread::ThreadClass;

use super::worker::{Worker, WorkerSettings};

/// Whose processor it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// The DPU's cores.
    Dpu,
    /// The host's.
    Host,
}

/// Settings of coding threads.
#[derive(Debug, Clone)]
pub struct SoftwareOptions {
    /// Whose threads they are.
    pub processor: Processor,
    /// How many threads, at least 1.
    pub threads: usize,
    /// Most pieces of work that wait, at least 1.
    pub queue: usize,
    /// What is to go wrong.
    pub faults: Faults,
}

impl SoftwareOptions {
    /// One thread of this processor, and defaults for the rest.
    #[must_use]
    pub fn new(processor: Processor) -> SoftwareOptions {
        SoftwareOptions { processor, threads: 1, queue: 1024, faults: Faults::default() }
    }
}

/// Starts the threads.
///
/// # Errors
/// If the system has no room for them.
pub fn start(options: SoftwareOptions) -> io::Result<Worker> {
    let SoftwareOptions { processor, threads, queue, faults } = options;
    let (name, class) = match processor {
        Processor::Dpu => ("software", ThreadClass::Coding),
        Processor::Host => ("host", ThreadClass::HostCoding),
    };
    Worker::start(WorkerSettings { name, class, threads, queue, device: None, faults })
}
