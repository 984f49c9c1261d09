//! The settings of a comparison, read from the command line.

use std::path::PathBuf;

use super::cases::CompareSuite;
use crate::Result;

/// Default number of rounds. With the default duration of runs, a comparison takes about 20
/// minutes.
const ROUNDS: u32 = 11;
/// Default duration of a run, in seconds.
const SECONDS: u32 = 3;

/// Maximum number of rounds, and of seconds per run. A larger number is probably a typing error,
/// because the comparison would take days.
const MOST: u32 = 1000;

/// The binaries to compare, the workloads, and the number and duration of runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompareSettings {
    /// The `outboard` program that the new program is compared with.
    pub old: PathBuf,
    /// The `outboard` program that is judged. `None` selects the `outboard` program in the
    /// directory of the running `outboard-bench`.
    pub new: Option<PathBuf>,
    /// Number of runs of each case on each binary, 1 to 1000.
    pub rounds: u32,
    /// Duration of each run, in seconds, 1 to 1000.
    pub seconds: u32,
    /// The workloads.
    pub suite: CompareSuite,
    /// Whether to print one JSON object instead of tables.
    pub json: bool,
}

impl CompareSettings {
    /// Reads `--compare OLD [--with NEW] [--redundancy] [--rounds N] [--seconds N] [--json]`.
    /// Returns `None` if there are no arguments.
    ///
    /// # Errors
    /// If an option is unknown, lacks its value, or has a value that is out of range.
    pub fn from_args(args: impl IntoIterator<Item = String>) -> Result<Option<CompareSettings>> {
        let (mut old, mut new) = (None, None);
        let (mut rounds, mut seconds, mut json) = (None, None, false);
        let mut suite = CompareSuite::Basic;
        let mut args = args.into_iter().peekable();
        let any = args.peek().is_some();
        while let Some(option) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{option} needs a value"));
            match option.as_str() {
                "--compare" => old = Some(PathBuf::from(value()?)),
                "--with" => new = Some(PathBuf::from(value()?)),
                "--rounds" => rounds = Some(number(&option, &value()?)?),
                "--seconds" => seconds = Some(number(&option, &value()?)?),
                "--redundancy" => suite = CompareSuite::Redundancy,
                "--json" => json = true,
                _ => return Err(format!("{option} is unknown; {USAGE}").into()),
            }
        }
        let Some(old) = old else {
            return if any { Err(format!("--compare is missing; {USAGE}").into()) } else { Ok(None) };
        };
        let (rounds, seconds) = (rounds.unwrap_or(ROUNDS), seconds.unwrap_or(SECONDS));
        Ok(Some(CompareSettings { old, new, rounds, seconds, suite, json }))
    }
}

const USAGE: &str = "use --compare OLD [--with NEW] [--redundancy] [--rounds N] [--seconds N] [--json]";

fn number(option: &str, text: &str) -> Result<u32> {
    let number = text.parse().ok().filter(|n| (1..=MOST).contains(n));
    number.ok_or_else(|| format!("{option} must be a number from 1 to {MOST}, not {text:?}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &str) -> Result<Option<CompareSettings>> {
        CompareSettings::from_args(args.split_ascii_whitespace().map(str::to_owned))
    }

    #[test]
    fn no_arguments_mean_no_comparison() {
        assert_eq!(read("").unwrap(), None);
    }

    #[test]
    fn defaults_give_a_95_percent_interval_in_20_minutes() {
        let settings = read("--compare /old").unwrap().unwrap();
        assert_eq!((settings.rounds, settings.seconds, settings.json), (11, 3, false));
        assert_eq!(settings.suite, CompareSuite::Basic);
        assert_eq!((settings.old, settings.new), ("/old".into(), None));
    }

    #[test]
    fn every_command_line_option_is_parsed() {
        let settings =
            read("--json --redundancy --rounds 3 --with /new --seconds 1 --compare /old").unwrap().unwrap();
        let expected = CompareSettings {
            old: "/old".into(),
            new: Some("/new".into()),
            rounds: 3,
            seconds: 1,
            suite: CompareSuite::Redundancy,
            json: true,
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn invalid_arguments_are_refused_with_a_reason() {
        for (args, why) in [
            ("--rounds 3", "--compare is missing"),
            ("--compare", "needs a value"),
            ("--compare /old --rounds 0", "from 1 to 1000"),
            ("--compare /old --seconds soon", "from 1 to 1000"),
            ("--compare /old --fast", "--fast is unknown"),
        ] {
            let refused = read(args).unwrap_err().to_string();
            assert!(refused.contains(why), "{args}: {refused}");
        }
    }
}
