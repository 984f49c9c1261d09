//! The rounds of a measurement of a disk.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::WallClock;
use base::process::{OwnUsage, Usage};
use client::Client;
use node::failure::{Doing, Result};
use vdisk::{AttachedDisk, Disks, OpenSession, SnapshotName};

use super::load::{DiskLoad, WINDOW, fill};
use super::report::{DiskBenchReport, SnapshotSum, Subject, SubjectSum};
use super::{DiskBenchArgs, DiskLayout, DiskWorkload, failed};
use crate::commands::bench::clients::show_time;
use crate::commands::bench::load::{ClientLoad, LoadResult, SharedLoad};
use crate::commands::disk::names::DiskPath;
use crate::commands::disk::transfer::{self, WorkEnd};
use crate::output;

/// A measurement in progress.
struct DiskBench {
    args: DiskBenchArgs,
    client: Client,
    sessions: OpenSession,
    disks: Disks,
    disk: AttachedDisk,
    layout: DiskLayout,
    /// The snapshot whose clones the workload `clone-first-write` measures.
    snapshot: SnapshotName,
    clone: DiskPath,
    /// The attached clone.
    attached_clone: RefCell<Option<AttachedDisk>>,
    /// What the workload `snapshots` has measured.
    snapshots: RefCell<SnapshotSum>,
    ranges: Arc<SharedLoad>,
    whole: Arc<SharedLoad>,
}

/// Attaches the disk, prepares it, measures, and computes the results.
///
/// # Errors
/// If the disk cannot be attached or prepared, or if no operation of a subject succeeds.
pub async fn measure(
    client: &Client,
    sessions: OpenSession,
    args: DiskBenchArgs,
) -> Result<WorkEnd<DiskBenchReport>> {
    let doing = format!("measuring disk {}", args.disk);
    let disks = Disks::open(client, &args.disk.pool, WallClock::default()).doing(&doing)?;
    let header = disks.stat(&args.disk.disk).await.doing(&doing)?;
    let layout = DiskLayout::new(&args, header.size, header.chunk).map_err(|why| failed(&args, why))?;
    let disk =
        transfer::attach(&args.disk, "bench", args.force, Arc::clone(&sessions)).await.doing(&doing)?;
    let unique = format!("bench-{}", std::process::id());
    let clone = DiskPath { pool: args.disk.pool.clone(), disk: format!("{unique}-clone") };
    let bench = DiskBench {
        client: client.clone(),
        sessions,
        disks,
        layout,
        snapshot: SnapshotName { disk: args.disk.disk.clone(), snapshot: unique },
        clone,
        attached_clone: RefCell::new(None),
        snapshots: RefCell::default(),
        ranges: Arc::new(SharedLoad::new(&args.on_objects(layout, false))?),
        whole: Arc::new(SharedLoad::new(&args.on_objects(layout, true))?),
        disk,
        args,
    };
    let work = async {
        let measured = bench.run().await;
        bench.clean_up().await;
        measured
    };
    let ended = transfer::until_signal(Some(&bench.disk), work).await?;
    if matches!(ended, WorkEnd::Interrupted) {
        bench.clean_up().await;
    }
    Ok(ended)
}

impl DiskBench {
    async fn run(&self) -> Result<DiskBenchReport> {
        fill(&self.disk, self.layout).await?;
        if self.args.workload == DiskWorkload::CloneFirstWrite {
            self.disk.snapshot(&self.snapshot.snapshot).await.doing("taking a snapshot")?;
        }
        self.on(&self.ranges)?.prepare().await?;
        self.on(&self.whole)?.prepare().await?;
        let seconds = self.args.seconds.saturating_mul(3).saturating_mul(self.args.rounds);
        tokio::select! {
            measured = self.rounds() => measured,
            never = show_time(seconds) => match never {},
        }
    }

    async fn rounds(&self) -> Result<DiskBenchReport> {
        let mut sums = Subject::ALL.map(|_| SubjectSum::default());
        for round in 0..self.args.rounds {
            for turn in 0..Subject::ALL.len() {
                let number = (round as usize + turn) % Subject::ALL.len();
                let (result, seconds, cpu) = self.subject(Subject::ALL[number], u64::from(round)).await?;
                if let Some(why) = &result.first_error {
                    let name = Subject::ALL[number].name();
                    output::note(format!(
                        "{name}: {} operations failed; the first one: {why}",
                        result.errors
                    ));
                }
                sums[number].add(result, seconds, cpu)?;
            }
        }
        DiskBenchReport::new(&self.args, self.layout, sums, &self.snapshots.borrow())
    }

    /// Measures a subject. Returns the result, its duration in seconds, and the CPU time of this process.
    async fn subject(&self, subject: Subject, round: u64) -> Result<(LoadResult, f64, Usage)> {
        let duration = Duration::from_secs(u64::from(self.args.seconds));
        let is_first_write = self.args.workload == DiskWorkload::CloneFirstWrite;
        match subject {
            Subject::Disk if is_first_write => {
                let clone = self.make_clone().await?;
                let load = DiskLoad::new(&clone, self.args.workload, self.layout, round)?;
                let measured = timed(async |start| load.run(start, duration, self.args.depth).await.0).await;
                self.remove_clone().await?;
                measured
            }
            Subject::Disk if self.args.workload == DiskWorkload::Snapshots => {
                let load = DiskLoad::new(&self.disk, self.args.workload, self.layout, round)?;
                let measured = timed(async |start| {
                    let loading = load.run(start, duration, self.args.depth);
                    let ((result, longest), taken) =
                        tokio::join!(loading, self.take_snapshots(start, duration));
                    self.snapshots.borrow_mut().add(&longest, taken);
                    result
                });
                let measured = measured.await;
                self.remove_snapshots().await?;
                measured
            }
            Subject::Disk => {
                let load = DiskLoad::new(&self.disk, self.args.workload, self.layout, round)?;
                timed(async |start| load.run(start, duration, self.args.depth).await.0).await
            }
            Subject::Ranges => {
                let load = self.on(&self.ranges)?;
                timed(async |start| load.run(start, self.args.depth).await).await
            }
            Subject::Whole => {
                let load = self.on(&self.whole)?;
                timed(async |start| load.run(start, self.args.depth).await).await
            }
        }
    }

    fn on(&self, objects: &Arc<SharedLoad>) -> Result<ClientLoad> {
        ClientLoad::new(&self.client, objects, 0)
    }

    /// Takes a snapshot in every other window of a measurement. Returns the windows, and how long the
    /// snapshots took.
    async fn take_snapshots(&self, start: Instant, duration: Duration) -> Vec<(usize, Duration)> {
        let windows = (duration.as_nanos() / WINDOW.as_nanos()) as usize;
        let mut taken = Vec::new();
        for window in (1..windows).step_by(2) {
            // Requests of the window before have completed.
            let at = start + WINDOW * window as u32 + WINDOW / 5;
            tokio::time::sleep_until(at.into()).await;
            let began = Instant::now();
            let name = format!("{}-{window}", self.snapshot.snapshot);
            match self.disk.snapshot(&name).await {
                Ok(()) => taken.push((window, began.elapsed())),
                Err(e) => output::note(format!("a snapshot has failed: {e}")),
            }
        }
        taken
    }

    /// Removes the snapshots that [`take_snapshots`](Self::take_snapshots) has taken.
    async fn remove_snapshots(&self) -> Result<()> {
        let doing = "removing the snapshots";
        let header = self.disks.stat(&self.snapshot.disk).await.doing(doing)?;
        let prefix = format!("{}-", self.snapshot.snapshot);
        for one in header.snapshots.iter().filter(|one| one.name.starts_with(&prefix)) {
            let (disk, snapshot) = (self.snapshot.disk.clone(), one.name.clone());
            self.disks.remove_snapshot(&SnapshotName { disk, snapshot }).await.doing(doing)?;
        }
        self.disks.upkeep(&self.worker()).await.map(drop).doing(doing)
    }

    fn worker(&self) -> vdisk::DiskWorker {
        vdisk::DiskWorker { gateway: transfer::name("bench"), open_session: Arc::clone(&self.sessions) }
    }

    async fn make_clone(&self) -> Result<AttachedDisk> {
        let doing = "making a clone";
        self.disks.clone_snapshot(&self.snapshot, &self.clone.disk).await.doing(doing)?;
        let clone = transfer::attach(&self.clone, "bench", false, Arc::clone(&self.sessions)).await;
        let clone = clone.doing(doing)?;
        *self.attached_clone.borrow_mut() = Some(clone.clone());
        Ok(clone)
    }

    async fn remove_clone(&self) -> Result<()> {
        let doing = "removing the clone";
        let attached = self.attached_clone.borrow_mut().take();
        if let Some(clone) = attached {
            clone.detach().await.doing(doing)?;
        }
        self.disks.remove(&self.clone.disk, false).await.doing(doing)
    }

    /// Removes the clone and the snapshot, if they exist.
    async fn clean_up(&self) {
        match self.args.workload {
            DiskWorkload::CloneFirstWrite => {}
            DiskWorkload::Snapshots => {
                if let Err(e) = self.remove_snapshots().await {
                    output::note(format!("snapshots of {} may remain: {e}", self.args.disk));
                }
                return;
            }
            _ => return,
        }
        // A clone exists only after a failure or a signal.
        let _ = self.remove_clone().await;
        let cleaned = async {
            // The snapshot has a clone until the upkeep has removed its data.
            let worker = self.worker();
            self.disks.upkeep(&worker).await?;
            self.disks.remove_snapshot(&self.snapshot).await?;
            self.disks.upkeep(&worker).await
        };
        if let Err(e) = cleaned.await {
            let SnapshotName { disk, snapshot } = &self.snapshot;
            output::note(format!("the snapshot {disk}@{snapshot} or its clone may remain: {e}"));
        }
    }
}

/// Runs a load. Returns its result, its duration in seconds, and the CPU time of this process.
async fn timed(run: impl AsyncFnOnce(Instant) -> LoadResult) -> Result<(LoadResult, f64, Usage)> {
    let reading = "reading the CPU time of this process";
    let before = OwnUsage::read().doing(reading)?;
    let start = Instant::now();
    let result = run(start).await;
    let seconds = start.elapsed().as_secs_f64();
    let cpu = OwnUsage::read().doing(reading)?.usage.total.since(&before.usage.total);
    Ok((result, seconds, cpu))
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use client::Options;
    use client::engine::MemEngine;
    use node::units::ByteSize;
    use vdisk::CreateOptions;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[tokio::test]
    async fn each_workload_measures_all_subjects_and_leaves_the_disk_detached() {
        let engine = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&engine) as _, Options::default());
        client.create_pool("p").await.unwrap();
        let disks = Disks::open(&client, "p", WallClock::default()).unwrap();
        disks.create("vm", CreateOptions { size: 3 * MIB, chunk: MIB }).await.unwrap();
        let sessions: OpenSession = Arc::new(move || {
            let client = Client::over(Arc::new(engine.sibling()), Options::default());
            Box::pin(async { Ok(client) })
        });
        for workload in DiskWorkload::value_variants() {
            let args = DiskBenchArgs {
                disk: "p/vm".parse().unwrap(),
                workload: *workload,
                block: ByteSize(4096),
                depth: 2,
                seconds: 1,
                rounds: 1,
                span: None,
                force: false,
                json: false,
            };
            let ended = measure(&client, Arc::clone(&sessions), args).await.unwrap();
            let WorkEnd::Done(report) = ended else { panic!("{workload:?} was interrupted") };
            let json = serde_json::to_value(&report).unwrap();
            for subject in ["disk", "ranges", "whole"] {
                let of_subject = &json["subjects"][subject];
                assert!(of_subject["ops"].as_u64().unwrap() > 0, "{workload:?} {subject}: {json}");
                assert_eq!(of_subject["errors"], 0, "{workload:?} {subject}: {json}");
            }
            let ops = &json["subjects"]["disk"]["ops"];
            assert!(*workload != DiskWorkload::CloneFirstWrite || *ops == 3, "each chunk is written once");
            let snapshots = &json["snapshots"]["count"];
            assert_eq!(*snapshots == 1, *workload == DiskWorkload::Snapshots, "{json}");
            let header = disks.stat("vm").await.unwrap();
            assert!(header.owner.is_none() && header.snapshots.is_empty(), "{header:?}");
            assert_eq!(disks.list().await.unwrap().len(), 1, "no clone remains");
        }
    }
}
