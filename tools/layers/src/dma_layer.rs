//! Measures the DMA engines of this machine, with both ends in one process.

use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use base::mem::{Arena, OutsideAccess};
use base::process::ProcessUsage;
use channel::ofi::{OfiEngine, OfiHost, OfiHostOptions, OfiOptions};
use channel::{
    Bell, Chain, DmaAddress, DmaEngine, DmaRegion, Doorbell, EnginePeer, MemoryAccess, MemoryFds, ShmEngine,
    ShmOptions, Transfer, URGENT,
};
use clap::Args;
use node::failure::{Doing, Failure, Result};
use serde::Serialize;

use crate::output;

const DOING: &str = "measuring a DMA engine";
const LEN: usize = 32 << 20;
/// Number of pings, and of transfers of 4 KiB.
const SMALL: usize = 2000;
/// Number of transfers of maximum length.
const LARGE: usize = 400;

/// Measure the DMA engines of this machine
///
/// Measures the emulated engine "shm", and the engine "ofi" over each named provider. Prints one
/// line of JSON for each engine.
///
/// ping_us: an entry of 64 bytes with a doorbell to the store, and the store's doorbell back.
/// write_4k_us, read_4k_us: one transfer and its completion. write_mb_s, read_mb_s: transfers of
/// maximum length, eight in flight on each of two queues. idle_cpu_ms: CPU time of this process
/// during one idle second. This machine's processor moves the data of "shm" and of the provider
/// "tcp".
#[derive(Debug, Args)]
pub struct DmaLayerArgs {
    /// Providers for the engine "ofi", each with a local address [default: tcp@127.0.0.1, if this
    /// machine has libfabric]
    #[arg(value_name = "PROVIDER@ADDRESS")]
    fabrics: Vec<String>,
}

/// The result for one engine. The JSON form is stable.
#[derive(Debug, Serialize)]
struct EngineFigures {
    engine: String,
    emulated: bool,
    ping_us: f64,
    write_4k_us: f64,
    read_4k_us: f64,
    write_mb_s: f64,
    read_mb_s: f64,
    idle_cpu_ms: f64,
}

/// An engine and both ends of its transfers.
struct EngineRig {
    name: String,
    engine: Arc<dyn DmaEngine>,
    local: DmaRegion,
    host: DmaRegion,
    peer: EnginePeer,
    bell: Box<dyn Bell>,
    host_doorbell: Doorbell,
    osd_doorbell: OwnedFd,
    _keep: Box<dyn std::any::Any>,
}

/// Runs the command.
pub fn run(args: &DmaLayerArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    runtime.block_on(async {
        measure(shm().await?).await?;
        if args.fabrics.is_empty() {
            return match fabric::Library::load() {
                Ok(_) => measure(ofi("tcp@127.0.0.1").await?).await,
                Err(e) => {
                    output::note(format!("the engine ofi is not measured: {e}"));
                    Ok(())
                }
            };
        }
        for fabric in &args.fabrics {
            measure(ofi(fabric).await?).await?;
        }
        Ok(())
    })
}

async fn shm() -> Result<EngineRig> {
    let engine = ShmEngine::start(ShmOptions::default()).doing(DOING)?;
    let there = Arena::shared("there", LEN).doing(DOING)?;
    let memory = there.share_fd().doing(DOING)?;
    let memory =
        memory.ok_or_else(|| Failure::new(DOING, "shared memory has no descriptor; this is a bug"))?;
    let doorbell = || Doorbell::create().doing(DOING);
    let (host_doorbell, osd_doorbell) = (doorbell()?, doorbell()?);
    let descriptors = MemoryFds {
        memory,
        host_doorbell: host_doorbell.try_clone().doing(DOING)?,
        osd_doorbell: osd_doorbell.try_clone().doing(DOING)?,
    };
    let attaching = engine.attach(MemoryAccess::Descriptors(descriptors), LEN).await;
    let (peer, bell) = attaching.doing(DOING)?;
    EngineRig::new("shm".to_owned(), engine, peer, bell, host_doorbell, osd_doorbell, Box::new(there))
}

async fn ofi(fabric: &str) -> Result<EngineRig> {
    let parsed = fabric.split_once('@').and_then(|(p, a)| Some((p, a.parse::<std::net::IpAddr>().ok()?)));
    let (provider, address) = parsed.ok_or_else(|| {
        Failure::usage(DOING, format!("{fabric} is not PROVIDER@ADDRESS, such as tcp@127.0.0.1"))
    })?;
    let doing = format!("measuring the engine ofi over {provider}");
    let host = OfiHost::start(OfiHostOptions::new(provider, (address, 0).into())).doing(&doing)?;
    let there = Arena::shared("there", LEN).doing(&doing)?;
    let grant = host.grant(&OutsideAccess::of_copied(&there).doing(&doing)?).doing(&doing)?;
    let options = OfiOptions { provider: provider.to_owned(), ..OfiOptions::default() };
    let engine = OfiEngine::start(options).doing(&doing)?;
    let attaching = engine.attach(MemoryAccess::Offer(grant.offer.clone()), LEN).await;
    let (peer, bell) = attaching.doing(&doing)?;
    let host_doorbell = grant.host_doorbell.try_clone().doing(&doing)?;
    let osd_doorbell = grant.osd_doorbell.try_clone().doing(&doing)?;
    let keep = Box::new((grant, there, host));
    EngineRig::new(format!("ofi:{provider}"), engine, peer, bell, host_doorbell, osd_doorbell, keep)
}

impl EngineRig {
    fn new(
        name: String,
        engine: Arc<dyn DmaEngine>,
        peer: EnginePeer,
        bell: Box<dyn Bell>,
        host_doorbell: OwnedFd,
        osd_doorbell: OwnedFd,
        keep: Box<dyn std::any::Any>,
    ) -> Result<EngineRig> {
        let here = Arena::shared("here", LEN).doing(DOING)?;
        let here = OutsideAccess::of_copied(&here).doing(DOING)?;
        let local = engine.register_local(&here).doing(DOING)?;
        let host = engine.register_peer(&peer, 0..LEN).doing(DOING)?;
        let host_doorbell = Doorbell::new(host_doorbell).doing(DOING)?;
        Ok(EngineRig { name, engine, local, host, peer, bell, host_doorbell, osd_doorbell, _keep: keep })
    }

    fn transfer(&self, write: bool, offset: usize, len: usize) -> Transfer {
        let place = |region: &DmaRegion| DmaAddress { region: region.id(), offset };
        let (src, dst) = match write {
            true => (place(&self.local), place(&self.host)),
            false => (place(&self.host), place(&self.local)),
        };
        Transfer { src, dst, len }
    }

    fn post(&self, queue: usize, transfer: Transfer) -> Result<()> {
        let chain = Chain { transfers: vec![transfer], ring: None, tag: Some(1), ..Chain::default() };
        self.engine.post(queue, chain).map_err(|e| Failure::new(DOING, format!("{e:?}")))
    }

    async fn completions(&self) -> Result<usize> {
        let mut done = Vec::new();
        poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.is_empty() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        let failed = done.iter().find_map(|c| c.result.clone().err());
        failed.map_or(Ok(done.len()), |e| Err(Failure::new(DOING, e)))
    }

    async fn ping(&self) -> Result<f64> {
        let started = Instant::now();
        for _ in 0..SMALL {
            let chain = Chain {
                transfers: vec![self.transfer(true, 0, 64)],
                ring: Some((self.peer.id, 64)),
                ..Chain::default()
            };
            self.engine.post(URGENT, chain).map_err(|e| Failure::new(DOING, format!("{e:?}")))?;
            poll_fn(|cx| self.host_doorbell.poll_wait(cx)).await.doing(DOING)?;
            Doorbell::ring(self.osd_doorbell.as_fd(), 64).doing(DOING)?;
            poll_fn(|cx| self.bell.poll_wait(cx)).await.doing(DOING)?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / SMALL as f64)
    }

    async fn latency(&self, write: bool) -> Result<f64> {
        let started = Instant::now();
        for _ in 0..SMALL {
            self.post(URGENT, self.transfer(write, 4096, 4096))?;
            self.completions().await?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / SMALL as f64)
    }

    async fn bandwidth(&self, write: bool) -> Result<f64> {
        let len = self.engine.max_transfer();
        let (mut posted, mut done) = (0, 0);
        let started = Instant::now();
        while done < LARGE {
            while posted < LARGE && posted - done < 16 {
                self.post(1 + posted % 2, self.transfer(write, posted % (LEN / len) * len, len))?;
                posted += 1;
            }
            done += self.completions().await?;
        }
        Ok((LARGE * len) as f64 / 1e6 / started.elapsed().as_secs_f64())
    }
}

async fn measure(rig: EngineRig) -> Result<()> {
    let one_digit = |value: f64| (value * 10.0).round() / 10.0;
    let ping_us = one_digit(rig.ping().await?);
    let (write_4k_us, read_4k_us) =
        (one_digit(rig.latency(true).await?), one_digit(rig.latency(false).await?));
    let (write_mb_s, read_mb_s) = (rig.bandwidth(true).await?.round(), rig.bandwidth(false).await?.round());
    let usage = || ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process");
    let before = usage()?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let idle_cpu_ms = one_digit(usage()?.since(&before).total.cpu_seconds() * 1e3);
    let (engine, emulated) = (rig.name, rig.engine.is_emulated());
    let figures = EngineFigures {
        engine,
        emulated,
        ping_us,
        write_4k_us,
        read_4k_us,
        write_mb_s,
        read_mb_s,
        idle_cpu_ms,
    };
    output::line(serde_json::to_string(&figures).doing("printing the result")?);
    Ok(())
}
