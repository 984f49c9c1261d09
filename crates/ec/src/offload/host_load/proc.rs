//! Reads the load counters from `/proc`.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::LoadCounters;

const STAT: &str = "/proc/stat";
const PRESSURE: &str = "/proc/pressure/cpu";
/// Length of a tick of `/proc/stat`. USER_HZ is 100 on x86-64 and AArch64, independent of the
/// kernel's own clock (`include/uapi/asm-generic/param.h`).
const TICK_MS: u64 = 10;

/// Reason why the host's counters cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HostCpusError {
    /// A file cannot be read.
    #[error(
        "{path} cannot be read, so it is not known whether the host is busy: {source}; is /proc mounted?"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// None of the CPUs exists.
    #[error("/proc/stat has none of the host's CPUs {0:?}: name CPUs of this machine that are online")]
    NoCpus(Vec<usize>),
}

/// Reads the counters of a set of CPUs. The caller supplies the CPU times of the threads that
/// emulate the DPU and of coding, because only the caller knows these threads. The times must not
/// include threads that run on CPUs outside the set.
#[derive(Debug)]
pub struct HostCpus<D, C> {
    cpus: Vec<usize>,
    dpu: D,
    coding: C,
}

impl<D: FnMut() -> Duration, C: FnMut() -> Duration> HostCpus<D, C> {
    /// Reads the counters of `cpus`, or of all CPUs if `cpus` is empty. `dpu` returns the CPU time
    /// that the threads that emulate the DPU have used so far (for example from `base::process`).
    /// `coding` returns the CPU time of coding on the host.
    #[must_use]
    pub fn new(cpus: Vec<usize>, dpu: D, coding: C) -> HostCpus<D, C> {
        HostCpus { cpus, dpu, coding }
    }

    /// Returns the current counters. Without PSI, the pressure is `None`.
    ///
    /// # Errors
    /// If `/proc/stat` cannot be read, or lists none of the CPUs.
    pub fn read(&mut self) -> Result<LoadCounters, HostCpusError> {
        let unreadable = |source| HostCpusError::Unreadable { path: STAT.into(), source };
        let stat = fs::read_to_string(STAT).map_err(unreadable)?;
        let ticks =
            CpuTicks::of(&stat, &self.cpus).ok_or_else(|| HostCpusError::NoCpus(self.cpus.clone()))?;
        let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(TICK_MS));
        Ok(LoadCounters {
            all: time(ticks.all),
            busy: time(ticks.busy),
            dpu: (self.dpu)(),
            coding: (self.coding)(),
            store: Duration::ZERO,
            pressure: self.pressure(),
        })
    }
}

impl<D, C> HostCpus<D, C> {
    /// Returns the total time of pressure, which covers the whole machine. Returns `None` if the
    /// host has only some of the CPUs, as beside an emulated DPU, because the value would include
    /// threads that wait for the DPU's CPUs.
    fn pressure(&self) -> Option<Duration> {
        let text = self.cpus.is_empty().then(|| fs::read_to_string(PRESSURE).ok())??;
        some_pressure(&text)
    }
}

/// CPU time of some CPUs, in clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CpuTicks {
    all: u64,
    busy: u64,
}

impl CpuTicks {
    /// Returns the sum over these CPUs in `/proc/stat`, or over all CPUs if `cpus` is empty; see
    /// proc(5). `None` if none of these CPUs is listed.
    fn of(stat: &str, cpus: &[usize]) -> Option<CpuTicks> {
        let each = stat.lines().filter_map(|line| {
            let (cpu, ticks) = line.strip_prefix("cpu")?.split_once(' ')?;
            let cpu: usize = cpu.parse().ok()?;
            (cpus.is_empty() || cpus.contains(&cpu)).then(|| CpuTicks::of_line(ticks))?
        });
        each.reduce(|sum, ticks| CpuTicks {
            all: sum.all.saturating_add(ticks.all),
            busy: sum.busy.saturating_add(ticks.busy),
        })
    }

    /// Parses `user nice system idle iowait irq softirq steal …`. The fields after `steal` are
    /// already included in `user` and `nice`. Old kernels have fewer fields.
    fn of_line(line: &str) -> Option<CpuTicks> {
        let mut fields = line.split_ascii_whitespace().take(8).map(|field| field.parse::<u64>());
        let mut sum = CpuTicks::default();
        let mut at = 0;
        while let Some(ticks) = fields.next().transpose().ok()? {
            sum.all = sum.all.saturating_add(ticks);
            if at != 3 && at != 4 {
                sum.busy = sum.busy.saturating_add(ticks);
            }
            at += 1;
        }
        (at >= 4).then_some(sum)
    }
}

/// Parses the field `total`, in microseconds, from a line of the form `some avg10=0.01 avg60=0.32
/// avg300=0.43 total=6392660984`.
fn some_pressure(text: &str) -> Option<Duration> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = line.split_ascii_whitespace().find_map(|field| field.strip_prefix("total="))?;
    Some(Duration::from_micros(total.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAT_TEXT: &str = "cpu  600 30 300 6000 600 0 60 30 15 0\n\
        cpu0 200 10 100 2000 200 0 20 10 5 0\n\
        cpu1 400 20 200 4000 400 0 40 20 10 0\n\
        cpu12 1 1 1 1\n\
        intr 5 1 2\nctxt 12\ncpufreq 3 4 5 6\n";

    #[test]
    fn the_ticks_of_the_selected_cpus_are_summed() {
        let ticks = |cpus: &[usize]| CpuTicks::of(STAT_TEXT, cpus).map(|ticks| (ticks.busy, ticks.all));
        assert_eq!(ticks(&[0]), Some((340, 2540)));
        assert_eq!(ticks(&[0, 1, 7]), Some((3 * 340, 3 * 2540)));
        assert_eq!(ticks(&[12]), Some((3, 4)), "an old kernel reports fewer fields");
        assert_eq!(ticks(&[]), Some((1023, 7624)));
        assert_eq!(ticks(&[2]), None);
    }

    #[test]
    fn the_total_of_the_pressure_line_some_is_parsed() {
        let text = "some avg10=0.01 avg60=0.32 avg300=0.43 total=6392660984\nfull avg10=0.00 total=7\n";
        assert_eq!(some_pressure(text), Some(Duration::from_micros(6_392_660_984)));
        assert_eq!(some_pressure("full avg10=0.00 total=7\n"), None);
    }

    #[test]
    fn the_load_counters_of_this_machine_can_be_read() {
        let mut cpus = HostCpus::new(Vec::new(), || Duration::from_secs(2), || Duration::from_secs(1));
        let reading = cpus.read().unwrap();
        assert!(reading.all >= reading.busy && reading.busy > Duration::ZERO);
        assert_eq!((reading.dpu, reading.coding), (Duration::from_secs(2), Duration::from_secs(1)));
        let mut first = HostCpus::new(vec![0], Duration::default, Duration::default);
        assert!(
            first.read().is_ok_and(|reading| reading.pressure.is_none()),
            "the kernel reports no pressure of single CPUs"
        );
        let mut none = HostCpus::new(vec![1 << 20], Duration::default, Duration::default);
        assert!(matches!(none.read(), Err(HostCpusError::NoCpus(_))));
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_text_as_proc_files_never_panics(text in any::<String>(), cpus in prop::collection::vec(0usize..4, 0..3)) {
            let _ = some_pressure(&text);
            let _ = some_pressure(&format!("some {text}"));
            for stat in [text.clone(), format!("cpu1 {text}"), format!("cpu{text}")] {
                if let Some(ticks) = CpuTicks::of(&stat, &cpus) {
                    prop_assert!(ticks.busy <= ticks.all);
                }
            }
        }

        #[test]
        fn the_first_eight_fields_of_a_cpu_line_are_summed(fields in prop::collection::vec(any::<u64>(), 0..12)) {
            let line: String = fields.iter().map(|field| format!(" {field}")).collect();
            let ticks = CpuTicks::of(&format!("cpu3{line}\n"), &[3]);
            let sum = |skipped: &[usize]| {
                let counted = fields.iter().enumerate().take(8).filter(|(at, _)| !skipped.contains(at));
                counted.fold(0u64, |sum, (_, field)| sum.saturating_add(*field))
            };
            let expected = CpuTicks { all: sum(&[]), busy: sum(&[3, 4]) };
            prop_assert_eq!(ticks, (fields.len() >= 4).then_some(expected));
        }

        #[test]
        fn every_total_of_the_pressure_is_parsed(total in any::<u64>()) {
            prop_assert_eq!(
                some_pressure(&format!("some avg10=1.00 total={total}")),
                Some(Duration::from_micros(total))
            );
        }
    }
}
