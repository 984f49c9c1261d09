//! Which CPUs a process may use.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Deserialize;

/// CPUs that can be named: numbers below this.
const MAX_CPUS: usize = CpuSet::MAX_CPU;
/// Most CPUs that an emulated DPU gets: as many as a BlueField-3 has.
const MAX_DPU: usize = 16;

/// CPUs for a process: "auto", "any", or a list such as "2,4-7".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Cpus {
    /// Those of an emulated DPU: the last quarter of the machine's, at least one and at most 16.
    Auto,
    /// All that the process may use already.
    Any,
    /// These.
    These(CpuSet),
}

impl TryFrom<String> for Cpus {
    type Error = String;

    fn try_from(text: String) -> Result<Cpus, String> {
        match text.as_str() {
            "auto" => Ok(Cpus::Auto),
            "any" => Ok(Cpus::Any),
            list => parse(list).map(Cpus::These).ok_or_else(|| {
                format!(
                    "{list:?} is not \"auto\", \"any\" or a list of CPUs below {MAX_CPUS} such as \"2,4-7\""
                )
            }),
        }
    }
}

fn parse(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        (first..=last).for_each(|cpu| set.set(cpu));
    }
    Some(set)
}

impl Cpus {
    /// Keeps the calling thread, and the threads that it starts from here on, to these CPUs.
    ///
    /// # Errors
    /// If none of them may be used.
    pub fn apply(self) -> std::io::Result<()> {
        let set = match self {
            Cpus::Any => return Ok(()),
            Cpus::These(set) => set,
            Cpus::Auto => last_quarter(&sched_getaffinity(None)?),
        };
        Ok(sched_setaffinity(None, &set)?)
    }
}

/// The last quarter of the CPUs in a set; all of them if there is only one.
fn last_quarter(all: &CpuSet) -> CpuSet {
    let count = (all.count() as usize / 4).clamp(1, MAX_DPU);
    let mut last = CpuSet::new();
    (0..MAX_CPUS).rev().filter(|cpu| all.is_set(*cpu)).take(count).for_each(|cpu| last.set(cpu));
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(set: &CpuSet) -> Vec<usize> {
        (0..MAX_CPUS).filter(|cpu| set.is_set(*cpu)).collect()
    }

    #[test]
    fn lists_are_read_and_nonsense_is_refused() {
        let Cpus::These(set) = Cpus::try_from("1, 4-6".to_owned()).unwrap() else { panic!("a list") };
        assert_eq!(listed(&set), [1, 4, 5, 6]);
        for text in ["", "x", "3-1", "1,,2", "-1", "0-99999"] {
            assert!(Cpus::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn an_emulated_dpu_gets_a_quarter() {
        for (cpus, expected) in [(1, vec![0]), (2, vec![1]), (8, vec![6, 7])] {
            let mut all = CpuSet::new();
            (0..cpus).for_each(|cpu| all.set(cpu));
            assert_eq!(listed(&last_quarter(&all)), expected);
        }
    }
}
