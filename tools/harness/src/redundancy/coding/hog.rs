//! The hog: a program that uses all available time of a CPU, and reports how much work it
//! completes. It shows how much CPU time coding on the host takes from other programs. The hog is
//! started as `outboard-redundancy hog CPU`.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::cpus;
use crate::Result;

/// Time between two reports of the hog.
const TOLD_EVERY: Duration = Duration::from_millis(50);
/// Number of steps of a work item, which takes about 20 µs.
const STEPS: u32 = 20_000;

/// A running hog. Dropping this value ends the hog.
#[derive(Debug)]
pub struct Hog {
    child: Child,
    told: Arc<Mutex<Vec<Told>>>,
}

/// A report of the hog.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Told {
    /// Time of the report, in seconds since 1970.
    pub at: f64,
    /// Number of work items that the hog has completed since its start.
    pub pieces: f64,
}

/// Runs the hog: computes on the CPU `cpu` until the process that reads the reports closes the
/// pipe.
///
/// # Errors
/// If the CPU may not be used.
pub fn run(cpu: &str) -> Result<()> {
    let cpu: usize = cpu.parse().map_err(|_| format!("{cpu} is not the number of a CPU"))?;
    cpus::on(&[cpu], || {
        let (mut pieces, mut next) = (0_u64, now());
        loop {
            let at = now();
            if at >= next {
                next = at + TOLD_EVERY.as_secs_f64();
                let mut out = std::io::stdout();
                if writeln!(out, "{at:.6} {pieces}").and_then(|()| out.flush()).is_err() {
                    return Ok(());
                }
            }
            black_box((0..STEPS).fold(pieces | 1, |x, _| step(x)));
            pieces += 1;
        }
    })
}

/// Performs one step of work. Each step depends on the result of the previous step.
fn step(x: u64) -> u64 {
    let x = x ^ (x << 13);
    let x = x ^ (x >> 7);
    x ^ (x << 17)
}

/// Returns the time in seconds since 1970. The hog and the program that started it use the same
/// clock.
#[must_use]
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

impl Hog {
    /// Starts the hog on a CPU.
    ///
    /// # Errors
    /// If the hog cannot be started.
    pub fn start(cpu: usize) -> Result<Hog> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(["hog", &cpu.to_string()]).stdout(Stdio::piped()).spawn()?;
        let out = child.stdout.take().ok_or("the hog has no output")?;
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&told);
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
                let mut words = line.split(' ').map(str::parse);
                if let (Some(Ok(at)), Some(Ok(pieces)), Ok(mut told)) =
                    (words.next(), words.next(), heard.lock())
                {
                    told.push(Told { at, pieces });
                }
            }
        });
        Ok(Hog { child, told })
    }

    /// Returns all reports so far.
    #[must_use]
    pub fn told(&self) -> Vec<Told> {
        self.told.lock().map(|told| told.clone()).unwrap_or_default()
    }

    /// Returns the number of work items per second between two times. Returns 0 if there are fewer
    /// than two reports between them.
    #[must_use]
    pub fn speed(&self, from: f64, to: f64) -> f64 {
        speed(&self.told(), from, to)
    }
}

/// Returns the number of work items per second between two times, or 0 if there are fewer than two
/// reports between them.
#[must_use]
pub fn speed(told: &[Told], from: f64, to: f64) -> f64 {
    let mut within = told.iter().filter(|t| (from..=to).contains(&t.at));
    match (within.next(), within.next_back()) {
        (Some(first), Some(last)) => (last.pieces - first.pieces) / (last.at - first.at),
        _ => 0.0,
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // Ignore errors: the hog may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_counts_only_the_reports_within_the_given_period() {
        let told: Vec<Told> = [(1.0, 0.0), (2.0, 10.0), (3.0, 30.0), (4.0, 90.0)]
            .map(|(at, pieces)| Told { at, pieces })
            .to_vec();
        assert_eq!(speed(&told, 1.5, 3.5), 20.0);
        assert_eq!(speed(&told, 0.0, 9.0), 30.0);
        assert_eq!(speed(&told, 3.5, 9.0), 0.0);
    }
}
