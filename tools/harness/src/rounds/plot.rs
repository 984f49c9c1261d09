//! Line charts over time, stacked vertically in one SVG file.

use std::fmt::Write;

use crate::evaluation::page::svg::{file, heading, ticks};
use crate::evaluation::page::text::{escape, number};

/// A chart of a timeline.
#[derive(Debug)]
pub struct Panel {
    /// Title above the chart.
    pub title: String,
    /// Lines of the chart.
    pub lines: Vec<ChartLine>,
}

/// A line of a chart.
#[derive(Debug)]
pub struct ChartLine {
    /// Name in the legend.
    pub name: &'static str,
    /// Class in the style sheet, which defines the colour.
    pub class: &'static str,
    /// Points: seconds and value.
    pub points: Vec<(f64, f64)>,
}

/// The periods in which a condition held, shaded behind all charts.
#[derive(Debug)]
pub struct ShadedSpan {
    /// Name of the condition in the legend.
    pub name: &'static str,
    /// Class in the style sheet, which defines the colour.
    pub class: &'static str,
    /// Start and end of each period, in seconds.
    pub times: Vec<(f64, f64)>,
}

const WIDTH: f64 = 760.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const PLOT: f64 = 120.0;
const PANEL: f64 = TOP + PLOT + 14.0;
const BOTTOM: f64 = 26.0;

/// Draws charts with a common time axis.
#[must_use]
pub fn timeline(panels: &[Panel], spans: &[ShadedSpan]) -> String {
    let times = panels.iter().flat_map(|p| &p.lines).flat_map(|l| &l.points).map(|(t, _)| *t);
    let end = times.fold(1.0, f64::max);
    let x = |t: f64| LEFT + (WIDTH - LEFT - RIGHT) * t / end;
    let height = PANEL * panels.len() as f64 + BOTTOM;
    let mut body = String::new();
    for (i, panel) in panels.iter().enumerate() {
        let drawn = panel.draw(&x, end, spans);
        let _ = write!(body, r#"<g transform="translate(0,{:.0})">{drawn}</g>"#, PANEL * i as f64);
    }
    let (step, _) = ticks(end);
    let mut t = 0.0;
    while t <= end {
        let _ = write!(
            body,
            r#"<text class="tick" x="{:.1}" y="{:.1}" text-anchor="middle">{} s</text>"#,
            x(t),
            height - BOTTOM + 6.0,
            number(t)
        );
        t += step;
    }
    let drawn = panels.iter().flat_map(|p| &p.lines).filter(|l| !l.points.is_empty());
    let lines = drawn.map(|l| (l.name, l.class));
    let keys: Vec<(&str, &str)> = lines.chain(spans.iter().map(|s| (s.name, s.class))).collect();
    file(WIDTH, height, &body, &keys)
}

impl Panel {
    fn draw(&self, x: &impl Fn(f64) -> f64, end: f64, spans: &[ShadedSpan]) -> String {
        let most = self.lines.iter().flat_map(|l| &l.points).map(|(_, v)| *v).fold(0.0, f64::max);
        let (step, top) = ticks(most * 1.02);
        let y = |value: f64| TOP + PLOT * (1.0 - value / top);
        let mut out = heading(&self.title, LEFT);
        for (span, (from, to)) in spans.iter().flat_map(|s| s.times.iter().map(move |t| (s, t))) {
            let _ = write!(
                out,
                r#"<rect class="{}" style="opacity:.25" x="{:.1}" y="{TOP}" width="{:.1}" height="{PLOT}"><title>{}</title></rect>"#,
                span.class,
                x(*from),
                (x(*to) - x(*from)).max(0.5),
                escape(span.name)
            );
        }
        let mut tick = 0.0;
        while tick <= top * 1.001 {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}"/><text class="tick" x="{:.0}" y="{:.1}" text-anchor="end">{}</text>"#,
                x(end),
                LEFT - 5.0,
                y(tick) + 3.5,
                number(tick),
                y = y(tick)
            );
            tick += step;
        }
        for line in &self.lines {
            let points: Vec<String> =
                line.points.iter().map(|(t, v)| format!("{:.1},{:.1}", x(*t), y(*v))).collect();
            let _ = write!(
                out,
                r#"<polyline points="{}" style="fill:none;stroke:var(--{});stroke-width:1.6"><title>{}</title></polyline>"#,
                points.join(" "),
                line.class,
                escape(line.name)
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_shaded_period_is_drawn_with_its_name() {
        let line = |name| ChartLine { name, class: "host", points: vec![(0.0, 1.0), (2.0, 3.0)] };
        let panels = [
            Panel { title: "a".to_owned(), lines: vec![line("x & y")] },
            Panel { title: "b".to_owned(), lines: vec![line("z"), line("w")] },
        ];
        let spans = [ShadedSpan { name: "busy", class: "p2", times: vec![(0.5, 1.0)] }];
        let svg = timeline(&panels, &spans);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("opacity:.25").count()), (3, 2));
        assert!(svg.contains("x &amp; y") && svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn a_timeline_without_charts_is_a_complete_file() {
        assert!(timeline(&[], &[]).contains("</svg>"));
    }
}
