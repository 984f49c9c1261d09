//! What the DMA engines of this machine can do, both ends in one process: `engines [PROVIDER@ADDRESS …]`.
//!
//! Always measures `shm`, which is emulated; `ofi` over each provider named, `tcp@127.0.0.1` if none is. Prints one line of
//! JSON for each. Times are of this machine's processors where these move the bytes: `shm` and `tcp`.
//!
//! | figure | meaning |
//! |---|---|
//! | `ping_us` | an entry of 64 bytes with doorbell to the store, and the store's doorbell back |
//! | `write_4k_us`, `read_4k_us` | one transfer and its completion |
//! | `write_mb_s`, `read_mb_s` | transfers of the longest kind, eight under way on each of two queues |
//! | `idle_cpu_ms` | processor time of the whole process in one second of doing nothing |
#![allow(clippy::print_stdout, reason = "a program that prints figures")]

use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::process::ProcessUsage;
use outboard_channel::ofi::{OfiEngine, OfiHost, OfiHostOptions, OfiOptions};
use outboard_channel::{
    Bell, Chain, DmaAddress, DmaEngine, DmaRegion, Doorbell, EnginePeer, MemoryAccess, MemoryFds, ShmEngine,
    ShmOptions, Transfer, URGENT,
};

const LEN: usize = 32 << 20;
const SMALL: usize = 2000;
const LARGE: usize = 400;

type Failure = Box<dyn std::error::Error>;

struct Rig {
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

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    outboard_channel::ofi::prepare_process();
    let named: Vec<String> = std::env::args().skip(1).collect();
    measure(shm().await?).await?;
    let default = ["tcp@127.0.0.1".to_owned()];
    for fabric in if named.is_empty() { &default[..] } else { &named[..] } {
        measure(ofi(fabric).await?).await?;
    }
    Ok(())
}

async fn shm() -> Result<Rig, Failure> {
    let engine = ShmEngine::start(ShmOptions::default())?;
    let there = Arena::shared("there", LEN)?;
    let (host_doorbell, osd_doorbell) = (Doorbell::create()?, Doorbell::create()?);
    let descriptors = MemoryFds {
        memory: there.share_fd()?.ok_or("shared memory has a descriptor")?,
        host_doorbell: host_doorbell.try_clone()?,
        osd_doorbell: osd_doorbell.try_clone()?,
    };
    let (peer, bell) = engine.attach(MemoryAccess::Descriptors(descriptors), LEN).await?;
    rig("shm".to_owned(), engine, peer, bell, host_doorbell, osd_doorbell, Box::new(there))
}

async fn ofi(fabric: &str) -> Result<Rig, Failure> {
    let (provider, address) = fabric.split_once('@').ok_or("PROVIDER@ADDRESS")?;
    let host =
        OfiHost::start(OfiHostOptions::new(provider, (address.parse::<std::net::IpAddr>()?, 0).into()))?;
    let there = Arena::shared("there", LEN)?;
    let grant = host.grant(&there)?;
    let engine = OfiEngine::start(OfiOptions { provider: provider.to_owned(), ..OfiOptions::default() })?;
    let (peer, bell) = engine.attach(MemoryAccess::Offer(grant.offer.clone()), LEN).await?;
    let (host_doorbell, osd_doorbell) = (grant.host_doorbell.try_clone()?, grant.osd_doorbell.try_clone()?);
    let keep = Box::new((grant, there, host));
    rig(format!("ofi:{provider}"), engine, peer, bell, host_doorbell, osd_doorbell, keep)
}

fn rig(
    name: String,
    engine: Arc<dyn DmaEngine>,
    peer: EnginePeer,
    bell: Box<dyn Bell>,
    host_doorbell: OwnedFd,
    osd_doorbell: OwnedFd,
    keep: Box<dyn std::any::Any>,
) -> Result<Rig, Failure> {
    let local = engine.register_local(&Arena::shared("here", LEN)?)?;
    let host = engine.register_peer(&peer, 0..LEN)?;
    let host_doorbell = Doorbell::new(host_doorbell)?;
    Ok(Rig { name, engine, local, host, peer, bell, host_doorbell, osd_doorbell, _keep: keep })
}

impl Rig {
    fn transfer(&self, write: bool, offset: usize, len: usize) -> Transfer {
        let place = |region: &DmaRegion| DmaAddress { region: region.id(), offset };
        let (src, dst) = match write {
            true => (place(&self.local), place(&self.host)),
            false => (place(&self.host), place(&self.local)),
        };
        Transfer { src, dst, len }
    }

    fn post(&self, queue: usize, transfer: Transfer) -> Result<(), Failure> {
        let chain = Chain { transfers: vec![transfer], ring: None, tag: Some(1) };
        self.engine.post(queue, chain).map_err(|e| format!("{e:?}").into())
    }

    async fn completions(&self) -> Result<usize, Failure> {
        let mut done = Vec::new();
        poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.is_empty() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        let failed = done.iter().find_map(|c| c.result.clone().err());
        failed.map_or(Ok(done.len()), |e| Err(e.into()))
    }

    async fn ping(&self) -> Result<f64, Failure> {
        let started = Instant::now();
        for _ in 0..SMALL {
            let chain = Chain {
                transfers: vec![self.transfer(true, 0, 64)],
                ring: Some((self.peer.id, 64)),
                tag: None,
            };
            self.engine.post(URGENT, chain).map_err(|e| format!("{e:?}"))?;
            poll_fn(|cx| self.host_doorbell.poll_wait(cx)).await?;
            Doorbell::ring(self.osd_doorbell.as_fd(), 64)?;
            poll_fn(|cx| self.bell.poll_wait(cx)).await?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / SMALL as f64)
    }

    async fn latency(&self, write: bool) -> Result<f64, Failure> {
        let started = Instant::now();
        for _ in 0..SMALL {
            self.post(URGENT, self.transfer(write, 4096, 4096))?;
            self.completions().await?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / SMALL as f64)
    }

    async fn bandwidth(&self, write: bool) -> Result<f64, Failure> {
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

async fn measure(rig: Rig) -> Result<(), Failure> {
    let ping = rig.ping().await?;
    let (write, read) = (rig.latency(true).await?, rig.latency(false).await?);
    let (write_mb, read_mb) = (rig.bandwidth(true).await?, rig.bandwidth(false).await?);
    let usage = || ProcessUsage::read(std::process::id());
    let before = usage()?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let idle = usage()?.since(&before).total.cpu_seconds;
    println!(
        "{{\"engine\":\"{}\",\"emulated\":{},\"ping_us\":{ping:.1},\"write_4k_us\":{write:.1},\"read_4k_us\":{read:.1},\
         \"write_mb_s\":{write_mb:.0},\"read_mb_s\":{read_mb:.0},\"idle_cpu_ms\":{:.1}}}",
        rig.name,
        rig.engine.is_emulated(),
        idle * 1e3
    );
    Ok(())
}
