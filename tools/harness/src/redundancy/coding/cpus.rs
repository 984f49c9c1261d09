//! Divides the machine's CPUs. The host, with its store and its other load, gets one CPU, the DPU
//! gets one CPU, and the clients get the remaining CPUs. If no CPU remains, clients share the DPU's
//! CPU, because their requests arrive there.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Result;

/// The division of the CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    /// The host's CPU.
    pub host: usize,
    /// The DPU's CPU.
    pub dpu: usize,
    /// The clients' CPUs.
    pub clients: Vec<usize>,
}

impl Division {
    /// Divides the CPUs that this process may use.
    ///
    /// # Errors
    /// If there are fewer than two CPUs.
    pub fn here() -> Result<Division> {
        let set = sched_getaffinity(None)?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
        Division::of(&all)
            .ok_or_else(|| "the part `coding` needs two CPUs: one for the host and one for the DPU".into())
    }

    fn of(all: &[usize]) -> Option<Division> {
        let [host, dpu, rest @ ..] = all else { return None };
        let clients = if rest.is_empty() { vec![*dpu] } else { rest.to_vec() };
        Some(Division { host: *host, dpu: *dpu, clients })
    }
}

/// Calls `what` while this thread may use only `cpus`. Processes that `what` starts also use only
/// these CPUs.
///
/// # Errors
/// If the call fails, or if this process may not use these CPUs.
pub fn on<T>(cpus: &[usize], what: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(None)?;
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set)?;
    let outcome = what();
    sched_setaffinity(None, &before)?;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_use_the_remaining_cpus_or_share_the_cpu_of_the_dpu() {
        let division = |all: &[usize]| Division::of(all).map(|d| (d.host, d.dpu, d.clients));
        assert_eq!(division(&[3]), None);
        assert_eq!(division(&[0, 1]), Some((0, 1, vec![1])));
        assert_eq!(division(&[0, 2, 4, 6]), Some((0, 2, vec![4, 6])));
    }

    #[test]
    fn a_call_on_some_cpus_restores_the_affinity_of_the_thread() {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
        let count = on(&[first], || Ok(sched_getaffinity(None)?.count())).unwrap();
        assert_eq!((count, sched_getaffinity(None).unwrap().count()), (1, before.count()));
    }
}
