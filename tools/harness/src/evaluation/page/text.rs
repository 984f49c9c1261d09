//! Numbers, tables and text for the page.

use std::fmt::Write;

use crate::evaluation::stats::Estimate;

/// Escapes text for HTML and SVG.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Formats a number with three significant digits, and with a thin space between thousands.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    let decimals = match () {
        () if size >= 99.95 || size == 0.0 => 0,
        () if size >= 9.995 => 1,
        () if size >= 0.9995 => 2,
        () => 3,
    };
    let text = format!("{size:.decimals$}");
    let (whole, fraction) = text.split_once('.').map_or((text.as_str(), ""), |(w, f)| (w, f));
    let mut grouped = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) && whole.len() > 4 {
            grouped.push('\u{2009}');
        }
        grouped.push(digit);
    }
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    let sign = if value < 0.0 { "−" } else { "" };
    format!("{sign}{grouped}{point}{fraction}")
}

/// Formats a median with its interval for a table cell. Returns a dash if there is no value.
#[must_use]
pub fn cell(estimate: Option<Estimate>) -> String {
    cell_in(estimate, "")
}

/// Like [`cell`], but appends `unit` to the median.
#[must_use]
pub fn cell_in(estimate: Option<Estimate>, unit: &str) -> String {
    let Some(e) = estimate else { return "–".to_owned() };
    let median = number(e.median) + unit;
    if e.n < 2 {
        return median;
    }
    let to = if e.low < 0.0 { " to " } else { "–" };
    format!("{median} <small>{}{to}{}</small>", number(e.low), number(e.high))
}

/// Formats a table. Cells are HTML, and the first cell of each row is the row's heading.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"wide\"><table><thead><tr>");
    for cell in head {
        let _ = write!(html, "<th>{}</th>", escape(cell));
    }
    html.push_str("</tr></thead><tbody>");
    for row in rows {
        html.push_str("<tr>");
        for (i, cell) in row.iter().enumerate() {
            let tag = if i == 0 { "th" } else { "td" };
            let _ = write!(html, "<{tag}>{cell}</{tag}>");
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></div>");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_significant_digits() {
        let cases = [
            (0.0, "0"),
            (0.01234, "0.012"),
            (0.85, "0.85"),
            (1.0, "1"),
            (94.2, "94.2"),
            (435.4, "435"),
            (9999.0, "9999"),
            (48_213.7, "48\u{2009}214"),
            (-3.5, "−3.5"),
            (99.97, "100"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }
}
