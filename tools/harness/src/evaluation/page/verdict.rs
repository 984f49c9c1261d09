//! The top of the page, with the thresholds and the results.

use std::fmt::Write;

use super::PageContent;
use super::text::{cell_in, escape, number};
use crate::evaluation::bars::{self, Bar, BarRow, BarVerdict, Bound, FigureFormat};

/// Formats the page's title, the score and the table of claims.
pub fn section(content: &PageContent<'_>) -> String {
    let (e, s) = (content.environment, content.settings);
    let (passed, failed, absent) = bars::score(content.bars);
    let mut html = format!(
        "<header><h1>Outboard, the DoCeph paper, and Ceph</h1><p class=\"soft\">{}; commit {}; {} CPUs, {}</p></header>",
        escape(&e.date),
        escape(&e.commit),
        e.cpus,
        escape(&e.cpu)
    );
    let _ = write!(
        html,
        "<div class=\"score\"><span class=\"pass\">{passed} passed</span>, <span class=\"fail\">{failed} failed</span>, {absent} not measured"
    );
    if content.rounds < s.rounds {
        let _ = write!(html, " — the run is incomplete: it has {} of {} rounds", content.rounds, s.rounds);
    }
    html.push_str("</div>");
    if s.quick {
        html.push_str("<p><b>This was a quick run</b> with only two sizes. It shows that everything works, but its values prove nothing.</p>");
    }
    html.push_str(
        "<section><h2>Claims and thresholds</h2><div class=\"wide\"><table><thead><tr><th>claim</th><th>here, median</th><th>threshold</th>\
         <th>verdict</th><th>paper</th></tr></thead><tbody>",
    );
    // A quick run measures only a few rows. To make them easy to find, the other rows are omitted.
    let shown = |row: &&BarRow| !s.quick || row.verdict != BarVerdict::NotMeasured;
    content.bars.iter().for_each(|b| html.push_str(&bar(b, shown)));
    html.push_str("</tbody></table></div></section>");
    if !content.found.problems.is_empty() {
        html.push_str("<section><h3>Missing and failed measurements</h3><ul>");
        for problem in &content.found.problems {
            let _ = write!(html, "<li>{}</li>", escape(problem));
        }
        html.push_str("</ul></section>");
    }
    html
}

fn bar(bar: &Bar, shown: impl Fn(&&BarRow) -> bool) -> String {
    if !bar.rows.iter().any(|r| shown(&r)) {
        return String::new();
    }
    let mut html = format!(
        "<tr class=\"bar\"><th colspan=\"5\">{} · {}<br/><small>{}</small></th></tr>",
        bar.number,
        escape(bar.title),
        escape(bar.definition)
    );
    for row in bar.rows.iter().filter(shown) {
        let (class, verdict) = match row.verdict {
            BarVerdict::Pass => ("pass", "pass"),
            BarVerdict::Fail => ("fail", "fail"),
            BarVerdict::NotMeasured => ("soft", "not measured"),
            BarVerdict::Information => ("soft", ""),
        };
        let _ = write!(
            html,
            "<tr class=\"case\"><th>{}</th><td>{}</td><td>{}</td><td class=\"{class}\">{verdict}</td><td>{}</td></tr>",
            escape(&row.case),
            value(row),
            bound(row),
            escape(row.paper.as_deref().unwrap_or("–"))
        );
    }
    html
}

fn value(row: &BarRow) -> String {
    cell_in(row.value, if row.unit == FigureFormat::Percent { " %" } else { "" })
}

/// Formats the threshold of a row, such as `≥ 0.85`. The text is empty if the row has no threshold.
pub fn bound(row: &BarRow) -> String {
    let unit = if row.unit == FigureFormat::Percent { " %" } else { "" };
    match row.bound {
        Some(Bound::AtLeast(v)) => format!("≥ {}{unit}", number(v)),
        Some(Bound::AtMost(v)) => format!("≤ {}{unit}", number(v)),
        None => String::new(),
    }
}
