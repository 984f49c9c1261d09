//! `make report`: repeats the evaluation of the DoCeph paper on this machine, together with a real
//! Ceph. Writes `report/index.html` and `report/report.json`. `QUICK=1`, `ROUNDS`, `SECONDS` and
//! `CEPH=0` determine how much is measured, and `OUTBOARD_REPORT_WORK` sets the work directory (see
//! `evaluation::settings`).

#![forbid(unsafe_code)]

use std::fs;

use outboard_harness::Result;
use outboard_harness::evaluation::bars::{self, Bar, BarVerdict, Bound, FigureFormat};
use outboard_harness::evaluation::campaign::Campaign;
use outboard_harness::evaluation::environment::Environment;
use outboard_harness::evaluation::page::{self, PageContent};
use outboard_harness::evaluation::paper;
use outboard_harness::evaluation::plan::{self, Subjects};
use outboard_harness::evaluation::progress::{ProgressLine, minutes};
use outboard_harness::evaluation::rig::EvaluationRig;
use outboard_harness::evaluation::sample::{Measurements, Medians};
use outboard_harness::evaluation::settings::EvaluationSettings;
use outboard_harness::evaluation::workload::TestedSystem;
use outboard_harness::report::{Table, say};
use serde::Serialize;

fn main() -> Result<()> {
    let settings = EvaluationSettings::from_env();
    fs::create_dir_all(&settings.out)?;
    let started = std::time::Instant::now();
    let environment = Environment::here(&settings.out);
    let mut missing = Vec::new();
    let mut subjects = Subjects::all();
    if !settings.ceph {
        subjects.configs.retain(|c| *c != TestedSystem::Ceph);
    }
    let setup = plan::setup_seconds(&settings, &subjects);
    let planned = setup + plan::seconds(&settings, &subjects, 1);
    say(format!(
        "measuring {} round(s), in total {} runs of at most {} s, in {}; this takes {}",
        settings.rounds,
        plan::runs(&settings, &subjects),
        settings.seconds,
        settings.work.display(),
        minutes(planned)
    ));
    let mut progress = ProgressLine::new(planned);
    let rig = EvaluationRig::up(&settings, &mut missing, &|what| progress.show(what));
    progress.clear();
    let rig = rig?;
    progress.add(setup);
    missing.iter().for_each(|what| say(format!("not measured: {what}")));
    let left_out = missing.len();
    let mut campaign = Campaign::new(&settings, &rig, missing);
    for round in 1..=settings.rounds {
        campaign.round(round, &mut progress);
        progress.landmark(&format!("finished round {round} of {}", settings.rounds));
        // The results are written after each round, so that an interrupted run leaves its complete
        // rounds.
        write(&settings, &environment, &campaign.found, round)?;
    }
    progress.clear();
    summary(&bars::all(&campaign.found));
    campaign.found.problems.iter().skip(left_out).for_each(|what| say(format!("problem: {what}")));
    say(format!(
        "wrote {} and report.json after {:.0} s",
        settings.out.join("index.html").display(),
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// The content of `report.json`. Later versions may add fields, but do not remove fields.
#[derive(Serialize)]
struct ReportDocument<'a> {
    environment: &'a Environment,
    quick: bool,
    rounds: u32,
    seconds_per_run: u32,
    seconds_per_secondary_run: u32,
    large_set_objects: Option<u64>,
    bars: &'a [Bar],
    medians: Vec<Medians>,
    paper: serde_json::Value,
    #[serde(flatten)]
    found: &'a Measurements,
}

fn write(
    settings: &EvaluationSettings,
    environment: &Environment,
    found: &Measurements,
    rounds: u32,
) -> Result<()> {
    let bars = bars::all(found);
    let of_coding = settings.out.join("redundancy");
    let coding = &page::coding::drawings(|file| fs::read_to_string(of_coding.join(file)).ok());
    let html = page::html(&PageContent { settings, environment, found, bars: &bars, rounds, coding });
    let document = ReportDocument {
        environment,
        quick: settings.quick,
        rounds,
        seconds_per_run: settings.seconds,
        seconds_per_secondary_run: settings.secondary_seconds(),
        large_set_objects: settings.large_set(),
        bars: &bars,
        medians: found.medians(),
        paper: paper::json(),
        found,
    };
    fs::write(settings.out.join("report.json"), serde_json::to_vec_pretty(&document)?)?;
    fs::write(settings.out.join("index.html"), html)?;
    Ok(())
}

/// Prints the measured claims and their verdicts to the terminal.
fn summary(bars: &[Bar]) {
    let mut table = Table::new(&["claim", "median", "interval", "threshold", "verdict", "paper"]);
    let rows = bars.iter().flat_map(|b| b.rows.iter().map(move |r| (b, r)));
    for (bar, row) in rows.filter(|(_, r)| r.verdict != BarVerdict::NotMeasured) {
        let unit = if row.unit == FigureFormat::Percent { " %" } else { "" };
        let number = |v: f64| format!("{v:.2}{unit}");
        table.row(&[
            format!("{} {}: {}", bar.number, bar.title, row.case),
            row.value.map_or_else(|| "-".to_owned(), |v| number(v.median)),
            row.value
                .filter(|v| v.n > 1)
                .map_or_else(String::new, |v| format!("{:.2}..{:.2}", v.low, v.high)),
            match row.bound {
                Some(Bound::AtLeast(v)) => format!(">= {v}{unit}"),
                Some(Bound::AtMost(v)) => format!("<= {v}{unit}"),
                None => String::new(),
            },
            match row.verdict {
                BarVerdict::Pass => "pass",
                BarVerdict::Fail => "FAIL",
                BarVerdict::NotMeasured => "not measured",
                BarVerdict::Information => "",
            }
            .to_owned(),
            row.paper.clone().unwrap_or_default(),
        ]);
    }
    table.print();
    let (passed, failed, absent) = bars::score(bars);
    say(format!("  {passed} results passed, {failed} failed, {absent} were not measured"));
}
