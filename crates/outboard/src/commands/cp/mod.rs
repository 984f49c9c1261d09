//! `outboard cp`: copies files and directory trees into and out of a pool.

mod download;
mod file_meta;
pub mod local;
mod upload;

use std::path::PathBuf;

use clap::Args;
use client::{Client, Pool};

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Failure, Result};
use node::progress::ProgressMeter;

/// Copy files and directory trees into and out of a pool
///
/// Either the source or the destination is in the node, written outboard:POOL[:NAMESPACE]/PREFIX.
/// The copy preserves directories, symlinks, modes, times, and names that are not UTF-8. If a file
/// exists at the destination with the same size and modification time, it is not copied again.
/// Therefore an interrupted copy that is run again continues where it stopped. All data that is
/// read from the node is verified against its checksums.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard cp -r /usr/share outboard:files/share\n  \
    outboard cp -r outboard:files/share ./share\n  \
    outboard cp beach.jpg outboard:photos/summer/")]
pub struct CpArgs {
    /// Source: a local path, or outboard:POOL/OBJECT, or with -r outboard:POOL[/PREFIX]
    pub src: String,
    /// Destination: a local path, or outboard:POOL[/PREFIX]
    pub dst: String,
    /// Copy a whole directory tree
    #[arg(long, short)]
    pub recursive: bool,
    /// Number of files that are copied at the same time
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub in_flight: u16,
}

/// Runs the command.
pub fn run(args: CpArgs, node: &NodeArgs) -> Result<()> {
    let sides = (args.src.strip_prefix("outboard:"), args.dst.strip_prefix("outboard:"));
    let job = CopyOptions { recursive: args.recursive, in_flight: usize::from(args.in_flight) };
    match (sides, PathBuf::from(&args.src), PathBuf::from(&args.dst)) {
        ((None, Some(to)), from, _) => {
            let to = to.to_owned();
            session::run(node, super::options(), async move |client| {
                let place = PoolPrefix::parse(&client, &to)?;
                upload::run(job, &from, place).await
            })
        }
        ((Some(from), None), _, to) => {
            let from = from.to_owned();
            session::run(node, super::options(), async move |client| {
                let place = PoolPrefix::parse(&client, &from)?;
                download::run(job, place, &to).await
            })
        }
        _ => Err(Failure::usage("copying", "exactly one of SRC and DST must start with 'outboard:'")),
    }
}

/// The flags of a copy.
#[derive(Debug, Clone, Copy)]
struct CopyOptions {
    recursive: bool,
    in_flight: usize,
}

/// The source or destination of a copy in a pool.
#[derive(Debug, Clone)]
struct PoolPrefix {
    pool: Pool,
    /// Prefix of the objects' names, or the name of a single object.
    prefix: String,
}

impl PoolPrefix {
    fn parse(client: &Client, text: &str) -> Result<PoolPrefix> {
        let (pool, prefix) = text.split_once('/').unwrap_or((text, ""));
        Ok(PoolPrefix { pool: session::pool(client, pool)?, prefix: prefix.to_owned() })
    }

    /// Returns the prefix in the form of a directory: empty, or with a slash at its end.
    fn directory(&self) -> String {
        match self.prefix.as_str() {
            "" => String::new(),
            p if p.ends_with('/') => p.to_owned(),
            p => format!("{p}/"),
        }
    }
}

/// Counts the outcomes of a copy, and shows its progress.
struct Tally {
    progress: ProgressMeter,
    copied: u64,
    bytes: u64,
    kept: u64,
    failed: u64,
    /// Number of consecutive paths for which the node gave no answer.
    unanswered: u64,
}

/// The outcome for one path.
enum PathOutcome {
    /// The path was copied, with this number of bytes.
    Copied(u64),
    /// The destination was up to date already; contains the size in bytes.
    Kept(u64),
    /// The link will be created, or the mode of the directory set, at the end of the copy.
    Deferred,
    /// The path was not copied, because the node did not answer; contains the message for the user.
    Unanswered(String),
}

impl PathOutcome {
    /// Converts the failure of a request into the outcome for its path. `why` is the message for
    /// the user, which names the path.
    fn of_failed(error: &client::Error, why: String) -> std::result::Result<PathOutcome, String> {
        match error {
            client::Error::TimedOut(_) => Ok(PathOutcome::Unanswered(why)),
            _ => Err(why),
        }
    }
}

/// A copy ends after this number of consecutive paths for which the node gives no answer. Each
/// further path would only wait for its own timeout.
const UNANSWERED_MOST: u64 = 8;

/// Maximum number of failed paths that are reported individually. Further failures are only
/// counted.
const FAILURES_SHOWN: u64 = 20;

impl Tally {
    fn new(label: &str) -> Tally {
        Tally {
            progress: ProgressMeter::bytes(label, 0),
            copied: 0,
            bytes: 0,
            kept: 0,
            failed: 0,
            unanswered: 0,
        }
    }

    /// Returns true if the copy should end because the node does not answer.
    fn gives_up(&self) -> bool {
        self.unanswered >= UNANSWERED_MOST
    }

    /// Counts the outcome for one path, and prints the message of a failure.
    fn add(&mut self, outcome: std::result::Result<PathOutcome, String>) {
        let outcome = match outcome {
            Ok(PathOutcome::Unanswered(why)) => {
                self.unanswered += 1;
                Err(why)
            }
            Ok(outcome) => {
                self.unanswered = 0;
                Ok(outcome)
            }
            Err(why) => Err(why),
        };
        match outcome {
            Ok(PathOutcome::Copied(bytes)) => {
                self.copied += 1;
                self.bytes += bytes;
                self.progress.add(bytes);
            }
            Ok(PathOutcome::Kept(bytes)) => {
                self.kept += 1;
                self.progress.add(bytes);
            }
            Ok(PathOutcome::Deferred | PathOutcome::Unanswered(_)) => {}
            Err(why) => {
                self.failed += 1;
                if self.failed <= FAILURES_SHOWN {
                    self.progress.suspended(|| output::note(why));
                }
            }
        }
        self.progress.message(format!("{} paths", self.copied + self.kept));
    }

    /// Prints a summary. Fails if a path was not copied.
    fn finish(self) -> Result<()> {
        drop(self.progress);
        let kept =
            if self.kept > 0 { format!(", {} were up to date already", self.kept) } else { String::new() };
        output::note(format!("copied {} paths, {} bytes{kept}", self.copied, self.bytes));
        match self.failed {
            0 => Ok(()),
            _ if self.unanswered >= UNANSWERED_MOST => Err(Failure::new(
                "copying",
                "the node does not answer; when it is up again, run the command again to continue",
            )),
            n => Err(Failure::new(
                "copying",
                format!(
                    "{n} paths were not copied; the messages above say why. Run the command again to copy them"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_ends_only_after_consecutive_paths_without_an_answer() {
        let timed_out = client::Error::TimedOut(std::time::Duration::from_secs(60).into());
        let mut tally = Tally::new("copying");
        for _ in 0..3 {
            for _ in 1..UNANSWERED_MOST {
                tally.add(PathOutcome::of_failed(&timed_out, "a: no answer".into()));
            }
            assert!(!tally.gives_up());
            tally.add(Ok(PathOutcome::Copied(1)));
        }
        for _ in 0..100 {
            tally.add(PathOutcome::of_failed(&client::Error::Closed, "a: closed".into()));
        }
        assert!(!tally.gives_up(), "other failures concern one path only");
        for _ in 0..UNANSWERED_MOST {
            tally.add(PathOutcome::of_failed(&timed_out, "a: no answer".into()));
        }
        assert!(tally.gives_up());
        assert!(tally.finish().unwrap_err().to_string().contains("does not answer"));
    }
}
