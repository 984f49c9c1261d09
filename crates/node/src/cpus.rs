//! Restricts a process to the CPUs of its side (host or DPU), or to configured CPUs.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Deserialize;
use wire::limits::MAX_SHARDS;

/// Upper bound of CPU numbers, exclusive.
const MAX_CPUS: usize = CpuSet::MAX_CPU;
/// Maximum number of CPUs of an emulated DPU. A BlueField-3 has this number of cores.
const MAX_DPU: usize = 16;
/// Maximum of [`ThreadCount`].
const MAX_THREADS: u16 = MAX_SHARDS;
/// Maximum number of threads that [`ThreadCount::Auto`] yields.
const MAX_AUTO: usize = MAX_DPU;
/// Number of CPUs of the host for which "auto" yields one event loop of the store. The store leaves
/// most of the host to other programs.
const CPUS_PER_LOOP: usize = 4;

/// CPUs for a process: "auto", "any", or a list like "2,4-7".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Cpus {
    /// The CPUs of the process's side. An emulated DPU has the last quarter of the CPUs that the
    /// process may already use: at least one and at most 16. Its host has the other CPUs.
    Auto,
    /// All CPUs that the process may already use.
    Any,
    /// The listed CPUs.
    These(CpuSet),
}

/// Number of threads that divide a work: "auto" or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "ThreadCountText")]
pub enum ThreadCount {
    /// A number that depends on the CPUs of the process's side.
    Auto,
    /// This number, 1 to [`MAX_THREADS`].
    Fixed(u16),
}

/// A number of threads as written in the configuration.
#[derive(Deserialize)]
#[serde(untagged)]
enum ThreadCountText {
    Number(u64),
    Text(String),
}

impl TryFrom<ThreadCountText> for ThreadCount {
    type Error = String;

    fn try_from(text: ThreadCountText) -> Result<ThreadCount, String> {
        let number = match &text {
            ThreadCountText::Text(text) if text == "auto" => return Ok(ThreadCount::Auto),
            ThreadCountText::Text(text) => text.parse().ok(),
            ThreadCountText::Number(number) => Some(*number),
        };
        let number = number.and_then(|number| u16::try_from(number).ok());
        let number = number.filter(|number| (1..=MAX_THREADS).contains(number));
        number.map(ThreadCount::Fixed).ok_or_else(|| format!("must be \"auto\" or 1 to {MAX_THREADS}"))
    }
}

impl ThreadCount {
    /// Returns the number of shards of an osd that is restricted to `cpus`. [`ThreadCount::Auto`] is
    /// one for each CPU, at most 16. Call this before the process is restricted to the CPUs.
    ///
    /// # Errors
    /// If the operating system does not report which CPUs the calling thread may use.
    pub fn shards(self, cpus: Cpus) -> std::io::Result<u16> {
        self.resolve(|| Ok(cpus.count(ChannelSide::Dpu)?.min(MAX_AUTO)))
    }

    /// Returns the number of event loops of a store that is restricted to `cpus` and serves this number
    /// of targets. [`ThreadCount::Auto`] is one for every four CPUs, at most one per target and at most
    /// 16. Call this before the process is restricted to the CPUs.
    ///
    /// # Errors
    /// If the operating system does not report which CPUs the calling thread may use.
    pub fn loops(self, cpus: Cpus, targets: usize) -> std::io::Result<u16> {
        self.resolve(|| Ok((cpus.count(ChannelSide::Host)? / CPUS_PER_LOOP).min(targets).min(MAX_AUTO)))
    }

    fn resolve(self, auto: impl FnOnce() -> std::io::Result<usize>) -> std::io::Result<u16> {
        match self {
            ThreadCount::Fixed(number) => Ok(number),
            ThreadCount::Auto => Ok(auto()?.clamp(1, MAX_THREADS.into()) as u16),
        }
    }
}

/// A side of the host–DPU channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelSide {
    /// The host: the store.
    Host,
    /// The DPU: the osd.
    Dpu,
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
    /// Restricts the calling thread, and the threads that it starts from now on, to these CPUs.
    ///
    /// # Errors
    /// If the thread may use none of these CPUs.
    pub fn apply(self, side: ChannelSide) -> std::io::Result<()> {
        let set = match self {
            Cpus::Any => return Ok(()),
            Cpus::These(set) => set,
            Cpus::Auto => of_side(side, &sched_getaffinity(None)?),
        };
        sched_setaffinity(None, &set).map_err(|e| {
            let why = format!(
                "{e}: this process may use none of the configured CPUs; configure other CPUs, or \"any\""
            );
            std::io::Error::new(std::io::Error::from(e).kind(), why)
        })
    }
}

impl Cpus {
    /// Returns the number of CPUs of a process of `side` that [applies](Self::apply) `self`.
    ///
    /// # Errors
    /// If the operating system does not report which CPUs the calling thread may use.
    pub fn count(self, side: ChannelSide) -> std::io::Result<usize> {
        let set = match self {
            Cpus::These(set) => set,
            Cpus::Any => sched_getaffinity(None)?,
            Cpus::Auto => of_side(side, &sched_getaffinity(None)?),
        };
        Ok(set.count() as usize)
    }

    /// Calls `body` with the calling thread restricted to these CPUs. Threads that `body` starts
    /// stay restricted; the calling thread's restriction ends with the call.
    ///
    /// # Errors
    /// If the thread may use none of these CPUs, or if `body` fails.
    pub fn during<T>(
        self,
        side: ChannelSide,
        body: impl FnOnce() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let before = sched_getaffinity(None)?;
        self.apply(side)?;
        let result = body();
        sched_setaffinity(None, &before)?;
        result
    }
}

/// Returns the CPUs that the calling thread is restricted to; empty if the thread may use all CPUs
/// of the machine.
///
/// # Errors
/// If the operating system reports an error.
pub fn kept_to() -> std::io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    let listed: Vec<usize> = (0..MAX_CPUS).filter(|cpu| set.is_set(*cpu)).collect();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    let online = online.and_then(|text| parse(text.trim())).map_or(0, |set| set.count() as usize);
    Ok(if listed.len() < online { listed } else { Vec::new() })
}

/// Returns the CPUs of `side` from the set `all`. If `all` contains only one CPU, both sides use
/// it.
fn of_side(side: ChannelSide, all: &CpuSet) -> CpuSet {
    let total = all.count() as usize;
    let count = (total / 4).clamp(1, MAX_DPU);
    let (mut dpu, mut host) = (CpuSet::new(), CpuSet::new());
    for (i, cpu) in (0..MAX_CPUS).rev().filter(|cpu| all.is_set(*cpu)).enumerate() {
        if i < count { dpu.set(cpu) } else { host.set(cpu) }
    }
    if side == ChannelSide::Dpu || total < 2 { dpu } else { host }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(set: &CpuSet) -> Vec<usize> {
        (0..MAX_CPUS).filter(|cpu| set.is_set(*cpu)).collect()
    }

    #[test]
    fn cpu_lists_are_parsed_and_invalid_text_is_refused() {
        let Cpus::These(set) = Cpus::try_from("1, 4-6".to_owned()).unwrap() else {
            panic!("expected a list of CPUs")
        };
        assert_eq!(listed(&set), [1, 4, 5, 6]);
        for text in ["", "x", "3-1", "1,,2", "-1", "0-99999"] {
            assert!(Cpus::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn the_number_of_threads_is_auto_or_a_number_in_range() {
        let parse = |text: &str| toml::from_str::<std::collections::BTreeMap<String, ThreadCount>>(text);
        let shards = |text: &str| parse(text).unwrap()["shards"];
        assert_eq!(shards("shards = 4"), ThreadCount::Fixed(4));
        assert_eq!(shards("shards = \"64\""), ThreadCount::Fixed(64));
        assert_eq!(shards("shards = \"auto\""), ThreadCount::Auto);
        for text in ["0", "65", "-1", "\"many\"", "\"\""] {
            assert!(parse(&format!("shards = {text}")).is_err(), "{text}");
        }
    }

    #[test]
    fn auto_follows_the_cpus_of_the_side() {
        let cpus = |list: &str| Cpus::try_from(list.to_owned()).unwrap();
        for (list, shards) in [("0", 1), ("0-2", 3), ("0-15", 16), ("0-63", 16)] {
            assert_eq!(ThreadCount::Auto.shards(cpus(list)).unwrap(), shards, "{list}");
        }
        for (list, targets, loops) in
            [("0", 9, 1), ("0-7", 1, 1), ("0-7", 9, 2), ("0-63", 9, 9), ("0-127", 99, 16), ("0-7", 0, 1)]
        {
            assert_eq!(ThreadCount::Auto.loops(cpus(list), targets).unwrap(), loops, "{list}, {targets}");
        }
        assert_eq!(ThreadCount::Fixed(5).shards(Cpus::Any).unwrap(), 5);
        assert_eq!(ThreadCount::Fixed(5).loops(Cpus::Any, 1).unwrap(), 5);
    }

    #[test]
    fn absent_cpus_are_refused_and_the_error_states_a_remedy() {
        let allowed = sched_getaffinity(None).unwrap();
        let absent = (0..MAX_CPUS).find(|cpu| !allowed.is_set(*cpu)).unwrap();
        let error = Cpus::try_from(absent.to_string()).unwrap().apply(ChannelSide::Dpu).unwrap_err();
        assert!(error.to_string().contains("\"any\""), "{error}");
    }

    #[test]
    fn an_emulated_dpu_gets_a_quarter_of_the_cpus_and_its_host_the_rest() {
        for (cpus, dpu, host) in
            [(1, vec![0], vec![0]), (2, vec![1], vec![0]), (8, vec![6, 7], (0..6).collect())]
        {
            let mut all = CpuSet::new();
            (0..cpus).for_each(|cpu| all.set(cpu));
            assert_eq!(listed(&of_side(ChannelSide::Dpu, &all)), dpu);
            assert_eq!(listed(&of_side(ChannelSide::Host, &all)), host);
        }
    }
}
