//! `outboard get`: writes an object to a file or to standard output.

use std::path::{Path, PathBuf};

use clap::Args;
use tokio::io::AsyncWriteExt;

use super::cp::local::{self, NewFile};
use super::session;
use crate::args::NodeArgs;
use node::failure::{Doing, Result};
use node::progress::ProgressMeter;

/// Write an object to a file or to standard output
///
/// Each block of data is verified against its checksum. The output file gets its final name only
/// when it is complete. A device or pipe receives the data directly.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard get photos/beach.jpg beach.jpg\n  \
    outboard get backups:monday/etc.tar - | tar t")]
pub struct GetArgs {
    /// Object to read, written POOL[:NAMESPACE]/OBJECT
    pub object: String,
    /// Output file; '-' stands for standard output
    pub file: PathBuf,
}

/// Runs the command.
pub fn run(args: GetArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let object = session::object(&client, &args.object)?;
        let doing = format!("getting {}", args.object);
        let size = object.stat().await.doing(&doing)?.size;
        if size > super::put::ONE_REQUEST {
            session::allow_huge_pages();
        }
        let progress = ProgressMeter::bytes(&args.object, size);
        if args.file == Path::new("-") {
            let mut out = progress.writing(tokio::io::stdout());
            object.get_to_writer(&mut out).await.doing(doing)?;
            return out.flush().await.doing("writing to standard output");
        }
        let writing = format!("writing {}", args.file.display());
        if local::is_special(&args.file) {
            let file = tokio::fs::OpenOptions::new().write(true).open(&args.file).await.doing(&writing)?;
            let mut out = progress.writing(file);
            object.get_to_writer(&mut out).await.doing(doing)?;
            return out.flush().await.doing(writing);
        }
        let mut new = NewFile::create(&args.file).doing(&writing)?;
        let file = tokio::fs::File::from_std(new.file().try_clone().doing(&writing)?);
        let mut out = progress.writing(file);
        object.get_to_writer(&mut out).await.doing(doing)?;
        out.flush().await.doing(&writing)?;
        new.finish(None).doing(writing)
    })
}
