//! The command line of `outboard-thrash`. `make thrash-sample` tests whole rounds.

use std::process::{Command, Output};

fn thrash(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outboard-thrash")).args(args).output().unwrap()
}

#[test]
fn the_help_lists_all_kinds_of_faults() {
    let output = thrash(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for kind in ["kill ", "stop ", "lose-drive ", "stale-image ", "damage ", "fill ", "cut ", "restart "] {
        assert!(help.contains(&format!("\n  {kind}")), "{kind}: {help}");
    }
}

#[test]
fn an_unknown_kind_of_fault_is_refused_with_the_list_of_all_kinds() {
    let output = thrash(&["--without", "kill,comet"]);
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("kill-supervisor"));
}

#[test]
fn a_missing_program_is_an_error_of_the_tool_and_no_violation() {
    let output = thrash(&["--program", "/does/not/exist"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stdout).unwrap().contains("/does/not/exist does not exist"));
}
