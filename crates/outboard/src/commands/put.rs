//! `outboard put`: stores a file or standard input as an object.

use std::path::{Path, PathBuf};

use clap::Args;
use client::{Object, PutOptions};

use super::session;
use crate::args::NodeArgs;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// Maximum size, in bytes, of a file that is stored without a progress bar.
pub const ONE_REQUEST: u64 = 16 << 20;

/// Store a file, or standard input, as an object
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard put photos/beach.jpg beach.jpg\n  \
    tar c /etc | outboard put backups:monday/etc.tar -")]
pub struct PutArgs {
    /// Object to write, written POOL[:NAMESPACE]/OBJECT
    pub object: String,
    /// File to store; '-' stands for standard input
    pub file: PathBuf,
    /// Fail if the object exists already
    #[arg(long)]
    pub exclusive: bool,
}

/// Runs the command.
pub fn run(args: PutArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let object = session::object(&client, &args.object)?;
        let doing = format!("storing {}", args.object);
        let options = PutOptions { exclusive: args.exclusive, ..PutOptions::default() };
        if args.file == Path::new("-") {
            session::allow_huge_pages();
            let progress = ProgressMeter::stream(&args.object);
            let input = progress.reading(tokio::io::stdin());
            object.put_reader(input, options).await.doing(doing)?;
            return Ok(());
        }
        file(&object, &args.file, options, &doing).await
    })
}

async fn file(object: &Object, path: &Path, options: PutOptions, doing: &str) -> Result<()> {
    let reading = || format!("reading {}", path.display());
    let metadata = std::fs::metadata(path).doing(reading())?;
    if metadata.is_dir() {
        return Err(Failure::usage(reading(), "it is a directory; copy it with `outboard cp -r`"));
    }
    if metadata.is_file() && metadata.len() <= ONE_REQUEST {
        object.put_file(path, options).await.doing(doing)?;
        return Ok(());
    }
    session::allow_huge_pages();
    let progress = ProgressMeter::bytes(&object.name().to_string(), metadata.len());
    let input = tokio::fs::File::open(path).await.doing(reading())?;
    object.put_reader(progress.reading(input), options).await.doing(doing)?;
    Ok(())
}
