//! `outboard doctor`: checks whether this machine can run a node well, and says how to improve the
//! machine.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use crate::args::NodeArgs;
use crate::commands::locate;
use node::checkup::{self, Finding, Grade};
use node::config_file;
use node::failure::{Doing, Failure, Result};

/// Check whether this machine can run a node: kernel, io_uring, limits, huge pages, file systems
///
/// Each finding states what was found, why it matters, and what to do. The command fails only if a
/// finding prevents a node from running.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard doctor\n  \
    outboard doctor --dir /srv/node1 --json")]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct DoctorReport<'a> {
    fit: bool,
    findings: &'a [Finding],
}

/// Checks the machine.
pub fn run(args: DoctorArgs, node: &NodeArgs) -> Result<()> {
    let root = locate::root(node);
    let file = root.join(config_file::FILE);
    let config = config_file::load(file.is_file().then_some(&*file), |name| std::env::var(name).ok());
    let config = config.doing("reading the configuration")?;
    let findings = checkup::all(&root, &config.targets, &config.osd);
    let fit = findings.iter().all(|f| f.grade != Grade::Prevents);
    let text = if args.json {
        serde_json::to_string_pretty(&DoctorReport { fit, findings: &findings })
            .doing("printing the findings")?
            + "\n"
    } else {
        findings.iter().map(describe).collect()
    };
    std::io::stdout().write_all(text.as_bytes()).doing("printing the findings")?;
    if fit {
        return Ok(());
    }
    let what: Vec<&str> = findings.iter().filter(|f| f.grade == Grade::Prevents).map(|f| f.what).collect();
    Err(Failure::new(
        "checking this machine",
        format!("a node cannot run here: {}; see above", what.join(", ")),
    ))
}

fn describe(finding: &Finding) -> String {
    let mark = match finding.grade {
        Grade::Good => "ok      ",
        Grade::Costs => "costs   ",
        Grade::Prevents => "prevents",
    };
    let mut text = format!("{mark}  {}: {}\n", finding.what, finding.found);
    if finding.grade != Grade::Good {
        text += &format!("          why: {}\n", finding.why);
        if let Some(remedy) = &finding.remedy {
            text += &format!("          do:  {remedy}\n");
        }
    }
    text
}
