//! Shows the scheduler's behaviour over time: writes in `hybrid:auto` while a hog starts and stops.

use std::time::Duration;

use serde::Serialize;

use super::hog::{self, Hog, Told};
use super::rig::{CodingRig, POOL, Pattern};
use crate::Result;
use crate::redundancy::book::Book;
use crate::redundancy::plot::{ChartLine, Panel, ShadedSpan, timeline};
use crate::redundancy::settings::RedundancySettings;
use crate::report::say;

const PATTERN: Pattern = Pattern { name: "16 MiB x 4", loads: &[("16MiB", 16 << 20, 4)] };
/// Pause between two looks.
const EVERY: Duration = Duration::from_millis(100);
/// The load starts before this, and what it starts with is not shown.
const LEAD: Duration = Duration::from_millis(700);

/// What one look saw.
#[derive(Debug, Clone, Copy, Serialize)]
struct Point {
    seconds: f64,
    utilization_percent: f64,
    /// None where it is not counted.
    pressure_percent: Option<f64>,
    host_busy: bool,
    alpha: u64,
    beta: u64,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Timeline {
    hog_from: f64,
    hog_to: f64,
    points: Vec<Point>,
    /// Seconds, and pieces of work per second.
    hog: Vec<(f64, f64)>,
}

/// Measures, and draws what was found.
///
/// # Errors
/// If the node fails.
pub fn measure(settings: &RedundancySettings, rig: &mut CodingRig, book: &mut Book) -> Result<()> {
    let third = settings.seconds.max(3) * 2;
    say(format!("  timeline, {} s, with a hog from {third} s to {} s", 3 * third, 2 * third));
    rig.set_mode("hybrid:auto")?;
    rig.write(POOL, &PATTERN, 1)?;
    let rig = &*rig;
    let seen = std::thread::scope(|scope| -> Result<Timeline> {
        let writes = scope.spawn(|| rig.write(POOL, &PATTERN, 3 * third + 2).map_err(|e| e.to_string()));
        let seen = watch(rig, f64::from(third))?;
        let run = writes.join().map_err(|_| "the writes panicked")??;
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
        "  busy {} s after the hog came, not busy {} s after it went",
        seen.busy_after().map_or("never".to_owned(), |s| format!("{s:.2}")),
        seen.calm_after().map_or("never".to_owned(), |s| format!("{s:.2}"))
    ));
    settings.save("timeline.json", &serde_json::to_string_pretty(&seen)?)?;
    settings.save("timeline.svg", &seen.draw())
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

/// How fast the hog was between each two things that it said.
fn speeds(told: &[Told], start: f64) -> Vec<(f64, f64)> {
    let between = |pair: &[Told]| {
        let seconds = pair[1].at - pair[0].at;
        (pair[1].at - start, (pair[1].pieces - pair[0].pieces) / seconds)
    };
    // Two of them, so that the pauses between them matter less.
    told.iter().copied().step_by(2).collect::<Vec<_>>().windows(2).map(between).collect()
}

impl Timeline {
    /// How long the hog was there before it was noticed.
    fn busy_after(&self) -> Option<f64> {
        let since = |p: &&Point| p.seconds >= self.hog_from && p.seconds < self.hog_to;
        let noticed = self.points.iter().filter(since).find(|p| p.host_busy)?;
        Some(noticed.seconds - self.hog_from)
    }

    /// How long it was gone before that was noticed.
    fn calm_after(&self) -> Option<f64> {
        let noticed = self.points.iter().filter(|p| p.seconds >= self.hog_to).find(|p| !p.host_busy)?;
        Some(noticed.seconds - self.hog_to)
    }

    /// When the host counted as busy.
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
                title: "The host's CPU, without coding and what stands for the DPU, %".to_owned(),
                lines: vec![
                    line("utilization", "p2", &|p| p.utilization_percent),
                    line_where("pressure", "p6", &|p| p.pressure_percent),
                ],
            },
            Panel {
                title: "Pieces sent in the last second".to_owned(),
                lines: vec![
                    line("to the host (α)", "host", &|p| p.alpha as f64),
                    line("to the DPU (β)", "p1", &|p| p.beta as f64),
                ],
            },
            Panel {
                title: "The hog's pieces of work per second".to_owned(),
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
    fn what_was_noticed_is_counted_from_when_it_was_so() {
        let points = [(0.0, true), (1.0, false), (2.0, false), (2.5, true), (4.0, true), (5.0, false)];
        let points = points.map(|(t, busy)| point(t, busy)).to_vec();
        let seen = Timeline { hog_from: 2.0, hog_to: 4.0, points, hog: vec![(2.5, 7.0)] };
        assert_eq!((seen.busy_after(), seen.calm_after()), (Some(0.5), Some(1.0)));
        assert_eq!(seen.busy_times(), [(0.0, 1.0), (2.5, 5.0)]);
        assert_eq!(seen.draw().matches("<polyline").count(), 5);
    }

    #[test]
    fn the_hogs_speed_is_over_two_of_the_times_it_spoke() {
        let told = [(1.0, 0.0), (1.5, 5.0), (2.0, 20.0), (2.5, 21.0), (3.0, 40.0)];
        let told = told.map(|(at, pieces)| Told { at, pieces });
        assert_eq!(speeds(&told, 1.0), [(1.0, 20.0), (2.0, 20.0)]);
        assert!(speeds(&told[..1], 1.0).is_empty());
    }
}
