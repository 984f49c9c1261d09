//! The DPU's cores: threads `ec-0`, `ec-1` … that code in software, a piece of work each.

use std::io;

use base::fault::Faults;
use base::thread::ThreadClass;

use super::worker::{Settings, Worker};

/// Settings of the DPU's coding threads.
#[derive(Debug, Clone)]
pub struct SoftwareOptions {
    /// How many threads, at least 1.
    pub threads: usize,
    /// Most pieces of work that wait, at least 1.
    pub queue: usize,
    /// What is to go wrong.
    pub faults: Faults,
}

impl Default for SoftwareOptions {
    fn default() -> SoftwareOptions {
        SoftwareOptions { threads: 1, queue: 1024, faults: Faults::default() }
    }
}

/// Starts the threads.
///
/// # Errors
/// If the system has no room for them.
pub fn start(options: SoftwareOptions) -> io::Result<Worker> {
    let SoftwareOptions { threads, queue, faults } = options;
    let (name, class) = ("software", ThreadClass::Coding);
    Worker::start(Settings { name, class, threads, queue, device: None, faults })
}
