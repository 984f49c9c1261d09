//! Records the commit that the simulator is built from, for the reports of failures.

use std::process::Command;

fn main() {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // The log of HEAD changes with each commit.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    println!("cargo:rerun-if-changed=../../crates");
    let commit =
        git(&["describe", "--always", "--dirty", "--match="]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=OUTBOARD_COMMIT={commit}");
}
