//! Arguments that several commands share.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use wire::Placement;

/// Arguments that locate the node.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Directory of the node, with its targets, configuration and logs [default: ./outboard-node]
    #[arg(long, global = true, env = "OUTBOARD_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address of the node; takes precedence over --dir
    #[arg(long, global = true, env = "OUTBOARD_ENDPOINT", value_name = "HOST:PORT")]
    pub endpoint: Option<String>,
    /// Credential file of the user who runs the command [default: credentials.toml in the node's
    /// directory]
    #[arg(long, global = true, env = "OUTBOARD_CREDENTIALS", value_name = "FILE")]
    pub credentials: Option<PathBuf>,
    /// File of a capability with which the command accesses objects, from `outboard token issue`
    /// [default: all rights of the user]
    #[arg(long, global = true, env = "OUTBOARD_CAPABILITY", value_name = "FILE")]
    pub capability: Option<PathBuf>,
    /// Network to use: auto (RDMA if both sides support it), tcp, or ofi:PROVIDER, e.g. ofi:verbs
    #[arg(long, global = true, env = "OUTBOARD_NETWORK", value_name = "STACK", default_value = "auto")]
    pub network: messenger::StackChoice,
    /// Local address from which to connect, if the machine has several addresses [default: chosen
    /// by the system]
    #[arg(long, global = true, env = "OUTBOARD_BIND", value_name = "ADDR")]
    pub bind: Option<std::net::IpAddr>,
}

/// Returns the parser for a placement. The help text of the flag describes each value.
pub fn placement() -> impl clap::builder::TypedValueParser<Value = Placement> {
    let value = |placement: Placement| {
        PossibleValue::new(placement.as_str()).help(match placement {
            Placement::Dpu => "The osd and the store are two processes joined by the host–DPU channel",
            Placement::Host => "One process contains the osd and the store: the baseline of benchmarks",
        })
    };
    PossibleValuesParser::new(Placement::ALL.map(value))
        .try_map(|name| Placement::ALL.into_iter().find(|p| p.as_str() == name).ok_or("unknown placement"))
}
