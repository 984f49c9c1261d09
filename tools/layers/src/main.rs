//! `outboard-layers`: measures single layers of a node, each without the layers above it.
//!
//! | command | layers |
//! |---|---|
//! | `rpc` | messenger, between two processes |
//! | `connections` | messenger: many connections beside one connection |
//! | `osd` | client and osd over TCP, on a store in memory |
//! | `shards` | osds with several shards, each on a store in memory |
//! | `channel` | `ProxyStore`, channel and DMA engine, on a store in memory |
//! | `dma` | the DMA engines alone |
//! | `registration` | registration of memory with a network device |
//! | `store` | `BlockStore` on a drive or a file |
//! | `ec` | the coding kernels, and coding on the host and on the emulated DPU |
//! | `checksums` | the verification of data, alone and while it is coded |
//!
//! `outboard bench` measures a whole node.

#![forbid(unsafe_code)]

mod channel_layer;
mod checksum_layer;
mod connections;
mod copies;
mod dma_layer;
mod ec_layer;
mod in_process;
mod osd_layer;
mod output;
mod registration_layer;
mod rpc;
mod shards_layer;
mod store_layer;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

/// The allocator of the `outboard` program, so that both programs have the same costs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures single layers of a node, without a running node.
#[derive(Debug, Parser)]
#[command(name = "outboard-layers", version, max_term_width = 100, arg_required_else_help = true)]
struct LayersCli {
    #[command(subcommand)]
    layer: Layer,
}

/// A layer, or several layers together.
#[derive(Debug, Subcommand)]
enum Layer {
    Rpc(rpc::RpcArgs),
    Connections(connections::ConnectionsArgs),
    Osd(osd_layer::OsdLayerArgs),
    Shards(shards_layer::ShardsArgs),
    Channel(channel_layer::ChannelLayerArgs),
    Dma(dma_layer::DmaLayerArgs),
    Registration(registration_layer::RegistrationArgs),
    Store(store_layer::StoreLayerArgs),
    Ec(ec_layer::EcArgs),
    Checksums(checksum_layer::ChecksumArgs),
}

/// Parses a duration in seconds, with fractions: 0.01 to 3600.
fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("it must be a number from 0.01 to 3600")
}

fn main() -> ExitCode {
    // This sets environment variables, so it must run before the first other thread starts.
    fabric::Library::prepare();
    let outcome = match LayersCli::parse().layer {
        Layer::Rpc(args) => rpc::run(args),
        Layer::Connections(args) => connections::run(&args),
        Layer::Osd(args) => osd_layer::run(&args),
        Layer::Shards(args) => shards_layer::run(&args),
        Layer::Channel(args) => channel_layer::run(&args),
        Layer::Dma(args) => dma_layer::run(&args),
        Layer::Registration(args) => registration_layer::run(&args),
        Layer::Store(args) => store_layer::run(&args),
        Layer::Ec(args) => ec_layer::run(args),
        Layer::Checksums(args) => checksum_layer::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::note(&failure);
            ExitCode::from(if failure.is_usage() { 2 } else { 1 })
        }
    }
}
