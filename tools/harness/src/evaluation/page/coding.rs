//! The page's section about the coding places, where parity is computed. It shows the drawings that
//! `outboard-redundancy coding` has stored beside the page.

use super::svg;

/// A drawing with its title and the text below it.
#[derive(Debug)]
pub struct Drawing {
    title: &'static str,
    svg: String,
    below: &'static str,
}

/// The known drawings: file in the report's directory `redundancy`, title, and explanation.
const KNOWN: [(&str, &str, &str); 4] = [
    (
        "figure2.svg",
        "Figure 2 of Ryu et al., measured on this machine",
        "Left, as in the paper by Ryu et al. on erasure coding with DPUs: encoding of files into 128 data and 32 parity fragments. The files are encoded by one core of the host, or \
         by the emulated accelerator, which computes the parity and then waits as long as the paper’s linear fit requires. The paper left a third coding place for later work: the \
         DPU’s cores (here of the same kind as the host’s; a real DPU’s are slower). Right, the effect on a client: latency of writes to a pool ec:4+2 on 6 targets, one at a time.",
    ),
    (
        "wide.svg",
        "Figure 2 of Ryu et al. inside a node",
        "Latency of writes to a pool ec:128+32 on 160 targets of one drive, one object at a time. As in the paper, the time includes the writes to the drive; unlike in the paper, it also includes the network and the transactions of 160 targets. The accelerator is emulated.",
    ),
    (
        "timeline.svg",
        "The scheduler at work",
        "Writes of 16 MiB to ec:4+2, four at a time, in hybrid:auto. The host’s roles run on one CPU, and the DPU’s roles on another. In the middle \
         third, a program that uses all available CPU time shares the host’s CPU. The drawn CPU utilization contains neither coding on the host nor the \
         threads that emulate the DPU.",
    ),
    (
        "sweep.svg",
        "Fixed ratios and hybrid:auto",
        "Throughput of writes on an idle host, by the ratio of coding tasks on host and DPU. From the last run of make bench-redundancy PARTS=coding:sweep.",
    ),
];

/// Returns the known drawings that exist. `read` returns the content of a file by its name.
pub fn drawings(read: impl Fn(&str) -> Option<String>) -> Vec<Drawing> {
    let found = KNOWN.into_iter().filter_map(|(file, title, below)| Some((read(file)?, title, below)));
    found.map(|(svg, title, below)| Drawing { title, svg: svg::inline(&svg), below }).collect()
}

/// Formats the section. It is empty if there are no drawings.
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
    fn a_stored_drawing_is_shown_without_its_own_style_sheet() {
        let drawn =
            drawings(|name| (name == "timeline.svg").then(|| svg::file(9.0, 9.0, "<g>body</g>", &[])));
        let html = section(&drawn);
        assert_eq!((html.matches("<svg").count(), html.matches("<style").count()), (1, 0));
        assert!(html.contains("<g>body</g>") && html.contains("The scheduler at work"), "{html}");
        assert_eq!(section(&drawings(|_| None)), "");
    }
}
