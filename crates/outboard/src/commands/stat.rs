//! `outboard stat`: shows an object's size, version and xattrs.

use clap::Args;
use serde::Serialize;

use super::session;
use crate::args::NodeArgs;
use crate::output;
use node::failure::{Doing, Result};
use node::units::ByteSize;

/// Show an object's size, version and xattrs
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    outboard stat photos/beach.jpg\n  \
    outboard stat photos/beach.jpg --json")]
pub struct StatArgs {
    /// Object to show, written POOL[:NAMESPACE]/OBJECT
    pub object: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Shown {
    object: String,
    size: u64,
    version: u64,
    modified_unix_ms: u64,
    /// Number of parts, if the object is striped.
    parts: Option<u64>,
    /// Names and values of the xattrs; bytes that are not UTF-8 are escaped.
    xattrs: std::collections::BTreeMap<String, String>,
}

/// Runs the command.
pub fn run(args: StatArgs, node: &NodeArgs) -> Result<()> {
    session::run_small(node, super::options(), async move |client| {
        let object = session::object(&client, &args.object)?;
        let found = object.describe().await.doing(format!("querying {}", args.object))?;
        let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.escape_ascii().to_string(),
        };
        let shown = Shown {
            object: object.name().to_string(),
            size: found.stat.size,
            version: found.stat.version,
            modified_unix_ms: found.stat.modified_ms,
            parts: found.stat.manifest.as_ref().map(|m| m.parts()),
            xattrs: found.xattrs.iter().map(|(name, value)| (text(name), text(value))).collect(),
        };
        if args.json {
            output::json(&shown);
            return Ok(());
        }
        output::line(format!("object    {}", output::name(&shown.object)));
        output::line(format!("size      {} ({:.1})", shown.size, ByteSize(shown.size)));
        output::line(format!("version   {}", shown.version));
        output::line(format!("modified  {} ms since 1970", shown.modified_unix_ms));
        if let Some(parts) = shown.parts {
            output::line(format!("striped   {parts} parts"));
        }
        for (name, value) in &shown.xattrs {
            output::line(format!("xattr     {} = {}", output::name(name), output::name(value)));
        }
        Ok(())
    })
}
