//! Divides the CPUs: one for the host with its store and its other load, one for the DPU, and the
//! remaining CPUs for the clients. If no CPUs remain, clients share the DPU's CPU, because their
//! requests arrive there.

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
    /// If there are fewer than two.
    pub fn here() -> Result<Division> {
        let set = sched_getaffinity(None)?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
        Division::of(&all)
            .ok_or_else(|| "this part needs two CPUs, one for the host and one for the DPU".into())
    }

    fn of(all: &[usize]) -> Option<Division> {
        let [host, dpu, rest @ ..] = all else { return None };
        let clients = if rest.is_empty() { vec![*dpu] } else { rest.to_vec() };
        Some(Division { host: *host, dpu: *dpu, clients })
    }
}

/// Calls `what` on some CPUs. Processes that it starts also use only these CPUs.
///
/// # Errors
/// The call fails, or these CPUs may not be used.
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
    fn clients_have_what_is_left_or_share_the_dpus() {
        let division = |all: &[usize]| Division::of(all).map(|d| (d.host, d.dpu, d.clients));
        assert_eq!(division(&[3]), None);
        assert_eq!(division(&[0, 1]), Some((0, 1, vec![1])));
        assert_eq!(division(&[0, 2, 4, 6]), Some((0, 2, vec![4, 6])));
    }

    #[test]
    fn what_is_done_on_some_cpus_leaves_the_thread_where_it_was() {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
        let count = on(&[first], || Ok(sched_getaffinity(None)?.count())).unwrap();
        assert_eq!((count, sched_getaffinity(None).unwrap().count()), (1, before.count()));
    }
}
