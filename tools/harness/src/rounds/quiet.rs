//! Checks whether other programs use the machine. Results from a busy machine are not reliable.

use std::time::Duration;

use super::book::Book;
use crate::Result;

/// Maximum CPU use of the machine in percent at which the machine counts as quiet. It is measured
/// while the node is idle.
const ALLOWED: f64 = 10.0;
/// Duration of the check.
const LOOK: Duration = Duration::from_secs(1);

/// Total and idle time of all CPUs since the system's start, in ticks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ticks {
    all: f64,
    idle: f64,
}

/// Measures and records the machine's CPU use while the node is idle. Reports a problem if the use
/// is high.
///
/// # Errors
/// If the system does not report CPU times.
pub fn look(book: &mut Book, round: u32) -> Result<()> {
    let before = now()?;
    std::thread::sleep(LOOK);
    let used = used_percent(before, now()?);
    book.note("the machine while the node is idle", "used_percent", round, used);
    if used > ALLOWED {
        book.problem(format!(
            "other programs used {used:.0} % of the machine's CPUs when round {round} began"
        ));
    }
    Ok(())
}

fn now() -> Result<Ticks> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    ticks(&stat).ok_or_else(|| "/proc/stat does not report the time of the CPUs".into())
}

/// Parses the line of all CPUs in `/proc/stat`: user, nice, system, idle, iowait, irq, softirq,
/// steal. The further fields (guest time) are ignored, because user and nice already contain them.
fn ticks(stat: &str) -> Option<Ticks> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<f64> = line.split_ascii_whitespace().map_while(|v| v.parse().ok()).take(8).collect();
    Some(Ticks { all: ticks.iter().sum(), idle: ticks.get(3)? + ticks.get(4)? })
}

fn used_percent(before: Ticks, now: Ticks) -> f64 {
    let (all, idle) = (now.all - before.all, now.idle - before.idle);
    if all > 0.0 { 100.0 * (all - idle) / all } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_stolen_by_a_hypervisor_counts_as_use_but_io_wait_does_not() {
        let before = ticks("cpu  0 0 0 100 0 0 0 0 50 50\ncpu0 1 1 1 1").unwrap();
        let now = ticks("cpu  10 0 5 150 30 0 0 5 60 60").unwrap();
        assert_eq!(before, Ticks { all: 100.0, idle: 100.0 });
        assert_eq!(used_percent(before, now), 20.0);
        assert_eq!(used_percent(now, now), 0.0);
        assert_eq!(ticks("nothing"), None);
    }
}
