//! Where parity is computed: the drawings that `outboard-redundancy coding` has stored beside the
//! page.

use super::svg;

/// A drawing.
#[derive(Debug)]
pub struct Drawing {
    title: &'static str,
    svg: String,
    below: &'static str,
}

/// File below the report's `redundancy`, title, and what to know of it.
const KNOWN: [(&str, &str, &str); 3] = [
    (
        "figure2.svg",
        "The paper’s figure 2, here",
        "Left, as in the paper: files in 128 data and 32 parity fragments, by one core of the host, by the emulated accelerator, which computes for \
         real and is paced to the paper’s fit, and by what the paper left for later, the DPU’s cores (here of the same kind as the host’s; a real \
         DPU’s are slower). Right, what a client sees of it: writes to a pool ec:4+2 on 6 targets, one at a time.",
    ),
    (
        "timeline.svg",
        "The scheduler at work",
        "Writes of 16 MiB to ec:4+2, four at a time, in hybrid:auto, with the host’s roles on one CPU and the DPU’s on the other. In the middle \
         third a program that wants all of the CPU shares the host’s. Coding on the host is left out of the utilization, as are the threads that \
         stand for the DPU.",
    ),
    (
        "sweep.svg",
        "Fixed ratios and hybrid:auto",
        "Writes on an idle host by the ratio of pieces that host and DPU code. From the last run of make bench-redundancy PARTS=coding:sweep.",
    ),
];

/// The drawings that `read` finds, by the names of their files.
pub fn drawings(read: impl Fn(&str) -> Option<String>) -> Vec<Drawing> {
    let found = KNOWN.into_iter().filter_map(|(file, title, below)| Some((read(file)?, title, below)));
    found.map(|(svg, title, below)| Drawing { title, svg: svg::inline(&svg), below }).collect()
}

/// All of them; nothing if there are none.
pub fn section(drawings: &[Drawing]) -> String {
    if drawings.is_empty() {
        return String::new();
    }
    let one = |d: &Drawing| {
        format!("<h3>{}</h3><div class=\"plot\">{}</div><p class=\"soft\">{}</p>", d.title, d.svg, d.below)
    };
    let all: Vec<String> = drawings.iter().map(one).collect();
    format!("<section><h2>Erasure coding: on the host or on the DPU</h2>{}</section>", all.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_drawn_is_shown_without_a_style_of_its_own() {
        let drawn =
            drawings(|name| (name == "timeline.svg").then(|| svg::file(9.0, 9.0, "<g>body</g>", &[])));
        let html = section(&drawn);
        assert_eq!((html.matches("<svg").count(), html.matches("<style").count()), (1, 0));
        assert!(html.contains("<g>body</g>") && html.contains("The scheduler at work"), "{html}");
        assert_eq!(section(&drawings(|_| None)), "");
    }
}
