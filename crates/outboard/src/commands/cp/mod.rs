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
/// One side is in the node, written outboard:POOL[:NAMESPACE]/PREFIX. Directories, symlinks, modes,
/// times and names that are not UTF-8 are kept as metadata. A file that exists at the destination
/// with the same size and time is not copied again, so an interrupted copy continues where it
/// stopped. All data read is verified against its checksums.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard cp -r /usr/share outboard:files/share\n  \
    outboard cp -r outboard:files/share ./share\n  \
    outboard cp beach.jpg outboard:photos/summer/")]
pub struct CpArgs {
    /// Source: a path, or outboard:POOL/OBJECT, or with -r outboard:POOL[/PREFIX]
    pub src: String,
    /// Destination: a path, or outboard:POOL[/PREFIX]
    pub dst: String,
    /// Copy a whole tree
    #[arg(long, short)]
    pub recursive: bool,
    /// Files copied at a time
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

/// How to copy.
#[derive(Debug, Clone, Copy)]
struct CopyOptions {
    recursive: bool,
    in_flight: usize,
}

/// The side that is in the node.
#[derive(Debug, Clone)]
struct PoolPrefix {
    pool: Pool,
    /// What object names start with; an object's name if a single one is meant.
    prefix: String,
}

impl PoolPrefix {
    fn parse(client: &Client, text: &str) -> Result<PoolPrefix> {
        let (pool, prefix) = text.split_once('/').unwrap_or((text, ""));
        Ok(PoolPrefix { pool: session::pool(client, pool)?, prefix: prefix.to_owned() })
    }

    /// The prefix of everything below, as if it were a directory.
    fn directory(&self) -> String {
        match self.prefix.as_str() {
            "" => String::new(),
            p if p.ends_with('/') => p.to_owned(),
            p => format!("{p}/"),
        }
    }
}

/// What a copy has done so far.
struct Tally {
    progress: ProgressMeter,
    copied: u64,
    bytes: u64,
    kept: u64,
    failed: u64,
    /// Paths in a row that the node gave no answer about.
    unanswered: u64,
}

/// What became of one path.
enum PathOutcome {
    /// Copied that many bytes.
    Copied(u64),
    /// It was there already.
    Kept(u64),
    /// It will be made at the end.
    Deferred,
    /// It was not copied, because the node did not answer; what to say about it.
    Unanswered(String),
}

impl PathOutcome {
    /// What became of a path that a request failed for; `why` names it.
    fn of_failed(error: &client::Error, why: String) -> std::result::Result<PathOutcome, String> {
        match error {
            client::Error::TimedOut(_) => Ok(PathOutcome::Unanswered(why)),
            _ => Err(why),
        }
    }
}

/// A copy ends when the node gave no answer about that many paths in a row: every further one would take as long.
const UNANSWERED_MOST: u64 = 8;

/// Failures named one by one; of more only the number is told.
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

    /// Whether it is of no use to go on.
    fn gives_up(&self) -> bool {
        self.unanswered >= UNANSWERED_MOST
    }

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

    fn finish(self) -> Result<()> {
        drop(self.progress);
        let kept = if self.kept > 0 { format!(", {} were there already", self.kept) } else { String::new() };
        output::note(format!("copied {} paths, {} bytes{kept}", self.copied, self.bytes));
        match self.failed {
            0 => Ok(()),
            _ if self.unanswered >= UNANSWERED_MOST => Err(Failure::new(
                "copying",
                "the node does not answer any more; when it is up, run the command again to go on",
            )),
            n => Err(Failure::new(
                "copying",
                format!("{n} paths were not copied (see above); run it again to go on"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_gives_up_when_the_node_is_gone_and_not_before() {
        let timed_out = client::Error::TimedOut(std::time::Duration::from_secs(60));
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
        assert!(!tally.gives_up(), "other failures are one path's each");
        for _ in 0..UNANSWERED_MOST {
            tally.add(PathOutcome::of_failed(&timed_out, "a: no answer".into()));
        }
        assert!(tally.gives_up());
        assert!(tally.finish().unwrap_err().to_string().contains("does not answer"));
    }
}
