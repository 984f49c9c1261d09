//! Bar charts as SVG, inline or as separate files. Colours are CSS classes; the page's style sheet
//! defines them for light and dark mode.

use std::fmt::Write;

use super::STYLE;
use super::text::{escape, number};
use crate::evaluation::stats::Estimate;

/// A chart with groups of bars.
#[derive(Debug)]
pub struct Grouped {
    /// Title above the chart.
    pub title: String,
    /// Label of the axis, with its unit.
    pub axis: String,
    /// Labels below the groups.
    pub groups: Vec<String>,
    /// The series. Each series has one bar per group.
    pub series: Vec<Series>,
}

/// Bars of one colour.
#[derive(Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Class in the style sheet.
    pub class: &'static str,
    /// One value per group. `None` is a missing value, for which no bar is drawn.
    pub values: Vec<Option<Estimate>>,
}

/// A chart of stacked bars.
#[derive(Debug)]
pub struct Stacked {
    /// Title above the chart.
    pub title: String,
    /// The bars from left to right.
    pub bars: Vec<Stack>,
}

/// A bar of a stacked chart.
#[derive(Debug)]
pub struct Stack {
    /// Two lines of text below the bar.
    pub label: [String; 2],
    /// The parts from bottom to top.
    pub parts: Vec<Share>,
}

/// A part of a stack.
#[derive(Debug)]
pub struct Share {
    /// Name in the legend.
    pub name: &'static str,
    /// Class in the style sheet.
    pub class: &'static str,
    /// Size of the part, in the unit of the stack.
    pub amount: f64,
}

const HEIGHT: f64 = 250.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
const LEFT: f64 = 56.0;
const PLOT: f64 = HEIGHT - TOP - BOTTOM;

/// Draws charts beside one another, each as wide as its bars need, with one legend.
#[must_use]
pub fn grouped(charts: &[Grouped]) -> String {
    let (width, body) = beside_one_another(charts);
    figure(width, &body, &keys(charts))
}

/// Draws charts like [`grouped`], but as a separate file.
#[must_use]
pub fn grouped_file(charts: &[Grouped]) -> String {
    let (width, body) = beside_one_another(charts);
    file(width, HEIGHT, &body, &keys(charts))
}

fn beside_one_another(charts: &[Grouped]) -> (f64, String) {
    let mut body = String::new();
    let mut x = 0.0;
    for chart in charts {
        let width = chart.width();
        let _ = write!(body, r#"<g transform="translate({x:.0},0)">{}</g>"#, chart.draw(width));
        x += width;
    }
    (x, body)
}

/// Returns the entries of the legend: the name and colour of each series that has a value.
fn keys(charts: &[Grouped]) -> Vec<(&str, &'static str)> {
    let mut keys: Vec<(&str, &'static str)> = Vec::new();
    for series in charts.iter().flat_map(|c| &c.series).filter(|s| s.values.iter().any(Option::is_some)) {
        if !keys.contains(&(series.name.as_str(), series.class)) {
            keys.push((&series.name, series.class));
        }
    }
    keys
}

/// Creates an SVG file with a legend above the drawing. The file uses no external resources.
#[must_use]
pub fn file(width: f64, height: f64, body: &str, keys: &[(&str, &str)]) -> String {
    const LEGEND: f64 = 24.0;
    let (mut legend, mut x) = (String::new(), 12.0);
    for (name, class) in keys {
        let _ = write!(
            legend,
            r#"<rect class="{class}" x="{x:.0}" y="8" width="10" height="10"/><text x="{:.0}" y="17">{}</text>"#,
            x + 15.0,
            escape(name)
        );
        x += 33.0 + 6.2 * name.chars().count() as f64;
    }
    let (width, height) = (width.max(x), height + LEGEND);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\
         <style><![CDATA[{STYLE}]]></style><rect width=\"100%\" height=\"100%\" style=\"fill:var(--bg)\"/>{legend}\
         <g transform=\"translate(0,{LEGEND})\">{body}</g></svg>\n"
    )
}

/// Removes the style sheet from a file's drawing, so that the drawing can be a part of the page and
/// use the page's style sheet.
#[must_use]
pub fn inline(file: &str) -> String {
    match (file.split_once("<style>"), file.split_once("</style>")) {
        (Some((before, _)), Some((_, after))) => format!("{before}{after}"),
        _ => file.to_owned(),
    }
}

fn figure(width: f64, body: &str, keys: &[(&str, &str)]) -> String {
    let mut html = String::from("<div class=\"legend\">");
    for (name, class) in keys {
        let _ = write!(html, "<span><i class=\"{class}\"></i>{}</span>", escape(name));
    }
    let _ = write!(
        html,
        "</div><div class=\"plot\"><svg viewBox=\"0 0 {width:.0} {HEIGHT:.0}\" width=\"{width:.0}\" height=\"{HEIGHT:.0}\" role=\"img\">{body}</svg></div>"
    );
    html
}

impl Grouped {
    fn bar_width(&self) -> f64 {
        if self.series.len() <= 2 { 30.0 } else { 28.0 }
    }

    fn group_width(&self) -> f64 {
        self.bar_width() * self.series.len() as f64 + 18.0
    }

    fn width(&self) -> f64 {
        let bars = self.group_width() * self.groups.len() as f64;
        LEFT + bars.max(self.title.len() as f64 * 7.0) + 12.0
    }

    fn draw(&self, width: f64) -> String {
        let values = self.series.iter().flat_map(|s| s.values.iter().flatten());
        let most = values.map(|v| v.high).fold(0.0, f64::max);
        let (step, top) = ticks(most * 1.06);
        let y = |value: f64| TOP + PLOT * (1.0 - value / top);
        let mut out = heading(&self.title, LEFT);
        let _ = write!(
            out,
            r#"<text class="axis" transform="translate(12,{:.0}) rotate(-90)" text-anchor="middle">{}</text>"#,
            TOP + PLOT / 2.0,
            escape(&self.axis)
        );
        let mut tick = 0.0;
        while tick <= top * 1.001 {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{:.0}" y1="{y:.1}" y2="{y:.1}"/><text class="tick" x="{:.0}" y="{:.1}" text-anchor="end">{}</text>"#,
                width - 12.0,
                LEFT - 5.0,
                y(tick) + 3.5,
                number(tick),
                y = y(tick)
            );
            tick += step;
        }
        for (g, group) in self.groups.iter().enumerate() {
            let left = LEFT + self.group_width() * g as f64 + 9.0;
            let middle = left + self.bar_width() * self.series.len() as f64 / 2.0;
            let _ = write!(
                out,
                r#"<text class="tick" x="{middle:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                TOP + PLOT + 16.0,
                escape(group)
            );
            for (s, series) in self.series.iter().enumerate() {
                let x = left + self.bar_width() * s as f64;
                if let Some(value) = series.values.get(g).copied().flatten() {
                    out.push_str(&bar(x, self.bar_width() - 3.0, value, series, &y));
                }
            }
        }
        out
    }
}

/// Draws a bar with its confidence interval, and its value above the bar. The tooltip shows the
/// name of the series and the ends of the interval.
fn bar(x: f64, width: f64, value: Estimate, series: &Series, y: &impl Fn(f64) -> f64) -> String {
    let (middle, floor) = (x + width / 2.0, y(0.0));
    let mut out = format!(
        r#"<g><title>{}: {}, {} to {}</title><rect class="{}" x="{x:.1}" y="{:.1}" width="{width:.1}" height="{:.1}"/>"#,
        escape(&series.name),
        number(value.median),
        number(value.low),
        number(value.high),
        series.class,
        y(value.median),
        (floor - y(value.median)).max(0.5)
    );
    if value.high > value.low {
        let _ = write!(
            out,
            r#"<line class="whisker" x1="{middle:.1}" x2="{middle:.1}" y1="{:.1}" y2="{:.1}"/>"#,
            y(value.low),
            y(value.high)
        );
    }
    let _ = write!(
        out,
        r#"<text class="value" x="{middle:.1}" y="{:.1}" text-anchor="middle">{}</text></g>"#,
        y(value.high) - 3.0,
        number(value.median)
    );
    out
}

/// Draws a chart's heading.
pub fn heading(text: &str, x: f64) -> String {
    format!(r#"<text class="title" x="{x}" y="14">{}</text>"#, escape(text))
}

/// Draws charts of stacked bars beside one another, with one legend.
#[must_use]
pub fn stacked(charts: &[Stacked]) -> String {
    const BAR: f64 = 62.0;
    const GAP: f64 = 24.0;
    let (mut body, mut x, mut keys) = (String::new(), 0.0, Vec::new());
    for chart in charts.iter().filter(|c| !c.bars.is_empty()) {
        let _ = write!(body, r#"<g transform="translate({x:.0},0)">{}"#, heading(&chart.title, 8.0));
        for (i, bar) in chart.bars.iter().enumerate() {
            body.push_str(&stack(GAP / 2.0 + (BAR + GAP) * i as f64, BAR, bar));
            for part in bar.parts.iter().filter(|p| p.amount > 0.0) {
                if !keys.contains(&(part.name, part.class)) {
                    keys.push((part.name, part.class));
                }
            }
        }
        body.push_str("</g>");
        let bars = GAP / 2.0 + (BAR + GAP) * chart.bars.len() as f64;
        x += bars.max(chart.title.len() as f64 * 7.0) + 28.0;
    }
    figure(x, &body, &keys)
}

fn stack(x: f64, width: f64, bar: &Stack) -> String {
    let whole: f64 = bar.parts.iter().map(|p| p.amount.max(0.0)).sum();
    let (mut out, mut floor, middle) = (String::new(), TOP + PLOT, x + width / 2.0);
    for Share { name, class, amount } in &bar.parts {
        let share = if whole > 0.0 { amount.max(0.0) / whole } else { 0.0 };
        let height = share * PLOT;
        floor -= height;
        let _ = write!(
            out,
            r#"<g><title>{}: {:.1} %</title><rect class="{class}" x="{x:.1}" y="{floor:.1}" width="{width}" height="{height:.1}"/>"#,
            escape(name),
            100.0 * share
        );
        if height > 12.0 {
            let _ = write!(
                out,
                r#"<text class="inside" x="{middle:.1}" y="{:.1}" text-anchor="middle">{:.0} %</text>"#,
                floor + height / 2.0 + 3.5,
                100.0 * share
            );
        }
        out.push_str("</g>");
    }
    for (i, line) in bar.label.iter().enumerate() {
        let _ = write!(
            out,
            r#"<text class="tick" x="{middle:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            TOP + PLOT + 15.0 + 13.0 * i as f64,
            escape(line)
        );
    }
    out
}

/// Returns the distance between the ticks of an axis, and the upper end of the axis. `most` is the
/// largest value. An axis has about four steps of 1, 2, 2.5 or 5 times a power of ten.
pub fn ticks(most: f64) -> (f64, f64) {
    if most <= 0.0 {
        return (1.0, 1.0);
    }
    let rough = most / 4.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 2.5, 5.0, 10.0].map(|f| f * power).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    (step, step * (most / step).ceil())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_reaches_its_largest_value_in_two_to_five_steps() {
        for most in [0.003, 0.9, 1.0, 7.3, 94.2, 101.0, 48_213.0] {
            let (step, top) = ticks(most);
            assert!(top >= most && top / step <= 5.001 && top / step >= 2.0, "{most}: {step} {top}");
        }
    }

    #[test]
    fn no_bar_is_drawn_for_a_missing_value() {
        let chart = |values| Grouped {
            title: "a < b".to_owned(),
            axis: "MB/s".to_owned(),
            groups: vec!["1".to_owned(), "2".to_owned()],
            series: vec![Series { name: "x".to_owned(), class: "host", values }],
        };
        let both = grouped(&[chart(vec![Some(Estimate::exact(1.0)), Some(Estimate::exact(2.0))])]);
        let one = grouped(&[chart(vec![None, Some(Estimate::exact(2.0))])]);
        assert_eq!((both.matches("<rect").count(), one.matches("<rect").count()), (2, 1));
        assert!(both.contains("a &lt; b"));
    }

    #[test]
    fn an_svg_file_contains_its_style_sheet_and_legend() {
        let text = file(100.0, 50.0, "<g/>", &[("host & dpu", "host")]);
        assert!(text.contains("host &amp; dpu") && text.contains("--host:") && text.contains("<g/>"));
        assert!(!STYLE.contains("]]>"));
    }
}
