//! Shows the scheduler's behaviour over time: writes in `hybrid:auto` while a hog starts and stops.

use std::time::Duration;

use serde::Serialize;

use super::hog::{self, Hog, Told};
use super::rig::{CodingRig, POOL, Pattern};
use crate::Result;
use crate::redundancy::settings::RedundancySettings;
use crate::report::say;
use crate::rounds::book::Book;
use crate::rounds::plot::{ChartLine, Panel, ShadedSpan, timeline};

const PATTERN: Pattern = Pattern::writes("16 MiB x 4", &[("16MiB", 16 << 20, 4)]);
/// Pause between two observations of the scheduler.
const EVERY: Duration = Duration::from_millis(100);
/// Time between the start of the load and the first observation.
const LEAD: Duration = Duration::from_millis(700);

/// One observation of the scheduler.
#[derive(Debug, Clone, Copy, Serialize)]
struct Point {
    seconds: f64,
    utilization_percent: f64,
    /// `None` if the system does not report the pressure.
    pressure_percent: Option<f64>,
    host_busy: bool,
    alpha: u64,
    beta: u64,
}

/// All observations, and the times of the hog's start and end.
#[derive(Debug, Serialize)]
struct Timeline {
    hog_from: f64,
    hog_to: f64,
    points: Vec<Point>,
    /// The hog's speed: seconds, and work items per second.
    hog: Vec<(f64, f64)>,
}

/// Measures the timeline, and draws it.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    let third = settings.run.seconds.max(3) * 2;
    say(format!("  timeline of {} s, with a hog from {third} s to {} s", 3 * third, 2 * third));
    rig.set_mode("hybrid:auto")?;
    rig.write(POOL, &PATTERN, 1)?;
    let rig = &*rig;
    let seen = std::thread::scope(|scope| -> Result<Timeline> {
        let writes = scope.spawn(|| rig.write(POOL, &PATTERN, 3 * third + 2).map_err(|e| e.to_string()));
        let seen = watch(rig, f64::from(third))?;
        let run = writes.join().map_err(|_| "the thread that writes panicked")??;
        if run.errors > 0 {
            book.problem(format!("timeline: {} writes failed", run.errors));
        }
        Ok(seen)
    })?;
    if let Some(busy_after) = seen.busy_after() {
        book.note("timeline", "seconds_until_busy", 1, busy_after);
    }
    if let Some(calm_after) = seen.calm_after() {
        book.note("timeline", "seconds_until_calm", 1, calm_after);
    }
    say(format!(
        "  time from the hog's start until the host counted as busy: {}; from the hog's end until the host no longer counted as busy: {}",
        seen.busy_after().map_or("never".to_owned(), |s| format!("{s:.2} s")),
        seen.calm_after().map_or("never".to_owned(), |s| format!("{s:.2} s"))
    ));
    settings.run.save("timeline.json", &serde_json::to_string_pretty(&seen)?)?;
    settings.run.save("timeline.svg", &seen.draw())
}

fn watch(rig: &CodingRig, third: f64) -> Result<Timeline> {
    std::thread::sleep(LEAD);
    let start = hog::now();
    let (mut points, mut running, mut told, mut times) = (Vec::new(), None, Vec::new(), [0.0; 2]);
    loop {
        let seconds = hog::now() - start;
        if seconds > 3.0 * third {
            break;
        }
        if seconds > third && times[0] == 0.0 {
            running = Some(Hog::start(rig.cpus.host)?);
            times[0] = seconds;
        }
        if seconds > 2.0 * third
            && let Some(hog) = running.take()
        {
            told = hog.told();
            times[1] = seconds;
        }
        let now = rig.coding()?;
        points.push(Point {
            seconds,
            utilization_percent: now.host_utilization_percent,
            pressure_percent: now.host_pressure_percent,
            host_busy: now.host_busy,
            alpha: now.alpha,
            beta: now.beta,
        });
        std::thread::sleep(EVERY);
    }
    Ok(Timeline { hog_from: times[0], hog_to: times[1], points, hog: speeds(&told, start) })
}

/// Returns the hog's speed over time, as pairs of seconds since `start` and work items per second.
fn speeds(told: &[Told], start: f64) -> Vec<(f64, f64)> {
    let between = |pair: &[Told]| {
        let seconds = pair[1].at - pair[0].at;
        (pair[1].at - start, (pair[1].pieces - pair[0].pieces) / seconds)
    };
    // Each speed spans two intervals between reports, so that irregular intervals matter less.
    told.iter().copied().step_by(2).collect::<Vec<_>>().windows(2).map(between).collect()
}

impl Timeline {
    /// Returns the time in seconds from the hog's start until the host counted as busy.
    fn busy_after(&self) -> Option<f64> {
        let since = |p: &&Point| p.seconds >= self.hog_from && p.seconds < self.hog_to;
        let noticed = self.points.iter().filter(since).find(|p| p.host_busy)?;
        Some(noticed.seconds - self.hog_from)
    }

    /// Returns the time in seconds from the hog's end until the host no longer counted as busy.
    fn calm_after(&self) -> Option<f64> {
        let noticed = self.points.iter().filter(|p| p.seconds >= self.hog_to).find(|p| !p.host_busy)?;
        Some(noticed.seconds - self.hog_to)
    }

    /// Returns the periods in which the host counted as busy.
    fn busy_times(&self) -> Vec<(f64, f64)> {
        let mut times: Vec<(f64, f64)> = Vec::new();
        for pair in self.points.windows(2).filter(|pair| pair[0].host_busy) {
            match times.last_mut() {
                Some((_, to)) if *to == pair[0].seconds => *to = pair[1].seconds,
                _ => times.push((pair[0].seconds, pair[1].seconds)),
            }
        }
        times
    }

    fn draw(&self) -> String {
        let line_where = |name, class, of: &dyn Fn(&Point) -> Option<f64>| ChartLine {
            name,
            class,
            points: self.points.iter().filter_map(|p| Some((p.seconds, of(p)?))).collect(),
        };
        let line = |name, class, of: &dyn Fn(&Point) -> f64| line_where(name, class, &|p| Some(of(p)));
        let panels = [
            Panel {
                title: "CPU use of the host without coding and without the emulated DPU, %".to_owned(),
                lines: vec![
                    line("utilization", "p2", &|p| p.utilization_percent),
                    line_where("pressure", "p6", &|p| p.pressure_percent),
                ],
            },
            Panel {
                title: "Coding tasks assigned in the last second".to_owned(),
                lines: vec![
                    line("to the host (α)", "host", &|p| p.alpha as f64),
                    line("to the DPU (β)", "p1", &|p| p.beta as f64),
                ],
            },
            Panel {
                title: "Work items of the hog per second".to_owned(),
                lines: vec![ChartLine { name: "hog", class: "p7", points: self.hog.clone() }],
            },
        ];
        let spans = [ShadedSpan { name: "the host counts as busy", class: "p8", times: self.busy_times() }];
        timeline(&panels, &spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(seconds: f64, host_busy: bool) -> Point {
        Point { seconds, utilization_percent: 1.0, pressure_percent: Some(0.0), host_busy, alpha: 1, beta: 1 }
    }

    #[test]
    fn delays_of_the_scheduler_are_measured_from_the_start_and_end_of_the_hog() {
        let points = [(0.0, true), (1.0, false), (2.0, false), (2.5, true), (4.0, true), (5.0, false)];
        let points = points.map(|(t, busy)| point(t, busy)).to_vec();
        let seen = Timeline { hog_from: 2.0, hog_to: 4.0, points, hog: vec![(2.5, 7.0)] };
        assert_eq!((seen.busy_after(), seen.calm_after()), (Some(0.5), Some(1.0)));
        assert_eq!(seen.busy_times(), [(0.0, 1.0), (2.5, 5.0)]);
        assert_eq!(seen.draw().matches("<polyline").count(), 5);
    }

    #[test]
    fn each_speed_of_the_hog_spans_two_intervals_between_reports() {
        let told = [(1.0, 0.0), (1.5, 5.0), (2.0, 20.0), (2.5, 21.0), (3.0, 40.0)];
        let told = told.map(|(at, pieces)| Told { at, pieces });
        assert_eq!(speeds(&told, 1.0), [(1.0, 20.0), (2.0, 20.0)]);
        assert!(speeds(&told[..1], 1.0).is_empty());
    }
}
